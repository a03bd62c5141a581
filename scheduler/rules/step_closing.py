"""When a step may close without the missing ranks: quorum, grace and expected arrival.

Pure state machine: the coordinator feeds it with arrivals and calls `evaluate(now_s)`; it never sleeps and never reads
a clock. The same object runs in the job, in tests of the simulator and under hypothesis.

A relaxed step closes when a quorum of m fresh gradients has arrived and no rank is worth waiting for. A missing rank is
worth waiting for, until the end of the grace after the quorum, if it computes for this step, is not slow, and should
arrive in time by its own recent compute time. So a slow rank costs nothing, a rank that was on time gets the whole
grace, and equal ranks never miss a step by jitter. Slow is relative to the lower median over the ranks, which is one of
the fast ones even when half are slow: with two of four ranks at 2x, waiting for both would lose the whole gain.

The grace (`scheduler.rules.grace`) is by the usual compute time.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from scheduler.diagnosis.window_stats import always_slow
from scheduler.records import Plan
from scheduler.rules.grace import FRACTION, MADS, Grace, median
from scheduler.stats import lower_median

__all__ = ["Close", "ClosingRule"]

_RECENT = 5  # Own compute times that predict the next one: few, so that a recovered rank is soon waited for.
_RETURN_S = 1.0
"""Ranks leave a collective within milliseconds of each other, but one may be suspended just then. A step that closes
without it has another gradient than the program's. Where ranks are at different steps of their programs, one step waits
this long in vain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    """Order to close a step.

    Attributes:
        step: The step to close.
        excused: Missing ranks that are inactive (finished, or inside the user's own collective).
        missing: All ranks whose gradient is not waited for.
        typical_compute_s: Usual compute time of a rank that is not slow.
        reason: `quorum`, `away`, `deadline`, or `elsewhere` without the quorum before its deadline, as missing ranks
            probably wait in another optimizer.
    """

    step: int
    excused: tuple[int, ...]
    missing: tuple[int, ...]
    typical_compute_s: float
    reason: str


@dataclass(slots=True)
class _Rank:
    step: int = 0  # The step whose gradient the rank computes now.
    started_s: float | None = None
    out_of_data: bool = True
    inactive_s: float = -math.inf  # When it became inactive, or got data again, if it is to be waited for.
    entered_s: float = -math.inf  # When it entered the user's collective that it is in.
    active_s: float = -math.inf  # When it last became active.
    compute_s: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    _usual_s: float | None = None

    def note(self, compute_s: float) -> None:
        """Add the compute time of a batch."""
        self.compute_s.append(compute_s)
        self._usual_s = None

    def usual_s(self) -> float | None:
        """Median of the recent compute times, None if there are none."""
        if self._usual_s is None and self.compute_s:
            self._usual_s = median(self.compute_s)
        return self._usual_s

    def expected_s(self) -> float | None:
        """Time at which the rank should arrive, None if unknown."""
        usual_s = self.usual_s()
        return None if self.started_s is None or usual_s is None else self.started_s + usual_s


class ClosingRule:
    """Decides for one optimizer when its current step closes.

    Args:
        plan: The active plan.
        grace_fraction: Least grace, as a fraction of the usual compute time.
        grace_mads: Median absolute deviations of the arrival offsets covered by the grace.
        quorum_deadline_s: Time after the first arrival at which a relaxed step closes even without its quorum.

    Attributes:
        several: Whether the program has other optimizers: a missing rank may wait in one of them for the ranks that
            have arrived here, so that the quorum is not to be had, if they are not stepped equally often.
        awaits_all: Whether a step waits for every active rank, as in lockstep: a return to `sync` is on its way, for
            which no rank may miss a step.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        grace_fraction: float = FRACTION,
        grace_mads: float = MADS,
        quorum_deadline_s: float = 60.0,
    ) -> None:
        self._plan, self._members = plan, plan.members_or_all
        self.step = 0
        self._grace = Grace(grace_fraction, grace_mads)
        self._quorum_deadline_s = quorum_deadline_s
        self.several = self.awaits_all = False
        self._ranks = [_Rank() for _ in range(plan.world_size)]
        self._ready: dict[int, float] = {}
        self._first_s = 0.0  # When the first of them arrived.
        self._inactive: set[int] = set()
        self._typical_s: float | None = None
        self._closed = False

    @property
    def ready(self) -> tuple[int, ...]:
        """Ranks whose fresh gradient for the current step has arrived."""
        return tuple(sorted(self._ready))

    @property
    def begun(self) -> bool:
        """Whether any fresh gradient for the current step has arrived."""
        return bool(self._ready)

    @property
    def inactive(self) -> tuple[int, ...]:
        """Ranks that deliver no gradients for now."""
        return tuple(sorted(self._inactive))

    @property
    def plan(self) -> Plan:
        """The active plan."""
        return self._plan

    @plan.setter
    def plan(self, plan: Plan) -> None:
        self._plan = plan
        self._members = plan.members_or_all  # Cached: used for every message.

    def skip_to(self, step: int) -> None:
        """Continue at `step`; earlier steps ended without arrivals reported here."""
        if step > self.step:
            self.step, self._ready, self._closed = step, {}, False

    def restart(self, step: int, now_s: float) -> None:
        """Let every rank continue at `step`, after a transfer of state."""
        self.skip_to(step)  # Arrivals for that step that preceded this report stay.
        for state in self._ranks:
            state.step, state.started_s = max(state.step, step), now_s

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks without a fresh gradient for the current step."""
        return tuple(rank for rank in self._members if rank not in self._ready)

    def arrive(self, rank: int, step: int, compute_s: float, now_s: float) -> None:
        """Record that a rank has submitted all buckets of `step`; for a closed step only its compute time counts."""
        state = self._ranks[rank]
        state.note(compute_s)
        self._typical_s = None
        if step < self.step or (step == self.step and self._closed and rank in self._ready):
            return
        if step > self.step:
            self._advance(step, now_s - compute_s)
        self._first_s = min(now_s, self._first_s) if self._ready else now_s
        self._ready.setdefault(rank, now_s)
        state.step = max(state.step, step)
        self._inactive.discard(rank)

    def late(self, rank: int, compute_s: float) -> None:
        """Record the compute time of a gradient that missed its step."""
        self._ranks[rank].note(compute_s)
        self._typical_s = None

    def join(self, rank: int, step: int, now_s: float) -> None:
        """Record that a rank has caught up to the parameters of `step` and computes with them from now on."""
        state = self._ranks[rank]
        state.step = max(state.step, step)
        state.started_s = now_s

    def deactivate(self, rank: int, now_s: float = -math.inf, *, out_of_data: bool = True) -> None:
        """Mark a rank inactive: it delivers no gradients until `activate`.

        Args:
            rank: The rank.
            now_s: The current time; needed unless it is out of data.
            out_of_data: It has no more batches. Otherwise it is in a collective of the user's, which ranks leave at
                slightly different times: in lockstep a step waits for it, a second or one more usual compute time.
        """
        self._inactive.add(rank)
        state = self._ranks[rank]
        state.out_of_data, state.inactive_s = out_of_data, now_s
        state.entered_s = -math.inf if out_of_data else now_s

    def has_data(self, rank: int, now_s: float) -> None:
        """Note that a rank has got data, so that one that is inactive without any will be active soon."""
        if rank in self._inactive and self._ranks[rank].out_of_data:
            self.deactivate(rank, now_s, out_of_data=False)
            self._ranks[rank].entered_s = -math.inf

    def activate(self, rank: int, now_s: float) -> None:
        """Mark a rank active. While it is behind, no step waits for it until it arrives or joins."""
        self._inactive.discard(rank)
        self._ranks[rank].started_s = self._ranks[rank].active_s = now_s

    def align(self, now_s: float) -> None:
        """Let all ranks start the next step together, after an end of an epoch for which all have every ended step."""
        following = self.step + (1 if self._ready else 0)
        self._inactive.clear()
        for state in self._ranks:
            state.step, state.started_s = max(state.step, following), now_s

    def up_to_date(self) -> tuple[int, ...]:
        """Ranks that have, or are about to have, the newest parameters, by their reports."""
        return tuple(rank for rank in self._members if self._ranks[rank].step >= self.step)

    def grace_s(self) -> float:
        """Seconds after the quorum that a step waits for ranks that should arrive in time."""
        return self._grace.seconds(self.typical_compute_s())

    def typical_compute_s(self) -> float:
        """Lower median over the ranks of their usual compute time, 0 if none is known."""
        if self._typical_s is None:
            usual = [own for state in self._ranks if (own := state.usual_s()) is not None]
            self._typical_s = lower_median(usual) if usual else 0.0
        return self._typical_s

    def _is_slow(self, rank: int) -> bool:
        usual_s = self._ranks[rank].usual_s()
        return usual_s is not None and always_slow(usual_s, self.typical_compute_s())

    def evaluate(self, now_s: float) -> tuple[Close | None, float | None]:
        """Return the order to close now, or the time at which to call again if no event comes before.

        After an order the step is closed; the next arrival for a later step opens that step.
        """
        if self._closed or not self._ready:
            return None, None
        members = self._members
        if len(self._ready) == len(members):
            self._closed = True  # All ranks have arrived: the reduction completes by itself.
            self._note_offsets()
            return None, None
        active = members
        if self._inactive:
            active = tuple(rank for rank in members if rank not in self._inactive or rank in self._ready)
        needed = len(active) if self.awaits_all else min(self.plan.quorum, len(active))
        if len(self._ready) < needed:
            return self._without_quorum(now_s)
        arrivals = sorted(self._ready.values())
        if not self._may_close:
            return self._without_inactive(arrivals[-1], now_s)
        limit_s = arrivals[needed - 1] + self.grace_s()
        if now_s < limit_s and any(self._worth_waiting(rank, limit_s) for rank in active):
            return None, limit_s
        return self._close("quorum"), None

    @property
    def _may_close(self) -> bool:
        return self.plan.may_close and not self.awaits_all

    def _worth_waiting(self, rank: int, limit_s: float) -> bool:
        state = self._ranks[rank]
        if rank in self._ready or rank in self._inactive or state.step < self.step or self._is_slow(rank):
            return False
        expected = state.expected_s()
        return expected is None or expected <= limit_s

    def _without_inactive(self, last_s: float, now_s: float) -> tuple[Close | None, float | None]:
        """Decide, in lockstep, when all active ranks have arrived."""
        ranks = (self._ranks[rank] for rank in self._inactive.intersection(self.missing))
        returning = [each for each in ranks if self._may_return(each)]
        limit_s = max(last_s, *(each.inactive_s for each in returning), -math.inf)
        limit_s += max(self.typical_compute_s(), _RETURN_S)
        if returning and now_s < limit_s:
            return None, limit_s
        for each in returning:
            each.out_of_data = True  # It stays away for longer: later steps do not wait for it again.
        return self._close("away"), None

    def _may_return(self, state: _Rank) -> bool:
        """Whether an inactive rank is worth waiting for in lockstep: it may return in a moment.

        An averaging of `local` lacks nothing without it, since its helper contributes the steps it has made. It waits
        only for a rank in a collective that the ranks here have left, as where they catch up in a meeting. One that
        they have still to come to does not end before: ranks stepping at their own pace enter each at different times.
        """
        if state.out_of_data or self.plan.mode != "local":
            return not state.out_of_data
        return all(self._ranks[rank].active_s >= state.entered_s for rank in self._ready)

    def _without_quorum(self, now_s: float) -> tuple[Close | None, float | None]:
        if not self._may_close:
            return None, None
        deadline_s = self._first_s + self._quorum_deadline_s
        elsewhere_s = self._all_expected_s() + self.grace_s() if self.several else math.inf
        if now_s >= deadline_s:
            return self._close("deadline"), None
        if now_s >= elsewhere_s:
            return self._close("elsewhere"), None
        return None, min(deadline_s, elsewhere_s)

    def _all_expected_s(self) -> float:
        """Time by which every missing active rank should arrive unless it waits elsewhere, infinite if unknown.

        Not before a whole compute time after the first arrival: ranks may have begun after a step of another optimizer.
        """
        expected_s = self._first_s
        for rank in set(self.missing) - self._inactive:
            state = self._ranks[rank]
            own_s, usual_s = state.expected_s(), state.usual_s()
            if own_s is None or usual_s is None:
                return math.inf
            # A rank that is behind computes for an ended step, and then for this one.
            due_s = max(own_s, self._first_s + usual_s) + (usual_s if state.step < self.step else 0.0)
            expected_s = max(expected_s, due_s)
        return expected_s

    def _close(self, reason: str) -> Close:
        self._closed = True
        self._note_offsets()
        return Close(
            step=self.step,
            excused=tuple(rank for rank in self.missing if rank in self._inactive),
            missing=self.missing,
            typical_compute_s=self.typical_compute_s(),
            reason=reason,
        )

    def _note_offsets(self) -> None:
        if not self.plan.may_close:  # In lockstep arrivals are reported in batches, so their times are meaningless.
            return
        first = self._first_s
        fast = (when for rank, when in self._ready.items() if not self._is_slow(rank))
        self._grace.note(when - first for when in fast if when > first)

    def _advance(self, step: int, started_s: float) -> None:
        """Open `step`. Ranks that were ready for the previous step started this one when that completed."""
        follows = step == self.step + 1
        for rank in self._ready if follows else ():
            state = self._ranks[rank]
            state.step = max(state.step, step)
            state.started_s = started_s
        self.step = step
        self._ready = {}
        self._closed = False
