"""When the next decision is due: ten times per second, or sooner because of reports, since in `sync` all ranks wait for
a slow one."""

from __future__ import annotations

import math

from scheduler.diagnosis.window_stats import slow_limit_s

__all__ = ["DecisionTimer", "SlowReportTrigger"]

_WORTH = (2, 3)
"""Consecutive slow reports of a rank that trigger a decision: one may be a pause, two are evidence, at three the rank
counts as a straggler. Further ones add nothing."""
_SOONER = 0.25  # Part of the interval between decisions after which slow reports may trigger the next one.


class SlowReportTrigger:
    """Counts every rank's consecutive slow reports.

    Args:
        world_size: Number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self._runs = [0] * world_size
        self._limit_s = math.inf

    def set_typical(self, typical_s: float) -> None:
        """Set the typical compute time of a batch in seconds, from the last window; NaN keeps the old one."""
        if not math.isnan(typical_s):
            self._limit_s = slow_limit_s(typical_s)

    def note(self, rank: int, compute_s: float) -> bool:
        """Take in a report's time, corrected as those of windows are; return whether it should trigger a decision."""
        self._runs[rank] = self._runs[rank] + 1 if compute_s > self._limit_s else 0
        return self._runs[rank] in _WORTH


class DecisionTimer:
    """Says when the next decision is due: one interval after the last one, or sooner because of slow reports.

    Args:
        world_size: Number of ranks.
        interval_s: The interval.

    Attributes:
        due_s: When it is due.
        trigger: Counts the slow reports.
    """

    def __init__(self, world_size: int, interval_s: float) -> None:
        self.due_s = 0.0
        self.trigger = SlowReportTrigger(world_size)
        self._interval_s = interval_s
        self._regular_s = 0.0  # When it is due without a trigger.

    def begin(self, now_s: float) -> None:
        """Note that a decision is made now."""
        self.due_s = self._regular_s = now_s + self._interval_s

    def note(self, rank: int, compute_s: float, now_s: float) -> None:
        """Take in a report's time; however many ranks report slow ones, the decision is brought forward once."""
        if self.trigger.note(rank, compute_s):
            self.due_s = min(self.due_s, max(now_s, self._regular_s - (1.0 - _SOONER) * self._interval_s))
