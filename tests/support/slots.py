"""Lets only some workers of a test run have jobs at the same time, while the others run tests of one process.

The ranks of a job wait for half of its time, for each other or as slow ranks; so one job more may run than there are
cores.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import math
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["job_slot"]

LONGEST_S = 1500.0  # A test whose job hangs is ended within this; then a worker goes on without a slot.
_LOOK_S = 0.1
_PLACE = Path(tempfile.gettempdir()) / f"star-test-slots-{os.getuid()}"  # A slot is a byte of it, and may be locked.


@contextlib.contextmanager
def job_slot(longest_s: float = LONGEST_S) -> Iterator[bool]:
    """Hold one of this machine's slots, one more than there are cores, and yield whether one was free in time.

    The system frees the slots of a process that dies.
    """
    slots, limit_s = range(1 + _cores()), time.monotonic() + longest_s
    with _PLACE.open("w") as place:
        while not (held := any(_lock(place.fileno(), slot) for slot in slots)) and time.monotonic() < limit_s:
            time.sleep(_LOOK_S)
        yield held


@functools.cache
def _cores() -> int:
    """Return the whole cores that this machine's tests may use: a container may have a quota below its processors."""
    # Here, since the process that only hands out the tests needs no torch.
    from star_hvd.telemetry.headroom import limiting, quota_cores
    from star_hvd.telemetry.resources import cgroup_directory

    usable, quota = len(os.sched_getaffinity(0)), math.inf
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        cgroup = cgroup_directory()
        quota = quota_cores(limiting(cgroup)) if cgroup is not None else math.inf
    return max(1, int(min(usable, quota)))


def _lock(place: int, slot: int) -> bool:
    try:
        fcntl.lockf(place, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, slot)
    except BlockingIOError:
        return False
    return True
