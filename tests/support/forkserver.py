"""Launchers and ranks of test jobs that start at once: forks of a process that has already imported everything.

Importing torch, Horovod and `star_hvd` takes a rank some seconds of processor time, more than all the rest of most test
jobs. So does `horovodrun`: it imports torch to see what Horovod was built with, and starts an interpreter for every
rank that only waits for it. Four ranks that do nothing took 6.2 s of processor time and take 1.4 s here; with an
optimizer each that makes five steps, 9.2 s and 2.9 s.

The server is started on first use and ends with its owner. `stub.py` replaces `horovodrun` and every rank: it passes
its arguments, environment, working directory, output, and network namespace to the server, forwards signals to the
forked process, and ends as that ends.

Differences from a rank that was started by itself: all ranks hash strings alike, the parent process is another,
torch's compiler and `star_hvd` are imported from the start (none of its modules reads the environment then), and a
program that ends without an error leaves by `os._exit`, after all exit handlers: finalizing the interpreter would
copy the pages that it shares with the server, 0.4 s a rank.
Jobs for which this matters are started with `run_job(..., fresh=True)`, and thus by `horovodrun` itself.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import multiprocessing
import os
import random
import runpy
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import types
from pathlib import Path
from typing import Any

import psutil

__all__ = ["ADDRESS", "LAUNCHER", "STACKS_AFTER_S", "server_address"]

ADDRESS = "TEST_FORK_SERVER"  # Environment variable: the server's address, for the ranks.
STACKS_AFTER_S = "TEST_STACKS_AFTER_S"
"""Environment variable: a rank that still runs so long after its start prints what its threads are doing."""
LAUNCHER = "horovodrun"
"""In the place of a program: what is to be run is Horovod's launcher, with the arguments that follow."""
EXECUTOR = "horovod.runner.common.util.safe_shell_exec"
REPOSITORY = Path(__file__).resolve().parents[2]
START_LIMIT_S = 300.0
STREAMS = 3  # Descriptors of a process's input and output; those of its namespaces follow.
LIBC = ctypes.CDLL(None, use_errno=True)  # `os.setns` came with Python 3.12.
_started: list[str] = []


def server_address() -> str:
    """Return the address of this process's server, starting it if necessary.

    Raises:
        AssertionError: It did not start.
    """
    if not _started:
        folder = tempfile.mkdtemp(prefix="star-fork-")
        address = str(Path(folder) / "socket")
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("STAR_", "HOROVOD_"))}
        environment.update(PYTHONPATH=str(REPOSITORY), OMP_NUM_THREADS="1", STAR_CHECK_LOCKS="1")
        command = [sys.executable, "-m", "tests.support.forkserver", address]
        pipe = subprocess.PIPE
        server = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdin=pipe, stdout=pipe)
        atexit.register(_end, server)
        assert server.stdout is not None
        ready, _, _ = select.select([server.stdout], [], [], START_LIMIT_S)
        assert ready and server.stdout.readline() == b"ready\n", "the server that forks ranks did not start"
        _started.append(address)
    return _started[0]


def _end(server: subprocess.Popen[bytes]) -> None:
    assert server.stdin is not None
    server.stdin.close()  # It ends when its standard input closes.
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(5.0)
    server.kill()
    server.wait()


def serve(address: str) -> dict[str, Any]:
    """Fork a rank for every connection until standard input ends; return, in the ranks only, the request to run."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Nobody waits for the processes that watch the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # An interrupted test ends its jobs itself.
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        print("ready", flush=True)
        while True:
            readable, _, _ = select.select([listener, sys.stdin], [], [])
            if sys.stdin in readable:
                shutil.rmtree(Path(address).parent, ignore_errors=True)
                os._exit(0)
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                return _watch(connection)
            connection.close()


def _watch(connection: socket.socket) -> dict[str, Any]:
    """Fork the requested process, and kill it if its stub ends; return the request, in the forked process only."""
    request, descriptors = _receive(connection)
    rank = os.fork()
    if rank == 0:
        connection.close()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for target, source in enumerate(descriptors[:STREAMS]):
            os.dup2(source, target)
            os.close(source)
        for name, descriptor in zip(("net", "mnt"), descriptors[STREAMS:], strict=True):
            _enter(name, descriptor)
        return request
    for descriptor in descriptors:
        os.close(descriptor)
    ended = os.pidfd_open(rank)
    connection.sendall(struct.pack("<q", rank))
    readable, _, _ = select.select([connection, ended], [], [])
    if ended not in readable:
        _kill(rank, request["words"][0] == LAUNCHER)
    status = os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])
    with contextlib.suppress(OSError):
        connection.sendall(struct.pack("<q", status))
    os._exit(0)


def _enter(name: str, descriptor: int) -> None:
    """Enter the stub's namespace, if it is in another than this process: it stands for a rank on another host.

    Raises:
        OSError: The system does not allow it.
    """
    if os.fstat(descriptor).st_ino != os.stat(f"/proc/self/ns/{name}").st_ino and LIBC.setns(descriptor, 0):
        number = ctypes.get_errno()
        raise OSError(number, f"cannot enter the {name} namespace of the stub: {os.strerror(number)}")
    os.close(descriptor)


def _kill(pid: int, with_children: bool) -> None:
    """Kill a forked process, and for a launcher also its children: stubs, and processes that wait for stubs."""
    forked = psutil.Process(pid)
    for each in (*(forked.children(recursive=True) if with_children else ()), forked):
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    descriptors = array.array("i")
    data, extra, _, _ = connection.recvmsg(8, socket.CMSG_SPACE((STREAMS + 2) * descriptors.itemsize))
    for _, _, sent in extra:
        descriptors.frombytes(sent)
    (size,) = struct.unpack("<q", data)
    text = b""
    while len(text) < size:
        text += connection.recv(1 << 16)
    request: dict[str, Any] = json.loads(text)
    return request, list(descriptors)


def _run(request: dict[str, Any]) -> None:
    """Run as the rank (`python -m MODULE ARGUMENT...` or `python SCRIPT.py ARGUMENT...`) or as the launcher."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    random.seed()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    what, *arguments = request["words"]
    sys.argv = [what, *arguments]
    if what != LAUNCHER and STACKS_AFTER_S in os.environ:
        faulthandler.dump_traceback_later(float(os.environ[STACKS_AFTER_S]))
    if what == LAUNCHER:
        _launch()
    elif what.endswith(".py"):
        sys.path.insert(0, str(Path(what).resolve().parent))
        runpy.run_path(what, run_name="__main__")
    else:
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(0)


def _launch() -> None:
    """Run Horovod's launcher; where it would start interpreters, a server of multiprocessing forks instead."""
    os.setsid()
    executor, launch = map(importlib.import_module, (EXECUTOR, "horovod.runner.launch"))
    forking = multiprocessing.get_context("forkserver")
    forking.set_forkserver_preload([EXECUTOR])
    # It would collect the exit status of a process that another thread waits for and then considers lost (observed).
    multiprocessing.process._cleanup = lambda: None  # type: ignore[attr-defined]
    executor.multiprocessing = types.SimpleNamespace(get_context=lambda _: forking)  # type: ignore[attr-defined]
    launch.run_commandline()


if __name__ == "__main__":
    # torch imports the compiler with a process's first optimizer, which takes longer than all the other imports.
    gc.disable()
    for module in ("star_hvd", "torch._dynamo", "horovod.runner.launch"):
        importlib.import_module(module)
    gc.enable()
    gc.collect()
    gc.freeze()  # Lets a rank's collections skip what it inherited: `star_hvd` collects with every new optimizer.
    _run(serve(sys.argv[1]))
