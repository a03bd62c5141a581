"""A mode for every cause: links, starved and frozen ranks, modes that are not allowed, and the way back."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.plan.completion import resolve
from scheduler.plan.headroom import Headroom
from scheduler.plan.plan import MODES, Plan
from scheduler.policy.rule_policy import RulePolicy
from scheduler.records import RankStats, Window
from tests.support.effort import cases

USUAL_S = 0.1
RATE = 1.25e8
GRADIENT_BYTES = 10_000_000
"""120 ms on a usual link of a ring of four: 2 * 3 / 4 * 10 MB at 125 MB/s."""

State = Callable[[int, int], dict[str, float]]
"""Of rank r at step k: `slow` factor on its batch, `link` factor on its rate, `silent` seconds, `starved` share."""


def stats(rank: int, state: State, step: int, keep: int = 60) -> RankStats:
    steps = tuple(range(max(0, step - keep), step))
    now = state(rank, step)
    return RankStats(
        rank=rank,
        compute_s=tuple(USUAL_S * state(rank, k).get("slow", 1.0) for k in steps),
        steps=steps,
        starved_share=now.get("starved", 0.0),
        link_bytes_per_s=RATE * now.get("link", 1.0),
        silent_s=now.get("silent", 0.0),
    )


def completed(wanted: Plan, active: Plan) -> Plan:
    n = wanted.world_size
    return resolve(
        wanted, active, times_s=[USUAL_S] * n, hosts=["a"] * n, slow=[], link_bytes_per_s=[RATE] * n,
        headroom=[Headroom()] * n, state_bytes=2 * GRADIENT_BYTES,
    )  # fmt: skip


def run(
    n: int, state: State, steps: int, *, allowed: frozenset[str] = frozenset(MODES), every: int = 1,
    headroom: tuple[Headroom, ...] = (), **settings: object,
) -> list[tuple[int, Plan]]:
    """The changes of plan of a job whose ranks report every step, asked every `every` steps.

    A plan comes into force as the coordinator completes it: servers, for example, do not move from `ps` to `ps`.
    """
    policy, plan = RulePolicy(n, **settings), Plan.sync(n)  # type: ignore[arg-type]
    changes = []
    for step in range(1, steps + 1, every):
        ranks = tuple(stats(rank, state, step) for rank in range(n))
        window = Window(step=step, ranks=ranks, comm_bytes=GRADIENT_BYTES, allowed=allowed, headroom=headroom)
        wanted = policy.decide(window, plan)
        if wanted is not None:
            assert wanted.plan_id == plan.plan_id + 1 and wanted.mode in allowed
            assert wanted.reason and "{" not in wanted.reason
            plan = completed(wanted, plan)
            changes.append((step, plan))
    return changes


def labels(changes: list[tuple[int, Plan]]) -> list[str]:
    return [plan.label for _, plan in changes]


def without(*modes: str) -> frozenset[str]:
    return frozenset(MODES) - set(modes)


def slow_link(rank: int, begin: int = 0, end: int = 10**9, factor: float = 0.1) -> State:
    return lambda r, k: {"link": factor} if r == rank and begin <= k < end else {}


def test_no_server_starts_where_it_would_slow_another_job() -> None:
    tight, free = Headroom(free_cpu_cores=0.0, neighbours=2), Headroom(free_cpu_cores=4.0, neighbours=2)
    given = {"allowed": without("subgroup"), "hosts": ["a", "b", "c", "d"]}
    assert run(4, slow_link(0), 120, headroom=(tight,) * 4, **given) == []
    ((_, plan),) = run(4, slow_link(0), 120, headroom=(tight, tight, free, free), **given)
    assert set(plan.servers) <= {2, 3}


def test_a_slow_link_leaves_the_all_reduce() -> None:
    ((step, plan),) = run(4, slow_link(3, begin=20), 120)
    assert plan.label == "subgroup(0,1,2)" and plan.parents == ((3, 0),)
    assert 20 + 3 <= step <= 20 + 4
    assert plan.reason == (
        "rank 3 has a link of 12.5 MB/s, 10.0x slower than the others', and communicates 1.2 s per step (link): "
        "subgroup(0,1,2) all-reduces, gradients of rank 3 come late"
    )


def test_without_subgroups_a_slow_link_goes_to_servers_away_from_it() -> None:
    ((_, plan),) = run(4, slow_link(0), 120, allowed=without("subgroup"))
    assert plan.label == "ps(3)" and plan.damping == "relative"
    assert plan.servers == (1,)
    assert "ps(3) waits for any 3 gradients, with servers at rank 1" in plan.reason
    hosts = run(4, slow_link(0), 120, allowed=without("subgroup"), hosts=["a", "a", "b", "b"])
    assert hosts[0][1].servers == (2,)  # not on the slow rank's host
    large = run(4, slow_link(0), 40, allowed=without("subgroup"), hosts=["a", "b", "c", "d"])
    assert large[0][1].servers == (1, 2, 3)  # 40 MB in 50 ms take more than one link


def test_where_neither_can_run_a_slow_link_changes_nothing() -> None:
    assert run(4, slow_link(3), 120, allowed=frozenset({"sync", "partial"})) == []


def test_a_link_that_recovers_returns_to_sync_after_a_quiet_time() -> None:
    changes = run(4, slow_link(3, 20, 80), 200)
    assert labels(changes) == ["subgroup(0,1,2)", "sync"]
    assert 79 + 25 <= changes[1][0] <= 79 + 28
    assert changes[1][1].reason == "no rank was slow for 25 steps: back to sync"
    assert changes[1][1].damping == "inverse"


def test_a_link_that_comes_and_goes_does_not_flap() -> None:
    changes = run(4, lambda r, k: {"link": 0.1} if r == 3 and (k // 10) % 2 else {}, 400)
    assert labels(changes) == ["subgroup(0,1,2)"]
    # Between half and three quarters of the usual rate nothing changes, in either direction.
    assert run(4, slow_link(3, factor=0.6), 200) == []
    wavering = run(4, lambda r, k: {"link": 0.1 if k < 50 else 0.6} if r == 3 else {}, 400)
    assert labels(wavering) == ["subgroup(0,1,2)"]


def test_a_short_dip_of_a_link_changes_nothing() -> None:
    assert run(4, slow_link(2, 30, 33), 100) == []


def test_a_slow_link_that_hardly_matters_changes_nothing() -> None:
    """20 kB: 2.4 ms of 102 on the slow link."""
    policy = RulePolicy(4)
    for step in range(3, 60):
        ranks = tuple(stats(rank, slow_link(3), step) for rank in range(4))
        assert policy.decide(Window(step=step, ranks=ranks, comm_bytes=20_000), Plan.sync(4)) is None


def test_a_second_slow_link_shrinks_the_subgroup_and_each_returns_by_itself() -> None:
    def state(r: int, k: int) -> dict[str, float]:
        return {"link": 0.1} if (r == 3 and k < 150) or (r == 1 and 50 <= k < 100) else {}

    changes = run(4, state, 250)
    assert labels(changes) == ["subgroup(0,1,2)", "subgroup(0,2)", "subgroup(0,1,2)", "sync"]
    assert "rank 1 not slow for 25 steps" in changes[2][1].reason


def test_a_rank_that_computes_slowly_leaves_the_subgroup_too() -> None:
    def state(r: int, k: int) -> dict[str, float]:
        return {"link": 0.1} if r == 3 else {"slow": 4.0} if r == 2 and k >= 50 else {}

    assert labels(run(4, state, 120)) == ["subgroup(0,1,2)", "subgroup(0,1)"]


def test_compute_is_left_to_partial_whatever_is_allowed() -> None:
    ((step, plan),) = run(4, lambda r, k: {"slow": 4.0} if r == 3 else {}, 100)
    assert (step, plan.label) == (3, "partial(3)")


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [
        (without("partial"), ["subgroup(0,1,2)"]),
        (without("partial", "subgroup"), ["ps(3)"]),
        (frozenset({"sync", "local", "grouped"}), []),
    ],
)
def test_compute_where_partial_cannot_run(allowed: frozenset[str], expected: list[str]) -> None:
    assert labels(run(4, lambda r, k: {"slow": 4.0} if r == 3 else {}, 60, allowed=allowed)) == expected


def test_rotating_compute_where_partial_cannot_run_goes_to_servers() -> None:
    turn = run(4, lambda r, k: {"slow": 4.0} if r == k % 4 else {}, 40, allowed=without("partial"))
    assert turn and turn[0][1].mode == "ps"


def test_a_starved_rank_sends_the_job_to_servers_and_back() -> None:
    def state(r: int, k: int) -> dict[str, float]:
        return {"slow": 4.0, "starved": 0.7} if r == 2 and 20 <= k < 80 else {}

    changes = run(4, state, 200)
    assert labels(changes) == ["ps(3)", "sync"]
    assert changes[0][0] <= 24 and 2 not in changes[0][1].servers
    assert "rank 2 computes 4.0x slower than the median since step 20 (starved)" in changes[0][1].reason
    assert 80 + 25 <= changes[1][0] <= 80 + 32
    assert labels(run(4, state, 200, allowed=without("ps"))) == ["partial(3)", "sync"]


def test_a_second_starved_rank_lowers_x_and_recovery_raises_it() -> None:
    def state(r: int, k: int) -> dict[str, float]:
        return {"slow": 4.0, "starved": 0.7} if r == 2 or (r == 1 and 60 <= k < 120) else {}

    assert labels(run(4, state, 250)) == ["ps(3)", "ps(2)", "ps(3)"]


def test_servers_move_away_from_a_rank_in_trouble() -> None:
    def state(r: int, k: int) -> dict[str, float]:
        return {"slow": 4.0, "starved": 0.7} if r == 2 or (r == 0 and k >= 60) else {}

    changes = run(4, state, 120)
    assert changes[0][1].servers == (0,)
    assert labels(changes) == ["ps(3)", "sync", "ps(2)"] and 0 not in changes[-1][1].servers
    assert "(starved): sync until servers run on other ranks" in changes[1][1].reason
    # Without a better place servers stay, and only x changes.
    everywhere = run(4, state, 120, hosts=["a", "b", "c", "d"])
    assert labels(everywhere)[-1] == "ps(2)" and len(everywhere) <= 4


def test_plans_that_cannot_be_carried_out_are_not_asked_for_again_and_again() -> None:
    def state(r: int, k: int) -> dict[str, float]:
        return {"slow": 4.0, "starved": 0.8} if r == 3 or (r == 0 and k > 100) else {}

    for hosts in (None, ["a", "b", "c", "d"], ["a", "a", "b", "b"]):
        changes = run(4, state, 200, hosts=hosts)
        assert len(changes) <= 4 and changes[-1][1].label == "ps(2)"
        assert not {0, 3} & set(changes[-1][1].servers)


def freezes(*begins: int, rank: int = 1, length: int = 3) -> State:
    return lambda r, k: {"silent": 5.0} if r == rank and any(b <= k < b + length for b in begins) else {}


def test_a_rank_that_freezes_repeatedly_sends_the_job_to_servers() -> None:
    assert run(4, freezes(30), 300) == []  # once is no reason
    assert run(4, freezes(30, 230), 300) == []  # nor is it so far apart
    changes = run(4, freezes(30, 60), 300)
    assert labels(changes) == ["ps(3)", "sync"]
    assert changes[0][0] == 60 and "rank 1 froze 2 times since step 30 (starved)" in changes[0][1].reason
    assert changes[1][0] >= 60 + 50
    assert run(4, freezes(30, 60), 300, allowed=without("ps")) == []


def test_everybody_silent_is_no_frozen_rank() -> None:
    """In sync all stop reporting when one freezes; who does not stop alone is not named."""
    assert run(4, lambda r, k: {"silent": 5.0} if k % 20 < 3 else {}, 200) == []


@pytest.mark.slow
def test_nobody_slow_stays_in_sync() -> None:
    def state(r: int, k: int) -> dict[str, float]:
        noise = random.Random(1000 * r + k)
        return {"slow": 1.0 + abs(noise.gauss(0.0, 0.03)), "link": noise.uniform(0.8, 1.2), "silent": noise.random()}

    for n in (2, 4, 8):
        assert run(n, state, 200) == []


def test_a_mode_that_cannot_run_any_more_is_left() -> None:
    window = Window(step=9, ranks=tuple(stats(r, slow_link(3), 9) for r in range(4)), allowed=frozenset({"sync"}))
    for active in (Plan.subgroup(4, [0, 1, 2], damping="none"), Plan.ps(4, 3), Plan.partial(4, 3)):
        plan = RulePolicy(4, damping="relative").decide(window, active)
        assert plan is not None and plan.mode == "sync" and "can no longer run" in plan.reason
        assert plan.damping == {"subgroup": "none", "ps": "relative", "partial": "inverse"}[active.mode]


def test_plans_it_never_chooses_are_left_alone() -> None:
    window = Window(step=40, ranks=tuple(stats(r, slow_link(3), 40) for r in range(4)), comm_bytes=GRADIENT_BYTES)
    for active in (Plan.local(4, steps=4), Plan.grouped(4, 2)):
        assert RulePolicy(4).decide(window, active) is None


@pytest.mark.parametrize("cause", ["slow", "link", "starved"])
@pytest.mark.parametrize(
    "active",
    [
        Plan.sync(4, balanced=True),
        Plan.sync(4, balanced=True, batch_shares=(8, 8, 8, 2)),
        Plan.sync(4, batch_shares=(8, 8, 8, 2)),
        Plan.sync(4, steal=True),
    ],
)
def test_an_exact_plan_against_stragglers_is_left_alone(active: Plan, cause: str) -> None:
    now = {"slow": {"slow": 4.0}, "link": {"link": 0.1}, "starved": {"slow": 4.0, "starved": 0.7}}[cause]
    policy = RulePolicy(4)
    for step in range(30, 60):
        ranks = tuple(stats(r, lambda r, k: now if r == 3 else {}, step) for r in range(4))
        assert policy.decide(Window(step=step, ranks=ranks, comm_bytes=GRADIENT_BYTES), active) is None


def test_a_policy_that_finds_a_plan_in_force_watches_it_for_a_quiet_time() -> None:
    for active in (Plan.subgroup(4, [0, 1, 2]), Plan.ps(4, 3)):
        policy, steps = RulePolicy(4), []
        for step in range(100, 140):
            ranks = tuple(stats(rank, lambda r, k: {}, step) for rank in range(4))
            if policy.decide(Window(step=step, ranks=ranks), active) is not None:
                steps.append(step)
        assert steps and steps[0] == 125


def test_two_ranks() -> None:
    assert labels(run(2, slow_link(1), 60)) == ["subgroup(0)"]
    starved = run(2, lambda r, k: {"slow": 4.0, "starved": 0.7} if r == 0 else {}, 60)
    assert labels(starved) == ["ps(1)"] and starved[0][1].servers == (1,)


def test_a_new_run_forgets_the_last_one() -> None:
    policy = RulePolicy(4)
    ranks = tuple(stats(r, slow_link(3), 90) for r in range(4))
    assert policy.decide(Window(step=90, ranks=ranks, comm_bytes=GRADIENT_BYTES), Plan.sync(4)) is None
    assert policy.decide(Window(step=10, ranks=ranks, comm_bytes=GRADIENT_BYTES), Plan.sync(4)) is None
    assert policy.decide(Window(step=12, ranks=ranks, comm_bytes=GRADIENT_BYTES), Plan.sync(4)) is None
    assert policy.decide(Window(step=13, ranks=ranks, comm_bytes=GRADIENT_BYTES), Plan.sync(4)) is not None


@pytest.mark.parametrize(
    ("n", "least_share", "expected"),
    [
        (4, 0.5, ["partial(2)"]),
        (5, 0.5, ["partial(3)"]),
        (4, 0.75, ["partial(3)"]),
        (8, 0.25, ["partial(6)"]),
        (4, 1.0, ["ps(3)"]),
    ],
)
def test_a_plan_waits_for_the_least_share_of_the_ranks(n: int, least_share: float, expected: list[str]) -> None:
    factors = {n - 2: 3.0, n - 1: 6.0}
    changes = run(n, lambda r, k: {"slow": factors.get(r, 1.0)}, 60, least_share=least_share)
    assert labels(changes) == expected


@pytest.mark.parametrize(("least_share", "label"), [(0.5, "subgroup(0,1)"), (0.75, "subgroup(0,1,2)"), (1.0, "ps(3)")])
def test_a_subgroup_has_the_least_share_of_the_ranks(least_share: float, label: str) -> None:
    changes = run(4, lambda r, k: {"link": 0.1 if r == 3 else 0.2} if r >= 2 else {}, 60, least_share=least_share)
    assert labels(changes) == [label]


def test_the_least_share_is_a_part_of_the_ranks() -> None:
    for share in (0.0, 1.5):
        with pytest.raises(ValueError, match=f"least_share is {share}"):
            RulePolicy(4, least_share=share)


def test_hosts_are_one_for_each_rank() -> None:
    with pytest.raises(ValueError, match="expected one for each of 4 ranks"):
        RulePolicy(4, hosts=["a"])


def test_a_subgroup_whose_members_all_become_slow_is_left_for_another_through_sync() -> None:
    """Of two ranks, a link is slow first on one, then on the other: the two subgroups have no member in common."""
    changes = run(
        2, lambda r, k: {"link": 0.1} if r == (k > 70) else {}, 160, allowed=frozenset({"sync", "subgroup"})
    )
    met = labels(changes)
    assert "subgroup(1)" in met and "subgroup(0)" in met
    between = met[met.index("subgroup(1)") + 1 : met.index("subgroup(0)")]
    assert "sync" in between


@pytest.mark.slow
@settings(max_examples=cases(25))
@given(data=st.data(), n=st.integers(2, 6))
def test_whatever_happens_plans_are_valid_and_changes_are_few(data: st.DataObject, n: int) -> None:
    """Random episodes of every cause: each is answered a bounded number of times and the job ends in sync."""
    kinds = [{"link": 0.1}, {"slow": 4.0}, {"slow": 4.0, "starved": 0.7}, {"silent": 5.0}, {"link": math.nan}]
    episode = st.tuples(st.integers(0, n - 1), st.integers(0, 150), st.integers(1, 60), st.sampled_from(kinds))
    episodes = data.draw(st.lists(episode, max_size=4))
    allowed = frozenset(data.draw(st.sets(st.sampled_from(MODES)))) | {"sync"}

    def state(r: int, k: int) -> dict[str, float]:
        return {key: v for rank, b, d, kind in episodes if rank == r and b <= k < b + d for key, v in kind.items()}

    changes = run(n, state, 420, allowed=allowed, every=data.draw(st.integers(1, 4)))
    assert len(changes) <= 4 * len(episodes)
    assert not changes or changes[-1][1].mode == "sync"
