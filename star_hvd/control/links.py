"""When the ranks' links are measured: only while communication costs something, one rank after another. Pure."""

from __future__ import annotations

import math

from star_hvd.control.switch_messages import Probe

__all__ = ["LinkSurvey"]

PROBE_BYTES = 1 << 20  # Four times what a token bucket of the usual size lets through at once.
_NEXT_S = 0.3  # Between two ranks of a sweep.
_PAUSE_S = 5.0  # Between two sweeps.


class LinkSurvey:
    """Asks one rank at a time to send to its neighbour, and keeps the rates.

    Args:
        world_size: Number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self.bytes_per_s = [math.nan] * world_size
        self._next_rank = 0
        self._next_s = 0.0

    def due(self, now_s: float, *, wanted: bool) -> tuple[int, Probe] | None:
        """The rank to ask now and what to ask it, None where nothing is due."""
        n = len(self.bytes_per_s)
        if not wanted or n < 2 or now_s < self._next_s:
            return None
        rank, self._next_rank = self._next_rank, (self._next_rank + 1) % n
        self._next_s = now_s + (_NEXT_S if self._next_rank else _PAUSE_S)
        return rank, Probe((rank + 1) % n, PROBE_BYTES)

    def note(self, rank: int, bytes_per_s: float) -> None:
        """A measured rate."""
        self.bytes_per_s[rank] = bytes_per_s
