"""What a rank's host has left for a server, and what a server takes. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["BYTES_PER_S_OF_A_CORE", "Headroom", "server_cores"]

BYTES_PER_S_OF_A_CORE = 1e9
"""Pushed bytes per second that one core receives, adds up and answers with as many bytes. Measured: 1.8e9 over
loopback in pieces of 2 MiB, without the optimizer's own step."""

_PUSH_CORE_S, _SERVED_BYTES_PER_S = 2.7e-3, 6.4e8
"""CPU time of a server for one push and its reply, and bytes of a push per second of it beyond that, with the
optimizer's step. Measured with 2 ranks, `ps(2)`, momentum: 2.75, 3.55 and 9.35 ms for 33 kB, 0.53 and 4.2 MB."""

_TOLERATED = 0.05
"""Part of a neighbour's processors that a server may take from it: a step may get this much longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Headroom:
    """What is left on a rank's host.

    Attributes:
        free_cpu_cores: Idle cores, NaN where unknown.
        neighbours: Ranks of other jobs of the same user on these cores.
        slack_cores: Cores that those can lose without their jobs getting slower, because they wait for others.
    """

    free_cpu_cores: float = math.nan
    neighbours: int = 0
    slack_cores: float = 0.0

    def fits(self, cores: float) -> bool:
        """Whether neighbours stay as fast as they are with a process that needs `cores`; without any they do."""
        if not self.neighbours or math.isnan(self.free_cpu_cores):
            return True
        return cores <= self.free_cpu_cores + self.slack_cores + _TOLERATED * self.neighbours


def server_cores(pushes_per_s: float, push_bytes: float) -> float:
    """Cores that servers need together for so many pushes and replies."""
    return pushes_per_s * (_PUSH_CORE_S + push_bytes / _SERVED_BYTES_PER_S)
