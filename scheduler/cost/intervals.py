"""Errors of the cost model, for the 90 % interval of explanations and the run log.

The model's own quantiles contain only the scatter of the times and the price of staleness, not changes of conditions or
effects it does not model: they cover 50 % of the labels in `datasets/moments.csv.gz`. Reports use wider intervals; the
policy and the features use the model's own.

The constants are 5 % and 95 % quantiles of log(label) - log(prediction), per mode, by quantile regression (the
upper one linear in the predicted gain) on half of the networks of that table (`dataset.folds(table, 2) == 0`; for all
but the forms of `sync` its first version), rows up to e times slower than `sync` (slower ones are never chosen). Those
of `sync(steal)` are a little wider than the quantiles of its 154 rows, which cover too few of `moments-2.csv.gz`. Of
the tables of today they cover 90 % of the labels in `moments.csv.gz` and in `moments-2.csv.gz`, and all 48 in
`real.csv.gz`, which are too few to say that there they are too wide.
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
    "sync(balanced)": _Spread(0.44, 0.03, 0.98),
    "sync(steal)": _Spread(0.22, 0.03, 0.95),
    "partial": _Spread(0.49, 0.01, 0.77),
    "subgroup": _Spread(0.20, 0.06, 0.89),
    "ps": _Spread(0.52, 0.39, 0.66),
    "grouped": _Spread(0.26, 0.63, 0.80),
    "local": _Spread(0.59, 0.82, 0.57),
}


def widened(form: str, relative: float, low: float, high: float) -> tuple[float, float]:
    """The 5 % and 95 % quantiles of a relative time, with the measured errors of the cost model.

    Args:
        form: The plan's mode, or the label of a form of `sync`. Nothing is added for `sync` itself, the reference.
        relative: The prediction, above 0, without the cost of a missed target.
        low: The cost model's own 5 % quantile.
        high: Its own 95 % quantile.
    """
    spread = _SPREADS.get(form)
    if spread is None:
        return low, high
    gain = max(0.0, -math.log(relative))
    up = spread.up + spread.lost * gain
    return min(low, relative * math.exp(-spread.down)), max(high, relative * math.exp(up))
