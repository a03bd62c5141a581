"""Runs under horovodrun: times the steps of plain Horovod and star_hvd in alternating blocks, with no straggler.

With `--feed loader` a block is an epoch, and its steps include loading the samples: plain Horovod is fed by a
`DataLoader` with `DistributedSampler`, star_hvd by `hvd.shard` of the same `DataLoader`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from benchmarks.lab.networks import NETWORKS, layer_costs, make_network
from benchmarks.lab.spec import write_json
from benchmarks.lab.tasks import SlowSamples, load_task
from benchmarks.lab.waits import set_waits
from benchmarks.lab.worker import progress, register
from benchmarks.machine.accelerator import CPU, make_clock, place_of
from benchmarks.machine.device import DeviceTime, LayerClock, make_device

WARM_UP_STEPS = 20
SKIPPED_STEPS = 2  # Of every block: the first one waits for ranks that left the last block late.
LEARNING_RATE = 0.01
BATCH_SAMPLES = 16
FEEDS = ("fixed", "loader")


@dataclass(slots=True, kw_only=True)
class Side:
    """One of the two optimizers with its own model; `plain`: plain Horovod's."""

    model: nn.Module
    optimizer: Any
    plain: bool = False

    def step(self, x: torch.Tensor, y: torch.Tensor, work_s: float = 0.0) -> None:
        """Make one training step.

        Args:
            x: Samples.
            y: Their classes.
            work_s: Pause between backward and the optimizer's step, as for logging or clipping on a slow device.
        """
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(x), y).backward()
        if work_s:
            time.sleep(work_s)
        self.optimizer.step()


def make_side(hvd: Any, dataset: str, place: torch.device = CPU, network: str = "usual", **options: Any) -> Side:
    """Make a new model, the same on both sides and all ranks, with `hvd`'s optimizer."""
    torch.manual_seed(0)
    model = make_network(dataset, network=network).to(place)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    wrapped = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **options)
    return Side(model=model, optimizer=wrapped, plain=hvd.__name__.startswith("horovod"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that define a block."""
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--blocks", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--device-ms", type=float, required=True)
    parser.add_argument("--device-fixed-ms", type=float, default=0.0)
    parser.add_argument("--work-after-backward-ms", type=float, default=0.0)
    parser.add_argument("--device", default="cpu")


def alternate(
    args: argparse.Namespace, sides: Mapping[str, Side], dataset: str, *, rank: int, size: int, warm_up: int
) -> dict[str, list[dict[str, Any]]]:
    """Train two sides in alternating blocks; the side that starts alternates from pair to pair.

    Returns:
        For every block of a side, the time of each step in seconds (`times_s`) and the end of the block
        (`ended_unix_s`).
    """
    place = next(next(iter(sides.values())).model.parameters()).device
    mine = slice(rank * BATCH_SAMPLES, (rank + 1) * BATCH_SAMPLES)
    x, y = (tensor[mine].to(place) for tensor in load_task(dataset, BATCH_SAMPLES * size).train.tensors)
    spend_device_time(args, sides, x)
    clock, work_s = make_clock(place.type), args.work_after_backward_ms / 1000.0
    for side in sides.values():
        for _ in range(warm_up):
            side.step(x, y, work_s)

    def block(name: str, _: int) -> list[float]:
        clock.tick()
        for _ in range(SKIPPED_STEPS + args.steps):
            sides[name].step(x, y, work_s)
            clock.tick()
        return clock.steps_s()[SKIPPED_STEPS:]

    return in_turns(args.blocks, sides, block, rank)


def spend_device_time(args: argparse.Namespace, sides: Mapping[str, Side], x: torch.Tensor) -> None:
    """Make the layers of both sides spend device time from now on: `--device-ms` for a full batch."""
    fixed_s = args.device_fixed_ms / 1000.0
    device_time = DeviceTime(
        fixed_s=fixed_s, per_sample_s=(args.device_ms / 1000.0 - fixed_s) / BATCH_SAMPLES
    )
    device = make_device(x.device.type)
    for side in sides.values():
        LayerClock(side.model, device, device_time, layer_costs(side.model, x[:1]))


def in_turns(
    blocks: int, sides: Mapping[str, Side], block: Callable[[str, int], list[float]], rank: int
) -> dict[str, list[dict[str, Any]]]:
    """Run `blocks` blocks per side, alternating; return step times and end of each."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for index in range(blocks):
        for name in list(sides) if index % 2 == 0 else reversed(sides):
            set_waits(sides[name].plain)
            times_s = block(name, index)
            found[name].append({"ended_unix_s": time.time(), "times_s": times_s})
        if rank == 0:
            progress(text=f"block {index + 1} of {blocks}", done=1)
    return found


def alternate_epochs(args: argparse.Namespace, sides: Mapping[str, Side], hvd: Any) -> dict[str, list[dict[str, Any]]]:
    """Train both sides on alternating whole epochs, each fed by its own loader.

    A rank's first block is not counted, since loader workers start in it. Every step of a block counts as the mean of
    the block, because samples prefetched at its start are missing later.
    """
    rank, size = int(hvd.rank()), int(hvd.size())
    samples = Repeated(load_task(args.dataset, BATCH_SAMPLES * size).train, args.steps)
    costly = SlowSamples(samples, args.input_ms_per_sample / 1000.0)
    sampler: DistributedSampler[Any] = DistributedSampler(costly, num_replicas=size, rank=rank)
    common: dict[str, Any] = dict(
        batch_size=BATCH_SAMPLES, num_workers=args.workers, persistent_workers=args.workers > 0
    )
    loaders: dict[str, Iterable[Any]] = {
        "plain": DataLoader(costly, sampler=sampler, **common),
        "star": hvd.shard(DataLoader(costly, shuffle=True, **common)),
    }
    spend_device_time(args, sides, samples[0][0].unsqueeze(0))

    def block(name: str, index: int) -> list[float]:
        sampler.set_epoch(index)
        hvd.barrier()
        began_s = time.perf_counter()
        for x, y in loaders[name]:
            sides[name].step(x, y, args.work_after_backward_ms / 1000.0)
        hvd.barrier()
        return [(time.perf_counter() - began_s) / args.steps] * args.steps

    for name in sides:
        block(name, 0)
    return in_turns(args.blocks, sides, block, rank)


class Repeated(Dataset[Any]):
    """A data set repeated several times."""

    def __init__(self, samples: Dataset[Any], times: int) -> None:
        self._samples, self._times = samples, times

    def __len__(self) -> int:
        return self._times * len(self._samples)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        return self._samples[index % len(self._samples)]  # type: ignore[arg-type]


def main(argv: list[str]) -> int:
    """Write the step times of every block to `overhead.json` in the run's folder."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--mode", required=True)
    parser.add_argument("--trained-network", choices=NETWORKS, default="usual")
    parser.add_argument("--feed", choices=FEEDS, default="fixed")
    parser.add_argument("--input-ms-per-sample", type=float, default=0.0)
    parser.add_argument("--workers", type=int, default=0)
    args = parser.parse_args(argv)
    register(args.run_dir)
    torch.set_num_threads(1)

    import horovod.torch as plain_hvd

    import star_hvd as hvd

    hvd.init()
    place = place_of(args.device, hvd.local_rank())
    sides = {
        "plain": make_side(plain_hvd, args.dataset, place, args.trained_network),
        "star": make_side(hvd, args.dataset, place, args.trained_network, mode=args.mode),
    }
    if args.feed == "loader":
        found = alternate_epochs(args, sides, hvd)
    else:
        found = alternate(args, sides, args.dataset, rank=hvd.rank(), size=hvd.size(), warm_up=WARM_UP_STEPS)
    blocks = {name: [block["times_s"] for block in made] for name, made in found.items()}
    stats = hvd.allgather_object(dict(sides["star"].optimizer.stats()), name="lab_stats")
    if hvd.rank() == 0:
        write_json(args.run_dir / "overhead.json", {"blocks_s": blocks, "stats": stats})
    hvd.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
