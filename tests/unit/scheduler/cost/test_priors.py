"""What is assumed of a network by its size."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.cost.conditions import Conditions
from scheduler.cost.cost_model import predict
from scheduler.cost.priors import LARGE, prior_of
from scheduler.plan.plan import Plan
from scheduler.policy.cost_policy import CostPolicy
from tests.support.windows import steady, window


@pytest.mark.parametrize("unknown", [0.0, -1.0, math.nan])
def test_a_network_of_unknown_size_is_taken_for_a_large_one(unknown: float) -> None:
    assert prior_of(unknown) == LARGE


@given(st.floats(1.0, 1e12), st.floats(1.0, 1e12))
def test_smaller_networks_are_taken_to_bear_no_less_drift(one: float, other: float) -> None:
    small, large = (prior_of(size) for size in sorted((one, other)))
    assert small.drift_limit >= large.drift_limit >= LARGE.drift_limit
    assert small.price <= large.price <= LARGE.price + 1e-12
    # Equal ranks stay in sync: see `scheduler.cost.progress`.
    assert all(prior.price >= prior.lr_ratio for prior in (small, large))


def test_asgd_of_four_equal_ranks() -> None:
    """Measured with a perceptron on the digits: 0.95 to 1.27 times the samples of a synchronous run, target reached."""
    plan = Plan.ps(4, 1, lr_rule="linear")
    windows = (window(steady(4), end=400, comm_bytes=size) for size in (20_000, 50_000_000))
    small, large = map(Conditions.from_window, windows)
    assert small is not None and large is not None
    found, doubtful = predict(plan, small), predict(plan, large)
    assert 4.0 * found.progress == pytest.approx(1.0 / 1.2, rel=0.1) and found.reach > 0.9
    assert doubtful.reach < found.reach and doubtful.relative > found.relative


def test_staleness_costs_more_at_the_beginning_of_a_training() -> None:
    """What a late gradient costs, not what a collective does: `sync` and `ps(backup=1)` are predicted alike."""
    plans = (Plan.partial(4, 2), Plan.ps(4, 3, rule="backup", lr_rule="none"))
    found = []
    for step in (32, 66, 100, 1000):
        conditions = Conditions.from_window(window(steady(4, slow={2: 2.0, 3: 2.0}), end=step, comm_bytes=100_000))
        assert conditions is not None
        found.append([predict(plan, conditions).relative for plan in plans])
    stale, dropping = zip(*found, strict=True)
    assert stale[0] > 1.01 * stale[1] > 1.02 * stale[2] and stale[2] == stale[3]
    assert dropping == pytest.approx([dropping[3]] * 4, rel=0.01)


def test_a_policy_takes_the_prior_of_its_network_until_it_has_learned() -> None:
    policy = CostPolicy(4)
    policy.decide(window(steady(4), comm_bytes=20_000), Plan.sync(4))
    assert policy.price.prior == prior_of(20_000)
    assert policy.price.value == pytest.approx(prior_of(20_000).price, rel=0.05)
    losses = tuple(3.0 - 0.01 * step for step in range(96))
    one = window(steady(4), end=128, comm_bytes=20_000)
    policy.decide(replace(one, losses=losses, loss_steps=tuple(range(32, 128))), Plan.sync(4))
    assert policy.price.observations == 1
    policy.decide(window(steady(4), comm_bytes=40_000_000), Plan.sync(4))
    assert policy.price.prior == prior_of(20_000), "what was learned is not thrown away"
