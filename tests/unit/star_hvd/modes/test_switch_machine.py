"""The state machine of a rank's switches: its table is complete, and no order of events breaks what must hold.

`Rank` plays one rank around the machine: the coordinator, the engine, the thread that prepares, and the training
thread, whose instructions are carried out one by one, so that events of all the others fall in between.
"""

from __future__ import annotations

import collections
import random
import typing
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler.plan.plan import Plan
from star_hvd.modes import switch_protocol as p
from star_hvd.modes.switch_machine import SwitchMachine
from star_hvd.modes.switch_protocol import PlanState as S
from tests.support.effort import cases

WORLD = 4
KINDS = ["sync", "partial", "local", "local2", "subgroup", "subgroup2", "ps", "ps2", "ssp", "grouped", "grouped2"]


def plan_of(kind: str, plan_id: int) -> Plan:
    more: dict[str, Any] = {"plan_id": plan_id}
    plans = {
        "sync": lambda: Plan.sync(WORLD, **more),
        "partial": lambda: Plan.partial(WORLD, 2, **more),
        "local": lambda: Plan.local(WORLD, steps=2, **more),
        "local2": lambda: Plan.local(WORLD, steps=3, **more),
        "subgroup": lambda: Plan.subgroup(WORLD, (0, 1, 2), **more),
        "subgroup2": lambda: Plan.subgroup(WORLD, (0, 3), **more),
        "ps": lambda: Plan.ps(WORLD, 3, servers=(1,), **more),
        "ps2": lambda: Plan.ps(WORLD, 1, servers=(1,), **more),
        "ssp": lambda: Plan.ps(WORLD, 2, servers=(0, 3), **more),
        "grouped": lambda: Plan.grouped(WORLD, [(0, 1), (2, 3)]).replace(servers=(0,), **more),
        "grouped2": lambda: Plan.grouped(WORLD, [(0,), (1, 2, 3)]).replace(servers=(1, 2), **more),
    }
    return plans[kind]()


# ---- the table ----------------------------------------------------------------------------------------------------


def test_every_event_is_defined_once_in_every_state() -> None:
    found = collections.Counter((state, row.event) for row in p.TRANSITIONS for state in row.states)
    found.update((state, event) for event, states in p.NO_EFFECT.items() for state in states)
    wanted = {(state, event) for state in S for event in typing.get_args(p.Event)}
    assert set(found) == wanted and set(found.values()) == {1}


def test_every_instruction_is_asked_for_somewhere() -> None:
    assert {each for row in p.TRANSITIONS for each in row.instructions} == set(typing.get_args(p.Instruction))


def test_only_a_plan_with_nothing_left_to_do_has_no_way_out() -> None:
    ways = {state: {to for row in p.TRANSITIONS if state in row.states for to in row.to} - {state} for state in S}
    assert [state for state in S if not ways[state]] == [S.OVER]
    assert ways[S.ABANDONED] <= {S.IN_FORCE, S.ENTERED, S.OVER, *p.EARLY}, "the engine has the last word"


# ---- single ways through it ---------------------------------------------------------------------------------------


def machine(*history: str, rank: int = 3) -> SwitchMachine:
    """A rank that went through plans of these kinds, each in force in its turn and not entered."""
    made = SwitchMachine(rank, plan_of("sync", 0))
    for plan_id, kind in enumerate(history, 1):
        ready(made, plan_of(kind, plan_id))
        made.handle(p.PlanInForce(plan_of(kind, plan_id)))
    return made


def ready(made: SwitchMachine, plan: Plan) -> None:
    made.handle(p.PlanOffered(plan))
    made.handle(p.PreparationBegins(plan.plan_id))
    made.handle(p.PlanPrepared(plan.plan_id))


def enter(made: SwitchMachine) -> list[p.Instruction]:
    """The training thread comes, up to date, and enters what is in force."""
    found = made.handle(p.StateChecked(behind=False))
    (way,) = [each for each in found if isinstance(each, p.EnterMode)]
    return found + made.handle(p.ModeOpened(way.session, behind=False))


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_member_does_not_follow_an_announcement_that_it_has_agreed_to(rank: int) -> None:
    made, served = machine("subgroup", rank=rank), plan_of("ps", 2)
    ready(made, served)
    assert made.handle(p.PlanActivated(2, 57)) == [] and made.state(2) is S.ANNOUNCED
    assert made.handle(p.PlanInForce(served)) == [p.BeginServers(served), p.QueueServing(2)]
    assert made.state(2) is S.IN_FORCE and made.needs_state == (rank == 1), "its servers are on rank 1"


def test_a_child_follows_at_once() -> None:
    made, served = machine("subgroup"), plan_of("ps", 2)
    ready(made, served)
    assert made.handle(p.PlanActivated(2, 57)) == [p.FollowPlan(served, 57)]


def test_what_was_announced_early_is_followed_after_the_agreement_in_band() -> None:
    made, served, back = machine("subgroup", rank=1), plan_of("ps", 2), plan_of("sync", 3)
    ready(made, served)
    ready(made, back)
    assert made.handle(p.PlanActivated(2, 57)) == made.handle(p.PlanActivated(3, 60)) == []
    assert made.handle(p.PlanInForce(served))[-1] == p.FollowPlan(back, 60)
    made.handle(p.PlanInForce(back))
    assert made.ended_servers == p.EndedServers(served, 60) and made.states()[2] is S.OVER


def test_announcements_are_followed_one_after_the_other() -> None:
    """Else the state with which the last plan begins would be looked for at servers that are none."""
    made = machine("ps")
    for plan_id, kind in ((2, "grouped"), (3, "sync")):
        ready(made, plan_of(kind, plan_id))
    assert made.handle(p.PlanActivated(2, 10)) == [p.FollowPlan(plan_of("grouped", 2), 10)]
    assert made.handle(p.PlanActivated(3, 20)) == []
    assert made.handle(p.PlanInForce(plan_of("grouped", 2)))[-1] == p.FollowPlan(plan_of("sync", 3), 20)
    made.handle(p.PlanInForce(plan_of("sync", 3)))
    assert made.ended_servers == p.EndedServers(plan_of("grouped", 2), 20)


def test_from_servers_to_servers_the_training_thread_is_not_asked_for_its_state() -> None:
    made, ssp = machine("ps"), plan_of("ssp", 2)
    ready(made, ssp)
    ended = p.EndedServers(plan_of("ps", 1), 9)
    assert made.handle(p.PlanActivated(2, 9)) == [p.FollowPlan(ssp, 9), p.SeedFromServers(ssp, ended)]
    made.handle(p.PlanInForce(ssp))
    assert not made.needs_state
    assert not any(isinstance(each, p.SeedServers) for each in enter(made))


def test_an_announced_plan_that_was_never_prepared_here_fails_with_what_to_do() -> None:
    made = machine("ps")
    made.handle(p.PlanOffered(plan_of("sync", 2)))
    (found,) = made.handle(p.PlanActivated(2, 9))
    assert isinstance(found, p.Fail) and "plan 2" in found.reason and "queued" in found.reason
    assert made.handle(p.PlanActivated(1, 3)) == [], "an old one does no harm"


def test_other_servers_wait_for_a_training_thread_that_is_one_mode_of_servers_behind() -> None:
    made = machine("ps")
    enter(made)
    ready(made, plan_of("grouped", 2))
    assert made.state(2) is S.PREPARED, "its servers are in force"
    made.handle(p.PlanInForce(plan_of("grouped", 2)))
    assert made.state(1) is S.ENDED
    ready(made, plan_of("ssp", 3))
    assert made.state(3) is S.WAITING
    assert made.handle(p.StepEnded(mode_over=True)) == [p.ExitMode(1), p.QueuePreparation(3)]


def test_a_waiting_plan_that_is_abandoned_is_not_prepared_afterwards() -> None:
    made = machine("ps", "grouped")
    made.handle(p.PlanInForce(plan_of("sync", 3)))
    ready(made, plan_of("ssp", 4))
    assert made.state(4) is S.WAITING and made.state(2) is S.UNDRAINED
    made.handle(p.PlanAbandoned(4))
    assert made.handle(p.StepEnded()) == [p.DrainMode(plan_of("grouped", 2), 2)]
    assert made.handle(p.ModeDrained(2)) == [] and made.state(4) is S.ABANDONED


def test_a_waiting_plan_is_prepared_as_soon_as_the_mode_that_was_passed_is_drained() -> None:
    made = machine("grouped", "sync")
    ready(made, plan_of("ssp", 3))
    assert made.handle(p.StepEnded()) == [p.DrainMode(plan_of("grouped", 1), 1)], "not yet: others wait there"
    assert made.handle(p.ModeDrained(1)) == [p.QueuePreparation(3)]


def test_a_plan_that_continues_the_servers_continues_the_training_threads_mode() -> None:
    made, ps2 = machine("ps"), plan_of("ps2", 2)
    enter(made)
    made.handle(p.PlanOffered(ps2))
    made.handle(p.PreparationBegins(2))
    assert made.handle(p.PlanPrepared(2, session=1)) == [p.ReportPrepared(ps2)]
    assert made.handle(p.PlanCommitted(2)) == [p.EndServers(plan_of("ps", 1), ps2)]
    made.handle(p.PlanInForce(ps2))
    assert made.states() == {0: S.OVER, 1: S.OVER, 2: S.ENTERED} and made.handle(p.StepEnded()) == []


def test_an_inactive_training_thread_is_announced_and_its_mode_opened_for_it() -> None:
    made, grouped = machine(), plan_of("grouped", 1)
    made.handle(p.ThreadInactive())
    ready(made, grouped)
    made.handle(p.PlanInForce(grouped))
    assert made.handle(p.ServingDue(1)) == [p.OpenMode(grouped, 1), p.AnnouncePresence(1, inactive=True)]
    assert made.handle(p.ThreadActive()) == [p.AnnouncePresence(1, inactive=False)]


def test_the_next_plan_in_the_moment_in_which_a_mode_is_opened() -> None:
    made = machine("ps")
    (way,) = made.handle(p.StateChecked(behind=True))
    assert way == p.EnterMode(plan_of("ps", 1), 1, behind=True)
    ready(made, plan_of("sync", 2))
    made.handle(p.PlanInForce(plan_of("sync", 2)))
    assert made.handle(p.ModeOpened(1, behind=True)) == [] and made.must_drain
    assert made.handle(p.StepEnded()) == [p.DrainMode(plan_of("ps", 1), 1)]
    made.handle(p.ModeDrained(1))
    assert made.needs_state and not made.must_drain


def test_a_group_that_was_passed_is_drained_before_its_members_are_waited_for() -> None:
    """They come to the plan in force when the group has ended, which waits for this rank; word of that may come at any
    moment of a step's end."""
    made = machine("grouped")
    assert made.handle(p.StepEnded()) == []
    ready(made, plan_of("sync", 2))
    made.handle(p.PlanInForce(plan_of("sync", 2)))
    assert not made.needs_state, "the state comes from a step that needs them"
    assert made.handle(p.StateChecked(behind=False)) == [] and made.state(2) is S.IN_FORCE
    made.handle(p.StepEnded())
    made.handle(p.ModeDrained(1))
    made.handle(p.StateChecked(behind=False))
    assert made.needs_state and made.state(2) is S.ENTERED


# ---- all ways -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reached", [S.QUEUED, S.PREPARING, S.PREPARED])
def test_a_plan_offered_before_the_last_one_was_taken_up_here_gets_this_ranks_flag(reached: S) -> None:
    """The coordinator learns from the first rank that acts on a plan that it is in force, and may publish the next."""
    child, back, partial = machine("subgroup"), plan_of("sync", 2), plan_of("partial", 3)
    ready(child, back)
    child.handle(p.PlanOffered(partial))
    if reached is not S.QUEUED:
        child.handle(p.PreparationBegins(3))
    if reached is S.PREPARED:
        child.handle(p.PlanPrepared(3))
    assert child.state(3) is reached
    child.handle(p.PlanActivated(2, 50))
    assert child.handle(p.PlanInForce(back)) == [p.RaiseFlag(partial, offered=True)]
    assert child.state(3) is S.PREPARED
    assert child.handle(p.PreparationBegins(3)) == child.handle(p.PlanPrepared(3)) == []
    child.handle(p.PlanInForce(partial))
    assert child.in_force == partial


def test_a_withdrawn_plan_and_one_of_another_family_get_no_flag_from_the_plan_before() -> None:
    child, back = machine("subgroup"), plan_of("sync", 2)
    ready(child, back)
    child.handle(p.PlanOffered(plan_of("partial", 3)))
    child.handle(p.PlanAbandoned(3))
    child.handle(p.PlanOffered(plan_of("ps", 4)))
    child.handle(p.PlanActivated(2, 50))
    assert child.handle(p.PlanInForce(back)) == []
    assert child.state(3) is S.ABANDONED and child.state(4) is S.QUEUED


@pytest.mark.parametrize("kind", ["ps", "grouped", "subgroup"])
def test_a_plan_of_which_only_the_flag_was_needed_is_reported_where_that_is_not_enough_any_more(kind: str) -> None:
    """Ranks that took up the plan before it earlier prepare it and report so; the coordinator waits for all ranks."""
    made, plan, back = machine(), plan_of(kind, 1), plan_of("sync", 2)
    ready(made, plan)
    assert made.handle(p.PlanOffered(back)) == [p.RaiseFlag(back, offered=True)], "it is in force elsewhere"
    made.handle(p.PlanOffered(plan_of("partial", 3)))
    made.handle(p.PlanAbandoned(3))
    assert [each for each in made.handle(p.PlanInForce(plan)) if isinstance(each, p.ReportPrepared)] == [
        p.ReportPrepared(back)
    ]
    assert made.state(2) is S.PREPARED and made.in_force == plan


def moves(found: list[p.Instruction]) -> list[p.Instruction]:
    return [each for each in found if isinstance(each, (p.EndServers, p.RaiseFlag))]


@pytest.mark.parametrize("kind", ["grouped", "ssp", "ps2", "sync"])
def test_a_plan_is_prepared_under_the_plan_under_which_it_was_published(kind: str) -> None:
    """A rank that reads late that the one before is in force would connect to servers of its own, or let none end."""
    made, served, coming = machine(rank=1), plan_of("ps", 1), plan_of(kind, 2)
    ready(made, served)
    made.handle(p.PlanOffered(coming, active=1))
    if kind == "sync":
        assert made.state(2) is S.PREPARED, "its flag is up"
        assert p.ReportPrepared(coming) in made.handle(p.PlanInForce(served))
    else:
        assert made.handle(p.PreparationBegins(2)) == [] and made.state(2) is S.WAITING
        assert made.handle(p.StepEnded()) == []
        assert p.QueuePreparation(2) in made.handle(p.PlanInForce(served))
        assert made.handle(p.PreparationBegins(2)) == [p.Prepare(coming)]
        made.handle(p.PlanPrepared(2, 1 if kind == "ps2" else 2))
    assert moves(made.handle(p.PlanCommitted(2))) == [p.EndServers(served, coming)]


@pytest.mark.parametrize("kind", ["ps", "subgroup"])
def test_a_commit_that_came_before_the_present_plan_is_carried_out_under_it(kind: str) -> None:
    """The coordinator had abandoned that plan, whose flags were up everywhere, and published the next one before it."""
    made, present, coming = machine(rank=1), plan_of(kind, 1), plan_of("grouped", 2)
    ready(made, present)
    made.handle(p.PlanCommitted(1))
    made.handle(p.PlanAbandoned(1))
    made.handle(p.PlanOffered(coming, active=0))
    made.handle(p.PreparationBegins(2))
    made.handle(p.PlanPrepared(2))
    assert moves(made.handle(p.PlanCommitted(2))) == [p.RaiseFlag(coming, offered=False)]
    wanted: p.Instruction = p.EndServers(present, coming) if kind == "ps" else p.RaiseFlag(coming, offered=False)
    assert moves(made.handle(p.PlanInForce(present))) == [wanted]


class Rank(RuleBasedStateMachine):
    """See the module's text."""

    seen: set[tuple[S, type]] = set()  # Transitions of all ranks, by state and event.

    @initialize(rank=st.integers(0, WORLD - 1))
    def start(self, rank: int) -> None:
        self.rank = rank
        self.machine = SwitchMachine(rank, plan_of("sync", 0), lambda state, event: self.seen.add((state, type(event))))
        self.plans = {0: plan_of("sync", 0)}
        self.published: Plan | None = None
        self.committed = False
        self.reported: set[int] = set()  # Plans of which the coordinator knows that this rank is ready.
        self.sessions = {0: 0}  # Of prepared plans.
        self.flag: Plan | None = None  # Raised here.
        self.in_flight: Plan | None = None  # Abandoned, with the flags of all ranks in a step that has begun.
        self.after: dict[int, int] = {}  # Per plan, the one under which it was published.
        self.moved = collections.Counter[tuple[int, int]]()  # How often servers of the first were told of the second.
        self.announcements: collections.deque[p.PlanActivated] = collections.deque()
        self.tasks: collections.deque[p.Instruction] = collections.deque()
        self.todo: collections.deque[p.Instruction] = collections.deque()  # Of the training thread.
        self.active: int | None = None
        self.opened: set[int] = set()
        self.seeds: collections.Counter[int] = collections.Counter()
        self.history = [0]  # Plans that came into force here.
        self.inactive = False
        self.over = False  # The servers have said so.

    # ---- the executor ------------------------------------------------------------------------------------------

    def feed(self, event: Any, *, trainer: bool = False) -> None:
        self.obey(self.machine.handle(event), trainer=trainer)

    def obey(self, instructions: list[p.Instruction], *, trainer: bool = False) -> None:
        for each in instructions:
            if isinstance(each, (p.QueuePreparation, p.QueueServing, p.SeedFromServers)):
                self.tasks.append(each)
            elif trainer and not isinstance(each, p.ExitMode):  # Which comes first: nothing is used there afterwards.
                self.todo.append(each)
            else:
                self.carry_out(each)

    def carry_out(self, each: p.Instruction) -> None:
        match each:
            case p.Fail():
                raise AssertionError(each.reason)
            case p.RaiseFlag(plan=plan, offered=offered):
                if offered and plan.plan_id % 5 == 4:
                    self.feed(p.PlanRefused(plan.plan_id, "a gradient is sparse"))
                else:
                    self.flag = plan
            case p.LowerFlag(plan_id=plan_id):
                self.flag = None if self.flag is not None and self.flag.plan_id == plan_id else self.flag
            case p.ReportPrepared(plan=plan):
                self.reported.add(plan.plan_id)
            case p.ReportRefused(plan=plan):
                if self.published is plan:
                    self.published = None
                    self.feed(p.PlanAbandoned(plan.plan_id))
            case p.FollowPlan(plan=plan):
                if plan.plan_id > self.machine.in_force.plan_id:
                    self.take_up(plan)
            case p.EndServers(present=present, plan=plan):
                self.moved[present.plan_id, plan.plan_id] += 1
            case p.SeedFromServers(plan=plan) | p.SeedServers(plan=plan):
                self.seeds[self.sessions[plan.plan_id]] += 1
            case p.OpenMode(session=session):
                assert session not in self.opened, "opened twice"
                self.opened.add(session)
            case p.AnnouncePresence(session=session, inactive=inactive):
                assert session in self.opened and inactive == self.inactive
            case _:
                self.carry_out_steps(each)

    def carry_out_steps(self, each: p.Instruction) -> None:
        match each:
            case p.EnterMode(session=session, behind=behind):
                self.opened.add(session)
                for one in self.machine.handle(p.ModeOpened(session, behind)):  # All under the engine's lock.
                    self.carry_out(one)
            case p.UseMode(session=session):
                assert self.active is None, "two active modes"
                assert self.machine.is_current(session), "a mode that is not in force"
                self.active = session
            case p.ExitMode(session=session):
                assert self.active == session
                self.active = None
                self.opened.discard(session)
            case p.DrainMode(session=session):
                assert self.active is None
                self.opened.discard(session)
                self.feed(p.ModeDrained(session), trainer=True)
            case p.AwaitPlan(session=session):
                if self.machine.is_current(session):
                    self.todo.appendleft(each)
                else:
                    self.feed(p.StepEnded(mode_over=True), trainer=True)

    def take_up(self, plan: Plan) -> None:
        """What the engine does; instructions are left to the thread that prepares, since it holds the engine's lock."""
        self.flag = None if self.flag is not None and self.flag.plan_id <= plan.plan_id else self.flag
        before = self.machine.in_force
        if plan.mode == before.mode == "local":
            self.sessions[plan.plan_id] = self.sessions[before.plan_id]
        self.sessions.setdefault(plan.plan_id, plan.plan_id)
        self.history.append(plan.plan_id)
        self.over = False
        if self.published is not None and self.published.plan_id <= plan.plan_id:
            self.published = None
        self.tasks.extend(self.machine.handle(p.PlanInForce(plan)))

    @property
    def takes_part(self) -> bool:
        plan = self.machine.in_force
        return plan.family == "all_ranks" or self.rank in plan.members

    # ---- the coordinator ---------------------------------------------------------------------------------------

    # A rank gets the coordinator's messages in their order: what was announced comes before the next plan.
    @precondition(lambda self: self.published is None and not self.announcements)
    @rule(kind=st.sampled_from(KINDS), knows=st.booleans())
    def publish(self, kind: str, knows: bool) -> None:
        """`knows`: the coordinator has heard of the plan that has come into force on other ranks, if one has."""
        plan = plan_of(kind, max(self.plans) + 1)
        self.plans[plan.plan_id] = self.published = plan
        self.committed = False
        active = self.in_flight if knows and self.in_flight is not None else self.machine.in_force
        self.after[plan.plan_id] = active.plan_id
        self.feed(p.PlanOffered(plan, active.plan_id))

    @precondition(lambda self: self.published is not None and self.in_flight is None)
    @rule()
    def agree_elsewhere(self) -> None:
        """The other ranks adopt a plan in band; this one reads so in `agree_in_band`."""
        if self.flag is self.published and self.takes_part:
            self.in_flight, self.published = self.published, None

    @precondition(lambda self: self.published is not None and self.published.plan_id in self.reported)
    @rule()
    def commit(self) -> None:
        if not self.committed and self.published is not None:
            self.committed = True
            self.feed(p.PlanCommitted(self.published.plan_id))

    @precondition(lambda self: self.published is not None)
    @rule(flags_are_up=st.booleans())
    def abandon(self, flags_are_up: bool) -> None:
        plan = self.published
        assert plan is not None
        if self.committed and self.machine.in_force.family in ("ps", "grouped"):
            return  # Irrevocable.
        if flags_are_up and (self.flag is plan or (self.committed and not self.takes_part)):
            self.in_flight = plan
        self.published = None
        self.feed(p.PlanAbandoned(plan.plan_id))

    @rule()
    def agree_in_band(self) -> None:
        plan = self.in_flight or self.flag
        if plan is None or not self.takes_part or plan.plan_id <= self.machine.in_force.plan_id:
            self.in_flight = None if self.takes_part else self.in_flight
            return
        present = self.active is None and not self.machine.needs_state
        if self.in_flight is None and plan.family != self.machine.in_force.family and self.inactive and not present:
            return
        self.in_flight = None
        before = self.machine.in_force
        self.take_up(plan)
        if before.mode == "subgroup" and plan.plan_id not in {each.plan_id for each in self.announcements}:
            self.announcements.append(p.PlanActivated(plan.plan_id, plan.plan_id * 10))

    @rule(servers_said_so=st.booleans())
    def announce(self, servers_said_so: bool) -> None:
        """A mode of servers has ended, or a subgroup's members have agreed; perhaps before this rank could read so."""
        present, plan = self.machine.in_force, self.in_flight or self.published
        agreed = plan is not None and (plan is self.in_flight or (self.committed and plan.plan_id in self.reported))
        if plan is None or not agreed or present.family == "all_ranks" or present.family == plan.family == "ps":
            return
        if self.announcements and self.plans[self.announcements[-1].plan_id].family == "all_ranks":
            return  # That plan's steps, in which the next one is agreed, need this rank.
        if self.takes_part and self.flag is not plan and self.in_flight is not plan:
            return
        unseeded = self.rank in present.servers and not self.seeds[self.sessions[present.plan_id]]
        if present.family in ("ps", "grouped") and unseeded:
            return  # They cannot end before they have begun.
        self.over = servers_said_so
        self.published, self.in_flight = None, plan if self.takes_part else None
        self.announcements.append(p.PlanActivated(plan.plan_id, plan.plan_id * 10))

    @precondition(lambda self: bool(self.announcements))
    @rule()
    def deliver(self) -> None:
        self.feed(self.announcements.popleft())

    @rule(here=st.booleans())
    def change_rule(self, here: bool) -> None:
        """The servers take up another rule; a rank learns of it by its next push, or not before the next plan."""
        plan, present = self.published, self.machine.in_force
        if plan is None or not self.committed or not present.family == plan.family == "ps":
            return
        self.published = None
        if here and self.active == self.sessions[present.plan_id]:
            self.take_up(plan)

    # ---- the thread that prepares --------------------------------------------------------------------------------

    @precondition(lambda self: bool(self.tasks))
    @rule(prepared=st.integers(0, 5))
    def run_task(self, prepared: int) -> None:
        task = self.tasks.popleft()
        if isinstance(task, p.QueuePreparation):
            for each in self.machine.handle(p.PreparationBegins(task.plan_id)):
                assert isinstance(each, p.Prepare)
                self.prepare(each.plan, prepared > 0)
        elif isinstance(task, p.QueueServing):
            self.feed(p.ServingDue(task.plan_id))
        else:
            self.carry_out(task)

    def prepare(self, plan: Plan, works: bool) -> None:
        present, under = self.machine.in_force, self.plans[self.after[plan.plan_id]]
        early = under.plan_id > present.plan_id and plan.family != "all_ranks" != under.family
        assert not early, f"{plan.label} under {present.label}, not {under.label} as on the other ranks"
        session = plan.plan_id
        if present.family == plan.family == "ps":
            session = self.sessions[present.plan_id]
        elif plan.family in ("ps", "grouped"):
            current = self.sessions[present.plan_id]
            assert self.active in (None, current) or self.plans[self.active].mode == "local", "two modes behind"
        self.sessions[plan.plan_id] = session
        if works:
            self.feed(p.PlanPrepared(plan.plan_id, session))
        else:
            self.feed(p.PlanRefused(plan.plan_id, "it does not work"))

    # ---- the training thread -------------------------------------------------------------------------------------

    @precondition(lambda self: bool(self.todo))
    @rule()
    def go_on(self) -> None:
        self.carry_out(self.todo.popleft())

    @precondition(lambda self: not self.todo)
    @rule(group_learned=st.booleans())
    def end_step(self, group_learned: bool) -> None:
        over = False
        if self.active is not None:
            ended = not self.machine.is_current(self.active)
            learned = group_learned or self.plans[self.active].family != "grouped"
            over = (ended and learned) or (self.over and self.plans[self.active].family in ("ps", "grouped"))
        self.feed(p.StepEnded(over), trainer=True)

    @precondition(lambda self: not self.todo)
    @rule(behind=st.booleans())
    def check_state(self, behind: bool) -> None:
        self.feed(p.StateChecked(behind), trainer=True)

    @precondition(lambda self: not self.todo)
    @rule()
    def turn(self) -> None:
        self.inactive = not self.inactive
        self.feed(p.ThreadInactive() if self.inactive else p.ThreadActive())

    # ---- everything in its usual order --------------------------------------------------------------------------

    @precondition(lambda self: self.published is not None)
    @rule(comes=st.booleans())
    def usually(self, comes: bool) -> None:
        """The plan on its way comes into force, and the training thread to it if it `comes`."""
        while self.tasks:
            self.run_task(1)
        self.commit_if_ready()
        self.agree_in_band()
        self.announce(False)
        while self.announcements:
            self.deliver()
        while self.tasks:
            self.run_task(1)
        while comes and self.todo and not isinstance(self.todo[0], p.AwaitPlan):
            self.go_on()
        if comes and not self.todo:
            self.end_step(True)

    def commit_if_ready(self) -> None:
        if self.published is not None and self.published.plan_id in self.reported:
            self.commit()

    # ---- what must hold ------------------------------------------------------------------------------------------

    @invariant()
    def one_mode_and_one_seed(self) -> None:
        states = self.machine.states()
        assert sum(state in (S.IN_FORCE, S.ENTERED) for state in states.values()) == 1
        assert sum(state is S.ENDED for state in states.values()) <= 1
        assert all(count == 1 for count in self.seeds.values()), self.seeds
        assert self.machine.in_force.plan_id == self.history[-1]
        assert all(count == 1 for count in self.moved.values()), self.moved

    @invariant()
    def no_more_than_one_mode_of_servers_behind(self) -> None:
        if self.active is not None and self.plans[self.active].mode != "local":
            sessions = {self.sessions[each]: self.plans[each] for each in self.history}
            later = [session for session, plan in sessions.items() if session > self.active and plan.servers]
            assert len(later) <= 1, f"in {self.active}, while {later} began"

    def teardown(self) -> None:
        """Everything that is under way comes to its end; then nothing is left half done."""
        if not hasattr(self, "machine"):
            return
        if self.inactive:
            self.turn()
        for _ in range(60):
            while self.announcements:
                self.deliver()
            if S.ANNOUNCED in self.machine.states().values() or self.in_flight is not None:
                self.agree_in_band()
            while self.tasks:
                self.run_task(1)
            if self.todo and not isinstance(self.todo[0], p.AwaitPlan):
                self.go_on()
            elif self.todo:
                self.over = False
                if self.machine.in_force.plan_id == self.history[-1] and not self.announcements:
                    self.todo.clear()  # The next plan was announced to nobody yet.
            else:
                self.over = False
                self.end_step(True)
                if not self.todo:
                    self.check_state(False)
        self.check_end()

    def check_end(self) -> None:
        states = self.machine.states()
        current = states.pop(self.machine.in_force.plan_id)
        assert current is S.ENTERED, states
        under_way = {self.published.plan_id} if self.published is not None else set()
        left = {plan_id: state for plan_id, state in states.items() if plan_id not in under_way}
        assert set(left.values()) <= {S.OVER, S.ABANDONED, S.WITHDRAWN, S.PREPARED}, left
        newer = [i for i, state in left.items() if state is S.PREPARED]
        assert all(i > self.machine.in_force.plan_id for i in newer), "a plan that was passed"
        present, coming = self.machine.in_force, self.published
        if coming is not None and self.committed and present.family in ("ps", "grouped"):
            assert self.moved[present.plan_id, coming.plan_id] == 1, "all ranks wait for the end of its servers"
        for plan_id in self.history:
            plan, session = self.plans[plan_id], self.sessions[plan_id]
            if self.rank in plan.servers and session == plan_id:
                assert self.seeds[session] == 1, f"{plan.label} began without its state"


TestRank = Rank.TestCase
TestRank.settings = settings(
    max_examples=cases(60), stateful_step_count=60, deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)

IMPOSSIBLE = {
    *((state, p.PlanActivated) for state in (S.UNKNOWN, S.QUEUED, S.WAITING, S.PREPARING, S.ABANDONED)),
    *((state, p.PlanInForce) for state in (S.UNKNOWN, S.QUEUED, S.WAITING, S.PREPARING, S.ABANDONED)),
    *((state, p.PlanAbandoned) for state in (S.UNKNOWN, S.PREPARING)),
    *((state, p.Superseded) for state in (S.QUEUED, S.WAITING, S.PREPARING, S.ANNOUNCED)),
    *((state, p.FlagDue) for state in (S.QUEUED, S.WAITING, S.PREPARING)),
    (S.UNDRAINED, p.ServingDue),
}
"""Rows for what a coordinator and an engine that work do not do, or what takes more threads than are played here."""


def walk(rank: Rank, chance: random.Random, steps: int) -> None:
    """Rules at random, the rarer ones as often as the machine needs them to get far."""
    rank.start(chance.randrange(WORLD))
    others: list[Any] = [rank.abandon, rank.agree_elsewhere]
    for _ in range(steps):
        usual: list[Any] = [rank.run_task, rank.go_on, rank.deliver, rank.end_step, rank.check_state]
        rare: list[Any] = [rank.publish, rank.commit_if_ready, rank.agree_in_band, rank.announce, rank.change_rule]
        rare.append(rank.turn)
        pick = chance.choice(usual if chance.random() < 0.6 else rare if chance.random() < 0.93 else others)
        step(rank, pick.__name__, chance)
        rank.one_mode_and_one_seed()
        rank.no_more_than_one_mode_of_servers_behind()
    rank.teardown()


def step(rank: Rank, name: str, chance: random.Random) -> None:
    some = chance.random() < 0.5
    if name == "run_task" and rank.tasks:
        rank.run_task(chance.randrange(12))
    elif name == "go_on" and rank.todo:
        rank.go_on()
    elif name == "deliver" and rank.announcements:
        rank.deliver()
    elif name == "end_step" and not rank.todo:
        rank.end_step(some)
    elif name == "check_state" and not rank.todo:
        rank.check_state(chance.random() < 0.2)
    elif name == "publish" and rank.published is None and not rank.announcements:
        rank.publish(chance.choice(KINDS), some)
    elif name == "agree_elsewhere" and rank.published is not None and rank.in_flight is None:
        rank.agree_elsewhere()
    elif name in ("announce", "change_rule"):
        getattr(rank, name)(some)
    elif name in ("agree_in_band", "commit_if_ready"):
        getattr(rank, name)()
    elif name == "turn" and not rank.todo and chance.random() < 0.3:
        rank.turn()
    elif name == "abandon" and rank.published is not None:
        rank.abandon(some)


def test_random_walks_come_through_the_whole_table() -> None:
    Rank.seen.clear()
    for seed in range(max(500, cases(500))):  # Fewer do not come through all of it.
        try:
            walk(Rank(), random.Random(seed), 150)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    missing = {(state, row.event) for row in p.TRANSITIONS for state in row.states} - Rank.seen - IMPOSSIBLE
    assert not missing, sorted(f"{state.name} {event.__name__}" for state, event in missing)
