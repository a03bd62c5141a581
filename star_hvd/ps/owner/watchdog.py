"""Whether a server that does not answer is lost (stopped or hung) rather than busy or starved of CPU time.

Killing a server costs its job a few seconds, so a false alarm must be avoided. The criterion is the state of the main
thread, which alone answers. A stopped process (SIGSTOP, a debugger) counts as lost within a second. One that is neither
runnable nor in disk I/O, and has used no CPU time while silent, is hung. One that is runnable is busy or starved, and
gets a far longer limit.

Only time in which the owner itself ran counts: after a pause of the machine or of the owner, the server gets a new
chance to answer.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from pathlib import Path

__all__ = ["PING_S", "Health", "ServerWatchdog", "thread_state"]

PING_S = 0.25
"""Interval of pings; a server answers between two messages, in milliseconds."""

_SILENT_S = 0.5
_STOPPED_S = 0.75
_HUNG_S = 3.0
_BUSY_S = 120.0
"""An update of the largest shard takes seconds; this limit ends an infinite loop."""

_COUNTED_S = 0.5
"""Most that one check adds: checks are a quarter of a second apart unless the owner itself was paused."""


class Health(enum.Enum):
    """The result of a check."""

    FINE = "fine"
    LOST = "lost"


def thread_state(pid: int) -> tuple[str, int] | None:
    """State (R, S, D, T, ...) and CPU time in ticks of a process's main thread; None where unknown."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # The name before it may hold any characters.
    return fields[0], int(fields[11]) + int(fields[12])


class ServerWatchdog:
    """Watches one server process.

    Args:
        pid: Its process id.
        now_s: The present.
        patience: Factor on the limits for a hung and a busy process.
        read: Reads the main thread's state, see `thread_state`.
    """

    def __init__(
        self,
        pid: int,
        now_s: float,
        *,
        patience: float = 1.0,
        read: Callable[[int], tuple[str, int] | None] = thread_state,
    ) -> None:
        self._pid = pid
        self._patience = patience
        self._read = read
        self._checked_s = now_s
        self._pinged_s = now_s
        self.reason = ""
        self.stopped = False  # Whether the process is stopped by a signal or debugger.
        self.note_event()

    def note_event(self) -> None:
        """Note an event of the server, a pong for example."""
        self._silent_s = self._stopped_s = self._idle_s = 0.0
        self._ticks = -1

    def ping_due(self, now_s: float) -> bool:
        """Return whether to send a ping now."""
        if now_s - self._pinged_s < PING_S:
            return False
        self._pinged_s = now_s
        return True

    def look(self, now_s: float) -> Health:
        """Check the process; called a few times per second."""
        passed_s, self._checked_s = min(now_s - self._checked_s, _COUNTED_S), now_s
        self._silent_s += passed_s
        if self._silent_s < _SILENT_S:
            return Health.FINE
        found = self._read(self._pid)
        if found is None:
            return Health.FINE  # Gone, which its pipe reports, or a system without /proc.
        state, ticks = found
        self.stopped = state in "Tt"
        works = state in "RD" or ticks != self._ticks
        self._ticks = ticks
        self._stopped_s = self._stopped_s + passed_s if self.stopped else 0.0
        self._idle_s = 0.0 if works else self._idle_s + passed_s
        return self._health(state)

    def _health(self, state: str) -> Health:
        limits = (
            (self._stopped_s, _STOPPED_S),
            (self._idle_s, _HUNG_S * self._patience),
            (self._silent_s, _BUSY_S * self._patience),
        )
        if any(spent_s >= limit_s for spent_s, limit_s in limits):
            self.reason = f"no answer for {self._silent_s:.1f} s, state {state}"
            return Health.LOST
        return Health.FINE
