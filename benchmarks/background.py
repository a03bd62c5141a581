"""Compare transfers behind compute (`Config.background`) with the same mode without them, over rate-limited links.

`python -m benchmarks.background --json FILE` makes one host per rank (network namespaces, needs root) and trains with
layer-wise device time. Each cell alternates between both settings in one run and reports the step time of each and its
exposed communication: the step time minus that of a step that waits for nothing (device and processor time only).

`--modes auto` leaves the choice to the scheduler: `Config(background=None)` against `Config(background=False)`.
`--slow-link` divides the rate of the last host's link. `--no-sets` disables process sets, as in an elastic job on an
unpatched Horovod: `auto` then has to use servers instead of a subgroup.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.lab.command import out_of_range, say_error
from benchmarks.lab.json_option import json_file
from benchmarks.lab.launch import JobFailed, run_job
from benchmarks.lab.options import check_mode
from benchmarks.lab.spec import write_json
from benchmarks.machine.netns import Network, NetworkError
from benchmarks.machine.netns_launch import netns_command, write_plan

__all__ = ["main", "measure", "train"]

DEADLINE_S = 240.0


def train(spec: dict[str, Any], network: Network) -> dict[str, Any]:
    """Run one training of one cell and return what its first rank measured."""
    with tempfile.TemporaryDirectory(prefix="star-background-") as name:
        folder = Path(name)
        write_plan(folder / "hosts.json", network)
        (folder / "spec.json").write_text(json.dumps(spec), encoding="utf-8")
        command = netns_command(folder / "hosts.json", "benchmarks.workers.background", name)
        run_job(command, folder, deadline_s=DEADLINE_S, stall_s=DEADLINE_S, on_progress=lambda fields: None)
        found: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return found


def measure(spec: dict[str, Any], network: Network, repeats: int) -> dict[str, Any]:
    """Alternate between without and with, and which one is first; return medians over the repeats."""
    runs: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for turn in range(repeats):
        for background in runs if turn % 2 == 0 else reversed(runs):
            runs[background].append(train({**spec, "background": background}, network))
    step_s = {each: statistics.median(run["step_s"] for run in found) for each, found in runs.items()}
    # In `local` most steps wait for nothing. With servers every step waits, so the baseline is the device time alone.
    idle_s = min(run["median_step_s"] for run in runs[False]) if "local" in spec["mode"] else spec["compute_s"]
    exposed_s = {each: max(0.0, step_s[each] - idle_s) for each in runs}
    return {
        **spec,
        "plans": {"before": runs[False][-1]["plans"], "after": runs[True][-1]["plans"]},
        "step_before_s": step_s[False],
        "step_after_s": step_s[True],
        "exposed_before_s": exposed_s[False],
        "exposed_after_s": exposed_s[True],
        "exposed_ratio": exposed_s[True] / max(exposed_s[False], 1e-9),
        "step_ratio": step_s[True] / step_s[False],
    }


def _row(cell: dict[str, Any]) -> str:
    times = ("compute_s", "step_before_s", "step_after_s", "exposed_before_s", "exposed_after_s")
    in_ms = " ".join(f"{1e3 * cell[name]:10.1f}" for name in times)
    ratios = f"{cell['exposed_ratio']:7.2f} {cell['step_ratio']:7.2f}"
    after = cell["plans"]["after"][-1][0]
    taken = f" {after}" if after != cell["mode"] else ""
    return f"{cell['mode']:>9} {cell['mbytes']:6g} {cell['mbit']:6g} {in_ms} {ratios}{taken}"


def main(argv: list[str] | None = None) -> int:
    """Measure, print a table, write JSON; exit status 77 if rate-limited links are unavailable."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--modes", default="local(8);ps(3)", help="separated by semicolons")
    parser.add_argument("--mbytes", default="1,10", help="sizes of the gradient in 10^6 bytes")
    parser.add_argument("--mbit", default="200", help="rates of the links")
    parser.add_argument("--compute-ms", type=float, default=100.0, help="device time of a step")
    parser.add_argument("--steps", type=int, default=48, help="timed steps of a training")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--slow-link", type=float, default=1.0, help="the last link is so many times slower")
    parser.add_argument("--no-sets", action="store_true", help="Horovod has no process sets")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each setting; even: each is first in half")
    parser.add_argument("--json", type=json_file)
    options = parser.parse_args(argv)
    if (problem := _problem(options)) is not None:
        say_error(problem)
        return 2
    print("     mode     MB Mbit/s compute/ms  before/ms   after/ms  exposed/ms      after   ratio    step")
    cells: list[dict[str, Any]] = []
    try:
        for cell in _cells(options):
            cells.append(cell)
            print(_row(cell), flush=True)
            if options.json is not None:
                write_json(options.json, {"cells": cells})  # Now, since a later cell may fail.
    except NetworkError as error:
        print(f"skipped: {error}", file=sys.stderr)
        return 77
    except JobFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _cells(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure one cell after the other."""
    for mbit in _numbers(options.mbit):
        with Network(options.ranks, 1e6 * mbit) as network:
            network.set_rate(options.ranks - 1, 1e6 * mbit / options.slow_link)
            for mbytes, mode in itertools.product(_numbers(options.mbytes), options.modes.split(";")):
                spec = {"mode": mode, "mbytes": mbytes, "mbit": mbit, "steps": options.steps,
                        "compute_s": options.compute_ms / 1e3, "sets": not options.no_sets}  # fmt: skip
                yield measure(spec, network, options.repeats)


def _numbers(text: str) -> list[float]:
    return [float(each) for each in text.split(",")]


def _problem(options: argparse.Namespace) -> str | None:
    """Return why no cell can be measured with these options."""
    least = (("ranks", 2), ("steps", 1), ("compute_ms", 0), ("slow_link", 1), ("repeats", 1))
    if (problem := out_of_range(options, least)) is not None:
        return problem
    for name in ("mbytes", "mbit"):
        text = getattr(options, name)
        try:
            usable = all(0.0 < number < math.inf for number in _numbers(text))
        except ValueError:
            usable = False
        if not usable:
            return f"--{name} is {text!r}; expected numbers above 0, separated by commas"
    try:
        for mode in options.modes.split(";"):
            check_mode(mode, options.ranks)
    except ValueError as error:
        return f"--modes: {error}"
    return None


if __name__ == "__main__":
    sys.exit(main())
