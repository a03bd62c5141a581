"""Errors of the cost model, for the 90 % interval of explanations and the run log.

The model's own quantiles contain only the scatter of the times and the price of staleness, not changes of conditions or
effects it does not model: they cover 46 % of the labels in `datasets/moments.csv.gz`. Reports use wider intervals; the
policy and the features use the model's own.

The constants are 5 % and 95 % quantiles of log(label) - log(prediction), per mode, by quantile regression (the
upper one linear in the predicted gain) on half of the networks of that table's first version (`dataset.folds(table, 2)
== 0`), rows up to e times slower than `sync` (slower ones are never chosen). Of the tables of today they cover 90 % of
the labels in `moments.csv.gz`, 91 % in `moments-2.csv.gz` and 36 of 42 in `real.csv.gz`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["widened"]


@dataclass(frozen=True, slots=True)
class _Spread:
    """Errors of a mode, in logarithms of the relative time.

    Attributes:
        down: Error towards shorter times.
        up: Error towards longer times.
        lost: Share of the predicted gain that may also be lost, because the slow ranks may recover.
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
    """The 5 % and 95 % quantiles of a relative time, with the measured errors of the cost model.

    Args:
        mode: The plan's mode; nothing is added for `sync`, the reference.
        relative: The prediction, above 0, without the cost of a missed target.
        low: The cost model's own 5 % quantile.
        high: Its own 95 % quantile.
    """
    spread = _SPREADS.get(mode)
    if spread is None:
        return low, high
    gain = max(0.0, -math.log(relative))
    up = spread.up + spread.lost * gain
    return min(low, relative * math.exp(-spread.down)), max(high, relative * math.exp(up))
