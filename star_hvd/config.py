"""All tuning values in one frozen record, each with its unit, its default and the origin of the default."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

__all__ = ["OWN_SETTINGS", "Config"]

OWN_SETTINGS = frozenset(
    {"bucket_bytes", "damping", "max_staleness", "noise_interval_steps", "replay_queue", "replica_mismatch"}
)
"""What each optimizer takes from its own `Config`; the rest is the whole job's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Settings of `star_hvd.DistributedOptimizer`, `shard` and `work`; every rank must use the same.

    `bucket_bytes`, `damping`, `max_staleness`, `noise_interval_steps`, `replay_queue` and `replica_mismatch` are each
    optimizer's own. All others are the whole job's: the first loader, `work` or optimizer of the job sets them, by its
    `config` or with the defaults, and a later `config` that differs in them is named in a warning. So give the same
    `config` to all of them. In an elastic job a loader counts from its first iteration.

    Deadlines have to be finite and more than 0, which does not mean "unlimited". A rank is heard once in `heartbeat_s`,
    so `absent_after_s` and `lost_after_s` have to be at least 3 times as long.

    Attributes:
        bucket_bytes: Size of a flat gradient buffer. 25 MiB as in PyTorch DDP: large enough to amortize a
            collective, small enough to overlap with backward.
        reference_samples: Samples, or what `hvd.weigh` counts, that make a weight of 1 in a reduction. 0 takes the size
            of `shard`'s first batch. Only float16 needs another value, see `hvd.weigh`.
        policy: The policy of mode `auto`: `learned` (a trained predictor of time to accuracy, or the cost model where
            no predictor fits), `cost` (the cost model alone) or `rule` (thresholds).
        background: Whether the averaging of `local` overlaps with compute, parameters from servers arrive during the
            next forward pass, and a rank outside a `subgroup` sends its gradients behind compute and does not wait for
            its parent. With None, `auto` uses it where it predicts shorter steps, never for `subgroup`, and a mode
            named by the user only with its argument `background`. Pushes to servers start within backward unless it is
            False.
        least_quorum: Smallest fraction of the ranks that `auto` may choose as a quorum.
        damping: `inverse` weighs a late gradient by 1 / (1 + staleness) (DynSGD); `none` by 1.
        max_staleness: Late gradients older than this many steps are dropped and counted.
        grace_fraction: The grace is at least this fraction of the usual compute time of a step. Measured: with 0.0,
            ranks of equal speed miss 10 to 20 % of their steps because of milliseconds of jitter.
        grace_mads: The grace also covers the median arrival offset plus this many median absolute deviations.
        quorum_deadline_s: After this, a relaxed step without its quorum closes with the gradients that are present; in
            a program with several optimizers as soon as all missing ranks should have arrived, if that is earlier.
        step_deadline_s: A reduction that takes longer than this ends the job with an error naming the missing
            ranks. Long, because a user may evaluate on one rank while the others wait, as with plain Horovod.
        shutdown_deadline_s: How long a finished rank contributes to the others' steps before it exits.
        control_deadline_s: Longest wait for an answer from the coordinator.
        heartbeat_s: Interval of every rank's heartbeat.
        lost_after_s: A rank silent for this long counts as lost.
        plan_deadline_s: A plan that not all ranks have prepared after this is abandoned; so is a prepared one that is
            not active this long after the steps that it needs.
        max_batch: Maximum samples of a rank in a batch under `sync(balanced)`; 0 for as many as fit in memory. Also the
            maximum in a pass under `sync(steal)`, raised to a micro-batch if smaller; 0 for two batches of the loader,
            or as many of those samples as fit in memory.
        min_batch: Minimum samples of a rank in a batch under `sync(balanced)`, at most the loader's batch size. 0 for 2
            if the network has layers of batch normalization with weights, which fail with one sample, else 1.
        decide_interval_s: Interval of the windows on which `auto` decides.
        noise_interval_steps: Steps between two measurements of the gradient norms for the noise scale.
        replay_queue: Closed steps queued for a rank that is inside `step()`, before the job waits for it.
        replica_mismatch: What to do if the ranks' parameters differ after a switch of modes: `log` an error, or
            `raise` `ReplicaMismatchError` on all ranks. GPUs of different kinds may differ in the last bit.
        encryption: `network` encrypts connections between hosts; if all ranks share one host, tensors and parameter
            servers use unencrypted Unix sockets that only this user can open. `all` encrypts those too. Control is
            always encrypted. Measured on one host: an exchange of 100 MB with a server takes 2.5 to 5 times as long
            encrypted, and 1.2 ms of a core per MB at each end, without more protection than the sockets' permissions.
        chunk_bytes: Size of a tensor message, at most 4 MiB. 1 MiB: 40 MB messages were 4 times slower than 4 MB ones.
        server_chunk_bytes: Size of a chunk: the unit of a parameter server's messages and updates.
        absent_after_s: Parameter servers do not wait for a rank that has been silent for this long.
        late_bytes_per_s: Rate at which a rank outside a subgroup sends late gradients; 0 to stay below its link's rate.
        report_interval_s: Interval between rank 0's warnings about a rank that stays slow.
        stall_warning_s: A step that waits longer than this for ranks is logged with their numbers.
    """

    bucket_bytes: int = 25 * 1024 * 1024
    reference_samples: int = 0
    policy: str = "learned"
    background: bool | None = None
    least_quorum: float = 0.5
    damping: str = "inverse"
    max_staleness: int = 16
    grace_fraction: float = 0.25
    grace_mads: float = 4.0
    quorum_deadline_s: float = 60.0
    step_deadline_s: float = 1800.0
    shutdown_deadline_s: float = 1800.0
    control_deadline_s: float = 60.0
    heartbeat_s: float = 0.5
    lost_after_s: float = 10.0
    plan_deadline_s: float = 60.0
    max_batch: int = 0
    min_batch: int = 0
    decide_interval_s: float = 0.1
    noise_interval_steps: int = 8
    replay_queue: int = 8
    replica_mismatch: str = "log"
    encryption: str = "network"
    chunk_bytes: int = 1024 * 1024
    server_chunk_bytes: int = 1024 * 1024
    absent_after_s: float = 3.0
    late_bytes_per_s: float = 0.0
    report_interval_s: float = 30.0
    stall_warning_s: float = 10.0

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if item.name in _CHOICES:
                known = _CHOICES[item.name]
                if value not in known:
                    raise ValueError(f"config {item.name} is {value!r}; expected one of {', '.join(known)}")
                continue
            if item.type == "bool | None":
                if value is not None and not isinstance(value, bool):
                    raise ValueError(f"config {item.name} is {value!r}; expected True or False, or None")
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ValueError(f"config {item.name} is {value!r}; expected a number")
            if item.type == "int" and not isinstance(value, int):
                raise ValueError(f"config {item.name} is {value!r}; expected a whole number")
            minimum = _MINIMUM.get(item.name, 0.0)
            if not minimum <= value < float("inf"):
                raise ValueError(f"config {item.name} is {value!r}; expected a finite number of at least {minimum}")
        if self.chunk_bytes > _MAX_CHUNK_BYTES:
            limit = f"{_MAX_CHUNK_BYTES}, the largest message of a socket"
            raise ValueError(f"config chunk_bytes is {self.chunk_bytes}; expected at most {limit}")
        if 0 < self.max_batch < self.min_batch:
            raise ValueError(
                f"config min_batch is {self.min_batch} and max_batch {self.max_batch}; expected min_batch to be at "
                "most max_batch, or max_batch to be 0, for no limit"
            )
        for name in ("absent_after_s", "lost_after_s"):
            silence_s = getattr(self, name)
            if silence_s < _LEAST_HEARTBEATS * self.heartbeat_s * (1.0 - 1e-9):  # 3 times 0.1 is more than 0.3.
                raise ValueError(
                    f"config {name} is {silence_s} and heartbeat_s {self.heartbeat_s}; expected {name} to be at least "
                    f"{_LEAST_HEARTBEATS} times heartbeat_s, else ranks would count as gone between two heartbeats"
                )
        if self.least_quorum > 1.0:
            raise ValueError(f"config least_quorum is {self.least_quorum}; expected a part of the ranks, at most 1")


_MAX_CHUNK_BYTES = 4 * 1024 * 1024
_LEAST_HEARTBEATS = 3  # In a silence after which a rank counts as absent: one may be late, and one lost.

_CHOICES = {
    "policy": ("learned", "cost", "rule"),
    "damping": ("inverse", "none"),
    "replica_mismatch": ("log", "raise"),
    "encryption": ("all", "network"),
}

_MINIMUM = {
    "least_quorum": 0.01,
    "bucket_bytes": 1024,
    "chunk_bytes": 1024,
    "server_chunk_bytes": 1024,
    "absent_after_s": 0.1,
    "replay_queue": 1,
    "noise_interval_steps": 1,
    "quorum_deadline_s": 0.01,
    "step_deadline_s": 0.1,
    "shutdown_deadline_s": 0.1,
    "control_deadline_s": 0.1,
    "plan_deadline_s": 0.1,
    "heartbeat_s": 0.01,
    "lost_after_s": 0.1,
    "decide_interval_s": 0.01,
}
