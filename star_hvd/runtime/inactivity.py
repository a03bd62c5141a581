"""Periods in which the training thread delivers no gradients: at the end of its data, or in a collective of the user's.

They may be nested, and any thread may start one, which the same thread ends. Engines, servers and the coordinator hear
only of the outermost period, of its start and its end in this order. Servers confirm the start, so that when a rank
leaves the user's collective they wait for no rank that is still inside; this rank waits for the confirmation outside
the lock.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from star_hvd.channel.messages.base import Away, Message
from star_hvd.locks import ordered_lock

__all__ = ["Inactivity"]


class Driver(Protocol):
    """The part of `star_hvd.modes.driver.StepDriver` used here."""

    def set_inactive(self, inactive: bool) -> None: ...
    def confirm_inactive(self) -> None: ...


class Inactivity:
    """See the module's text.

    Args:
        drivers: Drivers of all optimizers, by number; filled by others.
        send: Sends a message to the coordinator.
    """

    def __init__(self, drivers: Mapping[int, Driver], send: Callable[[Message], None]) -> None:
        self._drivers = drivers
        self._send = send
        self._lock = ordered_lock("Inactivity._lock")
        self._depth = 0  # Of all threads.
        self._of_thread = threading.local()

    # Ranks that decide whether to meet must not depend on what other threads of theirs do just then.

    @property
    def inside(self) -> bool:
        """Whether a period of the calling thread is in progress."""
        return self._own_depth > 0

    @property
    def nested(self) -> bool:
        """Whether a period of the calling thread is inside another of its own."""
        return self._own_depth > 1

    @property
    def _own_depth(self) -> int:
        return getattr(self._of_thread, "depth", 0)

    @contextlib.contextmanager
    def during(self, reason: str, *, out_of_data: bool) -> Iterator[None]:
        """Make the block a period of inactivity."""
        try:
            self.enter(reason, out_of_data=out_of_data)
            yield
        finally:
            self.leave(reason)

    def enter(self, reason: str, *, out_of_data: bool) -> None:
        """Start a period; the caller must end it with `leave` even if this raises.

        Raises:
            DeadlineError: The servers did not confirm it.
        """
        self._of_thread.depth = self._own_depth + 1
        with self._lock:
            self._depth += 1
            outermost = self._depth == 1
            if outermost:
                self._tell(True, out_of_data, reason)
        if outermost:
            for driver in list(self._drivers.values()):
                driver.confirm_inactive()

    def leave(self, reason: str) -> None:
        """End a period."""
        self._of_thread.depth = self._own_depth - 1
        with self._lock:
            self._depth -= 1
            if self._depth == 0:
                self._tell(False, False, reason)

    def _tell(self, inactive: bool, out_of_data: bool, reason: str) -> None:
        """Notify engines, servers and coordinator; called under the lock, which keeps the order. Never waits."""
        for driver in list(self._drivers.values()):
            driver.set_inactive(inactive)
        if self._drivers:
            self._send(Away(inactive, out_of_data, reason))
