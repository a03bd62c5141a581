"""The channel as a whole: agents, coordinator and tensor server over CURVE on loopback, with unauthenticated peers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zmq

from scheduler.records import Plan, StepTimes
from star_hvd.channel.agent import Agent
from star_hvd.channel.keys import Keyring, Peer
from star_hvd.channel.link import Router
from star_hvd.channel.messages import base as m
from star_hvd.channel.messages.switch import Presence
from star_hvd.channel.reliable import CONTROL
from star_hvd.channel.state_transfer import TensorServer, fetch
from star_hvd.config import Config
from star_hvd.coordinator import coordinator as coordinator_module
from star_hvd.coordinator.coordinator import Coordinator
from star_hvd.engine.records import Snapshot
from star_hvd.errors import DeadlineError

LIMIT_S = 120.0
CONFIG = Config(heartbeat_s=0.05, lost_after_s=30.0, decide_interval_s=0.05)


def within(condition: Callable[[], bool], limit_s: float = LIMIT_S) -> bool:
    end_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() >= end_s:
            return False
        time.sleep(0.005)
    return True


class Ranks:
    """The coordinator on rank 0, and one ring, one agent and one list of what came on every rank."""

    def __init__(self, world_size: int, config: Config = CONFIG) -> None:
        self.rings = [Keyring() for _ in range(world_size)]
        control, self.control_port = self.rings[0].server("127.0.0.1")
        tensors, self.tensor_port = self.rings[0].server("127.0.0.1")
        self.peers = [Peer(ring.public_key, "127.0.0.1", 0, self.tensor_port) for ring in self.rings]
        for ring in self.rings:
            ring.admit(self.peers)
        self.snapshot: Snapshot | None = Snapshot(3, [torch.arange(20_000.0)], [{"n": 1}])
        self.fetched: list[int] = []
        self.server = TensorServer(tensors, self._found, 1024)
        self.coordinator = Coordinator(control, world_size, config)
        self.came: list[list[m.Message]] = [[] for _ in range(world_size)]
        self.agents = [self.agent(rank, config) for rank in range(world_size)]
        self.server.start()
        self.coordinator.start()
        for agent in self.agents:
            agent.start()

    def _found(self, engine: int, state_too: bool, least: int) -> Snapshot | None:
        self.fetched.append(engine)
        return self.snapshot

    def port_for(self, rank: int) -> int:
        """The port at which a rank reaches the coordinator."""
        return self.control_port

    def agent(self, rank: int, config: Config, **settings: Any) -> Agent:
        ring, port = self.rings[rank], self.port_for(rank)
        identity = str(rank).encode()
        connect = lambda: ring.client(0, identity, port=port)  # noqa: E731
        return Agent(rank, connect, self.came[rank].append, config.heartbeat_s, **settings)

    def got(self, rank: int, kind: type[m.Message]) -> list[Any]:
        return [message for message in self.came[rank] if isinstance(message, kind)]

    def all_got(self, kind: type[m.Message]) -> bool:
        return within(lambda: all(self.got(rank, kind) for rank in range(len(self.rings))))

    def register(self, plan: Plan) -> None:
        first = Plan.sync(plan.world_size).to_dict()
        for agent in self.agents:
            agent.send(m.Register(0, first, plan.to_dict()))

    def close(self) -> None:
        for agent in self.agents:
            agent.stop()
        self.coordinator.stop()
        self.server.stop()
        for ring in self.rings:
            ring.close()


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    job = Ranks(3)
    yield job
    job.close()


def test_a_job_from_its_plan_to_its_end(ranks: Ranks) -> None:
    ranks.register(Plan.partial(3, 2))
    assert ranks.all_got(m.PlanMessage)
    assert all(ranks.got(rank, m.PlanMessage)[0].plan["quorum"] == 2 for rank in range(3))
    for step in range(3):
        for agent in ranks.agents[:2]:  # Rank 2 never comes: the steps must be closed without it.
            agent.send(m.Arrive(0, step, 1, StepTimes(0.02, 0.0, 0.02), 0.0))
        assert within(lambda step=step: any(order.step == step for order in ranks.got(2, m.CloseStep)))
    assert ranks.all_got(m.CloseStep)
    for agent in ranks.agents:
        agent.send(m.Finished(agent.rank))
    assert ranks.all_got(m.Bye) and ranks.got(0, m.Bye) == [m.Bye()]
    for came in ranks.came:
        rounds = [message.step for message in came if isinstance(message, m.CloseStep)]
        assert rounds == [0, 1, 2], "an order is given once, to everybody, in order"
    assert ranks.coordinator.malformed == 0 and all(agent.malformed == 0 for agent in ranks.agents)
    assert ranks.rings[0].denied == 0, "nobody of the job was turned away"


def test_a_pause_of_the_coordinators_process_is_not_counted(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it reads first behind it: messages that came meanwhile, or none."""
    reads, jump_s = [0], [0.0]

    def monotonic() -> float:
        reads[0] += 1
        return time.monotonic() + jump_s[0]

    monkeypatch.setattr(coordinator_module, "time", SimpleNamespace(monotonic=monotonic))
    ranks.register(Plan.ps(3, 1, servers=(0,)))
    assert ranks.all_got(m.PlanMessage)
    for _ in range(3):
        jump_s[0] += 1000.0
        seen = reads[0]
        assert within(lambda seen=seen: reads[0] > seen + 20)  # type: ignore[misc]
    with ranks.coordinator.job_state() as job:
        assert max(job.silent_for_s(monotonic())) < 100.0 and not job.lost
    assert not any(ranks.got(rank, m.Abandon) for rank in range(3))


def test_an_answer_reaches_only_the_rank_that_asked(ranks: Ranks) -> None:
    ranks.agents[1].send(m.RequestBatch(0, 0, 10, 4, False))
    assert within(lambda: bool(ranks.got(1, m.Grant)))
    assert ranks.got(1, m.Grant) == [m.Grant(0, 0, 0, 4)]
    assert ranks.got(0, m.Grant) == ranks.got(2, m.Grant) == []


def test_signs_of_life_go_both_ways(ranks: Ranks) -> None:
    assert ranks.all_got(m.Heartbeat)

    def silent_for_s() -> list[float]:
        with ranks.coordinator.job_state() as job:
            assert not job.lost
            return [*job.silent_for_s(time.monotonic())]

    def moments() -> list[float]:
        """When each rank was last heard by the coordinator, and the coordinator by each rank."""
        now_s = time.monotonic()
        return [now_s - silent_s for silent_s in silent_for_s()] + [agent.last_heard_s for agent in ranks.agents]

    for _ in range(3):  # Nothing else is said here: what is heard anew are signs of life.
        before = moments()
        assert within(lambda before=before: all(b > a + 0.01 for a, b in zip(before, moments(), strict=True)))  # type: ignore[misc]


def test_a_message_that_is_not_urgent_goes_soon_and_in_order(ranks: Ranks) -> None:
    assert ranks.all_got(m.Heartbeat)
    for samples in (8, 8, 8):
        ranks.agents[1].send(m.RequestBatch(0, 0, samples, 2, False), urgent=False)
    assert within(lambda: len(ranks.got(1, m.Grant)) == 3)
    assert [grant.start for grant in ranks.got(1, m.Grant)] == [0, 2, 4]


def test_what_is_queued_is_sent_before_an_agent_ends(ranks: Ranks) -> None:
    assert ranks.all_got(m.Heartbeat)
    ranks.agents[2].send(m.Finished(2), urgent=False)
    ranks.agents[2].stop()
    ranks.agents[2].stop()  # A second time does nothing.

    def heard() -> bool:
        with ranks.coordinator.job_state() as job:
            return job.finished == {2}

    assert within(heard)


DAMAGED = [
    [b""],
    [b"\xc1"],
    [b"junk" * 1000],
    [m.encode(m.Hello(0))[:-1]],
    [m.encode(m.Bye())],
    [m.encode(m.Arrive(0, 0, 0, StepTimes(-1.0), 0.0))],
    [m.encode(m.Hello(1)), b"one frame too many"],
    [b"\xc0" * (m.MAX_BYTES + 1)],
]


def test_damaged_messages_are_counted_and_the_job_goes_on(ranks: Ranks) -> None:
    with ranks.coordinator.job_state() as job:
        engines = dict(job.optimizers)
    dealer = ranks.rings[1].client(0, b"0000001", port=ranks.control_port)  # Rank 1 by another name.
    for frames in DAMAGED:
        dealer.send_multipart(frames)
    assert within(lambda: ranks.coordinator.malformed == len(DAMAGED))
    with ranks.coordinator.job_state() as job:
        assert job.optimizers == engines
    nobody = ranks.rings[1].client(0, b"someone", port=ranks.control_port)
    nobody.send(m.encode(m.Hello(0)))
    beyond = ranks.rings[1].client(0, b"77", port=ranks.control_port)
    beyond.send(m.encode(m.Hello(0)))
    assert within(lambda: ranks.coordinator.malformed == len(DAMAGED) + 2)
    for socket in (dealer, nobody, beyond):
        socket.close(linger=0)
    ranks.register(Plan.partial(3, 2))
    assert ranks.all_got(m.PlanMessage)


def test_an_agent_drops_what_it_cannot_read_or_act_on(caplog: pytest.LogCaptureFixture) -> None:
    server, client = Keyring(), Keyring()
    router, port = server.server("127.0.0.1")
    peers = [Peer(server.public_key, "127.0.0.1", port, 0), Peer(client.public_key, "127.0.0.1", 0, 0)]
    server.admit(peers)
    client.admit(peers)
    came: list[m.Message] = []

    def handler(message: m.Message) -> None:
        if isinstance(message, m.Bye):
            raise ZeroDivisionError
        came.append(message)

    agent = Agent(1, lambda: client.client(0, b"1", port=port), handler, 60.0)
    agent.start()
    peer = Router(router, CONTROL, lambda name: name == b"1")
    heard: list[Any] = []
    try:
        assert within(lambda: heard.extend(peer.receive()) or bool(heard))  # type: ignore[func-returns-value]
        assert [heard[0][0].bytes, heard[0][1]] == [b"1", m.encode(m.Hello(1))], "an agent introduces itself"
        with caplog.at_level(logging.WARNING, "star_hvd"):
            for data in (b"", b"\xc1", m.encode(m.Bye()), m.encode(m.ReportImmediately(True))):
                peer.send(b"1", [data])
            assert within(lambda: came == [m.ReportImmediately(True)])
        assert agent.malformed == 2 and "the handler of a bye message failed" in caplog.text
    finally:
        agent.stop()
        router.close(linger=0)
        client.close()
        server.close()


def test_an_agent_that_was_never_started_can_be_stopped() -> None:
    def connect() -> zmq.Socket[Any]:
        raise AssertionError("nobody started it")

    Agent(0, connect, lambda message: None, 1.0).stop()


def test_a_stranger_with_a_key_of_its_own_fetches_nothing(ranks: Ranks) -> None:
    assert ranks.all_got(m.Heartbeat)
    stranger = Keyring()
    stranger.admit(ranks.peers)  # It has learned the server's public key and its address.
    before = ranks.rings[0].denied
    def fetches_nothing() -> bool:
        with pytest.raises(DeadlineError, match=r"rank 0 were not complete after \d"):
            fetch(stranger, 0, 0, 0.6)
        return ranks.rings[0].denied > before

    # On a busy machine a connection may end before it has reached the server: again, until one was turned away.
    assert within(fetches_nothing), "it was not counted"
    stranger.close()
    assert ranks.fetched == [] and ranks.server.malformed == 0
    assert_served(ranks)


def test_a_client_without_any_key_fetches_nothing(ranks: Ranks) -> None:
    assert ranks.all_got(m.Heartbeat)
    before = ranks.rings[0].denied
    context: zmq.Context[Any] = zmq.Context()
    plain = context.socket(zmq.DEALER)
    plain.connect(f"tcp://127.0.0.1:{ranks.tensor_port}")
    plain.send(bytes(4))
    assert not plain.poll(500), "it got an answer"
    assert within(lambda: ranks.rings[0].denied > before), "it was not counted"  # Its connection may take longer.
    assert not plain.poll(0), "it got an answer"
    plain.close(linger=0)
    context.term()
    assert ranks.fetched == [] and ranks.server.malformed == 0
    assert_served(ranks)


def test_a_stranger_cannot_speak_for_a_rank(ranks: Ranks) -> None:
    assert ranks.all_got(m.Heartbeat)
    stranger = Keyring()
    stranger.admit(ranks.peers)
    before = ranks.rings[0].denied
    dealer = stranger.client(0, b"2", port=ranks.control_port)
    dealer.send(m.encode(m.Finished(2)))
    assert within(lambda: ranks.rings[0].denied > before), "it was not counted"
    dealer.close(linger=0)
    stranger.close()
    with ranks.coordinator.job_state() as job:
        assert not job.finished
    assert ranks.coordinator.malformed == 0
    ranks.register(Plan.partial(3, 2))
    assert ranks.all_got(m.PlanMessage)


def assert_served(ranks: Ranks) -> None:
    """Ranks of the job still get their parameters, all at once and in many chunks."""
    assert ranks.snapshot is not None
    got: list[Snapshot | None] = []
    threads = [
        threading.Thread(target=lambda ring=ring: got.append(fetch(ring, 0, 0, LIMIT_S)))  # type: ignore[misc]
        for ring in ranks.rings[1:]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 2
    for snapshot in got:
        assert snapshot is not None and snapshot.step == 3 and snapshot.state == [{"n": 1}]
        assert torch.equal(snapshot.params[0], ranks.snapshot.params[0])


def test_the_coordinator_closes_a_lone_gradient_at_the_deadline() -> None:
    """The deadline comes due without any message: the coordinator has to wake by itself."""
    job = Ranks(3, Config(heartbeat_s=0.05, lost_after_s=30.0, quorum_deadline_s=0.3))
    try:
        job.register(Plan.partial(3, 2))
        assert job.all_got(m.PlanMessage)
        began_s = time.monotonic()
        job.agents[1].send(m.Arrive(0, 0, 1, StepTimes(0.01, 0.0, 0.01), 0.0))
        assert job.all_got(m.CloseStep)
        assert time.monotonic() - began_s >= 0.3
    finally:
        job.close()


def test_a_silent_rank_is_named_and_the_others_look_whether_it_has_left(caplog: pytest.LogCaptureFixture) -> None:
    job = Ranks(2, Config(heartbeat_s=0.05, lost_after_s=0.5, absent_after_s=0.5))
    try:
        assert job.all_got(m.Heartbeat)
        with caplog.at_level(logging.WARNING, "star_hvd"):
            job.agents[1].stop()
            job.agents[0].send(m.Finished(0))
            assert within(lambda: job.got(0, Presence) == [Presence(1, False)])
            assert within(lambda: "rank 1 has sent no message" in caplog.text)
        assert not job.got(0, m.Bye) and not job.agents[0].coordinator_ended
        job.coordinator.stop()
        assert within(lambda: job.agents[0].coordinator_ended)
    finally:
        job.close()
