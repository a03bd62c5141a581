"""An elastic training in which one rank fails: `python -m tests.fault.elastic_job LIBRARY MODE [FAULT]`.

FAULT is `kill`, `channel` (one of its waits fails as after a deadline) or `announced` (it is killed after it has
announced a push to servers and before it has sent any part of it). LIBRARY is `star_hvd`, or `horovod.torch` for a
comparison by hand.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from star_hvd.channel.link import Dealer
from star_hvd.config import Config
from star_hvd.errors import DeadlineError
from star_hvd.ps.common.wire import HEADER_BYTES, Kind, unpack
from star_hvd.runtime import runtime
from tests.support.launch import write_result
from tests.support.signals import PATIENCE_S

STEPS, COMMIT_EVERY, STRIKES_AT, VICTIM = 40, 5, 13, 3
LAST_COMMIT = STRIKES_AT // COMMIT_EVERY * COMMIT_EVERY
RESUMED = {"sync": (LAST_COMMIT,), "partial": (LAST_COMMIT, LAST_COMMIT + COMMIT_EVERY)}
"""Steps from which survivors may go on, by mode.

If the rank that fails is late by some steps, in `partial` the others may be in the next commit: they have saved their
state, and wait for that rank there.
"""
OF_FOUR = "sync(3,2,2,1)"  # Mode of a second optimizer, which makes one step after every commit.


def lose_channel() -> None:
    """What a wait past its deadline does, in whatever thread."""
    run = runtime.current()
    assert run is not None
    for driver in run.drivers.values():
        driver.engine.fail(DeadlineError("an injected failure of the channel"))


def die_in_next_push() -> None:
    """Let the connection to the servers end this process between a push's announcement and its first part."""

    send = Dealer.send

    def watched(dealer: Dealer, frames: Sequence[Any]) -> None:
        send(dealer, frames)
        if len(frames[0]) == HEADER_BYTES and frames[0].startswith(b"STPS") and unpack(frames[0]).kind == Kind.PUSH:
            time.sleep(0.5)  # It leaves meanwhile.
            os.kill(os.getpid(), signal.SIGKILL)

    Dealer.send = watched  # type: ignore[method-assign]


FAULTS: dict[str, Callable[[], None]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL), "channel": lose_channel, "announced": die_in_next_push
}  # fmt: skip


def main(library: str, mode: str, fault: str = "kill") -> None:
    hvd: Any = importlib.import_module(library)
    torch.set_num_threads(1)
    hvd.init()
    torch.manual_seed(1)
    net = torch.nn.Linear(8, 1)
    inner = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    # Pushes go as a whole, so that one can be announced and not sent.
    options = {"mode": mode, "config": Config(background=False)} if library == "star_hvd" else {}
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=net.named_parameters(), **options)
    other = torch.nn.Linear(8, 1)
    options = {"mode": OF_FOUR} if library == "star_hvd" else {}
    beside = hvd.DistributedOptimizer(
        torch.optim.SGD(other.parameters(), lr=0.01), named_parameters=other.named_parameters(), **options
    )
    state = importlib.import_module(f"{library}.elastic").TorchState(
        net, optimizer, other=other, beside=beside, step=0, worlds=[]
    )
    resumed: list[int] = []
    struck, limit_s = False, 0.0

    def comes_late() -> bool:
        """Whether the user's mode is not yet in force among survivors, after however many steps."""
        asked = fault == "kill" and mode != "sync" and library == "star_hvd" and int(hvd.size()) < 4
        return asked and optimizer.mode == "sync" and time.monotonic() < limit_s

    @hvd.elastic.run  # type: ignore[untyped-decorator]
    def train(state: Any) -> None:
        nonlocal struck, limit_s
        resumed.append(state.step)
        limit_s = time.monotonic() + PATIENCE_S
        until, whole = max(STEPS, state.step + COMMIT_EVERY), int(hvd.size()) == 4
        while state.step < until or (fault == "announced" and whole) or comes_late():
            # Servers have to start, and there has to be a commit to go on from.
            served = optimizer.mode == mode and state.step > COMMIT_EVERY
            due = served if fault == "announced" else state.step == STRIKES_AT
            if whole and due and int(hvd.rank()) == VICTIM and not struck:
                struck = True
                FAULTS[fault]()
            time.sleep(0.05 if int(hvd.rank()) == 1 else 0.01)
            optimizer.zero_grad()
            net(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            state.step += 1
            if state.step % COMMIT_EVERY == 0:
                state.commit()
                beside.zero_grad()
                other(torch.randn(4, 8)).square().mean().backward()
                beside.step()

    train(state)
    report = hvd.report() if library == "star_hvd" else None
    if hasattr(optimizer, "close"):
        optimizer.close()
        beside.close()
    raw = b"".join(param.detach().numpy().tobytes() for param in (*net.parameters(), *other.parameters()))
    write_result(
        {
            "step": state.step,
            "size": int(hvd.size()),
            "resumed": resumed,
            "mode": report.mode if report is not None else "",
            "reason": report.reason if report is not None else "",
            "beside": getattr(beside, "mode", ""),
            "digest": hashlib.sha256(raw).hexdigest()[:16],
        }
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
