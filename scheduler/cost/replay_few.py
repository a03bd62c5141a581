"""The replays of `scheduler.cost.replay` for few ranks, as loops: faster than operations on arrays of eight."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["Array", "Counts", "Flags", "backup", "order", "partials"]

Array = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


def order(times: Array, x: int, updates: int, gap_s: float) -> tuple[Array, Counts]:
    """Updates of any x arrivals.

    Args:
        times: Times of all ranks, which repeat, shape (n_rows, n_ranks), seconds.
        x: Arrivals that make an update.
        updates: Updates to replay.
        gap_s: Least time between two updates.

    Returns:
        The end of every update, and the staleness of its gradients, shape (updates, x).
    """
    n, now_s, rows = times.shape[1], 0.0, times.tolist()
    finish_s, base, count = list(rows[0]), [0] * n, [1] * n
    ends, stale, ranks = [], [], range(n)
    for update in range(updates):
        chosen = sorted(ranks, key=finish_s.__getitem__)[:x]
        now_s = max(finish_s[chosen[-1]], now_s + gap_s)
        stale.append([update - base[rank] for rank in chosen])
        for rank in chosen:
            finish_s[rank] = now_s + rows[count[rank] % len(rows)][rank]
            count[rank] += 1
            base[rank] = update + 1
        ends.append(now_s)
    return np.array(ends), np.array(stale)


def backup(times: Array, x: int, updates: int, gap_s: float) -> Array:
    """Ends of updates of the first x fresh gradients.

    Later gradients are dropped on arrival; their ranks start again with the parameters of that time. Arguments as in
    `order`.
    """
    n, now_s, rows = times.shape[1], 0.0, times.tolist()
    finish_s, base, count = list(rows[0]), [0] * n, [1] * n
    ends, ranks = [], range(n)
    for update in range(updates):
        while True:
            arrivals = sorted(finish_s[rank] for rank in ranks if base[rank] == update)
            following_s = arrivals[x - 1] if len(arrivals) >= x else math.inf
            dropped = [rank for rank in ranks if base[rank] != update and finish_s[rank] <= following_s]
            if not dropped:
                break
            for rank in dropped:
                finish_s[rank] = max(finish_s[rank], now_s) + rows[count[rank] % len(rows)][rank]
                count[rank] += 1
                base[rank] = update
        chosen = [rank for rank in ranks if base[rank] == update and finish_s[rank] <= following_s][:x]
        now_s = max(following_s, now_s + gap_s)
        for rank in chosen:
            finish_s[rank] = now_s + rows[count[rank] % len(rows)][rank]
            count[rank] += 1
            base[rank] = update + 1
        ends.append(now_s)
    return np.array(ends)


def partials(
    times: Array, quorums: Sequence[int], fixed_s: float, slow: Flags, grace_s: float, steps: int
) -> list[tuple[float, list[int]]]:
    """Steps that wait for a quorum and a grace.

    Args:
        times: Times of all ranks, which repeat, shape (n_rows, n_ranks), seconds.
        quorums: Fresh gradients that a step waits for, for every case.
        fixed_s: Time of a step besides compute.
        slow: Ranks that the grace does not wait for.
        grace_s: Longest wait for the others after the quorum.
        steps: Steps to replay.

    Returns:
        For every case the total time of the steps, and the number of gradients of each staleness in them.
    """
    rows, always = times.tolist(), slow.tolist()
    return [_partial(rows, quorum, fixed_s, always, grace_s, steps) for quorum in quorums]


def _partial(
    rows: list[list[float]], quorum: int, fixed_s: float, slow: list[bool], grace_s: float, steps: int
) -> tuple[float, list[int]]:
    n, depth = len(rows[0]), len(rows)
    finish_s, batch_step, count = list(rows[0]), [0] * n, [1] * n
    taken, now_s, ranks = [0] * (steps + 1), 0.0, range(n)
    for step in range(steps):
        fresh = []
        for rank in ranks:
            if batch_step[rank] < step:
                if finish_s[rank] > now_s:
                    continue
                # It ended a late batch while the last step was reduced and begins one for this step.
                finish_s[rank] = now_s + rows[count[rank] % depth][rank]
                count[rank] += 1
                batch_step[rank] = step
            fresh.append(finish_s[rank])
        fresh.sort()
        close_s = fresh[quorum - 1] if len(fresh) >= quorum else max(fresh[-1] if fresh else now_s, now_s)
        limit_s = close_s + grace_s
        for rank in ranks:
            if close_s < finish_s[rank] <= limit_s and not slow[rank] and batch_step[rank] >= step:
                close_s = finish_s[rank]
        now_s = close_s + fixed_s
        for rank in ranks:
            if finish_s[rank] > close_s:
                continue
            following_s = rows[count[rank] % depth][rank]
            count[rank] += 1
            if batch_step[rank] >= step:  # Fresh ranks begin the next step together, late ones this one at once.
                taken[0] += 1
                finish_s[rank] = now_s + following_s
                batch_step[rank] = step + 1
            else:
                taken[step - batch_step[rank]] += 1
                finish_s[rank] += following_s
                batch_step[rank] = step
    return now_s, taken
