"""The candidate plans of a decision: a small set, deterministic in the conditions.

All modes, with arguments taken from the expected times: as many ranks are left out as are slow at once, and groups and
members follow speed and link, servers avoid hosts with stragglers. While no rank is slow the candidates are `sync`, the
active plan and `partial` without one rank. `local` is offered against slow ranks and links only, never because a rank
froze or for communication alone: equal ranks stay in `sync`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler.balance.share_policy import solve_shares
from scheduler.cost.conditions import Array, Conditions
from scheduler.cost.cost_model import part_behind_compute
from scheduler.diagnosis.links import reference_rate, ring_bytes, slow_links, worth_a_switch
from scheduler.diagnosis.window_stats import THRESHOLD, slow_limit_s
from scheduler.plan.grouping import progressive_groups, similar_groups
from scheduler.plan.headroom import server_cores
from scheduler.plan.placement import PUSH_ROUND_S, PlacementDecision, place_on_hosts
from scheduler.plan.plan import MODES, Plan
from scheduler.plan.transmission import BACKGROUND_MODES, Transmission
from scheduler.transmission.behind_compute import WORTH

__all__ = ["LEAST_SHARE", "StragglerSummary", "candidates", "enough_ranks", "most_left_out", "place", "reachable",
           "same_plan", "summarize_stragglers"]

_INTERMITTENT = 0.08
"""Share of slow reports above which a rank is intermittent; 3 % of alexnet's reports exceed `RESOLUTION_S` by its 5 ms
of jitter alone."""

_MANY = 64
"""Above this many ranks, groups are formed by one cut instead of a table of n^2 entries, and only plans that answer the
causes found are offered: the others cost milliseconds to replay and rarely win there. ASGD has a drift of nearly 1, and
servers receive the gradients of all ranks: they are offered against slow links and freezes only."""

_BEST, _HOSTS = 8, 32  # Ranks considered when choosing one server, and hosts when choosing many.

_COSTLY_STALENESS, _BACKUP_SHARE = 0.6, 0.25
"""Late gradients may be dropped (backup workers, Chen et al. 2016) from this price of staleness on, or if they are at
most this share of all. On Fashion-MNIST, where staleness is cheap, dropping those of two slow ranks of four cost one
point of accuracy, which no prediction showed."""

_FEW = 32
"""Most ranks for which similar ones are clustered, which takes O(n^3)."""

_SLIGHTLY = 1.15
"""Multiple of the typical time above which one of the subgroups leaves a rank out. In `partial` the grace covers it."""

LEAST_SHARE = 0.5
"""Least share of the ranks that a step waits for: with fewer the training differs from what the model was validated
on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerSummary:
    """Which ranks are slow, by the expected times.

    Attributes:
        slow: Ranks whose mean compute time is above the limit of slow.
        intermittent: Ranks that are slow in some of the steps.
        links: Ranks with a slow link.
        at_once: Numbers of ranks slow in the same step, over steps with any: median, 90 % quantile, and others;
            ascending.
        frozen: Ranks that freeze repeatedly.
    """

    slow: tuple[int, ...]
    intermittent: tuple[int, ...]
    links: tuple[int, ...]
    at_once: tuple[int, ...]
    frozen: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.slow or self.intermittent or self.links or self.frozen)


def most_left_out(world_size: int, least_share: float = LEAST_SHARE) -> int:
    """Most ranks that a plan may leave out, at least one."""
    return max(1, world_size - math.ceil(least_share * world_size - 1e-9))


def summarize_stragglers(conditions: Conditions, least_share: float = LEAST_SHARE) -> StragglerSummary:
    """Find the stragglers in the expected times; `at_once` is limited to what a plan may leave out."""
    times = conditions.times_s
    usual_s, typical_s = conditions.usual_s, conditions.typical_s
    limit_s = slow_limit_s(typical_s)
    late = times > limit_s
    if conditions.same_steps:  # A step that is long for all ranks is no rank's slowness.
        late &= times > THRESHOLD * times.min(axis=1, keepdims=True)
    share = late.mean(axis=0)
    slow = np.flatnonzero(usual_s > limit_s)
    intermittent = np.flatnonzero((share > _INTERMITTENT) & ~(usual_s > limit_s))
    links = _slow_links(conditions)
    # A batch of 4 usual times misses 4 steps: once no step waits, more ranks are late at once than become late.
    load = np.ceil(times / typical_s - 0.25) - 1.0
    overlap = np.where(late, np.maximum(load, 1.0), 0.0).sum(axis=1).mean()
    counts = sorted(count for count in late.sum(axis=1).tolist() if count)
    at_once = {int(_quantile(counts, 0.5)), int(_quantile(counts, 0.9)), round(float(overlap))} if counts else {1}
    most = most_left_out(conditions.world_size, least_share)
    if 0 < len(slow) <= most:
        at_once.add(len(slow))
    return StragglerSummary(
        slow=tuple(slow.tolist()),
        intermittent=tuple(intermittent.tolist()),
        links=tuple(links.tolist()),
        at_once=tuple(sorted({min(max(1, count), most) for count in at_once})),
        frozen=tuple(conditions.freezing),
    )


def _quantile(ordered: Sequence[int], share: float) -> float:
    """Interpolated quantile, as numpy's, whose call takes longer than the rest of the function."""
    place = share * (len(ordered) - 1)
    low = int(place)
    return ordered[low] + (place - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])


def _slow_links(conditions: Conditions) -> npt.NDArray[np.int64]:
    """Ranks with a slow link whose step would become sufficiently shorter with a usual link."""
    slow = slow_links(conditions.rate)
    if not slow.any():
        return np.flatnonzero(slow)
    wire_s = ring_bytes(conditions.world_size, conditions.reduced_bytes) / conditions.rate
    saved_s = wire_s * (1.0 - conditions.rate / reference_rate(conditions.rate))
    return np.flatnonzero(slow & worth_a_switch(saved_s, conditions.typical_s + wire_s))


def candidates(
    conditions: Conditions,
    active: Plan | None = None,
    *,
    allowed: Collection[str] = MODES,
    blocked: Collection[str] = (),
    hosts: Sequence[str] | None = None,
    stragglers: StragglerSummary | None = None,
    least_share: float = LEAST_SHARE,
) -> list[Plan]:
    """Return the plans to choose among, without duplicates: `sync` first, then the active one.

    Args:
        conditions: Expected times, links and prices.
        active: The active plan, always included while its mode is allowed or blocked. Other plans take its
            bound on staleness and, in `sync`, `partial` and `subgroup`, its damping.
        allowed: Modes this job can run. `sync` is offered if no other is.
        blocked: Modes that only the active plan may have.
        hosts: Host of every rank, to place servers.
        stragglers: Result of `summarize_stragglers`, if the caller has it.
        least_share: See `enough_ranks`.
    """
    n = conditions.world_size
    offered = [active if active is not None and active.plain else Plan.sync(n)]
    if n > 1:
        stragglers = summarize_stragglers(conditions, least_share) if stragglers is None else stragglers
        offered += [active] if active is not None else []
        offered += [Plan.partial(n, n - out) for out in stragglers.at_once if out < n]
        if stragglers:
            offered += _against(stragglers, conditions, active, hosts, most_left_out(n, least_share))
            offered = _with_transmission(offered, conditions, active)
    carried = {"max_staleness": active.max_staleness} if active is not None else {}
    if active is not None and active.mode in ("sync", "partial", "subgroup"):
        carried["damping"] = active.damping  # type: ignore[assignment]
    found: dict[tuple[object, ...], Plan] = {}
    for plan in offered:
        if plan.mode not in allowed and not (plan is active and plan.mode in blocked):
            continue
        if plan is not active and not (enough_ranks(plan, least_share) and reachable(plan, active)):
            continue
        if plan is not active and plan.mode in ("sync", "partial", "subgroup"):
            differs = any(getattr(plan, name) != value for name, value in carried.items())
            plan = plan.replace(**carried) if differs else plan
        found.setdefault(_key(plan), plan)
    return list(found.values()) or [Plan.sync(n).replace(**carried)]


def _against(
    stragglers: StragglerSummary,
    conditions: Conditions,
    active: Plan | None,
    hosts: Sequence[str] | None,
    most: int,
) -> list[Plan]:
    """Plans that may help against these stragglers; `most` ranks may be left out."""
    n = conditions.world_size
    offered = _balanced(conditions, stragglers)
    offered += [Plan.sync(n, steal=True)] if conditions.microbatches else []
    offered += _subgroups(conditions, stragglers, most)
    servers = _server_ranks(conditions, stragglers, hosts, active)
    if servers is not None:
        offered += _grouped(conditions)
        if n <= _MANY or stragglers.links or stragglers.frozen:
            offered += _servers(conditions, stragglers, servers, most)
    if n <= _MANY:
        # The grace waits for ranks not known to be slow: a quorum of half the ranks, or of the least share if that is
        # larger, costs at most noise.
        offered += [Plan.partial(n, max(n // 2, n - most))]
    return offered + (_locals(conditions) if stragglers.slow or stragglers.intermittent or stragglers.links else [])


def _locals(conditions: Conditions) -> list[Plan]:
    """Modes without a collective in each step. An averaging waits for a frozen rank as long as steps of `sync` do."""
    n = conditions.world_size
    steps = (4, 16) if n <= _MANY else (4,)
    return [
        *(Plan.local(n, steps=count) for count in steps),
        Plan.local(n, seconds=round(6.0 * conditions.typical_s, 4)),
    ]


def _with_transmission(offered: list[Plan], conditions: Conditions, active: Plan | None) -> list[Plan]:
    """Give plans of servers the active session's transmission, and add variants behind compute that shorten a step.

    Subgroups get no variant: their steps do not wait for a child, and one that sent behind compute made steps of a job
    with one slow link longer (294 instead of 207 ms).
    """
    served = active is not None and active.mode == "ps"
    found = offered
    if active is not None and served:
        # The active plan is no copy: `candidates` keeps it by its identity where its mode is blocked.
        found = [
            plan.replace(transmission=active.transmission) if plan.mode == "ps" and plan is not active else plan
            for plan in offered
        ]
    if conditions.background is not None:
        return found  # The user's settings decide.
    plain = [plan for plan in found if plan.transmission is None and not (served and plan.mode == "ps")]
    return found + [
        plan.replace(transmission=Transmission(background=True))
        for plan in plain
        if plan.mode in BACKGROUND_MODES and part_behind_compute(plan, conditions) <= WORTH
    ]


def enough_ranks(plan: Plan, least_share: float = LEAST_SHARE) -> bool:
    """Whether steps wait for enough fresh gradients for `auto` to choose the plan.

    `partial`, `subgroup` and backup workers leave ranks out. `ps` with x below n and `grouped` do not: every gradient
    is part of an update, of length x / n, when it arrives. A subgroup of one member would be one rank training alone.

    Args:
        plan: The plan.
        least_share: Share of the ranks, 0 to 1.
    """
    if plan.mode in ("partial", "subgroup") or plan.rule in ("backup", "grace"):
        least = max(least_share * plan.world_size, 2.0 if plan.mode == "subgroup" else 1.0)
        return plan.quorum >= least - 1e-9
    return True


def reachable(plan: Plan, active: Plan | None) -> bool:
    """Whether a plan can follow the active one without `sync` between them; the rules of `scheduler.plan.completion`.

    A candidate that completion rejects each time it is chosen would block every other one.
    """
    if active is None or plan.family != active.family:
        return True
    return plan.family != "subgroup" or bool(set(plan.members) & set(active.members))


def same_plan(one: Plan, other: Plan) -> bool:
    """Whether two plans are equal apart from id and reason."""
    return one is other or _key(one) == _key(other)


def _key(plan: Plan) -> tuple[object, ...]:
    """The fields that distinguish plans."""
    shares = () if plan.balanced else plan.batch_shares  # Shares that follow the ranks' speed do not make another plan.
    return (plan.mode, plan.balanced, plan.steal, shares, plan.quorum, plan.members, plan.groups, plan.rule, plan.slack,
            plan.servers, plan.local_steps, plan.local_s, plan.lr_rule, plan.transmission)


def _balanced(conditions: Conditions, stragglers: StragglerSummary) -> list[Plan]:
    """Batch shares by speed, if `shard` forms the batches and a rank is slow all the time."""
    if not conditions.batch or not stragglers.slow:
        return []
    shares = solve_shares(conditions.usual_s.tolist(), conditions.batch, conditions.fixed_part)
    if max(shares) == min(shares):
        return []
    return [Plan.sync(conditions.world_size, balanced=True, batch_shares=shares)]


def _subgroups(conditions: Conditions, stragglers: StragglerSummary, most: int) -> list[Plan]:
    """Subgroups without the slow ranks, without slow links, without both, and also without slightly slower ranks."""
    n, plans = conditions.world_size, []
    both = frozenset((*stragglers.slow, *stragglers.links))
    without = [frozenset(stragglers.slow), frozenset(stragglers.links), both]
    if n <= _MANY:
        slower = np.flatnonzero(conditions.usual_s > _SLIGHTLY * conditions.typical_s)
        without.append(both | frozenset(slower.tolist()))
    for left_out in dict.fromkeys(without):
        if 0 < len(left_out) <= most:
            plans.append(Plan.subgroup(n, [r for r in range(n) if r not in left_out]))
    return plans


def _grouped(conditions: Conditions) -> list[Plan]:
    """Two groups by speed, and as many as progressive grouping forms."""
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
    """One rank of each host without stragglers, best links first: enough to choose servers from."""
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


def place(conditions: Conditions, stragglers: StragglerSummary, hosts: Sequence[str] | None) -> PlacementDecision:
    """Place the servers of candidates: on idle hosts without stragglers and without jobs that they would slow down."""
    n = conditions.world_size
    bad = {*stragglers.slow, *stragglers.links, *stragglers.frozen}
    ranks: Sequence[int] = range(n)
    if n > _MANY:
        ranks = _best_links(conditions, bad, hosts) or ranks
    return place_on_hosts(
        ranks,
        hosts=hosts,
        slow=bad,
        link_bytes_per_s=conditions.rate.tolist(),
        state_bytes=int(conditions.comm_bytes),
        push_bytes=int(conditions.comm_bytes * n / len(ranks)),
        round_s=PUSH_ROUND_S,
        headroom=conditions.headroom or None,
        need_cores=server_cores(n / conditions.typical_s, conditions.comm_bytes),
    )


def _server_ranks(
    conditions: Conditions, stragglers: StragglerSummary, hosts: Sequence[str] | None, active: Plan | None
) -> tuple[int, ...] | None:
    """The ranks that would run the servers of `ps` and `grouped`; None if these are not offered.

    They are not where ranks wait for processors or another job would get slower, unless a rank freezes, which stops the
    job in every other mode.
    """
    if conditions.crowded and not stragglers.frozen:
        return None
    if conditions.headroom and active is not None and active.servers:
        return active.servers  # They already run, so the cores they use no longer count as idle.
    placed = place(conditions, stragglers, hosts)
    return None if placed.slows and not stragglers.frozen else placed.servers


def _servers(
    conditions: Conditions, stragglers: StragglerSummary, servers: tuple[int, ...], left_out: int
) -> list[Plan]:
    n = conditions.world_size
    bad = {*stragglers.slow, *stragglers.links, *stragglers.frozen}
    out = [len(bad), *stragglers.at_once]
    wanted = sorted({n - count for count in out if 0 < count <= left_out}, reverse=True)
    if n > _MANY:
        return [Plan.ps(n, x, servers=servers) for x in wanted[:1]]
    plans = [Plan.ps(n, x, servers=servers) for x in wanted]
    costly = conditions.prices[0] >= _COSTLY_STALENESS
    plans += [
        Plan.ps(n, x, rule="grace", lr_rule="none", servers=servers)
        for x in wanted[:1]
        if costly or n - x <= _BACKUP_SHARE * n
    ]
    plans.append(Plan.ps(n, 1, servers=servers))
    if n <= _FEW:
        groups = similar_groups(conditions.usual_s.tolist())
        if 1 < len(groups) < n:
            plans.append(Plan.ps(n, 1, rule="groups", groups=groups, servers=servers))
    return plans
