"""Reports, process name and lifetime: shared by the process that forks servers (`forker`), its owner and servers."""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import sys

__all__ = ["ENDED", "REPORT", "SERVER_NAME", "STARTED", "TO_ALL_PROCESSES", "end_with_parent", "name_server"]

REPORT = struct.Struct("<Bqq")  # `STARTED` or `ENDED`, process id, exit status.
STARTED, ENDED = 1, 2
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
# What a terminal (Ctrl-C) or batch system may send to all processes of a job; the program may handle it and train on,
# and its servers end with it, or by SIGKILL.
TO_ALL_PROCESSES = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
SERVER_NAME = "star-ps-server"  # As `ps -o comm` shows it.


def end_with_parent(parent: int) -> bool:
    """Have the kernel kill this process when the thread that started it ends. Return False if `parent` is gone already.

    A closed socket also shows that end, but only to a process that reads it, not to a stopped or busy one.
    """
    if sys.platform == "linux":
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


def _prctl(what: int, value: int | bytes) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(what, value, 0, 0, 0)


def name_server() -> None:
    """Name this process `SERVER_NAME`."""
    if sys.platform == "linux":
        _prctl(_PR_SET_NAME, SERVER_NAME.encode())
