"""Windows for tests of decisions, made from tables of times, shape (steps, ranks)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from scheduler.plan.plan import MODES
from scheduler.records import RankStats, Window

__all__ = ["steady", "window"]

Times = npt.NDArray[np.float64]


def steady(
    n: int, steps: int = 32, *, slow: dict[int, float] | None = None, jitter: float = 0.02, usual_s: float = 0.1
) -> Times:
    """Return times of equal ranks with jitter, except for the slow ones."""
    times = usual_s * np.exp(jitter * np.random.default_rng(n).standard_normal((steps, n)))
    for rank, factor in (slow or {}).items():
        times[:, rank] *= factor
    return times


def window(
    times: Times,
    *,
    end: int | None = None,
    rates: Sequence[float] | None = None,
    starved: dict[int, float] | None = None,
    silent_s: dict[int, float] | None = None,
    comm_bytes: int = 1_000_000,
    comm_s: Sequence[float] = (),
    allowed: Sequence[str] = MODES,
    each: Sequence[int] = (),
    **fields: Any,
) -> Window:
    """Return a window whose last step is `end`; with `each`, ranks have as many reports of a step, as in `local`."""
    steps, n = times.shape
    last = steps if end is None else end
    return Window(
        step=last,
        ranks=tuple(
            RankStats(
                rank=rank,
                compute_s=tuple(times[:, rank].tolist()),
                steps=tuple(last - 1 - back // (each[rank] if each else 1) for back in range(steps - 1, -1, -1)),
                link_bytes_per_s=1e9 if rates is None else rates[rank],
                starved_share=(starved or {}).get(rank, 0.0),
                silent_s=(silent_s or {}).get(rank, 0.0),
                comm_s=tuple(comm_s),
            )
            for rank in range(n)
        ),
        noise_scale=fields.pop("noise_scale", 4.0),
        comm_bytes=comm_bytes,
        allowed=frozenset(allowed),
        **fields,
    )
