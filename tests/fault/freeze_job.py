"""Training in which a process stands still: `python -m tests.fault.freeze_job MODE WHAT RANK SECONDS [DATA]`.

WHAT is `rank` (the training process of RANK is stopped for SECONDS), `server` (the server process that RANK owns is
stopped and not continued), `owner` (the training process of RANK is killed, and has to own a server) or `orphan` (the
same, with the server stopped before). DATA is `shard` (batches come from one long epoch of `hvd.shard`) or left out.
Every rank reports how long the longest of its steps since then took, and how many there were.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import psutil
import torch

import star_hvd as hvd
from star_hvd.runtime import runtime
from tests.support.launch import write_result
from tests.support.signals import PATIENCE_S, mark, marked

# Steps are long, so that those of the others cost little while a rank is frozen for many seconds.
WARM_STEPS, STEP_S, AFTER_S, SAMPLES, RECOVERED_STEPS = 10, 0.06, 3.0, 4_000_000, 100
CONFIG = hvd.Config(step_deadline_s=600.0, shutdown_deadline_s=600.0, control_deadline_s=240.0, plan_deadline_s=240.0)


def stop(pid: int, seconds: float | None) -> None:
    """Stop a process, from a process of its own where it is to be continued."""
    if seconds is None:
        os.kill(pid, signal.SIGSTOP)
        return
    subprocess.Popen(["sh", "-c", f"kill -STOP {pid}; sleep {seconds}; kill -CONT {pid}"])
    time.sleep(0.5)


def strike(what: str, seconds: float) -> None:
    mark("struck")
    if what == "rank":
        stop(os.getpid(), seconds)
        return
    run = runtime.current()
    assert run is not None
    pid = run.services.house.server.pid
    assert pid is not None, "this rank owns no server"
    if what != "owner":
        stop(pid, None)
    if what != "server":
        write_result({"servers": [pid, psutil.Process(pid).ppid()]})
        os.kill(os.getpid(), signal.SIGKILL)


class Clock:
    """Longest step since the freeze.

    Attributes:
        longest_s: Its duration.
        since: Steps made since.
    """

    def __init__(self) -> None:
        self.longest_s, self.since, self.last_s = 0.0, 0, time.monotonic()

    def step(self) -> None:
        now_s = time.monotonic()
        if marked("struck"):
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


def main(mode: str, what: str, rank: int, seconds: float, data: str) -> None:
    torch.set_num_threads(1)
    hvd.init()
    torch.manual_seed(1)
    net = torch.nn.Linear(8, 1)
    inner = torch.optim.SGD(net.parameters(), lr=0.001)
    optimizer: Any = hvd.DistributedOptimizer(inner, net.named_parameters(), mode=mode, config=CONFIG)
    me, served, struck_s, clock = int(hvd.rank()), 0, None, Clock()
    limit_s = time.monotonic() + PATIENCE_S
    for batch in batches(data):
        time.sleep(STEP_S)
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()
        clock.step()
        served += optimizer.mode != "sync"
        if served == WARM_STEPS:
            mark("warm")
        if me == rank and struck_s is None and served > WARM_STEPS and marked("warm", range(int(hvd.size()))):
            strike(what, seconds)
        if struck_s is None and marked("struck"):
            struck_s = time.monotonic()
        recovered = what == "server" and clock.since >= RECOVERED_STEPS  # None of them is made without it.
        if struck_s is not None and (recovered or time.monotonic() > struck_s + seconds + AFTER_S):
            break
        assert time.monotonic() < limit_s, f"the mode did not begin: {optimizer.mode}"
    write_result({"longest_s": clock.longest_s, "steps": clock.since, "mode": optimizer.mode})
    optimizer.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), sys.argv[5] if len(sys.argv) > 5 else "")
