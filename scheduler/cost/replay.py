"""Replays of recent times under the rules of a mode: interval and composition of updates.

Small event simulations for decisions within milliseconds; `scheduler.simulator` is exact. Each is written twice:
`replay_few.py` has loops, which are faster for few ranks, and `replay_many.py` operations on arrays.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler.cost import replay_few, replay_many
from scheduler.diagnosis.window_stats import always_slow
from scheduler.plan.plan import Plan
from scheduler.rules.weights import damped, damping_scale, lr_factor
from scheduler.stats import lower_median

__all__ = ["Flow", "partial_flow", "server_flow"]

Array = npt.NDArray[np.float64]

FEW = 16
"""Most ranks for which loops are faster than operations on arrays."""

_GRACE = 0.25  # Fraction of the usual time that `ClosingRule` waits after the quorum.
_ARRIVALS = 24  # Arrivals per rank in a replay of servers.
_ROWS = 8  # Up to this many rows, columns are sorted by comparing whole rows.
_MANY = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """The updates of a mode.

    Attributes:
        interval_s: Mean time between two updates.
        length: L of an update (`scheduler.cost.progress`).
        weights: Share of each kind of gradient in an update; sum 1.
        drifts: Drift of each kind.
        gradients: Effective number of gradients in an update.
        drift: Mean drift.
        scatter: Relative standard error of the interval.
    """

    interval_s: float
    length: float
    weights: Array
    drifts: Array
    gradients: float
    drift: float
    scatter: float

    @classmethod
    def fresh(cls, interval_s: float, gradients: float, scatter: float) -> Flow:
        """Updates of fresh gradients only."""
        return cls(
            interval_s=interval_s,
            length=1.0,
            weights=np.ones(1),
            drifts=np.zeros(1),
            gradients=gradients,
            drift=0.0,
            scatter=scatter,
        )

    @classmethod
    def mean(
        cls, interval_s: float, weights: Sequence[float] | Array, drifts: Sequence[float] | Array, scatter: float
    ) -> Flow:
        """Updates that are a weighted mean of gradients."""
        w, d = np.asarray(weights, dtype=np.float64), np.asarray(drifts, dtype=np.float64)
        total = float(w.sum())
        return cls(
            interval_s=interval_s,
            length=1.0,
            weights=w / total,
            drifts=d,
            gradients=total * total / float((w * w).sum()),
            drift=float((w * d).sum()) / total,
            scatter=scatter,
        )

    def slower(self, extra_s: float) -> Flow:
        """Copy with a longer interval."""
        return dataclasses.replace(self, interval_s=self.interval_s + extra_s)


def _first_steady(updates: int) -> int:
    """Index of the first update that counts: the first tenth is before the steady state."""
    return max(updates // 10, min(1, updates - 3))


def _interval_of(ends: Array) -> tuple[float, float]:
    """Mean interval of updates that end at these times, and its relative standard error."""
    updates, first = len(ends), _first_steady(len(ends))
    steps = np.diff(ends[first:]) if updates - first > 1 else ends
    mean_s = float(steps.mean())
    if updates >= 500:  # STAR's table counts from the start.
        mean_s = float(ends[-1]) / updates
    return mean_s, float(steps.std()) / math.sqrt(len(steps)) / max(mean_s, 1e-12)


def server_flow(plan: Plan, times: Array, x: int, gap_s: float) -> Flow:
    """Updates of any x arrivals at servers that process at most one update per `gap_s`.

    Args:
        plan: Provides damping, learning-rate rule and whether late gradients are dropped.
        times: Cycle time of every rank, push and reply included, rows of shape (n_ranks,).
        x: Arrivals that make an update.
        gap_s: Least time between updates.
    """
    n = times.shape[1]
    if not 1 <= x <= n:
        raise ValueError(f"x is {x}; expected 1..{n}, the ranks")
    if x == 1 and plan.rule not in ("backup", "grace"):
        # Ranks are independent: rates add up, no order to simulate.
        rates = 1.0 / times.mean(axis=0)
        interval_s = max(float(1.0 / rates.sum()), gap_s)
        stale, weight = np.maximum(rates.sum() / rates - 1.0, 0.0), rates / rates.sum()
        scatter = 0.02
    elif plan.rule == "backup":
        updates = max(12, _ARRIVALS * n // x) if n <= _MANY else 6
        backup = replay_few.backup if n <= FEW else replay_many.backup
        interval_s, scatter = _interval_of(backup(times, x, updates, gap_s))
        stale, weight = np.zeros(1), np.ones(1)
    elif plan.rule == "grace":
        return _graced(times, x, gap_s)
    else:
        updates = max(12, _ARRIVALS * n // x) if n <= _MANY else max(8, 6 * n // x)
        order = replay_few.order if n <= FEW else replay_many.order
        ends, all_stale = order(times, x, updates, gap_s)
        interval_s, scatter = _interval_of(ends)
        counts = np.bincount(all_stale[_first_steady(updates) :].reshape(-1))
        stale = np.flatnonzero(counts).astype(np.float64)
        weight = counts[counts > 0] / counts.sum()
    kept = damped(damping_scale(plan, float(x)), stale)
    share = weight * kept
    total = float(share.sum())
    length = lr_factor(plan, x) * total
    drifts = stale * length
    share = share / total
    return Flow(
        interval_s=interval_s,
        length=length,
        weights=share,
        drifts=drifts,
        gradients=x * total * total / float((weight * kept * kept).sum()),
        drift=float((share * drifts).sum()),
        scatter=scatter,
    )


def _graced(times: Array, x: int, gap_s: float) -> Flow:
    """Updates of the first x gradients and of those that follow within the grace; later ones are dropped.

    A rank whose gradient was dropped begins again with the next update, so one that is slow for some of its batches is
    missing for as long as those last. The grace is for ranks that work on this update and are not slow all the time.
    """
    usual = _median(times)
    typical_s, rows, now_s = lower_median(usual), len(times), 0.0
    updates = 2 * rows if len(usual) <= _MANY else rows + 3
    expected, batch, ranks = ~always_slow(usual, typical_s), np.ones(len(usual), dtype=np.int64), np.arange(len(usual))
    finish_s, fresh = times[0].copy(), np.ones(len(usual), dtype=np.bool_)
    ends, gradients = np.zeros(updates), np.zeros(updates)
    for update in range(updates):
        arrivals = np.sort(finish_s[fresh]) if fresh.any() else np.array([finish_s.min()])
        quorum_s = max(float(arrivals[min(x, len(arrivals)) - 1]), now_s + gap_s)
        limit_s = quorum_s + _GRACE * typical_s
        inside = fresh & (finish_s <= limit_s)
        close_s = limit_s if (fresh & expected & ~inside).any() else float(finish_s[inside].max(initial=quorum_s))
        now_s = ends[update] = close_s
        gradients[update] = np.count_nonzero(inside)
        fresh = finish_s <= now_s
        begun = ranks[fresh]
        finish_s[begun] = now_s + times[batch[begun] % rows, begun]
        batch[begun] += 1
    interval_s, scatter = _interval_of(ends)
    return Flow.fresh(interval_s, max(1.0, float(gradients[_first_steady(updates) :].mean())), scatter)


def partial_flow(times: Array, quorums: Sequence[int], fixed_s: float, *, scales: Sequence[float]) -> list[Flow]:
    """Steps that wait for a quorum and a grace, for several quorums at once.

    Args:
        times: Expected compute times, shape (n_steps, n_ranks); replayed twice or, with many ranks, a few steps longer.
        quorums: m of every case.
        fixed_s: Time of a step besides compute.
        scales: `damping_scale` of every case.
    """
    usual = _median(times)
    steps = 2 * len(times) if len(usual) <= _MANY else len(times) + 3
    typical_s = lower_median(usual)
    partials = replay_few.partials if len(usual) <= FEW else replay_many.partials
    found = partials(times, quorums, fixed_s, always_slow(usual, typical_s), _GRACE * typical_s, steps)
    return [_mean_flow(steps, *case) for case in zip(scales, found, strict=True)]


def _median(times: Array) -> Array:
    """Every rank's median; numpy's is slow for a thousand short columns."""
    ordered, rows = times.copy(), len(times)
    if rows > _ROWS:
        ordered.sort(axis=0)
    for turn in range(rows if rows <= _ROWS else 0):
        upper, lower = ordered[turn % 2 : rows - 1 : 2], ordered[turn % 2 + 1 :: 2]
        upper[:], lower[:] = np.minimum(upper, lower), np.maximum(upper, lower)
    return np.asarray(0.5 * (ordered[(rows - 1) // 2] + ordered[rows // 2]))


def _mean_flow(steps: int, scale: float, found: tuple[float, list[int]]) -> Flow:
    counts = np.asarray(found[1], dtype=np.float64)
    stale = np.flatnonzero(counts).astype(np.float64)
    kept = damped(scale, stale)
    counts = counts[counts > 0.0]
    sums = counts * kept
    total, square = float(sums.sum()), float((sums * kept).sum())
    share = sums / total
    mean = total / steps
    return Flow(
        interval_s=found[0] / steps,
        length=1.0,
        weights=share,
        drifts=stale,
        gradients=mean * mean / max(square / steps, 1e-12),
        drift=float((share * stale).sum()),
        scatter=0.02,
    )
