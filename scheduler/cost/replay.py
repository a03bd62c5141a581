"""Replays of recent times under the rules of a mode: interval and composition of updates.

Small event simulations for decisions within milliseconds; `scheduler.simulator` is exact.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler.cost import replay_few
from scheduler.cost.replay_few import FEW
from scheduler.diagnosis.window_stats import always_slow
from scheduler.plan.plan import Plan
from scheduler.rules.weights import damped, damping_scale, lr_factor

__all__ = ["Flow", "partial_flow", "server_flow"]

Array = npt.NDArray[np.float64]
_Counts = npt.NDArray[np.int64]

_GRACE = 0.25  # Fraction of the usual time that `ClosingRule` waits after the quorum.
_ARRIVALS = 24  # Arrivals per rank in a replay of servers.
_ROWS = 8  # Up to this many rows, columns are sorted by comparing whole rows.
_MANY = 128
_NONE = np.zeros((0, 1), dtype=np.int64)


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


def _order(times: Array, x: int, updates: int, gap_s: float = 0.0) -> tuple[float, _Counts, float]:
    """Mean interval, staleness of every gradient, and the relative standard error of the interval.

    The first tenth, before the steady state, is not counted.
    """
    n = times.shape[1]
    if not 1 <= x <= n:
        raise ValueError(f"x is {x}; expected 1..{n}, the ranks")
    if n <= FEW:
        few_ends, few_stale = replay_few.order(times.tolist(), x, updates, gap_s)
        return _steady(np.array(few_ends), np.array(few_stale), updates)
    finish_s, base, place = times[0].copy(), np.zeros(n, dtype=np.int64), np.arange(n, 2 * n)
    ahead, turn = times.reshape(-1), times.size
    ends, stale, now_s = np.zeros(updates), np.zeros((updates, x), dtype=np.int64), 0.0
    for update in range(updates):
        chosen = np.argpartition(finish_s, x - 1)[:x] if x < n else np.arange(n)
        now_s = max(float(finish_s[chosen].max()), now_s + gap_s)
        stale[update] = update - base[chosen]
        following = place[chosen]
        finish_s[chosen] = now_s + ahead[following % turn]
        place[chosen] = following + n
        base[chosen] = update + 1
        ends[update] = now_s
    return _steady(ends, stale, updates)


def _steady(ends: Array, stale: _Counts, updates: int) -> tuple[float, _Counts, float]:
    """Steady-state statistics as `_order` returns them, from the end and staleness of every update."""
    skip, now_s = max(updates // 10, min(1, updates - 3)), float(ends[-1])
    steps = np.diff(ends[skip:]) if updates - skip > 1 else ends
    mean_s = float(steps.mean())
    if updates >= 500:  # STAR's table counts from the start.
        mean_s = now_s / updates
    return mean_s, stale[skip:].reshape(-1), float(steps.std()) / math.sqrt(len(steps)) / max(mean_s, 1e-12)


def _backup(times: Array, x: int, updates: int, gap_s: float) -> tuple[float, float]:
    """Mean interval of updates of the first x fresh gradients, and its relative standard error.

    Later gradients are dropped on arrival; their ranks start again with the parameters of that time.
    """
    rows, n = times.shape
    if n <= FEW:
        mean_s, _, scatter = _steady(np.array(replay_few.backup(times.tolist(), x, updates, gap_s)), _NONE, updates)
        return mean_s, scatter
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
    mean_s, _, scatter = _steady(ends, _NONE, updates)
    return mean_s, scatter


def server_flow(plan: Plan, times: Array, x: int, gap_s: float) -> Flow:
    """Updates of any x arrivals at servers that process at most one update per `gap_s`.

    Args:
        plan: Provides damping, learning-rate rule and whether late gradients are dropped.
        times: Cycle time of every rank, push and reply included, rows of shape (n_ranks,).
        x: Arrivals that make an update.
        gap_s: Least time between updates.
    """
    n = times.shape[1]
    if x == 1:
        # Ranks are independent: rates add up, no order to simulate.
        rates = 1.0 / times.mean(axis=0)
        interval_s = max(float(1.0 / rates.sum()), gap_s)
        stale, weight = np.maximum(rates.sum() / rates - 1.0, 0.0), rates / rates.sum()
        scatter = 0.02
    elif plan.rule == "backup":
        updates = max(12, _ARRIVALS * n // x) if n <= _MANY else 6
        interval_s, scatter = _backup(times, x, updates, gap_s)
        stale, weight = np.zeros(1), np.ones(1)
    elif plan.rule == "grace":
        return _graced(times, x, gap_s)
    else:
        updates = max(12, _ARRIVALS * n // x) if n <= _MANY else max(8, 6 * n // x)
        interval_s, all_stale, scatter = _order(times, x, updates, gap_s)
        counts = np.bincount(all_stale)
        stale = np.flatnonzero(counts).astype(np.float64)
        weight = counts[counts > 0] / len(all_stale)
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
    """Updates of the first x gradients and of those that follow within the grace; ranks begin each update together.

    A rank that is slow all the time is in none of them, and the grace does not wait for it.
    """
    usual = _median(times)
    typical_s = float(np.sort(usual)[(len(usual) - 1) // 2])
    quorum_s = np.partition(times, x - 1, axis=1)[:, x - 1]
    limit_s = quorum_s + _GRACE * typical_s
    inside = times <= limit_s[:, None]
    expected = ~always_slow(usual, typical_s)
    close_s = np.where(inside, times, 0.0).max(axis=1)
    close_s = np.where((~inside & expected).any(axis=1), limit_s, np.maximum(close_s, quorum_s))
    steps_s = np.maximum(close_s, gap_s)
    interval_s = float(steps_s.mean())
    scatter = float(steps_s.std()) / math.sqrt(len(steps_s)) / max(interval_s, 1e-12)
    return Flow.fresh(interval_s, float(inside.sum(axis=1).mean()), scatter)


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
    typical_s = float(np.sort(usual)[(len(usual) - 1) // 2])
    slow, grace_s = always_slow(usual, typical_s), _GRACE * typical_s
    if len(usual) <= FEW:
        table, loud = times.tolist(), slow.tolist()
        found = [replay_few.partial(table, quorum, fixed_s, loud, grace_s) for quorum in quorums]
    else:
        found = _partials(times, np.asarray(quorums), fixed_s, slow, grace_s, steps)
    cases = zip(scales, found, strict=True)
    return [_mean_flow(steps, *case) for case in cases]


def _median(times: Array) -> Array:
    """Every rank's median; numpy's is slow for a thousand short columns."""
    ordered, rows = times.copy(), len(times)
    if rows > _ROWS:
        ordered.sort(axis=0)
    for turn in range(rows if rows <= _ROWS else 0):
        upper, lower = ordered[turn % 2 : rows - 1 : 2], ordered[turn % 2 + 1 :: 2]
        upper[:], lower[:] = np.minimum(upper, lower), np.maximum(upper, lower)
    return np.asarray(0.5 * (ordered[(rows - 1) // 2] + ordered[rows // 2]))


def _partials(
    times: Array,
    quorum: npt.NDArray[np.int64],
    fixed_s: float,
    slow: npt.NDArray[np.bool_],
    grace_s: float,
    steps: int,
) -> list[tuple[float, list[int]]]:
    """Total time of the steps and number of gradients of each staleness, for every quorum."""
    n = times.shape[1]
    cases, first = np.arange(len(quorum)), (quorum - 1)[:, None]
    places = sorted(set(first[:, 0].tolist()))
    turns = -(-(2 * steps + 2) // len(times))  # A rank begins at most two batches per step.
    ahead = np.tile(times, (turns, 1)).reshape(-1)
    place = np.tile(np.arange(n, 2 * n), (len(quorum), 1))  # Index of each rank's next time.
    finish_s = np.tile(times[0], (len(quorum), 1))
    batch_step = np.zeros(finish_s.shape, dtype=np.int64)
    now_s = np.zeros((len(quorum), 1))
    taken = np.zeros((len(quorum), steps + 1), dtype=np.int64)
    for step in range(steps):
        behind = batch_step < step
        join = behind & (finish_s <= now_s)
        if join.any():  # Ranks that ended a late batch while the last step was reduced begin one for this step.
            finish_s[join] = now_s[np.nonzero(join)[0], 0] + ahead[place[join]]
            place[join] += n
            batch_step[join] = step
            behind ^= join
        close_s = _close_s(finish_s, behind, now_s, places, first, slow, grace_s)
        ended = finish_s <= close_s
        fresh = ended & ~behind
        taken[:, 0] += fresh.sum(axis=1)
        # Late ranks begin a batch for this step at once; the others begin the next step together.
        late = ended & behind
        now_s = close_s + fixed_s
        following_s = now_s + ahead[place]
        if late.any():
            np.add.at(taken, (np.nonzero(late)[0], step - batch_step[late]), 1)
            following_s[late] = finish_s[late] + ahead[place[late]]
            batch_step[late] = step
        finish_s = np.where(ended, following_s, finish_s)
        place += n * ended
        batch_step[fresh] = step + 1
    return [(float(now_s[case, 0]), taken[case].tolist()) for case in cases.tolist()]


def _close_s(
    finish_s: Array,
    behind: npt.NDArray[np.bool_],
    now_s: Array,
    places: list[int],
    first: npt.NDArray[np.int64],
    slow: npt.NDArray[np.bool_],
    grace_s: float,
) -> Array:
    """When a step closes: at its quorum, or within the grace with a rank that is not known to be slow.

    Args:
        finish_s: When every rank ends its batch, shape (n_cases, n_ranks).
        behind: Whose batch is of an earlier step, same shape.
        now_s: When the step before ended, shape (n_cases, 1).
        places: All values of `first`, ascending.
        first: Place of the quorum's last rank among the arrivals, shape (n_cases, 1).
        slow: The ranks that are slow all the time.
        grace_s: Longest wait after the quorum.
    """
    arrive_s = np.where(behind, math.inf, finish_s)
    quorum_s = np.take_along_axis(np.partition(arrive_s, places, axis=1), first, axis=1)
    short = np.isinf(quorum_s)
    if short.any():
        newest_s = np.where(behind, -math.inf, finish_s).max(axis=1, keepdims=True)
        quorum_s = np.maximum(np.where(short, newest_s, quorum_s), now_s)
    awaited_s = np.where((arrive_s > quorum_s + grace_s) | slow, -math.inf, arrive_s)
    return np.asarray(np.maximum(quorum_s, awaited_s.max(axis=1, keepdims=True)))


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
