"""Statistics of a window: usable reports, the reference time, and which reports are slow.

Computed on whole tables, because a decision for a thousand ranks has milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from scheduler.records import RankTable, Window
from scheduler.stats import lower_median

__all__ = [
    "MIN_REPORTS",
    "OVERSUBSCRIBED",
    "RECENT",
    "RESOLUTION_S",
    "THRESHOLD",
    "Readings",
    "always_slow",
    "queueing",
    "slow_limit_s",
]

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]
_Flags = npt.NDArray[np.bool_]

THRESHOLD = 1.3
"""A report is slow above this multiple of the reference. In the STAR logs, where no rank is disturbed, compute times
of 153 ms (transformer) vary by 2.4 % and never exceed 1.16 times the reference; those of 5 ms (alexnet) vary by 14 %
and exceed 1.3 in 11 % of the reports, hence `RESOLUTION_S`."""

RESOLUTION_S = 0.002
"""Least excess over the reference of a slow report. Horovod negotiates in cycles of 1 ms, so a step cannot resolve
differences of a cycle or two. Measured: with it 3.3 % of the alexnet log's reports are slow and no window has a
straggler; without it 6.6 % of the windows do."""

MIN_REPORTS = 3
"""A rank with fewer reports has no meaningful median: it is not judged and not part of the reference."""

OVERSUBSCRIBED = 0.03
"""Usual share of waits for a processor above which there are fewer cores than ranks: 4 ranks on 2 idle cores show 1 %,
on 2 busy ones 40 %."""

_STARVED_REPORTS = 16
"""Least reports of a starved rank among ranks that all wait: over fewer, random waits of equal ranks differ as much."""

RECENT = 32
"""Reports per rank in its median: more than a straggler's rotation of a few steps, fewer than a training phase."""


def slow_limit_s(usual_s: float) -> float:
    """Seconds above which a batch is slow, for a usual time of `usual_s`; NaN if that is NaN."""
    return max(THRESHOLD * usual_s, usual_s + RESOLUTION_S)


@overload
def always_slow(usual_s: float, typical_s: float) -> bool: ...
@overload
def always_slow(usual_s: _Floats, typical_s: float | _Floats) -> _Flags: ...
def always_slow(usual_s: float | _Floats, typical_s: float | _Floats) -> bool | _Flags:
    """Whether ranks are slow all the time, by their usual times and a typical rank's; medians need no resolution."""
    return usual_s > THRESHOLD * typical_s


_SOME = 16
"""Ranks sampled first to find the fastest of a step."""


class Readings:
    """Statistics of a window.

    Attributes:
        reports: Usable reports per rank as (step, seconds), oldest first; times that are not positive and finite are
            omitted.
        counts: Number of usable reports of every rank, shape (n_ranks,).
        reference_s: Usual seconds per batch of a rank of the fast half: lower median over ranks of their lower
            medians; NaN while fewer than half of the ranks can be judged, and then no report is slow. The inner median
            is a lower one because of stragglers that alternate between two ranks: each is slow in half of its reports,
            and the usual median would lie between its two speeds.

    Raises:
        ValueError: A rank has different numbers of steps and times.
    """

    def __init__(self, window: Window) -> None:
        self._times, self._steps, self.counts = _usable(window.table)
        self.reports = _Reports(self._times, self._steps, self.counts)
        self._width = self._times.shape[1]
        self.reference_s = self._reference()
        self._limit_s = slow_limit_s(self.reference_s)
        self._slow: _Flags | None = None
        self._runs: _Ints | None = None

    @classmethod
    def of(cls, window: Window) -> Readings:
        """The statistics of a window, cached for the last window."""
        global _last
        if _last is None or _last[0] is not window:
            _last = (window, cls(window))
        return _last[1]

    @property
    def typical_s(self) -> float:
        """`reference_s` or, while that is NaN, the lower median of the latest reports; NaN if there are none."""
        if not math.isnan(self.reference_s):
            return self.reference_s
        latest = self._times[self.counts > 0, -1] if self._width else np.zeros(0)
        return lower_median(latest) if len(latest) else math.nan

    @property
    def steps(self) -> _Ints:
        """Steps of the reports, one row per rank, newest last, padded with zeros in front."""
        return self._steps

    def newest(self, count: int) -> _Floats:
        """The ranks' last times, newest last, padded with NaN in front, shape (n_ranks, count)."""
        known = min(count, self._width)
        times = self._times[:, self._width - known :]
        fewer = self.counts < known
        if fewer.any():
            times = np.where(np.arange(known) >= known - np.minimum(self.counts, known)[:, None], times, math.nan)
        if known == count:
            return times
        return np.concatenate([np.full((len(times), count - known), math.nan), times], axis=1)

    def latest(self, rank: int, count: int) -> _Floats:
        """The last times of one rank, newest last, at most `count`."""
        return self._times[rank, self._width - min(count, int(self.counts[rank])) :]

    def total_s(self) -> _Floats:
        """Sum of every rank's times, seconds, shape (n_ranks,)."""
        return np.asarray(self._times.sum(axis=1))

    def slow(self) -> _Flags:
        """Whether a report exceeds the reference, and the fastest rank of its step, by the threshold.

        Of all reports, one row per rank, newest last.
        """
        if self._slow is None:
            with np.errstate(invalid="ignore"):
                over = self._times > self._limit_s
            if over.any():
                rank, column = np.nonzero(over)
                times, (steps, which) = (
                    self._times[rank, column], np.unique(self._steps[rank, column], return_inverse=True)
                )
                # The minimum over some ranks is an upper bound of that over all: a report above it needs no others.
                some = slice(None, None, max(1, len(over) // _SOME))
                most_s = _in_force(self._steps[some], self._times[some], self.counts[some], steps, 0.0).min(axis=0)
                if not (times > THRESHOLD * most_s[which]).all():
                    over[rank, column] = times > THRESHOLD * self._floors_s(steps)[which]
            self._slow = over
        return self._slow

    def slow_reports(self, rank: int) -> list[bool]:
        """Which of a rank's reports are slow, oldest first."""
        return list(self.slow()[rank, self._width - int(self.counts[rank]) :].tolist())

    def last_steps(self) -> list[int]:
        """Step of the latest report of every rank that has one."""
        return list(self._steps[self.counts > 0, -1].tolist()) if self._width else []

    def reports_per_step(self, most: int) -> float:
        """Mean reports of a rank per step, above 1 between two averagings of `local`; NaN if no step is complete.

        Args:
            most: Number of steps to look at, the newest that all ranks have reported in full.
        """
        if not self._width or not self.counts.all():
            return math.nan
        known = np.arange(self._width) >= self._width - self.counts[:, None]
        oldest = int(np.where(known, self._steps, np.iinfo(np.int64).max).min(axis=1).max())
        end = int(self._steps[:, -1].min())  # Of this and the oldest step the window may have some reports only.
        begin = max(oldest + 1, end - most)
        if end <= begin:
            return math.nan
        inside = known & (self._steps >= begin) & (self._steps < end)
        return float(inside.sum()) / (len(self.counts) * (end - begin))

    def in_force(self, first: int, rows: int, since: int | None) -> tuple[_Floats, _Flags]:
        """Times in force at consecutive steps, for ranks without slow reports.

        Args:
            first: The first step.
            rows: Number of steps.
            since: If given, only ranks with a report of a later step.

        Returns:
            The times, NaN where unknown, shape (rows, n_ranks), and a mask of the ranks they are given for.
        """
        times = np.full((rows, len(self.counts)), math.nan)
        plain = ~self.slow().any(axis=1) & (self.counts > 0)
        if since is not None and self._width:
            plain &= self._steps[:, -1] > since
        if plain.any():
            wanted = np.arange(first, first + rows)
            found = _in_force(self._steps[plain], self._times[plain], self.counts[plain], wanted, math.nan)
            times[:, plain] = found.T
        return times, plain

    def any_slow(self, after: int) -> bool:
        """Whether any report of a step later than `after` is slow."""
        return bool((self.slow() & (self._steps > after)).any())

    def run_lengths(self) -> _Ints:
        """Length of the run of slow reports up to every rank's latest one, shape (n_ranks,)."""
        if self._runs is None:
            slow = self.slow()
            runs = np.zeros(len(slow), dtype=np.int64)
            if self._width:
                last = np.flatnonzero(slow[:, -1] & (self.counts >= MIN_REPORTS))
                quick = ~slow[last, ::-1]
                runs[last] = np.where(quick.any(axis=1), np.argmax(quick, axis=1), self._width)
            self._runs = runs
        return self._runs

    def slow_run(self, rank: int) -> list[tuple[int, float]]:
        """The run of slow reports up to the rank's latest one, oldest first."""
        length = int(self.run_lengths()[rank])
        return self.reports[rank][-length:] if length else []

    def _reference(self) -> float:
        judged = self.counts >= MIN_REPORTS
        if judged.sum() < 2 or 2 * judged.sum() < len(self.counts):
            return math.nan
        counts = np.minimum(self.counts[judged], RECENT)
        recent = self.newest(RECENT) if judged.all() else self.newest(RECENT)[judged]
        if counts.min() == counts.max():
            middle = RECENT - int(counts[0]) + (int(counts[0]) - 1) // 2  # NaN would be sorted last.
            recent = np.where(np.isnan(recent), -math.inf, recent) if counts[0] < RECENT else recent
            medians = np.partition(recent, middle, axis=1)[:, middle]
        else:
            medians = np.sort(recent, axis=1)[np.arange(len(recent)), (counts - 1) // 2]
        return lower_median(medians)

    def _floors_s(self, needed: _Ints) -> _Floats:
        """Shortest of the ranks' times in force at some steps, in seconds; 0 if a rank has none yet.

        A report is in force from its step to the rank's next one. When all ranks become slower together (longer
        sequences, a bigger batch) so does the fastest, and no rank is a straggler although all exceed the reference,
        which comes from older reports.

        Args:
            needed: The steps, ascending and unique, shape (k,).
        """
        # Ranks with the same steps are merged into one with the shortest times.
        usual = self._steps[np.argsort(self._steps[:, -1], kind="stable")[len(self._steps) // 2]]
        alike = (self._steps == usual).all(axis=1) & (self.counts == self._width)
        steps, times, counts = self._steps[~alike], self._times[~alike], self.counts[~alike]
        if alike.any():
            steps = np.concatenate([steps, usual[None]])
            fastest_s = (self._times if alike.all() else self._times[alike]).min(axis=0)
            times = np.concatenate([times, fastest_s[None]])
            counts = np.append(counts, self._width)
        return np.asarray(_in_force(steps, times, counts, needed, 0.0).min(axis=0))


def queueing(
    runqueue_s: _Floats, compute_s: _Floats, counts: _Ints, limit: float = OVERSUBSCRIBED
) -> tuple[_Floats, _Floats]:
    """Return the share of its compute time that each rank waits for a processor, and the part of it to subtract.

    If most ranks wait, there are fewer cores than ranks or other programs use them: a rank without a core for a moment
    is not slow, and no mode would help. A rank that waits for far longer than is usual is starved: of its waits only
    the usual ones are subtracted. If most ranks do not wait, nothing is.

    Args:
        runqueue_s: Waits of every rank, the sum of its reports.
        compute_s: The same for its compute times, waits included.
        counts: Number of its reports.
        limit: Median share above which waits are subtracted.

    Returns:
        The shares, and the parts of the ranks' waits to subtract, 0 to 1.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = np.where(compute_s > 0.0, np.minimum(1.0, runqueue_s / compute_s), 0.0)
        usual = np.float64(lower_median(shares))
        if not usual > limit:
            return shares, np.zeros(len(shares))
        # With the usual share a rank would take (1 - share) / (1 - usual) of its time. Random waits vary the more, the
        # more of them are usual, hence the second factor: for waits of 40 % the limit is 2.2 times the time, not 1.3.
        starved = (counts >= _STARVED_REPORTS) & ((1.0 - usual) ** 2 > THRESHOLD * (1.0 - shares))
        # Of a starved rank, the wait that would give it the usual share.
        part = usual / (1.0 - usual) * (1.0 - shares) / shares
        return shares, np.where(starved, part, 1.0)


def _in_force(steps: _Ints, times: _Floats, counts: _Ints, needed: _Ints, before: float) -> _Floats:
    """Every rank's time in force at some steps, `before` if it has none yet, shape (n_ranks, n_needed)."""
    width = steps.shape[1]
    # Column of the report in force: the last one up to the step, or -1.
    place = np.searchsorted(needed, steps)
    place[np.arange(width) < width - counts[:, None]] = len(needed)
    column = np.full((len(steps), len(needed) + 1), -1)
    column[np.arange(len(steps))[:, None], place] = np.arange(width)  # The last of equals wins.
    column = np.maximum.accumulate(column[:, :-1], axis=1)
    found = np.take_along_axis(times, np.maximum(column, 0), axis=1)
    return np.asarray(np.where(column >= 0, found, before))


_last: tuple[Window, Readings] | None = None


class _Reports(Sequence[list[tuple[int, float]]]):
    """Usable reports of every rank, created on access: few of many ranks are accessed."""

    def __init__(self, times: _Floats, steps: _Ints, counts: _Ints) -> None:
        self._times, self._steps, self._counts = times, steps, counts

    @overload
    def __getitem__(self, rank: int) -> list[tuple[int, float]]: ...

    @overload
    def __getitem__(self, rank: slice) -> Sequence[list[tuple[int, float]]]: ...

    def __getitem__(self, rank: int | slice) -> Any:
        if isinstance(rank, slice):
            return [self[index] for index in range(*rank.indices(len(self)))]
        known = slice(self._times.shape[1] - int(self._counts[rank]), None)
        return list(zip(self._steps[rank, known].tolist(), self._times[rank, known].tolist(), strict=True))

    def __len__(self) -> int:
        return len(self._counts)


def _usable(table: RankTable) -> tuple[_Floats, _Ints, _Ints]:
    """Positive finite times and their steps, in order of step, newest last, 0 in front; and their counts."""
    times, steps, counts = table.compute_s, table.steps, table.counts
    width = times.shape[1]
    good = (times > 0.0) & (times < math.inf)
    if counts.min(initial=width) < width:
        good &= np.arange(width) >= width - counts[:, None]
    if good.all() and bool((steps[:, 1:] > steps[:, :-1]).all()):
        return times, steps, counts
    times, steps = np.where(good, times, 0.0), np.where(good, steps, 0)
    # A row is in order if no usable report precedes an unusable one and steps strictly increase.
    ordered = (~good[:, :-1] | (good[:, 1:] & (steps[:, 1:] > steps[:, :-1]))).all(axis=1)
    rows = np.flatnonzero(~ordered)
    order = np.lexsort((times[rows], steps[rows], good[rows]), axis=1)
    times[rows] = np.take_along_axis(times[rows], order, axis=1)
    steps[rows] = np.take_along_axis(steps[rows], order, axis=1)
    return times, steps, np.asarray(good.sum(axis=1))
