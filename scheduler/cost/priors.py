"""Assumptions on a network before its job has measured anything: learning rate, price of staleness, tolerable drift.

Two sizes are known; between them values are interpolated by the logarithm of the gradient bytes:

* Up to 10 kB. Measured by this project with a perceptron of 10 kB on the digits: ASGD of four ranks needs 0.95 to 1.27
  times the samples of a synchronous run, at a quarter to a half of the learning rate that is fastest for the latter; at
  that fastest rate itself it does not converge. With a perceptron of 107 kB on Fashion-MNIST (momentum 0.9, 102 runs,
  steps to 73 to 82 %), 4 ranks, relative to a synchronous run: `ps(3)` 1.38 to 1.45, `asgd` 4.9 to 5.9, `ps(backup=1)`
  1.02 to 1.09, `partial(3)` 1.06 to 1.19, two slow ranks late 1.27 to 1.36: a price and a rate ratio of 0.5 fit these
  to about a tenth.
* Convolutional networks from 4 MB on. ASGD of 8 ranks, a drift of 0.875, is where runs begin to miss the target
  (Sync-Switch, Li et al. 2021: one of four runs reaches 0.90 of a ResNet on CIFAR-10, none 0.915), and delayed gradient
  descent needs a price of at least the learning-rate ratio.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["LARGE", "Prior", "prior_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """Assumptions on one network.

    Attributes:
        price: Median of the price of staleness c (`scheduler.cost.progress`), which is log-normal.
        spread: Standard deviation of its logarithm.
        lr_ratio: rho, the learning rate relative to the best one.
        drift_limit: Drift at which half of the runs miss their target.
        drift_softness: Scale of the logistic, in units of drift: at `drift_limit` + softness 73 of 100 runs miss it.
    """

    price: float
    spread: float
    lr_ratio: float
    drift_limit: float
    drift_softness: float


LARGE = Prior(price=0.9, spread=0.6, lr_ratio=0.5, drift_limit=0.9, drift_softness=0.12)
"""Users choose learning rates about a factor of two below divergence; momentum and curvature may double the price."""

_SMALL = Prior(price=0.35, spread=0.6, lr_ratio=0.35, drift_limit=1.6, drift_softness=0.3)
_SMALL_BYTES, _LARGE_BYTES = 1e4, 4e6


def prior_of(gradient_bytes: float) -> Prior:
    """Assumptions by gradient bytes; 0 (unknown) gives those of a large network."""
    if not gradient_bytes > 0.0:
        return LARGE
    part = math.log(gradient_bytes / _SMALL_BYTES) / math.log(_LARGE_BYTES / _SMALL_BYTES)
    part = min(1.0, max(0.0, part))

    def between(small: float, large: float) -> float:
        return math.exp((1.0 - part) * math.log(small) + part * math.log(large))

    return Prior(
        price=between(_SMALL.price, LARGE.price),
        spread=between(_SMALL.spread, LARGE.spread),
        lr_ratio=between(_SMALL.lr_ratio, LARGE.lr_ratio),
        drift_limit=between(_SMALL.drift_limit, LARGE.drift_limit),
        drift_softness=between(_SMALL.drift_softness, LARGE.drift_softness),
    )
