"""Placement of parameter servers: on which hosts, and how many.

Servers placed without regard to processor and network create the stragglers they should avoid (STAR, Zhang and Shen
2025), so hosts are chosen by the bytes/s they can serve. Hosts with a straggler, with cores in use by something else,
or where another job would get slower are avoided. There are as few servers as possible such that one push and reply per
rank fit in the time allowed, because every further server is a process on a host that also trains.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from scheduler.plan.headroom import BYTES_PER_S_OF_A_CORE, Headroom
from scheduler.stats import duration, lower_median

__all__ = ["PUSH_ROUND_S", "HostLoad", "PlacementDecision", "place_on_hosts", "place_servers"]

PUSH_ROUND_S = 0.05
"""Longest time for one push and reply of every rank with a policy's servers: a large fraction of a small network's
step, a small one of a large network's."""

_LEAST_CORES = 0.05
"""Cores assumed for a host without a free one; it can still serve, in competition with its ranks."""

_BUSY_CORES, _BUSY_SHARE, _LINK_SHARE = 1.0, 0.5, 0.5
"""A host is busy if its idle cores are fewer than the first and than the second times those of the idlest host. Servers
avoid it for an idle host whose link has at least the third times the rate of the best link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLoad:
    """Load of a rank's host, as measured by the rank.

    Attributes:
        rank: The rank; it starts the server if its host is chosen.
        host: Name or address of the host: equal for ranks of one host.
        free_cpu_cores: Idle cores, NaN where unknown.
        link_bytes_per_s: Bandwidth of its network in each direction, NaN where unknown.
        straggling: Whether this rank is slow now.
        neighbours: As in `Headroom`.
    """

    rank: int
    host: str
    free_cpu_cores: float = math.nan
    link_bytes_per_s: float = math.nan
    straggling: bool = False
    neighbours: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementDecision:
    """The ranks that each run a server.

    Attributes:
        servers: The ranks, ascending, one for each host chosen.
        round_s: Estimated time of the busiest server for one push and reply of every rank, seconds.
        reason: One sentence for people.
        avoided: Hosts that servers avoid because of what else runs there, `10.0.0.1 whose cores are busy`; empty if
            none.
        slows: Chosen hosts where other jobs of this user would get slower; there was no alternative.
    """

    servers: tuple[int, ...]
    round_s: float
    reason: str
    avoided: str = ""
    slows: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Host:
    name: str
    rank: int
    cores: float
    link_bytes_per_s: float
    straggling: bool
    headroom: Headroom
    busy: bool = False

    @property
    def bytes_per_s(self) -> float:
        """Bytes/s that a server on it can process: the smaller of its network's and its cores' rates."""
        return min(self.link_bytes_per_s, max(self.cores, _LEAST_CORES) * BYTES_PER_S_OF_A_CORE)


def place_on_hosts(
    ranks: Sequence[int],
    *,
    hosts: Sequence[str] | None,
    slow: Collection[int],
    link_bytes_per_s: Sequence[float],
    state_bytes: int,
    headroom: Sequence[Headroom] | None = None,
    push_bytes: int = 0,
    round_s: float = 0.1,
    need_cores: float = 0.0,
) -> PlacementDecision:
    """Place servers on the hosts of some ranks, from measurements of all ranks.

    Args:
        ranks: The ranks that may start a server.
        hosts: Host of every rank; None if unknown, then there is one server, since several might share a host.
        slow: Ranks that are slow now.
        link_bytes_per_s: Rate of every rank's link; not finite, or not above 0, if unknown.
        state_bytes: As in `place_servers`.
        headroom: Headroom of every rank's host; None if unknown.
        push_bytes: As in `place_servers`.
        round_s: As in `place_servers`.
        need_cores: As in `place_servers`.
    """
    unknown = Headroom()
    left = [unknown if headroom is None else headroom[rank] for rank in ranks]
    loads = [
        HostLoad(
            rank=rank,
            host=hosts[rank] if hosts is not None else f"rank {rank}",
            free_cpu_cores=own.free_cpu_cores,
            link_bytes_per_s=rate if 0.0 < (rate := link_bytes_per_s[rank]) < math.inf else math.nan,
            straggling=rank in slow,
            neighbours=own.neighbours,
        )
        for rank, own in zip(ranks, left, strict=True)
    ]
    most = 0 if hosts is not None else 1
    return place_servers(
        loads, state_bytes, push_bytes=push_bytes, round_s=round_s, most=most, need_cores=need_cores
    )


def place_servers(
    hosts: Sequence[HostLoad],
    state_bytes: int,
    *,
    push_bytes: int = 0,
    round_s: float = 0.1,
    most: int = 0,
    need_cores: float = 0.0,
) -> PlacementDecision:
    """Choose the hosts of the parameter servers: one server per host, best hosts first, as few as suffice.

    The state is split into equal parts, so one push and reply of every rank take what the slowest of k servers needs
    for 1/k of it. Chosen is the smallest k for which this fits in `round_s` or, if none does, the k for which it is
    shortest; of those k, if any, with which no neighbour gets slower. The result does not depend on the order of
    `hosts`.

    Args:
        hosts: One entry per rank. A host with a straggling rank, a busy one, or one whose neighbours would get slower,
            is chosen only if there are no others.
        state_bytes: Bytes of parameters and optimizer state on all servers together.
        push_bytes: Bytes a rank pushes per step; 0 for `state_bytes`, an upper estimate.
        round_s: Longest time for one push and reply of every rank, seconds.
        most: Most servers, 0 for as many as hosts.
        need_cores: Cores that all servers need together (`server_cores`).

    Raises:
        ValueError: There are no hosts, a rank occurs twice, or a number is out of range.
    """
    _check(hosts, state_bytes, push_bytes, round_s, most)
    found = _merge(hosts)
    total_bytes = len(hosts) * (push_bytes or state_bytes)
    orders = _orders(found, need_cores, most)
    rounds = {k: total_bytes / k / order[k - 1].bytes_per_s for k, order in orders.items()}
    count = next((k for k, time_s in rounds.items() if time_s <= round_s), min(rounds, key=rounds.__getitem__))
    chosen = orders[count][:count]
    return PlacementDecision(
        servers=tuple(sorted(host.rank for host in chosen)),
        round_s=rounds[count],
        reason=_reason(chosen, found, state_bytes, rounds[count], round_s),
        avoided=_avoided(chosen, found, need_cores),
        slows=tuple(host.name for host in chosen if not host.headroom.fits(need_cores / count)),
    )


def _orders(found: Sequence[_Host], need_cores: float, most: int) -> dict[int, list[_Host]]:
    """Hosts to choose from by number of servers, best first; numbers with which a neighbour gets slower are left out.

    Hosts are without stragglers, idle, and without neighbours that would get slower; else what is left. With more
    servers each needs fewer cores, so neighbours get slower on fewer hosts: every number has its own hosts.
    """
    hosts = [host for host in found if not host.straggling] or list(found)
    hosts.sort(key=lambda host: (-host.bytes_per_s, -host.cores, host.rank))
    limit = min(most or len(hosts), len(hosts))
    on_idle: dict[int, list[_Host]] = {}
    on_any: dict[int, list[_Host]] = {}
    kind: list[_Host] = []
    idle: list[_Host] = []
    for count in range(1, len(hosts) + 1):
        if len(kind) < len(hosts):  # Otherwise they stay the same.
            kind = [host for host in hosts if host.headroom.fits(need_cores / count)]
            now_idle = _idle(kind)
        if len(now_idle) >= count:  # Else the former ones: compared with a busy host's link, theirs may be too slow.
            idle = now_idle
        if len(idle) >= count:
            on_idle[count] = idle
        if len(kind) >= count:
            on_any[count] = kind
    for orders in (on_idle, on_any):
        if allowed := {count: order for count, order in orders.items() if count <= limit}:
            return allowed
    for orders in (on_idle, on_any):  # More servers than allowed: the fewer cores each needs, the better.
        if orders:
            return {limit: next(iter(orders.values()))}
    order = _idle(hosts) or hosts
    return {count: order for count in range(1, min(limit, len(order)) + 1)}


def _idle(hosts: Sequence[_Host]) -> list[_Host]:
    best_link = max((host.link_bytes_per_s for host in hosts), default=0.0)
    return [host for host in hosts if not host.busy and host.link_bytes_per_s >= _LINK_SHARE * best_link]


def _avoided(chosen: Sequence[_Host], found: Sequence[_Host], need_cores: float) -> str:
    kinds = {
        "whose cores are busy": [host.busy and not host.straggling for host in found],
        "where another job would get slower": [
            not (host.straggling or host.busy or host.headroom.fits(need_cores / len(chosen))) for host in found
        ],
    }
    taken = [host in chosen for host in found]
    parts = []
    for words, flags in kinds.items():
        names = [host.name for host, flag, used in zip(found, flags, taken, strict=True) if flag and not used]
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            parts.append(f"{', '.join(names[:3])}{more} {words}")
    return " and ".join(parts)


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
    most_cores = max((value for value in cores.values() if not math.isnan(value)), default=math.nan)
    return [
        _Host(
            name=name,
            rank=next((load for load in loads if not load.straggling), loads[0]).rank,  # `loads` is in order of rank.
            cores=usual_cores if math.isnan(cores[name]) else cores[name],
            link_bytes_per_s=usual_link if math.isnan(links[name]) else links[name],
            straggling=any(load.straggling for load in loads),
            headroom=Headroom(
                free_cpu_cores=cores[name],
                neighbours=max(load.neighbours for load in loads),
            ),
            busy=cores[name] < min(_BUSY_CORES, _BUSY_SHARE * most_cores),
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
        busy = sum(host.busy and not host.straggling for host in found if host not in chosen)
        why = "most idle cores and bandwidth"
        why += f", avoiding {avoided} host{'s' if avoided > 1 else ''} with stragglers" if avoided else ""
        why += f", avoiding {busy} busy host{'s' if busy > 1 else ''}" if busy else ""
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
