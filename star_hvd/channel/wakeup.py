"""Ends the poll of a thread that waits for sockets."""

from __future__ import annotations

import contextlib
import socket
import threading

__all__ = ["Wakeup"]


class Wakeup:
    """A file descriptor to poll together with sockets; readable after `wake` until `clear`.

    Any thread may call `wake`, before or after `close`. The thread that stops the polling thread calls `end`. Only the
    polling thread uses the rest.
    """

    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)

    def fileno(self) -> int:
        """Return the descriptor, -1 after `close`."""
        return self._read.fileno()

    def wake(self) -> None:
        """End the current poll, or the next one."""
        with contextlib.suppress(OSError):  # A full pipe means the thread is awake already.
            self._write.send(b"x")

    def clear(self) -> None:
        """Forget all calls of `wake`."""
        with contextlib.suppress(OSError):
            self._read.recv(4096)

    def end(self, thread: threading.Thread, deadline_s: float) -> None:
        """Wake the polling thread, which was told to stop, wait for its end, and close.

        If the thread misses the deadline, the descriptor stays open, because the thread still polls it.
        """
        self.wake()
        if thread.ident is not None and thread is not threading.current_thread():
            thread.join(deadline_s)
        if not thread.is_alive():
            self.close()

    def close(self) -> None:
        """Close the descriptors."""
        self._read.close()
        self._write.close()
