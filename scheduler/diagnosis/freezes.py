"""Ranks that freeze repeatedly: recorded, because a window shows a freeze only while it lasts.

A frozen process delays every Horovod collective, whichever ranks take part in it, so only `ps` isolates a job from it,
and `ps` cannot become active before the rank thaws. One freeze may be a debugger or the first of many: it counts half,
and less over time if none follows.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from scheduler.plan.plan import Plan
from scheduler.records import Window
from scheduler.stats import lower_median

__all__ = ["Freezes", "freeze_limit_s"]

_HORIZON = 500.0
"""Synchronous steps for which a freeze is remembered."""

_DISCOUNT = 0.5
"""Subtracted from the number of freezes: a single one may not recur. With the rate between two close freezes instead,
jobs in the simulator switched to servers that cost more than the remaining freezes."""

_LEAST_STEPS = 25.0  # Shortest period of a rate.
_NEGLIGIBLE = 0.05  # Expected cost per step, relative to the usual step, below which freezes of a rank are ignored.

_SILENT_S, _SILENT_STEPS = 1.0, 10.0  # As in `stragglers`.


def freeze_limit_s(typical_s: float) -> float:
    """Seconds without a message above which a rank may be frozen; below, it only computes a batch."""
    return max(_SILENT_S, _SILENT_STEPS * typical_s)


@dataclass(slots=True)
class _Freeze:
    begin: float
    silent_s: float


class Freezes:
    """Counts the freezes of every rank, as long silences."""

    def __init__(self) -> None:
        self._freezes: dict[int, list[_Freeze]] = {}
        self._silent: set[int] = set()
        self._step: int | None = None
        self._now = 0.0
        self._typical_s = math.inf
        self._lost_s = 0.0

    def note(self, window: Window, active: Plan, typical_s: float) -> None:
        """Record the silences of a window.

        Args:
            window: Recent reports; `silent_s` of its ranks is used.
            active: The active plan: under servers x of n gradients, or those of a group, count as a part of a step, and
                in `local` an averaging counts as the steps before it.
            typical_s: Usual compute time.
        """
        if self._step is not None and window.step < self._step:
            self.__init__()  # type: ignore[misc]  # Another run.
        share = 1.0 if window.counts_local else active.steps_per_report(typical_s)
        share /= active.updates_per_step
        self._now += share * (window.step - self._step) if self._step is not None else 0.0
        self._step = window.step
        self._typical_s = typical_s
        limit_s = freeze_limit_s(typical_s)
        silences = window.table.silent_s
        long = np.flatnonzero(silences > limit_s).tolist()
        # If many ranks are silent at once, the cause is elsewhere.
        usual_s = lower_median(silences) if long else 0.0
        silent = {rank: float(silences[rank]) for rank in long if silences[rank] > 2.0 * usual_s}
        for rank, silent_s in silent.items():
            freezes = self._freezes.setdefault(rank, [])
            if rank not in self._silent or not freezes:
                freezes.append(_Freeze(self._now, 0.0))
            longer_s = max(0.0, silent_s - freezes[-1].silent_s)
            freezes[-1].silent_s += longer_s
            self._lost_s += longer_s if active.mode != "ps" else 0.0
        self._silent = set(silent)
        begin = self._now - _HORIZON
        self._freezes = {
            rank: kept
            for rank, freezes in self._freezes.items()
            if (kept := [one for one in freezes if one.begin > begin or (rank in silent and one is freezes[-1])])
        }

    def take_lost_s(self) -> float:
        """Seconds lost to freezes in modes other than `ps` since the last call."""
        lost_s, self._lost_s = self._lost_s, 0.0
        return lost_s

    @property
    def now(self) -> bool:
        """Whether a rank is frozen, by the latest window."""
        return bool(self._silent)

    @property
    def froze(self) -> Collection[int]:
        """Ranks that froze at least once within `_HORIZON`."""
        return self._freezes.keys()

    @property
    def freezing(self) -> Mapping[int, int]:
        """Ranks that are expected to freeze again, with their number of freezes."""
        least_s = _NEGLIGIBLE * self._typical_s
        return {rank: len(freezes) for rank, freezes in self._freezes.items() if self._rank_s(freezes) >= least_s}

    @property
    def per_step_s(self) -> float:
        """Expected delay of every collective by future freezes, seconds per synchronous step."""
        return sum(self._rank_s(self._freezes[rank]) for rank in self.freezing)

    def _rank_s(self, freezes: Sequence[_Freeze]) -> float:
        """Expected delay by one rank: k freezes in t steps predict a rate of (k - 1/2) / t."""
        rate = (len(freezes) - _DISCOUNT) / min(_HORIZON, max(_LEAST_STEPS, self._now))
        return rate * sum(one.silent_s for one in freezes) / len(freezes)
