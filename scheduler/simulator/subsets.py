"""`subgroup(members)` and `local(H)`, many replicas at once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from scheduler.cost.progress import alignment, local_drift
from scheduler.plan.plan import Plan
from scheduler.rules.local_walk import another_step_fits
from scheduler.simulator.base import Mode, State, StepMode
from scheduler.simulator.machines import Array, Flags
from scheduler.transmission.behind_compute import averaging_left_s, steps_behind
from scheduler.transmission.pace import paced_s

__all__ = ["Local", "Subgroup"]


class Subgroup(StepMode):
    """The members all-reduce; every other rank (child) pushes gradients to a parent and fetches parameters from it.

    A child's gradient is in the first step that its parent closes after the arrival; the child starts its next batch
    when it has received the parameters of that step. No step waits for a child's gradient, but Horovod's negotiation
    needs every process: a frozen child blocks all, a starved one delays all by half a pause.

    Args:
        state: The job; ranks have the newest parameters, or are computing for an older step.
        plans: One plan of mode `subgroup` per replica.
    """

    def __init__(self, state: State, plans: Sequence[Plan]) -> None:
        super().__init__(state, plans)
        self.members = np.array([[rank in plan.members for rank in range(state.machines.n)] for plan in plans])

    def step(self) -> None:
        state, machines = self.state, self.state.machines
        fresh = self.members & (state.batch_step == state.step[:, None])
        behind = self.members & ~fresh
        if behind.any():
            self._catch_up(behind)
        close_s = np.where(self.members, machines.finish_s, 0.0).max(axis=1)
        machines.advance_to(close_s)
        push_s = machines.finish_s + machines.latency_s[:, None] + paced_s(machines.bytes[:, None], machines.rate)
        came = ~self.members & (push_s <= close_s[:, None])
        end_s = machines.thawed(close_s)
        end_s = end_s + machines.ring_s(self.members) + machines.helper_delay_s(~self.members & ~came)
        stale = np.where(came, state.step[:, None] - state.batch_step, 0).astype(np.float64)
        state.account.add_mean(end_s, self.weights(stale, self.members | came), stale)
        state.now_s, state.step = end_s, state.step + 1
        self._begin_next(came, end_s)

    def _catch_up(self, behind: Flags) -> None:
        """Let members with a batch of an older step (after a switch) discard it and start one for this step."""
        state, machines = self.state, self.state.machines
        where = np.flatnonzero(behind)
        row = where // machines.n
        state.report(where, late=True)
        begin_s = np.maximum(machines.finish_s.reshape(-1)[where], state.now_s[row])
        state.begin(where, begin_s, state.step[row])

    def _begin_next(self, came: Flags, end_s: Array) -> None:
        state, machines = self.state, self.state.machines
        for mask, late in ((self.members, False), (came, True)):
            where = np.flatnonzero(mask)
            row = where // machines.n
            state.report(where, late=late)
            begin_s = end_s[row]
            if late:
                rate = machines.rate.reshape(-1)[where]
                begin_s = begin_s + machines.latency_s[row] + paced_s(machines.bytes[row], rate)
            state.begin(where, begin_s, state.step[row])


class Local(Mode):
    """Every rank makes `local_steps` local steps, or as many as fit into `local_s`; then all average.

    Args:
        state: The job.
        plans: One plan of mode `local` per replica.
    """

    def __init__(self, state: State, plans: Sequence[Plan]) -> None:
        super().__init__(state, plans)
        self.local_steps = np.array([plan.local_steps for plan in plans])
        self.local_s = np.array([plan.local_s for plan in plans])
        self.behind = np.array([plan.in_background(None) for plan in plans])

    def step(self) -> None:
        state, machines = self.state, self.state.machines
        begin_s, done = state.now_s.copy(), np.zeros(state.batch_step.shape)
        working = np.ones(state.batch_step.shape, dtype=np.bool_)
        end_s = machines.finish_s.copy()
        while True:
            where = np.flatnonzero(working)
            state.report(where)
            done += working
            end_s = np.where(working, machines.finish_s, end_s)
            fits = another_step_fits(machines.finish_s - begin_s[:, None], machines.duration_s, self.local_s[:, None])
            working &= np.where((self.local_steps > 0)[:, None], done < self.local_steps[:, None], fits)
            where = np.flatnonzero(working)
            if not len(where):
                break
            state.begin(where, machines.finish_s.reshape(-1)[where], state.batch_step.reshape(-1)[where] + 1)
        close_s = end_s.max(axis=1)
        machines.advance_to(close_s)
        end = machines.thawed(close_s)
        # Behind compute an averaging overlaps with the next steps, which are assumed to take as long as these.
        averaging_s, walk_s = machines.averaging_s(), close_s - begin_s
        end = end + np.where(self.behind, averaging_left_s(averaging_s, walk_s), averaging_s)
        late = np.where(self.behind, steps_behind(averaging_s, walk_s, done.mean(axis=1)), 0.0)
        self._account(done, end, late)
        state.now_s, state.step = end, state.step + done.max(axis=1).astype(np.int64)
        all_ranks = np.arange(done.size)
        state.begin(all_ranks, np.repeat(end, machines.n), np.repeat(state.step, machines.n))

    def _account(self, done: Array, end_s: Array, late: Array) -> None:
        """Add the average of n walks of `done` steps as that many steps of n gradients with the walks' drift.

        The mean is applied `late` steps after the end of the walks.
        """
        account, count = self.state.account, done.mean(axis=1)
        drift = np.asarray(local_drift(count + late, account.world))
        account.add(
            np.where(count > 0.0, end_s, math.inf),
            length=np.ones_like(count),
            signal=np.asarray(alignment(drift, account.price)),
            # Walks of unequal length average out less noise.
            effective=done.sum(axis=1) ** 2 / np.maximum((done * done).sum(axis=1), 1e-12),
            drift=drift,
            gradients=account.world,
            times=count,
        )
