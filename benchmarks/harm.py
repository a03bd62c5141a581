"""Whether `auto` does harm where there is nothing to gain: busy jobs on few cores, no rank slower than another.

Every job trains in `sync` and in `auto`, in alternating runs, while other processes use part of the cores. `ratio` is
the median time of a run in `auto` over that in `sync`; it must not exceed 1.05, whatever `auto` tried in between. One
run of some seconds says little on a busy machine: two in the same mode differ by up to a tenth.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.lab.command import out_of_range, say_error
from benchmarks.lab.json_option import json_file
from benchmarks.lab.launch import JobFailed, horovodrun_command, run_job
from benchmarks.lab.spec import write_json

__all__ = ["Load", "main", "results_table", "worker"]

_LIMIT = 1.05
_BUSY_S = 0.02  # Length of one busy interval of a load process.
_JOBS = (  # Ranks, load processes, and the share of time that each load process computes.
    (2, 0, 0.0), (2, 1, 0.5), (2, 2, 0.7), (4, 0, 0.0), (4, 1, 1.0), (4, 2, 0.5),
)  # fmt: skip
_WARM_STEPS = 10
_EXIT_FAILED, _EXIT_INVALID = 1, 2


class Load:
    """Processes that compute for a share of the time, inside the `with` block.

    Args:
        count: Number of processes.
        share: Share of the time, 0 to 1.
    """

    def __init__(self, count: int, share: float) -> None:
        if count < 0 or not 0.0 <= share <= 1.0:
            raise ValueError(f"{count} processes that compute {share} of the time; expected at least 0, and 0 to 1")
        self._count, self._share = count, share
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Load:
        rest_s = _BUSY_S * (1.0 - self._share) / self._share if self._share else 1.0
        # Ends when its standard input closes, so also when this process ends for any reason.
        code = (
            "import select, sys, time\n"
            "while not select.select([sys.stdin], [], [], float(sys.argv[2]))[0]:\n"
            "    end = time.monotonic() + float(sys.argv[1])\n"
            "    while time.monotonic() < end: pass\n"
        )
        for _ in range(self._count):
            command = [sys.executable, "-c", code, str(_BUSY_S), str(rest_s)]
            self._processes.append(subprocess.Popen(command, stdin=subprocess.PIPE))
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            process.wait(60.0)


def worker(out: Path, mode: str, steps: int) -> None:
    """Run one rank of a job that trains in one mode; rank 0 writes the times."""
    import torch

    import star_hvd as hvd

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 16, 3, stride=2), torch.nn.ReLU(),
        torch.nn.Flatten(), torch.nn.Linear(16 * 12 * 12, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10),
    )  # fmt: skip
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.01), net.named_parameters(), mode=mode
    )
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    generator = torch.Generator().manual_seed(int(hvd.rank()))
    x = torch.randn(32, 1, 28, 28, generator=generator)
    y = torch.randint(0, 10, (32,), generator=generator)
    began_s = 0.0
    for step in range(_WARM_STEPS + steps):
        if step == _WARM_STEPS:
            began_s = time.perf_counter()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    hvd.barrier()
    report, time_s = hvd.report(), time.perf_counter() - began_s
    if report is not None:
        found = {"time_s": time_s, "plans": list(report.plans), "outcomes": list(report.outcomes)}
        write_json(out, {**found, "explain": hvd.explain()})
    hvd.shutdown()


def _measure(ranks: int, count: int, share: float, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one job in both modes."""
    runs: dict[str, list[dict[str, Any]]] = {"sync": [], "auto": []}
    with Load(count, share):
        for turn in range(args.turns):
            for mode in runs if turn % 2 == 0 else reversed(runs):
                runs[mode].append(_run(mode, ranks, args))
    time_s = {mode: statistics.median(one["time_s"] for one in found) for mode, found in runs.items()}
    found: dict[str, Any] = {"ranks": ranks, "load": count, "share": share, "steps": args.steps}
    found |= {f"{mode}_s": median_s for mode, median_s in time_s.items()}
    return {**found, "ratio": time_s["auto"] / time_s["sync"], "runs": runs}


def _run(mode: str, ranks: int, args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="harm-") as folder:
        out = Path(folder) / "result.json"
        given = ["--worker", str(out), "--mode", mode, "--steps", str(args.steps)]
        limits = {"deadline_s": args.deadline_s, "stall_s": args.deadline_s}
        run_job(
            horovodrun_command(ranks, "benchmarks.harm", *given), Path(folder), on_progress=lambda _: None, **limits
        )
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; exit status 1 if `auto` did harm or a job failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.harm", description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=len(_JOBS), help=f"how many, of {len(_JOBS)} kinds in turn")
    parser.add_argument("--steps", type=int, default=400, help="of a run")
    parser.add_argument("--turns", type=int, default=3, help="runs of each mode, in turns")
    parser.add_argument("--deadline-s", type=float, default=240.0, help="of a job")
    parser.add_argument("--json", type=json_file, help="write all figures to this file")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--mode", default="auto", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker is not None:
        worker(args.worker, args.mode, args.steps)
        return 0
    problem = out_of_range(args, (("jobs", 1), ("steps", 1), ("turns", 1), ("deadline_s", 1)))
    if problem is not None:
        say_error(problem)
        return _EXIT_INVALID
    console, found = Console(highlight=False), []
    for index in range(args.jobs):
        try:
            found.append(_measure(*_JOBS[index % len(_JOBS)], args))
        except JobFailed as error:
            console.print(f"error: {error}", markup=False)
            return _EXIT_FAILED
        one = found[-1]
        said = one["runs"]["auto"][-1]["explain"]
        console.print(f"{index + 1}/{args.jobs}: ratio {one['ratio']:.3f}; {said}", markup=False)
    if args.json is not None:
        cores = len(os.sched_getaffinity(0))
        write_json(args.json, {"schema": 1, "cores": cores, "limit": _LIMIT, "jobs": found})
    console.print(results_table(found))
    return 0 if max(one["ratio"] for one in found) <= _LIMIT else _EXIT_FAILED


def results_table(found: Sequence[dict[str, Any]]) -> Table:
    """Return the results of all cases, one per row."""
    table = Table(title=f"auto against sync, nobody slow, {len(os.sched_getaffinity(0))} cores", box=box.SIMPLE)
    for name in ("ranks", "other work", "sync ms/step", "auto ms/step", "ratio", "plans", "left again"):
        table.add_column(name, justify="right")
    for one in found:
        auto = one["runs"]["auto"]
        plans = "; ".join(", ".join(plan["mode"] for plan in run["plans"]) for run in auto)
        left = sum(outcome["harmful"] for run in auto for outcome in run["outcomes"])
        times = (f"{1e3 * one['sync_s'] / one['steps']:.1f}", f"{1e3 * one['auto_s'] / one['steps']:.1f}")
        work = f"{one['load']} x {one['share']:.0%}"
        table.add_row(str(one["ranks"]), work, *times, f"{one['ratio']:.3f}", plans, str(left))
    if found:
        table.caption = f"median {statistics.median(one['ratio'] for one in found):.3f}, limit {_LIMIT}"
    return table


if __name__ == "__main__":
    sys.exit(main())
