"""Unused capacity of a rank's host, and what a server needs. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["BYTES_PER_S_OF_A_CORE", "Headroom", "server_cores"]

BYTES_PER_S_OF_A_CORE = 1e9
"""Pushed bytes per second that one core can receive, add up and answer with as many bytes. Measured: 1.8e9 over
loopback in pieces of 2 MiB, without the optimizer's own step."""

_PUSH_CORE_S, _SERVED_BYTES_PER_S = 2.7e-3, 6.4e8
"""CPU time of a server for one push and its reply, and the push bytes that one CPU second processes beyond that, with
the optimizer's step. Measured with 2 ranks, `ps(2)`, momentum: 2.75, 3.55 and 9.35 ms for 33 kB, 0.53 and 4.2 MB."""

_TOLERATED = 0.05
"""Fraction of a core per neighbour that a server may take: the neighbour's step may get this much longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Headroom:
    """Unused capacity of a rank's host.

    Attributes:
        free_cpu_cores: Idle cores, NaN if unknown.
        neighbours: Number of ranks of other jobs of the same user on these cores.
    """

    free_cpu_cores: float = math.nan
    neighbours: int = 0

    def fits(self, cores: float) -> bool:
        """Whether neighbours keep their speed beside a process that needs `cores`; always true without neighbours.

        Only idle time counts. That a neighbour could compute more slowly without its job getting slower, because it
        waits for other ranks (STAR), adds nothing: it sleeps while it waits, which is idle time, and would need as much
        time of a processor in each of its steps as before.
        """
        if not self.neighbours or math.isnan(self.free_cpu_cores):
            return True
        return cores <= self.free_cpu_cores + _TOLERATED * self.neighbours


def server_cores(pushes_per_s: float, push_bytes: float) -> float:
    """Cores that servers need together for this rate and size of pushes, with their replies."""
    return pushes_per_s * (_PUSH_CORE_S + push_bytes / _SERVED_BYTES_PER_S)
