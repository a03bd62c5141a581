#!/usr/bin/env python3
"""Write or check `requirements.lock`: what `make setup` installs, each archive with its SHA-256.

    python scripts/lock.py write     resolve with pip and write the file
    python scripts/lock.py fits      whether it is for this interpreter and machine (exit status 0 or 1, and why)

pip, with its own configuration, resolves the requirements of pyproject.toml and of Horovod's build, and reports the
hash of every archive. torch itself is not in the file: the user chooses its build and index (TORCH_SPEC,
TORCH_INDEX_URL). Its dependencies are in the file, except those for CUDA. Hashes are those of one platform's archives,
which the first line names; on other platforms setup.sh installs without the file, and says so.

Only the standard library is used.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import build_horovod

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
EXTRAS = ("dev", "train", "bench")
"""Of the project; the same as the default of the Makefile."""

TOOLS = ("setuptools<81", "wheel", "cmake>=3.18,<4", *build_horovod.PREREQUISITES)
LEFT_OUT = re.compile(r"torch|triton|nvidia-.*|cuda-.*|star-hvd|horovod")
"""torch, and what only its builds for GPUs bring along."""


def platform() -> str:
    """Return this interpreter's platform in the form of the file's first line."""
    return f"cpython {sys.version_info[0]}.{sys.version_info[1]} {sysconfig.get_platform()}"


def wanted(pyproject: str) -> list[str]:
    """Return the requirements in the text of pyproject.toml: dependencies, and those of `EXTRAS`."""
    found: list[str] = []
    for name in ("dependencies", *EXTRAS):
        lists = re.findall(rf"^{name} = \[(.*?)\]$", pyproject, flags=re.MULTILINE | re.DOTALL)
        if len(lists) != 1:
            raise SystemExit(f"pyproject.toml has {len(lists)} lists {name}; expected one")
        found += re.findall(r'"([^"]+)"', lists[0])
    return list(dict.fromkeys(requirement for requirement in found if not LEFT_OUT.fullmatch(_name(requirement))))


def _name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement)[0].lower().replace("_", "-")


def lines(report: Mapping[str, Any]) -> list[str]:
    """Return the file's lines, from pip's installation report."""
    found = []
    for item in report["install"]:
        name, version = str(item["metadata"]["name"]).lower().replace("_", "-"), item["metadata"]["version"]
        if LEFT_OUT.fullmatch(name):
            continue
        digest = item["download_info"].get("archive_info", {}).get("hashes", {}).get("sha256")
        if not digest:
            raise SystemExit(f"pip knows no hash of {name} {version}: its index gives none, and it is no archive")
        found.append(f"{name}=={version} --hash=sha256:{digest}")
    return sorted(found)


def write(torch: str) -> None:
    """Resolve with pip and write the file."""
    requirements = [*TOOLS, torch, *wanted((ROOT / "pyproject.toml").read_text(encoding="utf-8"))]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        subprocess.run([*command, "--report", str(report), *requirements], check=True)
        found = lines(json.loads(report.read_text(encoding="utf-8")))
    head = [f"# {platform()}", "# Made by scripts/lock.py write; torch is left out: see there."]
    LOCK.write_text("\n".join([*head, *found]) + "\n", encoding="utf-8")
    print(f"[lock] {len(found)} archives in {LOCK.name}")


def fits(lock: Path, here: str) -> str | None:
    """Return why a file cannot be used here, or None if it can."""
    if not lock.is_file():
        return f"there is no {lock.name}"
    made_for = lock.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
    return None if made_for == here else f"{lock.name} is for {made_for}, this is {here}"


def main(arguments: Sequence[str]) -> int:
    """Run the command line; see the module's docstring."""
    if list(arguments[:1]) == ["write"]:
        write(arguments[1] if len(arguments) > 1 else "torch==2.13.0")
        return 0
    if list(arguments) == ["fits"]:
        reason = fits(LOCK, platform())
        if reason is not None:
            print(reason)
        return 0 if reason is None else 1
    print("expected: lock.py write [TORCH] or lock.py fits", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
