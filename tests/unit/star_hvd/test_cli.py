"""The command `star-hvd` where something is missing."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from star_hvd import cli
from star_hvd.run_log import RunLog

ROOT = Path(__file__).resolve().parents[3]


def command(*words: str, where: Path) -> subprocess.CompletedProcess[str]:
    """Run `star-hvd` in a process of its own; packages in `where` come before the installed ones."""
    environment = {**os.environ, "PYTHONPATH": f"{where}{os.pathsep}{ROOT}"}
    program = [sys.executable, "-m", "star_hvd_command", *words]
    return subprocess.run(program, cwd=where, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A folder with a Horovod whose library was built for another torch."""
    (tmp_path / "horovod" / "torch").mkdir(parents=True)
    (tmp_path / "horovod" / "__init__.py").touch()
    (tmp_path / "horovod" / "torch" / "__init__.py").write_text("raise ImportError('undefined symbol: _ZN3c10')\n")
    record = {"horovod": "0.28.1", "patches": [], "build": {"torch": "1.2.3"}}
    (tmp_path / "horovod" / "star_patches.json").write_text(json.dumps(record))
    return tmp_path


def test_doctor_says_why_horovod_cannot_be_imported(broken: Path) -> None:
    done = command("doctor", "--json", where=broken)
    assert done.returncode == 1, done.stderr
    told = json.loads(done.stdout)
    assert told["horovod"]["error"] == "ImportError: undefined symbol: _ZN3c10"
    unusable, other_torch = told["problems"]
    assert "undefined symbol" in unusable and "scripts/build_horovod.py" in unusable
    assert "Horovod was built for torch 1.2.3, but torch" in other_torch
    shown = command("doctor", where=broken)
    assert shown.returncode == 1 and "problem: Horovod cannot be used" in shown.stdout, shown.stderr


def test_run_logs_are_there_for_a_broken_horovod_too(broken: Path) -> None:
    done = command("sync-logs", "--logs", str(broken), where=broken)
    assert done.returncode == 0 and "no runs in" in done.stdout, done.stderr
    log = RunLog(broken / "runs" / "one", rank=0, world_size=2, job={"batch": 32}, ship=False)
    log.close()
    done = command("report", "one", "--logs", str(broken), "--out", "page.html", where=broken)
    assert done.returncode == 0 and (broken / "page.html").is_file(), done.stderr


def test_without_mlflow_one_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one", "two"):
        RunLog(tmp_path / "runs" / name, rank=0, world_size=2, job={"batch": 32}, ship=False).close()
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "mlflow" else found(name, *more)
    )
    assert cli.main(["sync-logs", "--logs", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "MLflow is missing, so nothing is sent; install it with: pip install" in said


def test_the_installed_command_starts_outside_the_package() -> None:
    assert 'star-hvd = "star_hvd_command:main"' in (ROOT / "pyproject.toml").read_text("utf-8")


def test_a_report_without_matplotlib_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = RunLog(tmp_path / "runs" / "one", rank=0, world_size=2, job={"batch": 32}, ship=False)
    log.close()
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_svg"):
        monkeypatch.setitem(sys.modules, name, None)
    assert cli.main(["report", str(log.directory), "--out", str(tmp_path / "page.html")]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("star-hvd report: error: ") and line.endswith("pip install 'star-hvd[train]'")
