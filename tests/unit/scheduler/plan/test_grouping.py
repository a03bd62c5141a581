"""Groups by speed and by similarity, against printed figures and against slower, plainer ways to find them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from scheduler.plan.grouping import (
    expected_staleness,
    progressive_groups,
    run_time_ratio,
    similar_groups,
    speed_groups,
    throughput,
)
from scheduler.plan.plan import Plan
from tests.support.effort import cases

ONE_SLOW = [1.0] * 7 + [4.0]
MIXED = [1.0, 1.1, 1.2, 1.3, 2.0, 2.2, 4.0, 4.5]
times = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=7)


def equal_groups(n: int, count: int) -> list[tuple[int, ...]]:
    size = n // count
    return [tuple(range(g * size, (g + 1) * size)) for g in range(count)]


def partitions(items: list[int], count: int) -> Iterator[list[list[int]]]:
    """Every way to put the items into `count` groups."""
    for labels in itertools.product(range(count), repeat=len(items)):
        if len(set(labels)) == count:
            yield [[i for i, label in zip(items, labels, strict=True) if label == g] for g in range(count)]


@pytest.mark.parametrize(("count", "printed"), [(1, "4.00"), (2, "1.60"), (4, "1.23"), (8, "1.10")])
def test_run_time_of_groups_without_regard_to_speed(count: int, printed: str) -> None:
    assert f"{run_time_ratio(ONE_SLOW, equal_groups(8, count)):.2f}" == printed


def test_two_groups_by_speed_do_what_takes_eight_otherwise() -> None:
    groups = speed_groups(ONE_SLOW, 2)
    assert groups == ((0, 1, 2, 3, 4, 5, 6), (7,))
    assert f"{run_time_ratio(ONE_SLOW, groups):.2f}" == "1.10"
    assert expected_staleness(ONE_SLOW, groups) == pytest.approx((0.25, 4.0))


@pytest.mark.parametrize(("count", "printed"), [(1, "1.778"), (2, "3.966"), (3, "4.430"), (4, "4.710"), (8, "4.938")])
def test_throughput_of_the_best_groups(count: int, printed: str) -> None:
    assert f"{throughput(MIXED, speed_groups(MIXED, count)):.3f}" == printed


@settings(max_examples=cases(60), deadline=None)
@given(values=times, data=st.data())
def test_no_partition_is_faster(values: list[float], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, min(4, len(values))))
    groups = speed_groups(values, count)
    assert sorted(rank for group in groups for rank in group) == list(range(len(values)))
    assert len(groups) == count and groups == tuple(sorted(groups))
    best = max(throughput(values, found) for found in partitions(list(range(len(values))), count))
    assert throughput(values, groups) == pytest.approx(best)
    Plan.grouped(len(values), groups)  # a plan takes them


def test_many_ranks() -> None:
    rng = np.random.default_rng(0)
    values = rng.uniform(1.0, 1.1, 512)
    values[:8] *= 5.0
    groups = speed_groups(values.tolist(), 2)
    assert groups[0] == tuple(range(8)) or groups[1] == tuple(range(8))


def test_progressive_groups_are_as_few_as_needed() -> None:
    assert progressive_groups([1.0, 1.05, 1.1, 1.15]) == ((0, 1, 2, 3),)
    assert progressive_groups(ONE_SLOW) == ((0, 1, 2, 3, 4, 5, 6), (7,))
    # Half of the ranks slow: 1.2 is out of reach, and a third group would add nothing.
    assert progressive_groups([1.0, 1.0, 4.0, 4.0]) == ((0, 1), (2, 3))
    assert len(progressive_groups(MIXED)) == 4  # within 5 % of the ceiling; target 1.2 is out of reach


def test_progressive_groups_respect_the_staleness_allowed() -> None:
    assert progressive_groups([1.0] * 7 + [16.0]) == ((0, 1, 2, 3, 4, 5, 6), (7,))
    assert progressive_groups([1.0] * 7 + [16.1]) == ((0, 1, 2, 3, 4, 5, 6, 7),)
    for factor in (2.0, 4.0, 8.0, 16.0):
        values = [time_s**factor for time_s in MIXED]
        groups = progressive_groups(values)
        assert len(groups) == 1 or max(expected_staleness(values, groups)) <= 16.0


def test_equal_groups_are_g_minus_one_stale() -> None:
    assert expected_staleness([2.0] * 6, equal_groups(6, 3)) == pytest.approx((2.0, 2.0, 2.0))


def test_similar_groups_at_any_scale() -> None:
    values = [1.0, 1.05, 2.0, 1.02, 2.1, 6.0]
    for scale in (1e-3, 1.0, 3.0):
        assert similar_groups([scale * value for value in values]) == ((0, 1, 3), (2, 4), (5,))
    assert similar_groups([1.0] * 4) == ((0, 1, 2, 3),)
    assert similar_groups([1.0] * 4, 0.0) == ((0, 1, 2, 3),)
    assert similar_groups([1.0, 2.0, 3.0], 0.1) == ((0,), (1,), (2,))
    assert similar_groups([1.0, 2.0, 3.0], 9.0) == ((0, 1, 2),)


@settings(max_examples=cases(150), deadline=None)
@given(values=st.lists(st.integers(10, 1000), min_size=2, max_size=8, unique=True), threshold=st.floats(0.01, 3.0))
def test_similar_groups_are_those_of_ward_linkage(values: list[int], threshold: float) -> None:
    hierarchy = pytest.importorskip("scipy.cluster.hierarchy")
    linkage = hierarchy.ward(np.asarray(values, dtype=float)[:, None])
    limit = threshold * sorted(values)[(len(values) - 1) // 2]
    merged = linkage[:, 2]
    # Ties may be resolved either way.
    assume(len(set(np.diff(sorted(values)))) == len(values) - 1 and np.all(np.diff(merged) > 1e-6))
    assume(not np.any(np.isclose(merged, limit)))
    labels = hierarchy.fcluster(linkage, limit, criterion="distance")
    expected = {tuple(np.flatnonzero(labels == label).tolist()) for label in set(labels)}
    assert set(similar_groups([float(value) for value in values], threshold)) == expected


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected positive seconds"):
        throughput([1.0, 0.0], [[0]])
    with pytest.raises(ValueError, match=r"expected ranks of 0\.\.1"):
        throughput([1.0, 1.0], [[0, 2]])
    with pytest.raises(ValueError, match=r"groups is 3; expected 1\.\.2"):
        speed_groups([1.0, 1.0], 3)
    with pytest.raises(ValueError, match="relative_threshold is -1"):
        similar_groups([1.0], -1.0)
