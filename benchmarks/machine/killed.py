"""What the death of a process costs: the kill itself, the time between steps around it, and steps that are gone."""

from __future__ import annotations

import time

import psutil

from star_hvd.ps.common.forking import SERVER_NAME

__all__ = ["Watch", "kill_server"]


class Watch:
    """Watches this rank's steps from a death on.

    Attributes:
        killed: Processes that were killed, as far as this rank did it.
        recovery_s: Longest time between two steps since the death, the first of them before it.
        lost_steps: How far the count of steps went back.
    """

    def __init__(self) -> None:
        self.killed = 0
        self.recovery_s = 0.0
        self.lost_steps = 0
        self._watching = False
        self._last_s = time.perf_counter()
        self._most = 0

    def begin(self) -> None:
        """From here on gaps count: a process is about to be killed, on whatever rank."""
        self._watching = True

    def end(self) -> None:
        """Gaps count no more; steps that have to be made again still do."""
        self._watching = False

    def step(self, number: int) -> None:
        """A step has ended, after which the count of steps is `number`."""
        now_s = time.perf_counter()
        if self._watching:
            self.recovery_s = max(self.recovery_s, now_s - self._last_s)
        self.lost_steps = max(self.lost_steps, self._most - number)
        self._most, self._last_s = max(self._most, number), now_s


def kill_server() -> int:
    """Kill the parameter server that this rank runs, if any; returns how many processes that were."""
    servers = [child for child in psutil.Process().children(recursive=True) if child.name() == SERVER_NAME]
    for server in servers:
        server.kill()
    return len(servers)
