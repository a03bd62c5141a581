"""Slowdown traces: the file format, its reader, and a small synthetic generator.

A trace has one row per global step and one column per rank; a value is the factor by which that rank is
slower than normal in that step (1.0 is normal). After its last row it repeats. Two formats:

    CSV    first line `rank0,rank1,...`, then one line per step
    JSON   {"slowdown": [[1.0, 1.0, 4.0], [1.0, 2.5, 1.0], ...]}
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["TraceError", "main", "read_trace", "synthetic_trace", "write_trace"]

LARGEST_SLOWDOWN = 1000.0


class TraceError(ValueError):
    """A trace file is unusable; the message names the file, the line and what was expected."""


def read_trace(path: Path) -> list[list[float]]:
    """Read a trace file.

    Returns:
        Slowdown factors, shape (n_steps, n_ranks).

    Raises:
        TraceError: Missing, unreadable, ragged, empty, or with values that are not slowdown factors.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"cannot read the trace {path}: {error}; python -m benchmarks.traces writes one") from None
    if path.suffix.lower() == ".json":
        rows, first_line = _json_rows(path, text), 0
    else:
        rows, first_line = _csv_rows(path, text), 2  # Line 1 is the header.
    if not rows:
        raise TraceError(f"the trace {path} has no steps; expected one row per global step")
    return [_checked(path, first_line + index, row, len(rows[0])) for index, row in enumerate(rows)]


def _json_rows(path: Path, text: str) -> list[list[object]]:
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise TraceError(f"the trace {path} is not JSON: {error}") from None
    rows = document.get("slowdown") if isinstance(document, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, list) and row for row in rows):
        raise TraceError(f'the trace {path} lacks {{"slowdown": [[...], ...]}}: one list of factors per global step')
    return rows


def _csv_rows(path: Path, text: str) -> list[list[object]]:
    lines = [line for line in csv.reader(text.splitlines()) if line]
    header = [cell.strip() for cell in lines[0]] if lines else []
    expected = [f"rank{index}" for index in range(len(header))]
    if not header or header != expected:
        raise TraceError(f"the trace {path} starts with {header}; expected the header rank0,rank1,...")
    return [list(line) for line in lines[1:]]


def _checked(path: Path, line: int, row: Sequence[object], columns: int) -> list[float]:
    if len(row) != columns:
        raise TraceError(f"the trace {path}, row {line}: {len(row)} values; expected {columns}, one per rank")
    values = []
    for cell in row:
        try:
            value = math.nan if isinstance(cell, bool) else float(cell)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            value = math.nan
        if not 0.0 < value <= LARGEST_SLOWDOWN:
            raise TraceError(
                f"the trace {path}, row {line}: {cell!r} is no slowdown; "
                f"expected a number above 0 and up to {LARGEST_SLOWDOWN:g}, 1 for normal speed"
            )
        values.append(value)
    return values


def write_trace(path: Path, rows: Sequence[Sequence[float]]) -> None:
    """Write a trace as JSON or CSV, by the suffix of `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix.lower() == ".json":
        path.write_text(json.dumps({"slowdown": rows}) + "\n", encoding="utf-8")
        return
    lines = [",".join(f"rank{index}" for index in range(len(rows[0])))]
    lines += [",".join(f"{value:g}" for value in row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def synthetic_trace(
    ranks: int, steps: int, seed: int, share: float = 0.15, mean_run_steps: float = 3.4
) -> list[list[float]]:
    """Return a trace of contention episodes that last a few steps and move between ranks.

    Each rank alternates between normal and slow; slow runs have a geometric length and one factor between 1.5
    and 6 each, normal steps jitter by 2 %.

    Args:
        ranks: Number of columns.
        steps: Number of rows.
        seed: Random seed.
        share: Share of the steps in which a rank is slow.
        mean_run_steps: Mean length of a slow run.
    """
    if not (ranks >= 1 and steps >= 1 and 0.0 <= share < 1.0 and mean_run_steps >= 1.0):
        raise TraceError(
            f"ranks {ranks}, steps {steps}, share {share}, mean run {mean_run_steps}; "
            "expected at least 1, at least 1, 0 to 1, at least 1"
        )
    draw = random.Random(seed)
    leave = 1.0 / mean_run_steps
    enter = min(1.0, leave * share / (1.0 - share))
    factors = [0.0] * ranks  # 0.0: not in a slow run.
    rows = []
    for _ in range(steps):
        for rank in range(ranks):
            if factors[rank] and draw.random() < leave:
                factors[rank] = 0.0
            elif not factors[rank] and draw.random() < enter:
                factors[rank] = draw.uniform(1.5, 6.0)
        rows.append([round(factor or max(0.9, draw.gauss(1.0, 0.02)), 3) for factor in factors])
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Write a synthetic trace."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.traces", description="Write a synthetic trace.")
    parser.add_argument("out", type=Path, help="file to write, .csv or .json")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=float, default=0.15, help="part of the steps in which a rank is slow")
    parser.add_argument("--mean-run-steps", type=float, default=3.4, help="mean length of a slow run")
    args = parser.parse_args(argv)
    try:
        rows = synthetic_trace(args.ranks, args.steps, args.seed, args.share, args.mean_run_steps)
        write_trace(args.out, rows)
    except (TraceError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(f"wrote {args.out}: {args.ranks} ranks, {args.steps} steps\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
