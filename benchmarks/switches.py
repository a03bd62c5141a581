"""How long a switch of mode blocks the training thread, in steps, between any two modes that were used before."""

from __future__ import annotations

import argparse
import itertools
import json
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
from benchmarks.lab.launch import JobFailed, horovodrun_command, run_job
from benchmarks.lab.report import progress_view
from scheduler.plan.mode_names import parse_mode

__all__ = ["holdups", "main", "walk"]

MODES = "sync;partial(3);subgroup(0,1,2);grouped(2);ps(3);ps(1);local(4)"
SKIPPED_STEPS = 3  # After a switch, before a step counts as normal.
AROUND_STEPS = 4  # A hand-over affects steps before and after the one in which the mode's name changes.
ALLOWANCE_S = 240.0


def walk(modes: Sequence[str]) -> list[str]:
    """Return a closed walk over all modes with every ordered pair once, preceded by one visit of every mode.

    Raises:
        ValueError: Fewer than two modes, or a duplicate.
    """
    if len(modes) < 2 or len(set(modes)) != len(modes):
        raise ValueError(f"modes are {list(modes)}; expected at least two different ones")
    left = {mode: [other for other in modes if other != mode] for mode in modes}
    path, circuit = [modes[0]], []
    while path:  # Hierholzer's algorithm: the complete directed graph has an Euler circuit.
        if left[path[-1]]:
            path.append(left[path[-1]].pop())
        else:
            circuit.append(path.pop())
    return [*modes, *circuit[::-1]]


def holdups(steps: Sequence[tuple[str, float]], warm_after: int) -> dict[tuple[str, str], list[float]]:
    """Return the time of switches in excess of normal steps, in normal steps, per (from, to).

    Args:
        steps: (mode at the end of the step, seconds) of one rank.
        warm_after: Number of first switches not counted, since they prepare modes for the first time.
    """
    changes = [i for i in range(1, len(steps)) if steps[i][0] != steps[i - 1][0]]
    found: dict[tuple[str, str], list[float]] = {}
    bounds = [*changes, len(steps)]
    for number, at in enumerate(changes):
        if number < warm_after:
            continue
        before = [time_s for _, time_s in steps[max(at - 20, 0) : at - AROUND_STEPS]]
        after = [time_s for _, time_s in steps[at + SKIPPED_STEPS : bounds[number + 1] - AROUND_STEPS]]
        if len(before) < 5 or len(after) < 5:
            continue
        usual_s = {True: statistics.median(before), False: statistics.median(after)}
        around = range(at - AROUND_STEPS, at + SKIPPED_STEPS)
        extra_s = sum(max(0.0, steps[i][1] - usual_s[i < at]) for i in around)
        found.setdefault((steps[at - 1][0], steps[at][0]), []).append(extra_s / usual_s[False])
    return found


def measure(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Run the job and compute its figures.

    Raises:
        JobFailed: The job died, hung or took too long.
        ValueError: The modes do not form a walk; `main` has looked.
    """
    modes = args.modes.split(";")
    path = walk(modes)
    run_dir = Path(tempfile.mkdtemp(prefix="straggler-lab-"))
    options = [f"--modes={';'.join(path)}", f"--device-ms={args.device_ms}", f"--width={args.width}"]
    command = horovodrun_command(args.ranks, "benchmarks.workers.switches", str(run_dir), *options)
    with progress_view(console, len(path) + 1) as view:
        deadline_s = ALLOWANCE_S + len(path) * (5.0 + 0.1 * args.device_ms)
        run_job(command, run_dir, deadline_s=deadline_s, stall_s=ALLOWANCE_S, on_progress=view.update)
    pooled: dict[tuple[str, str], list[float]] = {}
    for rank in range(args.ranks):
        steps = json.loads((run_dir / f"switches-{rank}.json").read_text(encoding="utf-8"))["steps"]
        for pair, values in holdups(steps, len(modes)).items():
            pooled.setdefault(pair, []).extend(values)
    shutil.rmtree(run_dir)
    everything = list(itertools.chain.from_iterable(pooled.values()))
    if not everything:
        raise JobFailed("no switch was seen")
    quantiles = statistics.quantiles(everything, n=20)
    return {
        "ranks": args.ranks,
        "device_ms": args.device_ms,
        "switches": len(everything) // args.ranks,
        "median_steps": statistics.median(everything),
        "p90_steps": quantiles[17],
        "pairs": {f"{a} -> {b}": statistics.median(values) for (a, b), values in sorted(pooled.items())},
        "modes": modes,
    }


def table(summary: dict[str, Any]) -> Table:
    """Return a matrix: from the row's mode to the column's."""
    made = Table("from \\ to", *summary["modes"], title="Steps a switch holds training up (medians)")
    for one in summary["modes"]:
        cells = [summary["pairs"].get(f"{one} -> {other}") for other in summary["modes"]]
        made.add_row(one, *("" if cell is None else f"{cell:.2f}" for cell in cells))
    return made


def _problem(args: argparse.Namespace) -> str | None:
    """Return why no walk through the modes can be measured with these options."""
    if (problem := out_of_range(args, (("ranks", 2), ("device_ms", 0), ("width", 1)))) is not None:
        return problem
    try:
        walk(args.modes.split(";"))
        for mode in args.modes.split(";"):
            plan = parse_mode(mode, args.ranks)
            if plan is None or plan.label != mode:  # Its steps would not be found under this name.
                name = "a fixed mode" if plan is None else plan.label
                return f"--modes has {mode!r}; expected {name}"
    except ValueError as error:
        return f"--modes: {error}"
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Measure once and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.switches", description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--modes", default=MODES, help="separated by semicolons")
    parser.add_argument("--device-ms", type=float, default=30.0, help="emulated device time per step")
    parser.add_argument("--width", type=int, default=256, help="of the network's hidden layer")
    parser.add_argument("--json", type=json_file, help="write all figures to this file")
    args = parser.parse_args(argv)
    if (problem := _problem(args)) is not None:
        say_error(problem)
        return 2
    console = Console()
    summary = measured(measure, args, console)
    if summary is None:
        return 1
    console.print(table(summary))
    console.print(
        f"{summary['switches']} switches: median {summary['median_steps']:.2f} steps, 90 % below "
        f"{summary['p90_steps']:.2f}",
        highlight=False,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
