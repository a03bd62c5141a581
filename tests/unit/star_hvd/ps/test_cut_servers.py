"""Parameter servers, late gradients and fetches through proxies that break their connections."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import zmq

from scheduler.plan.plan import Plan
from scheduler.transmission.decision import PACE_DOWN, PACE_UP, Decision
from star_hvd.channel import options
from star_hvd.channel.keys import Keyring, Peer
from star_hvd.channel.late_push import PUSH_HEADER, LatePushes, ParentLink, take_weights
from star_hvd.channel.late_sender import LateSender
from star_hvd.channel.state_transfer import TensorServer, fetch
from star_hvd.engine.records import Snapshot
from star_hvd.ps.common.auth import Endpoint, connect
from star_hvd.ps.common.identities import worker_identity
from star_hvd.ps.worker.exchange import Reply
from tests.support.effort import cases
from tests.support.proxy import TO_CLIENT, TO_SERVER, Proxy
from tests.support.ps_cluster import DEADLINE_S, Cluster, plain_steps, run_all
from tests.unit.star_hvd.channel.test_channel import within
from tests.unit.star_hvd.ps.test_cluster import assert_equal_state

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BLOCKED_S = 60.0  # No answer takes so long, whatever the machine does.
RECOVERY_S = 60.0  # Two seconds are promised; a test machine may be busy, or stand still for a while.


class CutCluster(Cluster):
    """Workers reach the servers, and shards the primary, through proxies.

    Attributes:
        proxies: By server, what the workers go through.
        links: By server, what the other shards go through.
    """

    def __init__(self, plan: Plan, **settings: Any) -> None:
        self.proxies: list[Proxy] = []
        self.links: list[Proxy] = []
        super().__init__(plan, **settings)

    def open(self, session: int = 0) -> None:
        direct = self.endpoints
        for endpoint in direct[len(self.links) :]:
            self.links.append(Proxy(endpoint.port))
            self.proxies.append(Proxy(endpoint.port))
        self.endpoints = through(direct, self.links)
        super().open(session)
        self.endpoints = direct

    def make_clients(self, session: int = 0) -> None:
        direct, self.endpoints = self.endpoints, through(self.endpoints, self.proxies)
        super().make_clients(session)
        self.endpoints = direct

    def close(self) -> None:
        super().close()
        for proxy in self.proxies + self.links:
            proxy.close()


def through(endpoints: list[Endpoint], proxies: list[Proxy]) -> list[Endpoint]:
    return [Endpoint("127.0.0.1", p.port, e.public_key) for e, p in zip(endpoints, proxies, strict=True)]


@contextmanager
def cut_cluster(plan: Plan, **settings: Any) -> Iterator[CutCluster]:
    made = CutCluster(plan, **settings)
    try:
        made.start()
        yield made
    finally:
        made.close()


def one_step(made: Cluster, rank: int, step: int, version: int) -> Reply:
    """A push and its answer; the gradient's memory is used again at once, as training does."""
    row = made.hyper.read(made.optimizer.param_groups)
    flats = made.gradients(rank, step)
    client = made.clients[rank]
    client.push(step=step, version=version, flats=flats, weight=1.0, own_steps=step, row=row, loss=0.0, keep=True)
    reply = client.wait(DEADLINE_S)
    for flat in flats:
        flat.fill_(float("nan"))
    return reply


def all_step(made: Cluster, ranks: int, step: int) -> float:
    """All ranks make a step; how long it took."""
    began_s = time.monotonic()
    replies = run_all(*(lambda r=r: one_step(made, r, step, step) for r in range(ranks)))
    assert [(reply.kind, reply.version, reply.applied) for reply in replies] == [("params", step + 1, True)] * ranks
    return time.monotonic() - began_s


WHERE: dict[str, Callable[[CutCluster], Proxy]] = {
    "primary": lambda made: made.proxies[0],
    "shard": lambda made: made.proxies[1],
    "shard to primary": lambda made: made.links[0],
}


def cut_everywhere(made: CutCluster, proxy: Proxy, way: int, inside: bool, last: int, turn: int = 0) -> None:
    """Steps of two ranks with a reset at each frame from the first to the last, in turn.

    With the usual effort it is every third frame, from the first, second or third on, by `turn`; with more, every one.
    """
    step, longest_s, stride = 0, 0.0, max(1, 3 // cases(1))
    for frames in range((0 if inside else 1) + turn % stride, last, stride):
        cuts = proxy.cuts
        proxy.arm(way, frames, inside=inside)
        while proxy.cuts == cuts:
            longest_s = max(longest_s, all_step(made, 2, step))
            step += 1
    for _ in range(2):
        all_step(made, 2, step)
        step += 1
    plain_steps(made, step, 2)
    assert_equal_state(made)
    print(f"{step} steps, {proxy.cuts} resets, longest step {longest_s:.2f} s")
    assert longest_s < RECOVERY_S
    assert all(client.malformed == 0 for client in made.clients)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("way", [TO_SERVER, TO_CLIENT], ids=["to the server", "to the client"])
@pytest.mark.parametrize("inside", [False, True], ids=["between frames", "inside a frame"])
def test_a_reset_at_every_frame_of_a_step_changes_nothing(where: str, way: int, inside: bool) -> None:
    with cut_cluster(Plan.ps(2, 2), servers=2) as made:
        turn = list(WHERE).index(where) + way + 2 * inside
        cut_everywhere(made, WHERE[where](made), way, inside, 22, turn)
        assert all(made.server_of(index).malformed == 0 for index in range(2))


def test_server_processes_are_reached_again() -> None:
    with cut_cluster(Plan.ps(2, 2), servers=2, processes=True) as made:
        cut_everywhere(made, made.proxies[0], TO_SERVER, True, 14)
        assert made.deaths == 0


@pytest.mark.parametrize("ahead", [False, True], ids=["whole pushes", "buckets ahead"])
@pytest.mark.parametrize("x", [1, 2])
def test_resets_at_any_moment_lose_and_double_nothing(x: int, ahead: bool) -> None:
    """Every push is applied exactly once, in any mode: a gradient of ones moves SGD by its rate."""
    plain = lambda params: torch.optim.SGD(params, lr=1.0)  # noqa: E731
    steps, stop = 60, threading.Event()
    with cut_cluster(Plan.ps(2, x, damping="none"), servers=2, optimizer=plain) as made:

        replies: list[int] = []

        def cut() -> None:
            """Cut ever less often until a reply gets through: on a busy machine none would between two cuts."""
            interval_s, seen = 0.1, 0
            while not stop.wait(interval_s):
                interval_s, seen = 0.1 if len(replies) > seen else 2.0 * interval_s, len(replies)
                for proxy in made.proxies + made.links:
                    proxy.cut()

        def work(rank: int) -> None:
            version = 0
            for step in range(steps):
                flats = [torch.ones(b.numel + 1) for b in made.buckets]
                for index, flat in enumerate(flats if ahead else ()):
                    made.clients[rank].give(step, index, flat)
                    time.sleep(0.005)
                made.clients[rank].push(step=step, version=version, flats=flats, weight=1.0, keep=True)
                reply = made.clients[rank].wait(DEADLINE_S)
                assert reply.kind == "params" and reply.applied
                replies.append(step)
                version = reply.version
                for flat in flats:
                    flat.fill_(float("nan"))
                if step == steps // 2:  # Where the cutter was held up, the other half waits for it.
                    assert within(lambda: sum(proxy.cuts for proxy in made.proxies) > 5)

        before = [param.detach().clone() for param in made.ordered]
        cutter = threading.Thread(target=cut)
        cutter.start()
        try:
            run_all(*(lambda r=r: work(r) for r in range(2)))
            found = made.clients[0].state(DEADLINE_S)
        finally:
            stop.set()
            cutter.join()
        for old, new in zip(before, found.params, strict=True):  # A gradient counts for half, whatever x is.
            torch.testing.assert_close(old - new, torch.full_like(old, steps), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("what", ["push", "read"])
def test_what_a_server_sends_to_a_connection_that_was_given_up_is_asked_for_again(what: str) -> None:
    """A worker told twice of a restart connects anew to a process that knows it already, and that answers meanwhile."""
    with cut_cluster(Plan.ps(2, 2), servers=2) as made:
        client, other = made.clients
        client.pull(DEADLINE_S)
        shard = made.server_of(1).jobs[0, 0].shard
        if what == "push":
            client.push(step=0, version=0, flats=made.gradients(0, 0), weight=1.0)
            assert within(lambda: shard.known_pushes.get((0, 0), 0) == len(shard.stores), RECOVERY_S)
        way = Proxy(made.endpoints[1].port)
        way.refuse()
        client.replace(1, Endpoint("127.0.0.1", way.port, made.endpoints[1].public_key))
        time.sleep(0.5)  # It has told server 0.
        reader = threading.Thread(target=lambda: client.pull(DEADLINE_S), daemon=True)
        if what == "push":
            other.push(step=0, version=0, flats=made.gradients(1, 0), weight=1.0)
            assert other.wait(RECOVERY_S).version == 1
        else:
            reader.start()
            time.sleep(0.5)
        way.refuse(False)
        if what == "push":
            assert client.wait(RECOVERY_S).version == 1
        else:
            reader.join(RECOVERY_S)
            assert not reader.is_alive(), "it waits for what was sent to the former connection"
        way.close()


UNEVEN = {
    "ssp": Plan.ps(3, 1, rule="ssp", slack=1),
    "two of three": Plan.ps(3, 2),
    "all": Plan.ps(3, 3),
}


def trouble(made: CutCluster, chosen: random.Random) -> None:
    """For a tenth of a second: resets, restarts that are told of twice, and ranks that are silent and heard again.

    No more than that, so that nothing of it helps a rank that it has blocked.
    """
    silent = [rank for rank in range(3) if chosen.random() < 0.7]
    for rank in silent:
        made.servers[0].member(0, rank, "absent")
    acts: list[Callable[[], None]] = [lambda r=r: made.servers[0].member(0, r, "present") for r in silent]  # type: ignore[misc]
    for _ in range(chosen.randrange(3)):
        acts.append(chosen.choice(made.proxies + made.links).cut)
    for rank in range(3):
        index = chosen.randrange(2)
        acts.append(lambda r=rank, i=index: made.clients[r].replace(i, through(made.endpoints, made.proxies)[i]))  # type: ignore[misc]
    chosen.shuffle(acts)
    for act in acts:
        time.sleep(chosen.uniform(0.0, 0.03))
        act()


@pytest.mark.parametrize("name", UNEVEN)
def test_nothing_that_is_told_late_or_twice_blocks_a_rank(name: str) -> None:
    """Epochs in which ranks have more or less to do, as under `shard`; those that are done wait for the others."""
    epochs = cases(24)
    with cut_cluster(UNEVEN[name], servers=2) as made:
        end = threading.Barrier(3)

        def work(rank: int) -> None:
            client, chosen, step, version = made.clients[rank], random.Random(rank), 0, 0
            for _ in range(epochs):
                troubled = threading.Thread(target=trouble, args=(made, chosen))
                if rank == 0:
                    troubled.start()
                for _ in range(chosen.randrange(12)):
                    time.sleep(chosen.uniform(0.0, 0.02))
                    client.push(step=step, version=version, flats=made.gradients(rank, step), weight=1.0)
                    version, step = client.wait(BLOCKED_S).version, step + 1
                client.absent(True)
                client.pull(BLOCKED_S, empty=True)
                if rank == 0:
                    troubled.join(BLOCKED_S)
                end.wait(2.0 * BLOCKED_S)
                client.absent(False)

        run_all(*(lambda r=r: work(r) for r in range(3)))
        assert all(made.server_of(index).malformed == 0 for index in range(2))


def test_reads_presence_and_the_end_of_a_mode_survive() -> None:
    with cut_cluster(Plan.ps(2, 2), servers=2) as made:
        all_step(made, 2, 0)
        for frames in range(5):
            for way in (TO_SERVER, TO_CLIENT):
                for proxy in made.proxies:
                    proxy.arm(way, frames, inside=True)
                pulled, state = made.clients[0].pull(DEADLINE_S), made.clients[1].state(DEADLINE_S)
                assert pulled.version == state.step == frames + 1
                known = made.clients[1].pull(DEADLINE_S, known=pulled.version)
                assert (known.kind, known.version) == ("known", pulled.version)
                for proxy in made.proxies:
                    proxy.disarm()
            made.proxies[0].arm(TO_SERVER, 0, inside=True)
            made.clients[1].absent(True)
            assert one_step(made, 0, frames + 1, frames + 1).version == frames + 2, "the other is absent"
            made.clients[1].absent(False)
            assert made.clients[1].pull(DEADLINE_S, empty=True).version == frames + 2
        made.proxies[0].arm(TO_CLIENT, 0, inside=True)
        made.clients[0].push(step=10, version=6, flats=made.gradients(0, 10), weight=1.0)
        made.servers[0].cut(0, 1)
        assert made.clients[0].wait(DEADLINE_S).kind == "moved"
        assert made.clients[1].state(DEADLINE_S).step == made.clients[0].state(DEADLINE_S).step


def test_a_half_open_connection_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "HEARTBEAT_INTERVAL_MS", 200)
    monkeypatch.setattr(options, "HEARTBEAT_TIMEOUT_MS", 1500)
    with cut_cluster(Plan.ps(2, 2), servers=2) as made:
        all_step(made, 2, 0)
        for step, proxy in enumerate([*made.proxies, made.links[0]], start=1):
            proxy.stall()
            all_step(made, 2, step)
        plain_steps(made, 4, 2)
        assert_equal_state(made)


def test_a_former_connection_that_arrives_late_does_not_cut_a_worker_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server takes it in after the present one, which then gets nothing: its heartbeats are still answered."""
    monkeypatch.setattr(options, "HEARTBEAT_INTERVAL_MS", 200)
    monkeypatch.setattr(options, "HEARTBEAT_TIMEOUT_MS", 1500)
    replies: list[Reply] = []
    context: zmq.Context[Any] = zmq.Context()
    with cut_cluster(Plan.ps(2, 2), servers=2) as made:
        all_step(made, 2, 0)
        waiting = threading.Thread(target=lambda: replies.append(one_step(made, 0, 1, 1)), daemon=True)
        waiting.start()
        time.sleep(0.5)  # All that it has sent is acknowledged.
        late = connect(context, made.key, made.endpoints[1], worker_identity(0, made.session, 0))
        connected = late.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        assert connected.poll(BLOCKED_S * 1e3)
        time.sleep(0.2)
        late.disable_monitor()
        late.close(linger=0)
        time.sleep(0.2)
        assert one_step(made, 1, 1, 1).version == 2
        waiting.join(BLOCKED_S)
        assert [reply.version for reply in replies] == [2]
    context.destroy(linger=0)


def test_a_server_that_stands_still_is_replaced_and_nothing_is_lost() -> None:
    """Its owner kills it and starts another one, which takes the mirror over; the workers reach that one."""
    with cut_cluster(Plan.ps(2, 2), servers=2, processes=True) as made:
        all_step(made, 2, 0)
        for step, index in ((1, 0), (2, 1)):
            pid = made.servers[index].pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)  # For good: only its owner can end this.
            all_step(made, 2, step)
            made.settled()
            assert made.deaths == step and made.servers[index].pid != pid
        plain_steps(made, 3, 2)
        assert_equal_state(made)


def test_a_server_needs_no_more_memory_for_what_is_on_its_way() -> None:
    """Asynchronous workers that answer at once: the mirror's places are taken again as soon as they have arrived."""
    with cut_cluster(Plan.ps(2, 1), servers=1) as made:
        one_step(made, 0, 0, 0)
        one_step(made, 1, 0, 0)
        job = made.server_of(0).jobs[0, 0]
        assert job.mirror is not None
        sizes = []
        for block in range(6):
            for step in range(1, 21):
                run_all(*(lambda r=r: one_step(made, r, 20 * block + step, 0) for r in range(2)))  # noqa: B023
            sizes.append(job.mirror.most_places)
        assert max(sizes) <= 4, f"places per chunk: {sizes}"  # 240 updates.


# ---- late gradients and fetches ---------------------------------------------------------------------------------


class Parent:
    """A rank that takes late gradients and serves its parameters, behind a proxy."""

    def __init__(self) -> None:
        self.server_ring, self.client_ring = Keyring(), Keyring()
        router, port = self.server_ring.server("127.0.0.1")
        self.proxy = Proxy(port)
        peers = [
            Peer(self.server_ring.public_key, "127.0.0.1", 0, self.proxy.port),
            Peer(self.client_ring.public_key, "127.0.0.1", 0, 0),
        ]
        self.server_ring.admit(peers)
        self.client_ring.admit(peers)
        self.taken: list[tuple[int, int, int, bytes]] = []
        self.snapshot = Snapshot(3, [torch.arange(3000.0)], [{"n": 1}])
        self.parts: list[tuple[int, int, int]] = []  # Attempt, first byte, and the first behind it.
        self._pushes = LatePushes(self._accept)
        self.server = TensorServer(router, lambda engine, state_too, least: self.snapshot, 1024, self._take)
        self.server.start()

    def _take(self, frames: list[bytes]) -> bytes | None:
        *_, attempt, _, offset, _ = PUSH_HEADER.unpack(frames[0])
        self.parts.append((attempt, offset, offset + len(frames[1])))
        return self._pushes.take(frames)

    def _accept(self, optimizer_id: int, rank: int, version: int, body: bytearray) -> int:
        self.taken.append((optimizer_id, rank, version, bytes(body)))
        return version + 1

    def close(self) -> None:
        self.server.stop()
        self.client_ring.close()
        self.server_ring.close()
        self.proxy.close()


@pytest.fixture
def parent() -> Iterator[Parent]:
    made = Parent()
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("way", [TO_SERVER, TO_CLIENT], ids=["to the parent", "to the child"])
@pytest.mark.parametrize("inside", [False, True], ids=["between frames", "inside a frame"])
@pytest.mark.parametrize("link_bytes_per_s", [0.0, 100_000.0], ids=["at once", "paced"])
def test_a_late_gradient_is_taken_once_and_parameters_come(
    parent: Parent, way: int, inside: bool, link_bytes_per_s: float
) -> None:
    told = list[Decision]()
    link = ParentLink(
        parent.client_ring, 0, 1, 0, chunk_bytes=1024, pace_bytes_per_s=0.0, deadline_s=DEADLINE_S,
        link_bytes_per_s=link_bytes_per_s, note=told.append,
    )  # fmt: skip
    longest_s, version = 0.0, 0
    for frames in range(0 if inside else 1, 24, 2 if link_bytes_per_s else 1):
        cuts = parent.proxy.cuts
        parent.proxy.arm(way, frames, inside=inside)
        while parent.proxy.cuts == cuts:
            began_s = time.monotonic()
            gradient = torch.full((1000,), float(version))
            assert link.push([gradient], version) == version + 1
            assert parent.taken[-1] == (0, 1, version, gradient.numpy().tobytes())
            snapshot = link.state(0, state_too=False)
            assert snapshot is not None and torch.equal(snapshot.params[0], parent.snapshot.params[0])
            longest_s = max(longest_s, time.monotonic() - began_s)
            version += 1
    assert [taken[2] for taken in parent.taken] == list(range(version)), "each once, in order"
    assert parent.server.malformed == 0
    print(f"{version} pushes, {parent.proxy.cuts} resets, longest {longest_s:.2f} s")
    assert longest_s < RECOVERY_S
    if link_bytes_per_s:
        assert PACE_UP in {one.what for one in told} <= {PACE_UP, PACE_DOWN}
    link.close()


@pytest.mark.parametrize("way", [TO_SERVER, TO_CLIENT], ids=["to the parent", "to the child"])
def test_sums_of_late_gradients_are_taken_once(parent: Parent, way: int) -> None:
    """A gradient of one place each, through connections that break: none is missing and none is there twice."""
    link = ParentLink(parent.client_ring, 0, 1, 0, chunk_bytes=256, pace_bytes_per_s=0.0, deadline_s=DEADLINE_S)
    sender = LateSender(link, "star-late-1", lambda contained: None)
    count = 200
    for number in range(count):
        if number % 20 == 0:
            parent.proxy.arm(way, number // 20, inside=number % 40 == 0)
        gradient = torch.zeros(count + 1)
        gradient[number] = gradient[-1] = 1.0
        sender.add([gradient], number, [1.0])
        gradient.fill_(float("nan"))
        time.sleep(0.002)
    sender.flush(DEADLINE_S)
    sent, _ = sender.take_results()
    assert sender.close(DEADLINE_S) is None and not sender.closes_link
    link.close()
    taken = [bytearray(body) for *_, body in parent.taken]
    weights = [take_weights(body, 1)[0] for body in taken]
    bodies = [torch.frombuffer(body, dtype=torch.float32) for body in taken]
    assert torch.stack(bodies).sum(0).tolist() == [1.0] * count + [float(count)]
    assert sum(weights) == count
    assert sum(each.count for each in sent) == count and len(sent) == len(parent.taken) < count
    assert parent.proxy.cuts > 0


@pytest.mark.parametrize("pace_bytes_per_s", [0.0, 40_000.0], ids=["at once", "paced"])
def test_the_rest_of_a_push_whose_connection_broke_is_not_sent(parent: Parent, pace_bytes_per_s: float) -> None:
    """It would take as long as the next attempt, which would wait behind it and break with the next connection."""
    parent.proxy.delay(0.05)  # At most 1 MiB each: what is left on the old socket needs seconds.
    gradient = torch.arange(20_000.0 if pace_bytes_per_s else 16_000_000.0)
    size_bytes = 4 * len(gradient)
    link = ParentLink(
        parent.client_ring, 0, 1, 0, chunk_bytes=1 << 16, pace_bytes_per_s=pace_bytes_per_s, deadline_s=DEADLINE_S
    )

    def cut() -> None:
        assert within(lambda: len(parent.parts) > 2)
        parent.proxy.cut()

    cutter = threading.Thread(target=cut)
    cutter.start()
    assert link.push([gradient], 1) == 2
    cutter.join()
    link.close()
    assert parent.proxy.cuts == 1 and parent.taken == [(0, 1, 1, gradient.numpy().tobytes())]
    assert {attempt for attempt, *_ in parent.parts} == {0, 1}
    assert max(stop for attempt, _, stop in parent.parts if attempt == 0) < size_bytes
    assert parent.server.malformed == 0


def test_a_push_whose_first_handshake_fails_is_not_sent_twice(parent: Parent) -> None:
    """Its connection never held, so nothing of it is lost and a new socket has nothing to improve."""
    parent.proxy.arm(TO_SERVER, 1)
    link = ParentLink(parent.client_ring, 0, 1, 0, chunk_bytes=1 << 16, pace_bytes_per_s=0.0, deadline_s=DEADLINE_S)
    assert link.push([torch.arange(100_000.0)], 1) == 2
    link.close()
    assert parent.proxy.cuts == 1 and len(parent.taken) == 1
    assert {attempt for attempt, *_ in parent.parts} == {0}


@pytest.mark.parametrize("way", [TO_SERVER, TO_CLIENT])
def test_a_fetch_is_made_again(parent: Parent, way: int) -> None:
    for frames in range(1, 30):
        parent.proxy.arm(way, frames, inside=True)
        snapshot = fetch(parent.client_ring, 0, 0, DEADLINE_S)
        assert snapshot is not None and torch.equal(snapshot.params[0], parent.snapshot.params[0])
        parent.proxy.disarm()
    assert parent.proxy.cuts >= 2 and parent.server.malformed == 0


def test_a_parent_that_cannot_be_reached_for_a_while_gets_the_gradient(parent: Parent) -> None:
    link = ParentLink(
        parent.client_ring, 0, 1, 0, chunk_bytes=512, pace_bytes_per_s=20_000.0, deadline_s=DEADLINE_S
    )
    assert link.push([torch.zeros(4)], 0) == 1

    def away() -> None:  # In one thread: of two timers that are held up the later one may be the first.
        time.sleep(0.2)
        parent.proxy.refuse()
        time.sleep(0.8)
        parent.proxy.refuse(False)

    cutter = threading.Thread(target=away)
    cutter.start()
    assert link.push([torch.ones(3000)], 1) == 2
    cutter.join()
    assert [taken[2] for taken in parent.taken] == [0, 1]
    link.close()
    assert within(lambda: parent.server.malformed == 0)
