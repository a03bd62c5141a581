"""The process that forks servers starts, whatever files the job's folder has."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

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
