"""The ranks of the benchmarks of switches and of the run log, in jobs of two ranks as short as they can be."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.lab.launch import horovodrun_command, run_job

pytestmark = pytest.mark.slow


def run_worker(name: str, folder: Path, *options: str, **variables: str) -> None:
    command = horovodrun_command(2, f"benchmarks.workers.{name}", str(folder), *options)
    run_job(command, folder, deadline_s=900.0, stall_s=600.0, on_progress=lambda _: None, added_environment=variables)


def test_ranks_walk_through_the_modes_that_rank_0_asks_for(tmp_path: Path) -> None:
    run_worker("switches", tmp_path, "--modes=partial(1);sync", "--device-ms=10", "--width=8")
    for rank in range(2):
        steps = json.loads((tmp_path / f"switches-{rank}.json").read_text())["steps"]
        changes = [mode for (before, _), (mode, _) in pairwise(steps) if mode != before]
        assert changes == ["partial(1)", "sync"]


def test_the_log_of_a_run_has_the_name_that_its_worker_notes(tmp_path: Path) -> None:
    run_worker("run_log", tmp_path, "--blocks=1", "--steps=2", "--device-ms=1", STAR_LOG_DIR=str(tmp_path / "logs"))
    found = json.loads((tmp_path / "run_log.json").read_text())
    assert (tmp_path / "logs/runs" / found["run"]).is_dir(), "of the optimizer that was logged"
    assert found["steps"] > 0 and {name: len(made) for name, made in found["blocks"].items()} == {"off": 1, "on": 1}
