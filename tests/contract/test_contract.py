"""Every row of the API table: `star_hvd.DistributedOptimizer` against `horovod.torch.DistributedOptimizer`.

One job per world size runs all cases; a test here reads the outcome of one. To run a few cases by themselves:
`horovodrun -np 2 --gloo python -m tests.contract.job 'adam[sync]'`.
"""

from __future__ import annotations

import functools

import pytest

from tests.contract.job import case_ids
from tests.support.launch import JOB_LIMIT_S, JobResult, run_job

LIMIT_S = 2 * JOB_LIMIT_S  # For all cases together.

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(LIMIT_S + 60)]

# A rank that fails in the middle of a case leaves the others in a collective: Horovod ends those soon.
STALL = ("--stall-check-warning-time-seconds", "10", "--stall-check-shutdown-time-seconds", "60")


@functools.cache
def _job(ranks: int) -> JobResult:
    return run_job("tests.contract.job", ranks=ranks, horovodrun_args=STALL, fresh=ranks == 4, timeout_s=LIMIT_S)


def _job_outcome(ranks: int, case_id: str) -> None:
    job = _job(ranks)
    told = []
    for rank, result in enumerate(job.results):
        outcome = result.get("outcomes", {}).get(case_id)
        if outcome is None:
            running = result.get("running")
            where = "while it ran" if running == case_id else f"before, at {running!r}"
            stuck = f"; stuck: {job.stuck}" if job.stuck and not told else ""
            told.append(f"rank {rank}: the job ended {where}{stuck}")
        elif outcome:
            told.append(f"rank {rank}: {outcome}")
    if any("the job ended" in text for text in told):
        told.append(job.tail)
    assert not told, "\n".join(told)


@pytest.mark.parametrize("case_id", case_ids(1))
def test_one_rank(case_id: str) -> None:
    _job_outcome(1, case_id)


@pytest.mark.parametrize("case_id", case_ids(2))
def test_two_ranks(case_id: str) -> None:
    _job_outcome(2, case_id)


@pytest.mark.parametrize("case_id", case_ids(4))
def test_four_ranks(case_id: str) -> None:
    _job_outcome(4, case_id)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_job_ends_well(ranks: int) -> None:
    _job(ranks).check()
