"""The replays of `scheduler.cost.replay` for many ranks, as operations on arrays. Arguments as in `replay_few.py`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from scheduler.cost.replay_few import Array, Counts, Flags

__all__ = ["backup", "order", "partials"]


def order(times: Array, x: int, updates: int, gap_s: float) -> tuple[Array, Counts]:
    """Updates of any x arrivals."""
    n = times.shape[1]
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
    return ends, stale


def backup(times: Array, x: int, updates: int, gap_s: float) -> Array:
    """Ends of updates of the first x fresh gradients; later ones are dropped."""
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
    return ends


def partials(
    times: Array, quorums: Sequence[int], fixed_s: float, slow: Flags, grace_s: float, steps: int
) -> list[tuple[float, list[int]]]:
    """Steps that wait for a quorum and a grace, as in `replay_few.partials`."""
    n, first = times.shape[1], np.asarray(quorums)[:, None] - 1
    places = sorted(set(first[:, 0].tolist()))
    turns = -(-(2 * steps + 2) // len(times))  # A rank begins at most two batches per step.
    ahead = np.tile(times, (turns, 1)).reshape(-1)
    place = np.tile(np.arange(n, 2 * n), (len(quorums), 1))  # Index of each rank's next time.
    finish_s = np.tile(times[0], (len(quorums), 1))
    batch_step = np.zeros(finish_s.shape, dtype=np.int64)
    now_s = np.zeros((len(quorums), 1))
    taken = np.zeros((len(quorums), steps + 1), dtype=np.int64)
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
    return [(float(now_s[case, 0]), taken[case].tolist()) for case in range(len(quorums))]


def _close_s(
    finish_s: Array, behind: Flags, now_s: Array, places: list[int], first: Counts, slow: Flags, grace_s: float
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
