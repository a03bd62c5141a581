"""The coordinator's state, driven by scripted jobs without sockets, clocks or threads."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.records import Plan
from star_hvd.config import Config
from star_hvd.control import messages as m
from star_hvd.control.board import ALL, Board
from star_hvd.control.switch_messages import LinkRate, MachineNote, Probe
from star_hvd.errors import ChannelError

CONFIG = Config(lost_after_s=10.0, plan_deadline_s=60.0)


class Job:
    """A board, a clock, and what the board has sent."""

    def __init__(self, world_size: int = 3, config: Config = CONFIG) -> None:
        self.world_size = world_size
        self.now_s = 100.0
        self.board = Board(world_size, config, self.now_s)

    def say(self, rank: int, message: m.Message) -> list[m.Message]:
        self.board.handle(rank, message, self.now_s)
        return self.sent()

    def pass_time(self, seconds: float, alive: tuple[int, ...] | None = None) -> list[m.Message]:
        """Let time pass in small steps in which ranks give signs of life."""
        end_s, heard = self.now_s + seconds, []
        while self.now_s < end_s - 1e-9:
            self.now_s = min(end_s, self.now_s + 0.5)
            for rank in range(self.world_size) if alive is None else alive:
                self.board.handle(rank, m.Heartbeat(rank), self.now_s)
            assert self.board.tick(self.now_s) > self.now_s
            heard += self.sent()
        return heard

    def sent(self) -> list[m.Message]:
        outbox, self.board.outbox = self.board.outbox, []
        self.destinations = [destination for destination, _ in outbox]
        return [message for _, message in outbox]

    def register(self, plan: Plan | None, engine: int = 0) -> list[m.Message]:
        first = Plan.sync(self.world_size).to_dict()
        wanted = plan.to_dict() if plan is not None else {}
        return [x for r in range(self.world_size) for x in self.say(r, m.Register(engine, first, wanted))]

    def arrive(self, rank: int, step: int, epoch: int = 0, compute_s: float = 0.1) -> None:
        self.say(rank, m.Arrive(0, step, epoch, compute_s, 0.0, 0.05, 0.0, 0.01))

    def tick(self) -> list[m.Message]:
        self.board.tick(self.now_s)
        return self.sent()

    @property
    def engine(self) -> Any:
        return self.board.engines[0]


def only(heard: list[m.Message], kind: type[m.Message]) -> list[Any]:
    return [message for message in heard if isinstance(message, kind)]


def relaxed_job(world_size: int = 3) -> Job:
    job = Job(world_size)
    job.register(Plan.partial(world_size, world_size - 1))
    for rank in range(world_size):
        job.arrive(rank, 5, epoch=1)
    assert job.engine.active.relaxed
    return job


def test_a_plan_is_published_once_all_ranks_have_registered() -> None:
    job = Job()
    plan = Plan.partial(3, 2, max_staleness=4)
    first = Plan.sync(3).to_dict()
    for rank in (1, 2):
        assert job.say(rank, m.Register(0, first, plan.to_dict())) == []
    (published,) = job.say(0, m.Register(0, first, plan.to_dict()))
    assert isinstance(published, m.PlanMessage) and job.destinations == [ALL]
    assert Plan.from_dict(published.plan) == plan.replace(epoch=1)
    assert not job.engine.active.relaxed, "it is in force only when a rank acts on it"
    job.arrive(2, 3, epoch=1)
    assert job.engine.active == plan.replace(epoch=1) and job.engine.rule.plan == job.engine.active


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


def test_a_refused_plan_is_abandoned() -> None:
    job = Job()
    job.register(Plan.partial(3, 2))
    heard = job.say(2, m.Refuse(0, 1, "cannot"))
    assert heard == [m.Abandon(0, 1, "cannot")]
    assert job.engine.refused == "cannot" and not job.engine.active.relaxed
    assert job.pass_time(5.0) == []


def test_a_plan_not_taken_up_in_time_is_abandoned() -> None:
    job = Job()
    job.register(Plan.partial(3, 2))
    assert only(job.pass_time(59.0), m.Abandon) == []
    (abandon,) = only(job.pass_time(2.0), m.Abandon)
    assert "60 s" in abandon.reason


def test_a_plan_taken_up_while_it_was_being_abandoned_is_in_force() -> None:
    job = Job()
    job.register(Plan.partial(3, 2))
    job.say(2, m.Refuse(0, 1, "cannot"))
    job.arrive(0, 4, epoch=1)
    assert job.engine.active.relaxed and job.engine.rule.plan.relaxed


def test_a_rank_pinned_while_relaxed_brings_everybody_back_to_sync() -> None:
    job = relaxed_job()
    (published,) = only(job.say(1, m.Refuse(0, 1, "a GradScaler")), m.PlanMessage)
    assert published.plan["mode"] == "sync" and published.plan["epoch"] == 2
    assert "rank 1: a GradScaler" in published.plan["reason"]
    assert only(job.say(2, m.Refuse(0, 1, "a GradScaler")), m.PlanMessage) == [], "one return is enough"
    job.arrive(0, 9, epoch=2)
    assert not job.engine.active.relaxed
    assert only(job.say(2, m.Refuse(0, 2, "again")), m.PlanMessage) == []


def test_a_step_is_closed_and_ordered_once() -> None:
    job = relaxed_job()
    job.tick()
    for rank in (0, 1):
        job.arrive(rank, 6, epoch=1)
    orders = only(job.tick(), m.CloseRound)
    orders += only(job.pass_time(3.0), m.CloseRound)
    assert [order.round for order in orders] == [6]
    assert orders[0].typical_compute_s == pytest.approx(0.1)


def test_an_epoch_ends_when_all_ranks_have_asked_in_vain() -> None:
    job = Job()
    take = m.Take(0, 0, 10, 4, False)
    grants = [job.say(rank, take)[0] for rank in (0, 1, 2)]
    assert [(g.start, g.stop) for g in grants] == [(0, 4), (4, 8), (8, 10)]  # type: ignore[attr-defined]
    assert job.destinations == [2], "only the rank that asked is answered"
    for rank in (0, 1):
        (grant,) = job.say(rank, take)
        assert grant == m.Grant(0, 0, 0, 0)
    heard = job.say(2, take)
    assert heard == [m.Grant(0, 0, 0, 0), m.EpochEnd(0, 0)]
    assert job.say(2, take) == [m.Grant(0, 0, 0, 0)], "announced once"


def test_an_epoch_ends_for_the_others_when_a_rank_finishes_in_the_middle_of_it() -> None:
    """A rank may break out of its loop and end its program while others wait for the end of the epoch."""
    job = Job()
    take = m.Take(0, 0, 2, 1, False)
    job.say(0, take), job.say(1, take), job.say(0, take), job.say(1, take)
    assert only(job.pass_time(5.0), m.EpochEnd) == []
    assert only(job.say(2, m.Finished(2)), m.EpochEnd) == [m.EpochEnd(0, 0)]


def test_everybody_leaves_once_all_have_finished() -> None:
    job = Job()
    assert only(job.say(0, m.Finished(0)), m.Bye) == []
    assert only(job.say(1, m.Finished(1)), m.Bye) == []
    assert only(job.say(2, m.Finished(2)), m.Bye) == [m.Bye([])]
    assert only(job.pass_time(30.0), m.Bye) == []


def test_a_silent_rank_is_named_and_does_not_keep_the_others(caplog: pytest.LogCaptureFixture) -> None:
    job = Job()
    job.say(0, m.Finished(0)), job.say(1, m.Finished(1))
    assert only(job.pass_time(9.5, alive=(0, 1)), m.Bye) == []
    assert only(job.pass_time(1.0, alive=(0, 1)), m.Bye) == [m.Bye([2])]
    assert "rank 2 has given no sign of life for 10." in caplog.text
    job.say(2, m.Heartbeat(2))
    assert "rank 2 is heard again" in caplog.text and not job.board.lost


def sources(job: Job, rank: int, times: int = 6) -> set[int]:
    return {reply.rank for _ in range(times) for reply in only(job.say(rank, m.Source(0)), m.SourceReply)}


def test_the_source_of_a_fetch_is_up_to_date_and_alive() -> None:
    job = relaxed_job()
    assert sources(job, 2) == {0, 1} and job.destinations == [2], "in turns: one may be behind after all"
    for rank in (0, 1):
        job.arrive(rank, 9, epoch=1)
    assert sources(job, 0) == {1}, "not the one that asks, not the one behind"
    job.say(1, m.Away(True, True, "evaluation"))
    job.say(0, m.Away(True, True, "end of epoch"))
    assert sources(job, 2) == {0, 1}, "whoever waits for the one that asks serves it"
    job.pass_time(11.0, alive=(1, 2))
    assert sources(job, 2) == {1}, "rank 0 is silent"
    job.pass_time(11.0, alive=(2,))
    assert sources(job, 2) == {-1}


def test_arrivals_are_hurried_while_somebody_is_away() -> None:
    job = relaxed_job()
    assert m.Hurry(True) in job.say(1, m.Away(True, True, "x"))
    assert m.Hurry(True) not in job.say(2, m.Away(True, True, "x"))
    job.say(1, m.Away(False, True, "x"))
    assert m.Hurry(False) not in job.pass_time(3.0)
    job.say(2, m.Away(False, True, "x"))
    assert m.Hurry(False) in job.pass_time(2.0)


def test_what_is_said_of_a_closed_optimizer_is_ignored() -> None:
    job = relaxed_job()
    job.say(0, m.Unregister(0))
    job.arrive(1, 7)
    assert job.board.engines == {}


PLAN = Plan.sync(3).to_dict()
BAD = [
    m.Register(0, {"mode": "turbo", "world_size": 3, "quorum": 3}, {}),
    m.Register(0, PLAN, {"mode": "sync"}),
    m.Register(0, PLAN, Plan.sync(4).to_dict()),
    m.Register(0, Plan.sync(4).to_dict(), {}),
    m.Register(-1, PLAN, {}),
    m.Register(5000, PLAN, {}),
    m.Arrive(0, 7, 0, -1.0, 0.0, 0.0, 0.0, 0.0),
    m.Arrive(0, 7, 0, math.nan, 0.0, 0.0, 0.0, 0.0),
    m.Arrive(0, 7, 0, math.inf, 0.0, 0.0, 0.0, 0.0),
    m.Arrive(0, 7, 0, 1.0, 0.0, 0.0, 0.0, math.nan),
    m.Arrive(0, -7, 0, 1.0, 0.0, 0.0, 0.0, 0.0),
    m.Arrive(0, 1 << 50, 0, 1.0, 0.0, 0.0, 0.0, 0.0),
    m.Join(0, 1 << 50),
    m.Late(0, 7, 0, 1.0, 1e10, 0.0, 0.0),
    m.Late(2000, 7, 0, 1.0, 1.0, 0.0, 0.0),
    m.RoundNote(0, 1 << 50, 0, [0], 0.0, 1.0, 1.0, 0.0, 0, 0.0, 0.0),
    m.Take(0, 0, -1, 4, False),
    m.Take(0, 0, 4, 0, False),
    m.Take(0, -1, 4, 1, False),
    m.PlanMessage(0, PLAN),
    m.CloseRound(0, 3, 0.1),
    m.Grant(0, 0, 0, 1),
    m.Bye([]),
    m.Abandon(0, 1, ""),
    m.EpochEnd(0, 0),
    m.SourceReply(0, 1),
    m.Hurry(True),
]


def state_of(thing: Any) -> Any:
    """Everything an object holds, down to plain values."""
    if isinstance(thing, dict):
        return {key: state_of(value) for key, value in thing.items()}
    if isinstance(thing, (list, tuple, deque)):
        return [state_of(value) for value in thing]
    if not type(thing).__module__.startswith(("star_hvd", "scheduler")):
        return "a call" if callable(thing) else repr(thing)
    names = [name for cls in type(thing).__mro__ for name in getattr(cls, "__slots__", ())]
    return {name: state_of(getattr(thing, name)) for name in [*names, *getattr(thing, "__dict__", ())]}


def test_the_state_that_is_compared_is_all_there_is() -> None:
    """Each of these must show, or the test below could not fail."""
    said = [
        m.Hello(0),
        m.Arrive(0, 7, 1, 0.1, 0.0, 0.0, 0.0, 0.0),
        m.Late(0, 5, 1, 0.1, 0.0, 0.0, 0.0),
        m.Join(0, 8),
        m.RoundNote(0, 6, 1, [0], 1.0, 1.0, 1.0, 1.0, 3, 1.0, 0.0),
        m.Refuse(0, 1, "x"),
        m.Away(True, False, "x"),
        m.Take(0, 0, 10, 4, False),
        m.Source(0),
        m.Finished(1),
        m.Unregister(0),
    ]
    for message in said:
        job = relaxed_job()
        before = state_of(job.board)
        job.now_s += 1.0
        job.board.handle(1, message, job.now_s)
        assert state_of(job.board) != before, message.kind


@pytest.mark.parametrize("message", BAD, ids=lambda x: x.kind)
def test_bad_input_changes_nothing(message: m.Message) -> None:
    job = relaxed_job()
    job.say(0, m.Take(0, 0, 10, 4, False))
    before = state_of(job.board)
    job.now_s += 1.0
    with pytest.raises(ChannelError):
        job.say(1, message)
    assert state_of(job.board) == before


@pytest.mark.parametrize("rank", [-1, 3, 1 << 40])
def test_a_rank_that_does_not_exist(rank: int) -> None:
    with pytest.raises(ChannelError, match=r"ranks 0\.\.2"):
        Job().say(rank, m.Hello(0))


COUNT = st.integers(-2, 40) | st.sampled_from([1 << 52, -(1 << 52)])
TIME_S = st.floats(0.0, 2.0) | st.sampled_from([math.nan, math.inf, -1.0])
LOOP = st.integers(0, 2)
ANY = st.one_of(
    st.builds(m.Register, LOOP, st.sampled_from([PLAN, {}]), st.sampled_from([{}, Plan.partial(3, 2).to_dict()])),
    st.builds(m.Unregister, st.just(2)),
    st.builds(m.Arrive, LOOP, COUNT, st.integers(-1, 4), TIME_S, TIME_S, TIME_S, TIME_S, TIME_S),
    st.builds(m.Late, LOOP, COUNT, st.integers(-1, 4), TIME_S, TIME_S, TIME_S, TIME_S),
    st.builds(m.Join, LOOP, COUNT),
    st.builds(m.Away, st.booleans(), st.booleans(), st.just("x")),
    st.builds(m.Refuse, LOOP, st.integers(-1, 4), st.just("x")),
    st.builds(m.Take, LOOP, st.integers(-1, 3), st.integers(-1, 9), st.integers(0, 3), st.booleans()),
    st.builds(m.Source, LOOP),
    st.builds(m.Finished, st.integers(-1, 3)),
    st.builds(
        m.RoundNote, LOOP, COUNT, st.integers(-1, 4), st.just([0]), st.floats(), st.floats(), st.floats(),
        st.floats(), st.integers(0, 3), st.floats(), st.floats(),
    ),
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(-1, 3), ANY, st.floats(0.0, 3.0)), max_size=60), st.booleans())
def test_no_input_breaks_the_coordinator(said: list[tuple[int, m.Message, float]], auto: bool) -> None:
    """Ranks may say anything in any order: it is acted on or refused, and the board goes on."""
    job = Job()
    job.register(None if auto else Plan.partial(3, 2))
    for rank, message, pause_s in said:
        job.now_s += pause_s
        try:
            job.board.handle(rank, message, job.now_s)
        except ChannelError:
            continue
        finally:
            assert job.board.tick(job.now_s) > job.now_s
        for sent in job.sent():
            assert m.decode(m.encode(sent)) == sent


def test_a_rank_pinned_while_another_relaxed_plan_is_on_its_way_brings_everybody_back_to_sync() -> None:
    """It says the epoch of the plan in force: it has dropped the one on its way already."""
    job = relaxed_job()
    job.engine.publish(Plan.partial(3, 1), job.now_s)
    (on_its_way,) = only(job.sent(), m.PlanMessage)
    heard = job.say(1, m.Refuse(0, 1, "a GradScaler")) + job.tick()
    assert [x.epoch for x in only(heard, m.Abandon)] == [on_its_way.plan["epoch"]], "it must not wait for the deadline"
    (published,) = only(heard, m.PlanMessage)
    assert published.plan["mode"] == "sync" and "a GradScaler" in published.plan["reason"]
    assert only(job.pass_time(5.0), m.PlanMessage) == [], "one return is enough"


def test_a_rank_pinned_before_the_first_plan_was_taken_up_ends_it_at_once() -> None:
    job = Job()
    job.register(Plan.partial(3, 2))
    heard = job.say(2, m.Refuse(0, 0, "a GradScaler"))
    assert heard == [m.Abandon(0, 1, "a GradScaler")]
    assert job.pass_time(70.0) == []


def test_a_refused_plan_that_was_taken_up_all_the_same_is_left_again() -> None:
    """All ranks had raised their flags for it when one of them found out that it cannot."""
    job = Job()
    job.register(Plan.partial(3, 2))
    job.say(2, m.Refuse(0, 1, "a GradScaler"))
    for rank in range(3):
        job.arrive(rank, 4, epoch=1)
    assert job.engine.active.relaxed
    (published,) = only(job.pass_time(1.0), m.PlanMessage)
    assert published.plan["mode"] == "sync" and published.plan["epoch"] == 2
    assert only(job.pass_time(30.0), m.PlanMessage) == []
    for rank in range(3):
        job.arrive(rank, 5, epoch=2)
    assert not job.engine.active.relaxed and only(job.pass_time(70.0), m.PlanMessage) == []


def test_a_return_to_sync_that_was_not_taken_up_in_time_is_tried_again() -> None:
    job = relaxed_job()
    job.say(1, m.Refuse(0, 1, "a GradScaler"))
    heard = job.pass_time(62.0)
    assert len(only(heard, m.Abandon)) == len(only(heard, m.PlanMessage)) == 1
    assert only(heard, m.PlanMessage)[0].plan["mode"] == "sync"


def test_arrivals_are_hurried_also_after_a_rank_came_back_late() -> None:
    """The end of an epoch takes all ranks back; what they say of it afterwards must not swallow the next order."""
    job = relaxed_job()
    job.say(1, m.Away(False, True, "x"))
    assert m.Hurry(True) in job.say(2, m.Away(True, True, "x"))
    assert job.say(0, m.Away(True, True, "x")) == []
    assert m.Hurry(False) not in job.pass_time(3.0)


def test_nobody_is_told_twice_that_arrivals_need_not_hurry() -> None:
    job = relaxed_job()
    job.say(1, m.Away(True, True, "x"))
    job.say(1, m.Away(False, True, "x"))
    assert only(job.pass_time(3.0), m.Hurry) == [m.Hurry(False)]
    job.say(1, m.Away(False, True, "x"))
    assert only(job.pass_time(3.0), m.Hurry) == []


def test_a_step_that_waits_long_is_logged_with_the_ranks_that_are_missing(caplog: pytest.LogCaptureFixture) -> None:
    job = Job(3, Config(stall_warning_s=10.0, lost_after_s=1e6))
    job.register(None)
    job.arrive(0, 7), job.arrive(2, 7)
    job.pass_time(9.5)
    assert caplog.text == ""
    job.pass_time(1.0)
    assert "step 7 has been waiting for ranks [1] for 10 s" in caplog.text
    job.pass_time(5.0)
    assert caplog.text.count("has been waiting") == 1, "not more often than it is long"
    job.arrive(1, 7)
    job.pass_time(30.0)
    assert caplog.text.count("has been waiting") == 1


def test_a_step_that_was_closed_waits_for_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """The ranks may compute the next gradient for minutes; that is no stall."""
    job = relaxed_job()
    job.tick()
    caplog.clear()
    for rank in (0, 1):
        job.arrive(rank, 6, epoch=1)
    assert len(only(job.pass_time(30.0), m.CloseRound)) == 1
    assert "waiting" not in caplog.text
    job.arrive(0, 7, epoch=1)
    assert len(only(job.pass_time(30.0), m.CloseRound)) == 0
    assert "step 7 has been waiting for ranks [1, 2]" in caplog.text


def test_a_step_closed_at_its_deadline_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    job = relaxed_job()
    job.tick()
    job.arrive(1, 6, epoch=1)
    (order,) = only(job.pass_time(61.0), m.CloseRound)
    assert order.round == 6
    assert "step 6 closes without ranks [0, 2]: its quorum did not come together within 60 s" in caplog.text


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


def test_auto_relaxes_for_a_slow_rank_and_never_after_a_refusal() -> None:
    published: dict[bool, list[Any]] = {}
    for refused in (False, True):
        job = Job(4)
        job.register(None)
        if refused:
            job.say(3, m.Refuse(0, 0, "sparse gradients"))
        heard: list[m.Message] = []
        for step in range(120):
            for rank in range(4):
                job.arrive(rank, step, compute_s=0.4 if rank == 2 else 0.1)
            job.now_s += 0.4
            heard += job.tick()
        published[refused] = only(heard, m.PlanMessage)
    assert published[False] and published[False][0].plan["quorum"] < 4
    assert published[True] == []


def test_uneven_loops_without_a_work_queue_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    job = Job()
    job.register(Plan.sync(3))
    job.say(2, m.Finished(2))
    for step in range(3):
        job.arrive(0, step), job.arrive(1, step)
        assert [order.round for order in only(job.tick(), m.CloseRound)] == [step]
    assert caplog.text.count("ranks [2] are outside their training loop") == 1
    fed = Job()
    fed.register(Plan.sync(3))
    fed.say(0, m.Take(0, 0, 10, 4, False))
    fed.say(2, m.Finished(2))
    caplog.clear()
    fed.arrive(0, 0), fed.arrive(1, 0)
    assert only(fed.tick(), m.CloseRound) and "outside" not in caplog.text


def test_a_finished_rank_stays_away_after_an_epoch_that_ends_without_it() -> None:
    job = Job()
    job.register(Plan.sync(3))
    job.say(2, m.Finished(2))
    for rank in (0, 1):
        job.say(rank, m.Away(True, True, "end of data"))
        job.say(rank, m.Take(0, 0, 0, 4, False))
    for rank in (0, 1):
        job.say(rank, m.Away(False, True, "end of data"))
        job.arrive(rank, 0)
    assert [order.round for order in only(job.tick(), m.CloseRound)] == [0], "rank 2 will never deliver again"


def test_optimizers_have_steps_and_plans_of_their_own() -> None:
    job = relaxed_job()
    job.register(Plan.sync(3), engine=1)
    for rank in (0, 1):
        job.say(rank, m.Arrive(1, 9, 0, 0.1, 0.0, 0.0, 0.0, 0.0))
    assert [order.engine for order in only(job.pass_time(2.0), m.CloseRound)] == []
    assert job.board.engines[1].rule.round == 9 and not job.board.engines[1].active.relaxed
    job.say(0, m.Unregister(1))
    assert set(job.board.engines) == {0}


def test_a_report_from_before_a_switch_does_not_undo_it() -> None:
    job = relaxed_job()
    job.engine.publish(Plan.partial(3, 1), job.now_s)
    job.arrive(0, 9, epoch=2)
    assert job.engine.active.quorum == 1
    job.arrive(1, 8, epoch=1)
    job.arrive(2, 8, epoch=0)
    job.say(0, m.RoundNote(0, 8, 1, [0, 1], 1.0, 2.0, 2.0, 0.0, 0, 0.0, 0.0))
    assert job.engine.active.quorum == job.engine.rule.plan.quorum == 1
    assert [plan.epoch for _, plan in job.engine.plans] == [0, 1, 2]


def test_an_epoch_nobody_published_is_not_taken_up() -> None:
    job = relaxed_job()
    job.arrive(0, 9, epoch=7)
    assert job.engine.active.epoch == 1


def test_rank_0_may_tell_of_a_switch_first() -> None:
    job = Job()
    job.register(Plan.partial(3, 2))
    job.say(0, m.RoundNote(0, 4, 1, [0, 1, 2], 1.5, 3.0, 3.0, 0.0, 0, 0.0, 0.0))
    assert job.engine.active.relaxed and job.engine.steps == 5 and job.engine.loss == 1.5


def test_arrivals_stay_hurried_as_long_as_a_rank_has_finished() -> None:
    job = Job()
    job.register(Plan.sync(3))
    assert only(job.say(2, m.Finished(2)), m.Hurry) == [m.Hurry(True)]
    for rank in (0, 1):
        job.say(rank, m.Take(0, 0, 0, 4, False))
    assert only(job.pass_time(5.0), m.Hurry) == []


@pytest.mark.parametrize("plan", [PLAN | {"mode": "x" * 500_000}, PLAN | {"y" * 500_000: 1}, {"z": 1}])
def test_what_is_said_of_a_refused_plan_is_short(plan: dict[str, Any]) -> None:
    for message in (m.Register(0, plan, {}), m.Register(0, PLAN, plan)):
        with pytest.raises(ChannelError, match="a plan was refused: plan ") as caught:
            Job().say(0, message)
        assert len(str(caught.value)) < 300, "an error must not carry what was received into the log"


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
    found = job.board.engines[0].stragglers
    assert [(s.rank, s.cause) for s in found] == [(2, "starved")]
    assert "a CPU quota holds it back 70 % of the time" in found[0].evidence
    with pytest.raises(ChannelError, match="throttled_share"):
        job.say(2, MachineNote(throttled_share=-1.0, **note))


def test_a_loss_that_is_no_number_reaches_the_guard_and_not_the_mean() -> None:
    job = Job(2)
    job.register(None)
    board = job.board.engines[0]
    for step, loss in enumerate((2.0, math.inf, 1.0, math.nan)):
        board._note_loss(step, loss)
    assert board.loss == pytest.approx(1.9)
    assert board.window().losses == (2.0, math.inf, 1.0) and board.window().loss_steps == (0, 1, 2)


# ---- links ----------------------------------------------------------------------------------------------------------


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
                    job.board.handle(rank, LinkRate(rate), job.now_s)

    answer(2.0)
    assert set(asked) == {0, 1, 2, 3} and job.board.links.bytes_per_s == list(rates.values())
    known = job.engine.window().ranks
    assert all(math.isnan(known[rank].link_bytes_per_s) for rank in range(4)), "nobody has asked for them"

    def lockstep(step: int, comm_s: float) -> None:
        for rank in range(4):
            job.say(rank, m.Arrive(0, step, 0, 0.1, 0.0, 0.05, 0.0, comm_s))

    asked.clear()
    for step in range(8):
        lockstep(step, comm_s=0.001)
        answer(1.0)
    assert not asked and math.isnan(job.engine.window().ranks[3].link_bytes_per_s)
    for step in range(8, 40):
        lockstep(step, comm_s=0.5)
        answer(0.2)
    assert asked, "they are measured again where it matters"
    assert [one.link_bytes_per_s for one in job.engine.window().ranks] == list(rates.values())


def test_two_steps_of_little_but_communication_are_enough_to_heed_what_is_known_of_links() -> None:
    job = Job(4)
    job.register(None)
    job.board.links.bytes_per_s[:] = [1e8, 1e8, 1e8, 1e7]
    for step in range(4):
        heeded = not math.isnan(job.engine.window().ranks[3].link_bytes_per_s)
        assert heeded == (step >= 3), "what step 0 communicated is told with step 1"
        for rank in range(4):
            job.say(rank, m.Arrive(0, step, 0, 0.1, 0.0, 0.05, 0.0, 0.6))
        job.now_s += 0.7
        job.tick()
