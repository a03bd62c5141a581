"""`sync(balanced)` among the plans of `auto`: where it is offered, predicted and chosen, and in a simulation."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from scheduler.cost.conditions import Conditions
from scheduler.cost.cost_model import Prediction, predict
from scheduler.plan.plan import Plan
from scheduler.policy.candidates import candidates
from scheduler.policy.cost_policy import CostPolicy
from scheduler.records import Window
from scheduler.simulator.job import run_plans
from scheduler.simulator.scenario import Cluster, Network, Scenario
from scheduler.simulator.whatif import what_if
from tests.support.windows import steady, window

EXACT = ("sync",)


def _conditions(times: np.ndarray, batch: int = 19, fixed_part: float = 0.0) -> Conditions:
    n = times.shape[1]
    return Conditions(times_s=times, rate=np.full(n, 1e9), batch=batch, fixed_part=fixed_part)


def _labels(times: np.ndarray, **fields: int) -> list[str]:
    return [plan.label for plan in candidates(_conditions(times, **fields), allowed=EXACT)]


def test_it_is_offered_where_shard_feeds_the_ranks_and_one_is_slow_all_the_time() -> None:
    slow = steady(4, slow={2: 4.0})
    assert _labels(slow) == ["sync", "sync(balanced)"]
    assert _labels(slow, batch=0) == ["sync"]
    assert _labels(steady(4)) == ["sync"]
    rotating = steady(4)
    for step in range(len(rotating)):
        rotating[step, step // 2 % 4] *= 4.0
    found = {plan.label: predict(plan, _conditions(rotating)) for plan in candidates(_conditions(rotating))}
    assert "sync(balanced)" not in found or found["sync(balanced)"].relative > found["partial(3)"].relative


def test_shares_that_slowness_outruns_gain_nothing() -> None:
    """Slow for five steps each: at the first change it is known, and `partial` is taken."""
    times = steady(4, 20)
    for step in range(len(times)):
        times[step, step // 5] *= 4.0
    policy, active, taken = CostPolicy(4), Plan.sync(4, balanced=True, batch_shares=(4, 24, 24, 24), plan_id=1), []
    for end in range(5, 10):
        seen = window(times[:end], batch=19, now_s=0.1 * end)
        plan = policy.decide(seen, active)
        taken += [(end, plan.mode)] if plan is not None else []
        active = plan or active
    assert taken == [(8, "partial")]
    found = predict(Plan.sync(4, balanced=True), Conditions.from_window(window(times, batch=19)))
    assert found.relative > 0.95


@pytest.mark.parametrize(("fixed_part", "expected"), [(0.0, 4.0 / 13.0), (0.5, 0.5 + 0.5 / 19)])
def test_it_is_predicted_as_the_best_shares_make_it(fixed_part: float, expected: float) -> None:
    conditions = _conditions(steady(4, slow={2: 4.0}, jitter=0.0), fixed_part=fixed_part)
    plan = next(plan for plan in candidates(conditions, allowed=EXACT) if plan.balanced)
    assert sum(plan.batch_shares) == 76
    found = predict(plan, conditions)
    # The slow rank alone has four times the fixed part, with one sample; else all end together.
    assert found.relative == pytest.approx(expected, rel=0.08)
    assert found.drift == 0.0 and found.reach == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize(
    ("exact", "relaxed", "gain", "mode", "chosen"),
    [
        (0.87, 0.75, 0.15, "partial", "partial"),
        (0.975, 0.93, 0.05, "partial", "partial"),
        (0.975, 0.93, 0.05, "subgroup", "subgroup"),  # It has a price: the exact one is nearly free.
        (0.84, 0.75, 0.15, "partial", "sync"),
        (0.87, 0.86, 0.15, "partial", None),
    ],
)
def test_it_is_preferred_to_a_relaxed_mode_only_if_it_is_worth_a_switch(
    exact: float, relaxed: float, gain: float, mode: str, chosen: str | None
) -> None:
    def ranker(offered: Sequence[Plan], conditions: Conditions, win: Window, active: Plan) -> list[Prediction]:
        relative = {mode: relaxed, "sync": exact}
        found = [
            Prediction(plan=p, relative=1.0 if p.plain else relative[p.mode], low=0.7, high=1.1, interval_s=0.1,
                       progress=1.0, drift=0.0, reach=1.0)
            for p in offered
        ]  # fmt: skip
        return sorted(found, key=lambda p: p.relative)

    policy, plan = CostPolicy(4, ranker=ranker, gain=gain), None
    for end in range(40, 440, 4):
        seen = window(steady(4, slow={2: 3.0}), batch=19, end=end, allowed=("sync", mode))
        plan = plan or policy.decide(seen, Plan.sync(4))
    assert (plan.mode if plan is not None else None) == chosen


def test_it_is_chosen_while_the_guard_of_accuracy_excludes_relaxed_modes() -> None:
    policy, times, plan = CostPolicy(4), steady(4, slow={2: 4.0}), Plan.sync(4)
    policy.guard.until_step, policy.guard.reason = 400, "the loss is not finite"
    for end in range(42, 60, 4):
        plan = policy.decide(window(times, batch=19, end=end), plan) or plan
        assert not plan.relaxed
    assert plan.label == "sync(balanced)"
    assert policy.explain() == "the loss is not finite: sync(balanced) until step 400 at least"


def test_it_is_chosen_where_only_exact_modes_are_allowed_and_left_when_the_rank_is_well() -> None:
    policy, active = CostPolicy(4), Plan.sync(4)
    for end in range(40, 80, 4):
        seen = window(steady(4, slow={2: 4.0}), end=end, allowed=EXACT, batch=19, now_s=0.1 * end)
        active = policy.decide(seen, active) or active
    assert active.balanced and sum(active.batch_shares) == 76
    assert "gets" in active.reason and "of 76 samples" in active.reason
    assert active.reason in policy.explain()
    for end in range(80, 400, 4):
        active = policy.decide(window(steady(4), end=end, allowed=EXACT, batch=19, now_s=0.1 * end), active) or active
    assert active.plain


def test_it_is_kept_while_it_pays_though_no_rank_counts_as_slow() -> None:
    """A rank at 1.2 times the others' time is below the threshold, but all others would wait for it."""
    n = 16
    active = Plan.sync(n, balanced=True, batch_shares=(19,) * n, plan_id=1)
    policy, times = CostPolicy(n), steady(n, slow={5: 1.2}, jitter=0.03)
    for end in range(40, 400, 4):
        seen = window(times, end=end, allowed=EXACT, batch=19, now_s=0.1 * end)
        plan = policy.decide(seen, active)
        assert plan is None, plan.reason
    assert "no rank is slow since step 40" in policy.explain()


def test_without_shard_exact_modes_are_sync_alone() -> None:
    policy = CostPolicy(4)
    for end in range(40, 80, 4):
        assert policy.decide(window(steady(4, slow={2: 4.0}), end=end, allowed=EXACT), Plan.sync(4)) is None


def test_a_simulated_job_with_shares_takes_as_long_as_predicted() -> None:
    rows = ((1.0, 1.0, 4.0, 1.0),)
    scenario = Scenario(
        cluster=Cluster(world_size=4), network=Network(compute_s=0.1), rows=rows, batch=19, fixed_part=0.1
    )
    plain, balanced, users = run_plans(
        [scenario] * 3,
        [Plan.sync(4), Plan.sync(4, balanced=True), Plan.sync(4, batch_shares=(24, 24, 4, 24))],
    )
    expected = predict(
        Plan.sync(4, balanced=True), _conditions(np.array([[0.1, 0.1, 0.4, 0.1]] * 24), fixed_part=0.1)
    ).relative
    assert balanced.time_s / plain.time_s == pytest.approx(expected, rel=0.1)
    assert users.time_s < 0.5 * plain.time_s
    assert plain.reach == balanced.reach


def test_what_if_shows_it() -> None:
    times = steady(4, 200, slow={2: 4.0})
    found = what_if(times, modes=("sync(balanced)",))
    relative = {one.label: one.relative for one in found.modes}
    assert relative["sync(balanced)"] < 0.5 < relative["sync"]


def test_plans_with_other_shares_are_the_same_mode() -> None:
    one, other = (Plan.sync(2, balanced=True, batch_shares=shares) for shares in ((3, 5), (4, 4)))
    conditions = dataclasses.replace(_conditions(steady(2, slow={1: 3.0})))
    assert [plan.label for plan in candidates(conditions, one, allowed=EXACT)].count("sync(balanced)") == 1
    assert [plan.label for plan in candidates(conditions, other, allowed=EXACT)].count("sync(balanced)") == 1


@pytest.mark.parametrize(
    ("slowest", "frozen", "left"), [(0.33, False, True), (0.37, False, False), (0.37, True, True)]
)
def test_it_is_left_for_a_relaxed_mode_only_if_the_gain_is_certain(slowest: float, frozen: bool, left: bool) -> None:
    """`ps(3)` is predicted a sixth faster; at the 95 % quantile it is faster or slower. A frozen rank needs it."""

    def ranker(offered: Sequence[Plan], _: Conditions, __: Window, active: Plan) -> list[Prediction]:
        plans = {(plan.mode, plan.balanced): plan for plan in (*offered, active)}
        servers = Plan.ps(4, 3, servers=(0,))
        return [
            Prediction(
                plan=plan, relative=relative, low=0.9 * relative, high=high, interval_s=0.4 * relative,
                progress=1.0, drift=0.0, reach=1.0, learned=True,
            )
            for plan, relative, high in (
                (servers, 0.30, slowest), (plans.get(("sync", True), active), 0.36, 0.36), (Plan.sync(4), 1.0, 1.0),
            )
        ]  # fmt: skip

    policy = CostPolicy(4, ranker=ranker)
    active = Plan.sync(4, balanced=True, batch_shares=(25, 24, 3, 24), plan_id=1)
    chosen = []
    for end in range(40, 240, 4):
        times = steady(4, slow={2: 4.0})
        silent = {2: 20.0} if frozen else None
        chosen.append(policy.decide(window(times, end=end, batch=19, now_s=0.1 * end, silent_s=silent), active))
    assert any(plan is not None and plan.mode == "ps" for plan in chosen) == left
    if not left:
        assert "ps(3) at 3.3x as fast as sync, 90 % interval 2.7-3.7, is too uncertain to give up" in policy.explain()


@pytest.mark.parametrize(("partial", "chosen"), [(0.35, "sync(balanced)"), (0.33, "partial(3)")])
def test_of_two_modes_that_are_about_as_fast_the_exact_one_is_chosen(partial: float, chosen: str) -> None:
    def ranker(offered: Sequence[Plan], _: Conditions, __: Window, ___: Plan) -> list[Prediction]:
        balanced = next(plan for plan in offered if plan.balanced)
        return [
            Prediction(
                plan=plan, relative=relative, low=0.9 * relative, high=1.1 * relative, interval_s=0.4 * relative,
                progress=1.0, drift=0.0, reach=1.0, learned=True,
            )
            for plan, relative in ((Plan.partial(4, 3), partial), (balanced, 0.36), (Plan.sync(4), 1.0))
        ]  # fmt: skip

    policy, seen = CostPolicy(4, ranker=ranker), set()
    for end in range(40, 240, 4):
        plan = policy.decide(window(steady(4, slow={2: 4.0}), end=end, batch=19, now_s=0.1 * end), Plan.sync(4))
        seen |= {plan.label} if plan is not None else set()
    assert seen == {chosen}
