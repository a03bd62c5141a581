"""Unused capacity of every rank's host, from the ranks' readings: one stable number per host. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from scheduler.diagnosis.machine import MachineStats
from scheduler.plan.headroom import Headroom

__all__ = ["HostHeadroom"]

_SMOOTHING = 0.4  # Weight of the newest reading; there is one per second.
_STEP_CORES = 0.25
"""Idle cores are rounded to steps of this size, and change only when a reading is half a step outside the current one:
placement must not follow the noise of readings, because moving servers means to start them again."""


class HostHeadroom:
    """Idle cores and neighbours of every rank's host.

    Args:
        hosts: Address of every rank's host.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self._ranks: dict[str, list[int]] = {}
        for rank, host in enumerate(hosts):
            self._ranks.setdefault(host, []).append(rank)
        self._hosts = tuple(hosts)
        self._latest = [MachineStats()] * len(self._hosts)
        self._readings = [0] * len(self._hosts)
        self._smooth: dict[str, float] = {}
        self._used: dict[str, float] = {}

    def note(self, rank: int, stats: MachineStats) -> None:
        """Record a rank's readings; the first ones fall into its start."""
        self._latest[rank] = stats
        self._readings[rank] += 1
        host = self._hosts[rank]
        free = self._free(host)
        if math.isnan(free) or self._starts(host):
            return
        before = self._smooth.get(host, free)
        # All ranks of a host report the same processors: together they weigh as much as one.
        weight = _SMOOTHING / len(self._ranks[host])
        self._smooth[host] = free if host not in self._smooth else before + weight * (free - before)
        above = self._smooth[host] - self._used.get(host, math.inf)
        if not -0.5 * _STEP_CORES <= above < 1.5 * _STEP_CORES:
            self._used[host] = _STEP_CORES * math.floor(self._smooth[host] / _STEP_CORES)

    def levels(self) -> list[Headroom]:
        """Headroom of every rank's host, equal for ranks of one host."""
        found = {host: self._level(host) for host in self._ranks}
        return [found[host] for host in self._hosts]

    def _level(self, host: str) -> Headroom:
        latest = [self._latest[rank] for rank in self._ranks[host]]
        free = self._used.get(host, math.nan)
        return Headroom(
            free_cpu_cores=self._free_at_start(host) if math.isnan(free) else free,
            neighbours=int(max(_known(one.neighbour_ranks) for one in latest)),
        )

    def _starts(self, host: str) -> bool:
        """Whether a rank of a host has only sent readings from its start, when it uses cores it will not need later."""
        return min((count for rank in self._ranks[host] if (count := self._readings[rank])), default=0) < 2

    def _free_at_start(self, host: str) -> float:
        """Idle cores, plus the part of the cores used by the starting ranks that will become idle.

        If other processes compete for cores, they take over their proportion of these once the ranks release them.
        """
        latest = [self._latest[rank] for rank in self._ranks[host]]
        idle, own = self._free(host), sum(_known(one.own_cpu_cores) for one in latest)
        others = max([0.0, *(one.usable_cpu_cores - idle - own for one in latest)])
        return idle + own * own / (own + others) if own > 0.0 else idle

    def _free(self, host: str) -> float:
        known = [free for rank in self._ranks[host] if not math.isnan(free := self._latest[rank].free_cpu_cores)]
        return min(known, default=math.nan)


def _known(value: float) -> float:
    return 0.0 if math.isnan(value) else value
