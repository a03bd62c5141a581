"""The input records of decisions: step reports, rank statistics and windows; plans are in `scheduler.plan.plan`.

Frozen data without behaviour beyond validation, shared by live jobs, the simulator and tests. Times are seconds on the
clock of the process that wrote the record; only differences are meaningful.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from scheduler.plan.headroom import Headroom
from scheduler.plan.mode_names import parse_mode
from scheduler.plan.plan import MODES, Plan, PlanError

__all__ = [
    "MODES",
    "Plan",
    "PlanError",
    "RankStats",
    "RankTable",
    "StepReport",
    "StepTimes",
    "Window",
    "parse_mode",
]

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One rank's own work for one gradient, in seconds.

    Attributes:
        compute_s: From the end of the previous step to the moment all gradients were ready, without time spent
            in the user's own collectives. Taken before the collective, so waiting ranks do not look busy.
        input_s: Part of `compute_s` spent waiting for data.
        cpu_s: CPU time of the training thread inside `compute_s`.
        runqueue_s: Time the training thread was runnable but not running (Linux schedstat), 0 where unknown.
        load_s: Least time in which the rank's loading workers can load the batch, 0 where unknown. Where it is longer
            than `compute_s`, waits for other ranks hide it.
    """

    compute_s: float
    input_s: float = 0.0
    cpu_s: float = 0.0
    runqueue_s: float = 0.0
    load_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Measurements of one rank for one of its gradients.

    Attributes:
        rank: The reporting rank.
        step: Global step the gradient was computed for.
        times: The rank's own work.
        wait_s: From the end of that work to the end of the step's reduction. The rank with the shortest wait is the
            slowest.
        late: Whether the gradient missed its step.
        samples: Samples behind the gradient, 0 if unknown.
        loss: Loss of the batch if the user reported it, else NaN.
    """

    rank: int
    step: int
    times: StepTimes
    wait_s: float = 0.0
    late: bool = False
    samples: float = 0.0
    loss: float = float("nan")

    def as_record(self) -> dict[str, Any]:
        """The report as a run log stores it: flat, the rank's own times first, then its wait."""
        times = self.times
        return {
            "rank": self.rank,
            "step": self.step,
            "compute_s": times.compute_s,
            "wait_s": self.wait_s,
            "input_s": times.input_s,
            "cpu_s": times.cpu_s,
            "runqueue_s": times.runqueue_s,
            "load_s": times.load_s,
            "late": self.late,
            "samples": self.samples,
            "loss": self.loss,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStats:
    """A rank's recent reports in a window.

    Attributes:
        rank: The rank.
        compute_s: Recent compute times, oldest first.
        steps: The global steps those times belong to, same length.
        input_share: Share of the compute time spent waiting for data, 0 to 1.
        starved_share: Share of the compute time the training thread was runnable but not running, 0 to 1.
        late_share: Share of the recent gradients that missed their step.
        link_bytes_per_s: Measured rate of the rank's link, NaN if unknown.
        comm_s: Recent communication times of steps, without waiting for other ranks, oldest first.
        silent_s: Time since the rank's last message; 0 for a rank that finished or is inactive.
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankTable(Sequence[RankStats]):
    """The `RankStats` of all ranks as arrays; records are created on access.

    With a thousand ranks, creating and reading their tuples would take longer than the decision. The arrays are
    read-only by convention.

    Attributes:
        compute_s: Shape (n_ranks, n_reports), newest last; with fewer reports only a rank's last columns are filled.
        steps: Same shape.
        counts: Reports of every rank, shape (n_ranks,).
        input_share: Shape (n_ranks,), as the others below; all as in `RankStats`.
        comm_s: One tuple for each rank.
    """

    compute_s: _Floats
    steps: _Ints
    counts: _Ints
    input_share: _Floats
    starved_share: _Floats
    late_share: _Floats
    link_bytes_per_s: _Floats
    silent_s: _Floats
    comm_s: Sequence[tuple[float, ...]]

    @classmethod
    def of(cls, ranks: Sequence[RankStats]) -> RankTable:
        """Convert records.

        Raises:
            ValueError: A rank has different numbers of steps and times.
        """
        counts = [len(stats.compute_s) for stats in ranks]
        for stats, count in zip(ranks, counts, strict=True):
            if len(stats.steps) != count:
                raise ValueError(
                    f"rank {stats.rank} has {len(stats.steps)} steps and {count} times; expected one time for each step"
                )
        n, width = len(counts), max(counts, default=0)
        if min(counts, default=0) == width:
            times = np.array([stats.compute_s for stats in ranks], dtype=np.float64).reshape(n, width)
            steps = np.array([stats.steps for stats in ranks], dtype=np.int64).reshape(n, width)
        else:
            times, steps = np.zeros((n, width)), np.zeros((n, width), dtype=np.int64)
            for row, stats in enumerate(ranks):
                if stats.steps:
                    times[row, width - counts[row] :] = stats.compute_s
                    steps[row, width - counts[row] :] = stats.steps
        return cls(
            compute_s=times,
            steps=steps,
            counts=np.array(counts, dtype=np.int64),
            input_share=np.array([stats.input_share for stats in ranks], dtype=np.float64),
            starved_share=np.array([stats.starved_share for stats in ranks], dtype=np.float64),
            late_share=np.array([stats.late_share for stats in ranks], dtype=np.float64),
            link_bytes_per_s=np.array([stats.link_bytes_per_s for stats in ranks], dtype=np.float64),
            silent_s=np.array([stats.silent_s for stats in ranks], dtype=np.float64),
            comm_s=[stats.comm_s for stats in ranks],
        )

    @overload
    def __getitem__(self, rank: int) -> RankStats: ...

    @overload
    def __getitem__(self, rank: slice) -> Sequence[RankStats]: ...

    def __getitem__(self, rank: int | slice) -> Any:
        if isinstance(rank, slice):
            return tuple(self[index] for index in range(*rank.indices(len(self))))
        rank = range(len(self))[rank]
        known = slice(self.compute_s.shape[1] - int(self.counts[rank]), None)
        return RankStats(
            rank=rank,
            compute_s=tuple(self.compute_s[rank, known].tolist()),
            steps=tuple(self.steps[rank, known].tolist()),
            input_share=float(self.input_share[rank]),
            starved_share=float(self.starved_share[rank]),
            late_share=float(self.late_share[rank]),
            link_bytes_per_s=float(self.link_bytes_per_s[rank]),
            comm_s=self.comm_s[rank],
            silent_s=float(self.silent_s[rank]),
        )

    def __len__(self) -> int:
        return len(self.counts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (RankTable, tuple)) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Recent reports of all ranks: the input of a decision.

    Attributes:
        step: Global step at the end of the window.
        ranks: One entry per rank, in order; a rank without reports has empty tuples. A tuple or a `RankTable`.
        noise_scale: Gradient noise scale in usual gradients of one rank, NaN if unknown.
        comm_bytes: Gradient bytes a rank reduces per step, 0 if unknown.
        edge_part: Fraction of those bytes in the bucket that backward fills last and forward needs first; 1 if buckets
            travel together.
        reduced_part: Fraction of those bytes that a reduction sends, below 1 with compression.
        pushed_part: The same for a push to a server or another rank, in the smallest form that the user allows.
        allowed: Modes that a new plan may have now.
        blocked: Modes of which a new plan could not be prepared recently; an active plan of such a mode can go on.
        losses: Recent training losses, averaged over the ranks, oldest first; empty if the user reports none.
        loss_steps: The global steps they belong to, same length.
        batch: Samples of a rank's batch if `shard` feeds the ranks and all batches are equal; 0 without `shard`. Times
            refer to such a batch, whatever the batch shares were.
        fixed_part: Fraction of such a time that does not depend on the batch size, NaN before any change of size.
        microbatches: Micro-batches of a rank in a step if `shard` cuts the batches; else 0.
        headroom: Unused capacity of every rank's host; empty if unknown.
        now_s: When the window was made, seconds on the clock of its process; NaN if unknown.
        pause_s: Longest time since the window before in which no rank reported or waited for others, as in an
            evaluation.
        counts_local: Whether `step` and the steps of reports count those between two averagings of `local` one by one,
            as the simulator does. In a job an averaging is a step.
    """

    step: int
    ranks: Sequence[RankStats] = field(default_factory=tuple)
    noise_scale: float = float("nan")
    comm_bytes: int = 0
    edge_part: float = 0.25
    reduced_part: float = 1.0
    pushed_part: float = 1.0
    allowed: frozenset[str] = frozenset(MODES)
    blocked: frozenset[str] = frozenset()
    losses: tuple[float, ...] = ()
    loss_steps: tuple[int, ...] = ()
    batch: int = 0
    fixed_part: float = float("nan")
    microbatches: int = 0
    headroom: tuple[Headroom, ...] = ()
    now_s: float = float("nan")
    pause_s: float = 0.0
    counts_local: bool = False
    _table: RankTable | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @property
    def table(self) -> RankTable:
        """All ranks as arrays; converted once if `ranks` is a tuple.

        Raises:
            ValueError: A rank has different numbers of steps and times.
        """
        if isinstance(self.ranks, RankTable):
            return self.ranks
        if self._table is None:
            object.__setattr__(self, "_table", RankTable.of(self.ranks))
        assert self._table is not None
        return self._table
