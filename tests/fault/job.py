"""What every rank of a fault test runs: a small training in which one rank does something fatal, or nearly so.

`python -m tests.fault.job MODE FAULT RANK`: the fault strikes that rank after its twelfth step.
"""

from __future__ import annotations

import atexit
import builtins
import hashlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import star_hvd as hvd
from star_hvd.runtime import runtime
from tests.support import signals
from tests.support.launch import write_result
from tests.support.signals import PATIENCE_S, mark, marked
from tests.support.threads import running

STEPS, STRIKES_AT = 60, 12
# So many that the launcher ends the job before, unless the rank that fails waits for the others to finish.
FATAL_STEPS = 6000
STEP_S = 0.01
FROZEN_S = 3.0
CONFIG = hvd.Config(
    step_deadline_s=600.0,
    shutdown_deadline_s=600.0,
    control_deadline_s=120.0,
    lost_after_s=30.0,
    encryption="all",  # Strangers need ports to knock at.
)
# Without a coordinator these are waited for.
SHORT = hvd.Config(step_deadline_s=40.0, shutdown_deadline_s=30.0, control_deadline_s=15.0, lost_after_s=5.0)


KNOCKS = 6  # Three at each of two ports.
DAMAGED = (b"", b"\xc1", b"\x92\x01\xa5hello", bytes(2000))
LINGER_MS = round(1000 * PATIENCE_S)  # What is not sent within this is never counted.


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise ArithmeticError("the user's own mistake")


def leave() -> None:
    sys.exit(3)


def quit() -> None:
    builtins.quit(3)


def raise_exit() -> None:
    raise SystemExit(3)


def break_agent() -> None:
    """What the agent cannot pack ends its thread."""
    run = runtime.current()
    assert run is not None
    run.agent.send(object())  # type: ignore[arg-type]


def fork_child() -> None:
    """A child that runs all exit handlers, and ends as children of multiprocessing do.

    By `sys.exit` it was seen to hang or crash in the library of Horovod, of plain Horovod too.
    """
    child = os.fork()
    if child == 0:
        atexit._run_exitfuncs()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def freeze() -> None:
    """Stop for three seconds; a process of its own, which sees this one stand still, ends it."""
    assert signals.freeze("frozen", (), at_least_s=FROZEN_S)


def throw_garbage() -> None:
    """Strangers knock at every port of this job on this rank."""
    run = runtime.current()
    assert run is not None
    peer = run.keyring.peers[run.rank]
    for port in {peer.control_port, peer.tensor_port} - {0}:
        for junk in (b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 100, b"\xff" + bytes(9) + b"\x7f" + bytes(60)):
            with socket.create_connection((peer.host, port), timeout=60.0) as raw:
                try:
                    raw.sendall(junk)
                except OSError:
                    pass
    for number, data in enumerate(DAMAGED):  # From somebody who has a key of the job.
        identity = str(run.world_size + number).encode()
        dealer = run.keyring.client(0, identity, port=run.keyring.peers[0].control_port)
        dealer.send(data)
        dealer.close(linger=LINGER_MS)


def break_coordinator() -> None:
    """Its thread ends with an exception, as after a defect of ours."""
    run = runtime.current()
    assert run is not None and run.coordinator is not None

    def broken(now_s: float) -> float:
        raise RuntimeError("an injected defect")

    with run.coordinator.job_state() as job:
        job.tick = broken  # type: ignore[method-assign]


FAULTS: dict[str, Callable[[], None]] = {
    f.__name__: f
    for f in (
        kill, fail, leave, quit, raise_exit, freeze, throw_garbage, break_agent, break_coordinator, fork_child
    )
}


def steps(fault: str) -> Iterator[int]:
    """Numbers of the steps to make."""
    if fault in ("kill", "fail", "leave", "quit", "raise_exit", "break_agent"):
        yield from range(FATAL_STEPS)
        return
    yield from range(STEPS)
    limit_s, number = time.monotonic() + PATIENCE_S, STEPS
    while fault == "throw_garbage" and not marked("counted") and time.monotonic() < limit_s:
        report = hvd.report()
        counted = report is not None and report.denied_connections >= KNOCKS
        if report is not None and counted and report.dropped_messages >= len(DAMAGED) and report.mode != "sync":
            mark("counted")
        yield number
        number += 1


def digest(net: torch.nn.Module) -> str:
    raw = b"".join(param.detach().numpy().tobytes() for param in net.parameters())
    return hashlib.sha256(raw).hexdigest()[:16]


def main(mode: str, fault: str, rank: int) -> None:
    torch.set_num_threads(1)
    hvd.init()
    torch.manual_seed(1)
    net = torch.nn.Linear(8, 1)
    inner = torch.optim.SGD(net.parameters(), lr=0.01)
    config = SHORT if fault == "break_coordinator" else CONFIG
    optimizer: Any = hvd.DistributedOptimizer(inner, net.named_parameters(), mode=mode, config=config)
    for step in steps(fault):
        if step == STRIKES_AT and int(hvd.rank()) == rank:
            FAULTS[fault]()
        time.sleep(STEP_S)
        optimizer.zero_grad()
        net(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        write_result({"steps": step + 1})
    facts = {"steps": STEPS, "stats": optimizer.stats()}
    report = hvd.report()
    if report is not None:
        facts |= {"denied": report.denied_connections, "dropped": report.dropped_messages, "mode": report.mode}
    run = runtime.current()
    if run is not None and run.coordinator is not None and not running("star-coordinator"):
        write_result(facts | {"coordinator": "gone"})
        return
    optimizer.close()
    write_result(facts | {"digest": digest(net)})


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
