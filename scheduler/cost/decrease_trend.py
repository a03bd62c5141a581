"""Trend of the loss decrease during a training, from which a cost of staleness is distinguished.

The decrease of the loss per unit of progress changes during a training, whatever the mode: mostly it falls, as the
loss flattens, and how fast is unknown. Its logarithm is tracked as a local linear trend: a level and a slope, which
wander. For each hypothesis on the progress of a stretch there is one such trend, and the density of each new decrease
under it, given those before, is the evidence for the hypothesis. A change of mode shows as a jump against the trend.
Where there is one change only, a jump and a bend of the trend differ clearly near it only, so that a hypothesis gains
little; where modes alternate, each change adds evidence. Hypotheses that differ by a constant factor of all stretches,
as those on a single mode do, have the same evidence.

How far decreases scatter about the trend and how fast it bends is unknown, too: there is a trend for each combination
of `_SCATTER` and `_BEND`, and their evidence is averaged by the caller.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

__all__ = ["DecreaseTrend"]

Array = npt.NDArray[np.float64]

_SCATTER = (0.1, 0.25, 0.5)
"""Standard deviations of the logarithm of a decrease about the trend, beyond the error of the losses."""

_BEND = (0.02, 0.06, 0.2)
"""Standard deviations of the change of slope within a unit of progress."""

_EARLY_BEND = 0.6
"""The same from the first unit of progress to the second. It falls with the power 1.5 of what has been made: where the
loss follows a power law, as most do at first, the slope of the logarithm is proportional to 1 / progress."""

_SLOPE = 0.5  # Standard deviation of the slope at the beginning; a loss with a time constant of 3 units has 0.33.
_LEAST_ERROR = 0.05  # Relative to a usual decrease: losses without a known error are not exact.
_OUTLIER = 2.5  # Standard errors beyond which evidence and correction grow no longer with the square.
_FOLLOW = 0.2  # Weight of the last decrease in the usual one.
_LEAST_DECREASE = 0.1  # Share of the usual decrease as which a smaller or negative one counts in the usual one.


class DecreaseTrend:
    """Trends of the logarithm of the decrease per progress, one for each hypothesis and assumption on the scatter.

    Arrays have shape (n_assumptions, n_hypotheses).

    Args:
        hypotheses: Number of hypotheses on the progress.
    """

    def __init__(self, hypotheses: int) -> None:
        scatter, bend = np.meshgrid(_SCATTER, _BEND, indexing="ij")
        self._scatter, self._bend = scatter.reshape(-1, 1), bend.reshape(-1, 1) ** 2
        self._shape = (scatter.size, hypotheses)
        self._level, self._slope = np.zeros(self._shape), np.zeros(self._shape)
        self._variance, self._covariance, self._slope_variance = (np.zeros(self._shape) for _ in range(3))
        self._made, self._span = 0.0, 0.0  # Nominal progress in all, and in the last stretch.
        self._usual = math.nan  # Logarithm of the usual decrease per nominal progress.

    def add(self, decrease: float, *, error: float, progress: Array, span: float, skipped: float) -> Array | None:
        """Add a stretch; return the logarithm of its density, None if it is the first one and has no decrease.

        Args:
            decrease: Loss decrease.
            error: Its standard error, 0 if unknown.
            progress: Progress under each hypothesis, shape (n_hypotheses,).
            span: Nominal progress, the same for all hypotheses, in the unit of the slope.
            skipped: The same between the previous stretch and this one.
        """
        expected = np.log(progress)
        if math.isnan(self._usual):
            return self._begin(decrease, error, expected, span)
        self._advance(0.5 * (self._span + span) + skipped, span)
        usual = math.exp(self._usual) * span
        error = math.hypot(error, _LEAST_ERROR * usual)
        self._usual += _FOLLOW * math.log(max(decrease, error, _LEAST_DECREASE * usual) / usual)
        return self._correct(decrease, error, expected)

    def _begin(self, decrease: float, error: float, expected: Array, span: float) -> Array | None:
        if not decrease > 0.0:
            return None
        seen = max(decrease, error)
        self._level[:] = math.log(seen) - expected
        self._variance[:] = self._scatter**2 + (error / seen) ** 2
        self._slope_variance[:] = _SLOPE**2
        self._usual, self._made, self._span = math.log(seen / span), 0.5 * span, span
        return np.zeros(self._shape)

    def _advance(self, ahead: float, span: float) -> None:
        """Extrapolate the trends to the middle of a stretch of this span."""
        self._made += ahead
        self._span = span
        bend = ahead * (self._bend + _EARLY_BEND**2 / max(self._made, ahead) ** 3)
        self._level += ahead * self._slope
        self._variance += ahead * (2.0 * self._covariance + ahead * (self._slope_variance + bend / 3.0))
        self._covariance += ahead * (self._slope_variance + bend / 2.0)
        self._slope_variance += bend

    def _correct(self, decrease: float, error: float, expected: Array) -> Array:
        """Correct the trends by a decrease and return the logarithm of its density.

        A decrease has the variance error^2 + (scatter times decrease)^2. Its inverse hyperbolic sine, suitably scaled,
        has unit variance: a logarithm where the decrease is clear, linear where it is lost in the error or negative.
        """
        scatter = self._scatter
        mean = np.exp(np.clip(self._level + expected, -60.0, 60.0))
        rate = mean / np.hypot(error, scatter * mean)
        surprise = (np.arcsinh(scatter * decrease / error) - np.arcsinh(scatter * mean / error)) / scatter
        variance = rate * rate * self._variance + 1.0
        errors = surprise / np.sqrt(variance)
        bounded = np.clip(errors, -_OUTLIER, _OUTLIER)
        move = bounded / np.sqrt(variance)
        gain, slope_gain = rate * self._variance, rate * self._covariance
        self._level += gain * move
        self._slope += slope_gain * move
        self._slope_variance -= slope_gain * slope_gain / variance
        self._covariance -= gain * slope_gain / variance
        self._variance /= variance
        # The last factor is the change of variables, which depends on the scatter.
        width = np.sqrt(variance) * np.hypot(error, scatter * decrease)
        return np.asarray(-bounded * (errors - 0.5 * bounded) - np.log(width))
