"""The mode that a user asked for: when it is due, and why it is not in force."""

from __future__ import annotations

import math

import pytest

from scheduler.records import Plan, PlanError
from star_hvd.channel.messages import base as m
from star_hvd.channel.messages.switch import PrepareFailed, Restart, Switched
from star_hvd.coordinator import optimizer_state
from star_hvd.coordinator.plans.asked_mode import AskedMode
from star_hvd.coordinator.plans.switch import Switch
from tests.support.job_states import Job, only

SYNC = Plan.sync(3)
HERE, APART = ("a", "a", "a"), ("a", "b", "c")
UNKNOWN, KNOWN = (math.nan,) * 3, (1e9,) * 3


def asked(*plans: Plan | None, hosts: tuple[str, ...] = HERE) -> AskedMode:
    """The mode asked for by these ranks, of 3; the last plan is that of the ranks left."""
    mode = AskedMode(0, 3, hosts)
    for rank in range(3):
        assert not mode.complete
        mode.request(rank, plans[min(rank, len(plans) - 1)])
    assert mode.complete
    return mode


def test_rank_0s_request_is_the_one_of_the_job(caplog: pytest.LogCaptureFixture) -> None:
    mode = asked(Plan.partial(3, 2), None, SYNC)
    assert mode.begin(SYNC, 0.0) is mode.plan and mode.plan == Plan.partial(3, 2) and not mode.auto
    assert caplog.messages == ["ranks [1, 2] request another mode than rank 0; rank 0's is used on all ranks"]
    assert not mode.lockstep and asked(None).lockstep and not asked(SYNC, Plan.partial(3, 2)).lockstep


@pytest.mark.parametrize("plan", [None, SYNC])
def test_nothing_is_due_for_auto_and_for_the_mode_in_which_the_job_starts(plan: Plan | None) -> None:
    mode = asked(plan)
    assert mode.begin(SYNC, 0.0) is None and mode.plan is None and mode.auto == (plan is None)
    assert mode.due(SYNC, (), KNOWN, 0.0) is None and not mode.needs_loader and not mode.awaits_rates(UNKNOWN)


def test_it_is_due_until_it_is_in_force_and_not_while_it_is_blocked() -> None:
    wanted = Plan.subgroup(3, (0, 1))
    mode = asked(wanted)
    mode.begin(SYNC, 0.0)
    assert mode.due(SYNC, ("ps",), KNOWN, 0.0) == wanted
    assert mode.due(SYNC, ("subgroup",), KNOWN, 0.0) is None and mode.due(wanted, (), KNOWN, 0.0) is None


def test_the_forms_of_sync_are_different_modes() -> None:
    balanced = Plan.sync(3, balanced=True)
    for wanted in (balanced, Plan.sync(3, steal=True)):
        mode = asked(wanted)
        assert mode.begin(SYNC, 0.0) == wanted and mode.needs_loader
        assert mode.due(SYNC, (), KNOWN, 0.0) == wanted and mode.due(wanted, (), KNOWN, 0.0) is None


def test_servers_are_placed_once_rates_are_known_or_after_a_while() -> None:
    wanted = Plan.ps(3, 2)
    mode = asked(wanted, hosts=APART)
    mode.begin(SYNC, 10.0)
    assert mode.awaits_rates(UNKNOWN) and mode.due(SYNC, (), UNKNOWN, 12.9) is None
    assert not mode.awaits_rates(KNOWN)
    assert mode.due(SYNC, (), UNKNOWN, 13.0) == wanted and not mode.awaits_rates(UNKNOWN), "they were placed"
    for plan, hosts in ((wanted, HERE), (Plan.ps(3, 2, servers=(1,)), APART), (Plan.partial(3, 2), APART)):
        mode = asked(plan, hosts=hosts)
        mode.begin(SYNC, 10.0)
        assert not mode.awaits_rates(UNKNOWN) and mode.due(SYNC, (), UNKNOWN, 10.0) == plan


def test_a_lack_of_the_loader_is_warned_about_once_some_steps_are_made(caplog: pytest.LogCaptureFixture) -> None:
    mode = asked(Plan.sync(3, balanced=True))
    mode.begin(SYNC, 0.0)
    assert not mode.has_loader("it needs one", "", 7) and mode.no_loader_reason == "" and not caplog.messages
    for _ in range(2):
        assert not mode.has_loader("it needs one", "", 8) and mode.no_loader_reason == "it needs one"
    assert caplog.messages == ["optimizer 0 stays in sync: it needs one"]
    assert mode.has_loader("", "", 9) and mode.no_loader_reason == ""
    assert not mode.has_loader("", "batches must be equal", 10) and mode.no_loader_reason == "batches must be equal"
    assert len(caplog.messages) == 1, "`mode_unsupported` has said it"


def test_a_mode_without_batch_shares_needs_no_loader() -> None:
    mode = asked(Plan.partial(3, 2))
    mode.begin(SYNC, 0.0)
    assert mode.has_loader("", "batches must be equal", 10) and mode.no_loader_reason == ""


def test_why_it_failed_is_known_until_it_is_in_force() -> None:
    wanted = Plan.ps(3, 2)
    mode = asked(wanted)
    mode.begin(SYNC, 0.0)
    assert mode.failed(Switch(0, Plan.grouped(3, 1), SYNC, 60.0), "no set", SYNC) == "" == mode.failure
    advice = mode.failed(Switch(0, wanted, SYNC, 60.0), "no server", SYNC)
    assert "continues in sync, and ps(2), which was asked for, is tried again" in advice
    assert mode.failure == "ps(2) could not be prepared: no server"
    mode.failed(Switch(0, wanted, SYNC, 60.0, committed=True), "too late", SYNC)
    assert mode.failure == "ps(2) did not come into force: too late"
    mode.activated(SYNC)
    assert mode.failure
    mode.activated(wanted)
    assert mode.failure == ""


def test_only_groups_that_the_user_left_open_are_formed_anew() -> None:
    active = Plan.grouped(3, [(0, 1), (2,)])
    other = Plan.grouped(3, [(0,), (1, 2)])
    for wanted in (Plan.grouped(3, 2), active):
        mode = asked(wanted)
        mode.begin(SYNC, 0.0)
        found = [mode.regrouped(active, lambda plan: other, lambda: [4.0, 1.0, 1.0]) for _ in range(60)]
        assert any(found) == (wanted is not active) and mode.regrouped(SYNC, lambda plan: other, list) is None
        assert {plan.reason for plan in found if plan is not None} <= {"other ranks are alike by now"}


def test_the_mode_a_user_asked_for_is_tried_again() -> None:
    job = Job(3)
    (plan,) = only(job.register(Plan.ps(3, 2)), m.PlanMessage)
    assert only(job.say(1, PrepareFailed(0, 1, "the servers were not up in time")), m.Abandon)
    assert only(job.pass_time(59.0), m.PlanMessage) == []
    (again,) = only(job.pass_time(3.0), m.PlanMessage)
    assert again.plan["mode"] == plan.plan["mode"] == "ps" and again.plan["epoch"] > plan.plan["epoch"]
    heard = job.pass_time(61.0)  # Nobody gets ready this time.
    assert only(heard, m.Abandon) and not only(heard, m.PlanMessage)
    assert len(only(job.pass_time(125.0), m.PlanMessage)) == 1


def test_a_user_is_told_once_that_the_mode_asked_for_is_not_possible_and_what_to_do(
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = Job(3)
    job.register(Plan.ps(3, 2))
    for plan_id in (1, 2):
        job.say(1, PrepareFailed(0, plan_id, "the server of rank 1 could not be started"))
        assert "ps(2) could not be prepared: rank 1: the server of rank 1" in job.engine.explain()
        job.pass_time(61.0)
    (told,) = [each for each in caplog.messages if "ps(2), which was asked for, is tried again" in each]
    assert "the server of rank 1 could not be started. Training continues in sync" in told
    job.pass_time(60.0)
    for rank in range(3):
        job.arrive(rank, 5, plan_id=3)
    assert job.engine.active.mode == "ps" and "could not" not in job.engine.explain()


def test_a_mode_that_makes_no_sense_here_is_not_asked_for_all_the_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(3)
    job.register(Plan.ps(3, 2))
    job.say(1, PrepareFailed(0, 1, "the servers were not up in time"))

    def refuse(plan: Plan, *given: object, **more: object) -> Plan:
        raise PlanError("nobody has the state")

    monkeypatch.setattr(optimizer_state, "resolve", refuse)
    job.pass_time(100.0)
    assert caplog.text.count("is not possible in this job: nobody has the state") == 1


def test_a_mode_waits_for_a_state_that_is_being_loaded() -> None:
    job = Job(3)
    job.register(Plan.partial(3, 2))
    for rank in range(3):
        job.arrive(rank, 5, plan_id=1)
    (away,) = only(job.say(0, Restart(0)), m.PlanMessage)
    assert away.plan["mode"] == "sync"
    job.say(0, Switched(0, 2, 6))
    assert job.engine.active.mode == "sync" and only(job.pass_time(5.0), m.PlanMessage) == []
    job.arrive(0, 6, plan_id=2)  # With the loaded state.
    (back,) = only(job.pass_time(5.0), m.PlanMessage)
    assert back.plan["mode"] == "partial" and back.plan["reason"] == "the loaded state is in force"
