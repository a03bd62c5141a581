"""What communication scheduling saves on slow links: step times of Horovod and star_hvd, cell by cell.

Every rank is a host of its own, or `--each` ranks share one, behind a link of a given rate (network namespaces, `tc`).
Device time is spent layer by layer, so that gradients of the last layers are sent while the first layers still compute;
it is a given multiple of the least time that the gradients need on the link. A cell is a network size, a rate, such a
multiple (`part`) and a mode. Each of its variants is one job; the jobs of a cell run one right after the other. `ratio`
is the step time over that of plain Horovod, `exposed_comm_s` the step time minus the device time, and `bound` the lower
bound of any lossless schedule of `sync` (`bound_s`) over the step time of plain Horovod: compare `ratio` with it.

A step with servers is an update of the parameters; `own_step_s` is the time between two pushes of one rank. `push_s` is
the least time in which a gradient leaves its host for servers on all hosts; parameters come back equally fast. Every
link carries both its rank's pushes and its server's answers. An update is decided when its last push has arrived, so a
rank's push and its answer are sequential: `ps_cycle_s` is the least time of both including the computation around them.
`ps_wire_s` is the least time for any order and staleness: that of the bytes of an update's pushes and answers.

Without `--mbytes`, `--mbit`, `--parts` and `--modes` it measures the cells of `CELLS`, the source of all `figures`.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.lab.json_option import json_file
from benchmarks.lab.launch import JobFailed, run_job
from benchmarks.lab.spec import write_json
from benchmarks.machine.device import FORWARD_PART
from benchmarks.machine.netns import Network, NetworkError
from benchmarks.machine.netns_launch import netns_command, write_plan
from benchmarks.workers.transmission import VARIANTS, Job
from scheduler.records import parse_mode

__all__ = ["CELLS", "Cell", "figures", "main", "measure"]

PLAIN, FP16, OURS, DEFAULT = "horovod", "horovod-fp16", "star", "default"
BEHIND, BEHIND_LOSSY = "background", "background-auto"
AUTO = "compression-auto"
_LITTLE_COMPUTE = 0.25  # Up to this part of a reduction's least time, compression can save most of a step.
CELLS = (
    (1.0, 50.0, 0.8, "sync", ()),
    (1.0, 200.0, 0.8, "sync", ()),
    (10.0, 50.0, 0.1, "sync", (PLAIN, FP16, AUTO)),
    (10.0, 50.0, 0.8, "sync", (PLAIN, FP16, AUTO)),
    (10.0, 200.0, 0.1, "sync", (PLAIN, FP16, AUTO)),
    (10.0, 200.0, 0.8, "sync", ()),
    (1.0, 200.0, 1.5, "sync", ()),
    (4.0, 200.0, 0.2, "ps(3)", (PLAIN, OURS, DEFAULT, BEHIND, BEHIND_LOSSY)),
    (4.0, 200.0, 0.8, "ps(3)", (DEFAULT, BEHIND)),
    (4.0, 200.0, 1.5, "ps(3)", (PLAIN, OURS, DEFAULT, BEHIND)),
    (10.0, 200.0, 0.4, "local(8)", (PLAIN, OURS, BEHIND)),
)
"""Megabytes, Mbit/s, device time over the least time of a reduction, mode, variants if not all: the default."""
_EXIT_FAILED, _EXIT_SKIPPED = 1, 77
_STARTUP_S = 120.0

Cell = dict[str, Any]  # One variant of one cell, as written to the file.


def link_s(mbytes: float, mbit: float, hosts: int) -> float:
    """Return the least time of an all-reduce: a host sends 2 (n - 1) / n times the bytes."""
    return 2.0 * (hosts - 1) / hosts * mbytes * 8.0 / mbit


def bound_s(comm_s: float, compute_s: float, layers: int) -> float:
    """Return the lower bound of the step time of any lossless schedule of `sync`.

    All bytes pass the link in every step. The first layer's gradient is ready only at the end of backward and needed at
    the start of the next forward pass, so a step takes at least the device time plus the time of this layer's bytes.
    """
    return max(comm_s, compute_s + comm_s / layers)


def push_s(mbytes: float, mbit: float, hosts: int) -> float:
    """Return the least time in which a rank's gradient leaves its host; the local server's part is not sent."""
    return link_s(mbytes, mbit, hosts) / 2.0


def ps_cycle_s(compute_s: float, pushed_s: float) -> float:
    """Return the least time between updates if parameters arrive behind forward and gradients leave behind backward.

    Equally fast ranks are released together, and a rank whose push misses the update is in the next one.

    Args:
        compute_s: Device time of a step.
        pushed_s: `push_s`.
    """
    return max(FORWARD_PART * compute_s, pushed_s) + max((1.0 - FORWARD_PART) * compute_s, pushed_s)


def ps_wire_s(mode: str, ranks: int, compute_s: float, pushed_s: float) -> float:
    """Return the least time of an update in any order and at any staleness, with a server beside every rank.

    An update takes x pushes and the computation of x gradients, shared by all ranks, and each push is answered: a link
    carries x / n of a push and as much of an answer, each way.

    Args:
        mode: A mode with servers.
        ranks: n.
        compute_s: Device time of a step.
        pushed_s: `push_s`.
    """
    plan = parse_mode(mode, ranks)
    x = plan.quorum if plan is not None else ranks
    return x / ranks * max(compute_s, 2.0 * pushed_s)


def variants_of(mode: str, each: int = 1) -> list[str]:
    """Return the variants that exist for a mode with `each` ranks per host, Horovod's first."""
    possible = {name: v for name, v in VARIANTS.items() if each > 1 or not v.shares_hosts}
    family = mode.partition("(")[0]
    return [name for name, variant in possible.items() if variant.modes is None or family in variant.modes]


def measure(
    mbytes: float,
    mbit: float,
    part: float,
    mode: str,
    chosen: Sequence[str],
    args: argparse.Namespace,
    report: Callable[[str], None],
) -> list[Cell]:
    """Measure all variants of one cell.

    Args:
        mbytes: Size of the network.
        mbit: Rate of the links.
        part: Device time over the least time of a reduction.
        mode: Mode of star_hvd.
        chosen: The variants; if empty, all of interest.
        args: The command line.
        report: Called with a line of text when a variant is done.

    Raises:
        JobFailed: A job died, hung or took too long.
        NetworkError: Rate-limited links are unavailable here.
    """
    hosts = args.ranks // args.each
    comm_s = link_s(mbytes, mbit, hosts)
    job = Job(mbytes=mbytes, compute_s=part * comm_s, layers=args.layers, mode=mode, steps=args.steps, warm=args.warm)
    if mode.startswith(("ps", "local")):
        job = dataclasses.replace(job, steps=2 * args.steps)  # `local(8)`: three averagings.
    found: list[Cell] = []
    with Network(hosts, 1e6 * mbit) as network:
        for variant in _wanted(mode, part, chosen, args):
            began_s = time.monotonic()
            result = _run(network, variant, job, args)
            steps_s = result["step_s"]
            found.append(
                {
                    "mbytes": mbytes, "mbit": mbit, "mode": mode, "part": part, "variant": variant,
                    "ranks": args.ranks, "link_s": comm_s, "push_s": push_s(mbytes, mbit, hosts),
                    "compute_s": job.compute_s,
                    "step_s": steps_s, "exposed_comm_s": max(0.0, steps_s - job.compute_s), **result["more"],
                }
            )  # fmt: skip
            place = f"{mbytes:g} MB, {mbit:g} Mbit/s, {mode}, compute {part:g} of the link's time"
            report(f"{place}: {variant} {1e3 * steps_s:.1f} ms a step ({time.monotonic() - began_s:.0f} s)")
    plain = next((cell["step_s"] for cell in found if cell["variant"] == PLAIN), None)
    least_s = bound_s(comm_s, job.compute_s, job.layers)
    for cell in found:
        cell["ratio"] = cell["step_s"] / plain if plain else None
        cell["bound"] = least_s / plain if plain and mode == "sync" else None
    return found


def _wanted(mode: str, part: float, chosen: Sequence[str], args: argparse.Namespace) -> list[str]:
    """Return the variants of a cell to measure; `overlap="auto"` only where its outcome is not obvious."""
    chosen = args.variants.split(",") if args.variants else chosen
    possible = variants_of(mode, args.each)
    if chosen:
        return [variant for variant in possible if variant in chosen]
    return [variant for variant in possible if part >= 1.0 or variant != "overlap-auto"]


def _run(network: Network, variant: str, job: Job, args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="transmission-") as folder:
        run_dir = Path(folder)
        write_plan(run_dir / "hosts.json", network, args.each)
        out = run_dir / "result.json"
        command = netns_command(
            run_dir / "hosts.json", "benchmarks.workers.transmission", str(out), variant, json.dumps(job.to_dict())
        )
        steps = 2 * job.warm + max(VARIANTS[variant].least_warm, VARIANTS[variant].longest_warm) + job.steps
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
    """Return the figures of merit of these cells; those without a cell are left out.

    `sync_lossless`: the largest ratio of `sync` with overlap where communication is longer than compute.
    `sync_lossless_bound`: the bound of the same cell.
    `hierarchical`: the largest ratio of `sync` with hierarchical reductions (inside the hosts first).
    `sync_auto`: the largest ratio of `sync` with `Compression.auto` where device time is short, so that nearly all of a
    step is communication; without such cells, where communication is longer than compute.
    `sync_auto_fp16`: the largest of its step times over those of Horovod with fp16, in the same cells.
    `sync_auto_long`, `sync_auto_long_bound`: the largest ratio where device time is long although communication is
    longer, and in that cell the device time over the step time of plain Horovod, below which no compression gets.
    `compute_bound`: the largest step time with `overlap="auto"` or `Compression.auto`, once decided, over that of
    star_hvd without it, where compute is at least as long as communication.
    `ps_bound`: the largest step time with servers under the default settings, over the longest of compute, push, pull.
    `ps_background_bound`: the same with `Config(background=True)`, which `auto` uses where it pays.
    `ps_least_bound`: the minimum given the order of push and pull, in the cell of `ps_background_bound`.
    `ps_wire_bound`: the minimum given the links there, at any staleness.
    `ps_over_cycle`: the largest step time in the background over `ps_cycle_s`.
    `ps_auto`: the smallest step time with `Compression.auto` over that without.
    `local_exposed`: the largest share of the averagings' exposed time that remains in the background.
    """
    over_hosts = [c["ratio"] for c in cells if c["variant"] == "hierarchical" and c["ratio"] is not None]
    bound = [c for c in cells if c["part"] < 1.0 and c["ratio"] is not None]
    kept = [c for c in bound if c["mode"] == "sync" and c["variant"] == "overlap"]
    found: dict[str, Any] = {}
    if kept:
        worst = max(kept, key=lambda c: c["ratio"])
        found = {"sync_lossless": worst["ratio"], "sync_lossless_bound": worst["bound"]}
    found |= _auto_figures([c for c in bound if c["mode"] == "sync" and c["variant"] == AUTO], cells)
    tried = [c for c in cells if c["part"] >= 1.0 and c["variant"] in ("overlap-auto", AUTO)]
    idle = [c["step_s"] / _same_cell(c, cells, OURS) for c in tried]
    found |= {"hierarchical": max(over_hosts)} if over_hosts else {}
    found |= {"compute_bound": max(idle)} if idle else {}
    return found | _ps_figures(cells) | _local_figures(cells)


def _auto_figures(lossy: Sequence[Cell], cells: Sequence[Cell]) -> dict[str, Any]:
    short = [c for c in lossy if c["part"] <= _LITTLE_COMPUTE] or list(lossy)
    found: dict[str, Any] = {}
    if short:
        found["sync_auto"] = max(c["ratio"] for c in short)
        found["sync_auto_fp16"] = max(c["step_s"] / _same_cell(c, cells, FP16) for c in short)
    if long := [c for c in lossy if c not in short]:
        worst = max(long, key=lambda c: c["ratio"])
        found["sync_auto_long"] = worst["ratio"]
        found["sync_auto_long_bound"] = worst["compute_s"] / _same_cell(worst, cells, PLAIN)
    return found


def _ps_figures(cells: Sequence[Cell]) -> dict[str, Any]:
    served = [c for c in cells if c["mode"].startswith("ps(")]
    usual = [_over_longest(c) for c in served if c["variant"] == DEFAULT]
    found: dict[str, Any] = {"ps_bound": max(usual)} if usual else {}
    behind = [c for c in served if c["variant"] == BEHIND]
    if not behind:
        return found
    worst = max(behind, key=_over_longest)
    longest_s = max(worst["compute_s"], worst["push_s"])
    wire_s = ps_wire_s(worst["mode"], worst["ranks"], worst["compute_s"], worst["push_s"])
    found |= {
        "ps_background_bound": _over_longest(worst),
        "ps_least_bound": ps_cycle_s(worst["compute_s"], worst["push_s"]) / longest_s,
        "ps_wire_bound": wire_s / longest_s,
        "ps_over_cycle": max(c["step_s"] / ps_cycle_s(c["compute_s"], c["push_s"]) for c in behind),
    }
    small = [c for c in served if c["variant"] == BEHIND_LOSSY]
    pairs = [(c["step_s"], whole["step_s"]) for c in small for whole in behind if _is_same(c, whole)]
    return found | ({"ps_auto": min(ours / whole for ours, whole in pairs)} if pairs else {})


def _over_longest(cell: Cell) -> float:
    """Return the step time over the longest of compute, push and pull; push and pull are equal."""
    return float(cell["step_s"] / max(cell["compute_s"], cell["push_s"]))


def _local_figures(cells: Sequence[Cell]) -> dict[str, Any]:
    """Return `local_exposed`; exposed time is the mean step minus the median, as most steps of `local` do not wait."""
    found = []
    for cell in cells:
        before = [c for c in cells if c["variant"] == OURS and _is_same(c, cell)]
        if cell["mode"].startswith("local(") and cell["variant"] == BEHIND and before:
            idle_s = before[0]["median_step_s"]
            found.append(max(0.0, cell["step_s"] - idle_s) / max(1e-9, before[0]["step_s"] - idle_s))
    return {"local_exposed": max(found)} if found else {}


def _is_same(one: Cell, other: Cell) -> bool:
    return all(one[key] == other[key] for key in ("mbytes", "mbit", "mode", "part"))


def _same_cell(cell: Cell, cells: Sequence[Cell], variant: str) -> float:
    """Return the step time of another variant in the same cell, NaN if it was not measured."""
    same = [c for c in cells if c["variant"] == variant and _is_same(c, cell)]
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


def _cells(args: argparse.Namespace) -> list[tuple[float, float, float, str, tuple[str, ...]]]:
    """Return the cells to measure: all combinations of the given values, or `CELLS` if none are given."""
    if not (args.mbytes or args.mbit or args.parts or args.modes):
        return list(CELLS)
    given = (args.mbytes or "1,10", args.mbit or "50,200", args.parts or "0.8")
    sizes, rates, parts = ([float(text) for text in texts.split(",")] for texts in given)
    return list(itertools.product(sizes, rates, parts, (args.modes or "sync").split(";"), [()]))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; exit status 1 if a job failed, 77 if this machine cannot have slow links."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transmission", description=__doc__.splitlines()[0])
    parser.add_argument("--mbytes", help="sizes of the network, separated by commas; 1,10 where another is given")
    parser.add_argument("--mbit", help="rates of the links; 50,200")
    parser.add_argument("--parts", help="device time of a step over the least time of its reduction; 0.8")
    parser.add_argument("--modes", help="separated by semicolons; sync")
    parser.add_argument("--variants", default="", help=f"those to measure, of {', '.join(VARIANTS)}; all by default")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--each", type=int, default=1, help="ranks on each host; a divisor of --ranks, below it")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--steps", type=int, default=12, help="that count")
    parser.add_argument("--warm", type=int, default=8, help="before that")
    parser.add_argument("--json", type=json_file, help="write all figures to this file")
    args = parser.parse_args(argv)
    if args.each < 1 or args.ranks % args.each or args.ranks == args.each:
        parser.error(f"--each is {args.each}; expected a divisor of --ranks, {args.ranks}, below it")
    if unknown := set(filter(None, args.variants.split(","))) - VARIANTS.keys():
        parser.error(f"--variants has {', '.join(sorted(unknown))}; expected some of {', '.join(VARIANTS)}")
    places = _cells(args)
    args.least_mbit = min(mbit for _, mbit, *_ in places)
    console, cells = Console(highlight=False, soft_wrap=True), list[Cell]()
    for place in places:
        try:
            cells += measure(*place, args, lambda text: console.print(text, markup=False))
        except (JobFailed, NetworkError) as error:
            skipped = isinstance(error, NetworkError)
            console.print(f"{'skipped' if skipped else 'error'}: {error}", markup=False)
            if args.json is not None:  # Some cells alone would pass for all figures.
                args.json.unlink(missing_ok=True)
            return _EXIT_SKIPPED if skipped else _EXIT_FAILED
        if args.json is not None:
            ranks = {"ranks": args.ranks, "each": args.each}
            write_json(args.json, {"schema": 1, **ranks, "cells": cells, **figures(cells)})
    console.print(_table(cells))
    for name, value in figures(cells).items():
        console.print(f"{name}: {value:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
