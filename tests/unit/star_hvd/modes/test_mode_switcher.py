"""The switcher carries out what the state machine decides: announcements, postponed plans, absences, a mode's end."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from scheduler.plan.plan import Plan
from star_hvd.channel.late_sender import LateSender
from star_hvd.config import Config
from star_hvd.engine.exchange.agreement import Agreement
from star_hvd.engine.meeting import Position, settled
from star_hvd.engine.records import Snapshot
from star_hvd.engine.replica import ReplicaState
from star_hvd.engine.step_engine import StepEngine
from star_hvd.errors import ChannelError, DeadlineError, RankLostError, StarError
from star_hvd.modes.driver import StepDriver
from star_hvd.modes.mode_switcher import ModeSwitcher
from star_hvd.modes.ps_worker import ServerSteps, StepInfo
from star_hvd.modes.subgroup_child import ChildSteps
from star_hvd.telemetry import wait_time
from tests.support.world import World

SYNC = Plan.sync(4)
SUBGROUP = Plan.subgroup(4, (0, 1, 2), plan_id=1)
SERVED = Plan.ps(4, 3, servers=(1,), plan_id=2)
BACK = Plan.sync(4, plan_id=3)
OTHER = Plan.ps(4, 2, servers=(2,), plan_id=4)
DEADLINE_S = 60.0


class Engine:
    """As much of a rank's engine as a switch is about."""

    def __init__(self, rank: int, plan: Plan = SYNC) -> None:
        self.lock = threading.Condition(threading.RLock())
        self.rank, self.plan = rank, plan
        self.step = self.next_step = 0
        self.replica = SimpleNamespace(
            state=ReplicaState.CURRENT, apply_lock=threading.RLock(), snapshot=lambda min_step: None
        )
        self.agreement = SimpleNamespace(refusal=lambda plan: None, prepare=lambda plan: None, abandon=lambda i: None)
        self.failure: BaseException | None = None
        self.ended = False
        self.voided: list[int] = []
        self.taken_up: Callable[[Plan], None] = lambda plan: None

    def take_up(self, plan: Plan) -> None:
        """All ranks agreed in band, or `resume`."""
        with self.lock:
            self.plan = plan
            self.taken_up(plan)

    def resume(self, plan: Plan, step: int) -> bool:
        with self.lock:
            if plan.plan_id <= self.plan.plan_id:
                return False
            self.voided.append(plan.plan_id)
            self.take_up(plan)
            return True

    def leave_common_steps(self) -> None:
        """Parameters come from elsewhere."""

    def fail(self, error: BaseException, *, unseen: bool = False) -> None:
        self.failure = error


class Recorded:
    """Steps that write down what they are asked."""

    def __init__(self) -> None:
        self.over = False
        self.asked: list[Any] = []

    def set_inactive(self, inactive: bool) -> None:
        self.asked.append(inactive)

    def __getattr__(self, name: str) -> Callable[[], None]:
        return lambda: self.asked.append(name)


class Servers:
    """Connections that are always there."""

    def __init__(self) -> None:
        self.prepared: list[int] = []
        self.made: dict[int, Recorded] = {}

    def prepare(self, optimizer_id: int, plan: Plan) -> str | None:
        self.prepared.append(plan.plan_id)
        return None

    def session(self, optimizer_id: int, plan: Plan) -> int | None:
        return plan.plan_id

    def steps(self, optimizer_id: int, plan: Plan) -> Any:
        return self.made.setdefault(plan.plan_id, Recorded())

    def seed(self, *unused: Any) -> None:
        """Nothing begins here."""

    begun = end = give_up = seed


class Rank:
    """A switcher with what is around it; the thread that prepares runs when the test says so."""

    def __init__(
        self, rank: int, engine: Any = None, services: Any = None, ranks: Any = None, push_deadline_s: float = 0.05
    ) -> None:
        self.engine = engine or Engine(rank)
        self.services = services or Servers()
        self.tasks: deque[Callable[[], None]] = deque()
        self.ready: list[int] = []
        self.refused: dict[int, str] = {}
        self.switcher = ModeSwitcher(
            0, self.engine, self.services, report=self.report,
            unsupported=lambda plan, reason: None, ranks=ranks, local=cast(Any, None),
            later=self.tasks.append, deadline_s=1.0, push_deadline_s=push_deadline_s,
        )  # fmt: skip
        self.engine.taken_up = self.switcher.taken_up

    def report(self, plan: Plan, reason: str | None) -> None:
        if reason is None:
            self.ready.append(plan.plan_id)
        else:
            self.refused[plan.plan_id] = reason

    def run_tasks(self) -> None:
        while self.tasks:
            self.tasks.popleft()()

    def offer(self, *plans: Plan) -> Rank:
        for plan in plans:
            self.switcher.offer(plan)
            self.run_tasks()
        return self

    def under(self, *plans: Plan) -> Rank:
        """All of these were in force, the last one is."""
        for plan in plans:
            self.offer(plan)
            self.engine.take_up(plan)
            self.run_tasks()
        self.engine.voided.clear()
        return self


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_member_keeps_its_state_whichever_rank_is_first(rank: int) -> None:
    made = Rank(rank).under(SUBGROUP).offer(SERVED)
    made.switcher.announce(SERVED.plan_id, 57)
    assert made.engine.plan is SUBGROUP and made.engine.voided == []
    made.engine.take_up(SERVED)
    made.run_tasks()
    assert made.engine.plan is SERVED and made.engine.voided == []


def test_a_child_follows_at_once() -> None:
    made = Rank(3).under(SUBGROUP).offer(SERVED)
    made.switcher.announce(SERVED.plan_id, 57)
    assert made.engine.plan is SERVED and made.engine.voided == [SERVED.plan_id]


def test_what_was_announced_early_is_followed_in_the_end() -> None:
    """In any order of what a slow member hears: it ends in the last plan, and voids no state that it brings along."""
    events = {"servers announced": 0, "in band to servers": 1, "end announced": 2}
    for order in itertools.permutations(events):
        if order.index("servers announced") > order.index("end announced"):
            continue  # The coordinator's messages keep their order.
        made = Rank(1).under(SUBGROUP).offer(SERVED, BACK)
        for event in order:
            if event == "in band to servers":
                made.engine.take_up(SERVED)
            else:
                plan = SERVED if event == "servers announced" else BACK
                made.switcher.announce(plan.plan_id, 57 if plan is SERVED else 60)
            made.run_tasks()
        assert made.engine.plan is BACK and made.engine.voided == [BACK.plan_id], order


def test_other_servers_wait_for_a_training_thread_that_is_one_mode_of_servers_behind() -> None:
    groups = Plan.grouped(4, [(0, 1), (2, 3)]).replace(plan_id=3, servers=(0,))
    made = Rank(3).under(SUBGROUP, SERVED)
    made.switcher.enter()
    made.offer(groups)
    assert made.ready == [1, 2, 3], "its servers are in force"
    made.engine.take_up(groups)
    made.run_tasks()
    made.services.made[2].over = True  # The training thread computes on.
    made.offer(OTHER)
    assert made.ready == made.services.prepared == [1, 2, 3] and not made.tasks
    made.switcher.leave()  # It comes, and leaves what was.
    made.run_tasks()
    assert made.ready == made.services.prepared == [1, 2, 3, 4] and made.switcher.active_mode is None


def one_mode_behind() -> Rank:
    """A rank whose training thread is inside a mode that has ended, and to which other servers were offered."""
    made = Rank(3).under(SUBGROUP, SERVED)
    made.switcher.enter()
    made.under(BACK)
    made.services.made[2].over = True
    return made.offer(OTHER)


def test_a_plan_that_was_given_up_is_not_prepared_afterwards() -> None:
    made = one_mode_behind()
    made.switcher.abandon(4)
    made.switcher.leave()
    assert 4 not in made.services.prepared and not made.tasks


def test_a_rank_that_cannot_prepare_a_plan_says_so_whatever_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the others wait for it until `plan_deadline_s`."""
    made = Rank(3)

    def fail(*unused: object) -> str | None:
        raise OSError("too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(made.services, "prepare", fail)
        made.offer(SERVED)
    assert made.refused == {2: "preparing it failed: OSError: too many open files"} and not made.ready
    made.offer(OTHER)
    assert made.ready == [4]


def adding(prepare: Callable[[], None] = lambda: None) -> Rank:
    """A rank that makes its steps with the others, and runs `prepare` while it prepares a plan."""
    made = Rank(3)
    applier, listener = cast(Any, SimpleNamespace(hyper=SimpleNamespace(size=1))), cast(Any, None)
    made.engine.agreement = Agreement(3, SYNC, applier, listener, made.engine.lock)

    def prepare_and_add(optimizer_id: int, plan: Plan) -> str | None:
        prepare()
        return None

    made.services.prepare = prepare_and_add
    return made


@pytest.mark.parametrize("moment", ["preparing", "prepared", "flag up"])
def test_servers_that_were_prepared_for_fewer_parameters_are_refused(moment: str) -> None:
    """They know nothing of those that were added meanwhile: the first gradient of one would end the rank."""
    made = adding(lambda: made.switcher.parameters_added() if moment == "preparing" else None)
    made.offer(SERVED)
    if moment == "flag up":
        made.switcher.commit(SERVED.plan_id)
        assert made.engine.agreement.prepared is SERVED
    if moment != "preparing":
        made.switcher.parameters_added()
    if moment == "prepared":
        made.switcher.commit(SERVED.plan_id)
    assert made.engine.agreement.prepared is None and list(made.refused) == [SERVED.plan_id]
    assert "parameters were added" in made.refused[SERVED.plan_id]


def test_servers_that_are_prepared_for_added_parameters_are_taken() -> None:
    made = adding()
    made.switcher.parameters_added()
    made.offer(SERVED)
    made.switcher.commit(SERVED.plan_id)
    assert made.engine.agreement.prepared is SERVED and made.ready == [SERVED.plan_id] and not made.refused


def test_a_mode_without_servers_is_taken_up_whatever_is_added() -> None:
    made, partial = adding(), Plan.partial(4, 3, plan_id=1)
    made.offer(partial)
    made.switcher.parameters_added()
    assert made.engine.agreement.prepared is partial and not made.refused


def test_servers_that_are_not_up_at_the_end_of_the_job_are_no_failure_of_their_mode() -> None:
    """Rank 0 would log that the mode is not possible at present, and is tried again."""
    made = Rank(3)

    def end(*unused: object) -> str | None:
        made.engine.ended = True
        return "the servers were not up, or the plan was abandoned before"

    made.services.prepare = end
    made.offer(SERVED)
    assert not made.refused and not made.ready


def test_a_postponed_plan_is_handed_on_once() -> None:
    made = one_mode_behind()
    for _ in range(3):  # Steps, while the preparer is busy with something else.
        made.switcher.leave()
    assert len(made.tasks) == 1


def test_an_announcement_of_a_plan_that_is_unknown_here_says_what_was_expected() -> None:
    made = Rank(3).under(SUBGROUP)
    made.switcher.announce(7, 99)
    text = str(made.engine.failure)
    assert "plan 7" in text and "step 99" in text and SUBGROUP.label in text and "report" in text


def test_the_end_of_a_mode_without_a_plan_that_follows_names_both_and_what_to_do() -> None:
    made = Rank(3).under(SUBGROUP, SERVED)
    made.switcher.enter()
    made.services.made[2].over = True
    with pytest.raises(DeadlineError, match=r"ps\(3.*plan 2.*0\.05 s.*log of rank 0.*step_deadline_s"):
        made.switcher.leave()


def test_a_rank_that_has_left_ends_the_wait_for_the_plan_that_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be the one that would have announced it: rank 0, or that of the servers' primary."""

    class Gone(Servers):
        def check_world(self, engine: Any) -> None:
            assert engine is made.engine
            raise RankLostError("rank 1 has left the job")

    made = Rank(3, services=Gone(), push_deadline_s=DEADLINE_S).under(SUBGROUP, SERVED)
    made.switcher.enter()
    made.services.made[2].over = True
    clock = itertools.count()
    monkeypatch.setattr(wait_time, "time", SimpleNamespace(monotonic=lambda: 0.4 * next(clock)))
    with pytest.raises(RankLostError, match="rank 1"):
        made.switcher.leave()
    assert 3 <= next(clock) <= 6, "about a second"


def test_a_step_ends_once_the_next_plan_is_announced() -> None:
    made = Rank(3, push_deadline_s=DEADLINE_S).under(SUBGROUP, SERVED).offer(BACK)
    made.switcher.enter()
    steps = made.services.made[2]
    steps.over = True
    teller = threading.Timer(0.01, lambda: made.switcher.announce(3, 60))
    teller.start()
    made.switcher.leave()
    assert made.switcher.active_mode is None and steps.asked[-1] == "exit" and made.switcher.needs_state


# ---- a training thread that is inactive ---------------------------------------------------------------------------


def test_an_absence_is_told_to_a_mode_that_comes_into_force_meanwhile() -> None:
    made = Rank(3).under(SUBGROUP).offer(SERVED)
    made.switcher.set_inactive(True)
    made.engine.take_up(SERVED)
    made.run_tasks()
    assert made.services.made[2].asked == [True]
    made.switcher.set_inactive(False)
    assert made.services.made[2].asked == [True, False]


def test_the_return_of_a_training_thread_is_not_overtaken_by_its_absence() -> None:
    """The thread that prepares opens the mode for an absent training thread, which comes back at that very moment."""

    class Slow(Servers):
        def steps(self, optimizer_id: int, plan: Plan) -> Any:
            opening.set()
            time.sleep(0.05)  # The training thread's turn, if nothing keeps it.
            return super().steps(optimizer_id, plan)

    opening = threading.Event()
    made = Rank(3, services=Slow()).under(SUBGROUP).offer(SERVED)
    made.switcher.set_inactive(True)
    made.engine.take_up(SERVED)
    preparer = threading.Thread(target=made.run_tasks, daemon=True)
    preparer.start()
    assert opening.wait(DEADLINE_S)
    made.switcher.set_inactive(False)
    preparer.join(DEADLINE_S)
    assert made.services.made[2].asked[-1] is False


def test_no_lock_is_held_while_the_servers_confirm_an_absence() -> None:
    made = Rank(3).under(SUBGROUP, SERVED)
    made.switcher.enter()
    confirming, confirmed = threading.Event(), threading.Event()

    def wait() -> None:
        confirming.set()
        assert confirmed.wait(DEADLINE_S)

    made.services.made[2].confirm_inactive = wait

    def leave_loop() -> None:
        made.switcher.set_inactive(True)
        made.switcher.confirm_inactive()

    thread = threading.Thread(target=leave_loop, daemon=True)
    thread.start()
    assert confirming.wait(DEADLINE_S)
    others = threading.Thread(
        target=lambda: (made.offer(BACK), made.switcher.set_inactive(False), made.switcher.plan_of(3)), daemon=True
    )
    others.start()
    others.join(DEADLINE_S / 2.0)
    assert not others.is_alive() and made.ready[-1] == 3
    confirmed.set()
    thread.join(DEADLINE_S)


# ---- single modes -------------------------------------------------------------------------------------------------


class Line:
    """A child's connection to a parent that gives nothing, or a client of servers."""

    def state(self, min_step: int, *, state_too: bool, awaited: bool = False) -> None:
        return None

    def wake(self) -> None:
        pass

    def release(self) -> None:
        pass

    def close(self) -> None:
        pass


class OtherRanks:
    """A source that gives what it has."""

    def __init__(self, given: Snapshot | None = None) -> None:
        self.given, self.asked = given, list[int]()

    def snapshot(self, min_step: int, deadline_s: float) -> Snapshot | None:
        self.asked.append(min_step)
        return self.given


def child_steps(
    engine: StepEngine, plan: Plan, ranks: OtherRanks | None = None, line: Any = None, told: Any = None, **options: Any
) -> ChildSteps:
    told = list[Any]() if told is None else told
    return ChildSteps(
        engine, plan, line or Line(), ranks=ranks or OtherRanks(), deadline_s=1.0, state_deadline_s=30.0,
        on_step=told.append, **options,
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
def test_the_next_plan_is_announced_in_the_very_moment_a_rank_enters_a_mode(
    first: Plan, make: Callable[..., Any]
) -> None:
    world = World(1, world_size=3)
    engine = world.engines[2]
    back = Plan.sync(3, plan_id=2)

    class Interrupted(Servers):
        def steps(self, optimizer_id: int, plan: Plan) -> Any:
            made.switcher.announce(2, 7)  # The agent's thread.
            made.switcher.taken_up(engine.plan)  # The engine's listener is the world's.
            return make(engine, plan)

    made = Rank(2, engine=engine, services=Interrupted()).offer(first)
    with engine.lock:
        engine.agreement.plan = first
        made.switcher.taken_up(first)
    made.offer(back)
    made.switcher.enter()
    assert made.switcher.active_mode is None and engine.plan is back and made.switcher.must_drain
    made.switcher.leave()
    assert made.switcher.needs_state and engine.needs_fetch, "it lacks step 7"
    assert not engine.catch_up(engine.next_step)


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


def test_gradients_that_a_child_has_not_sent_are_dropped_when_the_program_loads_a_state() -> None:
    world = World(1, world_size=3)
    engine, begun, free = world.engines[2], threading.Event(), threading.Event()
    plan = Plan.subgroup(3, (0, 1), plan_id=1)
    with engine.lock:
        engine.agreement.plan = plan

    class Parent(Line):
        def push(self, flats: Any, version: int, weights: Any = ()) -> int:
            begun.set()
            assert free.wait(DEADLINE_S)
            return version + 1

    steps = child_steps(engine, plan, line=Parent(), background=True)
    made = StepDriver(0, Config(), lambda *given, **more: None, cast(Any, None), str, lambda task: None)
    made.engine, made.switcher = engine, cast(Any, SimpleNamespace(active_mode=steps))
    for _ in range(2):
        for bucket in engine.applier.buckets:
            steps.give(bucket)
        steps.step(skip=False)
        assert begun.wait(DEADLINE_S)
    made.state_loaded()
    free.set()
    counters = engine.counters
    assert counters.drops == 1 and counters.produced_weight == counters.dropped_weight == pytest.approx(1.0)
    assert engine.replica.state_loaded
    with engine.lock:
        engine.agreement.plan = Plan.sync(3, plan_id=2)
    steps.exit()
    assert engine.pending_weight == 0.0 and counters.drops == 1


def test_a_child_that_has_what_is_newest_gets_it_once() -> None:
    """Over a slow link parameters take long; where ranks meet twice, at the same step, all would wait for it twice."""
    world = World(1, world_size=3)
    engine = world.engines[2]
    plan = Plan.subgroup(3, (0, 1), plan_id=1)
    with engine.lock:
        engine.agreement.plan = plan

    class Parent(Line):
        def state(self, min_step: int, *, state_too: bool, awaited: bool = False) -> Any:
            return world.engines[0].replica.snapshot()

    steps = child_steps(engine, plan, line=Parent())
    made = StepDriver(0, Config(), lambda *given, **more: None, cast(Any, None), str, lambda task: None)
    made.engine, made.local = engine, cast(Any, SimpleNamespace(waiting=False))
    made.switcher = cast(Any, SimpleNamespace(active_mode=steps))
    assert made.position().out_of_common_steps, "it has never got anything"
    steps.catch_up()
    assert not made.position().out_of_common_steps and made.position().whole
    for ahead in (0, 1):
        member = Position(0, 0, engine.step + ahead, engine.step + ahead, True, False, False)
        assert settled([made.position(), member], asked=False) == (ahead == 0)
    with torch.no_grad():
        engine.applier.buckets[0].params[0].mul_(2.0)
    assert made.position().out_of_common_steps, "the program has changed its parameters"
    steps.catch_up()
    with engine.lock:
        engine.agreement.plan = Plan.sync(3, plan_id=2)
    assert made.position().out_of_common_steps, "the mode is over"


def test_a_childs_step_during_which_the_mode_ends_is_reported_as_one_of_its_own_mode() -> None:
    """Else the coordinator takes the step to contain it for one of the next mode and closes none before it."""
    world = World(1, world_size=3)
    engine = world.engines[2]
    plan, after = Plan.subgroup(3, (0, 1), plan_id=1), Plan.grouped(3, [(0, 1), (2,)]).replace(plan_id=2, servers=(0,))

    class Parent(Line):
        def push(self, flats: Any, version: int, weights: Any = ()) -> int:
            with engine.lock:
                engine.agreement.plan = after  # It comes into force while the gradient is on its way.
            return version + 2

    with engine.lock:
        engine.agreement.plan = plan
    told: list[StepInfo] = []
    steps = child_steps(engine, plan, line=Parent(), told=told)
    steps.step(skip=False)
    assert [info.plan_id for info in told] == [1] and steps.over


def test_a_gradient_on_its_way_that_fails_at_the_end_of_the_mode_counts_as_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is lost without a trace: produced = applied + damped + dropped + what waits."""
    world = World(1, world_size=3)
    engine = world.engines[2]
    plan, pushing, closing = Plan.subgroup(3, (0, 1), plan_id=1), threading.Event(), threading.Event()

    class Parent(Line):
        parent = 0

        def push(self, flats: Any, version: int, weights: Any = ()) -> int:
            pushing.set()
            assert closing.wait(60.0)
            raise ChannelError("the parent is gone")

    def close(sender: LateSender, deadline_s: float, original: Any = LateSender.close) -> Any:
        unsent = original(sender, 0.0)
        closing.set()
        original(sender, deadline_s)
        return unsent

    monkeypatch.setattr(LateSender, "close", close)
    with engine.lock:
        engine.agreement.plan = plan
    steps = child_steps(engine, plan, line=Parent(), background=True)
    counters = engine.counters
    for number in range(3):
        counters.produced_weight += engine.own.weight
        steps.step(skip=False)
        assert number or pushing.wait(60.0)
    assert counters.produced_weight == 0.0, "they are the parent's"
    steps.exit()
    assert (counters.drops, counters.dropped_weight) == (1, engine.own.weight)
    assert counters.produced_weight == 3 * engine.own.weight, "two of them wait for this rank's next step"


class LastState(Servers):
    """Servers that ended with a state, if they still have it."""

    def __init__(self, given: Snapshot | None) -> None:
        super().__init__()
        self.given, self.asked = given, list[int]()

    def final_state(self, optimizer_id: int, plan: Plan, step: int, deadline_s: float) -> Snapshot | None:
        self.asked.append(step)
        return self.given


def behind_servers(ended_at: int, given: Snapshot | None) -> tuple[ModeSwitcher, LastState, OtherRanks]:
    """A rank that follows the end of servers, has not fetched their state yet, and goes on at step 6."""
    engine = World(1, world_size=3).engines[2]
    servers, ranks = LastState(given), OtherRanks(Snapshot(6, [], []))
    served, back = Plan.ps(3, 1, servers=(0,), plan_id=1), Plan.sync(3, plan_id=2)
    made = Rank(2, engine=engine, services=servers, ranks=ranks).offer(served)
    with engine.lock:
        engine.agreement.plan = served
        made.switcher.taken_up(served)
    made.offer(back).switcher.announce(2, ended_at)
    with engine.lock:
        made.switcher.taken_up(engine.plan)  # The engine's listener is the world's.
    engine.set_inactive(True)
    engine.close(5)  # Where the servers ended before it, the helper makes this step.
    engine.helper_tick()
    assert engine.next_step == 6
    assert made.switcher.needs_state
    return made.switcher, servers, ranks


def test_a_state_is_asked_of_the_servers_that_ended_and_then_of_other_ranks() -> None:
    given = Snapshot(6, [], [])
    made, servers, ranks = behind_servers(6, given)
    assert made.state_for(0) is given and servers.asked == [6] and ranks.asked == []
    made, servers, ranks = behind_servers(6, None)
    assert made.state_for(0) is ranks.given and servers.asked == [6] and ranks.asked == [0]


def test_servers_are_not_asked_once_other_ranks_have_later_steps() -> None:
    made, servers, ranks = behind_servers(5, Snapshot(5, [], []))
    assert made.state_for(0) is ranks.given and servers.asked == []


def test_a_rank_that_has_left_fails_the_engine_whose_servers_wait_for_its_state() -> None:
    gone = RankLostError("rank 1 has left the job")

    class Gone(Servers):
        def final_state(self, optimizer_id: int, plan: Plan, step: int, deadline_s: float) -> Snapshot | None:
            raise gone

    made = Rank(2, services=Gone()).under(SERVED).offer(OTHER)
    made.switcher.announce(OTHER.plan_id, 57)
    made.run_tasks()
    assert made.engine.failure is gone


@pytest.mark.parametrize("error", [ValueError("no such shard"), ChannelError("no server")], ids=["any", "ours"])
@pytest.mark.parametrize("call", ["seed", "begun"])
def test_what_fails_in_the_preparing_thread_once_a_plan_is_in_force_fails_the_rank(call: str, error: Exception) -> None:
    """Only logged, it left all ranks waiting for servers that did not begin here."""

    class Failing(Servers):
        def final_state(self, *unused: Any) -> Snapshot:
            return Snapshot(57, [], [])

    def fails(*unused: Any) -> None:
        raise error

    served = dataclasses.replace(OTHER, servers=(1,))
    made = Rank(1, services=Failing()).under(SERVED).offer(served)
    setattr(made.services, call, fails)
    made.switcher.announce(served.plan_id, 57)
    made.run_tasks()
    assert isinstance(made.engine.failure, StarError) and str(error) in str(made.engine.failure)


def test_what_fails_while_a_plan_is_prepared_is_no_failure_of_the_rank() -> None:
    def fails(*unused: Any) -> str | None:
        raise ValueError("no layout")

    made = Rank(1)
    made.services.prepare = fails
    made.offer(SERVED)
    assert made.engine.failure is None and "no layout" in made.refused[SERVED.plan_id]
