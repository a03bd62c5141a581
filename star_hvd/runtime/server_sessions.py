"""The parameter server that this rank runs, and its connections to all servers, for every optimizer.

A session lasts from entering a mode with servers to leaving it; its number is the `plan_id` of the plan that started
it. Server processes are kept for the next session.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from scheduler.plan.plan import Plan
from star_hvd.channel.messages.base import Message, ModeUnsupported, Send
from star_hvd.channel.messages.switch import Drained, PrepareFailed, Presence, ServerRestarted, Servers, ServerUp
from star_hvd.config import Config
from star_hvd.engine.records import Snapshot
from star_hvd.errors import ChannelError, DeadlineError, RankLostError, StarError
from star_hvd.locks import ordered_condition
from star_hvd.modes.driver import StepDriver
from star_hvd.ps.common.auth import Endpoint, JobKey
from star_hvd.ps.common.layout import Layout, LayoutError
from star_hvd.ps.common.optimizer_spec import OptimizerSpec
from star_hvd.ps.owner.server_process import ServerProcess
from star_hvd.ps.worker.client import Client
from star_hvd.telemetry.wait_time import WaitTime
from star_hvd.threads import supervised

__all__ = ["ServerSessions"]

logger = logging.getLogger("star_hvd")

_ENDPOINT_PARTS = 3
_SLICE_S = 1.0  # Longest wait between two looks at the time waited.
_MOVES = 3  # Addresses of the own server that are announced for one plan; if it dies again, the plan is given up.


@dataclass(slots=True)
class _Session:
    number: int
    plan: Plan
    client: Client
    endpoints: list[Endpoint]
    layout: Layout
    spec: OptimizerSpec
    begun: bool = False  # Whether its plan came into force, also if past this rank's training thread; many never do.
    seeded: bool = False  # Whether this rank's server has its shard.
    following: Plan | None = None  # The plan to move to as soon as it has.


class ServerSessions:
    """See the module's text.

    Args:
        rank: This rank.
        config: Settings.
        key: The job's key for the servers' channel.
        host: This rank's address.
        send: Sends a control message.
        drivers: The drivers of all optimizers by number.
    """

    def __init__(
        self, rank: int, config: Config, key: JobKey, host: str, send: Send, drivers: dict[int, StepDriver]
    ) -> None:
        self._rank = rank
        self._config = config
        self._key = key
        self._send = send
        self._drivers = drivers
        self._process = ServerProcess(rank, key, host, on_event=self._on_event)
        self._changed = ordered_condition("ServerSessions._changed")
        self._found: dict[tuple[int, int], list[Endpoint]] = {}
        self._sessions: dict[int, list[_Session]] = {}
        self._serves: dict[tuple[int, int], int] = {}  # (optimizer, plan_id) -> session
        self._announced: dict[tuple[int, int], int] = {}  # Index of the own server of plans that are being prepared.
        self._ended: set[int] = set()  # Optimizers that were closed on all ranks.
        self._absent: frozenset[int] = frozenset()
        self._given_up: dict[int, int] = {}  # Per optimizer, the last `plan_id` that nothing waits for any more.
        self._stopped = False

    def stop(self) -> None:
        """Close all connections and end this rank's server."""
        self._stopped = True
        with self._changed:
            self._changed.notify_all()
            sessions = [session for each in self._sessions.values() for session in each]
        for session in sessions:
            session.client.close()
        self._process.stop()  # Also while none runs: one may be being started, or restarted after a death.

    @property
    def server(self) -> ServerProcess:
        """This rank's server process, which may not have been started yet."""
        return self._process

    def open_sessions(self, optimizer_id: int) -> list[int]:
        """Return the numbers of an optimizer's sessions with connections, oldest first."""
        with self._changed:
            return [each.number for each in self._sessions.get(optimizer_id, [])]

    def known_plans(self, optimizer_id: int) -> set[int]:
        """Return the ids of an optimizer's plans for which anything is kept: a session, or its servers' addresses."""
        with self._changed:
            return {plan for known in (self._found, self._serves) for key, plan in known if key == optimizer_id}

    # ---- getting ready, in the preparer's thread ------------------------------------------------------------------

    def prepare(self, optimizer_id: int, plan: Plan) -> str | None:
        """Start this rank's server if the plan needs one, wait for the addresses of all servers, and connect.

        Returns:
            Why the plan cannot be carried out here, or None.
        """
        driver = self._drivers.get(optimizer_id)
        if driver is None:  # It was closed while its plan was in the queue.
            return f"optimizer {optimizer_id} has ended"
        if driver.engine.plan.family == plan.family == "ps":  # The same servers continue under another rule.
            with self._changed:
                self._serves[optimizer_id, plan.plan_id] = self._session_of(optimizer_id, driver.engine.plan).number
            return None
        applier = driver.engine.applier
        groups = applier.optimizer.param_groups
        try:
            chunk_bytes, spread = self._config.server_chunk_bytes, plan.pushes_early(self._config.background)
            layout = Layout.build(
                applier.buckets, groups, applier.base, len(plan.servers), chunk_bytes, each_spread=spread
            )
            spec = OptimizerSpec.of(applier.base, groups, applier.hyper)
            spec.check_rebuilt(applier.optimizer)
            if self._rank in plan.servers:
                self._announce(optimizer_id, plan)
            client = Client(self._rank, optimizer_id, plan.plan_id, [], layout, self._key)
            self._await_endpoints(client, optimizer_id, plan)
        except (LayoutError, DeadlineError) as error:
            with self._changed:
                self._announced.pop((optimizer_id, plan.plan_id), None)
            return str(error)
        self._tidy(optimizer_id, driver.engine.plan, plan)
        if not self._connect(_Session(plan.plan_id, plan, client, [], layout, spec), optimizer_id):
            return f"optimizer {optimizer_id} has ended"
        return None

    def _tidy(self, optimizer_id: int, active: Plan, newest: Plan) -> None:
        """Close an optimizer's sessions that are over, or whose plan was abandoned before it came into force.

        Args:
            optimizer_id: Number of the optimizer.
            active: The plan in force.
            newest: The plan that is being prepared, which has no session yet.
        """
        with self._changed:
            live = self._serves.get((optimizer_id, active.plan_id))
            kept = self._sessions.get(optimizer_id, [])
            past = [each for each in kept if each.number <= active.plan_id and each.number != live]
            begun = [each for each in past if each.begun]
            # Of plans that are not in force yet only the newest may still be: its flags may have been up already.
            ahead = [each for each in kept if each.number > active.plan_id]
            # Ended sessions may still be asked for their final state: keep the last, in modes without servers two.
            old = [each for each in past if not each.begun] + begun[: -1 if live is not None else -2] + ahead[:-1]
            self._sessions[optimizer_id] = [each for each in kept if each not in old]
            self._forget_plans(optimizer_id, newest)
        self._close(optimizer_id, old)

    def _forget_plans(self, optimizer_id: int, newest: Plan) -> None:
        """Under the lock: forget what is known of plans without a session, except the one that is being prepared."""
        numbers = {each.number for each in self._sessions[optimizer_id]}
        for key in [key for key, number in self._serves.items() if key[0] == optimizer_id and number not in numbers]:
            del self._serves[key]
        for key in [key for key in self._found if key[0] == optimizer_id and key[1] < newest.plan_id]:
            del self._found[key]

    def forget(self, optimizer_id: int) -> None:
        """Release the connections of an optimizer closed on all ranks, and its shards on this rank's server."""
        with self._changed:
            self._ended.add(optimizer_id)
            sessions = self._sessions.pop(optimizer_id, [])
            for known in (self._found, self._serves, self._announced):
                for key in [key for key in known if key[0] == optimizer_id]:
                    del known[key]
        self._close(optimizer_id, sessions)

    def _close(self, optimizer_id: int, sessions: list[_Session]) -> None:
        for session in sessions:
            session.client.close()
            self._process.close(optimizer_id, session.number)

    def give_up(self, optimizer_id: int, plan_id: int) -> None:
        """Give up a plan: the preparation of it, or of an earlier one, stops waiting."""
        with self._changed:
            self._given_up[optimizer_id] = max(plan_id, self._given_up.get(optimizer_id, -1))
            self._changed.notify_all()

    def warm(self) -> None:
        """Start this rank's server before any plan needs it."""
        if not self._stopped:
            with contextlib.suppress(DeadlineError):  # A plan that needs it tries again and reports a failure.
                self._start(self._process.ensure, self._config.plan_deadline_s)

    def _start(self, start: Callable[[float], Endpoint], deadline_s: float) -> Endpoint:
        """Start this rank's server by a method of `ServerProcess`; `stop` at any time leaves none running."""
        try:
            return start(deadline_s)
        finally:
            if self._stopped:  # `stop` may have come before the start was requested.
                self._process.stop()

    def _connect(self, session: _Session, optimizer_id: int) -> bool:
        """Connect a session to the servers of its plan; from now on it hears of restarts.

        Returns:
            False if the optimizer, or all of this, was closed meanwhile; nothing is left of the session then.
        """
        key = optimizer_id, session.number
        with self._changed:  # A restart reaches either `_found` or the session, at every moment.
            ended = self._stopped or optimizer_id in self._ended
            session.endpoints = self._found.pop(key, [])
            self._announced.pop(key, None)
            if not ended:
                self._serves[key] = session.number
                self._sessions.setdefault(optimizer_id, []).append(session)
                session.client.reach(session.endpoints)
                session.client.start()  # Under the lock: `stop` and `forget` close every session they find.
        if ended:
            session.client.close()
        return not ended

    def _announce(self, optimizer_id: int, plan: Plan) -> None:
        """Tell where this rank's server is; `_recover` tells it again if the server dies before the plan is ready."""
        index, limit_s = plan.servers.index(self._rank), self._config.plan_deadline_s
        with self._changed:
            self._announced[optimizer_id, plan.plan_id] = index
        endpoint = self._start(self._process.ensure, limit_s)
        for _ in range(_MOVES):
            self._send(ServerUp(optimizer_id, plan.plan_id, index, _to_parts(endpoint)))
            sent, endpoint = endpoint, self._start(self._process.ensure, limit_s)
            if endpoint == sent:  # Else a newer address may have been sent before this one.
                return
        raise DeadlineError(
            f"the server of rank {self._rank} died {_MOVES} times while {plan.label} was prepared; see the log of this "
            "rank for its exit codes"
        )

    def _await_endpoints(self, client: Client, optimizer_id: int, plan: Plan) -> None:
        """Wait until it is known where all servers are; the client is closed where that is in vain."""
        key, limit_s = (optimizer_id, plan.plan_id), self._config.plan_deadline_s
        wait = WaitTime(_SLICE_S, f"the servers of {plan.label}")

        def given_up() -> bool:
            return self._stopped or plan.plan_id <= self._given_up.get(optimizer_id, -1)

        with self._changed:
            while not (key in self._found or given_up()) and wait.count() < limit_s:
                self._changed.wait(min(_SLICE_S, limit_s - wait.passed_s))
            if key in self._found and not given_up():
                return
        client.close()
        raise DeadlineError(
            f"the servers of {plan.label} on ranks {list(plan.servers)} were not up within {limit_s:g} s, or the plan "
            "was abandoned before; see the logs of these ranks"
        )

    # ---- orders, in the agent's thread ------------------------------------------------------------------------------

    def on_message(self, message: Message) -> None:
        """Handle an order of the coordinator."""
        if isinstance(message, Servers):
            parts = message.addresses
            endpoints = [
                _from_parts(parts[i : i + _ENDPOINT_PARTS]) for i in range(0, len(parts), _ENDPOINT_PARTS)
            ]
            self._note_endpoints(message.optimizer_id, message.plan_id, endpoints)
        elif isinstance(message, ServerRestarted):
            self._replace(message)
        elif isinstance(message, Presence):
            self._presence(message.rank, present=message.present)

    def _note_endpoints(self, optimizer_id: int, plan_id: int, endpoints: list[Endpoint]) -> None:
        """Note where the servers of a plan are: said again if one was restarted before all ranks had prepared it."""
        with self._changed:
            known = [each.endpoints for each in self._sessions.get(optimizer_id, []) if each.number == plan_id]
            if not known:
                self._found[optimizer_id, plan_id] = endpoints
                self._changed.notify_all()
                return
            pairs = enumerate(zip(known[0], endpoints, strict=False))
            moved = [index for index, (before, now) in pairs if before != now]
        for index in moved:
            self._replace(ServerRestarted(optimizer_id, plan_id, index, _to_parts(endpoints[index])))

    def _replace(self, message: ServerRestarted) -> None:
        endpoint = _from_parts(message.address)
        with self._changed:  # As a whole: `seed` opens the own server with the address before or the one after.
            found = self._found.get((message.optimizer_id, message.plan_id))
            if found is not None:  # No session has connected yet.
                found[message.index] = endpoint
            for session in self._sessions.get(message.optimizer_id, []):
                if session.number == message.plan_id:
                    session.endpoints[message.index] = endpoint
                    session.client.replace(message.index, endpoint)
                    if self._rank in session.plan.servers and session.plan.servers.index(self._rank) != message.index:
                        self._process.replace(message.optimizer_id, message.plan_id, message.index, endpoint)

    def _presence(self, rank: int, *, present: bool) -> None:
        with self._changed:  # As a whole: `seed` reports who is absent before this or after it.
            self._absent = self._absent - {rank} if present else self._absent | {rank}
            for optimizer_id, driver in list(self._drivers.items()):
                plan = driver.engine.plan
                if rank != self._rank and plan.family in ("ps", "grouped") and self._leads(optimizer_id, plan):
                    self._process.member(optimizer_id, rank, "present" if present else "absent")

    def _leads(self, optimizer_id: int, plan: Plan) -> bool:
        """Whether this rank runs the first server of a plan's session, which orders the updates."""
        with contextlib.suppress(StarError):
            return self._session_of(optimizer_id, plan).plan.servers[0] == self._rank
        return False

    def _session_of(self, optimizer_id: int, plan: Plan) -> _Session:
        """Return the session that serves a plan."""
        with self._changed:
            number = self._serves.get((optimizer_id, plan.plan_id))
            for session in self._sessions.get(optimizer_id, []):
                if session.number == number:
                    return session
        raise StarError(f"{plan.label} has no servers here: its plan was never prepared")

    def end(self, optimizer_id: int, plan: Plan, new: Plan) -> None:
        """Change the servers' rule, or let them make their last update, as all ranks are ready to switch to `new`.

        A server that is not open yet does so then: this rank's training thread has still to bring its first state.
        """
        session = self._session_of(optimizer_id, plan)
        if session.plan.servers[0] != self._rank:
            return
        with self._changed:
            if not session.seeded:
                session.following = new
                return
        self._move(optimizer_id, plan, new)

    def _move(self, optimizer_id: int, plan: Plan, new: Plan) -> None:
        if new.family == plan.family == "ps":
            self._process.set_plan(optimizer_id, new)
        else:
            self._process.cut(optimizer_id, new.plan_id)

    def session_number(self, optimizer_id: int, plan: Plan) -> int:
        """Return the session that a prepared plan starts or continues."""
        return self._session_of(optimizer_id, plan).number

    def same_session(self, optimizer_id: int, one: Plan, other: Plan) -> bool:
        """Whether two plans belong to the same session of servers."""
        with self._changed:
            numbers = [self._serves.get((optimizer_id, plan.plan_id), -1 - i) for i, plan in enumerate((one, other))]
        return one.plan_id == other.plan_id or numbers[0] == numbers[1]

    def begun(self, optimizer_id: int, plan: Plan) -> None:
        """Note that a plan is in force, so that its session is kept: its servers may come to hold the only state."""
        with contextlib.suppress(StarError):
            self._session_of(optimizer_id, plan).begun = True

    # ---- for the training thread --------------------------------------------------------------------------------

    def client(self, optimizer_id: int, plan: Plan) -> Client:
        """Return the connection to the servers of a plan, new or continued from the plan before."""
        return self._session_of(optimizer_id, plan).client

    def seed(self, optimizer_id: int, plan: Plan, snapshot: Snapshot) -> None:
        """Open this rank's shard with the state with which the plan starts."""
        session = self._session_of(optimizer_id, plan)
        index = plan.servers.index(self._rank)
        number = session.number
        with self._changed:  # What the agent's thread hears meanwhile it tells the server after this.
            self._process.open(
                optimizer_id, number, index, session.endpoints, session.layout, plan, session.spec, snapshot.step
            )
            if index == 0:
                for rank in sorted(self._absent - {self._rank}):  # Reported absent while no shard was open.
                    self._process.member(optimizer_id, rank, "absent")
            session.begun = True
        self._process.seed(optimizer_id, number, snapshot)
        with self._changed:
            session.seeded, following = True, session.following
        if following is not None:
            self._move(optimizer_id, plan, following)
        if not (self._process.alive or self._stopped):  # Given up before all ranks had agreed on the plan.
            supervised(self._recover, "star-ps-recover").start()

    def final_state(
        self, optimizer_id: int, plan: Plan, version: int, deadline_s: float, check: Callable[[], None]
    ) -> Snapshot | None:
        """Return the state with which a plan's servers ended at `version`, None if it is no longer available.

        Args:
            optimizer_id: Number of the optimizer.
            plan: The plan.
            version: The step at which its servers ended.
            deadline_s: Longest wait.
            check: As in `Client.pull`; a `StarError` of it ends the wait, any other error is raised.
        """
        with contextlib.suppress(ChannelError, DeadlineError, StarError):
            snapshot = self.client(optimizer_id, plan).state(deadline_s, check=check)
            if snapshot.step == version:
                return snapshot
        return None

    # ---- events of the own server, in its supervising thread --------------------------------------------------------

    def _on_event(self, event: dict[str, Any]) -> None:
        kind, optimizer_id = event["event"], event.get("optimizer_id", -1)
        if kind == "cut":
            self._send(Drained(optimizer_id, event["plan_id"], event["version"]))
        elif kind == "refused":
            self._send(ModeUnsupported(optimizer_id, event["plan_id"], event["reason"]))
        elif kind == "failed":
            error = StarError(f"the parameter server of rank {self._rank} failed: {event['reason']}")
            logger.error("%s", error)  # The program may make no later call, which would raise it.
            self._fail(optimizer_id, error)
        elif kind == "died" and not self._stopped:
            logger.error(
                "rank %d: its parameter server died (exit code %s) and is started again from its copy",
                self._rank,
                event["returncode"],
            )
            supervised(self._recover, "star-ps-recover").start()

    def _recover(self) -> None:
        began_s = time.monotonic()
        try:
            endpoint = self._start(self._process.recover, self._config.control_deadline_s)
        except (DeadlineError, ChannelError, OSError) as error:
            if not self._stopped:
                self._give_up_server(f"the parameter server of rank {self._rank} could not be recovered: {error}")
            return
        if self._stopped:
            return
        logger.warning("rank %d: its parameter server is back after %.1f s", self._rank, time.monotonic() - began_s)
        self._tell(endpoint)
        while (newest := self._process.endpoint) not in (None, endpoint):
            endpoint = newest  # It died again, and its newer address may have been sent before the one above.
            self._tell(endpoint)

    def _give_up_server(self, reason: str) -> None:
        """Fail the optimizers whose servers' mode was in force; plans that have only been prepared are abandoned."""
        with self._changed:
            known = [(number, each) for number, sessions in self._sessions.items() for each in sessions]
            own = [(number, each) for number, each in known if self._rank in each.plan.servers]
            plans = [*self._announced, *((number, each.number) for number, each in own if not each.begun)]
            needed = {number for number, each in own if each.begun}
        logger.error("rank %d: %s", self._rank, reason)
        for optimizer_id, plan_id in plans:
            self._send(PrepareFailed(optimizer_id, plan_id, reason))
        for optimizer_id in sorted(needed):
            self._fail(optimizer_id, RankLostError(reason))

    def _tell(self, endpoint: Endpoint) -> None:
        """Tell all ranks where this rank's server is now."""
        with self._changed:
            sessions = [(optimizer_id, session) for optimizer_id, each in self._sessions.items() for session in each]
            announced = list(self._announced.items())
        for (optimizer_id, plan_id), index in announced:
            self._send(ServerUp(optimizer_id, plan_id, index, _to_parts(endpoint)))
        for optimizer_id, session in sessions:
            if self._rank in session.plan.servers:
                index = session.plan.servers.index(self._rank)
                self._send(ServerRestarted(optimizer_id, session.number, index, _to_parts(endpoint)))

    def _fail(self, optimizer_id: int, error: Exception) -> None:
        for number, driver in list(self._drivers.items()):
            if optimizer_id in (-1, number):
                driver.engine.fail(error)
                if driver.active_mode is not None:
                    driver.active_mode.wake()


def _to_parts(endpoint: Endpoint) -> list[str]:
    host, port, public_key = endpoint.to_list()
    return [str(host), str(port), bytes(public_key).hex()]


def _from_parts(parts: list[str]) -> Endpoint:
    host, port, public_key = parts
    return Endpoint(host, int(port), bytes.fromhex(public_key))


