"""A parameter server or a worker is killed under a mode of servers: training goes on, nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fault.ps_background_job import AFTER_DEATH, CONFIG, FAULTS, STRIKES_AT, SURVIVORS, VICTIM
from tests.fault.ps_job import COMMIT_EVERY, KILL_AT, STEPS
from tests.support.elastic import ELASTIC_LIMIT_S, run_elastic
from tests.support.launch import JobResult, run_job

pytestmark = [pytest.mark.fault, pytest.mark.timeout(ELASTIC_LIMIT_S)]


def test_a_killed_server_comes_back_with_every_update() -> None:
    job = run_job("tests.fault.ps_job", "server", ranks=4).check()
    assert job.output.count("its parameter server died") == 2, job.tail
    assert len({rank["digest"] for rank in job.results}) == 1
    assert [rank["steps"] for rank in job.results] == [STEPS] * 4, "an update was lost or made twice"
    assert job.results[0]["digest"] != job.results[0]["before"]


def test_servers_that_cannot_start_hold_nobody_up_and_the_log_says_once_why(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho ImportError: no such library >&2\nexit 3\n", encoding="utf-8")
    program.chmod(0o700)
    job = run_job("tests.fault.ps_job", "unstartable", str(program), ranks=4).check()
    why = "could not be started: the process that forks it ended with exit status 3 (ImportError: no such library)"
    for rank in job.results:
        assert rank["mode"] == "sync" and why in rank["explain"], job.tail
    assert len({rank["digest"] for rank in job.results}) == 1
    (told,) = [line for line in job.output.splitlines() if "mode ps is not possible at present" in line]
    assert why in told and "Training continues in sync, and ps(2), which was asked for, is tried again" in told


def test_servers_that_die_while_buckets_of_a_push_arrive_or_leave_make_every_update_once() -> None:
    job = run_job("tests.fault.ps_background_job", "server", ranks=4).check()
    assert job.output.count("its parameter server died") == len(FAULTS), job.tail
    for rank in job.results:
        assert rank["steps"] == 0, "an update was lost or made twice"
        assert rank["error"] < 1e-9, "the gradients are those of plain torch with the mean of the ranks"


def test_a_worker_killed_with_half_of_its_buckets_on_their_way_leaves_no_trace_of_them(tmp_path: Path) -> None:
    def went_on(job: JobResult) -> bool:
        return all(job.results[rank] for rank in SURVIVORS)

    job = run_elastic("tests.fault.ps_background_job", "worker", folder=tmp_path, recovered=went_on)
    assert went_on(job), job.tail
    for rank in SURVIVORS:
        found = job.results[rank]
        assert found["after"] >= AFTER_DEATH and found["before"]
        first = found["moved"][0]
        assert all(layer == first for layer in found["moved"]), "half an update was made"
        assert all(least == most for least, most in first)
        assert first[rank][0] == pytest.approx(0.25 * found["applied"]), "every gradient counts once"
        assert "has left the job" in found["lost"] and found["waited_s"] < 0.5 * CONFIG.control_deadline_s
        assert first[VICTIM][0] <= found["before"][0][VICTIM][0] + 0.25 * STRIKES_AT


def test_a_killed_worker_holds_nobody_up_and_the_world_is_rebuilt_at_the_next_commit(tmp_path: Path) -> None:
    job = run_elastic("tests.fault.ps_job", "worker", folder=tmp_path, recovered=lambda job: job.returncode == 0)
    # The others reported too, at commits before the death; who waited for the dead rank has no report from after it.
    survivors = [rank for rank in job.results if rank and rank["after_death"]]
    assert len(survivors) >= 2, f"the survivors waited for the dead rank:\n{job.tail}"
    for rank in survivors:
        assert rank["after_death"] > KILL_AT
        assert rank["committed"] % COMMIT_EVERY == 0
    if job.returncode != 0:
        pytest.skip("the survivors reached their commit; Horovod did not form a new world in any of the jobs")
    done = [rank for rank in survivors if rank["size"] == 2]
    assert len(done) == 2 and len({rank["digest"] for rank in done}) == 1
    for rank in done:
        assert rank["resumed"][0] == 0 and rank["resumed"][1] >= COMMIT_EVERY, "steps before the commit were lost"
