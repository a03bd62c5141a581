"""An elastic training on samples of `shard`; a rank is killed: `python -m tests.fault.elastic_loader_job DIR`.

Every rank writes down which samples it had for which step, so that those of the rank that dies are known as well.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import star_hvd as hvd
from tests.support.launch import write_result

SAMPLES, BATCH = 400, 4
COMMITS_AT, STRIKES_AT, VICTIM = 6, 9, 3


class Numbered(torch.utils.data.Dataset[tuple[int, torch.Tensor]]):
    """Samples that know their number."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.ones(8)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    hvd.init()
    torch.manual_seed(1)
    net = torch.nn.Linear(8, 1)
    inner = torch.optim.SGD(net.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=net.named_parameters(), mode="sync")
    loader = hvd.shard(DataLoader(Numbered(), batch_size=BATCH, num_workers=1), seed=5)
    state = hvd.elastic.TorchState(net, optimizer, loader=loader, epoch=0, worlds=0)
    notes = (folder / f"{os.getpid()}.txt").open("w", buffering=1)

    @hvd.elastic.run  # type: ignore[untyped-decorator]
    def train(state: Any) -> None:
        world = "first" if int(hvd.size()) == 4 else "second"
        while state.epoch < 2:
            for count, (numbers, rows) in enumerate(loader, 1):
                if world == "first" and count == STRIKES_AT and int(hvd.rank()) == VICTIM:
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.zero_grad()
                net(rows).square().mean().backward()
                optimizer.step()
                notes.write(f"{world} {state.epoch} {count} {' '.join(map(str, numbers.tolist()))}\n")
                if world == "first" and count == COMMITS_AT:
                    state.commit()
            state.epoch += 1

    train(state)
    write_result({"size": int(hvd.size()), "epoch": loader.epoch})
    optimizer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
