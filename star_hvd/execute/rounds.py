"""The claim rule: every rank submits every bucket of every step exactly once, by its training thread or its helper.

One `RoundEngine` per optimizer and rank. All methods return at once; the training thread and the helper thread loop
around them (`driver.py`), and a test drives them in any interleaving it likes.

State, all under one lock. `version` counts the steps applied to the live parameters, `next_round` is the first step
this rank has not wholly submitted. They are equal while the training thread computes a gradient that can still be
fresh. Whoever claims the header, always the last tensor of a step, owns the step's completion:

* The training thread claims it when its gradient is whole (`arrive`), waits, averages, applies.
* The helper claims it, with every bucket not yet submitted, when the coordinator closes the step. It submits what is
  left over from before or zeros, and hands the result to the replica.

A gradient that lost its claim is kept and folded into the next submission of its bucket.

The header travels behind the weight of the last bucket where it can, the one backward fills last: a tensor of its own
would often miss Horovod's cycle of 1 ms that took the bucket. That bucket is then submitted with the claim.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from scheduler.records import Plan
from star_hvd.buckets import Bucket
from star_hvd.errors import StarError
from star_hvd.execute.agreement import Agreement
from star_hvd.execute.collective import Collective
from star_hvd.execute.device import fence
from star_hvd.execute.hyper import HyperRow
from star_hvd.execute.late import LateGradients
from star_hvd.execute.replay import Applier
from star_hvd.execute.replica import Replica
from star_hvd.execute.state import Averaging, Counters, DeviceEvent, Listener, Result, Round, Snapshot

__all__ = ["RoundEngine"]


class RoundEngine:
    """See the module's text.

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
    ) -> None:
        self.rank = rank
        self.world_size = plan.world_size
        self.applier = applier
        self.collective = collective
        self.averaging: Averaging | None = None
        self.prefix = prefix
        self.counters = Counters()
        self.next_round = 0
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
        self._deferred: dict[int, DeviceEvent] = {}
        self._late = LateGradients(applier.buckets, self.counters)
        self._choose_carrier()
        self._current = Round.open(0, len(applier.buckets))
        self._inflight: Round | None = None
        self._close_upto = -1
        self._local_sqr = 0.0

    @property
    def plan(self) -> Plan:
        """The plan in force for `next_round`."""
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

    # ---- training thread ------------------------------------------------------------------------------------

    def gradient_ready(self, index: int) -> None:
        """The training thread's gradient of one bucket is whole in the bucket's `flat`.

        Submits it as this step's contribution when nobody has, else keeps it for a later step.
        """
        with self.lock:
            self._raise_failure()
            bucket = self.applier.buckets[index]
            self.counters.produced_weight += self.weight / len(self.applier.buckets)
            if self._lost(index):
                self._late.keep(bucket, self.weight, self.version)
                fence([bucket])  # The helper folds it.
            else:
                self._submit_fresh(bucket)

    def defer(self, index: int, event: DeviceEvent) -> None:
        """A bucket will be whole once `event` has happened on its device; until then its gradient can lose its step."""
        with self.lock:
            self._raise_failure()
            self._deferred[index] = event
            self._changed()

    def flush_deferred(self) -> bool:
        """Submit the deferred buckets that are whole by now. Whether none is left to wait for.

        A gradient that has lost its step anyway is kept at once: copies are ordered on its device's stream.
        """
        with self.lock:
            self._raise_failure()
            for index, event in list(self._deferred.items()):
                if self._lost(index) or event.query():
                    del self._deferred[index]
                    self.gradient_ready(index)
            return not self._deferred

    def arrive(self, *, manual: bool = False) -> bool:
        """The training thread has given all its buckets. Whether its gradient is in the step, else it is behind.

        Args:
            manual: The user works on the result between `synchronize` and `step`, so helpers cannot replay it.
        """
        with self.lock:
            self._raise_failure()
            self.replica.computing = False
            self.own_steps += 1
            if self._out_of_rounds():
                self.counters.late += 1
                self._listener.on_late(self.version, self.plan.epoch)
                return False
            missing = [i for i in range(len(self.applier.buckets)) if not self._current.claimed(i)]
            if missing:
                raise StarError(f"buckets {missing} of step {self.version} were not submitted before arrive()")
            self._claim_header("trainer", manual=manual or not self._can_replay)
            self.counters.fresh += 1
            self._listener.on_arrive(self.version, self.plan.epoch)
            return True

    def submit_average(self, index: int) -> None:
        """`local`: the parameters of one bucket are in its buffer; submit them with this rank's weight."""
        with self.lock:
            self._raise_failure()
            bucket = self.applier.buckets[index]
            bucket.flat[:-1].mul_(self.weight)
            bucket.flat[-1] = self.weight
            self._submit(bucket, bucket.flat)

    def arrive_average(self) -> None:
        """`local`: all buckets are submitted; claim the step."""
        with self.lock:
            self._raise_failure()
            self.replica.computing = False
            self._claim_header("trainer")
            self._listener.on_arrive(self.version, self.plan.epoch)

    def averaged(self) -> None:
        """`local`: the training thread computes again; from here on the helper may work for it while it is away."""
        with self.lock:
            self.replica.computing = True
            self._changed()

    def own_extras(self) -> list[torch.Tensor]:
        """`local`: what is averaged besides the parameters, summed after the handles have ended."""
        with self.lock:
            assert self._inflight is not None and self._inflight.owner == "trainer"
            return self._inflight.extras

    def own_handles(self) -> list[int]:
        """Handles of the step that the training thread owns, after `arrive` returned True."""
        with self.lock:
            self._raise_failure()
            assert self._inflight is not None and self._inflight.owner == "trainer"
            return self._inflight.all_handles()

    def finish_own(self) -> Result:
        """Average the step the training thread owns, in place; its handles must have ended and be collected."""
        with self.lock:
            self._raise_failure()
            assert self._inflight is not None and self._inflight.owner == "trainer"
            result = self._complete(self._inflight)
            self._inflight = None
            self._changed()
            return result

    def apply_own(self, result: Result, step: Callable[[Any], Any] | None = None) -> Any:
        """Apply the training thread's own step to the live parameters.

        Args:
            result: What `finish_own` returned.
            step: Applies it, given the row of hyperparameters; the applier's step where None.
        """
        with self.replica.apply_lock:
            value = (step or self.applier.step)(result.row)
            if self.plan.relaxed:
                fence(self.applier.buckets)  # From here on the helper may copy the parameters.
            with self.lock:
                self.replica.version += 1
                self._changed()
            return value

    def catch_up(self, target: int) -> bool:
        """Bring the live parameters up to the closed steps, without waiting.

        Returns:
            True when the training thread may compute again: it has every step that ended here, or at least `target`
            of them (a rank whose optimizer step is slower than the others' whole step would never leave otherwise;
            the helper replays the rest). False: call again after a step in flight has ended, or after `adopt` when
            `needs_fetch` is set.
        """
        with self.lock:
            self._raise_failure()
            self.replica.computing = False
        self.replica.bring_up()
        with self.lock:
            self._raise_failure()
            incomplete = self.needs_fetch or self.replica.queue or self._inflight is not None
            stateless = self.needs_fetch and self.replica.foreign
            if stateless or (incomplete and self.version < target):
                return False
            self.replica.computing = True
            self._local_sqr = 0.0
            self._changed()
            return True

    def adopt(self, snapshot: Snapshot) -> None:
        """Take parameters and optimizer state fetched from another rank; see `Replica.adopt`."""
        with self.lock:
            if snapshot.version > self.next_round:
                raise StarError(f"fetched parameters are of step {snapshot.version}; only {self.next_round} began here")
            ended = self._inflight.number if self._inflight is not None else self.next_round
        self.replica.adopt(snapshot, ended)

    def note_joined(self) -> None:
        """Tell that the training thread, which was behind, starts on the parameters of step `version`."""
        with self.lock:
            self._listener.on_join(self.version)

    def layout_changed(self, hyper: HyperRow) -> None:
        """Buckets were added on all ranks after the same step, in lockstep; headers and rounds take their new form."""
        with self.replica.apply_lock, self.lock:
            if self.version != self.next_round or self._inflight is not None or self.replica.queue:
                raise StarError("parameters were added while a step was in flight; add them between two steps")
            self.applier.hyper = hyper
            self.agreement.layout_changed()
            self._choose_carrier()
            self._current = Round.open(self.next_round, len(self.applier.buckets))

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
                self.replica.version = self.next_round = version

    def adopt_state(self, snapshot: Snapshot) -> None:
        """Take over parameters and optimizer state of one version, for a checkpoint; the mode goes on as before."""
        with self.replica.apply_lock:
            self.replica.load(snapshot)
            self.note_outside(snapshot.version)

    def fold_late(self, bucket: Bucket, flat: torch.Tensor) -> bool:
        """Add what was kept for a bucket to a contribution that does not go through a round; who sends it counts it."""
        with self.lock:
            return self._late.fold(bucket, flat, self.version, self.plan, count=False)

    def keep_late(self, flats: Sequence[torch.Tensor], version: int, *, foreign: bool = False) -> int:
        """Keep contributions (gradients times weight, then the weight), computed on step `version`, for the next step.

        Args:
            flats: One buffer per bucket.
            version: Of the parameters behind them.
            foreign: They are another rank's, which this rank has taken over.

        Returns:
            The first version that will contain them.
        """
        with self.lock:
            self._raise_failure()
            for bucket, flat in zip(self.applier.buckets, flats, strict=True):
                if foreign:
                    self.counters.produced_weight += float(flat[-1]) / len(self.applier.buckets)
                self._late.keep_whole(bucket, flat, min(version, self.version))
            fence(self.applier.buckets)
            # A bucket of the current step may have been submitted already; it then goes with the next one.
            begun = any(self._current.claimed(bucket.index) for bucket in self.applier.buckets)
            return self.next_round + (2 if begun else 1)

    def adopt_plan(self, plan: Plan) -> None:
        """Servers have changed their rule under way: the plan of this epoch is in force."""
        with self.lock:
            if plan.epoch > self.plan.epoch:
                self.agreement.resume(plan, self.version)

    def resume(self, plan: Plan, round_: int) -> bool:
        """Step `round_` is the first under `plan`; its state is elsewhere and has to be fetched.

        Returns:
            Whether that is news.
        """
        with self.lock:
            if plan.epoch <= self.plan.epoch:
                return False
            self.replica.cannot_replay(max(round_, self.version))
            self.replica.foreign = True
            self.next_round = round_
            self._current = Round.open(round_, len(self.applier.buckets))
            self.agreement.resume(plan, round_)
            self._plan_taken()
            self._changed()
            return True

    def _plan_taken(self) -> None:
        """Use the collective of the plan in force."""
        members = self.plan.members
        if self.plan.mode != "subgroup":
            self.collective = self._everybody
        elif self.rank in members:
            assert self._collective_of is not None, "this engine cannot run a subgroup"
            self.collective = self._collective_of(members)

    # ---- helper thread --------------------------------------------------------------------------------------

    def helper_has_work(self) -> bool:
        """Whether `helper_tick` would do something now. A step in flight counts: it has to be polled."""
        with self.lock:
            return self.failure is None and self._due()

    def helper_owns(self) -> bool:
        """Whether a step is in flight that the helper has to complete."""
        with self.lock:
            return self._helper_owns()

    def must_poll(self) -> bool:
        """Whether the helper waits for something that nobody announces: a reduction or a device."""
        with self.lock:
            return self._helper_owns() or bool(self._deferred)

    def helper_tick(self) -> bool:
        """Do one thing that is due, without waiting. Whether something was done."""
        with self.lock:
            self._raise_failure()
            if self._deferred:
                self.flush_deferred()
            if self._helper_owns():
                return self._poll_inflight()
            if self._may_close():
                self._stand_in()
                return True
        if self._may_absorb() and self.averaging is not None and self.averaging.absorb():
            return True
        return self.replica.replay_one()

    # ---- any thread -----------------------------------------------------------------------------------------

    def close(self, round_: int) -> None:
        """The coordinator closes `round_`.

        Outside a relaxed plan the order is carried out only while this rank really is away: a rank that came back
        before the order reached it delivers its gradient itself, so `sync` stays exact.
        """
        with self.lock:
            self._close_upto = max(self._close_upto, round_)
            self._changed()

    def set_away(self, away: bool) -> None:
        """Whether the training thread, which calls this, leaves its training loop and delivers no gradient for now."""
        if away:
            fence(self.applier.buckets)  # From here on the helper may copy the parameters.
        with self.lock:
            self.away = away
            self._changed()

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

    def abandon(self, epoch: int) -> None:
        """Give a plan up; see `Agreement.abandon`."""
        with self.lock:
            self.agreement.abandon(epoch)

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
        own = self._helper_owns() or self._may_close() or self._may_absorb()
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
        return elsewhere or self.version != self.next_round or self.replica.foreign

    def _helper_owns(self) -> bool:
        return self._inflight is not None and self._inflight.owner == "helper"

    def _may_close(self) -> bool:
        """Whether the helper may stand in for the training thread in the current round."""
        if self._inflight is not None or self._close_upto < self.next_round or not self.taking_part:
            return False
        # A training thread that hangs inside step() must not let the queue grow without bound: the job waits for it.
        return len(self.replica.queue) < self._replay_queue and (self.away or self.plan.may_close)

    def _samples_norm(self, number: int) -> bool:
        return number % self._noise_interval_steps == 0

    def _submit_fresh(self, bucket: Bucket) -> None:
        flat = bucket.flat
        if self._samples_norm(self._current.number):
            self._local_sqr += _sqr_norm(flat)
        if self.weight != 1.0:
            flat[:-1].mul_(self.weight)
        flat[-1] = self.weight
        self.counters.applied_weight += self.weight / len(self.applier.buckets)
        self._submit(bucket, flat)

    def _submit(self, bucket: Bucket, flat: torch.Tensor) -> None:
        """Submit `flat`, with what was kept for the bucket folded in."""
        round_ = self._current
        if self.plan.mode != "local":  # There the buffers hold parameters.
            round_.folded += self._late.fold(bucket, flat, round_.number, self.plan)
        wire = bucket.to_wire(flat)
        round_.flats[bucket.index], round_.wires[bucket.index] = flat, wire
        if bucket is not self._carrier:
            round_.handles[bucket.index] = self.collective.submit(f"{self.prefix}.b{bucket.index}", wire)

    def _stand_in(self) -> None:
        """Submit every bucket the training thread has not, then the header."""
        for bucket in self.applier.buckets:
            if not self._current.claimed(bucket.index):
                averaging = self.averaging if self.plan.mode == "local" else None
                self._submit(bucket, averaging.stand_in_flat(bucket) if averaging else bucket.new_flat())
        self._claim_header("helper")
        self.counters.proxied += 1

    def _claim_header(self, owner: str, *, manual: bool = False) -> None:
        """Submit the header of the current round, which makes `owner` responsible for its completion."""
        round_ = self._current
        # The last owner applied or queued its step before anybody can get here: one step in flight at a time.
        assert self._inflight is None, "two steps in flight"
        fresh = owner == "trainer"
        item = self.agreement.contribution(round_, self.own_steps, fresh=fresh, away=self.away)
        if fresh:
            item.manual, item.weight, item.loss = manual, self.weight, self.loss
            item.local_sqr = self.weight * self._local_sqr if self._samples_norm(round_.number) else None
            self.loss = math.nan
        codec = self.agreement.codec
        round_.owner, name = owner, f"{self.prefix}.h"
        if self._carrier is None:
            whole = round_.header = torch.zeros(codec.size, dtype=torch.float32)
        else:
            wire = round_.wires[self._carrier.index]
            assert wire is not None
            whole, round_.header, name = wire, wire[-codec.size :], f"{self.prefix}.b{self._carrier.index}"
        codec.write(self.rank, item, round_.header.numpy())
        if self.averaging is not None and self.plan.mode == "local":
            round_.averaging = self.averaging
            for extra, tensor in self.averaging.extras():
                round_.extras.append(tensor)
                round_.handles.append(self.collective.submit(f"{self.prefix}.{extra}", tensor))
        round_.header_handle = self.collective.submit(name, whole)
        self._inflight = round_
        self.next_round = round_.number + 1
        self._current = Round.open(self.next_round, len(self.applier.buckets))
        self._changed()

    def _complete(self, round_: Round) -> Result:
        """Turn sums into means and act on the header. The handles have ended and are collected."""
        assert round_.header is not None
        header = self.agreement.codec.read(round_.header.numpy())
        means = [self._mean(bucket, round_) for bucket in self.applier.buckets]
        mean_sqr = math.nan
        if header.local_count == len(self.agreement.members):
            mean_sqr = sum(map(_sqr_norm, means))
        if header.manual and round_.owner == "helper" and round_.averaging is None:
            self.replica.cannot_replay(round_.number)
        before = self.plan
        row = self.agreement.read(round_, header, mean_sqr)
        if self.plan is not before:
            self._plan_taken()
        return Result(round_.number, means, row)

    def _mean(self, bucket: Bucket, round_: Round) -> torch.Tensor:
        flat, wire = round_.flats[bucket.index], round_.wires[bucket.index]
        assert flat is not None and wire is not None
        bucket.from_wire(wire, flat)
        weight = float(flat[-1])
        factor = weight / self.world_size if self._scale_by_ranks else weight
        if factor not in (0.0, 1.0):  # Nobody gave anything: the sum of nothing stays zero.
            flat[:-1].div_(factor)
        return flat

    def _poll_inflight(self) -> bool:
        round_ = self._inflight
        assert round_ is not None
        if not round_.waiting:
            round_.waiting.extend(round_.all_handles())
        while round_.waiting and self.collective.poll(round_.waiting[0]):
            self.collective.finish(round_.waiting.popleft())
        if round_.waiting:
            return False
        result = self._complete(round_)
        self._inflight = None
        if round_.averaging is not None:
            round_.averaging.stood_in(result, round_.extras)
            self.replica.replaced(result.round + 1)
        else:
            self.replica.push(result)
        self._changed()
        return True


def _sqr_norm(flat: torch.Tensor) -> float:
    """Squared norm of a flat buffer's gradients, accumulated in float32 at least."""
    wide = torch.float64 if flat.dtype == torch.float64 else torch.float32
    return float(torch.linalg.vector_norm(flat[:-1], dtype=wide)) ** 2
