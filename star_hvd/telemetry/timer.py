"""Times one rank's own work between two steps, before any collective can hide it.

A blocking all-reduce makes wall time equal on all ranks, and a waiting rank may even look busier than the slow one. So
the clock stops when the rank's own gradient is complete, and time inside the user's own collectives is excluded.
Loading that is hidden behind waits for other ranks delays no step, but limits how fast the rank can be; so it is
reported beside.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time

from scheduler.records import StepTimes

__all__ = ["StepTimer"]


class _RunQueue:
    """Time the calling thread spent runnable but not running (Linux schedstat, second field, in ns)."""

    def __init__(self) -> None:
        self._fd: int | None = None
        with contextlib.suppress(OSError):
            self._fd = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)

    def read_s(self) -> float:
        if self._fd is None:
            return 0.0
        try:
            return int(os.pread(self._fd, 64, 0).split()[1]) * 1e-9
        except (OSError, ValueError, IndexError):
            return 0.0

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class StepTimer:
    """Used by the training thread only."""

    def __init__(self) -> None:
        self._queue: _RunQueue | None = None
        self._thread = 0
        self._outside_s = 0.0
        self._input_s = self._load_s = 0.0
        self._began_s = time.monotonic()
        self._began_cpu_s = 0.0
        self._began_queue_s = 0.0
        self.start()

    def start(self) -> None:
        """Start timing: the previous step has ended, and the rank's own work begins."""
        if self._thread != threading.get_ident():
            if self._queue is not None:
                self._queue.close()
            self._queue, self._thread = _RunQueue(), threading.get_ident()
        assert self._queue is not None
        self._outside_s = self._input_s = self._load_s = 0.0
        self._began_s, self._began_cpu_s = time.monotonic(), time.thread_time()
        self._began_queue_s = self._queue.read_s()

    def close(self) -> None:
        """End timing and close the file."""
        if self._queue is not None:
            self._queue.close()

    def add_outside(self, seconds: float) -> None:
        """Exclude time spent in the user's own collectives or waiting for an epoch to end."""
        self._outside_s += seconds

    def add_input(self, seconds: float, load_s: float = 0.0) -> None:
        """Count time spent waiting for data, which stays part of the compute time.

        Args:
            seconds: That time.
            load_s: Least time in which the data can be loaded beside the other work.
        """
        self._input_s += seconds
        self._load_s += load_s

    def stop(self) -> StepTimes:
        """Return the times of the step: the rank's own gradient is complete."""
        assert self._queue is not None
        same = self._thread == threading.get_ident()
        return StepTimes(
            compute_s=max(0.0, time.monotonic() - self._began_s - self._outside_s),
            input_s=self._input_s,
            cpu_s=max(0.0, time.thread_time() - self._began_cpu_s) if same else 0.0,
            runqueue_s=max(0.0, self._queue.read_s() - self._began_queue_s) if same else 0.0,
            load_s=self._load_s,
        )
