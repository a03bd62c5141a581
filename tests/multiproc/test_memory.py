"""A rank that runs out of memory: the step is repeated in parts, with the gradient it would have had."""

from __future__ import annotations

from typing import Any

import pytest

from tests.multiproc.memory_job import FITS, SHORT, stays_within
from tests.multiproc.shares_job import check
from tests.support.launch import JOB_LIMIT_S, run_job

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(2 * JOB_LIMIT_S)]

RANKS = 4


def _checked(scenario: str) -> list[dict[str, Any]]:
    results = run_job("tests.multiproc.memory_job", scenario, ranks=RANKS).check().results
    check(results)
    return results


@pytest.mark.parametrize("scenario", ["forward", "backward", "overlapped"])
def test_a_batch_that_does_not_fit_is_repeated_in_parts(scenario: str) -> None:
    """One batch fails; those behind it are cut before they do."""
    for result in _checked(scenario):
        assert result["parts"][0][0] == [9, 10] and result["parts"][1][0] == [12, 12]


def test_parts_that_do_not_fit_are_cut_again() -> None:
    """The pass of the whole batch and those of its parts fail in the middle: no gradient counts twice."""
    first = _checked("twice")[0]["parts"][1][0]
    assert max(first) <= 4 and sum(first) == 24


def test_shares_stay_within_what_fits() -> None:
    results = _checked("shares")
    sizes = results[0]["sizes"]
    assert any(step[SHORT] > FITS for epoch in sizes for step in epoch), "the rank never had more than fits"
    assert stays_within(sizes), sizes


def test_in_a_relaxed_mode_a_repeated_gradient_may_be_late_and_none_is_lost() -> None:
    results = run_job("tests.multiproc.memory_job", "relaxed", ranks=RANKS).check().results
    for result in results:
        assert all(result["once"]) and result["replicas"] == 0.0
        assert result["stats"]["drops"] == 0
