"""Strangers in crowds, silent or flooding, at every kind of socket: ranks get in, memory stays, and it is counted."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import zmq

from benchmarks.machine.strangers import GREETING, KINDS, strangers
from scheduler.plan.plan import Plan
from star_hvd.channel import connection_filter, handshake_limiter
from star_hvd.channel.handshake_limiter import CONTROL_BYTES, HandshakeLimiter, Listener
from star_hvd.channel.keys import JobKey, Keyring, Peer
from star_hvd.ps.common.auth import connect
from tests.support.ps_cluster import DEADLINE_S, cluster

FEW, MANY = 200, 1000
IN_S = 90.0  # A rank that the crowd keeps out for longer is out.
TCP_INFO_BYTES, BYTES_ACKED = 136, 120  # Of `struct tcp_info` in Linux.
MOST_BYTES = 50e6  # Without limits 1,000 that flood take 1,000 MB.

pytestmark = pytest.mark.timeout(900)


@contextlib.contextmanager
def memory_of(pid: int) -> Iterator[Callable[[], float]]:
    """Gives the most memory that a process took since, in bytes beyond what it had."""
    process, stop = psutil.Process(pid), threading.Event()
    before = most = process.memory_info().rss

    def watch() -> None:
        nonlocal most
        while not stop.wait(0.05):
            most = max(most, process.memory_info().rss)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield lambda: most - before
    finally:
        stop.set()
        thread.join()


@contextlib.contextmanager
def ring_of_two() -> Iterator[tuple[Keyring, Keyring, Any, int]]:
    own, friend = Keyring(), Keyring()
    router, port = own.server("127.0.0.1", CONTROL_BYTES)
    peers = [Peer(own.public_key, "127.0.0.1", port, 0), Peer(friend.public_key, "127.0.0.1", 0, 0)]
    own.admit(peers)
    friend.admit(peers)
    try:
        yield own, friend, router, port
    finally:
        router.close(linger=0)
        friend.close()
        own.close()


def enters(friend: Keyring, router: Any, port: int, name: bytes) -> None:
    """A rank connects and is heard.

    What is on its way when a connection ends is lost, and the socket connects again: a stream would send it again.
    """
    dealer = friend.client(0, name, port=port)
    limit_s, heard = time.monotonic() + IN_S, None
    while heard is None:
        dealer.send(b"hello")
        heard = hears(router, name, 1.0)
        assert heard is not None or time.monotonic() < limit_s, "the crowd keeps a rank out"
    dealer.close(linger=0)
    assert heard == b"hello"


def hears(router: Any, name: bytes, within_s: float = IN_S) -> bytes | None:
    """Return a rank's next message, None if none comes; those that `enters` repeats may arrive long behind its end."""
    limit_s = time.monotonic() + within_s
    while router.poll(max(0.0, 1e3 * (limit_s - time.monotonic()))):
        sender, message = router.recv_multipart()
        if sender == name:
            return bytes(message)
        assert message == b"hello"
    return None


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_crowd_at_a_socket_of_a_rank(kind: str) -> None:
    with ring_of_two() as (own, friend, router, port):
        stays = friend.client(0, b"stays", port=port)
        stays.send(b"before")
        assert router.poll(1e3 * IN_S) and router.recv_multipart() == [b"stays", b"before"]
        with memory_of(os.getpid()) as taken, strangers(kind, MANY, "127.0.0.1", port) as made:
            for number in range(5):
                enters(friend, router, port, b"%d" % number)
            assert taken() < MOST_BYTES
            router.send_multipart([b"stays", b"and you"])
            assert stays.poll(1e3 * IN_S) and stays.recv() == b"and you", "a rank that was in is still in"
        stays.close(linger=0)
        assert made[0] > MANY and own.denied > handshake_limiter.MAX_PENDING, "most are not even let in"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["silent", "flood"])
def test_a_crowd_at_a_server(kind: str) -> None:
    with cluster(Plan.ps(1, 1), processes=True) as made, contextlib.ExitStack() as stack:
        pid = made.servers[0].pid
        assert pid is not None
        taken = stack.enter_context(memory_of(pid))
        stack.enter_context(strangers(kind, MANY, made.endpoints[0].host, made.endpoints[0].port))
        for step in range(3):
            made.clients[0].push(step=step, version=step, flats=made.gradients(0, step), weight=1.0)
            assert made.clients[0].wait(DEADLINE_S).version == step + 1
            context = zmq.Context()  # A rank that comes in the flood.
            dealer = connect(context, made.key, made.endpoints[0], b"late%d" % step)
            monitor = dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
            assert monitor.poll(1e3 * IN_S), "the crowd keeps a rank out"
            dealer.disable_monitor()
            dealer.close(linger=0)
            context.destroy(linger=0)
        assert taken() < MOST_BYTES


def test_who_knows_the_public_key_and_has_none_of_the_job_is_counted() -> None:
    with ring_of_two() as (own, friend, router, port):
        context = zmq.Context()
        wrong = [JobKey.new() for _ in range(30)]
        dealers = []
        for key in wrong:
            dealers.append(context.socket(zmq.DEALER))
            key.own.join(dealers[-1], own.public_key)
            dealers[-1].connect(f"tcp://127.0.0.1:{port}")
        enters(friend, router, port, b"1")
        limit_s = time.monotonic() + IN_S
        while own.denied < len(wrong) and time.monotonic() < limit_s:
            time.sleep(0.01)
        context.destroy(linger=0)
        assert own.denied >= len(wrong)


@contextlib.contextmanager
def watched(handshake_s: float) -> Iterator[tuple[HandshakeLimiter, int]]:
    """A limiter of four handshakes, and the port that it watches; ZeroMQ itself sets no limit."""
    context, watch = zmq.Context(), HandshakeLimiter(max_pending=4, handshake_s=handshake_s)
    router = context.socket(zmq.ROUTER)
    JobKey.new().own.serve(router)
    router.setsockopt(zmq.HANDSHAKE_IVL, 0)
    watch.watch(router)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    try:
        yield watch, port
    finally:
        router.close(linger=0)
        watch.stop()
        context.destroy(linger=0)


def accepted(port: int) -> socket.socket:
    """A connection that has got the begin of the server's greeting."""
    end = socket.create_connection(("127.0.0.1", port))
    end.settimeout(IN_S)
    assert len(end.recv(10)) == 10
    return end


@pytest.mark.slow
def test_the_oldest_of_too_many_handshakes_go_first(caplog: pytest.LogCaptureFixture) -> None:
    with watched(10.0 * IN_S) as (watch, port), caplog.at_level(logging.WARNING, "star_hvd"):
        ends = [accepted(port) for _ in range(4)]
        ends[0].sendall(GREETING)  # The oldest gets further than the others: a younger one goes.
        assert len(ends[0].recv(54, socket.MSG_WAITALL)) == 54
        while watch.listeners[0].accepted < 4:  # Their age counts from then on.
            time.sleep(0.01)
        time.sleep(0.3)  # None of them is new any more.
        ends.append(socket.create_connection(("127.0.0.1", port)))
        assert ends[1].recv(1) == b"", "the oldest of those that have said nothing is shut"
        assert watch.evicted == 1, "and nobody else"
        for _ in range(20):
            socket.create_connection(("127.0.0.1", port)).close()
        limit_s = time.monotonic() + IN_S
        while "rejected" not in caplog.text and time.monotonic() < limit_s:
            time.sleep(0.01)
        for end in ends:
            end.close()
    warnings = [record for record in caplog.records if "rejected" in record.getMessage()]
    assert len(warnings) == 1 and "STAR_INTERFACE" in warnings[0].getMessage()


def test_a_handshake_has_a_deadline() -> None:
    began_s = time.monotonic()
    with watched(0.5) as (watch, port):
        silent, further = accepted(port), accepted(port)
        with contextlib.suppress(OSError):  # On a busy machine its time is up before.
            further.sendall(GREETING)
        for end in (silent, further):
            with contextlib.suppress(ConnectionResetError):
                while end.recv(64):
                    pass  # The rest of its greeting, then the end.
            end.close()
        assert watch.evicted == 2 and time.monotonic() - began_s > 0.5


def test_no_file_of_the_process_is_taken_for_a_connection() -> None:
    """The number of a connection that is closed may belong to anything by the time the list is looked through."""
    context = zmq.Context()
    monitor, events = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    monitor.bind("inproc://monitor")
    events.connect("inproc://monitor")
    found = Listener(monitor, max_pending=0, handshake_s=0.0)
    listener = socket.create_server(("127.0.0.1", 0))
    other, mine = socket.create_server(("127.0.0.1", 0)), socket.socketpair()
    reader, writer = os.pipe()
    try:
        near = socket.create_connection(other.getsockname())
        far, _ = other.accept()
        descriptors = (reader, writer, mine[0].fileno(), near.fileno(), far.fileno(), 9999)
        endpoint = b"tcp://127.0.0.1:%d" % listener.getsockname()[1]
        events.send_multipart([struct.pack("=Hi", zmq.EVENT_LISTENING, listener.fileno()), endpoint])
        for descriptor in descriptors:
            events.send_multipart([struct.pack("=Hi", zmq.EVENT_ACCEPTED, descriptor), endpoint])
        limit_s = time.monotonic() + IN_S
        while found.accepted < len(descriptors) and time.monotonic() < limit_s:
            assert found.take_events()
        assert found.pending.keys() == set(descriptors)
        found.sweep(time.monotonic() + 1.0)
        assert found.evicted == 0 and not found.pending
        os.write(writer, b"x")
        mine[0].sendall(b"y")
        near.sendall(b"z")
        assert (os.read(reader, 1), mine[1].recv(1), far.recv(1)) == (b"x", b"y", b"z")
    finally:
        for end in (listener, other, *mine, near, far):
            end.close()
        os.close(reader)
        os.close(writer)
        context.destroy(linger=0)


@pytest.mark.parametrize("known", [True, False])
def test_a_rank_comes_through_a_crowd_with_a_large_message(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """From an address of the job, and from one that nobody was told of, which waits its turn."""
    if not known:
        # At least so many requests are let in, however many come: its turn comes.
        monkeypatch.setattr(connection_filter, "LEAST_SHARE", 0.25)
    with ring_of_two() as (own, friend, router, port):
        note = own.limiter.listeners[0]
        if not known:
            own.limiter.know(())
        with strangers("flood", FEW, "127.0.0.1", port):
            limit_s = time.monotonic() + IN_S
            while not note.limited and time.monotonic() < limit_s:
                time.sleep(0.01)
            assert note.limited, "more came than are let in"
            enters(friend, router, port, b"1")
            dealer = friend.client(0, b"2", port=port)
            dealer.send(bytes(CONTROL_BYTES // 2))
            assert len(hears(router, b"2") or b"") == CONTROL_BYTES // 2
            dealer.close(linger=0)
        before = note.accepted
        limit_s = time.monotonic() + IN_S
        while note.share.value < 1.0 and time.monotonic() < limit_s:
            time.sleep(0.05)
        assert note.share.value == 1.0 and note.accepted - before < FEW, "the crowd is gone"


@pytest.mark.skipif(sys.platform != "linux", reason="filters of sockets")
def test_the_first_strangers_already_say_no_more_than_a_handshake_needs() -> None:
    with ring_of_two() as (own, friend, router, port):
        note = own.limiter.listeners[0]
        limit_s = time.monotonic() + IN_S
        while note.filter is None and time.monotonic() < limit_s:
            time.sleep(0.01)
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(KINDS["flood"][0])
            assert len(stranger.recv(64, socket.MSG_WAITALL)) == 64
            stranger.settimeout(0.5)
            with contextlib.suppress(TimeoutError):
                stranger.sendall(bytes(1 << 24))
            while not note.pending and time.monotonic() < limit_s:
                time.sleep(0.01)  # The limiter's thread may be behind.
            assert len(note.pending) == 1
            info = stranger.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
            (received,) = struct.unpack_from("<Q", info, BYTES_ACKED)  # What the other end has acknowledged.
            assert received <= len(KINDS["flood"][0]) + 1  # TCP counts the request for the connection.
            assert not note.limited, "one is no crowd"
            dealer = friend.client(0, b"1", port=port)
            dealer.send(bytes(CONTROL_BYTES // 2))
            assert router.poll(1e3 * IN_S) and len(router.recv_multipart()[1]) == CONTROL_BYTES // 2
            dealer.close(linger=0)


def test_a_message_larger_than_the_limit_is_refused_before_it_is_sent() -> None:
    with ring_of_two() as (_, friend, router, port):
        dealer = friend.client(0, b"1", port=port)
        dealer.send(bytes(CONTROL_BYTES + 1))  # It ends its connection, and all that is in the system's buffers.
        limit_s = time.monotonic() + IN_S
        while not router.poll(200) and time.monotonic() < limit_s:
            dealer.send(b"hello")
        assert router.poll(0) and router.recv_multipart() == [b"1", b"hello"]
        dealer.close(linger=0)


def test_the_sizes_of_a_handshake_are_as_the_watch_takes_them_to_be() -> None:
    """A library that says less would have ranks shut, one that says more would let strangers stay."""
    with ring_of_two() as (own, friend, router, port):
        note = own.limiter.listeners[0]
        silent = socket.create_connection(("127.0.0.1", port))
        silent.sendall(GREETING)
        assert len(silent.recv(64, socket.MSG_WAITALL)) == 64
        enters(friend, router, port, b"1")
        kept = friend.client(0, b"2", port=port)
        kept.send(b"hello")
        assert router.poll(1e3 * IN_S) and router.recv_multipart()[0] == b"2"
        limit_s = time.monotonic() + IN_S
        # The one that is in is forgotten, which takes READY to have been acknowledged; the other one stays.
        while (note.succeeded < 2 or len(note.pending) > 1) and time.monotonic() < limit_s:
            time.sleep(0.01)
        while [note.progress_bytes(descriptor) for descriptor in note.pending] != [64]:  # TCP acknowledges with delay.
            assert time.monotonic() < limit_s
            time.sleep(0.01)
        kept.send(b"again")
        assert router.poll(1e3 * IN_S) and router.recv_multipart() == [b"2", b"again"] and note.evicted == 0
        silent.close()
        kept.close(linger=0)
