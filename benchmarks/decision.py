"""How long a decision takes, from reports to plan: with the cost model, with the learned predictor and by the rule.

    python -m benchmarks.decision --json FILE [--ranks 8 128 1024] [--repeats 20]

A job with slow ranks is simulated until every rank has a full history, as on a running coordinator. From this history
the window is built and decided upon repeatedly, each time by a fresh policy. Figures are medians of wall-clock time
and of processor time, which is what a decision takes on an otherwise idle core. One thread, no accelerator. The
output also has the share of a core that a coordinator of 8 ranks uses: see `benchmarks.lab.coordinator`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.lab.coordinator import coordinator_share
from benchmarks.lab.json_option import json_file
from scheduler.diagnosis.stragglers import find_stragglers
from scheduler.learning.evaluate import hosts
from scheduler.learning.model_choice import find_ranker
from scheduler.plan.plan import Plan
from scheduler.policy.cost_policy import CostPolicy, Ranker
from scheduler.policy.rule_policy import RulePolicy
from scheduler.records import StepReport, StepTimes, Window
from scheduler.simulator.episodes import Episode
from scheduler.simulator.job import Job
from scheduler.simulator.scenario import Cluster, Network, Scenario
from star_hvd.config import Config
from star_hvd.coordinator.optimizer_state import OptimizerState

__all__ = ["main", "measure"]

_SLOW = (0.01, 0.4)
"""Part of the ranks that are slow in a lasting way; part of all steps that a further one is."""

_DECISIONS = ("learned", "cost_model")
"""Whose time is judged: the first that there is."""


def _window(n: int) -> tuple[Window, Plan]:
    """Return a window of a job with some slow ranks and full histories, and the job's plan."""
    count = max(1, int(_SLOW[0] * n))
    slow = [Episode(rank=3 + 7 * i, kind="compute", start_s=0.0, end_s=1e6, factor=3.0) for i in range(count)]
    slow += [Episode(rank=1, kind="compute", start_s=10.0 * i, end_s=10.0 * i + 4.0, factor=2.0) for i in range(40)]
    job = Job(Scenario(cluster=Cluster(world_size=n), network=Network(target_steps=1e6), episodes=tuple(slow)))
    job.advance(70)
    return job.window(), job.plan


def _reader(window: Window) -> Callable[[], Window]:
    """Return a function that rebuilds the window from a coordinator state that holds its reports."""
    n = window.world_size
    engine = OptimizerState(0, n, Config(), lambda message: None)
    for stats in window.ranks:
        for step, time_s in zip(stats.steps, stats.compute_s, strict=True):
            engine.history.append(StepReport(rank=stats.rank, step=step, times=StepTimes(time_s)))
    engine.links.bytes_per_s = [stats.link_bytes_per_s for stats in window.ranks]
    engine.gradients.total_bytes = window.comm_bytes
    rest = {"step": window.step, "noise_scale": window.noise_scale, "allowed": window.allowed}
    return lambda: dataclasses.replace(engine.window(), **rest)  # type: ignore[arg-type]


def measure(n: int, rankers: dict[str, Ranker | None], repeats: int) -> dict[str, list[tuple[float, float]]]:
    """Measure all parts of a decision with `n` ranks: wall-clock and processor seconds, without a first warm-up call.

    The decisions, and `rule`, include building the window; `window` and `find_stragglers` are parts of them.
    """
    window, plan = _window(n)
    places = hosts(n)
    read = _reader(window)
    made = read()

    def predicted(ranker: Ranker | None) -> None:
        policy = CostPolicy(n, ranker=ranker, hosts=places)
        policy.decide(read(), plan)
        if not policy.last:
            raise RuntimeError("nothing was predicted; expected a window with slow ranks")

    tasks: dict[str, Callable[[], object]] = {
        "window": read,
        "find_stragglers": lambda: find_stragglers(made),
        "rule": lambda: RulePolicy(n, hosts=places).decide(read(), plan),
        **{name: lambda ranker=ranker: predicted(ranker) for name, ranker in rankers.items()},  # type: ignore[misc]
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in tasks}
    for index in range(repeats + 1):
        for name, task in tasks.items():
            begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
            task()
            if index:
                found[name].append((time.perf_counter() - begin_s, time.process_time() - begin_cpu_s))
    return found


def _rows(ranks: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    rankers: dict[str, Ranker | None] = {"cost_model": None}
    learned = find_ranker(os.environ, lambda text: sys.stderr.write(f"{text}\n"))
    if learned is not None:
        rankers["learned"] = learned
    rows: list[dict[str, Any]] = []
    for n in ranks:
        for name, found in measure(n, rankers, repeats).items():
            times = sorted(1e3 * wall_s for wall_s, _ in found)
            cpu = statistics.median(1e3 * cpu_s for _, cpu_s in found)
            late = times[min(len(times) - 1, int(0.95 * len(times)))]
            median = statistics.median(times)
            rows.append({"ranks": n, "policy": name, "median_ms": median, "cpu_ms": cpu, "p95_ms": late})
    return rows


def _print(rows: Sequence[dict[str, Any]], shares: dict[str, float]) -> None:
    table = Table(title="A decision and its parts, ms")
    for column in ("ranks", "what", "median", "processor", "95th percentile"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for row in rows:
        figures = (f"{row[name]:.2f}" for name in ("median_ms", "cpu_ms", "p95_ms"))
        table.add_row(str(row["ranks"]), row["policy"], *figures)
    Console().print(table)
    told = ", ".join(f"{100.0 * share:.2f} % ({name})" for name, share in shares.items())
    Console().print(f"A coordinator of 8 ranks at 30 steps per second takes of a core: {told}")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decision", description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=json_file, help="write all figures to this file")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 128, 1024], help="default 8 128 1024")
    parser.add_argument("--repeats", type=int, default=20, help="decisions to time (default 20)")
    args = parser.parse_args(argv)
    if args.repeats < 1 or min(args.ranks) < 4:
        sys.stderr.write(f"error: --repeats {args.repeats}, --ranks {args.ranks}; expected at least 1, and 4\n")
        return 2
    logging.getLogger("star_hvd").setLevel(logging.ERROR)  # The simulation's stragglers would be logged.
    rows = _rows(args.ranks, args.repeats)
    # Three runs each: jobs differ only by what else the machine does.
    shares = {
        name: statistics.median(coordinator_share(slow=slow) for _ in range(3))
        for name, slow in (("nobody slow", False), ("one rank slow", True))
    }
    _print(rows, shares)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        most = max(args.ranks)
        there = {row["policy"]: row for row in rows if row["ranks"] == most}
        judged = next(there[name] for name in _DECISIONS if name in there)
        document: dict[str, Any] = {"schema": 2, "policy": judged["policy"], "ranks": most, "rows": rows}
        document.update(decision_ms=judged["median_ms"], decision_cpu_ms=judged["cpu_ms"])
        document.update(coordinator_share=max(shares.values()), coordinator_shares=shares)
        args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
