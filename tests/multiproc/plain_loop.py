"""A program that knows nothing of star_hvd but its import: a plain loop of as many steps as the argument says.

`python -m tests.multiproc.plain_loop MODE STEPS...`: the steps of every rank; the last rank is slow.
"""

from __future__ import annotations

import sys
import time

import torch

import star_hvd as hvd
from tests.support.launch import write_result


def main(mode: str, steps: list[int]) -> None:
    torch.set_num_threads(1)
    hvd.init()
    torch.manual_seed(1)
    net = torch.nn.Linear(8, 1)
    inner = torch.optim.SGD(net.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=net.named_parameters(), mode=mode)
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    rank = int(hvd.rank())
    for _ in range(steps[rank]):
        time.sleep(0.04 if rank == len(steps) - 1 else 0.005)
        optimizer.zero_grad()
        net(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    write_result({"stats": optimizer.stats()})


if __name__ == "__main__":
    main(sys.argv[1], [int(text) for text in sys.argv[2:]])
