"""The claim rule: every rank submits every bucket of every step exactly once, by its training thread or its helper.

One `StepEngine` per optimizer and rank. All methods return at once; the training thread and the helper thread loop
around them (`driver.py`, `helper.py`), and tests can drive them in any interleaving.

All state changes under one lock; some is read without it (docs/concurrency.md). `step` counts the steps applied to the
live parameters; `next_step` is the first step this rank has not wholly submitted. They are equal while the training
thread computes a gradient that can still be fresh. The thread that claims the header, always the last tensor of a step,
owns the step's completion:

* The training thread claims it when its gradient is complete (`arrive`), waits, averages, applies.
* The helper claims it, with every bucket not yet submitted, when the coordinator closes the step. It submits late
  gradients or zeros, and hands the result to the replica.

A gradient that lost its claim is kept and folded into the next submission of its bucket.

`claims.py` tracks the claims, `own_gradient.py` the training thread's gradient; `step_exchange.py` sends and receives
buckets and header, and `header_timing.py` decides when the header is sent.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from scheduler.records import Plan
from star_hvd.engine.applier import Applier
from star_hvd.engine.buckets import Bucket, Wire
from star_hvd.engine.claims import Claims
from star_hvd.engine.collective import Collective
from star_hvd.engine.device import Fence
from star_hvd.engine.exchange.agreement import Agreement
from star_hvd.engine.exchange.header_timing import HeaderTiming
from star_hvd.engine.exchange.late_gradients import LateGradients
from star_hvd.engine.exchange.manual_steps import ManualSteps
from star_hvd.engine.exchange.own_gradient import OwnGradient
from star_hvd.engine.exchange.step_exchange import StepExchange
from star_hvd.engine.header import Header
from star_hvd.engine.hyperparameters import HyperRow
from star_hvd.engine.records import Averaging, Counters, Listener, OpenStep, Result, Snapshot
from star_hvd.engine.replica import Replica, ReplicaState
from star_hvd.errors import ReplicaMismatchError, StarError
from star_hvd.locks import ordered_rlock

__all__ = ["StepEngine"]

logger = logging.getLogger("star_hvd")

_DEVICE_POLL_S = 0.0003


class StepEngine:
    """Runs the steps of one optimizer on one rank; see the module docstring.

    Args:
        rank: This rank.
        plan: The first plan, in force from step 0; must be `sync`.
        applier: Steps the live parameters.
        collective: Reduces tensors over all ranks.
        collective_of: Returns the collective of a subgroup's members; the process set must exist.
        listener: Called at the events of `Listener`.
        prefix: Prefix of the collectives' names; unique per optimizer and equal on all ranks.
        scale_by_ranks: Whether the result is the mean times the number of ranks (`op=Sum`).
        can_replay: Whether the optimizer's steps can be replayed on a copy.
        replay_queue: Closed steps queued for a training thread inside `step()` before closing waits for that thread.
        noise_interval_steps: Number of steps between measurements of the local gradient norm.
        early_after_steps: After an incomplete step, number of consecutive complete steps until headers are sent within
            backward again.
        raise_on_mismatch: Whether to end training if the replicas' checksums differ after a switch.
        wire: How gradients are encoded for sending; unchanged if None.
        clock: The time in seconds; only differences count.

    Attributes:
        ended: Whether no step follows, and Horovod may be shut down: what fails without a caller is no failure then.
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
        raise_on_mismatch: bool = False,
        wire: Wire | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank = rank
        self.world_size = plan.world_size
        self.applier = applier
        self.streams = applier.streams
        self.averaging: Averaging | None = None
        self.prefix = prefix
        self.counters = Counters()
        self.own = OwnGradient(applier, self.counters, noise_interval_steps)
        self.inactive = self.ended = False
        self.failure: BaseException | None = None
        self._mutex = ordered_rlock("StepEngine.lock")
        self.lock = threading.Condition(self._mutex)
        self.helper_wake = threading.Condition(self._mutex)
        self.replica = Replica(applier, self.lock, self.counters, self._changed)
        self.agreement = Agreement(rank, plan, applier, listener, self.lock)
        self._listener = listener
        self._scale_by_ranks = scale_by_ranks
        self._replay_queue = replay_queue
        self._raise_on_mismatch = raise_on_mismatch
        self.late = LateGradients(applier.buckets, self.counters, self.streams)
        self._manual = ManualSteps(can_replay=can_replay)
        self.wire = wire or Wire()
        self._exchange = StepExchange(
            applier,
            self.agreement,
            self.late,
            HeaderTiming(early_after_steps, clock),
            self.wire,
            collective,
            collective_of,
            prefix=prefix,
            mean_factor=plan.world_size if scale_by_ranks else 1,
        )
        self._claims = Claims(len(applier.buckets))

    @property
    def plan(self) -> Plan:
        """The plan in force for `next_step`."""
        return self.agreement.plan

    @property
    def collective(self) -> Collective:
        """The collective of the ranks that reduce together under the plan in force."""
        return self._exchange.collective

    @property
    def taking_part(self) -> bool:
        """Whether this rank reduces together with other ranks under the plan in force."""
        return self.plan.family == "all_ranks" or self.rank in self.plan.members

    @property
    def step(self) -> int:
        """Steps applied to the live parameters."""
        return self.replica.step

    @property
    def next_step(self) -> int:
        """The first step this rank has not wholly submitted."""
        return self._claims.next_step

    @property
    def needs_fetch(self) -> bool:
        """Whether the parameters have to be fetched before the next step."""
        return self.replica.state.needs_fetch

    @property
    def pending_weight(self) -> float:
        """Weight of late gradients that wait for a step, on the counters' scale."""
        with self.lock:
            return self.late.pending_weight

    # ---- training thread ------------------------------------------------------------------------------------

    def gradient_ready(self, index: int) -> None:
        """Handle the training thread's gradient of one bucket, which is complete in the bucket's `flat`.

        Submits it as this step's contribution unless the helper has contributed already; else keeps it for a later
        step.
        """
        with self.lock:
            self._raise_failure()
            bucket = self.applier.buckets[index]
            step = self._claims.current
            self.own.count_produced()
            if self._out_of_common_steps() or step.claimed(index):
                self.late.keep(bucket, self.own.weight, self.step)
                self.replica.note_bucket_use()
            else:
                self.own.count_fresh(bucket, step.number)
                self._exchange.submit_fresh(step, bucket, self.own.weight)
                if self._may_claim_early():
                    self._claim_early()

    def defer(self, index: int, fence: Fence) -> None:
        """Defer a bucket until its device has reached `fence`; until then its gradient can miss its step."""
        with self.lock:
            self._raise_failure()
            self.own.deferred[index] = fence
            self._changed()

    def flush_deferred(self) -> bool:
        """Submit the deferred buckets that are complete by now. Return whether none is left.

        A bucket that has missed its step is also kept only once it is complete: another stream works on what is kept.
        """
        with self.lock:
            self._raise_failure()
            for index in self.own.take_completed():
                self.gradient_ready(index)
            return not self.own.deferred

    def arrive(self, *, manual: bool = False) -> bool:
        """Note that the training thread has given all its buckets. Return whether its gradient is in the step.

        False means that the rank is behind.

        Args:
            manual: The user changes the result between `synchronize` and `step`, so helpers cannot replay it.
        """
        self._prepare_header()
        with self.lock:
            self._raise_failure()
            self.replica.computing = False
            self.own.count_step()
            step = self._claims.early
            if step is not None:
                step.early = False
                self._manual.arrived(step, manual=manual, early=True)
                self._exchange.timing.arrived(self._hyperparameters)
            elif self._out_of_common_steps():
                self.counters.late += 1
                self._listener.on_late(self.step, self.plan.plan_id)
                return False
            else:
                if self._claims.missing:
                    raise StarError(
                        f"buckets {self._claims.missing} of step {self.step} were not submitted before arrive()"
                    )
                step = self._claim_header("trainer", manual=self._manual.in_header(manual=manual))
                self._manual.arrived(step, manual=manual, early=False)
            self.counters.fresh += 1
            self.wire.arrived()
            self._listener.on_arrive(self.step, self.plan.plan_id)
            return True

    def _prepare_header(self) -> None:
        """Compute what the header needs and takes long, without the lock: the helper may have to act meanwhile."""
        with self.lock:
            queued = self.own.norm.take()
            number = self.next_step
            due = self.agreement.checksum_due(number) and not self._out_of_common_steps()
        self.own.norm.read(queued)
        if due:
            self.agreement.checksum = (number, self.applier.checksum())

    def submit_average(self, bucket: Bucket, average: torch.Tensor) -> None:
        """`local`: submit this rank's part of an average.

        Args:
            bucket: The bucket.
            average: As in `Bucket.new_average`: the parameters times this rank's weight, then the weight.
        """
        with self.lock:
            self._raise_failure()
            self._exchange.submit_average(self._claims.current, bucket, average)

    def arrive_average(self) -> None:
        """`local`: all buckets are submitted; claim the step."""
        with self.lock:
            self._raise_failure()
            self.replica.computing = False
            self._claim_header("trainer")
            self._listener.on_arrive(self.step, self.plan.plan_id)

    def averaging_asks_for_plan(self) -> bool:
        """`local`: whether this rank raised a flag in the averaging it has claimed, which may be the mode's last."""
        with self.lock:
            step = self._claims.in_flight
            return step is not None and step.flagged is not None

    def averaged(self) -> None:
        """`local`: the training thread computes again; from here on the helper may act for it while it is inactive.

        An averaging that it has claimed may still be in flight and then overlaps compute.
        """
        with self.lock:
            if (step := self._claims.owned_by("trainer")) is not None:
                step.early = True
            self.replica.computing = True
            self._changed()

    def reclaim_averaging(self, *, wait: bool) -> bool:
        """`local`: return whether the training thread is to complete the averaging that it has claimed.

        Args:
            wait: Whether the thread would wait for it to end; if not, True only if all of it has ended.
        """
        with self.lock:
            self._raise_failure()
            step = self._claims.owned_by("trainer")
            if step is None:
                return False  # The helper has taken it over.
            if not wait and not self._exchange.all_ended(step):
                return False
            step.early, self.replica.computing = False, False
            return True

    def own_step(self) -> OpenStep:
        """Return the step in flight that the training thread owns after `arrive` returned True; only it touches it."""
        with self.lock:
            self._raise_failure()
            step = self._claims.owned_by("trainer")
            assert step is not None
            return step

    def may_overlap(self) -> bool:
        """Whether that step may be applied bucket by bucket, because no switch can happen in it.

        A plan can only come into force in a step in which this rank has raised its flag.
        """
        with self.lock:
            return self.plan.mode == "sync" and self.own_step().flagged is None and self.replica.is_whole

    def own_row(self) -> tuple[float, ...] | None:
        """Return that step's hyperparameters, None for this rank's own; the header must have been collected."""
        with self.lock:
            return self.agreement.row_of(self._exchange.header(self.own_step()))

    def own_mean(self, index: int) -> torch.Tensor:
        """Compute the mean of one collected bucket of that step, in place."""
        return self._exchange.mean(self.own_step(), self.applier.buckets[index])

    def finish_own(self) -> Result:
        """Average the step the training thread owns, in place; its handles must have ended and been collected."""
        step = self.own_step()
        reduced = self._exchange.read(step)
        with self.lock:
            self._raise_failure()
            result = self._complete(step, *reduced)
            self._claims.end()
            self._changed()
            return result

    def apply_own(self, result: Result, step: Callable[[Any], Any] | None = None) -> Any:
        """Apply the training thread's own step to the live parameters.

        Args:
            result: What `finish_own` returned.
            step: Function that applies it, given the row of hyperparameters; the applier's step if None.
        """
        with self.replica.apply_lock:
            try:
                with self.replica.writing():
                    return (step or self.applier.step)(result.row)
            except BaseException:
                with self.lock:  # No catch-up follows; the user may continue with the next step, as under Horovod.
                    self.replica.computing = True
                raise
            finally:  # The step has ended, even if the user's optimizer or one of its hooks raised.
                with self.lock:
                    self.replica.advance()
                    self._changed()

    def catch_up(self, target: int, *, show_mean: bool = False) -> bool:
        """Bring the live parameters up to the closed steps, without waiting.

        Args:
            target: Number of steps, see below.
            show_mean: See `Replica.catch_up`.

        Returns:
            True if the training thread may compute again: it has every step that ended here, or at least `target` of
            them. (Without `target`, a rank whose optimizer step takes longer than the others' whole step would never
            return; the helper replays the rest.) False: call again after a step in flight has ended, or after `adopt`
            if `needs_fetch` is set. While an averaging is pending nothing is written here: the helper writes it to a
            shadow as soon as the training thread computes.
        """
        with self.lock:
            self._raise_failure()
            self.replica.computing = False
        self.replica.catch_up(show_mean=show_mean)
        with self.lock:
            self._raise_failure()
            state = self.replica.state
            incomplete = state in (ReplicaState.REPLAYABLE, ReplicaState.STALE) or (
                self._claims.in_flight is not None and state is not ReplicaState.AVERAGE_PENDING
            )
            if state is ReplicaState.STATELESS or (incomplete and self.step < target):
                return False
            self.replica.computing = True
            self.own.norm.clear()
            self._changed()
            return True

    def adopt(self, snapshot: Snapshot) -> bool:
        """Load parameters and optimizer state fetched from another rank; see `Replica.adopt`.

        Returns:
            False, with nothing changed, if they are no longer needed, are older than this rank's (their source was
            still inside the step), or belong to a step that has not started here (the others continued under a plan
            this rank has yet to read of).
        """
        snapshot = self.replica.placed(snapshot)
        with self.replica.apply_lock, self.lock:  # Else a step that ends meanwhile would be neither in them nor queued.
            if not self.step <= snapshot.step <= self.next_step:
                return False
            step = self._claims.in_flight
            return self.replica.adopt(snapshot, self.next_step if step is None else step.number)

    @property
    def least_useful_step(self) -> int:
        """The oldest step whose state would advance this rank."""
        with self.lock:
            return self.step + (self.replica.state is ReplicaState.STALE)

    def note_joined(self) -> None:
        """Report that the training thread, which was behind, starts on the parameters of `step`."""
        with self.lock:
            self._listener.on_join(self.step)

    def layout_changed(self, hyper: HyperRow) -> None:
        """Adapt headers and steps to buckets that were added on all ranks after the same step."""
        with self.replica.apply_lock, self.lock:
            if self.step != self.next_step or self._claims.in_flight is not None or self.replica.queue:
                raise StarError("parameters were added while a step was in flight; add them between two steps")
            self.applier.hyper = hyper
            self.streams.renew()
            self.agreement.layout_changed()
            self._exchange.choose_carrier()
            self.wire.restart()
            self.late.buckets_added(len(self._claims.current.buffers))
            self._claims.begin(self.next_step, len(self.applier.buckets))

    @property
    def unreported_manual(self) -> int | None:
        """The last step, if members changed its mean although its header did not report that."""
        with self.lock:
            return self._manual.unreported

    def note_manual(self, step: int) -> None:
        """Members of `step` changed its mean, so what the helper computed for it here differs from theirs."""
        with self.lock:
            if self._manual.proxied(step):
                self.replica.cannot_replay()
                self._changed()

    # ---- helper thread --------------------------------------------------------------------------------------

    def helper_has_work(self) -> bool:
        """Whether `helper_tick` has something to do now. A step in flight counts, since it has to be polled."""
        with self.lock:
            return self.failure is None and self._due()

    def helper_owns(self) -> bool:
        """Whether a step is in flight that the helper has to complete."""
        with self.lock:
            return self._claims.owned_by("helper") is not None

    def helper_averages(self) -> bool:
        """Whether that step is an averaging of local steps."""
        with self.lock:
            step = self._claims.owned_by("helper")
            return step is not None and step.averaging is not None

    def must_poll(self) -> bool:
        """Whether the helper waits for something that sends no wake-up: a reduction or a device."""
        with self.lock:
            return self.helper_owns() or bool(self.own.deferred)

    def await_helpers_step(self, longest_s: float) -> None:
        """For the helper, if `must_poll`: wait for the next operation of its step, or shortly for a device."""
        with self.lock:
            step = self._claims.owned_by("helper")
            handle = step.waiting[0] if step is not None and step.waiting and not self.own.deferred else None
            collective = self._exchange.collective
        if handle is None:
            time.sleep(_DEVICE_POLL_S)
        else:
            collective.wait(handle, longest_s)

    def helper_tick(self) -> bool:
        """Do one thing that is due, without waiting. Return whether something was done."""
        with self.lock:
            self._raise_failure()
            if self.own.deferred:
                self.flush_deferred()
            if self._may_take_over():
                self._claims.hand_to_helper()
            step = self._claims.owned_by("helper")
            ended = step is not None and self._exchange.collect(step)
            if step is None and self._may_close():
                self._submit_proxy()
                return True
        if step is not None:
            return ended and self._end_inflight(step)
        if self._may_absorb() and self.averaging is not None and self.averaging.absorb():
            return True
        return self.replica.replay_one()

    # ---- outside the common steps: servers, children ---------------------------------------------------

    def leave_common_steps(self) -> None:
        """Note that this rank's parameters come from elsewhere from here on, without the optimizer's state."""
        with self.replica.apply_lock, self.lock:
            self.replica.leave()

    def outside_gradient(self) -> None:
        """Count the training thread's gradient of one bucket, complete in a mode that does not reduce it here."""
        with self.lock:
            self._raise_failure()
            self.own.count_produced()

    def note_step(self, step: int) -> None:
        """Note that the live parameters are those of step `step`, received from elsewhere."""
        with self.lock:
            if not self.taking_part:
                self.replica.step = self._claims.next_step = step

    def adopt_state(self, snapshot: Snapshot) -> None:
        """Load parameters and optimizer state of one step, for a checkpoint; the mode continues as before."""
        snapshot = self.replica.placed(snapshot)
        with self.replica.apply_lock:
            self.replica.load(snapshot)
            self.note_step(snapshot.step)

    def adopt_optimizer_state(self, snapshot: Snapshot) -> None:
        """As `adopt_state` where the program has other values in the parameters, which stay."""
        snapshot = self.replica.placed(snapshot)
        with self.replica.apply_lock:
            self.replica.load(snapshot, parameters=False)

    def fold_late(self, bucket: Bucket, flat: torch.Tensor) -> float:
        """Add a bucket's late gradient to a contribution outside a reduced step; the sender counts it.

        Returns:
            The weight it adds, 0 if there was none.
        """
        with self.lock:
            return self.late.fold(bucket, flat, self.step, self.plan, count=False)

    def keep_late(
        self,
        flats: Sequence[torch.Tensor],
        computed_on: int,
        *,
        taken_over: bool = False,
        weights: Sequence[float] | None = None,
    ) -> int:
        """Keep contributions (gradients times weight, then the weight) of an earlier step for the next one.

        Args:
            flats: One buffer per bucket, created by the calling thread; owned by this object from now on.
            computed_on: The step of the parameters behind them.
            taken_over: Whether they are another rank's, which this rank has taken over.
            weights: The weights in them, read from their devices if left out.

        Returns:
            The first step whose parameters will contain them.
        """
        if weights is None:
            self.streams.await_host()
            weights = [float(flat[-1]) for flat in flats]
        with self.lock:
            self._raise_failure()
            for bucket, flat, weight in zip(self.applier.buckets, flats, weights, strict=True):
                if taken_over:
                    self.counters.produced_weight += weight / len(self.applier.buckets)
                self.late.keep_whole(bucket, flat, min(computed_on, self.step), weight)
            # A bucket of the current step may have been submitted already; its gradient then goes into the next step.
            return self.next_step + (2 if self._claims.begun else 1)

    def sent_elsewhere(self, weight: float) -> None:
        """Stop counting a gradient here that is sent to another rank, which counts it from there on.

        Under the lock, as the tensors' thread counts late gradients that this rank takes over at the same time.
        """
        with self.lock:
            self.counters.produced_weight -= weight

    def not_taken(self, weight: float, gradients: int) -> None:
        """Count gradients as dropped that were sent to a rank which has not answered."""
        with self.lock:
            self.counters.produced_weight += weight
            self.counters.dropped_weight += weight
            self.counters.drops += gradients

    def adopt_plan(self, plan: Plan) -> None:
        """Adopt the plan of this id, since servers have changed their rule during the mode."""
        with self.lock:
            if plan.plan_id > self.plan.plan_id:
                self.agreement.resume(plan, self.step)

    def resume(self, plan: Plan, step: int) -> bool:
        """Start `plan` at step `step`, whose state is elsewhere and has to be fetched.

        Returns:
            False if that was known already.
        """
        with self.lock:
            if plan.plan_id <= self.plan.plan_id:
                return False
            self.replica.resume()
            self._claims.begin(step, len(self.applier.buckets))
            self.agreement.resume(plan, step)
            self._exchange.plan_taken()
            self._changed()
            return True

    # ---- any thread -----------------------------------------------------------------------------------------

    def close(self, step: int) -> None:
        """Close `step`, on the coordinator's order.

        Outside a relaxed plan the order takes effect only while this rank is inactive: a rank that came back before the
        order reached it delivers its gradient itself, so `sync` stays exact.
        """
        with self.lock:
            self._claims.close(step)
            self._changed()

    def set_inactive(self, inactive: bool) -> None:
        """Note whether the training thread, which calls this, is outside its loop and delivers no gradient for now."""
        self.replica.written()  # The user or a user's collective may have; the helper may copy parameters from here on.
        with self.lock:
            self.inactive = inactive
            self._changed()

    def drop(self) -> None:
        """Note that the training thread makes no further step, wherever in a step it was: the helper does the rest."""
        with self.lock:
            step = self._claims.in_flight
            self._claims.hand_to_helper()
            self.replica.drop(ended=self.next_step if step is None else step.number)
        self.set_inactive(True)

    def under_way(self) -> tuple[int, bool, bool]:
        """Return where this rank is in the steps.

        Returns:
            The first step not wholly submitted here (-1 outside common steps), whether part of it is submitted, and
            whether the step before it is in flight.
        """
        with self.lock:
            if self.plan.family != "all_ranks":
                return -1, False, False
            return self.next_step, self._claims.begun, self._claims.in_flight is not None

    def unsuited(self, plan: Plan) -> str | None:
        """Return why a plan does not suit this optimizer although it may suit others, None if it does."""
        if self._scale_by_ranks and plan.mode in ("ps", "grouped", "local"):
            return f"op=Sum needs the gradients of all ranks in every step, which mode {plan.mode} does not have"
        return None

    def fail(self, error: BaseException, *, unseen: bool = False) -> None:
        """Stop: every later call raises `error`.

        Args:
            error: Why.
            unseen: Whether to log it: a thread without a caller found it, and the program may make no later call.
        """
        with self.lock:
            if self.ended and unseen:
                logger.debug("rank %d: behind the last step: %s", self.rank, error)
                return
            first = self.failure is None
            if first:
                self.failure = error
            self._changed()
        if first and unseen:
            logger.error("rank %d: %s", self.rank, error, exc_info=error)

    def drop_pending(self) -> None:
        """Count the gradients that still wait for a step as dropped: none follows, or one on other parameters."""
        with self.lock:
            self.late.drop_all()

    # ---- inside, under the lock -------------------------------------------------------------------------------

    def _may_claim_early(self) -> bool:
        """Whether the gradient is complete before the training thread arrives, and nothing holds the header back."""
        timing = self._exchange.timing
        if self._claims.in_flight is not None or not timing.may_be_early(self.plan, mixed=self.agreement.mixed):
            return False
        if self.streams.devices:  # The header needs numbers for which the host would have to wait here.
            return False
        return not self._claims.missing

    def _claim_early(self) -> None:
        """Claim the header within backward: the reduction overlaps what the program does before `step`.

        Hyperparameters are read here, and a loss recorded after this goes with the next step. Whether the program will
        work on the mean is not known yet: see `ManualSteps`.
        """
        self.own.count_step(early=True)
        self._exchange.timing.left_early(self._hyperparameters, mixed=self.agreement.mixed)
        self._claim_header("trainer", manual=self._manual.in_early_header()).early = True

    def _hyperparameters(self) -> list[float]:
        return self.applier.hyper.read(self.applier.optimizer.param_groups)

    def _submit_proxy(self) -> None:
        """Submit every bucket the training thread has not submitted, then the header."""
        averaging = self._averaging_in_force
        for bucket in self.applier.buckets:
            if self._claims.current.claimed(bucket.index):
                continue
            if averaging is not None:
                self.submit_average(bucket, averaging.proxy_contribution(bucket))
            else:
                self._exchange.submit_proxy(self._claims.current, bucket)
        self._claim_header("helper")
        self.counters.proxied += 1

    @property
    def _averaging_in_force(self) -> Averaging | None:
        return self.averaging if self.plan.mode == "local" else None

    def _claim_header(self, owner: str, *, manual: bool = False) -> OpenStep:
        """Submit the header of the current step, which makes `owner` responsible for its completion."""
        step, fresh = self._claims.current, owner == "trainer"
        item = self.agreement.contribution(step, self.own.steps, fresh=fresh, inactive=self.inactive)
        averaging = self._averaging_in_force
        if fresh:
            self.own.report(item, step.number, averaging=averaging is not None)
            item.manual, item.manual_before = manual, self._manual.report(step)
        self._exchange.submit_header(step, item, averaging)
        self._claims.claim(owner)
        self._changed()
        return step

    def _complete(self, step: OpenStep, header: Header, means: list[torch.Tensor], mean_sqr: float) -> Result:
        """Act on the header of a reduced step."""
        if header.manual and step.owner == "helper" and step.averaging is None:
            self.replica.cannot_replay(step.number)
        complete = header.complete(self.agreement.members)
        self._exchange.ended(step, header, complete=complete)
        if self._manual.read(step, header, complete=complete):
            self.replica.cannot_replay()
            self._changed()
        before = self.plan
        row = self.agreement.read(step, header, mean_sqr)
        if header.checksum_ok is False and self._raise_on_mismatch:
            self.fail(
                ReplicaMismatchError(
                    f"parameters differ between ranks at step {step.number}, compared after a switch; call "
                    "hvd.broadcast_parameters before training and change parameters on all ranks alike"
                ),
                unseen=step.owner == "helper",
            )
        if self.plan is not before:
            self._exchange.plan_taken()
        return Result(step.number, means, row, complete=complete)

    def _end_inflight(self, step: OpenStep) -> bool:
        reduced = self._exchange.read(step)
        with self.lock:
            self._raise_failure()
            result = self._complete(step, *reduced)
            self._claims.end()
            if step.averaging is not None:
                if self.replica.replaced(result.step + 1):
                    step.averaging.ended_by_proxy(result, step.extras)
            else:
                self.replica.push(result)
            self.replica.note_bucket_use()
            self._changed()
            return True

    def _due(self) -> bool:
        owns = self._claims.owned_by("helper") is not None
        own = owns or self._may_close() or self._may_absorb() or self._may_take_over()
        return own or self.replica.may_replay() or bool(self.own.deferred)

    def _may_absorb(self) -> bool:
        """Whether the helper may use an averaging that ended without the training thread."""
        return self.replica.computing and self.averaging is not None and self.averaging.absorbable

    def _changed(self) -> None:
        """Wake the training thread if it waits, and the helper only if it has work.

        Needless wake-ups take the interpreter from the training thread, half a millisecond per step.
        """
        self.lock.notify_all()
        if self._due():
            self.helper_wake.notify_all()

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _out_of_common_steps(self) -> bool:
        """Whether the training thread's gradient does not belong to the current step.

        It computes on other parameters, or the step consists of something else (`local`, which this thread has not
        entered yet).
        """
        elsewhere = not self.taking_part or self.plan.mode == "local"
        return elsewhere or self.step != self.next_step or not self.replica.state.in_common_steps

    def _may_take_over(self) -> bool:
        """Whether the helper must complete the step in flight: its owner, the training thread, is inactive, and a later
        step is closed already.
        """
        return self._claims.early is not None and self.inactive and self._claims.closed

    def _may_close(self) -> bool:
        """Whether the helper may submit what is missing of the current step."""
        if self._claims.in_flight is not None or not self._claims.closed or not self.taking_part:
            return False
        # A training thread that hangs inside step() must not let the queue grow without bound: then the job waits.
        return len(self.replica.queue) < self._replay_queue and (self.inactive or self.plan.may_close)
