"""Benchmarks with options that cannot be measured end with status 2 before their first job."""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.background import main as background
from benchmarks.background import measure
from benchmarks.lab.launch import JobFailed
from benchmarks.switches import main as switches

NAMES = ("background", "compression", "harm", "neighbours", "strangers", "switches")


@pytest.fixture(autouse=True)
def _no_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a job was started")

    for name in NAMES:
        monkeypatch.setattr(f"benchmarks.{name}.run_job", refuse)
    monkeypatch.setattr("benchmarks.background.Network", refuse)


@pytest.mark.parametrize(
    ("name", "option", "said"),
    [
        ("background", "--modes=local(8);pss(3)", "--modes: mode is 'pss(3)'; expected"),
        ("background", "--modes=ps(5)", "--modes: "),
        ("background", "--mbit=200,fast", "--mbit is '200,fast'; expected numbers above 0"),
        ("background", "--mbytes=0", "--mbytes is '0'; expected numbers above 0"),
        ("background", "--slow-link=0", "--slow-link is 0.0; expected at least 1"),
        ("background", "--repeats=0", "--repeats is 0; expected at least"),
        ("compression", "--networks=usual,cnv", "--networks has 'cnv'; expected some of usual, mlp, conv, transformer"),
        ("compression", "--seeds=0", "--seeds is 0; expected at least 1"),
        ("compression", "--train-samples=1", "--train-samples is 1; expected at least 2"),
        ("harm", "--turns=0", "--turns is 0; expected at least 1"),
        ("harm", "--jobs=0", "--jobs is 0; expected at least 1"),
        ("neighbours", "--turns=0", "--turns is 0; expected at least 1"),
        ("neighbours", "--jobs=0", "--jobs is 0; expected at least 1"),
        ("strangers", "--kinds=loud", "--kinds has loud; expected some of"),
        ("strangers", "--turns=0", "--turns is 0; expected at least 1"),
        ("strangers", "--mode=partial(3)", "--mode: "),
        ("switches", "--modes=sync;partal(3)", "--modes: mode is 'partal(3)'; expected"),
        ("switches", "--modes=sync", "--modes: modes are ['sync']; expected at least two"),
        ("switches", "--modes=sync;auto", "--modes has 'auto'; expected a fixed mode"),
        ("switches", "--modes=sync;asgd", "--modes has 'asgd'; expected ps(1)"),
        ("switches", "--ranks=2", "--modes: "),
    ],
)
def test_an_option_that_is_invalid_is_named_before_the_first_job(
    name: str, option: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = importlib.import_module(f"benchmarks.{name}").main([option])
    except SystemExit as ended:  # From argparse.
        status = ended.code
    assert status == 2
    assert said in capsys.readouterr().err


def test_the_usual_modes_of_switches_are_named_as_steps_name_them() -> None:
    with pytest.raises(AssertionError, match="a job was started"):
        switches([])


def test_the_cells_before_one_that_fails_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    @contextlib.contextmanager
    def network(*_: Any) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(set_rate=lambda *_: None)

    def train(spec: dict[str, Any], _: Any) -> dict[str, Any]:
        if spec["mode"] == "ps(3)":
            raise JobFailed("it hung")
        return {"step_s": 0.1, "median_step_s": 0.1, "plans": [["local(8)", 0]]}

    monkeypatch.setattr("benchmarks.background.Network", network)
    monkeypatch.setattr("benchmarks.background.train", train)
    out = tmp_path / "background.json"
    assert background(["--mbytes=1", "--json", str(out)]) == 1
    assert [cell["mode"] for cell in json.loads(out.read_text())["cells"]] == ["local(8)"]


def test_each_setting_is_first_in_every_other_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what a machine does over time (it warms up, another job starts) would count for one of them."""
    order: list[bool] = []

    def train(spec: dict[str, Any], _: Any) -> dict[str, Any]:
        order.append(spec["background"])
        return {"step_s": 0.1, "median_step_s": 0.1, "plans": []}

    monkeypatch.setattr("benchmarks.background.train", train)
    measure({"mode": "ps(3)", "compute_s": 0.1}, SimpleNamespace(), 4)  # type: ignore[arg-type]
    assert order == [False, True, True, False] * 2
