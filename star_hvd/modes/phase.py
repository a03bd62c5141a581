"""Tell whether a rank that missed a step is slow, or as fast as the others but out of phase, in mid-step.

Right after a step has closed, an out-of-phase rank can go on at once: the grace time covers the rest. Otherwise waiting
for the next close costs it less than one step, once; not waiting would cost it every step from now on.
"""

from __future__ import annotations

import time

__all__ = ["Phase"]


class Phase:
    """Written by the agent's thread, read by the training thread, which may once see a close half written.

    Args:
        grace_fraction: Least fraction of the usual compute time that the others wait for a rank.

    Attributes:
        typical_s: Compute time of a typical rank, as the coordinator knows it; 0 before it has closed a step.
    """

    def __init__(self, grace_fraction: float) -> None:
        self.typical_s = 0.0
        self._grace_fraction = grace_fraction
        self._last_close_s = 0.0

    def closed(self, typical_s: float) -> None:
        """Note that the coordinator closes a step."""
        self._last_close_s, self.typical_s = time.monotonic(), typical_s

    def is_out(self, compute_s: float) -> bool:
        """Whether a rank that computed for `compute_s` should wait for the next close."""
        if not self.typical_s or compute_s > 1.25 * self.typical_s:
            return False
        since_close_s = time.monotonic() - self._last_close_s
        return self._grace_fraction * self.typical_s < since_close_s < self.typical_s
