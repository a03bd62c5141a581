"""Connections to servers: which are closed, and that the one in use never is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import star_hvd.runtime.server_sessions as module
from scheduler.plan.plan import Plan
from star_hvd.channel.messages.switch import Presence, ServerRestarted, Servers
from star_hvd.config import Config
from star_hvd.engine.records import Snapshot
from star_hvd.errors import ChannelError
from star_hvd.ps.common.auth import Endpoint
from star_hvd.ps.owner.server_process import ServerProcess, _Opened
from star_hvd.ps.server.server import Server
from star_hvd.runtime.server_sessions import ServerSessions


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


class House:
    """A house whose plans are prepared without any server."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "Client", Connection)
        monkeypatch.setattr(module, "Layout", SimpleNamespace(build=lambda *unused, **also: None))
        monkeypatch.setattr(module, "OptimizerSpec", SimpleNamespace(of=lambda *unused: None))
        applier = SimpleNamespace(buckets=[], optimizer=SimpleNamespace(param_groups=[]), base=None, hyper=None)
        self.engine = SimpleNamespace(plan=Plan.sync(4), applier=applier)
        drivers: Any = {0: SimpleNamespace(engine=self.engine)}
        key: Any = None
        self.house = ServerSessions(2, Config(), key, "h", lambda *unused, **also: None, drivers)
        monkeypatch.setattr(self.house, "_await_endpoints", lambda client, engine, plan: None)
        self.shards: list[int] = []
        monkeypatch.setattr(self.house.server, "close", lambda engine, number: self.shards.append(number))

    def prepare(self, plan: Plan) -> None:
        assert self.house.prepare(0, plan) is None

    def enter(self, plan: Plan) -> Any:
        """Prepare a plan and bring it into force."""
        if plan.family in ("ps", "grouped"):
            self.prepare(plan)
            self.engine.plan = plan
            self.house.begun(0, plan)
            return self.house.client(0, plan)
        self.engine.plan = plan
        return None

    def numbers(self) -> list[int]:
        return self.house.open_sessions(0)


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch) -> House:
    return House(monkeypatch)


def ps(epoch: int, x: int = 3) -> Plan:
    return Plan.ps(4, x, servers=(0,)).replace(plan_id=epoch)


def grouped(epoch: int) -> Plan:
    return Plan.grouped(4, [(0, 1), (2, 3)]).replace(plan_id=epoch, servers=(0,))


def test_abandoned_plans_do_not_push_out_the_connection_in_use(house: House) -> None:
    used = house.enter(ps(10))
    house.prepare(grouped(11))
    house.prepare(grouped(12))
    assert house.enter(ps(13, x=2)) is used, "the same servers under another rule"
    house.prepare(grouped(14))
    assert not used.closed and house.house.client(0, house.engine.plan) is used
    assert house.numbers() == [10, 14] and house.shards == [11, 12]


def test_plans_abandoned_in_sync_do_not_pile_up(house: House) -> None:
    for epoch in range(1, 12, 2):
        house.prepare(ps(epoch))
        house.enter(Plan.sync(4).replace(plan_id=epoch + 1))
    assert len(house.numbers()) <= 2


def test_the_last_state_of_the_mode_before_stays_to_be_had(house: House) -> None:
    clients = []
    for epoch in range(1, 9, 2):
        clients.append(house.enter(ps(epoch)))
        house.enter(Plan.sync(4).replace(plan_id=epoch + 1))
        assert not clients[-1].closed
    assert [each.closed for each in clients] == [True, False, False, False]
    last = house.enter(grouped(9))
    house.prepare(ps(10))
    assert not clients[-1].closed and not last.closed
    assert [each.closed for each in clients[:-1]] == [True, True, True]


def test_a_mode_that_passed_by_while_the_training_thread_computed_keeps_its_last_state(house: House) -> None:
    house.prepare(ps(1))
    house.engine.plan = ps(1)
    house.house.begun(0, ps(1))
    house.engine.plan = Plan.sync(4).replace(plan_id=2)  # Nobody asked for the connection.
    house.prepare(grouped(3))
    assert not house.house.client(0, ps(1)).closed and house.shards == []


def test_a_plan_of_an_optimizer_that_was_closed_meanwhile_is_refused(house: House) -> None:
    assert house.house.prepare(7, ps(1)) == "optimizer 7 has ended"
    assert house.numbers() == []


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


def test_which_session_serves_a_plan_is_read_and_written_under_the_lock(house: House) -> None:
    """Plans are prepared in one thread, come into force in another, and are used in a third."""
    serves = house.house._serves = Guarded(house.house._changed)
    house.enter(ps(1))
    house.enter(ps(2, x=2))
    assert house.house.same_session(0, ps(1), ps(2, x=2)) and not house.house.same_session(0, ps(1), grouped(3))
    house.house.forget(0)
    assert serves.uses >= 6


def test_servers_are_told_who_was_absent_before_they_were_there(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[str, Any]] = []
    process = house.house.server
    for name in ("open", "seed", "member"):
        monkeypatch.setattr(process, name, lambda *given, name=name: said.append((name, given)))
    monkeypatch.setattr(house.house, "_announce", lambda engine, plan: None)
    house.house.on_message(Presence(1, False))
    house.house.on_message(Presence(3, False))
    house.house.on_message(Presence(3, True))
    plan = Plan.ps(4, 3, servers=(2, 0)).replace(plan_id=1)
    house.enter(plan)
    house.house.seed(0, plan, Snapshot(0, [], []))
    assert [name for name, _ in said] == ["open", "seed", "member"]
    assert said[-1][1] == (0, 1, "absent")


def test_a_server_that_is_not_open_yet_is_told_of_presence_later() -> None:
    server: Any = SimpleNamespace(_jobs={})
    Server._do(server, {"do": "member", "engine": 0, "rank": 1, "what": "absent"})
    with pytest.raises(ChannelError, match="not open"):
        Server._do(server, {"do": "cut", "engine": 0, "plan_id": 3})


def test_nothing_is_left_of_an_optimizer_that_is_closed(house: House) -> None:
    client = house.enter(ps(1))
    house.house.on_message(Servers(0, 2, ["h", "1", ""]))  # Of a plan that is given up before it is looked at.
    assert house.house.known_plans(0) == {1, 2}
    house.house.forget(0)
    assert client.closed and house.shards == [1] and not house.numbers()
    assert house.house.known_plans(0) == set()
    house.house.forget(0)


def test_a_moved_server_is_told_of_in_its_own_session_only() -> None:
    """In another session, or of another optimizer, the same number may be another rank's server."""
    process = ServerProcess(0, None, "h")  # type: ignore[arg-type]
    sent: list[Any] = []
    process._pipe = SimpleNamespace(send=lambda message, descriptor=None: sent.append(message))  # type: ignore[assignment]
    for key in ((0, 3), (0, 7), (1, 3)):
        message = {"engine": key[0], "session": key[1], "endpoints": [["a", 1, b""], ["b", 2, b""]]}
        process._opened[key] = _Opened(message, None, None)  # type: ignore[arg-type]
    process.replace(0, 3, 1, Endpoint("c", 3, b""))
    ends = {key: opened.message["endpoints"][1][0] for key, opened in process._opened.items()}
    assert ends == {(0, 3): "c", (0, 7): "b", (1, 3): "b"}
    assert [(message["engine"], message["session"]) for message in sent] == [(0, 3)]


def test_a_restart_while_a_plan_is_prepared_is_heard_of(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the connection is made it leads to the new process at once; after that it is made anew."""
    tidy = house.house._tidy

    def restart(port: int) -> None:
        house.house.on_message(ServerRestarted(0, 1, 0, ["h", str(port), ""]))

    def tidy_slowly(optimizer_id: int, active: Plan) -> None:
        tidy(optimizer_id, active)
        restart(3)

    monkeypatch.setattr(house.house, "_tidy", tidy_slowly)
    house.house.on_message(Servers(0, 1, ["h", "1", ""]))
    restart(2)
    client = house.enter(ps(1))
    assert client.reached == [Endpoint("h", 3)] and not client.replaced
    restart(4)
    assert client.replaced == [(0, Endpoint("h", 4))]
