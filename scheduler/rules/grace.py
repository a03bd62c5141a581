"""How long a step or an update waits, after its quorum, for ranks that should arrive soon.

max(fraction of the usual time, median + c * MAD of recent arrival offsets), the form requested in hivemind #676, but
at most the usual time. So equally fast ranks never miss a step by jitter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable

from scheduler.rules.server_rule import Event, ServerRule

__all__ = ["FRACTION", "MADS", "Grace", "UpdateGrace", "median"]

FRACTION, MADS = 0.25, 4.0
_OFFSETS = 64  # Arrival offsets that determine the grace.
_INTERVALS = 15
_LEAST_S = 1e-3


class Grace:
    """The grace by the arrivals so far.

    Args:
        fraction: Least grace, as a fraction of the usual time.
        mads: Median absolute deviations of the arrival offsets covered by the grace.
    """

    def __init__(self, fraction: float = FRACTION, mads: float = MADS) -> None:
        self._fraction, self._mads = fraction, mads
        self._offsets: deque[float] = deque(maxlen=_OFFSETS)
        self._late_s: float | None = None  # By the offsets; None if it must be computed again.

    def note(self, offsets_s: Iterable[float]) -> None:
        """Record by how much ranks arrived after the first one."""
        self._offsets.extend(offsets_s)
        self._late_s = None

    def seconds(self, usual_s: float) -> float:
        """Return the grace where a rank usually takes `usual_s` for a step."""
        grace_s = self._fraction * usual_s
        if self._offsets:
            if self._late_s is None:
                middle = median(self._offsets)
                deviation = median([abs(offset - middle) for offset in self._offsets])
                self._late_s = middle + self._mads * deviation
            grace_s = max(grace_s, self._late_s)
        return min(grace_s, max(usual_s, _LEAST_S))


class UpdateGrace:
    """When a server's update that waits for a grace (rule `grace`) has to be closed.

    Args:
        rule: The rule, whose plan may have any rule.
        now_s: Time in seconds, of any clock.

    Attributes:
        due_s: When to call `expire`; None while nothing is to be closed.
    """

    def __init__(self, rule: ServerRule, now_s: float) -> None:
        self._rule, self._grace = rule, Grace()
        self._intervals_s: deque[float] = deque(maxlen=_INTERVALS)  # From an update to the quorum of the next one.
        self._seen = 0  # Pushes that wait for the update.
        self._first_s: float | None = None  # When the first fresh push arrived.
        self._quorum_s: float | None = None  # When the quorum was complete.
        self.due_s: float | None = None
        self._begin(now_s)

    def look(self, now_s: float) -> None:
        """Follow the rule; call after each of its events."""
        if self._rule.version != self._version:
            if self._first_s is not None:  # The push that completed the update.
                self._grace.note([now_s - self._first_s])
                quorum_s = now_s if self._quorum_s is None else self._quorum_s
                self._intervals_s.append(quorum_s - self._began_s)
            self._begin(now_s)
        for _ in range(self._rule.fresh - self._seen):
            if self._first_s is None:
                self._first_s = now_s
            else:
                self._grace.note([now_s - self._first_s])
        self._seen = self._rule.fresh
        if not self._rule.holding:
            self.due_s = None
        elif self.due_s is None:  # Also if another plan's quorum was complete before.
            self._quorum_s = now_s
            usual_s = median(self._intervals_s) if self._intervals_s else now_s - self._began_s
            self.due_s = now_s + self._grace.seconds(usual_s)

    def expire(self, now_s: float) -> list[Event]:
        """Close the update if it is due; returns the rule's events."""
        if self.due_s is None or now_s < self.due_s:
            return []
        events = self._rule.close()
        if self._quorum_s is not None:
            self._intervals_s.append(self._quorum_s - self._began_s)
        self._begin(now_s)
        return events

    def _begin(self, now_s: float) -> None:
        self._version, self._began_s, self._seen = self._rule.version, now_s, 0
        self._first_s = self._quorum_s = self.due_s = None


def median(values: Collection[float]) -> float:
    """As `statistics.median`, three times as fast for few numbers; computed for every report."""
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(ordered) % 2 else 0.5 * (ordered[half - 1] + ordered[half])
