"""The record of a window in the run log: telemetry of all ranks as plain values, and which windows have it per rank."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from scheduler.diagnosis.stragglers import Straggler
from scheduler.records import Window

__all__ = ["PerRankReadings", "window_values"]

_FEW_RANKS = 64  # Up to here every window has the readings of each rank.
_READINGS_PART = 0.25  # Of the file's limit, for windows with readings per rank.
_Event = Callable[[], dict[str, Any]]


class PerRankReadings:
    """Which windows have one number per rank and reading.

    With 512 ranks these numbers have 50 kB, the rest of a window less than 1 kB. Without a limit of their own they
    would fill the file within an hour, and later there would be a window, and a loss, every few hours only.

    Args:
        world_size: Number of ranks.
        max_bytes: Limit of the file.
    """

    def __init__(self, world_size: int, max_bytes: int) -> None:
        self._least = -(-world_size // _FEW_RANKS)
        self._room_bytes = _READINGS_PART * max_bytes
        self._spent_bytes, self._seen = 0, -1

    def line(self, event: _Event, line_of: Callable[[_Event], str]) -> str:
        """Return the line of the next window that is written, with or without readings per rank."""
        if not self._keeps():
            return line_of(lambda: {name: value for name, value in event().items() if name != "ranks"})
        line = line_of(event)
        self._spent_bytes += len(line)
        return line

    def _keeps(self) -> bool:
        if self._least <= 1:
            return True
        self._seen += 1
        left = 1.0 - self._spent_bytes / self._room_bytes
        # As for other entries (`spool`), ever more sparsely, so that there are some however long the job is.
        return left > 0.0 and self._seen % max(self._least, int(left**-2.0)) == 0


def window_values(
    window: Window,
    *,
    mode: str,
    stragglers: Sequence[Straggler] = (),
    ranks: Mapping[str, Sequence[float]] | None = None,
    **numbers: float,
) -> dict[str, Any]:
    """Return the argument of `RunLog.window`.

    Args:
        window: Recent reports of all ranks.
        mode: Label of the active plan.
        stragglers: The window's stragglers.
        ranks: Further readings, one number per rank each: `wait_s`, `offset_s`, `cpu_share`, ...
        **numbers: Numbers of the whole job: `loss`, `effective_batch` (samples behind an update), `steps_per_s`,
            `folds`, `closed_early` (counts since the start), `rank0_drops` (such a count, of rank 0 alone).

    Raises:
        ValueError: A reading does not have one number per rank.
    """
    size = window.world_size
    per_rank: dict[str, list[float]] = {
        "compute_s": [statistics.median(s.compute_s) if s.compute_s else math.nan for s in window.ranks],
        "input_share": [s.input_share for s in window.ranks],
        "starved_share": [s.starved_share for s in window.ranks],
        "late_share": [s.late_share for s in window.ranks],
    }
    for name, values in (ranks or {}).items():
        if len(values) != size:
            raise ValueError(f"window reading {name} has {len(values)} numbers; expected {size}, one per rank")
        per_rank[name] = [float(value) for value in values]
    found = [
        {"rank": s.rank, "slowdown": s.slowdown, "cause": s.cause, "since_step": s.since_step, "evidence": s.evidence}
        for s in stragglers
    ]
    return {
        "step": window.step,
        "mode": mode,
        "noise_scale": window.noise_scale,
        "edge_part": window.edge_part,
        "reduced_part": window.reduced_part,
        "pushed_part": window.pushed_part,
        "fixed_part": window.fixed_part,
        "batch": window.batch,
        "microbatches": window.microbatches,
        **{name: float(value) for name, value in numbers.items()},
        "ranks": per_rank,
        "stragglers": found,
    }
