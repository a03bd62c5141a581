"""The socket between a rank and the server it owns: messages of msgpack, and descriptors of memory beside them.

Nobody waits in `send`. What the socket takes at once goes at once; the rest is queued and a thread, which exists only
while something is queued, writes it as the other side reads. So a side that stands still, frozen or busy, never stops
the other one.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgpack

from star_hvd.errors import DeadlineError
from star_hvd.threads import supervised

__all__ = ["Message", "Pipe", "PipeFull"]

Message = dict[str, Any]

_LENGTH = struct.Struct("<Q")
_READ_BYTES = 1 << 20
_LOOK_S = 0.5  # Between two looks of the writer whether the pipe was closed.
_MOST_BYTES = 64 << 20  # A side that left so much unread will not come back to it.
_MOST_ADVISORY = 256


class PipeFull(OSError):
    """The other side has not read for so long that no more is kept for it."""


class _Item:
    """A queued message; one that is made by a function takes no memory before its turn comes.

    Args:
        message: The message, or a function that makes it.
        descriptor: Sent with it; belongs to this object.
    """

    __slots__ = ("_make", "data", "descriptor", "sent")

    def __init__(self, message: Message | Callable[[], Message], descriptor: int | None) -> None:
        self._make = message if callable(message) else None
        self.data = memoryview(b"") if callable(message) else _framed(message)
        self.descriptor = descriptor
        self.sent = 0

    def make(self) -> None:
        """Make the bytes, if that is still to be done."""
        if self._make is not None:
            self.data, self._make = _framed(self._make()), None

    def close(self) -> None:
        """Give the descriptor up."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


def _framed(message: Message) -> memoryview:
    packed: bytes = msgpack.packb(message)
    return memoryview(_LENGTH.pack(len(packed)) + packed)


class Pipe:
    """One end of a pair of Unix sockets. `send` may be called from any thread, the rest from one.

    Args:
        end: The socket; belongs to this object.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._buffer = bytearray()
        self._descriptors: deque[int] = deque()
        self._received: deque[Message | None] = deque()
        self._lock = threading.Lock()  # Of the queue and of writing; never held across a wait.
        self._queue: deque[_Item] = deque()
        self._writer: threading.Thread | None = None
        self._broken: OSError | None = None
        self._closed = False

    def fileno(self) -> int:
        """For polling."""
        return self._socket.fileno()

    # ---- out ----------------------------------------------------------------------------------------------

    @property
    def queued(self) -> int:
        """Messages that the other side has not made room for."""
        return len(self._queue)

    @property
    def writing(self) -> bool:
        """Whether a thread writes what the socket did not take at once."""
        return self._writer is not None and self._writer.is_alive()

    def send(
        self, message: Message | Callable[[], Message], descriptor: int | None = None, *, advisory: bool = False
    ) -> None:
        """Send a message, now or when the other side has read what came before; never waits.

        Args:
            message: The message, or what makes it when its turn comes, for large ones; called in any thread.
            descriptor: Goes with it; it is copied.
            advisory: Leave it out where the other side has fallen behind in reading.

        Raises:
            PipeFull: The other side does not read at all.
            OSError: The other side is gone.
        """
        with self._lock:
            if self._broken is not None:
                raise self._broken
            if advisory and len(self._queue) >= _MOST_ADVISORY:
                return
            # The first one is being written, however large it is.
            if sum(len(item.data) for item in itertools.islice(self._queue, 1, None)) >= _MOST_BYTES:
                raise PipeFull(f"{len(self._queue)} messages are unread on the other side of a server's pipe")
            self._queue.append(_Item(message, None if descriptor is None else os.dup(descriptor)))
            if self._writer is None and not self._write():
                self._writer = supervised(self._write_later, "star-ps-pipe")
                self._writer.start()
            if self._broken is not None:
                raise self._broken

    def _write(self) -> bool:
        """Write what the socket takes; whether that was all. Under the lock."""
        try:
            while self._queue:
                item = self._queue[0]
                item.make()
                if item.descriptor is not None:
                    item.sent += socket.send_fds(
                        self._socket, [item.data[item.sent :]], [item.descriptor], socket.MSG_DONTWAIT
                    )
                    item.close()
                while item.sent < len(item.data):
                    item.sent += self._socket.send(item.data[item.sent :], socket.MSG_DONTWAIT)
                self._queue.popleft()
        except BlockingIOError:
            return False
        except OSError as error:
            self._break(error)
        return True

    def _break(self, error: OSError) -> None:
        self._broken = error
        for item in self._queue:
            item.close()
        self._queue.clear()

    def _write_later(self) -> None:
        """Thread: write as the other side reads, until nothing is queued."""
        poller = select.poll()
        poller.register(self._socket.fileno(), select.POLLOUT)
        while True:
            poller.poll(1e3 * _LOOK_S)
            with self._lock:
                if self._closed or self._write():
                    self._writer = None
                    return

    # ---- in -----------------------------------------------------------------------------------------------

    def receive(self) -> list[Message | None]:
        """What has come, after waiting for something; None behind it when the other side is gone."""
        if not self._received:
            self._read()
        found, self._received = list(self._received), deque()
        return found

    def _read(self) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._socket, _READ_BYTES, 8)
        except OSError:
            self._received.append(None)
            return
        self._descriptors.extend(descriptors)
        self._buffer += data
        position = 0
        while len(self._buffer) - position >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, position)
            if len(self._buffer) - position - _LENGTH.size < length:
                break
            position += _LENGTH.size
            message = msgpack.unpackb(memoryview(self._buffer)[position : position + length], strict_map_key=False)
            self._received.append(message)
            position += length
        del self._buffer[:position]
        if not data:
            self._received.append(None)

    def poll(self, seconds: float) -> bool:
        """Wait for something to `receive`; whether it has come. Part of a message may be all there is."""
        if self._received:
            return True
        poller = select.poll()
        try:
            poller.register(self._socket.fileno(), select.POLLIN)
        except ValueError:  # Closed here.
            return True
        return bool(poller.poll(max(0.0, 1e3 * seconds)))

    def wait(self, deadline_s: float, stopped: Callable[[], bool] = lambda: False) -> Message:
        """The next message.

        Args:
            deadline_s: Longest wait.
            stopped: Looked at while waiting: whether the wait has become pointless.

        Raises:
            DeadlineError: None came in time, or the other side is gone.
        """
        limit_s = time.monotonic() + deadline_s
        while not self._received and not stopped() and (left_s := limit_s - time.monotonic()) > 0.0:
            if self.poll(min(_LOOK_S, left_s)):
                self._read()
        if not self._received or self._received[0] is None:
            raise DeadlineError(f"nothing came through the pipe to a parameter server within {deadline_s:g} s")
        found = self._received.popleft()
        assert found is not None
        return found

    def descriptor(self) -> int:
        """The next descriptor that came."""
        return self._descriptors.popleft()

    def close(self, flush_s: float = 0.0) -> None:
        """Close this end and whatever descriptors nobody took.

        Args:
            flush_s: First wait so long for the other side to read what is queued.
        """
        limit_s = time.monotonic() + flush_s
        while self._queue and time.monotonic() < limit_s:
            time.sleep(0.01)
        with self._lock:
            self._closed = True
            self._break(OSError("the pipe is closed"))
            writer = self._writer
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # Wakes the writer, and whoever polls.
        if writer is not None and writer is not threading.current_thread():
            writer.join(2 * _LOOK_S)
        self._socket.close()
        while self._descriptors:
            os.close(self._descriptors.popleft())
