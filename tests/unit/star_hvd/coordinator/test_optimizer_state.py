"""Plans of one optimizer that come into force, or do not: repeated ones, and deadlines."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from scheduler.plan.mode_names import NOT_LOCAL
from scheduler.records import Plan, StepTimes
from star_hvd.channel.messages import base as m
from star_hvd.channel.messages.leases import LeaseAsk
from star_hvd.channel.messages.shares import Feeds
from star_hvd.channel.messages.switch import Drained, Prepared
from tests.support.job_states import Job, only


def choosing(job: Job, plan: Plan) -> None:
    """Have a policy choose the same plan every time."""
    silent: dict[str, Any] = {"take_outcomes": list, "predictions": dict, "coming": None, "watch": lambda *a, **k: None}
    job.engine.choice = SimpleNamespace(decide=lambda *unused: plan, explain=lambda: "", **silent)


def test_a_plan_that_completes_to_the_active_one_is_not_published() -> None:
    """From servers to servers these stay, so a policy that moves them would be given the same plan for ever."""
    job = Job(4)
    job.register(None)
    job.engine.active = Plan.ps(4, 3, servers=(0,))
    choosing(job, Plan.ps(4, 3, servers=(1,), plan_id=1))
    assert not only(job.pass_time(5.0), m.PlanMessage)
    choosing(job, Plan.ps(4, 2, servers=(1,), plan_id=1))
    (published,) = only(job.pass_time(5.0), m.PlanMessage)
    assert published.plan["servers"] == [0] and published.plan["quorum"] == 2


def test_time_without_steps_is_not_counted_against_a_plan_that_awaits_one() -> None:
    """An evaluation, a compilation or a data set that is read for minutes is no failure of the mode."""
    job = Job()
    (published,) = only(job.register(Plan.partial(3, 2)), m.PlanMessage)
    assert not only(job.pass_time(300.0), m.Abandon), "no step yet"
    for step in range(3):  # Of 100 s each: the flag goes up after two own steps.
        for rank in range(3):
            job.arrive(rank, step, compute_s=100.0)
        assert not only(job.pass_time(100.0), m.Abandon)
    for rank in range(3):
        job.arrive(rank, 3, plan_id=published.plan["epoch"])
    assert job.engine.active.label == "partial(2)" and not job.engine.blocked


def test_steps_in_which_a_prepared_plan_does_not_come_into_force_end_in_its_deadline(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for plan in (Plan.partial(3, 2), Plan.subgroup(3, [0, 1])):
        job = Job()
        job.register(plan)
        for rank in range(3):
            job.say(rank, Prepared(0, 1))
        for step in range(5):
            for rank in range(3):
                job.arrive(rank, step)
            assert not only(job.pass_time(20.0), m.Abandon)
        assert only(job.pass_time(62.0), m.Abandon) and plan.mode in job.engine.blocked
        assert f"mode {plan.mode} is not possible at present: some rank did not switch to it" in caplog.text
        assert "did not come into force: some rank" in job.engine.explain()


def test_a_preparation_has_a_deadline_with_and_without_steps(caplog: pytest.LogCaptureFixture) -> None:
    job = Job()
    job.register(Plan.subgroup(3, [0, 1]))
    job.say(0, Prepared(0, 1))
    assert only(job.pass_time(61.0), m.Abandon) and "subgroup" in job.engine.blocked
    assert "not all ranks prepared it within 60 s" in caplog.text


def _balanced_job() -> Job:
    """A job whose plan 1, `sync(balanced)`, is in force since step 5."""
    job = Job()
    job.register(Plan.sync(3))
    job.engine.publish(Plan.sync(3, balanced=True, reason="shares follow the speed"), job.now_s)
    for rank in range(3):
        job.arrive(rank, 5, plan_id=1)
    return job


def test_batch_shares_that_change_for_days_are_one_plan() -> None:
    job = _balanced_job()
    for step in range(10, 1010):
        shares = (8, 8, 8) if step % 2 else (4, 10, 10)
        job.engine.shares_changed(step, shares, f"rank 0 gets {shares[0]} of 24 samples")
    assert [(step, plan.plan_id) for step, plan in job.engine.plans] == [(0, 0), (5, 1)]
    assert job.engine.plans[-1][1] is job.engine.active and job.engine.active.batch_shares == (8, 8, 8)
    assert job.engine.shares_step == 1009
    assert job.engine.active.reason == "shares follow the speed; now rank 0 gets 8 of 24 samples"


def test_shares_that_are_out_of_force_are_no_reason_of_the_plan() -> None:
    """Gradients follow a plain DataLoader from step 20 on, and the loader of `shard` again from step 30 on."""
    job = _balanced_job()
    for rank in range(3):
        job.say(rank, LeaseAsk(0, 0, 2400, 8, False, 0))
    job.state.shares.state.shares = (4, 10, 10)
    job.engine.shares_changed(10, (4, 10, 10), job.state.shares.sentence())
    assert "rank 0 gets 4 of 24 samples" in job.engine.explain()
    job.say(0, Feeds(-1, 20))
    assert job.engine.explain() == "sync(balanced): shares follow the speed"
    assert job.engine.active.batch_shares == () and job.engine.shares_step == 20
    job.say(0, Feeds(0, 30))
    assert job.engine.active.batch_shares == (4, 10, 10) and job.engine.shares_step == 30
    assert "; now rank 0 gets 4 of 24 samples" in job.engine.explain()


def test_groups_that_would_be_much_faster_are_published_once_they_stay_so() -> None:
    """Not groups that the user gave."""
    for wanted in (Plan.grouped(4, 2), Plan.grouped(4, [[0, 1, 2], [3]])):
        job, heard = Job(4), []
        for rank in range(4):
            heard += job.say(rank, m.Register(0, Plan.sync(4).to_dict(), wanted.to_dict()))
            job.engine.history.usual_s = lambda: [1.0, 1.0, 1.0, 4.0]
        (published,) = only(heard, m.PlanMessage)
        assert published.plan["groups"] == [[0, 1, 2], [3]]
        for rank in range(4):
            job.arrive(rank, 5, plan_id=published.plan["epoch"])
        job.engine.history.usual_s = lambda: [4.0, 1.0, 1.0, 1.0]
        later = [each.plan["groups"] for each in only(job.pass_time(60.0), m.PlanMessage)]
        assert later[:1] == [[[0], [1, 2, 3]]] * (not wanted.groups)


def _plans_of_crowded_job(seed: int, starved: float, usual: float) -> list[m.PlanMessage]:
    """4 ranks that wait for processors, at random, for a share of their time; the last one for another share."""
    rng, job, plans = random.Random(seed), Job(4), []
    job.register(None)
    for step in range(120):
        for rank in range(4):
            ran_s, share = 0.1 * rng.lognormvariate(0.0, 0.02), starved if rank == 3 else usual
            waits_s = ran_s * share / (1.0 - share) * rng.expovariate(1.0)
            job.say(rank, m.Arrive(0, step, 0, StepTimes(ran_s + waits_s, runqueue_s=waits_s), 0.01))
            job.now_s += 0.04
            plans += only(job.tick(), m.PlanMessage)
    return plans


@pytest.mark.parametrize("usual", [0.04, 0.2, 0.4])
@pytest.mark.parametrize("seed", range(4))
def test_ranks_that_compete_for_processors_are_no_stragglers(seed: int, usual: float) -> None:
    assert [plan.plan["reason"] for plan in _plans_of_crowded_job(seed, usual, usual)] == []


@pytest.mark.parametrize("usual", [0.02, 0.04, 0.2])
def test_a_rank_that_is_starved_among_ranks_that_wait_is_a_straggler(usual: float) -> None:
    assert _plans_of_crowded_job(0, 0.75, usual)


def test_with_another_optimizer_none_is_in_local(caplog: pytest.LogCaptureFixture) -> None:
    job = Job(3)
    [pending] = only(job.register(Plan.local(3, seconds=2.5)), m.PlanMessage)
    sent = job.register(None, optimizer_id=1) + job.tick()
    assert [each.plan_id for each in only(sent, m.Abandon)] == [Plan.from_dict(pending.plan).plan_id]
    assert not [each for each in only(job.pass_time(120.0), m.PlanMessage) if each.plan["mode"] == "local"]
    assert "local(2.5s) is not possible" in caplog.text and NOT_LOCAL in job.engine.explain()
    assert caplog.text.count("local(2.5s) is not possible") == 1
    assert all("local" not in each.window(job.now_s).allowed for each in job.state.optimizers.values())
    job.say(0, m.Unregister(1))  # It is closed on all ranks.
    again = only(job.pass_time(5.0), m.PlanMessage)
    assert again and again[-1].plan["mode"] == "local"


def test_an_optimizer_in_local_returns_to_sync_when_another_one_is_made() -> None:
    job = Job(3)
    [pending] = only(job.register(Plan.local(3, steps=4)), m.PlanMessage)
    for rank in range(3):
        job.arrive(rank, 3, Plan.from_dict(pending.plan).plan_id)
    assert job.engine.active.mode == "local"
    job.say(0, m.Register(1, Plan.sync(3).to_dict(), {}))
    [plan] = only(job.tick(), m.PlanMessage)
    assert plan.optimizer_id == 0 and plan.plan["mode"] == "sync" and plan.plan["reason"] == NOT_LOCAL


def test_an_optimizer_holds_up_no_rank_once_all_have_dropped_it() -> None:
    """Until then those that have not may step it, and refuse plans that are not possible beside it."""
    job = Job(3)
    job.register(None)
    job.register(None, optimizer_id=1)
    for rank in (2, 0, 1):
        assert job.engine.others.exist
        job.say(rank, m.OptimizerDropped(1, 0, False, True))
    assert 1 in job.state.optimizers, "its last step is in flight"
    assert not job.engine.others.exist


def test_servers_that_do_not_drain_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """The plan that they drain for cannot be abandoned, so nothing else would say why the job stands still."""
    job = Job(3)
    job.register(Plan.ps(3, 2, servers=(1,)))
    for rank in range(3):
        job.say(rank, Prepared(0, 1))
        job.arrive(rank, 9, plan_id=1)
    job.engine.publish(Plan.grouped(3, [(0, 1), (2,)]).replace(servers=(1,)), job.now_s)
    job.pass_time(30.0)
    assert "has been waiting" not in caplog.text, "they are still being prepared"
    for rank in range(3):
        job.say(rank, Prepared(0, 2))
    job.pass_time(5.0)
    assert "last update" not in caplog.text
    for _ in range(20):
        job.pass_time(1.0)
    told = [text for text in caplog.messages if "last update" in text]
    assert len(told) == 1 and "(plan 2)" in told[0] and "servers of ps(2), on ranks [1]" in told[0]
    job.say(1, Drained(0, 2, 30))
    assert job.engine.active.mode == "grouped"
