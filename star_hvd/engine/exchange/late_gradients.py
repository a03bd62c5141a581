"""Gradients that missed their step, kept until the next submission of their bucket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from scheduler.records import Plan
from scheduler.rules.weights import damping
from star_hvd.engine.buckets import Bucket, set_weight
from star_hvd.engine.device import KEPT, Fence, Streams
from star_hvd.engine.records import Counters

__all__ = ["LateGradients", "damping_factor"]


def damping_factor(plan: Plan, staleness: int) -> float:
    """Weight of a late gradient: 1 / (1 + staleness) (DynSGD, Jiang et al., SIGMOD'17), or 1; 0 past the bound."""
    if staleness > plan.max_staleness:
        return 0.0
    return damping(plan, staleness, plan.world_size)


@dataclass(slots=True)
class KeptGradient:
    flat: torch.Tensor  # w * g, then w.
    computed_on: int  # Step of the oldest parameters this gradient was computed on.
    weight: float  # w, known without reading it from the device.
    fence: Fence  # Behind the work that wrote `flat`.


class LateGradients:
    """Keeps at most one gradient per bucket; a second is added to it, and the sum counts as old as the older one.

    Args:
        buckets: The optimizer's buckets.
        counters: Where folds, drops and weights are counted.
        streams: Makes the fences; a gradient is often folded by another thread than the one that kept it.

    Attributes:
        kept: The gradients that wait for their fold, by index of the bucket.
    """

    def __init__(self, buckets: Sequence[Bucket], counters: Counters, streams: Streams | None = None) -> None:
        self._buckets = buckets
        self._streams = streams or Streams(buckets)
        self._counters = counters
        self.kept: dict[int, KeptGradient] = {}

    @property
    def pending_weight(self) -> float:
        """Weight of the kept gradients, averaged over the buckets."""
        return sum(kept.weight for kept in self.kept.values()) / max(1, len(self._buckets))

    def buckets_added(self, before: int) -> None:
        """Count kept gradients as produced in the share of the parameters that their buckets now are.

        Args:
            before: Number of buckets before.
        """
        weight = sum(kept.weight for kept in self.kept.values())
        self._counters.produced_weight -= weight / max(1, before) - self.pending_weight

    def keep(self, bucket: Bucket, weight: float, computed_on: int) -> None:
        """Keep the gradient in `bucket.flat`, computed on the parameters of step `computed_on`."""
        flat = bucket.flat.clone()
        if weight != 1.0:
            flat[:-1].mul_(weight)
        set_weight(flat, weight)
        self.keep_whole(bucket, flat, computed_on, weight)

    def keep_whole(self, bucket: Bucket, flat: torch.Tensor, computed_on: int, weight: float) -> None:
        """Keep `flat` (gradients times weight, then the weight), which belongs to this object from now on.

        The calling thread has created it, or has ordered itself behind the thread that did.
        """
        older = self.kept.get(bucket.index)
        if older is None:
            self.kept[bucket.index] = KeptGradient(flat, computed_on, weight, self._streams.give_one(KEPT, flat))
        else:
            older.fence.order(older.flat)
            older.flat.add_(flat)
            older.computed_on, older.weight = min(older.computed_on, computed_on), older.weight + weight
            older.fence = self._streams.give_one(KEPT, older.flat)

    def drop_all(self) -> None:
        """Drop all kept gradients, and count them."""
        if self.kept:
            self._counters.dropped_weight += self.pending_weight
            self._counters.drops += 1
            self.kept.clear()

    def fold(self, bucket: Bucket, flat: torch.Tensor, step: int, plan: Plan, *, count: bool = True) -> float:
        """Add the gradient kept for a bucket to `flat`, damped by its staleness in step `step`.

        Args:
            bucket: The bucket.
            flat: The buffer it is added to.
            step: The step.
            plan: The plan in force.
            count: Whether to count it as applied, because `flat` is certain to be in a step.

        Returns:
            The weight it adds, 0 if nothing was folded; a gradient past the staleness bound is dropped and counted
            instead.
        """
        kept = self.kept.pop(bucket.index, None)
        if kept is None:
            return 0.0
        staleness = step - kept.computed_on
        factor = damping_factor(plan, staleness)
        weight = kept.weight / len(self._buckets)
        last = bucket.index == len(self._buckets) - 1
        if factor == 0.0:
            self._counters.dropped_weight += weight
            self._counters.drops += last
            return 0.0
        kept.fence.order(kept.flat)
        flat.add_(kept.flat, alpha=factor)
        self._counters.applied_weight += weight * factor if count else 0.0
        self._counters.damped_weight += weight * (1.0 - factor)
        self._counters.folds += last
        self._counters.max_staleness = max(self._counters.max_staleness, staleness)
        return kept.weight * factor
