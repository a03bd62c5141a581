"""What star_hvd costs at the start and at the end of a job, and the processes its run log adds to rank 0.

The same small script alternates between plain Horovod and star_hvd. Every figure takes the slowest rank of each run and
is the median over the runs. With `--optimizers N`, another job makes N optimizers one after another while rank 0's
helper processes are counted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import select
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.lab.command import measured, out_of_range, say_error
from benchmarks.lab.json_option import json_file
from benchmarks.lab.launch import REPOSITORY, JobFailed, horovodrun_command, run_job
from benchmarks.tta import versions

__all__ = ["main", "summarize_runs"]

SIDES = ("plain", "star")
STEPS = 20
DEADLINE_S = 300.0
AFTERWARDS_S = 600.0
LOOK_INTERVAL_S = 0.1
SHORTEST_S = 1.0
TAG = "STARTUP_BENCHMARK"  # Environment variable that identifies a job's processes, whatever their parent is.
FIGURES = ("import_s", "first_step_s", "first_step_cpu_s", "end_s", "wall_s")


def summarize_runs(runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Return medians of both sides and their differences.

    Args:
        runs: Per side (`plain`, `star`) the figures of every run.
    """
    medians = {
        f"{side}_{name}": statistics.median(run[name] for run in found)
        for side, found in runs.items()
        for name in FIGURES
    }
    extra = {
        f"{name.removesuffix('_s')}_extra_s": medians[f"star_{name}"] - medians[f"plain_{name}"] for name in FIGURES
    }
    return {**medians, **extra, "runs": runs}


class _Exits:
    """Notes when the processes registered in a folder end; they are not children of this process."""

    def __init__(self, folder: Path) -> None:
        self.began_unix_s: dict[int, float] = {}
        self.ended_unix_s: dict[int, float] = {}
        self._folder = folder
        self._fds: dict[int, int] = {}

    def look(self) -> None:
        """Note new processes and those that ended since the last call; waits up to `LOOK_INTERVAL_S`."""
        for path in self._folder.glob("*.pid"):
            pid = int(path.stem)
            if pid not in self.began_unix_s:
                with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                    self.began_unix_s[pid] = psutil.Process(pid).create_time()
                    self._fds[os.pidfd_open(pid)] = pid
        ready, _, _ = select.select(list(self._fds), [], [], LOOK_INTERVAL_S)
        for fd in ready:
            self.ended_unix_s[self._fds.pop(fd)] = time.time()
            os.close(fd)


class _Helpers:
    """Counts the helper processes of a job's rank 0, and their memory."""

    def __init__(self, tag: str, ranks: dict[int, float]) -> None:
        self.lived_s: dict[int, float] = {}
        self.most_bytes = 0
        self.most_at_once = 0
        self._tag = tag
        self._ranks = ranks  # Filled concurrently.
        self._strangers: set[int] = set()

    @property
    def count(self) -> int:
        """Return the total number of processes, without short-lived ones such as `git rev-parse`."""
        return sum(lived_s >= SHORTEST_S for lived_s in self.lived_s.values())

    def look(self) -> int:
        """Count once; return the current number."""
        found = self._alive()
        used = 0
        for process in found:
            with contextlib.suppress(psutil.Error):
                used += process.memory_full_info().pss
            with contextlib.suppress(psutil.Error):
                self.lived_s[process.pid] = time.time() - process.create_time()
        self.most_bytes = max(self.most_bytes, used)
        self.most_at_once = max(self.most_at_once, len(found))
        return len(found)

    def end(self) -> None:
        """Kill those still alive."""
        for process in self._alive():
            with contextlib.suppress(psutil.Error):
                process.kill()

    def _alive(self) -> list[psutil.Process]:
        found = []
        for pid in psutil.pids():
            if pid in self._strangers or pid in self._ranks:
                continue
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if process.environ().get(TAG) != self._tag:
                    self._strangers.add(pid)
                elif process.status() != psutil.STATUS_ZOMBIE and self._belongs(process):
                    found.append(process)
        return found

    def _belongs(self, process: psutil.Process) -> bool:
        """Whether it descends from a rank or is orphaned; horovodrun and its shells are excluded."""
        if not self._ranks:  # Only horovodrun so far.
            return False
        parents = process.parents()
        return any(parent.pid in self._ranks for parent in parents) or not any(
            "horovodrun" in " ".join(one.cmdline()) for one in (process, *parents)
        )


def _command(folder: Path, side: str, args: argparse.Namespace, optimizers: int) -> list[str]:
    command = horovodrun_command(args.ranks, "unused")
    script = str(REPOSITORY / "benchmarks" / "workers" / "startup.py")
    steps, device_s = (args.steps, args.device_ms / 1000.0) if optimizers == 1 else (3, 0.0)
    return [*command[:-2], script, str(folder), side, str(optimizers), str(steps), str(device_s)]


def _run(root: Path, side: str, args: argparse.Namespace, optimizers: int = 1) -> tuple[dict[str, float], _Helpers]:
    """Run one job; return its figures and rank 0's helpers."""
    folder, tag = Path(tempfile.mkdtemp(prefix="job-", dir=root)), secrets.token_hex(8)
    exits = _Exits(folder)
    helpers = _Helpers(tag, exits.began_unix_s)
    over = threading.Event()

    def watch() -> None:
        while not over.is_set() or exits.began_unix_s.keys() - exits.ended_unix_s.keys():
            exits.look()
            if optimizers > 1:  # Counting uses processor time that the timed runs need.
                helpers.look()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    environment = {"STAR_RUN_LOG": "1", "STAR_LOG_DIR": str(root / "logs"), TAG: tag}
    began_s = time.monotonic()
    try:
        command = _command(folder, side, args, optimizers)
        limits = {"deadline_s": DEADLINE_S, "stall_s": DEADLINE_S}
        run_job(command, folder, **limits, on_progress=_ignore, added_environment=environment)
    finally:
        wall_s = time.monotonic() - began_s
        over.set()
        watcher.join(10.0)
    ended_s = time.monotonic()
    while helpers.look():  # The sender keeps working for a while and would slow the next run.
        if optimizers == 1:
            helpers.end()
        if time.monotonic() > ended_s + AFTERWARDS_S:
            left = sorted(helpers.lived_s)
            raise JobFailed(f"processes of the job are alive {AFTERWARDS_S:g} s after its end: {left}")
        time.sleep(LOOK_INTERVAL_S)
    return {**_figures(folder, exits, args.ranks), "wall_s": wall_s, "after_s": time.monotonic() - ended_s}, helpers


def _ignore(fields: dict[str, Any]) -> None:
    """Ignore progress; the worker reports none."""


def _figures(folder: Path, exits: _Exits, ranks: int) -> dict[str, float]:
    found = [json.loads((folder / f"times{rank}.json").read_text(encoding="utf-8")) for rank in range(ranks)]
    return {
        "import_s": max(one["imported_unix_s"] - exits.began_unix_s[one["pid"]] for one in found),
        "first_step_s": max(one["first_step_unix_s"] - exits.began_unix_s[one["pid"]] for one in found),
        "first_step_cpu_s": max(one["first_step_cpu_s"] for one in found),
        "end_s": max(exits.ended_unix_s[one["pid"]] - one["last_step_unix_s"] for one in found),
    }


def measure(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Run the jobs and compute the figures."""
    root = Path(tempfile.mkdtemp(prefix="star-startup-"))
    try:
        runs: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
        for turn in range(args.runs + 1):  # The first pair warms the disk cache and creates MLflow's database.
            for side in SIDES if turn % 2 == 0 else reversed(SIDES):
                found, _ = _run(root, side, args)
                if turn:
                    runs[side].append(found)
            if turn:
                console.print(f"[{turn}/{args.runs}]", markup=False, highlight=False)
        summary = {"ranks": args.ranks, "steps": args.steps, "device_ms": args.device_ms, **summarize_runs(runs)}
        if args.optimizers > 1:
            _, helpers = _run(root, "star", args, args.optimizers)
            summary |= {
                "optimizers": args.optimizers,
                "helper_processes": helpers.count,
                "helper_processes_at_once": helpers.most_at_once,
                "helper_memory_mb": helpers.most_bytes / 1e6,
            }
        return {**summary, "versions": versions()}
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _table(summary: dict[str, Any]) -> Table:
    table = Table(title=f"start and end of a job, {summary['ranks']} ranks, one linear layer", title_justify="left")
    for name in ("", "plain Horovod", "star_hvd", "difference"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    rows = {
        "import_s": "process start to imports done",
        "first_step_s": "process start to end of first step",
        "first_step_cpu_s": "    processor time of it",
        "end_s": "end of last step to exit",
        "wall_s": "horovodrun, start to end",
    }
    for name, text in rows.items():
        plain_s, star_s = summary[f"plain_{name}"], summary[f"star_{name}"]
        table.add_row(text, f"{plain_s:.2f} s", f"{star_s:.2f} s", f"{star_s - plain_s:+.2f} s")
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5, help="runs of each side")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of a run")
    parser.add_argument("--device-ms", type=float, default=0.0, help="emulated device time per step")
    parser.add_argument("--optimizers", type=int, default=1, help="make so many one after another in a further job")
    parser.add_argument("--json", type=json_file, help="write all figures to this file")
    args = parser.parse_args(argv)
    console = Console()
    least = (("ranks", 1), ("runs", 1), ("steps", 1), ("device_ms", 0), ("optimizers", 1))
    if (problem := out_of_range(args, least)) is not None:
        say_error(problem)
        return 2
    summary = measured(measure, args, console)
    if summary is None:
        return 1
    console.print(_table(summary))
    if args.optimizers > 1:
        console.print(
            f"{args.optimizers} optimizers one after another: {summary['helper_processes']} helper processes of "
            f"rank 0, {summary['helper_memory_mb']:.0f} MB of memory together at most",
            highlight=False,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
