"""Who is slow, rank by rank in plain Python: what the arrays of `scheduler.diagnosis.stragglers` are compared with."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

from scheduler.diagnosis.links import LINK_RATIO
from scheduler.diagnosis.stragglers import PERSISTENCE, SILENT_STEPS, Straggler
from scheduler.diagnosis.window_stats import MIN_REPORTS, RECENT, RESOLUTION_S, THRESHOLD
from scheduler.records import RankStats, Window
from scheduler.stats import duration, lower_median

__all__ = ["Readings", "find_stragglers", "link_ratio"]

_SILENT_S, _OWN_STEPS, _CAUSE_SHARE = 1.0, 3, 0.5


def find_stragglers(window: Window, *, readings: Readings | None = None) -> tuple[Straggler, ...]:
    """As `scheduler.diagnosis.stragglers.find_stragglers`."""
    readings = Readings(window) if readings is None else readings
    found = []
    for rank in range(window.world_size):
        run = readings.slow_run(rank)
        compute = _describe(window, readings, rank, run) if len(run) >= PERSISTENCE else None
        link, saved_s = _slow_link(window, readings, rank)
        if link is not None and compute is not None:
            link = None if (compute.slowdown - 1.0) * readings.reference_s > saved_s else link
        named = _silence(window, readings, rank) or link or compute
        if named is not None:
            found.append(named)
    return tuple(found)


def link_ratio(window: Window, rank: int) -> float:
    """The rate of the rank's link over the lower median of the others'; NaN where either is unknown."""
    own = window.ranks[rank].link_bytes_per_s
    rates = [other.link_bytes_per_s for index, other in enumerate(window.ranks) if index != rank]
    known = [rate for rate in rates if math.isfinite(rate) and rate > 0.0]
    # Fewer than half are no reference.
    if not known or 2 * len(known) < len(rates) or not 0.0 < own < math.inf:
        return math.nan
    return own / lower_median(known)


def _slow_link(window: Window, readings: Readings, rank: int) -> tuple[Straggler | None, float]:
    """The rank as a straggler by its link, and the seconds per step that a usual link would save."""
    ratio = link_ratio(window, rank)
    typical_s = readings.reference_s
    if math.isnan(typical_s):  # Too early to judge anybody by times.
        latest = [reports[-1][1] for reports in readings.reports if reports]
        typical_s = lower_median(latest) if latest else math.nan
    if math.isnan(typical_s) or not ratio < LINK_RATIO:
        return None, 0.0
    own_s = _comm_s(window, rank)
    saved_s = own_s * (1.0 - ratio)
    if not (saved_s > RESOLUTION_S and saved_s > 0.2 * (typical_s + own_s)):
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
    times = [time_s for time_s in stats.comm_s[-RECENT:] if math.isfinite(time_s) and time_s >= 0.0]
    n = window.world_size
    wire_s = 2.0 * (n - 1) / n * window.comm_bytes / stats.link_bytes_per_s
    if len(times) >= MIN_REPORTS:
        return min(lower_median(times), 2.0 * wire_s) if window.comm_bytes else lower_median(times)
    return wire_s


def _silence(window: Window, readings: Readings, rank: int) -> Straggler | None:
    """The rank as a straggler of which nothing is heard, though the others are."""
    silent_s = window.ranks[rank].silent_s
    own = [time_s for _, time_s in readings.reports[rank][-RECENT:]]
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
        evidence=f"has sent nothing for {silent_s:.1f} s",
        silent=True,
    )


class Readings:
    """As `scheduler.diagnosis.window_stats.Readings`."""

    def __init__(self, window: Window) -> None:
        self.reports = [_usable(stats) for stats in window.ranks]
        self.reference_s = self._reference()
        self._steps = [[step for step, _ in reports] for reports in self.reports]
        self._floors: dict[int, float] = {}

    def is_slow(self, step: int, time_s: float) -> bool:
        """Whether a report exceeds the reference, and the fastest rank of its step, by the threshold."""
        if math.isnan(self.reference_s) or time_s <= self.reference_s + RESOLUTION_S:
            return False
        return time_s > THRESHOLD * max(self.reference_s, self._floor_s(step))

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
            lower_median([time_s for _, time_s in reports[-RECENT:]])
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
    return f"{100.0 * min(max(part, 0.0), 1.0):.0f} %"
