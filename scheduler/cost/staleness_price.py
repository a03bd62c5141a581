"""The price of staleness, learned during a job from the loss decrease under different drifts.

Every stretch under one plan gives the loss decrease and, from `scheduler.cost.progress`, the expected progress for each
price c: log(loss decrease) = log(g) + log(expected progress(c)) + error, where g, the decrease per synchronous step, is
unknown and changes during the training. The posterior of c is computed on a grid, with a trend of g for each c
(`scheduler.cost.decrease_trend`): changes of mode teach, as far as they stand out from the trend; stretches under a
single mode fit every c equally well and leave the prior unchanged.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from scheduler.cost.decrease_trend import DecreaseTrend
from scheduler.cost.priors import LARGE, Prior
from scheduler.cost.progress import alignment, update_progress

__all__ = ["StalenessPrice"]

_GRID = np.exp(np.linspace(math.log(0.05), math.log(8.0), 48))
_UNIT = 64.0  # Synchronous steps in the unit of the trend: about those of a stretch.
_KEEP = 0.97  # Weight of old evidence per new stretch: formula and price hold only roughly, and for a part of a job.


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
        self._trend = DecreaseTrend(len(_GRID))
        self._evidence: npt.NDArray[np.float64] = np.zeros((1, len(_GRID)))
        self._skipped = 0.0  # Synchronous steps, about, since the last stretch used.
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
        error: float = 0.0,
        skipped: float = 0.0,
    ) -> bool:
        """Add a stretch under one plan.

        Args:
            decrease: Loss decrease, negative if the loss rose.
            updates: Updates in the stretch.
            drift: Their mean drift.
            length: L of an update, 1 for a synchronous step.
            gradients: Effective gradients in an update.
            noise: phi.
            world: Ranks.
            error: Standard error of the decrease by the noise of the losses; 0 if unknown.
            skipped: Synchronous steps, about, between the previous stretch and this one.

        Returns:
            Whether it was used. It is not without updates, with values that are not finite, or if the first stretch has
            no decrease.
        """
        if not (updates > 0.0 and length > 0.0 and math.isfinite(updates * length + error + skipped)):
            return False
        self._skipped += skipped
        if not (math.isfinite(decrease) and math.isfinite(drift)):
            self._skipped += updates * length
            return False
        # The prior's price last: trends of all prices are extrapolated equally far.
        prices = np.append(_GRID, self.prior.price)
        signal = length * alignment(drift, prices)
        rho = self.prior.lr_ratio
        expected = updates * np.asarray(update_progress(length, signal, gradients, noise, float(world), rho))
        expected = np.maximum(expected, 0.02 * updates * length)
        found = self._trend.add(
            decrease,
            error=error,
            progress=expected[:-1],
            span=float(expected[-1]) / _UNIT,
            skipped=self._skipped / _UNIT,
        )
        self._skipped = 0.0
        if found is None:
            return False
        self._evidence = _KEEP * self._evidence + found
        self.observations += 1
        return True

    @property
    def posterior(self) -> npt.NDArray[np.float64]:
        """Probabilities of the grid of prices."""
        logs = self._log_prior + self._evidence
        chances = np.exp(logs - logs.max()).sum(axis=0)
        return np.asarray(chances / chances.sum())

    @property
    def value(self) -> float:
        """Geometric mean of c."""
        return float(np.exp((self.posterior * np.log(_GRID)).sum()))

    def quantiles(self, *levels: float) -> list[float]:
        """Quantiles of c."""
        chances = self.posterior
        # Half of a price's chance lies below it.
        return [float(math.exp(v)) for v in np.interp(levels, np.cumsum(chances) - 0.5 * chances, np.log(_GRID))]
