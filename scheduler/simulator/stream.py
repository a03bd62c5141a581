"""`ps` with few gradients per update among many ranks, simulated in batches of arrivals.

A released rank cannot arrive again before a reply, its shortest batch and a push have passed, so all arrivals before
that time are known and their updates are computed together (completion times are a maximum over prefixes, because
servers process pushes one after the other). Equal to `Arrivals` and `Server` update by update, except that link rates
and the noise scale are updated once per batch of arrivals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from scheduler.cost.progress import alignment
from scheduler.plan.plan import Plan
from scheduler.rules.weights import damped, damping_scale, lr_factor
from scheduler.simulator.base import Mode, State
from scheduler.simulator.machines import Array, Ints
from scheduler.simulator.servers import capacity
from scheduler.transmission.behind_compute import EDGE, push_left_s, reply_left_s

__all__ = ["Stream", "streams"]

_MANY = 64
"""Least ratio of ranks to gradients of an update at which batches of arrivals are long enough to save time."""


def streams(plan: Plan) -> bool:
    """Whether a plan is simulated in batches of arrivals."""
    plain = plan.mode == "ps" and plan.rule in ("x", "ssp") and plan.guard == "none"
    return plain and plan.world_size >= _MANY * plan.quorum


class Stream(Mode):
    """`ps(x)` and `ssp(s)`. One `step` is a batch of one or more updates.

    Args:
        state: The job, of one replica.
        plans: Its plan.

    Raises:
        ValueError: More replicas than one.
    """

    def __init__(self, state: State, plans: Sequence[Plan]) -> None:
        if len(plans) != 1 or state.machines.replicas != 1:
            raise ValueError(f"{state.machines.replicas} replicas with {len(plans)} plans; expected one of each")
        super().__init__(state, plans)
        self.plan, machines, n = plans[0], state.machines, state.machines.n
        machines.advance_to(state.now_s)
        self.base = np.full(n, int(state.step[0]))  # Version of the parameters behind each rank's gradient.
        self.base_moved = np.zeros(n)
        self.moved = 0.0
        self.clock = np.zeros(n, dtype=np.int64)
        self.blocked: list[int] = []
        self.length = lr_factor(self.plan, self.plan.quorum)
        self.early, self.behind = self.plan.pushes_early(None), self.plan.in_background(None)
        self.arrive_s = machines.finish_s[0] + self._push_s()

    def _wire_s(self) -> Array:
        return np.asarray(self.state.machines.bytes[0] / self.state.machines.rate[0])

    def _push_s(self) -> Array:
        """Exposed time of the pushes of the ranks' current batches, as in `Arrivals`."""
        machines, wire_s = self.state.machines, self._wire_s()
        left_s = push_left_s(wire_s, machines.duration_s[0]) if self.early else wire_s
        return np.asarray(machines.latency_s[0] + left_s)

    def _reply_s(self) -> Array:
        """Exposed time of the replies, beside forward passes as long as the last ones."""
        machines, wire_s = self.state.machines, self._wire_s()
        left_s = reply_left_s(wire_s, machines.duration_s[0]) if self.behind else wire_s
        return np.asarray(machines.latency_s[0] + left_s)

    def _least_ways_s(self) -> float:
        """Least time of a reply and the next push, without compute."""
        parts = (EDGE if self.behind else 1.0) + (EDGE if self.early else 1.0)
        return 2.0 * float(self.state.machines.latency_s[0]) + parts * float(self._wire_s().min())

    def step(self) -> None:
        state, machines, x = self.state, self.state.machines, self.plan.quorum
        first_s = float(np.partition(self.arrive_s, x - 1)[x - 1])
        machines.advance_to(np.array([first_s]))
        reply_s = self._reply_s()
        # No rank released from now on arrives, and no link changes, before this time.
        horizon_s = max(first_s, min(first_s + self._least_ways_s() + machines.fastest_s, machines.change_s))
        chosen = np.flatnonzero(self.arrive_s <= horizon_s)
        chosen = chosen[np.argsort(self.arrive_s[chosen], kind="stable")]
        count = len(chosen) // x
        chosen = chosen[: count * x]
        last_s = self.arrive_s[chosen][x - 1 :: x]
        end_s = self._ends(last_s)
        before = self.moved + np.concatenate([[0.0], np.cumsum(self._account(chosen, count, end_s))])
        self.moved = float(before[-1])
        first = int(state.step[0])
        state.now_s, state.step = end_s[-1:].copy(), np.array([first + count])
        state.report(chosen)
        self.arrive_s[chosen] = math.inf
        released, update = self._released(chosen, count)
        self.base[released], self.base_moved[released] = first + update + 1, before[update + 1]
        state.begin(released, end_s[update] + reply_s[released], self.base[released])
        self.arrive_s[released] = machines.finish_s[0, released] + self._push_s()[released]

    def _ends(self, last_s: Array) -> Array:
        """Completion times: after an update's last gradient and the update before, limited by the servers' links."""
        machines = self.state.machines
        server_s = float(machines.server_s[0])
        busy_s = self.plan.quorum * float(machines.bytes[0]) / float(capacity(machines, [self.plan.servers])[0])
        busy_s += server_s
        after = busy_s * np.arange(len(last_s))
        from_now = float(self.state.now_s[0]) + busy_s + after
        return np.asarray(np.maximum(np.maximum.accumulate(last_s + server_s - after) + after, from_now))

    def _account(self, chosen: Ints, count: int, end_s: Array) -> Array:
        """Add the updates to the account; returns their lengths."""
        plan, x = self.plan, self.plan.quorum
        first = int(self.state.step[0])
        stale = (first + np.repeat(np.arange(count), x) - self.base[chosen]).astype(np.float64)
        kept = damped(damping_scale(plan, float(x)), stale)
        factor = (kept * self.length / x).reshape(count, x)
        length = factor.sum(axis=1)
        moved = self.moved + np.concatenate([[0.0], np.cumsum(length)[:-1]])
        drift = moved[:, None] - self.base_moved[chosen].reshape(count, x)
        account = self.state.account
        account.add_series(
            end_s,
            length=length,
            signal=(factor * alignment(drift, float(account.price[0]))).sum(axis=1),
            effective=length * length / np.maximum((factor * factor).sum(axis=1), 1e-24),
            drift=(factor * drift).sum(axis=1) / np.maximum(length, 1e-12),
            gradients=float(x),
        )
        return np.asarray(length)

    def _released(self, chosen: Ints, count: int) -> tuple[Ints, Ints]:
        """Ranks that are released, and the index of the update that releases each."""
        if self.plan.rule != "ssp":
            return chosen, np.repeat(np.arange(count), self.plan.quorum)
        slack, clock = self.plan.slack, self.clock
        ranks: list[int] = []
        update: list[int] = []
        slowest = int(clock.min())
        at_slowest = int((clock == slowest).sum())
        for index, rank in enumerate(chosen.tolist()):
            own = int(clock[rank])
            clock[rank] = own + 1
            if own == slowest:
                at_slowest -= 1
            if at_slowest == 0:
                slowest = int(clock.min())
                at_slowest = int((clock == slowest).sum())
                free = [one for one in self.blocked if clock[one] - slowest <= slack]
                self.blocked = [one for one in self.blocked if clock[one] - slowest > slack]
                ranks += free
                update += [index] * len(free)
            if own + 1 - slowest > slack:
                self.blocked.append(rank)
            else:
                ranks.append(rank)
                update.append(index)
        return np.array(ranks, dtype=np.int64), np.array(update, dtype=np.int64)
