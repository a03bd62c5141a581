"""How fast the simulator is: a job of 1,000 ranks over 1,000 steps, in every mode.

    python -m benchmarks.simspeed --json FILE [--ranks 1000] [--steps 1000] [--limit-s 60]

A step is as many gradients as there are ranks, in any mode: under `ps(1)` that is 1,000 updates. The job has a slow
rank, a starved one and jitter, so that no mode is easy to simulate. Timed in processor time of this process; exit
status 1 if a mode exceeds the limit.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.lab.json_option import json_file
from benchmarks.lab.spec import write_json
from scheduler.plan.plan import Plan
from scheduler.policy.cost_policy import CostPolicy
from scheduler.simulator import Cluster, Episode, Job, Network, Scenario

__all__ = ["main", "measure", "plans"]


def plans(n: int) -> dict[str, Plan]:
    """Return a plan for every mode, with every server rule."""
    return {
        "sync": Plan.sync(n),
        "partial": Plan.partial(n, max(1, n - n // 100 - 1)),
        "subgroup": Plan.subgroup(n, range(max(1, n - n // 100))),
        "grouped": Plan.grouped(n, min(n, 8)),
        "ps": Plan.ps(n, max(1, n - n // 100)),
        "ps(n/2)": Plan.ps(n, max(1, n // 2)),
        "ps(1)": Plan.ps(n, 1),
        "ps(backup)": Plan.ps(n, max(1, n - n // 100), rule="backup", lr_rule="none"),
        "ps(dynamic)": Plan.ps(n, 1, rule="groups"),
        "ssp(3)": Plan.ps(n, 1, rule="ssp", slack=3),
        "local(4)": Plan.local(n, steps=4),
    }


def scenario(n: int) -> Scenario:
    """Return a job whose target is unreachable, so that only the number of steps ends it."""
    last = 1e6
    return Scenario(
        cluster=Cluster(world_size=n, jitter=0.05),
        network=Network(comm_bytes=1_000_000, compute_s=0.1, target_steps=1e9),
        episodes=(
            Episode(rank=0, kind="compute", start_s=5.0, end_s=last, factor=3.0),
            Episode(rank=n - 1, kind="starved", start_s=20.0, end_s=60.0, factor=2.0),
        ),
    )


def measure(plan: Plan, steps: int, *, policy: bool = False, limit_s: float = 300.0) -> dict[str, Any]:
    """Simulate `steps` gradients per rank on average.

    Returns:
        `cpu_s`, `gradients`, `updates` and the simulated time; `complete` is false if `limit_s` ended it.
    """
    n = plan.world_size
    job = Job(scenario(n), plan, CostPolicy(n) if policy else None, every_steps=10)
    account, begin_s = job.state.account, time.process_time()
    while float(account.gradients[0]) < n * steps and time.process_time() - begin_s < limit_s:
        job.advance(4)
    cpu_s = time.process_time() - begin_s
    return {
        "cpu_s": cpu_s,
        "gradients": float(account.gradients[0]),
        "updates": float(account.updates[0]),
        "simulated_s": job.now_s,
        "complete": float(account.gradients[0]) >= n * steps,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simspeed", description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=json_file, help="write all figures to this file")
    parser.add_argument("--ranks", type=int, default=1000, help="ranks of the job (default 1000)")
    parser.add_argument("--steps", type=int, default=1000, help="steps of the job (default 1000)")
    parser.add_argument("--limit-s", type=float, default=60.0, help="most seconds of a mode (default 60)")
    parser.add_argument("--modes", default="", help="comma-separated subset")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table, write JSON."""
    args = _parser().parse_args(argv)
    every = plans(args.ranks) if args.ranks >= 2 and args.steps >= 1 else {}
    wanted = [name for name in args.modes.split(",") if name] or [*every, "auto"]
    if not every or not set(wanted) <= {*every, "auto"}:
        sys.stderr.write(f"error: {args.ranks} ranks, {args.steps} steps, modes {wanted}; expected at least 2 ranks, "
                         f"1 step and modes of {', '.join([*every, 'auto'])}\n")
        return 2
    table = Table(title=f"{args.ranks} ranks x {args.steps} steps")
    for column in ("mode", "CPU s", "updates", "simulated s"):
        table.add_column(column, justify="left" if column == "mode" else "right")
    found: dict[str, Any] = {}
    for name in wanted:
        plan = every.get(name, every["sync"])
        found[name] = measure(plan, args.steps, policy=name == "auto", limit_s=5.0 * args.limit_s)
        one = found[name]
        table.add_row(name, f"{one['cpu_s']:.1f}", f"{one['updates']:.0f}", f"{one['simulated_s']:.0f}")
    Console().print(table)
    slowest = max(found, key=lambda name: found[name]["cpu_s"])
    worst_s = found[slowest]["cpu_s"]
    fast = all(one["complete"] for one in found.values()) and worst_s < args.limit_s
    if args.json is not None:
        write_json(args.json, {
            "schema": 1, "ranks": args.ranks, "steps": args.steps, "limit_s": args.limit_s, "worst_s": worst_s,
            "worst_mode": slowest, "ok": fast, "modes": found,
        })
    return 0 if fast else 1


if __name__ == "__main__":
    sys.exit(main())
