"""The socket between a rank and the server it owns: msgpack messages, with file descriptors as ancillary data.

`send` never blocks. Data that does not fit into the socket buffer is queued, and written by a thread that exists only
while something is queued. So a frozen or busy side never blocks the other.
"""

from __future__ import annotations

import contextlib
import errno
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
from star_hvd.locks import ordered_lock
from star_hvd.threads import supervised

__all__ = ["Message", "Pipe", "PipeFull"]

Message = dict[str, Any]

_LENGTH = struct.Struct("<Q")
_READ_BYTES = 1 << 20
_CHECK_S = 0.5  # Interval at which the writer checks whether the pipe was closed.
_MOST_BYTES = 64 << 20  # Unread bytes after which the other side counts as hung.
_MOST_ADVISORY = 256


class PipeFull(OSError):
    """The other side has left more than 64 MiB of queued messages unread."""


class _Item:
    """A queued message; if given as a function, it takes no memory until it is written.

    Args:
        message: The message, or a function that returns it.
        descriptor: Sent with it; owned by this object.
    """

    __slots__ = ("_make", "data", "descriptor", "sent")

    def __init__(self, message: Message | Callable[[], Message], descriptor: int | None) -> None:
        self._make = message if callable(message) else None
        self.data = memoryview(b"") if callable(message) else _framed(message)
        self.descriptor = descriptor
        self.sent = 0

    def make(self) -> None:
        """Serialize the message, unless that is already done."""
        if self._make is not None:
            self.data, self._make = _framed(self._make()), None

    def close(self) -> None:
        """Close the descriptor."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


def _framed(message: Message) -> memoryview:
    packed: bytes = msgpack.packb(message)
    return memoryview(_LENGTH.pack(len(packed)) + packed)


class Pipe:
    """One end of a pair of Unix sockets. `send` may be called from any thread, the rest from one.

    Args:
        end: The socket; owned by this object.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._buffer = bytearray()
        self._descriptors: deque[int] = deque()
        self._received: deque[Message | None] = deque()
        self._lock = ordered_lock("Pipe._lock")  # Guards the queue and writes; never held during a wait.
        self._queue: deque[_Item] = deque()
        self._writer: threading.Thread | None = None
        self._broken: OSError | None = None
        self._closed = False

    def fileno(self) -> int:
        """Return the socket's descriptor, for polling."""
        return self._socket.fileno()

    @property
    def broken(self) -> OSError | None:
        """Why nothing can be sent any more; None if it can."""
        return self._broken

    # ---- out ----------------------------------------------------------------------------------------------

    def send(
        self, message: Message | Callable[[], Message], descriptor: int | None = None, *, advisory: bool = False
    ) -> None:
        """Send a message, or queue it until the other side has read the earlier ones; never blocks.

        Args:
            message: The message, or for a large one a function that returns it, called in any thread when written.
            descriptor: Sent with it; duplicated, so the caller keeps its own.
            advisory: Drop the message if the other side has fallen behind in reading.

        Raises:
            PipeFull: The other side does not read.
            OSError: The other side is gone.
        """
        with self._lock:
            if self._broken is not None:
                raise self._broken
            if advisory and len(self._queue) >= _MOST_ADVISORY:
                return
            # The first item is being written and may be of any size.
            if sum(len(item.data) for item in itertools.islice(self._queue, 1, None)) >= _MOST_BYTES:
                raise PipeFull(f"{len(self._queue)} messages in a server's pipe are unread; the other side hangs")
            self._queue.append(_Item(message, None if descriptor is None else os.dup(descriptor)))
            if self._writer is None and not self._write():
                self._writer = supervised(self._write_later, "star-ps-pipe")
                self._writer.start()
            if self._broken is not None:
                raise self._broken

    def _write(self) -> bool:
        """Write what the socket accepts; the lock is held. Return whether the queue is empty."""
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
        """Thread: write while the other side reads, until nothing is queued."""
        poller = select.poll()
        poller.register(self._socket.fileno(), select.POLLOUT)
        while True:
            poller.poll(1e3 * _CHECK_S)
            with self._lock:
                if self._closed or self._write():
                    self._writer = None
                    return

    # ---- in -----------------------------------------------------------------------------------------------

    def receive(self) -> list[Message | None]:
        """Block until data arrives. Return the messages received, with None at the end if the other side is gone."""
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
        """Wait for data to `receive`. Return whether some has arrived, perhaps only part of a message."""
        if self._received:
            return True
        poller = select.poll()
        try:
            poller.register(self._socket.fileno(), select.POLLIN)
        except ValueError:  # Closed here.
            return True
        return bool(poller.poll(max(0.0, 1e3 * seconds)))

    def wait(self, deadline_s: float, stopped: Callable[[], bool] = lambda: False) -> Message:
        """Return the next message.

        Args:
            deadline_s: Longest wait.
            stopped: Checked twice a second; returning True ends the wait.

        Raises:
            DeadlineError: No message came in time, the wait was stopped, or the other side is gone.
        """
        limit_s = time.monotonic() + deadline_s
        while not self._received and not stopped() and (left_s := limit_s - time.monotonic()) > 0.0:
            if self.poll(min(_CHECK_S, left_s)):
                self._read()
        if not self._received and self.poll(0.0):  # It may have come just before the wait was stopped.
            self._read()
        if not self._received or self._received[0] is None:
            raise DeadlineError(f"no message came through the pipe of a parameter server within {deadline_s:g} s")
        found = self._received.popleft()
        assert found is not None
        return found

    def descriptor(self) -> int:
        """Return the next descriptor received."""
        return self._descriptors.popleft()

    def close(self, flush_s: float = 0.0) -> None:
        """Close this end and the received descriptors that were not taken.

        Args:
            flush_s: Longest wait before closing for the other side to read what is queued.
        """
        limit_s = time.monotonic() + flush_s
        while self._queue and time.monotonic() < limit_s:
            time.sleep(0.01)
        with self._lock:
            self._closed = True
            self._break(BrokenPipeError(errno.EPIPE, "the pipe is closed"))
            writer = self._writer
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # Wakes the writer and other pollers.
        if writer is not None and writer is not threading.current_thread():
            writer.join(2 * _CHECK_S)
        self._socket.close()
        while self._descriptors:
            os.close(self._descriptors.popleft())
