"""What scheduling of the communication saves on slow links: steps under Horovod and under star_hvd, cell by cell.

Every rank is a host of its own, or `--each` ranks share one, behind a link of a given rate (network namespaces, `tc`).
Device time is spent layer by layer, so that the gradients of the last layers travel while the first layers still work;
it is a given part of the time that the gradients need on the link at least. A cell is a size of the network, a rate, a
part and a mode; each of its variants is one job, and all of a cell run one right after the other. `ratio` is the step
time over that of plain Horovod, `exposed_comm_s` the step time less the device time, `bound` what no lossless schedule
of `sync` is below (`bound_s`), over the step time of plain Horovod: a `ratio` is to be read against it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.lab.launch import JobFailed, run_job
from benchmarks.lab.spec import write_json
from benchmarks.machine.netns import Network, NetworkError
from benchmarks.machine.netns_launch import netns_command, write_plan
from benchmarks.workers.transmission import VARIANTS, Job

__all__ = ["Cell", "figures", "main", "measure"]

PLAIN, FP16, OURS = "horovod", "horovod-fp16", "star"
_EXIT_FAILED = 1
_STARTUP_S = 120.0

Cell = dict[str, Any]  # One variant of one cell, as it is written to the file.


def link_s(mbytes: float, mbit: float, hosts: int) -> float:
    """Least time of an all-reduce: a host sends 2 (n - 1) / n times the bytes."""
    return 2.0 * (hosts - 1) / hosts * mbytes * 8.0 / mbit


def bound_s(comm_s: float, compute_s: float, layers: int) -> float:
    """What no lossless schedule of `sync` is below, in steps one after the other.

    All bytes pass the link in every step. And the first layer's gradient is there when backward ends, needed when the
    next forward pass begins: a step is at least the device time and the time of this layer's bytes.
    """
    return max(comm_s, compute_s + comm_s / layers)


def variants_of(mode: str, each: int = 1) -> list[str]:
    """The variants that are measured in a mode with so many ranks on a host, Horovod's first."""
    possible = {name: v for name, v in VARIANTS.items() if each > 1 or not v.shares_hosts}
    return [name for name, variant in possible.items() if variant.modes is None or mode in variant.modes]


def measure(mbytes: float, mbit: float, part: float, mode: str, args: argparse.Namespace) -> list[Cell]:
    """One cell: all its variants.

    Raises:
        JobFailed: A job died, hung or took too long.
        NetworkError: No rated links can be had here.
    """
    hosts = args.ranks // args.each
    comm_s = link_s(mbytes, mbit, hosts)
    job = Job(mbytes=mbytes, compute_s=part * comm_s, layers=args.layers, mode=mode, steps=args.steps, warm=args.warm)
    found: list[Cell] = []
    with Network(hosts, 1e6 * mbit) as network:
        for variant in variants_of(mode, args.each):
            wanted = args.variants.split(",") if args.variants else None
            if variant not in wanted if wanted else (part < 1.0 and variant == "overlap-auto"):
                continue  # It is measured where its outcome is in question.
            result = _run(network, variant, job, args)
            steps_s = result["step_s"]
            found.append(
                {
                    "mbytes": mbytes, "mbit": mbit, "mode": mode, "part": part, "variant": variant,
                    "link_s": comm_s, "compute_s": job.compute_s,
                    "step_s": steps_s, "exposed_comm_s": max(0.0, steps_s - job.compute_s), **result["more"],
                }
            )  # fmt: skip
    plain = next((cell["step_s"] for cell in found if cell["variant"] == PLAIN), None)
    least_s = bound_s(comm_s, job.compute_s, job.layers)
    for cell in found:
        cell["ratio"] = cell["step_s"] / plain if plain else None
        cell["bound"] = least_s / plain if plain and mode == "sync" else None
    return found


def _run(network: Network, variant: str, job: Job, args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="transmission-") as folder:
        run_dir = Path(folder)
        write_plan(run_dir / "hosts.json", network, args.each)
        out = run_dir / "result.json"
        command = netns_command(
            run_dir / "hosts.json", "benchmarks.workers.transmission", str(out), variant, json.dumps(job.to_dict())
        )
        steps = max(job.warm, VARIANTS[variant].least_warm) + job.steps
        longest_s = 4.0 * steps * (job.compute_s + link_s(job.mbytes, args.least_mbit, args.ranks))
        deadline_s = _STARTUP_S + longest_s
        run_job(
            command,
            run_dir,
            deadline_s=deadline_s,
            stall_s=deadline_s,
            on_progress=lambda _: None,
            added_environment=VARIANTS[variant].environment,
        )
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


def figures(cells: Sequence[Cell]) -> dict[str, Any]:
    """The figures of merit that these cells hold; those without a cell are left out.

    `sync_lossless`: the largest ratio of `sync` with overlap where communication is longer than compute.
    `sync_lossless_bound`: the bound of the same cell.
    `hierarchical`: the largest ratio of `sync` with sums that go through the hosts.
    `sync_auto`: the largest ratio of `sync` with `Compression.auto` there.
    `sync_auto_fp16`: the largest of its step times over those of Horovod with fp16.
    `compute_bound`: the largest step time with `overlap="auto"` or `Compression.auto`, once decided, over that of
    star_hvd without it, where compute is at least as long as communication.
    """
    over_hosts = [c["ratio"] for c in cells if c["variant"] == "hierarchical" and c["ratio"] is not None]
    bound = [c for c in cells if c["part"] < 1.0 and c["ratio"] is not None]
    kept = [c for c in bound if c["mode"] == "sync" and c["variant"] == "overlap"]
    found: dict[str, Any] = {}
    if kept:
        worst = max(kept, key=lambda c: c["ratio"])
        found = {"sync_lossless": worst["ratio"], "sync_lossless_bound": worst["bound"]}
    lossy = [c for c in bound if c["mode"] == "sync" and c["variant"] == "compression-auto"]
    if lossy:
        found["sync_auto"] = max(c["ratio"] for c in lossy)
        found["sync_auto_fp16"] = max(c["step_s"] / _same_cell(c, cells, FP16) for c in lossy)
    tried = [c for c in cells if c["part"] >= 1.0 and c["variant"] in ("overlap-auto", "compression-auto")]
    idle = [c["step_s"] / _same_cell(c, cells, OURS) for c in tried]
    found |= {"hierarchical": max(over_hosts)} if over_hosts else {}
    return found | ({"compute_bound": max(idle)} if idle else {})


def _same_cell(cell: Cell, cells: Sequence[Cell], variant: str) -> float:
    """Step time of another variant in the same cell, NaN where it was not measured."""
    keys = ("mbytes", "mbit", "mode", "part")
    same = [c for c in cells if c["variant"] == variant and all(c[key] == cell[key] for key in keys)]
    return float(same[0]["step_s"]) if same else math.nan


def _table(cells: Sequence[Cell]) -> Table:
    table = Table(title="steps on slow links", box=box.SIMPLE)
    for name in ("MB", "Mbit/s", "mode", "link ms", "compute ms", "variant", "step ms", "exposed ms", "ratio", "bound"):
        table.add_column(name, justify="left" if name in ("mode", "variant") else "right")
    for c in cells:
        times = [f"{1e3 * c[name]:.1f}" for name in ("link_s", "compute_s")]
        ratios = ["" if c[name] is None else f"{c[name]:.3f}" for name in ("ratio", "bound")]
        more = (f"{1e3 * c['step_s']:.1f}", f"{1e3 * c['exposed_comm_s']:.1f}", *ratios)
        table.add_row(f"{c['mbytes']:g}", f"{c['mbit']:g}", c["mode"], *times, c["variant"], *more)
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; exit status 1 where a job failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transmission", description=__doc__.splitlines()[0])
    parser.add_argument("--mbytes", default="1,10", help="sizes of the network, separated by commas")
    parser.add_argument("--mbit", default="50,200", help="rates of the links")
    parser.add_argument("--parts", default="0.8", help="device time of a step over the least time of its reduction")
    parser.add_argument("--modes", default="sync", help="separated by semicolons")
    parser.add_argument("--variants", default="", help=f"those to measure, of {', '.join(VARIANTS)}; all by default")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--each", type=int, default=1, help="ranks on each host; a divisor of --ranks, below it")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--steps", type=int, default=12, help="that count")
    parser.add_argument("--warm", type=int, default=8, help="before that")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args(argv)
    if args.each < 1 or args.ranks % args.each or args.ranks == args.each:
        parser.error(f"--each is {args.each}; expected a divisor of --ranks, {args.ranks}, below it")
    rates = [float(text) for text in args.mbit.split(",")]
    sizes = [float(text) for text in args.mbytes.split(",")]
    args.least_mbit = min(rates)
    console, cells = Console(highlight=False), []
    parts = [float(text) for text in args.parts.split(",")]
    for mbytes, mbit, part, mode in itertools.product(sizes, rates, parts, args.modes.split(";")):
        try:
            cells += measure(mbytes, mbit, part, mode, args)
        except (JobFailed, NetworkError) as error:
            console.print(f"error: {error}", markup=False)
            return _EXIT_FAILED
        if args.json is not None:
            place = {"ranks": args.ranks, "each": args.each}
            write_json(args.json, {"schema": 1, **place, "cells": cells, **figures(cells)})
    console.print(_table(cells))
    for name, value in figures(cells).items():
        console.print(f"{name}: {value:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
