"""Step times in blocks: what a way to communicate costs, where ways take turns."""

from __future__ import annotations

import statistics

__all__ = ["Blocks"]

_SKIPPED_STEPS = 3  # Of a block: its first steps overlap with the last ones of the block before.


class Blocks:
    """Blocks of steps, one after the other.

    Args:
        warm: Steps before the first block.
        steps: Of a block, more than three.
    """

    def __init__(self, warm: int, steps: int) -> None:
        self._warm, self._steps = warm, steps
        self._times_s: list[float] = []

    def note(self, step_s: float) -> float | None:
        """One more step took this long. The typical step of the block that ends with it, None where none does."""
        if self._warm:
            self._warm -= 1
            return None
        self._times_s.append(step_s)
        if len(self._times_s) < self._steps:
            return None
        typical_s, self._times_s = statistics.median(self._times_s[_SKIPPED_STEPS:]), []
        return typical_s
