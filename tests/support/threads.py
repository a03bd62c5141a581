"""Which of the threads that star_hvd names run: what a test sees of an object's thread."""

from __future__ import annotations

import threading

__all__ = ["await_end", "running"]


def running(name: str) -> set[threading.Thread]:
    """Return the running threads of that name."""
    return {thread for thread in threading.enumerate() if thread.name == name}


def await_end(name: str, limit_s: float = 120.0) -> None:
    """Wait for the end of all threads of that name."""
    for thread in running(name):
        thread.join(limit_s)
        assert not thread.is_alive(), f"{name} has not ended within {limit_s:g} s"
