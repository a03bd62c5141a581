"""Step times in blocks: the cost of each way to communicate when several are tried in turn."""

from __future__ import annotations

import statistics

__all__ = ["Blocks"]

_SKIPPED_STEPS = 3  # First steps of a block that are ignored: they overlap with the previous block.


class Blocks:
    """Consecutive blocks of steps.

    Args:
        warm: Steps before the first block.
        steps: Steps of a block, more than three.
    """

    def __init__(self, warm: int, steps: int) -> None:
        self._warm, self._steps = warm, steps
        self._times_s: list[float] = []

    def note(self, step_s: float) -> float | None:
        """Record the time of a step. Return the block's median step time if the step ends a block, else None."""
        if self._warm:
            self._warm -= 1
            return None
        self._times_s.append(step_s)
        if len(self._times_s) < self._steps:
            return None
        typical_s, self._times_s = statistics.median(self._times_s[_SKIPPED_STEPS:]), []
        return typical_s
