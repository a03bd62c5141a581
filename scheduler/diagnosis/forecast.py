"""Forecast of every rank's next iteration time, with quantiles, from past times.

In STAR's logs (8 workers, none disturbed) a worker's time correlates with its last one by 0.1 (alexnet) to 0.5
(transformer) after removing the part that all workers share, and the shared part is noise from one iteration to the
next. So the last value is a bad forecast, the running mean a good one, and a linear model is better:

    log t[w] = level of the iteration + y[w],   y = log of the time over the lower median over the ranks
    y[w] next = b . (level of w, short deviation, its trends, large deviation, y before) + residual

`level` is a running mean that restarts when five consecutive reports lie far on one side of it (a change point). The
weights b are fitted during the job by ridge regression over all ranks towards a prior, so they are useful from the
first iterations on. A deviation beyond three times the usual scatter is a feature of its own: jitter does not last,
contention does (runs of 3.4 iterations on average). The quantiles are those of recent residuals, each in units of its
rank's scatter.

Medians, not means, are forecast: times are skewed, and the median minimizes the absolute error. The result is a
weighted mean of this fit, the median of the past and the last value, weighted by their recent errors: the second is
best if there is nothing to learn, the third in intermittent contention.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler.diagnosis.window_stats import THRESHOLD
from scheduler.stats import lower_median

__all__ = ["Forecast", "Forecaster", "LastValue", "RunningMean", "RunningMedian"]

Array = npt.NDArray[np.float64]

_PRIOR = np.array([0.85, 0.35, 0.15, 0.0, 0.9, 0.05])
"""Prior weights: rounded means of fits to the first 70 % of the twenty matrices in STAR's logs, except for the large
deviation, which those logs do not contain: contention of 3.4 iterations continues with probability 1 - 1 / 3.4."""
_PRIOR_REPORTS = 400.0
"""Weight of the prior in reports: 50 iterations of 8 ranks."""
_MEMORY = 256  # Iterations of exponential forgetting in the fit.
_LEVEL_MEMORY = 128  # Reports in a level.
_SHRINK = 10.0  # Reports after which half of a rank's level is its own.
_LOSS_MEMORY = 64  # Iterations over which the candidates' errors are averaged.
_LOSS_SCALE = 0.25  # Log odds per unit of loss.
_RESIDUALS = 64  # Iterations whose residuals form the quantiles.
_MOST_RESIDUALS = 8192  # Over all ranks: with a thousand ranks fewer iterations suffice.
_LEAST_SHIFT = math.log(THRESHOLD)  # Smallest change point.
_LARGEST_LOG = 300.0  # Limits absurd times, which must not overflow.
_FAR = 3.0  # Deviation, in scatters, that jitter does not reach.
_PERSISTENCE = 5  # Reports on one side that make a change point; with three, undisturbed logs have some.
_LEAST_SCATTER = 0.005  # Of the logarithm: clocks and schedulers are no more precise than 0.5 %.


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Forecast of the next iteration.

    Attributes:
        median_s: Median of every rank's time in seconds, shape (n_ranks,); NaN for a rank without reports.
        quantiles: The quantiles in `quantile_s`, ascending, between 0 and 1.
        quantile_s: Their times in seconds, shape (n_quantiles, n_ranks).
        slow: Probability of every rank to exceed the lower median of its iteration by the threshold.
        spread: Probability that the slowest rank exceeds the fastest one by the threshold (STAR's definition of a
            straggling iteration).
    """

    median_s: Array
    quantiles: tuple[float, ...]
    quantile_s: Array
    slow: Array
    spread: float


class Forecaster:
    """Learns from one row of times per iteration and forecasts the next. Constant time and memory per iteration.

    Args:
        n_ranks: Number of ranks.

    Raises:
        ValueError: `n_ranks` is less than 1.
    """

    def __init__(self, n_ranks: int) -> None:
        if n_ranks < 1:
            raise ValueError(f"n_ranks is {n_ranks}; expected at least 1")
        self.n_ranks = n_ranks
        self.iterations = 0
        self._common = _Level(1)
        self._own = _Level(n_ranks)
        self._slow_trend = np.zeros(n_ranks)
        self._fast_trend = np.zeros(n_ranks)
        self._last = np.full(n_ranks, np.nan)
        self._before = np.full(n_ranks, np.nan)
        self._last_log = np.full(n_ranks, np.nan)
        size = len(_PRIOR)
        self._gram, self._moment = np.zeros((size, size)), np.zeros(size)
        self._weights = _PRIOR.copy()
        self._scatter = _Scatter(n_ranks)
        self._volatility = _Volatility()
        self._rows = max(8, min(_RESIDUALS, _MOST_RESIDUALS // n_ranks))
        self._pooled: list[Array] = []
        self._common_residuals: list[float] = []
        self._middle = self._common_middle = 0.0
        self._heard = np.zeros(n_ranks, dtype=bool)
        self._median = _TrackedMedian(n_ranks)
        self._losses = np.zeros(3)

    def update(self, times_s: Sequence[float] | Array) -> None:
        """Learn one iteration.

        Args:
            times_s: Every rank's time in seconds, shape (n_ranks,). NaN or a value not above 0 for a rank without a
                report (it is late or lost), whose state is unchanged.

        Raises:
            ValueError: `times_s` has another shape.
        """
        times = np.asarray(times_s, dtype=np.float64)
        if times.shape != (self.n_ranks,):
            raise ValueError(f"times_s has shape {times.shape}; expected ({self.n_ranks},)")
        known = np.isfinite(times) & (times > 0.0)
        if not known.any():
            return
        logs = np.where(known, np.log(np.where(known, times, 1.0)), np.nan)
        common = lower_median(logs[known])
        y = logs - common
        self._learn(y, common, known)
        self._remember(y, common, known)

    def forecast(self, quantiles: Sequence[float] = (0.1, 0.5, 0.9), threshold: float = 1.2) -> Forecast:
        """Forecast the next iteration.

        Args:
            quantiles: Ascending, between 0 and 1.
            threshold: Multiple of the iteration's lower median above which a rank is slow.

        Raises:
            ValueError: A quantile or the threshold is out of range.
        """
        if any(not 0.0 < q < 1.0 for q in quantiles) or list(quantiles) != sorted(quantiles):
            raise ValueError(f"quantiles is {tuple(quantiles)}; expected ascending numbers between 0 and 1")
        if not threshold > 1.0:
            raise ValueError(f"threshold is {threshold}; expected a number above 1")
        own, _ = self._predict()
        scale = self._scatter.value * self._volatility.factor
        rows = np.stack(self._pooled) if self._pooled else np.zeros((1, self.n_ranks))
        pooled = rows[np.isfinite(rows)]
        median = np.where(self._heard, self._candidate_weights() @ self._candidates(own), np.nan)
        centre = np.clip(median, -_LARGEST_LOG, _LARGEST_LOG)
        width = self._widths(pooled, scale, quantiles)
        slow, spread = self._probabilities(own, rows, pooled, scale, math.log(threshold))
        return Forecast(
            median_s=np.exp(centre),
            quantiles=tuple(quantiles),
            quantile_s=np.exp(np.clip(centre[None, :] + width, -2 * _LARGEST_LOG, 2 * _LARGEST_LOG)),
            slow=slow,
            spread=spread,
        )

    def _widths(self, pooled: Array, scale: Array, quantiles: Sequence[float]) -> Array:
        """Offsets of the quantiles from the median, shape (n_quantiles, n_ranks)."""
        if not quantiles:
            return np.zeros((0, self.n_ranks))
        common = np.asarray(self._common_residuals) if self._common_residuals else np.zeros(1)
        own_width = (np.quantile(pooled, quantiles) - np.median(pooled))[:, None] * scale[None, :]
        shared = (np.quantile(common, quantiles) - np.median(common))[:, None]
        # A rank's residual and the iteration's are independent in the logs: variances add.
        return np.asarray(np.sign(own_width) * np.hypot(own_width, shared))

    def _probabilities(
        self, own: Array, rows: Array, pooled: Array, scale: Array, limit: float
    ) -> tuple[Array, float]:
        """Probabilities that a rank exceeds the lower median by `limit`, and that the slowest exceeds the fastest."""
        needed = (limit - own) / scale
        above = 1.0 - np.searchsorted(np.sort(pooled), needed, side="right") / len(pooled)
        # A smooth part distinguishes probabilities beyond the last residual.
        smooth = 0.5 * np.array([math.erfc(value / math.sqrt(2.0)) for value in needed])
        slow = np.where(self._heard, 0.5 * (above + smooth), np.nan)
        if not self._pooled:
            return slow, math.nan
        # Whole iterations are drawn, because residuals of an iteration are correlated.
        drawn = (np.where(np.isfinite(rows), rows, self._middle) * scale + own)[:, self._heard]
        return slow, float(np.mean(drawn.max(axis=1) - drawn.min(axis=1) > limit))

    def _features(self) -> Array:
        """Shape (n_ranks, n_features)."""
        level = self._own.mean * self._own.total / (self._own.total + _SHRINK)
        deviation = np.nan_to_num(self._last - self._own.mean)
        limit = _FAR * self._scatter.value
        small = np.clip(deviation, -limit, limit)
        large = deviation - small
        before = np.clip(np.nan_to_num(self._before - self._own.mean), -limit, limit)
        fast = np.clip(self._fast_trend - self._own.mean, -limit, limit)
        slow = np.clip(self._slow_trend - self._own.mean, -limit, limit)
        return np.stack([level, small, fast, slow, large, before], axis=1)

    def _predict(self) -> tuple[Array, Array]:
        features = self._features()
        return features @ self._weights, features

    def _learn(self, y: Array, common: float, known: npt.NDArray[np.bool_]) -> None:
        """Compare with the forecast and update the weights."""
        if self.iterations == 0:
            return
        own, features = self._predict()
        judged = known & self._heard
        if not judged.any():
            return
        residual = (y - own)[judged]
        self._update_losses(own, y + common, judged)
        row = np.where(judged, (y - own) / (self._scatter.value * self._volatility.factor), np.nan)
        self._pooled = [*self._pooled[-(self._rows - 1) :], row]
        self._common_residuals = [*self._common_residuals[-(_RESIDUALS - 1) :], common - float(self._common.mean[0])]
        if self.iterations < _RESIDUALS or self.iterations % 8 == 0:  # Medians change slowly and are expensive.
            self._middle = float(np.nanmedian(np.stack(self._pooled)))
            self._common_middle = float(np.median(self._common_residuals))
        deviation = np.abs(y - self._own.mean)[judged] / self._scatter.value[judged]
        self._volatility.update(float(np.mean(np.minimum(deviation, _FAR))))
        self._scatter.update(residual, judged)
        # Far residuals would dominate the fit: clipped, as in Huber's regression.
        limit = _FAR * self._scatter.value[judged]
        x, target = features[judged], own[judged] + np.clip(residual, -limit, limit)
        keep = 1.0 - 1.0 / _MEMORY
        self._gram = keep * self._gram + x.T @ x
        self._moment = keep * self._moment + x.T @ target
        seen = float(np.trace(self._gram))
        if seen > 0.0:
            # Ridge in units of the features' size, because features differ by a factor of 10.
            unit = float(np.mean(self._scatter.value**2))
            ridge = _PRIOR_REPORTS * unit * np.array([1.0, 1.0, 1.0, 1.0, 4.0, 1.0])
            self._weights = np.linalg.solve(self._gram + np.diag(ridge), self._moment + ridge * _PRIOR)

    def _candidates(self, own: Array) -> Array:
        """Forecasts of the next logarithms by the fit, the median and the last value, shape (3, n_ranks)."""
        shift = float(self._common.mean[0]) + self._common_middle
        own = own + self._middle * self._scatter.value
        last = np.where(self._heard, self._last_log, 0.0)
        return np.stack([own + shift, self._median.value, last])

    def _candidate_weights(self) -> Array:
        """Weights of the candidates by their recent errors, shape (3,), sum 1."""
        odds = np.exp(-_LOSS_SCALE * (self._losses - self._losses.min()))
        return np.asarray(odds / odds.sum())

    def _update_losses(self, own: Array, logs: Array, judged: npt.NDArray[np.bool_]) -> None:
        """Add the candidates' errors of this iteration, in units of the usual scatter."""
        unit = float(np.mean(self._scatter.value[judged]))
        errors = np.abs(logs - self._candidates(own))[:, judged].mean(axis=1) / unit
        self._losses = (1.0 - 1.0 / _LOSS_MEMORY) * self._losses + errors

    def _remember(self, y: Array, common: float, known: npt.NDArray[np.bool_]) -> None:
        self._common.update(np.array([common]), np.array([True]), np.array([self._common_scatter()]))
        new = self._own.update(y, known, self._scatter.value)
        self._median.update(y + common, known, self._scatter.value)
        self._median.restart(new, self._own.mean + common)
        first = known & ~self._heard
        for trend, gain in ((self._fast_trend, 0.3), (self._slow_trend, 0.1)):
            trend[known] += gain * (y[known] - trend[known])
            trend[first] = y[first]
        self._before = np.where(known, self._last, self._before)
        self._last = np.where(known, y, self._last)
        self._last_log = np.where(known, y + common, self._last_log)
        self._heard |= known
        self.iterations += 1

    def _common_scatter(self) -> float:
        if len(self._common_residuals) < 4:
            return 1.0
        return max(_LEAST_SCATTER, 1.4826 * float(np.median(np.abs(self._common_residuals))))


class _Level:
    """Running means that restart at a change point."""

    def __init__(self, size: int) -> None:
        self.mean = np.zeros(size)
        self.count = np.zeros(size)
        self.total = np.zeros(size)
        self._side = np.zeros(size)
        self._run = np.zeros(size)
        self._run_sum = np.zeros(size)

    def update(self, values: Array, known: npt.NDArray[np.bool_], scatter: Array) -> npt.NDArray[np.bool_]:
        """Add one value each where `known`; `scatter` defines far. Returns which levels were restarted."""
        value = np.where(known, values, self.mean)
        side = np.where(known, np.sign(value - self.mean) * (np.abs(value - self.mean) > _FAR * scatter), self._side)
        side = np.where(self.count >= 2, side, 0.0)
        same = (side != 0.0) & (side == self._side)
        self._run = np.where(known, np.where(same, self._run + 1, np.abs(side)), self._run)
        self._run_sum = np.where(known, np.where(same, self._run_sum + value, value), self._run_sum)
        self._side = side
        # A far value is held back until it is clear whether it begins a new level.
        usual = known & (side == 0.0)
        self.count = np.where(usual, np.minimum(self.count + 1, _LEVEL_MEMORY), self.count)
        self.mean = np.where(usual, self.mean + (value - self.mean) / np.maximum(self.count, 1), self.mean)
        shift = np.abs(self._run_sum / np.maximum(self._run, 1) - self.mean)
        new = known & (self._run >= _PERSISTENCE) & (shift > _LEAST_SHIFT)
        self.mean = np.where(new, self._run_sum / np.maximum(self._run, 1), self.mean)
        self.count = np.where(new, self._run, self.count)
        self._side = np.where(new, 0.0, self._side)
        self._run = np.where(new, 0.0, self._run)
        self.total += known
        return new


class _TrackedMedian:
    """Medians of the logarithms by stochastic approximation, with decreasing steps (Robbins and Monro)."""

    def __init__(self, size: int) -> None:
        self.value = np.zeros(size)
        self._count = np.zeros(size)

    def update(self, logs: Array, known: npt.NDArray[np.bool_], scatter: Array) -> None:
        """Add one value each where `known`."""
        self._count = np.where(known, np.minimum(self._count + 1, _LEVEL_MEMORY), self._count)
        gain = 1.0 / np.maximum(self._count, 1)
        delta = np.where(known, logs, self.value) - self.value
        # The step is proportional to the distance, but clipped.
        step = np.clip(delta, -2.0 * scatter, 2.0 * scatter)
        self.value = np.where(known & (self._count <= 3), self.value + gain * delta, self.value + gain * step)

    def restart(self, new: npt.NDArray[np.bool_], logs: Array) -> None:
        """Restart from `logs` where a change point was found."""
        self.value = np.where(new, logs, self.value)
        self._count = np.where(new, 3.0, self._count)


class _Scatter:
    """Scatter of each rank's residuals: running means of absolute values, shrunk towards that of all ranks."""

    def __init__(self, n_ranks: int) -> None:
        self._mean = np.zeros(n_ranks)
        self._count = np.zeros(n_ranks)
        self._common, self._common_count = 0.1, 1.0

    @property
    def value(self) -> Array:
        """In units of the logarithm, shape (n_ranks,)."""
        weight = self._count / (self._count + 4 * _SHRINK)
        return np.maximum(_LEAST_SCATTER, 1.2533 * (weight * self._mean + (1 - weight) * self._common))

    def update(self, residual: Array, judged: npt.NDArray[np.bool_]) -> None:
        """Add the residuals of the ranks in `judged`, clipped at `_FAR`."""
        size = np.minimum(np.abs(residual), _FAR * self.value[judged])
        self._count[judged] = np.minimum(self._count[judged] + 1, _LEVEL_MEMORY)
        self._mean[judged] += (size - self._mean[judged]) / self._count[judged]
        self._common_count = min(self._common_count + 1, _LEVEL_MEMORY)
        self._common += (float(np.mean(size)) - self._common) / self._common_count


class _Volatility:
    """Factor of the current scatter over the usual one, which persists (autoregression of its logarithm)."""

    def __init__(self) -> None:
        self.factor = 1.0
        self._mean, self._count, self._last, self._seen = 0.0, 0.0, 0.0, 0.0
        self._products, self._squares = 0.0, 1e-9

    def update(self, size: float) -> None:
        """Add an iteration whose ranks deviate by `size` scatters on average."""
        value = math.log(max(size, 0.05))
        deviation = value - self._mean
        if self._count >= 3:
            self._seen += 1.0
            self._products += self._last * deviation
            self._squares += self._last * self._last
        self._count = min(self._count + 1, _LEVEL_MEMORY)
        self._mean += deviation / self._count
        self._last = value - self._mean
        # The correlation expected by chance in that many iterations is subtracted.
        part = min(0.9, max(0.0, self._products / self._squares - 1.0 / math.sqrt(self._seen + 1.0)))
        self.factor = math.exp(part * self._last)


class LastValue:
    """Baseline: the next time is the last one."""

    def __init__(self, n_ranks: int) -> None:
        self._value = np.full(n_ranks, np.nan)

    def update(self, times_s: Sequence[float] | Array) -> None:
        """Learn one iteration."""
        times = np.asarray(times_s, dtype=np.float64)
        self._value = np.where(np.isfinite(times), times, self._value)

    def median_s(self) -> Array:
        """The forecast in seconds, shape (n_ranks,)."""
        return self._value


class RunningMean:
    """Baseline: the next time is the mean of all past ones."""

    def __init__(self, n_ranks: int) -> None:
        self._sum = np.zeros(n_ranks)
        self._count = np.zeros(n_ranks)

    def update(self, times_s: Sequence[float] | Array) -> None:
        """Learn one iteration."""
        times = np.asarray(times_s, dtype=np.float64)
        known = np.isfinite(times)
        self._sum[known] += times[known]
        self._count[known] += 1

    def median_s(self) -> Array:
        """The forecast in seconds, shape (n_ranks,)."""
        return np.where(self._count > 0, self._sum / np.maximum(self._count, 1), np.nan)


class RunningMedian:
    """Baseline: the next time is the median of all past ones; linear memory, for comparisons only."""

    def __init__(self, n_ranks: int) -> None:
        self._rows: list[Array] = []
        self._n_ranks = n_ranks

    def update(self, times_s: Sequence[float] | Array) -> None:
        """Learn one iteration."""
        self._rows.append(np.asarray(times_s, dtype=np.float64))

    def median_s(self) -> Array:
        """The forecast in seconds, shape (n_ranks,)."""
        return np.nanmedian(self._rows, axis=0) if self._rows else np.full(self._n_ranks, np.nan)
