"""Time to accuracy with stragglers: plain Horovod, backup workers and star_hvd in one horovodrun."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.lab.elastic import run_elastic_jobs
from benchmarks.lab.launch import JobFailed, horovodrun_command, run_job
from benchmarks.lab.measures import accuracies, model_bytes, summarize
from benchmarks.lab.options import build_spec, make_parser, target_for
from benchmarks.lab.report import bound_sentence, progress_view, sentence, table
from benchmarks.lab.scenarios import ScenarioError
from benchmarks.lab.spec import RunRecord, RunSpec, write_json
from benchmarks.lab.tasks import TaskError, load_task
from benchmarks.machine.link_rates import LinkRates
from benchmarks.machine.netns import Network, NetworkError
from benchmarks.machine.netns_launch import netns_command, write_plan
from benchmarks.machine.quota import QuotaError
from benchmarks.traces import TraceError

__all__ = ["build_spec", "main", "make_parser", "measure", "run_deadline_s", "versions"]

OVERHEAD_ALLOWANCE_S = 0.15  # Per step, on a loaded machine; used only for the deadline.
SETUP_ALLOWANCE_S = 180.0
BYTES_PER_S = 3e7  # Of gradients computed, reduced and applied on a loaded machine; used only for the deadline.
TABLE_COLUMNS = 110  # If the terminal width is unknown.
EXIT_FAILED, EXIT_USAGE, EXIT_SKIPPED = 1, 2, 77  # Test harnesses treat 77 as "skipped".


def measure(spec: RunSpec, target: float, console: Console, args: argparse.Namespace) -> dict[str, Any]:
    """Run the job and compute its figures.

    Raises:
        JobFailed: The job died, hung or took too long.
        TaskError: The data set is missing.
    """
    task = load_task(spec.dataset, spec.train_samples)
    run_dir = Path(tempfile.mkdtemp(prefix="straggler-lab-"))
    write_json(run_dir / "spec.json", dataclasses.asdict(spec))
    units = len(spec.trained) * len(spec.seeds) * spec.epochs
    with progress_view(console, units) as view:
        failed: dict[str, int] = {}
        limits = {"deadline_s": _deadline_s(args, spec), "stall_s": args.stall_s}
        if spec.scenario == "killed-worker":
            failed = run_elastic_jobs(spec, run_dir, on_progress=view.update, **limits)
        else:
            with _launcher(spec, run_dir) as command:
                told = _logging(args, spec, target)
                run_job(command, run_dir, on_progress=view.update, added_environment=told, **limits)
    records = []
    for path in sorted(run_dir.glob("seed*.json")):
        record = RunRecord(**json.loads(path.read_text(encoding="utf-8")))
        record.accuracies = accuracies(path.with_suffix(".npz"), spec, task)
        record.failed_attempts = failed.get(record.stem, 0)
        records.append(record)
    summary = summarize(spec, target, records)
    summary.update(spec=dataclasses.asdict(spec), versions=versions())
    if args.keep:
        console.print(f"the run's folder is {run_dir}", highlight=False)
    else:
        shutil.rmtree(run_dir)
    return summary


def _deadline_s(args: argparse.Namespace, spec: RunSpec) -> float:
    return run_deadline_s(spec) if args.deadline_s is None else float(args.deadline_s)


def _logging(args: argparse.Namespace, spec: RunSpec, target: float) -> dict[str, str]:
    """Return the environment that enables the run log and describes the job to it."""
    if not args.log_runs:
        return {}
    tags = f"lab={spec.scenario},dataset={spec.dataset},device_ms={1e3 * spec.device_s:g},epochs={spec.epochs}"
    return {"STAR_RUN_LOG": "1", "STAR_TARGET": f"accuracy>={target:g}", "STAR_RUN_TAGS": tags}


@contextlib.contextmanager
def _launcher(spec: RunSpec, run_dir: Path) -> Iterator[list[str]]:
    """Give the command that runs the job: on this machine, or with every rank on its own host with a limited link."""
    if not spec.link_bits_per_s:
        yield horovodrun_command(spec.ranks, "benchmarks.lab.worker", str(run_dir))
        return
    with Network(spec.ranks, spec.link_bits_per_s) as network, LinkRates(network, run_dir):
        write_plan(run_dir / "hosts.json", network)
        yield netns_command(run_dir / "hosts.json", "benchmarks.lab.worker", str(run_dir))


def run_deadline_s(spec: RunSpec) -> float:
    """Return three times the expected time of the whole job if every step were as slow as the slowest."""
    slowdown = max(map(max, spec.rows))
    slowest_s = spec.device_s * slowdown * (4 if spec.quota_cores else 1) + OVERHEAD_ALLOWANCE_S
    slowest_s += spec.input_s_per_sample * spec.batch_samples * slowdown + model_bytes(spec) / BYTES_PER_S
    if spec.link_bits_per_s:
        slowest_s += 2.0 * 8.0 * model_bytes(spec) * slowdown / spec.link_bits_per_s
    jobs = len(spec.trained) * len(spec.seeds) if spec.scenario == "killed-worker" else 1
    return jobs * SETUP_ALLOWANCE_S + 3.0 * spec.steps * slowest_s * len(spec.trained) * len(spec.seeds)


def versions() -> dict[str, str]:
    """Return the versions of the software behind the figures."""
    cores = str(len(os.sched_getaffinity(0)))
    found = {"python": platform.python_version(), "system": platform.platform(), "cores": cores}
    for name in ("torch", "horovod", "star-hvd", "numpy", "scikit-learn"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed as a package"
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure one scenario; exit status 77 if the scenario is impossible on this machine."""
    args = make_parser().parse_args(argv)
    errors = Console(stderr=True, soft_wrap=True, highlight=False)
    console = Console()
    if not console.is_terminal:
        console.width = TABLE_COLUMNS
    try:
        spec = build_spec(args)
        summary = measure(spec, target_for(args), console, args)
    except (QuotaError, NetworkError) as error:
        errors.print(f"skipped: scenario {args.scenario} is impossible here: {error}", markup=False)
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
