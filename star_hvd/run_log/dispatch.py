"""Rank 0's side of the process (`shipper`) that sends the runs of all optimizers of a job to MLflow.

A thread here starts that process some seconds after the start of the first run, sends it the folder of every run over a
socket, and restarts it if it ends before its work is done. The shipper exits a while after its last run is complete, or
once this process has ended in any way and everything on disk has been sent.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from star_hvd.locks import ordered_condition
from star_hvd.run_log import layout
from star_hvd.threads import supervised

__all__ = ["MOST_FAILURES", "SHIPPER_PROGRAM", "Dispatch", "close", "send"]

logger = logging.getLogger("star_hvd")

_AFTER_S = 3.0  # MLflow's import should not slow down a job's first steps, nor run for a job that fails at once.
_CHECK_INTERVAL_S = 1.0
_HEALTHY_S = 30.0  # A process that lived for this long resets the count of failures.
_FIRST_PAUSE_S = 2.0
MOST_FAILURES = 5
"""Consecutive ends of the shipper after which the runs stay on disk."""

_CLOSE_S = 2.0  # Takes milliseconds, unless the machine is very busy.

SHIPPER_PROGRAM = (
    "import os, sys, types\n"
    "for lower in (lambda: os.nice(19),\n"
    "              lambda: os.getsid(0) == os.getpid() and open('/proc/self/autogroup', 'wb', 0).write(b'19')):\n"
    "    try: lower()\n"
    "    except OSError: pass\n"
    "if os.fork(): os._exit(0)\n"
    "package = types.ModuleType('star_hvd')\n"
    "package.__path__ = [sys.argv[1]]\n"
    "sys.modules['star_hvd'] = package\n"
    "sys.path[:0] = [sys.argv[2]]\n"
    "from star_hvd.run_log.shipper import main\n"
    "sys.exit(main(int(sys.argv[3])))\n"
)
"""The shipper's program; its arguments are the package's folder, the one above it, and rank 0's process id.

`python -m star_hvd.run_log.shipper` would import torch and Horovod with the package: 2 s and 300 MB. The shipper needs
neither, so it gets the package without its `__init__`. It is not a child of the rank, because horovodrun ends the
children of all ranks when a rank fails. It first lowers its priority, since it runs beside the job's first steps or
last second. If Linux groups processes by session, `nice` counts only within a session, and the session's own priority
is set through /proc.
"""


class Dispatch:
    """The shipper of this process. `send` and `close` may be called from any thread.

    Args:
        after_s: Time from the first run to the shipper's start.
        first_pause_s: Time before its first restart, doubled each time.
        check_interval_s: Interval of checks whether it runs.

    Attributes:
        starts: Number of times it was started.
        failures: Number of consecutive times it ended too early.
    """

    def __init__(
        self,
        after_s: float = _AFTER_S,
        first_pause_s: float = _FIRST_PAUSE_S,
        check_interval_s: float = _CHECK_INTERVAL_S,
    ) -> None:
        self._after_s, self._first_pause_s, self._check_interval_s = after_s, first_pause_s, check_interval_s
        self.starts = 0
        self.failures = 0
        self._changed = ordered_condition("Dispatch._changed")
        self._runs: dict[Path, str] = {}  # Runs not known to be complete, each with its line for the shipper.
        self._new: list[str] = []
        self._closing = False
        self._thread: threading.Thread | None = None
        self._unsent = b""
        self._line: socket.socket | None = None  # Its other end is the shipper's standard input.
        self._first: subprocess.Popen[bytes] | None = None
        self._started_s = self._begun_s = 0.0
        self._restart_at_s = 0.0

    @property
    def incomplete(self) -> int:
        """Number of runs not known to be sent completely."""
        return len(self._runs)

    def send(self, directory: Path) -> None:
        """Have a run sent that has started; does not block."""
        about = {"directory": str(directory), "uri": layout.tracking_uri(directory.parent.parent)}
        text = json.dumps({**about, "experiment": layout.experiment_name()})
        with self._changed:
            if self._closing:
                return
            self._runs[directory] = text
            self._new.append(text)
            if self._thread is None:
                self._begun_s = time.monotonic()
                self._thread = supervised(self._run, "star-run-sender", critical=False)
                self._thread.start()
            self._changed.notify()

    def close(self, deadline_s: float = _CLOSE_S) -> None:
        """Start the shipper if that was not done yet, and detach from it; called at the end of this process."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(deadline_s)

    def forget(self) -> None:
        """Close the socket in a forked child, where it would keep the shipper alive after the job."""
        self._disconnect()

    # ---- own thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        if importlib.util.find_spec("mlflow") is None:
            logger.info("MLflow is not installed; run logs stay on disk for star-hvd sync-logs")
            return
        closing = False
        while not closing:
            with self._changed:
                if not self._closing and not (self._new and self._line is not None):
                    self._changed.wait(self._check_interval_s)
                closing = self._closing
            try:
                if not self._check(closing):
                    return
            except Exception:
                logger.exception("run logs stay on disk for star-hvd sync-logs; training goes on")
                return

    def _check(self, closing: bool) -> bool:
        """Start the shipper if due and send it new runs; return False if it has failed too often."""
        if self._line is not None and _is_gone(self._line):
            self._note_end()
        now_s = time.monotonic()
        due = closing or now_s >= max(self._restart_at_s, self._begun_s + self._after_s)
        if self._line is None and self._runs and due:
            if self.failures >= MOST_FAILURES:
                logger.error("the run log's sender failed %d times; star-hvd sync-logs sends the rest", self.failures)
                return False
            self._start()
        if self._line is not None:
            self._send_new(self._line)
            if closing:
                self._disconnect()
        return True

    def _start(self) -> None:
        """Start the process, which gets all runs that may not be complete."""
        with self._changed:
            self._new = list(self._runs.values())
            label = next(iter(self._runs))
        self._line, theirs = socket.socketpair()
        with theirs:
            try:
                self._first = start_sender(label, theirs)
            except OSError as error:  # No memory for a moment, for example. It counts as one that ended at once.
                logger.warning("the sender of the run log cannot be started: %s", error)
        self._line.setblocking(False)
        self._unsent = b""
        self._started_s = time.monotonic()
        self.starts += 1

    def _send_new(self, line: socket.socket) -> None:
        with self._changed:
            texts, self._new = self._new, []
        self._unsent += "".join(f"{text}\n" for text in texts).encode()
        if self._first is not None and self._first.poll() is not None:
            self._first = None  # It exited after forking the shipper.
        with contextlib.suppress(BlockingIOError, ConnectionError):  # The buffer is full, or it ended: see `_check`.
            while self._unsent:  # MSG_NOSIGNAL: with SIGPIPE at its default action, the signal would end the program.
                self._unsent = self._unsent[line.send(self._unsent, socket.MSG_NOSIGNAL) :]

    def _note_end(self) -> None:
        """Handle the shipper's end, after its work or by a failure."""
        self._disconnect()
        with self._changed:
            names = list(self._runs)
        complete = [one for one in names if layout.read_json(one / layout.SENT).get("complete")]
        with self._changed:
            for one in complete:
                self._runs.pop(one, None)
            left = len(self._runs)
        lived_s = time.monotonic() - self._started_s
        if not left or lived_s >= _HEALTHY_S:
            self.failures = 0
        if left:
            self.failures += 1
            self._restart_at_s = time.monotonic() + self._first_pause_s * 2.0 ** (self.failures - 1)
            logger.warning("the sender of the run log ended with %d runs left; it is restarted", left)

    def _disconnect(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            line.close()


def start_sender(label: Path, line: socket.socket) -> subprocess.Popen[bytes]:
    """Start the process that sends runs to MLflow.

    Args:
        label: The first run's folder, to be seen in `ps`.
        line: Its standard input, from which it reads the folders of runs.
    """
    package = Path(__file__).resolve().parents[1]
    # Without the job's variables it cannot be mistaken for a rank, nor use the job's GPU.
    skipped = ("HOROVOD_", "OMPI_", "PMI_", "PMIX_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(skipped)}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, "-c", SHIPPER_PROGRAM, str(package), str(package.parent), str(os.getpid()), str(label)]
    # Its own session, since a signal to the job's group must not end it; no output, which horovodrun would wait for.
    with open(os.devnull, "wb") as null:
        return subprocess.Popen(
            command, stdin=line.fileno(), stdout=null, stderr=null, env=environment, start_new_session=True
        )


def _is_gone(line: socket.socket) -> bool:
    """Whether the other end is closed."""
    poller = select.poll()
    poller.register(line, 0)
    return bool(poller.poll(0))


_dispatch = Dispatch()


def send(directory: Path) -> None:
    """Have a run of this process sent; see `Dispatch.send`."""
    _dispatch.send(directory)


def starts() -> int:
    """Return how often this process started its sender."""
    return _dispatch.starts


def close() -> None:
    """Detach at the end of this process; see `Dispatch.close`."""
    _dispatch.close()


def _after_fork() -> None:
    global _dispatch
    _dispatch.forget()
    _dispatch = Dispatch()  # A new one, because locks held at the fork stay held in the child.


os.register_at_fork(after_in_child=_after_fork)
# Registered at import, so that it runs after the handler that closes the logs, which is registered at a job's start.
atexit.register(close)
