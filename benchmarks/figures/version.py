"""Which version of the code the figures belong to."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

__all__ = ["ROOT", "VersionError", "code_version", "is_clean"]

ROOT = Path(__file__).resolve().parents[2]
# What a figure can depend on. Recorded figures and prose are excluded, so recording does not change the version.
CODE = (
    "star_hvd", "scheduler", "benchmarks", "patches", "pyproject.toml", "requirements.lock",
    ":(exclude)benchmarks/figures.json", ":(exclude)*.md",
)  # fmt: skip
GIT_DEADLINE_S = 60.0


class VersionError(RuntimeError):
    """The version cannot be determined; the message says why."""


def code_version(root: Path = ROOT) -> str:
    """Return the last commit that changed the code; with uncommitted changes, followed by `+` and their digest.

    Raises:
        VersionError: `root` is not a git checkout, or git is missing.
    """
    commit = _git(root, "log", "-1", "--format=%h", "--abbrev=10", "--", *CODE).decode().strip()
    if not commit:
        raise VersionError(f"{root} has no commit of the code")
    changes = _git(root, "diff", "HEAD", "--binary", "--", *CODE)
    for name in _git(root, "ls-files", "--others", "--exclude-standard", "-z", "--", *CODE).split(b"\0"):
        if name:
            changes += name + (root / name.decode()).read_bytes()
    return f"{commit}+{hashlib.sha256(changes).hexdigest()[:8]}" if changes else commit


def is_clean(version: str) -> bool:
    """Return whether a version is a commit without uncommitted changes."""
    return "+" not in version


def _git(root: Path, *arguments: str) -> bytes:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, check=True, timeout=GIT_DEADLINE_S
        )
    except FileNotFoundError:
        raise VersionError("git is not installed; figures need the version of the code") from None
    except subprocess.CalledProcessError as error:
        raise VersionError(f"git {arguments[0]} failed in {root}: {error.stderr.decode().strip()}") from None
    return done.stdout
