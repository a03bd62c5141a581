"""Completes a plan from measurements: which ranks run servers, and the groups. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from scheduler.plan import grouping, placement
from scheduler.plan.headroom import Headroom, server_cores
from scheduler.plan.plan import Plan, PlanError
from scheduler.stats import lower_median

__all__ = ["groups_gain", "resolve", "with_groups"]


def resolve(
    plan: Plan,
    active: Plan,
    *,
    times_s: Sequence[float],
    hosts: Sequence[str],
    slow: Collection[int],
    link_bytes_per_s: Sequence[float],
    headroom: Sequence[Headroom],
    state_bytes: int,
) -> Plan:
    """Return the plan with the servers and groups that it leaves open.

    Args:
        plan: The next plan.
        active: The active plan.
        times_s: Usual compute time of every rank, NaN where unknown.
        hosts: Host of every rank.
        slow: Ranks that are slow now.
        link_bytes_per_s: Measured rate of every rank's link, NaN where unknown.
        headroom: Unused capacity of every rank's host.
        state_bytes: Parameters and optimizer state.

    Raises:
        PlanError: It cannot follow the active plan.
    """
    plan = with_groups(plan, _known(times_s))
    if plan.family in ("ps", "grouped"):
        plan = _with_servers(plan, active, hosts, slow, link_bytes_per_s, headroom, state_bytes, times_s)
    if plan.family == active.family == "subgroup" and not set(plan.members) & set(active.members):
        raise PlanError(
            f"{plan.label} has no member of {active.label}, the active plan, and so no rank with the optimizer's "
            "state; switch to sync first"
        )
    return plan


def with_groups(plan: Plan, times_s: Sequence[float]) -> Plan:
    """Form the groups that a plan leaves open, from the usual time of every rank."""
    if plan.groups:
        return plan
    if plan.mode == "grouped":
        count = plan.group_count
        groups = grouping.speed_groups(times_s, count) if count else grouping.progressive_groups(times_s)
        return plan.replace(groups=groups)
    if plan.mode == "ps" and plan.rule == "groups":
        return plan.replace(groups=grouping.similar_groups(times_s))
    return plan


def groups_gain(groups: grouping.Groups, present: grouping.Groups, times_s: Sequence[float]) -> float:
    """Return how many more gradients per second groups deliver than the present ones, as a fraction of theirs.

    Args:
        groups: The groups.
        present: The present groups.
        times_s: Usual compute time of every rank, NaN where unknown.
    """
    known_s = _known(times_s)
    return grouping.throughput(known_s, groups) / grouping.throughput(known_s, present) - 1.0


def _known(times_s: Sequence[float]) -> list[float]:
    """Replace unknown times by the median."""
    known = sorted(t for t in times_s if math.isfinite(t) and t > 0.0)
    middle = known[len(known) // 2] if known else 1.0
    return [t if math.isfinite(t) and t > 0.0 else middle for t in times_s]


def _with_servers(
    plan: Plan,
    active: Plan,
    hosts: Sequence[str],
    slow: Collection[int],
    link_bytes_per_s: Sequence[float],
    headroom: Sequence[Headroom],
    state_bytes: int,
    times_s: Sequence[float],
) -> Plan:
    if plan.family == active.family == "ps":
        # The same servers continue under another rule; the session's first plan fixes how pushes travel.
        return plan.replace(servers=active.servers, transmission=active.transmission)
    if plan.servers:
        chosen = plan.servers
    else:
        found = placement.place_on_hosts(
            range(plan.world_size),
            hosts=hosts,
            slow=slow,
            link_bytes_per_s=link_bytes_per_s,
            headroom=headroom,
            state_bytes=state_bytes,
            need_cores=server_cores(plan.world_size / lower_median(_known(times_s)), 0.5 * state_bytes),
        )
        chosen = tuple(_not_slow_beside(rank, hosts, slow) for rank in found.servers)
        if found.avoided:
            plan = plan.replace(reason=f"{plan.reason or 'asked for'}; its servers avoid {found.avoided}")
        if found.slows:
            slows = ", ".join(found.slows)
            plan = plan.replace(reason=f"{plan.reason or 'asked for'}; its servers slow another job on {slows}")
    if active.family == "subgroup":  # Only members have the state that seeds the servers.
        chosen = tuple(rank for rank in chosen if rank in active.members) or active.members[:1]
    return plan.replace(servers=chosen)


def _not_slow_beside(rank: int, hosts: Sequence[str], slow: Collection[int]) -> int:
    """A rank of the same host that is not slow, if there is one, to start and control the server."""
    same = [other for other, host in enumerate(hosts) if host == hosts[rank] and other not in slow]
    return rank if rank not in slow or not same else same[0]
