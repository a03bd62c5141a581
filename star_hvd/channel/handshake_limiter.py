"""Limits the number, memory and lifetime of connections that have not authenticated.

ZeroMQ accepts every connection, allocates memory for a message before the handshake is complete, and does not limit the
number of connections. A socket's monitor reports the descriptor of every accepted connection. This module lists those
whose handshake is incomplete, and shuts connections down if a handshake takes too long, or if there are too many: then
the least likely ones to be of the job. A rank of the job that is shut down by mistake reconnects. The kernel limits how
many arrive per second (`connection_filter`).
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import socket
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import zmq

from star_hvd.channel.connection_filter import RATE_PER_S, Share, lift, limit
from star_hvd.channel.options import keep_alive
from star_hvd.threads import supervised

__all__ = [
    "CONTROL_BYTES",
    "DATA_BYTES",
    "HANDSHAKE_S",
    "MAX_PENDING",
    "SLACK_BYTES",
    "HandshakeLimiter",
    "Listener",
    "set_limits",
]

logger = logging.getLogger("star_hvd")

HANDSHAKE_S = 5.0
"""A handshake takes four messages, in milliseconds; a busy interpreter may delay the authenticator's answer."""

MAX_PENDING = 16
"""Incomplete handshakes per socket; more in jobs with more ranks. Each can hold a message of the largest size."""

SLACK_BYTES = 64 * 1024  # For a message's header and encryption.
CONTROL_BYTES = (1 << 20) + SLACK_BYTES
DATA_BYTES = (1 << 22) + SLACK_BYTES
"""Allows the largest `Config.chunk_bytes`. A rank's own socket accepts only messages of up to its own `chunk_bytes`."""

_POLL_MS = 250
_SOON_MS, _LOOK_S = 20, 1.0  # Interval and duration of checks for the connection that has completed a handshake.
_PAUSE_S = 0.25
_BATCH = 256
_TRIM_S, _TRIM_BYTES = 2.0, 1 << 20  # Returning memory takes up to tens of milliseconds, under the allocator's lock.
_NEW_S = 0.1
_BURST = 2  # Connections that may come at once after a quiet time, as a multiple of those that may be pending.
_EVENT = struct.Struct("=Hi")  # A monitor's event: its number, and the descriptor or another value.
_WARN_AT = 20  # Rejected connections; a few may be a port scan, or a rank that was slow once.

# In `struct tcp_info` of Linux: bytes that the other side has acknowledged, followed by bytes received.
_TCP_INFO_BYTES, _BYTES_ACKED = 136, 120
_WELCOMED_BYTES, _ADMITTED_BYTES = 234, 240
"""Bytes that a peer has acknowledged after WELCOME and after READY. The server's greeting has 64 bytes, its WELCOME 170
(a peer gets it only if it knows the server's public key), and its READY after an accepted key at least 54."""


def set_limits(sock: zmq.Socket[Any], max_bytes: int) -> None:
    """Set the options of every socket of a job, before it is bound or connected.

    Args:
        sock: The socket.
        max_bytes: Largest message; a peer that announces a larger one is disconnected before memory is allocated.
    """
    sock.setsockopt(zmq.MAXMSGSIZE, max_bytes)
    sock.setsockopt(zmq.HANDSHAKE_IVL, round(1e3 * HANDSHAKE_S))
    # A full queue would drop messages; every protocol bounds what is in flight itself.
    sock.setsockopt(zmq.SNDHWM, 0)
    sock.setsockopt(zmq.RCVHWM, 0)
    keep_alive(sock)


class HandshakeLimiter:
    """Watches sockets, with one thread each, and counts accepted and authenticated connections.

    ZeroMQ's authenticator cannot do that: it never sees a connection that sends no key.

    Args:
        max_pending: Incomplete handshakes allowed per socket; `expect` raises it.
        handshake_s: Longest duration of a handshake.

    Attributes:
        listeners: The connections of every watched socket.
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
        self._known: frozenset[str] = frozenset()
        self.listeners: list[Listener] = []
        self._stop = threading.Event()
        self._warned = False

    @property
    def denied(self) -> int:
        """Connections that ended without authentication; one still in its handshake may be counted early."""
        return sum(listener.denied for listener in self.listeners)

    @property
    def evicted(self) -> int:
        """Connections shut down here: too many at once, or too slow."""
        return sum(listener.evicted for listener in self.listeners)

    def expect(self, peers: int) -> None:
        """Allow at least `peers` handshakes at a time, so that all ranks of the job can connect at once."""
        self._max_pending = max(self._max_pending, peers)
        for listener in self.listeners:
            listener.max_pending = self._max_pending

    def know(self, addresses: Iterable[str]) -> None:
        """Always let connections from these IPv4 addresses, the job's own, in."""
        self._known = frozenset(addresses)
        for listener in self.listeners:
            listener.known = self._known

    def watch(self, router: zmq.Socket[Any]) -> None:
        """Watch a server's socket, which must not be bound yet."""
        listener = Listener(router.get_monitor_socket(self._EVENTS), self._max_pending, self._handshake_s)
        listener.known = self._known
        listener.thread = supervised(self._run, "star-handshakes", args=(listener,), critical=False)
        self.listeners.append(listener)
        listener.thread.start()

    def stop(self, deadline_s: float = 2.0) -> None:
        """End the threads and wait for them."""
        self._stop.set()
        for listener in self.listeners:
            if listener.thread is not None:
                listener.thread.join(deadline_s)

    def _run(self, listener: Listener) -> None:
        # ZeroMQ's thread blocks if monitor events are not read, so this thread runs until its socket is closed.
        with contextlib.suppress(zmq.ZMQError):  # The context may end first.
            while listener.take_events() and not (self._stop.is_set() and not listener.monitor.poll(0)):
                listener.sweep(time.monotonic())
                listener.limit(time.monotonic())
                listener.trim(time.monotonic())
                self._warn()
                if listener.limited:  # Handle events in batches: each wake-up of this thread takes the GIL.
                    self._stop.wait(_PAUSE_S)
            listener.monitor.close(linger=0)

    def _warn(self) -> None:
        if self._warned or self.denied < _WARN_AT:
            return
        self._warned = True
        logger.warning(
            "%d connections without a key of this job were rejected so far, %d of them because more than %d were "
            "pending or after %g s; training goes on. From addresses that are not of this job, no more than %g per "
            "second are let in, %d at once. Use an interface that others cannot reach (STAR_INTERFACE, "
            "STAR_HOST), or a firewall; `denied_connections` of the report has the present count",
            self.denied,
            self.evicted,
            self._max_pending,
            self._handshake_s,
            RATE_PER_S,
            _BURST * self._max_pending,
        )


class Listener:
    """The connections of one socket, for one thread; others read only the counts.

    Args:
        monitor: The socket's monitor.
        max_pending: Incomplete handshakes allowed.
        handshake_s: Longest duration of a handshake.

    Attributes:
        accepted: Connections that were accepted.
        succeeded: Handshakes that succeeded.
        evicted: Connections that were shut down here.
        pending: Descriptors of the connections in their handshake, with the times when they were accepted.
        share: The share of foreign requests that is let in.
        filter: Share and addresses of the attached filter, None before it is attached.
    """

    def __init__(self, monitor: zmq.Socket[Any], max_pending: int, handshake_s: float) -> None:
        self.monitor = monitor
        self.thread: threading.Thread | None = None
        self.evicted = 0
        self.accepted = self.succeeded = self._disconnected = 0
        self.max_pending, self._handshake_s = max_pending, handshake_s
        self.known: frozenset[str] = frozenset()
        self._port, self._listener = -1, -1
        self._untrimmed_bytes, self._trim_at_s = 0, 0.0
        self.share = Share(time.monotonic())
        self.filter: tuple[float, frozenset[str]] | None = None
        self._look_until_s = 0.0
        self.pending: dict[int, float] = {}

    @property
    def denied(self) -> int:
        """Connections that ended without authentication."""
        return max(0, min(self.accepted - self.succeeded, self._disconnected))

    @property
    def limited(self) -> bool:
        """Whether the kernel drops requests for connections now."""
        return self.filter is not None and self.filter[0] < 1.0

    def take_events(self) -> bool:
        """Wait for monitor events and handle them. Return False once the socket is closed."""
        if not self.monitor.poll(_SOON_MS if time.monotonic() < self._look_until_s else _POLL_MS):
            return True
        now_s = time.monotonic()
        with contextlib.suppress(zmq.Again):
            for _ in range(_BATCH):  # Bounded, so that `sweep` runs during a flood.
                head, endpoint = self.monitor.recv_multipart(zmq.NOBLOCK)
                event, value = _EVENT.unpack(head)
                if event == zmq.EVENT_ACCEPTED:
                    self.accepted += 1
                    self.pending[value] = now_s
                    if not self._is_known(value):
                        self.share.note()
                    else:  # Its filter may be older than its address here.
                        self._lift(value)
                elif event == zmq.EVENT_DISCONNECTED:
                    self._disconnected += 1
                    self.pending.pop(value, None)
                elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self.succeeded += 1
                    self._look_until_s = now_s + _LOOK_S
                elif event == zmq.EVENT_LISTENING:
                    self._port, self._listener = int(endpoint.rsplit(b":", 1)[1]), value
                else:
                    return False
        return True

    def sweep(self, now_s: float) -> None:
        """Shut down handshakes that take too long and, if there are too many, the ones least likely to be the job's."""
        overdue = {d for d, since_s in self.pending.items() if now_s - since_s > self._handshake_s}
        if not overdue and len(self.pending) <= self.max_pending and now_s >= self._look_until_s:
            return
        progress = {descriptor: self.progress_bytes(descriptor) for descriptor in self.pending}
        waiting = [d for d, done in progress.items() if done < _ADMITTED_BYTES]
        surplus = self._unlikely(waiting, progress, now_s)[: max(0, len(waiting) - self.max_pending)]
        for descriptor in overdue.intersection(waiting).union(surplus):
            self._shut(descriptor)
            del self.pending[descriptor]
        for descriptor in progress.keys() - waiting:
            del self.pending[descriptor]
            self._lift(descriptor)

    def _unlikely(self, waiting: list[int], progress: dict[int, int], now_s: float) -> list[int]:
        """Return the incomplete handshakes in the order in which they are shut down.

        Those that had time and made little progress come first. A rank is past WELCOME within milliseconds. Connections
        that stop there keep at most half of the places, so that they cannot keep new ones out.
        """
        known = sorted((d for d in waiting if progress[d] >= _WELCOMED_BYTES), key=self.pending.__getitem__)
        stay = set(known[max(0, len(known) - self.max_pending // 2) :])

        def order(descriptor: int) -> tuple[int, int, float]:
            since_s = self.pending[descriptor]
            if descriptor in stay:
                return 2, 0, since_s
            if now_s - since_s < _NEW_S:
                return 1, 0, since_s
            return 0, progress[descriptor], since_s

        return sorted(waiting, key=order)

    def limit(self, now_s: float) -> None:
        """Attach the filter: at once, so that no stranger can send much, and again when its values change."""
        self.share.turn(now_s, _BURST * self.max_pending)
        wanted = self.share.value, self.known
        if self._listener >= 0 and wanted != self.filter:
            self.filter = wanted
            with contextlib.suppress(OSError), _lent(self._listener) as listener:  # Closed, or unsupported here.
                if listener.getsockname()[1:] == (self._port,):
                    limit(listener, *wanted)

    def trim(self, now_s: float) -> None:
        """Return the memory of unauthenticated messages, which the C library would keep, to the system."""
        if self._untrimmed_bytes >= _TRIM_BYTES and now_s >= self._trim_at_s:
            self._untrimmed_bytes, self._trim_at_s = 0, now_s + _TRIM_S
            with contextlib.suppress(AttributeError):  # Not in every C library.
                ctypes.CDLL(None).malloc_trim(0)

    def _lift(self, descriptor: int) -> None:
        with contextlib.suppress(OSError), _lent(descriptor) as connection:
            if connection.getsockname()[1:] == (self._port,):
                lift(connection)

    def _is_known(self, descriptor: int) -> bool:
        try:
            with _lent(descriptor) as connection:
                peer = connection.getpeername()
                return isinstance(peer, tuple) and peer[0] in self.known  # Of a reused descriptor anything.
        except OSError:
            return False

    def progress_bytes(self, descriptor: int) -> int:
        """Return the handshake bytes that the peer has acknowledged; `_ADMITTED_BYTES` if the connection is gone."""
        try:
            with _lent(descriptor) as connection:
                if connection.getsockname()[1:] != (self._port,):  # The descriptor was reused.
                    return _ADMITTED_BYTES
                return _acked_and_received(connection)[0]
        except OSError:
            return _ADMITTED_BYTES

    def _shut(self, descriptor: int) -> None:
        with contextlib.suppress(OSError), _lent(descriptor) as connection:  # Closed meanwhile.
            if connection.getsockname()[1:] == (self._port,):
                self.evicted += 1
                self._untrimmed_bytes += _acked_and_received(connection)[1]
                # ZeroMQ's thread then reads the end of the stream and closes it.
                connection.shutdown(socket.SHUT_RDWR)


def _acked_and_received(connection: socket.socket) -> tuple[int, int]:
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    acked, received = struct.unpack_from("<QQ", info, _BYTES_ACKED)
    return int(acked), int(received)


@contextlib.contextmanager
def _lent(descriptor: int) -> Iterator[socket.socket]:
    """Yield a socket object for one of ZeroMQ's descriptors, which stays open.

    Raises:
        OSError: The descriptor is closed, or no socket.
    """
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, descriptor)
    try:
        yield connection
    finally:
        connection.detach()
