"""One rank of a job of `benchmarks.transmission`: trains a network of equal layers and times its steps.

`VARIANTS` lists the compared variants; add an entry to compare another one.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.lab.spec import write_json
from benchmarks.machine.device import DeviceTime, LayerClock, SleepDevice
from benchmarks.workers.warm_up import await_mode, await_trials
from scheduler.records import Plan, parse_mode

__all__ = ["VARIANTS", "Job", "Variant", "main", "network_of"]

BATCH = 8
_FLOAT_BYTES = 4
_STEPS_OF_AUTO = 200  # In which it may choose a mode.


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a rank trains.

    Attributes:
        mbytes: Size of the network's parameters.
        compute_s: Device time of a step.
        layers: Number of layers of equal size.
        mode: Mode of star_hvd's variants; servers are on all hosts.
        steps: Steps that count.
        warm: Steps before those, once the mode is in force.
    """

    mbytes: float
    compute_s: float
    layers: int
    mode: str
    steps: int
    warm: int

    def to_dict(self) -> dict[str, Any]:
        """Return the values for the command line."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to train.

    Attributes:
        ours: True for star_hvd, False for plain Horovod.
        options: Arguments of `DistributedOptimizer` by name; `fp16` stands for Horovod's compression.
        environment: Environment variables of its job.
        modes: The modes it exists in, by their names without arguments, None for all.
        shares_hosts: Whether it makes sense only where ranks share hosts.
        least_warm: Minimum number of steps before those that count: until a trial that is decided early is over.
        longest_warm: Steps until the longest trial is over; 0 if nothing is tried.
    """

    ours: bool
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    modes: tuple[str, ...] | None = None
    shares_hosts: bool = False
    least_warm: int = 0
    longest_warm: int = 0


VARIANTS: dict[str, Variant] = {
    "horovod": Variant(ours=False),
    "horovod-fp16": Variant(ours=False, options={"fp16": True}),
    "star": Variant(ours=True),
    "overlap-auto": Variant(ours=True, options={"overlap": "auto"}, modes=("sync",), least_warm=172, longest_warm=400),
    "overlap": Variant(ours=True, options={"overlap": True}, modes=("sync",), least_warm=66),
    "hierarchical": Variant(
        ours=True, environment={"HOROVOD_HIERARCHICAL_ALLREDUCE": "1"}, modes=("sync",), shares_hosts=True
    ),
    "compression-auto": Variant(
        ours=True, options={"compression": "auto"}, modes=("sync",), least_warm=28, longest_warm=144
    ),
    "default": Variant(ours=True, options={"background": None}, modes=("ps",)),
    "background": Variant(ours=True, options={"background": True}, modes=("ps", "local")),
    "background-auto": Variant(
        ours=True, options={"background": True, "compression": "auto"}, modes=("ps",), least_warm=108, longest_warm=320
    ),
}


def network_of(job: Job) -> torch.nn.Sequential:
    """Make `job.layers` layers of equal size with `job.mbytes` in total."""
    width = max(1, round((1e6 * job.mbytes / _FLOAT_BYTES / job.layers) ** 0.5))
    return torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(job.layers)))


def _optimizer(variant: Variant, net: torch.nn.Module, mode: str) -> tuple[Any, Any]:
    """Return the library and the wrapped optimizer."""
    import horovod.torch

    options = dict(variant.options)
    if options.pop("fp16", False):
        options["compression"] = horovod.torch.Compression.fp16
    hvd: Any = horovod.torch
    if variant.ours:
        import star_hvd as hvd

        if "compression" in options:
            options["compression"] = getattr(hvd.Compression, options["compression"])
    hvd.init()
    if variant.ours:
        options["mode"] = _plan(mode, int(hvd.size()))
        options["config"] = hvd.Config(background=options.pop("background", False))
    own = torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9)
    return hvd, hvd.DistributedOptimizer(own, named_parameters=net.named_parameters(), **options)


def _plan(mode: str, ranks: int) -> str | Plan:
    """Return the mode, with servers on all hosts; `auto` would place them by the measured links."""
    plan = parse_mode(mode, ranks)
    return mode if plan is None or plan.family != "ps" else plan.replace(servers=tuple(range(ranks)))


class _Clock:
    """Times the steps of one rank once its mode is in force.

    Args:
        engine: Engine of star_hvd's optimizer, None under plain Horovod.
        plan: The mode, None for `auto`.
    """

    def __init__(self, engine: Any, plan: Plan | None) -> None:
        self._engine, self._mode = engine, plan.mode if plan is not None else "auto"
        self._ends_s: list[float] = []
        self._first = 0

    def begin(self) -> None:
        """Start timing."""
        self._ends_s = [time.perf_counter()]
        self._first = self._engine.step if self._engine is not None else 0

    def step(self) -> None:
        """Record the end of a step."""
        self._ends_s.append(time.perf_counter())

    def found(self) -> dict[str, Any]:
        """Return `step_s`: the median, or in `ps` and `local`, whose steps are unequal by design, the mean.

        With servers a step is an update of the parameters, which contains the pushes of some ranks; `own_step_s` is the
        time from one push of this rank to its next.
        """
        times = [later - sooner for sooner, later in itertools.pairwise(self._ends_s)]
        more = {"p90_step_s": sorted(times)[int(0.9 * (len(times) - 1))], "median_step_s": statistics.median(times)}
        total_s = self._ends_s[-1] - self._ends_s[0]
        if self._engine is None or self._mode not in ("ps", "local"):
            return {"step_s": statistics.median(times), "more": more}
        more["own_step_s"] = total_s / len(times)
        updates = self._engine.step - self._first if self._mode == "ps" else len(times)
        return {"step_s": total_s / max(1, updates), "more": more}


def _warm_up(step: Callable[[], None], hvd: Any, optimizer: Any, variant: Variant, job: Job) -> None:
    """Make the steps before those that count.

    Raises:
        RuntimeError: The mode did not come into force, or a trial did not end.
    """
    if variant.ours:
        plan = parse_mode(job.mode, int(hvd.size()))
        if plan is not None:
            await_mode(step, optimizer._star.core.driver.engine, plan)
        for _ in range(0 if plan is not None else _STEPS_OF_AUTO):
            step()
    warm = max(job.warm, variant.least_warm)
    for _ in range(warm):
        step()
    if variant.longest_warm:
        most = max(0, variant.longest_warm - warm)
        await_trials(step, lambda: _decided(optimizer, variant), hvd.allgather_object, most, job.warm)


def _decided(optimizer: Any, variant: Variant) -> bool:
    """Whether what this rank finds out by trial is known."""
    core = optimizer._star.core
    return bool(core.driver.overlapped.decided if "overlap" in variant.options else core.wire.decided)


def train(variant: Variant, job: Job) -> tuple[dict[str, Any], int]:
    """Train; return the figures of this rank, and its number."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = network_of(job)
    hvd, optimizer = _optimizer(variant, net, job.mode)
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    generator = torch.Generator().manual_seed(int(hvd.rank()))
    x = torch.randn(BATCH, net[0].in_features, generator=generator)
    share = 1.0 / job.layers
    device_time = DeviceTime(fixed_s=job.compute_s, per_sample_s=0.0)
    engine = optimizer._star.core.driver.engine if variant.ours else None
    clock = _Clock(engine, parse_mode(job.mode, int(hvd.size())))

    def step() -> None:
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
        clock.step()

    with LayerClock(net, SleepDevice(), device_time, {layer: share for layer in net}):
        _warm_up(step, hvd, optimizer, variant, job)
        clock.begin()
        for _ in range(job.steps):
            step()
        found = clock.found()
        if variant.longest_warm:
            found["more"]["decided"] = _decided(optimizer, variant)
        if variant.options.get("compression") == "auto":
            found["more"]["explain"] = optimizer._star.core.wire.explain()
        net.state_dict()  # With overlap, completes the last step.
    rank = int(hvd.rank())
    hvd.shutdown()
    return found, rank


def main(argv: Sequence[str]) -> int:
    """Train, and write rank 0's figures."""
    out, variant, job = argv
    found, rank = train(VARIANTS[variant], Job(**json.loads(job)))
    if rank == 0:
        write_json(Path(out), found)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
