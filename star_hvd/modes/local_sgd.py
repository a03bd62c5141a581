"""`local(H)`: every rank steps on its own; after H steps, or H seconds, parameters and optimizer state are averaged.

The average is weighted by the samples behind each rank's steps since the last one, so a rank that made fewer counts
for less. Momentum and Adam's moments are averaged with the same weights: linear in the gradients as they are, their
average is the moment of the average trajectory, and all replicas go on bit-equal (after post-local SGD, Lin et al.
2020; the time-based form is what users built by hand to escape stragglers, RETURNN #318).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from scheduler.records import Plan
from star_hvd.engine.buckets import Bucket
from star_hvd.engine.device import AVERAGED
from star_hvd.engine.records import Result
from star_hvd.engine.step_engine import StepEngine

__all__ = ["LocalSteps"]


_LEAST_WEIGHT = 1e-3  # Of a rank that made no step since the last averaging; if none did, the mean is what all have.


class LocalSteps:
    """Local steps of one rank and their averaging through the engine.

    Args:
        engine: The rank's engine; one averaging is one of its steps.
        wait: Waits for the handles of the step this rank owns.
    """

    def __init__(self, engine: StepEngine, wait: Callable[[], None]) -> None:
        self.plan: Plan = engine.plan
        self._engine = engine
        self._wait = wait
        self._weight = 0.0
        self._steps = 0
        self._began_s = time.monotonic()
        self._stood_in: tuple[Result, list[torch.Tensor]] | None = None

    def begin(self) -> LocalSteps:
        """The training thread enters the mode, at the parameters all ranks have."""
        self.plan, self._weight, self._steps, self._began_s = self._engine.plan, 0.0, 0, time.monotonic()
        return self

    @property
    def over(self) -> bool:
        """Whether the plan in force is no longer one of local steps; plans change at averagings only."""
        return self._engine.plan.mode != "local"

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
        if self._due():
            self.average()
        return value

    def _fold(self, bucket: Bucket, weight: float) -> float:
        """A gradient from before this mode joins this rank's next one: mean over both weights. Returns their sum."""
        flat = self._weighted(bucket, weight)
        self._engine.fold_late(bucket, flat)
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
        engine = self._engine
        weight = engine.weight
        engine.weight = self._weight = max(self._weight, _LEAST_WEIGHT)
        for bucket in engine.applier.buckets:
            engine.submit_average(bucket, self._part(bucket))
        engine.arrive_average()
        self._wait()
        extras = engine.own_extras()
        result = engine.finish_own()
        weights = self._weights(result)
        engine.apply_own(result, lambda row: self._write(result, extras, weights))
        engine.averaged()
        engine.weight = weight
        self._weight, self._steps, self._began_s = 0.0, 0, time.monotonic()

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
        if self._use(self._write_live):
            self._steps, self._began_s = 0, time.monotonic()
        self._engine.replica.catch_up()  # The helper may have put it onto a shadow, with later steps behind it.

    def _write_live(self, result: Result, extras: list[torch.Tensor], weights: list[float]) -> None:
        with self._engine.replica.writing():
            self._write(result, extras, weights)

    def absorb(self) -> bool:
        """Put such an averaging onto a shadow, in the helper's thread, so that later steps can be replayed on it."""

        def shadow(result: Result, extras: list[torch.Tensor], weights: list[float]) -> None:
            self._engine.replica.shadow_with(lambda *copied: self._write(result, extras, weights, *copied))

        return self._use(shadow)

    @property
    def waiting(self) -> bool:
        """Whether an averaging has ended whose result is not written yet."""
        return self._stood_in is not None

    def _use(self, use: Callable[[Result, list[torch.Tensor], list[float]], None]) -> bool:
        engine = self._engine
        while (found := self._stood_in) is not None:
            found[0].fence.order(*found[0].means, *found[1])
            weights = self._weights(found[0])
            with engine.replica.apply_lock:
                with engine.lock:
                    if self._stood_in is not found:
                        continue  # Used by the other thread meanwhile, or replaced by a later averaging.
                    self._stood_in = None
                use(*found, weights)
                with engine.lock:
                    engine.replica.average_used(found[0].step + 1)
                return True
        return False

    def _weights(self, result: Result) -> list[float]:
        """The weights behind an averaging, one per bucket: the host waits for the device, so hold no lock."""
        self._engine.streams.await_host()
        return [float(mean[-1]) for mean in result.means]

    def refresh_state(self) -> None:
        """The optimizer's state is this rank's own between two averagings."""

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
                    view.copy_(param.detach()).mul_(self._weight)
            part[-1] = self._weight
        return part

    def extras(self) -> list[tuple[str, torch.Tensor]]:
        """The optimizer's float state times this rank's weight, one tensor per bucket and kind of state."""
        found = []
        with self._engine.replica.copying():
            for bucket in self._engine.applier.buckets:
                for key in self._keys(bucket, self._engine.applier.optimizer.state):
                    own = torch.zeros(bucket.numel, dtype=bucket.average_dtype, device=bucket.flat.device)
                    for view, param in zip(bucket.split(own), bucket.params, strict=True):
                        value = self._engine.applier.optimizer.state.get(param, {}).get(key)
                        if value is not None and self._weight:
                            view.copy_(value).mul_(self._weight)
                    found.append((f"m{bucket.index}.{key}", own))
        return found

    def ended_by_proxy(self, result: Result, extras: list[torch.Tensor]) -> None:
        """Keep an averaging that the helper completed."""
        result.fence = self._engine.streams.give(AVERAGED)
        self._stood_in = (result, extras)
        self._weight = 0.0

    def _keys(self, bucket: Bucket, state: Mapping[Any, Mapping[str, Any]]) -> list[str]:
        """State that has the parameters' shape. It is the same on all ranks once all have stepped."""
        return sorted(
            {
                key
                for param in bucket.params
                for key, value in state.get(param, {}).items()
                if isinstance(value, torch.Tensor) and value.shape == param.shape and value.is_floating_point()
                and value.dim() > 0
            }
        )

    def _write(
        self,
        result: Result,
        extras: list[torch.Tensor],
        weights: list[float],
        buckets: Sequence[Bucket] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """Write averages into the live parameters and state, or into those of a copy."""
        position, state = 0, (optimizer or self._engine.applier.optimizer).state
        chosen = buckets or self._engine.applier.buckets
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
