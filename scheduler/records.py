"""The records that rooms exchange: plans, step reports, rank states and windows.

Everything here is frozen data without behaviour beyond validation, so the same records serve the live job, the
simulator and the tests. Times are seconds on the clock of whoever wrote the record; only differences are meaningful.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

__all__ = ["MODES", "Plan", "PlanError", "RankStats", "StepReport", "Window", "parse_mode"]

MODES = ("sync", "partial")


class PlanError(ValueError):
    """A plan that cannot be carried out; the message says what was got, what was expected and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How the ranks synchronize, from one step on until the next plan.

    A plan is published by the coordinator, prepared by every rank and taken up by all of them at the same step.

    Attributes:
        mode: One of `MODES`.
        world_size: Number of ranks the plan was made for.
        quorum: Number of fresh gradients a step waits for (m of n). Always `world_size` in `sync`.
        epoch: Position in the sequence of published plans; a rank refuses a plan older than the one it has.
        damping: Weight of a late gradient: `inverse` divides it by 1 + staleness (DynSGD, Jiang et al. 2017),
            `none` keeps it whole.
        max_staleness: Late gradients staler than this many steps are dropped and counted.
        reason: One sentence a person can read.
    """

    mode: str
    world_size: int
    quorum: int
    epoch: int = 0
    damping: str = "inverse"
    max_staleness: int = 16
    reason: str = ""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise PlanError(f"plan mode is {self.mode!r}; expected one of {', '.join(MODES)}")
        for name in ("world_size", "quorum", "epoch", "max_staleness"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise PlanError(f"plan field {name} is {value!r}; expected an integer")
        if self.world_size < 1:
            raise PlanError(f"plan world_size is {self.world_size}; expected at least 1")
        if not 1 <= self.quorum <= self.world_size:
            raise PlanError(
                f"plan quorum m is {self.quorum}; expected 1 <= m <= {self.world_size} (the number of ranks)"
            )
        if self.mode == "sync" and self.quorum != self.world_size:
            raise PlanError(
                f"plan quorum is {self.quorum} in mode sync; expected {self.world_size}: use mode partial"
            )
        if self.epoch < 0:
            raise PlanError(f"plan epoch is {self.epoch}; expected 0 or more")
        if self.damping not in ("inverse", "none"):
            raise PlanError(f"plan damping is {self.damping!r}; expected 'inverse' or 'none'")
        if self.max_staleness < 0:
            raise PlanError(f"plan max_staleness is {self.max_staleness}; expected 0 or more")
        if not isinstance(self.reason, str):
            raise PlanError(f"plan reason is {self.reason!r}; expected a string")

    @classmethod
    def sync(cls, world_size: int, **fields: Any) -> Plan:
        """The plan in which every step waits for all ranks."""
        return cls(mode="sync", world_size=world_size, quorum=world_size, **fields)

    @classmethod
    def partial(cls, world_size: int, quorum: int, **fields: Any) -> Plan:
        """The plan in which a step waits for `quorum` of `world_size` ranks and folds the late gradients."""
        return cls(mode="partial", world_size=world_size, quorum=quorum, **fields)

    @property
    def relaxed(self) -> bool:
        """Whether a step may close without every rank."""
        return self.quorum < self.world_size

    @property
    def label(self) -> str:
        """Short name for tables and logs, `partial(3)` for example."""
        return self.mode if self.mode == "sync" else f"{self.mode}({self.quorum})"

    def replace(self, **changes: Any) -> Plan:
        """A copy with `changes`, validated again."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for the wire and for logs."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Plan:
        """The inverse of `to_dict`.

        Raises:
            PlanError: A field is missing, unknown or out of range.
        """
        if not isinstance(values, dict):
            raise PlanError(f"a plan came as {type(values).__name__}; expected a mapping")
        known = {item.name for item in dataclasses.fields(cls)}
        unknown = sorted(set(map(str, values)) - known)
        if unknown:
            raise PlanError(f"plan has unknown fields {unknown}; expected some of {sorted(known)}")
        missing = sorted({"mode", "world_size", "quorum"} - set(values))
        if missing:
            raise PlanError(f"plan lacks the fields {missing}")
        return cls(**values)


def parse_mode(mode: str | Plan, world_size: int, **fields: Any) -> Plan | None:
    """Turn what the user wrote into a plan; `None` stands for `auto`.

    Args:
        mode: `auto`, `sync`, `partial` (one rank may be late), `partial(m)`, or a `Plan`.
        world_size: Number of ranks in this job.
        fields: Further fields of a plan made from a name, `damping` for example; a `Plan` has its own.

    Raises:
        PlanError: Unknown mode, m outside 1..n, or a plan made for another world size.
    """
    if isinstance(mode, Plan):
        if mode.world_size != world_size:
            raise PlanError(
                f"the plan is for {mode.world_size} ranks but this job has {world_size}; "
                "make it with Plan.sync(hvd.size()) or Plan.partial(hvd.size(), m)"
            )
        return mode
    if not isinstance(mode, str):
        raise PlanError(f"mode is {mode!r}; expected 'auto', 'sync', 'partial', 'partial(m)' or a Plan")
    text = mode.strip().lower()
    if text == "auto":
        return None
    if text == "sync":
        return Plan.sync(world_size, reason="asked for by the user", **fields)
    if text == "partial":
        return Plan.partial(world_size, max(1, world_size - 1), reason="asked for by the user", **fields)
    if text.startswith("partial(") and text.endswith(")"):
        inside = text[len("partial(") : -1]
        try:
            quorum = int(inside)
        except ValueError:
            raise PlanError(f"mode is {mode!r}; expected a whole number m in 'partial(m)'") from None
        return Plan.partial(world_size, quorum, reason="asked for by the user", **fields)
    raise PlanError(f"mode is {mode!r}; expected 'auto', 'sync', 'partial', 'partial(m)' or a Plan")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one rank measured around one gradient of its own.

    Attributes:
        rank: The reporting rank.
        step: Global step the gradient was computed for (the version of the parameters it used).
        compute_s: From the end of the previous step to the moment all gradients were ready, without time spent
            in the user's own collectives. Taken before the collective, so waiting ranks do not look busy.
        wait_s: From that moment to the end of the step's reduction. The rank with the least wait is the slowest.
        input_s: Part of `compute_s` spent waiting for data.
        cpu_s: CPU time of the training thread inside `compute_s`.
        runqueue_s: Time the training thread was runnable but not running (Linux schedstat), 0 where unknown.
        late: Whether the gradient missed its step.
        samples: Samples behind the gradient, 0 where unknown.
        loss: Loss of the batch where the user told it, else NaN.
    """

    rank: int
    step: int
    compute_s: float
    wait_s: float = 0.0
    input_s: float = 0.0
    cpu_s: float = 0.0
    runqueue_s: float = 0.0
    late: bool = False
    samples: float = 0.0
    loss: float = float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStats:
    """A rank's recent behaviour inside a window.

    Attributes:
        rank: The rank.
        compute_s: Recent compute times, oldest first.
        steps: The global steps those times belong to, same length.
        input_share: Part of the compute time spent waiting for data, 0 to 1.
        starved_share: Part of the compute time the training thread was runnable but not running, 0 to 1.
        late_share: Part of the recent gradients that missed their step.
    """

    rank: int
    compute_s: tuple[float, ...]
    steps: tuple[int, ...]
    input_share: float = 0.0
    starved_share: float = 0.0
    late_share: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Recent reports of all ranks: the whole input of a decision.

    Attributes:
        step: Global step at the end of the window.
        ranks: One entry per rank, in order; a rank that reported nothing has empty tuples.
        noise_scale: Gradient noise scale in units of samples or of reference batches, NaN where unknown.
    """

    step: int
    ranks: tuple[RankStats, ...] = field(default_factory=tuple)
    noise_scale: float = float("nan")

    @property
    def world_size(self) -> int:
        return len(self.ranks)
