"""No plan is believed to give more than its mode can, leaves out more than half of the ranks, or has no way back."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.cost.bounds import bounded, least_relative
from scheduler.cost.conditions import Conditions
from scheduler.cost.cost_model import Prediction, predict, rank
from scheduler.plan.plan import Plan
from scheduler.policy.candidates import candidates, enough_ranks, most_left_out, reachable, summarize_stragglers
from scheduler.policy.cost_policy import CostPolicy, _factors
from tests.support.windows import steady, window


def _conditions(times: list[float], beyond_s: float = 0.0, rows: int = 8) -> Conditions:
    return Conditions(
        times_s=np.tile(np.array(times), (rows, 1)), rate=np.full(len(times), np.inf), comm_bytes=4e6, beyond_s=beyond_s
    )


def _claim(plan: Plan, relative: float) -> Prediction:
    return Prediction(
        plan=plan, relative=relative, low=0.9 * relative, high=1.1 * relative, interval_s=0.1, progress=1.0, drift=0.0,
        reach=1.0,
    )  # fmt: skip


def test_two_equal_ranks_are_not_made_31_times_faster() -> None:
    """A launch takes 2 ms, the work 60 more, and all that looks like communication; nobody is slow."""
    equal = _conditions([0.002, 0.002], beyond_s=0.06)
    for plan in (Plan.subgroup(2, [0]), Plan.partial(2, 1), Plan.ps(2, 1), Plan.local(2, steps=16)):
        (found,) = bounded([_claim(plan, 1.0 / 31.8)], equal)
        assert 1.0 / found.relative < 1.2, plan.label
        assert found.bound == pytest.approx(1.0 / found.relative)
        assert found.low <= found.relative <= found.high
    assert 1.0 / rank([Plan.subgroup(2, [0])], equal)[0].relative > 5.0, "as the model alone would have it"


def test_a_bound_of_time_leaves_the_cost_of_a_missed_target() -> None:
    equal, plan = _conditions([0.1] * 4), Plan.ps(4, 1)
    (sure,) = bounded([_claim(plan, 0.2)], equal)
    for relative in (0.5, sure.relative + 0.1):
        doubtful = dataclasses.replace(_claim(plan, relative), reach=0.7)
        (found,) = bounded([doubtful], equal)
        assert found.relative == pytest.approx(sure.relative + 0.3) and found.bound == pytest.approx(1 / found.relative)
    (found,) = bounded([dataclasses.replace(_claim(plan, sure.relative + 0.31), reach=0.7)], equal)
    assert found.bound == 0.0 and found.relative == pytest.approx(sure.relative + 0.31)


def test_a_freeze_delays_all_groups() -> None:
    """A second in fifty steps: two groups of equal ranks lose as much of it per step of progress as `sync` does."""
    usual = _conditions([0.1] * 4)
    frozen = dataclasses.replace(usual, frozen_s=0.02)
    plan = Plan.grouped(4, 2)
    longer_s = predict(plan, frozen).interval_s - predict(plan, usual).interval_s
    assert longer_s == pytest.approx(0.01, rel=1e-3), "an update is one of a group"
    assert least_relative(plan, frozen, sync_s=1.0) > 1.05 * least_relative(plan, usual, sync_s=1.0)
    assert _factors(plan, frozen).normalized_step == pytest.approx(_factors(plan, usual).normalized_step)


def test_an_update_of_unequal_groups_is_as_long_as_those_of_the_faster_ones_make_it() -> None:
    """Seven ranks make a step per second; the rank alone, ten times slower, adds a tenth of its gradient to each."""
    plan = Plan.grouped(8, (tuple(range(7)), (7,)))
    found = least_relative(plan, _conditions([1.0] * 7 + [10.0]))
    assert found == pytest.approx(8.0 / 7.1 / 10.0, rel=0.05)


def test_what_a_mode_can_give_is_left_to_it() -> None:
    slow = _conditions([0.1, 0.1, 0.1, 0.4])
    found = bounded(rank(candidates(slow), slow), slow)
    alone = {one.plan.label: one.relative for one in rank(candidates(slow), slow)}
    assert found[0].relative < 0.5 and found[0].bound == 0.0
    assert all(one.relative == pytest.approx(alone[one.plan.label], rel=0.03) for one in found)


@settings(max_examples=40, deadline=None)
@given(
    times=st.lists(st.floats(0.01, 0.5), min_size=2, max_size=8),
    beyond_s=st.floats(0.0, 0.1),
)
def test_a_bound_is_never_above_what_equal_ranks_can_give(times: list[float], beyond_s: float) -> None:
    n, equal = len(times), _conditions([0.1] * len(times), beyond_s)
    plans = [Plan.partial(n, max(1, n // 2)), Plan.ps(n, 1), Plan.local(n, steps=8), Plan.grouped(n, 2)]
    for plan in plans:
        assert least_relative(plan, equal) > 0.8
        assert least_relative(plan, _conditions(times, beyond_s)) > 0.5 * min(times) / max(times)


def test_the_sentence_says_that_a_prediction_was_cut() -> None:
    def boasting(offered, conditions, win, active):  # type: ignore[no-untyped-def]
        return [_claim(p, 1.0 if p.mode == "sync" else 0.03) for p in offered]

    slow = window(steady(4, slow={3: 3.0}), allowed=("sync", "partial"))
    plan = CostPolicy(4, ranker=boasting).decide(slow, Plan.sync(4))
    assert plan is not None and "the upper bound of its mode" in plan.reason
    assert "33" not in plan.reason


def test_half_of_the_ranks_at_least_unless_told_otherwise() -> None:
    assert [most_left_out(n) for n in (1, 2, 3, 4, 5, 8)] == [1, 1, 1, 2, 2, 4]
    assert most_left_out(8, 0.75) == 2 and most_left_out(8, 0.25) == 6 and most_left_out(8, 1.0) == 1
    assert enough_ranks(Plan.partial(4, 2)) and not enough_ranks(Plan.partial(4, 1))
    assert enough_ranks(Plan.partial(4, 1), 0.25) and not enough_ranks(Plan.partial(4, 3), 1.0)
    assert enough_ranks(Plan.ps(4, 1)), "every gradient counts when it comes"
    assert not enough_ranks(Plan.ps(4, 1, rule="backup", lr_rule="none")), "three of four are thrown away"
    assert enough_ranks(Plan.grouped(4, 2)) and enough_ranks(Plan.local(4, steps=4))


@pytest.mark.parametrize("share", [0.5, 0.75])
def test_nothing_else_is_offered(share: float) -> None:
    for n in (2, 3, 4, 5, 8):
        for slow in range(n):
            times = [0.1] * (n - slow) + [0.4] * slow
            conditions = _conditions(times)
            stragglers = summarize_stragglers(conditions, share)
            for plan in candidates(conditions, stragglers=stragglers, least_share=share):
                assert enough_ranks(plan, share), (n, slow, plan.label)


def test_one_rank_alone_is_no_subgroup() -> None:
    slow = _conditions([0.1, 0.4])
    offered = candidates(slow)
    assert any(summarize_stragglers(slow).slow) and not any(plan.mode == "subgroup" for plan in offered)
    assert not enough_ranks(Plan.subgroup(2, [0])) and not enough_ranks(Plan.subgroup(2, [0]), 0.1)
    assert any(plan.label == "partial(1)" for plan in offered), "whose steps take in the late gradient as well"


def test_a_plan_that_cannot_follow_on_the_one_in_force_is_not_offered() -> None:
    """Refused each time, it would keep the way back to every other plan closed."""
    active = Plan.subgroup(4, [0, 1], plan_id=3)
    slow = _conditions([0.4, 0.4, 0.1, 0.1])
    labels = [plan.label for plan in candidates(slow, active)]
    assert "subgroup(2,3)" not in labels and labels[0] == "sync" and active.label in labels
    assert not reachable(Plan.subgroup(4, [2, 3]), active) and reachable(Plan.subgroup(4, [1, 2, 3]), active)
    assert reachable(Plan.ps(4, 1), Plan.ps(4, 3)) and reachable(Plan.sync(4), Plan.ps(4, 3))


def test_from_any_plan_there_is_a_way_back_to_sync() -> None:
    slow = _conditions([0.1, 0.1, 0.1, 0.4])
    for active in (Plan.subgroup(4, [3]), Plan.partial(4, 1), Plan.ps(4, 4), Plan.local(4, steps=4)):
        offered = candidates(slow, active.replace(plan_id=1))
        assert offered[0].mode == "sync" and reachable(offered[0], active)


def test_the_share_is_a_part() -> None:
    with pytest.raises(ValueError, match="least_share is 1.5"):
        CostPolicy(4, least_share=1.5)
