"""Batch sizes against brute force."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.balance.batch_shares import balance
from tests.support.effort import cases


def brute_force_s(fixed: list[float], per_sample: list[float], total: int, low: list[int], high: list[int]) -> float:
    best = math.inf
    spans = [range(a, b + 1) for a, b in zip(low, high, strict=True)]
    for sizes in itertools.product(*spans):
        if sum(sizes) == total:
            times = [a + b * size for a, b, size in zip(fixed, per_sample, sizes, strict=True) if size]
            best = min(best, max(times))
    return best


@settings(max_examples=cases(400), deadline=None)
@given(data=st.data(), n=st.integers(1, 4), total=st.integers(1, 12))
def test_equals_brute_force(data: st.DataObject, n: int, total: int) -> None:
    fixed = [data.draw(st.sampled_from((0.0, 0.1, 1.0, 3.0))) for _ in range(n)]
    per_sample = [data.draw(st.floats(0.01, 5.0)) for _ in range(n)]
    low = [data.draw(st.integers(0, total // n)) for _ in range(n)]
    high = [data.draw(st.integers(max(1, -(-total // n)), total)) for _ in range(n)]
    found = balance(fixed, per_sample, total, least=low, most=high)
    assert sum(found.sizes) == total
    assert all(a <= size <= b for a, size, b in zip(low, found.sizes, high, strict=True))
    own = [a + b * size for a, b, size in zip(fixed, per_sample, found.sizes, strict=True) if size]
    assert found.time_s == pytest.approx(max(own))
    assert found.time_s == pytest.approx(brute_force_s(fixed, per_sample, total, low, high))


def test_one_of_four_at_half_speed_gets_half_a_share() -> None:
    found = balance([0.0] * 4, [0.01, 0.01, 0.01, 0.02], 112)
    assert found.sizes == (32, 32, 32, 16)
    assert found.time_s == pytest.approx(0.32)


def test_many_ranks_are_divided_exactly() -> None:
    n = 512
    found = balance([0.01] * n, [0.001 * (1 + rank % 7) for rank in range(n)], 64 * n, least=[1] * n)
    assert sum(found.sizes) == 64 * n
    slowest = max(0.01 + 0.001 * (1 + rank % 7) * size for rank, size in enumerate(found.sizes))
    # No rank could take one more sample in that time: the least time there is.
    spare = sum(0.01 + 0.001 * (1 + rank % 7) * (size + 1) < slowest for rank, size in enumerate(found.sizes))
    assert spare == 0 or found.time_s == pytest.approx(slowest)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0.0], [1.0, 1.0], 2), "lengths"),
        (([0.0, 0.0], [1.0, 0.0], 2), "times"),
        (([0.0, math.nan], [1.0, 1.0], 2), "times"),
        (([0.0, 0.0], [1.0, 1.0], 0), "divide 0 samples"),
    ],
)
def test_bad_input(arguments: tuple[list[float], list[float], int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        balance(*arguments)


def test_bounds_without_a_solution() -> None:
    with pytest.raises(ValueError, match="take 0 to 4"):
        balance([0.0, 0.0], [1.0, 1.0], 8, most=[2, 2])
