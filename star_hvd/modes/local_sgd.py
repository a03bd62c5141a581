"""`local(H)`: every rank steps on its own; after H steps, or H seconds, parameters and optimizer state are averaged.

How many steps fit into the seconds is said by `scheduler.rules.local_walk`.

The average is weighted by the samples behind each rank's steps since the last one, so a rank that made fewer steps
counts less. Momentum and Adam's moments are averaged with the same weights: they are linear in the gradients or their
squares, so their average is the moment of the average trajectory. So are step counts and the like, on which bias
corrections depend, and all replicas continue bit-equal (after post-local SGD, Lin et al. 2020; users built the
time-based form by hand to escape stragglers, RETURNN #318).

In the background (`Plan.transmission`, `Config.background`) an averaging does not hold up the training thread: it sends
a copy of its parameters and state, steps on, and at the end of the first step by which the mean has arrived adds the
difference between mean and copy to both (Streaming DiLoCo, Douillard et al. 2025). It waits for the mean before the
next averaging, where ranks meet, for a checkpoint, and if the averaging's header requests another plan: a mode is left
with equal replicas.

An averaging ends unused on a rank whose program has loaded a state since it sent its part: its mean is one of values
that the program has replaced. The next averaging makes the ranks equal again, whichever of them have loaded one.

While the program has other values in the parameters for a while, a moving average that it evaluates say, the helper
contributes nothing. Once the former values are back, the rank adds to the mean of the others what it would have
contributed, and its steps count in the next averaging.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from scheduler.records import Plan
from scheduler.rules.local_walk import another_step_fits
from star_hvd.engine.buckets import Bucket, set_weight
from star_hvd.engine.device import AVERAGED, DONE, PARAMS, Fence
from star_hvd.engine.records import Result
from star_hvd.engine.replica import ReplicaState
from star_hvd.engine.step_engine import StepEngine
from star_hvd.modes.averaged_state import (
    State,
    gather_rest,
    mean_of_rest,
    move_to_mean,
    put_rest,
    shaped_keys,
    shaped_values,
)
from star_hvd.telemetry.wait_time import WaitTime

__all__ = ["LocalSteps"]


_SLICE_S = 1.0  # Longest wait for the helper without another look.
_STEPS_KEPT = 512  # Number of this rank's latest steps for which it is known which averages lack them.
_LEAST_WEIGHT = 1e-3  # Weight of a rank without a step since the last averaging; if no rank made one, nothing changes.


@dataclass(slots=True)
class _Copy:
    """What this rank had when it sent its part of an averaging: parameters per bucket, and optimizer state."""

    params: list[torch.Tensor] = field(default_factory=list)
    state: list[tuple[int, str, torch.Tensor]] = field(default_factory=list)  # Bucket index, key, values.
    rest: torch.Tensor | None = None  # See `gather_rest`.
    fence: Fence = DONE
    void: bool = False  # Whether the program has loaded other values since.


@dataclass(slots=True)
class _OnHost:
    """What the host reads of an averaging: the weight behind each bucket, and the rest of the optimizer's state."""

    weights: list[float]
    rest: torch.Tensor
    rest_before: torch.Tensor | None  # This rank's part of it, if the mean is added as a difference.


# The step, the tensors of `extras`, and the copy if the mean is added as a difference.
Ended = tuple[Result, list[torch.Tensor], _Copy | None]


class LocalSteps:
    """Local steps of one rank and their averaging through the engine.

    Args:
        engine: The rank's engine; one averaging is one of its steps.
        wait: Waits for the handles of the step this rank owns.
        background: Whether the training thread computes while an averaging is in flight, if the plan does not specify
            it.
    """

    def __init__(self, engine: StepEngine, wait: Callable[[], None], *, background: bool | None = None) -> None:
        self.plan: Plan = engine.plan
        self._engine = engine
        self._wait = wait
        self._background = background
        self._sent = False  # Whether an averaging is in flight to which the training thread has sent its part.
        self._copy: _Copy | None = None  # The copy sent with it, if the training thread computes meanwhile.
        self._weight = 0.0
        self._steps = 0
        self._began_s = self._ended_s = time.monotonic()  # When these steps began, and the latest of them ended.
        self._completed_by_helper: Ended | None = None  # An averaging that the helper has completed.
        self._by_helper: tuple[list[torch.Tensor], list[tuple[str, torch.Tensor]]] | None = None  # What it sends.
        self._left_out = False  # Whether the helper has contributed nothing, since the program had other values here.
        self._missed = 0  # Number of such averagings in a row, the last of which waits.
        self._lacking: dict[int, float] = {}  # See `lacking`.

    def begin(self) -> LocalSteps:
        """Enter the mode, in the training thread, with the parameters all ranks have."""
        self.plan, self._weight, self._steps = self._engine.plan, 0.0, 0
        self._missed, self._began_s = 0, time.monotonic()
        self._ended_s = self._began_s
        return self

    @property
    def over(self) -> bool:
        """Whether the plan in force is no longer one of local steps; plans change at averagings only."""
        return self._engine.plan.mode != "local"

    @property
    def in_flight(self) -> bool:
        """Whether this rank has sent its part of an averaging that has not ended; its steps count for the next one."""
        return self._sent

    @property
    def just_averaged(self) -> bool:
        """Whether this rank has made no step since it sent its part of an averaging."""
        return self._steps == 0

    def lacking(self, own: int) -> float:
        """Return the last step whose parameters lack this rank's step number `own`, from 0; -1 if unknown.

        The helper may average while the training thread computes, so the number of averagings does not tell.
        """
        return self._lacking.get(own, -1)

    def set_inactive(self, inactive: bool) -> None:
        """Does nothing: the helper takes part in averagings meanwhile."""

    def confirm_inactive(self) -> None:
        """Does nothing: the engine knows that this rank is inactive."""

    def wake(self) -> None:
        """Does nothing: no wait here can be ended by others."""

    # ---- training thread ------------------------------------------------------------------------------------

    def give(self, bucket: Bucket) -> None:
        """Count a complete gradient."""
        self._engine.outside_gradient()

    def step(self, *, skip: bool) -> Any:
        """Make one step on this rank's own gradient, and average if that is due.

        If a rank is late, the others wait for it at the averaging, not before.
        """
        engine, weight, own = self._engine, self._engine.own.weight, self._engine.own.steps
        self._lacking[own] = math.inf  # Until it is written.
        self._lacking.pop(own - _STEPS_KEPT, None)
        engine.own.steps += 1
        if self.over:  # The mode ended while this rank was inactive.
            del self._lacking[own]
            for bucket in engine.applier.buckets:
                engine.own.weigh(bucket, skip=skip)
            engine.keep_late([bucket.flat.clone() for bucket in engine.applier.buckets], engine.step)
            return None
        self.take_over()
        applied = sum(self._fold(bucket, weight) for bucket in engine.applier.buckets) / len(engine.applier.buckets)
        with engine.lock:  # Another rank's late gradients may arrive and be counted now.
            engine.counters.applied_weight += applied
        with engine.replica.writing():
            value = None if skip else engine.applier.step(None, hooks=False)  # They run around the whole of this.
        with engine.lock:  # A copy sent before this lacks the step.
            self._lacking[own] = engine.step + (self._sent or engine.helper_averages())
        engine.counters.fresh += 1
        self._weight += weight
        self._steps += 1
        due = self._due()
        self._use_sent(wait=due)
        if due:
            background = engine.plan.in_background(self._background)
            self._send(copy=background)
            if background and not engine.averaging_asks_for_plan():
                engine.averaged()
            else:
                self._use_sent(wait=True)
        return value

    def _fold(self, bucket: Bucket, weight: float) -> float:
        """Fold a gradient from before this mode into this rank's next one (mean by both weights). Return their sum."""
        flat = self._weighted(bucket, weight)
        if not self._engine.fold_late(bucket, flat):
            if weight not in (0.0, 1.0):
                flat[:-1].div_(weight)
            return weight
        self._engine.streams.await_host()
        total = float(flat[-1])
        if total not in (0.0, 1.0):
            flat[:-1].div_(total)
        return total

    def _weighted(self, bucket: Bucket, weight: float) -> torch.Tensor:
        flat = bucket.flat
        set_weight(flat, weight)
        if weight != 1.0:
            flat[:-1].mul_(weight)
        return flat

    def _due(self) -> bool:
        """Whether this rank averages now: once a step as long as the last one would end too late."""
        plan, now_s = self._engine.plan, time.monotonic()
        last_s, self._ended_s = now_s - max(self._began_s, self._ended_s), now_s
        if plan.local_steps:
            return self._steps >= plan.local_steps
        return not another_step_fits(now_s - self._began_s, last_s, plan.local_s)

    def average(self) -> None:
        """Average with all ranks now, and wait for them."""
        self._use_sent(wait=True)
        self._send(copy=False)
        self._use_sent(wait=True)

    def _send(self, *, copy: bool) -> None:
        """Submit this rank's part of an averaging. Its steps from here on count for the next one."""
        engine = self._engine
        weight = engine.own.weight
        engine.own.weight = self._weight = max(self._weight, _LEAST_WEIGHT)
        self._left_out = False
        self._copy = _Copy() if copy else None
        for bucket in engine.applier.buckets:
            engine.submit_average(bucket, self._part(bucket))
        engine.arrive_average()
        if self._copy is not None:
            self._copy.fence = engine.streams.give(PARAMS)
        engine.own.weight = weight
        self._sent, self._weight, self._steps, self._began_s = True, 0.0, 0, time.monotonic()

    def _use_sent(self, *, wait: bool) -> None:
        """Use the averaging in flight once it has ended; if the helper completes it, `take_over` uses it instead.

        Args:
            wait: Whether to wait for it to end.
        """
        engine = self._engine
        if not self._sent:
            return
        if not engine.reclaim_averaging(wait=wait):
            if wait:
                self.take_over()
            return
        self._wait()
        extras = engine.own_step().extras
        result = engine.finish_own()
        # If this rank has made no step since, it takes the mean itself: the same bits on all such ranks.
        copy = self._copy
        ended = (result, extras, copy if self._steps or (copy is not None and copy.void) else None)
        on_host = self._read(ended)
        self._sent, self._copy = False, None
        if not self._steps:
            self._began_s = time.monotonic()
        engine.apply_own(result, lambda row: self._write(ended, on_host))
        engine.averaged()

    def catch_up(self) -> None:
        """Average where all ranks meet, so that they leave an epoch, or an optimizer, with equal parameters."""
        self.take_over()
        if not self.over:
            self.average()

    def take_over(self, *, show_mean: bool = False) -> None:
        """Use an averaging that ended without the calling training thread; one in flight is waited for first.

        Args:
            show_mean: Of steps that ended since, see `Replica.catch_up`.
        """
        engine = self._engine
        wait = WaitTime(_SLICE_S, "an averaging that this rank's helper completes")
        while not self._helper_is_done():  # The helper has a deadline, and fails the engine past it.
            wait.count()
        pending = self._copy is not None or engine.replica.state is ReplicaState.AVERAGE_PENDING
        if pending and engine.replica.left_alone:
            self._discard()
        if self._missed and not self.over:  # Else it has to be equal to the others.
            self._join_late()
        found = self._completed_by_helper
        if self._use(self._write_live) and found is not None and found[2] is None:
            self._steps, self._began_s = 0, time.monotonic()
        # The helper may have written it to a shadow, with later steps replayed on it.
        self._engine.replica.catch_up(show_mean=show_mean)

    def _helper_is_done(self) -> bool:
        """Wait a moment until the helper completes no averaging any more; return whether it does not."""
        engine = self._engine
        with engine.lock:
            return engine.lock.wait_for(lambda: not engine.helper_averages() or engine.failure is not None, _SLICE_S)

    def _join_late(self) -> None:
        """Add to a mean of the others what this rank would have contributed, for this rank only.

        After several, whose weights the last one's stands for, it counts as much less.
        """
        found, share = self._completed_by_helper, 1.0 / self._missed
        if found is None:
            return
        result, extras, copy = found
        result.fence.order(*result.means, *extras)
        means = []
        for bucket, mean in zip(self._engine.applier.buckets, result.means, strict=True):
            joined = mean.clone()
            joined[:-1].mul_(joined[-1:])
            joined.add_(self._part(bucket), alpha=share)
            joined[:-1].div_(joined[-1:].clamp_min(torch.finfo(joined.dtype).tiny))
            means.append(joined)
        totals = [total.add(own, alpha=share) for total, (_, own) in zip(extras, self._state_part(), strict=True)]
        # The helper may write the former one at any moment until this, if the mode ends with it.
        with self._engine.lock:
            if self._completed_by_helper is found:
                ended = dataclasses.replace(result, means=means, fence=self._engine.streams.give(AVERAGED))
                self._completed_by_helper, self._missed = (ended, totals, copy), 0

    def _discard(self) -> None:
        """Leave unused what was averaged before the program loaded the present values."""
        with self._engine.lock:
            if self._copy is not None:
                self._copy.void = True
            found, self._completed_by_helper, self._missed = self._completed_by_helper, None, 0
        if found is not None and found[2] is None:  # This rank's steps were in it.
            self._steps, self._began_s = 0, time.monotonic()
        self._engine.replica.discard_average()

    def _write_live(self, ended: Ended, on_host: _OnHost) -> None:
        with self._engine.replica.writing():
            self._write(ended, on_host)

    def absorb(self) -> bool:
        """Write such an averaging to a shadow, in the helper's thread, so that later steps can be replayed on it."""

        def shadow(ended: Ended, on_host: _OnHost) -> None:
            self._engine.replica.shadow_with(lambda *copied: self._write(ended, on_host, *copied))

        return self.absorbable and self._use(shadow)

    @property
    def absorbable(self) -> bool:
        """Whether an averaging waits that replaces this rank's state.

        One to be added as a difference is instead included in the helper's next contribution. One that this rank was
        left out of replaces it only if the mode ended with it.
        """
        found = self._completed_by_helper
        return found is not None and found[2] is None and (not self._missed or self.over)

    @property
    def waiting(self) -> bool:
        """Whether an averaging has ended whose result is not written yet."""
        return self._completed_by_helper is not None

    def _use(self, use: Callable[[Ended, _OnHost], None]) -> bool:
        engine = self._engine
        while (found := self._completed_by_helper) is not None:
            found[0].fence.order(*found[0].means, *found[1])
            on_host = self._read(found)
            with engine.replica.apply_lock:
                with engine.lock:
                    if self._completed_by_helper is not found:
                        continue  # Used by the other thread meanwhile, or replaced by a later averaging.
                    self._completed_by_helper = None
                use(found, on_host)
                with engine.lock:
                    engine.replica.average_used(found[0].step + 1)
                return True
        return False

    def _read(self, ended: Ended) -> _OnHost:
        """Read what the host needs to write an averaging. It waits for the device, so call this without locks."""
        result, extras, copy = ended
        self._engine.streams.await_host()
        before = None if copy is None or copy.rest is None else copy.rest.cpu()
        return _OnHost([float(mean[-1]) for mean in result.means], mean_of_rest(extras[-1].cpu()), before)

    def refresh_state(self) -> None:
        """Between averagings the optimizer's state is this rank's own; an averaging in flight is waited for."""
        self.take_over()
        self._use_sent(wait=True)

    def drain(self) -> None:
        """Does nothing: averagings end without the training thread, since the helper takes part in them."""

    def shutdown(self) -> None:
        """End the averaging in flight: no later step would use it. Until the engine ends, the helper averages."""
        self.refresh_state()

    def exit(self) -> None:
        """Leave the mode, which has ended right after an averaging."""
        self.take_over()

    # ---- averaging: the engine's side -------------------------------------------------------------------------

    def proxy_contribution(self, bucket: Bucket) -> torch.Tensor:
        """Return the helper's contribution for an inactive training thread: its steps since the last averaging.

        Nothing, of weight 0, while the program has other values in the parameters' place.
        """
        if self._by_helper is None:
            self._by_helper = self._all_parts()
        return self._by_helper[0][bucket.index]

    def _all_parts(self) -> tuple[list[torch.Tensor], list[tuple[str, torch.Tensor]]]:
        """Return the helper's contribution to parameters and state; together, as they need the same weight."""
        parts, state = [self._part(bucket) for bucket in self._engine.applier.buckets], self._state_part()
        # Asked behind the copies: the program may have begun to change them meanwhile.
        self._left_out = self._engine.replica.out_of_place
        if self._left_out:
            for part in (*parts, *(own for _, own in state)):
                part.zero_()
        return parts, state

    def _part(self, bucket: Bucket) -> torch.Tensor:
        """Return this rank's part of the average of a bucket's parameters."""
        part = bucket.new_average()
        if self._weight:
            with self._engine.replica.copying():
                for view, param in zip(bucket.split(part), bucket.params, strict=True):
                    view.copy_(param.detach())
                if self._copy is not None:
                    self._copy.params.append(part.clone())
                if (unused := self._unused()) is not None:
                    result, _, copy = unused
                    copy.fence.order(*copy.params)
                    part.add_(result.means[bucket.index]).sub_(copy.params[bucket.index])
            part.mul_(self._weight)
            set_weight(part, self._weight)
        return part

    def _unused(self) -> tuple[Result, list[torch.Tensor], _Copy] | None:
        """Return an averaging whose difference the inactive training thread has not added yet."""
        found = self._completed_by_helper
        return None if found is None or found[2] is None or found[2].void else (found[0], found[1], found[2])

    def extras(self) -> list[tuple[str, torch.Tensor]]:
        """See `Averaging`."""
        by_helper, self._by_helper = self._by_helper, None
        return self._state_part() if by_helper is None else by_helper[1]

    def _state_part(self) -> list[tuple[str, torch.Tensor]]:
        """Return the optimizer's state times this rank's weight: a tensor per bucket and key, and one for the rest."""
        found, state = [], self._engine.applier.optimizer.state
        with self._engine.replica.copying():
            for bucket in self._engine.applier.buckets:
                for key in shaped_keys(bucket, state):
                    own = torch.zeros(bucket.numel, dtype=bucket.average_dtype, device=bucket.flat.device)
                    for view, value in zip(bucket.split(own), shaped_values(bucket, state, key), strict=True):
                        if value is not None and self._weight:
                            view.copy_(value)
                    found.append((bucket.index, key, own))
            rest = gather_rest(self._engine.applier.buckets, state)
            if self._copy is not None:
                self._copy.state = [(index, key, own.clone()) for index, key, own in found]
                self._copy.rest = rest.clone()
            if self._weight:
                self._add_unused(found, rest)
            else:
                rest.zero_()
        named = [(f"m{index}.{key}", own.mul_(self._weight)) for index, key, own in found]
        return [*named, ("c", rest.mul_(self._weight))]

    def _add_unused(self, found: Sequence[tuple[int, str, torch.Tensor]], rest: torch.Tensor) -> None:
        """Add to the state the difference that the inactive training thread has not added yet."""
        if (unused := self._unused()) is None:
            return
        result, totals, copy = unused
        assert copy.rest is not None
        copy.fence.order(*(before for _, _, before in copy.state), copy.rest)
        for (index, key, own), (at, name, before), total in zip(found, copy.state, totals[:-1], strict=True):
            assert (index, key) == (at, name), "the optimizer's state has another form than before"
            own.add_(total / result.means[index][-1]).sub_(before)
        rest.add_(mean_of_rest(totals[-1])).sub_(copy.rest)  # The 1 behind the values stays.

    def ended_by_proxy(self, result: Result, extras: list[torch.Tensor]) -> None:
        """Keep an averaging that the helper completed."""
        result.fence = self._engine.streams.give(AVERAGED)
        self._completed_by_helper = (result, extras, self._copy)
        self._missed = self._missed + 1 if self._left_out else 0
        if not self._sent and not self._left_out:  # It consisted of what the training thread had done by then.
            self._weight = 0.0
        self._sent, self._copy = False, None

    def _write(
        self,
        ended: Ended,
        on_host: _OnHost,
        buckets: Sequence[Bucket] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """Write averages into the live parameters and state, or into those of a copy."""
        result, extras, copy = ended
        if (copy is not None and copy.void) or not all(on_host.weights):
            return  # It is of values that were replaced, or of no rank's.
        position, state = 0, (optimizer or self._engine.applier.optimizer).state
        chosen = buckets or self._engine.applier.buckets
        if copy is not None:
            _add_difference(result.means, extras, on_host.weights, copy, chosen, state)
        else:
            for bucket, mean, weight in zip(chosen, result.means, on_host.weights, strict=True):
                with torch.no_grad():
                    for view, param in zip(bucket.split(mean), bucket.params, strict=True):
                        param.copy_(view)
                for key in shaped_keys(bucket, state):
                    own = extras[position].div_(weight or 1.0)
                    position += 1
                    for view, value in zip(bucket.split(own), shaped_values(bucket, state, key), strict=True):
                        if value is not None:
                            value.copy_(view)
        put_rest(chosen, state, on_host.rest, on_host.rest_before)


@torch.no_grad()
def _add_difference(
    means: Sequence[torch.Tensor],
    extras: Sequence[torch.Tensor],
    weights: Sequence[float],
    copy: _Copy,
    buckets: Sequence[Bucket],
    state: State,
) -> None:
    """Add mean minus copy to a rank's present values, which keeps the steps it has made since the copy."""
    for bucket, mean, before in zip(buckets, means, copy.params, strict=True):
        for view, param in zip(bucket.split(mean.sub_(before)), bucket.params, strict=True):
            param.add_(view)
    for (index, key, before), total in zip(copy.state, extras[:-1], strict=True):
        bucket, mean = buckets[index], total.div_(weights[index] or 1.0)
        values = shaped_values(bucket, state, key)
        for own, view, value in zip(bucket.split(before), bucket.split(mean), values, strict=True):
            if value is not None:
                move_to_mean(value, own, view)
