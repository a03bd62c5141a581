"""What a coordinator is told that makes no sense, and random input."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.plan.plan import SET_IDLE_S
from scheduler.records import Plan, StepTimes
from star_hvd.channel.messages import base as m
from star_hvd.channel.messages import switch as s
from star_hvd.channel.messages.joins import JoinedRanks, ProgramCollective
from star_hvd.channel.messages.leases import LoaderClosed
from star_hvd.channel.messages.shares import Feeds
from star_hvd.channel.messages.switch import ServerRestarted, ServerUp
from star_hvd.channel.messages.waits import Deadlock, ProgramWait
from star_hvd.coordinator.job_state import HANDLERS
from star_hvd.coordinator.validation import FROM_RANKS
from star_hvd.errors import ChannelError
from tests.support.job_states import PLAN, Job, only, relaxed_job, state_of

REDUCTION = ProgramCollective("allreduce", "loss", "named", 1, False, [2, 4, 4], ["float32"], "cpu", 1, 1.0, 1.0)
BAD_TENSORS: list[dict[str, Any]] = [
    {"shapes": []},
    {"shapes": [2, 4]},
    {"shapes": [1, 4, 4]},
    {"shapes": [-1]},
    {"shapes": [2, 4, -4]},
    {"shapes": [2, 1 << 30, 1 << 30]},
    {"dtypes": []},
    {"dtypes": ["quint8"]},
    {"dtypes": ["float32", "float32"]},
    {"device": "/dev/null"},
    {"number": 0},
]
BAD = [
    m.Register(0, {"mode": "turbo", "world_size": 3, "quorum": 3}, {}),
    m.Register(0, PLAN, {"mode": "sync"}),
    m.Register(0, PLAN, Plan.sync(4).to_dict()),
    m.Register(0, Plan.sync(4).to_dict(), {}),
    m.Register(-1, PLAN, {}),
    m.Register(0, {**PLAN, "world_size": 1 << 52, "quorum": 1 << 52}, {}),
    m.Register(0, Plan.subgroup(3, (0, 1)).to_dict() | {"world_size": 1 << 52}, {}),  # Made, it would count its ranks.
    m.Register(0, PLAN, {}, gradient_bytes=-1),
    m.Register(0, PLAN, {}, edge_part=0.0),
    m.Register(0, PLAN, {}, edge_part=math.nan),
    m.Register(0, PLAN, {}, pushed_part=0.0),
    m.Register(0, PLAN, {}, pushed_part=1.5),
    m.GradientSizes(0, 0, -1, 1.0, 1.0),
    m.GradientSizes(0, 0, 1, 0.0, 1.0),
    m.GradientSizes(0, 0, 1, 1.0, math.nan),
    m.GradientSizes(0, -1, 1, 1.0, 1.0),
    m.TransmissionNote(0, 1, "weather", "x", 0.1, "x"),
    m.TransmissionNote(0, 1, "overlap", "x", 0.1, "x" * 501),
    m.TransmissionNote(0, 1, "overlap", "x" * 501, 0.1, "x"),
    m.TransmissionNote(0, -1, "overlap", "x", 0.1, "x"),
    Feeds(-2, 0),
    Feeds(0, -1),
    ServerUp(0, 1, 99, ["127.0.0.1", "1", "00"]),
    ServerUp(0, 1, -1, ["127.0.0.1", "1", "00"]),
    ServerUp(0, 1, 0, ["127.0.0.1"]),
    ServerRestarted(0, 1, 0, ["h" * 2000, "1", "00"]),
    m.Register(5_000_000, PLAN, {}),
    m.Arrive(0, 7, 0, StepTimes(-1.0), 0.0),
    m.Arrive(0, 7, 0, StepTimes(math.nan), 0.0),
    m.Arrive(0, 7, 0, StepTimes(math.inf), 0.0),
    m.Arrive(0, 7, 0, StepTimes(1.0), math.nan),
    m.Arrive(0, -7, 0, StepTimes(1.0), 0.0),
    m.Arrive(0, 1 << 50, 0, StepTimes(1.0), 0.0),
    m.Join(0, 1 << 50),
    m.Late(0, 7, 0, StepTimes(1.0, 1e10)),
    m.Late(2_000_000, 7, 0, StepTimes(1.0, 1.0)),
    m.HeaderNote(0, 1 << 50, 0, [0], 0.0, 1.0, 1.0, 0.0, 0, 0.0, 0.0),
    *(dataclasses.replace(REDUCTION, **changes) for changes in BAD_TENSORS),
    JoinedRanks([1]),
    m.RequestBatch(0, 0, -1, 4, False),
    m.RequestBatch(0, 0, 4, 0, False),
    m.RequestBatch(0, -1, 4, 1, False),
    LoaderClosed(-1),
    ProgramWait(-1, operation="barrier"),
    ProgramWait(1, -1, "barrier"),
    ProgramWait(1, loader=-2),
    ProgramWait(1, loader=0),
    ProgramWait(1, operation="barrier", loader=0, epoch=0),
    ProgramWait(1, operation="x" * 1000),
    Deadlock("x"),
    m.PlanMessage(0, PLAN),
    m.CloseStep(0, 3, 0.1),
    m.Grant(0, 0, 0, 1),
    m.Bye(),
    m.Abandon(0, 1, ""),
    m.EpochEnd(0, 0),
    m.StateSource(0, 1),
    m.ReportImmediately(True),
]


def test_the_state_that_is_compared_is_all_there_is() -> None:
    """Each of these must show, or the test below could not fail."""
    said = [
        m.Hello(0),
        m.Arrive(0, 7, 1, StepTimes(0.1), 0.0),
        m.Late(0, 5, 1, StepTimes(0.1)),
        m.Join(0, 8),
        m.HeaderNote(0, 6, 1, [0], 1.0, 1.0, 1.0, 1.0, 3, 1.0, 0.0),
        m.ModeUnsupported(0, 1, "x"),
        m.Away(True, False, "x"),
        m.RequestBatch(0, 0, 10, 4, False),
        m.FindStateSource(0),
        m.Finished(1),
        m.GradientSizes(0, 9, 4000, 0.5, 0.26),
        m.TransmissionNote(0, 9, "late gradients", "int8", 0.1, "x"),
        m.Unregister(0),
    ]
    for message in said:
        job = relaxed_job()
        before = state_of(job.state)
        job.now_s += 1.0
        job.state.handle(1, message, job.now_s)
        assert state_of(job.state) != before, message.kind


@pytest.mark.parametrize("message", BAD, ids=lambda x: x.kind)
def test_bad_input_changes_nothing(message: m.Message) -> None:
    job = relaxed_job()
    job.say(0, m.RequestBatch(0, 0, 10, 4, False))
    before = state_of(job.state)
    job.now_s += 1.0
    with pytest.raises(ChannelError):
        job.say(1, message)
    assert state_of(job.state) == before


@pytest.mark.parametrize("rank", [-1, 3, 1 << 40])
def test_a_rank_that_does_not_exist(rank: int) -> None:
    with pytest.raises(ChannelError, match=r"ranks 0\.\.2"):
        Job().say(rank, m.Hello(0))


COUNT = st.integers(-2, 40) | st.sampled_from([1 << 52, -(1 << 52)])


TIME_S = st.floats(0.0, 2.0) | st.sampled_from([math.nan, math.inf, -1.0])
TIMES = st.builds(StepTimes, TIME_S, TIME_S, TIME_S, TIME_S)


LOOP = st.integers(0, 2)


ANY = st.one_of(
    st.builds(m.Register, LOOP, st.sampled_from([PLAN, {}]), st.sampled_from([{}, Plan.partial(3, 2).to_dict()])),
    st.builds(m.Unregister, st.just(2)),
    st.builds(m.GradientSizes, LOOP, COUNT, COUNT, TIME_S, TIME_S),
    st.builds(m.Arrive, LOOP, COUNT, st.integers(-1, 4), TIMES, TIME_S),
    st.builds(m.Late, LOOP, COUNT, st.integers(-1, 4), TIMES),
    st.builds(m.Join, LOOP, COUNT),
    st.builds(m.Away, st.booleans(), st.booleans(), st.just("x")),
    st.builds(m.ModeUnsupported, LOOP, st.integers(-1, 4), st.just("x")),
    st.builds(m.RequestBatch, LOOP, st.integers(-1, 3), st.integers(-1, 9), st.integers(0, 3), st.booleans()),
    st.builds(m.FindStateSource, LOOP),
    st.builds(m.Finished, st.integers(-1, 3)),
    st.builds(
        m.HeaderNote, LOOP, COUNT, st.integers(-1, 4), st.just([0]), st.floats(), st.floats(), st.floats(),
        st.floats(), st.integers(0, 3), st.floats(), st.floats(),
    ),
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(-1, 3), ANY, st.floats(0.0, 3.0)), max_size=60), st.booleans())
def test_no_input_breaks_the_coordinator(said: list[tuple[int, m.Message, float]], auto: bool) -> None:
    """Ranks may say anything in any order: it is acted on or refused, and the coordinator goes on."""
    job = Job()
    job.register(None if auto else Plan.partial(3, 2))
    for rank, message, pause_s in said:
        job.now_s += pause_s
        try:
            job.state.handle(rank, message, job.now_s)
        except ChannelError:
            continue
        finally:
            assert job.state.tick(job.now_s) > job.now_s
        for sent in job.sent():
            assert m.decode(m.encode(sent)) == sent


@pytest.mark.parametrize(
    "message",
    [
        m.Register(0, {"mode": "subgroup", "world_size": 1 << 52, "quorum": 1, "members": [0]}, {}),
        m.Register(0, PLAN, {}, -1),
        m.Register(0, PLAN, {**PLAN, "slack": (1 << 63) - 1}),
        s.ServerUp(0, 1, -1, ["h", "1", "k"]),
        s.ServerUp(0, 1, 1 << 52, ["h", "1", "k"]),
        s.ServerRestarted(0, 1, 0, ["h" * 5000, "1", "k"]),
    ],
    ids=lambda message: message.kind,
)
def test_numbers_that_no_job_has_change_nothing(message: m.Message) -> None:
    job = relaxed_job()
    before = state_of(job.state)
    with pytest.raises(ChannelError):
        job.say(1, message)
    assert state_of(job.state) == before


@pytest.mark.slow
def test_a_rank_that_opens_loaders_and_optimizers_without_end_is_refused() -> None:
    job = relaxed_job()
    for number in range(5000):
        try:
            job.say(1, m.RequestBatch(number, 0, 10, 4, False))
        except ChannelError as error:
            assert number >= 4000 and "are open" in str(error)
            break
    else:
        raise AssertionError("5,000 loaders were opened")
    job.say(1, m.RequestBatch(0, 0, 10, 4, False))  # Those that are there go on.


def test_a_plan_that_was_never_published_does_not_free_process_sets() -> None:
    job = Job(3)
    job.register(Plan.subgroup(3, (0, 1)))
    for rank in range(3):
        job.arrive(rank, 5, plan_id=1)
    assert job.engine.active.mode == "subgroup"
    for rank in range(3):
        job.say(rank, m.Arrive(0, 6, 1 << 40, StepTimes(0.1), 0.0))
    assert only(job.pass_time(2.0 * SET_IDLE_S), s.DropSet) == []


def test_every_message_that_a_rank_may_send_has_a_handler() -> None:
    assert set(HANDLERS) == set(FROM_RANKS)
