"""`auto` and transfers behind compute: taken where the price says so, never against the user's settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.cost.conditions import Conditions
from scheduler.cost.cost_model import Prediction, part_behind_compute, rank
from scheduler.plan.plan import Plan
from scheduler.plan.transmission import Transmission
from scheduler.policy.candidates import candidates, same_plan
from scheduler.policy.cost_policy import CostPolicy
from scheduler.records import Window
from scheduler.transmission.behind_compute import WORTH
from tests.support.windows import steady, window

SERVED = ("sync", "ps")
SLOW_LINKS, FAST_LINKS = 25e6, 1e10  # 200 Mbit/s, and links that need nothing of a step.


def decided(
    policy: CostPolicy, rate: float, *, last: float | None = None, slow: float = 3.0, size: int = 10**6
) -> Plan:
    """The last plan that the policy takes up where one rank of four computes slower."""
    active = Plan.sync(4)
    for end in range(40, 120, 4):
        times, rates = steady(4, slow={3: slow}), [rate] * 3 + [last or rate]
        one = window(times, rates=rates, comm_bytes=size, end=end, allowed=SERVED)
        active = policy.decide(one, active) or active
    return active


def test_servers_of_a_job_on_slow_links_get_pushes_behind_compute_with_a_reason() -> None:
    plan = decided(CostPolicy(4, background=None), SLOW_LINKS)
    assert plan.mode == "ps" and plan.in_background(None)
    name = plan.replace(transmission=None).label
    assert f"gradients and parameters of {name} travel behind compute: 0.1" in plan.reason
    assert "s instead of 0.1" in plan.reason and plan.reason.count("between updates") == 1


@pytest.mark.parametrize("said", [False, True])
def test_the_users_settings_are_not_overruled(said: bool) -> None:
    plan = decided(CostPolicy(4, background=said), SLOW_LINKS)
    assert plan.mode == "ps" and plan.transmission is None


def test_a_job_whose_links_need_nothing_of_a_step_is_left_as_it_is() -> None:
    plan = decided(CostPolicy(4, background=None), FAST_LINKS)
    assert plan.mode == "ps" and plan.transmission is None


def test_one_slow_link_that_no_update_waits_for_is_no_reason() -> None:
    plan = decided(CostPolicy(4, background=None), 125e6, last=6e5, slow=1.0, size=10**5)
    assert plan.mode == "ps" and plan.transmission is None


def test_what_a_replay_does_not_confirm_is_dropped() -> None:
    plain, active = Plan.ps(4, 3), Plan.sync(4)
    behind = plain.replace(transmission=Transmission(True))

    def ranker(offered: Sequence[Plan], now: Conditions, one: Window, old: Plan) -> list[Prediction]:
        return [dataclasses.replace(each, interval_s=1.0) for each in rank([active, plain, behind], now)]

    policy = CostPolicy(4, background=None, ranker=ranker)
    policy.decide(
        window(steady(4, slow={3: 3.0}), rates=[SLOW_LINKS] * 4, comm_bytes=10**6, end=60, allowed=SERVED), active
    )
    assert {one.plan.label for one in policy.last} == {"sync", "ps(3)"}


@settings(max_examples=60, deadline=None)
@given(st.floats(1e-2, 3.0), st.floats(1e6, 1e10), st.sampled_from([None, False, True]))
def test_only_variants_that_are_priced_shorter_are_offered(
    compute_s: float, rate: float, said: bool | None
) -> None:
    times_s = np.full((8, 4), compute_s)
    times_s[:, 3] *= 3.0
    now = Conditions(times_s=times_s, rate=np.full(4, rate), comm_bytes=1e6, background=said)
    offered = candidates(now)
    behind = [plan for plan in offered if plan.transmission is not None]
    for plan in behind:
        assert said is None and plan.mode in ("ps", "local") and part_behind_compute(plan, now) <= WORTH
        assert any(same_plan(one, plan.replace(transmission=None)) for one in offered), "without it there is no price"
    worth = [plan for plan in offered if plan.transmission is None and part_behind_compute(plan, now) <= WORTH]
    assert len(behind) == (len(worth) if said is None else 0)


def test_within_a_session_of_servers_the_transmission_stays() -> None:
    times_s = np.full((8, 4), 0.1)
    times_s[:, 3] *= 3.0
    now = Conditions(times_s=times_s, rate=np.full(4, SLOW_LINKS), comm_bytes=1e6, background=None)
    for transmission in (None, Transmission(True)):
        active = Plan.ps(4, 3, servers=(0, 1), transmission=transmission)
        served = [plan for plan in candidates(now, active) if plan.mode == "ps"]
        assert len(served) > 2 and {plan.transmission for plan in served} == {transmission}
    quick = dataclasses.replace(now, rate=np.full(4, FAST_LINKS))
    assert not [plan for plan in candidates(quick) if plan.transmission is not None]


def test_a_slow_rank_is_worth_a_mode_if_compression_leaves_little_of_the_reductions() -> None:
    """40 MB over 200 Mbit/s: 2.4 s per reduction, in which a rank that computes 0.1 s longer is hardly noticed."""
    allowed, times = ("sync", "partial", "ps", "local"), steady(4, slow={3: 2.0})

    def predicted(**parts: float) -> tuple[Plan | None, dict[str, float]]:
        policy = CostPolicy(4, background=None)
        one = window(times, rates=[SLOW_LINKS] * 4, comm_bytes=40_000_000, end=60, allowed=allowed, **parts)
        return policy.decide(one, Plan.sync(4)), {each.plan.label: each.relative for each in policy.last}

    plan, relative = predicted(reduced_part=0.01)
    assert plan is not None and plan.label == "partial(3)" and relative["partial(3)"] < 0.6
    assert relative["local(4)"] > 2.0, "whole parameters are averaged"
    plan, relative = predicted()
    assert plan is None and relative["partial(3)"] > 0.95 and relative["local(4)"] < 1.0
