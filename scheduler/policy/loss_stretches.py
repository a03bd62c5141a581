"""Stretches of training under one plan, with their loss decrease, from which the price of staleness is learned."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scheduler.diagnosis.window_stats import Readings
from scheduler.plan.plan import Plan
from scheduler.records import Window
from scheduler.rules.local_walk import mean_steps

__all__ = ["LossStretches", "Stretch"]

_STEPS = 64
"""Steps under one plan before its loss is compared; over fewer, the noise of batches dominates."""

_SMOOTH = 16
"""Losses averaged at each end of a stretch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Training under one plan.

    Attributes:
        plan: The plan.
        updates: Updates from the middle of the first losses to the middle of the last.
        decrease: Decrease of the loss between these, negative if it rose.
        error: Its standard error by the noise of the losses.
        skipped: Losses between the previous stretch and this one, under plans that did not last: about as many as
            synchronous steps, since under servers one is recorded per as many gradients as ranks.
    """

    plan: Plan
    updates: float
    decrease: float
    error: float
    skipped: float


class LossStretches:
    """Cuts the recorded losses of a job into stretches."""

    def __init__(self) -> None:
        self._begun: tuple[int, Plan] | None = None
        self._skipped = 0

    def note(self, window: Window, active: Plan) -> Stretch | None:
        """Return a stretch that ends with this window, None if there is none.

        Without recorded losses there never is one. Under servers a loss is one of several updates, so that a stretch
        can have enough steps but not enough losses: then it goes on.

        Args:
            window: Recent reports and losses.
            active: The active plan.
        """
        if self._begun is None or self._begun[1].plan_id != active.plan_id:
            began = 0 if self._begun is None else self._begun[0]
            self._skipped += sum(step >= began for step in window.loss_steps)
            self._begun = (window.step, active)
            return None
        began, plan = self._begun
        inside = [
            (step, loss)
            for step, loss in zip(window.loss_steps, window.losses, strict=True)
            if step >= began and math.isfinite(loss)
        ]
        if window.step - began < _STEPS or len(inside) < 3 * _SMOOTH:
            return None
        skipped, self._skipped = self._skipped, 0
        self._begun = (window.step, active)
        first, last = inside[:_SMOOTH], inside[-_SMOOTH:]
        decrease = (sum(loss for _, loss in first) - sum(loss for _, loss in last)) / _SMOOTH
        # The decrease is one from the middle of the first losses to the middle of the last; the oldest are not kept.
        steps = (sum(step for step, _ in last) - sum(step for step, _ in first)) / _SMOOTH
        readings = Readings.of(window)
        usual_s = np.where(readings.counts, readings.total_s() / np.maximum(readings.counts, 1), readings.typical_s)
        each = mean_steps(plan, usual_s, counts_local=window.counts_local)
        error = _noise([loss for _, loss in inside]) * math.sqrt(2.0 / _SMOOTH)
        return Stretch(plan=plan, updates=steps * each, decrease=decrease, error=error, skipped=float(skipped))


def _noise(losses: Sequence[float]) -> float:
    """Standard deviation of the noise, from differences of consecutive losses: a trend hardly affects them."""
    return math.sqrt(statistics.fmean((after - before) ** 2 for before, after in itertools.pairwise(losses)) / 2.0)
