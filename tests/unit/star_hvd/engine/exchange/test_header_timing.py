"""Whose header may leave within backward."""

from __future__ import annotations

import pytest

from scheduler.records import Plan
from star_hvd.engine.exchange.header_timing import HeaderTiming

SYNC = Plan.sync(2)


@pytest.mark.parametrize("mixed", [False, True])
def test_a_program_that_sets_hyperparameters_behind_backward_sends_no_header_before(mixed: bool) -> None:
    """Else a step that is applied with the leader's row would take those of the step before."""
    timing, learning_rate = HeaderTiming(0, lambda: 0.0), [0.1]
    for _ in range(5):
        assert timing.may_be_early(SYNC, mixed=mixed)
        timing.left_early(lambda: list(learning_rate), mixed=mixed)
        timing.arrived(lambda: list(learning_rate))
        learning_rate[0] /= 2  # Between two steps.
    timing = HeaderTiming(0, lambda: 0.0)
    timing.left_early(lambda: [0.1], mixed=mixed)
    timing.arrived(lambda: [0.0])
    assert not timing.may_be_early(SYNC, mixed=mixed)
    timing.restart()
    assert not timing.may_be_early(SYNC, mixed=mixed), "the program is the same in every mode"


def test_where_every_rank_uses_its_own_the_hyperparameters_are_read_in_the_first_steps_only() -> None:
    timing, read = HeaderTiming(0, lambda: 0.0), list[int]()

    def row() -> list[float]:
        read.append(1)
        return [0.1]

    for mixed, steps in ((False, 10), (True, 4)):
        for _ in range(steps):
            timing.left_early(row, mixed=mixed)
            timing.arrived(row)
    assert len(read) == 2 * (3 + 4)
