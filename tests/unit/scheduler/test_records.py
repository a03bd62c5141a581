"""Plans say what is wrong with them: what was got, what was expected."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.records import Plan, PlanError, StepReport, StepTimes, parse_mode
from star_hvd.config import Config


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
        ({"epoch": -1}, "plan_id is -1"),
        ({"damping": "half"}, "damping is 'half'; expected one of inverse, relative, none"),
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
        ([], "is of type list"),
        ({}, "expected also"),
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
    plan = Plan.partial(world_size, quorum, plan_id=data.draw(st.integers(0, 99)), reason=data.draw(st.text()))
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


UNKNOWN = ["partial()", "partial(x)", "partial(0)", "partial(5)", "asgd(2)", "ps(5)", "ps(ssp=x)", "local(0)"]
UNKNOWN += ["local(s)", "grouped(9)", "subgroup(0,4)", "subgroup(a)", "x(1)", ""]


@pytest.mark.parametrize("mode", [*UNKNOWN, None, 3])
def test_unknown_modes(mode: Any) -> None:
    with pytest.raises(PlanError, match="expected"):
        parse_mode(mode, 4)


def test_a_plan_for_another_world() -> None:
    with pytest.raises(PlanError, match="the plan is for 3 ranks but this job has 4"):
        parse_mode(Plan.sync(3), 4)


def test_a_plan_made_for_this_world_is_taken_as_it_is() -> None:
    plan = Plan.partial(4, 2, damping="none")
    assert parse_mode(plan, 4, max_staleness=3) is plan, "a plan keeps its own fields"


@given(st.text(max_size=12))
def test_any_text_as_a_mode(text: str) -> None:
    try:
        plan = parse_mode(text, 3)
    except PlanError as error:
        assert "expected" in str(error)
    else:
        assert plan is None or plan.world_size == 3


CHOICES = ("background", "damping", "encryption", "policy", "replica_mismatch")
SETTINGS = [item.name for item in dataclasses.fields(Config) if item.name not in CHOICES]


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_that_is_no_sane_number_is_refused_by_name(name: str) -> None:
    for value in (True, "1", None, [1], float("nan"), float("inf"), -1):
        with pytest.raises(ValueError, match=f"config {name} is ") as caught:
            Config(**{name: value})
        assert repr(value) in str(caught.value) and "expected a" in str(caught.value)
    default = getattr(Config(), name)
    assert getattr(Config(**{name: default}), name) == default


@pytest.mark.parametrize("value", [1, 0.0, "1"])
def test_a_switch_is_true_or_false(value: object) -> None:
    with pytest.raises(ValueError, match="config background is .* expected True or False"):
        Config(background=value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "least", "below"),
    [
        ("bucket_bytes", 1024, 1023),
        ("chunk_bytes", 1024, 0),
        ("replay_queue", 1, 0),
        ("noise_interval_steps", 1, 0),
        ("quorum_deadline_s", 0.01, 0.0),
        ("step_deadline_s", 0.1, 0.0),
        ("heartbeat_s", 0.01, 0.0),
        ("lost_after_s", 0.1, 0.0),
        ("absent_after_s", 0.1, 0.0),
        ("shutdown_deadline_s", 0.1, 0.0),
        ("control_deadline_s", 0.1, 0.0),
        ("plan_deadline_s", 0.1, 0.0),
        ("decide_interval_s", 0.01, 0.0),
        ("max_staleness", 0, -1),
        ("grace_fraction", 0.0, -0.1),
    ],
)
def test_the_least_values_of_settings(name: str, least: float, below: float) -> None:
    assert getattr(Config(**{"heartbeat_s": 0.01, name: least}), name) == least  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"config {name} is {below}; expected a finite number of at least"):
        Config(**{name: below})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["absent_after_s", "lost_after_s"])
def test_a_rank_is_not_gone_before_three_heartbeats(name: str) -> None:
    longer = {"absent_after_s": 60.0, "lost_after_s": 60.0}
    with pytest.raises(ValueError, match=f"config {name} is 44.9 and heartbeat_s 15; expected {name} to be at least 3"):
        Config(**{**longer, name: 44.9, "heartbeat_s": 15})  # type: ignore[arg-type]
    assert getattr(Config(**{**longer, name: 45.0, "heartbeat_s": 15}), name) == 45.0  # type: ignore[arg-type]
    assert getattr(Config(**{**longer, name: 0.3, "heartbeat_s": 0.1}), name) == 0.3  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="config absent_after_s is 3.0 and heartbeat_s 15"):
        Config(heartbeat_s=15)


def test_settings_without_numbers() -> None:
    assert Config(damping="none").damping == "none"
    with pytest.raises(ValueError, match="config damping is 'half'; expected one of inverse, none"):
        Config(damping="half")
    with pytest.raises(ValueError, match="config policy is 'best'; expected one of learned, cost, rule"):
        Config(policy="best")
    with pytest.raises(ValueError, match="config encryption is 'off'; expected one of all, network"):
        Config(encryption="off")
    with pytest.raises(ValueError, match="config chunk_bytes is 4194305; expected at most 4194304"):
        Config(chunk_bytes=4 * 1024 * 1024 + 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().damping = "none"  # type: ignore[misc]
    with pytest.raises(TypeError):
        Config(1)  # type: ignore[misc]


def test_plans_do_not_change() -> None:
    plan = Plan.sync(2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.quorum = 1  # type: ignore[misc]
    assert plan.replace(reason="x") == Plan.sync(2, reason="x") != plan
    assert (Plan.sync(3).relaxed, Plan.partial(3, 3).relaxed, Plan.partial(3, 2).relaxed) == (False, False, True)
    assert (Plan.sync(3).label, Plan.partial(3, 3).label) == ("sync", "partial(3)")


@pytest.mark.parametrize(
    "mode",
    ["sync", "partial(2)", "subgroup(0,2)", "grouped(2)", "ps(3)", "ps(dynamic)", "ps(ssp=2)", "ps(backup=1)"]
    + ["ps(grace=1)", "local(5)", "local(2.5s)"],
)
def test_every_mode_has_a_name_that_parses_back_and_survives_the_wire(mode: str) -> None:
    plan = parse_mode(mode, 4, max_staleness=3)
    assert plan is not None and plan.label == mode and plan.max_staleness == 3
    assert Plan.from_dict(plan.to_dict()) == plan
    assert plan.relaxed == (mode != "sync") and plan.may_close == (mode == "partial(2)")


def test_named_server_modes_are_the_ones_of_the_literature() -> None:
    asgd, ssgd, dynsgd = (parse_mode(name, 4) for name in ("asgd", "ssgd", "dynsgd"))
    assert asgd is not None and (asgd.quorum, asgd.damping, asgd.lr_rule) == (1, "none", "linear")
    assert ssgd is not None and (ssgd.quorum, ssgd.rule) == (4, "x")
    assert dynsgd is not None and (dynsgd.quorum, dynsgd.damping, dynsgd.lr_rule) == (1, "inverse", "none")
    assert parse_mode("ssp(2)", 4) == parse_mode("ps(ssp=2)", 4)


def test_children_of_a_subgroup_are_spread_over_its_members() -> None:
    plan = Plan.subgroup(6, [1, 4])
    assert plan.parents == ((0, 1), (2, 4), (3, 1), (5, 4))
    assert plan.parent_of(5) == 4 and plan.parent_of(1) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"mode": "subgroup", "quorum": 2, "members": (0, 1)},  # Ranks 2 and 3 have no parent.
        {"mode": "subgroup", "quorum": 2, "members": (1, 0), "parents": ((2, 0), (3, 1))},
        {"mode": "subgroup", "quorum": 3, "members": (0, 1, 2), "parents": ((3, 3),)},
        {"mode": "grouped", "quorum": 1, "groups": ((0, 1), (2,))},
        {"mode": "grouped", "quorum": 2},
        {"mode": "ps", "quorum": 2, "parents": ((1, 0),)},
        {"mode": "subgroup", "quorum": 2, "members": (0, 1), "parents": ((2, 0), (3, 2))},
        {"mode": "subgroup", "quorum": 2, "members": (0, 1), "parents": ((2, 0), (2, 1), (3, 0))},
        {"mode": "ps", "quorum": 2, "servers": (0, 0)},
        {"mode": "ps", "quorum": 2, "servers": "01"},
        {"mode": "ps", "quorum": 2, "noise_scale": -1.0},
        {"mode": "local", "quorum": 4},
        {"mode": "local", "quorum": 4, "local_steps": 2, "local_s": 1.0},
        {"mode": "local", "quorum": 4, "local_s": float("inf")},
    ],
)
def test_a_plan_that_does_not_fit_together_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="expected"):
        Plan(world_size=4, **fields)


def test_a_logged_step_has_all_times_of_the_rank() -> None:
    """Without one of them a reader of the log takes slow input for slow compute."""
    times = StepTimes(5.0, 1.0, 2.0, 3.0, 4.0)
    record = StepReport(rank=1, step=7, times=times).as_record()
    assert {name: record[name] for name in dataclasses.asdict(times)} == dataclasses.asdict(times)
