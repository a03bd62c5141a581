"""Modes of the optimizers of a program that has several, where ranks could wait for each other crosswise."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from scheduler.plan.mode_names import MAY_WAIT, NOT_SERVERS, ONLY_EXACT, parse_mode
from scheduler.records import Plan
from star_hvd.channel.messages import base as m
from star_hvd.channel.messages.switch import WarmServers
from tests.support.job_states import Job, only


def choose(job: Job, plan: Plan | None, coming: Plan | None = None) -> None:
    """Have the first optimizer's policy choose this plan every time."""
    silent: dict[str, Any] = {"take_outcomes": list, "predictions": dict, "watch": lambda *a, **k: None}
    chosen = "sync: chosen"
    job.engine.choice = SimpleNamespace(decide=lambda *a: plan, explain=lambda: chosen, coming=coming, **silent)


def test_auto_has_only_exact_modes_beside_another_optimizer(caplog: pytest.LogCaptureFixture) -> None:
    job = Job(4)
    job.register(None)
    assert "partial" in job.engine.window(job.now_s).allowed
    job.register(None, optimizer_id=1)
    choose(job, Plan.partial(4, 3), coming=Plan.ps(4, 1, servers=(0,)))
    heard = job.pass_time(20.0)
    assert not only(heard, m.PlanMessage) and not only(heard, WarmServers)
    assert all(each.window(job.now_s).allowed == {"sync"} for each in job.state.optimizers.values())
    assert job.engine.explain() == f"sync: chosen; only exact modes: {ONLY_EXACT}"
    assert caplog.text.count(f"optimizer 0: {ONLY_EXACT}") == caplog.text.count(f"optimizer 1: {ONLY_EXACT}") == 1
    for rank in range(4):
        job.say(rank, m.Unregister(1))
    assert "partial" in job.engine.window(job.now_s).allowed and ONLY_EXACT not in job.engine.explain()


def test_nothing_is_said_of_an_optimizer_that_replaces_another_one(caplog: pytest.LogCaptureFixture) -> None:
    """The new one is made before the variable that held the old one has another value."""
    for wanted in (None, Plan.partial(4, 3)):
        job = Job(4)
        job.register(wanted)
        job.register(wanted, optimizer_id=1)
        job.pass_time(0.5)
        for rank in range(4):
            job.say(rank, m.OptimizerDropped(0, 0, False, False))
        assert list(job.state.optimizers) == [1]
        job.pass_time(20.0)
        assert ONLY_EXACT not in caplog.text and MAY_WAIT not in caplog.text


def test_an_exact_plan_that_auto_chooses_is_published_beside_another_optimizer() -> None:
    job = Job(4)
    job.register(None)
    job.register(None, optimizer_id=1)
    choose(job, Plan.sync(4, balanced=True))
    (published,) = only(job.pass_time(5.0), m.PlanMessage)
    assert published.plan["balanced"]


@pytest.mark.parametrize("plan", [Plan.partial(4, 3), Plan.subgroup(4, [0, 1, 2]), Plan.ps(4, 1, servers=(0,))])
def test_a_plan_of_auto_ends_when_another_optimizer_is_made(plan: Plan) -> None:
    for reached in (False, True):
        job = Job(4)
        job.register(None)
        job.engine.publish(plan, job.now_s)
        (published,) = only(job.sent(), m.PlanMessage)
        if reached:
            for rank in range(4):
                job.arrive(rank, 3, Plan.from_dict(published.plan).plan_id)
            assert job.engine.active.mode == plan.mode
        job.say(0, m.Register(1, Plan.sync(4).to_dict(), {}))
        heard = job.tick()
        if reached:
            (after,) = only(heard, m.PlanMessage)
            assert after.optimizer_id == 0 and after.plan["mode"] == "sync" and after.plan["reason"] == ONLY_EXACT
        else:
            assert [each.reason for each in only(heard, m.Abandon)] == [ONLY_EXACT]


@pytest.mark.parametrize("mode", ["ps(2)", "ps(3,background)", "ps(grace=1)", "ssp(2)"])
def test_a_mode_in_which_a_late_rank_waits_at_servers_is_refused(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    job, wanted = Job(4), parse_mode(mode, 4)
    assert wanted is not None
    assert only(job.register(wanted), m.PlanMessage)
    assert only(job.register(None, optimizer_id=1) + job.tick(), m.Abandon)
    assert not [each for each in only(job.pass_time(120.0), m.PlanMessage) if each.optimizer_id == 0]
    assert caplog.text.count(f"is not possible: {NOT_SERVERS}") == 1 and NOT_SERVERS in job.engine.explain()
    job.say(0, m.Unregister(1))
    assert [each for each in only(job.pass_time(5.0), m.PlanMessage) if each.plan["mode"] == "ps"]


@pytest.mark.parametrize(
    "mode", ["partial(3)", "subgroup(0,1,2)", "grouped(2)", "ps(1)", "ps(4)", "ps(backup=1)", "ps(dynamic)"]
)
def test_other_modes_that_were_asked_for_stay_with_a_warning(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    job, wanted = Job(4), parse_mode(mode, 4)
    assert wanted is not None
    assert only(job.register(wanted), m.PlanMessage)
    assert not only(job.register(None, optimizer_id=1) + job.pass_time(20.0), m.Abandon)
    assert job.engine.switching and caplog.text.count(MAY_WAIT) == 1


def test_no_step_misses_an_active_rank_once_the_other_optimizer_is_made() -> None:
    for auto in (True, False):
        job = Job(3)
        job.register(None if auto else Plan.partial(3, 2))
        if auto:
            job.engine.publish(Plan.partial(3, 2), job.now_s)
        for rank in range(3):
            job.arrive(rank, 3, plan_id=1)
        assert job.engine.active.mode == "partial"
        job.say(0, m.Register(1, Plan.sync(3).to_dict(), {}))
        for rank in range(2):
            job.arrive(rank, 4, plan_id=1)
        closed = only(job.pass_time(20.0), m.CloseStep)
        assert not closed if auto else [each.step for each in closed] == [4]
