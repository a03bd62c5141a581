"""The forecast against series whose next value is known, and against the plain forecasts it must not lose to."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import forecast as benchmark
from scheduler.diagnosis.expected_times import outlook
from scheduler.diagnosis.forecast import Forecaster, LastValue, RunningMean, RunningMedian
from scheduler.records import RankStats, Window
from tests.support.effort import cases
from tests.support.traces import golden_and_recorded
from tests.support.windows import steady, window

Array = npt.NDArray[np.float64]


def _errors(rows: Array) -> dict[str, float]:
    """Mean absolute error on the last half."""
    medians, *_ = benchmark.replayed(rows)
    half = len(rows) // 2
    return {name: float(np.mean(np.abs(values[half:] - rows[half:]))) for name, values in medians.items()}


def _noise(rounds: int = 300, ranks: int = 8, size: float = 0.1, seed: int = 3) -> Array:
    draw = np.random.default_rng(seed)
    return np.asarray(0.1 * np.exp(size * draw.normal(size=(rounds, ranks))))


def test_pure_noise_is_forecast_as_well_as_by_the_median() -> None:
    errors = _errors(_noise())
    assert errors["forecast"] <= 1.02 * min(errors.values())
    assert errors["last"] > 1.3 * errors["forecast"]


def test_ranks_of_different_speed() -> None:
    rows = _noise() * np.array([1.0, 1.0, 1.0, 1.3, 1.0, 1.0, 2.0, 0.8])
    errors = _errors(rows)
    assert errors["forecast"] <= 1.03 * min(errors.values())


@pytest.mark.slow
def test_what_lasts_a_little_is_used() -> None:
    """An autoregression of 0.6: neither the last value nor the mean is the best forecast."""
    draw = np.random.default_rng(5)
    state, rows = np.zeros(8), []
    for _ in range(400):
        state = 0.6 * state + 0.15 * draw.normal(size=8)
        rows.append(0.1 * np.exp(state))
    errors = _errors(np.array(rows))
    assert errors["forecast"] < 0.95 * min(value for name, value in errors.items() if name != "forecast")


def test_a_straggler_is_followed_at_once_and_let_go_at_once() -> None:
    rows = _noise(300, size=0.03)
    rows[100:200, 3] *= 4.0
    forecaster = Forecaster(8)
    median = []
    for row in rows:
        median.append(forecaster.forecast().median_s)
        forecaster.update(row)
    times = np.array(median)[:, 3]
    assert np.all(np.abs(np.log(times[5:100] / 0.1)) < 0.2)
    assert times[101] > 1.3 * np.median(times[5:100]), "one slow report is half believed"
    assert np.all(times[106:200] > 0.28), "five are"
    assert np.all(np.abs(np.log(times[110:200] / 0.4)) < 0.2)
    assert np.all(np.abs(np.log(times[210:] / 0.1)) < 0.25), "ten reports after it is over"


def test_contention_that_moves_is_followed_as_by_the_last_value() -> None:
    rows = _noise(400, size=0.03)
    for step in range(400):
        rows[step, (step // 5) % 8] *= 4.0
    errors = _errors(rows)
    assert errors["forecast"] <= 1.1 * errors["last"] < 0.6 * errors["mean"]


def test_the_probability_of_being_slow() -> None:
    rows = _noise(300, size=0.03)
    rows[100:, 2] *= 2.0
    forecaster = Forecaster(8)
    for row in rows:
        forecaster.update(row)
    found = forecaster.forecast(threshold=1.2)
    assert found.slow[2] > 0.9 and np.all(np.delete(found.slow, 2) < 0.1) and found.spread > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("size", [0.02, 0.3])
def test_intervals_cover_what_they_say(size: float) -> None:
    rows = _noise(600, size=size)
    forecaster, inside = Forecaster(8), []
    for row in rows:
        found = forecaster.forecast((0.05, 0.5, 0.95))
        inside.append((row >= found.quantile_s[0]) & (row <= found.quantile_s[2]))
        forecaster.update(row)
    assert 0.85 <= float(np.mean(inside[100:])) <= 0.97


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_few_ranks(ranks: int) -> None:
    forecaster = Forecaster(ranks)
    for row in _noise(50, ranks):
        forecaster.update(row)
    found = forecaster.forecast()
    assert np.all(np.abs(np.log(found.median_s / 0.1)) < 0.3)
    assert np.all((found.slow >= 0) & (found.slow <= 1))


def test_before_anything_is_known_and_with_ranks_missing() -> None:
    forecaster = Forecaster(3)
    assert np.all(np.isnan(forecaster.forecast().median_s)) and math.isnan(forecaster.forecast().spread)
    forecaster.update([math.nan, math.nan, math.nan])
    assert forecaster.iterations == 0
    forecaster.update([0.1, math.nan, 0.2])
    found = forecaster.forecast()
    assert found.median_s[0] == pytest.approx(0.1) and math.isnan(found.median_s[1])
    for _ in range(20):
        forecaster.update([0.1, 0.3, math.nan])
    found = forecaster.forecast()
    assert found.median_s[1] == pytest.approx(0.3, rel=0.1)
    assert found.median_s[2] > 0.12, "a silent rank is remembered as it was"


def test_the_unit_of_time_does_not_matter() -> None:
    rows = _noise(80) * np.array([1, 1, 1, 2, 1, 1, 1, 1.0])
    small, large = Forecaster(8), Forecaster(8)
    for row in rows:
        small.update(row)
        large.update(1000.0 * row)
    assert large.forecast().median_s == pytest.approx(1000.0 * small.forecast().median_s)


def test_the_order_of_ranks_does_not_matter() -> None:
    rows = _noise(80)
    order = np.random.default_rng(1).permutation(8)
    plain, mixed = Forecaster(8), Forecaster(8)
    for row in rows:
        plain.update(row)
        mixed.update(row[order])
    assert mixed.forecast().median_s == pytest.approx(plain.forecast().median_s[order])


TIMES = st.one_of(st.floats(1e-6, 1e4), st.sampled_from([0.0, -1.0, math.nan, math.inf, -math.inf, 1e-130, 1e130]))


@settings(max_examples=cases(60), deadline=None)
@given(st.lists(st.lists(TIMES, min_size=4, max_size=4), max_size=40))
def test_nothing_makes_it_fail(rows: list[list[float]]) -> None:
    forecaster = Forecaster(4)
    for row in rows:
        forecaster.update(row)
    found = forecaster.forecast((0.1, 0.5, 0.9))
    heard = np.array([any(math.isfinite(row[r]) and row[r] > 0 for row in rows) for r in range(4)])
    assert np.array_equal(~np.isnan(found.median_s), heard)
    q = found.quantile_s[:, heard]
    assert np.all(q[0] <= q[1]) and np.all(q[1] <= q[2]) and np.all(q >= 0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Forecaster(0), "n_ranks is 0"),
        (lambda: Forecaster(2).update([1.0]), r"shape \(1,\); expected \(2,\)"),
        (lambda: Forecaster(2).forecast((0.9, 0.1)), "quantiles is"),
        (lambda: Forecaster(2).forecast((0.0,)), "quantiles is"),
        (lambda: Forecaster(2).forecast(threshold=1.0), "threshold is 1.0"),
    ],
)
def test_bad_input(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_baselines_are_what_they_are_called() -> None:
    rows = [[1.0, 2.0], [3.0, math.nan], [8.0, 4.0]]
    last, mean, median = LastValue(2), RunningMean(2), RunningMedian(2)
    assert all(np.all(np.isnan(b.median_s())) for b in (last, mean, median))
    for row in rows:
        for baseline in (last, mean, median):
            baseline.update(row)
    assert last.median_s().tolist() == [8.0, 4.0]
    assert mean.median_s().tolist() == [4.0, 3.0]
    assert median.median_s().tolist() == [3.0, 3.0]


def test_balanced_accuracy_and_area_of_the_benchmark() -> None:
    truth = np.array([True, True, False, False, False, False])
    assert benchmark.balanced_accuracy(np.ones(6, dtype=bool), truth) == 0.5, "always yes"
    assert benchmark.balanced_accuracy(truth, truth) == 1.0
    assert benchmark.balanced_accuracy(np.array([True, False, True, False, False, False]), truth) == 0.625
    assert benchmark.area_under_curve(np.array([3.0, 1.0, 2.0, 0.0, 0.0, 1.0]), truth) == pytest.approx((4 + 2.5) / 8)
    assert benchmark.balanced_accuracy(truth, np.ones(6, dtype=bool)) is None


def test_the_benchmark_refuses_other_files(tmp_path: Any) -> None:
    (tmp_path / "a.json").write_text('{"x": {"ssgd": {}}}')
    for name in ("a.json", "missing.json"):
        with pytest.raises(ValueError, match="is no file of traces"):
            benchmark.read_matrices(tmp_path / name)
        assert benchmark.main(["--traces", str(tmp_path / name)]) == 2


@pytest.mark.parametrize(
    ("path", "name", "of_mean", "of_last"),
    golden_and_recorded(
        # Contention that stays for a few rounds, of which ours has more, is what the last value is good at.
        [("bursts", 0.97, 0.96), ("rotating", 0.97, 0.96)],
        [("transformer", 0.97, 0.85), ("alexnet_ratio", 0.97, 0.85)],
    ),
)
def test_on_traces_it_beats_last_value_and_running_mean(path: Path, name: str, of_mean: float, of_last: float) -> None:
    found = benchmark.evaluate(benchmark.read_matrices(path)[name])
    errors = found["error_ms"]
    assert errors["forecast"] < of_mean * errors["mean"] and errors["forecast"] < of_last * errors["last"]
    ours = found["next"]["forecast"]
    assert ours["fitted"] > max(found["next"][other]["rule"] for other in ("last", "mean"))
    assert ours["auc"] > max(found["next"][other]["auc"] for other in ("last", "mean"))


# ---- the forecast of a window --------------------------------------------------------------------------------------


def test_the_outlook_of_a_window_is_that_of_its_steps() -> None:
    times = steady(4, 40, slow={3: 3.0}, jitter=0.05)
    expected = Forecaster(4)
    for row in times:
        expected.update(row)
    found = outlook(window(times, end=40))
    assert found is not None
    np.testing.assert_allclose(found.median_s, expected.forecast().median_s)
    low_s, _, high_s = found.quantile_s
    assert (low_s < found.median_s).all() and (found.median_s < high_s).all()
    assert 0.27 < found.median_s[3] < 0.33 and found.slow[3] > 0.9 and max(found.slow[:3]) < 0.2


def test_the_outlook_of_ranks_that_told_little_or_nothing() -> None:
    assert outlook(Window(step=0, ranks=tuple(RankStats(rank=r, compute_s=(), steps=()) for r in range(3)))) is None
    told = RankStats(rank=0, compute_s=(0.1, 0.2, 0.1), steps=(4, 6, 6))
    found = outlook(Window(step=7, ranks=(told, RankStats(rank=1, compute_s=(), steps=()))))
    assert found is not None and np.isnan(found.median_s[1]) and 0.09 < found.median_s[0] < 0.21
