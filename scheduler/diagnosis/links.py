"""Links: which are slow, whether that matters, and the rate to expect of one that was slow recently.

A measured rate is that of the moment. Under intermittent contention a policy that follows it would switch with every
change and pay for each. The cost of the next steps depends on the mean time per byte, which `LinkMemory` keeps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from scheduler.diagnosis.window_stats import RESOLUTION_S
from scheduler.plan.plan import Plan
from scheduler.records import Window
from scheduler.stats import lower_median

__all__ = [
    "LINK_CALM",
    "LINK_RATIO",
    "LinkMemory",
    "link_ratio",
    "link_ratios",
    "reference_rate",
    "ring_bytes",
    "slow_links",
    "usual_rate",
    "worth_a_switch",
]

Array = npt.NDArray[np.float64]

LINK_RATIO = 0.5
"""A link is slow below this fraction of the median of the others', and normal above `LINK_CALM`: loopback, 10 Gb/s and
1 Gb/s differ by factors of ten, equal links of one job by some ten percent."""

LINK_CALM = 0.75

_SHARE = 0.2
"""Least fraction of a rank's step that a usual link must save to justify a switch. It also avoids false alarms if the
gradient is so small that its rate measures latency."""

_HALF_LIFE, _LONGEST = 48.0, 4
"""Half-life of the memory in synchronous steps, about the horizon of a prediction; k times as long for a link that was
slow k times, up to `_LONGEST`."""

_SLOW, _NORMAL = 1.0 / LINK_RATIO, 1.3
"""Time per byte, relative to the usual one, above which a link becomes slow and below which it is normal."""


def link_ratio(window: Window, rank: int) -> float:
    """The rate of the rank's link relative to the lower median of the others'; NaN if either is unknown."""
    return float(link_ratios(window.table.link_bytes_per_s)[rank])


def link_ratios(rates: Array) -> Array:
    """`link_ratio` of all ranks."""
    known = np.isfinite(rates) & (rates > 0.0)
    ordered, others = np.sort(rates[known]), len(rates) - 1
    count = len(ordered) - 1  # Known other links, for a rank with a known link.
    if count < 1 or 2 * count < others:
        return np.full(len(rates), math.nan)
    middle = (count - 1) // 2
    # Removing the rank itself shifts the ranks above it down by one place.
    usual = np.where(rates <= ordered[middle], ordered[middle + 1], ordered[middle])
    return np.asarray(np.divide(rates, usual, out=np.full(len(rates), math.nan), where=known))


def usual_rate(rates: Array) -> float:
    """The lower median of all ranks' rates, infinite if most are unknown: of the slow links if they are half of all."""
    return lower_median(rates)


def reference_rate(rates: Array) -> float:
    """The rate of a link that is not slow, infinite if most are unknown.

    The inverse of the lower median of the times per byte, so that exactly half of the links may be slow.

    Args:
        rates: Link rate of every rank, bytes/s, infinite where unknown.
    """
    known = rates[np.isfinite(rates)]
    return float(np.sort(known)[len(known) // 2]) if 2 * len(known) >= len(rates) > 0 else math.inf


def slow_links(rates: Array) -> npt.NDArray[np.bool_]:
    """Which links are slow relative to the usual one; none if that is unknown.

    Args:
        rates: Link rate of every rank, bytes/s, infinite where unknown.
    """
    usual = reference_rate(rates)
    return rates < LINK_RATIO * usual if math.isfinite(usual) else np.zeros(len(rates), dtype=np.bool_)


def ring_bytes(ranks: int, gradient_bytes: float) -> float:
    """Bytes that each rank sends in a ring all-reduce, and receives at the same time."""
    return 2.0 * (ranks - 1) / ranks * gradient_bytes


def worth_a_switch(saved_s: Array | float, step_s: Array | float) -> npt.NDArray[np.bool_] | np.bool_:
    """Whether a usual link would save enough of a rank's step to justify a switch."""
    return saved_s > np.maximum(RESOLUTION_S, _SHARE * step_s)


class LinkMemory:
    """Exponentially weighted time per byte of every rank's link."""

    def __init__(self) -> None:
        self._cost: Array | None = None
        self._step: int | None = None
        self._times = np.zeros(0)
        self._slow = np.zeros(0, dtype=np.bool_)
        self._last_slow: dict[int, int] = {}

    @property
    def last_slow(self) -> Mapping[int, int]:
        """Last step at which the link of each rank was measured as slow; without ranks that never had a slow one."""
        return self._last_slow

    def note(self, window: Window, active: Plan, rate: Array, *, steps_per_report: float = 1.0) -> Array:
        """Add the rates of a window.

        Args:
            window: Provides the step.
            active: The active plan: under servers x of n gradients, or those of a group, count as a part of a step.
            rate: Link rate of every rank, bytes/s, infinite where unknown, shape (n_ranks,).
            steps_per_report: Steps of a rank per step of the window: more than 1 where that is an averaging of `local`.

        Returns:
            The expected rates: the current ones or, for a link that was slower recently, the weighted mean.
        """
        now = 1.0 / np.maximum(rate, 1.0)  # The inverse of a smaller rate could be infinite, and would stay so.
        if self._cost is None or self._step is None or window.step < self._step or len(now) != len(self._cost):
            self._cost, self._step = now, window.step
            self._times, self._slow = np.zeros(len(now)), np.zeros(len(now), dtype=np.bool_)
            self._last_slow = {}
            self._count(now, window.step)
            return rate
        self._count(now, window.step)
        steps = (window.step - self._step) * steps_per_report / active.updates_per_step
        keep = np.power(0.5, steps / (_HALF_LIFE * np.clip(self._times, 1, _LONGEST)))
        # A rank whose rate was unknown until now has no history.
        past = np.where(self._cost > 0.0, self._cost, now)
        self._cost = keep * past + (1.0 - keep) * now  # A rate that is no longer measured decays, too.
        self._step = window.step
        with np.errstate(divide="ignore"):
            expected: Array = 1.0 / np.maximum(now, self._cost)
        return expected

    def _count(self, now: Array, step: int) -> None:
        """Update which links are slow, how often each became slow, and when it last was."""
        usual = lower_median(now)
        begins = ~self._slow & (now > _SLOW * usual) & (usual > 0.0)  # 0: most rates are unknown.
        self._times += begins
        self._slow = (self._slow | begins) & (now > _NORMAL * usual)
        self._last_slow.update(dict.fromkeys(np.flatnonzero(self._slow).tolist(), step))
