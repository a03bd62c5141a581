"""Step reports of a logged run, as rows for a replay.

Input: files with one JSON object per line, with `rank`, `step`, `compute_s` and optionally `wait_s`, `late`, `samples`
and `time_s`. Lines whose `kind` is not `step` are skipped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scheduler.balance.usual_batches import UsualBatches
from scheduler.run_events import MAX_RANKS, read_run_file

__all__ = ["Reports", "read_reports"]

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reports:
    """Reports of a run, one row per global step that some rank reported.

    Attributes:
        steps: Global step of every row, ascending; with gaps, as servers make updates that no rank reports.
        own_steps: Mean reports of a rank for the row's step, 0 of one that made none; above 1 between two averagings of
            `local`.
        compute_s: Shape (n_rows, n_ranks): mean of a rank's reports, or its previous value if it made none (late);
            under batch shares of a batch of the usual size.
        wait_s: Same shape; NaN if unknown, and for late gradients, which do not wait.
        seconds: From the start of the first step to the end of the last one; NaN if unknown.
    """

    steps: npt.NDArray[np.int64]
    own_steps: Array
    compute_s: Array
    wait_s: Array
    seconds: float = math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class _Report:
    rank: int
    step: int
    compute_s: float
    wait_s: float
    late: bool
    time_s: float
    samples: Any


def read_reports(
    paths: Iterable[Path], usual: UsualBatches | None = None, *, world_size: object = None
) -> Reports:
    """Read JSONL files, one or all ranks per file; steps before every rank has reported once are skipped.

    Args:
        paths: The files.
        usual: Converts compute times to those of usual batches; None to leave them as they are.
        world_size: Ranks of the job; by default as many as the reports are of. Without it, a job whose last ranks have
            no files, being on another host for example, would pass for a smaller one.

    Raises:
        ValueError: No reports, a malformed one, or a rank without reports.
    """
    by_step: dict[int, dict[int, list[_Report]]] = {}
    by_rank: dict[int, list[_Report]] = {}
    begin_s, end_s = math.inf, -math.inf
    for report in _reports(paths):
        by_rank.setdefault(report.rank, []).append(report)
        if math.isfinite(report.time_s):
            spent_s = report.compute_s + (report.wait_s if math.isfinite(report.wait_s) else 0.0)
            begin_s, end_s = min(begin_s, report.time_s - spent_s), max(end_s, report.time_s)
    if not by_rank:
        raise ValueError("no step reports found; expected lines with rank, step and compute_s")
    for rank, own in by_rank.items():
        for report in own if usual is None else _usual(own, usual):
            by_step.setdefault(report.step, {}).setdefault(rank, []).append(report)
    n = max(by_rank) + 1
    if isinstance(world_size, int) and n < world_size <= MAX_RANKS:
        n = world_size
    return _rows(by_step, set(by_rank), n, end_s - begin_s if end_s > begin_s else math.nan)


def _usual(own: list[_Report], usual: UsualBatches) -> list[_Report]:
    """One rank's reports with the times of usual batches."""
    times_s = usual.usual_s([r.step for r in own], [r.compute_s for r in own], [r.samples for r in own])
    return [replace(report, compute_s=time_s) for report, time_s in zip(own, times_s, strict=True)]


def _rows(by_step: dict[int, dict[int, list[_Report]]], ranks: set[int], n: int, seconds: float) -> Reports:
    last, steps, own_steps, compute, wait = [math.nan] * n, [], [], [], []
    for step in sorted(by_step):
        row = by_step[step]
        last = [_mean([one.compute_s for one in row[r]]) if r in row else last[r] for r in range(n)]
        if not any(math.isnan(value) for value in last):
            steps.append(step)
            own_steps.append(sum(map(len, row.values())) / n)
            compute.append(last)
            wait.append([_wait_s(row.get(r, [])) for r in range(n)])
    if not compute:
        missing = sorted(set(range(n)) - ranks) or [r for r in range(n) if math.isnan(last[r])]
        named = f"{missing[:16]}{' and more' if len(missing) > 16 else ''}"
        raise ValueError(
            f"ranks {named} reported no step; expected reports of all ranks 0..{n - 1} (those of other hosts come to "
            "MLflow with `star-hvd sync-logs` there; then give the id of the run in MLflow)"
        )
    return Reports(
        steps=np.array(steps), own_steps=np.array(own_steps), compute_s=np.array(compute), wait_s=np.array(wait),
        seconds=seconds,
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _wait_s(found: list[_Report]) -> float:
    return math.nan if not found or found[-1].late else found[-1].wait_s


def _reports(paths: Iterable[Path]) -> Iterator[_Report]:
    for path in paths:
        for item in read_run_file(path):
            found = _report(path, item)
            if found is not None:
                yield found


def _report(path: Path, item: dict[str, Any]) -> _Report | None:
    if item.get("kind", "step") != "step" or "compute_s" not in item:
        return None
    compute_s, rank, step = item["compute_s"], item.get("rank"), item.get("step")
    if type(rank) is not int or type(step) is not int:
        raise ValueError(f"{path}: a report has rank {rank!r} and step {step!r}; expected rank, step and compute_s")
    if type(compute_s) not in (int, float) or not 0.0 < compute_s < math.inf or not 0 <= rank < MAX_RANKS:
        return None
    return _Report(
        rank=rank, step=step, compute_s=float(compute_s), wait_s=_number(item.get("wait_s")),
        late=item.get("late") is True, time_s=_number(item.get("time_s")), samples=item.get("samples"),
    )


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan
