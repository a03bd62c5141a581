"""How well policies choose: regret against the best fixed mode in hindsight, on simulated networks never seen.

    python -m benchmarks.policy --json FILE [--scenarios 60] [--policy module:factory]

Every scenario is a network, a cluster and contention drawn anew; all fixed modes are simulated to the target, then
every policy. The figure is expected time to the target (a job that misses it is run again in `sync`) over the best
fixed mode's, minus 1: negative where switching beats every fixed mode. `oracle` is that best fixed mode.
A learned policy is given as a factory `(world_size, hosts) -> policy` with the method `decide(window, active)`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from scheduler.candidates import candidates
from scheduler.cost_model import Conditions
from scheduler.cost_policy import CostPolicy
from scheduler.plans import Plan
from scheduler.policy import RulePolicy
from scheduler.simulator.job import Job, Outcome, Policy, mean_times_s, run_plans
from scheduler.simulator.scenario import Scenario, draw_scenario
from scheduler.star_heuristic import StarHeuristic

__all__ = ["BASELINES", "Regrets", "fixed_plans", "main", "regrets"]

Factory = Callable[[int, Sequence[str]], Policy]

HELD_OUT_SEED = 1_000_000
"""Scenarios from here on are for judging. Training draws seeds below."""

_WORST = 10.0
"""A job ends after as many times the best fixed mode's time: worse is not told apart, and a mean stays a mean."""

_REPORTED = ("sync", "partial(n-1)", "partial(n/2)", "subgroup", "ps(n-1)", "ps(backup=1)", "ps(1)", "grouped(2)",
             "local(4)", "local(16)")

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
        seed: Of the scenario.
        family: Of its network.
        best: Label of the best fixed mode.
        best_s: Its expected time.
        regret: By name.
        switches: Changes of plan, by policy.
    """

    seed: int
    family: str
    best: str
    best_s: float
    regret: dict[str, float]
    switches: dict[str, int]


def fixed_plans(scenario: Scenario) -> dict[str, Plan]:
    """Every mode by itself, with arguments that only hindsight knows; each name means the same in all scenarios."""
    import numpy as np

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
    servers = next((p.servers for p in candidates(conditions, hosts=_hosts(n)) if p.mode == "ps"), tuple(fast[:2]))
    for x, name in ((n - 1, "n-1"), (max(1, 3 * n // 4), "3n/4"), (max(1, n // 2), "n/2"), (1, "1")):
        plans[f"ps({name})"] = Plan.ps(n, x, servers=servers)
    plans["ps(backup=1)"] = Plan.ps(n, n - 1, rule="backup", lr_rule="none", servers=servers)
    plans["ps(dynamic)"] = Plan.ps(n, 1, rule="groups", servers=servers)
    return {name: plan for name, plan in plans.items() if plan.mode in scenario.allowed}


def _hosts(n: int) -> list[str]:
    return [f"host{rank}" for rank in range(n)]


def regrets(scenario: Scenario, policies: dict[str, Factory], *, every_steps: int = 4) -> Regrets:
    """Simulate all fixed modes and all policies in one scenario."""
    plans = fixed_plans(scenario)
    n = scenario.world_size
    sync = run_plans([scenario], [plans["sync"]])[0]
    rest = [name for name in plans if name != "sync"]
    found = run_plans([scenario] * len(rest), [plans[name] for name in rest], limit_s=2.0 * sync.time_s)
    costs = {"sync": sync.time_s}
    costs.update({name: _cost_s(o, sync.time_s) for name, o in zip(rest, found, strict=True)})
    best = min(costs, key=lambda name: costs[name])
    best_s = costs[best]
    switches: dict[str, int] = {}
    for name, make in policies.items():
        job = Job(scenario, policy=make(n, _hosts(n)), every_steps=every_steps)
        outcome = job.run(limit_s=max(_WORST * best_s, 2.0 * sync.time_s))
        costs[name] = _cost_s(outcome, sync.time_s)
        switches[name] = len(outcome.switches)
    regret = {name: min(_WORST, cost / best_s) - 1.0 for name, cost in costs.items()}
    return Regrets(scenario.seed, scenario.network.family, best, best_s, {**regret, "oracle": 0.0}, switches)


def _cost_s(outcome: Outcome, again_s: float) -> float:
    """Expected time; a job that did not get there is run again, after all the time it was given."""
    if outcome.time_s == float("inf"):
        return 2.0 * again_s + again_s
    return outcome.expected_s(again_s)


def _summary(rows: Sequence[Regrets], learned: str) -> dict[str, Any]:
    names = {name for row in rows for name in row.regret}
    mean = {name: statistics.fmean(row.regret[name] for row in rows if name in row.regret) for name in sorted(names)}
    middle = {name: statistics.median(row.regret[name] for row in rows if name in row.regret) for name in mean}
    worst = {name: max(row.regret[name] for row in rows if name in row.regret) for name in mean}
    chosen = learned if learned in mean else "cost_model"
    fixed = [name for name in mean if name not in {*BASELINES, "oracle", learned}]
    return {
        "schema": 1,
        "policy": chosen,
        "mean_regret": mean[chosen],
        "baselines": {name: value for name, value in mean.items() if name != chosen},
        "median_regret": middle,
        "worst_regret": worst,
        "best_single_mode": min(fixed, key=lambda name: mean[name]) if fixed else "",
        "scenarios": len(rows),
        "held_out": {"first_seed": rows[0].seed, "families": sorted({row.family for row in rows})},
        "rows": [
            {"seed": r.seed, "family": r.family, "best": r.best, "best_s": r.best_s, "regret": r.regret,
             "switches": r.switches}
            for r in rows
        ],
    }


def _table(summary: dict[str, Any]) -> Table:
    table = Table(title=f"Regret against the best fixed mode in hindsight, {summary['scenarios']} scenarios")
    for column in ("policy or mode", "mean", "median", "worst"):
        table.add_column(column, justify="left" if column.startswith("policy") else "right")
    mean = {summary["policy"]: summary["mean_regret"], **summary["baselines"]}
    for name in sorted(mean, key=lambda one: mean[one]):
        values = (mean[name], summary["median_regret"][name], summary["worst_regret"][name])
        table.add_row(name, *(f"{100.0 * value:.1f} %" for value in values))
    return table


def _learned(name: str) -> Factory:
    """The factory `module:attribute`."""
    module, _, attribute = name.partition(":")
    try:
        factory = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"--policy is {name!r}: {error}; expected module:factory") from None
    made: Factory = factory
    return made


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.policy", description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--scenarios", type=int, default=60, help="scenarios to simulate (default 60)")
    parser.add_argument("--seed", type=int, default=HELD_OUT_SEED, help="first seed")
    parser.add_argument("--ranks", type=int, default=0, help="ranks of every job; drawn if not given")
    parser.add_argument("--steps", type=float, default=400.0, help="synchronous steps to the target (default 400)")
    parser.add_argument("--pattern", default="", help="one pattern of contention only")
    parser.add_argument("--policy", help="module:factory of a further policy, compared as `learned`")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate, print a table, write JSON."""
    args = _parser().parse_args(argv)
    console = Console()
    policies = dict(BASELINES)
    try:
        if args.scenarios < 1:
            raise ValueError(f"--scenarios is {args.scenarios}; expected at least 1")
        if args.policy:
            policies["learned"] = _learned(args.policy)
        rows, begin_s = [], time.monotonic()
        for index in range(args.scenarios):
            scenario = draw_scenario(
                args.seed + index, world_size=args.ranks, pattern=args.pattern, steps=args.steps
            )
            rows.append(regrets(scenario, policies))
            if not console.is_terminal and (index + 1) % 10 == 0:
                console.print(f"[{index + 1}/{args.scenarios}] {time.monotonic() - begin_s:.0f} s", markup=False)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    summary = _summary(rows, "learned")
    console.print(_table(summary))
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
