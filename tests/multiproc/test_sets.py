"""Process sets that come and go: right members, one order, and what they may cost the other threads."""

from __future__ import annotations

import pytest

from star_hvd.runtime.process_sets import static_catalogue
from tests.multiproc.sets_job import TRIALS
from tests.support.launch import JOB_LIMIT_S, JobResult, run_job

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(JOB_LIMIT_S + 60)]

RANKS = 3
DYNAMIC = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}  # star_hvd.init sets it; so an unpatched Horovod is tested alike.


def job(scenario: str, **env: str) -> JobResult:
    return run_job("tests.multiproc.sets_job", scenario, ranks=RANKS, env=env).check()


def test_sets_are_added_used_and_removed_while_training_goes_on() -> None:
    result = job("keeper")
    for rank, facts in enumerate(result.results):
        assert facts["unavailable"] is None
        *good, bad, empty = facts["reasons"]
        assert good == [None] * 5
        assert "got the ranks [0, 3]; expected different ranks of 0..2" in bad and "got the ranks []" in empty
        right = {"(0, 1)": 11.0, "(1, 2)": 110.0, "(2,)": 100.0, "(0, 1, 2)": 111.0, "again": 101.0}
        members = {"(0, 1)": {0, 1}, "(1, 2)": {1, 2}, "(2,)": {2}, "(0, 1, 2)": {0, 1, 2}, "again": {0, 2}}
        assert facts["sums"] == {name: value for name, value in right.items() if rank in members[name]}
        assert facts["again"] is None and facts["gone"]
        assert facts["trained"] > 0


def test_a_set_of_the_users_is_used_and_left_alone() -> None:
    result = job("taken_over")
    assert [facts["sum"] for facts in result.results] == [2.0, 2.0, 0.0]
    for facts in result.results:
        assert facts["reason"] is None and facts["same"]


def test_programs_change_sets_while_orders_come_at_different_times() -> None:
    result = job("users")
    trials = [facts["sums"] for facts in result.results]
    assert trials == [[11.0] * TRIALS, [11.0] * TRIALS, [100.0] * TRIALS]
    assert [facts["found"] for facts in result.results] == [101.0, 0.0, 101.0]
    for facts in result.results:
        assert facts["reasons"] == ["None"] and facts["removed"]


def test_without_dynamic_sets_those_made_at_the_start_are_used() -> None:
    assert static_catalogue(RANKS) == [(0, 1), (0, 2), (1, 2)]
    result = job("static", HOROVOD_DYNAMIC_PROCESS_SETS="0")
    assert [facts["sum"] for facts in result.results] == [2.0, 2.0, 0.0]
    for facts in result.results:
        assert facts["unavailable"] is None
        *known, unknown = facts["reasons"]
        assert known == [None, None] and "[2] is not one of those made at the start: 0,1; 0,2; 1,2" in unknown


def test_sets_may_leave_out_different_ranks_on_different_hosts() -> None:
    """Patch 0006: without it the members of such a set wait for each other until Horovod gives up."""
    result = run_job(
        "tests.multiproc.sets_job",
        "over_hosts",
        ranks=4,
        env={"HOROVOD_GLOO_TIMEOUT_SECONDS": "60"},
        horovodrun_args=("-H", "localhost:2,127.0.0.1:2"),
    ).check()
    right = {"(1, 2, 3)": 1110.0, "(0, 1, 3)": 1011.0, "(0, 3)": 1001.0}
    for rank, facts in enumerate(result.results):
        assert facts["hosts"] == 2
        assert facts["sums"] == {name: value for name, value in right.items() if str(rank) in name}


def test_a_frozen_rank_does_not_hold_up_who_submits_a_tensor() -> None:
    """Patch 0004: without it dynamic sets lock the table of sets while they wait for the frozen rank."""
    trials = job("frozen", **DYNAMIC).results[-1]["trials"]
    assert [trial["got_on"] for trial in trials] == [True] * TRIALS, "nobody got on until the frozen rank was let go"


def test_a_thread_held_up_by_a_change_of_sets_does_not_hold_up_others() -> None:
    """Patch 0005: without it the waiting thread has the interpreter, and every other thread stands still."""
    results = job("frozen_in_a_change", **DYNAMIC).results
    assert all(trial["got_on"] for trial in results[-1]["trials"]), "the other thread stood still"
    if not any(trial["held_up"] for trial in results[0]["trials"]):
        pytest.skip(f"in none of {len(results[0]['trials'])} trials a thread had to wait: nothing is tested")
