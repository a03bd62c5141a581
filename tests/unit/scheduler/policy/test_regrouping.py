"""When groups that were formed from the ranks' times are formed anew."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from scheduler.plan.completion import with_groups
from scheduler.plan.grouping import Groups
from scheduler.plan.plan import Plan
from scheduler.policy.regrouping import Regrouping

DECISIONS = 120
SLOW = [[4.0, 1.0, 1.0, 1.0], [1.0, 4.0, 1.0, 1.0]]
DYNAMIC = Plan.ps(4, 1, rule="groups")


def regroupings(wanted: Plan, first_s: list[float], later_s: Callable[[int], list[float]]) -> list[Groups]:
    """The groups that are due in 120 decisions, after groups were formed from `first_s`, which stay."""
    active, regrouping, found = with_groups(wanted, first_s), Regrouping(), []
    for decision in range(DECISIONS):
        times_s = later_s(decision)
        best = with_groups(wanted, times_s).groups
        if regrouping.due(active, best, lambda known_s=times_s: known_s):  # type: ignore[misc]
            found.append(best)
    return found


@pytest.mark.parametrize("wanted", [Plan.grouped(4, 2), DYNAMIC], ids=["grouped", "dynamic"])
def test_noise_forms_no_new_groups(wanted: Plan) -> None:
    """Another partition is the best one in nearly every decision, by next to nothing and each time a different one."""
    chance = random.Random(1)
    assert not regroupings(wanted, [1.0] * 4, lambda decision: [chance.uniform(0.9, 1.1) for _ in range(4)])


def test_equally_good_groups_stay_however_long_others_are_a_little_better() -> None:
    assert not regroupings(Plan.grouped(4, 2), [1.0, 1.0, 1.0, 1.1], lambda decision: [1.1, 1.0, 1.0, 1.0])


@pytest.mark.parametrize("wanted", [Plan.grouped(4, 2), DYNAMIC], ids=["grouped", "dynamic"])
def test_others_are_due_again_and_again_while_the_same_ones_stay_better(wanted: Plan) -> None:
    found = regroupings(wanted, [1.0, 1.0, 1.0, 4.0], lambda decision: SLOW[0])
    assert found == [((0,), (1, 2, 3))] * (DECISIONS // 20)
    assert not regroupings(wanted, [1.0, 1.0, 1.0, 4.0], lambda decision: SLOW[decision // 10 % 2]), "each time others"


def test_a_rank_that_becomes_slow_gets_its_group_though_noise_divides_the_others_anew_each_time() -> None:
    chance = random.Random(2)
    slow = [1.0] * 5 + [4.0, 1.0, 1.0]
    found = regroupings(Plan.grouped(8, 3), [1.0] * 8, lambda decision: [s * chance.uniform(0.97, 1.03) for s in slow])
    assert found and (5,) in found[0]


def test_a_group_that_is_not_needed_any_more_is_given_up() -> None:
    found = regroupings(Plan.grouped(4, 0), [4.0, 1.0, 1.0, 1.0], lambda decision: [1.0] * 4)
    assert found[0] == ((0, 1, 2, 3),)


def test_times_are_asked_for_only_where_groups_could_be_the_better_ones() -> None:
    """They are medians over many reports."""
    active = with_groups(Plan.grouped(4, 2), [1.0, 1.0, 1.0, 4.0])

    def unasked() -> list[float]:
        raise AssertionError

    assert not any(Regrouping().due(active, active.groups, unasked) for _ in range(DECISIONS))
    dynamic = with_groups(DYNAMIC, [1.0, 1.0, 1.0, 4.0])
    assert not Regrouping().due(dynamic, ((0,), (1, 2, 3)), unasked)
