"""The specification of a laboratory run (`RunSpec`) and the result of each training (`RunRecord`)."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.machine.device import DeviceTime

__all__ = [
    "ALL_VARIANTS",
    "FEEDINGS",
    "FREE_VARIANTS",
    "PLAIN_VARIANTS",
    "RunRecord",
    "RunSpec",
    "write_json",
]

PLAIN_VARIANTS = ("straggler_free", "plain")
FREE_VARIANTS = ("straggler_free", "star_free")
FEEDINGS = ("shard", "sampler")
ALL_VARIANTS = (*PLAIN_VARIANTS, "drop", "star", "star_free")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """Everything the workers need; the driver writes it to `spec.json` in the run's folder.

    Attributes:
        scenario: Name of the scenario.
        rows: Slowdown factors, shape (n_steps, n_ranks), repeating.
        ranks: Number of ranks.
        variants: What to train, a subset of `ALL_VARIANTS`.
        modes: Fixed modes of star_hvd to train as well, in the form that `parse_mode` takes.
        seeds: Every variant is trained once per seed.
        dataset: Name of the data set.
        train_samples: Number of training samples.
        epochs: How often all ranks meet, average the loss, and lower the learning rate; the same for every variant.
        passes: Passes over the training samples in an epoch.
        batch_samples: Samples a rank takes per step.
        learning_rate: Learning rate of the first epoch.
        momentum: Momentum of SGD.
        device_s: Device time of a full batch at normal speed, in addition to the network's own, in seconds.
        device_fixed_s: Part of it that every forward and backward pass needs, however small its batch.
        device: `cpu`, where device time is emulated, or `cuda`, where network and device time use a real device.
        eval_every_steps: Global steps between two snapshots.
        mode: Mode of the `star` variant.
        quorum: The m of the `drop` variant's `partial(m)`.
        quota_cores: Share of a core the slow rank may use in scenario `quota`, 0 in all others.
        quota_period_s: Accounting period of that quota.
        network: The trained network, one of `NETWORKS`.
        hidden_units: Width of its hidden layers, if it is a small one.
        input_s_per_sample: Time to load one sample, spent asleep in the loading process or thread.
        workers: Processes of each rank's `DataLoader` that load samples, 0 for the training thread.
        feeding: `shard` if star_hvd's optimizers are fed by `hvd.shard`, `sampler` if by the same
            `DistributedSampler` as plain Horovod's.
        microbatches: Parts into which `hvd.shard` cuts a batch, so that ranks can take over each other's.
        accuracy: `exact` if star_hvd may choose only modes mathematically equal to plain Horovod, `bounded` for its
            default.
        compression: Name of star_hvd's compression in `hvd.Compression`.
        background: Whether star_hvd sends behind compute (`Config.background`).
        overlap: Whether star_hvd applies updates as gradients arrive.
        link_bits_per_s: Rate of a normal host's link in scenario `slow-link`, 0 in all others.
    """

    scenario: str
    rows: tuple[tuple[float, ...], ...]
    ranks: int
    variants: tuple[str, ...]
    seeds: tuple[int, ...]
    dataset: str
    train_samples: int
    epochs: int
    batch_samples: int
    learning_rate: float
    momentum: float
    device_s: float
    eval_every_steps: int
    mode: str = "auto"
    quorum: int = 1
    quota_cores: float = 0.0
    quota_period_s: float = 0.1
    modes: tuple[str, ...] = ()
    hidden_units: int = 32
    link_bits_per_s: float = 0.0
    passes: int = 1
    device: str = "cpu"
    device_fixed_s: float = 0.0
    network: str = "usual"
    input_s_per_sample: float = 0.0
    workers: int = 0
    feeding: str = "shard"
    microbatches: int = 1
    accuracy: str = "bounded"
    compression: str = "none"
    background: bool = False
    overlap: bool = False

    @property
    def device_time(self) -> DeviceTime:
        """Return the device time of a step as a function of its batch."""
        per_sample_s = (self.device_s - self.device_fixed_s) / self.batch_samples
        return DeviceTime(fixed_s=self.device_fixed_s, per_sample_s=per_sample_s)

    def feeding_of(self, name: str) -> str:
        """Return what feeds a variant or mode: `sampler`, an equal share per rank, or `shard`, the work queue."""
        return "sampler" if name in PLAIN_VARIANTS else self.feeding

    @property
    def steps(self) -> int:
        """Return the number of steps of a synchronous training."""
        return self.epochs * self.passes * -(-self.train_samples // (self.batch_samples * self.ranks))

    @property
    def trained(self) -> tuple[str, ...]:
        """Return all names that are trained once per seed: variants and modes."""
        return (*self.variants, *self.modes)

    @classmethod
    def read(cls, path: Path) -> RunSpec:
        """Read a specification that `write_json(path, dataclasses.asdict(spec))` wrote."""
        values = json.loads(path.read_text(encoding="utf-8"))
        values["rows"] = tuple(tuple(row) for row in values["rows"])
        for name in ("variants", "seeds", "modes"):
            values[name] = tuple(values[name])
        return cls(**values)


@dataclass(slots=True, kw_only=True)
class RunRecord:
    """One training of one variant with one seed, written by rank 0; the snapshots are stored beside it as .npz.

    Attributes:
        variant: One of `ALL_VARIANTS`, or a fixed mode.
        seed: Seed of initialization and sample order.
        train_s: From the barrier at the start to the end of the last epoch on rank 0.
        global_steps: Updates of the parameters.
        epoch_losses: Mean training loss per epoch over all ranks.
        rank_batches: Batches each rank computed, in rank order.
        folds: Late gradients folded into a later step, all ranks; None if not measured.
        drops: Late gradients dropped, all ranks; None if not measured.
        max_staleness: Largest staleness of a folded gradient; None if not measured.
        stats: star_hvd's counters of every rank.
        report: `hvd.report().to_dict()` of rank 0.
        timeline: One entry per global step: step, time_s, members, mode.
        killed: Number of processes killed during the training.
        recovery_s: Longest time between two steps of a surviving rank after the kill; 0 if nothing was killed.
        rebuild_s: Time from the last step of the old world to the first of the new one (elastic).
        lost_steps: Steps that were lost or had to be repeated because of a kill.
        failed_attempts: Jobs of this training that failed before (elastic); filled in after the run.
        times_s, steps, accuracies: The accuracy curve; accuracies are filled in after the run.
    """

    variant: str
    seed: int
    train_s: float = 0.0
    global_steps: int = 0
    epoch_losses: list[float] = field(default_factory=list)
    rank_batches: list[int] = field(default_factory=list)
    folds: int | None = 0
    drops: int | None = 0
    max_staleness: int | None = 0
    stats: list[dict[str, Any]] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict)
    timeline: list[dict[str, Any]] = field(default_factory=list)
    killed: int = 0
    recovery_s: float = 0.0
    rebuild_s: float = 0.0
    lost_steps: int = 0
    failed_attempts: int = 0
    times_s: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)

    @property
    def stem(self) -> str:
        """Return the file name without suffix."""
        return f"seed{self.seed}-{self.variant}"

    def to_dict(self) -> dict[str, Any]:
        """Return the record as plain values."""
        return dataclasses.asdict(self)


def write_json(path: Path, value: Any) -> None:
    """Write `value` atomically: a reader sees the old file or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            json.dump(value, stream, indent=1, default=str)
            stream.write("\n")
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
