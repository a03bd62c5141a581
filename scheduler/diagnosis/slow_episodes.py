"""Since when ranks are slow, also if that is before the window's first step, and how often slowness changes ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from scheduler.diagnosis.stragglers import PERSISTENCE, Straggler
from scheduler.diagnosis.window_stats import RECENT, Readings
from scheduler.records import Window

__all__ = ["CALM_REPORTS", "SlowSince", "changes_per_step", "first_slow_step"]

CALM_REPORTS = 12
"""An episode ends after this many consecutive own reports that are not slow: equal to the steps without stragglers
after which a job returns to `sync`. Reports, not steps: a slow rank of a relaxed mode makes one every few steps."""

_FASTER = 1.5  # Ratio of two successive times of a rank above which its speed has changed.


def first_slow_step(straggler: Straggler, steps: Mapping[int, int]) -> int:
    """The step since which a straggler is slow; `steps` comes from `SlowSince` and may precede the window."""
    return min(straggler.since_step, steps.get(straggler.rank, straggler.since_step))


def changes_per_step(readings: Readings) -> float:
    """How often a rank becomes slow after another spell of slowness, of the same rank or of another, has ended.

    The first slow ranks of a window are no change: whatever is chosen against them fits until they recover. Spells of
    fewer than `PERSISTENCE` reports, too short for any plan to follow, do not count. A spell also ends when its rank
    becomes `_FASTER` times as fast: times with other batch sizes are known roughly, and may stay above the limit.

    Returns:
        Changes per step, over at most the last `RECENT` steps; 0 if slowness stays where it is.
    """
    slow = readings.slow()
    ranks = np.flatnonzero(slow.any(axis=1))
    if not len(ranks):
        return 0.0
    slow, times, steps = slow[ranks], readings.newest(slow.shape[1])[ranks], readings.steps
    newest, width = int(steps[:, -1].max()), slow.shape[1]
    oldest = max(newest - RECENT, int(steps[np.arange(len(steps)), width - np.maximum(1, readings.counts)].min()))
    steps = steps[ranks]
    rises = np.zeros((len(ranks), width + 1), dtype=np.bool_)
    falls = rises.copy()
    with np.errstate(invalid="ignore"):
        rises[:, 1:-1] = slow[:, 1:] & (~slow[:, :-1] | (times[:, 1:] > _FASTER * times[:, :-1]))
        falls[:, 1:-1] = slow[:, :-1] & (~slow[:, 1:] | (times[:, :-1] > _FASTER * times[:, 1:]))
    cuts = rises | falls
    rises[:, 0], cuts[:, 0], cuts[:, -1] = slow[:, 0], True, True
    row, begin = np.nonzero(cuts[:, :-1])
    stop = np.append(begin[1:], width)
    stop = np.where(np.append(row[1:], -1) == row, stop, width)
    spell = rises[row, begin] & (stop - begin >= PERSISTENCE)
    row, begin, stop = row[spell], begin[spell], stop[spell]
    ended = stop < width
    if not ended.any():
        return 0.0
    begun, first_end = steps[row, begin], int(steps[row[ended], stop[ended] - 1].min())
    return float(np.count_nonzero((begun > first_end) & (begun > oldest)) / max(1, newest - oldest + 1))


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
