"""A process's services for the modes of its optimizers: process sets, servers, connections, a preparing thread."""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import sys
from collections.abc import Callable
from typing import Any

import zmq

from scheduler.records import Plan
from star_hvd.channel.keys import Keyring
from star_hvd.channel.late_push import ParentLink, probe
from star_hvd.channel.messages.base import Message, Send
from star_hvd.channel.messages.switch import (
    DropSet,
    LinkRate,
    MakeSet,
    Presence,
    Probe,
    ServerRestarted,
    Servers,
    WarmServers,
)
from star_hvd.config import Config
from star_hvd.engine.collective import HorovodCollective
from star_hvd.engine.records import Snapshot
from star_hvd.engine.step_engine import StepEngine
from star_hvd.errors import StarError
from star_hvd.locks import ordered_condition
from star_hvd.modes.driver import StepDriver
from star_hvd.modes.grouped import GroupSteps
from star_hvd.modes.mode_switcher import Steps
from star_hvd.modes.ps_worker import ServerSteps
from star_hvd.modes.subgroup_child import ChildSteps
from star_hvd.ps.common.auth import JobKey
from star_hvd.runtime.process_sets import SetKeeper
from star_hvd.runtime.server_sessions import ServerSessions
from star_hvd.telemetry.step_timeline import TimedClient
from star_hvd.telemetry.wait_time import WaitTime
from star_hvd.threads import supervised

__all__ = ["ModeServices"]

logger = logging.getLogger("star_hvd")

_SLICE_S = 1.0  # Longest wait between two looks at the time waited.

Ranks = tuple[int, ...]


class ModeServices:
    """See the module's text.

    Args:
        rank: This rank.
        config: Settings.
        keyring: Keys and addresses of the job.
        key: The job's key for the servers' channel.
        host: This rank's address.
        send: Sends a control message.
        drivers: The drivers of all optimizers by number; filled by the runtime.
        check_ranks: See `ArrivingParameters`.
    """

    def __init__(
        self,
        rank: int,
        config: Config,
        keyring: Keyring,
        key: JobKey,
        host: str,
        send: Send,
        drivers: dict[int, StepDriver],
        check_ranks: Callable[[], None] = lambda: None,
    ) -> None:
        self._check_ranks = check_ranks
        self._rank = rank
        self._config = config
        self._keyring = keyring
        self._send = send
        self._drivers = drivers
        self.sets = SetKeeper(len(keyring.peers), self._set_done, check_ranks, config.control_deadline_s)
        self._changed = ordered_condition("ModeServices._changed")
        self._set_reasons: dict[Ranks, str | None] = {}
        self._link_bytes_per_s = 0.0  # Rate of this rank's link as last measured.
        self._given_up: dict[int, int] = {}  # Per optimizer, the last `plan_id` that nothing waits for any more.
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = supervised(self._run, "star-prepare")
        self.sessions = ServerSessions(rank, config, key, host, send, drivers)

    def start(self) -> None:
        """Start the threads."""
        self.sets.start()
        self._thread.start()

    def stop(self, deadline_s: float = 5.0) -> None:
        """End threads and servers."""
        self._tasks.put(None)
        self.sessions.stop()
        self.sets.stop(deadline_s)
        if self._thread.ident is not None:
            self._thread.join(deadline_s)

    def later(self, task: Callable[[], None]) -> None:
        """Run `task` in the preparing thread, after the tasks queued before it."""
        self._tasks.put(task)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception:  # A plan that this rank does not report on is abandoned in the end.
                logger.exception("rank %d: preparing a plan failed", self._rank)

    def on_message(self, message: Message) -> None:
        """Handle an order of the coordinator, in the agent's thread."""
        if isinstance(message, (MakeSet, DropSet)):
            with self._changed:  # The known result for this set is outdated.
                self._set_reasons.pop(tuple(message.ranks), None)
            (self.sets.add if isinstance(message, MakeSet) else self.sets.remove)(message.ranks)
        elif isinstance(message, WarmServers):
            if self._rank in message.ranks:
                self.later(self.sessions.warm)
        elif isinstance(message, Probe):
            supervised(self._probe, "star-probe", args=(message,), critical=False).start()
        elif isinstance(message, (Servers, ServerRestarted, Presence)):
            self.sessions.on_message(message)

    def _probe(self, message: Probe) -> None:
        """Measure this rank's link, in a thread of its own."""
        with contextlib.suppress(StarError, zmq.ZMQError):
            rate = probe(
                self._keyring,
                message.target,
                self._rank,
                message.size_bytes,
                chunk_bytes=self._config.chunk_bytes,
                deadline_s=self._config.control_deadline_s,
            )
            self._link_bytes_per_s = rate
            self._send(LinkRate(rate))

    def give_up(self, optimizer_id: int, plan_id: int) -> None:
        """Give up an optimizer's plans up to `plan_id`.

        Their preparation stops waiting; otherwise it would delay the preparation of the next plan of any optimizer.
        """
        with self._changed:
            self._given_up[optimizer_id] = max(plan_id, self._given_up.get(optimizer_id, -1))
            self._changed.notify_all()
        self.sessions.give_up(optimizer_id, plan_id)

    def forget(self, optimizer_id: int) -> None:
        """Forget an optimizer that is closed on all ranks."""
        self.give_up(optimizer_id, sys.maxsize)
        self.sessions.forget(optimizer_id)

    # ---- process sets -----------------------------------------------------------------------------------------

    def _set_done(self, ranks: Ranks, reason: str | None) -> None:
        with self._changed:
            self._set_reasons[ranks] = reason
            self._changed.notify_all()

    def process_set(self, ranks: Ranks) -> Any:
        """Return a process set of a prepared plan.

        Raises:
            StarError: It does not exist.
        """
        found = self.sets.get(ranks)
        if found is None:
            raise StarError(f"process set {list(ranks)} does not exist; the plan that needs it was never prepared here")
        return found

    def _await_sets(self, optimizer_id: int, plan: Plan) -> str | None:
        limit_s, wait = self._config.plan_deadline_s, WaitTime(_SLICE_S, f"the process sets of {plan.label}")

        def is_known(ranks: Ranks) -> bool:
            return ranks in self._set_reasons or plan.plan_id <= self._given_up.get(optimizer_id, -1)

        for ranks in plan.sets:
            with self._changed:
                while not is_known(ranks) and wait.count() < limit_s:
                    self._changed.wait(min(_SLICE_S, limit_s - wait.passed_s))
                if plan.plan_id <= self._given_up.get(optimizer_id, -1):
                    return f"{plan.label} was given up"
                if ranks not in self._set_reasons:
                    return f"process set {list(ranks)} was not made within {self._config.plan_deadline_s:g} s"
                reason = self._set_reasons[ranks]
            if reason is not None:
                return reason
        return None

    # ---- for switches ------------------------------------------------------------------------------------------

    def prepare(self, optimizer_id: int, plan: Plan) -> str | None:
        """Get a plan's process sets, servers and connections ready; return why that failed, or None. Blocks."""
        reason = self._await_sets(optimizer_id, plan)
        if reason is None and plan.family in ("ps", "grouped"):
            reason = self.sessions.prepare(optimizer_id, plan)
        return reason

    def session(self, optimizer_id: int, plan: Plan) -> int | None:
        """Return the session of servers that a prepared plan starts or continues, None if it has no servers."""
        return self.sessions.session_number(optimizer_id, plan) if plan.family in ("ps", "grouped") else None

    def steps(self, optimizer_id: int, plan: Plan) -> Steps:
        """Return the object that makes the steps of a prepared plan outside the family `all_ranks`."""
        if plan.family == "subgroup":
            return self._child_steps(optimizer_id, plan)
        return self._steps_at_servers(optimizer_id, plan)

    def _child_steps(self, optimizer_id: int, plan: Plan) -> Steps:
        driver, config = self._drivers[optimizer_id], self._config
        parent = plan.parent_of(self._rank)
        assert parent is not None
        link = ParentLink(
            self._keyring,
            parent,
            self._rank,
            optimizer_id,
            chunk_bytes=config.chunk_bytes,
            pace_bytes_per_s=config.late_bytes_per_s,
            deadline_s=config.step_deadline_s,
            packer=driver.engine.wire.packer(),
            link_bytes_per_s=self._link_bytes_per_s,
            check=functools.partial(self.check_world, driver.engine),
            note=driver.reporter.note_transmission,
        )
        return ChildSteps(
            driver.engine,
            plan,
            link,
            ranks=driver.ranks,
            deadline_s=config.step_deadline_s,
            state_deadline_s=config.control_deadline_s,
            on_step=driver.reporter.note_step,
            background=plan.in_background(config.background),
        )

    def check_world(self, engine: StepEngine) -> None:
        """Raise why a wait for another rank is pointless, if it is."""
        if engine.failure is not None:
            raise engine.failure
        self._check_ranks()

    def _steps_at_servers(self, optimizer_id: int, plan: Plan) -> Steps:
        if plan.mode not in ("ps", "grouped"):
            raise StarError(f"no class makes the steps of mode {plan.mode}; add one to ModeServices.steps")
        driver = self._drivers[optimizer_id]
        common: dict[str, Any] = {
            "deadline_s": self._config.step_deadline_s,
            "on_step": driver.reporter.note_step,
            "on_notes": driver.reporter.note_updates,
            "plan_of": driver.switcher.plan_of,
            "check_ranks": self._check_ranks,
            "same_session": lambda one, other: self.sessions.same_session(optimizer_id, one, other),
        }
        client = self.sessions.client(optimizer_id, plan)
        if plan.mode == "ps":
            timed: Any = TimedClient(client, driver.timeline)
            background = plan.in_background(self._config.background)
            return ServerSteps(
                driver.engine, plan, timed, early=plan.pushes_early(self._config.background),
                gates=driver.gates if background else None, compressed=driver.engine.wire.server_pushes(),
                on_wait=driver.timer.add_outside, **common,
            )  # fmt: skip
        group = next(ranks for ranks in plan.groups if self._rank in ranks)
        collective = HorovodCollective(self.process_set(group)) if len(group) > 1 else None
        return GroupSteps(driver.engine, plan, client, collective, group, **common)

    def seed(self, optimizer_id: int, plan: Plan, snapshot: Callable[[], Snapshot]) -> None:
        """Give this rank's server the state to start with, a snapshot; called on ranks that run a server."""
        self.sessions.seed(optimizer_id, plan, snapshot())

    def end(self, optimizer_id: int, plan: Plan, new: Plan) -> None:
        """Let this rank's server change its rule or make its last update, as all ranks are ready to switch to `new`."""
        self.sessions.end(optimizer_id, plan, new)

    def begun(self, optimizer_id: int, plan: Plan) -> None:
        """Note that a plan with servers is in force."""
        self.sessions.begun(optimizer_id, plan)

    def final_state(self, optimizer_id: int, plan: Plan, version: int, deadline_s: float) -> Snapshot | None:
        """Return the state with which the servers of a plan ended at `version`, None if it is no longer available.

        Raises:
            StarError, RankLostError: This rank has failed, or another one has left, maybe with its server.
        """
        driver = self._drivers.get(optimizer_id)
        if driver is None:
            return None
        check = functools.partial(self.check_world, driver.engine)
        snapshot = self.sessions.final_state(optimizer_id, plan, version, deadline_s, check)
        if snapshot is None and driver.engine.failure is not None:
            raise driver.engine.failure
        return snapshot
