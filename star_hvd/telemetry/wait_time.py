"""Measures waits without the time in which this process was stopped, as all of a suspended job are.

A deadline shows that another process does not answer. While this one was stopped (SIGSTOP, a container or a batch job
that was suspended), none of them had to, and the clock went on: at the first look at it every wait would have ended.
"""

from __future__ import annotations

import math
import time

__all__ = ["WaitTime"]

_COUNTED_S = 1.0  # Most that an iteration adds: also on a busy machine, few threads wait for a core as long.
_SLICES = 2.0  # The same where iterations are long.


class WaitTime:
    """The time of one wait, which is a loop that calls `count` in each iteration.

    Args:
        slice_s: Longest wait of an iteration.

    Attributes:
        passed_s: Seconds since the start.
        silent_s: Seconds for which the other side had not been heard at the last `count`.
    """

    def __init__(self, slice_s: float = 0.0) -> None:
        self.passed_s, self.silent_s = 0.0, math.inf
        self._longest_s = max(_COUNTED_S, _SLICES * slice_s)
        self._counted_s = time.monotonic()

    def count(self, silent_s: float = math.inf) -> float:
        """Count the time since the last call, unless it is so long that this process was stopped; return `passed_s`.

        Args:
            silent_s: Seconds since the other side was last heard, by the clock.
        """
        return self._add(self._longest_s, silent_s)

    def count_work(self) -> float:
        """Count all of the time since the last call, in which the caller was not waiting; return `passed_s`."""
        return self._add(math.inf, math.inf)

    def _add(self, longest_s: float, silent_s: float) -> float:
        now_s = time.monotonic()
        added_s, self._counted_s = min(longest_s, now_s - self._counted_s), now_s
        self.passed_s += added_s
        self.silent_s = min(silent_s, self.silent_s + added_s)
        return self.passed_s
