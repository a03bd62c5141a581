"""Stretches of training under one plan, from recorded losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from scheduler.plan.plan import Plan
from scheduler.policy.loss_stretches import LossStretches, Stretch
from tests.support.windows import steady, window

FALLING = tuple(2.0 - 0.01 * i for i in range(100))


def _note(stretches: LossStretches, end: int, plan: Plan, losses: Sequence[float] = ()) -> Stretch | None:
    steps = tuple(range(end - len(losses), end))
    return stretches.note(replace(window(steady(4), end=end), losses=tuple(losses), loss_steps=steps), plan)


def test_a_stretch_is_long_and_under_one_plan() -> None:
    stretches, active = LossStretches(), Plan.ps(4, 3, plan_id=1)
    assert _note(stretches, 100, active) is None
    assert _note(stretches, 200, active) is None, "there are no losses"
    found = _note(stretches, 300, active, FALLING)
    assert found is not None and found.plan is active and found.decrease == pytest.approx(0.84)
    assert found.updates == pytest.approx(84.0), "from the middle of the first losses to that of the last"
    assert _note(stretches, 310, Plan.sync(4, plan_id=2), FALLING) is None
    assert _note(stretches, 320, Plan.sync(4, plan_id=2), FALLING) is None


@pytest.mark.parametrize(("plan", "updates"), [(Plan.local(4, steps=4), 336.0), (Plan.local(4, seconds=0.6), 504.0)])
@pytest.mark.parametrize("counted", [False, True])
def test_an_averaging_is_as_many_updates_as_steps(plan: Plan, updates: float, counted: bool) -> None:
    stretches = LossStretches()
    _note(stretches, 200, plan)
    one = replace(
        window(steady(4, jitter=0.0), end=300), losses=FALLING, loss_steps=tuple(range(200, 300)), counts_local=counted
    )
    found = stretches.note(one, plan)
    assert found is not None and found.updates == pytest.approx(84.0 if counted else updates)


@pytest.mark.parametrize(("counted", "updates"), [(False, 84.0 * 3.5), (True, 84.0 * 3.5 / 6.0)])
def test_slow_ranks_make_fewer_steps_between_averagings(counted: bool, updates: float) -> None:
    stretches, plan = LossStretches(), Plan.local(4, seconds=0.6)
    _note(stretches, 200, plan)
    times = steady(4, jitter=0.0, slow={2: 4.0, 3: 4.0})
    one = replace(
        window(times, end=300), losses=FALLING, loss_steps=tuple(range(200, 300)), counts_local=counted
    )
    found = stretches.note(one, plan)
    assert found is not None and found.updates == pytest.approx(updates)


def _stretches(plan: Plan, ends: Sequence[int], kept: int, every: int) -> list[Stretch]:
    """Each stretch, of which the last `kept` losses are known, one of `every` steps."""
    stretches, found = LossStretches(), []
    for end in ends:
        steps = tuple(range(0, end, every))[-kept:]
        losses = tuple(9.0 - 0.01 * step for step in steps)
        found.append(stretches.note(replace(window(steady(4), end=end), losses=losses, loss_steps=steps), plan))
    return [one for one in found if one is not None]


@pytest.mark.parametrize(("steps", "every"), [(100, 1), (800, 1), (800, 4)])
def test_updates_and_decrease_are_of_the_same_span(steps: int, every: int) -> None:
    (found,) = _stretches(Plan.ps(4, 1, plan_id=1), (200, 200 + steps), 256, every)
    slope = found.decrease / found.updates
    assert slope == pytest.approx(0.01), "however long the stretch, and however few of its losses are kept"


def test_a_stretch_goes_on_until_it_has_enough_losses() -> None:
    plan = Plan.ps(4, 1, plan_id=1)
    assert len(_stretches(plan, range(200, 701, 80), 256, 4)) == 2, "of 192 steps or more"


def test_the_error_is_that_of_the_losses_noise() -> None:
    stretches, plan, rng = LossStretches(), Plan.sync(4), np.random.default_rng(0)
    found = []
    for end in range(100, 6500, 64):
        losses = 3.0 - 0.004 * np.arange(64) + 0.05 * rng.standard_normal(64)
        stretch = _note(stretches, end, plan, losses.tolist())
        found += [stretch] if stretch is not None else []
    assert len(found) == 99
    assert np.std([one.decrease for one in found]) == pytest.approx(0.05 / 8.0**0.5, rel=0.2)
    assert np.mean([one.error for one in found]) == pytest.approx(0.05 / 8.0**0.5, rel=0.1)


def test_plans_that_do_not_last_are_counted_as_skipped() -> None:
    stretches, plan = LossStretches(), Plan.sync(4)
    assert _note(stretches, 10, plan, FALLING[:10]) is None
    first = _note(stretches, 100, plan, FALLING)
    assert first is not None and first.skipped == 10.0
    for end, epoch in ((130, 1), (160, 2), (190, 3)):
        assert _note(stretches, end, Plan.sync(4, plan_id=epoch), FALLING) is None
    last = _note(stretches, 260, Plan.sync(4, plan_id=3), FALLING)
    assert last is not None and last.skipped == 90.0
    again = _note(stretches, 330, Plan.sync(4, plan_id=3), FALLING)
    assert again is not None and again.skipped == 0.0
