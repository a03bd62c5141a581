"""Moves one rank between the families of modes: rounds, a subgroup's child, servers, local steps.

Only the training thread enters and leaves, at the end of its step, when its parameters are those of the step at which
the plan begins. Preparing happens in a thread of its own, orders come in the agent's thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from scheduler.records import Plan
from star_hvd.engine.buckets import Bucket
from star_hvd.engine.records import Snapshot
from star_hvd.engine.state_source import EndedServers, StateSource, StateSources
from star_hvd.engine.step_engine import StepEngine
from star_hvd.errors import DeadlineError, StarError

__all__ = ["ModeSwitcher", "Services", "Steps"]

logger = logging.getLogger("star_hvd")

_POLL_S = 0.001


class Steps(Protocol):
    """How a rank makes steps outside the rounds."""

    @property
    def over(self) -> bool:
        """Whether this rank has nothing more to do here."""
        ...

    @property
    def gone(self) -> bool:
        """Whether the plan in force asks for something else."""
        ...

    def give(self, bucket: Bucket) -> None: ...
    def step(self, *, skip: bool) -> Any: ...
    def bring_up(self) -> None: ...
    def refresh_state(self) -> None: ...
    def set_away(self, away: bool, *, settle: bool = True) -> None: ...
    def wake(self) -> None: ...
    def finish(self) -> None:
        """Take part, with nothing, until the end that others wait for."""
        ...

    def conclude(self) -> None:
        """All ranks have made their last step: nobody who still takes part may wait for one who does not any more."""
        ...

    def leave(self) -> None: ...


class Services(Protocol):
    """What the process offers to a handover; see `star_hvd.runtime.mode_services`."""

    def prepare(self, optimizer_id: int, plan: Plan) -> str | None:
        """Get process sets, servers and connections ready; blocks. A reason why not, or None."""
        ...

    def give_up(self, optimizer_id: int, plan_id: int) -> None:
        """Plans up to this one are not wanted any more: whatever gets one of them ready stops waiting."""
        ...

    def steps(self, optimizer_id: int, plan: Plan) -> Steps:
        """The steps of a prepared plan that does not run in rounds."""
        ...

    def seed(self, optimizer_id: int, plan: Plan, snapshot: Callable[[], Snapshot]) -> None:
        """The state with which servers begin, where this rank runs any."""
        ...

    def end(self, optimizer_id: int, plan: Plan, new: Plan) -> None:
        """All ranks are ready to go from `plan` on to `new`: let servers make their last update, where here are any."""
        ...

    def begun(self, optimizer_id: int, plan: Plan) -> None:
        """A plan of servers is in force, whether the training thread has come to it or not."""
        ...

    def final_state(self, optimizer_id: int, plan: Plan, version: int, deadline_s: float) -> Snapshot | None:
        """The state with which the servers of a plan ended, None where it is not to be had any more."""
        ...


class ModeSwitcher:
    """See the module's text.

    Args:
        number: Number of the optimizer.
        engine: Its engine.
        services: Of the process.
        ready: Tells the coordinator that a plan is prepared, or why it cannot be.
        ranks: The other ranks as a source of state.
        local: Makes the steps of `local`.
        later: Runs something in the preparer's thread.
        deadline_s: Longest wait for orders.
        push_deadline_s: Longest wait for the end of a mode: the last push in it may come over a slow link.
    """

    def __init__(
        self,
        number: int,
        engine: StepEngine,
        services: Services,
        *,
        ready: Callable[[Plan, str | None], None],
        ranks: StateSource,
        local: Callable[[], Steps],
        later: Callable[[Callable[[], None]], None],
        deadline_s: float,
        push_deadline_s: float,
    ) -> None:
        self.outside: Steps | None = None
        self._number = number
        self._engine = engine
        self._services = services
        self._ready = ready
        self._ranks = ranks
        self._local = local
        self._later = later
        self._seeded = -1  # Epoch of the plan whose servers here began without the training thread.
        self._deadline_s, self._push_deadline_s = deadline_s, push_deadline_s
        self._held: dict[int, Plan] = {}
        self._early: dict[int, int] = {}  # Epochs told to be in force before this rank read so itself: first steps.
        self._lock = threading.Lock()
        self._steps_lock = threading.RLock()
        self._made: dict[int, Steps] = {}
        self._ended: tuple[Plan, int] | None = None
        self._postponed: Plan | None = None  # Prepared once the training thread has left what it is still in.
        self._away = False

    # ---- preparer and agent threads -----------------------------------------------------------------------------

    def needs_preparing(self, plan: Plan) -> bool:
        """Whether a plan takes more than a flag in the next steps' headers."""
        return not (plan.family == self._engine.plan.family == "rounds")

    def prepare(self, plan: Plan) -> None:
        """Get ready for a plan; blocks, in the preparer's thread."""
        if self._postpone(plan):
            return
        reason = self._engine.agreement.refusal(plan) or self._services.prepare(self._number, plan)
        if reason is None:
            with self._lock:
                self._held = {plan_id: held for plan_id, held in self._held.items() if plan_id >= plan.plan_id - 8}
                self._held[plan.plan_id] = plan
        self._ready(plan, reason)

    def _postpone(self, plan: Plan) -> bool:
        """Whether other servers have to wait: nobody may be more than one mode of servers behind.

        Connections and states of the last one are kept for those who were busy when it ended, of earlier ones not.
        """
        with self._steps_lock:
            session = plan.family in ("ps", "grouped") and not (plan.family == self._engine.plan.family == "ps")
            behind = session and any(steps.gone for steps in self._made.values())
            self._postponed = plan if behind else None
            return behind

    def abandoned(self, plan_id: int) -> None:
        """A plan is given up."""
        self._services.give_up(self._number, plan_id)
        with self._steps_lock:
            if self._postponed is not None and self._postponed.plan_id == plan_id:
                self._postponed = None

    def commit(self, plan_id: int) -> None:
        """All ranks are ready for a plan: raise flags, or let the servers end."""
        plan = self.plan_of(plan_id)
        if plan is None:
            return
        present = self._engine.plan
        if present.family in ("ps", "grouped"):
            self._services.end(self._number, present, plan)
        elif self._engine.taking_part:
            self._engine.agreement.prepare(plan)

    def plan_of(self, plan_id: int) -> Plan | None:
        """A plan that was prepared here."""
        with self._lock:
            return self._held.get(plan_id)

    def moved(self, plan_id: int, step: int) -> None:
        """A plan is in force from a step on; ranks that do not agree to it in band have to follow.

        Whoever takes part in the reductions has agreed, but may not have read so yet: others are a moment ahead. To
        follow this word of it would void a state that it has and others, who begin with it, wait for.
        """
        with self._engine.lock:
            if self._engine.taking_part and self._engine.plan.plan_id < plan_id:
                self._early[plan_id] = step
                return
        self._follow(plan_id, step)

    @property
    def told_early(self) -> bool:
        """Whether something waits for `switched`."""
        return bool(self._early)

    def switched(self) -> None:
        """A plan was taken up in band: follow what was told before. In the preparer's thread."""
        with self._engine.lock:
            early, self._early = self._early, {}
        for plan_id, step in sorted(early.items()):
            self.moved(plan_id, step)

    def _follow(self, plan_id: int, step: int) -> None:
        plan = self.plan_of(plan_id)
        if plan is None:
            self._engine.fail(StarError(f"the plan of epoch {plan_id} is in force and was never prepared here"))
            return
        present = self._engine.plan
        if present.plan_id < plan_id:
            self._ended = (present, step) if present.family in ("ps", "grouped") else None
            if self._ended is not None and self.rank in plan.servers:
                # From servers to servers: the training thread may be in a collective of the user's for long.
                self._seeded = plan_id
                self._later(lambda: self._pass_on(plan))
        if self._engine.resume(plan, step) and self.outside is not None:
            self.outside.wake()

    def _pass_on(self, plan: Plan) -> None:
        ended = self._ended_servers()
        assert ended is not None and self._ended is not None
        snapshot = ended.snapshot(ended.step, self._deadline_s)
        if snapshot is None:
            self._engine.fail(StarError(f"the last state of {self._ended[0].label} is lost; {plan.label} cannot begin"))
            return
        self._services.seed(self._number, plan, lambda: snapshot)

    # ---- training thread ----------------------------------------------------------------------------------------

    def leave(self) -> None:
        """At the end of a step: leave what the plan in force does not ask for any more."""
        if self.outside is not None and self.outside.over:
            self._leave(self.outside)
        if self.outside is None and self._made:
            with self._steps_lock:
                passed = [steps for plan_id, steps in self._made.items() if plan_id != self._engine.plan.plan_id]
            for steps in passed:
                steps.finish()  # A mode that began and ended while this rank was busy; others wait for it there.
            with self._steps_lock:
                self._made = {plan_id: steps for plan_id, steps in self._made.items() if steps not in passed}
        with self._steps_lock:
            plan = self._postponed if self.outside is None else None
            if plan is not None:
                self._postponed = None
                self._later(lambda: self.prepare(plan))

    @property
    def needs_state(self) -> bool:
        """Whether this rank, at the end of its step, must have the state of the step the others are at."""
        plan = self._engine.plan
        return self.outside is None and (self._engine.taking_part or self._brings_state(plan))

    def _brings_state(self, plan: Plan) -> bool:
        """Whether others wait for the state that this rank's training thread has."""
        return self.rank in plan.sources and self._seeded != plan.plan_id

    def enter(self) -> None:
        """At the end of a step: enter what the plan in force asks for, once this rank is where it begins."""
        engine = self._engine
        if self.outside is not None:
            return
        with engine.lock:
            plan, behind = engine.plan, engine.step != engine.next_step or not engine.replica.state.in_common_steps
            inside = engine.taking_part and plan.mode != "local"
        if inside or (behind and (plan.mode == "local" or self._brings_state(plan))):
            if not inside:
                logger.debug(
                    "rank %d: step %d of %d: too far behind for %s (%s)",
                    self.rank,
                    engine.step,
                    engine.next_step,
                    plan.label,
                    engine.replica.state.name,
                )
            return  # While behind, its gradients are late; it comes here again.
        logger.debug("rank %d: step %d: enters %s, behind %s", self.rank, engine.step, plan.label, behind)
        if plan.mode == "local":
            self.outside = self._local()
        else:
            if self.rank in plan.servers and self._brings_state(plan):
                version = engine.step
                self._services.seed(self._number, plan, lambda: self._own_state(version))
            outside = self.outside = self._steps_of(plan)
            with engine.replica.apply_lock, engine.lock:
                # Word that the next plan is in force may just have come: then what it said of the state here holds.
                entered = not outside.gone
                if entered:
                    engine.leave_common_steps()
            if entered and behind:
                self._begin_behind(outside)

    def _steps_of(self, plan: Plan) -> Steps:
        """The steps of a plan, made once: by the training thread, or for it while it is away."""
        with self._steps_lock:
            if plan.plan_id not in self._made:
                self._made[plan.plan_id] = self._services.steps(self._number, plan)
            return self._made[plan.plan_id]

    def taken(self, plan: Plan) -> None:
        """A plan is in force here. In whatever thread learns of it."""
        if plan.family in ("ps", "grouped"):
            self._services.begun(self._number, plan)
            self._later(lambda: self._served(plan))

    def _served(self, plan: Plan) -> None:
        """While the training thread is away nobody may wait for it. In the preparer."""
        with self._steps_lock:
            grouped = plan.mode == "grouped"  # Its members wait for this rank until their leader learns of its end.
            if grouped or (self._away and self._engine.plan.plan_id == plan.plan_id):
                steps = self._steps_of(plan)
                if self._away:
                    steps.set_away(True, settle=False)

    def _begin_behind(self, outside: Steps) -> None:
        """Parameters to begin with: of the servers that have just ended, or from those who go on."""
        ended = self._ended_servers()
        if ended is not None and self._engine.next_step == ended.step:
            snapshot = ended.snapshot(ended.step, self._deadline_s)
            if snapshot is not None:
                self._engine.adopt_state(snapshot)
                return
        outside.bring_up()

    @property
    def rank(self) -> int:
        """This rank."""
        return self._engine.rank

    def _own_state(self, version: int) -> Snapshot:
        snapshot = self._engine.replica.snapshot(version)
        assert snapshot is not None and snapshot.step == version, "a server's first state is not that of its step"
        return snapshot

    def _leave(self, outside: Steps) -> None:
        """Wait until the coordinator has told where the next plan begins; the servers' answer may come earlier."""
        began_s = time.monotonic()
        while not outside.gone:
            if self._engine.failure is not None:
                raise self._engine.failure
            if time.monotonic() - began_s > self._push_deadline_s:
                raise DeadlineError(f"the mode ended, and no plan followed within {self._push_deadline_s:g} s")
            time.sleep(_POLL_S)
        outside.leave()
        self.outside = None

    def state_for(self, optimizer_id: int) -> Snapshot | None:
        """The state this rank lacks. None where a change of mode made it superfluous."""
        ended = self._ended_servers()
        if ended is not None and self._engine.next_step != ended.step:
            ended = None  # Other ranks have later steps by now.
        sources = StateSources(ended=ended, ranks=self._ranks)
        return sources.require(
            self.rank, self._engine.least_useful_step, self._deadline_s, lambda: self.needs_state
        )

    def _ended_servers(self) -> EndedServers | None:
        """The servers of the mode before, where it was one of servers."""
        if self._ended is None:
            return None
        plan, step = self._ended
        return EndedServers(step, lambda limit_s: self._services.final_state(self._number, plan, step, limit_s))

    def conclude(self) -> None:
        """All ranks are away and will make no step again; returns when nobody waits for this rank any more."""
        with self._steps_lock:
            concerned = [steps for steps in self._made.values() if not steps.over]
        for steps in concerned:
            steps.conclude()

    def set_away(self, away: bool) -> None:
        """The training thread, which calls this, delivers no gradients for now."""
        with self._steps_lock:
            self._away = away
            plan = self._engine.plan
            if away and plan.family in ("ps", "grouped"):
                self._steps_of(plan)  # It may have begun this very moment.
            concerned = [steps for steps in self._made.values() if not steps.over]
        for steps in concerned:
            steps.set_away(away, settle=steps is self.outside)
