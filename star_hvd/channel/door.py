"""Who stands at a socket's door: connections that have not shown a key are few, small and short-lived.

ZeroMQ accepts everybody, gives each connection memory for a message before it has shown a key, and has no limit on how
many do so at once. The monitor of a socket tells the descriptor of every connection it accepts; here those whose
handshake is not complete are kept in a list, and the least likely ones are shut where there are too many, or where it
takes too long. A rank of the job that is shut by mistake connects again by itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
import time
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

__all__ = ["CONTROL_BYTES", "DATA_BYTES", "HANDSHAKE_S", "MAX_PENDING", "SLACK_BYTES", "DoorWatch", "set_limits"]

logger = logging.getLogger("star_hvd")

HANDSHAKE_S = 5.0
"""A handshake takes four messages, milliseconds; a busy interpreter may hold the question whose key it is for some."""

MAX_PENDING = 16
"""Connections in the middle of their handshake, per socket. Each can hold a message of the socket's largest size."""

SLACK_BYTES = 64 * 1024  # Of a message beside its payload: header, encryption.
CONTROL_BYTES = (1 << 20) + SLACK_BYTES
DATA_BYTES = (1 << 22) + SLACK_BYTES  # The largest `Config.chunk_bytes`; a rank's own socket takes no more than its own.
_RECONNECT_MS, _RECONNECT_MAX_MS = 100, 500
_POLL_MS = 250
_WARN_AT = 20  # Connections turned away; a few are a scan of ports, or a rank that was slow once.

# In `struct tcp_info` of Linux: bytes the other side has acknowledged.
_TCP_INFO_BYTES, _BYTES_ACKED = 128, 120
_ADMITTED_BYTES = 240
"""Acknowledged by a peer that was let in. The server's greeting has 64 bytes, its WELCOME, for which the peer has to
know the server's public key, 170, and the READY behind an accepted key at least 54."""


def set_limits(sock: zmq.Socket[Any], max_bytes: int) -> None:
    """What holds for every socket of a job, before it is bound or connected.

    Args:
        sock: The socket.
        max_bytes: Largest message it takes; whoever announces more is disconnected before anything is allocated.
    """
    sock.setsockopt(zmq.MAXMSGSIZE, max_bytes)
    sock.setsockopt(zmq.HANDSHAKE_IVL, round(1e3 * HANDSHAKE_S))
    # No message of a rank is lost to a full queue; every protocol bounds what is under way by itself.
    sock.setsockopt(zmq.SNDHWM, 0)
    sock.setsockopt(zmq.RCVHWM, 0)
    sock.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    sock.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)


@dataclass(slots=True)
class _Pending:
    peer: Any  # Its address, to tell it from a later owner of the same descriptor.
    since_s: float


class DoorWatch:
    """Watches the doors of some sockets, with a thread for each, and counts who came and who was let in.

    The authenticator alone would not do: it never hears of a connection without a key.

    Args:
        max_pending: Connections per socket that may be in their handshake.
        handshake_s: Longest time they may take for it.
    """

    _EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED

    def __init__(self, max_pending: int = MAX_PENDING, handshake_s: float = HANDSHAKE_S) -> None:
        self._max_pending, self._handshake_s = max_pending, handshake_s
        self._doors: list[_Door] = []
        self._stop = threading.Event()
        self._warned = False

    @property
    def denied(self) -> int:
        """Connections that ended without having been let in; one in the middle of its handshake may count early."""
        return sum(door.denied for door in self._doors)

    @property
    def evicted(self) -> int:
        """Connections that were shut here: too many at once, or too slow."""
        return sum(door.evicted for door in self._doors)

    def watch(self, router: zmq.Socket[Any]) -> None:
        """Count and limit what happens at a server from now on, before it is bound."""
        door = _Door(router.get_monitor_socket(self._EVENTS), self._max_pending, self._handshake_s)
        door.thread = threading.Thread(target=self._run, args=(door,), name="star-door", daemon=True)
        self._doors.append(door)
        door.thread.start()

    def stop(self, deadline_s: float = 2.0) -> None:
        """End the threads and wait for them."""
        self._stop.set()
        for door in self._doors:
            if door.thread is not None:
                door.thread.join(deadline_s)

    def _run(self, door: _Door) -> None:
        with contextlib.suppress(zmq.ZMQError):  # The context ends before this thread notices.
            while not self._stop.is_set() and door.take_events():
                door.sweep(time.monotonic())
                self._warn()
            door.monitor.close(linger=0)

    def _warn(self) -> None:
        if self._warned or self.denied < _WARN_AT:
            return
        self._warned = True
        logger.warning(
            "%d connections that showed no key of this job were turned away so far, %d of them for more than %d at "
            "once or more than %g s without a key; training goes on. Put the job on an interface that others do not "
            "reach (STAR_INTERFACE, STAR_HOST), or close its ports to them; `denied_connections` of the report counts "
            "on",
            self.denied,
            self.evicted,
            self._max_pending,
            self._handshake_s,
        )


class _Door:
    """One socket's door; all but the counts belongs to its thread."""

    def __init__(self, monitor: zmq.Socket[Any], max_pending: int, handshake_s: float) -> None:
        self.monitor = monitor
        self.thread: threading.Thread | None = None
        self.evicted = 0
        self._accepted = self._succeeded = self._disconnected = 0
        self._max_pending, self._handshake_s = max_pending, handshake_s
        self._pending: dict[int, _Pending] = {}

    @property
    def denied(self) -> int:
        return max(0, min(self._accepted - self._succeeded, self._disconnected))

    def take_events(self) -> bool:
        """Wait for something to happen, and note all of it; False when the socket is closed."""
        if not self.monitor.poll(_POLL_MS):
            return True
        # A bounded number, so that in a flood the list is looked through before it is over.
        for _ in range(4 * self._max_pending):
            told = recv_monitor_message(self.monitor)
            event, descriptor = told["event"], told["value"]
            if event == zmq.EVENT_MONITOR_STOPPED:
                return False
            if event == zmq.EVENT_ACCEPTED:
                self._accepted += 1
                self._note(descriptor)
            elif event == zmq.EVENT_DISCONNECTED:
                self._disconnected += 1
                self._pending.pop(descriptor, None)
            else:
                self._succeeded += 1
            if not self.monitor.poll(0):
                break
        return True

    def _note(self, descriptor: int) -> None:
        connection = _borrow(descriptor)
        if connection is not None:
            with connection, contextlib.suppress(OSError):  # Gone already.
                self._pending[descriptor] = _Pending(connection.getpeername(), time.monotonic())

    def sweep(self, now_s: float) -> None:
        """Shut what waits for too long, and the least likely ones where too many wait."""
        overdue = [d for d, each in self._pending.items() if now_s - each.since_s > self._handshake_s]
        if not overdue and len(self._pending) <= self._max_pending:
            return
        progress = {descriptor: self._progress(descriptor) for descriptor in list(self._pending)}
        waiting = [d for d, done in progress.items() if done < _ADMITTED_BYTES]
        for descriptor in progress.keys() - waiting:
            del self._pending[descriptor]
        # Whoever has got further in the handshake is likelier to be of the job; of equals the oldest goes.
        waiting.sort(key=lambda d: (progress[d], self._pending[d].since_s))
        surplus = waiting[: max(0, len(waiting) - self._max_pending)]
        for descriptor in {*surplus, *(d for d in overdue if d in self._pending)}:
            self._shut(descriptor)

    def _progress(self, descriptor: int) -> int:
        """Bytes of the handshake that the peer has acknowledged; more than any handshake has where it is gone."""
        connection = _borrow(descriptor, self._pending[descriptor].peer)
        if connection is None:
            return _ADMITTED_BYTES
        with connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        return int(struct.unpack_from("<Q", info, _BYTES_ACKED)[0])

    def _shut(self, descriptor: int) -> None:
        connection = _borrow(descriptor, self._pending.pop(descriptor).peer)
        if connection is not None:
            self.evicted += 1
            with connection, contextlib.suppress(OSError):  # Gone in this very moment.
                # ZeroMQ's thread reads the end and closes the descriptor, which is its own.
                connection.shutdown(socket.SHUT_RDWR)


def _borrow(descriptor: int, peer: Any = None) -> socket.socket | None:
    """A connection of ZeroMQ's by its descriptor; None where that is closed, or belongs to something else by now.

    Args:
        descriptor: The number.
        peer: The address that the connection must have, where known.
    """
    try:
        copy = os.dup(descriptor)
    except OSError:
        return None
    try:
        connection = socket.socket(fileno=copy)
    except OSError:  # Not a socket.
        os.close(copy)
        return None
    with contextlib.suppress(OSError):
        stream = connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM
        if stream and (peer is None or connection.getpeername() == peer):
            return connection
    connection.close()
    return None
