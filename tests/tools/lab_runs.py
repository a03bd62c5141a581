"""Runs of the laboratory made up for tests."""

from __future__ import annotations

from typing import Any

from benchmarks.lab.spec import ALL_VARIANTS, RunRecord, RunSpec


def spec_of(**changes: Any) -> RunSpec:
    values: dict[str, Any] = dict(
        scenario="one-slow",
        rows=((1.0, 1.0, 1.0, 4.0),),
        ranks=4,
        variants=ALL_VARIANTS,
        seeds=(0, 1),
        dataset="digits",
        train_samples=1280,
        epochs=1,
        batch_samples=16,
        learning_rate=0.1,
        momentum=0.9,
        device_s=0.03,
        eval_every_steps=2,
    )
    return RunSpec(**{**values, **changes})


def some_records() -> list[RunRecord]:
    reached_s = {"straggler_free": 9.0, "plain": 30.0, "drop": 13.0, "star": 12.0, "star_free": 8.0}
    return [
        RunRecord(
            variant=variant,
            seed=seed,
            train_s=2 * time_s,
            global_steps=100,
            folds=5 if variant == "star" else 0,
            max_staleness=4 if variant == "star" else 0,
            times_s=[1.0, 2.0, 3.0, time_s, time_s + 1.0],
            steps=[2, 4, 6, 8, 10],
            accuracies=[0.1, 0.2, 0.91, 0.92, 0.95],
        )
        for variant, time_s in reached_s.items()
        for seed in (0, 1)
    ]
