"""A rank that waits for a late one, and counts how often its thread wakes meanwhile."""

from __future__ import annotations

import resource
import threading
import time

import torch
from horovod.torch import mpi_ops

import star_hvd as hvd
from star_hvd.engine.collective import HorovodCollective
from tests.support.launch import write_result
from tests.support.signals import PATIENCE_S, await_marks, mark, marked

LATE_S = 1.0
MOST_LATE_S = 60.0  # If the other rank's threads do not run.
LATE = 1  # The late rank.


def wakes() -> int:
    """Return how often this thread has given its core away."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def used_s_in_allreduce(late: bool) -> float:
    """Return the processor time of this thread in a blocking collective of the program's, beside a late rank."""
    if late:
        time.sleep(LATE_S)
    before_s = time.thread_time()
    hvd.allreduce(torch.ones(1), name="user's")
    return time.thread_time() - before_s


def main() -> None:
    hvd.init()
    rank = hvd.rank()
    collective = HorovodCollective()
    turns = 0
    ended = threading.Event()

    def other() -> None:
        nonlocal turns
        while not ended.wait(0.01):
            if marked("waits", [rank]):
                turns += 1
                mark("turns")

    thread = threading.Thread(target=other)
    thread.start()
    if rank == LATE:
        # However long the other rank takes to submit its tensor and to get a core.
        await_marks("turns", [1 - LATE], MOST_LATE_S)
        time.sleep(LATE_S)
    tensor = torch.ones(1)
    handle = collective.submit("late", tensor)
    too_early = rank != LATE and collective.wait(handle, 0.02)
    mark("waits")
    before = wakes()
    found = collective.wait(handle, PATIENCE_S)
    woken = wakes() - before
    ended.set()
    thread.join()
    collective.finish(handle)
    facts = {"late": rank == LATE, "too_early": too_early, "ended": found, "woken": woken}
    facts["others_ran"] = rank == LATE or turns > 0
    again = collective.wait(handle, PATIENCE_S)  # Of an operation that was collected.
    patched = {name: hasattr(mpi_ops.mpi_lib, f"horovod_torch_{name}") for name in ("wait_for", "set_waits_sleep")}
    used_s = used_s_in_allreduce(late=rank == LATE)
    write_result({**facts, **patched, "again": again, "sum": float(tensor), "used_s": used_s})
    hvd.shutdown()


if __name__ == "__main__":
    main()
