"""Who stands at a socket's door: connections that have not shown a key are few, small and short-lived.

ZeroMQ accepts everybody, gives each connection memory for a message before it has shown a key, and has no limit on how
many do so at once. The monitor of a socket tells the descriptor of every connection it accepts; here those whose
handshake is not complete are kept in a list, and the least likely ones are shut where there are too many, or where it
takes too long. A rank of the job that is shut by mistake connects again by itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import zmq

from star_hvd.channel.options import keep_alive
from star_hvd.threads import supervised

__all__ = ["CONTROL_BYTES", "DATA_BYTES", "HANDSHAKE_S", "MAX_PENDING", "SLACK_BYTES", "DoorWatch", "set_limits"]

logger = logging.getLogger("star_hvd")

HANDSHAKE_S = 5.0
"""A handshake takes four messages, milliseconds; a busy interpreter may hold the question whose key it is for some."""

MAX_PENDING = 16
"""Connections in the middle of their handshake, per socket, where the job is no larger. Each can hold a message of the
socket's largest size."""

SLACK_BYTES = 64 * 1024  # Of a message beside its payload: header, encryption.
CONTROL_BYTES = (1 << 20) + SLACK_BYTES
DATA_BYTES = (1 << 22) + SLACK_BYTES
"""The largest `Config.chunk_bytes`, and what is around it. Where a rank listens it takes no more than its own."""

_POLL_MS = 250
_BATCH = 256
_TRIM_S = 0.3
_NEW_S = 0.1
_EVENT = struct.Struct("=Hi")  # As the monitor sends it: event, and descriptor where there is one.
_WARN_AT = 20  # Connections turned away; a few are a scan of ports, or a rank that was slow once.

# In `struct tcp_info` of Linux: bytes the other side has acknowledged.
_TCP_INFO_BYTES, _BYTES_ACKED = 128, 120
_WELCOMED_BYTES, _ADMITTED_BYTES = 234, 240
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
    keep_alive(sock)


class DoorWatch:
    """Watches the doors of some sockets, with a thread for each, and counts who came and who was let in.

    The authenticator alone would not do: it never hears of a connection without a key.

    Args:
        max_pending: Connections per socket that may be in their handshake; `expect` raises it.
        handshake_s: Longest time they may take for it.
    """

    _EVENTS = (
        zmq.EVENT_LISTENING
        | zmq.EVENT_ACCEPTED
        | zmq.EVENT_HANDSHAKE_SUCCEEDED
        | zmq.EVENT_DISCONNECTED
        | zmq.EVENT_MONITOR_STOPPED
    )

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

    def expect(self, peers: int) -> None:
        """So many of the job's own may come at once, at its start for example: none of them is one too many."""
        self._max_pending = max(self._max_pending, peers)
        for door in self._doors:
            door.max_pending = self._max_pending

    def watch(self, router: zmq.Socket[Any]) -> None:
        """Count and limit what happens at a server from now on, before it is bound."""
        door = _Door(router.get_monitor_socket(self._EVENTS), self._max_pending, self._handshake_s)
        door.thread = supervised(self._run, "star-door", args=(door,), critical=False)
        self._doors.append(door)
        door.thread.start()

    def stop(self, deadline_s: float = 2.0) -> None:
        """End the threads and wait for them."""
        self._stop.set()
        for door in self._doors:
            if door.thread is not None:
                door.thread.join(deadline_s)

    def _run(self, door: _Door) -> None:
        # ZeroMQ's thread waits where its events are not read: this one ends with the socket it watches, not before.
        with contextlib.suppress(zmq.ZMQError):  # The context ends before this thread notices.
            while door.take_events() and not (self._stop.is_set() and not door.monitor.poll(0)):
                door.sweep(time.monotonic())
                door.trim(time.monotonic())
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
        self.max_pending, self._handshake_s = max_pending, handshake_s
        self._port, self._trimmed, self._trim_at_s = -1, 0, 0.0
        self._pending: dict[int, float] = {}  # Descriptor, and since when.

    @property
    def denied(self) -> int:
        return max(0, min(self._accepted - self._succeeded, self._disconnected))

    def take_events(self) -> bool:
        """Wait for something to happen, and note all of it; False when the socket is closed."""
        if not self.monitor.poll(_POLL_MS):
            return True
        now_s = time.monotonic()
        with contextlib.suppress(zmq.Again):
            for _ in range(_BATCH):  # In a flood there is always more, and the list has to be looked through.
                head, endpoint = self.monitor.recv_multipart(zmq.NOBLOCK)
                event, value = _EVENT.unpack(head)
                if event == zmq.EVENT_ACCEPTED:
                    self._accepted += 1
                    self._pending[value] = now_s
                elif event == zmq.EVENT_DISCONNECTED:
                    self._disconnected += 1
                    self._pending.pop(value, None)
                elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self._succeeded += 1
                elif event == zmq.EVENT_LISTENING:
                    self._port = int(endpoint.rsplit(b":", 1)[1])
                else:
                    return False
        return True

    def sweep(self, now_s: float) -> None:
        """Shut what waits for too long, and the least likely ones where too many wait."""
        overdue = {d for d, since_s in self._pending.items() if now_s - since_s > self._handshake_s}
        if not overdue and len(self._pending) <= self.max_pending:
            return
        progress = {descriptor: self._progress(descriptor) for descriptor in self._pending}
        waiting = [d for d, done in progress.items() if done < _ADMITTED_BYTES]
        surplus = self._unlikely(waiting, progress, now_s)[: max(0, len(waiting) - self.max_pending)]
        for descriptor in overdue.intersection(waiting).union(surplus):
            self._shut(descriptor)
            del self._pending[descriptor]
        for descriptor in progress.keys() - waiting:
            del self._pending[descriptor]

    def _unlikely(self, waiting: list[int], progress: dict[int, int], now_s: float) -> list[int]:
        """Who waits, in the order in which they are to go.

        Those go first that had time and have said little. A rank is past the WELCOME within milliseconds; so that
        nobody new can be kept out by those who go no further from there, half of the places are theirs at most.
        """
        known = sorted((d for d in waiting if progress[d] >= _WELCOMED_BYTES), key=self._pending.__getitem__)
        stay = set(known[max(0, len(known) - self.max_pending // 2) :])

        def order(descriptor: int) -> tuple[int, int, float]:
            since_s = self._pending[descriptor]
            if descriptor in stay:
                return 2, 0, since_s
            if now_s - since_s < _NEW_S:
                return 1, 0, since_s
            return 0, progress[descriptor], since_s

        return sorted(waiting, key=order)

    def trim(self, now_s: float) -> None:
        """Give the memory of messages that strangers had begun back to the system: the C library would keep it."""
        if self.evicted > self._trimmed and now_s >= self._trim_at_s:
            self._trimmed, self._trim_at_s = self.evicted, now_s + _TRIM_S
            with contextlib.suppress(AttributeError):  # Not of every C library.
                ctypes.CDLL(None).malloc_trim(0)

    def _progress(self, descriptor: int) -> int:
        """Bytes of the handshake that the peer has acknowledged; as if it were let in where the connection is gone."""
        try:
            with _lent(descriptor) as connection:
                if connection.getsockname()[1:] != (self._port,):  # The number is that of another file by now.
                    return _ADMITTED_BYTES
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
                return int(struct.unpack_from("<Q", info, _BYTES_ACKED)[0])
        except OSError:
            return _ADMITTED_BYTES

    def _shut(self, descriptor: int) -> None:
        with contextlib.suppress(OSError), _lent(descriptor) as connection:  # Gone in this very moment.
            if connection.getsockname()[1:] == (self._port,):
                self.evicted += 1
                # ZeroMQ's thread then reads the end of it, and closes it.
                connection.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def _lent(descriptor: int) -> Iterator[socket.socket]:
    """A connection of ZeroMQ's by its descriptor, which is not closed here.

    Raises:
        OSError: It is closed, or no socket.
    """
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, descriptor)
    try:
        yield connection
    finally:
        connection.detach()
