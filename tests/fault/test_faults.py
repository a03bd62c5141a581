"""Killed, failing, leaving and frozen ranks, strangers and defects: the job ends soon and says why, or goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fault.elastic_job import RESUMED
from tests.fault.job import FATAL_STEPS, FROZEN_S, STEPS
from tests.support.elastic import ELASTIC_LIMIT_S, run_elastic
from tests.support.launch import JOB_LIMIT_S, JobResult, run_job

pytestmark = [pytest.mark.fault, pytest.mark.timeout(JOB_LIMIT_S + 60)]

RANKS = 3


def job(mode: str, fault: str, rank: int) -> JobResult:
    return run_job("tests.fault.job", mode, fault, str(rank), ranks=RANKS)


@pytest.mark.parametrize(("mode", "rank"), [("partial", 1), ("sync", 1), ("partial", 0)])
def test_a_killed_rank_ends_the_job_and_is_named(mode: str, rank: int) -> None:
    result = job(mode, "kill", rank)
    assert result.returncode != 0
    assert f"Process name: {rank}" in result.output or f"rank {rank}" in result.output, result.tail
    assert result.results[rank]["steps"] == 12


@pytest.mark.parametrize("mode", ["partial", "sync"])
def test_a_rank_that_raises_ends_the_job_as_under_horovod(mode: str) -> None:
    result = job(mode, "fail", 1)
    assert result.returncode != 0
    assert "the user's own mistake" in result.output, result.tail
    # The launcher names whose process ended first, see below.
    assert "Process name: 1" in result.output or "Horovod has been shut down" in result.output, result.tail
    assert all(r["steps"] < FATAL_STEPS for r in result.results), "the others must not train on as if it had finished"


def test_a_rank_that_exits_with_an_error_ends_the_job_as_under_horovod() -> None:
    result = job("partial", "leave", 1)
    assert result.returncode != 0
    # The launcher names whose process ended first: rank 1 takes its interpreter down while the others hear of it.
    assert "Exit code: 3" in result.output or "Horovod has been shut down" in result.output, result.tail
    assert all(r["steps"] < FATAL_STEPS for r in result.results), "the others must not train on as if it had finished"


@pytest.mark.parametrize("mode", ["partial", "sync"])
def test_a_frozen_rank_only_delays(mode: str) -> None:
    result = job(mode, "freeze", 1).check()
    assert [r["steps"] for r in result.results] == [STEPS] * RANKS
    assert len({r["digest"] for r in result.results}) == 1
    assert result.elapsed_s > FROZEN_S


def test_strangers_and_damaged_messages_are_counted_and_training_goes_on() -> None:
    result = job("partial", "throw_garbage", 0).check()
    assert len({r["digest"] for r in result.results}) == 1
    first = result.results[0]
    assert first["denied"] >= 6 and first["dropped"] >= 4
    assert first["mode"] == "partial(2)"


def test_without_its_coordinator_training_goes_on_or_ends_with_an_error() -> None:
    result = job("partial", "break_coordinator", 0)
    assert "an injected defect" in result.output and "the coordinator failed" in result.output
    finished = [r.get("steps") == STEPS for r in result.results]
    assert all(finished) or result.returncode != 0, result.tail


@pytest.mark.timeout(ELASTIC_LIMIT_S)
@pytest.mark.parametrize("mode", ["partial"])
def test_survivors_of_an_elastic_job_go_on_from_their_last_commit(tmp_path: Path, mode: str) -> None:
    result = run_elastic(
        "tests.fault.elastic_job",
        "star_hvd",
        mode,
        folder=tmp_path,
        env={"STAR_RUN_LOG": "1", "STAR_LOG_DIR": str(tmp_path / "logs"), "MLFLOW_TRACKING_URI": ""},
        recovered=lambda job: sum(map(bool, job.results)) == 2,
    )
    survivors = [r for r in result.results if r]
    assert len(survivors) == 2, result.tail
    for facts in survivors:
        assert facts["step"] >= 40 and facts["size"] == 2
        assert facts["resumed"][0] == 0 and facts["resumed"][-1] in RESUMED[mode], "it goes on from a commit"
    assert len({facts["digest"] for facts in survivors}) == 1
    assert [facts["beside"] for facts in survivors] == ["sync"] * 2
    why = "mode sync(3,2,2,1) is not possible with 2 ranks: plan batch_shares has 4 numbers"
    assert result.output.count(why) == 1, result.tail
    (told,) = [facts for facts in survivors if facts["mode"]]
    assert (told["mode"], told["reason"]) == ("partial(1)", "asked for by the user"), "the user's mode, not auto's"
    sizes = set()
    for path in (tmp_path / "logs/runs").glob("*/events.jsonl"):
        events = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        known = [event["values"] for event in events if event["kind"] == "facts"]
        goes_on = {values["continues"] for values in known if "continues" in values}
        sizes.add(size := json.loads((path.parent / "run.json").read_text())["world_size"])
        if size == 2:
            assert goes_on == {"reset"}, "its time to a target would be that of a rest"
        else:
            assert not goes_on and "FINISHED" not in {e["status"] for e in events if e["kind"] == "end"}
    assert sizes == {2, 4}


@pytest.mark.timeout(ELASTIC_LIMIT_S)
def test_survivors_do_not_wait_for_a_push_that_its_dead_rank_had_only_announced(tmp_path: Path) -> None:
    result = run_elastic(
        "tests.fault.elastic_job",
        "star_hvd",
        "ps(4)",
        "announced",
        folder=tmp_path,
        recovered=lambda job: sum(map(bool, job.results)) == 2,
    )
    survivors = [r for r in result.results if r]
    assert len(survivors) == 2, result.tail
    for facts in survivors:
        assert facts["size"] == 2 and len(facts["resumed"]) == 2 and facts["step"] > facts["resumed"][-1] > 0


@pytest.mark.timeout(ELASTIC_LIMIT_S)
@pytest.mark.parametrize("mode", ["sync", "partial"])
def test_an_elastic_job_recovers_from_a_failure_of_the_channel(tmp_path: Path, mode: str) -> None:
    result = run_elastic(
        "tests.fault.elastic_job",
        "star_hvd",
        mode,
        "channel",
        folder=tmp_path,
        recovered=lambda job: sum(map(bool, job.results)) == RANKS + 1,
    )
    assert result.returncode == 0, result.tail
    assert [facts["size"] for facts in result.results] == [4] * 4, "nobody died"
    for facts in result.results:
        assert facts["step"] == 40
        assert facts["resumed"][0] == 0 and facts["resumed"][-1] in RESUMED[mode], "it goes on from a commit"
    assert len({facts["digest"] for facts in result.results}) == 1


@pytest.mark.parametrize("how", ["quit", "raise_exit"])
def test_a_rank_that_leaves_by_any_exit_with_an_error_ends_the_job(how: str) -> None:
    result = job("partial", how, 1)
    assert result.returncode != 0
    # The launcher names whose process ended first: rank 1 takes its interpreter down while the others hear of it.
    assert "Exit code: 3" in result.output or "Horovod has been shut down" in result.output, result.tail
    assert all(r["steps"] < FATAL_STEPS for r in result.results), "the others must not train on as if it had finished"


def test_a_thread_that_ends_fails_its_rank_with_the_reason() -> None:
    result = job("partial", "break_agent", 1)
    assert result.returncode != 0
    assert "rank 1 cannot go on: its thread star-agent ended by" in result.output, result.tail
    assert all(r["steps"] < FATAL_STEPS for r in result.results)


@pytest.mark.parametrize("mode", ["partial", "ps(1)"])
def test_a_child_made_by_fork_stops_nothing_of_its_parent(mode: str) -> None:
    result = job(mode, "fork_child", 0).check()
    assert len({r["digest"] for r in result.results}) == 1
    assert "its parameter server died" not in result.output
