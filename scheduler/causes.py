"""Who is slow, by how much, since when and why: a pure function of a window of reports.

Three kinds of evidence, in `find_stragglers`: compute times (causes compute, input and starved), the rates of links
(link), and silence (starved: a process that is stopped or gets no processor at all).

Of compute, the question is asked of compute times taken before the collective (`StepReport.compute_s`): inside a
collective the waiting ranks spin at full load and every rank sees the same wall time, so no time measured
there names anybody; a link is known by its own rate.

The reference is the lower median over ranks of each rank's lower median. Two simpler references fail:

* The minimum. "20 % over the fastest" fires in 80 % and 96 % of the uncontended rounds of the STAR logs
  (transformer and alexnet, 8 workers), because the minimum of eight jittering numbers lies well below all
  others.
* The usual median. With two ranks it is their mean: 1 s and 4 s give 2.5 s and the slow rank looks 1.6 times
  slow; with two of four ranks slow it lies between the halves and shrinks a factor of 2 to 1.33.

The lower median is the (ceil(n/2))-th smallest value: the largest order statistic that still belongs to the
fast ranks when half of them are slow, hence the one with the fewest false alarms among those that name half a
job. When more than half are slow, slow is what this job is, and nobody is named.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from scheduler.records import RankStats, Window

__all__ = [
    "CAUSES",
    "LINK_CALM",
    "LINK_RATIO",
    "MIN_REPORTS",
    "PERSISTENCE",
    "RESOLUTION_S",
    "THRESHOLD",
    "Readings",
    "Straggler",
    "duration",
    "find_stragglers",
    "link_ratio",
    "lower_median",
]

CAUSES = ("compute", "input", "starved", "link")
"""`compute`: the rank's own work takes longer. `input`: it waits for data. `starved`: its thread is runnable
but gets no processor, or the process is not heard of at all. `link`: its network is slow."""

THRESHOLD = 1.3
"""A report is slow above this multiple of the reference. In the STAR logs, where nobody is disturbed, compute times
of 153 ms (transformer) vary by 2.4 % and never exceed 1.16 times the reference; those of 5 ms (alexnet) vary by 14 %
and exceed 1.3 in 11 % of the reports, for which there is `RESOLUTION_S`."""

RESOLUTION_S = 0.002
"""Nor is a report slow that exceeds the reference by less than two milliseconds. Horovod negotiates in cycles of 1 ms,
so differences of a cycle or two are below what a step can resolve. Measured: with it 3.3 % of the alexnet log's reports
are slow and no window names a rank; without it 6.6 % of the windows do."""

PERSISTENCE = 3
"""Consecutive slow reports before a rank is named. The longest run in the undisturbed compute times is two."""

MIN_REPORTS = 3
"""A rank with fewer reports has no median worth the name: it is not judged and does not enter the
reference."""

_RECENT = 32
"""Reports per rank that make its median. Long against a rotation of a few steps, short against a training
phase."""

_MANY, _TAIL = 128, 16
"""Of more ranks than that, so many reports each: more would cost more than a decision is to take, and tell little."""

_CAUSE_SHARE = 0.5
"""Part of a rank's excess time that waiting for data, or for a processor, must explain to be called the
cause.
Half: then it explains more than everything else together."""

LINK_RATIO = 0.5
"""A link is slow below this part of the median of the others', and `LINK_CALM` is where it is slow no more: between
loopback, 10 Gb/s and 1 Gb/s lie factors of ten, between equal links of one job some ten percent."""

LINK_CALM = 0.75

LINK_SHARE = 0.2
"""Part of the rank's step that a usual link would save. Less is not worth a switch, and on it depend false alarms where
the gradient is so small that its rate measures latency."""

SILENT_STEPS = 10
"""A rank is silent after as many usual steps, or three of its own, and a second: the agents tell of themselves more
often than that."""

_SILENT_S = 1.0
_OWN_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that is slow now.

    Attributes:
        rank: The rank.
        slowdown: Median of its slow reports over the reference; 4.0 means that a batch takes it four times as
            long. Of a link: median rate of the others over its own. Of silence: its time over the reference.
        since_step: Global step of the first report of the present slow run, or the window's first if it began
            before; the window's end for a link and for silence, which have no history.
        cause: One of `CAUSES`.
        evidence: The numbers behind it in one phrase.
        silent: Whether it is named because nothing is heard of it.
    """

    rank: int
    slowdown: float
    since_step: int
    cause: str
    evidence: str
    silent: bool = False

    @property
    def sentence(self) -> str:
        """What a person reads: `rank 3 computes 4.0x slower than the median since step 410 (compute)`."""
        if self.silent or self.cause == "link":
            return f"rank {self.rank} {self.evidence} ({self.cause})"
        return (
            f"rank {self.rank} computes {self.slowdown:.1f}x slower than the median "
            f"since step {self.since_step} ({self.cause})"
        )


def find_stragglers(
    window: Window,
    *,
    threshold: float = THRESHOLD,
    persistence: int = PERSISTENCE,
    readings: Readings | None = None,
) -> tuple[Straggler, ...]:
    """The ranks that are slow now, in order of rank; of a rank's causes the one that costs most.

    Compute: its last `persistence` reports are all slow, that is above `threshold` times the reference and, where
    the whole job has just become slower, above `threshold` times the fastest rank at that step: see `Readings`.
    Link: its rate is below half of the others' median, and a usual link would save a considerable part of its step.
    Silence: nothing was heard of it for many steps while the others were heard.

    Args:
        window: Recent reports of all ranks. `input_share` and `starved_share` are ratios of sums over the
            reports in it.
        threshold: Multiple of the reference, above 1.
        persistence: Consecutive most recent reports that must be slow, at least 1. A single spike names
            nobody.
        readings: The window's, made with `threshold`, where the caller has them.

    Raises:
        ValueError: A threshold out of range, or a rank whose steps and times differ in number.
    """
    if not threshold > 1.0:
        raise ValueError(f"threshold is {threshold}; expected a number above 1")
    if persistence < 1:
        raise ValueError(f"persistence is {persistence}; expected at least 1")
    readings = Readings(window, threshold=threshold) if readings is None else readings
    found = []
    links = _Links(window)
    usual: dict[str, float] = {}
    for rank in range(window.world_size):
        run = readings.slow_run(rank)
        compute = _describe(window, readings, rank, run, usual) if len(run) >= persistence else None
        link, saved_s = _slow_link(window, readings, rank, links.ratio(rank))
        if link is not None and compute is not None:
            link = None if (compute.slowdown - 1.0) * readings.reference_s > saved_s else link
        named = _silence(window, readings, rank) or link or compute
        if named is not None:
            found.append(named)
    return tuple(found)


def link_ratio(window: Window, rank: int) -> float:
    """The rate of the rank's link over the lower median of the others'; NaN where either is unknown."""
    return _Links(window).ratio(rank)


class _Links:
    """The rates of all links, in order once for all ranks."""

    def __init__(self, window: Window) -> None:
        self._rates = [stats.link_bytes_per_s for stats in window.ranks]
        self._known = sorted(rate for rate in self._rates if math.isfinite(rate) and rate > 0.0)

    def ratio(self, rank: int) -> float:
        """As `link_ratio`."""
        own = self._rates[rank]
        others, count = len(self._rates) - 1, len(self._known)
        place = count
        if math.isfinite(own) and own > 0.0:
            place, count = bisect.bisect_left(self._known, own), count - 1
        # Fewer than half are no reference.
        if not count or 2 * count < others or not 0.0 < own < math.inf:
            return math.nan
        middle = (count - 1) // 2
        return own / self._known[middle if middle < place else middle + 1]


def _slow_link(window: Window, readings: Readings, rank: int, ratio: float) -> tuple[Straggler | None, float]:
    """The rank as a straggler by its link, and the seconds per step that a usual link would save."""
    if math.isnan(readings.reference_s) or not ratio < LINK_RATIO:
        return None, 0.0
    own_s = _comm_s(window, rank)
    saved_s = own_s * (1.0 - ratio)
    if not (saved_s > RESOLUTION_S and saved_s > LINK_SHARE * (readings.reference_s + own_s)):
        return None, 0.0
    rate = window.ranks[rank].link_bytes_per_s
    evidence = (
        f"has a link of {rate / 1e6:.3g} MB/s, {1.0 / ratio:.1f}x slower than the others', and communicates "
        f"{duration(own_s)} per step"
    )
    link = Straggler(rank=rank, slowdown=1.0 / ratio, since_step=window.step, cause="link", evidence=evidence)
    return link, saved_s


def _comm_s(window: Window, rank: int) -> float:
    """What the rank's communication takes per step: measured, else what a ring sends, else 0, not known.

    In a ring every rank sends 2 (n - 1) / n times its gradient and receives as much at the same time.
    """
    stats = window.ranks[rank]
    times = [time_s for time_s in stats.comm_s[-_RECENT:] if math.isfinite(time_s) and time_s >= 0.0]
    if len(times) >= MIN_REPORTS:
        return lower_median(times)
    n = window.world_size
    return 2.0 * (n - 1) / n * window.comm_bytes / stats.link_bytes_per_s


def _silence(window: Window, readings: Readings, rank: int) -> Straggler | None:
    """The rank as a straggler of which nothing is heard, though the others are."""
    silent_s = window.ranks[rank].silent_s
    if not silent_s > _SILENT_S:
        return None
    own = [time_s for _, time_s in readings.reports[rank][-_RECENT:]]
    if len(own) < MIN_REPORTS or math.isnan(readings.reference_s):
        return None
    limit_s = max(_SILENT_S, SILENT_STEPS * readings.reference_s, _OWN_STEPS * lower_median(own))
    others = lower_median([other.silent_s for index, other in enumerate(window.ranks) if index != rank])
    if not silent_s > max(limit_s, 2.0 * others):
        return None
    return Straggler(
        rank=rank,
        slowdown=silent_s / readings.reference_s,
        since_step=window.step,
        cause="starved",
        evidence=f"has not been heard of for {silent_s:.1f} s",
        silent=True,
    )


class Readings:
    """A window made ready for questions: usable reports, the reference, and which reports are slow.

    Attributes:
        reports: Per rank its usable reports as (step, seconds), oldest first; times that are no positive
            number are left out.
        counts: Usable reports of every rank, of as many ranks as most `_TAIL`.
        reference_s: What one batch usually takes a rank of the fast half, in seconds; NaN while fewer than
            half of the ranks can be judged, and then no report is slow. Both medians in it are lower ones.
            The inner one matters when a straggler alternates between two ranks: each is then slow in half of
            its reports, and the usual median would lie between its two speeds.

    Raises:
        ValueError: A rank whose steps and times differ in number.
    """

    def __init__(self, window: Window, *, threshold: float = THRESHOLD) -> None:
        self.reports = _Reports(window)
        self._times, self._steps = _table(window, self.reports)
        self.counts = np.isfinite(self._times).sum(axis=1)
        self.reference_s = self._reference()
        self._threshold = threshold
        self._floors: dict[int, float] = {}
        self._slow_now: npt.NDArray[np.bool_] | None = None

    @classmethod
    def of(cls, window: Window) -> Readings:
        """Those of a window; of the same one again they are not made anew."""
        global _last
        if _last is None or _last[0] is not window:
            _last = (window, cls(window))
        return _last[1]

    def newest(self, count: int) -> npt.NDArray[np.float64]:
        """The ranks' last times, newest last, NaN where there are fewer, shape (n_ranks, count)."""
        n, known = self._times.shape
        if known >= count:
            return self._times[:, known - count :]
        return np.concatenate([np.full((n, count - known), math.nan), self._times], axis=1)

    def slow_now(self) -> npt.NDArray[np.bool_]:
        """Whose latest report exceeds the reference: only these can be in a slow run. Shape (n_ranks,)."""
        if self._slow_now is None:
            found = np.zeros(len(self._times), dtype=np.bool_)
            if self._times.size and not math.isnan(self.reference_s):
                limit_s = max(self._threshold * self.reference_s, self.reference_s + RESOLUTION_S)
                with np.errstate(invalid="ignore"):
                    found = (self._times[:, -1] > limit_s) & (self.counts >= MIN_REPORTS)
            self._slow_now = found
        return self._slow_now

    def is_slow(self, step: int, time_s: float) -> bool:
        """Whether a report exceeds the reference, and the fastest rank of its step, by the threshold."""
        if math.isnan(self.reference_s) or time_s <= self.reference_s + RESOLUTION_S:
            return False
        if time_s <= self._threshold * self.reference_s:
            return False
        return time_s > self._threshold * self._floor_s(step)

    def any_slow(self, after: int) -> bool:
        """Whether any report of a step later than `after` is slow."""
        return any(self.is_slow(step, time_s) for reports in self.reports for step, time_s in reports if step > after)

    def slow_run(self, rank: int) -> list[tuple[int, float]]:
        """The unbroken run of slow reports that ends with the rank's latest one, oldest first."""
        run: list[tuple[int, float]] = []
        if not self.slow_now()[rank]:
            return run
        for step, time_s in reversed(self.reports[rank]):
            if not self.is_slow(step, time_s):
                break
            run.append((step, time_s))
        return run[::-1]

    def _reference(self) -> float:
        recent = self._times[:, -_RECENT:]
        count = np.isfinite(recent).sum(axis=1)
        judged = count >= MIN_REPORTS
        if judged.sum() < 2 or 2 * judged.sum() < len(self._times):
            return math.nan
        ordered = np.sort(recent[judged], axis=1)  # NaN comes last.
        medians = ordered[np.arange(len(ordered)), (count[judged] - 1) // 2]
        return float(np.sort(medians)[(len(medians) - 1) // 2])

    def _floor_s(self, step: int) -> float:
        """Shortest of the ranks' times in force at `step`, in seconds; 0 where a rank has none yet.

        A report is in force from its step to the rank's next one. When all ranks become slower together
        (longer sequences, a bigger batch) even the fastest does, and no rank is a straggler although all
        exceed the reference, which is made of older reports.
        """
        if step not in self._floors:
            width = self._times.shape[1]
            begun = (np.isfinite(self._times) & (self._steps <= step)).sum(axis=1)
            index = width - self.counts + begun - 1
            times = self._times[np.arange(len(self._times)), np.maximum(index, 0)]
            self._floors[step] = float(np.where(begun > 0, times, 0.0).min(initial=math.inf))
        return self._floors[step]


_last: tuple[Window, Readings] | None = None


class _Reports(Sequence[list[tuple[int, float]]]):
    """Usable reports of every rank, each made when it is asked for: of many ranks few are."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self._made: dict[int, list[tuple[int, float]]] = {}

    @overload
    def __getitem__(self, rank: int) -> list[tuple[int, float]]: ...

    @overload
    def __getitem__(self, rank: slice) -> Sequence[list[tuple[int, float]]]: ...

    def __getitem__(self, rank: int | slice) -> Any:
        if isinstance(rank, slice):
            return [self[index] for index in range(*rank.indices(len(self)))]
        if rank not in self._made:
            self._made[rank] = _usable(self._window.ranks[rank])
        return self._made[rank]

    def __len__(self) -> int:
        return len(self._window.ranks)


def _table(window: Window, reports: _Reports) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Usable times and their steps, newest last, padded in front; of many ranks the newest only."""
    most = _TAIL if window.world_size > _MANY else None
    kept = [(stats.compute_s, stats.steps) for stats in window.ranks]
    for stats, (times, steps) in zip(window.ranks, kept, strict=True):
        if len(times) != len(steps):
            _usable(stats)
    if most is not None:
        kept = [(times[-most:], steps[-most:]) for times, steps in kept]
    lengths = {len(times) for times, _ in kept}
    if len(lengths) == 1:
        table = np.array([times for times, _ in kept], dtype=np.float64).reshape(len(kept), -1)
        order = np.array([steps for _, steps in kept], dtype=np.int64).reshape(len(kept), -1)
        if bool((np.isfinite(table) & (table > 0.0)).all()) and bool((np.diff(order, axis=1) >= 0).all()):
            return table, order
    own = [reports[rank][-most:] if most is not None else reports[rank] for rank in range(len(reports))]
    longest = max(map(len, own), default=0)
    table, order = np.full((len(own), longest), math.nan), np.zeros((len(own), longest), dtype=np.int64)
    for row, pairs in enumerate(own):
        if pairs:
            table[row, longest - len(pairs) :] = [time_s for _, time_s in pairs]
            order[row, longest - len(pairs) :] = [step for step, _ in pairs]
    return table, order


def _usable(stats: RankStats) -> list[tuple[int, float]]:
    """The rank's reports whose time is a positive number, in order of step."""
    if len(stats.steps) != len(stats.compute_s):
        raise ValueError(
            f"rank {stats.rank} has {len(stats.steps)} steps and {len(stats.compute_s)} times; "
            "expected one time for each step"
        )
    pairs = zip(stats.steps, stats.compute_s, strict=True)
    return sorted((step, time_s) for step, time_s in pairs if math.isfinite(time_s) and time_s > 0.0)


def lower_median(values: Sequence[float]) -> float:
    """The ceil(k/2)-th smallest of k values, always one of them.

    Raises:
        ValueError: No values.
    """
    if not values:
        raise ValueError("lower_median got no values; expected at least one")
    return sorted(values)[(len(values) - 1) // 2]


def _describe(
    window: Window, readings: Readings, rank: int, run: Sequence[tuple[int, float]], usual: dict[str, float]
) -> Straggler:
    """Name the cause by where the rank's excess over the reference went.

    All quantities are totals over the window, so shares diluted by earlier, fast reports still add up:
    excess = sum(t) - k * reference; waiting = share * sum(t) - k * what a usual rank waits per report.
    """
    reference = readings.reference_s
    stats = window.ranks[rank]
    times = [time_s for _, time_s in readings.reports[rank]]
    excess = max(sum(times) - len(times) * reference, 1e-12)
    explained = {}
    for cause, shares in (
        ("input", [other.input_share for other in window.ranks]),
        ("starved", [other.starved_share for other in window.ranks]),
    ):
        if cause not in usual:
            usual[cause] = _usual_s(shares, readings)
        explained[cause] = (shares[rank] * sum(times) - len(times) * usual[cause]) / excess
    cause = max(explained, key=lambda key: explained[key])
    if explained[cause] < _CAUSE_SHARE:
        cause = "compute"
    slow = lower_median([time_s for _, time_s in run])
    evidence = (
        f"last {len(run)} reports slow, {slow * 1e3:.1f} ms against {reference * 1e3:.1f} ms; of the excess "
        f"{_percent(explained['input'])} is waiting for data, {_percent(explained['starved'])} for a CPU"
    )
    return Straggler(rank=stats.rank, slowdown=slow / reference, since_step=run[0][0], cause=cause, evidence=evidence)


def _usual_s(shares: Sequence[float], readings: Readings) -> float:
    """Lower median over ranks of the seconds per report that a share of its time comes to; 0 without reports."""
    times = readings.newest(_RECENT)
    known = np.isfinite(times)
    mean_s = np.where(known, times, 0.0).sum(axis=1) / np.maximum(known.sum(axis=1), 1)
    return lower_median((np.asarray(shares) * mean_s).tolist())


def duration(time_s: float) -> str:
    """`45 ms`, `1.2 s`, for a sentence."""
    return f"{time_s * 1e3:.3g} ms" if time_s < 0.9995 else f"{time_s:.3g} s"


def _percent(part: float) -> str:
    """A part as whole percent between 0 and 100, for a sentence."""
    return f"{100.0 * min(max(part, 0.0), 1.0):.0f} %"
