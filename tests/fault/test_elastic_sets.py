"""A rank of an elastic job with process sets is killed: the survivors go on, and make their sets anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.elastic import ELASTIC_LIMIT_S, run_elastic

pytestmark = [pytest.mark.fault, pytest.mark.timeout(ELASTIC_LIMIT_S)]


def test_survivors_with_process_sets_go_on_from_their_last_commit(tmp_path: Path) -> None:
    """Patch 0003: without it every survivor aborts."""
    result = run_elastic(
        "tests.fault.elastic_sets_job",
        folder=tmp_path,
        recovered=lambda job: sum(map(bool, job.results)) == 2,
    )
    survivors = [facts for facts in result.results if facts]
    assert len(survivors) == 2, result.tail
    for facts in survivors:
        assert facts["step"] == 40 and facts["size"] == 2 and facts["total"] == 40.0
        (first_step, first_size, why), *_, (last_step, last_size, why_after) = facts["resumed"]
        assert (first_step, first_size, why) == (0, 4, None)
        assert (last_size, why_after) == (2, None) and last_step in (5, 10), "it goes on from a commit, with a set"
