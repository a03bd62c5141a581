"""The guard of accuracy: which losses and noise scales end a relaxed mode, and for how long."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.plan.plan import Plan
from scheduler.policy.accuracy_guard import AccuracyGuard, loss_alarm, relative_gradient_noise
from scheduler.policy.cost_policy import CostPolicy
from scheduler.records import Window
from tests.support.windows import steady, window

SLOW = {5: 3.1}


def falling(steps: int, *, noise: float = 0.08, seed: int = 0) -> list[float]:
    """A loss from 2.3 downwards."""
    rng = np.random.default_rng(seed)
    return [float((0.3 + 2.0 * math.exp(-s / 150.0)) * (1.0 + noise * rng.standard_normal())) for s in range(steps)]


def with_losses(losses: list[float], *, slow: bool = True, **fields: object) -> Window:
    kept = losses[-256:]
    steps = tuple(range(len(losses) - len(kept), len(losses)))
    times = steady(8, slow=SLOW if slow else None)
    return window(times, end=len(losses), losses=tuple(kept), loss_steps=steps, **fields)  # type: ignore[arg-type]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), noise=st.sampled_from((0.0, 0.05, 0.15, 0.3)))
def test_a_falling_loss_is_no_alarm(seed: int, noise: float) -> None:
    losses = falling(600, noise=noise, seed=seed)
    guard, plan = AccuracyGuard(), Plan.partial(8, 7, plan_id=1)
    for end in range(40, 600, 8):
        assert guard.check(with_losses(losses[:end]), plan) == ""


def test_a_noisier_loss_of_one_rank_is_no_alarm() -> None:
    """Under servers one rank's own loss is told instead of the mean of eight."""
    for seed in range(40):
        rng = np.random.default_rng(seed)
        losses = [1.0 + 0.05 * float(v) for v in rng.standard_normal(100)]
        losses += [1.0 + 0.05 * math.sqrt(8.0) * float(v) for v in rng.standard_normal(40)]
        assert not any(loss_alarm(losses[:end], 100) for end in range(104, 141, 4)), seed


def test_a_rising_loss_returns_to_sync_and_holds_off() -> None:
    losses = falling(200)
    losses += [losses[-1] * (1.0 + 0.02 * k) for k in range(60)]
    policy, plan = CostPolicy(8), Plan.partial(8, 7, plan_id=1)
    ends = range(160, 260, 4)
    taken = next((end, p) for end in ends if (p := policy.decide(with_losses(losses[:end]), plan)) is not None)
    end, back = taken
    assert 210 < end < 240
    assert back.mode == "sync" and back.plan_id == 2
    assert back.reason.startswith("the loss rises against its trend, ") and back.reason.endswith(": sync")
    # Asked again before the switch: the same answer, and no second alarm.
    again = policy.decide(with_losses(losses[: end + 1]), plan)
    assert again is not None and again.mode == "sync" and policy.guard.alarms == 1
    held = with_losses(falling(end + 150))
    assert policy.decide(held, back) is None
    assert policy.explain() == f"{back.reason} until step {policy.guard.until_step} at least"
    after = policy.decide(with_losses(falling(policy.guard.until_step + 1)), back)
    assert after is not None and after.label == "partial(7)"


def test_a_second_alarm_holds_off_twice_as_long() -> None:
    guard = AccuracyGuard(hold_steps=10)
    bad = [1.0] * 100 + [5.0] * 8
    assert guard.check(with_losses([1.0] * 100), Plan.partial(8, 7, plan_id=1)) == ""
    assert guard.check(with_losses(bad), Plan.partial(8, 7, plan_id=1)).startswith("the loss diverges, 5 after 1")
    assert guard.until_step == 118
    assert guard.check(with_losses([1.0] * 200), Plan.sync(8, plan_id=2)) == ""
    assert guard.check(with_losses([1.0] * 200), Plan.partial(8, 7, plan_id=3)) == ""
    assert guard.check(with_losses([1.0] * 200 + [9.0] * 8), Plan.partial(8, 7, plan_id=3))
    assert guard.until_step == 208 + 20


def test_alarms_of_long_ago_are_forgiven() -> None:
    guard, plan = AccuracyGuard(hold_steps=10), Plan.partial(8, 7, plan_id=1)

    def alarm(step: int) -> int:
        """For how long relaxed modes are held off after an alarm at a step."""
        assert guard.check(with_losses([1.0] * step), Plan.sync(8)) == ""
        assert guard.check(with_losses([1.0] * step), plan) == ""
        assert guard.check(with_losses([1.0] * step + [5.0] * 8), plan)
        return guard.until_step - step - 8

    assert [alarm(step) for step in (100, 200, 300, 500)] == [10, 20, 40, 80]
    assert [alarm(step) for step in (1300, 3000)] == [40, 10], "320 calm steps forgive one"


def test_losses_that_are_no_numbers_are_divergence() -> None:
    assert loss_alarm([1.0] * 50 + [math.inf], 40) == "the loss is not finite"
    assert loss_alarm([1.0] * 50 + [math.nan], 51) == ""  # From before the plan.
    assert loss_alarm([], 0) == ""


def test_a_rise_before_the_plan_is_not_the_plans() -> None:
    assert loss_alarm([1.0] * 60 + [2.0] * 30, 90) == ""
    assert loss_alarm([1.0] * 60 + [2.0] * 30, 60).startswith("the loss rises")


def test_the_noise_scale_says_so() -> None:
    assert relative_gradient_noise(Plan.sync(8), 100.0) == pytest.approx(1.0)
    assert relative_gradient_noise(Plan.partial(8, 4), 1e9) == pytest.approx(2.0)
    assert relative_gradient_noise(Plan.ps(8, 1), 1e9) == pytest.approx(1.0)  # Shorter by as much as it is noisier.
    assert relative_gradient_noise(Plan.ps(8, 2, lr_rule="none"), 1e9) == pytest.approx(4.0)
    assert relative_gradient_noise(Plan.grouped(8, 4, lr_rule="none"), 1e9) == pytest.approx(4.0)
    groups = Plan.ps(8, 1, rule="groups", groups=((0, 1, 2, 3), (4, 5, 6, 7)), lr_rule="none")
    assert relative_gradient_noise(groups, 1e9) == pytest.approx(2.0), "updates of a group of four, not of one gradient"
    guard, plan = AccuracyGuard(), Plan.ps(8, 2, lr_rule="none", plan_id=1)
    assert guard.check(window(steady(8), noise_scale=4.0, end=40), plan) == ""
    assert guard.check(window(steady(8), noise_scale=12.0, end=44), plan) == ""
    assert guard.check(window(steady(8), noise_scale=40.0, end=48), plan).startswith("the noise scale has grown")
    assert AccuracyGuard().check(window(steady(8), noise_scale=math.nan), plan) == ""


def test_sync_is_never_left_by_the_guard_and_bad_windows_are_named() -> None:
    assert AccuracyGuard().check(with_losses([1.0] * 100 + [50.0] * 40), Plan.sync(8)) == ""
    with pytest.raises(ValueError, match="2 losses at 1 steps"):
        AccuracyGuard().check(window(steady(8), losses=(1.0, 2.0), loss_steps=(1,)), Plan.partial(8, 7))
    with pytest.raises(ValueError, match="hold_steps"):
        AccuracyGuard(hold_steps=0)
