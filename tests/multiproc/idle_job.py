"""Horovod's thread while nothing is submitted: how often it wakes, and how soon it sees a tensor."""

from __future__ import annotations

import resource
import time

import torch
from horovod.torch import mpi_ops

import star_hvd as hvd
from star_hvd.engine.collective import HorovodCollective, tune_horovod, wait_all
from tests.support.attempts import agreed
from tests.support.launch import write_result

REDUCTIONS = 10
IDLE_S = 1.0
ATTEMPTS_S = 300.0
LONG_MS = 60_000.0


def is_less(wakes: dict[str, int]) -> bool:
    """Whether Horovod's thread wakes seldom: hardly ever with a very long cycle, and less often with star_hvd's."""
    return wakes["asleep"] < 0.2 * wakes["usual"] and wakes["star_hvd"] < 0.6 * wakes["usual"]


def main() -> None:
    hvd.init()
    collective = HorovodCollective()
    patched = hasattr(mpi_ops.mpi_lib, "horovod_torch_set_idle_cycle_ms")

    def reduce(late_s: float = 0.0) -> None:
        time.sleep(late_s)
        wait_all(collective, [collective.submit("next", torch.ones(1))], 300.0, "a reduction")

    def wakes_while_idle() -> int:
        """Return how often threads of this process gave their core away in a second without work."""
        reduce()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
        time.sleep(IDLE_S)
        return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before

    def compared() -> dict[str, int]:
        """Return the wakes with what `hvd.init` has set, with Horovod's own cycle, and with a very long one."""
        tune_horovod(True)
        of_star_hvd = wakes_while_idle()
        tune_horovod(False)
        usual = wakes_while_idle()
        if patched:
            mpi_ops.mpi_lib.horovod_torch_set_idle_cycle_ms(LONG_MS)
        return {"usual": usual, "star_hvd": of_star_hvd, "asleep": wakes_while_idle()}

    # On a busy machine a thread gives its core away for other reasons, too.
    found, end_s = compared(), time.monotonic() + ATTEMPTS_S
    while not agreed(not patched or is_less(found), end_s):
        found = compared()
    began_s = time.monotonic()
    for number in range(REDUCTIONS):
        reduce(late_s=0.02 * (number % 3) * hvd.rank())
    took_s = time.monotonic() - began_s
    write_result({"patched": patched, "took_s": took_s} | found)
    tune_horovod(False)
    hvd.shutdown()


if __name__ == "__main__":
    main()
