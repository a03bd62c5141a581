"""One training on one rank: a Horovod user's training loop, with device time in the network's layers."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from benchmarks.lab.measures import SMOOTHED_EVALUATIONS, accuracies_of
from benchmarks.lab.networks import layer_costs, make_network
from benchmarks.lab.scenarios import FREEZE_EVERY_S, FREEZE_S, Scenario, baseline
from benchmarks.lab.spec import FREE_VARIANTS, PLAIN_VARIANTS, RunRecord, RunSpec
from benchmarks.lab.tasks import FINAL_LEARNING_RATE_FRACTION, SlowSamples, load_task
from benchmarks.lab.waits import set_waits
from benchmarks.machine.accelerator import CPU
from benchmarks.machine.device import Device, LayerClock, make_device
from benchmarks.machine.freezer import Freezer
from benchmarks.machine.killed import Watch, kill_server
from benchmarks.machine.link_rates import ask_for_rate
from benchmarks.machine.quota import CpuQuota

__all__ = ["Job", "Setting", "Snapshots", "bring_into_force", "equal_shares", "make_loader", "train"]

Batches = Iterable[tuple[torch.Tensor, torch.Tensor]]

FORCE_LIMIT_STEPS = 4000
FORCE_STEP_S = 0.005
ORDERS_ARRIVE_S = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all trainings of a rank share.

    Attributes:
        spec: The run's specification.
        train: Training samples.
        hvd: `star_hvd`, or `horovod.torch` where only plain variants run.
        rank: This rank.
        slow: Slowdowns of the variants with a straggler.
        burns: Whether device time uses the CPU instead of sleeping.
        run_dir: Folder of the run.
        place: Device of the tensors.
        on_epoch: Called on rank 0 after every epoch with the epoch's number and its mean loss.
    """

    spec: RunSpec
    train: Dataset[Any]
    hvd: Any
    rank: int
    slow: Scenario
    burns: bool
    run_dir: Path
    on_epoch: Callable[[str, int, int, float], None]
    place: torch.device = CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The differences between plain Horovod and star_hvd in a training script.

    Attributes:
        optimizer: The wrapped optimizer.
        batches: Maps an epoch to this rank's batches.
        global_step: Maps the number of this rank's own batches to the updates applied so far, as far as it knows.
    """

    optimizer: Any
    batches: Callable[[int], Batches]
    global_step: Callable[[int], int]


class Snapshots:
    """Timestamped copies of the parameters, taken by rank 0 only; accuracy is computed after the run."""

    def __init__(self, model: nn.Module, every_steps: int, active: bool) -> None:
        self._model, self._every_steps, self._active = model, every_steps, active
        self._next_step = every_steps
        self._batches: list[int] = []  # At the snapshots of the present epoch: this rank's batches of it.
        self._epochs_steps = 0
        self.times_s: list[float] = []
        self.steps: list[int] = []
        self.vectors: list[np.ndarray] = []

    def maybe_take(self, step: int, time_s: float, batch: int = 0) -> None:
        """Take a snapshot if `step` has reached the next multiple of the interval.

        Args:
            step: Updates of the parameters.
            time_s: Time of the snapshot.
            batch: This rank's batches of the present epoch, for `space_evenly`.
        """
        if self._active and step >= self._next_step:
            self._next_step = (step // self._every_steps + 1) * self._every_steps
            self.take(step, time_s)
            self._batches.append(batch)

    def space_evenly(self, batches: int, epoch_steps: int) -> None:
        """Thin the snapshots of the epoch that has just ended: as many per sample as in a synchronous training.

        An asynchronous step takes fewer samples, so there are more snapshots per epoch, and each would be one more
        chance to reach the target. Of them, those nearest to the places of a synchronous training's are kept.

        Args:
            batches: This rank's batches of the epoch.
            epoch_steps: Steps of an epoch of a synchronous training.
        """
        begin, count = self._epochs_steps, len(self._batches)
        self._epochs_steps += epoch_steps
        if not count:
            return
        at = [begin + epoch_steps * batch / batches for batch in self._batches]
        every = self._every_steps
        places = range(begin - begin % every + every, self._epochs_steps + 1, every)
        kept = sorted({min(range(count), key=lambda index: abs(at[index] - place)) for place in places})
        taken: tuple[list[Any], ...] = (self.times_s, self.steps, self.vectors)
        for values in taken:
            values[-count:] = [values[index - count] for index in kept]
        self._batches.clear()

    def take(self, step: int, time_s: float) -> None:
        """Take a snapshot now."""
        if self._active:
            vector = nn.utils.parameters_to_vector(self._model.parameters())
            self.times_s.append(time_s)
            self.steps.append(step)
            self.vectors.append(vector.detach().cpu().numpy().copy())


def train(setting: Setting, variant: str, seed: int) -> tuple[RunRecord, Snapshots]:
    """Train a new model; timed from a barrier to the end of the last epoch.

    Args:
        setting: Shared by all trainings of this rank.
        variant: One of `ALL_VARIANTS`, or a fixed mode.
        seed: Seed of initialization and sample order.

    Returns:
        The record, complete on rank 0, and the snapshots, empty on other ranks.
    """
    spec, hvd = setting.spec, setting.hvd
    if variant in spec.modes:
        bring_into_force(hvd, _plan(spec, variant), setting.place)
    torch.manual_seed(seed)
    model = make_network(spec.dataset, spec.hidden_units, spec.network).to(setting.place)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=spec.learning_rate, momentum=spec.momentum)
    plain = variant in PLAIN_VARIANTS
    set_waits(plain)
    scenario = setting.slow.without_stragglers() if variant in FREE_VARIANTS else setting.slow
    samples = _samples(setting, scenario)
    make_job = _plain_job if plain else _star_job
    job = make_job(setting, model, optimizer, samples, seed, variant)
    snapshots = Snapshots(model, spec.eval_every_steps, setting.rank == 0)
    record = RunRecord(variant=variant, seed=seed)
    watch = Watch()
    with _limits(setting, scenario), make_clock(setting, model) as clock:
        hvd.barrier()
        start_s, start_monotonic_s = time.perf_counter(), time.monotonic()
        _loop(setting, model, job, scenario, snapshots, record, start_s, watch, clock)
        record.train_s = time.perf_counter() - start_s
    _collect(setting, record, job, plain, watch)
    if not plain:
        _log_accuracies(setting, snapshots, start_monotonic_s)
        _end(hvd, job.optimizer)
    snapshots.take(record.global_steps, record.train_s)
    return record, snapshots


def make_clock(setting: Setting, model: nn.Module, device: Device | None = None) -> LayerClock:
    """Make the clock that spends this rank's device time in the layers of `model`, on `device` if one is given."""
    spec = setting.spec
    sample = setting.train[0][0].unsqueeze(0).to(setting.place)
    device = make_device(spec.device, burns=setting.burns) if device is None else device
    return LayerClock(model, device, spec.device_time, layer_costs(model, sample))


def _samples(setting: Setting, scenario: Scenario) -> Dataset[Any]:
    """Return the training samples, with this rank's loading time in the scenario."""
    sample_s = setting.spec.input_s_per_sample * scenario.input_slowdown(setting.rank)
    return SlowSamples(setting.train, sample_s) if sample_s else setting.train


def make_loader(spec: RunSpec, samples: Dataset[Any], sampler: DistributedSampler[Any] | None) -> DataLoader[Any]:
    """Return a loader as in a typical script; its workers live as long as it does."""
    return DataLoader(
        samples,
        batch_size=spec.batch_samples,
        sampler=sampler,
        shuffle=sampler is None,
        num_workers=spec.workers,
        persistent_workers=spec.workers > 0,
    )


def equal_shares(setting: Setting, samples: Dataset[Any], seed: int) -> Callable[[int], Batches]:
    """Return a function that gives this rank's equal share of each epoch, divided by `DistributedSampler`."""
    size = int(setting.hvd.size())
    sampler: DistributedSampler[Any] = DistributedSampler(
        samples,
        num_replicas=size,
        rank=setting.rank,
        seed=seed,  # type: ignore[arg-type]
    )
    loader = make_loader(setting.spec, samples, sampler)

    def batches(epoch: int) -> Batches:
        sampler.set_epoch(epoch)
        return loader

    return batches


def _plain_job(
    setting: Setting, model: nn.Module, optimizer: torch.optim.Optimizer, samples: Dataset[Any], seed: int, _: str
) -> Job:
    import horovod.torch as hvd

    wrapped = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    batches = equal_shares(setting, samples, seed)
    return Job(optimizer=wrapped, batches=batches, global_step=lambda own_batches: own_batches)


def _star_job(
    setting: Setting,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    samples: Dataset[Any],
    seed: int,
    variant: str,
) -> Job:
    hvd, spec = setting.hvd, setting.spec
    mode: Any = spec.mode
    settings: dict[str, Any] = {"background": True} if spec.background else {}
    if variant in spec.modes:
        mode = _plan(spec, variant)
    elif variant == "drop":
        mode = hvd.Plan.partial(spec.ranks, spec.quorum, max_staleness=0, reason="backup workers")
        settings["max_staleness"] = 0
    options: dict[str, Any] = {"mode": mode, "config": hvd.Config(**settings)}
    if spec.compression != "none":
        options["compression"] = getattr(hvd.Compression, spec.compression)
    if spec.overlap:
        options["overlap"] = True
    if spec.accuracy != "bounded" and variant not in spec.modes and variant != "drop":  # What `auto` may choose.
        options["accuracy"] = spec.accuracy
    wrapped = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **options)
    if spec.feeding_of(variant) == "sampler":
        batches = equal_shares(setting, samples, seed)
    else:
        cut = spec.microbatches > 1 and variant != "drop" and variant not in spec.modes  # Fixed modes do not cut.
        parts = {"microbatches": spec.microbatches} if cut else {}
        loader = hvd.shard(make_loader(spec, samples, None), seed=seed, **parts)
        batches = lambda _: loader  # noqa: E731
    return Job(optimizer=wrapped, batches=batches, global_step=lambda _: int(wrapped.stats()["steps"]))


def _log_accuracies(setting: Setting, snapshots: Snapshots, start_monotonic_s: float) -> None:
    """Write the accuracies to the run log, if there is one, with the times at which their snapshots were taken."""
    from star_hvd.run_log import enabled

    if setting.rank or not enabled():
        return
    spec = setting.spec
    task = load_task(spec.dataset, spec.train_samples)
    found = accuracies_of(snapshots.vectors, spec, task)
    smooth = [statistics.median(found[max(0, end - SMOOTHED_EVALUATIONS) : end]) for end in range(1, len(found) + 1)]
    for step, time_s, value in zip(snapshots.steps, snapshots.times_s, smooth, strict=True):
        setting.hvd.record_metric("accuracy", value, step, monotonic_s=start_monotonic_s + time_s)


def _end(hvd: Any, optimizer: Any) -> None:
    """Shut star_hvd down, so that the next training in this process starts without any of its state.

    A process set added on only some ranks would block all later ones. So the optimizer is closed first, on all ranks,
    and orders still on their way to it get a moment to arrive everywhere.
    """
    from star_hvd.runtime import runtime

    optimizer.close()
    time.sleep(ORDERS_ARRIVE_S)
    hvd.barrier()
    runtime.shutdown()


def _plan(spec: RunSpec, variant: str) -> str:
    return baseline(variant, spec.ranks - spec.quorum)


def bring_into_force(hvd: Any, mode: str, place: torch.device = CPU) -> None:
    """Bring the mode into force with a tiny optimizer: starting server processes takes seconds, once per job.

    `sync`, also with batch shares, does not need this.
    """
    if mode.startswith("sync"):
        return
    model = nn.Linear(4, 1).to(place)
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters(), mode=mode)
    for _ in range(FORCE_LIMIT_STEPS):
        if optimizer.mode != "sync":
            break
        optimizer.zero_grad()
        model(torch.ones(1, 4, device=place)).sum().backward()
        optimizer.step()
        time.sleep(FORCE_STEP_S)
    optimizer.close()


def _limits(setting: Setting, scenario: Scenario) -> contextlib.AbstractContextManager[object]:
    """Return a context that slows this rank by the scenario's means, if that is not a longer device time."""
    spec, slow = setting.spec, scenario.slowdown(setting.rank, 0) > 1.0
    if setting.burns and slow:
        return CpuQuota(spec.quota_cores, spec.quota_period_s)
    if scenario.means == "freeze" and slow:
        return Freezer(FREEZE_S, FREEZE_EVERY_S)
    if scenario.means == "link" and setting.rank == 0:
        return _slow_link(setting, scenario)
    return contextlib.nullcontext()


@contextlib.contextmanager
def _slow_link(setting: Setting, scenario: Scenario) -> Iterator[None]:
    usual = setting.spec.link_bits_per_s
    ask_for_rate(setting.run_dir, usual / scenario.slowdown(scenario.ranks - 1, 0))
    try:
        yield
    finally:
        ask_for_rate(setting.run_dir, usual)


def _loop(
    setting: Setting,
    model: nn.Module,
    job: Job,
    scenario: Scenario,
    snapshots: Snapshots,
    record: RunRecord,
    start_s: float,
    watch: Watch,
    clock: LayerClock,
) -> None:
    spec, hvd, optimizer = setting.spec, setting.hvd, job.optimizer
    decay = torch.optim.lr_scheduler.LinearLR(
        optimizer, 1.0, FINAL_LEARNING_RATE_FRACTION, total_iters=max(1, spec.epochs - 1)
    )
    own_batches, kill_at = 0, _kill_at(spec, scenario)
    for epoch in range(spec.epochs):
        losses: list[float] = []
        for x, y in job.batches(epoch):
            clock.slowdown = scenario.device_slowdown(setting.rank, job.global_step(own_batches))
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x.to(setting.place)), y.to(setting.place))
            loss.backward()
            optimizer.step()
            own_batches += 1
            watch.step(job.global_step(own_batches))
            if own_batches == kill_at:
                watch.begin()
                watch.killed = kill_server()
            losses.append(loss.item())
            snapshots.maybe_take(job.global_step(own_batches), time.perf_counter() - start_s, len(losses))
        snapshots.space_evenly(len(losses), spec.steps // spec.epochs)
        decay.step()
        mean_loss = float(hvd.allreduce(torch.tensor([sum(losses) / max(1, len(losses))]), name="epoch_loss"))
        record.epoch_losses.append(mean_loss)
        if setting.rank == 0:
            setting.on_epoch(record.variant, record.seed, epoch + 1, mean_loss)
    record.global_steps = job.global_step(own_batches)
    record.rank_batches = [own_batches]


def _kill_at(spec: RunSpec, scenario: Scenario) -> int:
    """Return the batch after which a rank's server is killed, 0 for none: in the middle of the run."""
    if scenario.name != "killed-server":
        return 0
    return max(1, spec.steps // 2)


def _collect(setting: Setting, record: RunRecord, job: Job, plain: bool, watch: Watch) -> None:
    """Gather the counters of all ranks into rank 0's record."""
    stats = {} if plain else dict(job.optimizer.stats())
    cost = (watch.killed, watch.recovery_s, watch.lost_steps)
    gathered = setting.hvd.allgather_object((record.rank_batches[0], stats, cost), name="lab_stats")
    record.rank_batches = [batches for batches, _, _ in gathered]
    record.killed = sum(killed for _, _, (killed, _, _) in gathered)
    record.recovery_s = max(time_s for _, _, (_, time_s, _) in gathered)
    record.lost_steps = max(steps for _, _, (_, _, steps) in gathered)
    if plain:
        return
    record.stats = [each for _, each, _ in gathered]
    record.folds = sum(int(each["folds"]) for each in record.stats)
    record.drops = sum(int(each["drops"]) for each in record.stats)
    record.max_staleness = max(int(each["max_staleness"]) for each in record.stats)
    record.global_steps = max(int(each["steps"]) for each in record.stats)
    if setting.rank == 0:
        record.report = setting.hvd.report().to_dict()
        record.timeline = list(job.optimizer.timeline())
