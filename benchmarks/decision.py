"""How long a decision takes: window in, plan out, with the cost model and with the learned predictor.

    python -m benchmarks.decision --json FILE [--ranks 8 128 1024] [--repeats 20]

A job with slow ranks is simulated until every rank has a full history; then the same window is decided again and again
by fresh policies. Figures are medians: of the time by the clock, and of the processor's time in it, which is what the
decision takes where nothing else wants the core. One thread, no accelerator.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from scheduler.cost_policy import CostPolicy, Ranker
from scheduler.evaluate import hosts
from scheduler.plans import Plan
from scheduler.predictor import find_ranker
from scheduler.records import Window
from scheduler.simulator.episodes import Episode
from scheduler.simulator.job import Job
from scheduler.simulator.scenario import Cluster, Network, Scenario

__all__ = ["main", "measure"]

_SLOW = (0.01, 0.4)
"""Part of the ranks that are slow in a lasting way; part of all steps that a further one is."""


def _window(n: int) -> tuple[Window, Plan]:
    """A window of a job with some slow ranks, full histories."""
    count = max(1, int(_SLOW[0] * n))
    slow = [Episode(rank=3 + 7 * i, kind="compute", start_s=0.0, end_s=1e6, factor=3.0) for i in range(count)]
    slow += [Episode(rank=1, kind="compute", start_s=10.0 * i, end_s=10.0 * i + 4.0, factor=2.0) for i in range(40)]
    job = Job(Scenario(cluster=Cluster(world_size=n), network=Network(target_steps=1e6), episodes=tuple(slow)))
    job.advance(70)
    return job.window(), job.plan


def measure(n: int, ranker: Ranker | None, repeats: int) -> list[tuple[float, float]]:
    """Seconds by the clock and of the processor of `repeats` decisions with `n` ranks, besides a first one."""
    window, plan = _window(n)
    found = []
    for index in range(repeats + 1):
        policy = CostPolicy(n, ranker=ranker, hosts=hosts(n))
        fresh = dataclasses.replace(window)  # What is known of a window is kept while it is the same one.
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        policy.decide(fresh, plan)
        if index:
            found.append((time.perf_counter() - begin_s, time.process_time() - begin_cpu_s))
        if not policy.last:
            raise RuntimeError("nothing was predicted; expected a window with slow ranks")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decision", description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 128, 1024], help="default 8 128 1024")
    parser.add_argument("--repeats", type=int, default=20, help="decisions to time (default 20)")
    args = parser.parse_args(argv)
    if args.repeats < 1 or min(args.ranks) < 4:
        sys.stderr.write(f"error: --repeats {args.repeats}, --ranks {args.ranks}; expected at least 1, and 4\n")
        return 2
    rankers: dict[str, Ranker | None] = {"cost_model": None}
    learned = find_ranker(os.environ, lambda text: sys.stderr.write(f"{text}\n"))
    if learned is not None:
        rankers["learned"] = learned
    table = Table(title="A decision, ms")
    for column in ("ranks", "policy", "median", "processor", "95th percentile"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    rows: list[dict[str, Any]] = []
    for n in args.ranks:
        for name, ranker in rankers.items():
            found = measure(n, ranker, args.repeats)
            times = sorted(1e3 * wall_s for wall_s, _ in found)
            cpu = statistics.median(1e3 * cpu_s for _, cpu_s in found)
            middle, late = statistics.median(times), times[min(len(times) - 1, int(0.95 * len(times)))]
            rows.append({"ranks": n, "policy": name, "median_ms": middle, "cpu_ms": cpu, "p95_ms": late})
            table.add_row(str(n), name, f"{middle:.2f}", f"{cpu:.2f}", f"{late:.2f}")
    Console().print(table)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        most = max(args.ranks)
        judged = next(row for row in reversed(rows) if row["ranks"] == most)
        document: dict[str, Any] = {"schema": 1, "policy": judged["policy"], "ranks": most, "rows": rows}
        document.update(decision_ms=judged["median_ms"], decision_cpu_ms=judged["cpu_ms"])
        args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
