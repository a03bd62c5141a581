"""Placement of parameter servers: on which hosts, and how many.

Servers placed without regard to processor and network create the stragglers they should avoid (STAR, Zhang and Shen
2025), so hosts are chosen by the bytes/s they can serve, without those that have a straggler. There are as few servers
as it takes for a round of pushes (one push and reply per rank) to fit in the time allowed, because every further one is
a process on a host that also trains.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from scheduler.stats import duration, lower_median

__all__ = ["PUSH_ROUND_S", "HostLoad", "PlacementDecision", "place_on_hosts", "place_servers"]

PUSH_ROUND_S = 0.05
"""Longest round of pushes for servers of a policy's plan: a large fraction of a small network's step, a small one of a
large network's."""

_BYTES_PER_S_OF_A_CORE = 1e9
"""Pushed bytes per second that one core receives, adds up and answers with as many bytes. Measured: 1.8e9 over
loopback in pieces of 2 MiB, without the optimizer's own step."""

_LEAST_CORES = 0.05
"""Cores assumed of a host without a free one, which still serves, in competition with its ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLoad:
    """Load of a rank's host, as measured by the rank.

    Attributes:
        rank: The rank; it starts the server if its host is chosen.
        host: Name or address of the host: equal for ranks of one host.
        free_cpu_cores: Idle cores, NaN where unknown.
        link_bytes_per_s: Bandwidth of its network in each direction, NaN where unknown.
        straggling: Whether this rank is slow now.
    """

    rank: int
    host: str
    free_cpu_cores: float = math.nan
    link_bytes_per_s: float = math.nan
    straggling: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementDecision:
    """The ranks that run a server each.

    Attributes:
        servers: The ranks, ascending, one for each host chosen.
        round_s: Estimated time of the busiest server for one push and reply of every rank, seconds.
        reason: One sentence for people.
    """

    servers: tuple[int, ...]
    round_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class _Host:
    name: str
    rank: int
    cores: float
    link_bytes_per_s: float
    straggling: bool

    @property
    def bytes_per_s(self) -> float:
        """Bytes/s that a server on it can process: the smaller of its network's and its cores' rates."""
        return min(self.link_bytes_per_s, max(self.cores, _LEAST_CORES) * _BYTES_PER_S_OF_A_CORE)


def place_on_hosts(
    ranks: Sequence[int],
    *,
    hosts: Sequence[str] | None,
    slow: Collection[int],
    link_bytes_per_s: Sequence[float],
    state_bytes: int,
    free_cpu_cores: Sequence[float] | None = None,
    push_bytes: int = 0,
    round_s: float = 0.1,
) -> PlacementDecision:
    """Place servers on the hosts of some ranks, from measurements of all ranks.

    Args:
        ranks: The ranks that may start a server.
        hosts: Host of every rank; None if unknown, then there is one server, since several might share a host.
        slow: Ranks that are slow now.
        link_bytes_per_s: Rate of every rank's link; not finite, or not above 0, where unknown.
        state_bytes: As in `place_servers`.
        free_cpu_cores: Idle cores of every rank's host, NaN where unknown; None if all are.
        push_bytes: As in `place_servers`.
        round_s: As in `place_servers`.
    """
    loads = [
        HostLoad(
            rank=rank,
            host=hosts[rank] if hosts is not None else f"rank {rank}",
            free_cpu_cores=math.nan if free_cpu_cores is None else free_cpu_cores[rank],
            link_bytes_per_s=rate if 0.0 < (rate := link_bytes_per_s[rank]) < math.inf else math.nan,
            straggling=rank in slow,
        )
        for rank in ranks
    ]
    return place_servers(
        loads, state_bytes, push_bytes=push_bytes, round_s=round_s, most=0 if hosts is not None else 1
    )


def place_servers(
    hosts: Sequence[HostLoad], state_bytes: int, *, push_bytes: int = 0, round_s: float = 0.1, most: int = 0
) -> PlacementDecision:
    """Choose the hosts of the parameter servers: one server per host, best hosts first, as few as suffice.

    The state is split into equal parts, so a round takes what the slowest of k servers needs for 1/k of it. Chosen is
    the smallest k whose round fits into `round_s` or, if none does, the k with the shortest round. The result does not
    depend on the order of `hosts`.

    Args:
        hosts: One entry per rank. A host with a straggling rank is chosen only if all hosts have one.
        state_bytes: Bytes of parameters and optimizer state on all servers together.
        push_bytes: Bytes a rank pushes per step; 0 for `state_bytes`, an upper estimate.
        round_s: Longest time of a round of one push from every rank, seconds.
        most: Most servers, 0 for as many as hosts.

    Raises:
        ValueError: There are no hosts, a rank occurs twice, or a number is out of range.
    """
    _check(hosts, state_bytes, push_bytes, round_s, most)
    found = _merge(hosts)
    usable = [host for host in found if not host.straggling] or found
    order = sorted(usable, key=lambda host: (-host.bytes_per_s, -host.cores, host.rank))
    total_bytes = len(hosts) * (push_bytes or state_bytes)
    rounds = [total_bytes / k / order[k - 1].bytes_per_s for k in range(1, min(most or len(order), len(order)) + 1)]
    count = next((k for k, time_s in enumerate(rounds, 1) if time_s <= round_s), rounds.index(min(rounds)) + 1)
    chosen = order[:count]
    return PlacementDecision(
        servers=tuple(sorted(host.rank for host in chosen)),
        round_s=rounds[count - 1],
        reason=_reason(chosen, found, state_bytes, rounds[count - 1], round_s),
    )


def _merge(hosts: Iterable[HostLoad]) -> list[_Host]:
    """One entry per host: the lowest report of its ranks, the median of the hosts if unknown.

    Its rank is the lowest that is not straggling, if there is one.
    """
    by_name: dict[str, list[HostLoad]] = {}
    for load in sorted(hosts, key=lambda load: load.rank):
        by_name.setdefault(load.host, []).append(load)
    cores = {name: _least([load.free_cpu_cores for load in loads]) for name, loads in by_name.items()}
    links = {name: _least([load.link_bytes_per_s for load in loads]) for name, loads in by_name.items()}
    usual_cores = _usual(cores.values(), 1.0)
    # If no link is known, cores alone decide.
    usual_link = _usual(links.values(), math.inf)
    return [
        _Host(
            name=name,
            rank=next((load for load in loads if not load.straggling), loads[0]).rank,  # They are in order.
            cores=usual_cores if math.isnan(cores[name]) else cores[name],
            link_bytes_per_s=usual_link if math.isnan(links[name]) else links[name],
            straggling=any(load.straggling for load in loads),
        )
        for name, loads in by_name.items()
    ]


def _least(values: Sequence[float]) -> float:
    if len(values) == 1:
        return values[0]
    return min((value for value in values if not math.isnan(value)), default=math.nan)


def _usual(values: Iterable[float], otherwise: float) -> float:
    known = [value for value in values if not math.isnan(value)]
    return lower_median(known) if known else otherwise


def _reason(chosen: Sequence[_Host], found: Sequence[_Host], state_bytes: int, time_s: float, round_s: float) -> str:
    names = ", ".join(f"{host.name} (rank {host.rank})" for host in sorted(chosen, key=lambda host: host.rank)[:4])
    more = f" and {len(chosen) - 4} more" if len(chosen) > 4 else ""
    if len(found) == 1:
        why = "the only host"
    elif chosen[0].straggling:
        why = "the best choice, although every host has a straggler"
    else:
        avoided = sum(host.straggling for host in found)
        why = "most idle cores and bandwidth"
        why += f", avoiding {avoided} host{'s' if avoided > 1 else ''} with stragglers" if avoided else ""
    fits = "" if time_s <= round_s else f", more than the {duration(round_s)} allowed"
    count = "1 server" if len(chosen) == 1 else f"{len(chosen)} servers"
    return (
        f"{count} for {state_bytes / 2**20:.3g} MiB on {names}{more}: {why}; "
        f"a round of pushes takes about {duration(time_s)}{fits}"
    )


def _check(hosts: Sequence[HostLoad], state_bytes: int, push_bytes: int, round_s: float, most: int) -> None:
    if not hosts:
        raise ValueError("hosts is empty; expected one entry per rank")
    ranks = [load.rank for load in hosts]
    if len(set(ranks)) != len(ranks):
        raise ValueError(f"hosts name the ranks {sorted(ranks)}; expected every rank once")
    for load in hosts:
        if load.free_cpu_cores < 0.0 or load.link_bytes_per_s <= 0.0:
            raise ValueError(
                f"rank {load.rank} has {load.free_cpu_cores} free cores and a link of {load.link_bytes_per_s} bytes/s; "
                "expected 0 or more cores and a rate above 0, NaN where unknown"
            )
    if state_bytes < 0 or push_bytes < 0 or most < 0 or not round_s > 0.0:
        raise ValueError(
            f"state_bytes is {state_bytes}, push_bytes {push_bytes}, most {most}, round_s {round_s}; expected none "
            "below 0 and round_s above 0"
        )
