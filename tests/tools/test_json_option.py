"""`--json` of the benchmarks: a file that cannot be written is refused before anything is measured."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

import pytest

from benchmarks.lab.json_option import json_file

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
WITH_JSON = sorted(path.stem for path in BENCHMARKS.glob("*.py") if '"--json"' in path.read_text())


def test_folders_that_are_missing_are_made_later(tmp_path: Path) -> None:
    wanted = tmp_path / "a" / "b" / "out.json"
    assert json_file(str(wanted)) == wanted and not (tmp_path / "a").exists()
    assert json_file("out.json") == Path("out.json")


@pytest.mark.parametrize(("name", "message"), [("", "is a folder"), ("file/out.json", "cannot be written")])
def test_what_is_no_place_for_a_file(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        json_file(str(tmp_path / name))


@pytest.mark.parametrize("name", [*WITH_JSON, "tta"])
def test_every_benchmark_checks_it_first(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"benchmarks.{name}").main(["--json", str(tmp_path / "file/out.json")])
    assert ended.value.code == 2 and "cannot be written" in capsys.readouterr().err
