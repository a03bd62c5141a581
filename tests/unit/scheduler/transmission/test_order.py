"""The order of buckets in overlapped steps, by a replay of layers and of a link that reduces one bucket at a time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from scheduler.transmission.order import order_of

LINK_S = 0.6
EXTRA_S = 0.002  # Of every reduction.


def step_s(order: Sequence[int], compute_s: float) -> float:
    """A step of equal layers, a third of it forward, each of which waits for its own bucket."""
    n, now_s, free_s, applied_s = len(order), 0.0, 0.0, [0.0] * len(order)
    ends_s = []
    for _ in range(6):
        for bucket in reversed(range(n)):  # The first layer's bucket is filled last.
            now_s = max(now_s, applied_s[bucket]) + compute_s / 3.0 / n
        filled_s = [now_s + (bucket + 1) * compute_s * 2.0 / 3.0 / n for bucket in range(n)]
        now_s = filled_s[-1]
        ends_s.append(now_s)
        for bucket in order:
            free_s = max(free_s, filled_s[bucket]) + LINK_S / n + EXTRA_S
            applied_s[bucket] = free_s
    return ends_s[-1] - ends_s[-2]


def every_second(buckets: int) -> list[int]:
    during = range(0, buckets - 1, 2)
    return [*during, *(index for index in reversed(range(buckets)) if index not in during)]


@pytest.mark.parametrize("buckets", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("part", [0.2, 0.5, 0.8, 1.0, 1.3])
def test_no_step_is_longer_than_with_every_second_bucket_during_backward(buckets: int, part: float) -> None:
    ours, halves = (step_s(order, part * LINK_S) for order in (order_of(buckets), every_second(buckets)))
    assert ours <= 1.002 * halves
    in_turn, as_needed = (step_s(order, part * LINK_S) for order in (range(buckets), range(buckets)[::-1]))
    assert ours <= 1.002 * min(in_turn, as_needed) or buckets < 8 or part > 1.0


def test_a_link_that_is_hardly_slower_than_compute_is_kept_busy() -> None:
    for part, most in ((0.9, 0.97), (1.0, 0.95), (1.2, 0.97)):
        assert step_s(order_of(16), part * LINK_S) < most * step_s(every_second(16), part * LINK_S)
