"""Time to accuracy with stragglers: plain Horovod, backup workers and star_hvd in one horovodrun."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.launch import JobFailed, horovodrun_command, run_job
from benchmarks.measures import accuracies, summarize
from benchmarks.quota import QuotaError, find_cpu_group
from benchmarks.report import bound_sentence, progress_view, sentence, table
from benchmarks.scenarios import SCENARIOS, Scenario, ScenarioError, make_scenario
from benchmarks.spec import ALL_VARIANTS, PLAIN_VARIANTS, RunRecord, RunSpec, write_json
from benchmarks.tasks import DATASETS, TaskError, defaults_for, load_task
from benchmarks.traces import TraceError, read_trace

__all__ = ["build_spec", "main", "make_parser", "measure", "versions"]

DEVICE_MS = 30.0
QUOTA_DEVICE_MS = 10.0  # CPU time, all ranks on the cores of one machine: less of it, or nothing else has room
OVERHEAD_ALLOWANCE_S = 0.15  # per step, for a loaded machine; only the deadline depends on it
SETUP_ALLOWANCE_S = 180.0
EXIT_FAILED, EXIT_USAGE, EXIT_SKIPPED = 1, 2, 77  # 77: what test harnesses take for "skipped"


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tta", description=__doc__)
    parser.add_argument("--scenario", choices=SCENARIOS, default="one-slow")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--json", type=Path, help="write all figures and curves to this file")
    parser.add_argument("--dataset", choices=sorted(DATASETS), default="digits")
    parser.add_argument("--seeds", type=int, default=3, help="how many; every variant is trained once per seed")
    parser.add_argument("--epochs", type=int, help="default: as fits the data set")
    parser.add_argument("--target", type=float, help="accuracy to reach, 0 to 1; default: as fits the data set")
    parser.add_argument("--device-ms", type=float, help="emulated device time per step at normal speed")
    parser.add_argument("--train-samples", type=int, help="training samples used")
    parser.add_argument("--slowdown", type=float, help="factor instead of the scenario's own")
    parser.add_argument("--trace", type=Path, help="slowdowns for scenario trace, .csv or .json")
    parser.add_argument("--mode", default="auto", help="mode of star_hvd: auto, sync, partial, partial(m)")
    parser.add_argument("--variants", default=",".join(ALL_VARIANTS), help="comma-separated subset")
    parser.add_argument("--quota-period-ms", type=float, default=100.0, help="scenario quota: accounting period")
    parser.add_argument("--deadline-s", type=float, help="end the job after this; default: from the sizes")
    parser.add_argument("--stall-s", type=float, default=180.0, help="end the job after this long without output")
    parser.add_argument("--keep", action="store_true", help="keep the run's folder: log, records, snapshots")
    return parser


def build_spec(args: argparse.Namespace) -> RunSpec:
    """Turn the command line into what the workers are told.

    Raises:
        ValueError: An option that cannot be; the message names it.
        QuotaError: Scenario quota where no quota can be set.
    """
    defaults = defaults_for(args.dataset)
    trace = read_trace(args.trace) if args.trace is not None else None
    if trace is not None and args.scenario != "trace":
        raise ScenarioError(f"--trace belongs to scenario trace; the scenario is {args.scenario}")
    scenario = make_scenario(args.scenario, args.ranks, trace, args.slowdown)
    variants = tuple(name.strip() for name in args.variants.split(","))
    unknown = sorted(set(variants) - set(ALL_VARIANTS))
    if unknown or len(set(variants)) != len(variants):
        raise ValueError(f"--variants is {args.variants!r}; expected some of {','.join(ALL_VARIANTS)}, each once")
    if not set(variants) <= set(PLAIN_VARIANTS) and importlib.util.find_spec("star_hvd.optimizer") is None:
        raise ValueError("star_hvd cannot be imported; install it, or use --variants straggler_free,plain")
    quota = args.scenario == "quota"
    device_ms = args.device_ms if args.device_ms is not None else QUOTA_DEVICE_MS if quota else DEVICE_MS
    for name, value, least in (
        ("--seeds", args.seeds, 1),
        ("--device-ms", device_ms, 0),
        ("--epochs", args.epochs or defaults.epochs, 1),
        ("--quota-period-ms", args.quota_period_ms, 1),
    ):
        if not least <= value < 1e6:
            raise ValueError(f"{name} is {value}; expected at least {least}")
    if quota:
        find_cpu_group()
    return RunSpec(
        scenario=args.scenario,
        rows=scenario.rows,
        ranks=args.ranks,
        variants=variants,
        seeds=tuple(range(args.seeds)),
        dataset=args.dataset,
        train_samples=args.train_samples or defaults.train_samples,
        epochs=args.epochs or defaults.epochs,
        batch_samples=defaults.batch_samples,
        learning_rate=defaults.learning_rate,
        momentum=defaults.momentum,
        device_s=device_ms / 1000.0,
        eval_every_steps=defaults.eval_every_steps,
        mode=args.mode,
        quorum=scenario.quorum(),
        quota_cores=_quota_cores(scenario) if quota else 0.0,
        quota_period_s=args.quota_period_ms / 1000.0,
    )


def _quota_cores(scenario: Scenario) -> float:
    """The share of a core that makes a rank `slowdown` times slower than its fair share of the machine."""
    fair = min(1.0, (os.cpu_count() or 1) / scenario.ranks)
    return fair / scenario.slowdown(scenario.ranks - 1, 0)


def measure(spec: RunSpec, target: float, console: Console, args: argparse.Namespace) -> dict[str, Any]:
    """Run the job and work out its figures.

    Raises:
        JobFailed: The job died, hung or took too long.
        TaskError: The data set is missing.
    """
    task = load_task(spec.dataset, spec.train_samples)
    run_dir = Path(tempfile.mkdtemp(prefix="straggler-lab-"))
    write_json(run_dir / "spec.json", dataclasses.asdict(spec))
    command = horovodrun_command(spec.ranks, "benchmarks.worker", str(run_dir))
    units = len(spec.variants) * len(spec.seeds) * spec.epochs
    with progress_view(console, units) as view:
        deadline_s = args.deadline_s or _deadline_s(spec)
        run_job(command, run_dir, deadline_s=deadline_s, stall_s=args.stall_s, on_progress=view.update)
    records = []
    for path in sorted(run_dir.glob("seed*.json")):
        record = RunRecord(**json.loads(path.read_text(encoding="utf-8")))
        record.accuracies = accuracies(path.with_suffix(".npz"), spec.dataset, task)
        records.append(record)
    summary = summarize(spec, target, records)
    summary.update(spec=dataclasses.asdict(spec), versions=versions())
    if args.keep:
        console.print(f"the run's folder is {run_dir}", highlight=False)
    else:
        shutil.rmtree(run_dir)
    return summary


def _deadline_s(spec: RunSpec) -> float:
    """Three times what the whole job should need if every step were as slow as the slowest."""
    steps = spec.epochs * -(-spec.train_samples // (spec.batch_samples * spec.ranks))
    slowest_s = spec.device_s * max(map(max, spec.rows)) * (4 if spec.quota_cores else 1) + OVERHEAD_ALLOWANCE_S
    return SETUP_ALLOWANCE_S + 3.0 * steps * slowest_s * len(spec.variants) * len(spec.seeds)


def versions() -> dict[str, str]:
    """Software the figures were made with."""
    found = {"python": platform.python_version(), "system": platform.platform(), "cores": str(os.cpu_count())}
    for name in ("torch", "horovod", "star-hvd", "numpy", "scikit-learn"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed as a package"
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure one scenario; exit status 77 where the scenario is impossible on this machine."""
    args = make_parser().parse_args(argv)
    errors = Console(stderr=True, soft_wrap=True, highlight=False)
    console = Console()
    try:
        spec = build_spec(args)
        target = args.target if args.target is not None else defaults_for(args.dataset).target_accuracy
        if not 0.0 < target < 1.0:
            raise ValueError(f"--target is {target}; expected an accuracy between 0 and 1, 0.9 for example")
        summary = measure(spec, target, console, args)
    except QuotaError as error:
        errors.print(f"skipped: scenario quota is impossible here: {error}", markup=False)
        return EXIT_SKIPPED
    except (ScenarioError, TraceError, TaskError, ValueError) as error:
        errors.print(f"error: {error}", markup=False)
        return EXIT_USAGE
    except JobFailed as error:
        errors.print(f"error: {error}", markup=False)
        return EXIT_FAILED
    if args.json is not None:
        write_json(args.json, summary)
    console.print(table(summary))
    for text in filter(None, (sentence(summary), bound_sentence(summary))):
        console.print(text, highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
