"""Which reports trigger a decision before the next window (10 per second): in `sync` all ranks wait for a slow one."""

from __future__ import annotations

import math

from scheduler.diagnosis.window_stats import slow_limit_s

__all__ = ["SlowReportTrigger"]

_WORTH = (2, 3)
"""Consecutive slow reports of a rank that trigger a decision: one may be a pause, two are evidence, at three the rank
counts as a straggler. Further ones add nothing."""


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
