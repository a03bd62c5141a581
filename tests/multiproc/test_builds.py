"""Ranks with different builds of Horovod: the same error everywhere; and what our build does not hand on."""

from __future__ import annotations

import http.client

import pytest
from horovod.runner.common.util.hosts import SlotInfo
from horovod.runner.http.http_server import RendezvousServer

from tests.multiproc.idle_job import is_less
from tests.multiproc.thread_state_job import REDUCTIONS
from tests.multiproc.wait_job import LATE_S
from tests.support.launch import JOB_LIMIT_S, run_job

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(JOB_LIMIT_S + 60)]


@pytest.mark.parametrize("place", ["init", "start"])
def test_all_ranks_raise_and_the_job_ends(place: str) -> None:
    result = run_job("tests.multiproc.builds_job", place, "differs", ranks=3)
    messages = {facts["raised"] for facts in result.results}
    assert len(messages) == 1, result.tail
    message = messages.pop()
    assert message is not None and "rank 1 on elsewhere: Horovod 0.28.1 with no patches" in message
    assert "ranks 0,2 on" in message and "scripts/build_horovod.py" in message
    # `star_hvd.init` finds out before Horovod starts.
    assert {facts["initialized"] for facts in result.results} == {place == "start"}
    assert result.returncode == 0, result.tail


def test_equal_builds_go_on() -> None:
    result = run_job("tests.multiproc.builds_job", "init", "equal", ranks=3).check()
    assert [facts["raised"] for facts in result.results] == [None] * 3


def test_horovods_thread_keeps_its_thread_state() -> None:
    """If it made one for each operation, a process that is forked meanwhile could hang (Python before 3.12)."""
    made = [facts["made"] for facts in run_job("tests.multiproc.thread_state_job", ranks=2).check().results]
    assert max(made) < REDUCTIONS // 2, "patch 0013 is missing in this build of Horovod"


def test_a_wait_sleeps_until_the_operation_has_ended() -> None:
    """With Horovod's own questions a waiting thread would wake some thousand times a second."""
    for facts in run_job("tests.multiproc.wait_job", ranks=2).check().results:
        assert facts["wait_for"], "patch 0014 is missing in this build of Horovod"
        assert facts["set_waits_sleep"], "patch 0017 is missing in this build of Horovod"
        assert not facts["too_early"] and facts["ended"] and facts["again"], facts
        assert facts["late"] or facts["woken"] <= 50, facts
        assert facts["others_ran"] and facts["sum"] == 2.0, facts
        assert facts["used_s"] < 0.1 * LATE_S, facts


def test_a_cycle_begins_when_somebody_waits_for_it() -> None:
    """A reduction takes a cycle of 300 ms otherwise; with nobody asleep, some milliseconds."""
    for facts in run_job("tests.multiproc.hurry_job", ranks=2, fresh=True).check().results:
        assert facts["patched"], "patch 0015 is missing in this build of Horovod"
        assert facts["hurried_s"] < 0.5 * facts["usual_s"], facts


def test_horovods_thread_sleeps_while_there_is_nothing_to_do_and_a_tensor_wakes_it() -> None:
    """With cycles of a minute while idle, ten reductions would take ten minutes if nobody woke the threads."""
    for facts in run_job("tests.multiproc.idle_job", ranks=3, fresh=True).check().results:
        assert facts["patched"], "patch 0016 is missing in this build of Horovod"
        assert is_less(facts), facts
        assert facts["took_s"] < 30.0, facts


@pytest.mark.parametrize("ranks", [3, 4, 5])
def test_short_reductions_are_exact_while_ranks_change_how_they_are_made(ranks: int) -> None:
    for facts in run_job("tests.multiproc.hops_job", str(ranks), ranks=ranks).check().results:
        assert facts["patched"], "patch 0018 is missing in this build of Horovod"
        assert facts["wrong"] == []
        if ranks == 4:  # A ring adds up each part of a tensor from another rank on.
            assert facts["few"] == 1 < facts["many"]


def test_credentials_reach_ranks_and_no_command_line() -> None:
    env = {"MLFLOW_TRACKING_PASSWORD": "correct-horse-7319"}
    result = run_job("tests.multiproc.credentials_job", ranks=2, env=env, fresh=True).check()
    assert [facts["secret"] for facts in result.results] == ["correct-horse-7319"] * 2
    assert [facts["shown"] for facts in result.results] == [0, 0], "patch 0011 is missing in this build of Horovod"


def test_a_scope_of_the_rendezvous_is_cleared_whatever_the_others_do() -> None:
    """Each scope waits for its own ranks; one address left over ends a later `init` ("Connection refused")."""
    slots = [SlotInfo("host", rank, rank, cross_rank=0, size=3, local_size=3, cross_size=1) for rank in range(3)]
    server = RendezvousServer()
    port = server.start()
    try:
        server.init(slots)
        scopes = [each for r in range(3) for each in (("global", r), ("local_host", r), (f"cross_{r}", 0))]
        for method in ("PUT", "DELETE"):  # A rank is through with all its scopes before the next one ends its first.
            assert {_ask(port, method, scope, rank) for scope, rank in scopes} == {200}
        left = [(scope, rank) for scope, rank in scopes if _ask(port, "GET", scope, rank) != 404]
        assert left == [], "patch 0019 is missing in this build of Horovod"
    finally:
        server.stop()



def _ask(port: int, method: str, scope: str, rank: int) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30.0)
    try:
        connection.request(method, f"/{scope}/{rank}", b"address" if method == "PUT" else None)
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()
