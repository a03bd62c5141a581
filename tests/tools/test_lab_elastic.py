"""The elastic trainings of scenario `killed-worker`: what is recorded of them."""

from __future__ import annotations

import io
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.lab import elastic
from benchmarks.lab.elastic import run_elastic_jobs
from benchmarks.lab.elastic_worker import Training
from benchmarks.lab.launch import JobFailed
from benchmarks.lab.measures import summarize
from benchmarks.lab.report import table
from tests.tools.lab_runs import some_records, spec_of


@pytest.mark.parametrize(("variant", "folds"), [("plain", 0), ("star", None), ("ps(2)", None)])
def test_counters_that_a_new_world_resets_are_not_recorded(variant: str, folds: int | None) -> None:
    spec = spec_of(scenario="killed-worker", modes=("ps(2)",))
    record = Training(spec, variant, 0, types.SimpleNamespace(rank=lambda: 1)).record
    assert (record.folds, record.drops, record.max_staleness) == (folds,) * 3


def test_what_is_not_measured_is_no_number() -> None:
    records = some_records()
    for record in records:
        if record.variant == "star":
            record.folds = record.drops = record.max_staleness = None
    summary = summarize(spec_of(scenario="killed-worker"), 0.9, records)
    assert [summary[name] for name in ("folds", "drops", "max_staleness")] == [None] * 3
    assert summary["variants"]["star_free"]["folds"] == 0
    console = Console(width=120, file=io.StringIO(), color_system=None)
    console.print(table(summary))
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    (star,) = (line.split() for line in printed.splitlines() if line.strip().startswith("star_hvd  "))
    assert star[-2:] == ["-", "queue"]


class TestDeath:
    def training(self, mode: str, size: int = 4) -> Training:
        spec = spec_of(scenario="killed-worker", modes=(mode,), epochs=12)
        return Training(spec, mode, 0, types.SimpleNamespace(rank=lambda: 1, size=lambda: size, report=lambda: None))

    def state(self, mode: str, step: int = 140) -> Any:
        """A state after half the run, halfway between two commits."""
        optimizer = types.SimpleNamespace(mode=mode, stats=dict, timeline=list, close=lambda: None)
        return types.SimpleNamespace(step=step, optimizer=optimizer)

    @pytest.mark.parametrize(
        ("wanted", "mode", "watched"),
        [("ps(2)", "sync", False), ("ps(2)", "ps(2)", True), ("asgd", "ps(1)", True), ("sync", "sync", True)],
    )
    def test_steps_are_watched_only_once_a_rank_dies(self, wanted: str, mode: str, watched: bool) -> None:
        training = self.training(wanted)
        training.maybe_die(self.state(mode), per_epoch=20)
        training.watch.step(141)
        assert (training.watch.recovery_s > 0.0) == watched, "until then the servers are starting"

    def test_the_pause_contains_the_new_world(self) -> None:
        training = self.training("ps(2)", size=2)
        training.watch.recovery_s, training.record.rebuild_s = 0.03, 8.0
        training.finish(self.state("ps(2)").optimizer, 240)
        assert (training.record.recovery_s, training.record.killed) == (8.0, 1)

    def test_a_training_in_which_nobody_could_die_fails(self) -> None:
        training = self.training("ps(2)")
        training.maybe_die(self.state("sync"), per_epoch=20)
        with pytest.raises(RuntimeError, match=r"ps\(2\) was not in force"):
            training.finish(self.state("sync").optimizer, 240)


class TestAttempts:
    """Horovod's recovery fails at times: how often is part of the result."""

    def failing(self, monkeypatch: pytest.MonkeyPatch, failures: dict[str, int]) -> None:
        left = dict(failures)

        def run_job(command: Sequence[str], run_dir: Path, **limits: Any) -> None:
            variant = command[-2]
            left[variant] = left.get(variant, 0) - 1
            if left[variant] >= 0:
                raise JobFailed("no new world")

        monkeypatch.setattr(elastic, "run_job", run_job)
        monkeypatch.setattr(elastic, "horovodrun_command", lambda ranks, module, *arguments, options: list(arguments))

    def run(self, run_dir: Path) -> dict[str, int]:
        spec = spec_of(scenario="killed-worker", variants=("plain", "star"), modes=("ps(2)",), seeds=(0,))
        return run_elastic_jobs(spec, run_dir, deadline_s=9.0, stall_s=9.0, on_progress=lambda fields: None)

    def test_failed_ones_are_counted(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.failing(monkeypatch, {"star": 1, "ps(2)": 2})
        assert self.run(tmp_path) == {"seed0-star": 1, "seed0-ps(2)": 2}

    def test_the_third_ends_the_run(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.failing(monkeypatch, {"star": 3})
        with pytest.raises(JobFailed):
            self.run(tmp_path)

    def test_the_summary_names_them_by_variant(self) -> None:
        records = [record for record in some_records() if record.variant in ("plain", "star")]
        for record in records:
            record.failed_attempts = 1 + record.seed if record.variant == "star" else 0
        summary = summarize(spec_of(scenario="killed-worker", variants=("plain", "star")), 0.9, records)
        assert summary["failed_attempts"] == {"plain": 0, "star": 3}
