"""One rank of a job for fault injection: `python -m tests.nemesis.job FOLDER MODE`.

It trains epochs of `shard` until rank 0 finds the file `over` in FOLDER at the end of one. It then writes which samples
its gradients contained, what became of their weights, and its final parameters.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

import star_hvd as hvd
from star_hvd.runtime import runtime
from tests.multiproc.scenarios import compute, digest, model
from tests.support.signals import PATIENCE_S

SAMPLES, BATCH, STEP_S = 120, 4, 0.01
LEAST_EPOCHS = 2
CONFIG = hvd.Config(plan_deadline_s=200.0)  # Servers import torch when they start, which is slow on few cores.


class Numbered(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Samples that identify themselves."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.randn(8, generator=torch.Generator().manual_seed(index)), index


def write(path: Path, values: dict[str, Any]) -> None:
    """Write the file atomically."""
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(values), encoding="utf-8")
    draft.replace(path)


def ports() -> list[int]:
    """Return the ports on which this rank listens for other ranks, without Horovod's own."""
    run = runtime.current()
    assert run is not None
    own = run.keyring.peers[run.rank]
    endpoint = run.services.sessions.server.endpoint
    return [port for port in (own.control_port, own.tensor_port, endpoint.port if endpoint else 0) if port]


def step(net: torch.nn.Module, optimizer: Any, inputs: torch.Tensor) -> None:
    optimizer.zero_grad()
    compute(net, inputs, STEP_S)
    optimizer.step()


def main(folder: Path, mode: str) -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # Shows where a hanging job waits: `Nemesis.stacks`.
    torch.set_num_threads(1)
    hvd.init()
    rank = int(hvd.rank())
    net = model()
    inner = torch.optim.SGD(net.parameters(), lr=0.005, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=net.named_parameters(), mode=mode, config=CONFIG)
    loader = hvd.shard(Numbered(), batch_size=BATCH)
    began_s = time.monotonic()
    while mode != "sync" and optimizer.mode == "sync" and time.monotonic() - began_s < PATIENCE_S:
        step(net, optimizer, torch.ones(BATCH, 8))
    hvd.barrier()
    write(folder / f"ready{rank}.json", {"pid": os.getpid(), "ports": ports(), "mode": optimizer.mode})
    epochs: list[list[int]] = []
    longest_s, over = 0.0, False
    while not over:
        epochs.append([])
        for inputs, numbers in loader:
            before_s = time.monotonic()
            step(net, optimizer, inputs)
            epochs[-1] += numbers.tolist()
            longest_s = max(longest_s, time.monotonic() - before_s)
        over = len(epochs) >= LEAST_EPOCHS and (folder / "over").exists()
        over = bool(hvd.broadcast_object(over, 0, name="over"))
    last_mode = optimizer.mode
    optimizer.close()
    facts = {"epochs": epochs, "digest": digest(net), "stats": optimizer.stats(), "mode": last_mode}
    write(folder / f"rank{rank}.json", {**facts, "longest_s": longest_s})
    hvd.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
