"""Promotion while others promote."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler.cli import main, promote
from scheduler.learning.evaluate import Regrets
from tests.support.learning import save_model
from tests.unit.scheduler.cli.test_main import FakeRegistry, regrets


@pytest.mark.parametrize("champion", ["1", None])
@pytest.mark.parametrize("moves", [True, False])
def test_a_champion_that_changed_meanwhile_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], champion: str | None,
    moves: bool,
) -> None:
    """The challenger was never compared with the champion that another promotion made during the simulation."""
    save_model(tmp_path)
    registry = FakeRegistry(tmp_path, challenger="2", **({} if champion is None else {"champion": champion}))

    def simulate(*_: object) -> list[Regrets]:
        if moves:
            registry.aliases["champion"] = "7"
        return regrets(learned=0.03, champion=0.04, cost_model=0.05) * 40

    monkeypatch.setattr(promote, "MOST_COVERAGE", 1.0)
    monkeypatch.setattr(promote, "LEAST_COVERAGE", 0.0)
    monkeypatch.setattr(promote, "run_scenarios", simulate)
    monkeypatch.setattr("scheduler.learning.registry.Registry", registry)
    assert main.main(["promote"]) == int(moves)
    assert registry.promoted == ([] if moves else ["2"])
    assert ("the champion changed meanwhile; run promote again" in capsys.readouterr().out) is moves
