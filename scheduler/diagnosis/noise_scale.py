"""Gradient noise scale, estimated from the differences of local gradients from their mean.

Model (McCandlish et al. 2018, appendix A; the same two equations as in Pollux, Qiao et al. 2021): a gradient
of b samples is the true gradient G plus noise, E|g|^2 = |G|^2 + S / b with S the trace of the per-sample
covariance. A small and a big batch at the same parameters give two equations, hence unbiased estimates

    |G|^2 = (big * |g_big|^2 - small * |g_small|^2) / (big - small)
    S     = (|g_small|^2 - |g_big|^2) / (1 / small - 1 / big)

and the noise scale S / |G|^2 in samples: batches well below it are mostly noise, so doubling them nearly halves the
steps; batches well above it waste samples. With n equal batches b these are Pollux's (n * q_mean - q_local) / (n - 1)
and (q_local - q_mean) * n * b / (n - 1).

A ratio of two noisy numbers is biased, so numerator and denominator are averaged separately and divided last.
"""

from __future__ import annotations

import math

__all__ = ["NoiseScale"]


class NoiseScale:
    """Running estimate of the gradient noise scale.

    Args:
        decay: Factor on the weight of old updates at each new one. 0.98 averages over about 50 updates: one estimate
            of |G|^2 has a relative error of order one near the noise scale, 50 reduce it below 20 %, and at one
            update every 8 steps that still follows training within a few hundred steps.

    Attributes:
        updates: Updates used so far.
        skipped: Updates rejected as unusable: not finite, or both batches equal.

    Raises:
        ValueError: `decay` outside 0 <= decay < 1.
    """

    def __init__(self, decay: float = 0.98) -> None:
        if not 0.0 <= decay < 1.0:
            raise ValueError(f"noise scale decay is {decay}; expected 0 <= decay < 1")
        self._decay = decay
        self._variance = 0.0
        self._square = 0.0
        self.updates = 0
        self.skipped = 0

    def update(self, local_sqr_mean: float, mean_sqr: float, small_batch: float, big_batch: float) -> bool:
        """Add one step's norms.

        With weights equal to the batch sizes, the small batch is their mean and the big one their sum.

        Args:
            local_sqr_mean: Weighted mean over ranks of |g_i|^2, the squared norms of the ranks' mean gradients.
            mean_sqr: |g|^2 of the weighted mean gradient, over the same ranks.
            small_batch: Samples behind `local_sqr_mean`.
            big_batch: Samples behind `mean_sqr`, more than `small_batch`.

        Returns:
            Whether the numbers were used; not for a single rank or after an overflow.
        """
        numbers = (local_sqr_mean, mean_sqr, small_batch, big_batch)
        usable = all(map(math.isfinite, numbers)) and min(local_sqr_mean, mean_sqr) >= 0.0
        if not usable or not 0.0 < small_batch < big_batch * (1.0 - 1e-9):
            self.skipped += 1
            return False
        spread = big_batch - small_batch
        square = (big_batch * mean_sqr - small_batch * local_sqr_mean) / spread
        variance = (local_sqr_mean - mean_sqr) * small_batch * big_batch / spread
        self._square = self._decay * self._square + (1.0 - self._decay) * square
        self._variance = self._decay * self._variance + (1.0 - self._decay) * variance
        self.updates += 1
        return True

    @property
    def gradient_sqr(self) -> float:
        """Estimate of |G|^2; NaN before the first update."""
        return self._corrected(self._square)

    @property
    def variance(self) -> float:
        """Estimate of S, the trace of the per-sample covariance; NaN before the first update."""
        return self._corrected(self._variance)

    @property
    def value(self) -> float:
        """Noise scale in samples; NaN before both averages are positive."""
        if self.updates == 0 or self._square <= 0.0 or self._variance <= 0.0:
            return math.nan
        return self.variance / self.gradient_sqr

    def _corrected(self, average: float) -> float:
        """Correct the bias of the average towards its initial 0, as in Adam."""
        if self.updates == 0:
            return math.nan
        return average / (1.0 - self._decay**self.updates)
