"""Links: which are slow, whether that matters, and what to expect of one that was slow a moment ago.

A rate is measured now and then and says how the link is now. Where contention comes and goes, a choice that follows it
changes mode with every change, and pays for each. What the next steps cost is the mean of what a byte costs, so that is
what `LinkMemory` keeps.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from scheduler.diagnosis.window_stats import RESOLUTION_S
from scheduler.plan.plan import Plan
from scheduler.records import Window

__all__ = [
    "LINK_CALM",
    "LINK_RATIO",
    "LinkMemory",
    "link_ratio",
    "link_ratios",
    "ring_bytes",
    "slow_links",
    "usual_rate",
    "worth_a_switch",
]

Array = npt.NDArray[np.float64]

LINK_RATIO = 0.5
"""A link is slow below this part of the median of the others', and `LINK_CALM` is where it is normal: between
loopback, 10 Gb/s and 1 Gb/s lie factors of ten, between equal links of one job some ten percent."""

LINK_CALM = 0.75

_SHARE = 0.2
"""Part of the rank's step that a usual link would save. Less is not worth a switch, and on it depend false alarms where
the gradient is so small that its rate measures latency."""

_HALF_LIFE, _LONGEST = 48.0, 4
"""Of what is remembered, in synchronous steps: a prediction looks ahead about as far. A link that was slow k times is
remembered k times as long, up to so many."""

_SLOW, _WELL = 1.0 / LINK_RATIO, 1.3
"""Times what a byte usually costs, where a link begins to be slow and where it is normal."""


def link_ratio(window: Window, rank: int) -> float:
    """The rate of the rank's link over the lower median of the others'; NaN where either is unknown."""
    return float(link_ratios(window.table.link_bytes_per_s)[rank])


def link_ratios(rates: Array) -> Array:
    """`link_ratio` of all ranks."""
    known = np.isfinite(rates) & (rates > 0.0)
    ordered, others = np.sort(rates[known]), len(rates) - 1
    count = len(ordered) - 1  # Others that are known, of a rank that is.
    # Fewer than half are no reference.
    if count < 1 or 2 * count < others:
        return np.full(len(rates), math.nan)
    middle = (count - 1) // 2
    # Without a rank itself, those above it move down by one place.
    usual = np.where(rates <= ordered[middle], ordered[middle + 1], ordered[middle])
    return np.asarray(np.divide(rates, usual, out=np.full(len(rates), math.nan), where=known))


def usual_rate(rates: Array) -> float:
    """The lower median of all ranks' rates."""
    return float(np.sort(rates)[(len(rates) - 1) // 2])


def slow_links(rates: Array) -> npt.NDArray[np.bool_]:
    """Which links are slow beside the usual one; none where that is not known.

    Args:
        rates: Of every rank, bytes per second, infinite where unknown.
    """
    usual = usual_rate(rates)
    return rates < LINK_RATIO * usual if math.isfinite(usual) else np.zeros(len(rates), dtype=np.bool_)


def ring_bytes(ranks: int, gradient_bytes: float) -> float:
    """What each rank sends in a ring all-reduce, and receives at the same time."""
    return 2.0 * (ranks - 1) / ranks * gradient_bytes


def worth_a_switch(saved_s: Array | float, step_s: Array | float) -> npt.NDArray[np.bool_] | np.bool_:
    """Whether a usual link would save so much of a rank's step that a switch pays."""
    return saved_s > np.maximum(RESOLUTION_S, _SHARE * step_s)


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
