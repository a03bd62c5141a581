"""The cost of a process's death: the kill itself, the time between steps around it, and lost steps."""

from __future__ import annotations

import time

import psutil

from star_hvd.ps.common.forking import SERVER_NAME

__all__ = ["Watch", "kill_server"]


class Watch:
    """Watches this rank's steps from a kill on.

    Attributes:
        killed: Processes that this rank killed.
        recovery_s: Longest time between two steps since the kill, the first of them before it.
        lost_steps: How far the step count went back.
    """

    def __init__(self) -> None:
        self.killed = 0
        self.recovery_s = 0.0
        self.lost_steps = 0
        self._watching = False
        self._last_s = time.perf_counter()
        self._most = 0

    def begin(self) -> None:
        """Start counting gaps: a process is about to be killed, on any rank."""
        self._watching = True

    def end(self) -> None:
        """Stop counting gaps; repeated steps are still counted."""
        self._watching = False

    def step(self, number: int) -> None:
        """Record the end of a step, after which the step count is `number`."""
        now_s = time.perf_counter()
        if self._watching:
            self.recovery_s = max(self.recovery_s, now_s - self._last_s)
        self.lost_steps = max(self.lost_steps, self._most - number)
        self._most, self._last_s = max(self._most, number), now_s


def kill_server() -> int:
    """Kill the parameter server processes that this rank runs, if any; return how many."""
    servers = [child for child in psutil.Process().children(recursive=True) if child.name() == SERVER_NAME]
    for server in servers:
        server.kill()
    return len(servers)
