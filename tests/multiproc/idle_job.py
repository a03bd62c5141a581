"""Horovod's thread while nothing is submitted: how often it wakes, and how soon it sees a tensor."""

from __future__ import annotations

import resource
import time

import torch
from horovod.torch import mpi_ops

import star_hvd as hvd
from star_hvd.engine.collective import IDLE_CYCLE_MS, HorovodCollective, set_idle_cycle, wait_all
from tests.support.launch import write_result

REDUCTIONS = 10
IDLE_S = 1.0
LONG_MS = 60_000.0


def main() -> None:
    hvd.init()
    collective = HorovodCollective()
    patched = hasattr(mpi_ops.mpi_lib, "horovod_torch_set_idle_cycle_ms")

    def reduce(late_s: float = 0.0) -> None:
        time.sleep(late_s)
        wait_all(collective, [collective.submit("next", torch.ones(1))], 300.0, "a reduction")

    def wakes_while_idle(idle_cycle_ms: float) -> int:
        """Return how often threads of this process gave their core away in a second without work."""
        set_idle_cycle(idle_cycle_ms)
        reduce()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
        time.sleep(IDLE_S)
        return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before

    of_star_hvd, usual = wakes_while_idle(IDLE_CYCLE_MS), wakes_while_idle(0.0)
    asleep = wakes_while_idle(LONG_MS)
    began_s = time.monotonic()
    for number in range(REDUCTIONS):
        reduce(late_s=0.02 * (number % 3) * hvd.rank())
    took_s = time.monotonic() - began_s
    write_result(
        {"patched": patched, "usual": usual, "star_hvd": of_star_hvd, "asleep": asleep, "took_s": took_s}
    )
    set_idle_cycle(0.0)
    hvd.shutdown()


if __name__ == "__main__":
    main()
