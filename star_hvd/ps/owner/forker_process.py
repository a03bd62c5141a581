"""Starts servers by forking from a process (`forker`) that has already imported torch.

Importing torch takes seconds of CPU time, and a job blocks while one of its servers restarts. A fork takes milliseconds
and shares the memory of the imported modules.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping

from scheduler.child_process import module_command
from star_hvd.errors import DeadlineError
from star_hvd.locks import ordered_lock
from star_hvd.ps.common.forking import REPORT, STARTED, TO_ALL_PROCESSES
from star_hvd.ps.common.mirror import new_memory
from star_hvd.ps.owner.watchdog import thread_state

__all__ = ["ForkedServer", "ForkerProcess"]

_CHECK_S = 0.2
_POLL_S = 0.02
_WARM_S = 5.0  # After its imports the forker answers within this, or counts as hung.
_STATUS_S = 1.0  # Longest wait for a server's exit status after its end.
_STDERR = 2
_KEPT_BYTES = 1 << 16  # Of what a forker wrote to standard error while it started.
_MOST_CHARACTERS = 300  # Of its last line.


class ForkedServer:
    """A server process, with the part of `subprocess.Popen`'s interface that is used; a child of the forker.

    Args:
        pid: Its process id.
        forker: Its forker.
    """

    def __init__(self, pid: int, forker: ForkerProcess) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._forker = forker
        self._handle: int | None = None
        # Some builds of Python lack these calls; old kernels and some sandboxes refuse them.
        self._has_handles = hasattr(os, "pidfd_open") and hasattr(signal, "pidfd_send_signal")
        try:
            self._handle = os.pidfd_open(pid) if self._has_handles else None
        except ProcessLookupError:
            pass  # It has ended already.
        except OSError:
            self._has_handles = False

    def poll(self) -> int | None:
        """Return its exit status, None while it runs; never waits. Just after its end, -SIGKILL may be assumed."""
        if self.returncode is None and self._ended(0.0):
            return self._forker.status_of(self.pid, 0.0)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Wait for its end and return the exit status.

        Raises:
            subprocess.TimeoutExpired: It still runs after `timeout` seconds.
        """
        if self.returncode is None:
            if not self._ended(timeout):
                raise subprocess.TimeoutExpired("a parameter server", timeout)
            self.returncode = self._forker.status_of(self.pid, _STATUS_S)
        return self.returncode

    def _ended(self, seconds: float) -> bool:
        if not self._has_handles:
            limit_s = time.monotonic() + seconds
            while self._is_there():
                if time.monotonic() >= limit_s:
                    return False
                time.sleep(_POLL_S)
            return True
        if self._handle is None:
            return True
        poller = select.poll()
        poller.register(self._handle, select.POLLIN)
        return bool(poller.poll(1e3 * seconds))

    def kill(self) -> None:
        """Kill it, by pidfd if possible, since its id may belong to another process by now."""
        if self._handle is not None and self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        elif not self._has_handles and self.returncode is None and self._is_there():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _is_there(self) -> bool:
        found = thread_state(self.pid)
        return found is not None and found[0] not in "ZX"

    def __del__(self) -> None:
        if self._handle is not None:
            os.close(self._handle)


class ForkerProcess:
    """The owner's side of the forker. Its methods are called by one thread, `status_of` by any.

    Args:
        environment: Returns the servers' environment.
    """

    def __init__(self, environment: Callable[[], Mapping[str, str]]) -> None:
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._warm = False
        self._errors: int | None = None  # Memory with what a forker that starts has written to standard error.
        self._lock = ordered_lock("ForkerProcess._lock")  # Guards reads, which do not block.
        self._started: deque[int] = deque()
        self._statuses: dict[int, int] = {}

    def fork(self, end: socket.socket, deadline_s: float, stopped: Callable[[], bool]) -> ForkedServer:
        """Fork a server.

        Args:
            end: The server's end of the pipe.
            deadline_s: Longest wait.
            stopped: Checked while waiting; returning True ends the wait.

        Raises:
            DeadlineError: No server was forked in time.
            OSError: The system cannot start a process.
        """
        limit_s = time.monotonic() + deadline_s
        reason = f"no parameter server was started within {deadline_s:g} s; this host may lack processor time or memory"
        while not stopped() and time.monotonic() < limit_s:
            if self._process is None or self._process.poll() is not None:
                self._start()
            was_warm = self._warm
            self._started.clear()
            pid = self._ask(end, min(_WARM_S, limit_s - time.monotonic()) if was_warm else deadline_s, stopped)
            last_line = self._pass_on_errors()
            if pid is not None:
                self._warm = True
                return ForkedServer(pid, self)
            if not was_warm and (status := self._exit_status(stopped)) is not None:
                reason = f"the process that forks it ended with exit status {status}{last_line and f' ({last_line})'}"
            self.stop()  # The forker hangs or was killed: start a new one.
            if not was_warm:
                break
        raise DeadlineError(reason)

    def _start(self) -> None:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = module_command("star_hvd.ps.server.forker", str(os.getpid()))
        self._pass_on_errors()  # Of one that the system could not start.
        self._errors = new_memory()
        with theirs, _signals_blocked():
            # At normal priority: at the lowest, a job of four ranks on two cores stalled more, not less.
            self._process = subprocess.Popen(
                command, stdin=theirs.fileno(), stderr=self._errors, env=dict(self._environment())
            )
        self._socket, self._warm = mine, False

    def _pass_on_errors(self) -> str:
        """Write to standard error what a forker has written while it started; return the last line."""
        memory, self._errors = self._errors, None
        if memory is None:
            return ""
        # The position is shared with the forker, so nothing here moves it.
        text = os.pread(memory, _KEPT_BYTES, max(0, os.fstat(memory).st_size - _KEPT_BYTES))
        os.close(memory)
        with contextlib.suppress(OSError):
            os.write(_STDERR, text)
        return (text.decode(errors="replace").strip().splitlines() or [""])[-1][:_MOST_CHARACTERS]

    def _exit_status(self, stopped: Callable[[], bool]) -> int | None:
        """Return the exit status of a forker that has ended, also if it ends just now; None if it runs."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(0.0 if stopped() else _STATUS_S)
        return None

    def _ask(self, end: socket.socket, deadline_s: float, stopped: Callable[[], bool]) -> int | None:
        assert self._socket is not None and self._process is not None
        limit_s = time.monotonic() + deadline_s
        try:
            socket.send_fds(self._socket, [b"f"], [end.fileno(), *_standard_error()])
            while not self._started and not stopped() and time.monotonic() < limit_s:
                self._read(_CHECK_S)
                if self._process.poll() is not None:  # A process forked by the program may hold the socket's other end.
                    break
        except OSError:
            pass  # The forker is gone.
        return self._started.popleft() if self._started else None

    def _read(self, seconds: float) -> None:
        """Wait at most `seconds` for a report from the forker, and note it."""
        end = self._socket
        if end is None:
            raise BrokenPipeError("the process that forks parameter servers was stopped")
        poller = select.poll()
        poller.register(end.fileno(), select.POLLIN)
        poller.poll(1e3 * seconds)
        with self._lock, contextlib.suppress(BlockingIOError):
            data = end.recv(REPORT.size, socket.MSG_DONTWAIT)
            if not data:
                raise BrokenPipeError("the process that forks parameter servers has died")
            what, pid, status = REPORT.unpack(data)
            if what == STARTED:
                self._started.append(pid)
            else:
                self._statuses[pid] = status

    def status_of(self, pid: int, seconds: float) -> int:
        """Return the exit status of an ended server, after at most `seconds`; -SIGKILL if it is unknown by then."""
        limit_s = time.monotonic() + seconds
        with contextlib.suppress(OSError, ValueError):  # The forker is gone.
            while pid not in self._statuses:
                left_s = limit_s - time.monotonic()
                self._read(max(0.0, min(_CHECK_S, left_s)))
                if left_s <= 0.0:
                    break
        return self._statuses.get(pid, -signal.SIGKILL)

    def stop(self) -> None:
        """Kill the forker, and with it its servers."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_WARM_S)
        if self._socket is not None:
            self._socket.close()
            self._socket = None


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Start processes inside the block with `TO_ALL_PROCESSES` blocked: the forker ignores them after its imports."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, TO_ALL_PROCESSES)  # Of this thread; others get them meanwhile.
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _standard_error() -> list[int]:
    """Return this process's standard error, on which servers write, or nothing if it was closed."""
    with contextlib.suppress(OSError):
        os.fstat(_STDERR)
        return [_STDERR]
    return []
