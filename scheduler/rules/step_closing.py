"""When a step may close without the ranks that are missing: quorum, grace and expected arrival.

Pure state machine: the coordinator feeds it with arrivals and asks `evaluate(now_s)`; it never sleeps and never reads
a clock. The same object runs in the job, in the simulator and under hypothesis.

The rule. A relaxed step closes when a quorum of m fresh gradients is there and no rank is worth waiting for. A missing
rank is worth waiting for, until the grace time after the quorum, when it works on this very step (a rank that is
behind cannot deliver for it), is not known to be slow, and should arrive in that time by its own recent compute time.
So a slow rank costs nothing, a rank that was on time until now gets the whole grace, and equal ranks never lose a
step to jitter. Slow is measured against the lower median over the ranks, one of the fast ones even when half of them
are slow: with two of four ranks at 2x, waiting for both would cost every step its whole gain.

Grace: max(fraction of the usual compute time, median + c * MAD of recent arrival offsets), the form asked for in
hivemind #676, capped at one usual compute time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from scheduler.diagnosis.window_stats import THRESHOLD
from scheduler.records import Plan

__all__ = ["Close", "ClosingRule"]

_RECENT = 5  # Own compute times that predict the next one: short, so that a recovered rank is waited for again.
_COMING_BACK_S = 0.05  # Ranks leave a collective within milliseconds of each other, on a busy host within tens.
_OFFSETS = 64  # Arrival offsets behind the grace time.


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    """Order to close a step.

    Attributes:
        step: The step to close.
        excused: Missing ranks that are inactive (finished, or inside the user's own collective).
        missing: Ranks whose gradient is not waited for, the excused ones included.
        typical_compute_s: Usual compute time of a rank that is not slow.
        reason: `quorum`, `away` or `deadline`.
    """

    step: int
    excused: tuple[int, ...]
    missing: tuple[int, ...]
    typical_compute_s: float
    reason: str


@dataclass(slots=True)
class _Rank:
    version: int = 0  # The step whose gradient the rank computes now.
    started_s: float | None = None
    out_of_data: bool = True
    compute_s: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    _usual_s: float | None = None

    def note(self, compute_s: float) -> None:
        """Take in the time of a batch."""
        self.compute_s.append(compute_s)
        self._usual_s = None

    def usual_s(self) -> float | None:
        """Median of the recent compute times, None where nothing is known."""
        if self._usual_s is None and self.compute_s:
            self._usual_s = _median(self.compute_s)
        return self._usual_s

    def expected_s(self) -> float | None:
        """Time at which the rank should arrive, None where nothing is known."""
        usual_s = self.usual_s()
        return None if self.started_s is None or usual_s is None else self.started_s + usual_s


class ClosingRule:
    """Decides for one optimizer when its current step closes.

    Args:
        plan: The plan in force.
        grace_fraction: Least grace, as a part of the usual compute time.
        grace_mads: Median absolute deviations of the arrival offsets covered by the grace.
        quorum_deadline_s: A relaxed step closes after this even without its quorum, if one gradient is there.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        grace_fraction: float = 0.25,
        grace_mads: float = 4.0,
        quorum_deadline_s: float = 60.0,
    ) -> None:
        self._plan, self._taking_part = plan, plan.members_or_all
        self.step = 0
        self._grace_fraction = grace_fraction
        self._grace_mads = grace_mads
        self._quorum_deadline_s = quorum_deadline_s
        self._ranks = [_Rank() for _ in range(plan.world_size)]
        self._ready: dict[int, float] = {}
        self._first_s = 0.0  # When the first of them came.
        self._away: set[int] = set()
        self._offsets: deque[float] = deque(maxlen=_OFFSETS)
        self._typical_s: float | None = None
        self._late_s: float | None = None  # What the offsets ask for.
        self._closed = False

    @property
    def ready(self) -> tuple[int, ...]:
        """Ranks whose fresh gradient for the current step is there."""
        return tuple(sorted(self._ready))

    @property
    def begun(self) -> bool:
        """Whether any is: `ready` without a list of them."""
        return bool(self._ready)

    @property
    def away(self) -> tuple[int, ...]:
        """Ranks that are excused for now."""
        return tuple(sorted(self._away))

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self._plan

    @plan.setter
    def plan(self, plan: Plan) -> None:
        self._plan = plan
        self._taking_part = plan.members_or_all  # Ranks whose gradients a step is made of. Asked for at every message.

    def skip_to(self, step: int) -> None:
        """Steps up to `step` have ended without arrivals reported here."""
        if step > self.step:
            self.step, self._ready, self._closed = step, {}, False

    def restart(self, step: int, now_s: float) -> None:
        """Every rank begins at `step`, with a state handed over."""
        self.skip_to(step)  # If some have arrived there already, before this report, they stay.
        for state in self._ranks:
            state.version, state.started_s = max(state.version, step), now_s

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks without a fresh gradient for the current step."""
        return tuple(rank for rank in self._taking_part if rank not in self._ready)

    def arrive(self, rank: int, step: int, compute_s: float, now_s: float) -> None:
        """A rank has submitted everything for `step`; reports for closed steps only update its speed."""
        state = self._ranks[rank]
        state.note(compute_s)
        self._typical_s = None
        if step < self.step or (step == self.step and self._closed and rank in self._ready):
            return
        if step > self.step:
            self._advance(step, now_s - compute_s)
        self._first_s = min(now_s, self._first_s) if self._ready else now_s
        self._ready.setdefault(rank, now_s)
        state.version = max(state.version, step)
        self._away.discard(rank)

    def late(self, rank: int, compute_s: float) -> None:
        """A rank's gradient missed its step."""
        self._ranks[rank].note(compute_s)
        self._typical_s = None

    def join(self, rank: int, version: int, now_s: float) -> None:
        """A rank that was behind has the parameters of step `version` and computes on them from now on."""
        state = self._ranks[rank]
        state.version = max(state.version, version)
        state.started_s = now_s

    def leave(self, rank: int, *, out_of_data: bool = True) -> None:
        """A rank stops delivering gradients until it comes back.

        Args:
            rank: The rank.
            out_of_data: It has no batch any more. Else it is inside a collective of the user's, which ranks leave a
                little after one another: in lockstep a step waits another usual compute time for it to come back.
        """
        self._away.add(rank)
        self._ranks[rank].out_of_data = out_of_data

    def back(self, rank: int, now_s: float) -> None:
        """An inactive rank is active now; it counts as slow until it arrives or joins."""
        self._away.discard(rank)
        self._ranks[rank].started_s = now_s

    def align(self, now_s: float) -> None:
        """All ranks have met and have every step that ended (the end of an epoch): they start on the next together."""
        following = self.step + (1 if self._ready else 0)
        self._away.clear()
        for state in self._ranks:
            state.version, state.started_s = max(state.version, following), now_s

    def up_to_date(self) -> tuple[int, ...]:
        """Ranks that have, or are about to have, the newest parameters, as far as their reports tell."""
        return tuple(rank for rank in self._taking_part if self._ranks[rank].version >= self.step)

    def grace_s(self) -> float:
        """How long after the quorum a step waits for ranks that should be on time."""
        typical = self.typical_compute_s()
        grace = self._grace_fraction * typical
        if self._offsets:
            if self._late_s is None:
                middle = _median(self._offsets)
                deviation = _median([abs(offset - middle) for offset in self._offsets])
                self._late_s = middle + self._grace_mads * deviation
            grace = max(grace, self._late_s)
        return min(grace, max(typical, 1e-3))

    def typical_compute_s(self) -> float:
        """Lower median over the ranks of their usual compute time, 0 where nothing is known."""
        if self._typical_s is None:
            usual = sorted(own for state in self._ranks if (own := state.usual_s()) is not None)
            self._typical_s = usual[(len(usual) - 1) // 2] if usual else 0.0
        return self._typical_s

    def _is_slow(self, rank: int) -> bool:
        usual_s = self._ranks[rank].usual_s()
        return usual_s is not None and usual_s > THRESHOLD * self.typical_compute_s()

    def evaluate(self, now_s: float) -> tuple[Close | None, float | None]:
        """The order to close now, if any, and else the time at which to ask again without a new event.

        After an order the step counts as closed; the next arrival for a later step opens the next one.
        """
        if self._closed or not self._ready:
            return None, None
        taking_part = self._taking_part
        if len(self._ready) == len(taking_part):
            self._closed = True  # Everybody is there: the reduction completes by itself.
            self._note_offsets()
            return None, None
        active = taking_part
        if self._away:
            active = tuple(rank for rank in taking_part if rank not in self._away or rank in self._ready)
        needed = min(self.plan.quorum, len(active))
        if len(self._ready) < needed:
            return self._without_quorum(now_s)
        arrivals = sorted(self._ready.values())
        if not self.plan.may_close:
            return self._without_the_away(arrivals[-1], now_s)
        limit_s = arrivals[needed - 1] + self.grace_s()
        if now_s < limit_s and any(self._worth_waiting(rank, limit_s) for rank in active):
            return None, limit_s
        return self._close("quorum"), None

    def _worth_waiting(self, rank: int, limit_s: float) -> bool:
        state = self._ranks[rank]
        if rank in self._ready or rank in self._away or state.version < self.step or self._is_slow(rank):
            return False
        expected = state.expected_s()
        return expected is None or expected <= limit_s

    def _without_the_away(self, last_s: float, now_s: float) -> tuple[Close | None, float | None]:
        """In lockstep, when all others are there."""
        coming_back = any(r in self._away and not self._ranks[r].out_of_data for r in self._taking_part)
        limit_s = last_s + max(self.typical_compute_s(), _COMING_BACK_S)
        if coming_back and now_s < limit_s:
            return None, limit_s
        return self._close("away"), None

    def _without_quorum(self, now_s: float) -> tuple[Close | None, float | None]:
        if not self.plan.may_close:
            return None, None
        deadline_s = self._first_s + self._quorum_deadline_s
        if now_s >= deadline_s:
            return self._close("deadline"), None
        return None, deadline_s

    def _close(self, reason: str) -> Close:
        self._closed = True
        self._note_offsets()
        return Close(
            step=self.step,
            excused=tuple(rank for rank in self.missing if rank in self._away),
            missing=self.missing,
            typical_compute_s=self.typical_compute_s(),
            reason=reason,
        )

    def _note_offsets(self) -> None:
        if not self.plan.may_close:  # In lockstep arrivals are reported in batches: their times say nothing.
            return
        first, self._late_s = self._first_s, None
        fast = (when for rank, when in self._ready.items() if not self._is_slow(rank))
        self._offsets.extend(when - first for when in fast if when > first)

    def _advance(self, step: int, started_s: float) -> None:
        """Open `step`. A rank that was ready for the step just before started on this one when it completed."""
        follows = step == self.step + 1
        for rank in self._ready if follows else ():
            state = self._ranks[rank]
            state.version = max(state.version, step)
            state.started_s = started_s
        self.step = step
        self._ready = {}
        self._closed = False


def _median(values: Collection[float]) -> float:
    """`statistics.median` of a few numbers, in a third of its time: a coordinator asks for it at every report."""
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(ordered) % 2 else 0.5 * (ordered[half - 1] + ordered[half])
