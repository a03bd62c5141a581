"""Run as a module with the owner's process id: forks servers for the owner at its standard input.

It has no threads, so forking is safe. It ends when the owner's thread that started it ends, and its servers end with
it. A request on standard input is one byte accompanied by one end of a server's pipe as a file descriptor, and by the
owner's standard error if it has one, which replaces the memory that the owner reads if this process does not get that
far; the replies are the server's process id and, once it has ended, its exit status.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import sys

from star_hvd.ps.common.forking import ENDED, REPORT, STARTED, TO_ALL_PROCESSES, end_with_parent, name_server
from star_hvd.ps.server import server

__all__ = ["main"]


def main() -> int:
    """Fork servers until the owner is gone. Return the exit status; in a forked process, the server's."""
    if not end_with_parent(int(sys.argv[1])):
        return 0
    owner, own_pid = socket.socket(fileno=0), os.getpid()
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    woken.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    for number in TO_ALL_PROCESSES:  # Inherited by the servers. The owner has blocked them until here.
        signal.signal(number, signal.SIG_IGN)
    gc.collect()
    gc.freeze()  # Otherwise garbage collection in a server would copy the shared pages.
    while True:
        ready, _, _ = select.select([owner, woken], [], [])
        if woken in ready:
            with contextlib.suppress(BlockingIOError):
                woken.recv(4096)
            _report_ended(owner)
        if owner not in ready:
            continue
        try:
            data, descriptors, _, _ = socket.recv_fds(owner, 1, 2)
        except OSError:
            return 0
        if not data:
            return 0
        for standard_error in descriptors[1:]:
            os.dup2(standard_error, 2)
            os.close(standard_error)
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for end in (woken, wake):
                end.close()
            os.dup2(descriptors[0], 0)  # Replaces the socket to the owner.
            os.close(descriptors[0])
            owner.detach()
            name_server()
            return server.main(own_pid)
        os.close(descriptors[0])
        with contextlib.suppress(OSError):
            owner.send(REPORT.pack(STARTED, pid, 0))


def _report_ended(owner: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        with contextlib.suppress(OSError):
            owner.send(REPORT.pack(ENDED, pid, os.waitstatus_to_exitcode(status)), socket.MSG_DONTWAIT)


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # An orderly shutdown of the interpreter and torch takes seconds.
