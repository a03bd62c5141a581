"""Trials of a way to communicate: alternating blocks of steps without and with it show whether it pays.

All ranks record the same step times (they travel with the gradients), so all decide alike after the same step.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from scheduler.transmission.blocks import Blocks

__all__ = ["OffSwitch", "lower_bound"]

_WARM_STEPS = 8
_BLOCK_STEPS = 16
_LEAST_GAIN = 0.03
_LEAST_PAIRS, _MOST_PAIRS = 3, 8
# One-sided 90 % quantiles of Student's t distribution, by the number of values.
_T90 = {2: 3.078, 3: 1.886, 4: 1.638, 5: 1.533, 6: 1.476, 7: 1.440, 8: 1.415}


def lower_bound(gains: Sequence[float]) -> float:
    """Lower 90 % bound of the mean of 2 to 8 gains."""
    error: float = statistics.stdev(gains) / len(gains) ** 0.5
    return statistics.mean(gains) - _T90[len(gains)] * error


class OffSwitch:
    """Tries an option, then keeps it on or off permanently.

    It is kept only if the lower 90 % bound of the gain is above 0 and its median above 3 %, and given up if the upper
    90 % bound is below 3 %, or after 8 pairs of blocks.

    Attributes:
        on: Whether the next step uses the option.
        decided: Whether the trial is over.
        gains: Fraction of the step time saved, for every pair of blocks.
    """

    def __init__(self) -> None:
        self.on, self.decided = False, False
        self.gains: list[float] = []
        self._steps = Blocks(_WARM_STEPS, _BLOCK_STEPS)
        self._without_s = 0.0

    def note(self, step_s: float) -> bool:
        """Record the time of a step. Return whether the trial ends with it."""
        if self.decided:
            return False
        typical_s = self._steps.note(step_s)
        if typical_s is None:
            return False
        if not self.on:
            self._without_s, self.on = typical_s, True
            return False
        self.gains.append(1.0 - typical_s / self._without_s if self._without_s > 0.0 else 0.0)
        self.on = False
        self._decide()
        return self.decided

    def _decide(self) -> None:
        if len(self.gains) < _LEAST_PAIRS:
            return
        lower = lower_bound(self.gains)
        upper = 2.0 * statistics.mean(self.gains) - lower
        if lower > 0.0 and statistics.median(self.gains) > _LEAST_GAIN:
            self.on = self.decided = True
        elif upper < _LEAST_GAIN or len(self.gains) >= _MOST_PAIRS:
            self.decided = True

    def describe(self, name: str) -> str:
        """The result of the trial, as a sentence."""
        if not self.decided:
            return f"{name} is being tried: {len(self.gains)} pairs of blocks of {_BLOCK_STEPS} steps so far"
        median = statistics.median(self.gains)
        return (
            f"{name} is {'kept' if self.on else 'off'}: it saved {100.0 * median:.1f} % of a step "
            f"(median of {len(self.gains)} pairs of blocks of {_BLOCK_STEPS} steps, lower 90 % bound "
            f"{100.0 * lower_bound(self.gains):.1f} %)"
        )
