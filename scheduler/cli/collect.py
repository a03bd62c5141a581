"""`star-scheduler collect`: makes the training table."""

from __future__ import annotations

import argparse
import os
import re
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from scheduler.commands import seconds
from scheduler.learning import dataset
from scheduler.learning.evaluate import HELD_OUT_SEED

__all__ = ["DEFAULT_TABLE", "add_arguments", "add_sources", "logged_rows", "run", "print_line", "why_none"]

DEFAULT_TABLE = Path("training_logs/datasets/moments.csv.gz")

_PATTERNS = ("one", "several", "rotating", "bursts", "mixed", "frozen", "links", "links", "")
"""Patterns of contention, used in turn; most often links, where the cost model has the largest errors."""


_PAIRS = 7
"""One of so many jobs has two ranks; the others have 3 to 32 (`scheduler.simulator.scenario.draw_cluster`)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    parser.add_argument("--out", type=Path, default=DEFAULT_TABLE, help=f"table to write (default {DEFAULT_TABLE})")
    parser.add_argument("--jobs", type=int, default=200, help="simulated jobs (default 200, about 10 minutes)")
    parser.add_argument("--seed", type=int, default=0, help="first seed; those from 1,000,000 on are held out")
    parser.add_argument("--moments", type=int, default=6, help="moments to collect per job (default 6)")
    parser.add_argument("--budget-s", type=seconds, default=0.0, help="stop after this many seconds and write the rows")
    add_sources(parser)


def add_sources(parser: argparse.ArgumentParser) -> None:
    """Add the options for logged runs."""
    parser.add_argument("--runs", type=Path, help="folder of logged runs (training_logs/runs) to add, marked as real")
    parser.add_argument("--mlflow", action="store_true", help="add the runs that the run log has sent to MLflow")


def run(options: argparse.Namespace) -> int:
    """Read real runs, simulate, write the table."""
    if options.jobs < 0 or options.moments < 1:
        raise ValueError(f"--jobs is {options.jobs}, --moments {options.moments}; expected at least 0 and 1")
    last = options.seed + options.jobs
    if not 0 <= options.seed <= last <= HELD_OUT_SEED:
        raise ValueError(f"seeds are {options.seed} to {last}; expected 0 to {HELD_OUT_SEED}, later ones are held out")
    # What can fail comes before the simulation, which takes minutes.
    dataset.description_path(options.out)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    real = logged_rows(options)
    simulated = _simulated(options) if options.jobs else []
    rows = simulated + real
    if not rows:
        raise dataset.DatasetError(why_none(options, jobs=options.jobs))
    made_by = f"star-scheduler collect --jobs {options.jobs} --seed {options.seed} --moments {options.moments}"
    described = dataset.write(options.out, dataset.frame_of(rows), made_by=made_by)
    print_line(
        f"{described['rows']} rows ({len(simulated)} simulated, {len(real)} real) of {described['runs']} runs "
        f"in {options.out}, SHA-256 {described['sha256'][:12]}"
    )
    return 0


def logged_rows(options: argparse.Namespace) -> list[list[Any]]:
    """Rows of the logged runs that the options select; prints every skipped run with its reason."""
    rows: list[list[Any]] = []
    if options.runs is not None:
        from scheduler.learning.logged_rows import real_rows

        rows += real_rows(options.runs, project_version(), report=print_line)
    if options.mlflow:
        from scheduler.learning.logged_rows import mlflow_rows

        rows += mlflow_rows(os.environ, project_version(), report=print_line)
    return rows


def why_none(options: argparse.Namespace, *, jobs: int = 0) -> str:
    """Error message for a table without rows."""
    places = [str(options.runs)] if options.runs is not None else []
    places += ["MLflow"] if options.mlflow else []
    if not places:
        return "no rows: no moment of a simulated job was collected; give more --jobs"
    tried = " and no moment of a simulated job was collected" if jobs else ""
    return f"no rows: no usable runs in {' and '.join(places)}{tried}; see docs/scheduler.md for what a run needs"


def project_version() -> str:
    """Version of the installed project or of this checkout; `unknown` without either."""
    try:
        return metadata.version("star-hvd")
    except metadata.PackageNotFoundError:
        pass
    try:
        text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    except OSError:
        return "unknown"
    found = re.search(r'^version = "([^"]+)"', text, re.MULTILINE)  # Python 3.10 has no tomllib.
    return found[1] if found else "unknown"


def print_line(text: str) -> None:
    """Print one line to standard error, without wrapping or markup."""
    _console().print(text, highlight=False, markup=False, soft_wrap=True)


def _console() -> Any:
    from rich.console import Console

    return Console(stderr=True)


def _simulated(options: argparse.Namespace) -> list[list[Any]]:
    from rich.progress import track

    from scheduler.learning.simulated_rows import collect_scenario

    rows: list[list[Any]] = []
    begin_s = time.monotonic()
    seeds = range(options.seed, options.seed + options.jobs)
    for seed in track(seeds, description="simulating jobs", console=_console(), transient=True):
        # Half of the jobs have the drawn length, half are short.
        scenario, moments = collect_scenario(
            seed,
            moments=options.moments,
            steps=400.0 if seed % 2 else 0.0,
            pattern=_PATTERNS[seed % len(_PATTERNS)],
            world_size=0 if seed % _PAIRS else 2,
        )
        rows += dataset.records(scenario, moments, project_version())
        if options.budget_s and time.monotonic() - begin_s > options.budget_s:
            break
    return rows
