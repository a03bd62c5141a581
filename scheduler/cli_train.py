"""`star-scheduler train`: table to model, with a record of it in MLflow."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

from scheduler import dataset
from scheduler.cli_collect import DEFAULT_TABLE

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the subcommand."""
    parser.add_argument(
        "table", type=Path, nargs="*", default=[DEFAULT_TABLE],
        help=f"tables that `collect` made (default {DEFAULT_TABLE}); several are put together",
    )
    parser.add_argument("--out", type=Path, default=Path("training_logs/models/latest"), help="folder for the model")
    parser.add_argument("--tune-s", type=float, default=0.0, help="seconds to search for settings (default 0: none)")
    parser.add_argument("--seed", type=int, default=1, help="of everything drawn")
    parser.add_argument("--no-registry", action="store_true", help="write the folder only; MLflow is not touched")


def run(options: argparse.Namespace) -> int:
    """Tune, fit, save, record."""
    from rich.console import Console
    from rich.table import Table

    from scheduler.train import Settings, fit, save, tune

    console = Console()
    frame, described = _read(options.table)
    settings = Settings(seed=options.seed)
    if options.tune_s > 0.0:
        with console.status("searching for settings"):
            settings = tune(frame, budget_s=options.tune_s, seed=options.seed, told=lambda text: console.log(text))
    with console.status(f"fitting to {len(frame)} rows"):
        found = fit(frame, settings)
    names = " ".join(str(path) for path in options.table)
    about = save(found, options.out, data=described, made_by=f"star-scheduler train {names} --seed {options.seed}")
    table = Table(title="On networks it was not fitted to")
    for column in ("figure", "learned", "cost model"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    for name, title in (
        ("error", "error of log time"), ("choice_regret", "regret of a choice"), ("kendall", "Kendall's tau"),
        ("coverage", "90 % intervals cover"), ("width", "their width in logs"), ("reach_brier", "Brier score, reached"),
    ):
        other = found.metrics.get(f"cost_{name}")
        table.add_row(title, f"{found.metrics[name]:.3f}", "" if other is None else f"{other:.3f}")
    console.print(table)
    console.print(f"model in {options.out}", highlight=False)
    if options.no_registry:
        return 0
    return _record(console, options.out, about, frame, found)


def _read(paths: list[Path]) -> tuple[Any, dict[str, Any]]:
    """All tables as one, and the description of all."""
    import pandas

    read = [dataset.read(path) for path in paths]
    if len(read) == 1:
        return read[0]
    frame = pandas.concat([table for table, _ in read], ignore_index=True)
    described = dict(read[0][1])
    described["sha256"] = "+".join(str(about["sha256"])[:16] for _, about in read)
    described.update(rows=len(frame), runs=int(frame["run"].nunique()), networks=int(frame["network"].nunique()))
    for name, column in (("sources", "source"), ("families", "family")):
        described[name] = {str(key): int(count) for key, count in sorted(frame[column].value_counts().items())}
    return frame, described


def _record(console: Any, folder: Path, about: dict[str, Any], frame: Any, found: Any) -> int:
    from scheduler.plots import draw
    from scheduler.registry import CHALLENGER, Registry

    with tempfile.TemporaryDirectory() as scratch, console.status("recording in MLflow"):
        figures = draw(found, frame, Path(scratch))
        registry = Registry(os.environ)
        version = registry.record(folder, about, sample=frame.head(5), figures=figures)
    console.print(
        f"{version.name} version {version.number} is {CHALLENGER} in {registry.uri}; next: star-scheduler evaluate",
        highlight=False,
    )
    return 0
