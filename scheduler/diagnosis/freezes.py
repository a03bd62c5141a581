"""Ranks that freeze repeatedly: recorded, because a window shows a freeze only while it lasts.

A frozen process keeps every Horovod collective waiting, whichever ranks take part in it, so the mode that isolates a
job from it is `ps` alone, and that cannot be taken up before the rank thaws. One freeze may be a debugger, or the first
of many: it counts by half, and ever less the longer none follows.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from scheduler.plan.plan import Plan
from scheduler.records import Window

__all__ = ["Freezes"]

_HORIZON = 500.0
"""In synchronous steps: two freezes further apart have nothing to do with each other."""

_DOUBT = 0.5
"""Of the freezes that came, what is taken for chance: one that came once comes again or not. The pace between two that
came close together is no pace: by it, jobs in the simulator went to servers that cost more than the freezes left."""

_LEAST_STEPS = 25.0  # What came sooner after the beginning says nothing of a pace.
_WORTH = 0.05  # Part of a usual step: whose freezes cost less than that is not in trouble any more.

_SILENT_S, _SILENT_STEPS = 1.0, 10.0  # As `causes` names a silent rank.


@dataclass(slots=True)
class _Spell:
    begin: float
    silent_s: float


class Freezes:
    """Counts the silences of every rank."""

    def __init__(self) -> None:
        self._spells: dict[int, list[_Spell]] = {}
        self._silent: set[int] = set()
        self._step: int | None = None
        self._now = 0.0
        self._typical_s = math.inf
        self._lost_s = 0.0

    def note(self, window: Window, active: Plan, typical_s: float) -> None:
        """Take in a window.

        Args:
            window: Recent reports; `silent_s` of its ranks counts.
            active: The plan in force: under servers x of n gradients are a step.
            typical_s: Usual compute time.
        """
        if self._step is not None and window.step < self._step:
            self.__init__()  # type: ignore[misc]  # Another run.
        share = active.quorum / active.world_size if active.mode in ("ps", "grouped") else 1.0
        self._now += share * (window.step - self._step) if self._step is not None else 0.0
        self._step = window.step
        self._typical_s = typical_s
        limit_s = max(_SILENT_S, _SILENT_STEPS * typical_s)
        silences = window.table.silent_s
        long = np.flatnonzero(silences > limit_s).tolist()
        # Where many are silent at once it is not them.
        usual_s = float(np.sort(silences)[(len(silences) - 1) // 2]) if long else 0.0
        silent = {rank: float(silences[rank]) for rank in long if silences[rank] > 2.0 * usual_s}
        for rank, silent_s in silent.items():
            spells = self._spells.setdefault(rank, [])
            if rank not in self._silent or not spells:
                spells.append(_Spell(self._now, 0.0))
            longer_s = max(0.0, silent_s - spells[-1].silent_s)
            spells[-1].silent_s += longer_s
            self._lost_s += longer_s if active.mode != "ps" else 0.0
        self._silent = set(silent)
        begin = self._now - _HORIZON
        self._spells = {
            rank: kept
            for rank, spells in self._spells.items()
            if (kept := [one for one in spells if one.begin > begin or (rank in silent and one is spells[-1])])
        }

    def take_lost_s(self) -> float:
        """Seconds that freezes cost the job since this was asked last, as it was not at servers."""
        lost_s, self._lost_s = self._lost_s, 0.0
        return lost_s

    @property
    def now(self) -> bool:
        """Whether some rank stands still, by the latest window."""
        return bool(self._silent)

    @property
    def froze(self) -> Collection[int]:
        """Ranks that froze at all, of late."""
        return self._spells.keys()

    @property
    def freezing(self) -> Mapping[int, int]:
        """How often each rank froze that is expected to do so again."""
        worth_s = _WORTH * self._typical_s
        return {rank: len(spells) for rank, spells in self._spells.items() if self._rank_s(spells) >= worth_s}

    @property
    def per_step_s(self) -> float:
        """Time per synchronous step that freezes to come are expected to cost every collective, seconds."""
        return sum(self._rank_s(self._spells[rank]) for rank in self.freezing)

    def _rank_s(self, spells: Sequence[_Spell]) -> float:
        """The same, of one rank's freezes: of k in t steps, k - 1/2 are taken for the pace of those to come."""
        pace = (len(spells) - _DOUBT) / min(_HORIZON, max(_LEAST_STEPS, self._now))
        return pace * sum(one.silent_s for one in spells) / len(spells)
