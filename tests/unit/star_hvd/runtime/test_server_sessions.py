"""Connections to servers: which are closed, and that the one in use never is."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import star_hvd.runtime.server_sessions as module
from scheduler.plan.plan import Plan
from star_hvd.channel.messages.switch import PrepareFailed, Presence, ServerRestarted, Servers, ServerUp
from star_hvd.config import Config
from star_hvd.engine.records import Snapshot
from star_hvd.errors import DeadlineError, RankLostError
from star_hvd.ps.common.auth import Endpoint, JobKey
from star_hvd.runtime.server_sessions import ServerSessions
from tests.support.ps_cluster import DEADLINE_S, Cluster, ThreadServer
from tests.unit.star_hvd.channel.test_channel import within


class Connection:
    """Stands for a client."""

    def __init__(self, rank: int, optimizer_id: int, number: int, *rest: Any) -> None:
        self.number, self.closed = number, False
        self.reached: list[Endpoint] = []
        self.replaced: list[tuple[int, Endpoint]] = []

    def reach(self, endpoints: list[Endpoint]) -> None:
        self.reached = list(endpoints)

    def start(self) -> None:
        pass

    def replace(self, index: int, endpoint: Endpoint) -> None:
        self.replaced.append((index, endpoint))

    def close(self) -> None:
        self.closed = True


class Owner:
    """Stands for the owner of this rank's server, which is at port 1."""

    def __init__(self, rank: int, key: Any, host: str, *, on_event: Callable[[dict[str, Any]], None]) -> None:
        self.on_event = on_event
        self.endpoint: Endpoint | None = None
        self.pid: int | None = None
        self.alive = True
        self.closed: list[int] = []
        self.orders: list[tuple[Any, ...]] = []
        self.stops = 0

    def stop(self) -> None:
        self.stops += 1

    def ensure(self, deadline_s: float) -> Endpoint:
        return Endpoint("h", 1)

    recover = ensure

    def open(self, optimizer_id: int, number: int, index: int, endpoints: list[Endpoint], *rest: Any) -> None:
        self.orders.append(("open", [each.port for each in endpoints]))

    def seed(self, optimizer_id: int, number: int, snapshot: Snapshot) -> None:
        self.orders.append(("seed",))

    def cut(self, optimizer_id: int, plan_id: int) -> None:
        self.orders.append(("cut", plan_id))

    def member(self, optimizer_id: int, rank: int, what: str) -> None:
        self.orders.append(("member", rank, what))

    def replace(self, optimizer_id: int, number: int, index: int, endpoint: Endpoint) -> None:
        self.orders.append(("replace", index, endpoint.port))

    def close(self, optimizer_id: int, number: int) -> None:
        self.closed.append(number)

    def die(self) -> None:
        """Report the server's death, and wait until the thread that it starts has ended."""
        self.on_event({"event": "died", "returncode": -9})
        for thread in threading.enumerate():
            if thread.name == "star-ps-recover":
                thread.join(60.0)
                assert not thread.is_alive()


class Drivers(dict[int, Any]):
    """The drivers by number; what is in `closing` happens while somebody goes through them."""

    closing: Callable[[], None] | None = None

    def items(self) -> Any:
        found = list(super().items())
        if self.closing is not None:
            self.closing()
        return found


class Made:
    """Sessions of rank 2 whose plans are prepared without any server."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "Client", Connection)
        monkeypatch.setattr(module, "ServerProcess", Owner)
        monkeypatch.setattr(module, "Layout", SimpleNamespace(build=lambda *unused, **also: None))
        spec = SimpleNamespace(check_rebuilt=lambda optimizer: None)
        monkeypatch.setattr(module, "OptimizerSpec", SimpleNamespace(of=lambda *unused: spec))
        applier = SimpleNamespace(buckets=[], optimizer=SimpleNamespace(param_groups=[]), base=None, hyper=None)
        self.engine = SimpleNamespace(plan=Plan.sync(4), applier=applier)
        self.drivers = Drivers({0: SimpleNamespace(engine=self.engine)})
        self.sent: list[Any] = []
        key: Any = None
        self.sessions = ServerSessions(2, Config(), key, "h", self.sent.append, self.drivers)
        owner: Any = self.sessions.server
        self.owner: Owner = owner
        self.shards = self.owner.closed

    def tell(self, plan: Plan) -> None:
        """The coordinator tells where the servers of a plan are, unless the test has told it."""
        if plan.plan_id not in self.sessions.known_plans(0):
            self.sessions.on_message(Servers(0, plan.plan_id, ["h", "1", ""] * len(plan.servers)))

    def prepare(self, plan: Plan) -> None:
        self.tell(plan)
        assert self.sessions.prepare(0, plan) is None

    def seed(self, plan: Plan) -> None:
        self.sessions.seed(0, plan, Snapshot(0, [], []))

    def absent(self) -> list[int]:
        """The ranks of which a session that begins now hears that they are absent."""
        plan = Plan.ps(4, 3, servers=(2, 0)).replace(plan_id=50)
        self.enter(Plan.sync(4).replace(plan_id=49))
        self.enter(plan)
        self.owner.orders.clear()
        self.seed(plan)
        return [order[1] for order in self.owner.orders if order[0] == "member"]

    def enter(self, plan: Plan) -> Any:
        """Prepare a plan and bring it into force."""
        if plan.family in ("ps", "grouped"):
            self.prepare(plan)
            self.engine.plan = plan
            self.sessions.begun(0, plan)
            return self.sessions.client(0, plan)
        self.engine.plan = plan
        return None

    def numbers(self) -> list[int]:
        return self.sessions.open_sessions(0)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    return Made(monkeypatch)


def ps(epoch: int, x: int = 3) -> Plan:
    return Plan.ps(4, x, servers=(0,)).replace(plan_id=epoch)


def grouped(epoch: int) -> Plan:
    return Plan.grouped(4, [(0, 1), (2, 3)]).replace(plan_id=epoch, servers=(0,))


def test_abandoned_plans_do_not_push_out_the_connection_in_use(made: Made) -> None:
    used = made.enter(ps(10))
    made.prepare(grouped(11))
    made.prepare(grouped(12))
    assert made.enter(ps(13, x=2)) is used, "the same servers under another rule"
    made.prepare(grouped(14))
    assert not used.closed and made.sessions.client(0, made.engine.plan) is used
    assert made.numbers() == [10, 14] and made.shards == [11, 12]


def test_plans_abandoned_in_sync_do_not_pile_up(made: Made) -> None:
    for epoch in range(1, 12, 2):
        made.prepare(ps(epoch))
        made.enter(Plan.sync(4).replace(plan_id=epoch + 1))
    assert len(made.numbers()) <= 2


def test_plans_abandoned_one_after_the_other_do_not_pile_up(made: Made) -> None:
    """Under one plan: connections, addresses and what serves them."""
    used = made.enter(ps(1))
    for epoch in range(2, 12):
        if epoch % 3:
            made.prepare(grouped(epoch))
        else:
            made.tell(grouped(epoch))  # Given up before it connected.
    assert made.numbers() == [1, 10, 11] and not used.closed, "the flags of the last but one may have been up"
    assert made.sessions.known_plans(0) == {1, 10, 11}


def test_the_last_state_of_the_mode_before_stays_to_be_had(made: Made) -> None:
    clients = []
    for epoch in range(1, 9, 2):
        clients.append(made.enter(ps(epoch)))
        made.enter(Plan.sync(4).replace(plan_id=epoch + 1))
        assert not clients[-1].closed
    assert [each.closed for each in clients] == [True, False, False, False]
    last = made.enter(grouped(9))
    made.prepare(ps(10))
    assert not clients[-1].closed and not last.closed
    assert [each.closed for each in clients[:-1]] == [True, True, True]


def test_a_mode_that_passed_by_while_the_training_thread_computed_keeps_its_last_state(made: Made) -> None:
    made.prepare(ps(1))
    made.engine.plan = ps(1)
    made.sessions.begun(0, ps(1))
    made.engine.plan = Plan.sync(4).replace(plan_id=2)  # Nobody asked for the connection.
    made.prepare(grouped(3))
    assert not made.sessions.client(0, ps(1)).closed and made.shards == []


def test_a_plan_of_an_optimizer_that_was_closed_meanwhile_is_refused(made: Made) -> None:
    assert made.sessions.prepare(7, ps(1)) == "optimizer 7 has ended"
    assert made.numbers() == []


class Guarded(dict[Any, Any]):
    """A dictionary that may only be used under a lock."""

    def __init__(self, lock: Any) -> None:
        super().__init__()
        self.lock, self.uses = lock, 0

    def _check(self) -> None:
        self.uses += 1
        assert self.lock._is_owned(), "used without its lock"

    def __setitem__(self, key: Any, value: Any) -> None:
        self._check()
        super().__setitem__(key, value)

    def get(self, key: Any, default: Any = None) -> Any:
        self._check()
        return super().get(key, default)


def test_which_session_serves_a_plan_is_read_and_written_under_the_lock(made: Made) -> None:
    """Plans are prepared in one thread, come into force in another, and are used in a third."""
    serves = made.sessions._serves = Guarded(made.sessions._changed)
    made.enter(ps(1))
    made.enter(ps(2, x=2))
    assert made.sessions.same_session(0, ps(1), ps(2, x=2)) and not made.sessions.same_session(0, ps(1), grouped(3))
    made.sessions.forget(0)
    assert serves.uses >= 6


def test_servers_are_told_who_was_absent_before_they_were_there(made: Made) -> None:
    made.sessions.on_message(Presence(1, False))
    made.sessions.on_message(Presence(3, False))
    made.sessions.on_message(Presence(3, True))
    plan = Plan.ps(4, 3, servers=(2, 0)).replace(plan_id=1)
    made.enter(plan)
    made.seed(plan)
    assert made.owner.orders == [("open", [1, 1]), ("member", 1, "absent"), ("seed",)]


@pytest.mark.parametrize("before", [True, False])
def test_servers_end_once_they_have_their_first_state(made: Made, before: bool) -> None:
    """All ranks may be ready for the next plan while this one's training thread has still to bring it."""
    plan = Plan.ps(4, 3, servers=(2, 0)).replace(plan_id=1)
    made.enter(plan)
    if before:
        made.sessions.end(0, plan, grouped(2))
        assert made.owner.orders == []
    made.seed(plan)
    if not before:
        made.sessions.end(0, plan, grouped(2))
    assert [order[0] for order in made.owner.orders] == ["open", "seed", "cut"] and made.owner.orders[-1][1] == 2


def test_a_server_that_is_not_open_yet_is_told_of_presence_later() -> None:
    events: queue.Queue[dict[str, Any]] = queue.Queue()
    process = ThreadServer(0, JobKey.new(), "127.0.0.1", on_event=events.put)
    process.start(DEADLINE_S)
    try:
        process.member(0, 1, "absent")
        process.cut(0, 3)
        while (failed := events.get(timeout=DEADLINE_S))["event"] != "failed":
            pass
        assert failed["while"] == "cut" and "not open" in failed["reason"]
    finally:
        process.stop()


def test_nothing_is_left_of_an_optimizer_that_is_closed(made: Made) -> None:
    client = made.enter(ps(1))
    made.sessions.on_message(Servers(0, 2, ["h", "1", ""]))  # Of a plan that is given up before it is looked at.
    assert made.sessions.known_plans(0) == {1, 2}
    made.sessions.forget(0)
    assert client.closed and made.shards == [1] and not made.numbers()
    assert made.sessions.known_plans(0) == set()
    made.sessions.forget(0)


def test_a_moved_server_is_told_of_in_its_own_session_only() -> None:
    """In another session, or of another optimizer, the same number may be another rank's server."""
    layout = Cluster(Plan.ps(4, 4, servers=(0, 1)), servers=2)
    process = ThreadServer(0, layout.key, "127.0.0.1")
    own = process.start(DEADLINE_S)
    other, moved = (Endpoint("127.0.0.1", port, layout.key.own.public) for port in (1, 2))
    keys = [(0, 3), (0, 7), (1, 3)]

    def known() -> dict[tuple[int, int], Endpoint]:
        return {key: job.endpoints[1] for key, job in list(process.processes[-1].server.jobs.items())}

    try:
        for optimizer_id, session in keys:
            process.open(optimizer_id, session, 0, [own, other], layout.layout, layout.plan, layout.spec(), 0)
        process.replace(0, 3, 1, moved)
        assert within(lambda: known() == {(0, 3): moved, (0, 7): other, (1, 3): other})
        process.processes[-1].end()
        assert within(lambda: not process.alive)
        process.recover(DEADLINE_S)  # All that is kept of the sessions is sent to the new process.
        assert within(lambda: known() == {(0, 3): moved, (0, 7): other, (1, 3): other})
    finally:
        process.stop()


def test_a_restart_while_a_plan_is_prepared_is_heard_of(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the connection is made it leads to the new process at once; after that it is made anew."""

    def restart(port: int) -> None:
        made.sessions.on_message(ServerRestarted(0, 3, 0, ["h", str(port), ""]))

    made.prepare(ps(1))  # Abandoned: closed when the next plan is prepared, once it is known where its servers are.
    made.enter(Plan.sync(4).replace(plan_id=2))
    monkeypatch.setattr(made.owner, "close", lambda engine, number: restart(3))
    made.sessions.on_message(Servers(0, 3, ["h", "1", ""]))
    restart(2)
    client = made.enter(ps(3))
    assert client.reached == [Endpoint("h", 3)] and not client.replaced
    restart(4)
    assert client.replaced == [(0, Endpoint("h", 4))]


def test_an_optimizer_that_is_closed_while_its_plan_is_prepared_leaves_nothing_behind(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.prepare(ps(1))
    made.enter(Plan.sync(4).replace(plan_id=2))
    monkeypatch.setattr(made.owner, "close", lambda engine, number: made.sessions.forget(0))
    made.tell(ps(3))
    assert made.sessions.prepare(0, ps(3)) == "optimizer 0 has ended"
    assert made.numbers() == [] and made.sessions.known_plans(0) == set()


def test_a_server_that_dies_while_a_plan_is_prepared_is_told_of_again(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the word that it is up and the connections to it no session hears of a restart."""
    places = iter([Endpoint("h", 1), Endpoint("h", 2), Endpoint("h", 2)])
    plan = Plan.ps(4, 3, servers=(0, 2)).replace(plan_id=1)

    def hear(message: Any) -> None:
        """Once the second address is sent, the server dies again; then the coordinator tells all addresses."""
        made.sent.append(message)
        if message == ServerUp(0, 1, 1, ["h", "2", ""]):
            made.owner.die()
            made.sessions.on_message(Servers(0, 1, ["g", "1", "", "h", "2", ""]))

    made.sessions = ServerSessions(2, Config(), None, "h", hear, made.drivers)  # type: ignore[arg-type]
    made.owner = made.sessions.server  # type: ignore[assignment]
    monkeypatch.setattr(made.owner, "ensure", lambda deadline_s: next(places))
    monkeypatch.setattr(made.owner, "recover", lambda deadline_s: Endpoint("h", 3))
    client = made.enter(plan)
    assert [message.address[1] for message in made.sent] == ["1", "2", "3"], "it moved meanwhile, and died"
    assert made.sent[-1] == ServerUp(0, 1, 1, ["h", "3", ""])
    made.sessions.on_message(Servers(0, 1, ["g", "5", "", "h", "3", ""]))  # Said again.
    assert client.replaced == [(0, Endpoint("g", 5)), (1, Endpoint("h", 3))]
    assert made.owner.orders == [("replace", 0, 5)], "this rank's server connects to the other one anew"
    made.owner.die()
    assert isinstance(made.sent[-1], ServerRestarted)


def test_a_plan_whose_server_dies_again_and_again_is_given_up(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    restless = iter(range(10, 20))
    monkeypatch.setattr(made.owner, "ensure", lambda deadline_s: Endpoint("h", next(restless)))
    plan = Plan.ps(4, 3, servers=(0, 2)).replace(plan_id=1)
    assert "died 3 times" in str(made.sessions.prepare(0, plan))
    made.sent.clear()
    made.owner.die()
    assert made.sent == [], "nobody waits for its address any more"


def unrecoverable(deadline_s: float) -> Endpoint:
    raise DeadlineError("no memory")


def test_a_server_that_no_mode_needs_yet_fails_only_the_plan_that_is_prepared(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training goes on in `sync`; if all ranks had agreed on the plan already, the server is tried once more."""
    failures: list[BaseException] = []
    made.engine.fail = failures.append
    made.drivers[0].active_mode = None
    plan = Plan.ps(4, 3, servers=(2,)).replace(plan_id=1)
    made.prepare(plan)
    made.sent.clear()
    with monkeypatch.context() as patch:
        patch.setattr(made.owner, "recover", unrecoverable)
        made.owner.die()
    made.owner.alive = False
    (failed,) = made.sent
    assert isinstance(failed, PrepareFailed) and failed.plan_id == 1 and "no memory" in failed.reason
    assert not failures
    made.engine.plan = plan
    made.sessions.begun(0, plan)
    made.seed(plan)
    assert within(lambda: isinstance(made.sent[-1], ServerRestarted))
    with monkeypatch.context() as patch:
        patch.setattr(made.owner, "recover", unrecoverable)
        made.owner.die()
    assert len(failures) == 1 and isinstance(failures[0], RankLostError), "now it holds the parameters"


def meanwhile(*works: Callable[[], Any]) -> list[threading.Thread]:
    """Do the work in another thread, which gets ahead as far as the locks held here let it."""

    def work() -> None:
        for each in works:
            each()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(0.2)
    return [thread]


@pytest.mark.parametrize("how", ["forget", "stop"])
def test_a_connection_is_not_started_after_it_was_closed(made: Made, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    closing: list[threading.Thread] = []
    started: list[bool] = []
    close = made.sessions.stop if how == "stop" else lambda: made.sessions.forget(0)
    monkeypatch.setattr(Connection, "reach", lambda self, endpoints: closing.extend(meanwhile(close)))
    monkeypatch.setattr(Connection, "start", lambda self: started.append(self.closed))
    made.prepare(ps(1))
    client: Any = made.sessions.client(0, ps(1)) if how == "stop" else None
    closing[0].join(60.0)
    assert started == [False] and not closing[0].is_alive()
    assert client is None or client.closed


class StoppedMeanwhile(ServerSessions):
    """Sessions that are stopped just before their server is asked for, on a thread that has found them open."""

    def __init__(self, made: list[ThreadServer], monkeypatch: pytest.MonkeyPatch) -> None:
        class Server(ThreadServer):
            def __init__(self, *given: Any, **more: Any) -> None:
                super().__init__(*given, **more)
                made.append(self)

            def ensure(server, deadline_s: float) -> Endpoint:
                self.stop()
                return super().ensure(deadline_s)

        monkeypatch.setattr(module, "ServerProcess", Server)
        super().__init__(0, Config(), JobKey.new(), "127.0.0.1", lambda message: None, {})


def test_a_server_that_is_requested_as_all_ends_does_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[ThreadServer] = []
    StoppedMeanwhile(made, monkeypatch).warm()
    assert within(lambda: not made[0].alive)


@pytest.mark.parametrize("pid", [None, 1])
def test_the_end_stops_a_server_that_is_being_started_too(made: Made, pid: int | None) -> None:
    """`pid` is None during the first start, and from a death until the restart is complete."""
    made.owner.pid = pid
    made.sessions.stop()
    assert made.owner.stops == 1


def test_a_server_whose_recovery_was_stopped_fails_nothing(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[Exception] = []
    made.drivers[0].engine.fail = failed.append
    made.drivers[0].active_mode = None
    plan = Plan.ps(4, 3, servers=(2, 0)).replace(plan_id=1)
    made.enter(plan)

    def stopped(deadline_s: float) -> Endpoint:
        made.sessions.stop()
        raise DeadlineError("it was stopped")

    monkeypatch.setattr(made.owner, "recover", stopped)
    made.sent.clear()
    made.owner.die()
    assert not failed and not made.sent and made.owner.stops == 2


def test_no_connection_is_made_after_the_end(made: Made) -> None:
    made.sessions.stop()
    assert made.sessions.prepare(0, ps(1)) is not None and not made.numbers()


def test_a_shard_is_opened_with_an_address_or_told_of_a_newer_one(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would connect to the dead process of the first server for ever."""
    telling: list[threading.Thread] = []
    opened = made.owner.open

    def moved() -> None:
        made.sessions.on_message(ServerRestarted(0, 1, 0, ["h", "9", ""]))

    def open_slowly(engine: int, number: int, index: int, endpoints: list[Endpoint], *rest: Any) -> None:
        taken = list(endpoints)
        telling.extend(meanwhile(moved))
        opened(engine, number, index, taken, *rest)

    monkeypatch.setattr(made.owner, "open", open_slowly)
    made.sessions.on_message(Servers(0, 1, ["h", "1", "", "g", "2", ""]))
    plan = Plan.ps(4, 3, servers=(0, 2)).replace(plan_id=1)
    made.enter(plan)
    made.seed(plan)
    telling[0].join(60.0)
    assert [order for order in made.owner.orders if order != ("seed",)] == [("open", [1, 2]), ("replace", 0, 9)]


def test_the_last_word_on_a_rank_s_presence_is_the_last_that_servers_hear(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a rank comes back and falls silent again while the first server is told who was absent before."""
    said: list[str] = []
    telling: list[threading.Thread] = []

    def heard(present: bool) -> Callable[[], None]:
        return lambda: made.sessions.on_message(Presence(1, present))

    def member(engine: int, rank: int, what: str) -> None:
        if threading.current_thread() is threading.main_thread():
            telling.extend(meanwhile(heard(what == "absent")))
        said.append(what)

    made.sessions.on_message(Presence(1, False))
    plan = Plan.ps(4, 3, servers=(2, 0)).replace(plan_id=1)
    made.enter(plan)
    with monkeypatch.context() as patch:
        patch.setattr(made.owner, "member", member)
        made.seed(plan)
        for each in telling:
            each.join(60.0)
    assert (said[-1] == "absent") == (made.absent() == [1])


def test_an_optimizer_that_is_closed_meanwhile_keeps_no_word_from_the_others(made: Made) -> None:
    made.enter(ps(1))
    gone = dict(made.drivers)
    made.drivers.closing = made.drivers.clear
    made.sessions.on_message(Presence(1, False))
    made.drivers.closing = None
    made.drivers.update(gone)
    assert made.absent() == [1]


def test_the_newest_address_of_a_server_that_dies_twice_is_told_last(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each death has a thread of its own; the first may tell of its process after the second has told of the next."""
    made.enter(Plan.ps(4, 3, servers=(2,)).replace(plan_id=1))
    made.sent.clear()

    def recover(deadline_s: float) -> Endpoint:
        made.owner.endpoint = Endpoint("h", 4)  # By the time this returns, the process at port 3 has died too.
        return Endpoint("h", 3)

    monkeypatch.setattr(made.owner, "recover", recover)
    made.owner.die()
    assert [message.address[1] for message in made.sent] == ["3", "4"]
