"""Replays of recent times under the rules of a mode: how often updates come, and of what.

These are small event simulations for decisions that take milliseconds; `scheduler.simulator` is the exact one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler.plans import Plan

__all__ = ["Flow", "order_interval", "partial_flow", "server_flow"]

Array = npt.NDArray[np.float64]

_GRACE = 0.25  # Of the usual time, as `ClosingRule` waits after the quorum.
_SLOW = 1.3  # As there.
_ARRIVALS = 24  # Arrivals per rank that a replay of servers takes.
_MANY = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """The updates of a mode.

    Attributes:
        interval_s: Mean time between two.
        length: L of an update (`scheduler.progress`).
        weights: What kinds of gradients share in it; sum 1.
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
        """Updates of fresh gradients alone."""
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
    def mean(cls, interval_s: float, weights: Sequence[float], drifts: Sequence[float], scatter: float) -> Flow:
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
        """The same with updates that take so much longer."""
        return dataclasses.replace(self, interval_s=self.interval_s + extra_s)


def order_interval(times_s: Sequence[float] | Array, x: int, *, updates: int = 1000) -> float:
    """tau(x): mean time between updates of any x arrivals (STAR section 4.4), seconds.

    Args:
        times_s: Every rank's time, shape (n_ranks,), or rows of them to be gone through again and again.
        x: Arrivals that make an update.
        updates: Updates to simulate.
    """
    times = np.atleast_2d(np.asarray(times_s, dtype=np.float64))
    return _order(times, x, updates)[0]


def _order(times: Array, x: int, updates: int, gap_s: float = 0.0) -> tuple[float, Array, float]:
    """Mean interval, staleness of every gradient taken, and the relative standard error of the interval.

    The first tenth is the way into the steady state, and not counted.
    """
    rows, n = times.shape
    if not 1 <= x <= n:
        raise ValueError(f"x is {x}; expected 1..{n}, the ranks")
    finish_s, base, count = times[0].copy(), np.zeros(n, dtype=np.int64), np.ones(n, dtype=np.int64)
    ends, stale, now_s = np.zeros(updates), np.zeros((updates, x)), 0.0
    for update in range(updates):
        chosen = np.argpartition(finish_s, x - 1)[:x] if x < n else np.arange(n)
        now_s = max(float(finish_s[chosen].max()), now_s + gap_s)
        stale[update] = update - base[chosen]
        finish_s[chosen] = now_s + times[count[chosen] % rows, chosen]
        count[chosen] += 1
        base[chosen] = update + 1
        ends[update] = now_s
    skip = updates // 10
    steps = np.diff(ends[skip:]) if updates - skip > 1 else ends
    mean_s = float(steps.mean())
    if updates >= 500:  # The table of the source counts from the start.
        mean_s = now_s / updates
    return mean_s, stale[skip:].reshape(-1), float(steps.std()) / math.sqrt(len(steps)) / max(mean_s, 1e-12)


def _backup(times: Array, x: int, updates: int, gap_s: float) -> tuple[float, float]:
    """Mean interval of updates of the first x fresh gradients, and its relative standard error.

    What comes later is dropped when it comes, and its rank begins anew with the parameters there are by then.
    """
    rows, n = times.shape
    finish_s, base, count = times[0].copy(), np.zeros(n, dtype=np.int64), np.ones(n, dtype=np.int64)
    ends, now_s = np.zeros(updates), 0.0
    for update in range(updates):
        while True:
            fresh = base == update
            following_s = float(np.partition(np.where(fresh, finish_s, math.inf), x - 1)[x - 1])
            dropped = np.flatnonzero(~fresh & (finish_s <= following_s))
            if not len(dropped):
                break
            finish_s[dropped] = np.maximum(finish_s[dropped], now_s) + times[count[dropped] % rows, dropped]
            count[dropped] += 1
            base[dropped] = update
        chosen = np.flatnonzero(fresh & (finish_s <= following_s))[:x]
        now_s = max(following_s, now_s + gap_s)
        finish_s[chosen] = now_s + times[count[chosen] % rows, chosen]
        count[chosen] += 1
        base[chosen] = update + 1
        ends[update] = now_s
    steps = np.diff(ends[updates // 10 :])
    mean_s = float(steps.mean())
    return mean_s, float(steps.std()) / math.sqrt(len(steps)) / max(mean_s, 1e-12)


def server_flow(plan: Plan, times: Array, x: int, gap_s: float) -> Flow:
    """Updates of any x arrivals at servers that cannot take in more than one update in `gap_s`.

    Args:
        plan: For its damping, learning-rate rule and whether late gradients are dropped.
        times: Cycle of every rank, push and answer included, rows of shape (n_ranks,).
        x: Arrivals that make an update.
        gap_s: Least time between updates.
    """
    n = times.shape[1]
    if x == 1:
        # Every rank for itself: rates add up, no order to simulate.
        rates = 1.0 / times.mean(axis=0)
        interval_s = max(float(1.0 / rates.sum()), gap_s)
        stale, weight = np.maximum(rates.sum() / rates - 1.0, 0.0), rates / rates.sum()
        scatter = 0.02
    elif plan.rule == "backup":
        updates = max(12, _ARRIVALS * n // x) if n <= _MANY else 8
        interval_s, scatter = _backup(times, x, updates, gap_s)
        stale, weight = np.zeros(1), np.ones(1)
    else:
        arrivals = _ARRIVALS if n <= _MANY else 6
        interval_s, all_stale, scatter = _order(times, x, max(12, arrivals * n // x), gap_s)
        stale, counts = np.unique(all_stale, return_counts=True)
        weight = counts / counts.sum()
    kept = np.ones(len(stale))
    if plan.damping == "inverse":
        kept = 1.0 / (1.0 + stale)
    elif plan.damping == "relative":
        kept = np.minimum(1.0, n / x / (1.0 + stale))
    full = x / n if plan.lr_rule == "linear" else 1.0
    if plan.lr_rule == "noise":
        full = (1.0 + plan.noise_scale / n) / (1.0 + plan.noise_scale / x)
    share = weight * kept
    total = float(share.sum())
    length = full * total
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


def partial_flow(times: Array, quorums: Sequence[int], fixed_s: float, *, relative: Sequence[bool]) -> list[Flow]:
    """Steps that wait for a quorum and a grace, for several quorums at once.

    Args:
        times: Compute times to come, shape (n_steps, n_ranks); gone through twice.
        quorums: m of every case.
        fixed_s: What a step takes besides.
        relative: Whether late gradients are damped by `relative` rather than `inverse`.
    """
    rows, n = times.shape
    cases, quorum = np.arange(len(quorums)), np.asarray(quorums)
    typical_s = float(np.sort(np.median(times, axis=0))[(n - 1) // 2])
    usual = np.median(times, axis=0)
    slow = usual > _SLOW * typical_s
    count = np.ones((len(quorum), n), dtype=np.int64)
    finish_s = np.broadcast_to(times[0], count.shape).copy()
    version = np.zeros(count.shape, dtype=np.int64)
    now_s, steps = np.zeros(len(quorum)), 2 * rows
    total, square, signal = np.zeros(len(quorum)), np.zeros(len(quorum)), []
    for step in range(steps):
        _join(finish_s, version, count, times, now_s, step, quorum)
        fresh = version >= step
        arrive_s = np.where(fresh, finish_s, math.inf)
        quorum_s = np.sort(arrive_s, axis=1)[cases, quorum - 1]
        short = np.isinf(quorum_s)
        if short.any():
            quorum_s = np.where(short, np.where(fresh, finish_s, -math.inf).max(axis=1), quorum_s)
            quorum_s = np.maximum(quorum_s, now_s)
        limit_s = quorum_s + _GRACE * typical_s
        waited = fresh & ~slow & (arrive_s <= limit_s[:, None])
        close_s = np.maximum(quorum_s, np.where(waited, arrive_s, -math.inf).max(axis=1))
        inside = arrive_s <= close_s[:, None]
        late = ~fresh & (finish_s <= close_s[:, None])
        stale = np.where(late, step - version, 0).astype(np.float64)
        kept = np.where(
            np.asarray(relative)[:, None], np.minimum(1.0, n / quorum[:, None] / (1.0 + stale)), 1.0 / (1.0 + stale)
        )
        weights = np.where(inside, 1.0, np.where(late, kept, 0.0))
        total += weights.sum(axis=1)
        square += (weights * weights).sum(axis=1)
        signal.append((weights, stale))
        # Late ones join at once, for this step; those inside begin the next one together.
        begin_s = np.where(late, finish_s, (close_s + fixed_s)[:, None])
        again = inside | late
        finish_s = np.where(again, begin_s + times[count % rows, np.arange(n)], finish_s)
        count += again
        version = np.where(inside, step + 1, np.where(late, step, version))
        now_s = close_s + fixed_s
    return [_mean_flow(signal, case, float(now_s[case]) / steps, total, square, steps) for case in cases.tolist()]


def _join(
    finish_s: Array, version: npt.NDArray[np.int64], count: npt.NDArray[np.int64], times: Array, now_s: Array,
    step: int, quorum: npt.NDArray[np.int64],
) -> None:
    """Ranks that ended a late batch while the last step was reduced begin one for this step."""
    late = (version < step) & (finish_s <= now_s[:, None])
    if not late.any():
        return
    case, rank = np.nonzero(late)
    finish_s[case, rank] = now_s[case] + times[count[case, rank] % len(times), rank]
    count[case, rank] += 1
    version[case, rank] = step


def _mean_flow(
    signal: Sequence[tuple[Array, Array]], case: int, interval_s: float, total: Array, square: Array, steps: int
) -> Flow:
    weights = np.concatenate([w[case] for w, _ in signal])
    drifts = np.concatenate([s[case] for _, s in signal])
    sums = np.bincount(drifts.astype(np.int64), weights=weights)
    levels = np.flatnonzero(sums).astype(np.float64)
    share = sums[sums > 0.0] / weights.sum()
    mean = float(total[case]) / steps
    return Flow(
        interval_s=interval_s,
        length=1.0,
        weights=share,
        drifts=levels,
        gradients=mean * mean / max(float(square[case]) / steps, 1e-12),
        drift=float((share * levels).sum()),
        scatter=0.02,
    )
