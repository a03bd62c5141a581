"""Threads that wait for sockets end at once when they are told to."""

from __future__ import annotations

import select

import zmq

from star_hvd.channel.state_transfer import TensorServer
from star_hvd.channel.wakeup import Wakeup


def readable(wakeup: Wakeup) -> bool:
    return bool(select.select([wakeup], [], [], 0.0)[0])


def test_a_wakeup_is_readable_from_wake_until_clear() -> None:
    wakeup = Wakeup()
    assert not readable(wakeup)
    for _ in range(100_000):  # More than the descriptor holds: waking never blocks.
        wakeup.wake()
    assert readable(wakeup)
    while readable(wakeup):
        wakeup.clear()
    wakeup.clear()
    wakeup.wake()
    assert readable(wakeup)
    wakeup.close()
    wakeup.wake()  # By a thread that has not heard of the end.
    assert wakeup.fileno() == -1


def test_a_tensor_server_that_waits_for_fetches_ends_when_it_is_stopped() -> None:
    with zmq.Context() as context:
        router = context.socket(zmq.ROUTER)
        router.bind("inproc://tensors")
        server = TensorServer(router, lambda *_: None, 1 << 20, poll_ms=3_600_000)
        server.start()
        server.stop(60.0)
        assert router.closed, "its thread, which closes the socket, has ended"
