"""What the coordinator notices and logs: slow ranks, long steps, machines, losses, links."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from scheduler.records import Plan, StepTimes
from star_hvd.channel.messages import base as m
from star_hvd.channel.messages.leases import LeaseAsk
from star_hvd.channel.messages.switch import LinkRate, MachineNote, MakeSet, Probe
from star_hvd.config import Config
from star_hvd.coordinator.plans.report_trigger import SlowReportTrigger
from star_hvd.errors import ChannelError
from tests.support.job_states import Job, only, relaxed_job


def test_a_silent_rank_is_named_and_the_others_wait_for_its_end(caplog: pytest.LogCaptureFixture) -> None:
    """It may be frozen and train on: the first rank that leaves shuts Horovod down."""
    job = Job()
    job.say(0, m.Finished(0)), job.say(1, m.Finished(1))
    job.pass_time(9.5, alive=(0, 1))
    assert not job.state.lost
    assert only(job.pass_time(60.0, alive=(0, 1)), m.Bye) == [] and job.state.lost == {2}
    assert "rank 2 has sent no message for 10." in caplog.text
    job.say(2, m.Heartbeat(2))
    assert "rank 2 sends messages again" in caplog.text and not job.state.lost
    assert only(job.say(2, m.Finished(2)), m.Bye) == [m.Bye()]


def test_a_step_that_waits_long_is_logged_with_the_ranks_that_are_missing(caplog: pytest.LogCaptureFixture) -> None:
    job = Job(3, Config(stall_warning_s=10.0, lost_after_s=1e6))
    job.register(None)
    job.arrive(0, 7), job.arrive(2, 7)
    job.pass_time(9.5)
    assert caplog.text == ""
    (told,) = only(job.pass_time(1.0), m.StepWaits)
    assert (told.step, told.ranks) == (7, [1]) and told.waited_s == pytest.approx(10.0, abs=0.5)
    assert "step 7 has been waiting for ranks [1] for 10 s" in caplog.text
    job.pass_time(5.0)
    assert caplog.text.count("has been waiting") == 1, "not more often than it is long"
    job.arrive(1, 7)
    job.pass_time(30.0)
    assert caplog.text.count("has been waiting") == 1


def test_ranks_that_others_wait_for_at_the_end_are_logged_more_and_more_rarely(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nothing else would show where a rank is stuck that never gets to its end: no step waits for it."""
    job = Job(3, Config(lost_after_s=1e6))
    job.pass_time(100.0)
    job.say(0, m.Finished(0)), job.say(1, m.Finished(1))
    assert only(job.pass_time(59.0), m.StepWaits) == []
    for pause_s, waited_s in ((2.0, 60.0), (61.0, 120.0), (121.0, 240.0)):
        (told,) = only(job.pass_time(pause_s), m.StepWaits)
        assert (told.step, told.ranks) == (-1, [2]) and told.waited_s == pytest.approx(waited_s, abs=3.0)
        assert only(job.pass_time(waited_s - 3.0 - pause_s), m.StepWaits) == []
    assert "ranks [0, 1] have ended, and wait for ranks [2] for 60 s" in caplog.text
    assert only(job.say(2, m.Finished(2)), m.Bye) == [m.Bye()]
    assert only(job.pass_time(1000.0), m.StepWaits) == []


def test_a_step_closed_at_its_deadline_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    job = relaxed_job()
    job.tick()
    job.arrive(1, 6, plan_id=1)
    (order,) = only(job.pass_time(61.0), m.CloseStep)
    assert order.step == 6
    assert "step 6 closes without ranks [0, 2]: its quorum was not reached within 60 s" in caplog.text


def test_steps_that_close_early_beside_another_optimizer_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """With two steps of one to each of another, every other step would be."""
    job = relaxed_job()
    job.register(Plan.sync(3), optimizer_id=1)
    for step in range(6, 9):
        for rank in range(3):
            job.arrive(rank, step, plan_id=1)
        job.now_s += 0.1
        job.tick()
    job.arrive(1, 9, plan_id=1)
    (order,) = only(job.pass_time(5.0), m.CloseStep)
    assert order.step == 9 and "quorum" not in caplog.text


def test_a_slow_rank_is_named_and_not_named_again_at_once(caplog: pytest.LogCaptureFixture) -> None:
    job = Job(3, Config(report_interval_s=30.0, lost_after_s=1e6))
    job.register(Plan.sync(3))
    for step in range(40):
        for rank in range(3):
            job.arrive(rank, step, compute_s=0.4 if rank == 2 else 0.1)
        job.now_s += 0.4
        job.tick()
    lines = [record.getMessage() for record in caplog.records if "slower" in record.getMessage()]
    assert len(lines) == 1 and lines[0].startswith("rank 2 computes 4.0x slower than the median since step ")
    assert [straggler.rank for straggler in job.engine.stragglers] == [2]
    job.pass_time(31.0)
    assert len([record for record in caplog.records if "slower" in record.getMessage()]) == 2


def test_equal_ranks_are_never_called_slow(caplog: pytest.LogCaptureFixture) -> None:
    job = Job()
    job.register(Plan.sync(3))
    for step in range(40):
        for rank in range(3):
            job.arrive(rank, step, compute_s=0.1 + 0.005 * ((step + rank) % 3))
        job.now_s += 0.1
        job.tick()
    assert "slower" not in caplog.text and job.engine.stragglers == ()


def test_uneven_loops_without_a_work_queue_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    job = Job()
    job.register(Plan.sync(3))
    job.say(2, m.Finished(2))
    for step in range(3):
        job.arrive(0, step), job.arrive(1, step)
        assert [order.step for order in only(job.tick(), m.CloseStep)] == [step]
    assert caplog.text.count("ranks [2] wait at the end of their training loop") == 1
    fed = Job()
    fed.register(Plan.sync(3))
    fed.say(0, LeaseAsk(0, 0, 10, 4, False, 0))
    fed.say(2, m.Finished(2))
    caplog.clear()
    fed.arrive(0, 0), fed.arrive(1, 0)
    assert only(fed.tick(), m.CloseStep) and "outside" not in caplog.text


def test_a_machine_s_readings_become_part_of_the_evidence() -> None:
    job = Job(3)
    job.register(None)
    note = {"pressure_share": 0.1, "gpu_clock_share": math.nan, "gpu_throttled": math.nan}
    note |= {"gpu_temperature_c": math.nan, "nic_drops_per_s": 0.0}
    job.say(2, MachineNote(throttled_share=0.7, **note))
    for step in range(8):
        for rank in range(3):
            job.arrive(rank, step, compute_s=0.4 if rank == 2 else 0.1)
        job.now_s += 0.4
        job.tick()
    found = job.state.optimizers[0].stragglers
    assert [(s.rank, s.cause) for s in found] == [(2, "starved")]
    assert "a CPU quota throttles it 70 % of the time" in found[0].evidence
    with pytest.raises(ChannelError, match="throttled_share"):
        job.say(2, MachineNote(throttled_share=-1.0, **note))


def test_a_loss_that_is_no_number_reaches_the_guard_and_not_the_mean() -> None:
    job = Job(2)
    job.register(None)
    optimizer = job.state.optimizers[0]
    for step, loss in enumerate((2.0, math.inf, 1.0, math.nan)):
        optimizer.losses.note(step, loss)
    assert optimizer.losses.usual == pytest.approx(1.9)
    assert optimizer.window().losses == (2.0, math.inf, 1.0) and optimizer.window().loss_steps == (0, 1, 2)


@pytest.mark.slow
def test_links_are_measured_once_at_the_start_and_heeded_only_where_communication_costs_something() -> None:
    job = Job(4)
    job.register(None)
    rates = {0: 1e8, 1: 1e8, 2: 1e8, 3: 1e7}
    asked = []

    def answer(seconds: float) -> None:
        for _ in range(round(seconds / 0.05)):
            job.now_s += 0.05
            for probe, rank in zip(job.tick(), job.destinations, strict=True):
                if isinstance(probe, Probe):
                    asked.append(rank)
                    rate = min(rates[rank], rates[probe.target])
                    job.state.handle(rank, LinkRate(rate), job.now_s)

    answer(2.0)
    assert set(asked) == {0, 1, 2, 3} and job.state.links.bytes_per_s == list(rates.values())
    known = job.engine.window().ranks
    assert all(math.isnan(known[rank].link_bytes_per_s) for rank in range(4)), "nobody has asked for them"

    def lockstep(step: int, comm_s: float) -> None:
        for rank in range(4):
            job.say(rank, m.Arrive(0, step, 0, StepTimes(0.1, 0.0, 0.05), comm_s))

    asked.clear()
    for step in range(8):
        lockstep(step, comm_s=0.001)
        answer(1.0 if step else 0.1)  # A first step that lasts is a reason to measure.
    assert not asked and math.isnan(job.engine.window().ranks[3].link_bytes_per_s)
    for step in range(8, 40):
        lockstep(step, comm_s=0.5)
        answer(0.2)
    assert asked, "they are measured again where it matters"
    assert [one.link_bytes_per_s for one in job.engine.window().ranks] == list(rates.values())
    rates[3] = 1e8  # It recovers, and since communication is cheap again nobody measures it.
    for step in range(40, 140):
        lockstep(step, comm_s=0.001)
        answer(1.0)
    assert math.isnan(job.engine.window().ranks[3].link_bytes_per_s), "a rate of long ago is held against it"


def test_two_steps_of_little_but_communication_are_enough_to_heed_what_is_known_of_links() -> None:
    job = Job(4)
    job.register(None)
    job.state.links.bytes_per_s[:] = [1e8, 1e8, 1e8, 1e7]
    for step in range(4):
        heeded = not math.isnan(job.engine.window().ranks[3].link_bytes_per_s)
        assert heeded == (step >= 3), "what step 0 communicated is told with step 1"
        for rank in range(4):
            job.say(rank, m.Arrive(0, step, 0, StepTimes(0.1, 0.0, 0.05), 0.6))
        job.now_s += 0.7
        job.tick()


def slow_link_job(rates: list[float], gradient_bytes: int = 1_000_000) -> Job:
    """Four hosts, in the middle of nothing, whose links were measured."""
    job = Job(4)
    job.register(None)
    job.engine.gradients.total_bytes = gradient_bytes
    job.state.links.bytes_per_s[:] = rates
    return job


def lockstep(job: Job, step: int, *, comm_s: float, compute_s: float = 0.03) -> list[m.PlanMessage]:
    """A step of all ranks, which say how long the one before was reduced; plans that are published in it."""
    for rank in range(4):
        job.say(rank, m.Arrive(0, step, 0, StepTimes(compute_s, 0.0, compute_s), comm_s))
    job.now_s += 0.1
    return only(job.tick(), m.PlanMessage)


@pytest.mark.parametrize(("slow", "compute_s"), [(2.5e6, 0.03), (0.9e6, 0.03), (2.5e6, 0.3)])
def test_one_step_is_enough_where_a_far_slower_link_explains_what_it_took(slow: float, compute_s: float) -> None:
    """600 ms for the bytes of a step; beside it a probe got a third of the link. Or making a set delayed the step."""
    job = slow_link_job([2.5e7, 2.5e7, 2.5e7, slow])
    assert lockstep(job, 0, comm_s=0.0) == []
    (message,) = lockstep(job, 1, comm_s=0.63, compute_s=compute_s)
    assert message.plan["mode"] == "subgroup" and message.plan["members"] == [0, 1, 2]


@pytest.mark.parametrize(
    ("rates", "gradient_bytes", "comm_s"),
    [
        ([2.5e7, 2.5e7, 2.5e7, 1e7], 1_000_000, 0.2),  # Not that much slower.
        ([2.5e7, 2.5e7, 2.5e7, 2.5e6], 1_000_000, 0.1),  # The bytes did not take as long as on such a link.
        ([2.5e7, 2.5e7, 2.5e7, 2.5e6], 10_000, 0.6),  # Far longer: something else.
        ([2.5e7, math.nan, 2.5e7, 2.5e6], 1_000_000, 0.6),
    ],
)
def test_one_step_is_not_enough_where_something_else_may_be_the_cause(
    rates: list[float], gradient_bytes: int, comm_s: float
) -> None:
    job = slow_link_job(rates, gradient_bytes)
    assert [lockstep(job, step, comm_s=comm_s) for step in range(2)] == [[], []]


@pytest.mark.parametrize("compressed", [False, True])
def test_rates_are_heeded_if_they_explain_steps_with_what_compression_leaves(compressed: bool) -> None:
    """10 MB take 600 ms on these links: steps of 50 ms show that the rates are wrong, or that 200 kB were sent."""
    job = slow_link_job([2.5e7] * 4, 10_000_000)
    for step in range(12):
        assert lockstep(job, step, comm_s=0.02) == []
        sent_bytes = 200_000 if compressed else 10_000_000
        job.say(0, m.HeaderNote(0, step, 0, [0, 1, 2, 3], 1.0, 4.0, 4.0, 0.0, 0, 0.0, 0.0, sent_bytes))
    assert [math.isfinite(one.link_bytes_per_s) for one in job.engine.window().ranks] == [compressed] * 4


@pytest.mark.parametrize("seed", range(20))
def test_probes_that_were_slow_beside_other_work_change_nothing(seed: int) -> None:
    """A busy machine: some probes took 20 times as long, reductions vary by a factor of 4, no link is slow."""
    rng = random.Random(seed)
    job = slow_link_job([rng.choice([5e7, 2.5e6]) for _ in range(4)])
    for step in range(60):
        comm_s = 0.04 * 4.0 ** rng.random()
        assert lockstep(job, step, comm_s=comm_s, compute_s=0.03 + 0.001 * rng.random()) == []
    assert job.engine.active.plain


def test_a_reduction_that_lasts_longer_than_its_links_explain_has_them_measured_at_once() -> None:
    job = slow_link_job([2.5e7] * 4)

    def probes(seconds: float) -> int:
        found = 0
        for _ in range(round(seconds / 0.05)):
            job.now_s += 0.05
            for message, rank in zip(job.tick(), job.destinations, strict=True):
                if isinstance(message, Probe):
                    found += 1
                    job.state.handle(rank, LinkRate(2.5e7), job.now_s)
        return found

    assert probes(2.0) == 0 or job.state.links.bytes_per_s == [2.5e7] * 4
    lockstep(job, 0, comm_s=0.0)
    assert probes(1.0) == 4, "the first step lasts"
    for step in range(1, 5):
        lockstep(job, step, comm_s=0.6)
    assert probes(1.0) == 0, "as it was when they were measured"
    for step in range(5, 12):
        lockstep(job, step, comm_s=0.05)
    lockstep(job, 12, comm_s=0.6)
    assert probes(1.0) >= 3, "and again; the first one goes with the step"


def test_links_are_measured_when_reductions_become_slow_under_partial() -> None:
    job = slow_link_job([2.5e7] * 4)
    job.engine.rule.plan = job.engine.active = Plan.partial(4, 3)
    for step, comm_s in enumerate([0.02] * 9 + [1.0] * 6):
        for rank in range(3):
            job.say(rank, m.Arrive(0, step, 0, StepTimes(0.03, 0.0, 0.03), comm_s))
        job.say(3, m.Late(0, step, 0, StepTimes(0.12, 0.0, 0.12)))
        job.now_s += 0.1
        job.tick()
        slow = step >= 11  # From the third such step on: what is known of each is an upper bound.
        assert job.engine.surprised_by_links(job.now_s) == slow
    assert job.engine.suspects_links
    assert [one.link_bytes_per_s for one in job.engine.window().ranks] == [2.5e7] * 4


def test_a_helper_that_takes_part_late_now_and_then_makes_no_link_slow() -> None:
    job = slow_link_job([2.5e7] * 4)
    job.engine.rule.plan = job.engine.active = Plan.partial(4, 3)
    for step, comm_s in enumerate([0.02, 0.02, 1.0, 1.0, 0.02, 1.0] * 4):
        for rank in range(3):
            job.say(rank, m.Arrive(0, step, 0, StepTimes(0.03, 0.0, 0.03), comm_s))
        job.say(3, m.Late(0, step, 0, StepTimes(0.12, 0.0, 0.12)))
        job.now_s += 0.1
        job.tick()
        assert not job.engine.surprised_by_links(job.now_s)


@pytest.mark.parametrize(
    ("rates", "first_s", "made"),
    [
        ([2.5e7, 2.5e7, None, None], math.inf, [[0, 1, 2]]),  # Neither what rank 3 sends nor what is sent to it.
        ([2.5e7, 2.5e7, None, 1.3e6], math.inf, [[0, 1, 2]]),
        ([2.5e7, 2.5e7, None, None], 0.05, []),  # Reductions are as quick as ever: something else holds probes up.
        ([2.5e7, 2.5e7, None, 2.5e7], math.inf, []),  # Rank 2 may be slow or busy; it has received fast.
        ([2.5e7, None, None, None], math.inf, []),  # Too little is known.
        ([2.5e7, 2.5e7, 2.5e7, None], math.inf, []),
    ],
)
def test_the_set_without_a_suspected_link_is_made_while_that_is_measured(
    rates: list[float | None], first_s: float, made: list[list[int]]
) -> None:
    job = Job(4)
    job.register(None)
    job.engine.gradients.total_bytes = 1_000_000
    found: list[list[int]] = []
    for rank in range(4):
        job.say(rank, m.Arrive(0, 0, 0, StepTimes(0.03, 0.0, 0.03), 0.0))
    for twentieth in range(18):
        job.now_s += 0.05
        if 0.05 * twentieth >= first_s and not job.engine.arrivals.comm_s:
            for rank in range(4):
                job.say(rank, m.Arrive(0, 1, 0, StepTimes(0.03, 0.0, 0.03), first_s))
        for message, rank in zip(job.tick(), job.destinations, strict=True):
            if isinstance(message, MakeSet):
                found.append(list(message.ranks))
            rate = rates[rank] if isinstance(message, Probe) else None
            if rate is not None:
                job.state.handle(rank, LinkRate(rate), job.now_s)
    assert found == made
    assert job.engine.active.plain and all(math.isnan(one.link_bytes_per_s) for one in job.engine.window().ranks)


def test_a_first_step_ends_when_a_rank_begins_the_next_one() -> None:
    """Ranks that compute long in their second step are no reason to measure links that explain the first one."""
    job = slow_link_job([2.5e7, 2.5e7, 2.5e7, 2.5e6])
    job.pass_time(1.0)  # What is measured at the start goes without an answer here.
    for rank in range(4):
        job.arrive(rank, 0)
    job.now_s += 0.6
    job.arrive(1, 1)
    assert not job.engine.surprised_by_links(job.now_s + 5.0)


def test_a_second_slow_step_in_sync_is_answered_before_the_next_window() -> None:
    job = Job(4, Config(decide_interval_s=0.1))
    job.register(None)
    answered = []
    for step in range(8):
        for rank in range(3):
            job.arrive(rank, step, compute_s=0.05)
            answered += [(step, plan) for plan in only(job.tick(), m.PlanMessage)]
        slow_s = 0.3 if step >= 6 else 0.05
        job.now_s += slow_s
        job.tick()  # The window that is due by now: the report comes soon behind it.
        job.now_s += 0.03
        job.arrive(3, step, compute_s=slow_s)
        answered += [(step, plan) for plan in only(job.tick(), m.PlanMessage)]
    assert [(step, message.plan["mode"]) for step, message in answered] == [(7, "partial")]
    assert job.engine.explain() == answered[0][1].plan["reason"], "also before it is in force"


def test_many_that_become_slow_together_are_looked_at_together() -> None:
    job, looks = Job(64, Config(decide_interval_s=0.1)), 0
    job.register(None)
    for step in range(8):
        for rank in range(64):
            job.arrive(rank, step, compute_s=0.05)
        job.now_s += 0.1
        job.tick()

    def counted(look: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*given: Any) -> Any:
            nonlocal looks
            looks += 1
            return look(*given)

        return counting

    choice = job.engine.choice
    choice.decide, choice.watch = counted(choice.decide), counted(choice.watch)  # Every window goes to one of them.
    for step in (8, 9):
        for rank in range(30):
            job.now_s += 1e-4
            job.arrive(rank, step, compute_s=0.3)
            job.tick()
    assert looks <= 1, "in six milliseconds"


def test_what_is_worth_a_look() -> None:
    again = SlowReportTrigger(2)
    assert not any(again.note(0, 9.0) for _ in range(5)), "nothing is known yet"
    again.set_typical(math.nan)
    again.set_typical(0.1)
    assert [again.note(1, time_s) for time_s in (0.1, 0.5, 0.5, 0.5, 0.5)] == [False, False, True, True, False]
    assert [again.note(1, time_s) for time_s in (0.1, 0.2, 0.1, 0.2, 0.2)] == [False, False, False, False, True]
    again.set_typical(0.001)
    assert not any(again.note(0, 0.0025) for _ in range(5)), "a millisecond or two are Horovod's cycle"


def test_waits_for_a_processor_trigger_no_window_where_they_are_not_counted() -> None:
    job = Job(3)
    job.register(None)
    for step in range(12):
        for rank in range(3):
            waited_s = 0.03 if step < 10 else 0.3
            job.say(rank, m.Arrive(0, step, 0, StepTimes(0.1 + waited_s, runqueue_s=waited_s), 0.01))
        job.now_s += 0.1
        job.tick()
    assert job.engine._timer.trigger._runs == [0, 0, 0]


def test_averagings_of_local_steps_repeat_no_wait_of_sync() -> None:
    job = Job(3)
    job.register(Plan.local(3, steps=4))
    for step in range(8):
        for rank in range(3):
            job.arrive(rank, step, plan_id=int(step >= 4))
    assert job.engine.active.mode == "local"
    assert len(job.engine.arrivals.comm_s) == 3, "of the steps that sync has ended"


def test_a_rank_that_is_always_late_waits_for_nobody() -> None:
    """What it waited for in `sync`, before it was left behind, is not its wait for ever."""
    job = Job()
    job.register(None)
    for step in range(5):
        for rank in range(3):
            job.say(rank, m.Arrive(0, step, 0, StepTimes(0.1, 0.0, 0.05), 0.004))
    assert job.engine.arrivals.waits_s() == [0.004] * 3
    for step in range(5, 60, 4):
        job.say(2, m.Late(0, step, 0, StepTimes(0.4, 0.0, 0.05)))
    assert job.engine.arrivals.waits_s() == [0.004, 0.004, 0.0]
