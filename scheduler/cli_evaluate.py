"""`star-scheduler evaluate`: who chooses best in simulated jobs that no model was trained on."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scheduler.cost_policy import CostPolicy
from scheduler.evaluate import BASELINES, HELD_OUT_SEED, Factory, Regrets, regrets, standings, summary
from scheduler.predictor import SHIPPED, ModelError, Predictor, load

__all__ = ["add_arguments", "chooser", "judge", "locate", "run", "table"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the subcommand."""
    parser.add_argument(
        "--model", default="challenger",
        help="`challenger` (default) or another alias, a folder, a URI models:/..., or `shipped`",
    )
    parser.add_argument("--scenarios", type=int, default=60, help="scenarios to simulate (default 60, minutes)")
    parser.add_argument("--seed", type=int, default=HELD_OUT_SEED, help="first seed")
    parser.add_argument("--json", type=Path, help="write all figures to this file")


def run(options: argparse.Namespace) -> int:
    """Judge, print a table; exit status 1 where the model is not better than the cost model."""
    from rich.console import Console

    if options.scenarios < 1:
        raise ValueError(f"--scenarios is {options.scenarios}; expected at least 1")
    policies = {"learned": chooser(load(locate(options.model)))}
    champion = _champion(options.model)
    if champion is not None:
        policies["champion"] = chooser(champion)
    rows = judge({**BASELINES, **policies}, options.scenarios, options.seed)
    Console().print(table(rows))
    found = summary(rows, "learned")
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0 if found["mean_regret"] <= found["baselines"]["cost_model"] else 1


def locate(name: str) -> Path:
    """The folder of a model that is named by alias, path, URI or `shipped`.

    Raises:
        ModelError: There is none.
    """
    from scheduler.registry import Registry, fetch

    if name == "shipped":
        return SHIPPED
    if name.startswith("models:/"):
        return fetch(name, os.environ, deadline_s=120.0)
    if Path(name).is_dir():
        return Path(name)
    if os.sep in name:
        raise ModelError(f"no model in {name}: there is no such folder")
    return Registry(os.environ).download(name)


def _champion(but: str) -> Predictor | None:
    """The champion, where there is one besides the model to judge."""
    from scheduler.registry import CHAMPION, Registry

    if but == CHAMPION or importlib.util.find_spec("mlflow") is None:
        return None
    registry = Registry(os.environ)
    return load(registry.download(CHAMPION)) if registry.alias(CHAMPION) is not None else None


def chooser(predictor: Predictor) -> Factory:
    """A factory of policies that go by a model."""
    return lambda n, hosts: CostPolicy(n, ranker=predictor, hosts=hosts)


def judge(policies: dict[str, Factory], scenarios: int, seed: int) -> list[Regrets]:
    """Regrets of policies in `scenarios` scenarios from `seed` on, with a progress bar on the terminal."""
    from rich.console import Console
    from rich.progress import track

    from scheduler.simulator.scenario import draw_scenario

    seeds = range(seed, seed + scenarios)
    watched = track(seeds, description="simulating", console=Console(stderr=True), transient=True)
    return [regrets(draw_scenario(one, steps=400.0), policies) for one in watched]


def table(rows: Sequence[Regrets]) -> Any:
    """Mean, median and worst regret of every policy and mode, the best first."""
    from rich.table import Table

    found = Table(title=f"Regret against the best fixed mode in hindsight, {len(rows)} scenarios")
    for column in ("policy or mode", "mean", "median", "worst"):
        found.add_column(column, justify="left" if column.startswith("policy") else "right")
    for one in standings(rows):
        cells = (f"{100.0 * value:.1f} %" for value in (one.mean, one.median, one.worst))
        found.add_row(one.name, *cells, style=None if one.fixed else "bold")
    return found
