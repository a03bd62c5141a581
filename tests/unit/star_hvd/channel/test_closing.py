"""Closing ends by its deadline, whatever ZeroMQ waits for."""

from __future__ import annotations

import logging
import threading

import pytest
import zmq

from star_hvd.channel.closing import CLOSE_S, close_within
from star_hvd.channel.keys import Keyring, Peer

SOON_S = 0.2


def test_what_ends_is_waited_for() -> None:
    closed: list[int] = []
    assert close_within(lambda: closed.append(1), "it", CLOSE_S) and closed == [1]


def test_an_error_of_closing_is_told_and_nothing_else_fails(caplog: pytest.LogCaptureFixture) -> None:
    assert close_within(lambda: [][0], "it", CLOSE_S)
    assert "star-close" in caplog.text


def test_where_no_thread_can_be_started_it_is_closed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in exit handlers of Python 3.12."""

    def refused(self: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    closed: list[threading.Thread] = []
    monkeypatch.setattr(threading.Thread, "start", refused)
    assert close_within(lambda: closed.append(threading.current_thread()), "it", CLOSE_S)
    assert closed == [threading.current_thread()]


def test_a_context_with_a_socket_that_stays_open_is_left(caplog: pytest.LogCaptureFixture) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    caplog.set_level(logging.WARNING)
    assert not close_within(context.term, "the context", SOON_S)
    assert "the context did not close within 0.2 s" in caplog.text
    socket.close(linger=0)


def test_keys_whose_authenticator_does_not_end_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job's end does not wait for it."""
    inside, go_on = threading.Event(), threading.Event()

    def stuck(self: object, domain: str, key: bytes) -> bool:
        inside.set()
        return go_on.wait(60.0)

    monkeypatch.setattr("star_hvd.channel.keys._Known.callback", stuck)
    ring = Keyring()
    _, port = ring.server("127.0.0.1")
    ring.admit([Peer(ring.public_key, "127.0.0.1", port, 0)])
    dealer = ring.client(0, b"0", port=port)
    assert inside.wait(60.0)
    ring.close(SOON_S)
    assert not dealer.closed, "its end waits for the authenticator's"
    go_on.set()
