"""What a `StepEngine` is made of and what may be asked of it by any thread; the claims are in `rounds.py`."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence

import torch

from scheduler.records import Plan
from star_hvd.engine.agreement import Agreement
from star_hvd.engine.applier import Applier
from star_hvd.engine.buckets import Bucket
from star_hvd.engine.collective import Collective
from star_hvd.engine.device import Fence
from star_hvd.engine.late_gradients import LateGradients
from star_hvd.engine.records import Averaging, Counters, Listener, OpenStep, Snapshot
from star_hvd.engine.replica import Replica

__all__ = ["EngineState"]


class EngineState:
    """The state of an engine, under one lock; see `StepEngine`.

    Args:
        rank: This rank.
        plan: The first plan, in force from step 0; must be `sync`.
        applier: Steps the live parameters.
        collective: Reduces tensors over all ranks.
        collective_of: Gives the collective of a subgroup's members; the process set must exist.
        listener: Is told what happens.
        prefix: Names of the collectives start with it; unique per optimizer and equal on all ranks.
        scale_by_ranks: Whether the result is the mean times the number of ranks (`op=Sum`).
        can_replay: Whether the optimizer's steps can be replayed on a copy.
        replay_queue: Closed steps kept for a training thread inside `step()` before closing waits for it.
        noise_interval_steps: Every how many steps the local gradient norm is taken.
        early_after_steps: Complete steps in a row, once steps have ever been incomplete, after which headers are sent
            within backward again.
        clock: The time in seconds; only differences count.
    """

    def __init__(
        self,
        *,
        rank: int,
        plan: Plan,
        applier: Applier,
        collective: Collective,
        listener: Listener,
        collective_of: Callable[[tuple[int, ...]], Collective] | None = None,
        prefix: str = "star",
        scale_by_ranks: bool = False,
        can_replay: bool = True,
        replay_queue: int = 8,
        noise_interval_steps: int = 8,
        early_after_steps: int = 8,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank = rank
        self.world_size = plan.world_size
        self.applier = applier
        self.streams = applier.streams
        self.collective = collective
        self.averaging: Averaging | None = None
        self.prefix = prefix
        self.counters = Counters()
        self.next_step = 0
        self.own_steps = 0
        self.away = False
        self.weight = 1.0
        self.loss = math.nan
        self.failure: BaseException | None = None
        self._mutex = threading.RLock()
        self.lock = threading.Condition(self._mutex)
        self.helper_wake = threading.Condition(self._mutex)
        self.replica = Replica(applier, self.lock, self.counters, self._changed)
        self.agreement = Agreement(rank, plan, applier, listener)
        self._listener = listener
        self._everybody = collective
        self._collective_of = collective_of
        self._scale_by_ranks = scale_by_ranks
        self._can_replay = can_replay
        self._replay_queue = replay_queue
        self._noise_interval_steps = noise_interval_steps
        self._deferred: dict[int, Fence] = {}
        self._norms: list[tuple[torch.Tensor, Fence]] = []
        self._late = LateGradients(applier.buckets, self.counters, self.streams)
        self._clock = clock
        self._whole_at_s: float | None = None  # When the carrier's gradient of this step was whole.
        self._waited = 0  # Steps in a row in which it then waited for the header.
        self._claimed_early = False  # The header of the step that the training thread has not arrived for yet.
        self._early_after_steps = early_after_steps
        self._complete_run = 0  # Steps in a row with the fresh gradients of all members.
        self._ever_manual = False  # Whether a program has ever worked on the mean of a step.
        # The step in which this rank's did so first, where the header of that step did not say so.
        self._untold_manual: int | None = None
        self._proxied: int | None = None  # The last step, where the helper completed it.
        self._apart = False  # Whether the header travels alone in the step to come.
        self._choose_carrier()
        self._current = OpenStep.open(0, len(applier.buckets))
        self._inflight: OpenStep | None = None
        self._close_upto = -1
        self._local_sqr = 0.0

    @property
    def plan(self) -> Plan:
        """The plan in force for `next_step`."""
        return self.agreement.plan

    @property
    def taking_part(self) -> bool:
        """Whether this rank reduces together with others under the plan in force."""
        return self.plan.family == "rounds" or self.rank in self.plan.members

    @property
    def version(self) -> int:
        """Steps applied to the live parameters."""
        return self.replica.version

    @property
    def needs_fetch(self) -> bool:
        """Whether the parameters have to be fetched before the next step."""
        return self.replica.needs_fetch

    @property
    def pending_weight(self) -> float:
        """Weight of late gradients that wait for a step, on the scale of the counters."""
        with self.lock:
            return self._late.pending_weight

    # ---- outside the rounds: servers, a subgroup's children ---------------------------------------------------

    def leave_rounds(self) -> None:
        """From here on this rank's parameters come from elsewhere, without the optimizer's state."""
        with self.replica.apply_lock, self.lock:
            self.replica.leave()

    def outside_gradient(self, index: int) -> None:
        """The training thread's gradient of one bucket is whole, in a mode that does not reduce it here."""
        with self.lock:
            self._raise_failure()
            self.counters.produced_weight += self.weight / len(self.applier.buckets)

    def note_outside(self, version: int) -> None:
        """The live parameters are those of step `version`, received from elsewhere."""
        with self.lock:
            if not self.taking_part:
                self.replica.version = self.next_step = version

    def adopt_state(self, snapshot: Snapshot) -> None:
        """Take over parameters and optimizer state of one version, for a checkpoint; the mode goes on as before."""
        snapshot = self.replica.placed(snapshot)
        with self.replica.apply_lock:
            self.replica.load(snapshot)
            self.note_outside(snapshot.version)

    def fold_late(self, bucket: Bucket, flat: torch.Tensor) -> bool:
        """Add what was kept for a bucket to a contribution outside a reduced step; who sends it counts it."""
        with self.lock:
            return self._late.fold(bucket, flat, self.version, self.plan, count=False)

    def keep_late(
        self,
        flats: Sequence[torch.Tensor],
        version: int,
        *,
        foreign: bool = False,
        weights: Sequence[float] | None = None,
    ) -> int:
        """Keep contributions (gradients times weight, then the weight), computed on step `version`, for the next step.

        Args:
            flats: One buffer per bucket, made by the calling thread; this object's from now on.
            version: Of the parameters behind them.
            foreign: They are another rank's, which this rank has taken over.
            weights: The weights in them, read from their devices where left out.

        Returns:
            The first version that will contain them.
        """
        if weights is None:
            self.streams.await_host()
            weights = [float(flat[-1]) for flat in flats]
        with self.lock:
            self._raise_failure()
            for bucket, flat, weight in zip(self.applier.buckets, flats, weights, strict=True):
                if foreign:
                    self.counters.produced_weight += weight / len(self.applier.buckets)
                self._late.keep_whole(bucket, flat, min(version, self.version), weight)
            # A bucket of the current step may have been submitted already; it then goes with the next one.
            begun = any(self._current.claimed(bucket.index) for bucket in self.applier.buckets)
            return self.next_step + (2 if begun else 1)

    def adopt_plan(self, plan: Plan) -> None:
        """Servers have changed their rule under way: the plan of this id is in force."""
        with self.lock:
            if plan.plan_id > self.plan.plan_id:
                self.agreement.resume(plan, self.version)

    def resume(self, plan: Plan, step: int) -> bool:
        """Step `step` is the first under `plan`; its state is elsewhere and has to be fetched.

        Returns:
            Whether that is news.
        """
        with self.lock:
            if plan.plan_id <= self.plan.plan_id:
                return False
            self.replica.cannot_replay(max(step, self.version))
            self.replica.foreign = True
            self.next_step = step
            self._current = OpenStep.open(step, len(self.applier.buckets))
            self.agreement.resume(plan, step)
            self._plan_taken()
            self._changed()
            return True

    def _plan_taken(self) -> None:
        """Use the collective of the plan in force. Who joins has not read the last headers: all begin alike."""
        self._apart, self._complete_run = False, 0
        members = self.plan.members
        if self.plan.mode != "subgroup":
            self.collective = self._everybody
        elif self.rank in members:
            assert self._collective_of is not None, "this engine cannot run a subgroup"
            self.collective = self._collective_of(members)

    # ---- any thread -----------------------------------------------------------------------------------------

    def close(self, step: int) -> None:
        """The coordinator closes `step`.

        Outside a relaxed plan the order is carried out only while this rank really is away: a rank that came back
        before the order reached it delivers its gradient itself, so `sync` stays exact.
        """
        with self.lock:
            self._close_upto = max(self._close_upto, step)
            self._changed()

    def set_away(self, away: bool) -> None:
        """Whether the training thread, which calls this, leaves its training loop and delivers no gradient for now."""
        self.replica.written()  # By the user, or in a collective of the user's; the helper may copy them from here on.
        with self.lock:
            self.away = away
            self._changed()

    def drop(self) -> None:
        """The training thread makes no step again, wherever in a step it was: the helper does what is left of it."""
        with self.lock:
            step = self._inflight
            if step is not None and step.owner == "trainer":
                step.owner = "helper"  # Handles that the training thread has collected count as ended.
            self.replica.drop(ended=self.next_step if step is None else step.number)
        self.set_away(True)

    def under_way(self) -> tuple[int, bool, bool]:
        """The first step not wholly submitted here, -1 outside common steps; whether a part of it is; whether the step
        before it is in flight."""
        with self.lock:
            if self.plan.family != "rounds":
                return -1, False, False
            begun = any(flat is not None for flat in self._current.flats)
            return self.next_step, begun, self._inflight is not None

    def refusal(self, plan: Plan) -> str | None:
        """Why this rank cannot take a plan up, None where it can."""
        with self.lock:
            return self.agreement.refusal(plan)

    def unsuited(self, plan: Plan) -> str | None:
        """Why a plan is nothing for this optimizer, though others are, None where it is."""
        if self._scale_by_ranks and plan.mode in ("ps", "grouped", "local"):
            return f"op=Sum needs the gradients of all ranks in every step, which mode {plan.mode} does not have"
        return None

    def prepare(self, plan: Plan) -> str | None:
        """Get ready for a plan; see `Agreement.prepare`."""
        with self.lock:
            return self.agreement.prepare(plan)

    def abandon(self, plan_id: int) -> None:
        """Give a plan up; see `Agreement.abandon`."""
        with self.lock:
            self.agreement.abandon(plan_id)

    def pin(self, reason: str) -> None:
        """Refuse relaxed plans from now on."""
        with self.lock:
            self.agreement.pin(reason)

    def fail(self, error: BaseException) -> None:
        """Stop: every later call raises `error`."""
        with self.lock:
            if self.failure is None:
                self.failure = error
            self._changed()

    def drop_pending(self) -> None:
        """Count the gradients that still wait for a step as dropped: there is no further step."""
        with self.lock:
            self._late.drop_all()

    # ---- inside, under the lock -------------------------------------------------------------------------------

    def _choose_carrier(self) -> None:
        for bucket in self.applier.buckets:
            if bucket.tail:
                bucket.carry(0)
        last = self.applier.buckets[-1] if self.applier.buckets else None
        self._carrier = last if last is not None and last.can_carry else None
        if self._carrier is not None:
            self._carrier.carry(self.agreement.codec.size)

    def _due(self) -> bool:
        own = self._helper_owns() or self._may_close() or self._may_absorb() or self._may_take_over()
        return own or self.replica.may_replay() or bool(self._deferred)

    def _may_absorb(self) -> bool:
        """Whether the helper may use an averaging that ended without the training thread."""
        return self.replica.computing and self.averaging is not None and self.averaging.waiting

    def _changed(self) -> None:
        """Wake the training thread if it waits, and the helper if there is work: a thread woken for nothing costs the
        training thread the interpreter, half a millisecond per step."""
        self.lock.notify_all()
        if self._due():
            self.helper_wake.notify_all()

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _lost(self, index: int) -> bool:
        """Whether the training thread's gradient of a bucket can no longer be fresh."""
        return self._out_of_rounds() or self._current.claimed(index)

    def _out_of_rounds(self) -> bool:
        """Whether the training thread's gradient is none of the current step: it computes on other parameters, or the
        step is made of something else (`local`, which it has not entered yet)."""
        elsewhere = not self.taking_part or self.plan.mode == "local"
        return elsewhere or self.version != self.next_step or self.replica.foreign

    def _helper_owns(self) -> bool:
        return self._inflight is not None and self._inflight.owner == "helper"

    def _may_take_over(self) -> bool:
        """Whether others wait for the step after one that the training thread has claimed and does not complete."""
        claimed = self._inflight is not None and self._inflight.early
        return claimed and self.away and self._close_upto >= self.next_step

    def _may_close(self) -> bool:
        """Whether the helper may stand in for the training thread in the current step."""
        if self._inflight is not None or self._close_upto < self.next_step or not self.taking_part:
            return False
        # A training thread that hangs inside step() must not let the queue grow without bound: the job waits for it.
        return len(self.replica.queue) < self._replay_queue and (self.away or self.plan.may_close)
