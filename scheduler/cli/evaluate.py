"""`star-scheduler evaluate`: compares policies in held-out simulated jobs."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scheduler.commands import check_output
from scheduler.learning.evaluate import BASELINES, HELD_OUT_SEED, Factory, Regrets, regrets, standings, summary
from scheduler.learning.predictor import SHIPPED, ModelError, Predictor, load
from scheduler.policy.cost_policy import CostPolicy
from scheduler.redact import redacted

if TYPE_CHECKING:
    from scheduler.learning.registry import Registry, Version

__all__ = [
    "FEW_SCENARIOS",
    "Located",
    "add_arguments",
    "check_scenarios",
    "policy_factory",
    "find_champion",
    "find_version",
    "run_scenarios",
    "log_regrets",
    "locate",
    "run",
    "table",
    "model_title",
    "on_real_runs",
    "reliability",
]

FEW_SCENARIOS = 30
"""Regrets differ by tens of percent between scenarios, so the mean of fewer depends mostly on which were drawn."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    parser.epilog = (
        "Exit status: 0 if the model's mean regret is at most the cost model's, 1 if it is above, 2 if there is no "
        "model or MLflow cannot be asked. Figures of a registered model are added to the MLflow run that trained it."
    )
    parser.add_argument(
        "--model",
        default="challenger",
        help="`challenger` (default) or another alias, a folder, a URI models:/..., or `shipped`",
    )
    parser.add_argument("--scenarios", type=int, default=60, help="scenarios to simulate (default 60, minutes)")
    parser.add_argument("--seed", type=int, default=HELD_OUT_SEED, help="first seed (default and least %(default)s)")
    parser.add_argument("--json", type=Path, help="write all figures to this file")


def run(options: argparse.Namespace) -> int:
    """Evaluate a model and print a table; exit status 1 if the cost model is better."""
    from rich.console import Console

    check_scenarios(options)
    if options.json is not None:
        check_output(options.json, "--json")
    found_model = locate(options.model)
    model, version = load(found_model.folder), found_model.version
    # Loading MLflow takes seconds: after everything that can fail.
    console, registry = Console(), found_model.registry or _registry()
    names = {"learned": model_title(version, options.model) if version is not None else f"{options.model} (judged)"}
    policies = {"learned": policy_factory(model)}
    champion = find_champion(registry, options.model)
    if champion is not None:
        names["champion"], policies["champion"] = champion[0], policy_factory(champion[1])
    rows = run_scenarios({**BASELINES, **policies}, options.scenarios, options.seed)
    console.print(table(rows, names))
    metrics = model.about.get("metrics", {})
    blind = [f"warning: promote rejects this model: {problem}" for problem in model.blind_spots()]
    for text in (reliability(metrics, len(rows)), on_real_runs(metrics), *blind):
        console.print(text, highlight=False)
    found = summary(rows, "learned")
    if registry is not None and version is not None:
        console.print(log_regrets(registry, version, "evaluate", rows), highlight=False)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0 if found["mean_regret"] <= found["baselines"]["cost_model"] else 1


def check_scenarios(options: argparse.Namespace) -> None:
    """Check `--scenarios` and `--seed`.

    Raises:
        ValueError: There is no scenario, or one that a model may have been trained on.
    """
    if options.scenarios < 1:
        raise ValueError(f"--scenarios is {options.scenarios}; expected at least 1")
    if options.seed < HELD_OUT_SEED:
        raise ValueError(f"--seed is {options.seed}; expected {HELD_OUT_SEED} or more, training draws those below")


@dataclass(frozen=True, slots=True)
class Located:
    """A model that was found.

    Attributes:
        folder: Its folder.
        registry: The registry, if it was found there by an alias.
        version: Its version there, resolved once: the alias may move while it is judged.
    """

    folder: Path
    registry: Registry | None = None
    version: Version | None = None


def locate(name: str) -> Located:
    """Find a model that is given by alias, path, URI or `shipped`.

    Raises:
        ModelError: There is none, or the registry cannot be asked.
    """
    from scheduler.learning.registry import CHALLENGER, CHAMPION, Registry, fetch

    if name == "shipped":
        return Located(SHIPPED)
    if name.startswith("models:/"):
        return Located(fetch(name, os.environ, deadline_s=120.0))
    if name not in (CHALLENGER, CHAMPION):  # A folder of that name in the working directory is `./challenger`.
        if Path(name).is_dir():
            return Located(Path(name))
        if Path(name).exists():
            raise ModelError(
                f"--model is {name}, a file; expected a folder with model.json, an alias or a URI models:/..."
            )
        if os.sep in name:
            raise ModelError(f"the model folder {name} does not exist; expected a folder with model.json")
    registry = Registry(os.environ)
    version = find_version(registry, name)
    return Located(registry.download(version), registry, version)


def find_version(registry: Registry, alias: str) -> Version:
    """The version with an alias.

    Raises:
        ModelError: There is none, or the registry cannot be asked.
    """
    version = registry.alias(alias)
    if version is None:
        shown = redacted(registry.uri)
        raise ModelError(f"{registry.name} has no {alias} in {shown}; run `star-scheduler train` first")
    return version


def _registry() -> Registry | None:
    """The registry; None without MLflow."""
    from scheduler.learning.registry import Registry

    return None if importlib.util.find_spec("mlflow") is None else Registry(os.environ)


def find_champion(registry: Registry | None, but: str) -> tuple[str, Predictor] | None:
    """The champion with its title; the package's model, which jobs use by default, if there is no usable champion.

    A champion of another version of the features, or whose files are damaged or gone, would otherwise keep its place
    for ever, since only a comparison with it gives the alias to another model.

    Args:
        registry: None without MLflow.
        but: The model to evaluate; returns None if it is the champion itself.

    Raises:
        ModelError: The registry cannot be asked or does not answer.
    """
    from scheduler.learning.registry import CHAMPION, FilesMissing

    version = registry.alias(CHAMPION) if registry is not None else None
    if but == CHAMPION or (version is None and but == "shipped"):
        return None
    if registry is None or version is None:
        return "shipped model (no champion)", load(SHIPPED)
    try:
        folder = registry.download(version)
    except FilesMissing as error:  # Not other errors, so an outage does not pass for a missing champion.
        return _replaced(version, error)
    try:
        return model_title(version, CHAMPION), load(folder)
    except ModelError as error:
        return _replaced(version, error)


def _replaced(version: Version, error: ModelError) -> tuple[str, Predictor]:
    """The package's model in the place of a champion that cannot be used."""
    return f"shipped model (champion v{version.number} cannot be used: {error})", load(SHIPPED)


def model_title(version: Version, alias: str) -> str:
    """`star-tta v1 (challenger)`."""
    return f"{version.name} v{version.number} ({alias})"


def reliability(metrics: Mapping[str, float], scenarios: int) -> str:
    """Sentences on the coverage of a model's intervals, and on too few scenarios."""
    covered = metrics.get("coverage")
    text = "the coverage of its 90 % intervals is unknown"
    if covered is not None:
        text = f"its 90 % intervals cover {100.0 * covered:.1f} % of the held-out labels of its training"
    if scenarios < FEW_SCENARIOS:
        text += f"\n{scenarios} scenarios are too few for a comparison: take {FEW_SCENARIOS} or more"
    return text


def on_real_runs(metrics: Mapping[str, float]) -> str:
    """A sentence on a model's figures on real runs, by heads that were not fitted to their networks."""
    names = ("real_error", "real_cost_error", "real_choice_regret", "real_cost_choice_regret")
    if not all(name in metrics for name in names):
        return "its figures on real runs are unknown: its tables had no networks of real runs, or it is an older model"
    error, cost_error, regret, cost_regret = (metrics[name] for name in names)
    return (
        f"on real runs, out of fold: error of log time {error:.3f} (cost model {cost_error:.3f}), regret of a choice "
        f"{100.0 * regret:.1f} % (cost model {100.0 * cost_regret:.1f} %)"
    )


def log_regrets(registry: Registry, version: Version, prefix: str, rows: Sequence[Regrets]) -> str:
    """Add regrets to the MLflow run that trained a version, as `evaluate/regret/learned`, ...; returns a message."""
    mean = {f"{prefix}/regret/{one.name}": one.mean for one in standings(rows) if not one.fixed}
    counts = {f"{prefix}/scenarios": float(len(rows)), f"{prefix}/first_seed": float(rows[0].seed)}
    try:
        registry.log(version, {**mean, **counts})
    except ModelError as error:
        return f"the figures are not in MLflow: {error}"  # They were printed; the exit status does not change.
    return f"the figures are in MLflow, run {version.run_id}"


def policy_factory(predictor: Predictor) -> Factory:
    """A factory of policies with a model."""
    return lambda n, hosts: CostPolicy(n, ranker=predictor, hosts=hosts)


def run_scenarios(policies: dict[str, Factory], scenarios: int, seed: int) -> list[Regrets]:
    """Regrets of policies in `scenarios` scenarios from `seed` on, with a progress bar."""
    from rich.console import Console
    from rich.progress import track

    from scheduler.simulator.scenario import draw_scenario

    seeds = range(seed, seed + scenarios)
    watched = track(seeds, description="simulating", console=Console(stderr=True), transient=True)
    return [regrets(draw_scenario(one, steps=400.0), policies) for one in watched]


def table(rows: Sequence[Regrets], names: Mapping[str, str] | None = None) -> Any:
    """Mean, median and worst regret of every policy and mode, the best first.

    Args:
        rows: Regrets.
        names: Titles of policies; default: their names in the rows.
    """
    from rich.table import Table

    called = dict(names or {})
    found = Table(title=f"Regret against the best fixed mode in hindsight, {len(rows)} scenarios")
    for column in ("policy or mode", "mean", "median", "worst"):
        found.add_column(column, justify="left" if column.startswith("policy") else "right")
    for one in standings(rows):
        cells = (f"{100.0 * value:.1f} %" for value in (one.mean, one.median, one.worst))
        found.add_row(called.get(one.name, one.name), *cells, style=None if one.fixed else "bold")
    return found
