"""A rank whose Horovod looks for tensors seldom: reductions one after another, without hurry and with it."""

from __future__ import annotations

import os
import statistics
import time

import torch
from horovod.torch import mpi_ops

import star_hvd as hvd
from star_hvd.engine.collective import HorovodCollective, wait_all
from tests.support.attempts import agreed
from tests.support.launch import write_result

REDUCTIONS = 10
CYCLE_MS = 300
ATTEMPTS_S = 300.0


def main() -> None:
    os.environ["HOROVOD_CYCLE_TIME"] = str(CYCLE_MS)
    hvd.init()
    collective = HorovodCollective()

    def reduce(hurries: bool) -> float:
        """Return the median time of a reduction: a busy machine holds up some of them for seconds."""
        took_s = []
        for _ in range(REDUCTIONS):
            began_s = time.monotonic()
            handle = collective.submit("next", torch.ones(1))
            if hurries:
                collective.hurry()
            wait_all(collective, [handle], 60.0, "a reduction")
            took_s.append(time.monotonic() - began_s)
        return statistics.median(took_s)

    reduce(False)  # The cache learns the tensor.
    patched = hasattr(mpi_ops.mpi_lib, "horovod_torch_hurry")
    end_s, usual_s, hurried_s = time.monotonic() + ATTEMPTS_S, reduce(False), reduce(True)
    while not agreed(not patched or hurried_s < 0.5 * usual_s, end_s):
        usual_s, hurried_s = reduce(False), reduce(True)
    write_result({"patched": patched, "usual_s": usual_s, "hurried_s": hurried_s})
    hvd.shutdown()


if __name__ == "__main__":
    main()
