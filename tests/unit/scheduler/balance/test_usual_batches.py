"""Times of logged steps under batch shares, converted to those of usual batches."""

from __future__ import annotations

import math
from typing import Any

import pytest

from scheduler.balance.usual_batches import UsualBatches
from scheduler.plan.plan import Plan

FACTS = {"kind": "facts", "values": {"batch": 16}}


def made(*events: dict[str, Any]) -> UsualBatches:
    found = UsualBatches()
    for event in events:
        found.take(event)
    return found


def plan(step: int, plan: Plan) -> dict[str, Any]:
    return {"kind": "plan", "step": step, "plan": plan.to_dict()}


@pytest.mark.parametrize("shares", [Plan.sync(2, balanced=True), Plan.sync(2, batch_shares=(24, 8))])
def test_times_are_those_of_usual_batches_while_shares_are_uneven(shares: Plan) -> None:
    found = made(FACTS, plan(0, Plan.sync(2)), plan(3, shares), plan(6, Plan.partial(2, 1)))
    times_s = found.usual_s(range(8), [0.1] * 8, [8] * 8)
    assert times_s == pytest.approx([0.1] * 3 + [0.2] * 3 + [0.1] * 2)


def test_the_fixed_part_does_not_grow_with_the_batch() -> None:
    windows = [{"kind": "window", "fixed_part": part} for part in (None, 0.1, 0.5, None, 1.0)]
    found = made(FACTS, plan(0, Plan.sync(2, balanced=True)), *windows)
    assert found.fixed_part == 0.5
    assert found.usual_s([0, 1], [0.3, 0.3], [8, 32]) == pytest.approx([0.4, 0.2])
    assert math.isnan(made(FACTS).fixed_part)


def test_the_last_batch_of_an_epoch_is_not_blown_up() -> None:
    found = made(FACTS, plan(0, Plan.sync(2, balanced=True)))
    times_s = found.usual_s(range(5), [0.1, 0.1, 0.02, 0.1, 0.2], [8, 8, 1, 8, 16])
    assert times_s == pytest.approx([0.2, 0.2, 0.04, 0.2, 0.2])


@pytest.mark.parametrize("samples", [0, None, "many", -3, {}])
def test_times_of_unknown_samples_stay(samples: Any) -> None:
    found = made(FACTS, plan(0, Plan.sync(2, balanced=True)))
    assert found.usual_s([0, 1, 2], [0.1] * 3, [samples] * 3) == [0.1] * 3


def test_another_loader_s_batch_counts_from_its_first_step() -> None:
    later = {"kind": "facts", "step": 3, "values": {"batch": 32}}
    found = made({**FACTS, "step": 1}, plan(0, Plan.sync(2, balanced=True)), later, {"kind": "facts", "values": {}})
    assert found.usual_s(range(5), [0.1] * 5, [8] * 5) == pytest.approx([0.2] * 3 + [0.4] * 2)


def test_of_two_batches_from_the_same_step_the_later_entry_counts() -> None:
    found = made(FACTS, {**FACTS, "values": {"batch": 32}}, plan(0, Plan.sync(2, balanced=True)))
    assert found.usual_s([0], [0.1], [16]) == pytest.approx([0.2])


def test_times_stay_where_the_usual_batch_is_unknown() -> None:
    found = made({"kind": "facts", "values": {"batch": "16"}}, plan(0, Plan.sync(2, balanced=True)))
    assert found.usual_s([0], [0.1], [8]) == [0.1]
