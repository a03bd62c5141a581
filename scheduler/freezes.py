"""Ranks that stand still again and again: remembered, because a window tells of a freeze only while it lasts.

A frozen process keeps every Horovod collective waiting, whoever takes part in it, so the mode that isolates a job from
it is `ps` alone, and that cannot be taken up before the rank thaws. One freeze may be a debugger; two within
`_HORIZON` steps are a habit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from scheduler.plans import Plan
from scheduler.records import Window

__all__ = ["Freezes"]

_HORIZON = 500.0
"""In synchronous steps: two freezes further apart have nothing to do with each other."""

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
        limit_s = max(_SILENT_S, _SILENT_STEPS * typical_s)
        silences = window.table.silent_s
        long = np.flatnonzero(silences > limit_s).tolist()
        # Where many are silent at once it is not them.
        usual_s = float(np.sort(silences)[(len(silences) - 1) // 2]) if long else 0.0
        silent = {rank: float(silences[rank]) for rank in long if silences[rank] > 2.0 * usual_s}
        for rank, silent_s in silent.items():
            spells = self._spells.setdefault(rank, [])
            if rank in self._silent:
                spells[-1].silent_s = max(spells[-1].silent_s, silent_s)
            else:
                spells.append(_Spell(self._now, silent_s))
        self._silent = set(silent)
        begin = self._now - _HORIZON
        self._spells = {r: kept for r, s in self._spells.items() if (kept := [one for one in s if one.begin > begin])}

    @property
    def froze(self) -> Collection[int]:
        """Ranks that froze at all, of late."""
        return self._spells.keys()

    @property
    def habitual(self) -> Mapping[int, int]:
        """How often each rank froze that did so twice or more."""
        return {rank: len(spells) for rank, spells in self._spells.items() if len(spells) > 1}

    @property
    def per_step_s(self) -> float:
        """Time per synchronous step that the habit costs every collective, seconds; 0 without one."""
        total_s = 0.0
        for rank in self.habitual:
            spells = self._spells[rank]
            # As many gaps as spells but one: the last spell ends the last gap.
            steps = max(1.0, spells[-1].begin - spells[0].begin)
            total_s += sum(one.silent_s for one in spells[1:]) / steps
        return total_s
