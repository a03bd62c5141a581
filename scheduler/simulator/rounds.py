"""`sync` and `partial(m)`, many replicas at once, with the closing rule of the live job.

The rule is `scheduler.rules.step_closing.ClosingRule` in arrays: a quorum, then a grace for ranks that work on this
step, are not slow and should arrive in time. Single events are simulated only from the quorum on. A test drives both
implementations with the same batches and compares every closing time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from scheduler.balance.share_policy import share_factors, solve_shares
from scheduler.balance.time_curves import SHORT
from scheduler.diagnosis.window_stats import always_slow
from scheduler.plan.plan import Plan
from scheduler.rules.microbatches import TRANSFER_S, moves, stolen_makespan
from scheduler.rules.step_layout import grain
from scheduler.simulator.base import HISTORY, State, StepMode
from scheduler.simulator.machines import Array, Flags, Ints

__all__ = ["Rounds"]

_GRACE_FRACTION, _GRACE_MADS, _DEADLINE_S = 0.25, 4.0, 60.0  # Defaults of ClosingRule.
_BATCH = 64  # Samples of a usual batch if the scenario has none.
_PARTS = 4  # Micro-batches of a usual batch if the scenario has none.
_RECENT, _OFFSETS = 5, 64  # As in `ClosingRule`.


class Rounds(StepMode):
    """All ranks reduce together; a step waits for `quorum` of them.

    Args:
        state: The job.
        plans: One plan of mode `sync` or `partial` per replica.

    Attributes:
        left_out: Ranks whose gradients are not in the last step.
    """

    def __init__(self, state: State, plans: Sequence[Plan]) -> None:
        super().__init__(state, plans)
        shape = state.batch_step.shape
        self.recent = np.full((*shape, _RECENT), math.inf)
        self.seen = np.zeros(shape, dtype=np.int64)
        self.usual = np.full(shape, math.nan)
        self.offsets = np.full((shape[0], _OFFSETS), math.inf)
        self.offset_count = np.zeros(shape[0], dtype=np.int64)
        self.left_out = np.zeros(shape, dtype=np.bool_)
        self.late = np.full(shape, -1, dtype=np.int64)  # Staleness of a gradient to fold into this step.
        state.step = np.maximum(state.step, state.batch_step.max(axis=1))
        self.solved = np.zeros(shape)  # Factors of the shares of `sync(balanced)`, 0 before they are first solved for.
        self.set_plans(plans)

    def set_plans(self, plans: Sequence[Plan]) -> None:
        """Continue under other plans of the same family; current batches continue."""
        self.quorum = np.array([plan.quorum for plan in plans])
        self.strict = self.quorum == self.state.machines.n
        self.balanced = np.array([plan.balanced for plan in plans])
        self.steals = np.array([plan.steal for plan in plans])
        fixed = [plan.batch_shares if not plan.balanced else () for plan in plans]
        self._shared = True  # Factors are set once more, to 1 if these plans have no shares.
        self.shares = np.array([one or (0,) * self.state.machines.n for one in fixed], dtype=np.float64)

    def _share(self) -> None:
        """Set the batch shares after a step; `sync(balanced)` solves for them every few reports, as the coordinator."""
        machines, self._shared = self.state.machines, False
        machines.share_factor.fill(1.0)
        user = self.shares.any(axis=1)
        if user.any():
            ratio = self.shares[user] / self.shares[user].mean(axis=1, keepdims=True)
            fixed = machines.fixed_part[user, None]
            machines.share_factor[user] = fixed + (1.0 - fixed) * ratio
        for row in np.flatnonzero(self.balanced & (self.state.reported.min(axis=1) >= SHORT)).tolist():
            if self.state.step[row] % SHORT == 0 or not self.solved[row].any():
                slots = (self.state.reported[row][:, None] - 1 - np.arange(SHORT)) % HISTORY
                levels = np.median(np.take_along_axis(self.state.history_s[row], slots, axis=1), axis=1)
                batch, fixed_part = int(machines.batch[row]) or _BATCH, float(machines.fixed_part[row])
                shares = solve_shares(levels.tolist(), batch, fixed_part)
                self.solved[row] = share_factors(shares, batch, fixed_part)
            machines.share_factor[row] = self.solved[row]

    def step(self) -> None:
        state, machines = self.state, self.state.machines
        fresh = state.batch_step == state.step[:, None]
        if self.strict.all() and fresh.all():
            close_s, arrived = machines.finish_s.max(axis=1), fresh
            where = np.arange(fresh.size)
            self._learn(where)
            state.report(where)
        else:
            close_s, arrived = self._close(fresh)
        if self.steals.any():
            close_s = self._taken_over(close_s, arrived)
        self.left_out = ~arrived
        machines.advance_to(close_s)
        end_s = machines.thawed(close_s)
        end_s = end_s + machines.ring_s() + machines.helper_delay_s(~arrived)
        stale = np.where(arrived, 0, self.late).astype(np.float64)
        # A rank that ended a late batch and then a fresh one in time contributes both: the late one is folded in.
        both = arrived & (self.late > 0)
        weights = self.weights(np.maximum(stale, 0.0), arrived | (self.late > 0))
        if both.any():
            extra = self.weights(np.where(both, self.late, 0).astype(np.float64), both)
            weights = np.concatenate([weights, extra], axis=1)
            stale = np.concatenate([stale, np.where(both, self.late, 0)], axis=1)
        state.account.add_mean(end_s, weights, np.maximum(stale, 0.0))
        self.late.fill(-1)
        state.now_s = end_s
        state.step = state.step + 1
        if self.balanced.any() or self.shares.any() or self._shared:
            self._share()
        where = np.flatnonzero(arrived)
        row = where // machines.n
        state.begin(where, end_s[row], state.step[row])

    def _taken_over(self, close_s: Array, arrived: Flags) -> Array:
        """When steps end if ranks take over micro-batches from each other; reports are of whole batches."""
        machines = self.state.machines
        found_s = close_s.copy()
        for row in np.flatnonzero(self.steals & arrived.all(axis=1)).tolist():
            times_s = machines.finish_s[row] - machines.start_s[row]
            parts, fixed_part = int(machines.parts[row]) or _PARTS, float(machines.fixed_part[row])
            fine = grain(int(machines.batch[row]) or _BATCH, parts)
            moving = self._moves(row)
            makespan_s = TRANSFER_S + float(
                stolen_makespan(times_s, parts, grain=fine, fixed_part=fixed_part, moving=moving)
            )
            found_s[row] = min(close_s[row], machines.start_s[row].max() + makespan_s)
            machines.finish_s[row] = np.minimum(machines.finish_s[row], found_s[row])
        return found_s

    def _moves(self, row: int) -> bool:
        """Whether the latest reports of a job show slowness that moves."""
        reported = int(self.state.reported[row].min())
        slots = (reported - 1 - np.arange(min(reported, HISTORY))) % HISTORY
        return moves(self.state.history_s[row][:, slots].T) if reported > 1 else False

    # ---- the closing rule -------------------------------------------------------------------------------------------

    def _close(self, fresh: Flags) -> tuple[Array, Flags]:
        """When the step closes, and its ranks. Ranks that end a late batch before it closes join it."""
        together = fresh.copy()
        arrive_s = np.where(fresh, self.state.machines.finish_s, math.inf)
        quorum_s = self._quorum(fresh, arrive_s)
        arrived = arrive_s <= quorum_s[:, None]
        self._arrived(arrived)
        close_s = quorum_s.copy()
        open_ = ~arrived.all(axis=1) & (arrived.sum(axis=1) >= self.quorum)
        # At the first arrival the rule learns the start time of all ranks that were ready for the last step.
        rows, start_s = np.arange(len(close_s)), self.state.machines.start_s
        first_s = start_s[rows, arrive_s.argmin(axis=1)]
        began_s = np.where(together, first_s[:, None], start_s)
        # Offsets change only at the end of a step.
        offset_s = self._offset_s()
        while open_.any():
            limit_s = quorum_s + self._grace_s(offset_s)
            worth = self._worth_waiting(fresh & ~arrived, began_s, limit_s)
            shut = open_ & ((close_s >= limit_s) | ~worth.any(axis=1))
            open_ &= ~shut
            if not open_.any():
                break
            coming_s = np.where(arrived, math.inf, arrive_s).min(axis=1)
            behind_s = self._behind_s(fresh)
            following_s = np.minimum(np.minimum(limit_s, coming_s), behind_s.min(axis=1))
            close_s = np.where(open_, following_s, close_s)
            new = (arrive_s <= close_s[:, None]) & ~arrived & open_[:, None]
            self._arrived(new)
            arrived |= new
            joins = (behind_s <= close_s[:, None]) & open_[:, None]
            self._join(joins, behind_s, fresh, arrive_s)
            began_s = np.where(joins, behind_s, began_s)
            open_ &= ~arrived.all(axis=1)
        self._note_offsets(arrived, arrive_s)
        return close_s, arrived

    def _quorum(self, fresh: Flags, arrive_s: Array) -> Array:
        """Time of the quorum. Ranks that end a late batch before it join the step, one after the other."""
        rows = np.arange(len(self.quorum))
        while True:
            ordered = np.sort(arrive_s, axis=1)
            quorum_s = ordered[rows, self.quorum - 1]
            quorum_s = np.where(self.strict, quorum_s, np.minimum(quorum_s, ordered[:, 0] + _DEADLINE_S))
            behind_s = self._behind_s(fresh)
            first = behind_s.argmin(axis=1)
            due = (behind_s[rows, first] <= quorum_s) & np.isfinite(behind_s[rows, first])
            if not due.any():
                found: Array = quorum_s
                return found
            joins = np.zeros_like(fresh)
            joins[rows[due], first[due]] = True
            self._join(joins, behind_s, fresh, arrive_s)

    def _behind_s(self, fresh: Flags) -> Array:
        """When each rank that is behind can join this step; infinite for the others."""
        ready_s = np.maximum(self.state.machines.finish_s, self.state.now_s[:, None])
        return np.where(fresh, math.inf, ready_s)

    def _join(self, joins: Flags, behind_s: Array, fresh: Flags, arrive_s: Array) -> None:
        """Let these ranks end a late batch and start one for this step."""
        where = np.flatnonzero(joins)
        if not len(where):
            return
        state = self.state
        row = where // state.machines.n
        self._learn(where)
        state.report(where, late=True)
        self.late.reshape(-1)[where] = (state.step[row] - state.batch_step.reshape(-1)[where]).astype(np.int64)
        state.begin(where, behind_s.reshape(-1)[where], state.step[row])
        fresh.reshape(-1)[where] = True
        arrive_s.reshape(-1)[where] = state.machines.finish_s.reshape(-1)[where]

    def _arrived(self, new: Flags) -> None:
        where = np.flatnonzero(new)
        if len(where):
            self._learn(where)
            self.state.report(where)

    def _learn(self, where: Ints) -> None:
        """Add a compute time to the last five of these ranks; their median is the usual time."""
        machines = self.state.machines
        recent, seen = self.recent.reshape(-1, _RECENT), self.seen.reshape(-1)
        recent[where, seen[where] % _RECENT] = (
            machines.finish_s.reshape(-1)[where] - machines.start_s.reshape(-1)[where]
        )
        seen[where] += 1
        count = np.minimum(seen[where], _RECENT)
        ordered = np.sort(recent[where], axis=1)
        index = np.arange(len(where))
        self.usual.reshape(-1)[where] = 0.5 * (ordered[index, (count - 1) // 2] + ordered[index, count // 2])

    def _typical_s(self) -> Array:
        """Lower median over the ranks of their usual times, 0 if none is known."""
        known = np.isfinite(self.usual)
        count = known.sum(axis=1)
        ordered = np.sort(np.where(known, self.usual, math.inf), axis=1)
        middle = ordered[np.arange(len(count)), np.maximum(count - 1, 0) // 2]
        return np.where(count > 0, middle, 0.0)

    def _grace_s(self, offset_s: Array) -> Array:
        typical_s = self._typical_s()
        return np.minimum(np.maximum(_GRACE_FRACTION * typical_s, offset_s), np.maximum(typical_s, 1e-3))

    def _offset_s(self) -> Array:
        """median + 4 MAD of recent arrival offsets; 0 if there are none."""
        count = np.minimum(self.offset_count, _OFFSETS)
        middle = np.where(count > 0, _median(self.offsets, count), 0.0)
        deviation = np.abs(self.offsets - middle[:, None])
        with np.errstate(invalid="ignore"):
            value = middle + _GRACE_MADS * _median(deviation, count)
        return np.where(count > 0, value, 0.0)

    def _worth_waiting(self, missing: Flags, began_s: Array, limit_s: Array) -> Flags:
        with np.errstate(invalid="ignore"):
            slow = always_slow(self.usual, self._typical_s()[:, None])
            worth: Flags = missing & ~slow & ~(began_s + self.usual > limit_s[:, None])
            return worth

    def _note_offsets(self, arrived: Flags, arrive_s: Array) -> None:
        """Add arrival offsets (after the first arrival) of ranks that are not slow; the last 64 are kept."""
        with np.errstate(invalid="ignore"):
            fast = arrived & ~always_slow(self.usual, self._typical_s()[:, None]) & ~self.strict[:, None]
        first_s = np.where(arrived, arrive_s, math.inf).min(axis=1)
        fast &= arrive_s > first_s[:, None]
        if not fast.any():
            return
        order = np.argsort(np.where(fast, arrive_s, math.inf), axis=1, kind="stable")
        count = fast.sum(axis=1)
        place = np.arange(arrive_s.shape[1])[None, :]
        kept = (place < count[:, None]) & (place >= count[:, None] - _OFFSETS)
        row, column = np.nonzero(kept)
        slot = (self.offset_count[row] + column) % _OFFSETS
        self.offsets[row, slot] = arrive_s[row, order[row, column]] - first_s[row]
        self.offset_count = self.offset_count + count


def _median(values: Array, count: Ints) -> Array:
    """Median of the `count` finite values of each row, the others being infinite."""
    ordered = np.sort(values, axis=1)
    row = np.arange(len(values))
    low = ordered[row, np.maximum(count - 1, 0) // 2]
    return np.asarray(0.5 * (low + ordered[row, np.minimum(count // 2, values.shape[1] - 1)]))
