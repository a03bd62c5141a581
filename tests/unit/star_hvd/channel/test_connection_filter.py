"""The filter of a listening socket: how many are let in per second, and what the kernel drops."""

from __future__ import annotations

import contextlib
import random
import socket
import sys
from collections.abc import Iterator

import pytest

from star_hvd.channel.connection_filter import (
    BLOCK_ADDRESSES,
    RATE_PER_S,
    SEGMENT_BYTES,
    Share,
    lift,
    limit,
    loopback_source,
    route,
)

KEY = b"k" * 40
BURST = 32
LOOK_S = 0.02  # The limiter looks as often while connections come.
SOON_S, IN_S = 0.3, 30.0
linux = pytest.mark.skipif(sys.platform != "linux", reason="filters of sockets, and the whole of 127.0.0.0/8")


def let_in(share: Share, requests_per_s: float, begin_s: float, seconds: float, dice: random.Random) -> int:
    """Connections accepted while so many ask per second."""
    accepted = 0
    for look in range(int(seconds / LOOK_S)):
        for _ in range(int(requests_per_s * LOOK_S)):
            if dice.random() < share.value:
                share.note()
                accepted += 1
        share.turn(begin_s + (look + 1) * LOOK_S, BURST)
    return accepted


@pytest.mark.parametrize("requests_per_s", [300.0, 1_000.0, 20_000.0])
def test_a_crowd_is_let_in_slowly_and_everybody_when_it_is_gone(requests_per_s: float) -> None:
    share, dice = Share(0.0), random.Random(0)
    first = let_in(share, requests_per_s, 0.0, 1.0, dice)
    assert first < BURST + 3 * RATE_PER_S + 2 * requests_per_s * LOOK_S, "a burst, and what comes until the next look"
    later = let_in(share, requests_per_s, 1.0, 20.0, dice)
    assert 0.5 * 20 * RATE_PER_S < later < 1.5 * 20 * RATE_PER_S
    let_in(share, 0.0, 21.0, 5.0, dice)
    assert share.value == 1.0


def test_few_are_never_kept_waiting() -> None:
    share, dice = Share(0.0), random.Random(0)
    for _ in range(BURST):
        share.note()
    share.turn(LOOK_S, BURST)
    assert share.value == 1.0, "a job that starts"
    let_in(share, RATE_PER_S, 2.0, 60.0, dice)
    assert share.value == 1.0


@contextlib.contextmanager
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(IN_S)
        yield listener


def knock(listener: socket.socket, source: str, limit_s: float) -> socket.socket | None:
    """A connection from an address; None if it is not accepted in time."""
    end = socket.socket()
    end.settimeout(limit_s)
    try:
        end.bind((source, 0))
        end.connect(listener.getsockname())
    except TimeoutError:
        end.close()
        return None
    return end


@linux
@pytest.mark.parametrize("others", [0, 1, BLOCK_ADDRESSES - 1, BLOCK_ADDRESSES, 900])
def test_requests_of_the_job_always_come_through_and_others_do_not(others: int) -> None:
    own = loopback_source(KEY)
    known = [own, *(f"10.{index // 250}.7.{index % 250}" for index in range(others))]
    with listening() as listener:
        limit(listener, 0.0, known)
        assert knock(listener, "127.0.0.1", SOON_S) is None
        end = knock(listener, own, IN_S)
        assert end is not None
        made, _ = listener.accept()
        with end, made:
            made.settimeout(IN_S)
            end.sendall(bytes(10 * SEGMENT_BYTES))
            assert len(made.recv(10 * SEGMENT_BYTES, socket.MSG_WAITALL)) == 10 * SEGMENT_BYTES
        limit(listener, 1.0, known)
        limit(listener, 1.0, known)
        again = knock(listener, "127.0.0.1", IN_S)
        assert again is not None
        again.close()


@linux
def test_others_say_what_a_handshake_needs_until_they_are_let_in() -> None:
    with listening() as listener:
        limit(listener, 0.9999999, [])  # Everybody's request comes through, but for one of many million.
        end = knock(listener, "127.0.0.1", IN_S)
        assert end is not None
        made, _ = listener.accept()
        with end, made:
            made.settimeout(IN_S)
            end.sendall(b"a" * SEGMENT_BYTES)
            assert made.recv(SEGMENT_BYTES, socket.MSG_WAITALL) == b"a" * SEGMENT_BYTES
            end.sendall(b"b" * (SEGMENT_BYTES + 1))
            made.settimeout(SOON_S)
            with pytest.raises(TimeoutError):
                made.recv(1)
            lift(made)
            made.settimeout(IN_S)
            assert made.recv(SEGMENT_BYTES + 1, socket.MSG_WAITALL) == b"b" * (SEGMENT_BYTES + 1)


@linux
def test_ranks_of_a_host_have_addresses_of_their_own() -> None:
    assert route(KEY, "127.0.0.2", 80) == f"tcp://{loopback_source(KEY)}:0;127.0.0.2:80"
    assert route(KEY, "10.0.0.2", 80) == "tcp://10.0.0.2:80"
    assert loopback_source(KEY) != loopback_source(b"l" * 40)
