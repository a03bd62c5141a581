"""Measures waits without the time in which this process was stopped, as all of a suspended job are, and logs long ones.

A deadline shows that another process does not answer. While this one was stopped (SIGSTOP, a container or a batch job
that was suspended), none of them had to, and the clock went on: at the first look at it every wait would have ended.

A deadline of half an hour is silent for as long, so a wait says what it is for, on the rank that waits: after
`Config.stall_warning_s`, then each time after twice as long.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

__all__ = ["WaitTime", "warn_after"]

logger = logging.getLogger("star_hvd")

_COUNTED_S = 1.0  # Most that an iteration adds: also on a busy machine, few threads wait for a core as long.
_SLICES = 2.0  # The same where iterations are long.
_LASTS_S = 60.0  # First warning of a wait for programs, some of which evaluate on one rank.

_warnings = (math.inf, -1)  # When a wait is logged first, and this rank.


def warn_after(first_s: float = math.inf, rank: int = -1) -> None:
    """Have waits that begin from now on be logged; without arguments none are.

    Args:
        first_s: Length of a wait at its first warning.
        rank: This rank, for the log.
    """
    global _warnings
    _warnings = first_s, rank


class WaitTime:
    """The time of one wait, which is a loop that calls `count` in each iteration.

    Args:
        slice_s: Longest wait of an iteration.
        what: What is waited for, or a function that returns it, called only for a warning; empty for no warnings.
        lasts: Whether it may last for minutes because a program evaluates, or a link is slow.

    Attributes:
        passed_s: Seconds since the start.
        silent_s: Seconds for which the other side had not been heard at the last `count`.
    """

    def __init__(self, slice_s: float = 0.0, what: str | Callable[[], str] = "", *, lasts: bool = False) -> None:
        first_s, self._rank = _warnings
        self._what = what
        self._warn_s = max(first_s, _LASTS_S if lasts else 0.0) if what else math.inf
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
        if self.passed_s >= self._warn_s:
            self._warn()
        return self.passed_s

    def _warn(self) -> None:
        self._warn_s = 2.0 * self.passed_s
        what = self._what if isinstance(self._what, str) else self._what()
        logger.warning("rank %d has been waiting for %s for %.0f s", self._rank, what, self.passed_s)
