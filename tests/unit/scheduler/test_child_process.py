"""Modules of ours run in child processes, whatever files the current folder has."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import scheduler
from scheduler.child_process import module_command

ROOT = str(Path(scheduler.__file__).resolve().parents[1])


@pytest.mark.parametrize("safe", ["", "1"])
def test_a_module_is_ours_though_the_current_folder_has_others_of_its_name(tmp_path: Path, safe: str) -> None:
    """A folder for a package, and a file for a module of Python that is loaded before ours."""
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "scheduler" / "__init__.py").write_text("raise SystemExit('not ours')\n")
    (tmp_path / "runpy.py").write_text("raise SystemExit('not Python's')\n")
    environ = {**os.environ, "PYTHONPATH": ROOT, "PYTHONSAFEPATH": safe}
    done = subprocess.run(
        module_command("scheduler.cli.main", "--help"), cwd=tmp_path, env=environ, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "star-scheduler" in done.stdout
