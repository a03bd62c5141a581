"""The record of a window in the run log: telemetry of all ranks as plain values."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from scheduler.diagnosis.stragglers import Straggler
from scheduler.records import Window

__all__ = ["window_values"]


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
        **{name: float(value) for name, value in numbers.items()},
        "ranks": per_rank,
        "stragglers": found,
    }
