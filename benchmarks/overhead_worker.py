"""Runs under horovodrun: times the steps of plain Horovod and star_hvd in alternating blocks, nobody slow."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.accelerator import CPU, make_clock, place_of
from benchmarks.device import Device, make_device
from benchmarks.spec import write_json
from benchmarks.tasks import load_task, make_network
from benchmarks.worker import progress, register

WARM_UP_STEPS = 20
SKIPPED_STEPS = 2  # of every block: the first one waits for whoever left the last block late
LEARNING_RATE = 0.01
BATCH_SAMPLES = 16


@dataclass(slots=True, kw_only=True)
class Side:
    """One of the two optimizers with its own model."""

    model: nn.Module
    optimizer: Any

    def step(self, x: torch.Tensor, y: torch.Tensor, device: Device, work_s: float = 0.0) -> None:
        """One training step with some device time in it.

        Args:
            x: Samples.
            y: Their classes.
            device: Spends the time, before backward.
            work_s: Between backward and the step of the optimizer: logging, or clipping over a slow device.
        """
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(x), y)
        device.run(1.0)
        loss.backward()
        if work_s:
            time.sleep(work_s)
        self.optimizer.step()


def make_side(hvd: Any, dataset: str, place: torch.device = CPU, **options: Any) -> Side:
    """A fresh model, the same on both sides and all ranks, with `hvd`'s optimizer."""
    torch.manual_seed(0)
    model = make_network(dataset).to(place)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    wrapped = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **options)
    return Side(model=model, optimizer=wrapped)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What blocks are made of."""
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--blocks", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--device-ms", type=float, required=True)
    parser.add_argument("--work-after-backward-ms", type=float, default=0.0)
    parser.add_argument("--device", default="cpu")


def alternate(
    args: argparse.Namespace, sides: Mapping[str, Side], dataset: str, *, rank: int, size: int, warm_up: int
) -> dict[str, list[dict[str, Any]]]:
    """Train two sides in turn, block by block, each beginning every other pair of blocks.

    Returns:
        Of every side's blocks the time of each step in seconds (`times_s`) and when the block ended (`ended_unix_s`).
    """
    place = next(next(iter(sides.values())).model.parameters()).device
    mine = slice(rank * BATCH_SAMPLES, (rank + 1) * BATCH_SAMPLES)
    x, y = (tensor[mine].to(place) for tensor in load_task(dataset, BATCH_SAMPLES * size).train.tensors)
    device = make_device(place.type, args.device_ms / 1000.0, burns=False)
    clock, work_s = make_clock(place.type), args.work_after_backward_ms / 1000.0
    for side in sides.values():
        for _ in range(warm_up):
            side.step(x, y, device, work_s)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for block in range(args.blocks):
        for name in sides if block % 2 == 0 else reversed(list(sides)):
            clock.tick()
            for _ in range(SKIPPED_STEPS + args.steps):
                sides[name].step(x, y, device, work_s)
                clock.tick()
            times_s = clock.steps_s()
            found[name].append({"ended_unix_s": time.time(), "times_s": times_s[SKIPPED_STEPS:]})
        if rank == 0:
            progress(text=f"block {block + 1} of {args.blocks}", done=1)
    return found


def main(argv: list[str]) -> int:
    """Write the step times of every block to `overhead.json` in the run's folder."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--mode", required=True)
    args = parser.parse_args(argv)
    register(args.run_dir)
    torch.set_num_threads(1)

    import horovod.torch as plain_hvd

    import star_hvd as hvd

    hvd.init()
    place = place_of(args.device, hvd.local_rank())
    sides = {
        "plain": make_side(plain_hvd, args.dataset, place),
        "star": make_side(hvd, args.dataset, place, mode=args.mode),
    }
    found = alternate(args, sides, args.dataset, rank=hvd.rank(), size=hvd.size(), warm_up=WARM_UP_STEPS)
    blocks = {name: [block["times_s"] for block in made] for name, made in found.items()}
    stats = hvd.allgather_object(dict(sides["star"].optimizer.stats()), name="lab_stats")
    if hvd.rank() == 0:
        write_json(args.run_dir / "overhead.json", {"blocks_s": blocks, "stats": stats})
    hvd.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
