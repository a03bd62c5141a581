"""Ranges of an epoch in order, each once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.rules.work_queue import WorkQueue


def _all(queue: WorkQueue) -> list[tuple[int, int]]:
    return list(iter(queue.take, None))


def test_ranges_in_order_and_a_short_last_one() -> None:
    queue = WorkQueue(10, 4)
    assert _all(queue) == [(0, 4), (4, 8), (8, 10)]
    assert queue.take() is None


def test_drop_last_leaves_the_short_range_out() -> None:
    assert _all(WorkQueue(10, 4, drop_last=True)) == [(0, 4), (4, 8)]
    assert _all(WorkQueue(3, 4, drop_last=True)) == []


def test_an_empty_epoch_has_no_range() -> None:
    assert WorkQueue(0, 1).take() is None


@given(st.integers(0, 200), st.integers(1, 9), st.booleans())
def test_every_position_once(samples: int, batch: int, drop_last: bool) -> None:
    ranges = _all(WorkQueue(samples, batch, drop_last=drop_last))
    found = [position for start, stop in ranges for position in range(start, stop)]
    assert found == list(range(samples - samples % batch if drop_last else samples))


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="batch_size is 0; expected at least 1"):
        WorkQueue(1, 0)
    with pytest.raises(ValueError, match="n_samples is -1; expected at least 0"):
        WorkQueue(-1, 1)
