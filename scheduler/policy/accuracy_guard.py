"""The guard of accuracy: return to `sync` when the loss or the noise scale show that a relaxed mode does harm.

Three alarms, all about the active plan and its own losses:

* divergence: the loss is not finite, or far above its level;
* the smoothed loss rises: the mean of the last losses exceeds the level before them by 5 standard errors and by 10 %.
  The level is not extrapolated: losses fall ever more slowly, so a line would report every flattening as a rise. Noise
  is estimated from differences of consecutive losses, which a trend does not affect;
* the noise scale has grown fourfold since the plan became active, and its updates are more than 2.5 times as noisy as
  those of `sync`: (1 + phi / m) / (1 + phi / n) (McCandlish et al. 2018). The cost model accounts for smaller growth.

An alarm excludes relaxed modes for a number of steps that doubles with each further alarm.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

from scheduler.cost.progress import iterations
from scheduler.plan.plan import Plan
from scheduler.records import Window

__all__ = ["AccuracyGuard", "loss_alarm", "relative_gradient_noise"]

_RECENT, _BASE, _LEAST_BASE = 24, 96, 32
"""Number of losses tested, number before them that form the level, and the fewest that can form one."""

_ERRORS, _RISE = 5.0, 0.1
_DIVERGED, _SUDDEN = 3.0, 6
"""Multiple of the level that counts as divergence, and the number of losses averaged to detect it."""

_NOISE_GROWTH, _LOUD = 4.0, 2.5

_HOLD_STEPS, _MOST_DOUBLINGS = 200, 5
_FORGIVEN = 32  # Every this many first holds without an alarm reduce the count of alarms by one.


def loss_alarm(losses: Sequence[float], before: int) -> str:
    """Describe the alarm that the losses under the active plan raise; empty if none.

    Args:
        losses: Losses, oldest first.
        before: How many of them precede the plan: they may form the level, but not the rise.
    """
    own = losses[before:]
    if any(not math.isfinite(loss) for loss in own[-_SUDDEN:]):
        return "the loss is not finite"
    finite = [loss for loss in losses if math.isfinite(loss)]
    if len(own) >= _SUDDEN and len(finite) >= _LEAST_BASE + _SUDDEN:
        now, level, _ = _compare(finite, _SUDDEN)
        if level > 0.0 and now > _DIVERGED * level:
            return f"the loss diverges, {now:.3g} after {level:.3g}"
    if len(own) < _RECENT or len(finite) < _LEAST_BASE + _RECENT:
        return ""
    now, level, error = _compare(finite, _RECENT)
    if now - level > max(_ERRORS * error, _RISE * abs(level)):
        return f"the loss rises against its trend, {now:.3g} after {level:.3g}"
    return ""


def _compare(losses: Sequence[float], recent: int) -> tuple[float, float, float]:
    """Mean of the recent losses, the level before them, and the standard error of their difference."""
    now = losses[-recent:]
    base = losses[max(0, len(losses) - recent - _BASE) : -recent]
    late = base[len(base) // 2 :]
    # Under servers a loss is a mean of pushes, of which fast ranks make more than slow ones: the larger noise counts.
    spread = max(_spread(base), _spread(now) if len(now) >= _RECENT else 0.0)
    error = spread * math.sqrt(1.0 / len(now) + 1.0 / len(late))
    return statistics.fmean(now), statistics.fmean(late), error


def _spread(losses: Sequence[float]) -> float:
    """Standard deviation of the noise, from differences of consecutive losses."""
    jumps = [after - before for before, after in itertools.pairwise(losses)]
    middle = statistics.median(jumps)
    return 1.4826 * statistics.median(abs(jump - middle) for jump in jumps) / math.sqrt(2.0)


def relative_gradient_noise(plan: Plan, noise: float) -> float:
    """Noise of an update of the plan relative to that of `sync`, without late gradients; 1 if equal.

    Args:
        plan: The plan.
        noise: phi, in gradients of one rank.
    """
    gradients, n = float(plan.quorum), float(plan.world_size)
    if plan.mode in ("ps", "grouped"):
        gradients = n / plan.updates_per_step  # Where a group makes an update, the quorum says nothing of its size.
    ratio = float(iterations(noise, gradients)) / float(iterations(noise, n))
    # An update of x of n gradients is x / n as long.
    return ratio * gradients / n if plan.mode in ("ps", "grouped") and plan.lr_rule == "linear" else ratio


class AccuracyGuard:
    """Monitors a job's losses and noise scale window by window.

    Args:
        hold_steps: Steps without relaxed modes after the first alarm.

    Attributes:
        alarms: Number of alarms, reduced over long periods without one.
        reason: Text of the last alarm.
        until_step: First step at which relaxed modes are allowed again.
    """

    def __init__(self, hold_steps: int = _HOLD_STEPS) -> None:
        if hold_steps < 1:
            raise ValueError(f"hold_steps is {hold_steps}; expected at least 1")
        self.alarms = 0
        self.reason = ""
        self.until_step = -1
        self._hold_steps = hold_steps
        self._plan_id: int | None = None
        self._since_step = 0
        self._noise = math.nan

    def check(self, window: Window, active: Plan) -> str:
        """Return why the active plan must be replaced by `sync`; empty if it need not.

        Raises:
            ValueError: The window has different numbers of losses and of their steps.
        """
        if len(window.losses) != len(window.loss_steps):
            raise ValueError(
                f"the window has {len(window.losses)} losses at {len(window.loss_steps)} steps; expected as many"
            )
        if active.mode == "sync":
            self._plan_id = None
            return ""
        if self.holds(window.step):
            return self.reason
        if self._plan_id != active.plan_id:
            self._plan_id, self._since_step, self._noise = active.plan_id, window.step, window.noise_scale
        elif not math.isfinite(self._noise):
            self._noise = window.noise_scale
        before = sum(step <= self._since_step for step in window.loss_steps)
        return self._alarm(window.step, loss_alarm(window.losses, before) or self._noise_alarm(window, active))

    def holds(self, step: int) -> bool:
        """Whether relaxed modes are still excluded."""
        return step < self.until_step

    def _noise_alarm(self, window: Window, active: Plan) -> str:
        noise = window.noise_scale
        if not (math.isfinite(noise) and noise > _NOISE_GROWTH * self._noise):
            return ""
        loud = relative_gradient_noise(active, noise)
        if loud <= _LOUD:
            return ""
        return f"the noise scale has grown from {self._noise:.2g} to {noise:.2g}, updates are {loud:.1f}x as noisy"

    def _alarm(self, step: int, reason: str) -> str:
        if reason:
            calm_steps = step - self.until_step if self.alarms else 0
            self.alarms = max(0, self.alarms - calm_steps // (_FORGIVEN * self._hold_steps))
            self.until_step = step + self._hold_steps * 2 ** min(self.alarms, _MOST_DOUBLINGS)
            self.alarms += 1
            self.reason = reason
        return reason
