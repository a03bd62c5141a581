"""How far off the cost model is, for the 90 % interval of explanations and the run log.

Its own quantiles hold the scatter of the times and the price of staleness alone. Whether the next steps are like the
last ones is not in them, nor what the model leaves out: of the labels in `datasets/moments.csv.gz` they cover 44 %.
What is reported is wider; the policy and the features go by the narrow ones, which say how sure the arithmetic is.

The constants are 5 % and 95 % quantiles of log(label) - log(prediction), per mode, by quantile regression (the upper
one linear in the predicted gain) on half of the networks of that table (`dataset.folds(table, 2) == 0`), rows up to e
times slower than `sync`: those beyond are never chosen. They cover 90 % of the other half's labels, 90 % of
`moments-2.csv.gz` and 56 of 60 in `real.csv.gz`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["widened"]


@dataclass(frozen=True, slots=True)
class _Spread:
    """Of a mode, in logarithms of the relative time.

    Attributes:
        down: How much shorter the time may be.
        up: How much longer.
        lost: Part of the predicted gain that may not come besides: who is slow now may not be so for long.
    """

    down: float
    up: float
    lost: float


_SPREADS = {
    "partial": _Spread(0.49, 0.01, 0.77),
    "subgroup": _Spread(0.20, 0.06, 0.89),
    "ps": _Spread(0.52, 0.39, 0.66),
    "grouped": _Spread(0.26, 0.63, 0.80),
    "local": _Spread(0.59, 0.82, 0.57),
}


def widened(mode: str, relative: float, low: float, high: float) -> tuple[float, float]:
    """The 5 % and 95 % quantiles of a relative time, with the errors that the cost model does not know of.

    Args:
        mode: The plan's mode; nothing is added for `sync`, which is what the others are relative to.
        relative: The prediction, above 0, without what a target that may be missed counts.
        low: The cost model's own 5 % quantile.
        high: Its own 95 % quantile.
    """
    spread = _SPREADS.get(mode)
    if spread is None:
        return low, high
    gain = max(0.0, -math.log(relative))
    up = spread.up + spread.lost * gain
    return min(low, relative * math.exp(-spread.down)), max(high, relative * math.exp(up))
