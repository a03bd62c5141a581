"""Move one rank between modes: all-reduce with all members, subgroup child, parameter servers, local SGD.

`SwitchMachine` (`switch_machine.py`) decides what to do when. This module carries out its instructions, in the thread
whose event caused them, or in `star-prepare` if they wait or the engine's lock is held. Only the training thread enters
and leaves modes, at the end of its step, when its parameters are those of the step at which the plan begins.

Locks: `_lock` is held only while the machine processes an event. `_presence` is held around an event about the training
thread's presence and its consequences, so that the servers hear of absences in order; nothing waits under it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from scheduler.records import Plan
from star_hvd.engine.buckets import Bucket
from star_hvd.engine.records import Snapshot
from star_hvd.engine.state_source import EndedServers, StateSource, StateSources
from star_hvd.engine.step_engine import StepEngine
from star_hvd.errors import DeadlineError, RankLostError, StarError
from star_hvd.locks import ordered_lock
from star_hvd.modes import switch_protocol as protocol
from star_hvd.modes.switch_machine import SwitchMachine
from star_hvd.telemetry.wait_time import WaitTime

__all__ = ["ModeSwitcher", "Services", "Steps"]

logger = logging.getLogger("star_hvd")

_POLL_S = 0.001
_LOOK_S = 1.0  # Between two looks at whether a rank has left.


class Steps(Protocol):
    """How a rank makes steps in a mode in which its gradients are not reduced with those of all members."""

    @property
    def over(self) -> bool:
        """Whether this rank has nothing left to do here."""
        ...

    def give(self, bucket: Bucket) -> None:
        """Handle the training thread's complete gradient of a bucket."""
        ...

    def step(self, *, skip: bool) -> Any:
        """Make a whole step with the gradients."""
        ...

    def catch_up(self) -> None:
        """Get the newest parameters of this mode. Waits."""
        ...

    def refresh_state(self) -> None:
        """Get parameters and optimizer state, for a checkpoint. Waits."""
        ...

    def set_inactive(self, inactive: bool) -> None:
        """Note whether the training thread delivers no gradients from now on. Never waits."""
        ...

    def confirm_inactive(self) -> None:
        """Wait until the others know that it is inactive."""
        ...

    def wake(self) -> None:
        """Have a wait in this object check whether something has changed."""
        ...

    def drain(self) -> None:
        """Take part without gradients until the end that other ranks wait for. Waits."""
        ...

    def shutdown(self) -> None:
        """End after all ranks have made their last step: none that still takes part may wait for another. Waits."""
        ...

    def exit(self) -> None:
        """Release connections after the training thread has left."""
        ...


class Services(Protocol):
    """What the process provides for a switch; see `star_hvd.runtime.mode_services`."""

    def prepare(self, optimizer_id: int, plan: Plan) -> str | None:
        """Get process sets, servers and connections ready; blocks. Return why not, or None."""
        ...

    def session(self, optimizer_id: int, plan: Plan) -> int | None:
        """Return the server session that a prepared plan starts or continues, None if it has no servers."""
        ...

    def give_up(self, optimizer_id: int, plan_id: int) -> None:
        """Stop all preparations of plans up to this one, which are no longer wanted."""
        ...

    def steps(self, optimizer_id: int, plan: Plan) -> Steps:
        """Return the object that makes the steps of a prepared plan other than `local`."""
        ...

    def seed(self, optimizer_id: int, plan: Plan, snapshot: Callable[[], Snapshot]) -> None:
        """Provide the state with which servers start, if this rank runs any."""
        ...

    def end(self, optimizer_id: int, plan: Plan, new: Plan) -> None:
        """All ranks are ready to move from `plan` to `new`: let servers that run here make their last update."""
        ...

    def begun(self, optimizer_id: int, plan: Plan) -> None:
        """A plan of servers is in force, whether or not the training thread has reached it."""
        ...

    def final_state(self, optimizer_id: int, plan: Plan, version: int, deadline_s: float) -> Snapshot | None:
        """Return the state with which the servers of a plan ended, None if it is no longer available.

        Raises:
            StarError, RankLostError: This rank has failed, or another one has left: waiting longer is pointless.
        """
        ...

    def check_world(self, engine: StepEngine) -> None:
        """Raise why a wait for another rank is pointless, if it is."""
        ...


class ModeSwitcher:
    """Switches one optimizer between modes; see the module docstring.

    Args:
        number: Number of the optimizer.
        engine: Its engine.
        services: The process's services.
        report: Tells the coordinator that a plan is prepared, or why it cannot be.
        unsupported: Tells the coordinator why the program forbids a plan.
        ranks: The other ranks as a source of state.
        local: Returns the object that makes the steps of `local`.
        later: Runs a function in the preparer's thread.
        deadline_s: Longest wait for a state.
        push_deadline_s: Longest wait for the end of a mode, whose last push may use a slow link.

    Attributes:
        active_mode: What makes this rank's steps if its gradients are not reduced with those of all members, else
            None. The training thread sets it.
        ranks: As given.
    """

    def __init__(
        self,
        number: int,
        engine: StepEngine,
        services: Services,
        *,
        report: Callable[[Plan, str | None], None],
        unsupported: Callable[[Plan, str], None],
        ranks: StateSource,
        local: Callable[[], Steps],
        later: Callable[[Callable[[], None]], None],
        deadline_s: float,
        push_deadline_s: float,
    ) -> None:
        self.active_mode: Steps | None = None
        self._number = number
        self._engine = engine
        self._services = services
        self._report = report
        self._unsupported = unsupported
        self.ranks = ranks
        self._local = local
        self._later = later
        self._deadline_s, self._push_deadline_s = deadline_s, push_deadline_s
        self._lock = ordered_lock("ModeSwitcher._lock")
        self._presence = ordered_lock("ModeSwitcher._presence")
        self._machine = SwitchMachine(engine.rank, engine.plan)
        self._note_answers()
        self._steps: dict[int, Steps] = {}  # By session; changed under `_lock`.

    @property
    def rank(self) -> int:
        """This rank."""
        return self._engine.rank

    # ---- events of the coordinator, in the agent's thread ---------------------------------------------------------

    def offer(self, plan: Plan, active: int = -1) -> None:
        """The coordinator publishes a plan, under the plan of id `active`."""
        self._take_in(protocol.PlanOffered(plan, active))

    def commit(self, plan_id: int) -> None:
        """All ranks are ready for a plan."""
        self._take_in(protocol.PlanCommitted(plan_id))

    def abandon(self, plan_id: int) -> None:
        """The coordinator abandons a plan."""
        self._take_in(protocol.PlanAbandoned(plan_id))

    def announce(self, plan_id: int, step: int) -> None:
        """A plan is in force from `step` on; ranks that do not agree to it in band have to follow."""
        self._take_in(protocol.PlanActivated(plan_id, step))

    # ---- events of the engine, in whatever thread takes a plan up -------------------------------------------------

    def taken_up(self, plan: Plan) -> None:
        """A plan is in force here. Under the engine's lock, so the preparer's thread carries out the consequences."""
        instructions = self._decide(protocol.PlanInForce(plan))
        if instructions:
            self._serve_later(lambda: self._carry_out(instructions))

    # ---- events of the training thread ----------------------------------------------------------------------------

    def parameters_added(self) -> None:
        """Refuse plans whose servers were, or are being, prepared for fewer parameters."""
        with self._lock:
            newest = max(self._machine.states())
        refused = self._engine.agreement.outdate(newest)
        if refused is not None:
            self._report(refused, self._engine.agreement.refusal(refused))

    def leave(self) -> None:
        """At the end of a step: leave a mode that the plan in force no longer uses."""
        over = self.active_mode is not None and self.active_mode.over
        if over or not self._at_rest:
            self._take_in(protocol.StepEnded(over))

    def enter(self) -> None:
        """At the end of a step: enter the mode of the plan in force, once this rank has the step at which it begins."""
        if self._at_rest:
            return
        engine = self._engine
        with engine.lock:
            behind = engine.step != engine.next_step or not engine.replica.state.in_common_steps
            instructions = self._decide(protocol.StateChecked(behind))
        self._carry_out(instructions)

    def set_inactive(self, inactive: bool) -> None:
        """Note whether the training thread delivers no gradients from now on.

        Does not wait; see `confirm_inactive`.
        """
        with self._presence:
            self._take_in(protocol.ThreadInactive() if inactive else protocol.ThreadActive())

    def confirm_inactive(self) -> None:
        """Wait until the servers of the active mode know that the training thread is inactive."""
        active = self.active_mode
        if active is not None:
            active.confirm_inactive()

    def shutdown(self) -> None:
        """All ranks are inactive and will make no further step; return once no rank waits for this one."""
        with self._lock:
            steps = list(self._steps.values())
        for each in steps:
            if not each.over:
                each.shutdown()

    # ---- questions ------------------------------------------------------------------------------------------------

    @property
    def needs_state(self) -> bool:
        """Whether this rank, at the end of its step, needs the state of the step the others are at."""
        return self._needs_state

    @property
    def must_drain(self) -> bool:
        """Whether a mode was skipped meanwhile that has to be drained before the plan in force can be entered."""
        return self._must_drain

    def plan_of(self, plan_id: int) -> Plan | None:
        """Return a plan that was prepared here, None if unknown."""
        with self._lock:
            return self._machine.plan(plan_id)

    # ---- states ---------------------------------------------------------------------------------------------------

    def state_for(self, optimizer_id: int) -> Snapshot | None:
        """Return the state this rank lacks, None if a change of mode has made it unnecessary."""
        with self._lock:
            ended = self._machine.ended_servers
        if ended is not None and self._engine.next_step != ended.step:
            ended = None  # Other ranks have made later steps by now.
        sources = StateSources(ended=self._source_of(ended) if ended is not None else None, ranks=self.ranks)
        return sources.require(self.rank, self._engine.least_useful_step, self._deadline_s, lambda: self.needs_state)

    def _source_of(self, ended: protocol.EndedServers) -> EndedServers:
        """Return servers that have ended as a source of state."""

        def read(limit_s: float) -> Snapshot | None:
            return self._services.final_state(self._number, ended.plan, ended.step, limit_s)

        return EndedServers(ended.step, read)

    def _own_state(self, version: int) -> Snapshot:
        snapshot = self._engine.replica.snapshot(version)
        assert snapshot is not None and snapshot.step == version, "a server's first state is not that of its step"
        return snapshot

    # ---- carrying out ---------------------------------------------------------------------------------------------

    def _take_in(self, event: protocol.Event) -> None:
        self._carry_out(self._decide(event))

    def _decide(self, event: protocol.Event) -> list[protocol.Instruction]:
        with self._lock:
            instructions = self._machine.handle(event)
            self._note_answers()
            return instructions

    def _note_answers(self) -> None:
        """Cache what the training thread asks in every step without the lock."""
        machine = self._machine
        self._at_rest, self._needs_state, self._must_drain = machine.at_rest, machine.needs_state, machine.must_drain

    def _carry_out(self, instructions: Sequence[protocol.Instruction]) -> None:
        for each in instructions:
            logger.debug("rank %d: %s", self.rank, each)
            self._prepare_or_follow(each)

    def _prepare_or_follow(self, each: protocol.Instruction) -> None:
        """Carry out instructions about plans; `_serve_or_step` handles the others."""
        number, services, agreement = self._number, self._services, self._engine.agreement
        match each:
            case protocol.QueuePreparation(plan_id):
                self._later(lambda: self._take_in(protocol.PreparationBegins(plan_id)))
            case protocol.Prepare(plan):
                self._prepare(plan)
            case protocol.ReportPrepared(plan):
                self._report(plan, None)
            case protocol.ReportRefused(plan, reason, unsupported):
                (self._unsupported if unsupported else self._report)(plan, reason)
            case protocol.RaiseFlag(plan, offered):
                refusal = agreement.prepare(plan)
                if refusal is not None and offered:
                    self._take_in(protocol.PlanRefused(plan.plan_id, refusal))
                elif refusal is not None:
                    self._report(plan, refusal)
            case protocol.LowerFlag(plan_id):
                agreement.abandon(plan_id)
            case protocol.GiveUp(plan_id):
                services.give_up(number, plan_id)
            case protocol.EndServers(present, plan):
                services.end(number, present, plan)
            case protocol.FollowPlan(plan, step):
                if self._engine.resume(plan, step) and self.active_mode is not None:
                    self.active_mode.wake()
            case protocol.Fail(reason):
                self._fail(StarError(reason))
            case _:
                self._serve_or_step(each)

    def _serve_or_step(self, each: protocol.Instruction) -> None:
        number, services = self._number, self._services
        match each:
            case protocol.BeginServers(plan):
                services.begun(number, plan)
            case protocol.QueueServing(plan_id):
                self._serve_later(lambda: self._serve(plan_id))
            case protocol.SeedFromServers(plan, ended):
                self._serve_later(lambda: self._seed_from_servers(plan, ended))
            case protocol.SeedServers(plan):
                version = self._engine.step
                services.seed(number, plan, lambda: self._own_state(version))
            case protocol.OpenMode(plan, session):
                self._open(plan, session)
            case protocol.AnnouncePresence(session, inactive):
                self._announce_presence(session, inactive)
            case protocol.EnterMode(plan, session, behind):
                self._enter(plan, session, behind)
            case protocol.CatchUp(session, ended_servers):
                self._catch_up(session, ended_servers)
            case protocol.AwaitPlan(plan, session):
                self._await_plan(plan, session)
            case protocol.ExitMode(session):
                self._exit(session)
            case protocol.DrainMode(plan, session):
                self._open(plan, session).drain()
                self._exit(session)
                self._take_in(protocol.ModeDrained(session))
            case _:
                raise StarError(f"an instruction that is unknown here: {each}; please report this")

    def _prepare(self, plan: Plan) -> None:
        event: protocol.Event
        try:
            refusal = self._engine.agreement.refusal
            # Asked again behind it: meanwhile parameters may have been added that the servers lack.
            reason = refusal(plan) or self._services.prepare(self._number, plan) or refusal(plan)
            if reason is not None:
                event = protocol.PlanRefused(plan.plan_id, reason)
            else:
                event = protocol.PlanPrepared(plan.plan_id, self._services.session(self._number, plan))
        except Exception as error:  # Else the coordinator and the other ranks would wait until `plan_deadline_s`.
            logger.exception("rank %d: preparing %s failed", self.rank, plan.label)
            event = protocol.PlanRefused(plan.plan_id, f"preparing it failed: {type(error).__name__}: {error}")
        if not self._engine.ended:  # Else the job, or the optimizer, has ended: the mode is not to blame.
            self._take_in(event)

    def _serve_later(self, task: Callable[[], None]) -> None:
        """Have the preparer's thread do what a plan in force needs; if that fails, this rank does.

        Unlike a plan that cannot be prepared, it is not abandoned: all ranks would wait for the servers, say, that do
        not begin here.
        """

        def guarded() -> None:
            try:
                task()
            except (StarError, RankLostError) as error:
                self._fail(error)
            except Exception as error:
                plan, reason = self._engine.plan, f"{type(error).__name__}: {error}"
                failure = StarError(f"rank {self.rank} cannot go on under {plan.label} (plan {plan.plan_id}): {reason}")
                failure.__cause__ = error
                self._fail(failure)

        self._later(guarded)

    def _fail(self, error: Exception) -> None:
        """Make the training thread raise an error that has no caller here."""
        self._engine.fail(error, unseen=True)
        if self.active_mode is not None:
            self.active_mode.wake()

    def _serve(self, plan_id: int) -> None:
        with self._presence:
            self._take_in(protocol.ServingDue(plan_id))

    def _seed_from_servers(self, plan: Plan, ended: protocol.EndedServers) -> None:
        snapshot = self._source_of(ended).snapshot(ended.step, self._deadline_s)
        if snapshot is None:
            raise StarError(
                f"{plan.label} (plan {plan.plan_id}) cannot begin on rank {self.rank}: the state with which the "
                f"servers of {ended.plan.label} ended at step {ended.step} was not to be had within "
                f"{self._deadline_s:g} s; see the logs of ranks {list(ended.plan.servers)}, which ran them, and "
                "start again from the last checkpoint"
            )
        self._services.seed(self._number, plan, lambda: snapshot)

    # ---- steps of a mode ------------------------------------------------------------------------------------------

    def _open(self, plan: Plan, session: int) -> Steps:
        """Return the object that makes a session's steps; if two threads create one at once, the first is used."""
        with self._lock:
            found = self._steps.get(session)
        if found is None:
            made = self._local() if plan.mode == "local" else self._services.steps(self._number, plan)
            with self._lock:
                found = self._steps.setdefault(session, made)
        return found

    def _announce_presence(self, session: int, inactive: bool) -> None:
        with self._lock:
            steps = self._steps.get(session)
        if steps is not None and not steps.over:
            steps.set_inactive(inactive)

    def _enter(self, plan: Plan, session: int, behind: bool) -> None:
        engine, steps = self._engine, self._open(plan, session)
        with engine.replica.apply_lock, engine.lock:
            # Another plan may have just come into force; its effect on this rank's state must then stand.
            instructions = self._decide(protocol.ModeOpened(session, behind))
            for use in (each for each in instructions if isinstance(each, protocol.UseMode)):
                self.active_mode = steps
                if use.elsewhere:
                    engine.leave_common_steps()
        logger.debug("rank %d: step %d: enters %s: %s", self.rank, engine.step, plan.label, instructions)
        self._carry_out([each for each in instructions if not isinstance(each, protocol.UseMode)])

    def _catch_up(self, session: int, ended: protocol.EndedServers | None) -> None:
        """Get the first parameters, from the servers that have just ended or from the ranks that continue."""
        if ended is not None and self._engine.next_step == ended.step:
            snapshot = self._source_of(ended).snapshot(ended.step, self._deadline_s)
            if snapshot is not None:
                self._engine.adopt_state(snapshot)
                return
        with self._lock:
            steps = self._steps[session]
        steps.catch_up()

    def _await_plan(self, plan: Plan, session: int) -> None:
        """Wait: the servers may report their end before the coordinator announces where the next plan begins."""
        wait, checked_s = WaitTime(what=lambda: f"the plan that follows {plan.label} (plan {plan.plan_id})"), 0.0
        while self._is_current(session):
            if self._engine.failure is not None:
                raise self._engine.failure
            if wait.count() >= checked_s + _LOOK_S:  # Who announces it may be gone, with rank 0 or its server.
                checked_s = wait.passed_s
                self._services.check_world(self._engine)
            if wait.passed_s > self._push_deadline_s:
                raise DeadlineError(
                    f"rank {self.rank}: {plan.label} (plan {plan.plan_id}) has ended, but within "
                    f"{self._push_deadline_s:g} s the coordinator did not announce the plan that follows; see the log "
                    "of rank 0 for a server or a rank that is missing, or raise Config.step_deadline_s"
                )
            time.sleep(_POLL_S)
        self._take_in(protocol.StepEnded(mode_over=True))

    def _is_current(self, session: int) -> bool:
        with self._lock:
            return self._machine.is_current(session)

    def _exit(self, session: int) -> None:
        with self._lock:
            steps = self._steps.pop(session)
        if self.active_mode is steps:
            self.active_mode = None
        steps.exit()
