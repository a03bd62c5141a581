"""A rank of the test of namespaces: the address the library would use, and the time of an all-reduce."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import horovod.torch as hvd
import torch

from star_hvd.channel.keys import own_address

__all__ = ["main"]

FLOATS, TIMES = 500_000, 3


def main(folder: Path) -> None:
    """Write address and shortest time into `folder`."""
    hvd.init()
    tensor, shortest_s = torch.ones(FLOATS), float("inf")
    for _ in range(TIMES):
        hvd.barrier()
        began_s = time.monotonic()
        hvd.allreduce(tensor, name="tensor")
        shortest_s = min(shortest_s, time.monotonic() - began_s)
    address = own_address(single_host=int(hvd.local_size()) == int(hvd.size()))
    (folder / f"rank{int(hvd.rank())}").write_text(f"{address} {shortest_s}", encoding="utf-8")
    hvd.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
