"""A job in which one rank has, as it says, another build of Horovod. Argument: where the ranks compare."""

from __future__ import annotations

import os
import sys
import time

import horovod.torch as plain
import torch

import star_hvd as hvd
from star_hvd import build_check
from star_hvd.build_check import Build, BuildMismatchError
from star_hvd.runtime import runtime
from tests.support.launch import write_result

LATE_S = 2.0


def main(place: str, differs: bool) -> None:
    rank = int(os.environ["HOROVOD_RANK"])
    if differs and rank == 1:
        build_check.own_build = runtime.own_build = lambda: Build("0.28.1", "no patches", None, "elsewhere")
    if rank == 2:
        time.sleep(LATE_S)  # The others wait for whoever comes late.
    raised = None
    try:
        if place == "init":
            hvd.init()
        else:
            plain.init()  # A user's own call: the builds are compared when the ranks first meet.
        model = torch.nn.Linear(2, 1)
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    except BuildMismatchError as error:
        raised = str(error)
    write_result({"raised": raised, "initialized": bool(plain.is_initialized())})


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "differs")
