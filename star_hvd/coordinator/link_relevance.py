"""From when on one optimizer cares about the ranks' links: measuring them costs traffic, and believing them switches.

Links are measured once at the start, while nobody needs them, and then while communication costs something. A rate is
told to the policy from when on it matters.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from scheduler.plan.plan import Plan
from star_hvd.coordinator.reports import History
from star_hvd.coordinator.waiting_times import Arrivals

__all__ = ["LinkRelevance"]

_COMM_S, _COMM_SHARE = 0.01, 0.2  # Communication below this, or this part of a step, is not worth measuring links.
_HEEDED_LOOKS = 600  # About a minute: links that come and go are remembered, and one that recovered is not blamed.
_COMM_STEPS, _COMM_SURE, _COMM_SURE_SHARE = 4, 2, 0.5  # Steps to know it by; fewer where it is the most of a step.


class LinkRelevance:
    """What one optimizer wants to know of links.

    Args:
        history: Reports of the ranks.
        arrivals: How long communication takes.

    Attributes:
        bytes_per_s: The links as last measured, NaN where unknown.
    """

    def __init__(self, history: History, arrivals: Arrivals, world_size: int) -> None:
        self.bytes_per_s: Sequence[float] = [math.nan] * world_size
        self._history = history
        self._arrivals = arrivals
        self._costs: bool | None = None  # Looked at once for each decision.
        self._heeded = 0  # Looks for which rates are told, since communication cost something last.

    def look_again(self) -> None:
        """A decision is due: what communication costs is to be found out anew."""
        self._costs = None
        self._heeded = max(0, self._heeded - 1)

    def suspects(self, active: Plan) -> bool:
        """Whether the links are to be measured."""
        return _at_the_links(active) or all(map(math.isnan, self.bytes_per_s)) or self._costly()

    def rates(self, active: Plan) -> Sequence[float]:
        """The links' rates while they matter; else all are as good as unknown: nobody measures them any more."""
        if _at_the_links(active) or self._costly():
            self._heeded = _HEEDED_LOOKS
        return self.bytes_per_s if self._heeded else (math.nan,) * len(self.bytes_per_s)

    def _costly(self) -> bool:
        """Whether communication costs enough for a slow link to be worth an answer."""
        known = len(self._arrivals.comm_s)
        if known < _COMM_SURE:
            return False
        if self._costs is None:
            share = _COMM_SHARE if known >= _COMM_STEPS else _COMM_SURE_SHARE
            compute_s = [usual_s for usual_s in self._history.usual_s() if not math.isnan(usual_s)]
            comm_s = self._arrivals.usual_comm_s
            least_s = max(_COMM_S, share * (comm_s + statistics.median_low(compute_s))) if compute_s else math.inf
            self._costs = comm_s > least_s
        return self._costs


def _at_the_links(active: Plan) -> bool:
    """Modes in which somebody's link was avoided, or all depends on those of servers."""
    return active.mode in ("subgroup", "ps")
