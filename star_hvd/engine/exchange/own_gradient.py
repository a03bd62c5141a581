"""The gradient that this rank's training thread computes for a step, and what a header reports about it."""

from __future__ import annotations

import math

from star_hvd.engine.applier import Applier
from star_hvd.engine.buckets import Bucket, set_weight
from star_hvd.engine.device import Fence
from star_hvd.engine.exchange.means import LocalNorm
from star_hvd.engine.header import Contribution
from star_hvd.engine.records import Counters

__all__ = ["OwnGradient"]


class OwnGradient:
    """Changed under the engine's lock, except `weight`, `loss`, `interval_s` and `no_overlap`, which the training
    thread sets.

    Args:
        applier: Holds the buckets.
        counters: Where weights are counted.
        noise_interval_steps: Number of steps between measurements of the norm.

    Attributes:
        weight: Its weight in a mean over the ranks.
        loss: Its loss, NaN if unknown or reported already.
        interval_s: Time since the training thread arrived in the step before, NaN if unknown.
        no_overlap: Whether that step did not overlap with the program although that is wanted.
        steps: Steps the training thread has made, including one whose header is claimed before it arrives.
        norm: Its squared norm.
        deferred: By bucket, the fence of a device that has not completed it yet.
    """

    def __init__(self, applier: Applier, counters: Counters, noise_interval_steps: int) -> None:
        self.weight = 1.0
        self.loss = self.interval_s = math.nan
        self.no_overlap = False
        self.steps = 0
        self.norm = LocalNorm(applier.streams, noise_interval_steps)
        self.deferred: dict[int, Fence] = {}
        self._applier = applier
        self._counters = counters
        self._counted = False  # Whether the step still to be arrived at is in `steps`.

    def take_completed(self) -> list[int]:
        """Return the deferred buckets that their device has completed; the calling thread may work on them."""
        completed = [index for index, fence in self.deferred.items() if fence.done()]
        for index in completed:
            bucket = self._applier.buckets[index]
            self.deferred.pop(index).order(bucket.flat, bucket.wire)
        return completed

    def count_produced(self) -> None:
        """Count one complete bucket."""
        self._counters.produced_weight += self.weight / len(self._applier.buckets)

    def count_fresh(self, bucket: Bucket, step: int) -> None:
        """Count a bucket that becomes part of `step`, before it is submitted, and measure its norm if due."""
        self._counters.applied_weight += self.weight / len(self._applier.buckets)
        if self.norm.due(step):
            self.norm.add(bucket.flat)

    def weigh(self, bucket: Bucket, *, skip: bool = False) -> float:
        """Turn a bucket's buffer into what is sent outside a reduced step: the gradient times its weight, the weight.

        Args:
            bucket: The bucket.
            skip: Leave the gradient out, e.g. because it is infinite: zeros of weight 0; it counts as dropped.

        Returns:
            The weight, which a buffer of bfloat16 rounds to 8 bits.
        """
        weight = 0.0 if skip else self.weight
        if skip:
            bucket.flat.zero_()
            self._counters.dropped_weight += self.weight / len(self._applier.buckets)
            self._counters.drops += bucket.index == len(self._applier.buckets) - 1
        elif weight != 1.0:
            bucket.flat[:-1].mul_(weight)
        set_weight(bucket.flat, weight)
        return weight

    def count_step(self, *, early: bool = False) -> None:
        """Count a step, once; `early`: its header is claimed, and the training thread has still to arrive."""
        self.steps += not self._counted
        self._counted = early

    def report(self, item: Contribution, step: int, *, averaging: bool = False) -> None:
        """Write what the header of `step`, which leaves now, reports about it.

        Args:
            item: This rank's part of the header.
            step: The step.
            averaging: Whether it averages parameters (`local`) and contains no gradient, so that there is no norm.
        """
        item.weight, item.loss, item.interval_s = self.weight, self.loss, self.interval_s
        item.no_overlap = self.no_overlap
        item.local_sqr = self.weight * self.norm.sqr if self.norm.due(step) and not averaging else None
        self.loss = math.nan
