"""Programs with `overlap=True` read and end with, bit for bit, what they do without it; on two ranks, where sums have
no order."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.multiproc.overlap_job import PROGRAMS
from tests.support.launch import JOB_LIMIT_S, JobResult, run_job

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(JOB_LIMIT_S + 60)]

RANKS = 2


@functools.cache
def _job() -> JobResult:
    return run_job("tests.multiproc.overlap_job", ranks=RANKS, fresh=True)


def _facts_of(name: str) -> list[list[dict[str, Any]]]:
    job = _job()
    facts = [result.get("facts", {}).get(name) for result in job.results]
    assert all(facts), f"the job ended during {[result.get('running') for result in job.results]}:\n{job.tail}"
    return facts


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_the_same_with_overlap(name: str) -> None:
    ranks = _facts_of(name)
    for without, with_overlap in ranks:
        assert with_overlap == without
    if name == "switching":
        assert ranks[0][0] == {"equal": True, "lost": False, "mismatches": 0}
    else:
        assert ranks[0][0].get("params") == ranks[1][0].get("params")


def test_the_job_ends_well() -> None:
    _job().check()
