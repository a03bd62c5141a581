"""Every rank of a job that trains, then evaluates with `hvd.shard`: with collectives within the loop, or behind it."""

from __future__ import annotations

import sys
import time

import torch

import star_hvd as hvd
from tests.support.launch import write_result
from tests.support.patient import wait_without_spinning

BATCH = 4
SLOW_S = 5.0  # More than a rank may be stuck before it is told so.


def main(kind: str) -> None:
    torch.set_num_threads(1)
    wait_without_spinning()
    hvd.init()
    rank, ranks = int(hvd.rank()), int(hvd.size())
    torch.manual_seed(1)
    net = torch.nn.Linear(8, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), 1e-2), named_parameters=net.named_parameters(), mode="sync"
    )
    data = torch.utils.data.TensorDataset(torch.randn(BATCH * (2 * ranks), 8), torch.ones(BATCH * 2 * ranks))
    for x, _ in hvd.shard(data, batch_size=BATCH):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
        if kind == "training":
            hvd.allreduce(torch.ones(1))
    # One batch more than the ranks can have equally many of.
    held_out = torch.utils.data.TensorDataset(torch.randn(BATCH * (2 * ranks + 1), 8))
    batches, total = 0, 0
    began_s = time.monotonic()
    with torch.set_grad_enabled(kind == "gradients"):
        for (x,) in hvd.shard(held_out, batch_size=BATCH) if kind != "alone" or rank == 0 else ():
            batches += 1
            total += len(x)
            net(x)
            if kind in ("inside", "gradients"):
                hvd.allreduce(torch.ones(1), name="loss")
            if kind == "slow" and rank == 1 and batches == 1:
                time.sleep(SLOW_S)
        found = int(hvd.allreduce(torch.tensor([float(total)]), op=hvd.Sum).item())
    write_result({"batches": batches, "samples": found, "took_s": time.monotonic() - began_s})


if __name__ == "__main__":
    main(sys.argv[1])
