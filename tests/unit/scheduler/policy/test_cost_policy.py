"""The policy of predictions: when it switches, when it does not, and what it says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.cost.conditions import Conditions
from scheduler.cost.cost_model import Prediction
from scheduler.cost.staleness_price import StalenessPrice
from scheduler.diagnosis.freezes import Freezes
from scheduler.plan.headroom import Headroom
from scheduler.plan.plan import Plan
from scheduler.plan.transmission import Transmission
from scheduler.policy.cost_policy import CostPolicy
from scheduler.policy.ski_rental import SkiRental
from scheduler.records import Window
from scheduler.simulator import Cluster, Episode, Job, Network, Scenario
from tests.support.windows import steady, window

SLOW = {5: 3.1}


def drive(policy: CostPolicy, active: Plan, windows: Sequence[Window]) -> list[Plan]:
    """Plans taken up, window by window."""
    taken = []
    for one in windows:
        plan = policy.decide(one, active)
        if plan is not None:
            active = plan
            taken.append(plan)
    return taken


# ---- choices --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 4, 8, 16])
@pytest.mark.parametrize("jitter", [0.02, 0.08])
def test_equal_ranks_stay_in_sync(n: int, jitter: float) -> None:
    policy = CostPolicy(n)
    windows = [window(steady(n, jitter=jitter), end=end) for end in range(32, 400, 8)]
    assert drive(policy, Plan.sync(n), windows) == []
    assert policy.explain() == "no rank is slow: sync"


def test_a_slow_rank_is_answered_with_a_reason() -> None:
    policy = CostPolicy(8)
    plan = policy.decide(window(steady(8, slow=SLOW), end=442), Plan.sync(8))
    assert plan is not None and plan.plan_id == 1
    found = plan.reason
    assert found.startswith("rank 5 computes 3.1x slower since step 410: partial(7) is predicted ")
    assert "x faster than sync, 90 % interval " in found
    speed = float(found.split("is predicted ")[1].split("x")[0])
    low, high = (float(part) for part in found.split("interval ")[1].split(";")[0].split("-"))
    assert 1.0 < low < 2.0 < speed < 3.3 < high < 5.0, "the cost model alone is not sure"
    runner_up = found.rsplit("; ", 1)[1]
    other = next(p for p in policy.last if p.plan.mode not in ("partial", "sync"))
    assert runner_up == f"{other.plan.label} {1.0 / other.relative:.1f}x"
    policy.decide(window(steady(8, slow=SLOW), end=446), plan)
    assert policy.explain() == found


def test_of_plans_alike_the_one_that_waits_for_more_ranks_is_taken() -> None:
    def almost(offered: Sequence[Plan], conditions: Conditions, win: Window, active: Plan) -> list[Prediction]:
        """Each rank that a step of `partial` waits for costs half a percent."""
        found = []
        for plan in offered:
            out = 8 - plan.quorum
            relative = {"sync": 1.0, "partial": 0.5 - (0.05 + 0.002 * out if out > 1 else 0.0)}.get(plan.mode, 0.9)
            found.append(
                Prediction(plan=plan, relative=relative, low=relative, high=relative, interval_s=0.1, progress=1.0,
                           drift=0.0, reach=1.0)
            )  # fmt: skip
        return sorted(found, key=lambda p: p.relative)

    slow = window(steady(8, slow={5: 3.1, 6: 3.1}), end=442)
    policy = CostPolicy(8, ranker=almost)
    plan = policy.decide(slow, Plan.sync(8))
    assert [p.plan.quorum for p in policy.last if p.plan.mode == "partial"] == [4, 6], "fewer ranks are a trifle faster"
    assert plan is not None and plan.label == "partial(6)"
    assert policy.decide(slow, plan) is None
    best = policy.decide(slow, Plan.partial(8, 4))
    assert best is None, "nor is the plan in force left for one alike"


def test_a_process_set_is_paid_for_once() -> None:
    def half(offered: Sequence[Plan], conditions: Conditions, win: Window, active: Plan) -> list[Prediction]:
        relative = {"sync": 1.0, "subgroup": 0.5}
        found = [
            Prediction(plan=p, relative=relative[p.mode], low=0.5, high=1.0, interval_s=0.1, progress=1.0, drift=0.0,
                       reach=1.0)
            for p in offered
        ]  # fmt: skip
        return sorted(found, key=lambda p: p.relative)

    policy, end = CostPolicy(8, ranker=half), 40

    def steps_until_a_switch() -> tuple[int, Plan]:
        nonlocal end
        for count in range(1, 30):
            end += 1
            plan = policy.decide(window(steady(8, slow=SLOW), end=end, allowed=("sync", "subgroup")), Plan.sync(8))
            if plan is not None:
                return count, plan
        raise AssertionError("no switch")

    first, plan = steps_until_a_switch()
    policy.decide(window(steady(8, slow=SLOW), end=end, allowed=("sync", "subgroup")), plan)
    second, _ = steps_until_a_switch()
    assert first >= 6 and second == 1, "50 ms are lost with each step, and a set takes 300"


@pytest.mark.parametrize("better", [{"subgroup": 0.5}, {"subgroup": 0.5, "partial": 0.7}])
def test_the_loss_of_an_averaging_is_that_of_its_steps(better: dict[str, float]) -> None:
    """Whether a window counts averagings, as in a job, or the steps between them, as in the simulator."""

    def ranker(offered: Sequence[Plan], conditions: Conditions, win: Window, active: Plan) -> list[Prediction]:
        found = [
            Prediction(plan=p, relative=better.get(p.mode, 0.9), low=0.4, high=1.0, interval_s=0.01, progress=1.0,
                       drift=0.0, reach=1.0)
            for p in offered
        ]  # fmt: skip
        return sorted(found, key=lambda p: p.relative)

    local, allowed = Plan.local(8, steps=4, plan_id=1), ("sync", "local", *better)

    def averagings_until_a_switch(each: int, *, counts_local: bool) -> int:
        policy = CostPolicy(8, ranker=ranker)
        for count in range(1, 100):
            end = 400 + each * count
            seen = window(steady(8, slow=SLOW), end=end, allowed=allowed, counts_local=counts_local)
            plan = policy.decide(seen, local)
            if plan is not None:
                assert plan.mode == list(better)[-1], "the one that costs less to switch to"
                return count
        raise AssertionError("no switch")

    in_a_job = averagings_until_a_switch(1, counts_local=False)
    simulated = averagings_until_a_switch(4, counts_local=True)
    assert in_a_job > 1 and abs(in_a_job - simulated) <= 1, "the first loss counts as that of a window's step"


def test_both_of_two_and_causes_are_named() -> None:
    policy = CostPolicy(8)
    both = window(steady(8, slow={2: 3.0, 3: 3.0}), starved={2: 0.9, 3: 0.9}, end=40)
    plan = policy.decide(both, Plan.sync(8))
    assert plan is not None
    assert plan.reason.startswith("ranks 2 and 3 compute 3.0x slower, short of a processor, since step 8: ")


def test_ranks_slow_in_turn_are_named() -> None:
    times = steady(4, 40)
    for step in range(40):
        times[step, step // 2 % 3] *= 4.0
    plan = CostPolicy(4).decide(window(times), Plan.sync(4))
    assert plan is not None and plan.mode != "sync"
    assert "ranks 0, 1 and 2 compute 4." in plan.reason and " since step " in plan.reason


def test_a_slow_link_leaves_for_a_subgroup() -> None:
    rates = [1e9, 1e9, 1e9, 1e7]
    slow = [
        window(steady(4), rates=rates, comm_bytes=4_000_000, end=end, allowed=("sync", "partial", "subgroup"))
        for end in range(40, 80, 4)
    ]
    taken = drive(CostPolicy(4), Plan.sync(4), slow)
    assert [plan.label for plan in taken] == ["subgroup(0,1,2)"]
    assert "rank 3 has a link of 10 MB/s" in taken[0].reason


def test_it_goes_back_when_nobody_is_slow_and_not_before() -> None:
    policy, relaxed = CostPolicy(8), Plan.partial(8, 7, plan_id=3, damping="none", max_staleness=4)
    assert drive(policy, relaxed, [window(steady(8, slow=SLOW), end=e) for e in range(40, 140, 4)]) == []
    calm = [policy.decide(window(steady(8), end=end), relaxed) for end in range(144, 244, 4)]
    assert calm[:24] == [None] * 24
    back = calm[24]
    assert back is not None and (back.mode, back.plan_id, back.damping, back.max_staleness) == ("sync", 4, "none", 4)
    assert back.reason == "no rank was slow since step 144: sync"


def alike(offered: Sequence[Plan], _: Conditions, __: Window, ___: Plan) -> list[Prediction]:
    return [
        Prediction(plan=plan, relative=1.0, low=0.9, high=1.1, interval_s=0.1, progress=1.0, drift=0.0, reach=1.0)
        for plan in offered
    ]


@pytest.mark.parametrize(
    "plan", [Plan.ps(4, 2), Plan.grouped(4, ((0, 1, 2), (3,))), Plan.ps(4, 1, rule="groups", groups=((0, 1, 2), (3,)))]
)
def test_updates_count_as_their_part_of_a_step_towards_calm(plan: Plan) -> None:
    policy = CostPolicy(4, ranker=alike)
    taken = [policy.decide(window(steady(4), end=end), plan.replace(plan_id=3)) for end in range(40, 65)]
    assert taken[:24] == [None] * 24 and taken[24] is not None
    assert taken[24].reason == "no rank was slow since step 40: sync"


def test_averagings_count_as_their_steps_towards_calm() -> None:
    policy, local = CostPolicy(8, ranker=alike), Plan.local(8, steps=4, plan_id=3)
    taken = [policy.decide(window(steady(8), end=end), local) for end in range(40, 44)]
    assert taken[:3] == [None] * 3 and taken[3] is not None
    assert taken[3].reason == "no rank was slow since step 40: sync"
    policy = CostPolicy(8, ranker=alike)
    one_by_one = [policy.decide(window(steady(8), end=end, counts_local=True), local) for end in range(40, 53)]
    assert one_by_one[:12] == [None] * 12 and one_by_one[12] is not None, "as the simulator counts them"


def test_a_mode_that_cannot_run_any_more_is_left() -> None:
    policy = CostPolicy(8)
    only = window(steady(8, slow=SLOW), allowed=("sync", "partial"), end=40)
    plan = policy.decide(only, Plan.ps(8, 7, plan_id=2))
    assert plan is not None and plan.label == "partial(7)"
    assert plan.reason.startswith("ps(7) can no longer run; rank 5 computes 3.1x slower")


@pytest.mark.parametrize(
    "active",
    [
        Plan.partial(8, 7, plan_id=2),
        Plan.ps(8, 6, plan_id=2),
        Plan.ps(8, 6, plan_id=2, transmission=Transmission(background=True)),
    ],
    ids=lambda plan: plan.label,
)
def test_a_plan_in_force_outlasts_the_block_of_its_mode(active: Plan) -> None:
    """Other servers could not be started; those that run go on, and no other plan of theirs is offered."""
    policy = CostPolicy(8)
    for end in range(40, 80, 4):
        blocked = window(
            steady(8, slow={5: 3.1, 6: 3.1}), allowed=("sync",), blocked=frozenset(("partial", "ps")), end=end
        )
        assert policy.decide(blocked, active) is None
    assert {p.plan.label for p in policy.last} == {"sync", active.label}


def test_a_plan_after_one_that_cannot_run_is_judged() -> None:
    policy = CostPolicy(8)
    plan = policy.decide(window(steady(8, slow=SLOW), allowed=("sync", "partial"), end=40), Plan.ps(8, 7, plan_id=2))
    assert plan is not None and policy._check._expected is not None
    assert policy._check._expected.plan is plan and policy._check._expected.replaced.plain


def test_hysteresis() -> None:
    """A plan that is a little better is not taken up, from either side."""

    def ranker(offered: Sequence[Plan], _: Conditions, __: Window, ___: Plan) -> list[Prediction]:
        values = {"partial(7)": 0.50, "partial(6)": 0.49}
        return [
            Prediction(
                plan=plan, relative=values.get(plan.label, 1.0), low=0.4, high=0.6, interval_s=0.1, progress=1.0,
                drift=0.0, reach=1.0,
            )
            for plan in offered
        ]  # fmt: skip

    for active in (Plan.partial(8, 7, plan_id=1), Plan.partial(8, 6, plan_id=1)):
        policy = CostPolicy(8, ranker=ranker)
        assert drive(policy, active, [window(steady(8, slow={1: 3.0, 2: 3.0}), end=e) for e in range(40, 200, 4)]) == []
    # A mild straggler's 4 % is no reason either.
    mild = [window(steady(8, slow={1: 1.04}), end=e) for e in range(40, 200, 4)]
    assert drive(CostPolicy(8), Plan.sync(8), mild) == []


@pytest.mark.parametrize(("waits", "switches"), [(0.0, True), (0.4, False)])
def test_where_processors_are_short_a_tenth_is_no_gain(waits: float, switches: bool) -> None:
    def ranker(offered: Sequence[Plan], _: Conditions, __: Window, ___: Plan) -> list[Prediction]:
        return [
            Prediction(
                plan=plan, relative=0.9 if plan.mode == "partial" else 1.0, low=0.8, high=1.0, interval_s=0.1,
                progress=1.0, drift=0.0, reach=1.0,
            )
            for plan in offered
        ]  # fmt: skip

    starved = dict.fromkeys(range(4), waits)
    policy = CostPolicy(4, ranker=ranker)
    windows = [window(steady(4, slow={1: 3.0}), end=e, starved=starved) for e in range(40, 400, 4)]
    assert bool(drive(policy, Plan.sync(4), windows)) == switches


def test_after_a_return_to_sync_a_switch_still_has_its_price() -> None:
    """A plan `sync` of epoch 2 is the plan `sync` among the candidates."""
    rates = [1e9, 1e9, 1e9, 1e7]
    link = window(steady(4), rates=rates, comm_bytes=1_000_000, end=40, allowed=("sync", "ps"))
    fresh, later = CostPolicy(4), CostPolicy(4)
    one = fresh.decide(link, Plan.sync(4))
    two = later.decide(link, Plan.sync(4, plan_id=2, reason="nobody was slow"))
    assert one is None and two is None
    assert "; sync until staying has cost 0." in later.explain() and later.explain() == fresh.explain()


@pytest.mark.parametrize(
    ("servers", "ready", "warm", "chosen"),
    [
        (0.10, 0.105, False, "subgroup"),  # Hardly worse, and there at once.
        (0.10, 0.105, True, "ps"),
        (0.10, 0.30, False, "ps"),  # What it costs more in 48 steps is more than what is lost in two seconds.
        (0.50, 0.52, True, "ps"),
        (0.50, 0.52, False, "subgroup"),
        (0.90, 0.98, False, "ps"),  # The other one is no gain over what there is.
    ],
)
def test_servers_that_have_to_start_are_not_waited_for_in_vain(
    servers: float, ready: float, warm: bool, chosen: str
) -> None:
    ps, subgroup = Plan.ps(4, 3, servers=(0, 1)), Plan.subgroup(4, [0, 1, 2])
    relative = {"sync": 1.0, "ps": servers, "subgroup": ready}

    def ranker(offered: Sequence[Plan], now: Conditions, one: Window, old: Plan) -> list[Prediction]:
        made = [
            Prediction(
                plan=plan, relative=relative[plan.mode], low=0.9 * relative[plan.mode], high=1.1 * relative[plan.mode],
                interval_s=relative[plan.mode] * 0.7, progress=1.0, drift=0.0, reach=1.0,
            )
            for plan in (Plan.sync(4), ps, subgroup)
        ]  # fmt: skip
        return sorted(made, key=lambda each: each.relative)

    policy = CostPolicy(4, ranker=ranker)
    policy.coming = ps if warm else None
    plan = None
    for end in range(40, 80):
        slow = window(steady(4, usual_s=0.05), rates=[1e6 if rank == 3 else 2e7 for rank in range(4)], end=end)
        plan = plan or policy.decide(slow, Plan.sync(4))
    assert plan is not None and plan.mode == chosen
    told = "the servers of ps(3) would have to start first" in plan.reason
    assert told == (plan.mode == "subgroup")


def test_bad_windows_and_arguments() -> None:
    with pytest.raises(ValueError, match="window is for 4"):
        CostPolicy(8).decide(window(steady(4)), Plan.sync(8))
    with pytest.raises(ValueError, match="plan is for 4"):
        CostPolicy(8).decide(window(steady(8)), Plan.sync(4))
    with pytest.raises(ValueError, match="hosts"):
        CostPolicy(8, hosts=["one"])
    assert CostPolicy(1).decide(window(steady(1)), Plan.sync(1)) is None


def test_explain_at_every_time() -> None:
    policy = CostPolicy(8)
    assert policy.explain() == "no window was evaluated yet"
    policy.decide(Window(step=0, ranks=window(steady(8, 1), rates=[math.nan] * 8).ranks), Plan.sync(8))
    assert policy.explain() == "not every rank has reported yet: sync"
    nothing_else = window(steady(8, slow=SLOW), allowed=("sync",), end=40)
    policy.decide(nothing_else, Plan.sync(8))
    assert policy.explain() == "rank 5 computes 3.1x slower since step 8: sync, no other mode can run"
    large = window(steady(8, slow={5: 1.5}), allowed=("sync", "local"), end=40, comm_bytes=10_000_000)
    policy.decide(large, Plan.sync(8))
    assert policy.explain().startswith("rank 5 computes 1.5x slower since step 8: sync, local(")
    assert policy.explain().endswith("as fast, too little for a switch")
    relaxed = Plan.partial(8, 7, reason="because")
    policy.decide(window(steady(8), end=44), relaxed)
    assert policy.explain() == "because; no rank is slow since step 44"


def test_servers_that_are_not_offered_or_placed_elsewhere_are_explained() -> None:
    times, frozen = steady(4, slow={3: 4.0}), ("sync", "ps")
    tight, free = Headroom(free_cpu_cores=0.0, neighbours=2), Headroom(free_cpu_cores=3.0)
    policy = CostPolicy(4, hosts=("a", "a", "b", "c"))
    full = window(times, comm_bytes=40_000_000, allowed=frozen, headroom=(tight,) * 4)
    assert policy.decide(full, Plan.sync(4)) is None
    assert policy.explain() == (
        "rank 3 computes 4.0x slower since step 0: sync, no other mode can run; servers are not offered, because they "
        "would make another job slower on a, b"
    )
    policy = CostPolicy(4, hosts=("a", "a", "b", "c"))
    elsewhere = [
        window(times, end=32 + 8 * k, comm_bytes=40_000_000, allowed=frozen, headroom=(tight, tight, free, tight))
        for k in range(8)
    ]
    (plan,) = drive(policy, Plan.sync(4), elsewhere)[:1]
    assert plan.mode == "ps" and plan.servers == (2,)
    assert plan.reason.endswith("; its servers avoid a whose cores are busy"), plan.reason


def test_meanwhile_a_mode_without_a_price_is_taken() -> None:
    """With a slow rank: `partial` at once, servers once their hand-over pays; a subgroup has next to no price."""
    times = steady(4, slow={3: 2.0}, usual_s=0.01)
    slow = [
        window(times, comm_bytes=20_000, comm_s=[0.004] * 4, end=end, allowed=("sync", "partial", "ps"))
        for end in range(40, 600, 4)
    ]
    policy, ends = CostPolicy(4), []
    plan = Plan.sync(4)
    for one in slow:
        taken = policy.decide(one, plan)
        if taken is not None:
            plan = taken
            ends.append((one.step, plan.label))
    (first, partial), (later, servers) = ends
    assert (partial, servers) == ("partial(3)", "ps(grace=1)") and first <= 44 and later > 100
    rates = [1e9, 1e9, 1e9, 1e7]
    link = [
        window(steady(4), rates=rates, comm_bytes=1_000_000, end=end, allowed=("sync", "local", "subgroup"))
        for end in range(40, 120, 4)
    ]
    assert [plan.mode for plan in drive(CostPolicy(4), Plan.sync(4), link)] == ["subgroup"]


# ---- ski-rental -----------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(
    losses=st.lists(st.one_of(st.just(0.0), st.floats(0.0, 1.0)), min_size=1, max_size=120),
    price=st.floats(0.1, 20.0),
)
def test_at_most_twice_hindsight(losses: list[float], price: float) -> None:
    """A disturbance of any course: what is lost and paid against paying at the start, or never."""
    rental, lost, paid = SkiRental(), 0.0, False
    rental.reset(0)
    for step, loss in enumerate(losses, start=1):
        lost += loss
        if rental.pays(step, loss, price):
            paid = True
            break
    cost = lost + (price if paid else 0.0)
    best = min(sum(losses), price)
    # The loss of the last step before a decision cannot be spared by anyone who sees it only then.
    assert cost <= 2.0 * best + max(losses) + 1e-9
    assert paid == (sum(losses) >= price or lost >= price)


def test_asking_again_costs_nothing_and_rest_forgets() -> None:
    rental = SkiRental()
    rental.reset(10)
    assert not any(rental.pays(11, 1.0, 2.5) for _ in range(50))
    assert rental.lost_s == 1.0
    rental.reset(12)
    assert not rental.pays(14, 1.0, 2.5)
    assert rental.pays(15, 1.0, 2.5)
    with pytest.raises(ValueError, match="0 or more"):
        rental.pays(16, math.nan, 1.0)


def test_what_the_latest_step_lost_is_counted_once() -> None:
    rental = SkiRental()
    rental.reset(10)
    assert not rental.pays(14, 0.1, 5.0, once_s=1.0) and rental.lost_s == pytest.approx(1.4)
    assert not rental.pays(14, 0.1, 5.0, once_s=1.0) and rental.lost_s == pytest.approx(1.4)


def test_two_slow_reports_after_a_quiet_time_buy_no_costly_switch() -> None:
    """Between decisions the job makes 40 steps without any loss, which the slow ones must not be multiplied by."""
    times = steady(4)
    policy = CostPolicy(4)
    fields = {"rates": [1e9] * 4, "allowed": ("sync", "subgroup")}
    assert policy.decide(window(times, end=100, **fields), Plan.sync(4)) is None
    times[-2:, 3] *= 3.0
    assert policy.decide(window(times, end=140, **fields), Plan.sync(4)) is None
    lasting = steady(4, slow={3: 3.0})
    taken = drive(policy, Plan.sync(4), [window(lasting, end=end, **fields) for end in range(141, 150)])
    assert [plan.mode for plan in taken] == ["subgroup"], "those that follow are counted all the same"


def job(episodes: tuple[Episode, ...], *, seed: int = 0, allowed: Sequence[str] = ("sync", "ps")) -> Scenario:
    return Scenario(
        cluster=Cluster(world_size=4, jitter=0.02),
        network=Network(comm_bytes=1_000_000, compute_s=0.1, target_steps=300.0),
        episodes=episodes,
        seed=seed,
        allowed=frozenset(allowed),
    )


def test_a_short_disturbance_causes_no_costly_switch() -> None:
    short = job((Episode(rank=1, kind="compute", start_s=5.0, end_s=5.5, factor=2.0),))
    outcome = Job(short, policy=CostPolicy(4)).run()
    assert outcome.switches == ()
    lasting = job((Episode(rank=1, kind="compute", start_s=5.0, end_s=1e6, factor=4.0),))
    outcome = Job(lasting, policy=CostPolicy(4)).run()
    assert outcome.switches[0][1].startswith("ps(")
    assert 5.0 < outcome.switches[0][0] < 8.0


@pytest.mark.slow
@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 1000), gap=st.floats(1.0, 30.0), length=st.floats(0.2, 30.0), factor=st.floats(1.5, 6.0))
def test_any_rhythm_of_a_disturbance_costs_at_most_twice_the_better_mode(
    seed: int, gap: float, length: float, factor: float
) -> None:
    """On and off in the worst rhythm, with a costly hand-over each way."""
    episodes = tuple(
        Episode(rank=2, kind="compute", start_s=i * (gap + length), end_s=i * (gap + length) + length, factor=factor)
        for i in range(40)
    )
    sc = job(episodes, seed=seed)
    chosen = Job(sc, policy=CostPolicy(4)).run().time_s
    best = min(Job(sc, plan).run(limit_s=1e4).time_s for plan in (Plan.sync(4), Plan.ps(4, 3)))
    assert chosen <= 2.0 * best


# ---- freezes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [((0, 1, 2), (3,)), ((0, 1), (2,), (3,))])
def test_an_update_of_dynamic_groups_is_that_of_a_group(
    groups: tuple[tuple[int, ...], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    dynamic = Plan.ps(4, 1, rule="groups", groups=groups)
    found: list[tuple[float, float]] = []

    def observe(self: StalenessPrice, **values: float) -> None:
        found.append((values["length"], values["gradients"]))

    monkeypatch.setattr(StalenessPrice, "observe", observe)
    for plan in (dynamic, Plan.grouped(4, groups), dynamic.replace(lr_rule="none"), Plan.ps(4, 1)):
        policy = CostPolicy(4)
        for end in (100, 200):
            losses = tuple(3.0 - 0.01 * step for step in range(end - 96, end))
            one = replace(window(steady(4), end=end), losses=losses, loss_steps=tuple(range(end - 96, end)))
            policy.decide(one, plan)
    count = len(groups)
    assert found == [(1.0 / count, 4.0 / count)] * 2 + [(1.0, 4.0 / count), (0.25, 1.0)]


def test_freezes_are_counted_and_forgotten() -> None:
    freezes, plan = Freezes(), Plan.sync(4)
    for step, silent in ((0, 0.0), (100, 1.5), (100, 2.0), (101, 0.0), (200, 3.0), (201, 0.0)):
        freezes.note(window(steady(4), end=step, silent_s={1: silent}), plan, 0.1)
        if step == 101:
            assert dict(freezes.freezing) == {1: 1} and list(freezes.froze) == [1]
            assert freezes.per_step_s == pytest.approx(0.5 * 2.0 / 101.0)
    assert dict(freezes.freezing) == {1: 2}
    assert freezes.per_step_s == pytest.approx(1.5 * 2.5 / 201.0)
    freezes.note(window(steady(4), end=2000), plan, 0.1)
    assert not freezes.freezing and freezes.per_step_s == 0.0


def test_a_freeze_without_end_is_one_freeze_however_long() -> None:
    freezes, plan = Freezes(), Plan.ps(4, 1)
    for step in range(0, 12000, 50):
        freezes.note(window(steady(4), end=step, silent_s={3: max(0.0, 0.02 * (step - 100))}), plan, 0.1)
    assert dict(freezes.freezing) == {3: 1}
    freezes.note(window(steady(4), end=12050), plan, 0.1)
    assert not freezes.freezing, "it began long ago"


def test_freezes_are_counted_per_step_where_groups_make_updates() -> None:
    groups = ((0, 1, 2), (3,))
    for plan in (Plan.grouped(4, groups), Plan.ps(4, 1, rule="groups", groups=groups)):
        freezes = Freezes()
        for step, silent in ((0, 0.0), (100, 4.0), (101, 0.0), (200, 0.0)):
            freezes.note(window(steady(4), end=step, silent_s={1: silent}), plan, 0.1)
        assert freezes.per_step_s == pytest.approx(0.5 * 4.0 / 100.0), plan.label


def test_freezes_are_counted_per_step_of_a_rank() -> None:
    freezes, plan = Freezes(), Plan.local(4, steps=10)
    for step, silent in ((0, 0.0), (10, 4.0), (11, 0.0), (20, 0.0)):
        freezes.note(window(steady(4), end=step, silent_s={1: silent}), plan, 0.1)
    assert freezes.per_step_s == pytest.approx(0.5 * 4.0 / 200.0)


def test_what_came_once_counts_less_and_less() -> None:
    freezes, plan = Freezes(), Plan.sync(4)
    costs = []
    for step in (0, 2, 3, 60, 160, 400):
        freezes.note(window(steady(4), end=step, silent_s={1: 2.0 * (step == 2)}), plan, 0.1)
        costs.append(freezes.per_step_s)
    assert costs[1:5] == pytest.approx([1.0 / 25.0, 1.0 / 25.0, 1.0 / 60.0, 1.0 / 160.0])
    assert list(freezes.froze) == [1] and not freezes.freezing and costs[5] == 0.0, "below 5 % of a step by now"


def test_a_pause_of_all_is_nobodys_freeze() -> None:
    freezes = Freezes()
    freezes.note(window(steady(4), silent_s=dict.fromkeys(range(4), 5.0)), Plan.sync(4), 0.1)
    assert not list(freezes.froze)


def test_a_rank_that_freezes_sends_the_job_to_servers() -> None:
    episodes = tuple(Episode(rank=1, kind="frozen", start_s=t, end_s=t + 3.0) for t in np.arange(4.0, 200.0, 9.0))
    outcome = Job(job(episodes, allowed=("sync", "partial", "ps")), policy=CostPolicy(4)).run()
    labels = [label for _, label, _ in outcome.switches]
    assert any(label.startswith("ps(") for label in labels)
    reason = next(reason for _, label, reason in outcome.switches if label.startswith("ps("))
    assert reason.startswith("rank 1 froze once recently: ps(")
    assert outcome.time_s < 0.9 * Job(job(episodes), Plan.sync(4)).run().time_s


def test_a_slow_link_is_answered_before_anybody_can_be_judged_by_times() -> None:
    rates, nothing = [2.5e7, 2.5e7, 2.5e7, 2.5e6], [math.nan] * 4
    early = window(steady(4, 1, slow={1: 4.0}), rates=rates, comm_bytes=1_000_000, comm_s=(0.7, 0.7), end=2)
    plan = CostPolicy(4).decide(early, Plan.sync(4))
    assert plan is not None and plan.label == "subgroup(0,1,2)", "one long step of rank 1 says nothing"
    assert plan.reason.startswith("rank 3 has a link of 2.5 MB/s, 10.0x slower than the others'")
    policy = CostPolicy(4)
    assert policy.decide(window(steady(4, 1, slow={1: 4.0}), rates=nothing, end=2), Plan.sync(4)) is None
    assert policy.explain() == "not every rank has reported yet: sync"


def test_what_a_freeze_costs_is_lost_against_servers() -> None:
    """Not what its like will cost: that takes a dozen steps to add up to the price of the switch."""
    policy = CostPolicy(4)
    assert policy.decide(window(steady(4), end=40), Plan.sync(4)) is None
    taken = policy.decide(window(steady(4), end=42, silent_s={3: 2.0}), Plan.sync(4))
    assert taken is not None and taken.mode == "ps" and taken.reason.startswith("rank 3 froze once recently: ps(")


@pytest.mark.slow
def test_a_single_freeze_is_left_behind() -> None:
    """Servers for a while, as another may follow; back in `sync` when none does, at little loss."""
    sc = job((Episode(rank=1, kind="frozen", start_s=4.0, end_s=7.0),), allowed=("sync", "partial", "ps"))
    sc = replace(sc, network=replace(sc.network, target_steps=1000.0))
    outcome = Job(sc, policy=CostPolicy(4)).run()
    assert [label.split("(")[0] for _, label, _ in outcome.switches] == ["ps", "sync"]
    assert outcome.time_s < 1.05 * Job(sc, Plan.sync(4)).run().time_s


def test_freezes_are_noticed_while_a_plan_is_on_its_way() -> None:
    policy, plan = CostPolicy(4), Plan.sync(4)
    assert policy.decide(window(steady(4), end=40), plan) is None
    for end, silent_s in ((44, 1.5), (60, 0.0), (80, 1.6), (96, 0.0)):
        policy.watch(window(steady(4), end=end, silent_s={3: silent_s}), plan)
    taken = drive(policy, plan, [window(steady(4), end=end) for end in range(100, 160, 4)])
    assert taken and taken[0].mode == "ps" and "rank 3 froze 2 times recently" in taken[0].reason
