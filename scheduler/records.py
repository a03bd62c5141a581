"""The records that rooms exchange: step reports, rank states and windows; plans are in `plans.py`.

Everything here is frozen data without behaviour beyond validation, so the same records serve the live job, the
simulator and the tests. Times are seconds on the clock of whoever wrote the record; only differences are meaningful.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler.mode_names import parse_mode
from scheduler.plans import MODES, Plan, PlanError

__all__ = ["MODES", "Plan", "PlanError", "RankStats", "StepReport", "Window", "parse_mode"]


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
        link_bytes_per_s: Measured rate of the rank's link, NaN where unknown.
        comm_s: Recent times inside a step's communication that were not waiting for other ranks, oldest first.
        silent_s: Time since the rank was last heard of; 0 for a rank that finished or is away with leave.
    """

    rank: int
    compute_s: tuple[float, ...]
    steps: tuple[int, ...]
    input_share: float = 0.0
    starved_share: float = 0.0
    late_share: float = 0.0
    link_bytes_per_s: float = float("nan")
    comm_s: tuple[float, ...] = ()
    silent_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Recent reports of all ranks: the whole input of a decision.

    Attributes:
        step: Global step at the end of the window.
        ranks: One entry per rank, in order; a rank that reported nothing has empty tuples.
        noise_scale: Gradient noise scale in units of samples or of reference batches, NaN where unknown.
        comm_bytes: Gradient bytes a rank reduces per step, 0 where unknown.
        allowed: Modes this job can run now; no other is chosen.
        losses: Training losses of late, averaged over the ranks, oldest first; empty where the user tells none.
        loss_steps: The global steps they belong to, same length.
    """

    step: int
    ranks: tuple[RankStats, ...] = field(default_factory=tuple)
    noise_scale: float = float("nan")
    comm_bytes: int = 0
    allowed: frozenset[str] = frozenset(MODES)
    losses: tuple[float, ...] = ()
    loss_steps: tuple[int, ...] = ()

    @property
    def world_size(self) -> int:
        return len(self.ranks)
