"""How long ranks wait for each other, and what communication takes besides: told apart without comparing clocks."""

from __future__ import annotations

import math
import statistics
from collections import deque

__all__ = ["Arrivals"]

_KEPT = 64
_STEPS_KEPT = 4 * _KEPT


class Arrivals:
    """Waits and arrivals of every rank, the recent ones.

    Args:
        world_size: Number of ranks.

    Attributes:
        comm_s: Recent times of a step's communication without waiting for others, oldest first.
    """

    def __init__(self, world_size: int) -> None:
        self.comm_s: deque[float] = deque(maxlen=_KEPT)
        self._wait_s: list[deque[float]] = [deque(maxlen=_KEPT) for _ in range(world_size)]
        self._offset_s: list[deque[float]] = [deque(maxlen=_KEPT) for _ in range(world_size)]
        self._first_s: dict[int, float] = {}
        self._step_waits_s: dict[int, dict[int, float]] = {}

    def waited(self, rank: int, wait_s: float) -> None:
        """A rank was inside a collective for so long."""
        self._wait_s[rank].append(wait_s)

    def in_lockstep(self, rank: int, step: int, wait_s: float) -> None:
        """The same of a step that began with the last rank.

        Waiting ended at the same moment everywhere, so the longest wait minus one's own is the time one came later.
        """
        if step < 0:
            return  # What a rank tells with its first step: there was none before.
        waits = self._step_waits_s.setdefault(step, {})
        waits[rank] = wait_s
        if len(waits) == len(self._wait_s):
            del self._step_waits_s[step]
            self.comm_s.append(min(waits.values()))  # Of the last to come: it waited for nobody.
            for other, other_s in waits.items():
                self._offset_s[other].append(max(waits.values()) - other_s)
        elif len(self._step_waits_s) > _STEPS_KEPT:  # Those of which not all ranks told.
            del self._step_waits_s[next(iter(self._step_waits_s))]

    def came(self, rank: int, step: int, now_s: float) -> None:
        """A rank's gradient of a step that does not wait for all is here, by the clock of the coordinator."""
        if step not in self._first_s:
            self._first_s[step] = now_s
            if len(self._first_s) > _STEPS_KEPT:
                del self._first_s[next(iter(self._first_s))]
        self._offset_s[rank].append(now_s - self._first_s[step])

    @property
    def usual_comm_s(self) -> float:
        """Median of `comm_s`; NaN if unknown."""
        return statistics.median(self.comm_s) if self.comm_s else math.nan

    def offsets_s(self) -> list[float]:
        """Median arrival of every rank behind the first one of its step; NaN if unknown.

        A gradient that missed its step counts with the time at which it came after all.
        """
        return [statistics.median(items) if items else math.nan for items in self._offset_s]

    def waits_s(self) -> list[float]:
        """Median time of every rank inside the collective; the rank with the least is the slowest. NaN if unknown."""
        return [statistics.median(items) if items else math.nan for items in self._wait_s]
