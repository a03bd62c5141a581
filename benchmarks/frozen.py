"""Time to accuracy with one rank stopped (SIGSTOP) 2 s in every 6 s: Horovod, `auto` and fixed modes in one job."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.launch import JobFailed, horovodrun_command, run_job
from benchmarks.measures import time_to_accuracy_s
from benchmarks.spec import write_json
from benchmarks.tasks import defaults_for

__all__ = ["Freezer", "main"]

STOPPED_S, EVERY_S = 2.0, 6.0


class Freezer:
    """Stops and continues one rank in turn while a variant with a straggler runs.

    Args:
        run_dir: Folder in which the ranks leave their questions and the slow one its process id.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._stop = threading.Event()
        self._freezing = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Freezer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10.0)
        self._signal(signal.SIGCONT)

    def _run(self) -> None:
        next_s = time.monotonic() + EVERY_S - STOPPED_S
        while not self._stop.wait(0.05):
            self._answer()
            if not self._freezing:
                next_s = time.monotonic() + 0.5 * (EVERY_S - STOPPED_S)
            elif time.monotonic() >= next_s:
                self._signal(signal.SIGSTOP)
                self._stop.wait(STOPPED_S)
                self._signal(signal.SIGCONT)
                next_s += EVERY_S

    def _answer(self) -> None:
        for question in self._run_dir.glob("ask-*"):
            variant = question.name.removeprefix("ask-")
            self._freezing = variant != "straggler_free"
            question.rename(self._run_dir / f"go-{variant}")

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.kill(int((self._run_dir / "frozen").read_text(encoding="utf-8")), number)
        except (OSError, ValueError):
            pass  # The job has ended, or has not begun.


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run the job and work out its figures.

    Raises:
        JobFailed: The job died, hung or took too long.
    """
    modes = [mode for mode in args.modes.split(";") if mode]
    variants = ["straggler_free", "plain", "auto", *modes]
    run_dir = Path(tempfile.mkdtemp(prefix="straggler-lab-"))
    spec = {"variants": variants, "samples": 1280, "epochs": args.epochs, "device_s": args.device_ms / 1e3}
    write_json(run_dir / "spec.json", spec)
    command = horovodrun_command(args.ranks, "benchmarks.frozen_worker", str(run_dir))
    with Freezer(run_dir):
        run_job(command, run_dir, deadline_s=args.deadline_s, stall_s=args.deadline_s, on_progress=lambda fields: None)
    target = defaults_for("digits").target_accuracy
    seconds: dict[str, float | None] = {}
    final: dict[str, float] = {}
    for variant in variants:
        done = json.loads((run_dir / f"done-{variant}.json").read_text(encoding="utf-8"))
        seconds[variant] = time_to_accuracy_s(done["times_s"], done["accuracies"], target)
        final[variant] = done["accuracies"][-1]
    shutil.rmtree(run_dir)
    plain_s = seconds["plain"]

    def ratio(variant: str) -> float | None:
        own_s = seconds[variant]
        return own_s / plain_s if own_s is not None and plain_s else None

    return {
        "scenario": "frozen",
        "ranks": args.ranks,
        "target_accuracy": target,
        "straggler_free_s": seconds["straggler_free"],
        "plain_s": plain_s,
        "star_s": seconds["auto"],
        "ratio": ratio("auto"),
        "final_accuracy": final,
        "modes": {
            mode: {"seconds": seconds[mode], "ratio": ratio(mode), "final_accuracy": final[mode]} for mode in modes
        },
    }


def table(summary: dict[str, Any]) -> Table:
    """The figures for people."""
    made = Table(title=f"one of {summary['ranks']} ranks stopped {STOPPED_S:g} s in every {EVERY_S:g} s")
    for name in ("variant", "s to target", "of plain Horovod", "final accuracy"):
        made.add_column(name, justify="left" if name == "variant" else "right")
    times = {"straggler_free": summary["straggler_free_s"], "plain": summary["plain_s"], "auto": summary["star_s"]}
    times |= {mode: values["seconds"] for mode, values in summary["modes"].items()}
    for variant, own_s in times.items():
        share = own_s / summary["plain_s"] if own_s and summary["plain_s"] else None
        made.add_row(
            variant,
            "never" if own_s is None else f"{own_s:.1f}",
            "" if share is None else f"{share:.2f}",
            f"{summary['final_accuracy'][variant]:.1%}",
        )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Measure once and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.frozen", description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--modes", default="ps(3);asgd;partial(3)", help="fixed modes, separated by semicolons")
    parser.add_argument("--epochs", type=int, default=24)
    parser.add_argument("--device-ms", type=float, default=30.0)
    parser.add_argument("--deadline-s", type=float, default=600.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    console = Console()
    try:
        with console.status("training every variant, one rank frozen again and again"):
            summary = measure(args)
    except JobFailed as error:
        Console(stderr=True, soft_wrap=True).print(f"error: {error}", markup=False)
        return 1
    if args.json is not None:
        write_json(args.json, summary)
    console.print(table(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
