"""An evaluation with `hvd.shard`: collectives within the loop end with an error, not in a hang; behind it they work."""

from __future__ import annotations

import pytest

from tests.multiproc.evaluation_job import BATCH, SLOW_S
from tests.support.launch import JOB_LIMIT_S, run_job

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(JOB_LIMIT_S + 60)]

RANKS = 2
ERROR = "which wait for them in a loop over an hvd.shard loader: nothing can go on"


@pytest.mark.parametrize("kind", ["inside", "alone"])
def test_a_collective_that_not_all_ranks_call_ends_the_job(kind: str) -> None:
    """One in each iteration, of which a rank has one more; or behind a loop that only rank 0 makes."""
    result = run_job("tests.multiproc.evaluation_job", kind, ranks=RANKS)
    assert result.returncode != 0 and result.results == [{}] * RANKS
    assert "StarError: ranks [" in result.output
    assert ERROR in result.output and "in hvd.allreduce for ranks" in result.output


@pytest.mark.parametrize("kind", ["behind", "slow", "training", "gradients"])
def test_a_collective_behind_the_loop_or_in_training_is_left_alone(kind: str) -> None:
    """So is one in the iterations of an evaluation with gradients: all ranks get equal batches, as in training."""
    results = run_job("tests.multiproc.evaluation_job", kind, ranks=RANKS).check()
    assert [each["samples"] for each in results.results] == [BATCH * (2 * RANKS + 1)] * RANKS
    assert ERROR not in results.output
    if kind == "slow":
        assert min(each["took_s"] for each in results.results) >= SLOW_S
