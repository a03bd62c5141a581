"""What every rank of a run-log test runs: two optimizers at once, then more of them one after another.

`python -m tests.multiproc.run_log_many COUNT`: rank 0 kills the sender of the run log in the middle, and makes a child
by fork that outlives the job.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import psutil
import torch

import star_hvd as hvd
from star_hvd.run_log import dispatch
from star_hvd.runtime import runtime
from tests.support.launch import write_result
from tests.support.senders import SENT_S

DEADLINE_S = 120.0


def optimizer_of(net: torch.nn.Module) -> Any:
    inner = torch.optim.SGD(net.parameters(), lr=0.01)
    return hvd.DistributedOptimizer(inner, net.named_parameters(), mode="sync")


def train(net: torch.nn.Module, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.ones(4, 8)).square().mean().backward()
        optimizer.step()


def senders() -> list[psutil.Process]:
    """Processes that send the runs of this job."""
    run = runtime.current()
    assert run is not None
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            # A child of this process is the sender's first one, which ends at once, having left its work to its own.
            ours = bool(words) and words[-1].endswith(run.run_name) and process.ppid() != os.getpid()
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def await_sender(starts: int) -> list[int]:
    """Ids of the senders once that many were started, and the last one is there."""
    limit_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < limit_s:
        found = [process.pid for process in senders()]
        if dispatch.starts() == starts and found:
            return found
        time.sleep(0.1)
    raise TimeoutError(f"the sender was started {dispatch.starts()} times; expected {starts}")


def main(count: int) -> None:
    torch.set_num_threads(1)
    hvd.init()
    rank = int(hvd.rank())
    nets = [torch.nn.Linear(8, 1) for _ in range(2)]
    pair = [optimizer_of(net) for net in nets]
    for _ in range(5):
        for net, optimizer in zip(nets, pair, strict=True):
            train(net, optimizer, 1)
    found: dict[str, Any] = {}
    if rank == 0:
        found["first"] = await_sender(1)
        psutil.Process(found["first"][0]).kill()
        found["second"] = await_sender(2)
        found["child"] = os.fork()
        if found["child"] == 0:
            null = os.open(os.devnull, os.O_RDWR)
            for fd in (0, 1, 2):  # horovodrun waits for the end of a rank's output.
                os.dup2(null, fd)
            time.sleep(SENT_S + 3.0 * DEADLINE_S)  # Longer than the test waits for the sender.
            os._exit(0)
    hvd.barrier()
    for _ in range(count - 2):
        net = torch.nn.Linear(8, 1)
        optimizer = optimizer_of(net)
        train(net, optimizer, 3)
        optimizer.close()
    run = runtime.current()
    assert run is not None
    name = run.run_name
    if rank == 0:
        found |= {"last": [process.pid for process in senders()], "starts": dispatch.starts()}
    hvd.shutdown()
    write_result({"name": name, **found})


if __name__ == "__main__":
    main(int(sys.argv[1]))
