"""The coordinator's state, driven by scripted jobs without sockets, clocks or threads."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.records import Plan, StepTimes
from star_hvd.channel.messages import base as m
from star_hvd.channel.messages.joins import JoinCalled, JoinedRanks, ProgramCollective
from star_hvd.channel.messages.leases import Lease, LeaseAsk, LeaseReturn
from star_hvd.channel.messages.microbatches import MicrobatchOpen, MicrobatchShares
from star_hvd.channel.messages.switch import Commit, Drained, Prepared, Restart
from star_hvd.config import Config
from star_hvd.coordinator.job_state import ALL
from star_hvd.errors import ChannelError
from star_hvd.runtime.coordinator_client import CoordinatorClient
from tests.support.job_states import CONFIG, PLAN, Job, only, relaxed_job


def test_a_plan_is_published_once_all_ranks_have_registered() -> None:
    job = Job()
    plan = Plan.partial(3, 2, max_staleness=4)
    first = Plan.sync(3).to_dict()
    for rank in (1, 2):
        assert job.say(rank, m.Register(0, first, plan.to_dict())) == []
    (published,) = job.say(0, m.Register(0, first, plan.to_dict()))
    assert isinstance(published, m.PlanMessage) and job.destinations == [ALL]
    assert Plan.from_dict(published.plan) == plan.replace(plan_id=1)
    assert not job.engine.active.relaxed, "it is in force only when a rank acts on it"
    job.arrive(2, 3, plan_id=1)
    assert job.engine.active == plan.replace(plan_id=1) and job.engine.rule.plan == job.engine.active


def test_sync_and_auto_publish_nothing_at_first() -> None:
    assert Job().register(Plan.sync(3)) == []
    assert Job().register(None) == []


def test_ranks_that_ask_for_different_modes_get_that_of_rank_0() -> None:
    job = Job(2)
    first = Plan.sync(2).to_dict()
    job.say(1, m.Register(0, first, Plan.sync(2).to_dict()))
    (published,) = job.say(0, m.Register(0, first, Plan.partial(2, 1).to_dict()))
    assert isinstance(published, m.PlanMessage) and published.plan["mode"] == "partial"


def test_the_first_step_of_a_rank_tells_nothing_of_the_steps_to_come() -> None:
    job = Job()
    job.register(None)
    for rank in range(3):
        job.arrive(rank, 7, compute_s=1.3 + rank)
        job.arrive(rank, 8, compute_s=0.02)
    assert [stats.compute_s for stats in job.engine.window().ranks] == [(0.02,)] * 3


def test_collectives_are_passed_on_to_the_ranks_that_have_joined_until_all_have() -> None:
    job = Job()
    reduction = ProgramCollective("allreduce", "loss", "named", 1, False, [0], ["float32"], "cpu", 1, 1.0, 1.0)
    assert job.say(0, reduction) == []
    assert job.say(2, JoinCalled()) == [JoinedRanks([2])] and job.destinations == [ALL]
    assert job.say(0, reduction) == [reduction] and job.destinations == [2]
    assert job.say(0, JoinCalled()) == [JoinedRanks([2, 0])]
    assert job.say(1, reduction) == [reduction] and job.destinations == [0], "rank 2 has it already"
    assert job.say(1, JoinCalled()) == [JoinedRanks([2, 0, 1])]
    assert job.say(1, reduction) == [], "all have data again"


def test_a_collective_that_several_ranks_describe_is_passed_on_once_to_each_joined_rank() -> None:
    def loss(number: int, counter: str = "named") -> ProgramCollective:
        return ProgramCollective("allreduce", "loss", counter, number, False, [0], ["float32"], "cpu", 1, 1.0, 1.0)

    def told(rank: int, collective: ProgramCollective) -> list[int]:
        return job.destinations if job.say(rank, collective) else []

    job = Job(5)
    job.say(3, JoinCalled())
    assert [told(rank, loss(7)) for rank in (0, 1, 2)] == [[3], [], []]
    assert told(0, loss(7, "allreduce_async")) == [3], "counted on its own"
    job.say(2, JoinCalled())
    assert told(0, loss(7)) == [2], "described again as another has joined, to which it is new"
    assert [told(rank, loss(8)) for rank in (1, 0)] == [[3, 2], []]
    assert told(1, loss(7)) == [] and told(1, loss(7, "allreduce_async")) == [2]
    job.say(4, JoinCalled())
    assert [told(0, loss(number)) for number in (6, 7, 8)] == [[4]] * 3, "several in progress, in their sequence"
    job.say(0, JoinCalled())
    job.say(1, JoinCalled())
    job.say(1, JoinCalled())
    assert told(0, loss(1)) == [1], "after all have joined, numbers may begin anew"


def test_the_list_of_joined_ranks_is_sent_at_once_or_soon_and_not_for_each_of_many() -> None:
    job = Job(64)
    lists = [job.say(rank, JoinCalled()) for rank in range(62)]
    assert lists == [[JoinedRanks([0])]] + [[]] * 61
    assert job.state.tick(job.now_s) <= job.now_s + 0.1 and not only(job.sent(), JoinedRanks)
    job.now_s += 0.1
    assert only(job.tick(), JoinedRanks) == [JoinedRanks(list(range(62)))]
    assert not only(job.tick(), JoinedRanks), "nothing has changed"
    assert job.say(62, JoinCalled()) == []
    assert job.say(63, JoinCalled()) == [JoinedRanks(list(range(64)))], "nobody waits longer than necessary"
    job.now_s += 0.1
    assert not only(job.tick(), JoinedRanks), "all have data again"


def test_no_step_is_closed_without_a_rank_that_has_just_got_samples() -> None:
    """It became inactive while the coordinator was held up, and is about to work on them."""
    job = Job(2)
    job.register(Plan.sync(2))
    asks = LeaseAsk(0, 0, 64, 4, False, begun=0, ahead=1, load_s=0.0, digest=1, done=[], idle=True)
    assert only(job.say(0, asks), Lease)
    job.say(1, m.Away(True, True, "waiting for samples"))
    job.arrive(0, 0, compute_s=0.3)
    assert only(job.say(1, asks), Lease) and not only(job.tick(), m.CloseStep)
    job.say(1, m.Away(False, False, "waiting for samples"))
    job.now_s += 100.0
    assert not only(job.tick(), m.CloseStep), "it has data"


def test_a_rank_at_the_end_of_an_epoch_that_asks_for_the_next_one_is_not_waited_for() -> None:
    job = Job(2)
    job.register(Plan.sync(2))

    def asks(epoch: int) -> LeaseAsk:
        return LeaseAsk(0, epoch, 12, 4, False, begun=0, ahead=1, load_s=0.0, digest=1, done=[], idle=True)

    for rank in range(2):
        assert only(job.say(rank, asks(0)), Lease)
        job.arrive(rank, 0, compute_s=0.03)
    job.say(1, m.Away(True, True, "the end of an epoch"))
    job.say(1, LeaseReturn(0, 0, 4, leaves=True))
    assert only(job.say(1, asks(1)), Lease), "for when it begins"
    job.arrive(0, 1, compute_s=0.03)
    assert only(job.tick(), m.CloseStep)


def test_a_refused_plan_is_abandoned() -> None:
    job = Job()
    job.register(Plan.partial(3, 2))
    heard = job.say(2, m.ModeUnsupported(0, 1, "cannot"))
    assert heard == [m.Abandon(0, 1, "cannot")]
    assert job.engine.refused == "cannot" and not job.engine.active.relaxed
    assert job.pass_time(5.0) == []


def test_a_plan_not_taken_up_in_time_is_abandoned() -> None:
    job = Job()
    job.register(Plan.partial(3, 2))
    job.tick()
    job.arrive(0, 4)  # Steps in which it could have been taken up.
    assert only(job.pass_time(59.0), m.Abandon) == []
    (abandon,) = only(job.pass_time(2.0), m.Abandon)
    assert "60 s" in abandon.reason


def test_a_plan_taken_up_while_it_was_being_abandoned_is_in_force() -> None:
    job = Job()
    job.register(Plan.partial(3, 2))
    job.say(2, m.ModeUnsupported(0, 1, "cannot"))
    job.arrive(0, 4, plan_id=1)
    assert job.engine.active.relaxed and job.engine.rule.plan.relaxed


def test_a_rank_pinned_while_relaxed_brings_everybody_back_to_sync() -> None:
    job = relaxed_job()
    (published,) = only(job.say(1, m.ModeUnsupported(0, 1, "a GradScaler")), m.PlanMessage)
    assert published.plan["mode"] == "sync" and published.plan["epoch"] == 2
    assert "rank 1: a GradScaler" in published.plan["reason"]
    assert only(job.say(2, m.ModeUnsupported(0, 1, "a GradScaler")), m.PlanMessage) == [], "one return is enough"
    job.arrive(0, 9, plan_id=2)
    assert not job.engine.active.relaxed
    assert only(job.say(2, m.ModeUnsupported(0, 2, "again")), m.PlanMessage) == []


@pytest.mark.parametrize("equal_batches, where", [(False, "the exact modes"), (True, "sync")])
def test_the_log_says_what_remains_possible(equal_batches: bool, where: str, caplog: pytest.LogCaptureFixture) -> None:
    """With a GradScaler `sync(balanced)` stays; with what reduces inside the network only equal batches do."""
    job = Job()
    job.register(None)
    job.say(2, m.ModeUnsupported(0, 0, "the reason", equal_batches))
    assert [record.getMessage() for record in caplog.records] == [f"optimizer 0 stays in {where}: rank 2: the reason"]


def test_a_step_is_closed_and_ordered_once() -> None:
    job = relaxed_job()
    job.tick()
    for rank in (0, 1):
        job.arrive(rank, 6, plan_id=1)
    orders = only(job.tick(), m.CloseStep)
    orders += only(job.pass_time(3.0), m.CloseStep)
    assert [order.step for order in orders] == [6]
    assert orders[0].typical_compute_s == pytest.approx(0.1)


def test_an_epoch_ends_when_all_ranks_have_asked_in_vain() -> None:
    job = Job()
    take = m.RequestBatch(0, 0, 10, 4, False)
    grants = [job.say(rank, take)[0] for rank in (0, 1, 2)]
    assert [(g.start, g.stop) for g in grants] == [(0, 4), (4, 8), (8, 10)]  # type: ignore[attr-defined]
    assert job.destinations == [2], "only the rank that asked is answered"
    for rank in (0, 1):
        (grant,) = job.say(rank, take)
        assert grant == m.Grant(0, 0, 0, 0)
    heard = job.say(2, take)
    assert heard == [m.Grant(0, 0, 0, 0), m.EpochEnd(0, 0)]
    assert job.say(2, take) == [m.Grant(0, 0, 0, 0)], "announced once"


def test_a_request_that_is_repeated_gets_the_same_batch_and_no_other_rank_gets_it() -> None:
    job = Job()
    first = job.say(1, m.RequestBatch(0, 0, 10, 4, False, 1))
    assert first == [m.Grant(0, 0, 0, 4, 1)]
    again = m.RequestBatch(0, 0, 10, 4, False, 1)
    assert job.say(1, again) == first == job.say(1, again)
    assert job.say(2, m.RequestBatch(0, 0, 10, 4, False, 1)) == [m.Grant(0, 0, 4, 8, 1)], "every rank counts for itself"
    assert job.say(1, m.RequestBatch(0, 0, 10, 4, False, 2)) == [m.Grant(0, 0, 8, 10, 2)]
    assert job.say(1, m.RequestBatch(0, 0, 10, 4, False, 1)) == first, "even later"
    for number in range(3, 200):
        job.say(1, m.RequestBatch(0, 3, 10_000, 4, False, number))
    assert job.say(1, m.RequestBatch(0, 0, 10, 4, False, 1)) == [], "an epoch that is long over does not begin again"
    kept = [n for n in range(1, 200) if job.say(1, m.RequestBatch(0, 3, 10_000, 4, False, n))]
    assert kept == list(range(kept[0], 200)) and len(kept) <= 64, "of so many requests the answers are kept"


def test_a_rank_asks_again_and_takes_one_answer() -> None:
    sent: list[m.Message] = []

    class Silent:
        last_heard_s = 0.0

        def send(self, message: m.Message) -> None:
            """The first answer is lost; those to the repetitions come twice."""
            sent.append(message)
            assert isinstance(message, m.RequestBatch)
            if sent.count(message) > 1:
                for _ in range(2):
                    process.on_message(
                        m.Grant(message.loader, message.epoch, 4 * message.number, 99, message.number)
                    )

    silent: Any = Silent()
    process = CoordinatorClient(Config(), 0, silent, lambda: None, ask_again_s=0.1)
    for number in (1, 2, 3):
        process.request(0, 0, 100, 4, False)
        assert process.granted(0, 0) == (4 * number, 99)
    assert set(sent) == {m.RequestBatch(0, 0, 100, 4, False, number) for number in (1, 2, 3)}


def test_an_epoch_ends_for_the_others_when_a_rank_finishes_in_the_middle_of_it() -> None:
    """A rank may break out of its loop and end its program while others wait for the end of the epoch."""
    job = Job()
    take = m.RequestBatch(0, 0, 2, 1, False)
    job.say(0, take), job.say(1, take), job.say(0, take), job.say(1, take)
    assert only(job.pass_time(5.0), m.EpochEnd) == []
    assert only(job.say(2, m.Finished(2)), m.EpochEnd) == [m.EpochEnd(0, 0)]


def test_everybody_leaves_once_all_have_finished() -> None:
    job = Job()
    assert only(job.say(0, m.Finished(0)), m.Bye) == []
    assert only(job.say(1, m.Finished(1)), m.Bye) == []
    assert only(job.say(2, m.Finished(2)), m.Bye) == [m.Bye()]
    assert only(job.pass_time(30.0), m.Bye) == []


def test_a_coordinator_that_stood_still_calls_nobody_lost() -> None:
    job = Job(3)
    job.register(None)
    job.pass_time(1.0)
    job.now_s += 30.0
    job.state.paused(30.0)
    assert only(job.tick(), m.Bye) == [] and not job.state.lost
    job.pass_time(1.0)
    assert not job.state.lost
    assert only(job.pass_time(11.0, alive=(0, 1)), m.Bye) == [] and job.state.lost == {2}


def test_a_coordinator_that_stood_still_gives_up_no_plan_and_closes_no_step(caplog: pytest.LogCaptureFixture) -> None:
    """It could not hear meanwhile that the plan was prepared, nor that a gradient had arrived."""
    for served in (True, False):
        job = Job(3, Config(lost_after_s=1e6, plan_deadline_s=60.0, stall_warning_s=50.0))
        job.register(Plan.ps(3, 1, servers=(0,)) if served else Plan.partial(3, 2))
        for rank in range(3):
            job.arrive(rank, 0, plan_id=0 if served else 1)
        job.tick()
        job.arrive(1, 1, plan_id=0 if served else 1)
        job.pass_time(30.0)
        job.now_s += 300.0
        job.state.paused(300.0)
        heard = job.tick() + job.pass_time(10.0)
        assert not only(heard, m.Abandon) and not only(heard, m.CloseStep) and "waiting for" not in caplog.text
        heard = job.pass_time(30.0)
        assert only(heard, m.Abandon if served else m.CloseStep), "the time since then counts"
        caplog.clear()


def test_nobody_is_told_of_an_end_while_nobody_has_finished() -> None:
    """Rank 0 may hear nothing for a while, of itself neither, and all come back."""
    job = Job(3)
    assert only(job.pass_time(30.0, alive=()), m.Bye) == [] and job.state.lost == {0, 1, 2}
    job.pass_time(1.0)
    assert not job.state.lost
    for rank in (0, 1):
        assert only(job.say(rank, m.Finished(rank)), m.Bye) == []
    assert only(job.say(2, m.Finished(2)), m.Bye) == [m.Bye()]


def ask_source(job: Job, rank: int) -> list[m.StateSource]:
    return only(job.say(rank, m.FindStateSource(0)), m.StateSource)


def sources(job: Job, rank: int) -> set[int]:
    """Ranks that are named, but for every third, which may not be known to have the state."""
    named = [reply.rank for _ in range(9) for reply in ask_source(job, rank)]
    return set(named[::3] + named[1::3])


def test_the_source_of_a_fetch_is_up_to_date_and_alive() -> None:
    job = relaxed_job()
    assert sources(job, 2) == {0, 1} and job.destinations == [2], "in turns: one may be behind after all"
    for rank in (0, 1):
        job.arrive(rank, 9, plan_id=1)
    assert sources(job, 0) == {1}, "not the one that asks, not the one behind"
    job.say(1, m.Away(True, True, "evaluation"))
    job.say(0, m.Away(True, True, "end of epoch"))
    assert sources(job, 2) == {0, 1}, "whoever waits for the one that asks serves it"
    job.pass_time(11.0, alive=(1, 2))
    assert sources(job, 2) == {1}, "rank 0 is silent"
    job.pass_time(11.0, alive=(2,))
    assert sources(job, 2) == {-1}


def test_ranks_that_fall_behind_together_fetch_from_different_sources() -> None:
    job = relaxed_job(8)
    behind = (5, 6, 7)
    for rank in set(range(8)) - set(behind):
        job.arrive(rank, 9, plan_id=1)
    named = [[reply.rank for rank in behind for reply in ask_source(job, rank)] for _ in range(3)]
    assert all(len(set(each)) == len(behind) for each in named), named
    assert set(named[0] + named[1]) <= set(range(5)), "ranks that are up to date"
    assert set(named[2]) <= set(behind), "the third time, ranks that may be the last with the state"


def test_a_rank_that_takes_part_no_more_is_asked_for_the_state_now_and_then() -> None:
    """It may be the last that had it, where all who take part are away and nobody can replay their steps."""
    job = relaxed_job()
    for rank in (0, 1):
        job.arrive(rank, 9, plan_id=1)
    named = [reply.rank for _ in range(9) for reply in ask_source(job, 0)]
    assert named == [1, 1, 2] * 3


def test_a_rank_that_says_nothing_is_not_asked_for_the_state() -> None:
    job = relaxed_job()
    job.pass_time(Config().absent_after_s + 1.0, alive=(1, 2))
    assert 0 not in job.state.lost
    assert sources(job, 2) == {1}


def test_a_state_is_loaded_once_servers_that_are_ending_have_ended() -> None:
    job = Job(3)
    job.register(Plan.ps(3, 2))
    engine = job.engine
    for rank in range(3):
        job.say(rank, Prepared(0, 1))
        job.arrive(rank, 9, plan_id=1)
    assert engine.active.mode == "ps"
    engine.publish(Plan.grouped(3, [(0, 1), (2,)]).replace(servers=(1,)), job.now_s)
    for rank in range(3):
        heard = job.say(rank, Prepared(0, 2))
    assert only(heard, Commit) == [Commit(0, 2)], "the old servers are told to end"
    heard = job.say(0, Restart(0)) + job.pass_time(1.0)
    assert only(heard, m.PlanMessage) == [] and only(heard, m.Abandon) == []
    heard = job.say(0, Drained(0, 2, 30)) + job.pass_time(1.0)
    (home,) = only(heard, m.PlanMessage)
    assert home.plan["mode"] == "sync" and home.plan["epoch"] == 3
    for rank in range(3):
        job.say(rank, Prepared(0, 3))
    job.say(1, Drained(0, 3, 30))
    assert engine.active.mode == "sync"
    for rank in range(3):
        job.arrive(rank, 31, plan_id=3)  # On the loaded state.
    (back,) = only(job.pass_time(CONFIG.decide_interval_s + 1.0), m.PlanMessage)
    assert back.plan["mode"] == "grouped", "and back after the load"


def test_a_plan_whose_servers_are_ending_is_not_abandoned_because_a_rank_refuses_it() -> None:
    """They hear of no other plan: it comes into force, and the job goes on to `sync` from there."""
    job = Job(3)
    job.register(Plan.ps(3, 2))
    for rank in range(3):
        job.say(rank, Prepared(0, 1))
        job.arrive(rank, 9, plan_id=1)
    job.engine.publish(Plan.grouped(3, [(0, 1), (2,)]).replace(servers=(1,)), job.now_s)
    for rank in range(3):
        job.say(rank, Prepared(0, 2))
    heard = job.say(2, m.ModeUnsupported(0, 2, "no room")) + job.pass_time(1.0)
    assert only(heard, m.Abandon) == [] and only(heard, m.PlanMessage) == []
    heard = job.say(0, Drained(0, 2, 30)) + job.pass_time(1.0)
    (home,) = only(heard, m.PlanMessage)
    assert home.plan["mode"] == "sync" and job.engine.active.mode == "grouped"


def test_arrivals_are_hurried_while_somebody_is_away() -> None:
    job = relaxed_job()
    assert m.ReportImmediately(True) in job.say(1, m.Away(True, True, "x"))
    assert m.ReportImmediately(True) not in job.say(2, m.Away(True, True, "x"))
    job.say(1, m.Away(False, True, "x"))
    assert m.ReportImmediately(False) not in job.pass_time(3.0)
    job.say(2, m.Away(False, True, "x"))
    assert m.ReportImmediately(False) in job.pass_time(0.6), "an epoch may be as short as that"


def test_what_is_said_of_a_closed_optimizer_is_ignored() -> None:
    job = relaxed_job()
    job.say(0, m.Unregister(0))
    job.arrive(1, 7)
    assert job.state.optimizers == {}


def test_a_rank_pinned_while_another_relaxed_plan_is_on_its_way_brings_everybody_back_to_sync() -> None:
    """It says the epoch of the plan in force: it has dropped the one on its way already."""
    job = relaxed_job()
    job.engine.publish(Plan.partial(3, 1), job.now_s)
    (on_its_way,) = only(job.sent(), m.PlanMessage)
    heard = job.say(1, m.ModeUnsupported(0, 1, "a GradScaler")) + job.tick()
    given_up = [x.plan_id for x in only(heard, m.Abandon)]
    assert given_up == [on_its_way.plan["epoch"]], "it must not wait for the deadline"
    (published,) = only(heard, m.PlanMessage)
    assert published.plan["mode"] == "sync" and "a GradScaler" in published.plan["reason"]
    assert only(job.pass_time(5.0), m.PlanMessage) == [], "one return is enough"


def test_a_rank_pinned_before_the_first_plan_was_taken_up_ends_it_at_once() -> None:
    job = Job()
    job.register(Plan.partial(3, 2))
    heard = job.say(2, m.ModeUnsupported(0, 0, "a GradScaler"))
    assert heard == [m.Abandon(0, 1, "a GradScaler")]
    assert job.pass_time(70.0) == []


def test_a_refused_plan_that_was_taken_up_all_the_same_is_left_again() -> None:
    """All ranks had raised their flags for it when one of them found out that it cannot."""
    job = Job()
    job.register(Plan.partial(3, 2))
    job.say(2, m.ModeUnsupported(0, 1, "a GradScaler"))
    for rank in range(3):
        job.arrive(rank, 4, plan_id=1)
    assert job.engine.active.relaxed
    (published,) = only(job.pass_time(1.0), m.PlanMessage)
    assert published.plan["mode"] == "sync" and published.plan["epoch"] == 2
    assert only(job.pass_time(30.0), m.PlanMessage) == []
    for rank in range(3):
        job.arrive(rank, 5, plan_id=2)
    assert not job.engine.active.relaxed and only(job.pass_time(70.0), m.PlanMessage) == []


def test_a_return_to_sync_that_was_not_taken_up_in_time_is_tried_again() -> None:
    job = relaxed_job()
    job.say(1, m.ModeUnsupported(0, 1, "a GradScaler"))
    job.tick()
    job.arrive(0, 9, plan_id=1)
    heard = job.pass_time(62.0)
    assert len(only(heard, m.Abandon)) == len(only(heard, m.PlanMessage)) == 1
    assert only(heard, m.PlanMessage)[0].plan["mode"] == "sync"


def test_arrivals_are_hurried_also_after_a_rank_came_back_late() -> None:
    """The end of an epoch takes all ranks back; what they say of it afterwards must not swallow the next order."""
    job = relaxed_job()
    job.say(1, m.Away(False, True, "x"))
    assert m.ReportImmediately(True) in job.say(2, m.Away(True, True, "x"))
    assert job.say(0, m.Away(True, True, "x")) == []
    assert m.ReportImmediately(False) not in job.pass_time(3.0)


def test_nobody_is_told_twice_that_arrivals_need_not_hurry() -> None:
    job = relaxed_job()
    job.say(1, m.Away(True, True, "x"))
    job.say(1, m.Away(False, True, "x"))
    assert only(job.pass_time(3.0), m.ReportImmediately) == [m.ReportImmediately(False)]
    job.say(1, m.Away(False, True, "x"))
    assert only(job.pass_time(3.0), m.ReportImmediately) == []


def test_a_step_that_was_closed_waits_for_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """The ranks may compute the next gradient for minutes; that is no stall."""
    job = relaxed_job()
    job.tick()
    caplog.clear()
    for rank in (0, 1):
        job.arrive(rank, 6, plan_id=1)
    assert len(only(job.pass_time(30.0), m.CloseStep)) == 1
    assert "waiting" not in caplog.text
    job.arrive(0, 7, plan_id=1)
    assert len(only(job.pass_time(30.0), m.CloseStep)) == 0
    assert "step 7 has been waiting for ranks [1, 2]" in caplog.text


def test_auto_relaxes_for_a_slow_rank_and_never_after_a_refusal() -> None:
    published: dict[bool, list[Any]] = {}
    for refused in (False, True):
        job = Job(4)
        job.register(None)
        if refused:
            job.say(3, m.ModeUnsupported(0, 0, "sparse gradients"))
        heard: list[m.Message] = []
        for step in range(120):
            for rank in range(4):
                job.arrive(rank, step, compute_s=0.4 if rank == 2 else 0.1)
            job.now_s += 0.4
            heard += job.tick()
        published[refused] = only(heard, m.PlanMessage)
    assert published[False] and published[False][0].plan["quorum"] < 4
    assert published[True] == []


def _exact_plans(reason: m.Message, plan: Plan | None = None) -> tuple[Job, list[Plan]]:
    """What is published where `shard` feeds the ranks, one is slow, and a rank has refused relaxed modes."""
    job = Job(4)
    job.register(plan)
    job.register(Plan.sync(4), optimizer_id=1)
    heard = job.say(3, reason)
    for rank in range(4):
        heard += job.say(rank, LeaseAsk(0, 0, 100_000, 16, False, 0, 0, 0.0, 1, []))
    for step in range(120):
        for rank in range(4):
            job.arrive(rank, step, compute_s=0.4 if rank == 2 else 0.1)
        job.now_s += 0.4
        heard += job.tick()
    return job, [Plan.from_dict(each.plan) for each in only(heard, m.PlanMessage) if each.optimizer_id == 0]


def test_what_refuses_relaxed_modes_leaves_auto_the_exact_ones() -> None:
    job, published = _exact_plans(m.ModeUnsupported(0, 0, "parameters on CUDA"))
    assert published and all(plan.balanced for plan in published)
    job.arrive(0, 120, plan_id=published[-1].plan_id)
    assert job.engine.explain().endswith("only exact modes: parameters on CUDA")


def test_what_refuses_relaxed_modes_leaves_the_users_shares() -> None:
    _, published = _exact_plans(m.ModeUnsupported(0, 0, "a GradScaler"), Plan.sync(4, batch_shares=(8, 16, 16, 24)))
    assert {plan.batch_shares for plan in published} == {(8, 16, 16, 24)}


@pytest.mark.parametrize("optimizer", [0, 1])
@pytest.mark.parametrize("plan", [None, Plan.sync(4, balanced=True)])
def test_where_batches_must_be_equal_no_optimizer_gets_others(optimizer: int, plan: Plan | None) -> None:
    job, published = _exact_plans(m.ModeUnsupported(optimizer, 0, "SyncBatchNorm", equal_batches=True), plan)
    assert not any(each.uneven for each in published)
    assert plan is None or "SyncBatchNorm" in job.engine.explain()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("even", [False, True])
def test_a_job_of_exact_modes_starts_with_batch_shares(exact: bool, even: bool) -> None:
    job = Job(4)
    job.register(None)
    job.register(Plan.sync(4), optimizer_id=1)
    if exact:
        job.say(0, m.ModeUnsupported(0, 0, "a GradScaler"))
    if even:
        job.say(0, m.ModeUnsupported(1, 0, "SyncBatchNorm", equal_batches=True))
    heard = job.say(1, LeaseAsk(0, 0, 100_000, 16, False, 0, 0, 0.0, 1, []))  # Without a tick.
    plans = [Plan.from_dict(each.plan) for each in only(heard, m.PlanMessage)]
    assert [plan.label for plan in plans] == (["sync(balanced)"] if exact and not even else [])
    again = job.say(2, LeaseAsk(0, 0, 100_000, 16, False, 0, 0, 0.0, 1, []))
    assert only(again, m.PlanMessage) == [], "once"


@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("most", [0, 16, 32])
def test_with_microbatches_auto_starts_with_taking_over_if_longer_passes_fit(most: int, even: bool) -> None:
    job = Job(4)
    job.register(None)
    if even:
        job.say(0, m.ModeUnsupported(0, 0, "SyncBatchNorm", equal_batches=True))
    heard = job.say(1, MicrobatchOpen(0, 0, 100_000, 16, 4, False, 0, 0, most=most))
    starts = most > 16 and not even
    plans = [Plan.from_dict(each.plan) for each in only(heard, m.PlanMessage)]
    assert [plan.label for plan in plans] == (["sync(steal)"] if starts else [])
    sizes = {tuple(each.sizes) for each in only(heard, MicrobatchShares) if each.step == 0}
    assert len(sizes) == 1 and (len(set(sizes.pop())) > 1) == starts, "the first step is made for it"


@pytest.mark.parametrize("early", [False, True])
def test_the_first_step_of_a_stealing_loader_is_made_for_it(early: bool) -> None:
    """Passes of several sizes, which show pace and fixed cost, also if a rank's loader is faster than an optimizer."""
    job = Job(4)
    opened = MicrobatchOpen(0, 0, 100_000, 16, 4, False, 0, 0)
    heard = [] if not early else job.say(0, opened)
    job.register(Plan.sync(4, steal=True))
    for rank in range(early, 4):
        heard += job.say(rank, opened)
    shares = [each for each in only(heard, MicrobatchShares) if each.step == 0]
    assert len(shares) == 4 and len({tuple(each.sizes) for each in shares}) == 1
    equal = len(set(shares[0].sizes)) == 1
    assert equal == early, "a step that is made is not made again"
    plans = [Plan.from_dict(each.plan).label for each in only(heard, m.PlanMessage)]
    assert plans == ["sync(steal)"]


def test_shares_end_where_batches_turn_out_to_have_to_be_equal() -> None:
    job, published = _exact_plans(m.ModeUnsupported(0, 0, "a GradScaler"))
    job.arrive(0, 120, plan_id=published[-1].plan_id)
    assert job.engine.active.balanced
    heard = only(job.say(1, m.ModeUnsupported(0, 1, "sparse gradients", equal_batches=True)), m.PlanMessage)
    (last,) = [Plan.from_dict(each.plan) for each in heard]
    assert last.plain and last.reason == "sparse gradients"


def test_a_finished_rank_stays_away_after_an_epoch_that_ends_without_it() -> None:
    job = Job()
    job.register(Plan.sync(3))
    job.say(2, m.Finished(2))
    for rank in (0, 1):
        job.say(rank, m.Away(True, True, "end of data"))
        job.say(rank, m.RequestBatch(0, 0, 0, 4, False))
    for rank in (0, 1):
        job.say(rank, m.Away(False, True, "end of data"))
        job.arrive(rank, 0)
    assert [order.step for order in only(job.tick(), m.CloseStep)] == [0], "rank 2 will never deliver again"


def test_optimizers_have_steps_and_plans_of_their_own() -> None:
    job = relaxed_job()
    job.register(Plan.sync(3), optimizer_id=1)
    for rank in (0, 1):
        job.say(rank, m.Arrive(1, 9, 0, StepTimes(0.1), 0.0))
    assert [order.optimizer_id for order in only(job.pass_time(2.0), m.CloseStep)] == []
    assert job.state.optimizers[1].rule.step == 9 and not job.state.optimizers[1].active.relaxed
    job.say(0, m.Unregister(1))
    assert set(job.state.optimizers) == {0}


def test_a_report_from_before_a_switch_does_not_undo_it() -> None:
    job = relaxed_job()
    job.engine.publish(Plan.partial(3, 1), job.now_s)
    job.arrive(0, 9, plan_id=2)
    assert job.engine.active.quorum == 1
    job.arrive(1, 8, plan_id=1)
    job.arrive(2, 8, plan_id=0)
    job.say(0, m.HeaderNote(0, 8, 1, [0, 1], 1.0, 2.0, 2.0, 0.0, 0, 0.0, 0.0))
    assert job.engine.active.quorum == job.engine.rule.plan.quorum == 1
    assert [plan.plan_id for _, plan in job.engine.plans] == [0, 1, 2]


def test_an_epoch_nobody_published_is_not_taken_up() -> None:
    job = relaxed_job()
    job.arrive(0, 9, plan_id=7)
    assert job.engine.active.plan_id == 1


def test_rank_0_may_tell_of_a_switch_first() -> None:
    job = Job()
    job.register(Plan.partial(3, 2))
    job.say(0, m.HeaderNote(0, 4, 1, [0, 1, 2], 1.5, 3.0, 3.0, 0.0, 0, 0.0, 0.0))
    assert job.engine.active.relaxed and job.engine.steps == 5 and job.engine.losses.usual == 1.5


def test_decisions_know_how_many_bytes_steps_send() -> None:
    job = Job()
    for rank in range(3):
        job.say(rank, m.Register(0, Plan.sync(3).to_dict(), {}, 1_000_000, pushed_part=0.25))
    assert (job.engine.window().reduced_part, job.engine.window().pushed_part) == (1.0, 0.25)

    def header(step: int, sent_bytes: int) -> None:
        job.say(0, m.HeaderNote(0, step, 0, [0, 1, 2], 1.0, 3.0, 3.0, 0.0, 0, 0.0, 0.0, sent_bytes))

    header(0, 1_004_000)  # With a header behind the gradient.
    assert job.engine.window().reduced_part == 1.0
    header(1, 20_000)
    header(2, 0)  # An averaging.
    header(3, 1_004_000)  # A trial without compression.
    assert job.engine.window().reduced_part == 0.02
    for step in range(4, 40):
        header(step, 500_000)
    assert job.engine.window().reduced_part == 0.5


def test_decisions_know_the_bytes_of_added_parameters() -> None:
    job = Job()
    for rank in range(3):
        job.say(rank, m.Register(0, Plan.sync(3).to_dict(), {}, 1000))
    for rank in range(3):
        job.say(rank, m.GradientSizes(0, 0, 9_000_000, 0.2, 0.26))
    window = job.engine.window()
    assert (window.comm_bytes, window.edge_part, window.reduced_part, window.pushed_part) == (9_000_000, 0.2, 1.0, 0.26)


def test_arrivals_stay_hurried_as_long_as_a_rank_has_finished() -> None:
    job = Job()
    job.register(Plan.sync(3))
    assert only(job.say(2, m.Finished(2)), m.ReportImmediately) == [m.ReportImmediately(True)]
    for rank in (0, 1):
        job.say(rank, m.RequestBatch(0, 0, 0, 4, False))
    assert only(job.pass_time(5.0), m.ReportImmediately) == []


@pytest.mark.parametrize("plan", [PLAN | {"mode": "x" * 500_000}, PLAN | {"y" * 500_000: 1}, {"z": 1}])
def test_what_is_said_of_a_refused_plan_is_short(plan: dict[str, Any]) -> None:
    for message in (m.Register(0, plan, {}), m.Register(0, PLAN, plan)):
        with pytest.raises(ChannelError, match="a plan in a register message is invalid: plan ") as caught:
            Job().say(0, message)
        assert len(str(caught.value)) < 300, "an error must not carry what was received into the log"


@pytest.mark.parametrize("ask", [LeaseAsk(0, 0, 1000, 1, False, 0), LeaseAsk(0, 0, 1000, 16, False, 0, fixed=True)])
def test_shares_are_refused_with_the_reason_where_the_loader_s_batches_cannot_have_other_sizes(ask: LeaseAsk) -> None:
    """Those of a batch sampler, one position each, and those of a stream; not "needs hvd.shard", which is there."""
    job = Job()
    job.register(Plan.sync(3, balanced=True))
    for rank in range(3):
        job.say(rank, ask)
    for step in range(1, 11):
        for rank in range(3):
            job.arrive(rank, step)
        job.now_s += 0.2
        job.tick()
    assert "whose sizes hvd.shard can choose" in job.engine.explain() and job.engine.active.plain
