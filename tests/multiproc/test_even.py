"""What meets all ranks within a pass needs as many batches on every rank: an epoch gives them that, or an error."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.launch import JOB_LIMIT_S, JobResult, run_job

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(2 * JOB_LIMIT_S)]


def _job(scenario: str) -> JobResult:
    return run_job("tests.multiproc.even_job", scenario, ranks=4)


def _check(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert all(result["once"])
        assert all(len(set(batches)) == 1 for batches in result["batches"])


@pytest.mark.parametrize("scenario", ["sparse", "short", "normalized", "native", "native_later"])
def test_all_ranks_have_as_many_batches_to_the_end_of_the_epoch(scenario: str) -> None:
    _check(_job(scenario).check().results)


def test_an_optimizer_that_averages_without_weights_refuses_batch_shares() -> None:
    results = _job("beside").check().results
    _check(results)
    assert "without weights" in results[0]["explain"]
    assert all(len(set(sizes)) == 1 for epoch in results[0]["sizes"] for sizes in epoch[:13])


@pytest.mark.parametrize(
    ("scenario", "reason"),
    [("few", "sparse gradients"), ("native_few", "an optimizer's gradients")],
)
def test_an_epoch_that_cannot_be_divided_is_refused(scenario: str, reason: str) -> None:
    job = _job(scenario)
    assert f"cannot be here: {reason}" in job.output + str(job.results)


def test_ranks_in_join_add_zeros_to_an_optimizer_that_reduces_as_horovod_does() -> None:
    """Beside one that does not: the others waited for those ranks until the deadline."""
    weights = [rank["weights"] for rank in _job("joined").check().results]
    assert len(weights[0]) == 2 and all(each == weights[0] for each in weights)


@pytest.mark.parametrize(
    ("scenario", "name"),
    [("averaging", "allreduce"), ("committing", "elastic.TorchState.commit or check_host_updates")],
)
def test_auto_stays_exact_where_the_loop_holds_a_collective(scenario: str, name: str) -> None:
    """In relaxed modes ranks have different numbers of iterations, and one waits for one in a collective."""
    job = _job(scenario).check()
    results = job.results
    _check([{**rank, "batches": rank["batches"][1:]} for rank in results])  # The first one may have begun relaxed.
    assert all(mode.split("(")[0] == "sync" for rank in results for mode in rank["modes"][1:])
    assert f"the program calls hvd.{name} within its loop" in job.output


def test_a_rank_without_batches_is_an_error_of_an_optimizer_whose_state_cannot_be_sent() -> None:
    """Its loss is averaged over all ranks after every evaluation, and the rank could not follow."""
    job = _job("lbfgs")
    assert job.returncode != 0 and "a step of LBFGS ended without a gradient of every rank" in job.output
