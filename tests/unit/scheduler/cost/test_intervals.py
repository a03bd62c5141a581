"""The interval that people are told where the cost model alone speaks: it covers what it says it covers."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scheduler.cost.conditions import Conditions
from scheduler.cost.cost_model import Prediction, predict
from scheduler.cost.intervals import widened
from scheduler.learning import dataset
from scheduler.plan.plan import Plan
from scheduler.policy.explanation import comparison

TABLES = Path(__file__).parents[4] / "datasets"


def form_of(row: Any) -> str:
    """What the constants are for: a mode, or a form of `sync`."""
    return str(row.plan if row.mode == "sync" else row.mode)


def told_logs(row: Any) -> tuple[float, float]:
    """The told quantiles of a table's row, over its prediction, in logarithms."""
    relative = math.exp(row.cost_log)
    low, high = widened(
        form_of(row), relative, relative * math.exp(row.cost_low_log), relative * math.exp(row.cost_high_log)
    )
    return math.log(low), math.log(high)


def coverage(frame: Any) -> float:
    bounds = np.array([told_logs(row) for row in frame.itertuples()])
    labels = frame["log_relative"].to_numpy()
    return float(((bounds[:, 0] <= labels) & (labels <= bounds[:, 1])).mean())


def other_plans(name: str) -> Any:
    pytest.importorskip("pandas")
    frame, _ = dataset.read(TABLES / name)
    return frame[frame["plan"] != "sync"]


def test_nine_of_ten_labels_of_other_networks_are_inside() -> None:
    """The constants were fitted to the networks of fold 0; these are the others."""
    frame = other_plans("moments.csv.gz")
    held_out = frame[dataset.folds(frame, 2) == 1]
    assert len(held_out) > 9000
    assert 0.85 < coverage(held_out) < 0.95
    for form in ("partial", "subgroup", "ps", "grouped", "local", "sync(balanced)", "sync(steal)"):
        rows = [form_of(row) == form for row in held_out.itertuples()]
        assert 0.82 < coverage(held_out[rows]) < 0.96, form
    # Also of what is worth choosing, where most is promised.
    for least, most in ((-9.0, -1.0), (-1.0, -0.5), (-0.5, 0.0)):
        inside = held_out["cost_log"].between(least, most)
        assert 0.82 < coverage(held_out[inside]) < 0.96, (least, most)


def test_labels_of_real_runs_are_inside() -> None:
    assert coverage(other_plans("real.csv.gz")) > 0.85


def prediction(**fields: Any) -> Prediction:
    times_s = np.full((24, 3), 0.1) * np.array([1.0, 1.0, 4.0])
    found = predict(Plan.partial(3, 2), Conditions(times_s=times_s, rate=np.full(3, math.inf), starved=np.zeros(3)))
    return dataclasses.replace(found, **fields)


def test_only_what_is_told_is_wider() -> None:
    """`low` and `high` are features of the learned model and bounds of the policy's: they stay as they are."""
    found = prediction()
    assert found.high / found.low < 1.1
    low, high = found.reported_interval
    assert low < 0.7 * found.low and high > 1.5 * found.high
    assert prediction(learned=True).reported_interval == (found.low, found.high)
    sync = prediction(plan=Plan.sync(3), relative=1.0, low=1.0, high=1.0, reach=1.0)
    assert sync.reported_interval == pytest.approx((1.0, 1.0))


def test_what_a_missed_target_counts_is_not_stretched() -> None:
    found, sure = prediction(), prediction(reach=1.0)
    missed = 0.25
    risky = prediction(
        relative=sure.relative + missed, low=sure.low + missed, high=sure.high + missed, reach=1.0 - missed
    )
    sure = prediction(relative=sure.relative, reach=1.0)
    assert found.plan == risky.plan
    assert risky.reported_interval == pytest.approx([bound + missed for bound in sure.reported_interval])


def test_the_sentence_tells_the_wide_interval() -> None:
    found = prediction()
    low, high = (1.0 / bound for bound in reversed(found.reported_interval))
    assert comparison([found], found, None).endswith(f"90 % interval {low:.1f}-{high:.1f}")
    assert low < 2.3 < high, "what was measured in such a job"
