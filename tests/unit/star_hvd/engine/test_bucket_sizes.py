"""Sizes of buckets: every parameter in one, the first small, none above a quarter or the user's limit."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from star_hvd.engine.bucket_sizes import limits_of, partition

LIMITS = st.lists(st.integers(1, 150), min_size=1, max_size=4)


@given(st.lists(st.integers(0, 100), max_size=60), LIMITS)
def test_every_index_exactly_once(sizes: list[int], limits: list[int]) -> None:
    runs = partition(sizes, limits)
    assert [i for run in runs for i in run] == list(range(len(sizes)))
    of_run = [*limits, *[limits[-1]] * len(runs)][: len(runs)]
    for run, limit in zip(runs, of_run, strict=True):
        assert run and (len(run) == 1 or sum(sizes[i] for i in run) <= limit)
    for (before, after), limit in zip(pairwise(runs), of_run, strict=False):
        assert sum(sizes[i] for i in before) + sizes[after[0]] > limit, "a bucket was begun too early"


def test_the_sizes_that_torchft_loses() -> None:
    assert partition([6, 6], [10]) == [[0], [1]]
    assert partition([6, 6, 6], [10]) == [[0], [1], [2]]
    assert partition([20, 1, 1], [10]) == [[0], [1, 2]]
    assert partition([], [10]) == []


def test_each_run_has_its_own_limit() -> None:
    assert partition([1] * 8, [1, 2, 3]) == [[0], [1, 2], [3, 4, 5], [6, 7]]


@pytest.mark.parametrize("limits", [[], [0], [1, -1]])
def test_a_limit_that_is_not_positive(limits: list[int]) -> None:
    with pytest.raises(ValueError, match="expected at least 1"):
        partition([1], limits)


@pytest.mark.parametrize(
    "size, plain, overlapped",
    [
        (0, [1], 1),
        (1000, [250], 250),
        (10**6, [65_536, 131_072, 250_000], 65_536),
        (2 * 10**6, [125_000, 250_000, 500_000], 125_000),
        (10**7, [625_000, 1_250_000, 2_500_000], 625_000),
    ],
)
def test_bytes_of_a_bucket(size: int, plain: list[int], overlapped: int) -> None:
    assert limits_of(size, 1 << 25, by_bucket=False) == plain
    assert limits_of(size, 1 << 25, by_bucket=True) == [overlapped]


@given(st.integers(0, 1 << 40), st.integers(1024, 1 << 30), st.booleans())
def test_limits_grow_and_stay_within_what_the_user_allows(size: int, most: int, by_bucket: bool) -> None:
    limits = limits_of(size, most, by_bucket=by_bucket)
    assert limits[0] >= 1 and max(limits) <= min(most, max(1, -(-size // 4)))
    assert all(before <= after <= 2 * before for before, after in pairwise(limits))
