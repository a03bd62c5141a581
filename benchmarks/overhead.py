"""What star_hvd costs without stragglers: step time against plain Horovod, in alternating blocks."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.lab.command import measured, out_of_range, say_error
from benchmarks.lab.json_option import json_file
from benchmarks.lab.launch import horovodrun_command, run_job
from benchmarks.lab.networks import NETWORKS
from benchmarks.lab.options import add_device_options, check_mode, device_times_ms
from benchmarks.lab.report import progress_view
from benchmarks.lab.tasks import DATASETS
from benchmarks.machine.accelerator import DEVICES, check_device
from benchmarks.tta import versions
from benchmarks.workers.overhead import BATCH_SAMPLES, FEEDS

__all__ = ["main", "summarize_blocks"]

ALLOWANCE_S = 180.0
LOADER_LIMITS = (("input_ms_per_sample", 0), ("workers", 0))
FIGURES = (
    "blocks", "steps", "device-ms", "device-fixed-ms", "work-after-backward-ms", "dataset", "mode", "device",
    "feed", "input-ms-per-sample", "workers",
)  # fmt: skip
SLOWEST_STEP_S = 0.3  # On a loaded machine; used only for the deadline.


def summarize_blocks(blocks_s: dict[str, list[list[float]]], stats: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return medians, their ratio and its spread over the pairs of blocks.

    Args:
        blocks_s: Step times in seconds per side (`plain`, `star`), one list per block.
        stats: Counters of every rank.
    """
    medians = {name: statistics.median(t for block in blocks for t in block) for name, blocks in blocks_s.items()}
    pairs = [
        statistics.median(star) / statistics.median(plain)
        for plain, star in zip(blocks_s["plain"], blocks_s["star"], strict=True)
    ]
    quartiles = statistics.quantiles(pairs, n=4) if len(pairs) > 1 else [pairs[0]] * 3
    return {
        "plain_step_s": medians["plain"],
        "star_step_s": medians["star"],
        "ratio": medians["star"] / medians["plain"],
        "block_ratio_median": statistics.median(pairs),
        "block_ratio_quartiles": [quartiles[0], quartiles[2]],
        "block_ratios": pairs,
        "folds": sum(int(each["folds"]) for each in stats),
        "drops": sum(int(each["drops"]) for each in stats),
        "late": sum(int(each.get("late", 0)) for each in stats),
        "blocks_s": blocks_s,
    }


def measure(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Run the job and compute its figures."""
    run_dir = Path(tempfile.mkdtemp(prefix="straggler-lab-"))
    options = [f"--{name}={getattr(args, name.replace('-', '_'))}" for name in FIGURES]
    options.append(f"--trained-network={args.network}")  # horovodrun would take --network as an abbreviation.
    command = horovodrun_command(args.ranks, "benchmarks.workers.overhead", str(run_dir), *options)
    deadline_s = ALLOWANCE_S + 2 * args.blocks * args.steps * (
        SLOWEST_STEP_S + (args.device_ms + args.work_after_backward_ms + BATCH_SAMPLES * args.input_ms_per_sample) / 1e3
    )
    with progress_view(console, args.blocks) as view:
        run_job(command, run_dir, deadline_s=deadline_s, stall_s=ALLOWANCE_S, on_progress=view.update)
    raw = json.loads((run_dir / "overhead.json").read_text(encoding="utf-8"))
    shutil.rmtree(run_dir)
    summary = summarize_blocks(raw["blocks_s"], raw["stats"])
    return {
        "ranks": args.ranks,
        "cores": len(os.sched_getaffinity(0)),
        **{name.replace("-", "_"): getattr(args, name.replace("-", "_")) for name in FIGURES[2:]},
        "network": args.network,
        **summary,
        "versions": versions(),
    }


def _table(summary: dict[str, Any]) -> Table:
    low, high = summary["block_ratio_quartiles"]
    title = f"nobody slow, {summary['ranks']} ranks, mode {summary['mode']}, {summary['cores']} cores"
    result = Table(title=title, title_justify="left")
    for name in ("plain Horovod", "star_hvd", "ratio", "quartiles over blocks", "folds"):
        result.add_column(name, justify="right", no_wrap=True)
    result.add_row(
        f"{1000.0 * summary['plain_step_s']:.1f} ms/step",
        f"{1000.0 * summary['star_step_s']:.1f} ms/step",
        f"{summary['ratio']:.3f}",
        f"{low:.3f} - {high:.3f}",
        str(summary["folds"]),
    )
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the overhead."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--json", type=json_file, help="write all figures to this file")
    parser.add_argument("--dataset", choices=sorted(DATASETS), default="digits")
    parser.add_argument("--network", choices=NETWORKS, default="usual", help="conv: 1 MB of gradients; transformer: 10")
    add_device_options(parser)
    parser.add_argument("--feed", choices=FEEDS, default="fixed", help="one batch kept, or a loader per side, epochs")
    parser.add_argument("--input-ms-per-sample", type=float, default=0.0, help="cost of a sample; with --feed loader")
    parser.add_argument("--workers", type=int, default=0, help="loading processes of each side and rank; likewise")
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="cpu emulates device time, cuda spends it")
    parser.add_argument(
        "--work-after-backward-ms", type=float, default=0.0, help="the program's own work between backward and step"
    )
    parser.add_argument("--blocks", type=int, default=16, help="pairs of blocks")
    parser.add_argument("--steps", type=int, default=30, help="timed steps per block")
    parser.add_argument("--mode", default="auto", help="mode of star_hvd")
    args = parser.parse_args(argv)
    console = Console()
    problem = _problem(args)
    if problem is None:
        args.device_ms, args.device_fixed_ms = device_times_ms(args, BATCH_SAMPLES)
    if problem:
        say_error(problem)
        return 2
    summary = measured(measure, args, console)
    if summary is None:
        return 1
    console.print(_table(summary))
    return 0


def _problem(args: argparse.Namespace) -> str | None:
    least = (("ranks", 2), ("blocks", 1), ("steps", 1), ("work_after_backward_ms", 0), *LOADER_LIMITS)
    if (problem := out_of_range(args, least)) is not None:
        return problem
    if args.feed == "fixed" and (args.input_ms_per_sample or args.workers):
        return "--input-ms-per-sample and --workers belong to --feed loader"
    if args.feed == "loader" and args.device != "cpu":
        return f"--feed loader is timed on the processor; --device is {args.device}"
    try:
        check_device(args.device)
        check_mode(args.mode, args.ranks)
        device_times_ms(args, BATCH_SAMPLES)
    except ValueError as error:
        return str(error)
    if importlib.util.find_spec("star_hvd.optimizer") is None:
        return "star_hvd cannot be imported; install it first"
    return None


if __name__ == "__main__":
    sys.exit(main())
