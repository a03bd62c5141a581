"""What a command says if an optional package of one of its subcommands is missing."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from scheduler.cli import main
from scheduler.commands import run_command

INSTALL = "pip install 'star-hvd[train]'"


def test_train_without_pandas_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert main.main(["train", str(tmp_path / "table.csv.gz"), "--no-registry"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("star-scheduler train: error: ") and "pandas" in line and line.endswith(INSTALL)


def test_advice_is_given_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(options: object) -> int:
        raise ImportError(f"pages need matplotlib; {INSTALL}")

    module = ModuleType("module_of_a_subcommand")
    module.__dict__.update(add_arguments=lambda parser: None, run=run)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert run_command("tool", "A tool.", [("page", module.__name__, "write a page")], ["page"]) == 2
    assert capsys.readouterr().err == f"tool page: error: pages need matplotlib; {INSTALL}\n"
