"""The losses that an optimizer's user tells, of the recent steps."""

from __future__ import annotations

import math
from collections import deque

__all__ = ["Losses"]

_KEPT = 256


class Losses:
    """What was told, the last 256 of it.

    Attributes:
        values: The mean over the ranks, or one rank's own under servers; infinite where one was no number.
        steps: Their steps.
        usual: Mean of the finite ones, the later the more it weighs; NaN before the first.
    """

    def __init__(self) -> None:
        self.values: deque[float] = deque(maxlen=_KEPT)
        self.steps: deque[int] = deque(maxlen=_KEPT)
        self.usual = math.nan

    def note(self, step: int, loss: float) -> None:
        """Take in the loss of a step; NaN where the user told none."""
        if math.isnan(loss):
            return
        self.values.append(loss)
        self.steps.append(step)
        if math.isfinite(loss):
            self.usual = loss if math.isnan(self.usual) else 0.9 * self.usual + 0.1 * loss
