"""When the ranks' links are measured, and when an optimizer's decisions use the rates. Pure: no sockets, no clock.

Links are measured once at the start, and later only while communication is a notable part of a step, since probes are
traffic. Only then does the policy get the rates (`LinkRelevance`), because a low rate makes it switch.

In a sweep every rank sends a probe to one other rank, so a low rate may be due to either rank's link. A rank with a low
rate sends another probe, to the rank with the highest rate, and the best of its rates counts. There is no second probe
if the link is already known to be slow from both sides: what a rank with a fast link sent to it took about as long as
what it sent to such a rank. Training, the coordinator on rank 0 and other jobs make a link look slower, never faster.
So a link is slow only if two measurements agree, one of them with a rank whose own link is fast. A rank that has
received fast counts as fast too, even before it has sent to a rank other than the slow one. Every sweep pairs the ranks
differently.

Sweeps are seconds apart, except that one starts at once when reductions begin to take far longer than the last measured
rates explain. A low rate is used only while reductions are as slow as such a link makes them.

Ranks of one host do not probe each other, which would measure the scheduling of threads and not a link. If all ranks
are on one host, nothing is measured.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from scheduler.diagnosis.links import link_ratios, ring_bytes, usual_rate
from scheduler.plan.plan import Plan
from star_hvd.channel.messages.switch import Probe
from star_hvd.coordinator.reports import Arrivals, History

__all__ = ["LinkRelevance", "LinkSurvey"]

PROBE_BYTES = 1 << 19  # Twice the burst that a token bucket of the usual size lets through.
_RECHECK_S = 0.05  # Between two checks of whether a sweep is wanted.
_NEXT_S = 0.1  # Between two probes of a sweep; less if
_SWEEP_S = 2.0  # the sweep would take longer than this: probes of many ranks overlap.
_PAUSE_S = 5.0  # Minimum time between two sweeps, or
_PAUSES = 5.0  # this multiple of a sweep's length if that is more: probes must not fill a slow link.
_LATE_S = 0.35  # A probe takes 0.25 s if the link is not slow.
_PATIENCE_S = 10.0  # Wait for answers at a sweep's end; a rank without one keeps its last rate.
_LOW = 0.5  # A rate below this fraction of the sweep's highest needs a second measurement.
_ALIKE = 2.0  # Largest ratio of two measurements that confirm a slow link, unless
_FAR = 0.125  # both are below this fraction of the sweep's highest: a concurrent reduction slows one of them.


class LinkSurvey:
    """Schedules probes between ranks and keeps the rates.

    A rank that does not answer within 10 s of the end of a sweep keeps its last rate.

    Args:
        world_size: Number of ranks.
        hosts: Address of every rank's host; if empty, each rank is on a host of its own.
        sweep: Number of the first sweep; in each one a rank sends to another one first.

    Attributes:
        bytes_per_s: Rate of every rank's link as of the last sweep, NaN where unknown.
    """

    def __init__(self, world_size: int, hosts: Sequence[str] = (), sweep: int = 0) -> None:
        self.bytes_per_s = [math.nan] * world_size
        self._hosts = tuple(hosts) or tuple(map(str, range(world_size)))
        self._sweep = sweep
        self._todo = deque(self._ring())
        self._next_s = self._began_s = 0.0
        self._asked: dict[int, int] = {}  # Probes without an answer: sender to receiver.
        self._asked_s: dict[int, float] = {}  # When each sender was told to send its probe.
        self._rates: dict[int, float] = {}  # Best rate of each rank in this sweep.
        self._pairs: dict[tuple[int, int], float] = {}  # Rate by sender and receiver in this sweep.
        self._tried: set[tuple[int, int]] = set()  # (sender, receiver) of this sweep's probes.
        self._was_surprised = False

    def due(
        self, now_s: float, *, wanted: Callable[[], bool], surprised: Callable[[], bool] = lambda: False
    ) -> tuple[int, Probe] | None:
        """Return the next probe and the rank that sends it; None if none is due.

        Args:
            now_s: Current time.
            wanted: Whether a sweep is wanted; called before every sweep.
            surprised: Whether reductions take far longer than the rates explain; when this becomes true, the next sweep
                starts at once.
        """
        if len(set(self._hosts)) < 2:
            return None
        hurries = not self._tried and self._surprise_begins(surprised)
        if now_s < self._next_s and not hurries:
            return None
        if not self._tried and not hurries and not wanted():
            self._next_s = now_s + _RECHECK_S
            return None
        if not self._todo:
            if self._asked and now_s < self._next_s + _PATIENCE_S:
                return None
            self._todo.extend(self._accept_rates())
            if not self._todo:
                self._begin_next()
                self._next_s = now_s + max(_PAUSE_S, _PAUSES * (now_s - self._began_s))
                return None
        if not self._tried:
            self._began_s = now_s
        rank, target = self._todo.popleft()
        self._asked[rank], self._asked_s[rank] = target, now_s
        self._tried.add((rank, target))
        self._next_s = now_s + min(_NEXT_S, _SWEEP_S / len(self.bytes_per_s))
        return rank, Probe(target, PROBE_BYTES)

    def _surprise_begins(self, surprised: Callable[[], bool]) -> bool:
        """Whether reductions have just become slower than the measured rates explain; it starts one sweep, not more."""
        before, self._was_surprised = self._was_surprised, surprised()
        return self._was_surprised and not before

    def note(self, rank: int, bytes_per_s: float) -> None:
        """Take in a measured rate, in bytes per second."""
        target = self._asked.pop(rank, None)
        if bytes_per_s > 0.0:
            self._rates[rank] = max(bytes_per_s, self._rates.get(rank, 0.0))
            if target is not None:
                self._pairs[rank, target] = bytes_per_s

    def suspected(self, now_s: float) -> list[float]:
        """Return the rates; for an unknown rate, the upper bound implied by a probe that is still unanswered.

        Used for preparations, which may turn out unnecessary. Bounds are given only for links that they show to be slow
        from both sides, and for those of ranks that have received fast; NaN if nothing is suspected.
        """
        waited_s = {rank: now_s - self._asked_s[rank] for rank in self._asked}
        late = {(rank, self._asked[rank]): PROBE_BYTES / each for rank, each in waited_s.items() if each > _LATE_S}
        if not late or 2 * len(self._rates) < len(self.bytes_per_s) or not any(map(math.isnan, self.bytes_per_s)):
            return list(self.bytes_per_s)
        as_if = LinkSurvey(len(self.bytes_per_s), self._hosts)
        as_if._pairs = {**self._pairs, **late}
        for (rank, _), rate in as_if._pairs.items():
            as_if._rates[rank] = max(rate, as_if._rates.get(rank, 0.0))
        as_if._tried = set(as_if._pairs)
        as_if._accept_rates()
        known = zip(self.bytes_per_s, as_if.bytes_per_s, strict=True)
        return [guess if math.isnan(rate) else rate for rate, guess in known]

    def _ring(self) -> list[tuple[int, int]]:
        """Return (sender, receiver) of this sweep's first probes, on different hosts."""
        n, found = len(self.bytes_per_s), []
        for rank in range(n):
            others = [(rank + place) % n for place in range(1, n)]
            remote = [other for other in others if self._hosts[other] != self._hosts[rank]]
            if remote:
                found.append((rank, remote[self._sweep % len(remote)]))
        return found

    def _accept_rates(self) -> list[tuple[int, int]]:
        """Publish the rates that need no second measurement; return (sender, receiver) of those that do."""
        self._asked.clear()
        if not self._rates:
            return []
        best = max(self._rates, key=lambda rank: self._rates[rank])
        low = {rank for rank, rate in self._rates.items() if rate < _LOW * self._rates[best]}
        wanting = {rank for rank in low if not self._confirmed(rank, low)}
        targets = {rank: self._good_target(rank, low) for rank in wanting}
        again = {rank: target for rank, target in targets.items() if target is not None}
        # Whether these need a second measurement is known once the rank that sent to them has made its own.
        later = {rank for rank in again if self._sender(rank, low) in again}
        probes = [(rank, target) for rank, target in sorted(again.items()) if rank not in later]
        for rank, rate in sorted(self._rates.items()):
            measured_once = rank in wanting and sum(one == rank for one, _ in self._tried) == 1
            if rank not in again and not (probes and measured_once):  # Else a fast rank to send to may show up soon.
                self.bytes_per_s[rank] = rate
            elif math.isnan(self.bytes_per_s[rank]) and self._is_fast(rank, low):
                self.bytes_per_s[rank] = self._received(rank, low)  # Until it has sent to a fast rank itself.
        return probes

    def _sender(self, rank: int, low: set[int]) -> int | None:
        """Return the rank that sent a probe to `rank`; None if `rank` has sent none to one whose link is not slow."""
        if not any(one == rank and target not in low for one, target in self._pairs):
            return None
        return next((one for one, target in self._pairs if target == rank), None)

    def _confirmed(self, rank: int, low: set[int]) -> bool:
        """Whether the rank's link is as slow in the other direction, measured by a rank with a fast link."""
        own = [rate for (one, target), rate in self._pairs.items() if one == rank and target not in low]
        other = [rate for (one, target), rate in self._pairs.items() if target == rank and self._is_fast(one, low)]
        if not (own and other):
            return False
        return max(*own, *other) < max(_ALIKE * min(*own, *other), _FAR * max(self._rates.values()))

    def _is_fast(self, rank: int, low: set[int]) -> bool:
        """Whether a rank's link is known to be fast, from what it sent or what a rank with a fast link sent to it."""
        return rank not in low or self._received(rank, low) >= _LOW * max(self._rates.values())

    def _received(self, rank: int, low: set[int]) -> float:
        """Return the best rate at which ranks that are not low have sent to this one; 0 if none has."""
        rates = (rate for (one, target), rate in self._pairs.items() if target == rank and one not in low)
        return max(rates, default=0.0)

    def _good_target(self, rank: int, low: set[int]) -> int | None:
        """Return the fastest rank on another host that `rank` has not probed yet; None if there is none, or if it has
        sent two probes, one of them to a rank that is not low."""
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
        self._rates, self._pairs, self._tried = {}, {}, set()
        self._todo.extend(self._ring())


_COMM_S, _COMM_SHARE = 0.01, 0.2  # Links matter if communication takes more than both: seconds, part of a step.
_RELEVANT_DECISIONS = 600  # About a minute: covers intermittent links, and forgets one that has recovered.
_COMM_STEPS, _COMM_SURE, _COMM_SURE_SHARE = 4, 2, 0.5  # Steps needed for that; 2 if it is over half of a step.

_FAR_LOW, _COMM_MOST, _EXPLAINED = 1.0 / 3.0, 0.6, (0.3, 3.0)
"""One step is enough if a link has less than a third of the others' rate, communication is most of the step, and it
took as long as its bytes take on that link, within these factors: beside a reduction a probe gets part of the rate."""

_SHOWN = 0.3
"""A low rate, over which a step's bytes would take time t, is used only if steps take at least this part of t: all
bytes have to cross the link within the step. Other work on a machine can make a probe slow too."""

_SURPRISE, _SURPRISE_S = 3.0, 0.15  # Multiple of the time that the rates explain, and minimum in seconds.


class LinkRelevance:
    """Whether links matter to one optimizer, so that they are measured and used in decisions.

    Args:
        history: Reports of the ranks.
        arrivals: Measured communication times.
        world_size: Number of ranks.

    Attributes:
        bytes_per_s: Rate of every rank's link as last measured, NaN where unknown.
        suspected: The same, with bounds for links that are being measured (`LinkSurvey.suspected`).
    """

    def __init__(self, history: History, arrivals: Arrivals, world_size: int) -> None:
        self.bytes_per_s: Sequence[float] = [math.nan] * world_size
        self.suspected: Sequence[float] = self.bytes_per_s
        self._reduced_bytes = 0
        self._history = history
        self._arrivals = arrivals
        self._costs: bool | None = None  # Computed once per decision.
        self._relevant_decisions = 0  # Decisions for which the rates are still used.
        self._first: set[int] = set()  # Ranks whose gradient of the first step has arrived.
        self._first_s = self._second_s = math.nan  # Arrival of the last one of them, and of the first of the next step.

    def new_decision(self, reduced_bytes: int) -> None:
        """Start a decision, for which the cost of communication is computed again.

        Args:
            reduced_bytes: Size of the optimizer's gradients as they are reduced, after compression.
        """
        self._costs, self._reduced_bytes = None, reduced_bytes
        self._relevant_decisions = max(0, self._relevant_decisions - 1)

    def suspects(self, active: Plan) -> bool:
        """Whether the links should be measured."""
        return _depends_on_links(active) or all(map(math.isnan, self.bytes_per_s)) or self._costly()

    def rates(self, active: Plan) -> Sequence[float]:
        """Return the rates of the links while they matter, else NaN for all, since they are then stale."""
        if _depends_on_links(active) or self._costly():
            self._relevant_decisions = _RELEVANT_DECISIONS
        shown = active.mode != "sync" or self._shown()
        return self.bytes_per_s if self._relevant_decisions and shown else (math.nan,) * len(self.bytes_per_s)

    def arrived(self, rank: int, now_s: float) -> None:
        """Note that a rank's gradient is complete, to time the first step's reduction; ranks time later ones."""
        if self._arrivals.reduced_s:
            return
        if len(self._first) < len(self.bytes_per_s):
            self._first.add(rank)
            self._first_s = now_s
        elif math.isnan(self._second_s):
            self._second_s = now_s

    def surprised(self, now_s: float) -> bool:
        """Whether the latest reduction, or the first one so far, takes far longer than the rates explain."""
        slowest = self._slowest_s()
        return not math.isnan(slowest) and self._seen_s(now_s) > max(_SURPRISE_S, _SURPRISE * slowest)

    def to_prepare_for(self, now_s: float) -> Sequence[float]:
        """Return the rates; suspected ones while the latest reduction takes far longer than usual links explain."""
        if any(map(math.isnan, self.suspected)) or not any(map(math.isnan, self.bytes_per_s)):
            return self.bytes_per_s
        usual = usual_rate(np.array(self.suspected, dtype=np.float64))
        explained_s = ring_bytes(len(self.suspected), self._reduced_bytes) / usual
        return self.suspected if self._seen_s(now_s) > max(_SURPRISE_S, _SURPRISE * explained_s) else self.bytes_per_s

    def _seen_s(self, now_s: float) -> float:
        """Return the duration of the latest reduction, or of the first one so far; 0 before."""
        if self._arrivals.reduced_s:
            return self._arrivals.latest_reduced_s
        if len(self._first) < len(self.bytes_per_s):
            return 0.0
        return (now_s if math.isnan(self._second_s) else self._second_s) - self._first_s

    def _slowest_s(self) -> float:
        """Return the time that the bytes of a step take on the slowest link; NaN while a rate is unknown."""
        if any(map(math.isnan, self.bytes_per_s)):
            return math.nan
        return ring_bytes(len(self.bytes_per_s), self._reduced_bytes) / min(self.bytes_per_s)

    def _shown(self) -> bool:
        """Whether steps take as long as the slowest link would make them; True while a time or a rate is unknown."""
        comm_s, compute_s = self._recent_s()
        slowest_s = self._slowest_s()
        return math.isnan(comm_s) or math.isnan(slowest_s) or comm_s + compute_s > _SHOWN * slowest_s

    def _recent_s(self) -> tuple[float, float]:
        """Return the usual times of recent communication and of compute; NaN if unknown."""
        recent = list(self._arrivals.reduced_s)[-_COMM_STEPS:]
        known = [usual_s for usual_s in self._history.usual_s() if not math.isnan(usual_s)]
        comm_s = statistics.median_low(recent) if recent else math.nan
        return comm_s, statistics.median_low(known) if known else math.nan

    def _costly(self) -> bool:
        """Whether communication takes enough of a step for a slow link to matter."""
        if self._costs is None:
            known = len(self._arrivals.reduced_s)
            share = _COMM_SHARE if known >= _COMM_STEPS else _COMM_SURE_SHARE if known >= _COMM_SURE else _COMM_MOST
            comm_s, compute_s = self._recent_s()
            # False also if one of them is unknown (NaN).
            self._costs = comm_s > max(_COMM_S, share * (comm_s + compute_s))
            if known < _COMM_SURE:
                self._costs = self._costs and self._is_explained(comm_s)
        return self._costs

    def _is_explained(self, comm_s: float) -> bool:
        """Whether a link far slower than the others explains the time of a reduction."""
        slowest_s = self._slowest_s()
        low, high = _EXPLAINED
        far_low = bool((link_ratios(np.array(self.bytes_per_s, dtype=np.float64)) < _FAR_LOW).any())
        return far_low and low * slowest_s < comm_s < high * slowest_s


def _depends_on_links(active: Plan) -> bool:
    """Whether the active mode avoids a rank's link (`subgroup`) or depends on those of servers (`ps`)."""
    return active.mode in ("subgroup", "ps")
