"""How long a pass over several tasks takes, and into which passes a rank divides its tasks.

A pass (forward and backward) over m tasks takes rank i

    t_i(m) = pace_i * (fixed + m)

seconds. `fixed` is the cost of a pass that does not depend on its size (kernel launches, the loop itself), counted in
tasks. It is the same for all ranks, because a rank's slowness changes faster than `fixed` could be fitted per rank; it
is the median over pairs of consecutive passes of one rank with different sizes.

Several tasks in one pass save `fixed` each, but a pass that has started cannot be taken over: a rank that becomes slow
during a pass delays the step by that pass. So the first pass of a step may be short, to show whether the rank is slow,
and the rest follows in few passes. Its length is the one with which the recent steps would have ended soonest if the
worst pass of each step had been the first pass.

Slowness lasts: a step soon after a rank has become slow is rarely the one in which the next one does. So the steps that
came as long after such a change as the coming one count, and all recent ones together as `_PRIOR` more.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["PassTimes", "earliest_end", "first_size", "pass_sizes", "spread", "tasks_by"]

Array = npt.NDArray[np.float64]

_RECENT = 3
"""Passes whose median is a rank's pace: the fewest that tolerate an outlier; taking over corrects the rest."""

_MOVED = 1.3  # If the last pass differs from the median by this factor, it counts alone: the slowness has changed.
_PAIRS = 31  # Pairs of passes whose median is `fixed`, which depends on the network only: many, against outliers.
_PAIR_RATIO = 1.3  # Least ratio of the sizes of a pair: with nearly equal sizes the result would be noise.
_SAME = 0.03  # Smaller relative changes of `fixed` are ignored: each change recomputes all paces.
_LATE = 1.2  # Multiple of its expected time after which a pass shows that its rank has become slow.
_STEPS = 64  # Steps remembered for the choice of the first pass.
_UNKNOWN = (1.0, 2.0)  # Before any step was observed: as if in every second one a rank took twice its time.
_FIRST = (0.125, 0.25, 0.375, 0.5, 1.0)  # Candidate lengths of the first pass, as fractions of the step.
_SLOWED = 1.5  # Multiple of its expected time after which a pass counts as that of a rank that has become slow.
_PRIOR = 3.0  # Weight of all recent steps together, in steps that came as long after the last such pass.
_AGES = 16  # Steps that came longer after it count as one kind.
_TIE = 0.01  # Shorter first passes are preferred if they cost no more than this fraction.
_WORTH = 10.0  # Passes after the first are not cut shorter than this multiple of `fixed`.
_HALVINGS = 24
_FEW = 128  # Up to this many ranks plain Python is faster than numpy.


class PassTimes:
    """Times of all ranks' passes, over the epochs of a loader.

    Args:
        ranks: Number of ranks.

    Attributes:
        fixed: Fixed time of a pass, in tasks.
    """

    def __init__(self, ranks: int) -> None:
        self.fixed = 0.0
        self._recent: list[deque[tuple[int, float]]] = [deque(maxlen=_RECENT) for _ in range(ranks)]
        self._paces_s = [math.nan] * ranks
        self._pairs: deque[float] = deque(maxlen=_PAIRS)
        # By epoch and step, in their order: largest ratio of a pass's time to the expected one; 0 before the first.
        self._worst: dict[tuple[int, int], float] = {}
        self._longer: deque[float] = deque(maxlen=_PAIRS)  # These ratios for single late passes.

    def continued(self, epoch: int) -> PassTimes:
        """Return a copy for another loader of the same network, whose steps from `epoch` on come after those known."""
        copied = copy.deepcopy(self)
        shift = max((known for known, _ in self._worst), default=-1) + 1 - epoch
        copied._worst = {(known - shift, step): ratio for (known, step), ratio in self._worst.items()}
        return copied

    def fixed_part(self, parts: int, share: int) -> float:
        """Fraction of a batch's time that does not depend on its size; NaN if nothing is known.

        Args:
            parts: Passes into which the batch is divided.
            share: Tasks of the batch.
        """
        return parts * self.fixed / (parts * self.fixed + share) if self._pairs else math.nan

    def note(self, rank: int, tasks: int, time_s: float, step: tuple[int, int] = (0, 0)) -> None:
        """Record the time of a rank's pass.

        Args:
            rank: The rank.
            tasks: Tasks of the pass.
            time_s: Its time, more than 0.
            step: Epoch and step of the pass.
        """
        expected_s, recent = self.expected_s(rank, tasks), self._recent[rank]
        if not math.isnan(expected_s):
            ratio = time_s / expected_s
            self._note_step(step, ratio)
            if ratio > _LATE:
                self._longer.append(ratio)
        if recent:
            self._note_pair(recent[-1], (tasks, time_s))
        recent.append((tasks, time_s))
        self._paces_s[rank] = self._pace(recent)

    def note_late(self, rank: int, tasks: int, elapsed_s: float, step: tuple[int, int]) -> None:
        """Record that a rank has become slow, as its pass shows before it has ended; `note` follows then.

        Args:
            rank: The rank.
            tasks: Tasks of the pass.
            elapsed_s: Time since the pass began.
            step: Epoch and step of the pass.
        """
        ratio = elapsed_s / self.expected_s(rank, tasks)
        if ratio > _SLOWED:  # Not if nothing is known, which is NaN.
            self._note_step(step, ratio)

    def _note_step(self, step: tuple[int, int], ratio: float) -> None:
        self._worst[step] = max(ratio, self._worst.get(step, 0.0))
        if len(self._worst) > _STEPS:
            del self._worst[next(iter(self._worst))]

    def _likely_ratios(self, step: tuple[int, int]) -> tuple[Array, Array]:
        """Return ratios that the worst pass of a step may have to its expected time, and their weights; sum 1."""
        if not any(self._worst.values()):
            return np.array(_UNKNOWN), np.full(len(_UNKNOWN), 1.0 / len(_UNKNOWN))
        self._note_step(step, 0.0)
        age, ages = _AGES, {}  # Of every step: how long after the last change it came.
        for known, ratio in self._worst.items():
            ages[known] = age
            age = 1 if ratio > _SLOWED else min(_AGES, age + 1)
        measured = [known for known, ratio in self._worst.items() if ratio]
        same = np.array([ages[known] == ages[step] for known in measured], dtype=float)
        weights = (same + _PRIOR / len(measured)) / (same.sum() + _PRIOR)
        return _surprises(np.array([self._worst[known] for known in measured])), weights

    def _note_pair(self, one: tuple[int, float], other: tuple[int, float]) -> None:
        """Solve t = pace (fixed + m), known at two sizes, for `fixed`."""
        (less, less_s), (more, more_s) = sorted((one, other))
        if more >= _PAIR_RATIO * less:
            most = 4.0 * more
            found = (less_s * more - more_s * less) / (more_s - less_s) if more_s > less_s else most
            self._pairs.append(min(max(found, 0.0), most))
            fixed = statistics.median_low(self._pairs)
            if abs(fixed - self.fixed) > _SAME * max(1.0, self.fixed):
                self.fixed = fixed
                self._paces_s = [self._pace(each) for each in self._recent]

    def pace_s(self, rank: int) -> float:
        """Seconds per task, and per unit of `fixed`; NaN if nothing is known."""
        return self._paces_s[rank]

    def _pace(self, recent: deque[tuple[int, float]]) -> float:
        found = [time_s / (self.fixed + m) for m, time_s in recent]
        if not found:
            return math.nan
        usual_s = statistics.median_low(found)
        return usual_s if usual_s / _MOVED < found[-1] < usual_s * _MOVED else found[-1]

    def expected_s(self, rank: int, tasks: int) -> float:
        """Expected seconds of a rank's pass over `tasks` tasks, NaN if nothing is known."""
        return self.pace_s(rank) * (self.fixed + tasks)

    def likely_s(self, expected_s: float, elapsed_s: float) -> float:
        """Likely total time of a pass after `elapsed_s`: once it is late, the lower median of longer late passes."""
        if elapsed_s <= _LATE * expected_s:
            return max(expected_s, elapsed_s)
        longer = [ratio * expected_s for ratio in self._longer if ratio * expected_s > elapsed_s]
        return statistics.median_low(longer) if longer else elapsed_s

    def first_pass_s(self, paces_s: Array, counts: Array, cap: int, step: tuple[int, int] = (0, 0)) -> float:
        """Return the length in seconds of every rank's first pass in a step; infinite for passes as long as possible.

        Args:
            paces_s: Pace of every rank, see `pace_s`.
            counts: Tasks of every rank.
            cap: Most tasks in a pass.
            step: Epoch and step. Steps are asked for in their order.
        """
        seen, weights = self._likely_ratios(step)
        end_s = float((paces_s * (self.fixed * np.ceil(counts / cap) + counts)).max())
        best_s, found = math.inf, math.inf
        for part in _FIRST:
            limit_s = part * end_s if part < 1.0 else math.inf
            first = np.array([
                first_size(int(count), cap, self.fixed, limit_s / pace_s)
                for count, pace_s in zip(counts, paces_s, strict=True)
            ])  # fmt: skip
            more = (first < counts) & (counts <= cap)  # These ranks have one more pass than they need.
            with_s = end_s + self.fixed * more.sum() / (1.0 / paces_s).sum()
            first_s = np.where(first > 0, paces_s * (self.fixed + first), 0.0)
            mean_s = float((weights @ np.maximum(with_s, seen[:, None] * first_s)).mean())
            if mean_s < (1.0 - _TIE) * best_s:
                best_s, found = mean_s, limit_s
        return found


def _surprises(ratios: Array) -> Array:
    """Return the ratios without the scatter of usual passes, which a short first pass would not avoid.

    The worst of a step's passes is always a little longer than expected, and the rest of the step is no better.
    """
    usual = ratios[ratios <= _SLOWED]
    found = ratios / max(1.0, float(np.median(usual))) if len(usual) else ratios
    return np.where(found > _LATE, found, 1.0)


def first_size(count: int, cap: int, fixed: float, first: float) -> int:
    """Tasks of a rank's first pass, see `pass_sizes`. With more than `cap` tasks it causes no additional pass."""
    needed = -(-count // cap) - 1  # Least number of passes after the first.
    if first >= fixed + count or count <= fixed:
        size = 0 if needed else count  # A rank with few tasks is already slow.
    else:
        size = min(cap, max(1, int(first - fixed)))
    return max(size, count - cap * needed) if needed else size


def pass_sizes(count: int, cap: int, least: int, fixed: float, first: float) -> list[int]:
    """Tasks of each of a rank's passes of a step.

    Each pass after the first takes half of the rest, but not so few tasks that `fixed` would be a large part of it.

    Args:
        count: Tasks of the rank.
        cap: Most tasks in a pass.
        least: Fewest tasks in a pass, except the first and the last.
        fixed: Fixed time of a pass, in tasks.
        first: Length of the first pass including `fixed`, in tasks.
    """
    sizes = [first_size(count, cap, fixed, first)] if count else []
    rest, shortest = count - sum(sizes), max(least, math.ceil(_WORTH * fixed))
    while rest > 0:
        sizes.append(min(cap, -(-rest // 2) if rest >= 2 * shortest else rest))
        rest -= sizes[-1]
    return sizes


def tasks_by(time_s: Array, pace_s: Array, fixed: float, cap: int) -> Array:
    """Number of tasks that ranks of these paces end within a time, in passes of at most `cap` tasks."""
    worth = np.maximum(time_s, 0.0) / pace_s + 1e-9
    whole = np.floor(worth / (fixed + cap))
    return np.asarray(cap * whole + np.floor(np.clip(worth - whole * (fixed + cap) - fixed, 0.0, cap)))


def earliest_end(free_s: Array, pace_s: Array, tasks: int, fixed: float, cap: int, least: int = 0) -> Array:
    """Return when `tasks` tasks can have ended, each rank taking as many as it can end by then.

    Args:
        free_s: When each rank is free, shape (..., n_ranks).
        pace_s: Pace of each rank (see `PassTimes.pace_s`), same shape.
        tasks: Number of tasks.
        fixed: Fixed time of a pass, in tasks.
        cap: Most tasks in a pass.
        least: Fewest tasks of a rank.
    """
    found_s = _level(free_s, pace_s, tasks, fixed, cap, least)
    return np.maximum(found_s, (free_s + pace_s * (fixed + least)).max(axis=-1)) if least else found_s


def _level(free_s: Array, pace_s: Array, tasks: int, fixed: float, cap: int, least: int) -> Array:
    """`earliest_end`, without the time that slow ranks need for their `least` tasks."""
    low_s = free_s.min(axis=-1)
    high_s = (free_s + pace_s * (fixed * -(-tasks // cap) + tasks)).min(axis=-1)
    for _ in range(_HALVINGS):
        middle_s = 0.5 * (low_s + high_s)
        enough = np.maximum(least, tasks_by(middle_s[..., None] - free_s, pace_s, fixed, cap)).sum(axis=-1) >= tasks
        low_s, high_s = np.where(enough, low_s, middle_s), np.where(enough, middle_s, high_s)
    return np.asarray(high_s)


def spread(
    free_s: Sequence[float], pace_s: Sequence[float], tasks: int, fixed: float, cap: int, least: int = 0
) -> tuple[float, list[int]]:
    """Return when all ranks can end at the earliest, and each rank's tasks for that. See `earliest_end`."""
    n = len(free_s)
    if n > _FEW:
        level_s = float(_level(np.array(free_s), np.array(pace_s), tasks, fixed, cap, least))
    else:
        level_s = _level_of_few(free_s, pace_s, tasks, fixed, cap, least)
    ranks = zip(free_s, pace_s, strict=True)
    counts = [max(least, _tasks_by(level_s - free, pace, fixed, cap)) for free, pace in ranks]
    surplus = sum(counts) - tasks
    if surplus > 0:  # Ranks that end at the same time: at most one task too many each.
        ends_s = [free_s[r] + pace_s[r] * (fixed * -(-counts[r] // cap) + counts[r]) for r in range(n)]
        for rank in sorted((r for r in range(n) if counts[r] > least), key=lambda r: -ends_s[r])[:surplus]:
            counts[rank] -= 1
    if least:
        forced = (r for r in range(n) if counts[r] <= least)
        ends = (free_s[r] + pace_s[r] * (fixed * -(-counts[r] // cap) + counts[r]) for r in forced)
        level_s = max(level_s, max(ends, default=level_s))
    return level_s, counts


def _tasks_by(time_s: float, pace_s: float, fixed: float, cap: int) -> int:
    """`tasks_by` of one rank."""
    worth = max(time_s, 0.0) / pace_s + 1e-9
    whole = math.floor(worth / (fixed + cap))
    return int(cap * whole + math.floor(min(max(worth - whole * (fixed + cap) - fixed, 0.0), cap)))


def _level_of_few(
    free_s: Sequence[float], pace_s: Sequence[float], tasks: int, fixed: float, cap: int, least: int
) -> float:
    """`_level` of one step in plain Python: for few ranks numpy's calls take twenty times as long as the arithmetic."""
    ranks = list(zip(free_s, pace_s, strict=True))
    low_s = min(free_s)
    high_s = min(free + pace * (fixed * -(-tasks // cap) + tasks) for free, pace in ranks)
    for _ in range(_HALVINGS):
        middle_s = 0.5 * (low_s + high_s)
        if sum(max(least, _tasks_by(middle_s - free, pace, fixed, cap)) for free, pace in ranks) >= tasks:
            high_s = middle_s
        else:
            low_s = middle_s
    return high_s
