"""The claim rule: every rank submits every bucket of every step exactly once, by its training thread or its helper.

One `StepEngine` per optimizer and rank. All methods return at once; the training thread and the helper thread loop
around them (`driver.py`), and a test drives them in any interleaving it likes.

State, all under one lock. `version` counts the steps applied to the live parameters, `next_step` is the first step
this rank has not wholly submitted. They are equal while the training thread computes a gradient that can still be
fresh. Whoever claims the header, always the last tensor of a step, owns the step's completion:

* The training thread claims it when its gradient is whole (`arrive`), waits, averages, applies.
* The helper claims it, with every bucket not yet submitted, when the coordinator closes the step. It submits what is
  left over from before or zeros, and hands the result to the replica.

A gradient that lost its claim is kept and folded into the next submission of its bucket.

The header travels behind the weight of the last bucket where it can, the one backward fills last: a tensor of its own
would often miss Horovod's cycle of 1 ms that took the bucket. Where all ranks wait for each other the header is claimed
as soon as the whole gradient is there, so that the reduction goes on beside whatever the program does between
`backward` and `step`. Where steps close without late ranks (`partial`) it is claimed on arrival, and the last bucket
waits for it, but not for long: a rank whose program works there says so in its header, and as all ranks read it in the
same step, in the next one the header travels alone on all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from star_hvd.engine.buckets import Bucket
from star_hvd.engine.device import NORM, Fence
from star_hvd.engine.engine_state import EngineState
from star_hvd.engine.header import Header
from star_hvd.engine.hyperparameters import HyperRow
from star_hvd.engine.records import OpenStep, Result, Snapshot
from star_hvd.errors import StarError

__all__ = ["StepEngine"]

_HEADER_WAIT_S = 0.002
"""Two of Horovod's cycles. The way from the last hook through `backward` into `step` takes a tenth of it."""


class StepEngine(EngineState):
    """See the module's text; the arguments are those of `EngineState`."""

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
                self.replica.note_bucket_use()
            else:
                self._submit_fresh(bucket)
                if self._may_claim_early():
                    self._claim_early()

    def defer(self, index: int, fence: Fence) -> None:
        """A bucket will be whole once its device has come to `fence`; until then its gradient can lose its step."""
        with self.lock:
            self._raise_failure()
            self._deferred[index] = fence
            self._changed()

    def flush_deferred(self) -> bool:
        """Submit the deferred buckets that are whole by now. Whether none is left to wait for.

        One that has lost its step is kept once it is whole, no earlier: whoever keeps it works on another stream.
        """
        with self.lock:
            self._raise_failure()
            for index, fence in list(self._deferred.items()):
                if fence.done():
                    del self._deferred[index]
                    fence.order(self.applier.buckets[index].flat)
                    self.gradient_ready(index)
            return not self._deferred

    def arrive(self, *, manual: bool = False) -> bool:
        """The training thread has given all its buckets. Whether its gradient is in the step, else it is behind.

        Args:
            manual: The user works on the result between `synchronize` and `step`, so helpers cannot replay it.
        """
        self._read_devices()
        with self.lock:
            self._raise_failure()
            self.replica.computing = False
            self._count_own_step()
            step, self._claimed_early = self._inflight, False
            if step is not None and step.early:
                step.early = False
                if manual and not self._ever_manual:
                    self._untold_manual = step.number
                self._ever_manual = self._ever_manual or manual
                self.counters.fresh += 1
                self._listener.on_arrive(self.version, self.plan.plan_id)
                return True
            if self._out_of_rounds():
                self.counters.late += 1
                self._listener.on_late(self.version, self.plan.plan_id)
                return False
            missing = [i for i in range(len(self.applier.buckets)) if not self._current.claimed(i)]
            if missing:
                raise StarError(f"buckets {missing} of step {self.version} were not submitted before arrive()")
            self._ever_manual = self._ever_manual or manual
            self._claim_header("trainer", manual=manual or not self._can_replay)
            self.counters.fresh += 1
            self._listener.on_arrive(self.version, self.plan.plan_id)
            return True

    def _read_devices(self) -> None:
        """What the header needs from the devices: the host waits for it here, without the lock."""
        with self.lock:
            norms, self._norms = self._norms, []
            due = self.agreement.checksum_due(self.next_step)
        if norms:
            for norm, fence in norms:
                fence.order(norm)
            self.streams.await_host()
            self._local_sqr += sum(float(norm) ** 2 for norm, _ in norms)
        if due and self.streams.devices:
            self.agreement.checksum = (self.next_step, self.applier.checksum())

    def submit_average(self, index: int, average: torch.Tensor) -> None:
        """`local`: submit this rank's part of an average.

        Args:
            index: The bucket.
            average: As `Bucket.new_average`: the parameters times this rank's weight, then the weight.
        """
        with self.lock:
            self._raise_failure()
            self._submit_average(self.applier.buckets[index], average)

    def arrive_average(self) -> None:
        """`local`: all buckets are submitted; claim the step."""
        with self.lock:
            self._raise_failure()
            self.replica.computing = False
            self._claim_header("trainer")
            self._listener.on_arrive(self.version, self.plan.plan_id)

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
            step = self._inflight  # No other thread touches a step that the training thread owns.
        assert step is not None and step.owner == "trainer"
        reduced = self._reduced(step)
        with self.lock:
            self._raise_failure()
            result = self._complete(step, *reduced)
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
            try:
                with self.replica.writing():
                    return (step or self.applier.step)(result.row)
            except BaseException:
                with self.lock:  # No catch-up follows; the user may go on with the next step, as under Horovod.
                    self.replica.computing = True
                raise
            finally:  # The step has ended, even where the user's optimizer or a hook of its raised.
                with self.lock:
                    self.replica.version += 1
                    self._changed()

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
            self._norms.clear()
            self._changed()
            return True

    def adopt(self, snapshot: Snapshot) -> bool:
        """Take parameters and optimizer state fetched from another rank; see `Replica.adopt`.

        Returns:
            False where they are older than what is here (its source was still inside the step), or of a step that did
            not begin here: the others went on under a plan this rank has yet to read of. Nothing was changed then.
        """
        snapshot = self.replica.placed(snapshot)
        with self.replica.apply_lock, self.lock:  # A step that ends meanwhile would be neither in them nor queued.
            if not self.version <= snapshot.version <= self.next_step:
                return False
            ended = self._inflight.number if self._inflight is not None else self.next_step
            self.replica.adopt(snapshot, ended)
            return True

    def note_joined(self) -> None:
        """Tell that the training thread, which was behind, starts on the parameters of step `version`."""
        with self.lock:
            self._listener.on_join(self.version)

    def layout_changed(self, hyper: HyperRow) -> None:
        """Buckets were added on all ranks after the same step, in lockstep; headers and rounds take their new form."""
        with self.replica.apply_lock, self.lock:
            if self.version != self.next_step or self._inflight is not None or self.replica.queue:
                raise StarError("parameters were added while a step was in flight; add them between two steps")
            self.applier.hyper = hyper
            self.streams.renew()
            self.agreement.layout_changed()
            self._choose_carrier()
            self._current = OpenStep.open(self.next_step, len(self.applier.buckets))

    @property
    def untold_manual(self) -> int | None:
        """The last step, where members worked on its mean although its header did not say so."""
        with self.lock:
            return self._untold_manual

    def note_manual(self, step: int) -> None:
        """The members of `step` worked on its mean: what the helper made of it here is not what they have."""
        with self.lock:
            if self._proxied == step:
                self._proxied = None
                self.replica.was_not_replayable()
                self._changed()

    # ---- helper thread --------------------------------------------------------------------------------------

    def helper_has_work(self) -> bool:
        """Whether `helper_tick` would do something now. A step in flight counts: it has to be polled."""
        with self.lock:
            return self.failure is None and self._due()

    def helper_owns(self) -> bool:
        """Whether a step is in flight that the helper has to complete."""
        with self.lock:
            return self._helper_owns()

    def helper_averages(self) -> bool:
        """Whether that step is an averaging of local steps."""
        with self.lock:
            return self._helper_owns() and self._inflight is not None and self._inflight.averaging is not None

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
            if self._may_take_over():
                assert self._inflight is not None
                self._inflight.early, self._inflight.owner = False, "helper"
            owns = self._helper_owns()
            step = self._collected() if owns else None
            if not owns and self._may_close():
                self._stand_in()
                return True
        if owns:
            return step is not None and self._end_inflight(step)
        if self._may_absorb() and self.averaging is not None and self.averaging.absorb():
            return True
        return self.replica.replay_one()

    # ---- inside, under the lock -------------------------------------------------------------------------------

    def _may_claim_early(self) -> bool:
        """Whether the step's gradient is whole before the training thread arrives, and nothing keeps the header back.

        Where steps close without late ranks the header goes with the arrival, which the coordinator counts. Else it may
        go early as long as helpers have nothing to do: what they replay must be known to be replayable.
        """
        if self.plan.may_close or self.plan.mode == "local" or self._inflight is not None:
            return False
        if self.agreement.mixed and self._complete_run < self._early_after_steps:
            return False
        if self.streams.devices:  # The header needs numbers that the host would wait for here.
            return False
        return all(self._current.claimed(bucket.index) for bucket in self.applier.buckets)

    def _claim_early(self) -> None:
        """Claim the header within backward: the reduction goes on beside what the program does before `step`.

        Hyperparameters are read here, and a loss recorded after this goes with the next step. Whether the program will
        work on the mean is not known yet: a program that ever did is taken to do so again, and where it does for the
        first time, the next header says so (or a meeting of all ranks, whichever comes first).
        """
        self._count_own_step()
        self._claimed_early = True
        self._claim_header("trainer", manual=self._ever_manual or not self._can_replay)
        assert self._inflight is not None
        self._inflight.early = True

    def _count_own_step(self) -> None:
        if not self._claimed_early:
            self.own_steps += 1

    def _samples_norm(self, number: int) -> bool:
        return number % self._noise_interval_steps == 0

    def _submit_fresh(self, bucket: Bucket) -> None:
        flat = bucket.flat
        if self._samples_norm(self._current.number):
            self._take_norm(flat)
        if self.weight != 1.0:
            flat[:-1].mul_(self.weight)
        flat[-1] = self.weight
        self.counters.applied_weight += self.weight / len(self.applier.buckets)
        if bucket is self._carrier:
            self._whole_at_s = self._clock()
        self._submit(bucket, flat)

    def _submit(self, bucket: Bucket, flat: torch.Tensor) -> None:
        """Submit `flat`, with what was kept for the bucket folded in."""
        step = self._current
        step.folded += self._late.fold(bucket, flat, step.number, self.plan)
        wire = bucket.to_wire(flat)
        step.flats[bucket.index], step.wires[bucket.index] = flat, wire
        if bucket is self._carrier and self._apart:
            wire[-bucket.tail :].zero_()  # What is left of an earlier header.
        if bucket is not self._carrier or self._apart:
            step.handles[bucket.index] = self.collective.submit(f"{self.prefix}.b{bucket.index}", wire)

    def _submit_average(self, bucket: Bucket, average: torch.Tensor) -> None:
        step = self._current
        step.flats[bucket.index] = step.wires[bucket.index] = average
        step.handles[bucket.index] = self.collective.submit(f"{self.prefix}.a{bucket.index}", average)

    def _stand_in(self) -> None:
        """Submit every bucket the training thread has not, then the header."""
        averaging = self.averaging if self.plan.mode == "local" else None
        for bucket in self.applier.buckets:
            if self._current.claimed(bucket.index):
                continue
            if averaging is not None:
                self._submit_average(bucket, averaging.stand_in_flat(bucket))
            else:
                self._submit(bucket, bucket.new_flat())
        self._claim_header("helper")
        self.counters.proxied += 1

    def _claim_header(self, owner: str, *, manual: bool = False) -> None:
        """Submit the header of the current step, which makes `owner` responsible for its completion."""
        step = self._current
        # The last owner applied or queued its step before anybody can get here: one step in flight at a time.
        assert self._inflight is None, "two steps in flight"
        fresh = owner == "trainer"
        item = self.agreement.contribution(step, self.own_steps, fresh=fresh, away=self.away)
        if fresh:
            item.manual, item.weight, item.loss = manual, self.weight, self.loss
            item.local_sqr = self.weight * self._local_sqr if self._samples_norm(step.number) else None
            item.waited = self._waits_for_headers()
            item.manual_before, self._untold_manual = self._untold_manual == step.number - 1, None
            self.loss = math.nan
        codec = self.agreement.codec
        step.owner, name = owner, f"{self.prefix}.h"
        if self._carrier is None or self._apart or self.plan.mode == "local":
            whole = step.header = torch.zeros(codec.size, dtype=torch.float32, device="cpu")
        else:
            wire = step.wires[self._carrier.index]
            assert wire is not None
            whole, step.header, name = wire, wire[-codec.size :], f"{self.prefix}.b{self._carrier.index}"
        codec.write(self.rank, item, step.header.numpy())
        if self.averaging is not None and self.plan.mode == "local":
            step.averaging = self.averaging
            for extra, tensor in self.averaging.extras():
                step.extras.append(tensor)
                step.handles.append(self.collective.submit(f"{self.prefix}.{extra}", tensor))
        step.header_handle = self.collective.submit(name, whole)
        self._inflight = step
        self.next_step = step.number + 1
        self._current = OpenStep.open(self.next_step, len(self.applier.buckets))
        self._changed()

    def _waits_for_headers(self) -> bool:
        """Whether the carrier's gradient is whole long before the header, in this step and the one before."""
        whole_at_s, self._whole_at_s = self._whole_at_s, None
        waited = whole_at_s is not None and self._clock() - whole_at_s > _HEADER_WAIT_S
        self._waited = self._waited + 1 if waited else 0
        return self._waited >= 2

    def _take_norm(self, flat: torch.Tensor) -> None:
        if self.streams.queues(flat):  # The host reads it later, where it may wait.
            self._norms.append((_norm(flat), self.streams.give_one(NORM, flat)))
        else:
            self._local_sqr += _sqr_norm(flat)

    def _reduced(self, step: OpenStep) -> tuple[Header, list[torch.Tensor], float]:
        """Header, means and, when sampled, their squared norm. The handles have ended and are collected.

        Called by the step's owner without the lock, since the host may wait for the device here.
        """
        assert step.header is not None
        header = self.agreement.codec.read(step.header.numpy())
        means = [self._mean(bucket, step) for bucket in self.applier.buckets]
        if header.local_count != len(self.agreement.members):
            return header, means, math.nan
        norms = [_norm(mean) for mean in means]
        self.streams.await_host()
        return header, means, sum(float(norm) ** 2 for norm in norms)

    def _complete(self, step: OpenStep, header: Header, means: list[torch.Tensor], mean_sqr: float) -> Result:
        """Act on the header of a reduced step."""
        self._apart = header.waited
        if header.manual and step.owner == "helper" and step.averaging is None:
            self.replica.cannot_replay(step.number)
        complete = header.complete(self.agreement.members)
        self._complete_run = self._complete_run + 1 if complete else 0
        self._ever_manual = self._ever_manual or header.manual
        if header.manual_before:
            self.note_manual(step.number - 1)
        self._proxied = step.number if step.owner == "helper" else None
        if self._untold_manual == step.number and complete:
            self._untold_manual = None  # There is no helper whom it would concern.
        before = self.plan
        row = self.agreement.read(step, header, mean_sqr)
        if self.plan is not before:
            self._plan_taken()
        return Result(step.number, means, row)

    def _mean(self, bucket: Bucket, step: OpenStep) -> torch.Tensor:
        flat, wire = step.flats[bucket.index], step.wires[bucket.index]
        assert flat is not None and wire is not None
        self.streams.use(wire, flat)  # Another thread may have submitted them.
        if step.averaging is None:
            bucket.from_wire(wire, flat)
        if self.streams.queues(flat):  # The same without a look at the device.
            whole = flat[-1:] / self.world_size if self._scale_by_ranks else flat[-1:]
            flat[:-1].div_(torch.where(whole == 0, torch.ones_like(whole), whole))
            return flat
        weight = float(flat[-1])
        factor = weight / self.world_size if self._scale_by_ranks else weight
        if factor not in (0.0, 1.0):  # Nobody gave anything: the sum of nothing stays zero.
            flat[:-1].div_(factor)
        return flat

    def _collected(self) -> OpenStep | None:
        """The step in flight once all its operations have ended."""
        step = self._inflight
        assert step is not None
        if not step.waiting:
            step.waiting.extend(step.all_handles())
        while step.waiting and self.collective.poll(step.waiting[0]):
            self.collective.finish(step.waiting.popleft())
        return None if step.waiting else step

    def _end_inflight(self, step: OpenStep) -> bool:
        reduced = self._reduced(step)
        with self.lock:
            self._raise_failure()
            result = self._complete(step, *reduced)
            self._inflight = None
            if step.averaging is not None:
                # It is no whole state where the rest of it is elsewhere: an optimizer's count of steps for example.
                if not self.needs_fetch:
                    step.averaging.stood_in(result, step.extras)
                    self.replica.replaced(result.step + 1)
            else:
                self.replica.push(result)
            self.replica.note_bucket_use()
            self._changed()
            return True


def _norm(flat: torch.Tensor) -> torch.Tensor:
    """Norm of a flat buffer's gradients, accumulated in float32 at least."""
    wide = torch.float64 if flat.dtype == torch.float64 else torch.float32
    norm: torch.Tensor = torch.linalg.vector_norm(flat[:-1], dtype=wide)
    return norm


def _sqr_norm(flat: torch.Tensor) -> float:
    """Its square, read by the host."""
    return float(_norm(flat)) ** 2
