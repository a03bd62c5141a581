"""Since when ranks are slow, also if that is before the window's first step."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from scheduler.diagnosis.stragglers import Straggler
from scheduler.diagnosis.window_stats import Readings
from scheduler.records import Window

__all__ = ["CALM_REPORTS", "SlowSince", "first_slow_step"]

CALM_REPORTS = 12
"""An episode ends after this many consecutive own reports that are not slow: equal to the steps without stragglers
after which a job returns to `sync`. Reports, not steps: a slow rank of a relaxed mode makes one every few steps."""


def first_slow_step(straggler: Straggler, steps: Mapping[int, int]) -> int:
    """The step since which a straggler is slow; `steps` comes from `SlowSince` and may precede the window."""
    return min(straggler.since_step, steps.get(straggler.rank, straggler.since_step))


class SlowSince:
    """Records the first slow step of every rank's current episode, from all windows of a job in order.

    An episode ends with `CALM_REPORTS` reports that are not slow, so intermittent slowness is one episode.
    """

    def __init__(self) -> None:
        self._steps: dict[int, int] = {}

    @property
    def steps(self) -> Mapping[int, int]:
        """First slow step of each rank's current episode."""
        return self._steps

    def note(self, window: Window) -> None:
        """Add a window; one seen before, or without a reference time, changes nothing."""
        readings = Readings.of(window)
        if math.isnan(readings.reference_s):
            return
        slow = readings.slow()
        width = slow.shape[1]
        ranks = np.flatnonzero(slow[:, -CALM_REPORTS:].any(axis=1))
        slow, columns, never = slow[ranks], np.arange(width), -width - CALM_REPORTS
        latest = np.maximum.accumulate(np.where(slow, columns, never), axis=1)
        before = np.concatenate([np.full((len(ranks), 1), never), latest[:, :-1]], axis=1)
        # The last slow report that follows `CALM_REPORTS` others or the beginning of the window.
        begins = slow & (columns - before > CALM_REPORTS)
        first = width - 1 - np.argmax(begins[:, ::-1], axis=1)
        # Certain if the calm period before it is in the window; else the episode may have begun earlier.
        certain = first - (width - readings.counts[ranks]) >= CALM_REPORTS
        found = readings.steps[ranks, first]
        self._steps = {
            rank: step if sure else min(step, self._steps.get(rank, step))
            for rank, step, sure in zip(ranks.tolist(), found.tolist(), certain.tolist(), strict=True)
        }
