"""Grouping of ranks: groups by speed, groups of similar times.

Groups that wait for their own members only (grouped mode, Basu et al., HiPC 2018; dynamic x-order of STAR) deliver
sum_k |S_k| / max_{i in S_k} t_i gradients per second: a slow rank delays only its own group. With one rank of eight
four times slow, run time relative to the undisturbed one is 4.00 in one group, 1.60 and 1.23 in two and four groups
formed without regard to speed, 1.10 in eight, and 1.10 already in two formed by speed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from scheduler.stats import lower_median

__all__ = [
    "expected_staleness",
    "progressive_groups",
    "run_time_ratio",
    "similar_groups",
    "speed_groups",
    "throughput",
]

Groups = tuple[tuple[int, ...], ...]

SIMILAR = 0.15
"""Difference, as a fraction of the median time, up to which ranks count as equally fast. STAR's 50 ms are 1.6 % of a
densenet iteration and 45 % of an alexnet one; uncontended compute times vary by 2 to 14 %."""

_TARGET = 1.2
"""Run time relative to the undisturbed one at which no further group is needed: the paper's result."""

_MAX_STALENESS = 16.0
"""Largest expected staleness of a group, in updates; the default bound of a plan."""

_CEILING_SHARE = 0.95
"""Fraction of the attainable throughput at which no further group is needed; one would only add staleness."""


def throughput(times_s: Sequence[float], groups: Iterable[Sequence[int]]) -> float:
    """Gradients per second of groups that each wait for their slowest member.

    Args:
        times_s: Step time of every rank, seconds.
        groups: The groups, with ranks of 0..n-1.

    Raises:
        ValueError: A time is not positive and finite, a group is empty, or a rank does not exist.
    """
    _check_times(times_s)
    total = 0.0
    for group in groups:
        if not group or not all(0 <= rank < len(times_s) for rank in group):
            raise ValueError(f"a group is {list(group)}; expected ranks of 0..{len(times_s) - 1}")
        total += len(group) / max(times_s[rank] for rank in group)
    return total


def run_time_ratio(times_s: Sequence[float], groups: Iterable[Sequence[int]]) -> float:
    """Run time relative to that of an undisturbed job with the same number of gradients; 1.0 is undisturbed.

    Args:
        times_s: Step time of every rank, seconds; an undisturbed rank is taken to need their lower median.
        groups: The groups.
    """
    return len(times_s) / lower_median(times_s) / throughput(times_s, groups)


def expected_staleness(times_s: Sequence[float], groups: Sequence[Sequence[int]]) -> tuple[float, ...]:
    """Updates of other groups during one step of each group: sum of the other rates over its own.

    G - 1 if all are equally fast; largest for a group of a straggler only.
    """
    rates = [throughput(times_s, [group]) / len(group) for group in groups]
    return tuple((sum(rates) - rate) / rate for rate in rates)


def speed_groups(times_s: Sequence[float], count: int) -> Groups:
    """The `count` groups of highest throughput, exactly, in O(count n^2).

    With ranks sorted by time the best groups are contiguous, because a group pays for its slowest member only:
    best(j, g) = max_i best(i, g - 1) + (j - i) / t_j.

    Returns:
        Groups ordered by their lowest rank, each ascending, so that equal partitions compare equal.

    Raises:
        ValueError: A time is not positive and finite, or the count is outside 1..n.
    """
    _check_times(times_s)
    _check_count(count, len(times_s))
    return next(islice(_speed_groups(times_s), count - 1, None))


def _speed_groups(times_s: Sequence[float]) -> Iterator[Groups]:
    """Yield the best groups for every count from 1 to n; each adds a row to the table."""
    n = len(times_s)
    order = sorted(range(n), key=lambda rank: (times_s[rank], rank))
    times = np.asarray([times_s[rank] for rank in order])
    before = np.full(n + 1, -np.inf)
    before[0] = 0.0
    starts: list[npt.NDArray[np.int64]] = []
    for g in range(1, n + 1):
        best = np.full(n + 1, -np.inf)
        start = np.zeros(n + 1, dtype=np.int64)
        for j in range(g, n + 1):
            values = before[:j] + (j - np.arange(j)) / times[j - 1]
            # The first of equal values: the last (slowest) group takes as many ranks as cost it nothing.
            start[j] = int(np.argmax(values))
            best[j] = values[start[j]]
        before = best
        starts.append(start)
        yield _cut(order, starts)


def _cut(order: Sequence[int], starts: Sequence[npt.NDArray[np.int64]]) -> Groups:
    """Backtrack from the last group's start to the first rank."""
    groups, end = [], len(order)
    for start in reversed(starts):
        begin = int(start[end])
        groups.append(tuple(sorted(order[begin:end])))
        end = begin
    return tuple(sorted(groups))


def progressive_groups(times_s: Sequence[float]) -> Groups:
    """Form as few groups by speed as needed: progressive grouping of HiPC 2018, decided from the times.

    The number of groups grows while the run time exceeds `_TARGET` times the undisturbed one, more than the last few
    percent of the attainable throughput are missing, and no group's expected staleness exceeds `_MAX_STALENESS`.

    Args:
        times_s: Step time of every rank, seconds.

    Raises:
        ValueError: A time is not a positive number.
    """
    _check_times(times_s)
    ceiling = sum(1.0 / time_s for time_s in times_s)
    candidates: list[tuple[float, Groups]] = []
    for groups in _speed_groups(times_s):
        if candidates and max(expected_staleness(times_s, groups)) > _MAX_STALENESS:
            break
        rate = throughput(times_s, groups)
        candidates.append((rate, groups))
        if run_time_ratio(times_s, groups) <= _TARGET or rate >= _CEILING_SHARE * ceiling:
            break
    # If staleness stopped the growth, the best allowed throughput is the reference.
    enough = _CEILING_SHARE * candidates[-1][0]
    return next(groups for rate, groups in candidates if rate >= enough)


def similar_groups(times_s: Sequence[float], relative_threshold: float = SIMILAR) -> Groups:
    """Form groups of similar times, in any number: the dynamic x-order of STAR with a relative threshold.

    Agglomerative with Ward's distance |difference of means| * sqrt(2 n1 n2 / (n1 + n2)): the closest two groups are
    merged while they are closer than `relative_threshold` times the median. One group is SSGD, n groups are ASGD.

    Returns:
        Groups ordered by their lowest rank, each ascending.

    Raises:
        ValueError: A time is not positive and finite, or the threshold is negative.
    """
    _check_times(times_s)
    if not relative_threshold >= 0.0:
        raise ValueError(f"relative_threshold is {relative_threshold}; expected 0 or more")
    limit_s = relative_threshold * lower_median(times_s)
    order = sorted(range(len(times_s)), key=lambda rank: (times_s[rank], rank))
    groups = [[rank] for rank in order]
    mean_s = np.asarray([times_s[rank] for rank in order])
    size = np.ones(len(order))
    # In one dimension the closest two groups by Ward's distance are always adjacent.
    while len(groups) > 1:
        distances = np.diff(mean_s) * np.sqrt(2.0 * size[:-1] * size[1:] / (size[:-1] + size[1:]))
        index = int(np.argmin(distances))
        # Exactly equal times are one group at any threshold.
        if not (distances[index] < limit_s or distances[index] == 0.0):
            break
        groups[index : index + 2] = [groups[index] + groups[index + 1]]
        mean_s[index] = math.fsum(times_s[rank] for rank in groups[index]) / len(groups[index])
        size[index] += size[index + 1]
        mean_s, size = np.delete(mean_s, index + 1), np.delete(size, index + 1)
    return tuple(sorted(tuple(sorted(group)) for group in groups))


def _check_times(times_s: Sequence[float]) -> None:
    if not times_s or not all(0.0 < time_s < math.inf for time_s in times_s):
        raise ValueError(f"times are {list(times_s)}; expected positive seconds, one for each rank")


def _check_count(count: int, most: int) -> None:
    if not 1 <= count <= most:
        raise ValueError(f"the number of groups is {count}; expected 1..{most}")
