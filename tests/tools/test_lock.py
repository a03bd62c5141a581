"""requirements.lock: everything that the project asks for, each archive with its hash, for the platform it names."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import lock
import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]


def locked() -> dict[str, str]:
    found = {}
    for line in lock.LOCK.read_text().splitlines():
        if not line.startswith("#"):
            matched = re.fullmatch(r"([a-z0-9.-]+)==(\S+) --hash=sha256:[0-9a-f]{64}", line)
            assert matched, line
            found[matched[1]] = matched[2]
    return found


def test_all_that_is_asked_for_is_in_it_and_fits() -> None:
    """After a change of pyproject.toml: `make lock`."""
    versions = locked()
    for text in (*lock.TOOLS, *lock.wanted((ROOT / "pyproject.toml").read_text())):
        wanted = Requirement(text)
        name = wanted.name.lower().replace("_", "-")
        assert name in versions, f"{text} is not in requirements.lock: make lock"
        assert wanted.specifier.contains(versions[name], prereleases=True), f"{text}: make lock"
    assert not any(lock.LEFT_OUT.fullmatch(name) for name in versions)


def test_what_is_left_out_is_torch_alone() -> None:
    asked = lock.wanted((ROOT / "pyproject.toml").read_text())
    assert {"numpy", "pyzmq>=25", "mlflow>=3", "hypothesis"} <= set(asked) and "torch>=2.1" not in asked


def test_lines_come_from_the_report_of_pip() -> None:
    def item(name: str, version: str, **hashes: str) -> dict[str, object]:
        info = {"archive_info": {"hashes": hashes}} if hashes else {"dir_info": {}}
        return {"metadata": {"name": name, "version": version}, "download_info": info}

    report = {"install": [item("Zict_x", "2", sha256="b" * 64), item("a", "1", sha256="a" * 64),
                          item("torch", "2.13.0", sha256="c" * 64), item("nvidia-nccl-cu13", "2")]}  # fmt: skip
    assert lock.lines(report) == [f"a==1 --hash=sha256:{'a' * 64}", f"zict-x==2 --hash=sha256:{'b' * 64}"]
    with pytest.raises(SystemExit, match="no hash of b 1"):
        lock.lines({"install": [item("b", "1")]})


def test_it_is_for_one_platform(tmp_path: Path) -> None:
    file = tmp_path / "requirements.lock"
    assert lock.fits(file, "x") == "there is no requirements.lock"
    file.write_text("# cpython 3.11 linux-x86_64\na==1 --hash=sha256:00\n")
    assert lock.fits(file, "cpython 3.11 linux-x86_64") is None
    assert "is for cpython 3.11 linux-x86_64, this is cpython 3.13 linux-aarch64" in str(
        lock.fits(file, "cpython 3.13 linux-aarch64")
    )
    command = [sys.executable, ROOT / "scripts/lock.py", "fits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == (0 if lock.fits(lock.LOCK, lock.platform()) is None else 1)
