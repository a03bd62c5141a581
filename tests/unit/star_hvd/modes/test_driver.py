"""What the training thread does around an engine, without threads or processes."""

from __future__ import annotations

import dataclasses
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from scheduler.plan.mode_names import NOT_LOCAL, ONLY_EXACT, parse_mode
from scheduler.records import Plan
from star_hvd.channel.messages.base import Arrive, HeaderNote, PlanMessage
from star_hvd.channel.messages.switch import Commit
from star_hvd.config import Config
from star_hvd.engine.header import Contribution, HeaderCodec
from star_hvd.modes.driver import StepDriver
from star_hvd.modes.local_sgd import LocalSteps
from star_hvd.modes.step_reporter import StepReporter


def unheard(message: Any, urgent: bool = True) -> None:
    """Send nothing."""


def driver(
    engine: Any, *, needs_state: Any = lambda: True, state_for: Any = None, send: Any = unheard
) -> StepDriver:
    made = StepDriver(0, Config(), send, cast(Any, None), str, lambda task: None)
    engine.replica = SimpleNamespace(reuse_buckets=lambda: None)
    made.engine = engine

    class Switcher:
        active_mode = None
        must_drain = False
        needs_state = property(lambda self: needs_state())

        def leave(self) -> None:
            """No mode is active."""

        enter = leave

        def state_for(self, number: int) -> Any:
            return state_for()

    made.switcher = cast(Any, Switcher())
    made.local = cast(Any, SimpleNamespace(take_over=lambda **how: None))
    return made


@pytest.mark.parametrize("was_late", [False, True])
def test_only_a_step_that_the_rank_was_late_for_leaves_the_others_mean_as_its_gradients(was_late: bool) -> None:
    """Elsewhere the program may have cleared its gradients already, or accumulates them over several passes."""
    asked = list[bool]()

    def catch_up(target: int, *, show_mean: bool) -> bool:
        asked.append(show_mean)
        return True

    engine = SimpleNamespace(next_step=3, step=2, catch_up=catch_up, note_joined=lambda: None)
    made = driver(engine)
    made.local = cast(Any, SimpleNamespace(take_over=lambda *, show_mean: asked.append(show_mean)))
    made.end_of_step(was_late=was_late)
    assert asked == [was_late, was_late]


def test_a_rank_stops_fetching_a_state_that_a_change_of_mode_made_superfluous() -> None:
    wanted, asked = [True, True, True, False], list[int]()
    engine = SimpleNamespace(
        next_step=3, step=2, needs_fetch=True, catch_up=lambda target, show_mean: False, adopt=lambda snapshot: False,
        lock=threading.Condition(),
    )

    def state_for() -> Any:
        asked.append(1)
        return object() if len(asked) == 1 else None  # One of a step that did not begin here, and none any more.

    driver(engine, needs_state=lambda: wanted.pop(0), state_for=state_for).end_of_step(was_late=False)
    assert len(asked) == 2 and not wanted


def test_the_end_of_a_job_does_not_wait_for_an_averaging_that_its_helper_can_no_longer_complete() -> None:
    mutex = threading.RLock()
    engine = SimpleNamespace(
        lock=threading.Condition(mutex), helper_wake=threading.Condition(mutex), drop_pending=lambda: None, rank=0,
        helper_averages=lambda: True, failure=None,
    )
    made = driver(engine)
    made.local = cast(Any, SimpleNamespace(exit=lambda: pytest.fail("it waits for the helper, which has ended")))
    made.switcher.active_mode = made.local
    made.stop()


def test_of_a_step_that_may_close_early_only_the_arrival_wakes_the_threads_of_the_channel() -> None:
    sent = list[tuple[type, bool]]()

    def send(message: Any, *, urgent: bool = True) -> None:
        sent.append((type(message), urgent))

    plan, codec = Plan.partial(2, 1), HeaderCodec(2, 0)
    reporter = StepReporter(0, send, lambda plan: None)
    reporter.start(cast(Any, SimpleNamespace(rank=0, plan=plan)))
    sums = torch.zeros(codec.size)
    codec.write(0, Contribution(fresh=True, own_steps=1, weight=1.0), sums.numpy())
    reporter.on_arrive(0, 1)
    reporter.on_step_end(0, codec.read(sums.numpy()), plan, 0.0, 0)
    assert sent == [(Arrive, True), (HeaderNote, False)]


def test_the_timeline_of_many_ranks_does_not_name_them_all_in_every_step() -> None:
    world_size = 1000
    plan, codec = Plan.sync(world_size), HeaderCodec(world_size, 0)
    reporter = StepReporter(0, lambda message, urgent=True: None, lambda plan: None)
    reporter.start(cast(Any, SimpleNamespace(rank=0, plan=plan)))
    assert reporter.timeline.maxlen == 25_000
    for step, missing in enumerate((None, None, 999, None)):
        sums = torch.zeros(codec.size)
        for rank in range(world_size):
            part = torch.zeros(codec.size)
            codec.write(rank, Contribution(fresh=rank != missing, own_steps=1, weight=1.0), part.numpy())
            sums += part
        reporter.on_step_end(step, codec.read(sums.numpy()), plan, 0.0, 0)
    members = [entry["members"] for entry in reporter.timeline]
    assert [len(one) for one in members] == [1000, 1000, 999, 1000] and members[0] == list(range(world_size))
    assert members[0] is members[1]
    assert all(one is other for one, other in zip(members[0], members[3], strict=True)), "integers are shared, too"


@pytest.mark.parametrize(("broadcasts", "left_alone"), [(False, True), (True, True), (False, False)])
def test_local_steps_are_not_averaged_where_other_values_are_in_the_parameters_place(
    broadcasts: bool, left_alone: bool
) -> None:
    """A broadcast replaces what is there on all ranks, so it needs what all have."""
    did = list[str]()

    class Local(LocalSteps):
        over, just_averaged = False, True  # type: ignore[assignment]

        def __init__(self) -> None:
            """Without an engine."""

        def take_over(self, *, show_mean: bool = False) -> None:
            """Nothing has ended without it."""

        def catch_up(self) -> None:
            did.append("average")

        def refresh_state(self) -> None:
            did.append("refresh")

    engine = SimpleNamespace(
        agreement=SimpleNamespace(mixed=True), lock=threading.Condition(), plan=Plan.local(2, steps=2), step=3
    )
    made = driver(engine, needs_state=lambda: False)
    engine.replica.left_alone, made.broadcasts = left_alone, broadcasts
    made.local = made.switcher.active_mode = Local()
    made.catch_up()
    made.refresh_state()
    assert did == ([] if left_alone and not broadcasts else ["average", "refresh"])


def test_local_is_refused_beside_another_optimizer_also_one_made_while_the_plan_arrives() -> None:
    sent, taken = list[Any](), list[Any]()
    agreement = SimpleNamespace(prepared=None, pinned=None)
    engine = SimpleNamespace(unsuited=lambda plan: None, lock=threading.RLock(), agreement=agreement)
    made = driver(engine, send=sent.append)
    made.switcher = cast(Any, SimpleNamespace(offer=lambda plan, _: taken.append(plan), abandon=taken.append))
    local, partial = Plan.local(3, steps=4, plan_id=5), Plan.partial(3, 2, plan_id=6)
    offer = PlanMessage(0, local.to_dict())
    made.on_message(offer)
    assert taken == [local] and not sent
    agreement.prepared = local
    answers = iter([False, True])
    made.others = lambda: next(answers)
    made.on_message(offer)
    assert taken == [local, local, 5]
    made.others = lambda: True
    made.on_message(offer)
    assert [(each.plan_id, each.reason) for each in sent] == [(5, NOT_LOCAL)]
    agreement.prepared = partial
    made.on_message(PlanMessage(0, partial.to_dict()))
    assert taken[-1] == partial
    made.auto = True  # The coordinator chose it before it knew of the other optimizer.
    made.on_message(PlanMessage(0, partial.to_dict()))
    assert (sent[-1].plan_id, sent[-1].reason) == (6, ONLY_EXACT)
    made.refuse_crossing()
    assert taken[-1] == 6


def test_a_plan_is_refused_whose_flag_goes_up_by_its_commit_beside_another_optimizer_made_just_before() -> None:
    """That one was made after the offer, and looked at the plans that were prepared before the commit."""
    taken, agreement = list[Any](), SimpleNamespace(prepared=None, pinned=None)
    made = driver(SimpleNamespace(lock=threading.RLock(), agreement=agreement))
    plan = dataclasses.replace(parse_mode("ps(2)", 3), plan_id=5)

    def commit(plan_id: int) -> None:
        agreement.prepared = plan
        taken.append(("commit", plan_id))

    made.switcher = cast(Any, SimpleNamespace(commit=commit, abandon=lambda plan_id: taken.append(("no", plan_id))))
    made.on_message(Commit(0, 5))
    assert taken == [("commit", 5)]
    made.others = lambda: True
    made.on_message(Commit(0, 5))
    assert taken == [("commit", 5)] * 2 + [("no", 5)]
