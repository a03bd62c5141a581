"""Links that come and go: a rate remembered, so that a link which was slow a moment ago is not trusted at once.

A rate is measured now and then and says how the link is now. Where contention comes and goes, a choice that follows it
changes mode with every change, and pays for each. What the next steps cost is the mean of what a byte costs, so that is
what is remembered.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from scheduler.plan.plan import Plan
from scheduler.records import Window

__all__ = ["LinkMemory"]

Array = npt.NDArray[np.float64]

_HALF_LIFE, _LONGEST = 48.0, 4
"""Of what is remembered, in synchronous steps: a prediction looks ahead about as far. A link that was slow k times is
remembered k times as long, up to so many."""

_SLOW, _WELL = 2.0, 1.3  # Times what a byte usually costs, where a link begins to be slow and where it is well again.


class LinkMemory:
    """The ranks' links as far back as it matters."""

    def __init__(self) -> None:
        self._cost: Array | None = None
        self._step: int | None = None
        self._times = np.zeros(0)
        self._slow = np.zeros(0, dtype=np.bool_)

    def note(self, window: Window, active: Plan, rate: Array) -> Array:
        """Take in the rates of a window.

        Args:
            window: For its step.
            active: The plan in force: under servers x of n gradients are a step.
            rate: Of every rank, bytes per second, infinite where unknown, shape (n_ranks,).

        Returns:
            The rates to expect: what they are now or, where a link was slower of late, the mean over that time.
        """
        now = 1.0 / rate
        if self._cost is None or self._step is None or window.step < self._step or len(now) != len(self._cost):
            self._cost, self._step = now, window.step
            self._times, self._slow = np.zeros(len(now)), np.zeros(len(now), dtype=np.bool_)
            self._count(now)
            return rate
        self._count(now)
        share = active.quorum / active.world_size if active.mode in ("ps", "grouped") else 1.0
        keep = np.power(0.5, share * (window.step - self._step) / (_HALF_LIFE * np.clip(self._times, 1, _LONGEST)))
        # A rank whose rate was unknown until now has no past.
        past = np.where(self._cost > 0.0, self._cost, now)
        self._cost = keep * past + (1.0 - keep) * now  # One that is not measured any more is forgotten, too.
        self._step = window.step
        with np.errstate(divide="ignore"):
            expected: Array = 1.0 / np.maximum(now, self._cost)
        return expected

    def _count(self, now: Array) -> None:
        """Notice links that have become slow, or well again."""
        usual = float(np.sort(now)[(len(now) - 1) // 2])
        begins = ~self._slow & (now > _SLOW * usual) & (usual > 0.0)  # Where most are unknown nothing is usual.
        self._times += begins
        self._slow = (self._slow | begins) & (now > _WELL * usual)
