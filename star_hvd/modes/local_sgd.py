"""`local(H)`: every rank steps on its own; after H steps, or H seconds, parameters and optimizer state are averaged.

The average is weighted by the samples behind each rank's steps since the last one, so a rank that made fewer counts
for less. Momentum and Adam's moments are averaged with the same weights: linear in the gradients as they are, their
average is the moment of the average trajectory, and all replicas go on bit-equal (after post-local SGD, Lin et al.
2020; the time-based form is what users built by hand to escape stragglers, RETURNN #318).

In the background (`Plan.transmission`, `Config.background`) an averaging does not hold up the training thread: it
sends a copy of what it has, steps on, and at the end of the first step by which the mean is there adds the difference
of mean and copy, to parameters and optimizer state alike (Streaming DiLoCo, Douillard et al. 2025). It waits where the
next averaging is due, where ranks meet, for a checkpoint, and where its header asks for another plan: a mode is left
at equal replicas.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from scheduler.records import Plan
from star_hvd.engine.buckets import Bucket
from star_hvd.engine.device import AVERAGED, DONE, PARAMS, Fence
from star_hvd.engine.records import Result
from star_hvd.engine.step_engine import StepEngine

__all__ = ["LocalSteps"]


_LEAST_WEIGHT = 1e-3  # Of a rank that made no step since the last averaging; if none did, the mean is what all have.


@dataclass(slots=True)
class _Copy:
    """What this rank had when it sent its part of an averaging: parameters per bucket, and kinds of state."""

    params: list[torch.Tensor] = field(default_factory=list)
    state: list[tuple[int, str, torch.Tensor]] = field(default_factory=list)  # Index of the bucket, key, values.
    fence: Fence = DONE


Ended = tuple[Result, list[torch.Tensor], _Copy | None]


class LocalSteps:
    """Local steps of one rank and their averaging through the engine.

    Args:
        engine: The rank's engine; one averaging is one of its steps.
        wait: Waits for the handles of the step this rank owns.
        background: Whether the training thread computes on while an averaging is under way, where the plan does not
            say.
    """

    def __init__(self, engine: StepEngine, wait: Callable[[], None], *, background: bool | None = None) -> None:
        self.plan: Plan = engine.plan
        self._engine = engine
        self._wait = wait
        self._background = background
        self._sent = False  # An averaging is under way to which the training thread has sent its part.
        self._copy: _Copy | None = None  # What it had then, where it computes on.
        self._weight = 0.0
        self._steps = 0
        self._began_s = time.monotonic()
        self._stood_in: Ended | None = None  # An averaging that the helper has completed.

    def begin(self) -> LocalSteps:
        """The training thread enters the mode, at the parameters all ranks have."""
        self.plan, self._weight, self._steps, self._began_s = self._engine.plan, 0.0, 0, time.monotonic()
        return self

    @property
    def over(self) -> bool:
        """Whether the plan in force is no longer one of local steps; plans change at averagings only."""
        return self._engine.plan.mode != "local"

    @property
    def just_averaged(self) -> bool:
        """Whether this rank has made no step since it sent its part of an averaging."""
        return self._steps == 0

    def set_inactive(self, inactive: bool) -> None:
        """The helper takes part in averagings meanwhile."""

    def confirm_inactive(self) -> None:
        """The engine knows that this rank is inactive."""

    def wake(self) -> None:
        """Nothing waits here that others could end."""

    # ---- training thread ------------------------------------------------------------------------------------

    def give(self, bucket: Bucket) -> None:
        """A gradient is whole."""
        self._engine.outside_gradient(bucket.index)

    def step(self, *, skip: bool) -> Any:
        """One step on this rank's own gradient, and the averaging when it is due.

        If a rank is late: the others wait for it at the averaging, not before.
        """
        engine, weight = self._engine, self._engine.weight
        engine.own_steps += 1
        if self.over:  # The mode ended while this rank was elsewhere.
            flats = [self._weighted(bucket, weight).clone() for bucket in engine.applier.buckets]
            engine.keep_late(flats, engine.step)
            return None
        self.take_over()
        for bucket in engine.applier.buckets:
            engine.counters.applied_weight += self._fold(bucket, weight) / len(engine.applier.buckets)
        with engine.replica.writing():
            value = None if skip else engine.applier.step(None)
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
        """A gradient from before this mode joins this rank's next one: mean over both weights. Returns their sum."""
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
        flat[-1] = weight
        if weight != 1.0:
            flat[:-1].mul_(weight)
        return flat

    def _due(self) -> bool:
        plan = self._engine.plan
        if plan.local_steps:
            return self._steps >= plan.local_steps
        return time.monotonic() - self._began_s >= plan.local_s

    def average(self) -> None:
        """Average with all ranks now; waits for them."""
        self._use_sent(wait=True)
        self._send(copy=False)
        self._use_sent(wait=True)

    def _send(self, *, copy: bool) -> None:
        """Submit this rank's part of an averaging. What it does from here on counts for the next one."""
        engine = self._engine
        weight = engine.weight
        engine.weight = self._weight = max(self._weight, _LEAST_WEIGHT)
        self._copy = _Copy() if copy else None
        for bucket in engine.applier.buckets:
            engine.submit_average(bucket, self._part(bucket))
        engine.arrive_average()
        if self._copy is not None:
            self._copy.fence = engine.streams.give(PARAMS)
        engine.weight = weight
        self._sent, self._weight, self._steps, self._began_s = True, 0.0, 0, time.monotonic()

    def _use_sent(self, *, wait: bool) -> None:
        """Use the averaging under way once it has ended; where the helper completes it, `take_over` does.

        Args:
            wait: Wait for its end.
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
        weights = self._weights(result)
        # Where this rank has made no step since, it takes the mean as it is: the same bits on all such ranks.
        ended = (result, extras, self._copy if self._steps else None)
        self._sent, self._copy = False, None
        if not self._steps:
            self._began_s = time.monotonic()
        engine.apply_own(result, lambda row: self._write(ended, weights))
        engine.averaged()

    def catch_up(self) -> None:
        """Average where all ranks meet: they leave an epoch, or an optimizer, with equal parameters."""
        self.take_over()
        if not self.over:
            self.average()

    def take_over(self) -> None:
        """Use an averaging that ended without the training thread, which calls this; one under way ends first."""
        engine = self._engine
        with engine.lock:  # The helper has a deadline, and fails the engine past it.
            while engine.helper_averages() and engine.failure is None:
                engine.lock.wait(1.0)
        found = self._stood_in
        if self._use(self._write_live) and found is not None and found[2] is None:
            self._steps, self._began_s = 0, time.monotonic()
        self._engine.replica.catch_up()  # The helper may have put it onto a shadow, with later steps behind it.

    def _write_live(self, ended: Ended, weights: list[float]) -> None:
        with self._engine.replica.writing():
            self._write(ended, weights)

    def absorb(self) -> bool:
        """Put such an averaging onto a shadow, in the helper's thread, so that later steps can be replayed on it."""

        def shadow(ended: Ended, weights: list[float]) -> None:
            self._engine.replica.shadow_with(lambda *copied: self._write(ended, weights, *copied))

        return self.absorbable and self._use(shadow)

    @property
    def absorbable(self) -> bool:
        """Whether there is one that replaces what this rank has. Another is part of the helper's next contribution."""
        found = self._stood_in
        return found is not None and found[2] is None

    @property
    def waiting(self) -> bool:
        """Whether an averaging has ended whose result is not written yet."""
        return self._stood_in is not None

    def _use(self, use: Callable[[Ended, list[float]], None]) -> bool:
        engine = self._engine
        while (found := self._stood_in) is not None:
            found[0].fence.order(*found[0].means, *found[1])
            weights = self._weights(found[0])
            with engine.replica.apply_lock:
                with engine.lock:
                    if self._stood_in is not found:
                        continue  # Used by the other thread meanwhile, or replaced by a later averaging.
                    self._stood_in = None
                use(found, weights)
                with engine.lock:
                    engine.replica.average_used(found[0].step + 1)
                return True
        return False

    def _weights(self, result: Result) -> list[float]:
        """The weights behind an averaging, one per bucket: the host waits for the device, so hold no lock."""
        self._engine.streams.await_host()
        return [float(mean[-1]) for mean in result.means]

    def refresh_state(self) -> None:
        """The optimizer's state is this rank's own between two averagings; one under way ends first."""
        self.take_over()
        self._use_sent(wait=True)

    def drain(self) -> None:
        """Averagings end without the training thread: the helper takes part in them."""

    def shutdown(self) -> None:
        """The helper averages for a rank that is inactive, until its engine ends."""

    def exit(self) -> None:
        """The mode has ended, right after an averaging."""
        self.take_over()

    # ---- averaging: the engine's side -------------------------------------------------------------------------

    def proxy_contribution(self, bucket: Bucket) -> torch.Tensor:
        """What the helper contributes for a training thread that is inactive: its steps since the last averaging."""
        return self._part(bucket)

    def _part(self, bucket: Bucket) -> torch.Tensor:
        """This rank's part of the average of a bucket's parameters."""
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
            part[-1] = self._weight
        return part

    def _unused(self) -> tuple[Result, list[torch.Tensor], _Copy] | None:
        """An averaging whose difference the training thread, which is inactive, has not added yet."""
        found = self._stood_in
        return None if found is None or found[2] is None else (found[0], found[1], found[2])

    def extras(self) -> list[tuple[str, torch.Tensor]]:
        """The optimizer's float state times this rank's weight, one tensor per bucket and kind of state."""
        found, state = [], self._engine.applier.optimizer.state
        with self._engine.replica.copying():
            for bucket in self._engine.applier.buckets:
                for key in self._keys(bucket, state):
                    own = torch.zeros(bucket.numel, dtype=bucket.average_dtype, device=bucket.flat.device)
                    for view, param in zip(bucket.split(own), bucket.params, strict=True):
                        value = state.get(param, {}).get(key)
                        if value is not None and self._weight:
                            view.copy_(value)
                    found.append((bucket.index, key, own))
            if self._copy is not None:
                self._copy.state = [(index, key, own.clone()) for index, key, own in found]
            if self._weight and (unused := self._unused()) is not None:
                result, totals, copy = unused
                copy.fence.order(*(before for _, _, before in copy.state))
                for (index, key, own), (at, name, before), total in zip(found, copy.state, totals, strict=True):
                    assert (index, key) == (at, name), "the optimizer's state has another form than before"
                    own.add_(total / result.means[index][-1]).sub_(before)
        return [(f"m{index}.{key}", own.mul_(self._weight)) for index, key, own in found]

    def ended_by_proxy(self, result: Result, extras: list[torch.Tensor]) -> None:
        """Keep an averaging that the helper completed."""
        result.fence = self._engine.streams.give(AVERAGED)
        self._stood_in = (result, extras, self._copy)
        if not self._sent:  # It was made of what the training thread had done by then.
            self._weight = 0.0
        self._sent, self._copy = False, None

    def _keys(self, bucket: Bucket, state: Mapping[Any, Mapping[str, Any]]) -> list[str]:
        """State that has the parameters' shape. It is the same on all ranks once all have stepped."""
        return sorted(
            {
                key
                for param in bucket.params
                for key, value in state.get(param, {}).items()
                if isinstance(value, torch.Tensor)
                and value.shape == param.shape
                and value.is_floating_point()
                and value.dim() > 0
            }
        )

    def _write(
        self,
        ended: Ended,
        weights: list[float],
        buckets: Sequence[Bucket] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """Write averages into the live parameters and state, or into those of a copy."""
        result, extras, copy = ended
        position, state = 0, (optimizer or self._engine.applier.optimizer).state
        chosen = buckets or self._engine.applier.buckets
        if copy is not None:
            _add_difference(result.means, extras, weights, copy, chosen, state)
            return
        for bucket, mean, weight in zip(chosen, result.means, weights, strict=True):
            with torch.no_grad():
                for view, param in zip(bucket.split(mean), bucket.params, strict=True):
                    param.copy_(view)
            for key in self._keys(bucket, state):
                own = extras[position].div_(weight or 1.0)
                position += 1
                for view, param in zip(bucket.split(own), bucket.params, strict=True):
                    if key in state.get(param, {}):
                        state[param][key].copy_(view)


@torch.no_grad()
def _add_difference(
    means: Sequence[torch.Tensor],
    extras: Sequence[torch.Tensor],
    weights: Sequence[float],
    copy: _Copy,
    buckets: Sequence[Bucket],
    state: Mapping[Any, Mapping[str, Any]],
) -> None:
    """Add mean minus copy to what a rank has by now: steps it has made since the copy stay in it."""
    for bucket, mean, before in zip(buckets, means, copy.params, strict=True):
        for view, param in zip(bucket.split(mean.sub_(before)), bucket.params, strict=True):
            param.add_(view)
    for (index, key, before), total in zip(copy.state, extras, strict=True):
        bucket, mean = buckets[index], total.div_(weights[index] or 1.0)
        for own, view, param in zip(bucket.split(before), bucket.split(mean), bucket.params, strict=True):
            if key in state.get(param, {}):
                _move(state[param][key], own, view)


def _move(value: torch.Tensor, before: torch.Tensor, mean: torch.Tensor) -> None:
    """Add `mean - before` to `value`. What is never negative, a second moment, stays above zero.

    Such a moment shrinks by itself, so that the difference of two older values can exceed what is left of it. It stays
    at least as large as the smaller of own value and mean.
    """
    moved = value + (mean - before)
    never_negative = (before.amin() >= 0) & (mean.amin() >= 0) & (value.amin() >= 0)
    value.copy_(torch.where(never_negative, torch.maximum(moved, torch.minimum(value, mean.to(moved.dtype))), moved))
