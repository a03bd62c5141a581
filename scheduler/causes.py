"""Who is slow, by how much, since when and why: a pure function of a window of reports.

The question is asked of compute times taken before the collective (`StepReport.compute_s`): inside a
collective the waiting ranks spin at full load and every rank sees the same wall time, so nothing measured
there names anybody.

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

from scheduler.records import RankStats, Window

__all__ = [
    "CAUSES",
    "MIN_REPORTS",
    "PERSISTENCE",
    "RESOLUTION_S",
    "THRESHOLD",
    "Readings",
    "Straggler",
    "find_stragglers",
    "lower_median",
]

CAUSES = ("compute", "input", "starved", "link")
"""`compute`: the rank's own work takes longer. `input`: it waits for data. `starved`: its thread is runnable
but gets no processor. `link`: its network is slow; invisible in compute times, so nothing in this module says
it yet."""

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

_CAUSE_SHARE = 0.5
"""Part of a rank's excess time that waiting for data, or for a processor, must explain to be called the
cause.
Half: then it explains more than everything else together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that is slow now.

    Attributes:
        rank: The rank.
        slowdown: Median of its slow reports over the reference; 4.0 means that a batch takes it four times as
            long.
        since_step: Global step of the first report of the present slow run, or the window's first if it began
            before.
        cause: One of `CAUSES`.
        evidence: The numbers behind it in one phrase.
    """

    rank: int
    slowdown: float
    since_step: int
    cause: str
    evidence: str

    @property
    def sentence(self) -> str:
        """What a person reads: `rank 3 computes 4.0x slower than the median since step 410 (compute)`."""
        return (
            f"rank {self.rank} computes {self.slowdown:.1f}x slower than the median "
            f"since step {self.since_step} ({self.cause})"
        )


def find_stragglers(
    window: Window, *, threshold: float = THRESHOLD, persistence: int = PERSISTENCE
) -> tuple[Straggler, ...]:
    """The ranks whose last `persistence` reports are all slow, in order of rank.

    A report is slow above `threshold` times the reference and, where the whole job has just become slower,
    above `threshold` times the fastest rank at that step: see `Readings`.

    Args:
        window: Recent reports of all ranks. `input_share` and `starved_share` are ratios of sums over the
            reports in it.
        threshold: Multiple of the reference, above 1.
        persistence: Consecutive most recent reports that must be slow, at least 1. A single spike names
            nobody.

    Raises:
        ValueError: A threshold out of range, or a rank whose steps and times differ in number.
    """
    if not threshold > 1.0:
        raise ValueError(f"threshold is {threshold}; expected a number above 1")
    if persistence < 1:
        raise ValueError(f"persistence is {persistence}; expected at least 1")
    readings = Readings(window, threshold=threshold)
    found = []
    for rank in range(window.world_size):
        run = readings.slow_run(rank)
        if len(run) >= persistence:
            found.append(_describe(window, readings, rank, run))
    return tuple(found)


class Readings:
    """A window made ready for questions: usable reports, the reference, and which reports are slow.

    Attributes:
        reports: Per rank its usable reports as (step, seconds), oldest first; times that are no positive
            number are left out.
        reference_s: What one batch usually takes a rank of the fast half, in seconds; NaN while fewer than
            half of the ranks can be judged, and then no report is slow. Both medians in it are lower ones.
            The inner one matters when a straggler alternates between two ranks: each is then slow in half of
            its reports, and the usual median would lie between its two speeds.

    Raises:
        ValueError: A rank whose steps and times differ in number.
    """

    def __init__(self, window: Window, *, threshold: float = THRESHOLD) -> None:
        self.reports = [_usable(stats) for stats in window.ranks]
        self.reference_s = self._reference()
        self._threshold = threshold
        self._steps = [[step for step, _ in reports] for reports in self.reports]
        self._floors: dict[int, float] = {}

    def is_slow(self, step: int, time_s: float) -> bool:
        """Whether a report exceeds the reference, and the fastest rank of its step, by the threshold."""
        if math.isnan(self.reference_s) or time_s <= self.reference_s + RESOLUTION_S:
            return False
        return time_s > self._threshold * max(self.reference_s, self._floor_s(step))

    def any_slow(self, after: int) -> bool:
        """Whether any report of a step later than `after` is slow."""
        return any(self.is_slow(step, time_s) for reports in self.reports for step, time_s in reports if step > after)

    def slow_run(self, rank: int) -> list[tuple[int, float]]:
        """The unbroken run of slow reports that ends with the rank's latest one, oldest first."""
        run: list[tuple[int, float]] = []
        if len(self.reports[rank]) < MIN_REPORTS:
            return run
        for step, time_s in reversed(self.reports[rank]):
            if not self.is_slow(step, time_s):
                break
            run.append((step, time_s))
        return run[::-1]

    def _reference(self) -> float:
        medians = [
            lower_median([time_s for _, time_s in reports[-_RECENT:]])
            for reports in self.reports
            if len(reports) >= MIN_REPORTS
        ]
        if len(medians) < 2 or 2 * len(medians) < len(self.reports):
            return math.nan
        return lower_median(medians)

    def _floor_s(self, step: int) -> float:
        """Shortest of the ranks' times in force at `step`, in seconds; 0 where a rank has none yet.

        A report is in force from its step to the rank's next one. When all ranks become slower together
        (longer sequences, a bigger batch) even the fastest does, and no rank is a straggler although all
        exceed the reference, which is made of older reports.
        """
        if step not in self._floors:
            shortest = math.inf
            for reports, steps in zip(self.reports, self._steps, strict=True):
                index = bisect.bisect_right(steps, step)
                shortest = min(shortest, reports[index - 1][1] if index else 0.0)
            self._floors[step] = shortest
        return self._floors[step]


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


def _describe(window: Window, readings: Readings, rank: int, run: Sequence[tuple[int, float]]) -> Straggler:
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
        usual = lower_median([_per_report_s(*item) for item in zip(shares, readings.reports, strict=True)])
        explained[cause] = (shares[rank] * sum(times) - len(times) * usual) / excess
    cause = max(explained, key=lambda key: explained[key])
    if explained[cause] < _CAUSE_SHARE:
        cause = "compute"
    slow = lower_median([time_s for _, time_s in run])
    evidence = (
        f"last {len(run)} reports slow, {slow * 1e3:.1f} ms against {reference * 1e3:.1f} ms; of the excess "
        f"{_percent(explained['input'])} is waiting for data, {_percent(explained['starved'])} for a CPU"
    )
    return Straggler(rank=stats.rank, slowdown=slow / reference, since_step=run[0][0], cause=cause, evidence=evidence)


def _per_report_s(share: float, reports: Sequence[tuple[int, float]]) -> float:
    """Seconds per report that a share of a rank's time comes to; 0 where it has no reports."""
    return share * sum(time_s for _, time_s in reports) / len(reports) if reports else 0.0


def _percent(part: float) -> str:
    """A part as whole percent between 0 and 100, for a sentence."""
    return f"{100.0 * min(max(part, 0.0), 1.0):.0f} %"
