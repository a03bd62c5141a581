"""The processes that send run logs: waiting until they are done, on a machine that has hardly time for them."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from star_hvd.run_log import layout
from tests.support.launch import JOB_LIMIT_S

__all__ = ["SENT_LIMIT_S", "SENT_S", "all_sent", "await_sent"]

SENT_S = 900.0
SENT_LIMIT_S = JOB_LIMIT_S + SENT_S + 40.0
"""Of a test with one job and the wait for its log; below the `faulthandler_timeout` of pyproject.toml."""


def all_sent(folders: Sequence[Path]) -> bool:
    """Return whether the runs in these folders are in MLflow as a whole."""
    return all(layout.read_json(folder / "sent.json").get("complete") for folder in folders)


def await_sent(folders: Sequence[Path], also: Callable[[], bool] = lambda: True, limit_s: float = SENT_S) -> bool:
    """Wait until runs are sent and `also` holds; return whether they are.

    Senders have the lowest priority. Where other tests keep all cores busy, they would take minutes to import MLflow,
    so they are given the usual one, if this user may do that.
    """
    end_s = time.monotonic() + limit_s
    while not (all_sent(folders) and also()):
        if time.monotonic() > end_s:
            return False
        _hurry()
        time.sleep(0.5)
    return True


def _hurry() -> None:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if words[:1] == [sys.executable] and any("run_log.shipper" in word for word in words) and process.nice():
                process.nice(0)
