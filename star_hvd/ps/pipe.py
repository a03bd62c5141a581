"""The socket between a rank and the server it owns: messages of msgpack, and descriptors of memory beside them."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections import deque
from typing import Any

import msgpack

from star_hvd.errors import DeadlineError

__all__ = ["Pipe"]

_LENGTH = struct.Struct("<Q")
_READ_BYTES = 1 << 20


class Pipe:
    """One end of a pair of Unix sockets.

    Args:
        end: The socket; belongs to this object.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._buffer = bytearray()
        self._descriptors: deque[int] = deque()
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """For polling."""
        return self._socket.fileno()

    def send(self, message: dict[str, Any], descriptor: int | None = None) -> None:
        """Send a message; a descriptor that goes with it is copied.

        Raises:
            OSError: The other side is gone.
        """
        data = msgpack.packb(message)
        head = _LENGTH.pack(len(data))
        with self._lock:
            if descriptor is None:
                self._socket.sendall(head)
            else:
                socket.send_fds(self._socket, [head], [descriptor])
            self._socket.sendall(data)

    def receive(self) -> list[dict[str, Any] | None]:
        """What has come, after waiting for something; None behind it when the other side is gone."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._socket, _READ_BYTES, 8)
        except OSError:
            return [None]
        self._descriptors.extend(descriptors)
        self._buffer += data
        found: list[dict[str, Any] | None] = []
        position = 0
        while len(self._buffer) - position >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, position)
            if len(self._buffer) - position - _LENGTH.size < length:
                break
            position += _LENGTH.size
            found.append(msgpack.unpackb(memoryview(self._buffer)[position : position + length], strict_map_key=False))
            position += length
        del self._buffer[:position]
        return found if data else [*found, None]

    def wait(self, deadline_s: float) -> dict[str, Any]:
        """The first message.

        Raises:
            DeadlineError: None came in time, or the other side is gone.
        """
        self._socket.settimeout(deadline_s)
        try:
            while not (found := self.receive()):
                pass
        finally:
            self._socket.settimeout(None)
        if found[0] is None:
            raise DeadlineError(f"nothing came through the pipe to a parameter server within {deadline_s:g} s")
        return found[0]

    def descriptor(self) -> int:
        """The next descriptor that came."""
        return self._descriptors.popleft()

    def close(self) -> None:
        """Close this end and whatever descriptors nobody took."""
        self._socket.close()
        while self._descriptors:
            os.close(self._descriptors.popleft())
