"""What crowds of peers without a key at every socket of a job cost the job: step time, processor time, memory.

The job has half of the processors and the crowds have the other half, so that the crowds' own processor use does not
slow the job; with `--share` both use all. One job goes through all phases: no crowd; crowds at listeners that are not
the job's (`elsewhere`: they accept, keep 16, close the oldest and discard the data); the same crowds at the job's
sockets. Every phase is compared with the preceding phase without a crowd.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.lab.command import out_of_range
from benchmarks.lab.json_option import json_file
from benchmarks.lab.launch import JobFailed, horovodrun_command, run_job
from benchmarks.lab.options import check_mode
from benchmarks.lab.spec import write_json
from benchmarks.machine.strangers import KINDS, idle_listeners, strangers
from benchmarks.neighbours import halves, median_in

__all__ = ["main", "summarize"]

_LIMIT, _MOST_BYTES = 1.05, 50e6
_SETTLE_S = 1.0
_WAIT_S = 60.0  # For the job's sockets.
_LOOK_S = 0.05
_EXIT_FAILED = 1
_LEAST = (
    ("ranks", 1), ("count", 1), ("turns", 1), ("phase_s", 0.1), ("settle_s", 0), ("work", 0), ("deadline_s", 1),
)  # fmt: skip

QUIET = "quiet"

Address = tuple[str, int]
Entry = tuple[float, float]
Figures = dict[str, Any]


class _Job:
    """The attacked job, run in a thread of its own."""

    def __init__(self, folder: Path, args: argparse.Namespace, cpus: Sequence[int]) -> None:
        self._folder, self._args, self._cpus = folder, args, cpus
        self._failed: list[JobFailed] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        command = horovodrun_command(
            self._args.ranks, "benchmarks.workers.strangers", str(self._folder), self._args.mode, str(self._args.work)
        )
        bound = ["taskset", "-c", ",".join(map(str, self._cpus)), *command]
        limit_s = self._args.deadline_s
        try:
            run_job(bound, self._folder, deadline_s=limit_s, stall_s=limit_s, on_progress=lambda _: None)
        except JobFailed as error:
            self._failed.append(error)

    def ready(self) -> list[Address]:
        """Wait for the sockets of the ranks and of their servers, and return them."""
        limit_s = time.monotonic() + _WAIT_S
        while len(found := self._notes()) < self._args.ranks:
            if self._failed or time.monotonic() > limit_s:
                raise self._failed[0] if self._failed else JobFailed("the job did not begin to train")
            time.sleep(_LOOK_S)
        time.sleep(self._args.settle_s)  # Servers start later.
        addresses = {(note["host"], port) for note in found for port in note["ports"]}
        for process in self.processes()[len(found) :]:
            with contextlib.suppress(psutil.Error):
                open_ = process.net_connections("tcp")
                addresses |= {tuple(one.laddr) for one in open_ if one.status == psutil.CONN_LISTEN}
        return sorted(addresses)

    def processes(self) -> list[psutil.Process]:
        """Return its ranks, then their servers."""
        ranks = [psutil.Process(note["pid"]) for note in self._notes()]
        return ranks + [child for rank in ranks for child in rank.children(recursive=True)]

    def _notes(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(self._folder.glob("ports*.json"))]

    def end(self) -> dict[str, Any]:
        """Stop it; return what its first and its last rank recorded."""
        (self._folder / "stop").touch()
        self._thread.join()
        if self._failed:
            raise self._failed[0]
        first, last = (json.loads((self._folder / f"rank{rank}.json").read_text(encoding="utf-8"))
                       for rank in (0, self._args.ranks - 1))  # fmt: skip
        return {"ends_s": first["ends_s"], "entries_s": last["entries_s"]}


class _Meter(threading.Thread):
    """Tracks the largest memory growth of processes while it runs, and reads their processor time on request."""

    def __init__(self, processes: Sequence[psutil.Process]) -> None:
        super().__init__(daemon=True)
        self._processes = processes
        self._before = [process.memory_info().rss for process in processes]
        self.most_bytes = 0
        self._over = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._over.wait(_LOOK_S):
            now = [process.memory_info().rss for process in self._processes]
            self.most_bytes = max(self.most_bytes, *(b - a for a, b in zip(self._before, now, strict=True)))

    def cpu_s(self) -> tuple[float, float]:
        """Return the processor time of all threads, and of all but the training threads."""
        used = [(one.user_time + one.system_time, one.id == p.pid) for p in self._processes for one in p.threads()]
        return sum(took_s for took_s, _ in used), sum(took_s for took_s, trains in used if not trains)

    def end(self) -> None:
        self._over.set()
        self.join()


def _phase(name: str, job: _Job, ports: Sequence[Address], args: argparse.Namespace, cpus: Sequence[int]) -> Figures:
    """Run one phase; return its figures except step times, which the job records."""
    kind, _, elsewhere = name.partition(" ")
    crowds: list[list[int]] = []
    with contextlib.ExitStack() as stack:
        meter = _Meter(job.processes())
        stack.callback(meter.end)
        if elsewhere:
            ports = stack.enter_context(idle_listeners(len(ports), cpus))
        if kind != QUIET:
            # Memory counts from the first stranger on, processor time once all are connected.
            with ThreadPoolExecutor(len(ports)) as pool:
                made = [strangers(kind, args.count, host, port, cpus) for host, port in ports]
                crowds = list(pool.map(stack.enter_context, made))
        time.sleep(_SETTLE_S)
        begin_s, (all_s, beside_s), stolen_s = time.monotonic(), meter.cpu_s(), psutil.cpu_times().steal
        time.sleep(args.phase_s)
        end_s, now_s, stolen_s = time.monotonic(), meter.cpu_s(), psutil.cpu_times().steal - stolen_s
    lasted_s = end_s - begin_s
    return {
        "name": name,
        "begin_s": begin_s,
        "end_s": end_s,
        "cores": (now_s[0] - all_s) / lasted_s,
        "beside_cores": (now_s[1] - beside_s) / lasted_s,
        "stolen_cores": stolen_s / lasted_s,
        "memory_bytes": meter.most_bytes,
        "connections_made": sum(map(sum, crowds)),
    }


def summarize(phases: Sequence[Figures], ends_s: Sequence[float], entries_s: Sequence[Entry]) -> dict[str, Figures]:
    """Return per kind of phase the median step and processor time, also of the quiet phase before, and other maxima.

    Args:
        phases: In order; see `_phase`.
        ends_s: When the steps ended.
        entries_s: Start and duration of the job's own connection attempts.
    """
    found: dict[str, dict[str, list[float]]] = {}
    before: dict[str, float] = {}
    for phase in phases:
        steps = sum(phase["begin_s"] <= at <= phase["end_s"] for at in ends_s)
        step_s = median_in(ends_s, phase["begin_s"], phase["end_s"])
        mean_s = (phase["end_s"] - phase["begin_s"]) / max(1, steps)
        one = {"step_s": step_s, "mean_step_s": mean_s, "cores": phase["cores"], "beside_cores": phase["beside_cores"]}
        if phase["name"] == QUIET:
            before = one
        waits_s = [took_s for began_s, took_s in entries_s if phase["begin_s"] <= began_s <= phase["end_s"]]
        one |= {"ratio": one["step_s"] / before["step_s"], "mean_ratio": one["mean_step_s"] / before["mean_step_s"]}
        one |= {"added_cores": one["beside_cores"] - before["beside_cores"]}
        one |= {"memory_bytes": phase["memory_bytes"], "connections_made": phase["connections_made"]}
        one |= {"stolen_cores": phase["stolen_cores"], "entered": float(len(waits_s))}
        one |= {"entry_s": statistics.median(waits_s or [math.nan]), "longest_entry_s": max(waits_s, default=math.nan)}
        for name, value in one.items():
            found.setdefault(phase["name"], {}).setdefault(name, []).append(value)
    worst = ("memory_bytes", "longest_entry_s", "stolen_cores")
    return {
        kind: {name: (max if name in worst else statistics.median)(values) for name, values in figures.items()}
        | {"ratios": figures["ratio"]}
        for kind, figures in found.items()
    }


def _table(found: dict[str, Figures]) -> Table:
    shown = Table("", "step time, x quiet", "(mean step)", "cores of the job", "cores added by other threads",
                  "memory, MB", "entry, s", "longest, s", "connections", "stolen cores")  # fmt: skip
    for kind, one in found.items():
        spread = ", ".join(f"{ratio:.2f}" for ratio in one["ratios"])
        shown.add_row(
            kind, f"{one['ratio']:.3f} ({spread})", f"{one['mean_ratio']:.3f}", f"{one['cores']:.2f}",
            f"{one['added_cores']:+.3f}",
            f"+{one['memory_bytes'] / 1e6:.0f}", f"{one['entry_s']:.3f}", f"{one['longest_entry_s']:.2f}",
            f"{one['connections_made']:.0f}", f"{one['stolen_cores']:.2f}",
        )  # fmt: skip
    return shown


def _measure(args: argparse.Namespace) -> Figures:
    cpus = sorted(os.sched_getaffinity(0))
    mine, theirs = (cpus, cpus) if args.share or len(cpus) < 2 else halves(cpus)
    os.sched_setaffinity(0, theirs)  # This process only observes the job, whose command binds its threads.
    order = [name for kind in args.kinds.split(",") for name in (QUIET, f"{kind} elsewhere", QUIET, kind)]
    with tempfile.TemporaryDirectory(prefix="strangers-") as folder:
        job = _Job(Path(folder), args, mine)
        try:
            ports = job.ready()
            phases = [_phase(name, job, ports, args, theirs) for _ in range(args.turns) for name in order]
        finally:
            noted = job.end()
    found = summarize(phases, noted["ends_s"], noted["entries_s"])
    return {"sockets": len(ports), "cores_of_the_job": len(mine), "kinds": found, "phases": phases}


def _problem(args: argparse.Namespace) -> str | None:
    """Return why no job can be measured with these options."""
    unknown = sorted(set(args.kinds.split(",")) - set(KINDS))
    if unknown:
        return f"--kinds has {', '.join(unknown)}; expected some of {', '.join(KINDS)}"
    if (problem := out_of_range(args, _LEAST)) is not None:
        return problem
    try:
        check_mode(args.mode, args.ranks)
    except ValueError as error:
        return f"--mode: {error}"
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; exit status 1 if a crowd costs more than allowed, or a job failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.strangers", description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="of the job (%(default)s)")
    parser.add_argument("--mode", default="partial(2)", help="of its optimizer; `ps(...)` has sockets of servers too")
    parser.add_argument("--count", type=int, default=1000, help="strangers at each socket (%(default)s)")
    parser.add_argument("--kinds", default="silent,flood", help=f"comma-separated, of {', '.join(KINDS)}")
    parser.add_argument("--turns", type=int, default=3, help="times each phase is measured (%(default)s)")
    parser.add_argument("--phase-s", type=float, default=4.0, help="length of a phase (%(default)s)")
    parser.add_argument("--settle-s", type=float, default=3.0, help="until the job's servers are there (%(default)s)")
    parser.add_argument("--work", type=int, default=20, help="products of 256 x 256 matrices in a step (%(default)s)")
    parser.add_argument("--share", action="store_true", help="crowds and job share all processors")
    parser.add_argument("--deadline-s", type=float, default=600.0, help="of the job")
    parser.add_argument("--json", type=json_file, help="write all figures to this file")
    args = parser.parse_args(argv)
    if (problem := _problem(args)) is not None:
        parser.error(problem)
    try:
        found = _measure(args)
    except JobFailed as error:
        print(f"error: {error}")
        return _EXIT_FAILED
    console = Console()
    console.print(_table(found["kinds"]))
    if args.json is not None:
        write_json(args.json, {"schema": 1, "limit": _LIMIT, "most_bytes": _MOST_BYTES, **found})
    attacks = [one for kind, one in found["kinds"].items() if kind in KINDS]
    harmed = any(one["ratio"] > _LIMIT or one["memory_bytes"] > _MOST_BYTES for one in attacks)
    return _EXIT_FAILED if harmed else 0


if __name__ == "__main__":
    sys.exit(main())
