"""Marks by which ranks of a test job signal events to each other, without Horovod and without waiting.

A scenario that needs an event (a gradient is folded, a mode comes into force) continues until it has happened, however
slow the machine: the rank that sees it sets a mark, and all ranks continue until they find the mark. Marks are files
beside the ranks' reports, so they affect no collective and remain when the rank that set them dies.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.support.launch import RESULTS

__all__ = ["PATIENCE_S", "await_marks", "freeze", "mark", "marked"]

PATIENCE_S = 240.0  # An event that has not happened by then never will, on any machine.


def mark(name: str) -> None:
    """Set a mark of this rank."""
    _path(name, int(os.environ.get("HOROVOD_RANK", "0"))).touch()


def marked(name: str, ranks: Iterable[int] | None = None) -> bool:
    """Return whether all of `ranks` have set the mark; without `ranks`, whether any rank has."""
    if ranks is None:
        return any(True for _ in _folder().glob(f"{_file(name)}.*"))
    return all(_path(name, rank).exists() for rank in ranks)


def await_marks(name: str, ranks: Iterable[int] | None = None, deadline_s: float = PATIENCE_S) -> bool:
    """Wait for `marked`; return whether it became true in time."""
    wanted = None if ranks is None else list(ranks)
    limit_s = time.monotonic() + deadline_s
    while not marked(name, wanted):
        if time.monotonic() > limit_s:
            return False
        time.sleep(0.005)
    return True


def freeze(name: str, ranks: Sequence[int], *, at_least_s: float = 0.0, at_most_s: float = PATIENCE_S) -> bool:
    """Stop this process until those `ranks` have set the mark `name`; a helper process continues it.

    Args:
        name: The mark; `name.stopped` is set when this process is stopped.
        ranks: The ranks whose mark is awaited.
        at_least_s: Shortest time stopped, even if the marks are set earlier.
        at_most_s: Longest time stopped, so that the other ranks can end.

    Returns: whether they set the mark.
    """
    code = (
        "import os, psutil, signal, sys, time\n"
        "from tests.support.signals import await_marks, mark\n"
        "frozen, name, ranks = psutil.Process(os.getppid()), sys.argv[1], map(int, sys.argv[4:])\n"
        "while frozen.status() != psutil.STATUS_STOPPED: time.sleep(0.005)\n"
        "mark(f'{name}.stopped')\n"
        "least_s = time.monotonic() + float(sys.argv[2])\n"
        "made = await_marks(name, ranks, float(sys.argv[3]))\n"
        "time.sleep(max(0.0, least_s - time.monotonic()))\n"
        "frozen.send_signal(signal.SIGCONT)\n"
        "sys.exit(not made)\n"
    )
    limits = (str(at_least_s), str(at_most_s))
    watch = subprocess.Popen([sys.executable, "-c", code, name, *limits, *map(str, ranks)])
    os.kill(os.getpid(), signal.SIGSTOP)
    return watch.wait(PATIENCE_S) == 0


def _path(name: str, rank: int) -> Path:
    return _folder() / f"{_file(name)}.{rank}"


def _file(name: str) -> str:
    return f"mark.{name.replace('/', '_')}@"


def _folder() -> Path:
    folder = os.environ.get(RESULTS)
    if folder is None:  # The job was started by hand; each job's launcher has a different port.
        port = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT", str(os.getpid()))
        folder = str(Path(tempfile.gettempdir()) / f"star-marks-{port}")
        os.makedirs(folder, exist_ok=True)
    return Path(folder)
