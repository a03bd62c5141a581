"""Replays of times under the rules of modes: printed figures, identities, and the exact simulator."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.cost.replay import Flow, partial_flow, server_flow
from scheduler.plan.plan import Plan
from scheduler.simulator import Cluster, Network, Scenario, run_plans

SEVEN_AND_ONE = [1.0] * 7 + [2.0]


def interval_s(times_s: list[float], x: int) -> float:
    """tau(x) of STAR: mean time between updates of any x arrivals."""
    return server_flow(Plan.ps(len(times_s), x), np.atleast_2d(times_s), x, 0.0).interval_s


@pytest.mark.parametrize(
    ("x", "tau"), list(enumerate((0.13, 0.29, 0.50, 0.67, 1.0, 1.0, 1.0, 2.0), start=1))
)
def test_intervals_of_star_section_4_4(x: int, tau: float) -> None:
    assert interval_s(SEVEN_AND_ONE, x) == pytest.approx(tau, rel=0.03)


@settings(max_examples=30, deadline=None)
@given(times=st.lists(st.floats(0.5, 4.0), min_size=2, max_size=6), data=st.data())
def test_interval_bounds(times: list[float], data: st.DataObject) -> None:
    x = data.draw(st.integers(1, len(times)))
    tau = interval_s(times, x)
    together = 1.0 / sum(1.0 / t for t in times)
    # Nothing is faster than all ranks at work all the time; the x fastest alone are no slower than any x.
    assert tau >= x * together * 0.95
    assert tau <= sorted(times)[x - 1] * 1.02
    assert interval_s(times, len(times)) == pytest.approx(max(times))


def test_bad_order() -> None:
    with pytest.raises(ValueError, match=r"expected 1\.\.2"):
        server_flow(Plan.ps(2, 2), np.ones((1, 2)), 3, 0.0)


def test_asgd_adds_up_rates() -> None:
    flow = server_flow(Plan.ps(8, 1, damping="none"), np.array([SEVEN_AND_ONE]), 1, 0.0)
    assert flow.interval_s == pytest.approx(1.0 / 7.5)
    assert flow.length == pytest.approx(1.0 / 8.0)  # STAR's division by n.
    # n - 1 updates of 1 / n between reading and writing, more for the slow rank.
    assert flow.drift == pytest.approx((7 * 6.5 / 7.5 + 14.0 * 0.5 / 7.5) / 8.0, rel=1e-6)


def test_servers_cannot_take_in_faster_than_their_link() -> None:
    flow = server_flow(Plan.ps(8, 4), np.array([[1.0] * 8]), 4, 0.9)
    assert flow.interval_s == pytest.approx(0.9, rel=0.05)


def test_backup_drops_what_is_late() -> None:
    times = np.array([SEVEN_AND_ONE])
    flow = server_flow(Plan.ps(8, 7, rule="backup", lr_rule="none"), times, 7, 0.0)
    assert flow.drift == 0.0
    assert flow.gradients == pytest.approx(7.0)
    # The slow one begins anew when its gradient is dropped; the seven never wait for it.
    assert flow.interval_s == pytest.approx(1.0)


def test_the_grace_of_servers_waits_for_who_is_usually_in_time() -> None:
    plan = Plan.ps(8, 7, rule="grace", lr_rule="none")
    slow = server_flow(plan, np.array([SEVEN_AND_ONE]), 7, 0.0)
    assert (slow.interval_s, slow.gradients, slow.drift) == (pytest.approx(1.0), pytest.approx(7.0), 0.0)
    times = 0.1 * np.exp(0.02 * np.random.default_rng(1).standard_normal((24, 8)))
    equal = server_flow(plan, times, 7, 0.0)
    assert equal.gradients == 8.0 and equal.interval_s == pytest.approx(float(times.max(axis=1).mean()), rel=0.01)
    times[1, 0] = 1.0  # Once, for ten updates.
    once = server_flow(plan, times, 7, 0.0)
    assert 7.4 < once.gradients < 7.9
    assert equal.interval_s < once.interval_s < 1.05 * equal.interval_s


@pytest.mark.parametrize("rule", ["backup", "grace"])
def test_one_of_two_ranks_that_drop_late_gradients_is_no_asgd(rule: str) -> None:
    plan = Plan.ps(2, 1, rule=rule, lr_rule="none")
    flow = server_flow(plan, np.array([[1.0, 10.0]]), 1, 0.0)
    assert (flow.drift, flow.length) == (0.0, 1.0), "every update has fresh gradients only"
    assert flow.interval_s == pytest.approx(1.0) and flow.gradients == pytest.approx(1.0)
    assert server_flow(Plan.ps(2, 1), np.array([[1.0, 10.0]]), 1, 0.0).drift > 0.0


def test_ranks_slow_in_turn_are_missing_for_as_long_as_their_batches_last() -> None:
    """Each of four ranks is four times slower for five of twenty batches, which are more than half of its time."""
    times = np.full((20, 4), 0.03)
    for rank in range(4):
        times[5 * rank : 5 * rank + 5, rank] *= 4.0
    flow = server_flow(Plan.ps(4, 2, rule="grace", lr_rule="none"), times, 2, 0.0)
    assert 1.0 <= flow.gradients < 3.0, "three are fast in every row"
    assert flow.drift == 0.0


def test_partial_waits_for_its_quorum_and_folds_the_rest() -> None:
    times = np.array([[1.0] * 7 + [4.1]] * 24)
    all_, seven = partial_flow(times, [8, 7], 0.0, scales=[1.0, 1.0])
    assert all_.interval_s == pytest.approx(4.1)
    assert seven.interval_s == pytest.approx(1.0, rel=0.02)
    assert all_.drift == 0.0
    # Every fourth or fifth step has the late gradient of the slow rank: 7 fresh ones and 1 / (1 + 4) of one.
    assert 7.0 < seven.gradients < 7.3
    assert 0.0 < seven.drift < 0.2


def test_equal_ranks_lose_no_gradient_in_a_replayed_partial() -> None:
    times = 0.1 * np.exp(0.02 * np.random.default_rng(1).standard_normal((24, 8)))
    (flow,) = partial_flow(times, [7], 0.0, scales=[1.0])
    assert flow.gradients == pytest.approx(8.0, abs=0.05)
    assert flow.interval_s == pytest.approx(float(times.max(axis=1).mean()), rel=0.03)


def test_means_of_gradients() -> None:
    flow = Flow.mean(2.0, [1.0, 1.0, 0.5], [0.0, 0.0, 4.0], 0.01)
    assert flow.gradients == pytest.approx(2.5**2 / 2.25)
    assert flow.drift == pytest.approx(0.8)
    assert flow.slower(0.5).interval_s == 2.5
    assert Flow.fresh(1.0, 4, 0.0).drift == 0.0


@pytest.mark.parametrize(
    "plan",
    [
        Plan.partial(6, 5), Plan.partial(6, 4), Plan.ps(6, 4), Plan.ps(6, 1),
        *(Plan.ps(6, x, rule=rule, lr_rule="none") for x in (5, 4, 3) for rule in ("backup", "grace")),
    ],
    ids=lambda plan: plan.label,
)
def test_replays_agree_with_the_simulator(plan: Plan) -> None:
    relative = (1.0, 1.0, 1.0, 1.0, 1.4, 3.3)
    cluster = Cluster(world_size=6, relative_s=relative, cycle_s=0.0, latency_s=0.0, server_s=0.0, jitter=0.05)
    network = Network(comm_bytes=8, compute_s=0.1, target_steps=300.0)
    exact = run_plans([Scenario(cluster=cluster, network=network)], [plan])[0].step_s
    times = 0.1 * np.array(relative) * np.exp(0.05 * np.random.default_rng(0).standard_normal((24, 6)))
    if plan.mode == "ps":
        found = server_flow(plan, times, plan.quorum, 0.0).interval_s
    else:
        found = partial_flow(times, [plan.quorum], 0.0, scales=[1.0])[0].interval_s
    assert found == pytest.approx(exact, rel=0.06)
