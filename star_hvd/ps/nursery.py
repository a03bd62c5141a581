"""`python -m star_hvd.ps.nursery OWNER`: a process that has imported what a server needs, and forks servers.

Importing torch takes a server seconds of a processor, and a job stands still as long as one of its servers is being
started again. A fork takes milliseconds, and shares the memory of what was imported. This process does nothing else: it
has no threads, so that a fork is whole, and ends with the thread of the owner that started it, as its servers end with
it.

Over its standard input, a socket to the owner, come single bytes with one end of a server's pipe each; back go the
server's process id, and its exit status when it has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

from star_hvd.errors import DeadlineError

__all__ = ["SERVER_NAME", "Forked", "Nursery", "end_with_parent", "main"]

_REPORT = struct.Struct("<Bqq")  # What, process id, exit status.
_STARTED, _ENDED = 1, 2
_LOOK_S = 0.2
_WARM_S = 5.0  # Once it has imported everything, it forks within this, or is of no use any more.
_STATUS_S = 1.0  # For the exit status behind a server's end.
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15

SERVER_NAME = "star-ps-server"  # As `ps -o comm` shows it.


class Forked:
    """A server process, with what is used of a `subprocess.Popen`; it is a child of the nursery.

    Args:
        pid: Its id.
        nursery: Where it comes from.
    """

    def __init__(self, pid: int, nursery: Nursery) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._nursery = nursery
        self._handle: int | None = None
        with contextlib.suppress(ProcessLookupError):  # It has ended already.
            self._handle = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Its exit status, None while it runs; does not wait, and may not know the status yet."""
        if self.returncode is None and self._ended(0.0):
            return self._nursery.status_of(self.pid, 0.0)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: It still runs.
        """
        if self.returncode is None:
            if not self._ended(timeout):
                raise subprocess.TimeoutExpired("a parameter server", timeout)
            self.returncode = self._nursery.status_of(self.pid, _STATUS_S)
        return self.returncode

    def _ended(self, seconds: float) -> bool:
        if self._handle is None:
            return True
        poller = select.poll()
        poller.register(self._handle, select.POLLIN)
        return bool(poller.poll(1e3 * seconds))

    def kill(self) -> None:
        """Kill it; the handle makes sure that it is no other process by now."""
        if self._handle is not None and self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def __del__(self) -> None:
        if self._handle is not None:
            os.close(self._handle)


class Nursery:
    """The owner's side. Its methods are called by one thread, `status_of` by any.

    Args:
        environment: Of the servers.
    """

    def __init__(self, environment: Callable[[], Mapping[str, str]]) -> None:
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._warm = False
        self._lock = threading.Lock()  # Of reading, which does not wait.
        self._started: deque[int] = deque()
        self._statuses: dict[int, int] = {}

    def fork(self, end: socket.socket, deadline_s: float, stopped: Callable[[], bool]) -> Forked:
        """Have a server forked.

        Args:
            end: Its end of the pipe.
            deadline_s: Longest wait.
            stopped: Looked at while waiting: whether the wait has become pointless.

        Raises:
            DeadlineError: There was none in time.
            OSError: No process can be made.
        """
        limit_s = time.monotonic() + deadline_s
        while not stopped() and time.monotonic() < limit_s:
            if self._process is None or self._process.poll() is not None:
                self._start()
            was_warm = self._warm
            self._started.clear()
            pid = self._ask(end, min(_WARM_S, limit_s - time.monotonic()) if was_warm else deadline_s, stopped)
            if pid is not None:
                self._warm = True
                return Forked(pid, self)
            self.stop()  # Frozen itself, or killed: a new one has to import everything once more.
            if not was_warm:
                break
        raise DeadlineError(f"no parameter server was started within {deadline_s:g} s")

    def _start(self) -> None:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "star_hvd.ps.nursery", str(os.getpid())]
        with theirs:
            # At the usual priority: at the lowest one a job of four ranks on two cores stalled more, not less.
            self._process = subprocess.Popen(command, stdin=theirs.fileno(), env=dict(self._environment()))
        self._socket, self._warm = mine, False

    def _ask(self, end: socket.socket, deadline_s: float, stopped: Callable[[], bool]) -> int | None:
        assert self._socket is not None
        limit_s = time.monotonic() + deadline_s
        try:
            socket.send_fds(self._socket, [b"f"], [end.fileno()])
            while not self._started and not stopped() and time.monotonic() < limit_s:
                self._read(_LOOK_S)
        except OSError:
            pass  # It is gone.
        return self._started.popleft() if self._started else None

    def _read(self, seconds: float) -> None:
        """Wait for a report and note what it says."""
        end = self._socket
        if end is None:
            raise BrokenPipeError("there is no process that forks parameter servers")
        poller = select.poll()
        poller.register(end.fileno(), select.POLLIN)
        poller.poll(1e3 * seconds)
        with self._lock, contextlib.suppress(BlockingIOError):
            data = end.recv(_REPORT.size, socket.MSG_DONTWAIT)
            if not data:
                raise BrokenPipeError("the process that forks parameter servers is gone")
            what, pid, status = _REPORT.unpack(data)
            if what == _STARTED:
                self._started.append(pid)
            else:
                self._statuses[pid] = status

    def status_of(self, pid: int, seconds: float) -> int:
        """Exit status of a server that has ended; that of a killed one where it cannot be had in time."""
        limit_s = time.monotonic() + seconds
        with contextlib.suppress(OSError, ValueError):  # It is gone.
            while pid not in self._statuses:
                left_s = limit_s - time.monotonic()
                self._read(max(0.0, min(_LOOK_S, left_s)))
                if left_s <= 0.0:
                    break
        return self._statuses.get(pid, -signal.SIGKILL)

    def stop(self) -> None:
        """End it, and with it its servers."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_WARM_S)
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def end_with_parent(parent: int) -> bool:
    """Have the system kill this process when the thread that started it ends; False if it has ended already.

    A closed socket tells that too, but only a process that reads it: not one that is stopped, or busy.
    """
    if sys.platform == "linux":
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


def _prctl(what: int, value: int | bytes) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(what, value, 0, 0, 0)


def main() -> int:
    """Fork servers until the owner is gone; the exit status, of a server in its process."""
    from star_hvd.ps import server

    if not end_with_parent(int(sys.argv[1])):
        return 0
    owner, own_pid = socket.socket(fileno=0), os.getpid()
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    woken.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The rank ends its servers itself.
    gc.collect()
    gc.freeze()  # Else every collection in a server would copy the memory that it shares.
    while True:
        ready, _, _ = select.select([owner, woken], [], [])
        if woken in ready:
            with contextlib.suppress(BlockingIOError):
                woken.recv(4096)
            _report_ended(owner)
        if owner not in ready:
            continue
        try:
            data, descriptors, _, _ = socket.recv_fds(owner, 1, 1)
        except OSError:
            return 0
        if not data:
            return 0
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for end in (woken, wake):
                end.close()
            os.dup2(descriptors[0], 0)  # In the place of the socket to the owner.
            os.close(descriptors[0])
            owner.detach()
            if sys.platform == "linux":
                _prctl(_PR_SET_NAME, SERVER_NAME.encode())
            return server.main(own_pid)
        os.close(descriptors[0])
        with contextlib.suppress(OSError):
            owner.send(_REPORT.pack(_STARTED, pid, 0))


def _report_ended(owner: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        with contextlib.suppress(OSError):
            owner.send(_REPORT.pack(_ENDED, pid, os.waitstatus_to_exitcode(status)), socket.MSG_DONTWAIT)


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # Taking the interpreter and torch down in order takes seconds and serves nobody.
