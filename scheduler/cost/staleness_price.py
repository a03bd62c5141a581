"""The price of staleness, learned during a job from the loss decrease under different drifts.

Every stretch under one plan gives the loss decrease and, from `scheduler.cost.progress`, the expected progress for each
price c: log(loss decrease) = log(g) + log(expected progress(c)) + error, where g, the decrease per synchronous step, is
unknown. The posterior of c is computed on a grid, with g fitted for each c; stretches under a single mode fit every c
equally well and leave the prior unchanged.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from scheduler.cost.priors import LARGE, Prior
from scheduler.cost.progress import alignment, update_progress

__all__ = ["StalenessPrice"]

_GRID = np.exp(np.linspace(math.log(0.05), math.log(8.0), 48))
_ERROR = 0.3  # Standard error of a stretch's log decrease.
_WORST = 1.2  # A stretch's decrease counts as at least exp(-1.2), 30 %, of the mean.
_KEEP = 0.97  # Weight of old stretches per new one, because g falls during training.


class StalenessPrice:
    """Posterior of the price c.

    Args:
        prior: Assumptions on the network.

    Attributes:
        prior: As given; its rho and its drift limit are not learned.
        observations: Stretches used.

    Raises:
        ValueError: A price or a spread is not above 0.
    """

    def __init__(self, prior: Prior = LARGE) -> None:
        if not (prior.price > 0.0 and prior.spread > 0.0):
            raise ValueError(f"price median is {prior.price} and spread {prior.spread}; expected both above 0")
        self._log_prior = -0.5 * (np.log(_GRID / prior.price) / prior.spread) ** 2
        self.prior = prior
        # Weighted sums of 1, r and r^2, where r = log decrease - log expected, for every c.
        self._weight = 0.0
        self._log = 0.0  # Of the decrease per update.
        self._sum, self._square = np.zeros(len(_GRID)), np.zeros(len(_GRID))
        self.observations = 0

    def observe(
        self,
        *,
        decrease: float,
        updates: float,
        drift: float,
        length: float,
        gradients: float,
        noise: float,
        world: int,
    ) -> bool:
        """Add a stretch under one plan.

        Args:
            decrease: Loss decrease; a small or negative one counts as 30 % of the mean (`_WORST`).
            updates: Updates in the stretch.
            drift: Their mean drift.
            length: L of an update, 1 for a synchronous step.
            gradients: Effective gradients in an update.
            noise: phi.
            world: Ranks.

        Returns:
            Whether it was used. It is not without updates, with values that are not finite, or if the first stretch has
            no decrease.
        """
        if not (updates > 0.0 and math.isfinite(decrease) and math.isfinite(drift) and length > 0.0):
            return False
        signal = length * alignment(drift, _GRID)
        rho = self.prior.lr_ratio
        expected = updates * np.asarray(update_progress(length, signal, gradients, noise, float(world), rho))
        expected = np.maximum(expected, 0.02 * updates * length)
        log = math.log(decrease / updates) if decrease > 0.0 else -math.inf
        if self._weight:
            # A stretch without a decrease is evidence of a high price, but of bounded weight.
            log = max(log, self._log / self._weight - _WORST)
        if math.isinf(log):
            return False
        residual = log + math.log(updates) - np.log(expected)
        self._weight = _KEEP * self._weight + 1.0
        self._log = _KEEP * self._log + log
        self._sum = _KEEP * self._sum + residual
        self._square = _KEEP * self._square + residual * residual
        self.observations += 1
        return True

    @property
    def posterior(self) -> npt.NDArray[np.float64]:
        """Probabilities of the grid of prices."""
        spread = self._square - self._sum * self._sum / max(self._weight, 1e-12)
        logs = self._log_prior - 0.5 * np.maximum(spread, 0.0) / _ERROR**2
        chances = np.exp(logs - logs.max())
        return np.asarray(chances / chances.sum())

    @property
    def value(self) -> float:
        """Geometric mean of c."""
        return float(np.exp((self.posterior * np.log(_GRID)).sum()))

    def quantiles(self, *levels: float) -> list[float]:
        """Quantiles of c."""
        return [float(v) for v in np.interp(levels, np.cumsum(self.posterior), _GRID)]
