"""The user's mode after the number of ranks has changed: `parse_mode` itself is tested in `test_records.py`."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.plan.mode_names import parse_again, parse_mode, suits_some_world
from scheduler.records import Plan, PlanError


def again(mode: str | Plan, before: int, after: int) -> Plan:
    plan = parse_mode(mode, before, damping="none", max_staleness=5)
    assert plan is not None
    return parse_again(mode, plan, after, damping="none", max_staleness=5)


@pytest.mark.parametrize(
    ("mode", "before", "after", "label"),
    [
        ("sync", 4, 3, "sync"),
        ("sync(balanced)", 4, 3, "sync(balanced)"),
        ("sync(steal)", 4, 8, "sync(steal)"),
        ("partial", 4, 2, "partial(1)"),
        ("partial", 1, 4, "partial(3)"),
        ("partial(4)", 4, 3, "partial(3)"),
        ("Partial( 2 )", 4, 8, "partial(6)"),
        ("partial(1)", 4, 2, "partial(1)"),
        ("subgroup(0,1,2)", 4, 3, "subgroup(0,1,2)"),
        ("subgroup(0,1)", 3, 6, "subgroup(0,1)"),
        ("grouped(2)", 4, 8, "grouped(2)"),
        ("grouped", 4, 8, "grouped(0)"),
        ("ps", 2, 4, "ps(3)"),
        ("ps(4)", 4, 2, "ps(2)"),
        ("ps(3,background)", 4, 8, "ps(7,background)"),
        ("ps(1)", 4, 8, "ps(1)"),
        ("ps(1,background)", 4, 8, "ps(1,background)"),
        ("ps(dynamic)", 4, 8, "ps(dynamic)"),
        ("ps(backup=1)", 4, 8, "ps(backup=1)"),
        ("ps(grace=3)", 4, 2, "ps(grace=1)"),
        ("ssp(2)", 4, 8, "ps(ssp=2)"),
        ("ps(ssp=2)", 4, 2, "ps(ssp=2)"),
        ("asgd", 4, 8, "ps(1)"),
        ("dynsgd", 4, 8, "ps(1)"),
        ("ssgd", 4, 8, "ps(8)"),
        ("local(3)", 4, 8, "local(3)"),
        ("local(2.5s,background)", 4, 2, "local(2.5s,background)"),
    ],
)
def test_a_mode_in_another_world(mode: str, before: int, after: int, label: str) -> None:
    made = again(mode, before, after)
    assert (made.label, made.world_size, made.max_staleness) == (label, after, 5)
    assert made.reason == "asked for by the user"


@pytest.mark.parametrize(
    ("mode", "before", "after", "reason"),
    [
        ("subgroup(0,3)", 4, 3, "expected different ranks of 0..2"),
        ("sync(24,12,16,24)", 4, 3, "expected one for each of the 3 ranks"),
        ("grouped(4)", 4, 2, "expected at most 2, the ranks"),
    ],
)
def test_a_mode_that_is_impossible_in_another_world(mode: str, before: int, after: int, reason: str) -> None:
    with pytest.raises(PlanError, match=re.escape(reason)):
        again(mode, before, after)
    with pytest.raises(PlanError):
        parse_mode(mode, after)
    assert suits_some_world(mode), "so a new worker of an elastic job trains in sync as well"


@pytest.mark.parametrize("mode", ["turbo", "partial(x)", "partial(0)", "local(0)", "asgd(2)", "subgroup()", "", 3])
def test_a_mode_that_is_wrong_in_every_world(mode: str) -> None:
    assert not suits_some_world(mode)


def test_a_plan_keeps_its_other_fields() -> None:
    plan = Plan.partial(4, 3, damping="none", max_staleness=2, reason="mine")
    assert parse_again(plan, plan, 3) == Plan.partial(3, 2, damping="none", max_staleness=2, reason="mine")
    groups = Plan.grouped(4, [[0, 1], [2, 3]], lr_rule="none", guard="damp")
    assert parse_again(groups, groups, 8) == Plan.grouped(8, 2, lr_rule="none", guard="damp", reason="")
    seconds = Plan.local(4, seconds=0.123456789)
    assert parse_again(seconds, seconds, 2).local_s == 0.123456789
    with pytest.raises(PlanError, match="servers has"):
        servers = Plan.ps(4, 1, servers=(3,))
        parse_again(servers, servers, 2)


def test_a_mode_that_was_impossible_before_is_what_its_name_says() -> None:
    assert parse_again("partial(3)", Plan.sync(2), 4) == parse_mode("partial(3)", 4)


@given(
    st.sampled_from(["partial", "ps", "subgroup(0)", "grouped(1)", "ssp(1)", "local", "asgd"]),
    st.integers(1, 9),
    st.integers(1, 9),
)
def test_there_and_back_again_is_the_same_plan(mode: str, before: int, after: int) -> None:
    plan = parse_mode(mode, before)
    assert plan is not None
    assert parse_again(mode, parse_again(mode, plan, after), before) == plan
