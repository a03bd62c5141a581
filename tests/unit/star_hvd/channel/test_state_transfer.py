"""Parameters over the channel: round trips, damage, chunks, and deadlines, with real sockets on loopback."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
import torch
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.transmission.pace import SHARE, Pace
from star_hvd.channel.keys import Keyring, Peer
from star_hvd.channel.messages import base as messages
from star_hvd.channel.state_transfer import (
    MANIFEST_SIZE,
    REPLY_HEADER,
    REQUEST,
    Caller,
    OtherRanks,
    PacedReplies,
    TensorServer,
    ask,
    fetch,
    pack_snapshot,
    unpack_snapshot,
)
from star_hvd.engine.records import Snapshot
from star_hvd.errors import ChannelError, DeadlineError, RankLostError, StarError
from star_hvd.telemetry import wait_time
from tests.support.effort import cases

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64]
DTYPES += [torch.bool, torch.uint8, torch.int8]


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        return a.numel() == 0 or bool(torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)))
    return bool(a == b) and type(a) is type(b)


def same(a: Snapshot, b: Snapshot) -> bool:
    states = zip(a.state, b.state, strict=True)
    return (
        a.step == b.step
        and all(equal(x, y) for x, y in zip(a.params, b.params, strict=True))
        and all(x.keys() == y.keys() and all(equal(x[k], y[k]) for k in x) for x, y in states)
    )


def example(version: int = 7, numel: int = 1000) -> Snapshot:
    params = [torch.randn(numel), torch.randn(3, 4).t(), torch.tensor(1.5), torch.empty(0, 3)]
    params += [torch.randn(5).to(torch.bfloat16), torch.tensor([float("nan"), float("inf")])]
    state: list[dict[str, object]] = [{"step": torch.tensor(3.0), "exp_avg": torch.randn(numel)}, {"momentum": None}]
    state += [{"n": 3, "x": 0.1, "on": True, "name": "a"}, {}, {}, {"count": torch.tensor(2**40)}]
    return Snapshot(version, params, state)


def test_round_trip() -> None:
    snapshot = example()
    assert same(unpack_snapshot(*pack_snapshot(snapshot)), snapshot)


TENSORS = st.builds(
    lambda shape, dtype, seed: (
        torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(100).to(dtype).transpose(0, -1)
        if shape
        else torch.tensor(seed).to(dtype)
    ),
    st.lists(st.integers(0, 4), max_size=3),
    st.sampled_from(DTYPES),
    st.integers(0, 1000),
)


@settings(max_examples=cases(60), deadline=None)
@given(st.lists(TENSORS, max_size=4), st.integers(0, 1 << 40))
def test_any_tensors(tensors: list[torch.Tensor], version: int) -> None:
    snapshot = Snapshot(version, tensors, [{"s": t} for t in tensors])
    assert same(unpack_snapshot(*pack_snapshot(snapshot)), snapshot)


@pytest.mark.parametrize("value", [[1], {"a": 1}, object(), torch.ones(2, dtype=torch.complex64)])
def test_what_cannot_travel(value: Any) -> None:
    with pytest.raises(ChannelError, match="state 'x' of parameter 0"):
        pack_snapshot(Snapshot(0, [torch.ones(1)], [{"x": value}]))


DIMENSION = st.integers(-3, 5) | st.sampled_from([1 << 31, 1 << 32, 1 << 62, (1 << 64) - 1, -(1 << 63), 0.5, "x", None])
ITEM = st.one_of(
    st.tuples(
        st.just("t"), st.sampled_from([*map(str, DTYPES), "torch.complex64", "x", 3]), st.lists(DIMENSION, max_size=3)
    ),
    st.tuples(st.just("v"), st.none() | st.integers(0, 9) | st.lists(st.integers(0, 3), max_size=2)),
    st.sampled_from([None, [], "t", "v", ["t"], ["v"], ["?", 1], {"t": 1}, 5, ["t", "torch.float32", 3]]),
)
STATES = st.lists(st.dictionaries(st.text(max_size=2), ITEM, max_size=2) | st.none(), max_size=3)


@settings(max_examples=cases(500), deadline=None)
@given(
    st.integers(-1, 9) | st.none() | st.text(max_size=2),
    st.lists(ITEM, max_size=3) | st.none(),
    STATES,
    st.binary(max_size=64),
)
def test_damaged_manifests(version: Any, params: Any, states: Any, body: bytes) -> None:
    read_or_refused(msgpack.packb([version, params, states]), body)


@settings(max_examples=cases(300), deadline=None)
@given(st.binary(max_size=100), st.binary(max_size=100))
def test_arbitrary_bytes(manifest: bytes, body: bytes) -> None:
    read_or_refused(manifest, body)


@settings(max_examples=cases(300), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), min_size=1, max_size=4), st.integers(-9, 9))
def test_mutated_snapshots(changes: list[tuple[int, int]], grow: int) -> None:
    manifest, body = pack_snapshot(example(numel=4))
    damaged = bytearray(manifest)
    for place, value in changes:
        damaged[place % len(damaged)] = value
    read_or_refused(bytes(damaged), body[:grow] if grow < 0 else body + bytes(grow))


def read_or_refused(manifest: bytes, body: bytes) -> None:
    try:
        snapshot = unpack_snapshot(manifest, body)
    except ChannelError:
        return
    assert all(isinstance(p, torch.Tensor) for p in snapshot.params)
    assert len(snapshot.params) == len(snapshot.state) and snapshot.step >= 0
    for entry in snapshot.state:
        assert all(v is None or isinstance(v, (torch.Tensor, bool, int, float, str)) for v in entry.values())


@contextmanager
def two_rings() -> Iterator[tuple[Keyring, Keyring, Any, list[Peer]]]:
    """Rank 0 with a bound socket, and rank 1; both admit each other."""
    server, client = Keyring(), Keyring()
    router, port = server.server("127.0.0.1")
    peers = [Peer(server.public_key, "127.0.0.1", 0, port), Peer(client.public_key, "127.0.0.1", 0, 0)]
    server.admit(peers)
    client.admit(peers)
    try:
        yield server, client, router, peers
    finally:
        server.close()
        client.close()


def test_fetching_in_chunks() -> None:
    snapshot = example(numel=100_000)
    asked: list[int] = []

    def found(engine: int, state_too: bool, least: int) -> Snapshot | None:
        asked.append(engine)
        return snapshot if engine == 2 else None

    with two_rings() as (_, client, router, _):
        server = TensorServer(router, found, 4096)
        server.start()
        try:
            got = fetch(client, 0, 2, 60.0)
            assert got is not None and same(got, snapshot)
            assert fetch(client, 0, 3, 60.0) is None, "it is behind itself"
            for _ in range(30):  # One after the other, without a pause: the server must not mix up the connections.
                got = fetch(client, 0, 2, 60.0)
                assert got is not None and got.step == 7
            assert len(asked) == 32
        finally:
            server.stop()


class Coordinator:
    """Names ranks in turn."""

    def __init__(self, ranks: list[int], optimizer_id: int = 2) -> None:
        self.ranks, self.optimizer_id = ranks, optimizer_id
        self.answers: queue.SimpleQueue[messages.StateSource] = queue.SimpleQueue()

    def send(self, message: messages.Message) -> None:
        assert message == messages.FindStateSource(2)
        self.answers.put(messages.StateSource(self.optimizer_id, self.ranks.pop(0)))


def test_other_ranks_as_a_source() -> None:
    """Each request goes to the rank that the coordinator names, with the least step that is of use."""
    asked: list[tuple[int, bool, int]] = []

    def snapshot(optimizer_id: int, state_too: bool, min_step: int) -> Snapshot | None:
        asked.append((optimizer_id, state_too, min_step))
        return example() if min_step <= 7 else None

    with two_rings() as (_, client, router, _):
        server = TensorServer(router, snapshot, 4096)
        server.start()
        coordinator = Coordinator([-1, 0, 0])
        source = OtherRanks(client, 2, coordinator.send, coordinator.answers, lambda: None)
        assert source.snapshot(7, 60.0) is None and asked == [], "the coordinator knows of no rank"
        found = source.snapshot(7, 60.0)
        assert found is not None and found.step == 7
        assert source.snapshot(8, 60.0) is None
        assert asked == [(2, True, 7), (2, True, 8)]
        server.stop()


def test_other_ranks_that_are_silent_or_named_for_another_optimizer_have_no_state() -> None:
    with two_rings() as (_, client, router, _):
        silent, other = Coordinator([0]), Coordinator([0], optimizer_id=3)
        assert OtherRanks(client, 2, silent.send, silent.answers, lambda: None).snapshot(0, 0.5) is None
        assert OtherRanks(client, 2, other.send, other.answers, lambda: None).snapshot(0, 0.5) is None
        nobody: queue.SimpleQueue[messages.StateSource] = queue.SimpleQueue()
        assert OtherRanks(client, 2, lambda message: None, nobody, lambda: None).snapshot(0, 0.1) is None
        router.close(linger=0)


def test_an_answer_that_comes_too_late_is_not_taken_for_the_next_one() -> None:
    """The queue is that of all optimizers; each answer would be taken for the next request's, for ever."""
    with two_rings() as (_, client, router, _):
        server = TensorServer(router, lambda optimizer_id, state_too, min_step: example(), 4096)
        server.start()
        coordinator = Coordinator([0])
        coordinator.answers.put(messages.StateSource(2, -1))
        coordinator.answers.put(messages.StateSource(3, 1))

        def send(message: messages.Message) -> None:
            coordinator.answers.put(messages.StateSource(3, 1))
            coordinator.send(message)

        assert OtherRanks(client, 2, send, coordinator.answers, lambda: None).snapshot(7, 60.0) is not None
        assert coordinator.answers.empty()
        server.stop()


def test_other_ranks_are_not_asked_by_a_rank_that_has_failed() -> None:
    def check() -> None:
        raise ChannelError("rank 1 has failed")

    none: Any = None
    with pytest.raises(ChannelError, match="rank 1 has failed"):
        OtherRanks(none, 2, none, none, check).snapshot(0, 60.0)


def sizes_sent(router: Any) -> list[int]:
    """A list that gets the size of the last frame of every message which the socket is given to send."""
    sizes: list[int] = []
    send = router.send_multipart
    router.send_multipart = lambda frames: (sizes.append(len(frames[-1])), send(frames))
    return sizes


def test_a_manifest_of_many_parameters_travels_in_chunks() -> None:
    snapshot = Snapshot(7, [torch.full((2,), float(i)) for i in range(9000)], [{"step": 1.0} for _ in range(9000)])
    assert len(pack_snapshot(snapshot)[0]) > 10 * 4096
    with two_rings() as (_, client, router, _):
        sizes = sizes_sent(router)
        server = TensorServer(router, lambda engine, state_too, least: snapshot, 4096)
        server.start()
        try:
            got = fetch(client, 0, 0, 60.0)
            assert got is not None and same(got, snapshot) and max(sizes) == 4096
        finally:
            server.stop()


def test_a_break_is_noticed_however_early_the_connection_was_made(tmp_path: Path) -> None:
    """A thread may be suspended behind `connect`; a request lost later would never be repeated."""
    context, address = zmq.Context(), f"ipc://{tmp_path}/rank"
    routers = [context.socket(zmq.ROUTER)]
    routers[0].bind(address)

    def client(rank: int, identity: bytes, *, port: int, watch: Any) -> Any:
        socket = context.socket(zmq.DEALER)
        watch(socket)
        socket.connect(address)
        socket.send(b"early")
        assert routers[0].poll(60_000), "the connection was not made"
        return socket

    keyring: Any = SimpleNamespace(client=client, peers=[SimpleNamespace(tensor_port=1)])
    caller = Caller(keyring, 0)
    try:
        assert not caller.reopened()
        routers[0].close(linger=0)
        routers.append(context.socket(zmq.ROUTER))
        limit_s, again = time.monotonic() + 60.0, False
        while not again and time.monotonic() < limit_s:
            with contextlib.suppress(zmq.ZMQError):  # The old one is closed by another thread.
                routers[1].bind(address)
            caller.wait(time.monotonic() + 0.05)
            again = caller.reopened()
        assert again
    finally:
        caller.close()
        context.destroy(linger=0)


def test_a_watch_sees_a_socket_before_it_connects() -> None:
    with two_rings() as (_, client, _, peers):
        before: list[bytes] = []
        socket = client.client(
            0, b"", port=peers[0].tensor_port, watch=lambda each: before.append(each.getsockopt(zmq.LAST_ENDPOINT))
        )
        after = socket.getsockopt(zmq.LAST_ENDPOINT)
        socket.close(linger=0)
    assert before == [b""] and after != b""


class Asking:
    """A rank that asks for the state with a pace."""

    def __init__(self, client: Keyring, rate: float) -> None:
        self.caller = Caller(client, 0)
        self.pace = PacedReplies(Pace(rate), size_bytes=1 << 20)

    def ask(self) -> Snapshot | None:
        return ask(self.caller, 0, 0, 60.0, state_too=True, pace=self.pace)


def test_a_paced_reply_comes_in_small_parts_no_faster_than_asked_for() -> None:
    snapshot, rate = example(numel=40_000), 2e6
    with two_rings() as (_, client, router, _):
        sizes = sizes_sent(router)
        server = TensorServer(router, lambda engine, state_too, least: snapshot, 1 << 20)
        server.start()
        asking = Asking(client, rate)
        try:
            began_s = time.monotonic()
            got = asking.ask()
            took_s = time.monotonic() - began_s
            assert got is not None and same(got, snapshot)
            # All but the last part was sent, and its time over, before that one; 10 ms may be made up for.
            assert max(sizes) <= 0.01 * rate and took_s > (sum(sizes) - 2 * max(sizes)) / (SHARE * rate) - 0.01
            assert asking.pace.size_bytes >= 1 << 20, "the next one is not taken to be shorter"
            sizes.clear()
            got = asking.ask()
            assert got is not None and same(got, snapshot) and max(sizes) > 0.01 * rate, "the link is measured again"
        finally:
            asking.caller.close()
            server.stop()


def test_a_paced_reply_ends_where_its_asker_asks_again_and_others_do_not_wait_for_it() -> None:
    snapshot = example(numel=200_000)
    with two_rings() as (_, client, router, _):
        server = TensorServer(router, lambda engine, state_too, least: snapshot if engine == 0 else None, 1 << 20)
        server.start()
        asking = Asking(client, 20_000.0)  # A minute and a half: nothing here waits for its end.
        try:
            with pytest.raises(DeadlineError):
                ask(asking.caller, 0, 0, 0.2, state_too=True, pace=asking.pace)
            limit_s = time.monotonic() + 60.0
            while not server.paced_replies and time.monotonic() < limit_s:  # The connection may take longer.
                time.sleep(0.01)
            assert server.paced_replies
            got = fetch(client, 0, 0, 60.0)
            assert got is not None and same(got, snapshot) and server.paced_replies, "another connection"
            got = ask(asking.caller, 0, 0, 60.0, state_too=True)
            assert got is not None and same(got, snapshot) and not server.paced_replies
        finally:
            asking.caller.close()
            server.stop()


def test_fetches_of_two_threads() -> None:
    snapshot = example(numel=50_000)
    with two_rings() as (_, client, router, _):
        server = TensorServer(router, lambda engine, state_too, least: snapshot, 4096)
        server.start()
        got: list[Snapshot | None] = []
        threads = [threading.Thread(target=lambda: got.append(fetch(client, 0, 0, 60.0))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        server.stop()
        assert len(got) == 4 and all(g is not None and same(g, snapshot) for g in got)


def test_a_server_that_cannot_pack_says_so_at_once() -> None:
    with two_rings() as (_, client, router, _):
        server = TensorServer(router, lambda engine, state_too, least: Snapshot(0, [], [{"x": object()}]), 4096)
        server.start()
        assert fetch(client, 0, 0, 60.0) is None
        server.stop()


def test_malformed_requests_are_counted_and_the_next_one_is_served() -> None:
    with two_rings() as (_, client, router, peers):
        server = TensorServer(router, lambda engine, state_too, least: example(), 4096)
        server.start()
        socket = client.client(0, b"junk", port=peers[0].tensor_port)
        for frames in ([b""], [b"abc"], [b"a", b"b"], [bytes(4), b"x"]):
            socket.send_multipart(frames)
        limit_s = time.monotonic() + 60.0
        while server.malformed < 4 and time.monotonic() < limit_s:
            time.sleep(0.01)
        assert server.malformed == 4
        assert fetch(client, 0, 0, 60.0) is not None
        socket.close(linger=0)
        server.stop()


def test_a_push_that_cannot_be_taken_is_no_end_of_the_server(caplog: pytest.LogCaptureFixture) -> None:
    """It serves the other optimizers' late gradients, and ranks that are behind."""

    def push(frames: list[bytes]) -> bytes | None:
        raise StarError("rank 1's optimizer has failed")

    with two_rings() as (_, client, router, _):
        server = TensorServer(router, lambda optimizer_id, state_too, min_step: example(), 4096, push)
        server.answer([b"peer", b"a header", b"a part"])
        server.start()
        assert fetch(client, 0, 0, 60.0) is not None and "optimizer has failed" in caplog.text
        assert server.malformed == 0
        server.stop()


def test_a_silent_server_costs_no_more_than_the_deadline() -> None:
    with two_rings() as (_, client, router, _):
        began_s = time.monotonic()
        with pytest.raises(DeadlineError, match=r"rank 0 were not complete after \d"):
            fetch(client, 0, 0, 0.5)
        assert 0.4 < time.monotonic() - began_s < 60.0
        router.close(linger=0)


def header(number: int, total: int, offset: int, size: int, magic: bytes = b"STAR", protocol: int = 2) -> bytes:
    return REPLY_HEADER.pack(magic, protocol, 0, number, total, offset, size)


MANIFEST, BODY = pack_snapshot(Snapshot(1, [torch.ones(4)], [{}]))
LONG = len(MANIFEST)
SIZE = LONG + len(BODY)
BEGIN = [header(0, 3, 0, SIZE), MANIFEST_SIZE.pack(LONG)]
SECOND = [header(1, 3, 0, SIZE), MANIFEST]
REPLIES = {
    "one frame": [[b"x"]],
    "short header": [[b"x", BEGIN[1]]],
    "magic": [[header(0, 1, 0, SIZE, magic=b"RATS"), BEGIN[1]]],
    "protocol": [[header(0, 1, 0, SIZE, protocol=9), BEGIN[1]]],
    "wrong number": [SECOND],
    "twice": [BEGIN, BEGIN],
    "no chunks": [[header(0, 1, 0, SIZE), BEGIN[1]]],
    "too few bytes": [BEGIN, SECOND, [header(2, 3, LONG, SIZE), BODY[:8]]],
    "a gap": [BEGIN, SECOND, [header(2, 3, LONG + 8, SIZE), BODY[:8]]],
    "beyond the end": [BEGIN, SECOND, [header(2, 3, LONG, SIZE), BODY + b"x"]],
    "size changes": [BEGIN, SECOND, [header(2, 3, LONG, 99), BODY]],
    "absurd size": [[header(0, 3, 0, 1 << 41), BEGIN[1]], SECOND],
    "absurd total": [[header(0, 1 << 31, 0, SIZE), BEGIN[1]], SECOND],
    "absurd manifest": [[BEGIN[0], MANIFEST_SIZE.pack(1 << 60)], SECOND, [header(2, 3, LONG, SIZE), BODY]],
    "begin": [[BEGIN[0], MANIFEST]],
    "manifest": [BEGIN, [header(1, 3, 0, SIZE), b"\xc1" * LONG], [header(2, 3, LONG, SIZE), BODY]],
}


@pytest.mark.parametrize("replies", REPLIES.values(), ids=REPLIES.keys())
def test_damaged_replies(replies: list[list[bytes]]) -> None:
    with two_rings() as (_, client, router, _):

        def answer() -> None:
            if router.poll(60_000):
                peer, request = router.recv_multipart()
                number, *wanted = REQUEST.unpack(request)
                assert wanted == [0, 1, 0, 0]
                for head, *payload in replies:
                    if len(head) == REPLY_HEADER.size:
                        fields = list(REPLY_HEADER.unpack(head))
                        fields[2] = number
                        head = REPLY_HEADER.pack(*fields)
                    router.send_multipart([peer, head, *payload])

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ChannelError):
            fetch(client, 0, 0, 60.0)
        thread.join()
        router.close(linger=0)


class SlowLink:
    """A caller to which a part of a reply comes every five seconds of a clock, and whose connection may break."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, breaks_after: int = 1000) -> None:
        self.now_s, self.attempts = 0.0, 0
        self.socket = SimpleNamespace(send=lambda data: None)
        self._breaks_after = self._until_break = breaks_after
        self.snapshot = example()
        self._manifest, self._body = pack_snapshot(self.snapshot)
        monkeypatch.setattr(wait_time, "time", SimpleNamespace(monotonic=lambda: self.now_s))

    def begin(self) -> int:
        self.attempts, self._until_break = self.attempts + 1, self._breaks_after
        parts = [(self._manifest, at) for at in range(0, len(self._manifest), 200)]
        parts += [(self._body, at) for at in range(0, len(self._body), 1000)]
        self._size, total = len(self._manifest) + len(self._body), 1 + len(parts)
        self._left = [(0, total, 0, MANIFEST_SIZE.pack(len(self._manifest)))]
        offset = 0
        for number, (data, at) in enumerate(parts, 1):
            part = data[at : at + (200 if data is self._manifest else 1000)]
            self._left.append((number, total, offset, part))
            offset += len(part)
        return self.attempts

    def wait(self, until_s: float) -> list[bytes] | None:
        self.now_s += 5.0
        self._until_break -= 1
        if self._until_break <= 0:
            return None
        number, total, offset, part = self._left.pop(0)
        return [REPLY_HEADER.pack(b"STAR", 2, self.attempts, number, total, offset, self._size), part]

    def reopened(self) -> bool:
        return self._until_break <= 0


def test_a_reply_that_goes_on_arriving_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank on a slow link would end the job, or leave it with other parameters, though it is served."""
    link: Any = SlowLink(monkeypatch)
    got = ask(link, 0, 2, 12.0, state_too=True)
    assert got is not None and same(got, link.snapshot) and link.now_s > 40.0


def test_a_reply_that_begins_again_and_again_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    link: Any = SlowLink(monkeypatch, breaks_after=3)
    with pytest.raises(DeadlineError, match=r"rank 0 were not complete after 11\d s, the last 10\d s without progress"):
        ask(link, 0, 2, 100.0, state_too=True)
    assert link.attempts > 3


def test_a_wait_for_a_rank_ends_with_the_loss_of_one() -> None:
    """In an elastic job the others are at the rendezvous by then, and wait for this rank in turn."""
    waits_s: list[float] = []

    def wait(until_s: float) -> None:
        waits_s.append(until_s - time.monotonic())

    def lost() -> None:
        raise RankLostError("rank 1 has left the job")

    caller: Any = SimpleNamespace(
        begin=lambda: 1, socket=SimpleNamespace(send=lambda data: None), wait=wait, reopened=lambda: False
    )
    with pytest.raises(RankLostError):
        ask(caller, 1, 0, 1800.0, state_too=False, check=lost)
    assert len(waits_s) == 1 and waits_s[0] < 10.0
