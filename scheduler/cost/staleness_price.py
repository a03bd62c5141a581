"""The price of staleness, learned while a job runs from how fast the loss falls under different drifts.

Of every stretch under one plan two numbers are known: how much the loss fell, and what `scheduler.cost.progress`
expects for each price c. log(loss decrease) = log(g) + log(expected progress(c)) + error, with g, the decrease per
synchronous step, unknown. c is judged on a grid, with g fitted for each c: under one mode alone every c explains
everything and the prior stays, so nothing is learned where nothing can be.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from scheduler.cost.priors import LARGE, Prior
from scheduler.cost.progress import alignment, update_progress

__all__ = ["StalenessPrice"]

_GRID = np.exp(np.linspace(math.log(0.05), math.log(8.0), 48))
_ERROR = 0.3  # Of a stretch's log decrease: losses are noisy.
_WORST = 1.2  # A stretch counts as no worse than exp(-1.2), 30 %, of the usual decrease.
_KEEP = 0.97  # g falls as training goes on: old stretches count less.


class StalenessPrice:
    """Posterior of the price c.

    Args:
        prior: What is assumed of the network.

    Attributes:
        prior: What was assumed of the network; its rho and its bearable drift are kept.
        observations: Stretches taken in.

    Raises:
        ValueError: A price or a spread that is not above 0.
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
        """Take in a stretch under one plan.

        Args:
            decrease: How much the loss fell; what did not fall counts as a third of the usual, at most.
            updates: Updates in the stretch.
            drift: Their mean drift.
            length: L of an update, 1 for a synchronous step.
            gradients: Effective gradients in one.
            noise: phi.
            world: Ranks.

        Returns:
            Whether it was used: not without updates, with numbers that are none, or as the first without a decrease.
        """
        if not (updates > 0.0 and math.isfinite(decrease) and math.isfinite(drift) and length > 0.0):
            return False
        signal = length * alignment(drift, _GRID)
        rho = self.prior.lr_ratio
        expected = updates * np.asarray(update_progress(length, signal, gradients, noise, float(world), rho))
        expected = np.maximum(expected, 0.02 * updates * length)
        log = math.log(decrease / updates) if decrease > 0.0 else -math.inf
        if self._weight:
            # A stretch without any decrease says that it is bad, not by how many powers of ten.
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
