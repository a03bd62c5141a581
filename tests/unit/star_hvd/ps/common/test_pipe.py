"""The pipe between an owner and its server: neither side ever waits for the other to read."""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from star_hvd.errors import DeadlineError
from star_hvd.ps.common.pipe import Pipe, PipeFull
from tests.support.threads import running

LIMIT_S = 120.0


def ends() -> tuple[Pipe, Pipe]:
    one, other = socket.socketpair()
    return Pipe(one), Pipe(other)


def receive(pipe: Pipe, count: int) -> list[Any]:
    found: list[Any] = []
    while len(found) < count:
        found += pipe.receive()
    return found


def messages_of(pipe: Pipe) -> Iterator[Any]:
    while True:
        yield from pipe.receive()


def test_a_message_that_came_before_the_wait_was_stopped_is_not_lost() -> None:
    one, other = ends()
    one.send({"do": "ping"})
    assert other.wait(LIMIT_S, lambda: True) == {"do": "ping"}
    with pytest.raises(DeadlineError):
        other.wait(LIMIT_S, lambda: True)
    one.close()
    other.close()


def test_a_side_that_does_not_read_stops_nobody_and_gets_everything_in_order_later() -> None:
    others = running("star-ps-pipe")
    mine, theirs = ends()
    messages = [{"n": n, "data": bytes(n % 5000)} for n in range(3000)]
    for message in messages:
        mine.send(message)
    mine.send(lambda: {"n": 3000, "data": bytes(3_000_000)})
    assert running("star-ps-pipe") - others, "it is far more than a socket holds"
    found = receive(theirs, 3001)
    assert found[:3000] == messages and len(found[3000]["data"]) == 3_000_000
    limit_s = time.monotonic() + LIMIT_S
    while running("star-ps-pipe") - others:
        assert time.monotonic() < limit_s, "the writer ends when nothing is queued"
        time.sleep(0.01)
    mine.send({"n": 3001})
    assert receive(theirs, 1) == [{"n": 3001}]
    mine.close()
    assert receive(theirs, 1) == [None]
    theirs.close()


def test_one_message_beyond_the_bound_keeps_none_behind_it_out() -> None:
    mine, theirs = ends()
    large = 80 << 20  # A state that cannot be cut, which the other side reads as fast as it can.
    mine.send(lambda: {"data": bytes(large)})
    mine.send({"n": 1})
    found = receive(theirs, 2)
    assert len(found[0]["data"]) == large and found[1] == {"n": 1}
    mine.close(), theirs.close()


def test_many_threads_send_whole_messages() -> None:
    mine, theirs = ends()
    threads = [
        threading.Thread(target=lambda t=t: [mine.send({"t": t, "n": n, "x": bytes(999)}) for n in range(300)])
        for t in range(4)
    ]
    for thread in threads:
        thread.start()
    found = receive(theirs, 1200)
    for t in range(4):
        assert [each["n"] for each in found if each["t"] == t] == list(range(300))
    mine.close(), theirs.close()


def test_advice_is_left_out_and_memory_is_bounded_where_the_other_side_does_not_read() -> None:
    mine, theirs = ends()
    for n in range(20_000):
        mine.send({"n": n}, advisory=True)
    mine.send({"n": -1})
    received = list(itertools.takewhile(lambda message: message["n"] >= 0, messages_of(theirs)))
    assert len(received) < 10_000
    with pytest.raises(PipeFull):
        for _ in range(200):
            mine.send({"data": bytes(1 << 20)})
    mine.close(), theirs.close()


def test_descriptors_come_with_their_messages_though_they_were_queued() -> None:
    mine, theirs = ends()
    for _ in range(400):
        mine.send({"data": bytes(5000)})
    read, write = os.pipe()
    for n in range(20):
        mine.send({"n": n}, write)
    os.close(write)
    assert len(receive(theirs, 420)) == 420
    for n in range(20):
        descriptor = theirs.descriptor()
        os.write(descriptor, bytes([n]))
        os.close(descriptor)
    assert os.read(read, 100) == bytes(range(20))
    assert os.read(read, 1) == b"", "no copy of it is left on this side"
    os.close(read)
    mine.close(), theirs.close()


def test_the_other_side_gone_is_an_error_for_whoever_sends_and_ends_a_wait() -> None:
    mine, theirs = ends()
    theirs.send({"first": 1})
    theirs.send({"second": 2})
    theirs.close()
    assert mine.wait(LIMIT_S) == {"first": 1} and mine.receive() == [{"second": 2}]
    with pytest.raises(DeadlineError):
        mine.wait(LIMIT_S)
    with pytest.raises(OSError):
        for _ in range(3):
            mine.send({"late": True})
    mine.close()


def test_closing_ends_the_writer_at_once() -> None:
    others = running("star-ps-pipe")
    mine, theirs = ends()
    for _ in range(100):
        mine.send({"data": bytes(10_000)})
    assert running("star-ps-pipe") - others
    mine.close()
    limit_s = time.monotonic() + LIMIT_S
    while running("star-ps-pipe") - others and time.monotonic() < limit_s:
        time.sleep(0.01)
    assert not running("star-ps-pipe") - others
    theirs.close()


def test_a_wait_has_its_deadline_and_can_be_given_up() -> None:
    mine, theirs = ends()
    with pytest.raises(DeadlineError, match=r"within 0\.1 s"):
        mine.wait(0.1)
    with pytest.raises(DeadlineError):
        mine.wait(LIMIT_S, lambda: True)
    mine.close(), theirs.close()
