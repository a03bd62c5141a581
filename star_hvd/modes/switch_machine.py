"""The state machine of a rank's switches from plan to plan: events in, instructions out.

It is pure: it starts no thread, takes no lock, waits for nothing and knows neither engine nor servers. `ModeSwitcher`
(`mode_switcher.py`) feeds it events, one at a time, and carries out what it returns. The table in `switch_protocol.py`
lists what may happen; this module chooses among the possibilities of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from scheduler.records import Plan
from star_hvd.modes.switch_protocol import (
    LIVE,
    PAST,
    RULES,
    AnnouncePresence,
    AwaitPlan,
    BeginServers,
    CatchUp,
    DrainMode,
    EndedServers,
    EndServers,
    EnterMode,
    Event,
    ExitMode,
    Fail,
    FlagDue,
    FollowDue,
    FollowPlan,
    GiveUp,
    Instruction,
    LowerFlag,
    ModeDrained,
    ModeOpened,
    OpenMode,
    PlanAbandoned,
    PlanActivated,
    PlanCommitted,
    PlanInForce,
    PlanOffered,
    PlanPrepared,
    PlanRefused,
    PlanState,
    PreparationBegins,
    Prepare,
    QueuePreparation,
    QueueServing,
    RaiseFlag,
    ReportPrepared,
    ReportRefused,
    SeedFromServers,
    SeedServers,
    ServingDue,
    StateChecked,
    StepEnded,
    Superseded,
    ThreadActive,
    ThreadInactive,
    ThreadLeft,
    UseMode,
)

__all__ = ["SwitchMachine"]

_SERVED = ("ps", "grouped")
_KEPT_PLANS = 8  # Records of this many plans before the newest are kept after they end; servers may still name them.

S = PlanState


@dataclass(slots=True)
class _Record:
    plan: Plan
    state: PlanState = S.UNKNOWN
    session: int = -1
    after: int = -1  # The id of the plan under which it was published.
    committed: bool = False  # Whether all ranks are ready for it.
    step: int = -1  # At which it begins, once announced.
    following: bool = False  # Whether the engine was asked to adopt it.
    ended: EndedServers | None = None  # Servers whose last state it begins with.
    seeded: bool = False  # Whether servers here have the state they start with, or will get it.
    opened: bool = False  # Whether the object that makes its steps exists.
    entering: bool = False  # Whether the training thread is about to use that.


class SwitchMachine:
    """Decides what a rank does at each event of a switch; see the module docstring.

    Args:
        rank: This rank.
        plan: The plan in force at the start, of family `all_ranks` and without a mode of its own.
        on_transition: Called before every transition, with the plan's state and the event.
    """

    def __init__(
        self, rank: int, plan: Plan, on_transition: Callable[[PlanState, Event], None] = lambda state, event: None
    ) -> None:
        self.rank = rank
        self._on_transition = on_transition
        self._records = {plan.plan_id: _Record(plan, S.ENTERED, plan.plan_id)}
        self._current = self._records[plan.plan_id]
        self._inactive = False
        self._handlers: dict[type, Callable[[_Record, Event], list[Instruction]]] = {
            PlanOffered: self._offered, PreparationBegins: self._preparation_begins, PlanPrepared: self._prepared,
            PlanRefused: self._refused, PlanCommitted: self._committed, PlanAbandoned: self._abandoned,
            PlanActivated: self._activated, FollowDue: self._follow, PlanInForce: self._in_force,
            FlagDue: self._flag, Superseded: self._superseded, ServingDue: self._serve, StepEnded: self._step_ended,
            ModeDrained: self._drained, ThreadLeft: self._thread_left, StateChecked: self._state_checked,
            ModeOpened: self._opened, ThreadInactive: self._presence, ThreadActive: self._presence,
        }  # fmt: skip

    # ---- questions ------------------------------------------------------------------------------------------------

    @property
    def in_force(self) -> Plan:
        """The plan in force on this rank."""
        return self._current.plan

    @property
    def ended_servers(self) -> EndedServers | None:
        """The servers whose last state the plan in force begins with."""
        return self._current.ended

    @property
    def needs_state(self) -> bool:
        """Whether the training thread, at the end of its step, needs the state of the step the others are at."""
        if self._active() is not None or self.must_drain:
            return False
        return self._takes_part(self.in_force) or self._brings_state(self._current)

    @property
    def must_drain(self) -> bool:
        """Whether other ranks may wait for this one in a mode that was skipped.

        They reach the plan in force only after that mode has ended, so until then the training thread must not wait for
        them there.
        """
        return bool(self._in(S.UNDRAINED)) and self._active() is None

    @property
    def at_rest(self) -> bool:
        """Whether the end of a step changes nothing unless the active mode is over; the usual case."""
        return self._current.state is S.ENTERED and not self._in(S.ENDED, S.UNDRAINED, S.WAITING)

    def state(self, plan_id: int) -> PlanState:
        """Return how far a plan has come."""
        record = self._records.get(plan_id)
        return S.UNKNOWN if record is None else record.state

    def states(self) -> dict[int, PlanState]:
        """Return the states of all remembered plans by id."""
        return {plan_id: record.state for plan_id, record in sorted(self._records.items())}

    def plan(self, plan_id: int) -> Plan | None:
        """Return a plan that was ready here, None if there is none of this id."""
        never = (S.UNKNOWN, S.QUEUED, S.WAITING, S.PREPARING, S.ABANDONED)
        record = self._records.get(plan_id)
        return None if record is None or record.state in never else record.plan

    def is_current(self, session: int) -> bool:
        """Whether the plan in force belongs to a session."""
        return self._current.session == session

    # ---- events ----------------------------------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Instruction]:
        """Process an event.

        Returns:
            The instructions to carry out, in this order.
        """
        if isinstance(event, (ThreadInactive, ThreadActive)):
            self._inactive = isinstance(event, ThreadInactive)
        found = [each for record in self._concerned(event) for each in self._apply(record, event)]
        if isinstance(event, PlanInForce):
            found += self._follow_next() + self._flag_later()
        if isinstance(event, (PlanInForce, StepEnded, ModeDrained)) and not self._outdated():
            waiting = [record for record in self._in(S.WAITING) if not self._is_early(record)]
            found += [each for record in waiting for each in self._apply(record, ThreadLeft())]
        return found

    def _concerned(self, event: Event) -> Iterator[_Record]:
        """Return the records an event is about; for a session, the record under which it is open now."""
        if isinstance(event, (PlanOffered, PlanInForce)):
            yield self._record(event.plan)
        elif isinstance(event, (ModeOpened, ModeDrained)):
            live = [each for each in self._in(*LIVE) if each.session == event.session]
            yield from live[-1:]
        elif isinstance(event, (StepEnded, ThreadInactive, ThreadActive)):
            yield from self._in(S.ENDED)  # First leave ended modes; skipped ones are drained afterwards.
            yield from self._in(S.IN_FORCE, S.ENTERED, S.UNDRAINED)
        elif isinstance(event, StateChecked):
            yield self._current
        elif not isinstance(event, (Superseded, FollowDue, FlagDue, ThreadLeft)):
            yield self._records.get(event.plan_id) or _Record(Plan.sync(1, plan_id=event.plan_id))

    def _record(self, plan: Plan) -> _Record:
        for plan_id in [i for i, each in self._records.items() if each.state in PAST]:
            if plan_id < plan.plan_id - _KEPT_PLANS:
                del self._records[plan_id]
        return self._records.setdefault(plan.plan_id, _Record(plan, session=plan.plan_id))

    def _apply(self, record: _Record, event: Event) -> list[Instruction]:
        row = RULES.get((record.state, type(event)))
        if row is None:
            return []
        self._on_transition(record.state, event)
        before, found = record.state, self._handlers[type(event)](record, event)
        assert record.state in row.to, f"{before.name} became {record.state.name} by {event}; expected one of {row.to}"
        assert all(type(each) in row.instructions for each in found), f"{before.name} and {event} asked for {found}"
        return found

    def _in(self, *states: PlanState) -> list[_Record]:
        """Return the records in one of these states, by plan id."""
        return [record for _, record in sorted(self._records.items()) if record.state in states]

    # ---- getting ready ---------------------------------------------------------------------------------------------

    def _offered(self, record: _Record, event: Event) -> list[Instruction]:
        assert isinstance(event, PlanOffered)
        record.after = event.active
        if record.plan.family == self.in_force.family == "all_ranks":
            record.state = S.PREPARED
            return [RaiseFlag(record.plan, offered=True)]
        record.state = S.QUEUED
        return [QueuePreparation(record.plan.plan_id)]

    def _preparation_begins(self, record: _Record, event: Event) -> list[Instruction]:
        """Prepare, unless the training thread is still connected to a server session before the last one.

        For a busy training thread only the connections to the servers that ended last are kept. Nor is a plan prepared
        before the one under which it was published is in force here: whether it continues that one's servers, and what
        follows from its commit, is not known earlier.
        """
        plan = record.plan
        own_servers = plan.family in _SERVED and not plan.family == self.in_force.family == "ps"
        if (own_servers and self._outdated()) or self._is_early(record):
            record.state = S.WAITING
            return []
        record.state = S.PREPARING
        return [Prepare(plan)]

    def _is_early(self, record: _Record) -> bool:
        """Whether the plan under which this one was published is yet to come into force here, and both need more than a
        flag: with `all_ranks` it makes no difference which of them this rank is under."""
        active = self._records.get(record.after)
        if active is None or active.state is S.ABANDONED or record.after <= self.in_force.plan_id:
            return False
        return record.plan.family != "all_ranks" != active.plan.family

    def _prepared(self, record: _Record, event: Event) -> list[Instruction]:
        assert isinstance(event, PlanPrepared)
        record.state = S.PREPARED
        record.session = record.plan.plan_id if event.session is None else event.session
        return [ReportPrepared(record.plan)]

    def _refused(self, record: _Record, event: Event) -> list[Instruction]:
        assert isinstance(event, PlanRefused)
        unsupported, record.state = record.state is S.PREPARED, S.ABANDONED
        return [ReportRefused(record.plan, event.reason, unsupported)]

    def _committed(self, record: _Record, event: Event) -> list[Instruction]:
        record.committed = True
        return self._leave_for(record)

    def _leave_for(self, record: _Record) -> list[Instruction]:
        """Return what all ranks being ready for a plan means under the plan in force."""
        if self.in_force.family in _SERVED:
            return [EndServers(self.in_force, record.plan)]
        return [RaiseFlag(record.plan, offered=False)] if self._takes_part(self.in_force) else []

    def _abandoned(self, record: _Record, event: Event) -> list[Instruction]:
        assert isinstance(event, PlanAbandoned)
        if record.state is not S.UNKNOWN:
            record.state = S.WITHDRAWN if record.state is S.PREPARED else S.ABANDONED
        return [LowerFlag(event.plan_id), GiveUp(event.plan_id)]

    # ---- coming into force -----------------------------------------------------------------------------------------

    def _activated(self, record: _Record, event: Event) -> list[Instruction]:
        """Follow an announced plan, unless this rank takes part in reductions and thus adopts the plan in band.

        It may not have read that yet while others are a moment ahead. Following would void a state that this rank has
        and that other ranks wait to begin with.
        """
        assert isinstance(event, PlanActivated)
        if event.plan_id <= self.in_force.plan_id:
            return []
        if record.state not in (S.PREPARED, S.WITHDRAWN):
            return [Fail(
                f"the coordinator announced plan {event.plan_id}, in force from step {event.step}, but rank "
                f"{self.rank} has not prepared it (it is {record.state.name.lower()}: {record.state.value}); the plan "
                f"in force here is {self.in_force.plan_id}, {self.in_force.label}. Please report this with the logs"
            )]  # fmt: skip
        record.state, record.step = S.ANNOUNCED, event.step
        return self._follow_next()

    def _follow_next(self) -> list[Instruction]:
        announced = self._in(S.ANNOUNCED)
        if not announced or announced[0].following or self._takes_part(self.in_force):
            return []
        return self._apply(announced[0], FollowDue())

    def _follow(self, record: _Record, event: Event) -> list[Instruction]:
        record.following = True
        found: list[Instruction] = [FollowPlan(record.plan, record.step)]
        if self.in_force.family in _SERVED:
            record.ended = EndedServers(self.in_force, record.step)
            if self.rank in record.plan.servers:
                # From servers to servers: the training thread may be in a user's collective for long.
                record.seeded = True
                found.append(SeedFromServers(record.plan, record.ended))
        return found

    def _flag_later(self) -> list[Instruction]:
        """Raise the flags of later plans that need nothing else now.

        On ranks that took up the plan in force before they were offered these, the flags are up. No `Commit` follows,
        since those ranks do not report that they are prepared.
        """
        if self.in_force.family != "all_ranks":
            return []
        offered = self._in(S.QUEUED, S.WAITING, S.PREPARING, S.PREPARED)
        later = [each for each in offered if each.plan.family == "all_ranks"]
        return [
            each
            for record in later
            if record.plan.plan_id > self.in_force.plan_id
            for each in self._apply(record, FlagDue())
        ]

    def _flag(self, record: _Record, event: Event) -> list[Instruction]:
        record.state = S.PREPARED
        return [RaiseFlag(record.plan, offered=True)]

    def _in_force(self, record: _Record, event: Event) -> list[Instruction]:
        before, plan = self._current, record.plan
        if plan.plan_id <= before.plan.plan_id:
            record.state = S.OVER
            return []
        if plan.mode == before.plan.mode == "local":
            record.session = before.session
        continued = record.session == before.session
        record.state = S.ENTERED if continued and before.state is S.ENTERED else S.IN_FORCE
        if continued:
            record.opened, record.entering, record.seeded = before.opened, before.entering, True
        self._current = record
        for older in [each for each in self._records.values() if each.plan.plan_id < plan.plan_id]:
            self._apply(older, Superseded(plan))
        serving: list[Instruction] = [BeginServers(plan), QueueServing(plan.plan_id)] if plan.family in _SERVED else []
        later = [each for each in self._in(S.PREPARED) if each.committed and each.plan.plan_id > plan.plan_id]
        moving = [each for record in later[-1:] for each in self._leave_for(record)]
        return [*serving, *self._report_flagged(), *moving]

    def _report_flagged(self) -> list[Instruction]:
        """Report later plans that only have their flag up, as they were offered under a plan that needs no more.

        Ranks that had taken up the plan in force before were to prepare them, so the coordinator waits for all ranks.
        """
        if self.in_force.family == "all_ranks":
            return []
        later = [each.plan for each in self._in(S.PREPARED) if each.plan.plan_id > self.in_force.plan_id]
        return [ReportPrepared(plan) for plan in later if plan.family == "all_ranks"]

    def _superseded(self, record: _Record, event: Event) -> list[Instruction]:
        continued = record.session == self._current.session
        if record.state in (S.QUEUED, S.WAITING, S.PREPARING):
            record.state = S.ABANDONED
        elif record.state is S.ENTERED and not continued and self._has_mode(record.plan):
            record.state = S.ENDED
        elif record.state is S.IN_FORCE and not continued and self._may_be_awaited(record):
            record.state = S.UNDRAINED
        else:
            record.state = S.OVER
        return []

    def _may_be_awaited(self, record: _Record) -> bool:
        """Whether other ranks may wait for this one in a mode its training thread has not entered."""
        return record.opened or record.entering or record.plan.family == "grouped"

    def _serve(self, record: _Record, event: Event) -> list[Instruction]:
        """Open the mode for a group, whose members wait for this rank until their leader learns of the mode's end."""
        found: list[Instruction] = []
        if record.state is S.IN_FORCE and record.plan.family == "grouped":
            found += self._open(record)
        return found + (self._presence(record, event) if self._inactive else [])

    # ---- the training thread ---------------------------------------------------------------------------------------

    def _presence(self, record: _Record, event: Event) -> list[Instruction]:
        """Announce the training thread's presence: while it is inactive other ranks must not wait for it."""
        if record.plan.family not in _SERVED:
            return []
        due = isinstance(event, ServingDue) or (isinstance(event, ThreadInactive) and record.state is S.IN_FORCE)
        found = self._open(record) if due and self._inactive else []
        return [*found, AnnouncePresence(record.session, self._inactive)] if record.opened else found

    def _open(self, record: _Record) -> list[Instruction]:
        if record.opened:
            return []
        record.opened = True
        return [OpenMode(record.plan, record.session)]

    def _step_ended(self, record: _Record, event: Event) -> list[Instruction]:
        assert isinstance(event, StepEnded)
        if record.state is S.UNDRAINED:
            return [DrainMode(record.plan, record.session)] if self._active() is None else []
        if not event.mode_over or not self._has_mode(record.plan):
            return []
        if record.state is S.ENTERED:
            return [AwaitPlan(record.plan, record.session)]
        record.state = S.OVER
        return [ExitMode(record.session)]

    def _drained(self, record: _Record, event: Event) -> list[Instruction]:
        record.state = S.OVER
        return []

    def _thread_left(self, record: _Record, event: Event) -> list[Instruction]:
        record.state = S.QUEUED
        return [QueuePreparation(record.plan.plan_id)]

    def _state_checked(self, record: _Record, event: Event) -> list[Instruction]:
        assert isinstance(event, StateChecked)
        plan = record.plan
        if self._active() is not None or self.must_drain:
            return []
        if not self._has_mode(plan):
            record.state = S.IN_FORCE if event.behind else S.ENTERED
            return []
        if event.behind and (plan.mode == "local" or self._brings_state(record)):
            return []  # While behind, its gradients are late; a later step gets here again.
        found: list[Instruction] = []
        if self.rank in plan.servers and self._brings_state(record):
            record.seeded = True
            found.append(SeedServers(plan))
        record.entering = True
        return [*found, EnterMode(plan, record.session, event.behind)]

    def _opened(self, record: _Record, event: Event) -> list[Instruction]:
        assert isinstance(event, ModeOpened)
        record.opened = True
        if record.state is S.UNDRAINED:
            return []
        record.state = S.ENTERED
        found: list[Instruction] = [UseMode(record.session, elsewhere=record.plan.mode != "local")]
        return [*found, CatchUp(record.session, record.ended)] if event.behind else found

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _takes_part(self, plan: Plan) -> bool:
        """Whether this rank reduces together with other ranks under a plan."""
        return plan.family == "all_ranks" or self.rank in plan.members

    def _has_mode(self, plan: Plan) -> bool:
        """Whether something other than the reduction of gradients makes this rank's steps under a plan."""
        return plan.mode == "local" or not self._takes_part(plan)

    def _brings_state(self, record: _Record) -> bool:
        """Whether other ranks wait for a state that this rank's training thread has."""
        return self.rank in record.plan.sources and not record.seeded

    def _active(self) -> _Record | None:
        """Return the plan in whose mode the training thread is."""
        found = [each for each in self._in(S.ENTERED, S.ENDED) if self._has_mode(each.plan)]
        return found[0] if found else None

    def _outdated(self) -> bool:
        """Whether the training thread has yet to leave a mode of its own that is no longer in force."""
        return any(each.state is S.UNDRAINED or each.plan.mode != "local" for each in self._in(S.ENDED, S.UNDRAINED))
