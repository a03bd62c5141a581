"""The Makefile: what `make setup` leaves behind once it is done."""

from __future__ import annotations

import os
import shutil
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


def test_the_environment_has_the_stamp_of_its_last_setup_only(tmp_path: Path) -> None:
    """In a copy whose set-up notes what it would install, and fails where that cannot be had."""
    (tmp_path / "scripts").mkdir()
    for name in ("Makefile", "pyproject.toml", "requirements.lock"):
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("build_horovod.py", "gpu_build.py", "unified_diff.py", "lock.py"):
        (tmp_path / "scripts" / name).touch()
    script = 'mkdir -p "$VENV" && echo "$TORCH_SPEC $EXTRAS" >>"$VENV/installed" && [ "$TORCH_SPEC" != torch==0 ]\n'
    (tmp_path / "scripts/setup.sh").write_text(script)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}

    def setup(torch_spec: str, extras: str) -> tuple[int, str]:
        command = ["make", "setup", f"TORCH_SPEC={torch_spec}", f"EXTRAS={extras}", f"VENV={tmp_path / 'venv'}"]
        status = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=False).returncode
        return status, (tmp_path / "venv/installed").read_text().splitlines()[-1]

    for torch_spec, extras in (("torch==2", "dev"), ("torch==1", "dev"), ("torch==2", "dev"), ("torch==2", "train")):
        assert setup(torch_spec, extras) == (0, f"{torch_spec} {extras}")
        assert len(list((tmp_path / "venv").glob(".setup-*"))) == 1
    made = (tmp_path / "venv/installed").read_text()
    assert setup("torch==2", "train")[0] == 0 and (tmp_path / "venv/installed").read_text() == made, "nothing to do"
    assert setup("torch==0", "train") == (2, "torch==0 train")
    assert not list((tmp_path / "venv").glob(".setup-*"))
    assert setup("torch==2", "train") == (0, "torch==2 train"), "the failed set-up may have changed anything"


def test_clean_leaves_the_measured_figures(tmp_path: Path) -> None:
    """They are hours of measuring, with the record of what was measured for which version."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    kept, removed = tmp_path / "benchmarks/out/report_all/figures.json", tmp_path / "benchmarks/__pycache__/x.pyc"
    for path in (kept, removed):
        path.parent.mkdir(parents=True)
        path.touch()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    subprocess.run(["make", "clean"], cwd=tmp_path, env=environment, capture_output=True, check=True, timeout=60)
    assert kept.exists() and not removed.exists()
