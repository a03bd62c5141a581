"""`star-scheduler promote`: the champion changes through a gate, and through nothing else."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence

from scheduler.cli.evaluate import chooser, defender, judge, keep, table, titled, truth
from scheduler.learning.evaluate import BASELINES, HELD_OUT_SEED, Regrets, standings
from scheduler.learning.predictor import ModelError, load

__all__ = ["LEAST_COVERAGE", "MOST_COVERAGE", "add_arguments", "gate", "run"]

LEAST_COVERAGE, MOST_COVERAGE = 0.85, 0.95


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the subcommand."""
    parser.epilog = (
        "The challenger must have no more mean regret than the champion, or the shipped model where there is none yet, "
        f"and than the cost model; its 90 %% intervals must cover {100 * LEAST_COVERAGE:.0f} to "
        f"{100 * MOST_COVERAGE:.0f} %%. Exit status: 0 where it is champion now, 1 where the champion stays, 2 where "
        "there is no challenger."
    )
    parser.add_argument("--scenarios", type=int, default=40, help="scenarios to simulate (default 40, minutes)")
    parser.add_argument("--seed", type=int, default=HELD_OUT_SEED + 100_000, help="first seed")


def run(options: argparse.Namespace) -> int:
    """Judge the challenger; exit status 1 where the gate stays shut."""
    from rich.console import Console

    from scheduler.learning.registry import CHALLENGER, CHAMPION, Registry
    from scheduler.redact import redacted

    if options.scenarios < 1:
        raise ValueError(f"--scenarios is {options.scenarios}; expected at least 1")
    console, registry = Console(), Registry(os.environ)
    version = registry.alias(CHALLENGER)
    if version is None:
        shown = redacted(registry.uri)
        raise ModelError(f"{registry.name} has no {CHALLENGER} in {shown}; run `star-scheduler train` first")
    challenger, champion = load(registry.download(CHALLENGER)), defender(registry, CHALLENGER)
    assert champion is not None
    names = {"learned": titled(version, CHALLENGER), "champion": champion[0]}
    policies = {"learned": chooser(challenger), "champion": chooser(champion[1]), "cost_model": BASELINES["cost_model"]}
    rows = judge(policies, options.scenarios, options.seed)
    console.print(table(rows, names))
    metrics = challenger.about.get("metrics", {})
    console.print(truth(metrics, len(rows)), highlight=False)
    console.print(keep(registry, version, "promote", rows), highlight=False)
    problems = gate(rows, metrics, names)
    for problem in problems:
        console.print(f"no: {problem}", highlight=False)
    if problems:
        console.print(f"the champion stays: {champion[0]}", highlight=False)
        return 1
    mean = {one.name: one.mean for one in standings(rows)}
    registry.promote(version, {"regret": mean["learned"], "coverage": metrics["coverage"]})
    console.print(f"{version.name} version {version.number} is {CHAMPION} now", highlight=False)
    return 0


def gate(rows: Sequence[Regrets], metrics: Mapping[str, float], names: Mapping[str, str] | None = None) -> list[str]:
    """Why the challenger, `learned` in the rows, must not become champion; empty where it may.

    Its regret must not exceed that of the champion, or of the cost model, and its intervals must be true.

    Args:
        rows: Regrets of `learned`, `champion` and `cost_model`.
        metrics: Of the challenger's training, with `coverage`.
        names: What to call them, where not so.
    """
    called = dict(names or {})
    mean = {one.name: one.mean for one in standings(rows)}
    own = f"its mean regret is {100.0 * mean['learned']:.2f} %"
    found = [
        f"{own}, that of {called.get(name, name)} {100.0 * mean[name]:.2f} %"
        for name in ("champion", "cost_model")
        if name in mean and mean["learned"] > mean[name]
    ]
    coverage = metrics.get("coverage", float("nan"))
    if not LEAST_COVERAGE <= coverage <= MOST_COVERAGE:
        wanted = f"{100.0 * LEAST_COVERAGE:.0f} to {100.0 * MOST_COVERAGE:.0f} %"
        found.append(f"its 90 % intervals cover {100.0 * coverage:.1f} %; expected {wanted}")
    return found
