"""Regret of policies against the best fixed mode in hindsight, in held-out simulated jobs.

Every scenario is a newly drawn network, cluster and contention; all fixed modes are simulated to the target, then every
policy. Regret is the expected time to the target (a job that misses it is repeated in `sync`) relative to the best
fixed mode's, minus 1: negative if switching beats every fixed mode. `oracle` is that best fixed mode.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from scheduler.cost.conditions import Conditions
from scheduler.plan.plan import Plan
from scheduler.policy.candidates import candidates
from scheduler.policy.cost_policy import CostPolicy
from scheduler.policy.rule_policy import RulePolicy
from scheduler.policy.star_heuristic import StarHeuristic
from scheduler.simulator.job import Job, Outcome, Policy, mean_times_s, run_plans
from scheduler.simulator.scenario import Scenario

__all__ = [
    "BASELINES",
    "HELD_OUT_SEED",
    "Factory",
    "Regrets",
    "Standing",
    "cost_s",
    "fixed_plans",
    "hosts",
    "regrets",
    "standings",
    "summary",
]

Factory = Callable[[int, Sequence[str]], Policy]

HELD_OUT_SEED = 1_000_000
"""First seed of held-out scenarios; training draws seeds below."""

_WORST = 10.0
"""A job ends after this many times the best fixed mode's time, so that the mean is not dominated by outliers."""

BASELINES: dict[str, Factory] = {
    "cost_model": lambda n, hosts: CostPolicy(n, hosts=hosts),
    "rule": lambda n, hosts: RulePolicy(n, hosts=hosts),
    "star_heuristic": lambda n, hosts: StarHeuristic(n),
    "star_heuristic_all_reduce": lambda n, hosts: StarHeuristic(n, architecture="all_reduce"),
}


@dataclass(frozen=True, slots=True)
class Regrets:
    """Regret of every policy and fixed mode in one scenario.

    Attributes:
        seed: Seed of the scenario.
        family: Family of its network.
        best: Name of the best fixed mode.
        best_s: Its expected time.
        regret: Regret by name.
        switches: Number of switches by policy.
    """

    seed: int
    family: str
    best: str
    best_s: float
    regret: dict[str, float]
    switches: dict[str, int]


@dataclass(frozen=True, slots=True)
class Standing:
    """Regret of one policy or mode over scenarios.

    Attributes:
        name: Name of the policy or mode.
        mean, median, worst: Statistics of its regret.
        fixed: Whether it is a fixed mode.
    """

    name: str
    mean: float
    median: float
    worst: float
    fixed: bool


def hosts(n: int) -> list[str]:
    """Names of hosts with one rank each."""
    return [f"host{rank}" for rank in range(n)]


def fixed_plans(scenario: Scenario) -> dict[str, Plan]:
    """Return every fixed mode, with arguments from hindsight; a name means the same in all scenarios."""
    n = scenario.world_size
    mean_s = mean_times_s(scenario)
    usual = sorted(mean_s)[(n - 1) // 2]
    rate = [float(r) for r in scenario.cluster.link_bytes_per_s]
    for episode in scenario.episodes:
        if episode.kind == "link":
            rate[episode.rank] = min(rate[episode.rank], rate[episode.rank] / episode.factor)
    middle = sorted(rate)[(n - 1) // 2]
    fast = [r for r in range(n) if mean_s[r] <= 1.15 * usual and rate[r] > 0.6 * middle]
    order = sorted(range(n), key=lambda r: (r in fast, -mean_s[r]))
    members = fast if n // 2 <= len(fast) < n else sorted(set(range(n)) - set(order[: max(1, n // 8)]))
    conditions = Conditions(
        times_s=np.array([mean_s]), rate=np.array(rate), comm_bytes=float(scenario.network.comm_bytes)
    )
    plans = {
        "sync": Plan.sync(n),
        "partial(n-1)": Plan.partial(n, n - 1),
        "partial(3n/4)": Plan.partial(n, max(1, 3 * n // 4)),
        "partial(n/2)": Plan.partial(n, max(1, n // 2)),
        "subgroup": Plan.subgroup(n, members),
        "grouped(2)": Plan.grouped(n, 2),
        "local(4)": Plan.local(n, steps=4),
        "local(16)": Plan.local(n, steps=16),
    }
    servers = next((p.servers for p in candidates(conditions, hosts=hosts(n)) if p.mode == "ps"), tuple(fast[:2]))
    for x, name in ((n - 1, "n-1"), (max(1, 3 * n // 4), "3n/4"), (max(1, n // 2), "n/2"), (1, "1")):
        plans[f"ps({name})"] = Plan.ps(n, x, servers=servers)
    plans["ps(backup=1)"] = Plan.ps(n, n - 1, rule="backup", lr_rule="none", servers=servers)
    plans["ps(dynamic)"] = Plan.ps(n, 1, rule="groups", servers=servers)
    return {name: plan for name, plan in plans.items() if plan.mode in scenario.allowed}


def regrets(scenario: Scenario, policies: Mapping[str, Factory]) -> Regrets:
    """Simulate all fixed modes and all policies in one scenario."""
    plans = fixed_plans(scenario)
    n = scenario.world_size
    sync = run_plans([scenario], [plans["sync"]])[0]
    rest = [name for name in plans if name != "sync"]
    found = run_plans([scenario] * len(rest), [plans[name] for name in rest], limit_s=2.0 * sync.time_s)
    costs = {"sync": sync.time_s}
    costs.update({name: cost_s(o, sync.time_s) for name, o in zip(rest, found, strict=True)})
    best = min(costs, key=lambda name: costs[name])
    best_s = costs[best]
    switches: dict[str, int] = {}
    for name, make in policies.items():
        job = Job(scenario, policy=make(n, hosts(n)))
        outcome = job.run(limit_s=max(_WORST * best_s, 2.0 * sync.time_s))
        costs[name] = cost_s(outcome, sync.time_s)
        switches[name] = len(outcome.switches)
    regret = {name: min(_WORST, cost / best_s) - 1.0 for name, cost in costs.items()}
    return Regrets(scenario.seed, scenario.network.family, best, best_s, {**regret, "oracle": 0.0}, switches)


def cost_s(outcome: Outcome, again_s: float) -> float:
    """Expected time; a job that missed the target is repeated after all the time that it took.

    Args:
        outcome: Result of the job.
        again_s: Time of the repetition, in `sync`.
    """
    if math.isinf(outcome.time_s):
        return outcome.updates * outcome.step_s + again_s
    return outcome.expected_s(again_s)


def standings(rows: Sequence[Regrets]) -> list[Standing]:
    """Statistics of every policy and mode over its scenarios, the best first."""
    found = []
    for name in {name for row in rows for name in row.regret}:
        own = [row.regret[name] for row in rows if name in row.regret]
        fixed = all(name not in row.switches for row in rows) and name != "oracle"
        found.append(Standing(name, statistics.fmean(own), statistics.median(own), max(own), fixed))
    return sorted(found, key=lambda one: (one.mean, one.name))


def summary(rows: Sequence[Regrets], judged: str) -> dict[str, Any]:
    """All results as JSON values; `mean_regret` is that of the policy `judged`."""
    order = standings(rows)
    mean = {one.name: one.mean for one in order}
    fixed = [one.name for one in order if one.fixed]
    return {
        "schema": 1,
        "policy": judged,
        "mean_regret": mean[judged],
        "baselines": {name: value for name, value in sorted(mean.items()) if name != judged},
        "median_regret": {one.name: one.median for one in order},
        "worst_regret": {one.name: one.worst for one in order},
        "best_single_mode": fixed[0] if fixed else "",
        "scenarios": len(rows),
        "held_out": {"first_seed": rows[0].seed, "families": sorted({row.family for row in rows})},
        "rows": [
            {"seed": r.seed, "family": r.family, "best": r.best, "best_s": r.best_s, "regret": r.regret,
             "switches": r.switches}
            for r in rows
        ],
    }
