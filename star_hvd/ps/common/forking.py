"""What the process that forks servers and the processes it forks agree on."""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import sys

__all__ = ["ENDED", "REPORT", "SERVER_NAME", "STARTED", "end_with_parent", "name_server"]

REPORT = struct.Struct("<Bqq")  # What, process id, exit status.
STARTED, ENDED = 1, 2
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
SERVER_NAME = "star-ps-server"  # As `ps -o comm` shows it.


def end_with_parent(parent: int) -> bool:
    """Have the system kill this process when the thread that started it ends; False if it has ended already.

    A closed socket tells that too, but only a process that reads it: not one that is stopped, or busy.
    """
    if sys.platform == "linux":
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


def _prctl(what: int, value: int | bytes) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(what, value, 0, 0, 0)


def name_server() -> None:
    """Give this process the name by which a server is known."""
    if sys.platform == "linux":
        _prctl(_PR_SET_NAME, SERVER_NAME.encode())
