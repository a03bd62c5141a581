"""The demonstration behind `make demo`: real training with one of four ranks four times slower."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.lab.launch import JobFailed
from benchmarks.lab.networks import NETWORKS
from benchmarks.lab.options import build_spec, make_parser, target_for
from benchmarks.lab.report import sentence, table
from benchmarks.lab.spec import write_json
from benchmarks.lab.tasks import TaskError
from benchmarks.plot import plot
from benchmarks.tta import measure

__all__ = ["main"]

OUT = Path(__file__).resolve().parent / "out"
VARIANTS = ("straggler_free", "plain", "star")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, plot."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo", description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--network", choices=NETWORKS, default="usual", help="conv: 1 MB of gradients; transformer: 10")
    parser.add_argument("--out", type=Path, default=OUT, help="folder for demo.png and demo.json")
    args = parser.parse_args(argv)
    console = Console(highlight=False)
    errors = Console(stderr=True, soft_wrap=True, highlight=False)
    options = ["--scenario=one-slow", f"--ranks={args.ranks}", f"--seeds={args.seeds}", f"--network={args.network}"]
    tta_args = make_parser().parse_args([*options, f"--variants={','.join(VARIANTS)}"])
    console.print(
        f"Training scikit-learn's digits with horovodrun -np {args.ranks}; rank {args.ranks - 1} needs four "
        "times as long for each batch. First without that, then with plain Horovod, then with star_hvd."
    )
    try:
        spec = build_spec(tta_args)
        summary = measure(spec, target_for(tta_args), console, tta_args)
    except (JobFailed, TaskError, ValueError) as error:
        errors.print(f"error: {error}", markup=False)
        return 1
    write_json(args.out / "demo.json", summary)
    plot(summary, args.out / "demo.png")
    console.print()
    console.print(table(summary))
    console.print(sentence(summary))
    console.print(f"Plot:    {_shown(args.out / 'demo.png')}", soft_wrap=True)
    console.print(f"Figures: {_shown(args.out / 'demo.json')}", soft_wrap=True)
    return 0


def _shown(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


if __name__ == "__main__":
    sys.exit(main())
