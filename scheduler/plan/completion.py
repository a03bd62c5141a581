"""Completes a plan from what was measured: which ranks run servers, who is grouped with whom. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from scheduler.plan import grouping, placement
from scheduler.plan.plan import Plan, PlanError

__all__ = ["resolve", "with_groups"]


def resolve(
    plan: Plan,
    active: Plan,
    *,
    times_s: Sequence[float],
    hosts: Sequence[str],
    slow: Collection[int],
    link_bytes_per_s: Sequence[float],
    free_cpu_cores: Sequence[float],
    state_bytes: int,
) -> Plan:
    """Fill in what a plan leaves open.

    Args:
        plan: The plan wanted.
        active: The plan in force.
        times_s: Usual compute time of every rank, NaN where unknown.
        hosts: Host of every rank.
        slow: Ranks that are slow now.
        link_bytes_per_s: Measured rate of every rank's link, NaN where unknown.
        free_cpu_cores: Idle cores of every rank's host, NaN where unknown.
        state_bytes: Parameters and optimizer state.

    Raises:
        PlanError: It cannot follow on the plan in force.
    """
    plan = with_groups(plan, _known(times_s))
    if plan.family == active.family == "ps" and (active.parents or plan.parents or plan.fan_in):
        raise PlanError(
            f"{plan.label} cannot follow on {active.label}: connections of a fan-in tree stay as they are; go through "
            "sync"
        )
    if plan.fan_in and not plan.parents:
        plan = plan.replace(parents=grouping.fan_in_tree(plan.world_size, link_bytes_per_s, plan.fan_in))
    if plan.family in ("ps", "grouped"):
        plan = _with_servers(plan, active, hosts, slow, link_bytes_per_s, free_cpu_cores, state_bytes)
    if plan.family == active.family == "subgroup" and not set(plan.members) & set(active.members):
        raise PlanError(
            f"{plan.label} has no member of {active.label}, the plan in force, and so no rank with the optimizer's "
            "state; go through sync"
        )
    return plan


def with_groups(plan: Plan, times_s: Sequence[float]) -> Plan:
    """The plan with its groups formed from the usual time of every rank, where it leaves them open."""
    if plan.groups:
        return plan
    if plan.mode == "grouped":
        count = plan.group_count
        groups = grouping.speed_groups(times_s, count) if count else grouping.progressive_groups(times_s)
        return plan.replace(groups=groups)
    if plan.mode == "ps" and plan.rule == "groups":
        return plan.replace(groups=grouping.similar_groups(times_s))
    return plan


def _known(times_s: Sequence[float]) -> list[float]:
    """Times with the median in place of those that are not known."""
    known = sorted(t for t in times_s if math.isfinite(t) and t > 0.0)
    middle = known[len(known) // 2] if known else 1.0
    return [t if math.isfinite(t) and t > 0.0 else middle for t in times_s]


def _with_servers(
    plan: Plan,
    active: Plan,
    hosts: Sequence[str],
    slow: Collection[int],
    link_bytes_per_s: Sequence[float],
    free_cpu_cores: Sequence[float],
    state_bytes: int,
) -> Plan:
    if plan.family == active.family == "ps":
        return plan.replace(servers=active.servers)  # The same servers go on under another rule.
    if plan.servers:
        chosen = plan.servers
    else:
        found = placement.place_on_hosts(
            range(plan.world_size),
            hosts=hosts,
            slow=slow,
            link_bytes_per_s=link_bytes_per_s,
            free_cpu_cores=free_cpu_cores,
            state_bytes=state_bytes,
        ).servers
        chosen = tuple(_not_slow_beside(rank, hosts, slow) for rank in found)
    if active.family == "subgroup":  # Only members have the state that servers begin with.
        chosen = tuple(rank for rank in chosen if rank in active.members) or active.members[:1]
    return plan.replace(servers=chosen)


def _not_slow_beside(rank: int, hosts: Sequence[str], slow: Collection[int]) -> int:
    """A rank of the same host that is not slow: it starts the server, and passes orders on to it."""
    same = [other for other, host in enumerate(hosts) if host == hosts[rank] and other not in slow]
    return rank if rank not in slow or not same else same[0]
