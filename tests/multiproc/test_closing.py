"""Optimizers that come and go in one process leave no connections, threads, descriptors or servers' memory behind."""

from __future__ import annotations

import pytest

from tests.support.launch import JOB_LIMIT_S, run_job

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(JOB_LIMIT_S + 60)]


@pytest.mark.parametrize("mode", ["ps(1)", "grouped(2)"])
def test_nothing_is_left_of_a_closed_optimizer(mode: str) -> None:
    job = run_job("tests.multiproc.closing_job", mode, ranks=3).check()
    for rank, result in enumerate(job.results):
        facts = result["facts"]
        assert {each["mode"] for each in facts} == {mode}
        assert [each["sessions"] for each in facts] == [0] * len(facts)
        second, last = facts[1], facts[-1]  # With the first one servers and threads come that stay.
        for what in ("own", "threads", "server", "servers"):
            # A connection that is just being closed may still count.
            assert last[what] <= second[what] + 4, f"rank {rank}: {what} {[each[what] for each in facts]}"
