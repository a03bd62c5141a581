"""The plans worth considering at a moment: a small set, the same for the same conditions.

All modes, with the arguments that the expected times suggest: as many ranks left out as are slow at once, groups and
members by speed and link, servers away from stragglers. While no rank is slow there is little to choose from: `sync`,
the plan in force, and `partial` with one rank to spare. `local` is offered against trouble only, never for
communication alone: equal ranks stay in `sync`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler.balance.share_policy import solve_shares
from scheduler.cost.conditions import Array, Conditions
from scheduler.diagnosis.links import ring_bytes, slow_links, usual_rate, worth_a_switch
from scheduler.diagnosis.window_stats import slow_limit_s
from scheduler.plan.grouping import progressive_groups, similar_groups
from scheduler.plan.placement import PUSH_ROUND_S, place_on_hosts
from scheduler.plan.plan import MODES, Plan

__all__ = ["LEAST_SHARE", "StragglerSummary", "candidates", "enough_ranks", "find_trouble", "most_left_out",
           "reachable", "same_plan"]

_SELDOM = 0.08
"""Part of its reports that make a rank slow now and then; alexnet's 5 ms of jitter reach 3 % past `RESOLUTION_S`."""

_MANY = 64
"""Ranks above which groups are formed by two cuts instead of a table of n^2 entries, and only such plans are offered as
answer what was found: everything else costs milliseconds to replay and has hardly a chance there. ASGD, for one, has a
drift of nearly 1, and servers take in the gradients of all those ranks: against links and freezes only."""

_BEST, _HOSTS = 8, 32  # Links to choose one server's from, and hosts those of many.

_COSTLY_STALENESS, _BACKUP_SHARE = 0.6, 0.25
"""Late gradients may be thrown away where staleness has this price, or where they are no more than this part of all:
backup workers as they are known (Chen et al. 2016). On Fashion-MNIST, where staleness is cheap, throwing away those of
two slow ranks of four lost a point of accuracy, which no prediction saw coming."""

_FEW = 32
"""Ranks up to which similar ones are sought by clustering, which takes the cube of their number."""

_A_LITTLE = 1.15
"""Times the usual time: a rank that takes longer is left out of one subgroup. Unlike a straggler such a rank is waited
for in `partial`, whose steps wait a moment for those about to come."""

LEAST_SHARE = 0.5
"""Part of the ranks whose gradients a step waits for, at least: with fewer it is another, smaller training,
chosen by a model that was not checked against it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerSummary:
    """Which ranks are slow, by the times to expect.

    Attributes:
        slow: Ranks whose work takes longer on average.
        now_and_then: Ranks that are slow in some of the steps.
        links: Ranks with a slow link.
        at_once: Ranks that are slow in the same step: usually, and in one of ten steps with any, ascending.
        frozen: Ranks that freeze repeatedly.
    """

    slow: tuple[int, ...]
    now_and_then: tuple[int, ...]
    links: tuple[int, ...]
    at_once: tuple[int, ...]
    frozen: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.slow or self.now_and_then or self.links or self.frozen)


def most_left_out(world_size: int, least_share: float = LEAST_SHARE) -> int:
    """Ranks that a plan may do without, at least one."""
    return max(1, world_size - math.ceil(least_share * world_size - 1e-9))


def find_trouble(conditions: Conditions, least_share: float = LEAST_SHARE) -> StragglerSummary:
    """Which ranks the expected times name as stragglers; of those slow at once as many as a plan may do without."""
    times = conditions.times_s
    usual_s, typical_s = conditions.usual_s, conditions.typical_s
    limit_s = slow_limit_s(typical_s)
    late = times > limit_s
    share = late.mean(axis=0)
    slow = np.flatnonzero(usual_s > limit_s)
    seldom = np.flatnonzero((share > _SELDOM) & ~(usual_s > limit_s))
    links = _slow_links(conditions)
    # A batch of 4 usual times is late for 4 steps: once no step waits, more ranks are late at once than begin to be.
    load = np.ceil(times / typical_s - 0.25) - 1.0
    overlap = np.where(late, np.maximum(load, 1.0), 0.0).sum(axis=1).mean()
    counts = sorted(count for count in late.sum(axis=1).tolist() if count)
    at_once = {int(_quantile(counts, 0.5)), int(_quantile(counts, 0.9)), round(float(overlap))} if counts else {1}
    most = most_left_out(conditions.world_size, least_share)
    if 0 < len(slow) <= most:
        at_once.add(len(slow))
    return StragglerSummary(
        slow=tuple(slow.tolist()),
        now_and_then=tuple(seldom.tolist()),
        links=tuple(links.tolist()),
        at_once=tuple(sorted({min(max(1, count), most) for count in at_once})),
        frozen=tuple(conditions.freezing),
    )


def _quantile(ordered: Sequence[int], share: float) -> float:
    """Interpolated, as numpy's, whose call takes longer than all else here."""
    place = share * (len(ordered) - 1)
    low = int(place)
    return ordered[low] + (place - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])


def _slow_links(conditions: Conditions) -> npt.NDArray[np.int64]:
    """Ranks whose link is slow beside the usual one, where a usual one would save a considerable part of their step."""
    slow = slow_links(conditions.rate)
    if not slow.any():
        return np.flatnonzero(slow)
    wire_s = ring_bytes(conditions.world_size, conditions.comm_bytes) / conditions.rate
    saved_s = wire_s * (1.0 - conditions.rate / usual_rate(conditions.rate))
    return np.flatnonzero(slow & worth_a_switch(saved_s, conditions.typical_s + wire_s))


def candidates(
    conditions: Conditions,
    active: Plan | None = None,
    *,
    allowed: Collection[str] = MODES,
    hosts: Sequence[str] | None = None,
    trouble: StragglerSummary | None = None,
    least_share: float = LEAST_SHARE,
) -> list[Plan]:
    """The plans to choose among: `sync` first, then the active one, each once.

    Args:
        conditions: What is expected.
        active: The plan in force, always among them while its mode is allowed. Damping and the bound on staleness of
            the modes of rounds are carried over from it.
        allowed: Modes this job can run. `sync` is offered where nothing else is.
        hosts: Host of every rank, to place servers.
        trouble: What `find_trouble` found, where the caller has asked already.
        least_share: See `enough_ranks`.
    """
    n = conditions.world_size
    offered = [active if active is not None and active.plain else Plan.sync(n)]
    if n > 1:
        trouble = find_trouble(conditions, least_share) if trouble is None else trouble
        most = most_left_out(n, least_share)
        offered += [active] if active is not None else []
        offered += [Plan.partial(n, n - out) for out in trouble.at_once if out < n]
        if trouble:
            offered += _balanced(conditions, trouble)
            offered += _subgroups(conditions, trouble, most)
            offered += _grouped(conditions)
            # Where ranks wait for a processor already, a server takes time of one from them.
            served = not conditions.crowded or trouble.frozen
            if served and (n <= _MANY or trouble.links or trouble.frozen):
                offered += _servers(conditions, trouble, hosts, most)
            offered += [Plan.local(n, steps=4), Plan.local(n, seconds=round(6.0 * conditions.typical_s, 4))]
            if n <= _MANY:
                # Ranks not known to be slow are waited for anyway: what half of the ranks costs is noise, if anything.
                offered += [Plan.partial(n, max(1, n // 2)), Plan.local(n, steps=16)]
    carried = {"max_staleness": active.max_staleness} if active is not None else {}
    if active is not None and active.mode in ("sync", "partial", "subgroup"):
        carried["damping"] = active.damping  # type: ignore[assignment]
    found: dict[tuple[object, ...], Plan] = {}
    for plan in offered:
        if plan.mode not in allowed:
            continue
        if plan is not active and not (enough_ranks(plan, least_share) and reachable(plan, active)):
            continue
        if plan is not active and plan.mode in ("sync", "partial", "subgroup"):
            differs = any(getattr(plan, name) != value for name, value in carried.items())
            plan = plan.replace(**carried) if differs else plan
        found.setdefault(_key(plan), plan)
    return list(found.values()) or [Plan.sync(n).replace(**carried)]


def enough_ranks(plan: Plan, least_share: float = LEAST_SHARE) -> bool:
    """Whether steps wait for the fresh gradients of so many ranks that `auto` may take the plan unasked.

    This is about ranks that are left out: quorum and members. `ps` with x below n and `grouped` leave no rank out, for
    every gradient is an update or part of one, of x / n the length, when it comes; backup workers are left out. A
    subgroup of one member is no group: that is one rank training alone.

    Args:
        plan: The plan.
        least_share: Part of the ranks, 0 to 1.
    """
    if plan.mode in ("partial", "subgroup") or plan.rule == "backup":
        least = max(least_share * plan.world_size, 2.0 if plan.mode == "subgroup" else 1.0)
        return plan.quorum >= least - 1e-9
    return True


def reachable(plan: Plan, active: Plan | None) -> bool:
    """Whether a plan can follow on the one in force without going through `sync`, as `scheduler.plan.completion` has
    it.

    A plan that is refused each time it is chosen prevents every other one.
    """
    if active is None or plan.family != active.family:
        return True
    if plan.family == "subgroup":
        return bool(set(plan.members) & set(active.members))
    return not (plan.family == "ps" and (active.parents or plan.parents or plan.fan_in))


def same_plan(one: Plan, other: Plan) -> bool:
    """Whether two plans mean the same, whatever their epoch and reason."""
    return one is other or _key(one) == _key(other)


def _key(plan: Plan) -> tuple[object, ...]:
    """What makes plans different. Servers that the coordinator is yet to place are no difference in `sync`."""
    shares = () if plan.balanced else plan.batch_shares  # Those that follow the ranks' speed are no other plan.
    return (plan.mode, plan.balanced, shares, plan.quorum, plan.members, plan.groups, plan.rule, plan.slack,
            plan.servers, plan.local_steps, plan.local_s, plan.lr_rule)


def _balanced(conditions: Conditions, trouble: StragglerSummary) -> list[Plan]:
    """Batch shares by speed, where `shard` forms the batches and a rank is slow all the time."""
    if not conditions.batch or not trouble.slow:
        return []
    shares = solve_shares(conditions.usual_s.tolist(), conditions.batch, conditions.fixed_part)
    if max(shares) == min(shares):
        return []
    return [Plan.sync(conditions.world_size, balanced=True, batch_shares=shares)]


def _subgroups(conditions: Conditions, trouble: StragglerSummary, most: int) -> list[Plan]:
    """Without the slow ranks, without the slow links, without either, and without those a little slower either."""
    n, plans = conditions.world_size, []
    both = frozenset((*trouble.slow, *trouble.links))
    without = [frozenset(trouble.slow), frozenset(trouble.links), both]
    if n <= _MANY:
        slower = np.flatnonzero(conditions.usual_s > _A_LITTLE * conditions.typical_s)
        without.append(both | frozenset(slower.tolist()))
    for outside in dict.fromkeys(without):
        if 0 < len(outside) <= most:
            plans.append(Plan.subgroup(n, [r for r in range(n) if r not in outside]))
    return plans


def _grouped(conditions: Conditions) -> list[Plan]:
    """Two groups by speed, and as many as pay."""
    n = conditions.world_size
    way_s = 2.0 * conditions.comm_bytes / conditions.rate
    times_s = conditions.usual_s + way_s
    layouts = [_two_groups(times_s)]
    if 2 < n <= _MANY:
        layouts.append(progressive_groups(times_s.tolist()))
    return [Plan.grouped(n, groups) for groups in layouts if len(groups) > 1]


def _two_groups(times_s: Array) -> tuple[tuple[int, ...], ...]:
    """The two groups of highest throughput: a cut in the order of times."""
    order = np.argsort(times_s, kind="stable")
    ordered, n = times_s[order], len(times_s)
    if n < 2:
        return (tuple(range(n)),)
    cut = np.arange(1, n)
    best = int(cut[np.argmax(cut / ordered[:-1] + (n - cut) / ordered[-1])])
    fast, slow = sorted(order[:best].tolist()), sorted(order[best:].tolist())
    return tuple(sorted((tuple(fast), tuple(slow))))


def _best_links(conditions: Conditions, bad: Collection[int], hosts: Sequence[str] | None) -> list[int]:
    """One rank of each host without trouble, of the hosts with the best links: enough to choose servers from.

    The bytes of all ranks still have to be taken in.
    """
    order = np.argsort(-conditions.rate, kind="stable").tolist()
    if hosts is None:
        return sorted([rank for rank in order[: _BEST + len(bad)] if rank not in bad][:_BEST])
    taken, found = {hosts[rank] for rank in bad}, []
    for rank in order:
        if hosts[rank] not in taken:
            taken.add(hosts[rank])
            found.append(rank)
            if len(found) == _HOSTS:
                break
    return sorted(found)


def _servers(
    conditions: Conditions, trouble: StragglerSummary, hosts: Sequence[str] | None, left_out: int
) -> list[Plan]:
    n = conditions.world_size
    bad = {*trouble.slow, *trouble.links, *trouble.frozen}
    ranks: Sequence[int] = range(n)
    if n > _MANY:
        ranks = _best_links(conditions, bad, hosts) or ranks
    servers = place_on_hosts(
        ranks,
        hosts=hosts,
        slow=bad,
        link_bytes_per_s=conditions.rate.tolist(),
        state_bytes=int(conditions.comm_bytes),
        push_bytes=int(conditions.comm_bytes * n / len(ranks)),
        round_s=PUSH_ROUND_S,
    ).servers
    out = [len(bad), *trouble.at_once]
    wanted = sorted({n - count for count in out if 0 < count <= left_out}, reverse=True)
    if n > _MANY:
        return [Plan.ps(n, x, servers=servers) for x in wanted[:1]]
    plans = [Plan.ps(n, x, servers=servers) for x in wanted]
    costly = conditions.prices[0] >= _COSTLY_STALENESS
    plans += [
        Plan.ps(n, x, rule="backup", lr_rule="none", servers=servers)
        for x in wanted[:1]
        if costly or n - x <= _BACKUP_SHARE * n
    ]
    plans.append(Plan.ps(n, 1, servers=servers))
    if n <= _FEW:
        groups = similar_groups(conditions.usual_s.tolist())
        if 1 < len(groups) < n:
            plans.append(Plan.ps(n, 1, rule="groups", groups=groups, servers=servers))
    return plans
