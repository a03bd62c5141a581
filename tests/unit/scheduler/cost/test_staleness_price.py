"""The price of staleness: learned where modes differ, kept where they do not."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from scheduler.cost.priors import LARGE
from scheduler.cost.progress import alignment, iterations, update_progress
from scheduler.cost.staleness_price import StalenessPrice


def feed(price: StalenessPrice, true: float, drifts: list[float], *, rounds: int, noise: float = 0.1) -> None:
    """Stretches of 64 updates under these drifts, with a decrease of 0.001 per synchronous step."""
    rng = np.random.default_rng(5)
    for _ in range(rounds):
        for drift in drifts:
            signal = float(alignment(drift, true))
            gain = float(update_progress(1.0, signal, 8.0, 4.0, 8.0, 0.5))
            price.observe(
                decrease=64 * 0.001 * gain * math.exp(noise * rng.standard_normal()),
                updates=64.0, drift=drift, length=1.0, gradients=8.0, noise=4.0, world=8,
            )


@pytest.mark.parametrize("true", [0.2, 0.9, 3.0])
def test_the_price_is_learned_from_two_modes(true: float) -> None:
    price = StalenessPrice()
    feed(price, true, [0.0, 0.5], rounds=60)
    low, high = price.quantiles(0.05, 0.95)
    assert low < true < high
    assert price.value == pytest.approx(true, rel=0.9)
    assert high / low < StalenessPrice().quantiles(0.95)[0] / StalenessPrice().quantiles(0.05)[0]


def test_one_mode_alone_teaches_nothing() -> None:
    price, prior = StalenessPrice(), StalenessPrice()
    feed(price, 3.0, [0.5], rounds=40, noise=0.0)
    assert price.value == pytest.approx(prior.value, rel=0.02)
    assert price.observations == 40


def test_losses_that_rise_are_no_proof_of_a_million_fold_price() -> None:
    price = StalenessPrice()
    assert not price.observe(decrease=-0.5, updates=64.0, drift=0.5, length=1.0, gradients=8.0, noise=4.0, world=8)
    feed(price, 0.9, [0.0, 0.5], rounds=4)
    before = price.value
    price.observe(decrease=-0.5, updates=64.0, drift=0.5, length=1.0, gradients=8.0, noise=4.0, world=8)
    assert before < price.value < 4.0 * before


def test_what_is_no_stretch_is_not_taken_in() -> None:
    price = StalenessPrice()
    for decrease, updates, drift in ((math.nan, 8.0, 0.1), (0.1, 0.0, 0.1), (0.1, 8.0, math.nan)):
        assert not price.observe(
            decrease=decrease, updates=updates, drift=drift, length=1.0, gradients=8.0, noise=4.0, world=8
        )
    assert price.observations == 0
    assert price.posterior.sum() == pytest.approx(1.0)
    with pytest.raises(ValueError, match="above 0"):
        StalenessPrice(dataclasses.replace(LARGE, price=0.0))


def test_progress_of_known_updates() -> None:
    # A synchronous step is the unit, at any learning rate.
    for rho in (0.1, 0.5, 1.0):
        assert update_progress(1.0, 1.0, 8.0, 4.0, 8.0, rho) == pytest.approx(1.0)
    # At the best learning rate, with the noise rule's length L = K(n) / K(x): K(n) / K(x), STAR's rule.
    phi, n, x = 100.0, 8.0, 3.0
    length = float(iterations(phi, n)) / float(iterations(phi, x))
    assert update_progress(length, length, x, phi, n, 1.0) == pytest.approx(length)
    # With a small learning rate only the length counts.
    assert update_progress(0.25, 0.25, 2.0, 100.0, 8.0, 1e-9) == pytest.approx(0.25)
    assert alignment(0.0, 5.0) == 1.0
    assert alignment(2.0, 0.5) == 0.5
