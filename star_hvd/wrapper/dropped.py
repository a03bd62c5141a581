"""Optimizers dropped without `close`: their hooks are removed before the next one is made.

The garbage collector finalizes an optimizer in any thread at any point, even during a backward pass that runs its
hooks. So the finalizer only queues it, and the training thread releases the parameters where it is safe.
"""

from __future__ import annotations

import queue
from typing import Protocol

__all__ = ["note_dropped", "release_dropped"]


class Dropped(Protocol):
    """The core of a dropped optimizer."""

    def release(self) -> None:
        """Remove the hooks from the parameters."""
        ...


_dropped: queue.SimpleQueue[Dropped] = queue.SimpleQueue()  # Its `put` is reentrant, as a finalizer needs.


def note_dropped(core: Dropped) -> None:
    """Queue a core for `release_dropped`; called by the garbage collector, takes no lock."""
    _dropped.put(core)


def release_dropped() -> None:
    """Release all queued cores; called by the training thread, outside forward and backward."""
    while True:
        try:
            core = _dropped.get_nowait()
        except queue.Empty:
            return
        core.release()
