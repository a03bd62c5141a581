"""What process sets cost: static and dynamic, with this project's Horovod and optionally an unpatched one.

`python -m benchmarks.sets --ranks 4 --json FILE [--unpatched-python PATH]`
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.lab.json_option import json_file
from benchmarks.lab.launch import JobFailed, run_job
from benchmarks.lab.spec import write_json

__all__ = ["main", "summarize"]

DEADLINE_S = 240.0
ROWS = (  # Name, description, displayed unit, factor from the unit of the name.
    ("idle_cpu_share", "CPU of an idle process", "% of a core", 100.0),
    ("empty_s", "empty all-reduce, median", "ms", 1e3),
    ("empty_p95_s", "empty all-reduce, 95th percentile", "ms", 1e3),
    ("add_s", "adding a set", "ms", 1e3),
    ("remove_s", "removing a set", "ms", 1e3),
    ("beside_s", "all-reduce beside that, median", "ms", 1e3),
    ("hiccup_s", "all-reduce beside that, longest", "ms", 1e3),
    ("idle_1_s", "all-reduce of 4 KB beside 1 idle set, mean", "ms", 1e3),
    ("idle_4_s", "the same beside 4", "ms", 1e3),
    ("idle_8_s", "the same beside 8", "ms", 1e3),
    ("frozen_subgroup_s", "a rank outside the set frozen 2 s: all-reduce in the set, longest", "ms", 1e3),
    ("frozen_submit_s", "the same: submitting a tensor, longest", "ms", 1e3),
    ("frozen_beat_gap_s", "the same: another Python thread's longest gap", "ms", 1e3),
)


def horovodrun(python: str, ranks: int, dynamic: bool, run_dir: Path) -> list[str]:
    """Return the command of one job. The launcher passes its environment on to the ranks."""
    launcher = [python, "-m", "horovod.runner.launch", "-np", str(ranks), "--gloo"]
    worker = [python, "-m", "benchmarks.workers.sets", str(run_dir)]
    return ["env", f"HOROVOD_DYNAMIC_PROCESS_SETS={int(dynamic)}", *launcher, *worker]


def summarize(runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Return medians over the repetitions, and their ratios to the static sets of the same Horovod.

    Args:
        runs: Maps variant (`static`, `dynamic`, or these followed by ` unpatched`) to the figures of its repetitions.
    """
    medians = {
        variant: {name: statistics.median(each[name] for each in repeats) for name in repeats[0]}
        for variant, repeats in runs.items()
    }
    ratios = {
        variant: {
            name: value / base[name]
            for name, value in figures.items()
            if (base := medians[variant.replace("dynamic", "static")]).get(name)
        }
        for variant, figures in medians.items()
        if variant.startswith("dynamic")
    }
    return {"medians": medians, "ratios_to_static": ratios, "runs": runs}


def table(summary: dict[str, Any]) -> Table:
    """Return a table of the medians, with the ratio to static sets in brackets."""
    medians, ratios = summary["medians"], summary["ratios_to_static"]
    shown = Table("", "unit", *medians, title="Cost of process sets", title_justify="left")
    for name, what, unit, factor in ROWS:
        cells = []
        for variant, figures in medians.items():
            ratio = ratios.get(variant, {}).get(name)
            tail = f" ({ratio:.2f}x)" if ratio is not None else ""
            cells.append(f"{figures[name] * factor:.1f}{tail}" if name in figures else "-")
        shown.add_row(what, unit, *cells)
    return shown


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; exit status 1 if a job failed."""
    parser = argparse.ArgumentParser(description="Measure what process sets cost.")
    parser.add_argument("--ranks", type=int, default=4, help="3 or more (%(default)s)")
    parser.add_argument("--repeats", type=int, default=1, help="jobs per variant, in turn (%(default)s)")
    parser.add_argument("--json", type=json_file, help="write all figures here")
    parser.add_argument("--unpatched-python", help="Python of an environment with an unpatched Horovod")
    options = parser.parse_args(arguments)
    if options.ranks < 3 or options.repeats < 1:
        parser.error(f"got {options.ranks} ranks and {options.repeats} repeats; expected 3 and 1 or more")
    pythons = {"": sys.executable} | ({" unpatched": options.unpatched_python} if options.unpatched_python else {})
    console = Console()
    runs: dict[str, list[dict[str, float]]] = {}
    try:
        for _ in range(options.repeats):
            for suffix, python in pythons.items():
                for kind in ("static", "dynamic"):
                    figures = one_job(python, options.ranks, kind == "dynamic")
                    runs.setdefault(f"{kind}{suffix}", []).append(figures)
    except JobFailed as error:
        console.print(str(error), style="red", markup=False)
        return 1
    summary = {"ranks": options.ranks, **summarize(runs)}
    console.print(table(summary))
    if options.json:
        write_json(options.json, summary)
    return 0


def one_job(python: str, ranks: int, dynamic: bool) -> dict[str, float]:
    """Run one job and return its figures.

    Raises:
        JobFailed: It died or took too long.
    """
    run_dir = Path(tempfile.mkdtemp(prefix="sets-"))
    command = horovodrun(python, ranks, dynamic, run_dir)
    run_job(command, run_dir, deadline_s=DEADLINE_S, stall_s=DEADLINE_S, on_progress=lambda _: None)
    figures: dict[str, float] = json.loads((run_dir / "sets.json").read_text(encoding="utf-8"))
    shutil.rmtree(run_dir)
    return figures


if __name__ == "__main__":
    sys.exit(main())
