"""What every rank's host has left, from the ranks' readings: one number per host, steady enough to decide on. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from scheduler.diagnosis.machine import MachineStats
from scheduler.plan.headroom import Headroom

__all__ = ["HostHeadroom"]

_SMOOTHING = 0.4  # Weight of the newest reading, one per second.
_STEP_CORES = 0.25
"""Idle cores are used in steps of this size, and change only once a reading is half a step outside of its own:
placement must not follow the noise of readings, because servers that move have to be started anew."""


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
        """Take in a rank's readings; the first are of its start."""
        self._latest[rank] = stats
        self._readings[rank] += 1
        host = self._hosts[rank]
        free = self._free(host)
        if math.isnan(free) or self._starts(host):
            return
        before = self._smooth.get(host, free)
        # Every rank of a host reports the same processors: together they weigh as much as one.
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
            slack_cores=min(_known(one.neighbour_slack_cores) for one in latest),
        )

    def _starts(self, host: str) -> bool:
        """Whether a rank of a host has sent no readings but those of its start, when it uses what it will not need."""
        return min((count for rank in self._ranks[host] if (count := self._readings[rank])), default=0) < 2

    def _free_at_start(self, host: str) -> float:
        """Idle cores, and those that the job's ranks use for their start, in the proportion that they get them in.

        Where others compete for cores, these take them over once the ranks need them no more.
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
