"""`make docs`: the site is built strictly, and a broken link or a missing page ends it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("docs", "scripts", "star_hvd", "scheduler", "Makefile", "mkdocs.yml", "pyproject.toml")
INSTALL_LIMIT_S, BUILD_LIMIT_S = 600.0, 300.0

pytestmark = pytest.mark.slow


def _make(target: str, where: Path, limit_s: float, **variables: object) -> subprocess.CompletedProcess[str]:
    given = [f"{name}={value}" for name, value in {"PYTHON": sys.executable, **variables}.items()]
    outer = ("MAKE", "MFLAGS", "PYTHON", "VENV")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
    command = ["make", target, *given]
    return subprocess.run(
        command, cwd=where, env=environment, capture_output=True, text=True, timeout=limit_s, check=False
    )


@pytest.fixture(scope="module")
def venv() -> Path:
    """The environment of `make docs`, which stays in the repository, as that of `make setup` does."""
    made = _make("docs-venv", ROOT, INSTALL_LIMIT_S)
    if made.returncode != 0:
        pytest.skip(f"the packages of `docs` in pyproject.toml cannot be installed here: {made.stderr.strip()[-300:]}")
    return ROOT / ".venv-docs"


def test_the_site_is_built_from_pages_and_docstrings(venv: Path, tmp_path: Path) -> None:
    done = _make("docs", ROOT, BUILD_LIMIT_S, SITE=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert pages <= {path.stem for path in tmp_path.glob("*.html")}
    assert "DistributedOptimizer" in (tmp_path / "api.html").read_text(encoding="utf-8")


def test_a_broken_link_ends_the_build(venv: Path, tmp_path: Path) -> None:
    for name in SOURCES:
        # With its time: a newer `pyproject.toml` would renew the environment.
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copy(ROOT / name, tmp_path / name)
    page = tmp_path / "docs" / "glossary.md"
    page.write_text(page.read_text(encoding="utf-8") + "\nSee [there](no_such_page.md).\n", encoding="utf-8")
    done = _make("docs", tmp_path, BUILD_LIMIT_S, DOCS_VENV=venv, SITE=tmp_path / "site")
    assert done.returncode != 0
    assert "no_such_page.md" in done.stderr and "glossary.md" in done.stderr
