"""The walk over all pairs of modes, and what counts as the price of a switch."""

from __future__ import annotations

from itertools import pairwise

import pytest

from benchmarks.switches import holdups, walk


@pytest.mark.parametrize("count", [2, 3, 7])
def test_every_ordered_pair_occurs_once_after_all_modes_were_visited(count: int) -> None:
    modes = [f"mode{i}" for i in range(count)]
    path = walk(modes)
    assert path[:count] == modes
    pairs = list(pairwise(path[count:]))
    assert len(pairs) == len(set(pairs)) == count * (count - 1)


@pytest.mark.parametrize("modes", [["sync"], ["sync", "sync"]])
def test_a_walk_needs_different_modes(modes: list[str]) -> None:
    with pytest.raises(ValueError, match="at least two"):
        walk(modes)


def test_only_what_goes_beyond_usual_steps_counts() -> None:
    steps = [("sync", 0.1)] * 30 + [("ps(1)", 0.35)] + [("ps(1)", 0.1)] * 30 + [("sync", 0.1)] * 30
    found = holdups(steps, 0)
    assert found[("sync", "ps(1)")] == pytest.approx([2.5])
    assert found[("ps(1)", "sync")] == pytest.approx([0.0])
    assert set(holdups(steps, 1)) == {("ps(1)", "sync")}, "the first switch made the mode ready"
