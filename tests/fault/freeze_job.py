"""Training in which processes stand still: `python -m tests.fault.freeze_job SCENARIO...`.

A scenario is `MODE:WHAT[:DATA]`. WHAT is `rank` (the training process of rank 0 is stopped until the others have made
many steps), `server` (the server process that rank 0 owns is stopped and not continued), `owner` (the training process
of rank 0 is killed, and has to own a server) or `orphan` (the same, with the server stopped before). DATA is `shard`
(batches come from one long epoch of `hvd.shard`) or left out. Every rank reports how long the longest of its steps
since then took, how many there were, and what was logged.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import psutil
import torch

import star_hvd as hvd
from star_hvd.runtime import runtime
from tests.support.launch import write_result
from tests.support.signals import PATIENCE_S, freeze, mark, marked

WARM_STEPS, STEP_S, SAMPLES = 10, 0.04, 4_000_000
STEPS_SINCE, RECOVERED_STEPS = 60, 70
"""Steps that no rank makes where one waits for the frozen process. More of the first would outlast the samples that
ranks have leased, for half of `scheduler.rules.leasing.LEASE_S` at least, where a step takes ten times as long."""
FROZEN_S = 12.0
"""Longer than `Config.lost_after_s` and than any limit of a server that does not answer."""
AFTER_S = 3.0  # Rank 0 trains on for so long, with its server, which it has not heard for a while.
VICTIM = 0
CONFIG = hvd.Config(step_deadline_s=600.0, shutdown_deadline_s=600.0, control_deadline_s=240.0, plan_deadline_s=240.0)


class Logged(logging.Handler):
    """Keeps what the library logs."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def strike(what: str, name: str) -> dict[str, Any]:
    """Stop or kill; what is known of it then."""
    mark(f"{name}.struck")
    others = [rank for rank in range(int(hvd.size())) if rank != VICTIM]
    if what == "rank":
        began_s = time.monotonic()
        went_on = freeze(f"{name}.went_on", others, at_least_s=FROZEN_S)
        return {"went_on": went_on, "frozen_s": time.monotonic() - began_s}
    run = runtime.current()
    assert run is not None
    pid = run.services.sessions.server.pid
    assert pid is not None, "this rank owns no server"
    if what != "owner":
        os.kill(pid, signal.SIGSTOP)
    if what != "server":
        write_result({"servers": [pid, psutil.Process(pid).ppid()]})
        os.kill(os.getpid(), signal.SIGKILL)
    return {}


class Clock:
    """Longest step since the freeze.

    Attributes:
        longest_s: Its duration.
        since: Steps made since.
    """

    def __init__(self, name: str) -> None:
        self.name = f"{name}.struck"
        self.longest_s, self.since, self.last_s = 0.0, 0, time.monotonic()

    def step(self) -> None:
        now_s = time.monotonic()
        if self.since or marked(self.name):
            self.longest_s, self.since = max(self.longest_s, now_s - self.last_s), self.since + 1
        self.last_s = now_s


def forever() -> Iterator[torch.Tensor]:
    while True:
        yield torch.randn(4, 8)


def batches(data: str) -> Iterator[torch.Tensor]:
    if data != "shard":
        return forever()
    loader = hvd.shard(torch.utils.data.TensorDataset(torch.randn(1, 8).expand(SAMPLES, 8)), 4, config=CONFIG)
    return (batch for (batch,) in loader)


def train(name: str) -> dict[str, Any]:
    mode, what, data = (*name.split(":"), "")[:3]
    torch.manual_seed(1)
    net = torch.nn.Linear(8, 1)
    inner = torch.optim.SGD(net.parameters(), lr=0.001)
    optimizer: Any = hvd.DistributedOptimizer(inner, net.named_parameters(), mode=mode, config=CONFIG)
    struck, served, clock, facts, freed_s = False, 0, Clock(name), {}, math.inf
    limit_s = time.monotonic() + PATIENCE_S
    for batch in batches(data):
        time.sleep(STEP_S)
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()
        clock.step()
        if clock.since == 1:
            limit_s = time.monotonic() + PATIENCE_S
        served += optimizer.mode != "sync"
        if served == WARM_STEPS:
            mark(f"{name}.warm")
        warm = served > WARM_STEPS and marked(f"{name}.warm", range(int(hvd.size())))
        if int(hvd.rank()) == VICTIM and not struck and warm:
            struck, facts = True, strike(what, name)
            freed_s = time.monotonic()
            limit_s = freed_s + PATIENCE_S
        if clock.since == STEPS_SINCE:
            mark(f"{name}.went_on")
        if time.monotonic() > freed_s + AFTER_S:
            mark(f"{name}.over")
        # Behind a server that stands still none of these is made.
        if clock.since >= RECOVERED_STEPS if what == "server" else marked(f"{name}.over"):
            break
        assert time.monotonic() < limit_s, f"step {clock.since} since the freeze, in {optimizer.mode}"
    facts |= {"longest_s": clock.longest_s, "steps": clock.since, "mode": optimizer.mode}
    optimizer.close()
    return facts


def main(wanted: list[str]) -> None:
    torch.set_num_threads(1)
    hvd.init()
    facts: dict[str, Any] = {}
    for name in wanted:
        write_result({"facts": facts, "running": name})
        logged = Logged()
        logging.getLogger("star_hvd").addHandler(logged)
        facts[name] = train(name) | {"logged": logged.texts}
        logging.getLogger("star_hvd").removeHandler(logged)
        hvd.barrier()
    write_result({"facts": facts, "running": ""})


if __name__ == "__main__":
    main(sys.argv[1:])
