"""Plans say what is wrong with them: what was got, what was expected."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.records import Plan, PlanError, parse_mode


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "turbo"}, "mode is 'turbo'; expected one of sync, partial"),
        ({"mode": 3}, "mode is 3"),
        ({"quorum": 0}, "m is 0; expected 1 <= m <= 4"),
        ({"quorum": 5}, "m is 5; expected 1 <= m <= 4"),
        ({"quorum": True}, "quorum is True; expected an integer"),
        ({"quorum": 2.0}, "quorum is 2.0; expected an integer"),
        ({"world_size": 0, "quorum": 0}, "world_size is 0; expected at least 1"),
        ({"mode": "sync", "quorum": 3}, "quorum is 3 in mode sync; expected 4"),
        ({"epoch": -1}, "epoch is -1"),
        ({"damping": "half"}, "damping is 'half'; expected 'inverse' or 'none'"),
        ({"max_staleness": -1}, "max_staleness is -1"),
        ({"max_staleness": None}, "max_staleness is None"),
        ({"reason": 7}, "reason is 7; expected a string"),
    ],
)
def test_a_bad_plan_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    good = {"mode": "partial", "world_size": 4, "quorum": 3}
    with pytest.raises(PlanError, match=message.replace("(", r"\(")):
        Plan.from_dict(good | changes)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "came as list"),
        ({}, "lacks the fields"),
        ({"mode": "sync", "world_size": 2, "quorum": 2, "x": 1}, "unknown fields"),
        ({b"mode": "sync"}, "unknown fields"),
    ],
)
def test_a_damaged_mapping_is_refused(values: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan.from_dict(values)


@given(st.integers(1, 64), st.data())
def test_round_trip(world_size: int, data: st.DataObject) -> None:
    quorum = data.draw(st.integers(1, world_size))
    plan = Plan.partial(world_size, quorum, epoch=data.draw(st.integers(0, 99)), reason=data.draw(st.text()))
    assert Plan.from_dict(plan.to_dict()) == plan
    assert plan.relaxed is (quorum < world_size)
    with pytest.raises(PlanError):
        plan.replace(quorum=world_size + 1)


def test_names_of_modes() -> None:
    assert parse_mode("auto", 4) is None
    assert parse_mode(" Sync ", 4) == Plan.sync(4, reason="asked for by the user")
    partial = parse_mode("partial(2)", 4, max_staleness=3)
    assert partial is not None and (partial.quorum, partial.max_staleness, partial.label) == (2, 3, "partial(2)")
    default = parse_mode("partial", 4)
    assert default is not None and default.quorum == 3
    alone = parse_mode("partial", 1)
    assert alone is not None and not alone.relaxed


@pytest.mark.parametrize("mode", ["partial()", "partial(x)", "partial(0)", "partial(5)", "asgd", "", None, 3])
def test_unknown_modes(mode: Any) -> None:
    with pytest.raises(PlanError, match="expected"):
        parse_mode(mode, 4)


def test_a_plan_for_another_world() -> None:
    with pytest.raises(PlanError, match="the plan is for 3 ranks but this job has 4"):
        parse_mode(Plan.sync(3), 4)
