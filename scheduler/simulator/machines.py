"""Ranks, links and contention as arrays over replicas; computes when each batch ends.

A replica is one simulated job; all replicas of one `Machines` have equally many ranks and advance together. The first
axis of every array is the replica. Contention is piecewise constant in time and integrated exactly: a batch during
which its rank freezes ends after the thaw.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from scheduler.plan.plan import LOCAL_COPIES
from scheduler.simulator.episodes import Episode
from scheduler.simulator.scenario import Scenario

__all__ = ["Array", "Flags", "Ints", "Machines", "Replicas"]

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
_Pieces: TypeAlias = Sequence[Sequence[Sequence[tuple[float, float]]]]
Self = TypeVar("Self", bound="Replicas")

_PERIOD = 512
"""Batches of a rank after which jitter repeats. Replicas of a scenario share it, so that modes are compared under the
same jitter."""


class Replicas:
    """Base of objects whose arrays have the replicas as first axis, except those named in `shared`."""

    shared: frozenset[str] = frozenset()

    def take(self: Self, rows: Ints) -> Self:
        """Copy with these replicas, which may repeat: forks a job."""
        other = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, np.ndarray) and name not in self.shared:
                setattr(other, name, value[rows].copy())
            elif isinstance(value, Replicas):
                setattr(other, name, value.take(rows))
        return other


class Machines(Replicas):
    """Batches and links of the ranks.

    Args:
        scenarios: One per replica, of equal world size. Replicas of the same object share its tables.

    Attributes:
        start_s: Start of every rank's current batch, shape (replicas, ranks).
        finish_s: Its end.
        count: Number of batches started.

    Raises:
        ValueError: No scenario, or different world sizes.
    """

    shared = frozenset(
        ("_jitter", "_base_s", "_edges", "_slowdown", "_status_edges", "_link", "_starved", "_fed", "_rows")
    )

    def __init__(self, scenarios: Sequence[Scenario]) -> None:
        sizes = {scenario.world_size for scenario in scenarios}
        if len(sizes) != 1:
            raise ValueError(f"scenarios have world sizes {sorted(sizes)}; expected one size for all replicas")
        unique = list({id(scenario): scenario for scenario in scenarios}.values())
        position = {id(scenario): index for index, scenario in enumerate(unique)}
        self.n = sizes.pop()
        self.source = np.array([position[id(scenario)] for scenario in scenarios])
        self._tables(unique)
        of = [(s.cluster, s.network) for s in scenarios]
        self.compute_s = np.array([network.compute_s for _, network in of])
        self.bytes = np.array([float(network.comm_bytes) for _, network in of])
        self.latency_s = np.array([cluster.latency_s for cluster, _ in of])
        self.cycle_s = np.array([cluster.cycle_s for cluster, _ in of])
        self.hidden_s = np.array([cluster.overlap * network.compute_s for cluster, network in of])
        self.server_s = np.array([cluster.server_s for cluster, _ in of])
        self.pause_s = np.array([cluster.starved_pause_s for cluster, _ in of])
        self.switch_s = np.array([cluster.switch_s for cluster, _ in of])
        self.handover_s = np.array([cluster.handover_s for cluster, _ in of])
        shape = (self.replicas, self.n)
        self.count = np.zeros(shape, dtype=np.int64)
        self.start_s, self.finish_s = np.zeros(shape), np.zeros(shape)
        self._segment = np.zeros(shape, dtype=np.int64)
        self._until_s = self._edges[self.source, :, 1].copy()
        self._factor = self._slowdown[self.source, :, 0].copy()
        self._status_segment = np.zeros(shape, dtype=np.int64)
        self._change_s = np.full(self.replicas, -math.inf)
        self.rate, self.starved, self.fed = np.ones(shape), np.ones(shape), np.ones(shape)
        self.thaw_s = np.zeros(shape)
        self.batch = np.array([scenario.batch for scenario in scenarios])
        self.fixed_part = np.array([scenario.fixed_part for scenario in scenarios])
        self.parts = np.array([scenario.microbatches for scenario in scenarios])
        self.share_factor = np.ones(shape)  # Time of a rank's batch relative to a usual one, by its batch share.

    def _tables(self, scenarios: Sequence[Scenario]) -> None:
        jitter, base = [], []
        for scenario in scenarios:
            rng = np.random.default_rng(scenario.seed)
            cluster = scenario.cluster
            own = cluster.jitter * rng.standard_normal((_PERIOD, self.n))
            common = cluster.common_jitter * rng.standard_normal((_PERIOD, 1))
            jitter.append(np.exp(own + common))
            base.append(scenario.network.compute_s * np.asarray(cluster.relative_s))
        self._jitter, self._base_s = np.stack(jitter), np.stack(base)
        slow = [[_pieces(own, _compute_factor) for own in _by_rank(s, self.n)] for s in scenarios]
        self._edges, self._slowdown = _stack(slow)
        links = [[_pieces(own, _link_factor) for own in _by_rank(s, self.n)] for s in scenarios]
        starved = [[_pieces(own, _starved_factor) for own in _by_rank(s, self.n)] for s in scenarios]
        rates = [np.asarray(s.cluster.link_bytes_per_s) for s in scenarios]
        # Links, starvation and input change at the same edges: one status table with three values.
        fed = [[_pieces(own, _input_factor) for own in _by_rank(s, self.n)] for s in scenarios]
        self._status_edges, self._link, self._starved, self._fed = _merge(links, starved, fed, rates)
        steps = max((len(s.rows) for s in scenarios), default=0)
        self._rows = np.ones((len(scenarios), max(1, steps), self.n)) if steps else np.zeros((0, 0, 0))
        self._row_steps = np.array([max(1, len(scenario.rows)) for scenario in scenarios])[self.source]
        for index, scenario in enumerate(scenarios if steps else ()):
            if scenario.rows:
                self._rows[index, : len(scenario.rows)] = np.asarray(scenario.rows)[:, : self.n]

    @property
    def replicas(self) -> int:
        """Number of simulated jobs."""
        return len(self.source)

    # ---- batches ----------------------------------------------------------------------------------------------------

    def begin(self, where: Ints, start_s: Array, step: Ints) -> None:
        """Start a batch on each of these ranks.

        Args:
            where: Unique indices replica * n + rank, shape (k,).
            start_s: Start, not before the end of the rank's last batch, shape (k,).
            step: Global step of each, shape (k,); selects the row of a trace.
        """
        row, rank = np.divmod(where, self.n)
        source = self.source[row]
        count = self.count.reshape(-1)
        done = count[where]
        count[where] = done + 1
        work_s = self._base_s[source, rank] * self._jitter[source, done % _PERIOD, rank]
        work_s *= self.share_factor.reshape(-1)[where]
        if self._rows.size:
            work_s *= self._rows[source, step % self._row_steps[row], rank]
        finish_s = start_s + work_s * self._factor.reshape(-1)[where]
        over = np.flatnonzero(finish_s > self._until_s.reshape(-1)[where])
        if len(over):
            finish_s[over] = self._across(where[over], source[over], rank[over], start_s[over], work_s[over])
        self.start_s.reshape(-1)[where] = start_s
        self.finish_s.reshape(-1)[where] = finish_s

    def _across(self, where: Ints, source: Ints, rank: Ints, start_s: Array, work_s: Array) -> Array:
        """Ends of batches that span several pieces of their rank's contention."""
        segment = self._segment.reshape(-1)[where]
        now_s, left_s, finish_s = start_s.copy(), work_s.copy(), np.full(len(where), np.nan)
        todo = np.arange(len(where))
        while len(todo):
            s, r, g = source[todo], rank[todo], segment[todo]
            end_s, factor = self._edges[s, r, g + 1], self._slowdown[s, r, g]
            need_s = np.where(now_s[todo] >= end_s, math.inf, left_s[todo] * factor)
            done = now_s[todo] + need_s <= end_s
            finish_s[todo[done]] = (now_s[todo] + need_s)[done]
            more = todo[~done]
            left_s[more] -= np.maximum(0.0, end_s - now_s[todo])[~done] / factor[~done]
            now_s[more] = np.maximum(now_s[more], end_s[~done])
            segment[more] += 1
            todo = more
        self._segment.reshape(-1)[where] = segment
        self._until_s.reshape(-1)[where] = self._edges[source, rank, segment + 1]
        self._factor.reshape(-1)[where] = self._slowdown[source, rank, segment]
        return finish_s

    @property
    def duration_s(self) -> Array:
        """Compute time of every rank's current batch, shape (replicas, ranks)."""
        return self.finish_s - self.start_s

    @property
    def fastest_s(self) -> float:
        """A lower bound of the compute time of any batch."""
        shortest = self._base_s.min(axis=1) * self._jitter.min(axis=(1, 2))
        return float(shortest.min()) * (float(self._rows.min()) if self._rows.size else 1.0)

    @property
    def change_s(self) -> float:
        """When `rate`, `starved`, `fed` or `thaw_s` changes next, in any replica."""
        return float(self._change_s.min())

    # ---- links and processes ----------------------------------------------------------------------------------------

    def advance_to(self, now_s: Array) -> None:
        """Update `rate` (bytes/s), `starved` and `fed` (slowdowns) and `thaw_s` to a time, which never goes back.

        `starved` is infinite for a frozen rank; `fed` is the slowdown by late input.
        """
        if bool((now_s < self._change_s).all()):
            return
        source, rank = self.source[:, None], np.arange(self.n)
        while True:
            past = now_s[:, None] >= self._status_edges[source, rank, self._status_segment + 1]
            if not past.any():
                break
            self._status_segment += past
        g = self._status_segment
        end_s = self._status_edges[source, rank, g + 1]
        self.rate, self.starved = self._link[source, rank, g], self._starved[source, rank, g]
        self.fed = self._fed[source, rank, g]
        self.thaw_s = np.where(np.isinf(self.starved), end_s, 0.0)
        self._change_s = end_s.min(axis=1)

    def thawed(self, now_s: Array) -> Array:
        """First time, not before `now_s`, at which no rank is frozen: a collective needs every process."""
        for _ in range(64):
            self.advance_to(now_s)
            later = np.maximum(now_s, self.thaw_s.max(axis=1))
            if bool((later == now_s).all()):
                break
            now_s = later
        return now_s

    def ring_s(self, members: Flags | None = None) -> Array:
        """Exposed time of a ring all-reduce at the link rates of the last `advance_to`."""
        if members is None:
            count, rate = np.full(self.replicas, float(self.n)), self.rate.min(axis=1)
        else:
            count = members.sum(axis=1).astype(np.float64)
            rate = np.where(members, self.rate, math.inf).min(axis=1)
        wire_s = 2.0 * (count - 1.0) / count * self.bytes / rate
        exposed_s = np.maximum(0.1 * wire_s, wire_s - self.hidden_s)
        total_s: Array = np.where(count > 1.0, self.cycle_s + 2.0 * self.latency_s + exposed_s, 0.0)
        return total_s

    def averaging_s(self) -> Array:
        """Time to average parameters and momentum over all ranks; no computing hides it."""
        if self.n < 2:
            return np.zeros(self.replicas)
        wire_s = 2.0 * (self.n - 1.0) / self.n * self.bytes / self.rate.min(axis=1)
        total_s: Array = self.cycle_s + 2.0 * self.latency_s + LOCAL_COPIES * wire_s
        return total_s

    def helper_delay_s(self, missing: Flags) -> Array:
        """Time a collective waits for helpers of missing, starved ranks: half a pause times their share without CPU."""
        stopped = np.where(missing & np.isfinite(self.starved), 1.0 - 1.0 / self.starved, 0.0)
        delay_s: Array = 0.5 * self.pause_s * stopped.max(axis=1)
        return delay_s


# ---- tables ---------------------------------------------------------------------------------------------------------


def _compute_factor(active: Sequence[Episode]) -> float:
    if any(episode.kind == "frozen" for episode in active):
        return math.inf
    return math.prod(episode.factor for episode in active if episode.kind in ("compute", "input", "starved"))


def _link_factor(active: Sequence[Episode]) -> float:
    return math.prod(episode.factor for episode in active if episode.kind == "link")


def _input_factor(active: Sequence[Episode]) -> float:
    return math.prod(episode.factor for episode in active if episode.kind == "input")


def _starved_factor(active: Sequence[Episode]) -> float:
    if any(episode.kind == "frozen" for episode in active):
        return math.inf
    return math.prod(episode.factor for episode in active if episode.kind == "starved")


def _by_rank(scenario: Scenario, n: int) -> list[list[Episode]]:
    own: list[list[Episode]] = [[] for _ in range(n)]
    for episode in scenario.episodes:
        own[episode.rank].append(episode)
    return own


def _pieces(episodes: Sequence[Episode], factor: Callable[[Sequence[Episode]], float]) -> list[tuple[float, float]]:
    """(start, factor) of every piece of time, from 0 on; episodes may overlap."""
    times = sorted({0.0, *(e.start_s for e in episodes), *(e.end_s for e in episodes if math.isfinite(e.end_s))})
    ordered = sorted(episodes, key=lambda e: e.start_s)
    pieces: list[tuple[float, float]] = []
    active: list[Episode] = []
    following = 0
    for time_s in times:
        while following < len(ordered) and ordered[following].start_s <= time_s:
            active.append(ordered[following])
            following += 1
        active = [e for e in active if e.end_s > time_s]
        pieces.append((time_s, factor(active)))
    return pieces


def _stack(pieces: _Pieces) -> tuple[Array, Array]:
    """Padded tables: edges (scenarios, ranks, k + 1) and values (scenarios, ranks, k)."""
    most = max(len(own) for ranks in pieces for own in ranks)
    shape = (len(pieces), len(pieces[0]), most)
    edges, values = np.full((*shape[:2], most + 1), math.inf), np.ones(shape)
    for i, ranks in enumerate(pieces):
        for j, own in enumerate(ranks):
            edges[i, j, : len(own)] = [time_s for time_s, _ in own]
            values[i, j, : len(own)] = [value for _, value in own]
    return edges, values


def _merge(
    links: _Pieces, starved: _Pieces, fed: _Pieces, rates: Sequence[Array]
) -> tuple[Array, Array, Array, Array]:
    """Status tables; adjacent pieces of equal values are joined, so that `advance_to` is mostly a comparison."""
    together: list[list[list[tuple[float, tuple[float, ...]]]]] = []
    for ranks in zip(links, starved, fed, strict=True):
        joined = []
        for pieces in zip(*ranks, strict=True):
            own: list[tuple[float, tuple[float, ...]]] = []
            for items in zip(*pieces, strict=True):
                values = tuple(value for _, value in items)
                if not own or own[-1][1] != values:
                    own.append((items[0][0], values))
            joined.append(own)
        together.append(joined)
    tables = [_stack([[[(t, v[i]) for t, v in own] for own in ranks] for ranks in together]) for i in range(3)]
    return tables[0][0], np.stack(list(rates))[:, :, None] / tables[0][1], tables[1][1], tables[2][1]
