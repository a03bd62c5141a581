"""The price of transfers behind compute: bounds, directions, and what the cost model makes of it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.cost import cost_model
from scheduler.cost.conditions import Conditions
from scheduler.cost.cost_model import part_behind_compute, predict
from scheduler.plan.plan import Plan
from scheduler.plan.transmission import Transmission
from scheduler.records import parse_mode
from scheduler.transmission.behind_compute import averaging_left_s, push_left_s, reply_left_s, steps_behind
from scheduler.transmission.pace import SHARE

times = st.floats(0.0, 100.0)
rates = st.floats(1e5, 1e10)
LEFT = (averaging_left_s, push_left_s, reply_left_s)


def conditions(compute_s: float, rate: float, *, slow: float = 1.0) -> Conditions:
    times_s = np.full((8, 4), compute_s)
    times_s[:, 3] *= slow
    return Conditions(times_s=times_s, rate=np.full(4, rate), comm_bytes=10e6)


@given(times, times)
def test_what_is_left_is_some_of_the_transfer(transfer_s: float, compute_s: float) -> None:
    for left_s in LEFT:
        assert 0.0 <= float(left_s(transfer_s, compute_s)) <= transfer_s
    assert 0.0 <= float(steps_behind(transfer_s, compute_s, 8.0)) <= 8.0


@given(times, times, times)
def test_longer_transfers_leave_more_and_longer_steps_less(transfer_s: float, compute_s: float, more_s: float) -> None:
    for left_s in LEFT:
        here = float(left_s(transfer_s, compute_s))
        assert float(left_s(transfer_s + more_s, compute_s)) >= here - 1e-9
        assert float(left_s(transfer_s, compute_s + more_s)) <= here + 1e-9


@given(st.sampled_from(["local(8)", "local(2.5s)", "ps(3)", "ps(1)", "ps(dynamic)"]), st.floats(1e-3, 10.0), rates)
def test_behind_compute_a_plan_is_never_slower_and_never_faster_than_compute(
    name: str, compute_s: float, rate: float
) -> None:
    now, plan = conditions(compute_s, rate), parse_mode(name, 4)
    assert plan is not None
    behind = predict(plan.replace(transmission=Transmission(True)), now)
    assert behind.interval_s <= predict(plan, now).interval_s * (1.0 + 1e-9)
    assert behind.interval_s >= compute_s * plan.quorum / 4 * (1.0 - 1e-9)


def test_the_settings_price_a_plan_that_does_not_say() -> None:
    now, plan = conditions(0.1, 25e6), Plan.ps(4, 3)
    forced = dataclasses.replace(now, background=True)
    assert predict(plan, forced).interval_s == predict(plan.replace(transmission=Transmission(True)), now).interval_s
    assert predict(plan.replace(transmission=Transmission(False)), forced).interval_s == predict(plan, now).interval_s


def test_pushes_hide_behind_backward_where_nobody_says_and_parameters_do_not() -> None:
    """0.4 s each way; a quarter of the push is in the bucket that is whole last."""
    plan, slow = Plan.ps(4, 4, servers=range(4)), conditions(3.0, 25e6)
    said = [predict(plan, dataclasses.replace(slow, background=each)).interval_s for each in (None, False, True)]
    assert said == pytest.approx([3.0 + 0.1 + 0.4, 3.0 + 0.4 + 0.4, 3.0 + 0.1 + 0.1], abs=0.01)
    assert predict(plan.replace(transmission=Transmission(False)), slow).interval_s == pytest.approx(said[1])
    whole = predict(plan, dataclasses.replace(slow, edge_part=1.0)).interval_s
    assert whole == pytest.approx(said[1]), "what is clipped or on a device leaves with step()"


@pytest.mark.parametrize(("rate", "share"), [(25e6, SHARE), (1e9, 1.0)])
def test_a_childs_transfers_are_priced_at_their_pace(
    monkeypatch: pytest.MonkeyPatch, rate: float, share: float
) -> None:
    plan, now = Plan.subgroup(4, (0, 1, 2), max_staleness=1000), conditions(0.1, 1e9)
    found = predict(plan, dataclasses.replace(now, rate=np.array([1e9, 1e9, 1e9, rate])))
    monkeypatch.setattr(cost_model, "paced_s", np.divide)
    slower = predict(plan, dataclasses.replace(now, rate=np.array([1e9, 1e9, 1e9, share * rate])))
    assert (found.interval_s, found.progress) == (slower.interval_s, pytest.approx(slower.progress))
    whole = predict(plan, dataclasses.replace(now, rate=np.array([1e9, 1e9, 1e9, rate])))
    assert (found.progress != whole.progress) == (share < 1.0)


def test_an_averaging_behind_compute_hides_behind_the_steps_until_the_next_and_costs_drift() -> None:
    now, plan = conditions(0.1, 100e6), Plan.local(4, steps=8)
    before, after = predict(plan, now), predict(plan.replace(transmission=Transmission(True)), now)
    exposed = [8.0 * (one.interval_s - 0.1) for one in (before, after)]
    assert exposed[1] == pytest.approx(0.1 * exposed[0])
    assert after.drift > before.drift


def test_servers_step_takes_the_longer_of_backward_and_push_and_of_forward_and_parameters() -> None:
    behind = Plan.ps(4, 4, servers=range(4), transmission=Transmission(True))
    hidden = predict(behind, conditions(3.0, 25e6)).interval_s
    assert hidden == pytest.approx(3.0 + 2.0 * 0.25 * 0.4, abs=0.01)
    bound = predict(behind, conditions(0.03, 25e6)).interval_s
    assert bound == pytest.approx(2.0 * 0.4 + 0.25 * 0.03, abs=0.01)


def test_what_cannot_travel_in_parts_is_not_hidden_at_servers() -> None:
    now, plan = dataclasses.replace(conditions(0.1, 25e6), edge_part=1.0), Plan.ps(4, 3)
    assert part_behind_compute(plan, now) == pytest.approx(1.0)
    behind = predict(plan.replace(transmission=Transmission(True)), now)
    assert behind.interval_s == pytest.approx(predict(plan, now).interval_s)
    assert part_behind_compute(Plan.local(4, steps=8), now) < 1.0, "an averaging is not pushed"


def test_a_child_behind_compute_contributes_all_it_computes() -> None:
    now = dataclasses.replace(conditions(0.1, 1e9), rate=np.array([1e9, 1e9, 1e9, 50e6]))
    plan = Plan.subgroup(4, (0, 1, 2))
    before, after = predict(plan, now), predict(plan.replace(transmission=Transmission(True)), now)
    assert after.interval_s == before.interval_s and after.drift > before.drift
