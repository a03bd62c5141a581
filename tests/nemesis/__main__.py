"""Jobs with faults: `python -m tests.nemesis --seeds 50`, also `make nemesis SEEDS=50`.

A seed determines mode, faults, victims and times. A job passes if it ends by itself, every sample was in exactly one
gradient of its epoch, the weight of every gradient was applied or counted as dropped, and all replicas are equal.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.machine.netns import Network, NetworkError
from benchmarks.machine.netns_launch import netns_command, write_plan
from tests.nemesis.faults import FAULTS, ROLES, USUAL_BITS_PER_S, Nemesis, possible
from tests.nemesis.job import SAMPLES
from tests.support.forkserver import ADDRESS, server_address
from tests.support.launch import FORKED

MODES = (
    "sync", "partial(3)", "subgroup(0,1,2)", "local(3)", "grouped(2)", "ps(1)", "ps(3)", "ssp(2)", "ps(backup=1)",
    "ps(grace=1)",
)  # fmt: skip
RANKS, STRIKES = 4, 3
READY_S, JOB_S = 300.0, 300.0
REPOSITORY = Path(__file__).resolve().parents[2]
SKIPPED = 77
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "STAR_RUN_LOG": "0", "PYTHONFAULTHANDLER": "1"}
TAIL, LONG_TAIL = 40, 1000  # Output lines shown of a job that failed, and of one that had to be killed.


@dataclass
class Outcome:
    """The result of a job."""

    seed: int
    mode: str
    faults: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    stuck: bool = False
    longest_s: float = 0.0
    elapsed_s: float = 0.0
    output: str = ""


def plan_of(seed: int) -> tuple[str, list[tuple[str, str]]]:
    """Return mode and faults of a seed; consecutive seeds cover all modes, and all faults possible in each."""
    chosen = random.Random(seed)
    mode = MODES[seed % len(MODES)]
    usable = [(fault, role) for fault in FAULTS for role in ROLES if possible(fault, role, mode)]
    first = usable[(seed // len(MODES)) % len(usable)]
    return mode, [first, *chosen.choices(usable, k=STRIKES - 1)]


def judge(results: list[dict[str, Any]]) -> list[str]:
    """Return the errors in a job's history."""
    wrong = []
    for number in range(max(len(rank["epochs"]) for rank in results)):
        seen = Counter(sample for rank in results for sample in rank["epochs"][number])
        missing = [sample for sample in range(SAMPLES) if sample not in seen]
        twice = sorted(sample for sample, count in seen.items() if count > 1)
        if missing or twice:
            wrong.append(f"epoch {number}: samples {missing} in no gradient, {twice} in several")
    if len({rank["digest"] for rank in results}) > 1:
        wrong.append("replicas differ")
    for number, rank in enumerate(results):
        s = rank["stats"]
        used = s["applied_weight"] + s["damped_weight"] + s["dropped_weight"]
        if s["pending_weight"] or abs(s["produced_weight"] - used) > 1e-3 * max(1.0, used):
            wrong.append(f"rank {number} made gradients of weight {s['produced_weight']:g}, {used:g} is accounted for")
        if s["mismatches"]:
            wrong.append(f"rank {number} saw replicas differ {s['mismatches']} times")
    return wrong


def run(seed: int, mode: str, strikes: list[tuple[str, str]]) -> Outcome:
    """Run one job with its faults.

    Raises:
        NetworkError: Namespaces are unavailable here.
    """
    outcome, began_s = Outcome(seed, mode), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="star-nemesis-") as name, Network(RANKS, USUAL_BITS_PER_S) as network:
        folder = Path(name)
        write_plan(folder / "hosts.json", network)
        with (folder / "output.txt").open("wb") as sink:
            job = subprocess.Popen(
                netns_command(folder / "hosts.json", "tests.nemesis.job", str(folder), mode, start=FORKED),
                cwd=REPOSITORY,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY), ADDRESS: server_address(), **ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
            )
            try:
                _go_through(job, folder, network, outcome, strikes)
            finally:
                if job.poll() is None:
                    job.terminate()
                    job.wait(60.0)
        outcome.output = (folder / "output.txt").read_text(encoding="utf-8", errors="replace")
    outcome.elapsed_s = time.monotonic() - began_s
    return outcome


def _go_through(
    job: subprocess.Popen[bytes], folder: Path, network: Network, outcome: Outcome, strikes: list[tuple[str, str]]
) -> None:
    """Wait until the job trains in its mode, inject the faults, let it end, and judge it."""
    limit_s = time.monotonic() + READY_S
    while len(ready := sorted(folder.glob("ready?.json"))) < RANKS:
        if job.poll() is not None or time.monotonic() > limit_s:
            outcome.wrong.append("the job did not come to train in its mode")
            return
        time.sleep(0.05)
    facts = [json.loads(path.read_text(encoding="utf-8")) for path in ready]
    if outcome.mode != "sync" and facts[0]["mode"] == "sync":
        outcome.wrong.append("the mode did not come into force")
    nemesis = Nemesis(network, facts, outcome.seed)
    for fault, role in strikes:
        time.sleep(nemesis.random.uniform(0.1, 1.0))
        if job.poll() is None:
            nemesis.strike(fault, role)
    outcome.faults = nemesis.log
    time.sleep(1.0)
    (folder / "over").touch()
    try:
        code = job.wait(JOB_S)
    except subprocess.TimeoutExpired:
        outcome.wrong.append(f"it did not end within {JOB_S:g} s of the last fault")
        outcome.stuck = True
        nemesis.stacks()
        return
    results = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("rank?.json"))]
    if code != 0 or len(results) < RANKS:
        outcome.wrong.append(f"it ended with exit status {code}, {len(results)} of {RANKS} ranks at their end")
        return
    outcome.longest_s = max(rank["longest_s"] for rank in results)
    outcome.wrong += judge(results)


def main(arguments: list[str]) -> int:
    """Run the seeds; return 1 if a job failed, 77 if no job can be run here."""
    parser = argparse.ArgumentParser(prog="python -m tests.nemesis", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=9, help="how many jobs")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--mode", help="this mode instead of the seed's")
    parser.add_argument("--fault", choices=FAULTS, help="this fault alone")
    parser.add_argument("--role", choices=ROLES, help="it happens to this role (default: worker)")
    args = parser.parse_args(arguments)
    console, outcomes = Console(width=140), []
    for seed in range(args.first, args.first + args.seeds):
        mode, strikes = plan_of(seed)
        mode = args.mode or mode
        if args.fault:
            strikes = [(args.fault, args.role or "worker")] * STRIKES
            if not possible(args.fault, args.role or "worker", mode):
                parser.error(f"{args.fault} of {args.role or 'worker'} cannot happen in {mode}")
        try:
            outcome = run(seed, mode, strikes)
        except NetworkError as error:
            console.print(f"no faults can be made here: {error}")
            return SKIPPED
        outcomes.append(outcome)
        said = "; ".join(outcome.wrong) or "good"
        console.print(f"seed {seed}: {mode}: {', '.join(outcome.faults)}: {said} ({outcome.elapsed_s:.0f} s)")
        if outcome.wrong:
            tail = outcome.output.splitlines()[-(LONG_TAIL if outcome.stuck else TAIL) :]
            console.print("\n".join(tail), markup=False, highlight=False)
    console.print(_table(outcomes))
    return int(any(outcome.wrong for outcome in outcomes))


def _table(outcomes: list[Outcome]) -> Table:
    good = sum(not outcome.wrong for outcome in outcomes)
    table = Table(title=f"{good} of {len(outcomes)} jobs: every sample and gradient exactly once, replicas equal")
    for name in ("seed", "mode", "faults", "longest step", "outcome"):
        table.add_column(name, justify="right" if name in ("seed", "longest step") else "left")
    for outcome in outcomes:
        wrong = "; ".join(outcome.wrong) or "good"
        table.add_row(str(outcome.seed), outcome.mode, ", ".join(outcome.faults), f"{outcome.longest_s:.1f} s", wrong)
    return table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
