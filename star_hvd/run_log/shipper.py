"""The process beside rank 0 that sends the runs of all optimizers of a job to MLflow while the job runs.

It reads runs from its standard input, one JSON mapping per line: `directory`, `uri`, `experiment`. Rank 0 holds the
other end, which closes when the job ends in any way. Then everything on disk is sent, and this process exits; it also
exits after some time with nothing to send. If MLflow accepts nothing for five minutes after the job's end, the rest
stays in the runs' folders for `star-hvd sync-logs`. Those are minutes in which this process, which has the lowest
priority, was not kept from working by a machine whose cores are all busy; an hour in any case.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import resource
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil

from scheduler.redact import redacted
from star_hvd.run_log import layout
from star_hvd.run_log.sender import Sender

__all__ = ["Shipping", "main"]

logger = logging.getLogger("star_hvd.run_log")

_POLL_S, _SOON_S = 2.0, 0.2
_LINGER_S = 300.0
"""On `_clock_s`. Creating MLflow's tables takes 5 s of CPU time and many small writes to disk, of which this process
gets few on a busy machine."""
_LONGEST_S = 3600.0  # The same on any clock: a machine may stay busy for days.
_RANKS_S = 10.0
_IDLE_S = 30.0
_LARGEST_PAUSE_S = 60.0
_waited_s = [0.0]  # What `core_wait_s` read last: without descriptors it cannot read for a while.


class _Run:
    """One run that is being sent."""

    def __init__(self, directory: Path, uri: str, experiment: str | None, on_progress: Callable[[], None]) -> None:
        self.directory = directory
        self.sender = Sender(directory, uri, experiment=experiment, on_progress=on_progress)
        self.ended_s: float | None = None  # When rank 0's part was complete.
        self._lock = layout.RunLock(directory, sending=True)
        self._locked = False

    def send(self, *, over: bool) -> bool:
        """Send new events and, after the run's end, totals and files; return whether MLflow has everything.

        Args:
            over: Whether the job has ended, even without an end event.

        Raises:
            Exception: Any error of MLflow's; a later call continues.
        """
        self._locked = self._locked or self._lock.take()
        if not self._locked:
            raise RuntimeError("another process is sending this run")
        if not (self.sender.send() or over):
            return False
        now_s = time.monotonic()
        self.ended_s = now_s if self.ended_s is None else self.ended_s
        # Rank 0 may end first: wait a moment for the files of this host's other ranks.
        if now_s < self.ended_s + _RANKS_S and self._has_writers():
            return False
        self.sender.finish("KILLED")
        return True

    def _has_writers(self) -> bool:
        try:
            return layout.is_live(self.directory)
        except OSError:  # The lock's file is another user's.
            return True

    def close(self) -> None:
        """Release the lock, so that other processes may send the run."""
        self._lock.free()

    def note(self, text: str) -> None:
        """Append a line to `shipper.log` in the run's folder, which explains why a run is not in MLflow."""
        with contextlib.suppress(OSError), (self.directory / "shipper.log").open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")


class Shipping:
    """Sends all runs named in `lines`, one after the other.

    Args:
        lines: Input lines; they end with the job.
        job: Process id of rank 0; None to use the end of `lines` only.
        poll_s: Interval at which new events are sent.
        idle_s: Time without a run after which `run` returns.
        linger_s: Time without progress after the job's end after which the process exits.
    """

    def __init__(
        self,
        lines: Iterable[str],
        job: int | None = None,
        *,
        poll_s: float = _POLL_S,
        idle_s: float = _IDLE_S,
        linger_s: float = _LINGER_S,
    ) -> None:
        self._poll_s, self._idle_s, self._linger_s = poll_s, idle_s, linger_s
        self._note_progress()
        self.over = threading.Event()  # The job has ended.
        self._lines = lines
        self._job: psutil.Process | None = None
        try:
            self._job = psutil.Process(job) if job is not None else None
        except psutil.NoSuchProcess:
            self.over.set()
        self._new: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._done = threading.Event()
        self._runs: deque[_Run] = deque()
        self._sending: _Run | None = None  # That one, which is not in `_runs` meanwhile.

    def run(self) -> None:
        """Send until everything is sent; exit the process if MLflow accepts nothing for five minutes after the job."""
        threading.Thread(target=self._listen, daemon=True).start()
        import_mlflow()
        self._note_progress()
        threading.Thread(target=self._watch, daemon=True).start()
        pause_s = self._poll_s
        while True:
            over = self.over.is_set()  # Read first, so that all runs named before the end are taken below.
            self._take()
            fine = self._round(over)
            if not self._runs and (over or _clock_s() > self.progress_s + self._idle_s):
                self._done.set()
                return
            pause_s = self._poll_s if fine else min(_LARGEST_PAUSE_S, 2.0 * pause_s)
            if fine and (over or any(one.ended_s is not None for one in self._runs)):
                time.sleep(_SOON_S)  # Some rank is still writing the end of its file.
            else:
                self._wake.wait(self._poll_s if over else pause_s)
                self._wake.clear()

    def give_up(self, text: str) -> None:
        """Note in the folders of all remaining runs why they were not sent."""
        sending = self._sending
        for one in (*([] if sending is None else [sending]), *self._runs):
            one.note(f"{text}; star-hvd sync-logs sends the rest")

    def _take(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                about = self._new.get_nowait()
                directory = Path(about["directory"])
                try:
                    self._runs.append(_Run(directory, about["uri"], about.get("experiment"), self._note_progress))
                except ValueError as error:  # The folder was removed, for example.
                    logger.error("%s", redacted(str(error)))
                self._note_progress()

    def _round(self, over: bool) -> bool:
        """Send every run once, until one fails: the others would probably fail too, each after its deadline."""
        for _ in range(len(self._runs)):
            one = self._sending = self._runs.popleft()
            try:
                complete = one.send(over=over)
            except Exception as error:
                one.note(f"not sent for now: {type(error).__name__}: {redacted(str(error))[:300]}")
                self._runs.append(one)
                self._sending = None
                return False
            self._sending = None
            if complete:
                self._note_progress()
                most_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024.0
                one.note(f"complete: {redacted(one.sender.uri)}; the sender took {most_mb:.0f} MiB of memory at most")
                one.close()
            else:
                self._runs.append(one)
        return True

    def _listen(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in self._lines:
                with contextlib.suppress(ValueError):  # An incomplete last line.
                    about = json.loads(line)
                    if isinstance(about, dict) and {"directory", "uri"} <= about.keys():
                        self._new.put(about)
                        self._wake.set()
        self.over.set()
        self._wake.set()

    def _watch(self) -> None:
        """Exit if a server hangs for five minutes after the job's end."""
        while not self.over.wait(self._poll_s) and not self._done.is_set():
            # A process forked by some library in the job may hold the other end of the pipe open.
            if self._job is not None and not _is_alive(self._job):
                self.over.set()
                self._wake.set()
        self._note_progress()
        while (left_s := self._left_s()) > 0.0:
            if self._done.wait(left_s):
                return
        waited_s = time.monotonic() - self._progress_wall_s
        self.give_up(f"gave up: MLflow took nothing for {waited_s:.0f} s after the job's end")
        os._exit(1)

    def _left_s(self) -> float:
        """Seconds until this process gives up, unless there is progress."""
        return min(self.progress_s + self._linger_s - _clock_s(), self._progress_wall_s + _LONGEST_S - time.monotonic())

    def _note_progress(self) -> None:
        self.progress_s, self._progress_wall_s = _clock_s(), time.monotonic()


def main(job: int) -> int:
    """Send the runs named on standard input; return the exit status.

    Args:
        job: Process id of rank 0; when that process ends, the input counts as ended.
    """
    shipping = Shipping(sys.stdin, job)
    try:
        shipping.run()
    except Exception as error:
        shipping.give_up(f"{type(error).__name__}: {redacted(str(error))[:300]}")
        return 1
    return 0


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def core_wait_s() -> float:
    """How long this process's main thread has waited for a core so far; 0 if the system does not tell."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        _waited_s[0] = 1e-9 * int(Path("/proc/self/schedstat").read_text(encoding="ascii").split()[1])
    return _waited_s[0]


def _clock_s() -> float:
    """Seconds on a clock that stands still while the main thread waits for a core."""
    return time.monotonic() - core_wait_s()


def import_mlflow() -> None:
    """Import MLflow's client without pandas, which is optional and costs 40 MB and a second."""
    if "pandas" in sys.modules:
        return
    # With None the import fails, and MLflow continues as if pandas were not installed.
    sys.modules["pandas"] = None  # type: ignore[assignment]
    try:
        from mlflow.tracking import MlflowClient  # noqa: F401
    except ImportError as error:  # This version needs it; `sender.connect` imports it as usual.
        logger.info("MLflow needs pandas: %s", error)
    finally:
        del sys.modules["pandas"]
