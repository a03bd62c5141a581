"""A TCP proxy on loopback that can reset, delay, stall or split the data between two peers.

It understands enough of ZeroMQ's framing (a greeting of 64 bytes, then frames preceded by their size) to break a
connection at a chosen frame, or in the middle of one; encrypted frames have the same form.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass, field

__all__ = ["TO_CLIENT", "TO_SERVER", "Proxy"]

TO_SERVER, TO_CLIENT = 0, 1
_GREETING_BYTES = 64
_READ_BYTES = 1 << 16
_MOST_WAITING = 1 << 20
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER with zero time: closing sends a reset.


class _Frames:
    """Finds the ends of frames in a stream of bytes."""

    def __init__(self) -> None:
        self._head = b""
        self._left = _GREETING_BYTES
        self._greeting = True

    def next_end(self, data: memoryview) -> tuple[int, bool]:
        """Return the bytes up to the end of the current frame, at most all of `data`, and whether it ends there."""
        taken = 0
        while taken < len(data):
            if self._left:
                step = min(self._left, len(data) - taken)
                self._left -= step
                taken += step
                if not self._left:
                    was_greeting, self._greeting = self._greeting, False
                    return taken, not was_greeting
                continue
            self._head += bytes(data[taken : taken + 1])
            taken += 1
            size_bytes = 8 if self._head[0] & 2 else 1
            if len(self._head) == 1 + size_bytes:
                self._left = int.from_bytes(self._head[1:], "big")
                self._head = b""
                if not self._left:
                    return taken, True
        return taken, False


@dataclass
class _Way:
    """One direction of one connection."""

    frames: _Frames = field(default_factory=_Frames)
    waiting: deque[tuple[float, bytes]] = field(default_factory=deque)
    waiting_bytes: int = 0
    passed: int = 0
    ended: bool = False


@dataclass
class _Connection:
    client: socket.socket
    server: socket.socket
    ways: tuple[_Way, _Way] = field(default_factory=lambda: (_Way(), _Way()))
    stuck: bool = False

    def source(self, way: int) -> socket.socket:
        return self.client if way == TO_SERVER else self.server

    def target(self, way: int) -> socket.socket:
        return self.server if way == TO_SERVER else self.client


@dataclass
class _Plan:
    """When to reset a connection."""

    way: int
    frames: int
    inside: bool


class Proxy:
    """A listening port that forwards to another one.

    Args:
        port: The target port, on loopback.
        delay_s: Delay of all data.
        piece_bytes: Largest piece that is sent at once.

    Attributes:
        port: The listening port.
        connections: Connections accepted so far.
        cuts: Connections reset so far.
    """

    def __init__(self, port: int, *, delay_s: float = 0.0, piece_bytes: int = _READ_BYTES) -> None:
        self._target = ("127.0.0.1", port)
        self._delay_s, self._piece_bytes = delay_s, piece_bytes
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self.connections = self.cuts = 0
        self._open: list[_Connection] = []
        self._plan: _Plan | None = None
        self._cut_at_byte: tuple[int, int] | None = None
        self._refusing = self._cut_now = self._stick_now = False
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._bell = os.pipe()
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._run, name="test-proxy", daemon=True)
        self._thread.start()

    # ---- for tests ----------------------------------------------------------------------------------------

    def cut(self) -> None:
        """Reset all connections."""
        with self._lock:
            self._cut_now = True
        self._ring()

    def arm(self, way: int, frames: int, *, inside: bool = False) -> None:
        """Reset the connection after `frames` more frames in a direction, or in the middle of the one after them.

        Handshake frames count.
        """
        with self._lock:
            self._plan = _Plan(way, frames, inside)

    def arm_at_byte(self, way: int, offset: int) -> None:
        """Reset the next connection when `offset` bytes of it have passed in a direction."""
        with self._lock:
            self._cut_at_byte = (way, offset)

    @property
    def armed(self) -> bool:
        """Whether a planned reset is still pending."""
        with self._lock:
            return self._plan is not None or self._cut_at_byte is not None

    def disarm(self) -> bool:
        """Cancel the planned reset; return whether there was one."""
        with self._lock:
            planned = self._plan is not None or self._cut_at_byte is not None
            self._plan = self._cut_at_byte = None
            return planned

    def delay(self, delay_s: float) -> None:
        """Delay all data from now on, which also limits the rate: at most 1 MiB waits in each direction."""
        self._delay_s = delay_s

    def stall(self) -> None:
        """Keep the present connections open but forward nothing more (half open). New connections still work."""
        with self._lock:
            self._stick_now = True
        self._ring()

    def refuse(self, on: bool = True) -> None:
        """Reset all connections and every new one; with `on=False`, accept connections again."""
        with self._lock:
            self._refusing = on
            self._cut_now = self._cut_now or on
        self._ring()

    def close(self) -> None:
        """Reset everything and end the thread."""
        self._stop.set()
        self._ring()
        self._thread.join(90.0)
        assert not self._thread.is_alive(), "the proxy did not end"
        for end in self._bell:
            os.close(end)

    def _ring(self) -> None:
        os.write(self._bell[1], b"!")

    # ---- the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._selector.register(self._bell[0], selectors.EVENT_READ, None)
        while not self._stop.is_set():
            for key, _ in self._selector.select(self._due_s()):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj == self._bell[0]:
                    os.read(self._bell[0], 4096)
            with self._lock:
                cut, self._cut_now = self._cut_now, False
                stick, self._stick_now = self._stick_now, False
            for connection in list(self._open):
                connection.stuck |= stick
                if cut:
                    self._reset(connection)
                elif not connection.stuck:
                    self._pass(connection)
            self._watch()
        for connection in list(self._open):
            self._reset(connection)
        self._listener.close()
        self._selector.close()

    def _due_s(self) -> float:
        now_s = time.monotonic()
        firsts = [way.waiting[0][0] for each in self._open if not each.stuck for way in each.ways if way.waiting]
        return min((due_s - now_s for due_s in firsts if due_s > now_s), default=1.0)  # Overdue data waits for room.

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            client, (address, _) = self._listener.accept()
            if self._refusing:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                client.close()
                return
            try:
                # From the client's own address, by which the job's connections are known.
                server = socket.create_connection(self._target, 60.0, source_address=(address, 0))
            except OSError:
                client.close()
                return
            for end in (client, server):
                end.setblocking(False)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._open.append(_Connection(client, server))
            self.connections += 1

    def _watch(self) -> None:
        """Select the sockets on which progress is possible."""
        wanted: dict[socket.socket, int] = {}
        now_s = time.monotonic()
        for each in self._open:
            for number, way in enumerate(each.ways):
                if not each.stuck and not way.ended and way.waiting_bytes < _MOST_WAITING:
                    source = each.source(number)
                    wanted[source] = wanted.get(source, 0) | selectors.EVENT_READ
                if not each.stuck and way.waiting and way.waiting[0][0] <= now_s:
                    target = each.target(number)
                    wanted[target] = wanted.get(target, 0) | selectors.EVENT_WRITE
        for key in list(self._selector.get_map().values()):
            if key.fileobj is not self._listener and key.fileobj != self._bell[0] and key.fileobj not in wanted:
                self._selector.unregister(key.fileobj)
        for end, events in wanted.items():
            if end not in self._selector.get_map():
                self._selector.register(end, events, None)
            else:
                self._selector.modify(end, events, None)

    def _pass(self, connection: _Connection) -> None:
        for number in (TO_SERVER, TO_CLIENT):
            try:
                self._read(connection, number)
                done = self._write(connection, number)
            except OSError:
                done = True
            if done:
                self._reset(connection)
                return
        if all(way.ended and not way.waiting for way in connection.ways):
            self._reset(connection, planned=False)

    def _read(self, connection: _Connection, number: int) -> None:
        way = connection.ways[number]
        if way.ended or way.waiting_bytes >= _MOST_WAITING:
            return
        with contextlib.suppress(BlockingIOError):
            data = connection.source(number).recv(_READ_BYTES)
            way.ended = not data
            if data:
                way.waiting.append((time.monotonic() + self._delay_s, data))
                way.waiting_bytes += len(data)

    def _write(self, connection: _Connection, number: int) -> bool:
        """Forward data that is due; return whether to reset the connection now."""
        way, target = connection.ways[number], connection.target(number)
        while way.waiting and way.waiting[0][0] <= time.monotonic():
            due_s, data = way.waiting.popleft()
            way.waiting_bytes -= len(data)
            allowed, cut = self._allowed(way, number, data)
            sent = 0
            try:
                while sent < allowed:
                    sent += target.send(data[sent : min(allowed, sent + self._piece_bytes)])
            except BlockingIOError:
                self._put_back(way, due_s, data[sent:])
                way.passed += sent
                return cut  # A reset is then earlier than planned, as the receiver accepts no more data now.
            way.passed += sent
            if cut:
                return True
        if way.ended and not way.waiting:
            with contextlib.suppress(OSError):
                target.shutdown(socket.SHUT_WR)
        return False

    def _put_back(self, way: _Way, due_s: float, data: bytes) -> None:
        """Requeue unsent data; its bytes count as frames again, so plans are exact for small messages only."""
        way.waiting.appendleft((due_s, data))
        way.waiting_bytes += len(data)

    def _allowed(self, way: _Way, number: int, data: bytes) -> tuple[int, bool]:
        """Return how many of these bytes may pass, and whether the connection is reset after them."""
        with self._lock:
            at_byte = self._cut_at_byte
            if at_byte is not None and at_byte[0] == number and way.passed + len(data) >= at_byte[1]:
                self._cut_at_byte = None
                return max(0, at_byte[1] - way.passed), True
            position, view = 0, memoryview(data)
            while position < len(data):
                size, whole = way.frames.next_end(view[position:])
                plan = self._plan
                if plan is not None and plan.way == number:
                    if plan.inside and plan.frames == 0:
                        self._plan = None
                        return position + max(1, size // 2), True
                    if whole:
                        plan.frames -= 1
                        if not plan.inside and plan.frames <= 0:
                            self._plan = None
                            return position + size, True
                position += size
        return len(data), False

    def _reset(self, connection: _Connection, *, planned: bool = True) -> None:
        self._open.remove(connection)
        self.cuts += planned
        for end in (connection.client, connection.server):
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(end)
            with contextlib.suppress(OSError):
                if planned:
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                end.close()
