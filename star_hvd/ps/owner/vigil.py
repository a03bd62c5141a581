"""Whether a server that gives no answer is lost: stopped or hung, rather than busy or short of processor time.

Killing a server costs its job a few seconds, so it has to be sure. What counts is the state of the main thread, which
alone answers. A process that is stopped (SIGSTOP, a debugger) is seen at once. One that neither runs, nor waits to run,
nor reads a disk, and has used no processor time since it was silent, waits for something that does not come. One that
runs, or would if it were given a core, is busy or starved, and gets a far longer limit.

Only time counts in which the owner itself ran: after a pause of the whole machine, or of the owner, the server gets the
chance to answer that it has not had.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from pathlib import Path

__all__ = ["PING_S", "Verdict", "Vigil", "thread_state"]

PING_S = 0.25
"""Silence after which the server is asked; it answers between two messages, in milliseconds."""

_SILENT_S = 0.5
_STOPPED_S = 0.75
_HUNG_S = 3.0
_BUSY_S = 120.0
"""An update of the largest shard takes seconds; a loop without end has to be found some time."""

_COUNTED_S = 0.5
"""Most that one look adds: between two looks lies a quarter of a second, unless the owner itself stood still."""


class Verdict(enum.Enum):
    """What a look found."""

    FINE = "fine"
    LOST = "lost"


def thread_state(pid: int) -> tuple[str, int] | None:
    """State (R, S, D, T, ...) and processor time, in ticks, of a process's main thread; None where it is unknown."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # The name before it may hold anything.
    return fields[0], int(fields[11]) + int(fields[12])


class Vigil:
    """Watches one server process.

    Args:
        pid: Its id.
        now_s: The time.
        patience: Factor on the limit for a process that waits for something.
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
        self._looked_s = now_s
        self._pinged_s = now_s
        self.reason = ""
        self.stopped = False  # Whether the verdict was that somebody stopped it.
        self.heard()

    def heard(self) -> None:
        """A sign of life came."""
        self._silent_s = self._stopped_s = self._idle_s = 0.0
        self._ticks = -1

    def ping_due(self, now_s: float) -> bool:
        """Whether to ask for a sign of life now."""
        if now_s - self._pinged_s < PING_S:  # Events are signs of life too, but need not be there when one is wanted.
            return False
        self._pinged_s = now_s
        return True

    def look(self, now_s: float) -> Verdict:
        """What to think of it; called a few times per second."""
        passed_s, self._looked_s = min(now_s - self._looked_s, _COUNTED_S), now_s
        self._silent_s += passed_s
        if self._silent_s < _SILENT_S:
            return Verdict.FINE
        found = self._read(self._pid)
        if found is None:
            return Verdict.FINE  # Gone, which its pipe tells, or a system that does not say.
        state, ticks = found
        self.stopped = state in "Tt"
        works = state in "RD" or ticks != self._ticks
        self._ticks = ticks
        self._stopped_s = self._stopped_s + passed_s if self.stopped else 0.0
        self._idle_s = 0.0 if works else self._idle_s + passed_s
        return self._verdict(state)

    def _verdict(self, state: str) -> Verdict:
        limits = (
            (self._stopped_s, _STOPPED_S),
            (self._idle_s, _HUNG_S * self._patience),
            (self._silent_s, _BUSY_S * self._patience),
        )
        if any(spent_s >= limit_s for spent_s, limit_s in limits):
            self.reason = f"no answer for {self._silent_s:.1f} s, state {state}"
            return Verdict.LOST
        return Verdict.FINE
