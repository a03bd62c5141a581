"""`star-scheduler train`: fits a model to tables and logged runs, and records it in MLflow."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scheduler.cli.collect import DEFAULT_TABLE, add_sources, logged_rows, print_line, why_none
from scheduler.commands import check_output, seconds
from scheduler.learning import dataset

if TYPE_CHECKING:
    from scheduler.learning.registry import Registry

__all__ = ["add_arguments", "metrics_table", "run"]

LOGGED_TABLE = Path("training_logs/datasets/logged.csv.gz")
"""Table of the logged runs that `--mlflow` and `--runs` select."""

SHIPPED_TABLES = Path(__file__).parents[2] / "datasets"
"""Folder with the tables of the project, which are fitted to if there are no others."""

REAL_TABLE = "real.csv.gz"
"""The one of them with rows of real runs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    parser.add_argument(
        "table", type=Path, nargs="*",
        help=f"tables made by `collect`, which are joined (default {DEFAULT_TABLE} and {REAL_TABLE} of the project's "
        "datasets/; if the former does not exist, all of datasets/)",
    )
    add_sources(parser)
    parser.add_argument("--out", type=Path, default=Path("training_logs/models/latest"), help="folder for the model")
    parser.add_argument("--tune-s", type=seconds, default=0.0, help="seconds to search for settings (default 0: none)")
    parser.add_argument("--seed", type=int, default=1, help="random seed")
    parser.add_argument("--no-registry", action="store_true", help="write the folder only, without MLflow")


def run(options: argparse.Namespace) -> int:
    """Tune, fit, save, record."""
    from rich.console import Console

    from scheduler.learning.predictor import Predictor
    from scheduler.learning.train import Settings, fit, save, tune

    console = Console()
    # What can fail comes before the fit, which takes minutes.
    check_output(options.out, "--out", folder=True)
    tables = _tables(options)
    frame, described = _read(tables)
    registry = None if options.no_registry else _registry()
    settings = Settings(seed=options.seed)
    if options.tune_s > 0.0:
        with console.status("searching for settings"):
            settings = tune(frame, budget_s=options.tune_s, seed=options.seed, report=console.log)
    with console.status(f"fitting to {len(frame)} rows"):
        found = fit(frame, settings)
    names = " ".join(str(path) for path in tables)
    about = save(found, options.out, data=described, made_by=f"star-scheduler train {names} --seed {options.seed}")
    console.print(metrics_table(found.metrics))
    console.print(f"model in {options.out}", highlight=False)
    for problem in Predictor(about, found.boosters).blind_spots():
        console.print(f"warning: promote will reject this model: {problem}", highlight=False)
    if registry is None:
        return 0
    return _record(console, registry, options.out, about, frame, found)


def metrics_table(metrics: Mapping[str, float]) -> Any:
    """A table of a fit's metrics; those on real runs, of which there are few, in columns of their own."""
    from rich.table import Table

    table = Table(title="On held-out networks")
    prefixes = {"learned": "", "cost model": "cost_"}
    if any(name.startswith("real_") for name in metrics):
        prefixes |= {"real runs: learned": "real_", "real runs: cost model": "real_cost_"}
    for column in ("figure", *prefixes):
        table.add_column(column, justify="left" if column == "figure" else "right")
    for name, title in (
        ("error", "error of log time"), ("choice_regret", "regret of a choice"), ("kendall", "Kendall's tau"),
        ("coverage", "90 % intervals cover"), ("width", "their width in logs"), ("reach_brier", "Brier score, reached"),
    ):
        values = [metrics.get(f"{prefix}{name}") for prefix in prefixes.values()]
        table.add_row(title, *("" if value is None else f"{value:.3f}" for value in values))
    return table


def _usual_tables() -> list[Path]:
    """The tables to fit to if none are given: the project's real rows stay beside the user's simulated ones."""
    shipped = sorted(SHIPPED_TABLES.glob("*.csv.gz"))
    if not DEFAULT_TABLE.exists():
        if not shipped:
            return [DEFAULT_TABLE]
        names = ", ".join(one.name for one in shipped)
        print_line(f"{DEFAULT_TABLE} does not exist; fitting to {names} of {SHIPPED_TABLES}")
        return shipped
    real = SHIPPED_TABLES / REAL_TABLE
    if not real.exists():
        return [DEFAULT_TABLE]
    print_line(f"fitting to {DEFAULT_TABLE} and {REAL_TABLE} of {SHIPPED_TABLES}")
    return [DEFAULT_TABLE, real]


def _tables(options: argparse.Namespace) -> list[Path]:
    """The tables to fit to: the given ones or the default, and one of the selected logged runs.

    Raises:
        DatasetError: No logged run can be used, and tables were given or there are no default ones.
    """
    tables = list(options.table) or _usual_tables()
    if options.mlflow or options.runs is not None:
        rows = logged_rows(options)
        if not rows:
            if options.table or not all(path.exists() for path in tables):
                raise dataset.DatasetError(why_none(options))
            # Most jobs run in `auto`, which gives no rows: that is no reason to fit to nothing at all.
            print_line(f"warning: {why_none(options)}; fitting without logged runs")
            return tables
        source = " --mlflow" * options.mlflow + (f" --runs {options.runs}" if options.runs is not None else "")
        described = dataset.write(LOGGED_TABLE, dataset.frame_of(rows), made_by=f"star-scheduler train{source}")
        print_line(f"{described['rows']} rows of {described['runs']} logged runs in {LOGGED_TABLE}")
        tables.append(LOGGED_TABLE)
    return tables


def _read(paths: list[Path]) -> tuple[Any, dict[str, Any]]:
    """Join the tables and their descriptions."""
    import pandas

    read = [dataset.read(path) for path in paths]
    if len(read) == 1:
        return read[0]
    frame = pandas.concat([table for table, _ in read], ignore_index=True)
    # A logged run may be in several tables, under the names of its folder and of its MLflow run.
    frame = frame[~frame.duplicated(subset=[name for name in frame.columns if name not in ("run", "project")])]
    described = dict(read[0][1])
    described["sha256"] = "+".join(str(about["sha256"])[:16] for _, about in read)
    described.update(rows=len(frame), runs=int(frame["run"].nunique()), networks=int(frame["network"].nunique()))
    for name, column in (("sources", "source"), ("families", "family")):
        described[name] = {str(key): int(count) for key, count in sorted(frame[column].value_counts().items())}
    return frame, described


def _registry() -> Registry:
    """The registry, which has been asked once.

    Raises:
        ModelError: MLflow is missing or cannot be asked.
    """
    from scheduler.learning.registry import CHALLENGER, Registry

    found = Registry(os.environ)
    found.alias(CHALLENGER)
    return found


def _record(console: Any, registry: Registry, folder: Path, about: dict[str, Any], frame: Any, found: Any) -> int:
    from scheduler.learning.plots import draw
    from scheduler.learning.registry import CHALLENGER
    from scheduler.redact import redacted

    with tempfile.TemporaryDirectory() as scratch, console.status("recording in MLflow"):
        figures = draw(found, frame, Path(scratch))
        version = registry.record(folder, about, sample=frame.head(5), figures=figures)
    console.print(
        f"{version.name} version {version.number} is {CHALLENGER} in {redacted(registry.uri)}; "
        "next: star-scheduler evaluate",
        highlight=False,
    )
    return 0
