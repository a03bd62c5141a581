"""Ends the poll of a thread that waits for sockets."""

from __future__ import annotations

import contextlib
import socket

__all__ = ["Wakeup"]


class Wakeup:
    """A file descriptor to be polled beside sockets, readable after `wake` until `clear`.

    `wake` may be called from any thread, before `close` and after it; all else belongs to the thread that polls.
    """

    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)

    def fileno(self) -> int:
        """The descriptor, -1 after `close`."""
        return self._read.fileno()

    def wake(self) -> None:
        """End the poll that runs, or the next one."""
        with contextlib.suppress(OSError):  # A full pipe means the thread is awake already.
            self._write.send(b"x")

    def clear(self) -> None:
        """Forget all calls of `wake`."""
        with contextlib.suppress(OSError):
            self._read.recv(4096)

    def close(self) -> None:
        """Give the descriptors back."""
        self._read.close()
        self._write.close()
