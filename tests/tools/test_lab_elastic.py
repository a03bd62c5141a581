"""The elastic trainings of scenario `killed-worker`: what is recorded of them."""

from __future__ import annotations

import io
import types

import pytest
from rich.console import Console

from benchmarks.lab.elastic_worker import Training
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
