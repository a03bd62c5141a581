"""A plan's transmission: its wire form, names, and what follows from it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.plan.completion import resolve
from scheduler.plan.plan import Plan, PlanError
from scheduler.plan.transmission import BACKGROUND_MODES, Transmission
from scheduler.records import parse_mode

NAMES = (
    "local(8)", "local(2.5s)", "ps(3)", "ps(dynamic)", "ps(ssp=2)", "ps(backup=1)", "ps(grace=1)", "subgroup(0,1,2)"
)
transmissions = st.one_of(st.none(), st.builds(Transmission, background=st.booleans()))


@given(st.sampled_from(NAMES), transmissions)
def test_the_wire_form_is_read_back(name: str, transmission: Transmission | None) -> None:
    plan = parse_mode(name, 4, transmission=transmission)
    assert plan is not None
    values = plan.to_dict()
    assert Plan.from_dict(values) == plan
    assert ("transmission" in values) == (transmission is not None), "a plan without one reads as before"


@given(st.sampled_from(NAMES), st.booleans())
def test_a_label_is_a_mode_of_the_users(name: str, background: bool) -> None:
    plan = parse_mode(name, 4, transmission=Transmission(background))
    assert plan is not None
    again = parse_mode(plan.label, 4)
    assert again is not None and again.in_background(None) is background and again.label == plan.label


def test_background_is_the_last_argument_of_a_name() -> None:
    for name in BACKGROUND_MODES[:2]:
        plan = parse_mode(f"{name}(background)", 4)
        assert plan is not None and plan.in_background(None) and plan.label.startswith(name)
    with pytest.raises(PlanError, match="transmission"):
        parse_mode("partial(3,background)", 4)
    with pytest.raises(PlanError, match="expected"):
        parse_mode("ps(background,3)", 4)


@pytest.mark.parametrize("default", [None, False, True])
def test_the_settings_decide_where_the_plan_does_not_say(default: bool | None) -> None:
    assert Plan.local(4, steps=8).in_background(default) is bool(default)
    assert Plan.local(4, steps=8, transmission=Transmission(True)).in_background(default)
    assert not Plan.local(4, steps=8, transmission=Transmission(False)).in_background(default)
    assert not Plan.sync(4).in_background(default)


@pytest.mark.parametrize("default", [None, False, True])
def test_pushes_begin_early_where_nobody_says_no(default: bool | None) -> None:
    assert Plan.ps(4, 3).pushes_early(default) is (default is not False)
    assert Plan.ps(4, 3, transmission=Transmission(True)).pushes_early(default)
    assert not Plan.ps(4, 3, transmission=Transmission(False)).pushes_early(default)
    assert not Plan.local(4, steps=8, transmission=Transmission(True)).pushes_early(default)
    assert not Plan.sync(4).pushes_early(default)


@pytest.mark.parametrize("bad", [{"background": 1}, {"pace": 3}, "background", 1])
def test_a_damaged_transmission_is_refused(bad: object) -> None:
    with pytest.raises(PlanError, match="transmission"):
        Plan.from_dict({**Plan.ps(4, 3).to_dict(), "transmission": bad})


def test_servers_keep_the_transmission_with_which_their_session_began() -> None:
    active = Plan.ps(4, 3, servers=(0,), transmission=Transmission(True))
    plan = resolve(
        Plan.ps(4, 2), active, times_s=[1.0] * 4, hosts=["a"] * 4, slow=(), link_bytes_per_s=[1e9] * 4,
        headroom=(), state_bytes=1,
    )
    assert plan.transmission == active.transmission
