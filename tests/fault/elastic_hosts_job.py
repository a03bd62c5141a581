"""An elastic training whose hosts change in the middle of an epoch.

`python -m tests.fault.elastic_hosts_job FILE HOSTS`: rank 0 writes the new hosts to the file that names them. Every
rank writes down which samples it had in which epoch.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import star_hvd as hvd
from tests.fault.elastic_loader_job import Numbered
from tests.support.launch import write_result
from tests.support.signals import PATIENCE_S

BATCH, CHANGES_AT, STEP_S = 4, 4, 0.05


def main(file: Path, hosts: str) -> None:
    torch.set_num_threads(1)
    hvd.init()
    torch.manual_seed(1)
    net = torch.nn.Linear(8, 1)
    inner = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.5)
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=net.named_parameters(), mode="sync")
    other = hvd.shard(DataLoader(Numbered(), batch_size=BATCH))  # Made first, and never iterated.
    loader = hvd.shard(DataLoader(Numbered(), batch_size=BATCH), seed=5)
    state = hvd.elastic.TorchState(net, optimizer, loader=loader, epoch=0, last=0)
    notes = (file.parent / "notes" / f"{os.getpid()}.txt").open("w", buffering=1)
    begun, sizes, limit_s = int(hvd.size()), [int(hvd.size())], time.monotonic() + PATIENCE_S

    @hvd.elastic.run  # type: ignore[untyped-decorator]
    def train(state: Any) -> None:
        sizes.append(int(hvd.size()))
        # One epoch more behind the change, which Horovod notices when it does.
        while state.epoch <= state.last:
            for count, (numbers, rows) in enumerate(loader, 1):
                if count == CHANGES_AT and state.epoch == 0 and int(hvd.rank()) == 0:
                    file.write_text(hosts)
                time.sleep(STEP_S)
                optimizer.zero_grad()
                net(rows).square().mean().backward()
                optimizer.step()
                notes.write(f"{state.epoch} {' '.join(map(str, numbers.tolist()))}\n")
                state.commit()
            state.epoch += 1
            unchanged = int(hvd.size()) == begun and len(sizes) == 2 and time.monotonic() < limit_s
            state.last = hvd.broadcast_object(state.epoch if unchanged else max(state.last, 1), 0, name="last")

    train(state)
    raw = b"".join(param.detach().numpy().tobytes() for param in net.parameters())
    digests = hvd.allgather_object(hashlib.sha256(raw).hexdigest(), name="digests")
    facts = {"size": int(hvd.size()), "digests": digests, "epochs": state.epoch}
    write_result({**facts, "batches": len(other)})
    optimizer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2].replace(",", "\n") + "\n")
