"""What rank 0 knows of the process that sends its runs to MLflow: one for all optimizers of a job.

A thread here starts that process some seconds after the first run began, tells it the folder of every run over a
socket, and starts it again where it ended before its work was done. The process ends by itself: a while after its last
run is complete, or when this process ends, however it ends, and everything that is on disk has been sent.
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

from star_hvd.run_log import layout
from star_hvd.threads import supervised

__all__ = ["Dispatch", "close", "send"]

logger = logging.getLogger("star_hvd")

_AFTER_S = 3.0  # A job that fails at once should not have paid for MLflow's import, nor its first steps wait beside it.
_LOOK_INTERVAL_S = 1.0
_HEALTHY_S = 30.0  # One that lived for so long did not fail because it was started.
_FIRST_PAUSE_S = 2.0  # Before it is started again; twice as long each time.
_MOST_FAILURES = 5
_CLOSE_S = 2.0  # Takes milliseconds, unless the machine is very busy.

# `python -m star_hvd.run_log.shipper` would import torch and Horovod with the package: 2 s and 300 MB for nothing. The
# sender needs neither, so it gets the package without its `__init__`. It is no child of the rank's: where a rank fails,
# horovodrun ends the children of all ranks.
_START = (
    "import os, sys, types\n"
    "if os.fork(): os._exit(0)\n"
    "package = types.ModuleType('star_hvd')\n"
    "package.__path__ = [sys.argv[1]]\n"
    "sys.modules['star_hvd'] = package\n"
    "sys.path[:0] = [sys.argv[2]]\n"
    "from star_hvd.run_log.shipper import main\n"
    "sys.exit(main(int(sys.argv[3])))\n"
)


class Dispatch:
    """The sender of one process. `send` and `close` may be called from any thread.

    Attributes:
        starts: How often the sender was started.
        failures: How often in a row it ended too early.
    """

    def __init__(self) -> None:
        self.starts = 0
        self.failures = 0
        self._changed = threading.Condition()
        self._runs: dict[Path, str] = {}  # Not known to be complete, with what the sender is told of them.
        self._new: list[str] = []
        self._closing = False
        self._thread: threading.Thread | None = None
        self._unsent = b""
        self._line: socket.socket | None = None  # Its other end is the sender's standard input.
        self._first: subprocess.Popen[bytes] | None = None
        self._started_s = self._begun_s = 0.0
        self._again_s = 0.0

    @property
    def incomplete(self) -> int:
        """Runs that are not known to be sent in whole."""
        return len(self._runs)

    def send(self, directory: Path) -> None:
        """A run has begun; returns at once. What is sent of it, and until when, is the other process's affair."""
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
        """This process ends: start the sender if that was not done yet, and leave it to itself."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(deadline_s)

    def forget(self) -> None:
        """In a child made by fork: the line must not stay open there, or the sender would outlive the job."""
        self._hang_up()

    # ---- own thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        if importlib.util.find_spec("mlflow") is None:
            logger.info("MLflow is not installed; run logs stay on disk for star-hvd sync-logs")
            return
        closing = False
        while not closing:
            with self._changed:
                if not self._closing and not (self._new and self._line is not None):
                    self._changed.wait(_LOOK_INTERVAL_S)
                closing = self._closing
            try:
                if not self._look(closing):
                    return
            except Exception:
                logger.exception("run logs stay on disk for star-hvd sync-logs; training goes on")
                return

    def _look(self, closing: bool) -> bool:
        """Do what is due; whether there is anything to do later."""
        if self._line is not None and _is_gone(self._line):
            self._note_end()
        now_s = time.monotonic()
        due = closing or now_s >= max(self._again_s, self._begun_s + _AFTER_S)
        if self._line is None and self._runs and due:
            if self.failures >= _MOST_FAILURES:
                logger.error("the run log's sender ended %d times; star-hvd sync-logs sends the rest", self.failures)
                return False
            self._start()
        if self._line is not None:
            self._tell(self._line)
            if closing:
                self._hang_up()
        return True

    def _start(self) -> None:
        """Start the process; it is told of all runs that may not be complete."""
        with self._changed:
            self._new = list(self._runs.values())
            label = next(iter(self._runs))
        self._line, theirs = socket.socketpair()
        with theirs:
            self._first = start_sender(label, theirs)
        self._line.setblocking(False)
        self._unsent = b""
        self._started_s = time.monotonic()
        self.starts += 1

    def _tell(self, line: socket.socket) -> None:
        with self._changed:
            texts, self._new = self._new, []
        self._unsent += "".join(f"{text}\n" for text in texts).encode()
        if self._first is not None and self._first.poll() is not None:
            self._first = None  # It ends at once, having left its work to a child.
        with contextlib.suppress(BlockingIOError, ConnectionError):  # Hundreds of runs wait; or it ended: see `_look`.
            while self._unsent:  # Without a signal: a program may have set SIGPIPE to end it.
                self._unsent = self._unsent[line.send(self._unsent, socket.MSG_NOSIGNAL) :]

    def _note_end(self) -> None:
        """The sender has ended: after its work, or it was killed."""
        self._hang_up()
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
            self._again_s = time.monotonic() + _FIRST_PAUSE_S * 2.0 ** (self.failures - 1)
            logger.warning("the sender of the run log ended with %d runs left; it is started again", left)

    def _hang_up(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            line.close()


def start_sender(label: Path, line: socket.socket) -> subprocess.Popen[bytes]:
    """Start the process that sends runs to MLflow.

    Args:
        label: The first run's folder, for `ps`.
        line: Its standard input, from which it reads the folders of runs.
    """
    package = Path(__file__).resolve().parents[1]
    # Not the job's: a sender that looked like a rank, or took the job's GPU, would be in the way.
    skipped = ("HOROVOD_", "OMPI_", "PMI_", "PMIX_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(skipped)}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, "-c", _START, str(package), str(package.parent), str(os.getpid()), str(label)]
    # Its own session: a signal for the job's group must not end it, and horovodrun must not wait for its output.
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
    """A run of this process has begun; see `Dispatch.send`."""
    _dispatch.send(directory)


def starts() -> int:
    """How often this process started its sender."""
    return _dispatch.starts


def close() -> None:
    """This process ends; see `Dispatch.close`."""
    _dispatch.close()


def _after_fork() -> None:
    global _dispatch
    _dispatch.forget()
    _dispatch = Dispatch()  # Whatever the child does is its own; locks held at the fork stay held there.


os.register_at_fork(after_in_child=_after_fork)
# Registered at import, so that it runs after what ends the logs, which is registered when a job begins.
atexit.register(close)
