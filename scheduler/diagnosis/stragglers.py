"""Which ranks are slow, by how much, since when and why: a pure function of a window of reports.

`find_stragglers` uses compute times (causes compute, input and starved), link rates (link), and silence (starved: a
process that is stopped or gets no processor).

Compute times are measured before the collective (`StepTimes.compute_s`): inside a collective all ranks see the same
wall time, and waiting ranks spin at full load, so times measured there identify no rank.

The reference is the lower median over ranks of each rank's lower median. Two simpler references fail:

* The minimum. "20 % over the fastest" fires in 80 % and 96 % of the uncontended iterations of the STAR logs
  (transformer and alexnet, 8 workers), because the minimum of eight jittering numbers lies well below the others.
* The usual median. With two ranks it is their mean: 1 s and 4 s give 2.5 s and the slow rank looks 1.6 times
  slow; with two of four ranks slow it lies between the halves and reduces a factor of 2 to 1.33.

The lower median is the (ceil(n/2))-th smallest value: the largest order statistic that still belongs to the fast ranks
when half are slow, hence the one with the fewest false alarms that can detect half a job. When more than half are slow,
slow is the job's normal speed, and no rank is a straggler.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler.diagnosis.links import LINK_RATIO, link_ratios, ring_bytes, worth_a_switch
from scheduler.diagnosis.window_stats import MIN_REPORTS, RECENT, RESOLUTION_S, Readings
from scheduler.records import Window
from scheduler.stats import duration, lower_median

__all__ = [
    "CAUSES",
    "MIN_REPORTS",
    "PERSISTENCE",
    "RESOLUTION_S",
    "Readings",
    "Straggler",
    "find_stragglers",
]

_Floats = npt.NDArray[np.float64]

CAUSES = ("compute", "input", "starved", "link")
"""`compute`: its computation takes longer. `input`: it waits for data. `starved`: its thread is runnable but gets
no processor, or the process sends nothing at all. `link`: its network is slow."""

PERSISTENCE = 3
"""Consecutive slow reports that make a straggler. The longest run in undisturbed compute times is two."""

_CAUSE_SHARE = 0.5
"""Share of a rank's excess time that waiting for data, or for a processor, must explain to be the cause: more than
everything else together."""

_WIRE_MOST = 2.0  # Largest multiple of the transfer time that a step's communication attributes to the link.

SILENT_STEPS = 10
"""A rank is silent after this many usual steps, three of its own, and one second: agents send heartbeats more often."""

_SILENT_S = 1.0
_OWN_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that is slow now.

    Attributes:
        rank: The rank.
        slowdown: Median of its slow reports relative to the reference; 4.0 means that a batch takes four times as long.
            For a link: median rate of the others relative to its own. For silence: its duration relative to the
            reference.
        since_step: Global step of the first report of the current slow run, or the window's first if it began before
            (see `scheduler.diagnosis.slow_episodes`); the window's end for a link and for silence, which have no
            history.
        cause: One of `CAUSES`.
        evidence: The numbers behind the diagnosis in one phrase.
        silent: Whether it is a straggler by silence.
    """

    rank: int
    slowdown: float
    since_step: int
    cause: str
    evidence: str
    silent: bool = False

    @property
    def sentence(self) -> str:
        """For people: `rank 3 computes 4.0x slower than the median since step 410 (compute)`."""
        if self.silent or self.cause == "link":
            return f"rank {self.rank} {self.evidence} ({self.cause})"
        return (
            f"rank {self.rank} computes {self.slowdown:.1f}x slower than the median "
            f"since step {self.since_step} ({self.cause})"
        )


def find_stragglers(window: Window, *, readings: Readings | None = None) -> tuple[Straggler, ...]:
    """Find the ranks that are slow now, in order of rank; if a rank has several causes, the costliest is given.

    Compute: its last `PERSISTENCE` reports are all slow, that is above `THRESHOLD` times the reference and, so that a
    slowdown of the whole job does not count, above `THRESHOLD` times the fastest rank at that step: see `Readings`.
    Link: its rate is below half of the others' median, and a usual link would save enough of its step; this can be
    detected before there are enough compute times.
    Silence: it sent nothing for many steps while the others did.

    Args:
        window: Recent reports of all ranks. `input_share` and `starved_share` are ratios of sums over its reports.
        readings: Those of the window, if the caller has them.

    Raises:
        ValueError: A rank has different numbers of steps and times.
    """
    readings = readings or Readings.of(window)
    if math.isnan(readings.typical_s):
        return ()
    table = window.table
    runs = readings.run_lengths()
    ratios = link_ratios(table.link_bytes_per_s)
    suspects = (runs >= PERSISTENCE) | (ratios < LINK_RATIO) | (table.silent_s > _SILENT_S)
    found = []
    excess: _Excess | None = None
    for rank in np.flatnonzero(suspects).tolist():
        compute = None
        if runs[rank] >= PERSISTENCE:
            excess = excess or _Excess(window, readings)
            compute = excess.describe(rank)
        link, saved_s = _slow_link(window, readings, rank, float(ratios[rank]))
        if link is not None and compute is not None:
            link = None if (compute.slowdown - 1.0) * readings.reference_s > saved_s else link
        named = _silence(window, readings, rank) or link or compute
        if named is not None:
            found.append(named)
    return tuple(found)


def _slow_link(window: Window, readings: Readings, rank: int, ratio: float) -> tuple[Straggler | None, float]:
    """The rank as a straggler by its link, and the seconds per step that a usual link would save; None, 0 if not."""
    if not ratio < LINK_RATIO:
        return None, 0.0
    own_s = _comm_s(window, rank)
    saved_s = own_s * (1.0 - ratio)
    if not worth_a_switch(saved_s, readings.typical_s + own_s):
        return None, 0.0
    rate = float(window.table.link_bytes_per_s[rank])
    evidence = (
        f"has a link of {rate / 1e6:.3g} MB/s, {1.0 / ratio:.1f}x slower than the others', and communicates "
        f"{duration(own_s)} per step"
    )
    link = Straggler(rank=rank, slowdown=1.0 / ratio, since_step=window.step, cause="link", evidence=evidence)
    return link, saved_s


def _comm_s(window: Window, rank: int) -> float:
    """Communication time of the rank per step: measured, else a ring's transfer, 0 if unknown.

    Limited to `_WIRE_MOST` times the transfer of a ring: longer times have other causes, such as too few cores.
    """
    table = window.table
    times = [time_s for time_s in table.comm_s[rank][-RECENT:] if math.isfinite(time_s) and time_s >= 0.0]
    n = window.world_size
    wire_s = ring_bytes(n, window.comm_bytes * window.reduced_part) / float(table.link_bytes_per_s[rank])
    if len(times) >= MIN_REPORTS:
        return min(lower_median(times), _WIRE_MOST * wire_s) if window.comm_bytes else lower_median(times)
    return wire_s


def _silence(window: Window, readings: Readings, rank: int) -> Straggler | None:
    """The rank as a straggler that sends nothing while the others do, or None."""
    silences = window.table.silent_s
    silent_s = float(silences[rank])
    if not silent_s > _SILENT_S or math.isnan(readings.reference_s):
        return None
    own = [time_s for _, time_s in readings.reports[rank][-RECENT:]]
    if len(own) < MIN_REPORTS:
        return None
    limit_s = max(_SILENT_S, SILENT_STEPS * readings.reference_s, _OWN_STEPS * lower_median(own))
    if not silent_s > limit_s:
        return None
    others = lower_median(np.delete(silences, rank))
    if not silent_s > 2.0 * others:
        return None
    return Straggler(
        rank=rank,
        slowdown=silent_s / readings.reference_s,
        since_step=window.step,
        cause="starved",
        evidence=f"has sent nothing for {silent_s:.1f} s",
        silent=True,
    )


class _Excess:
    """Determines the cause of a rank's excess time over the reference.

    All quantities are totals over the window, so that earlier, fast reports do not matter:
    excess = sum(t) - k * reference; waiting = share * sum(t) - k * usual waiting time per report.
    """

    def __init__(self, window: Window, readings: Readings) -> None:
        self._readings = readings
        self._total_s = readings.total_s()
        self._shares = {"input": window.table.input_share, "starved": window.table.starved_share}
        mean_s = self._total_s / np.maximum(readings.counts, 1)
        self._usual_s = {cause: lower_median(shares * mean_s) for cause, shares in self._shares.items()}

    def describe(self, rank: int) -> Straggler:
        """The `Straggler` of a rank in a slow run."""
        reference = self._readings.reference_s
        total_s, count = float(self._total_s[rank]), int(self._readings.counts[rank])
        excess_s = max(total_s - count * reference, 1e-12)
        explained = {
            cause: (float(shares[rank]) * total_s - count * self._usual_s[cause]) / excess_s
            for cause, shares in self._shares.items()
        }
        cause = max(explained, key=lambda key: explained[key])
        if explained[cause] < _CAUSE_SHARE:
            cause = "compute"
        run = self._readings.slow_run(rank)
        slow = lower_median([time_s for _, time_s in run])
        evidence = (
            f"last {len(run)} reports slow, {slow * 1e3:.1f} ms against {reference * 1e3:.1f} ms; of the excess "
            f"{_percent(explained['input'])} is waiting for data, {_percent(explained['starved'])} for a CPU"
        )
        return Straggler(rank=rank, slowdown=slow / reference, since_step=run[0][0], cause=cause, evidence=evidence)


def _percent(part: float) -> str:
    """A fraction as whole percent, clipped to 0..100."""
    return f"{100.0 * min(max(part, 0.0), 1.0):.0f} %"
