"""`star-scheduler promote`: makes the challenger champion if it passes a gate."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from typing import Any

from scheduler.cli.evaluate import (
    FEW_SCENARIOS,
    check_scenarios,
    find_champion,
    find_version,
    log_regrets,
    model_title,
    on_real_runs,
    policy_factory,
    reliability,
    run_scenarios,
    table,
)
from scheduler.learning.evaluate import BASELINES, HELD_OUT_SEED, Regrets, standings
from scheduler.learning.predictor import load

__all__ = ["LEAST_COVERAGE", "MOST_COVERAGE", "add_arguments", "gate", "run"]

LEAST_COVERAGE, MOST_COVERAGE = 0.85, 0.95


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    parser.epilog = (
        "The challenger's mean regret must not exceed that of the champion (the shipped model if there is none that "
        f"can be used) or of the cost model; its 90 % intervals must cover {100 * LEAST_COVERAGE:.0f} to "
        f"{100 * MOST_COVERAGE:.0f} %, and its tables must have rows without known link rates and without observed "
        "prices of staleness. Exit status: 0 if it is champion now, 1 if it is not, 2 if there is no challenger or "
        "MLflow cannot be asked."
    )
    parser.add_argument(
        "--scenarios", type=int, default=40,
        help=f"scenarios to simulate (default 40, minutes); fewer than {FEW_SCENARIOS} are rejected",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=HELD_OUT_SEED + 100_000, help="first seed")


def run(options: argparse.Namespace) -> int:
    """Evaluate the challenger and promote it; exit status 1 if the gate rejects it."""
    from rich.console import Console

    from scheduler.learning.registry import CHALLENGER, CHAMPION, Registry

    check_scenarios(options)
    console, registry = Console(), Registry(os.environ)
    version, before = find_version(registry, CHALLENGER), registry.alias(CHAMPION)
    challenger, champion = load(registry.download(version)), find_champion(registry, CHALLENGER)
    assert champion is not None
    if blind := challenger.blind_spots():  # Before the simulation, which takes minutes.
        return _rejected(console, blind, champion[0])
    names = {"learned": model_title(version, CHALLENGER), "champion": champion[0]}
    policies = {"learned": policy_factory(challenger), "champion": policy_factory(champion[1])}
    policies["cost_model"] = BASELINES["cost_model"]
    rows = run_scenarios(policies, options.scenarios, options.seed)
    console.print(table(rows, names))
    metrics = challenger.about.get("metrics", {})
    console.print(reliability(metrics, len(rows)), highlight=False)
    console.print(on_real_runs(metrics), highlight=False)
    console.print(log_regrets(registry, version, "promote", rows), highlight=False)
    if problems := gate(rows, metrics, names):
        return _rejected(console, problems, champion[0])
    # The simulation takes minutes: another promotion may have ended, and this model was not compared with its champion.
    if registry.alias(CHAMPION) != before:
        console.print("the champion changed meanwhile; run promote again", highlight=False)
        return 1
    mean = {one.name: one.mean for one in standings(rows)}
    registry.promote(version, {"regret": mean["learned"], "coverage": metrics["coverage"]})
    console.print(f"{version.name} version {version.number} is {CHAMPION} now", highlight=False)
    return 0


def _rejected(console: Any, problems: Sequence[str], champion: str) -> int:
    """Say why the challenger is rejected; returns the exit status."""
    for problem in problems:
        console.print(f"rejected: {problem}", highlight=False)
    console.print(f"the champion stays: {champion}", highlight=False)
    return 1


def gate(rows: Sequence[Regrets], metrics: Mapping[str, float], names: Mapping[str, str] | None = None) -> list[str]:
    """Return why the challenger, `learned` in the rows, must not become champion; empty if it may.

    Its regret must not exceed that of the champion or of the cost model, in enough scenarios that the mean says
    something, and its intervals must be calibrated.

    Args:
        rows: Regrets of `learned`, `champion` and `cost_model`.
        metrics: Metrics of the challenger's training, with `coverage`.
        names: Their titles; default: these names.
    """
    called = dict(names or {})
    mean = {one.name: one.mean for one in standings(rows)}
    own = f"its mean regret is {100.0 * mean['learned']:.2f} %"
    found = [
        f"{own}, that of {called.get(name, name)} {100.0 * mean[name]:.2f} %"
        for name in ("champion", "cost_model")
        if name in mean and mean["learned"] > mean[name]
    ]
    if len(rows) < FEW_SCENARIOS:
        found.append(f"it was judged in {len(rows)} scenarios; expected at least {FEW_SCENARIOS}")
    coverage = metrics.get("coverage", float("nan"))
    if not LEAST_COVERAGE <= coverage <= MOST_COVERAGE:
        wanted = f"{100.0 * LEAST_COVERAGE:.0f} to {100.0 * MOST_COVERAGE:.0f} %"
        found.append(f"its 90 % intervals cover {100.0 * coverage:.1f} %; expected {wanted}")
    return found
