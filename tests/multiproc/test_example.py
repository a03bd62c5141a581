"""The example that users start from."""

from __future__ import annotations

import pytest

from tests.support.launch import JOB_LIMIT_S, run_job

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(JOB_LIMIT_S + 60)]

SCRIPT = "examples/digits.py"


def test_it_trains_with_a_slow_rank() -> None:
    short = ("--epochs", "2", "--device-ms", "1", "--slow-rank")
    job = run_job(SCRIPT, *short, "1", ranks=2, env={"STAR_RUN_LOG": "0"}).check()
    assert job.output.count("epoch 2: loss") == 1


def test_a_slow_rank_that_the_job_lacks_is_refused() -> None:
    job = run_job(SCRIPT, "--slow-rank", "2", ranks=2)
    assert job.returncode != 0 and "--slow-rank is 2; expected a rank of this job, 0 to 1" in job.output
