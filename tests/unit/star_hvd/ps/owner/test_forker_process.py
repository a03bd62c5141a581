"""The process that forks servers starts whatever files the job's folder has, and stays when the job gets signals."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

import star_hvd
from star_hvd.ps.owner.forker_process import ForkerProcess

ROOT = str(Path(star_hvd.__file__).resolve().parents[1])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_users_scheduler_in_the_current_folder_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scheduler.py").write_text("raise SystemExit('not ours')\n")
    monkeypatch.chdir(tmp_path)
    path = os.pathsep.join([*(each for each in sys.path if each), ROOT])
    forker = ForkerProcess(lambda: {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"})
    mine, theirs = socket.socketpair()
    try:
        with mine, theirs:
            assert forker.fork(theirs, 200.0, lambda: False).poll() is None
    finally:
        forker.stop()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_signals_to_all_processes_of_a_job_end_no_server() -> None:
    """A batch system warns a job so; the program saves a checkpoint or trains on. Servers end by SIGKILL only."""
    path = os.pathsep.join([*(each for each in sys.path if each), ROOT])
    forker = ForkerProcess(lambda: {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"})
    mine, theirs = socket.socketpair()
    blocked, ready = signal.pthread_sigmask(signal.SIG_BLOCK, []), threading.Event()
    watcher = threading.Thread(target=_signal_children_until, args=(ready,))
    try:
        with mine, theirs:
            watcher.start()  # Also while it imports.
            server = forker.fork(theirs, 200.0, lambda: False)
            time.sleep(0.5)
            ready.set()
            watcher.join()
            assert server.poll() is None
            assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == blocked
            server.kill()
            assert server.wait(60.0) == -signal.SIGKILL
    finally:
        ready.set()
        forker.stop()


def _signal_children_until(ready: threading.Event) -> None:
    """Send the signals to all processes that this one has started, again and again."""
    while not ready.wait(0.02):
        for child in psutil.Process().children(recursive=True):
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
                child.send_signal(number)
