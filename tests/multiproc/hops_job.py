"""Reductions of all lengths while ranks change, each on its own, how short ones are to be made."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable

import horovod.torch as hvd
import torch
from horovod.torch import mpi_ops

from tests.support.launch import write_result

TYPES = (torch.float32, torch.float64, torch.int64, torch.float16)
LENGTHS = (*range(1, 20), 100, 1023, 1 << 18, (1 << 18) + 1, 400_000)  # Around the longest that counts as short.
ROUNDS = 60
ORDERED = 64


def wrong_sums(seed: int, set_few_hops: Callable[[bool], None]) -> list[str]:
    """Return the reductions that were not the exact sum, of all ranks and of all but the last."""
    some = hvd.ProcessSet(list(range(int(os.environ["HOROVOD_SIZE"]) - 1)))
    hvd.init(process_sets=[some])
    rank, size = hvd.rank(), hvd.size()
    common, own, wrong = random.Random(seed), random.Random(100 * seed + rank), []
    for number in range(ROUNDS):
        if own.random() < 0.1:
            set_few_hops(own.random() < 0.8)
        length, dtype = common.choice(LENGTHS), common.choice(TYPES)
        members, process_set = common.choice(((range(size), hvd.global_process_set), (range(size - 1), some)))
        if rank in members:
            mine = (torch.arange(length) % 17 + rank).to(dtype)
            handles = [
                hvd.allreduce_async(mine, name=f"{name}{length}{dtype}", op=hvd.Sum, process_set=process_set)
                for name in common.choice(("a", "ab", "abc"))
            ]
            wanted = sum((torch.arange(length) % 17 + other).to(dtype) for other in members)
            for handle in handles:
                if not torch.equal(hvd.synchronize(handle), wanted):
                    wrong.append(f"round {number}: {length} of {dtype} over {list(members)}")
        else:
            common.choice(("a", "ab", "abc"))
    return wrong


def values_of_a_sum() -> int:
    """Return how many different sums there are of equal elements, whose sum depends on the order of the ranks."""
    mine = torch.full((ORDERED,), (1e8, 1.0, -1e8, 1.0)[hvd.rank()])
    return len(set(hvd.allreduce(mine, name="ordered", op=hvd.Sum).tolist()))


def main() -> None:
    set_few_hops = getattr(mpi_ops.mpi_lib, "horovod_torch_set_few_hops", None)
    if set_few_hops is None:
        write_result({"patched": False})
        return
    facts = {"patched": True, "wrong": wrong_sums(int(sys.argv[1]), set_few_hops)}
    if hvd.size() == 4:
        for on, name in ((False, "many"), (True, "few")):
            set_few_hops(on)
            hvd.barrier()  # All have said so; the negotiation of the next operation may still be as before.
            hvd.barrier()
            facts[name] = values_of_a_sum()
    write_result(facts)
    hvd.barrier()


if __name__ == "__main__":
    main()
