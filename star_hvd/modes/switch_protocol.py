"""The protocol of a rank's switches from plan to plan, as data: states, events, instructions, and the table.

`SwitchMachine` (`switch_machine.py`) carries the table out and is checked against it at every step;
`docs/protocols.md` prints it (`scripts/protocol_tables.py`).

Every plan has one state. Two plans share a *session* if the second continues the mode that started with the first:
servers that only change their rule, local steps with another interval. A session has the id of the plan that started
it, and at most one object that makes its steps.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from scheduler.records import Plan

__all__ = [
    "EARLY",
    "LIVE",
    "NO_EFFECT",
    "PAST",
    "RULES",
    "TRANSITIONS",
    "AnnouncePresence",
    "AwaitPlan",
    "BeginServers",
    "CatchUp",
    "DrainMode",
    "EndServers",
    "EndedServers",
    "EnterMode",
    "Event",
    "ExitMode",
    "Fail",
    "FollowDue",
    "FollowPlan",
    "GiveUp",
    "Instruction",
    "LowerFlag",
    "ModeDrained",
    "ModeOpened",
    "OpenMode",
    "PlanAbandoned",
    "PlanActivated",
    "PlanCommitted",
    "PlanInForce",
    "PlanOffered",
    "PlanPrepared",
    "PlanRefused",
    "PlanState",
    "PreparationBegins",
    "Prepare",
    "QueuePreparation",
    "QueueServing",
    "RaiseFlag",
    "ReportPrepared",
    "ReportRefused",
    "SeedFromServers",
    "SeedServers",
    "ServingDue",
    "StateChecked",
    "StepEnded",
    "Superseded",
    "ThreadActive",
    "ThreadInactive",
    "ThreadLeft",
    "Transition",
    "UseMode",
]


class PlanState(enum.Enum):
    """How far a plan has come on this rank, as described by the value."""

    UNKNOWN = "never offered here"
    QUEUED = "waits for the thread that prepares"
    WAITING = "needs servers of its own, and the training thread has yet to leave older ones"
    PREPARING = "being prepared"
    PREPARED = "ready; this rank takes it up when all ranks agree in band, or when it is announced"
    WITHDRAWN = "abandoned after it was ready; comes into force all the same if all flags were up already"
    ANNOUNCED = "in force elsewhere; not taken up here yet"
    IN_FORCE = "in force here; the training thread has not entered it"
    ENTERED = "in force here; the training thread works in it"
    ENDED = "not in force any more; the training thread is still in its mode"
    UNDRAINED = "not in force any more, never entered; other ranks may wait for this one in its mode"
    OVER = "passed: nothing is left to do for it here"
    ABANDONED = "never ready here; never comes into force"


S = PlanState


# ---- events -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlanOffered:
    """The coordinator publishes a plan. `active` is the id of the plan that it knew to be in force."""

    plan: Plan
    active: int = -1


@dataclass(frozen=True, slots=True)
class PreparationBegins:
    """`star-prepare` has taken this plan from its queue."""

    plan_id: int


@dataclass(frozen=True, slots=True)
class PlanPrepared:
    """Process sets, servers and connections are ready. `session` is the one that serves the plan, if any does."""

    plan_id: int
    session: int | None = None


@dataclass(frozen=True, slots=True)
class PlanRefused:
    """The plan cannot be carried out here."""

    plan_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class PlanCommitted:
    """All ranks are ready for the plan."""

    plan_id: int


@dataclass(frozen=True, slots=True)
class PlanAbandoned:
    """The coordinator abandons the plan."""

    plan_id: int


@dataclass(frozen=True, slots=True)
class PlanActivated:
    """The coordinator announces that the plan is in force from `step` on."""

    plan_id: int
    step: int


@dataclass(frozen=True, slots=True)
class PlanInForce:
    """This rank's engine has adopted the plan: agreed in band, followed, or a changed rule of the same servers."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class ServingDue:
    """`star-prepare` has taken a served plan that came into force from its queue."""

    plan_id: int


@dataclass(frozen=True, slots=True)
class StepEnded:
    """The training thread has made a step. `mode_over`: the steps of its mode have nothing left to do."""

    mode_over: bool = False


@dataclass(frozen=True, slots=True)
class StateChecked:
    """The training thread may enter a mode. `behind`: it lacks the state of the step the others are at."""

    behind: bool


@dataclass(frozen=True, slots=True)
class ModeOpened:
    """The object that makes a session's steps exists, for the training thread to use."""

    session: int
    behind: bool


@dataclass(frozen=True, slots=True)
class ModeDrained:
    """No other rank waits for this one in a session any more."""

    session: int


@dataclass(frozen=True, slots=True)
class ThreadInactive:
    """The training thread delivers no gradients for now."""


@dataclass(frozen=True, slots=True)
class ThreadActive:
    """The training thread delivers gradients again."""


@dataclass(frozen=True, slots=True)
class Superseded:
    """Internal: the plan `by` came into force after this one."""

    by: Plan


@dataclass(frozen=True, slots=True)
class FollowDue:
    """Internal: this is the oldest plan that is in force elsewhere and will not be agreed on here in band."""


@dataclass(frozen=True, slots=True)
class FlagDue:
    """Internal: the plan in force and this later one are of `all_ranks`, so that it needs only its flag."""


@dataclass(frozen=True, slots=True)
class ThreadLeft:
    """Internal: the training thread has left all modes that are not in force, and the plan in force here is as new as
    that under which the waiting one was published."""


Event = (
    PlanOffered | PreparationBegins | PlanPrepared | PlanRefused | PlanCommitted | PlanAbandoned | PlanActivated
    | PlanInForce | ServingDue | StepEnded | StateChecked | ModeOpened | ModeDrained | ThreadInactive | ThreadActive
    | Superseded | FollowDue | FlagDue | ThreadLeft
)


# ---- instructions -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class QueuePreparation:
    """Queue this plan for `star-prepare`, which then sends `PreparationBegins`."""

    plan_id: int


@dataclass(frozen=True, slots=True)
class Prepare:
    """Get ready, then `PlanPrepared` or `PlanRefused`. Waits."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class ReportPrepared:
    """Report that the plan is prepared to the coordinator."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class ReportRefused:
    """Report the refusal. `unsupported`: permanent, since within `all_ranks` only the program can forbid a plan."""

    plan: Plan
    reason: str
    unsupported: bool


@dataclass(frozen=True, slots=True)
class RaiseFlag:
    """Raise the plan's flag in the headers of the next steps. `offered`: a refusal becomes `PlanRefused`."""

    plan: Plan
    offered: bool


@dataclass(frozen=True, slots=True)
class LowerFlag:
    """Lower the plan's flag."""

    plan_id: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Stop waiting for the sets or servers of plans up to this one, which need not be prepared any more."""

    plan_id: int


@dataclass(frozen=True, slots=True)
class EndServers:
    """Have servers that run here move to `plan`: by their last update, or under a new rule."""

    present: Plan
    plan: Plan


@dataclass(frozen=True, slots=True)
class Fail:
    """The job cannot continue."""

    reason: str


@dataclass(frozen=True, slots=True)
class EndedServers:
    """Where the state is with which a plan begins: at the servers of `plan`, at `step`."""

    plan: Plan
    step: int


@dataclass(frozen=True, slots=True)
class FollowPlan:
    """Have the engine adopt the plan, from `step` on, with a state that is elsewhere: `PlanInForce`."""

    plan: Plan
    step: int


@dataclass(frozen=True, slots=True)
class SeedFromServers:
    """Start servers here with the state in which others have ended, without the training thread. Waits."""

    plan: Plan
    ended: EndedServers


@dataclass(frozen=True, slots=True)
class BeginServers:
    """A served plan is in force: its session must be kept."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class QueueServing:
    """Queue this plan for `star-prepare`, which then sends `ServingDue`."""

    plan_id: int


@dataclass(frozen=True, slots=True)
class OpenMode:
    """Create the object that makes a session's steps."""

    plan: Plan
    session: int


@dataclass(frozen=True, slots=True)
class AnnouncePresence:
    """Tell the other ranks of a session whether to go on without this one's training thread. Does not wait."""

    session: int
    inactive: bool


@dataclass(frozen=True, slots=True)
class AwaitPlan:
    """The mode is over and the next plan is not announced yet: wait for it, then `StepEnded` again."""

    plan: Plan
    session: int


@dataclass(frozen=True, slots=True)
class ExitMode:
    """The training thread leaves the mode it is in."""

    session: int


@dataclass(frozen=True, slots=True)
class DrainMode:
    """Take part without gradients until no other rank waits for this one there, then `ModeDrained`. Waits."""

    plan: Plan
    session: int


@dataclass(frozen=True, slots=True)
class SeedServers:
    """Start servers here with the state that the training thread has."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class EnterMode:
    """Create the object that makes a session's steps if it does not exist, then `ModeOpened`."""

    plan: Plan
    session: int
    behind: bool


@dataclass(frozen=True, slots=True)
class UseMode:
    """This session's object makes the training thread's steps now. `elsewhere`: it also supplies the parameters."""

    session: int
    elsewhere: bool


@dataclass(frozen=True, slots=True)
class CatchUp:
    """Get the first parameters, from the servers that have ended or else from the ranks that continue. Waits."""

    session: int
    ended: EndedServers | None


Instruction = (
    QueuePreparation | Prepare | ReportPrepared | ReportRefused | RaiseFlag | LowerFlag | GiveUp | EndServers | Fail
    | FollowPlan | SeedFromServers | BeginServers | QueueServing | OpenMode | AnnouncePresence | AwaitPlan | ExitMode
    | DrainMode | SeedServers | EnterMode | UseMode | CatchUp
)


# ---- the table --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Transition:
    """One row: in `states`, `event` leads to one of `to`, with some of `instructions`."""

    states: tuple[PlanState, ...]
    event: type
    to: tuple[PlanState, ...]
    instructions: tuple[type, ...]
    when: str


TRANSITIONS: tuple[Transition, ...] = (
    Transition(
        (S.UNKNOWN,), PlanOffered, (S.PREPARED, S.QUEUED), (RaiseFlag, QueuePreparation),
        "ready at once, flag up, where this plan and the one in force are of `all_ranks`",
    ),
    Transition(
        (S.QUEUED,), PreparationBegins, (S.PREPARING, S.WAITING), (Prepare,),
        "waits if it needs servers of its own and some plan is ended or undrained, or if it was published under a plan "
        "that is not in force here yet, and neither is of `all_ranks`",
    ),
    Transition((S.PREPARING,), PlanPrepared, (S.PREPARED,), (ReportPrepared,), ""),
    Transition((S.PREPARING, S.PREPARED), PlanRefused, (S.ABANDONED,), (ReportRefused,), ""),
    Transition(
        (S.PREPARED,), PlanCommitted, (S.PREPARED,), (RaiseFlag, EndServers),
        "the present servers end; or, of a rank that takes part in reductions, the flag goes up; or nothing",
    ),
    Transition((S.UNKNOWN,), PlanAbandoned, (S.UNKNOWN,), (LowerFlag, GiveUp), ""),
    Transition((S.QUEUED, S.WAITING, S.PREPARING), PlanAbandoned, (S.ABANDONED,), (LowerFlag, GiveUp), ""),
    Transition((S.PREPARED,), PlanAbandoned, (S.WITHDRAWN,), (LowerFlag, GiveUp), ""),
    Transition(
        (S.PREPARED, S.WITHDRAWN), PlanActivated, (S.ANNOUNCED, S.PREPARED, S.WITHDRAWN),
        (FollowPlan, SeedFromServers),
        "followed unless this rank takes part in reductions, whose agreement in band comes, or an older plan is "
        "announced; unchanged if a newer one is in force",
    ),
    Transition(
        (S.UNKNOWN, S.QUEUED, S.WAITING, S.PREPARING, S.ABANDONED), PlanActivated,
        (S.UNKNOWN, S.QUEUED, S.WAITING, S.PREPARING, S.ABANDONED), (Fail,),
        "unchanged; fails unless the plan in force is newer",
    ),
    Transition((S.ANNOUNCED,), FollowDue, (S.ANNOUNCED,), (FollowPlan, SeedFromServers), ""),
    Transition(
        (S.QUEUED, S.WAITING, S.PREPARING, S.PREPARED), FlagDue, (S.PREPARED,), (RaiseFlag,),
        "it was offered before the plan in force had come into force here; ranks where it had already raised theirs",
    ),
    Transition(
        (S.UNKNOWN, S.QUEUED, S.WAITING, S.PREPARING, S.PREPARED, S.WITHDRAWN, S.ANNOUNCED, S.ABANDONED), PlanInForce,
        (S.IN_FORCE, S.ENTERED, S.OVER), (BeginServers, QueueServing, ReportPrepared, RaiseFlag, EndServers),
        "entered at once where it continues the mode that the training thread is in; over if a newer one is in force; "
        "later plans that only had their flag up are reported where that is not enough any more; what follows from an "
        "earlier `PlanCommitted` of a later one is done under this one",
    ),
    Transition((S.QUEUED, S.WAITING, S.PREPARING), Superseded, (S.ABANDONED,), (), ""),
    Transition((S.PREPARED, S.WITHDRAWN, S.ANNOUNCED), Superseded, (S.OVER,), (), "passed"),
    Transition(
        (S.IN_FORCE,), Superseded, (S.UNDRAINED, S.OVER), (),
        "undrained if it is `grouped` or its mode was opened, and the new plan does not continue that",
    ),
    Transition(
        (S.ENTERED,), Superseded, (S.ENDED, S.OVER), (),
        "over where the new plan continues its mode, or the training thread reduced with the others",
    ),
    Transition(
        (S.IN_FORCE,), ServingDue, (S.IN_FORCE,), (OpenMode, AnnouncePresence),
        "if the training thread is inactive; the mode alone if the plan is `grouped`",
    ),
    Transition(
        (S.UNDRAINED,), ServingDue, (S.UNDRAINED,), (OpenMode, AnnouncePresence), "if the training thread is inactive"
    ),
    Transition((S.ENTERED, S.ENDED), ServingDue, (S.ENTERED, S.ENDED), (AnnouncePresence,), "unchanged; likewise"),
    Transition((S.ENTERED,), StepEnded, (S.ENTERED,), (AwaitPlan,), "if the mode is over"),
    Transition((S.ENDED,), StepEnded, (S.OVER, S.ENDED), (ExitMode,), "if the mode is over, else unchanged"),
    Transition((S.UNDRAINED,), StepEnded, (S.UNDRAINED,), (DrainMode,), "once the training thread is in no mode"),
    Transition((S.UNDRAINED,), ModeDrained, (S.OVER,), (), ""),
    Transition((S.UNDRAINED,), ModeOpened, (S.UNDRAINED,), (), "the plan ended as the training thread entered it"),
    Transition((S.WAITING,), ThreadLeft, (S.QUEUED,), (QueuePreparation,), ""),
    Transition(
        (S.IN_FORCE,), StateChecked, (S.IN_FORCE, S.ENTERED), (SeedServers, EnterMode),
        "entered at once by a rank that reduces with the others; nothing while the training thread is in another mode, "
        "while a plan is undrained, or while it is behind although the plan is `local` or begins with its state",
    ),
    Transition((S.IN_FORCE,), ModeOpened, (S.ENTERED,), (UseMode, CatchUp), "catches up if it is behind"),
    Transition(
        (S.IN_FORCE,), ThreadInactive, (S.IN_FORCE,), (OpenMode, AnnouncePresence), "if the plan is served"
    ),
    Transition(
        (S.ENTERED, S.ENDED, S.UNDRAINED), ThreadInactive, (S.ENTERED, S.ENDED, S.UNDRAINED), (AnnouncePresence,),
        "unchanged; if the plan is served and its mode was opened",
    ),
    Transition(
        (S.IN_FORCE, S.ENTERED, S.ENDED, S.UNDRAINED), ThreadActive, (S.IN_FORCE, S.ENTERED, S.ENDED, S.UNDRAINED),
        (AnnouncePresence,), "unchanged; likewise",
    ),
)

LIVE = (S.IN_FORCE, S.ENTERED, S.ENDED, S.UNDRAINED)
EARLY = (S.UNKNOWN, S.QUEUED, S.WAITING, S.PREPARING, S.PREPARED, S.WITHDRAWN, S.ANNOUNCED)
PAST = (S.OVER, S.ABANDONED)

NO_EFFECT: dict[type, tuple[PlanState, ...]] = {
    PlanOffered: (*EARLY[1:], *LIVE, *PAST),
    PreparationBegins: (S.UNKNOWN, *EARLY[2:], *LIVE, *PAST),
    PlanPrepared: (*EARLY[:3], *EARLY[4:], *LIVE, *PAST),
    PlanRefused: (*EARLY[:3], S.WITHDRAWN, S.ANNOUNCED, *LIVE, *PAST),
    PlanCommitted: (*EARLY[:4], S.WITHDRAWN, S.ANNOUNCED, *LIVE, *PAST),
    PlanAbandoned: (S.WITHDRAWN, S.ANNOUNCED, *LIVE, *PAST),
    PlanActivated: (S.ANNOUNCED, *LIVE, S.OVER),
    FollowDue: (*EARLY[:-1], *LIVE, *PAST),
    FlagDue: (S.UNKNOWN, S.WITHDRAWN, S.ANNOUNCED, *LIVE, *PAST),
    PlanInForce: (*LIVE, S.OVER),
    Superseded: (S.UNKNOWN, S.ENDED, S.UNDRAINED, *PAST),
    ServingDue: (*EARLY, *PAST),
    StepEnded: (*EARLY, S.IN_FORCE, *PAST),
    ModeDrained: (*EARLY, S.IN_FORCE, S.ENTERED, S.ENDED, *PAST),
    ThreadLeft: (S.UNKNOWN, S.QUEUED, *EARLY[3:], *LIVE, *PAST),
    StateChecked: (*EARLY, S.ENTERED, S.ENDED, S.UNDRAINED, *PAST),
    ModeOpened: (*EARLY, S.ENTERED, S.ENDED, *PAST),
    ThreadInactive: (*EARLY, *PAST),
    ThreadActive: (*EARLY, *PAST),
}
"""States in which an event changes nothing and asks for nothing. With `TRANSITIONS` every pair is defined once."""

RULES = {(state, row.event): row for row in TRANSITIONS for state in row.states}
"""The row for a state and an event."""
