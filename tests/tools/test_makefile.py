"""The Makefile: what `make setup` leaves behind once it is done."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOUCH, EXTRAS = "touch ", "EXTRAS=dev,train,bench"


def setup_stamp(torch_spec: str, venv: Path) -> Path:
    """Run the last command of `make setup` alone; return the file that it has made."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "-n", "setup", f"TORCH_SPEC={torch_spec}", f"VENV={venv}", EXTRAS]
    shown = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    touch = shown.strip().splitlines()[-1]
    assert touch.startswith(TOUCH), shown
    venv.mkdir()
    subprocess.run(["/bin/sh", "-e", "-c", touch], cwd=venv, check=True)
    (stamp,) = venv.iterdir()
    return stamp


@pytest.mark.parametrize("torch_spec", ["torch>=2.4,<2.9", "torch!=2.5.*", "torch~=2.4", "torch >= 2.4"])
def test_setup_ends_with_its_stamp_for_every_range_of_versions(torch_spec: str, tmp_path: Path) -> None:
    stamp = setup_stamp(torch_spec, tmp_path / "venv")
    assert stamp.name.startswith(".setup-torch") and stamp.name.endswith("-dev-train-bench")


def test_another_torch_has_another_stamp(tmp_path: Path) -> None:
    specs = ("torch==2.4", "torch>=2.4", "torch<=2.4", "torch~=2.4", "torch!=2.4", "torch<2.4", "torch>2.4")
    names = {setup_stamp(spec, tmp_path / str(index)).name for index, spec in enumerate(specs)}
    assert len(names) == len(specs)
    assert ".setup-torch--2.4-dev-train-bench" in names, "that of earlier versions, so that nothing is built again"
