"""Word of a switch that comes before a rank has read of it itself."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from scheduler.plan.plan import Plan
from star_hvd.engine.records import Snapshot
from star_hvd.engine.step_engine import StepEngine
from star_hvd.modes.mode_switcher import ModeSwitcher
from star_hvd.modes.ps_worker import ServerSteps, StepInfo
from star_hvd.modes.subgroup_child import ChildSteps
from tests.support.world import World

SYNC = Plan.sync(4)
SUBGROUP = Plan.subgroup(4, (0, 1, 2), plan_id=1)
SERVED = Plan.ps(4, 3, servers=(1,), plan_id=2)
BACK = Plan.sync(4, plan_id=3)


class Engine:
    """As much of a rank's engine as a switch is about."""

    def __init__(self, rank: int, plan: Plan) -> None:
        self.lock = threading.Condition(threading.RLock())
        self.rank, self.plan = rank, plan
        self.voided: list[int] = []

    @property
    def taking_part(self) -> bool:
        return self.plan.family == "rounds" or self.rank in self.plan.members

    def resume(self, plan: Plan, step: int) -> bool:
        if plan.plan_id <= self.plan.plan_id:
            return False
        self.voided.append(plan.plan_id)
        self.plan = plan
        return True

    def fail(self, error: Exception) -> None:
        raise error


def handover(engine: Engine) -> ModeSwitcher:
    made = ModeSwitcher(
        0, cast(Any, engine), cast(Any, None), ready=lambda plan, reason: None, ranks=cast(Any, None),
        local=cast(Any, None), later=lambda task: None, deadline_s=1.0, push_deadline_s=1.0,
    )
    made._held = {plan.plan_id: plan for plan in (SUBGROUP, SERVED, BACK)}
    return made


def in_band(engine: Engine, made: ModeSwitcher, plan: Plan) -> None:
    """The rank reads the header of the step that all agreed in, as `StepDriver.on_switch` is told."""
    with engine.lock:
        engine.plan = plan
    if made.told_early:
        made.switched()


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_member_keeps_its_state_whoever_is_first(rank: int) -> None:
    engine = Engine(rank, SUBGROUP)
    made = handover(engine)
    made.moved(SERVED.plan_id, 57)
    assert engine.plan is SUBGROUP and engine.voided == []
    in_band(engine, made, SERVED)
    assert engine.plan is SERVED and engine.voided == [] and not made.told_early


def test_a_child_follows_at_once() -> None:
    engine = Engine(3, SUBGROUP)
    handover(engine).moved(SERVED.plan_id, 57)
    assert engine.plan is SERVED and engine.voided == [SERVED.plan_id]


def test_what_was_told_early_is_followed_in_the_end() -> None:
    """In any order of what a slow member hears: it ends in the last plan, and voids no state that it brings along."""
    events = {"moved to servers": 0, "in band to servers": 1, "moved back": 2}
    for order in itertools.permutations(events):
        if order.index("moved to servers") > order.index("moved back"):
            continue  # The coordinator's messages keep their order.
        engine = Engine(1, SUBGROUP)
        made = handover(engine)
        for event in order:
            if event == "in band to servers":
                in_band(engine, made, SERVED)
            else:
                plan = SERVED if event == "moved to servers" else BACK
                made.moved(plan.plan_id, 57 if plan is SERVED else 60)
        assert engine.plan is BACK and engine.voided == [BACK.plan_id], order


class Servers:
    """Connections that are always there."""

    def __init__(self) -> None:
        self.prepared: list[int] = []

    def prepare(self, optimizer_id: int, plan: Plan) -> str | None:
        self.prepared.append(plan.plan_id)
        return None

    def give_up(self, optimizer_id: int, plan_id: int) -> None:
        """Nothing waits here."""


def test_other_servers_wait_for_a_training_thread_that_is_one_mode_of_servers_behind() -> None:
    engine, servers, tasks = Engine(3, SERVED), Servers(), list[Callable[[], None]]()
    ready: list[int] = []
    made = handover(engine)
    made._services, made._later = cast(Any, servers), tasks.append
    made._ready = lambda plan, reason: ready.append(plan.plan_id)
    engine.agreement = SimpleNamespace(refusal=lambda plan: None)  # type: ignore[attr-defined]
    steps = SimpleNamespace(gone=False, over=False, finish=lambda: None)
    made._made = {SERVED.plan_id: cast(Any, steps)}
    groups = Plan.grouped(4, [(0, 1), (2, 3)]).replace(plan_id=3, servers=(0,))

    made.prepare(groups)
    assert ready == [3], "its servers are in force"
    engine.plan, steps.gone = groups, True  # The training thread computes on.
    other = Plan.ps(4, 2, servers=(2,), plan_id=4)
    made.prepare(other)
    assert ready == servers.prepared == [3] and tasks == []
    made.leave()  # It comes, and leaves what was.
    (again,) = tasks
    again()
    assert ready == servers.prepared == [3, 4]


def a_mode_behind() -> tuple[ModeSwitcher, Servers, list[Callable[[], None]]]:
    """A rank whose training thread is inside a mode that has ended, and was told of other servers."""
    servers, tasks = Servers(), list[Callable[[], None]]()
    made = handover(Engine(3, BACK))
    made._services, made._later = cast(Any, servers), tasks.append
    made._made = {SERVED.plan_id: cast(Any, SimpleNamespace(gone=True, over=True, finish=lambda: None))}
    made.prepare(Plan.ps(4, 2, servers=(2,), plan_id=4))
    return made, servers, tasks


def test_a_plan_that_was_given_up_is_not_prepared_afterwards() -> None:
    made, servers, tasks = a_mode_behind()
    made.abandoned(4)
    made.leave()
    assert servers.prepared == [] and tasks == []


def test_a_postponed_plan_is_handed_on_once() -> None:
    made, _, tasks = a_mode_behind()
    for _ in range(3):  # Steps, while the preparer is busy with something else.
        made.leave()
    assert len(tasks) == 1


class Line:
    """A child's connection to a parent that gives nothing, or a client of servers."""

    def state(self, min_step: int, *, state_too: bool) -> None:
        return None

    def wake(self) -> None:
        pass


class OtherRanks:
    """A source that gives what it has."""

    def __init__(self, given: Snapshot | None = None) -> None:
        self.given, self.asked = given, list[int]()

    def snapshot(self, min_step: int, deadline_s: float) -> Snapshot | None:
        self.asked.append(min_step)
        return self.given


def child_steps(engine: StepEngine, plan: Plan, ranks: OtherRanks | None = None, line: Any = None) -> ChildSteps:
    told = list[Any]()
    return ChildSteps(
        engine, plan, line or Line(), ranks=ranks or OtherRanks(), deadline_s=1.0, state_deadline_s=1.0,
        on_step=told.append,
    )


def server_steps(engine: StepEngine, plan: Plan) -> ServerSteps:
    told = list[Any]()
    return ServerSteps(
        engine, plan, cast(Any, Line()), deadline_s=1.0, on_step=told.append, on_notes=told.append,
        plan_of=lambda plan_id: None, same_session=lambda one, other: False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "make"),
    [(Plan.subgroup(3, (0, 1), plan_id=1), child_steps), (Plan.ps(3, 1, servers=(0,), plan_id=1), server_steps)],
)
def test_word_of_the_next_mode_in_the_very_moment_a_rank_enters_one(first: Plan, make: Callable[..., Any]) -> None:
    world = World(1, world_size=3)
    engine = world.engines[2]
    back = Plan.sync(3, plan_id=2)

    class Interrupted(Servers):
        def steps(self, number: int, plan: Plan) -> Any:
            made.moved(2, 7)  # The agent's thread.
            return make(engine, plan)

    made = ModeSwitcher(
        0, engine, cast(Any, Interrupted()), ready=lambda plan, reason: None, ranks=cast(Any, None),
        local=cast(Any, None), later=lambda task: None, deadline_s=1.0, push_deadline_s=1.0,
    )
    made._held = {1: first, 2: back}
    with engine.lock:
        engine.agreement.plan = first
    made.enter()
    assert made.outside is not None and made.outside.over and engine.plan is back
    made.outside = None  # As `leave` does.
    assert made.needs_state and engine.needs_fetch and not engine.catch_up(engine.next_step), "it lacks step 7"


def test_a_childs_checkpoint_does_not_wait_for_a_parent_that_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(1, world_size=3)
    engine = world.engines[2]
    plan = Plan.subgroup(3, (0, 1), plan_id=1)
    with engine.lock:
        engine.agreement.plan = plan
    given = world.engines[0].replica.snapshot()

    ranks = OtherRanks(given)
    child_steps(engine, plan, ranks).refresh_state()
    assert ranks.asked == [engine.step] and given is not None
    assert torch.equal(engine.applier.buckets[0].params[0], given.params[0])


def test_a_childs_step_during_which_the_mode_ends_is_told_as_one_of_its_own_mode() -> None:
    """Else the coordinator takes the step to contain it for one of the next mode and closes none before it."""
    world = World(1, world_size=3)
    engine = world.engines[2]
    plan, after = Plan.subgroup(3, (0, 1), plan_id=1), Plan.grouped(3, [(0, 1), (2,)]).replace(plan_id=2, servers=(0,))

    class Parent(Line):
        def push(self, flats: Any, version: int) -> int:
            with engine.lock:
                engine.agreement.plan = after  # Word of it comes while the gradient is on its way.
            return version + 2

    with engine.lock:
        engine.agreement.plan = plan
    steps = child_steps(engine, plan, line=Parent())
    told: list[StepInfo] = []
    steps._on_step = told.append
    steps.step(skip=False)
    assert [info.plan_id for info in told] == [1] and steps.over


class LastState(Servers):
    """Servers that ended with a state, if they still have it."""

    def __init__(self, given: Snapshot | None) -> None:
        super().__init__()
        self.given, self.asked = given, list[int]()

    def final_state(self, optimizer_id: int, plan: Plan, step: int, deadline_s: float) -> Snapshot | None:
        self.asked.append(step)
        return self.given


def behind_servers(ended_at: int, given: Snapshot | None) -> tuple[ModeSwitcher, LastState, OtherRanks]:
    """A rank that follows the end of servers at step 6 and has not fetched its state yet."""
    engine = World(1, world_size=3).engines[2]
    servers, ranks = LastState(given), OtherRanks(Snapshot(6, [], []))
    made = ModeSwitcher(
        0, engine, cast(Any, servers), ready=lambda plan, reason: None, ranks=ranks, local=cast(Any, None),
        later=lambda task: None, deadline_s=30.0, push_deadline_s=1.0,
    )
    assert engine.resume(Plan.sync(3, plan_id=2), 6) and made.needs_state
    made._ended = (Plan.ps(3, 1, servers=(0,), plan_id=1), ended_at)
    return made, servers, ranks


def test_a_state_is_asked_of_the_servers_that_ended_and_then_of_other_ranks() -> None:
    given = Snapshot(6, [], [])
    made, servers, ranks = behind_servers(6, given)
    assert made.state_for(0) is given and servers.asked == [6] and ranks.asked == []
    made, servers, ranks = behind_servers(6, None)
    assert made.state_for(0) is ranks.given and servers.asked == [6] and ranks.asked == [0]


def test_servers_are_not_asked_once_other_ranks_have_later_steps() -> None:
    made, servers, ranks = behind_servers(5, Snapshot(5, [], []))
    assert made.state_for(0) is ranks.given and servers.asked == []
