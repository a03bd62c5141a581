"""Which plans are worth considering, and which ranks are slow."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.cost.conditions import Conditions
from scheduler.cost.cost_model import predict
from scheduler.plan.headroom import Headroom
from scheduler.plan.plan import MODES, Plan
from scheduler.policy.candidates import candidates, same_plan, summarize_stragglers
from tests.support.windows import steady, window


def conditions(times: np.ndarray, rate: list[float] | None = None, comm_bytes: float = 1e6) -> Conditions:
    n = times.shape[1]
    return Conditions(times_s=times, rate=np.array(rate or [1e9] * n), comm_bytes=comm_bytes)


@pytest.mark.parametrize("n", [2, 3, 8, 200])
def test_nobody_slow_leaves_few(n: int) -> None:
    calm = conditions(steady(n))
    assert not summarize_stragglers(calm)
    assert [plan.mode for plan in candidates(calm)] == ["sync", "partial"]
    active = Plan.local(n, steps=4, plan_id=3)
    assert [plan.label for plan in candidates(calm, active)] == ["sync", "local(4)", f"partial({n - 1})"]


def test_jitter_of_five_milliseconds_is_no_trouble() -> None:
    """As in STAR's alexnet log: 5.4 ms and 14 % of jitter."""
    assert not summarize_stragglers(conditions(steady(8, 200, jitter=0.14, usual_s=0.0054)))


@pytest.mark.parametrize("reports", [3, 6, 24])
def test_one_long_step_is_no_trouble_however_few_there_were(reports: int) -> None:
    times = steady(4, reports, usual_s=0.02)
    times[-1, 1] = 1.0
    early = Conditions.from_window(window(times))
    assert early is not None and not summarize_stragglers(early)
    times = steady(4, 2 * reports, usual_s=0.02)
    times[::2, 1] = 1.0
    again = Conditions.from_window(window(times))
    assert again is not None and summarize_stragglers(again).slow == (1,)


@pytest.mark.parametrize("pause_s", [0.5, 5.0])
def test_a_pause_beside_short_slow_steps_is_no_trouble(pause_s: float) -> None:
    """A checkpoint on a machine with 3 % of slow reports: the short ones do not say that the pause comes back."""
    times = steady(4, 64)
    times[-20, 0], times[-40, 0], times[-50, 0] = pause_s, 0.14, 0.15
    found = Conditions.from_window(window(times))
    assert found is not None and not summarize_stragglers(found)
    assert found.usual_s[0] == pytest.approx(0.1, rel=0.05)
    times[-5, 0] = 0.7 * pause_s
    again = Conditions.from_window(window(times))
    assert again is not None and summarize_stragglers(again)
    assert again.usual_s[0] == pytest.approx(0.1 + 1.7 * pause_s / 24.0, rel=0.1)


@pytest.mark.parametrize("slow_s", [(0.4, 0.4, 0.4), (5.0, 0.4, 0.4), (0.15, 0.4, 0.4), (0.4, 0.4, 5.0)])
def test_a_rank_that_has_just_become_slow_is_found_whatever_its_longest_step(slow_s: tuple[float, ...]) -> None:
    times = steady(4, 64)
    times[-len(slow_s) :, 1] = slow_s
    found = Conditions.from_window(window(times))
    assert found is not None and summarize_stragglers(found).slow == (1,)
    assert 0.3 < found.usual_s[1] < 0.41, "the longest one does not count while it is the only one of its size"


def test_steps_that_are_long_for_all_ranks_are_nobodys_slowness() -> None:
    times = steady(4)
    times[::5] *= 2.0
    found = Conditions.from_window(window(times))
    assert found is not None and not summarize_stragglers(found)
    times[::5, 1] *= 1.6
    found = Conditions.from_window(window(times))
    assert found is not None and summarize_stragglers(found).intermittent == (1,)
    assert summarize_stragglers(found).at_once == (1,)


@pytest.mark.parametrize("reports", [5, 12, 64])
def test_an_evaluation_of_all_ranks_does_not_hide_a_slow_one(reports: int) -> None:
    times = steady(4, reports, slow={2: 3.0})
    times[-2] = [10.0, 10.1, 10.4, 10.0]
    found = Conditions.from_window(window(times))
    assert found is not None and summarize_stragglers(found).slow == (2,)
    assert found.typical_s == pytest.approx(0.1, rel=0.05) and found.usual_s[2] == pytest.approx(0.3, rel=0.05)


def test_an_evaluation_in_every_epoch_slows_a_rank_by_what_it_takes_longer() -> None:
    times = steady(4, 64)
    times[::12] = [5.0, 5.0, 5.0, 7.0]
    found = Conditions.from_window(window(times))
    assert found is not None and found.typical_s == pytest.approx(0.1, rel=0.05)
    assert found.usual_s[3] == pytest.approx(0.1 + 2.0 * 2.0 / 24.0, rel=0.05)


def test_long_sequences_of_all_ranks_count_as_steps() -> None:
    times = steady(4)
    times[::4] *= 4.0
    found = Conditions.from_window(window(times))
    assert found is not None and found.typical_s == pytest.approx(0.1 * (1.0 + 3.0 / 4.0), rel=0.05)


def test_as_many_are_left_out_as_are_slow() -> None:
    stragglers = summarize_stragglers(conditions(steady(8, slow={2: 2.0, 5: 4.0})))
    assert (stragglers.slow, stragglers.intermittent, stragglers.links) == ((2, 5), (), ())
    assert 2 in stragglers.at_once
    labels = {plan.label for plan in candidates(conditions(steady(8, slow={2: 2.0, 5: 4.0})))}
    assert {"sync", "partial(6)", "subgroup(0,1,3,4,6,7)", "grouped(2)", "ps(6)", "ps(grace=2)", "ps(1)"} <= labels


@pytest.mark.parametrize(
    ("n", "least_share", "quorum"), [(4, 0.5, 2), (5, 0.5, 3), (7, 0.5, 4), (8, 0.75, 6), (8, 0.25, 4)]
)
def test_a_quorum_of_half_the_ranks_or_of_the_least_share_is_offered(n: int, least_share: float, quorum: int) -> None:
    labels = [plan.label for plan in candidates(conditions(steady(n, slow={1: 1.6})), least_share=least_share)]
    assert f"partial({quorum})" in labels


def test_ranks_a_little_slower_are_left_out_of_one_subgroup_beside_the_slow_one() -> None:
    mixed = conditions(steady(8, slow={1: 1.2, 6: 1.08, 7: 3.0}))
    stragglers = summarize_stragglers(mixed)
    assert stragglers.slow == (7,)
    labels = {plan.label for plan in candidates(mixed)}
    assert {"subgroup(0,1,2,3,4,5,6)", "subgroup(0,2,3,4,5,6)"} <= labels
    # `partial` waits for rank 1, which is about to come; without it a step is shorter.
    with_it, without = (predict(Plan.subgroup(8, m), mixed) for m in ((0, 1, 2, 3, 4, 5, 6), (0, 2, 3, 4, 5, 6)))
    assert predict(Plan.partial(8, 6), mixed).interval_s == pytest.approx(with_it.interval_s, rel=0.02)
    assert without.interval_s < 0.95 * with_it.interval_s
    many = conditions(steady(200, slow={1: 1.2, 7: 3.0}))
    left_out = [set(range(200)) - set(plan.members) for plan in candidates(many) if plan.mode == "subgroup"]
    assert left_out == [{7}], "of many ranks some are always a little slower"


def test_ranks_that_are_slow_in_turn() -> None:
    times = steady(4, 40)
    for step in range(40):
        times[step, step // 5 % 4] *= 4.0
    stragglers = summarize_stragglers(conditions(times))
    assert set(stragglers.intermittent) | set(stragglers.slow) == {0, 1, 2, 3}
    assert 1 in stragglers.at_once
    # A batch of four usual times is late for four steps: while nobody waits they overlap.
    assert max(stragglers.at_once) == 2


def test_a_slow_link_is_left_outside_and_holds_no_server() -> None:
    slow = conditions(steady(8), [1e9] * 3 + [1e7] + [1e9] * 4, 1e7)
    assert summarize_stragglers(slow).links == (3,)
    found = candidates(slow)
    assert "subgroup(0,1,2,4,5,6,7)" in {plan.label for plan in found}
    assert all(3 not in plan.servers for plan in found if plan.mode == "ps")
    hosts = [f"host{rank}" for rank in range(8)]
    spread = [plan for plan in candidates(slow, hosts=hosts) if plan.mode == "ps"]
    assert spread and all(3 not in plan.servers and plan.servers for plan in spread)


def test_half_of_the_links_may_be_slow() -> None:
    slow = conditions(steady(4), [1e7, 1e7, 1e9, 1e9], 1e7)
    assert summarize_stragglers(slow).links == (0, 1)
    assert "subgroup(2,3)" in {plan.label for plan in candidates(slow)}


def test_a_slow_link_that_carries_nothing_is_no_trouble() -> None:
    assert not summarize_stragglers(conditions(steady(8), [1e9] * 3 + [1e7] + [1e9] * 4, 1e3))


def test_where_most_ranks_wait_for_a_processor_no_server_takes_one_from_them() -> None:
    times = steady(4, slow={2: 3.0})
    one = Conditions.from_window(window(times, starved={2: 0.6}))
    assert one is not None and not one.crowded, "one starved rank is a straggler"
    assert any(plan.mode == "ps" for plan in candidates(one))
    most = Conditions.from_window(window(times, starved={0: 0.3, 1: 0.3, 2: 0.6}))
    assert most is not None and most.crowded
    modes = {plan.mode for plan in candidates(most)}
    assert "ps" not in modes and {"sync", "partial", "subgroup"} <= modes
    # But nothing else helps against a rank that stands still.
    frozen = most.with_freezes(0.05, [2], [2])
    assert any(plan.mode == "ps" for plan in candidates(frozen))


def test_no_averaging_is_offered_because_a_rank_froze() -> None:
    """It waits for a frozen rank as every collective does, so only communication would be saved."""
    frozen = conditions(steady(4)).with_freezes(0.5, [1], [1])
    assert "local" not in {plan.mode for plan in candidates(frozen)}
    slow_too = conditions(steady(4, slow={2: 3.0})).with_freezes(0.5, [1], [1])
    assert "local" in {plan.mode for plan in candidates(slow_too)}


def test_ranks_that_freeze_hold_no_server() -> None:
    frozen = conditions(steady(4)).with_freezes(0.5, [1], [1])
    assert summarize_stragglers(frozen).frozen == (1,)
    servers = [plan for plan in candidates(frozen) if plan.mode == "ps"]
    assert servers and all(1 not in plan.servers for plan in servers)
    assert {"ps(3)", "ps(grace=1)"} <= {plan.label for plan in servers}


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 12), seed=st.integers(0, 1000), allowed=st.sets(st.sampled_from(MODES)), share=st.floats(0.0, 0.6)
)
def test_whatever_is_offered_can_be_done(n: int, seed: int, allowed: set[str], share: float) -> None:
    rng = np.random.default_rng(seed)
    times = steady(n, 24) * np.where(rng.random((1, n)) < share, rng.uniform(1.5, 8.0, (1, n)), 1.0)
    rate = np.where(rng.random(n) < share, 1e7, 1e9).tolist()
    now = conditions(times, rate, 1e7)
    active = Plan.partial(n, max(1, n - 1), damping="none", max_staleness=5, plan_id=7)
    found = candidates(now, active, allowed=allowed)
    assert found
    assert {plan.mode for plan in found} <= (allowed or {"sync"}) or [plan.label for plan in found] == ["sync"]
    assert (active in found) == ("partial" in allowed) or n == 1
    for one in range(len(found)):
        assert not any(same_plan(found[one], other) for other in found[one + 1 :])
    for plan in found:
        if plan.groups:
            assert sorted(rank for crew in plan.groups for rank in crew) == list(range(n))
        if plan.mode in ("partial", "subgroup") and plan is not active:
            assert plan.quorum >= n // 2
        if plan.mode in ("sync", "partial", "subgroup"):
            assert (plan.damping, plan.max_staleness) == ("none", 5)


def test_equal_times_twice_give_equal_plans() -> None:
    now = conditions(steady(8, slow={1: 3.0}))
    assert candidates(now) == candidates(now)


def test_the_plan_in_force_is_itself_among_them() -> None:
    back = Plan.sync(4, plan_id=4, reason="nobody was slow", damping="none")
    found = candidates(conditions(steady(4, slow={1: 3.0})), back)
    assert found[0] is back
    assert sum(plan.mode == "sync" for plan in found) == 1
    assert same_plan(Plan.sync(4), back) and not same_plan(Plan.sync(4), Plan.partial(4, 3))


def test_half_of_the_ranks_at_most_are_slow() -> None:
    stragglers = summarize_stragglers(conditions(steady(4, slow={0: 3.0, 1: 3.0, 2: 3.0})))
    assert not stragglers.slow  # Then slow is what this job is.
    assert all(1 <= count <= 2 for count in stragglers.at_once)
    assert math.isclose(conditions(steady(4, slow={0: 3.0, 1: 3.0, 2: 3.0})).typical_s, 0.3, rel_tol=0.1)


def test_servers_are_not_offered_where_they_would_slow_another_job() -> None:
    times = steady(4, slow={3: 4.0})
    tight = Headroom(free_cpu_cores=0.0, neighbours=2)
    free = Headroom(free_cpu_cores=4.0, neighbours=2)

    def found(*headroom: Headroom, hosts: str = "abcd") -> list[Plan]:
        known = dataclasses.replace(conditions(times, comm_bytes=4e7), headroom=headroom)
        return [plan for plan in candidates(known, hosts=hosts) if plan.family == "ps" or plan.mode == "grouped"]

    assert found() and found(*[Headroom()] * 4), "nothing known changes nothing"
    assert found(*[tight] * 4) == [], "all hosts are full"
    assert {plan.servers for plan in found(tight, tight, free, tight) if plan.mode == "ps"} == {(2,)}
    assert {plan.servers for plan in found(tight, tight, tight, free)} == set(), "that one has the straggler"
    assert found(*[Headroom(free_cpu_cores=0.0)] * 4), "no other job is there"
    froze = dataclasses.replace(conditions(times, comm_bytes=4e7), headroom=(tight,) * 4, freezing=(3,))
    assert any(plan.mode == "ps" for plan in candidates(froze, hosts="abcd")), "no other mode helps there"
    served = dataclasses.replace(conditions(times, comm_bytes=4e7), headroom=(tight,) * 4)
    active = Plan.ps(4, 3, servers=(1,))
    offered = [plan for plan in candidates(served, active, hosts="abcd") if plan.mode == "ps"]
    assert len(offered) > 1 and {plan.servers for plan in offered} == {(1,)}, "they run already"
    grouped = Plan.grouped(4, ((0, 1, 2), (3,)), servers=(1,))
    assert grouped in candidates(served, grouped, hosts="abcd"), "so do these"
    crowded = dataclasses.replace(conditions(times, comm_bytes=4e7), crowded=True)
    assert {plan.mode for plan in candidates(crowded)}.isdisjoint({"ps", "grouped"}), "ranks need the processors"
