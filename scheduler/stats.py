"""Small statistics, and formatting for sentences."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["duration", "listing", "lower_median"]


def lower_median(values: Sequence[float] | npt.NDArray[np.float64]) -> float:
    """The ceil(k/2)-th smallest of k values, always one of them.

    Raises:
        ValueError: There are no values.
    """
    if not len(values):
        raise ValueError("lower_median got no values; expected at least one")
    ordered = np.sort(values) if isinstance(values, np.ndarray) else sorted(values)
    return float(ordered[(len(values) - 1) // 2])


def duration(time_s: float) -> str:
    """`45 ms`, `1.2 s`, for a sentence."""
    return f"{time_s * 1e3:.3g} ms" if time_s < 0.9995 else f"{time_s:.3g} s"


def listing(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 1 and 4`; at most four are listed."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 4:
        return f"ranks {', '.join(map(str, ranks[:4]))} and {len(ranks) - 4} more"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
