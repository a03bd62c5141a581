"""Which report is worth a decision at once: in `sync` everybody waits, and a window comes ten times a second only."""

from __future__ import annotations

import math

from scheduler.diagnosis.window_stats import slow_limit_s

__all__ = ["SlowReportTrigger"]

_WORTH = (2, 3)
"""Slow reports in a row: one may be a pause, two are the first evidence, with three a rank is named. Later ones tell
nothing new."""


class SlowReportTrigger:
    """Counts every rank's slow reports in a row.

    Args:
        world_size: Number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self._runs = [0] * world_size
        self._limit_s = math.inf

    def usual(self, typical_s: float) -> None:
        """What a batch usually takes, as the last window says; NaN where it does not."""
        if not math.isnan(typical_s):
            self._limit_s = slow_limit_s(typical_s)

    def note(self, rank: int, compute_s: float) -> bool:
        """Take in a report; whether it is worth a look."""
        self._runs[rank] = self._runs[rank] + 1 if compute_s > self._limit_s else 0
        return self._runs[rank] in _WORTH
