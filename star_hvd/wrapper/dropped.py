"""Optimizers the user has dropped without `close`: their hooks come off the parameters before the next is made.

The garbage collector says that an optimizer is gone, in any thread and at any place of it, a backward pass through
the very hooks included. So it is only noted, and the training thread lets go of the parameters where it is safe.
"""

from __future__ import annotations

import queue
from typing import Protocol

__all__ = ["note_dropped", "release_dropped"]


class Dropped(Protocol):
    """What a dropped optimizer leaves behind."""

    def release(self) -> None:
        """Let go of the parameters."""
        ...


_dropped: queue.SimpleQueue[Dropped] = queue.SimpleQueue()  # The one container that a finalizer may write to.


def note_dropped(core: Dropped) -> None:
    """A garbage collector's word; takes no lock."""
    _dropped.put(core)


def release_dropped() -> None:
    """Called by the training thread, outside forward and backward."""
    while True:
        try:
            core = _dropped.get_nowait()
        except queue.Empty:
            return
        core.release()
