"""`ps` and `grouped`: arrivals at servers, in arrays for a fixed x, through the live `ServerRule` for all other rules.

A push takes the latency plus its bytes over the rank's link; the servers have a limited total bandwidth, so that
simultaneous pushes queue (incast). The reply takes as long as the push. If pushes start within backward
(`Plan.pushes_early`, in jobs with the usual settings), only the part not hidden by backward counts; behind compute
(`Plan.transmission`) the same holds for the reply, beside a forward pass as long as the last one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from scheduler.cost.progress import alignment
from scheduler.plan.plan import Plan
from scheduler.rules.grace import UpdateGrace
from scheduler.rules.server_rule import Event, Push, Release, ServerRule, Update
from scheduler.rules.weights import damped, damping_scale, lr_factor
from scheduler.simulator.base import Mode, State
from scheduler.simulator.machines import Array, Flags, Ints, Machines
from scheduler.transmission.behind_compute import push_left_s, reply_left_s

__all__ = ["Arrivals", "Server", "capacity"]


def capacity(machines: Machines, servers: Sequence[tuple[int, ...]]) -> Array:
    """Bytes/s that all servers receive together; shards are equal, so the slowest server limits all."""
    return np.array(
        [
            max(1, len(chosen)) * float(machines.rate[row, list(chosen) or slice(None)].min() if chosen
            else machines.rate[row].max())
            for row, chosen in enumerate(servers)
        ]
    )


class Arrivals(Mode):
    """`ps(x)`, rule `x` or `backup`: any x arrivals make an update. Many replicas at once.

    Args:
        state: The job. Batches started before count as computed on the servers' initial parameters.
        plans: One plan per replica, without guard.
    """

    def __init__(self, state: State, plans: Sequence[Plan]) -> None:
        super().__init__(state, plans)
        self._plans = tuple(plans)
        self.x = np.array([plan.quorum for plan in plans])
        self.backup = np.array([plan.rule == "backup" for plan in plans])
        self.length = np.array([lr_factor(plan, plan.quorum) for plan in plans])
        self.scale = np.array([damping_scale(plan, float(plan.quorum)) for plan in plans])
        machines = state.machines
        machines.advance_to(state.now_s)
        self.base = state.batch_step.copy()  # Version of the parameters behind each rank's gradient.
        self.base[:] = state.step[:, None]
        self.moved = np.zeros(machines.replicas)  # Sum of the lengths of all updates.
        self.base_moved = np.zeros(self.base.shape)
        self.early = np.array([plan.pushes_early(None) for plan in plans])
        self.behind = np.array([plan.in_background(None) for plan in plans])
        self.arrive_s = machines.finish_s + self._way_s(push_left_s)

    def take(self, rows: Ints) -> Arrivals:
        other = super().take(rows)
        other._plans = tuple(self._plans[int(row)] for row in rows)
        return other

    def _way_s(self, left_s: Callable[[Array, Array], Array]) -> Array:
        """Exposed time of a push or its reply; `left_s` computes the part not hidden behind compute."""
        machines, behind = self.state.machines, self.early if left_s is push_left_s else self.behind
        way_s = machines.bytes[:, None] / machines.rate
        if behind.any():
            way_s = np.where(behind[:, None], left_s(way_s, machines.duration_s), way_s)
        return np.asarray(machines.latency_s[:, None] + way_s)

    def step(self) -> None:
        state, machines = self.state, self.state.machines
        self._drop_stale()
        order = np.argsort(self.arrive_s, axis=1, kind="stable")
        place = np.empty_like(order)
        np.put_along_axis(place, order, np.broadcast_to(np.arange(machines.n), order.shape), axis=1)
        chosen = place < self.x[:, None]
        last_s = np.where(chosen, self.arrive_s, -math.inf).max(axis=1)
        machines.advance_to(last_s)
        carried = capacity(machines, [plan.servers for plan in self._plans])
        # The servers' bandwidth limits the rate of updates.
        busy_s = self.x * machines.bytes / carried + machines.server_s
        end_s = np.maximum(last_s + machines.server_s, state.now_s + busy_s)
        self._account(chosen, end_s)
        state.now_s, state.step = end_s, state.step + 1
        where = np.flatnonzero(chosen)
        row = where // machines.n
        self.base_moved.reshape(-1)[where] = self.moved[row]
        state.report(where)
        state.begin(where, end_s[row] + self._way_s(reply_left_s).reshape(-1)[where], state.step[row])
        self.base.reshape(-1)[where] = state.step[row]
        self._push(where)

    def _push(self, where: Ints) -> None:
        """Compute when the pushes of the current batches of these ranks arrive."""
        ended_s, way_s = self.state.machines.finish_s.reshape(-1), self._way_s(push_left_s).reshape(-1)
        self.arrive_s.reshape(-1)[where] = ended_s[where] + way_s[where]

    def _drop_stale(self) -> None:
        """Rule `backup`: drop gradients of older parameters on arrival; their ranks start a new batch."""
        if not self.backup.any():
            return
        state, machines = self.state, self.state.machines
        while True:
            fresh = self.base == state.step[:, None]
            current = np.where(fresh, self.arrive_s, math.inf)
            x_th = np.sort(current, axis=1)[np.arange(len(self.x)), self.x - 1]
            stale = ~fresh & self.backup[:, None] & (self.arrive_s <= x_th[:, None])
            where = np.flatnonzero(stale)
            if not len(where):
                break  # Old gradients that arrive later do not count for x.
            row, way_s = where // machines.n, self._way_s(reply_left_s).reshape(-1)[where]
            state.report(where, late=True)
            begin_s = np.maximum(self.arrive_s.reshape(-1)[where], state.now_s[row]) + way_s
            state.begin(where, begin_s, state.step[row])
            self.base.reshape(-1)[where] = state.step[row]
            self.base_moved.reshape(-1)[where] = self.moved[row]
            self._push(where)

    def _account(self, chosen: Flags, end_s: Array) -> None:
        account = self.state.account
        stale = (self.state.step[:, None] - self.base).astype(np.float64)
        factor = np.where(chosen, damped(self.scale[:, None], stale) * (self.length / self.x)[:, None], 0.0)
        length = factor.sum(axis=1)
        drift = self.moved[:, None] - self.base_moved
        self.moved = self.moved + length
        account.add(
            end_s,
            length=length,
            signal=(factor * alignment(drift, account.price[:, None])).sum(axis=1),
            effective=length * length / np.maximum((factor * factor).sum(axis=1), 1e-24),
            drift=(factor * drift).sum(axis=1) / np.maximum(length, 1e-12),
            gradients=self.x.astype(np.float64),
        )


class Server(Mode):
    """`ps` with any rule, and `grouped`, through `ServerRule`; one replica, event by event.

    In `grouped` a group pushes once its slowest member and its ring all-reduce are done. Groups of rule `groups` also
    push as one, with their last member.

    Args:
        state: The job, of one replica.
        plans: Its plan; `grouped` with its groups.
    """

    def __init__(self, state: State, plans: Sequence[Plan]) -> None:
        super().__init__(state, plans)
        (plan,) = plans
        self.plan, machines = plan, state.machines
        rule = plan
        if plan.mode == "ps" and plan.rule == "groups":
            rule = Plan.grouped(plan.world_size, plan.groups, damping=plan.damping, lr_rule=plan.lr_rule,
                                noise_scale=plan.noise_scale, guard=plan.guard)
        self.rule = ServerRule(rule, version=int(state.step[0]))
        if rule.mode == "grouped":
            self.pushers = {group[0]: np.array(group) for group in plan.groups}
        else:
            self.pushers = {rank: np.array([rank]) for rank in range(plan.world_size)}
        self.base = dict.fromkeys(self.pushers, int(state.step[0]))
        self.pushes = dict.fromkeys(self.pushers, 0)
        self.lengths = {int(state.step[0]): 0.0}  # Sum of the lengths of all updates before a version.
        self.moved = 0.0
        self.busy_s = float(state.now_s[0])
        self.grace = UpdateGrace(self.rule, self.busy_s)
        machines.advance_to(state.now_s)
        self.first_s: dict[int, float] = {}
        self.arrive_s = {leader: self._push_s(leader) for leader in self.pushers}

    def _push_s(self, leader: int) -> float:
        """When the push of the current batches reaches the server."""
        machines, ranks = self.state.machines, self.pushers[leader]
        if len(ranks) > 1 and self.plan.mode == "ps":
            each_s = machines.finish_s[0, ranks] + np.array([self._way_s(rank, push_left_s) for rank in ranks])
            self.first_s[leader] = float(each_s.min())
            return float(each_s.max())
        ready_s = float(machines.finish_s[0, ranks].max())
        if len(ranks) > 1:
            members = np.zeros((1, machines.n), dtype=np.bool_)
            members[0, ranks] = True
            ready_s += float(machines.ring_s(members)[0] + machines.helper_delay_s(members)[0])
        return ready_s + self._way_s(leader, push_left_s)

    def _way_s(self, rank: int, left_s: Callable[[float, float], Array]) -> float:
        machines = self.state.machines
        way_s = float(machines.bytes[0] / machines.rate[0, rank])
        if self.plan.pushes_early(None) if left_s is push_left_s else self.plan.in_background(None):
            way_s = float(left_s(way_s, float(machines.duration_s[0, rank])))
        return float(machines.latency_s[0]) + way_s

    def step(self) -> None:
        """Process arrivals up to and including the next update."""
        before = self.rule.version
        while self.rule.version == before:
            leader = min(self.arrive_s, key=lambda one: (self.arrive_s[one], one))
            due_s = self.grace.due_s
            if due_s is not None and due_s < self.arrive_s[leader]:
                self.state.machines.advance_to(np.array([max(due_s, float(self.state.now_s[0]))]))
                self._take(self.grace.expire(due_s), max(due_s, self.busy_s))
            else:
                self._arrive(leader)

    def _arrive(self, leader: int) -> None:
        state, machines, ranks = self.state, self.state.machines, self.pushers[leader]
        machines.advance_to(np.array([max(self.arrive_s[leader], float(state.now_s[0]))]))
        carried = float(capacity(machines, [self.plan.servers])[0])
        pushed = len(ranks) if leader in self.first_s else 1
        one_s = float(machines.bytes[0]) / carried
        busy_s = max(self.busy_s, self.first_s.get(leader, -math.inf) - one_s)
        now_s = max(self.arrive_s[leader], busy_s + pushed * one_s)
        self.busy_s, self.arrive_s[leader] = now_s, math.inf
        state.report(ranks)
        self.pushes[leader] += 1
        push = Push(
            rank=leader,
            step=self.pushes[leader],
            version=self.base[leader],
            weight=float(len(ranks)),
            count=len(ranks),
        )
        self._take(self.rule.push(push), now_s)
        self.grace.look(now_s)

    def _take(self, events: Sequence[Event], now_s: float) -> None:
        """Execute the rule's events of a time."""
        state, machines = self.state, self.state.machines
        for event in events:
            released = event.ranks if isinstance(event, Release) else event.release
            if isinstance(event, Update):
                now_s += float(machines.server_s[0])
                self._account(event, now_s)
            version = event.number + 1 if isinstance(event, Update) else self.rule.version
            for rank in released:
                self._release(rank, now_s, version)
        state.now_s, state.step = np.array([max(now_s, float(state.now_s[0]))]), np.array([self.rule.version])

    def _release(self, leader: int, now_s: float, version: int) -> None:
        ranks = self.pushers[leader]
        begin_s = now_s + self._way_s(leader, reply_left_s)
        self.base[leader] = version
        self.state.begin(ranks, np.full(len(ranks), begin_s), np.full(len(ranks), version))
        self.arrive_s[leader] = self._push_s(leader)

    def _account(self, event: Update, now_s: float) -> None:
        account = self.state.account
        factor = event.lr_factor * np.array([part.factor * len(self.pushers[part.rank]) for part in event.parts])
        weight = np.array([float(len(self.pushers[part.rank])) for part in event.parts])
        drift = np.array([self.moved - self.lengths.get(self.base[part.rank], 0.0) for part in event.parts])
        length = float(factor.sum())
        self.moved += length
        self.lengths[event.number + 1] = self.moved
        if len(self.lengths) > 4096:
            oldest = min(self.base.values())
            self.lengths = {version: moved for version, moved in self.lengths.items() if version >= oldest}
        account.add(
            np.array([now_s]),
            length=np.array([length]),
            signal=np.array([float((factor * alignment(drift, float(account.price[0]))).sum())]),
            effective=np.array([length * length / max(float((factor * factor / weight).sum()), 1e-24)]),
            drift=np.array([float((factor * drift).sum()) / max(length, 1e-12)]),
            gradients=np.array([float(event.gradients)]),
        )
