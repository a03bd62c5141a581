"""Batch sizes that make the slowest rank as fast as possible: an exact min-max program (BOA, Yang et al. 2020).

    minimize over b  max_i t_i(b_i)    with  sum b_i = B,  l_i <= b_i <= u_i, integers,  t_i(b) = alpha_i + beta_i b

For a time T rank i can have b_i(T) = clamp(floor((T - alpha_i) / beta_i), l_i, u_i) samples, so the least T whose
sizes sum to B or more is found by bisection, and the excess is removed, sample by sample, from the rank that is then
slowest. Equal to brute force on random instances; 512 ranks take milliseconds. Weight each gradient by b_i / B.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Balance", "LastStep", "balance", "divide"]

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """Batch sizes.

    Attributes:
        sizes: Samples of every rank.
        time_s: Time of the slowest rank, seconds.
    """

    sizes: tuple[int, ...]
    time_s: float


def balance(
    fixed_s: Sequence[float],
    per_sample_s: Sequence[float],
    total: int,
    *,
    least: Sequence[int] | None = None,
    most: Sequence[int] | None = None,
) -> Balance:
    """Divide `total` samples so that the slowest rank is as fast as possible.

    Args:
        fixed_s: alpha of every rank, seconds.
        per_sample_s: beta of every rank, seconds per sample, above 0.
        total: B.
        least: Fewest samples of every rank; 0 if not given.
        most: Most samples, by memory; B if not given.

    Raises:
        ValueError: Numbers out of range, of different lengths, or bounds that leave no solution.
    """
    n = len(fixed_s)
    low = np.zeros(n, dtype=np.int64) if least is None else np.asarray(least, dtype=np.int64)
    high = np.full(n, total, dtype=np.int64) if most is None else np.asarray(most, dtype=np.int64)
    alpha, beta = np.asarray(fixed_s, dtype=np.float64), np.asarray(per_sample_s, dtype=np.float64)
    _check(alpha, beta, total, low, high)
    sizes = _at_time(_least_time_s(alpha, beta, total, low, high), alpha, beta, low, high)
    surplus = int(sizes.sum()) - total
    heap = [(-(alpha[i] + beta[i] * sizes[i]), i) for i in range(n) if sizes[i] > low[i]]
    heapq.heapify(heap)
    for _ in range(surplus):
        _, i = heapq.heappop(heap)
        sizes[i] -= 1
        if sizes[i] > low[i]:
            heapq.heappush(heap, (-(alpha[i] + beta[i] * sizes[i]), i))
    return Balance(sizes=tuple(sizes.tolist()), time_s=_time_s(sizes, alpha, beta))


@dataclass(frozen=True, slots=True)
class LastStep:
    """How the last step of an epoch, which has fewer samples than the others, is divided; equal on all ranks.

    Attributes:
        whole: It is left out, since short batches are to be dropped: some ranks would make a step more than others.
            Else it is divided in the proportion of the shares.
        least: In the proportion of the shares: fewest samples of a rank that has a part.
    """

    whole: bool = False
    least: int = 1

    def parts(self, total: int, shares: Sequence[int]) -> tuple[int, ...]:
        """Return every rank's part of `total` samples."""
        return (0,) * len(shares) if self.whole else divide(total, shares, self.least)


def _largest_first(shares: Sequence[int]) -> list[int]:
    return sorted(range(len(shares)), key=lambda rank: (-shares[rank], rank))


def divide(total: int, shares: Sequence[int], least: int = 1) -> tuple[int, ...]:
    """Divide `total` samples in the proportion of `shares`, by largest remainders.

    Every rank gets at least `least`. If there are too few samples for that, only ranks with the largest shares get any:
    as many ranks as can have `least`, or more of them where these would have to take more than their shares.

    Used for the last step of an epoch; the result is equal on all ranks.

    Raises:
        ValueError: The total is negative, or the shares are not usable.
    """
    whole = sum(shares)
    if total < 0 or whole < 1 or min(shares) < 0:
        raise ValueError(f"divide got {total} samples and shares {list(shares)}; expected 0 or more, and some above 0")
    if total < least * len(shares):
        order = _largest_first(shares)
        held = list(itertools.accumulate(shares[rank] for rank in order))
        count = max(total // least, bisect.bisect_left(held, min(total, whole)) + 1)
        first = order[: min(count, total)]
        if len(first) < len(shares):
            some = divide(total, [shares[rank] for rank in first], least) if first else ()
            return tuple(dict(zip(first, some, strict=True)).get(rank, 0) for rank in range(len(shares)))
        least = 1
    exact = [total * share / whole for share in shares]
    parts = [max(least, int(value)) for value in exact]
    order = sorted(range(len(shares)), key=lambda rank: (parts[rank] - exact[rank], rank))
    for rank in order[: max(0, total - sum(parts))]:
        parts[rank] += 1
    while sum(parts) > total:  # Only if many ranks had less than `least`.
        parts[parts.index(max(parts))] -= 1
    return tuple(parts)


def _least_time_s(
    alpha: Array, beta: Array, total: int, low: npt.NDArray[np.int64], high: npt.NDArray[np.int64]
) -> float:
    """A time just large enough for `total` samples."""
    begin, end = 0.0, float((alpha + beta * high).max())
    for _ in range(200):
        middle = 0.5 * (begin + end)
        if middle <= begin or middle >= end:
            break
        if int(_at_time(middle, alpha, beta, low, high).sum()) >= total:
            end = middle
        else:
            begin = middle
    return end


def _at_time(
    time_s: float, alpha: Array, beta: Array, low: npt.NDArray[np.int64], high: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    # Accept a whole number that rounding left just below itself.
    fit = np.floor((time_s - alpha) / beta * (1.0 + 1e-12) + 1e-9)
    return np.clip(fit, low, high).astype(np.int64)


def _time_s(sizes: npt.NDArray[np.int64], alpha: Array, beta: Array) -> float:
    """Time of the slowest rank; a rank without samples takes none."""
    return float(np.where(sizes > 0, alpha + beta * sizes, 0.0).max(initial=0.0))


def _check(
    alpha: Array, beta: Array, total: int, low: npt.NDArray[np.int64], high: npt.NDArray[np.int64]
) -> None:
    lengths = {len(alpha), len(beta), len(low), len(high)}
    if len(lengths) != 1 or not len(alpha):
        raise ValueError(f"balance got lists of lengths {sorted(lengths)}; expected one entry for every rank")
    if not (np.isfinite(alpha).all() and np.isfinite(beta).all() and (alpha >= 0.0).all() and (beta > 0.0).all()):
        raise ValueError("balance got times that are no times; expected fixed_s >= 0 and per_sample_s > 0, finite")
    if total < 1 or (low < 0).any() or (low > high).any() or not int(low.sum()) <= total <= int(high.sum()):
        raise ValueError(
            f"balance cannot divide {total} samples: the ranks take {int(low.sum())} to {int(high.sum())}; "
            "expected bounds around the total"
        )
