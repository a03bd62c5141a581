"""When the ranks' links are measured, and from when on an optimizer acts on the rates. Pure.

They are measured once at the start, while nobody needs them, and then while communication costs something: measuring
costs traffic. A rate reaches the policy (`LinkRelevance`) only where communication matters, as believing it switches.

One rank after another sends to another one, so a low rate is that of either's link. A rank that has a low rate is
measured again, to the rank with the highest one, and counts with the best of its rates: whatever else goes on, be it
training, the coordinator's work on rank 0 or another job, makes a link look slower and never faster. So a link is slow
only where two measurements say so, one of them to a rank whose link is not. Every sweep sends to other ranks.

Between ranks of one host there is no link: what a message takes there is what the processes' threads take to get their
turn, and most of all on rank 0, where the coordinator runs. It is not measured, and not known. Where all ranks are on
one host nothing is.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence

from scheduler.plan.plan import Plan
from star_hvd.channel.messages.switch import Probe
from star_hvd.coordinator.reports import Arrivals, History

__all__ = ["LinkRelevance", "LinkSurvey"]

PROBE_BYTES = 1 << 19  # Twice what a token bucket of the usual size lets through at once.
_UNWANTED_S = 0.05  # Until it is asked again whether anybody wants to know.
_NEXT_S = 0.1  # Between two ranks of a sweep, and
_SWEEP_S = 2.0  # all of them together at most: a sweep of many ranks has some under way at a time.
_PAUSE_S = 5.0  # Between two sweeps at least, and
_PAUSES = 5.0  # this multiple of the sweep's length: a slow link is not to be kept busy by measuring it.
_PATIENCE_S = 10.0  # For answers: a rank that gives none keeps the rate it had.
_LOW = 0.5  # Part of the sweep's highest rate below which a rate is looked at again.


class LinkSurvey:
    """Asks one rank at a time to send to another one, and keeps the rates.

    If a rank is late: its rate is waited for a while at the end of a sweep, then it keeps the one it had.

    Args:
        world_size: Number of ranks.
        hosts: Address of every rank's host; each rank on a host of its own where empty.

    Attributes:
        bytes_per_s: Rate of every rank's link as of the last sweep, NaN where unknown.
    """

    def __init__(self, world_size: int, hosts: Sequence[str] = ()) -> None:
        self.bytes_per_s = [math.nan] * world_size
        self._hosts = tuple(hosts) or tuple(map(str, range(world_size)))
        self._sweep = 0
        self._todo = deque(self._ring())
        self._next_s = self._began_s = 0.0
        self._asked: dict[int, int] = {}  # Ranks whose answer is awaited, and to whom they send.
        self._rates: dict[int, float] = {}  # Of this sweep, the best of each rank.
        self._tried: set[tuple[int, int]] = set()

    def due(self, now_s: float, *, wanted: Callable[[], bool]) -> tuple[int, Probe] | None:
        """The rank to ask now and what to ask it, None where nothing is due; `wanted` decides on whole sweeps."""
        if now_s < self._next_s or len(set(self._hosts)) < 2:
            return None
        if not self._tried and not wanted():
            self._next_s = now_s + _UNWANTED_S
            return None
        if not self._todo:
            if self._asked and now_s < self._next_s + _PATIENCE_S:
                return None
            self._todo.extend(self._judge())
            if not self._todo:
                self._begin_next()
                self._next_s = now_s + max(_PAUSE_S, _PAUSES * (now_s - self._began_s))
                return None
        if not self._tried:
            self._began_s = now_s
        rank, target = self._todo.popleft()
        self._asked[rank] = target
        self._tried.add((rank, target))
        self._next_s = now_s + min(_NEXT_S, _SWEEP_S / len(self.bytes_per_s))
        return rank, Probe(target, PROBE_BYTES)

    def note(self, rank: int, bytes_per_s: float) -> None:
        """A measured rate."""
        self._asked.pop(rank, None)
        if bytes_per_s > 0.0:
            self._rates[rank] = max(bytes_per_s, self._rates.get(rank, 0.0))

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _ring(self) -> list[tuple[int, int]]:
        """Every rank and the one to which it sends in this sweep, on another host."""
        n, found = len(self.bytes_per_s), []
        for rank in range(n):
            others = [(rank + place) % n for place in range(1, n)]
            abroad = [other for other in others if self._hosts[other] != self._hosts[rank]]
            if abroad:
                found.append((rank, abroad[self._sweep % len(abroad)]))
        return found

    def _judge(self) -> list[tuple[int, int]]:
        """Tell the rates that are beyond doubt; the ranks to measure again, and to whom they send."""
        self._asked.clear()
        if not self._rates:
            return []
        best = max(self._rates, key=lambda rank: self._rates[rank])
        low = {rank for rank, rate in self._rates.items() if rate < _LOW * self._rates[best]}
        again = []
        for rank, rate in sorted(self._rates.items()):
            target = self._good_target(rank, low)
            if rank in low and target is not None:
                again.append((rank, target))
            else:
                self.bytes_per_s[rank] = rate
        return again

    def _good_target(self, rank: int, low: set[int]) -> int | None:
        """The rank with the highest rate, on another host, that a rank has not sent to; None where it has sent twice
        and once to a rank that is not low, or where there is nobody to send to."""
        sent = {target for one, target in self._tried if one == rank}
        if len(sent) > 1 and any(target not in low and target in self._rates for target in sent):
            return None
        others = [
            other
            for other in self._rates
            if other not in sent and other not in low and self._hosts[other] != self._hosts[rank]
        ]
        return max(others, key=lambda other: self._rates[other], default=None)

    def _begin_next(self) -> None:
        self._sweep += 1
        self._rates, self._tried = {}, set()
        self._todo.extend(self._ring())


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
