"""Reports where the program waits for other ranks, for the coordinator to find ranks that wait for each other."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Protocol

from star_hvd.channel.messages.base import Message
from star_hvd.channel.messages.waits import ProgramWait

__all__ = ["ProgramWaits"]


class _Sender(Protocol):
    def __call__(self, message: Message, *, urgent: bool = True) -> None: ...


class ProgramWaits:
    """Counts the collectives of all ranks that the program calls in the thread that makes this, and reports waits.

    All ranks call them in the same order, or they would wait for each other for ever. So a rank that has called fewer
    of them is the one that another waits for. Other threads may be anywhere in that order: they are left out, and a
    rank that waits in one of them counts as one that does not wait.

    A collective that raises an error may have done so on this rank alone, before any other had to call it. If the
    program goes on, its count differs from the others', so nothing is reported any more until `join` begins it anew.

    Args:
        send: Sends a message to the coordinator; does not wait.
    """

    def __init__(self, send: _Sender) -> None:
        self._send = send
        self._thread = threading.current_thread()
        self._watched = False  # Whether there was a loop over `shard`: without one there is nothing to be reported.
        self._calls = self._joins = 0
        self._inside = False
        self._alike = True  # Whether this rank's count can be compared with the others'.

    @property
    def in_its_thread(self) -> bool:
        """Whether this is called in the thread whose waits are reported."""
        return threading.current_thread() is self._thread

    def watch(self) -> None:
        """Report collectives from now on, as this rank has begun a loop over `shard`."""
        self._watched = True

    @contextlib.contextmanager
    def during(self, operation: str) -> Iterator[None]:
        """The block is a collective of all ranks that the program has called; one within another is a part of it.

        Its end is reported, too: counts alone would not show it where one rank has called more than the others, as with
        a collective of nothing, which returns at once.

        Args:
            operation: Name of the function.
        """
        if self._inside or not self.in_its_thread:
            yield
            return
        self._calls, self._inside = self._calls + 1, True
        self._report(operation)
        ended = False
        try:
            yield
            ended = True
        finally:
            self._inside = False
            self._report("")
            self._alike = self._alike and ended

    def in_loop(self, loader: int, epoch: int) -> None:
        """Note that a loop over `shard` begins to wait for samples, or for other ranks at its end."""
        if self._alike and self.in_its_thread:
            self._send(ProgramWait(self._calls, self._joins, "", loader, epoch))

    def joined(self) -> None:
        """Note that all ranks leave `join`, in which they did not take part alike in the others' collectives."""
        self._calls, self._joins, self._alike = 0, self._joins + 1, True

    def _report(self, operation: str) -> None:
        if self._watched and self._alike:
            self._send(ProgramWait(self._calls, self._joins, operation), urgent=False)
