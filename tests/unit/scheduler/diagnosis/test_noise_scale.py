"""The gradient noise scale against synthetic gradients whose variance is known."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.diagnosis.noise_scale import NoiseScale

DIMENSIONS = 400


def _measured(
    samples: list[float],
    weights: list[float],
    batches: tuple[float, float],
    *,
    noise: float,
    steps: int = 1500,
    decay: float = 0.999,
) -> NoiseScale:
    """Feed norms of gradients of mean norm 1 and total per-sample variance `noise`."""
    rng = np.random.default_rng(7)
    true = rng.normal(size=DIMENSIONS)
    true /= np.linalg.norm(true)
    share = np.asarray(weights) / sum(weights)
    scale = NoiseScale(decay)
    for _ in range(steps):
        deviation = np.sqrt(noise / DIMENSIONS / np.asarray(samples))[:, None]
        local = true + deviation * rng.normal(size=(len(samples), DIMENSIONS))
        mean = share @ local
        assert scale.update(float(share @ (local**2).sum(axis=1)), float(mean @ mean), *batches)
    return scale


def equivalent_batches(samples: Sequence[float], weights: Sequence[float] | None = None) -> tuple[float, float]:
    """The general formula: the small and the big batch of a weighted mean of gradients, for `NoiseScale.update`.

    Let g_i be means over b_i samples with weights w_i, W = sum w_i, and g = sum w_i g_i / W. By independence

        E sum w_i |g_i|^2 / W = |G|^2 + S * sum(w_i / b_i) / W       so 1 / small = sum(w_i / b_i) / W
        E |g|^2               = |G|^2 + S * sum(w_i^2 / b_i) / W^2   so 1 / big   = sum(w_i^2 / b_i) / W^2

    With w_i = b_i they are the mean batch B / n and the total batch B. `local_sqr_mean` must be the mean of
    |g_i|^2 with the same weights.

    Args:
        samples: b_i, samples behind each gradient, shape (n_gradients,). Entries of 0 are ranks that gave
            nothing.
        weights: w_i in the reduction, same shape; the samples themselves where left out. A damped late
            gradient has w_i = b_i / (1 + staleness).

    Returns:
        (small, big) in samples; (0, 0) without any gradient, which `update` refuses.

    Raises:
        ValueError: Different lengths, or a negative number.
    """
    weights = samples if weights is None else weights
    if len(samples) != len(weights):
        raise ValueError(f"got {len(samples)} sample counts and {len(weights)} weights; expected as many")
    if any(not number >= 0.0 for number in (*samples, *weights)):
        raise ValueError("a sample count or weight is negative or NaN; expected 0 or more")
    pairs = [(b, w) for b, w in zip(samples, weights, strict=True) if b > 0.0 and w > 0.0]
    total = sum(w for _, w in pairs)
    if not pairs:
        return 0.0, 0.0
    small = total / sum(w / b for b, w in pairs)
    return small, total**2 / sum(w * w / b for b, w in pairs)


@pytest.mark.parametrize("noise", [20.0, 300.0, 3000.0])
def test_equal_batches_give_the_known_scale(noise: float) -> None:
    scale = _measured([32.0] * 4, [1.0] * 4, (32.0, 128.0), noise=noise)
    assert scale.value == pytest.approx(noise, rel=0.15)
    assert scale.variance == pytest.approx(noise, rel=0.1)
    assert scale.gradient_sqr == pytest.approx(1.0, rel=0.15)


@pytest.mark.parametrize("samples", [[8.0, 64.0, 32.0, 16.0], [120.0, 4.0, 4.0]])
def test_unequal_batches_weighted_by_their_samples(samples: list[float]) -> None:
    batches = equivalent_batches(samples)
    assert batches == pytest.approx((sum(samples) / len(samples), sum(samples)))
    assert _measured(samples, samples, batches, noise=300.0).value == pytest.approx(300.0, rel=0.1)


def test_unequal_weights_of_equal_batches() -> None:
    samples, weights = [32.0] * 4, [1.0, 1.0, 1.0 / 3.0, 0.2]
    batches = equivalent_batches(samples, weights)
    assert _measured(samples, weights, batches, noise=300.0).value == pytest.approx(300.0, rel=0.1)
    # Pretending that they count alike is wrong by more than the tolerance, so this test can fail.
    naive = _measured(samples, weights, (32.0, 128.0), noise=300.0).value
    assert naive != pytest.approx(300.0, rel=0.2)


def test_damped_late_gradients_of_unequal_batches() -> None:
    samples = [16.0, 64.0, 32.0, 32.0]
    weights = [b / (1 + staleness) for b, staleness in zip(samples, (0, 0, 3, 1), strict=True)]
    batches = equivalent_batches(samples, weights)
    assert _measured(samples, weights, batches, noise=300.0).value == pytest.approx(300.0, rel=0.1)


def test_default_decay_is_right_within_a_third_after_a_few_hundred_steps() -> None:
    scale = _measured([32.0] * 4, [1.0] * 4, (32.0, 128.0), noise=300.0, steps=60, decay=0.98)
    assert scale.value == pytest.approx(300.0, rel=0.33)


def test_same_as_the_formula_for_equal_batches() -> None:
    scale = NoiseScale()
    n, b, local, mean = 4, 8.0, 3.0, 1.5
    scale.update(local, mean, b, n * b)
    assert scale.gradient_sqr == pytest.approx((n * mean - local) / (n - 1))
    assert scale.variance == pytest.approx((local - mean) * n * b / (n - 1))


def test_bias_correction_makes_a_constant_its_own_average() -> None:
    scale = NoiseScale(0.9)
    values = []
    for _ in range(5):
        scale.update(3.0, 1.5, 8.0, 32.0)
        values.append((scale.gradient_sqr, scale.variance))
    assert all(value == pytest.approx(values[0]) for value in values)


def test_unknown_before_the_first_update_and_while_an_estimate_is_negative() -> None:
    scale = NoiseScale()
    assert math.isnan(scale.value) and math.isnan(scale.variance) and math.isnan(scale.gradient_sqr)
    scale.update(100.0, 1.0, 8.0, 16.0)  # the mean gradient is smaller than noise alone explains
    assert scale.gradient_sqr < 0.0
    assert math.isnan(scale.value)


@pytest.mark.parametrize(
    "numbers",
    [
        (math.nan, 1.0, 8.0, 16.0),
        (math.inf, 1.0, 8.0, 16.0),
        (1.0, -1.0, 8.0, 16.0),
        (1.0, 1.0, 8.0, 8.0),
        (1.0, 1.0, 0.0, 0.0),
    ],
)
def test_says_nothing_update_is_refused_and_counted(numbers: tuple[float, float, float, float]) -> None:
    scale = NoiseScale()
    scale.update(3.0, 1.5, 8.0, 32.0)
    before = scale.value
    assert not scale.update(*numbers)
    assert (scale.value, scale.updates, scale.skipped) == (before, 1, 1)


@given(
    st.lists(
        st.tuples(st.floats(0.5, 512), st.floats(0.01, 512)),
        min_size=2,
        max_size=16,
    )
)
def test_batches_lie_between_the_smallest_and_the_total(pairs: list[tuple[float, float]]) -> None:
    samples, weights = [b for b, _ in pairs], [w for _, w in pairs]
    small, big = equivalent_batches(samples, weights)
    assert min(samples) * (1 - 1e-9) <= small <= max(samples) * (1 + 1e-9)
    assert big <= sum(samples) * (1 + 1e-9)  # weights by samples are the best there are
    assert small < big or max(weights) > 0.5 * sum(weights)


def test_ranks_that_gave_nothing_do_not_count() -> None:
    assert equivalent_batches([8.0, 0.0, 8.0], [8.0, 0.0, 8.0]) == pytest.approx((8.0, 16.0))
    assert equivalent_batches([0.0, 0.0]) == (0.0, 0.0)


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 0 <= decay < 1"):
        NoiseScale(1.0)
    with pytest.raises(ValueError, match="2 sample counts and 1 weights"):
        equivalent_batches([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="negative or NaN"):
        equivalent_batches([1.0, -2.0])
