"""The simulator against the rules of the live job, against closed forms, and against itself."""

from __future__ import annotations

import heapq
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.cost.conditions import Conditions
from scheduler.cost.cost_model import predict
from scheduler.plan.mode_names import parse_mode
from scheduler.plan.plan import Plan
from scheduler.plan.transmission import Transmission
from scheduler.policy.rule_policy import RulePolicy
from scheduler.records import Window
from scheduler.rules.step_closing import ClosingRule
from scheduler.simulator import (
    Cluster,
    Episode,
    Job,
    Network,
    Scenario,
    draw_scenario,
    run_plans,
)
from scheduler.simulator.account import Account
from scheduler.simulator.base import State
from scheduler.simulator.episodes import generate
from scheduler.simulator.job import make_mode
from scheduler.simulator.machines import Machines
from scheduler.simulator.rounds import Rounds
from scheduler.simulator.servers import Arrivals, Server
from scheduler.simulator.stream import Stream
from tests.support.effort import cases

TINY = Network(comm_bytes=8, target_steps=200.0)


def job(scenario: Scenario, *plans: Plan) -> State:
    return State(Machines([scenario] * len(plans)), Account([scenario] * len(plans)))


def scenario(n: int, *, slow: dict[int, float] | None = None, jitter: float = 0.0, **fields: object) -> Scenario:
    slow = slow or {}
    cluster = Cluster(
        world_size=n,
        relative_s=tuple(slow.get(rank, 1.0) for rank in range(n)),
        jitter=jitter,
        common_jitter=0.0,
        cycle_s=0.0,
        latency_s=1e-9,
        server_s=0.0,
    )
    return Scenario(cluster=cluster, network=replace(TINY, compute_s=1.0), **fields)  # type: ignore[arg-type]


# ---- the closing rule -----------------------------------------------------------------------------------------------


def closing_times_by_the_rule(sc: Scenario, quorum: int, steps: int) -> list[tuple[float, tuple[int, ...]]]:
    """Ends of steps and ranks left out, event by event through `ClosingRule`, with the batches of `sc`."""
    n = sc.world_size
    machines = Machines([sc])
    rule = ClosingRule(Plan.partial(n, quorum))
    everybody = np.arange(n)
    machines.begin(everybody, np.zeros(n), np.zeros(n, dtype=np.int64))
    version, opened, found = [0] * n, 0.0, []
    for step in range(steps):
        events = [(max(float(machines.finish_s[0, r]), opened), r) for r in range(n)]
        heapq.heapify(events)
        arrived: set[int] = set()
        again = math.inf
        while True:
            now, rank = events[0] if events else (math.inf, -1)
            if again < now:
                now, rank = again, -1
            else:
                heapq.heappop(events)
            if rank >= 0:
                time_s = float(machines.duration_s[0, rank])
                if version[rank] == step:
                    rule.arrive(rank, step, time_s, now)
                    arrived.add(rank)
                else:
                    rule.late(rank, time_s)
                    rule.join(rank, step, now)
                    version[rank] = step
                    machines.begin(np.array([rank]), np.array([now]), np.array([step]))
                    heapq.heappush(events, (float(machines.finish_s[0, rank]), rank))
            order, at = rule.evaluate(now)
            again = math.inf if at is None else at
            if order is not None or len(arrived) == n:
                break
        left_out = tuple(sorted(set(range(n)) - arrived))
        machines.advance_to(np.array([now]))
        opened = float((machines.thawed(np.array([now])) + machines.ring_s())[0])
        missing = np.zeros((1, n), dtype=bool)
        missing[0, list(left_out)] = True
        opened += float(machines.helper_delay_s(missing)[0])
        found.append((opened, left_out))
        fresh = np.array(sorted(arrived))
        machines.begin(fresh, np.full(len(fresh), opened), np.full(len(fresh), step + 1))
        for rank in arrived:
            version[rank] = step + 1
    return found


@pytest.mark.slow
@settings(max_examples=cases(40), deadline=None)
@given(
    seed=st.integers(0, 10_000),
    n=st.integers(2, 9),
    jitter=st.sampled_from((0.001, 0.02, 0.1, 0.3)),  # Not 0: ties are nobody's business.
    pattern=st.sampled_from(("none", "one", "several", "rotating", "bursts", "mixed", "frozen")),
    data=st.data(),
)
def test_rounds_close_when_the_closing_rule_does(
    seed: int, n: int, jitter: float, pattern: str, data: st.DataObject
) -> None:
    quorum = data.draw(st.integers(1, n - 1))
    episodes = generate(np.random.default_rng(seed), n, step_s=1.0, horizon_s=60.0, pattern=pattern)
    sc = scenario(n, jitter=jitter, episodes=episodes, seed=seed)
    expected = closing_times_by_the_rule(sc, quorum, 60)
    plans = [Plan.partial(n, quorum), Plan.partial(n, max(1, quorum - 1)), Plan.partial(n, quorum)]
    state = job(sc, *plans)
    rounds = Rounds(state, plans)
    for step, (end_s, missing) in enumerate(expected):
        rounds.step()
        for row in (0, 2):
            left_out = tuple(np.flatnonzero(rounds.left_out[row]).tolist())
            assert (state.now_s[row], left_out) == (pytest.approx(end_s), missing), f"step {step}"


def test_equal_ranks_lose_no_step_to_jitter() -> None:
    sc = scenario(8, jitter=0.03)
    outcome = run_plans([sc], [Plan.partial(8, 6)])[0]
    assert outcome.drift == 0.0 and outcome.updates == pytest.approx(sc.network.target_steps)


# ---- servers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ps(1)", "ps(3)", "ps(7)", "ps(8)", "asgd", "dynsgd", "ps(backup=2)"])
def test_arrivals_are_the_server_rule(name: str) -> None:
    sc = draw_scenario(5, network=TINY, world_size=8, pattern="mixed")
    sc = replace(sc, cluster=replace(sc.cluster, jitter=0.2, server_s=0.0))
    plan = parse_mode(name, 8)
    assert plan is not None
    one, two = job(sc, plan), job(sc, plan)
    fast, exact = Arrivals(one, [plan]), Server(two, [plan])
    for _ in range(300):
        fast.step()
        exact.step()
        assert one.now_s[0] == pytest.approx(two.now_s[0], rel=1e-5)
    assert one.account.progress[0] == pytest.approx(two.account.progress[0], rel=1e-6)
    assert one.account.drift[0] == pytest.approx(two.account.drift[0], rel=1e-6)


@pytest.mark.parametrize(("x", "tau"), [(1, 0.13), (2, 0.29), (3, 0.50), (4, 0.67), (5, 1.0), (7, 1.0), (8, 2.0)])
def test_update_intervals_of_star_section_4_4(x: int, tau: float) -> None:
    # x = 5 and 6 leave fast workers waiting; the table gives means over 1,000 updates.
    sc = scenario(8, slow={7: 2.0})
    state = job(sc, Plan.ps(8, x))
    mode = make_mode(state, [Plan.ps(8, x)])
    for _ in range(1000):
        mode.step()
    assert state.now_s[0] / 1000 == pytest.approx(tau, abs=0.01)


def test_sync_opt_of_chen_et_al() -> None:
    """32 workers, each slow by 4 in 2 % of its steps: 2.49, 1.50, 1.15, 1.06 with 0, 1, 2, 4 backup workers."""
    rng = np.random.default_rng(1)
    rows = tuple(tuple(row) for row in np.where(rng.random((1000, 32)) < 0.02, 4.0, 1.0).tolist())
    steps = [np.sort(np.asarray(rows), axis=1)[:, 31 - b].mean() for b in (0, 1, 2, 4)]
    sc = scenario(32, rows=rows)
    state = job(sc, Plan.sync(32))
    mode = make_mode(state, [Plan.sync(32)])
    for _ in range(1000):
        mode.step()
    assert state.now_s[0] / 1000 == pytest.approx(steps[0], rel=0.01) == pytest.approx(2.49, abs=0.15)


def test_groups_of_the_hipc_paper() -> None:
    """One rank of eight 4x slow: gradients per second relative to the undisturbed job, table of Basu et al."""
    sc = scenario(8, slow={7: 4.0})
    layouts = {
        4.0: [range(8)],
        1.6: [range(4), range(4, 8)],
        1.231: [[0, 1], [2, 3], [4, 5], [6, 7]],
        1.103: [range(7), [7]],
    }
    for ratio, groups in layouts.items():
        plan = Plan.grouped(8, [list(group) for group in groups])
        state = job(sc, plan)
        mode = make_mode(state, [plan])
        while state.now_s[0] < 200.0:
            mode.step()
        assert 8 * state.now_s[0] / state.account.gradients[0] == pytest.approx(ratio, rel=0.03)


# ---- contention -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=cases(60), deadline=None)
@given(seed=st.integers(0, 10_000), pattern=st.sampled_from(("one", "several", "rotating", "bursts", "frozen")))
def test_batches_take_as_much_work_as_there_is(seed: int, pattern: str) -> None:
    """The integral of the speed over every batch is its work."""
    rng = np.random.default_rng(seed)
    episodes = generate(rng, 3, step_s=1.0, horizon_s=40.0, pattern=pattern)
    machines = Machines([scenario(3, episodes=episodes)])
    times = np.linspace(0.0, 400.0, 40_001)
    speed = np.ones((3, len(times)))
    for e in episodes:
        inside = (times >= e.start_s) & (times < e.end_s)
        speed[e.rank, inside] *= 0.0 if e.kind == "frozen" else 1.0 if e.kind == "link" else 1.0 / e.factor
    start = np.zeros(3)
    for _ in range(20):
        machines.begin(np.arange(3), start, np.zeros(3, dtype=np.int64))
        for rank in range(3):
            begin, end = machines.start_s[0, rank], machines.finish_s[0, rank]
            if end < 390.0:
                inside = (times >= begin) & (times < end)
                assert speed[rank, inside].sum() * 0.01 == pytest.approx(1.0, abs=0.06)
        start = machines.finish_s[0] + rng.uniform(0.0, 1.0, size=3)


def test_trace_rows_repeat() -> None:
    sc = scenario(2, rows=((1.0, 3.0), (2.0, 1.0)))
    state = job(sc, Plan.sync(2))
    mode = make_mode(state, [Plan.sync(2)])
    ends = [0.0]
    for _ in range(4):
        mode.step()
        ends.append(float(state.now_s[0]))
    assert np.diff(ends) == pytest.approx([3.0, 2.0, 3.0, 2.0])


# ---- whole jobs -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_replicas_do_not_touch_each_other() -> None:
    plans = [Plan.sync(8), Plan.partial(8, 7), Plan.partial(8, 5), Plan.ps(8, 7), Plan.local(8, steps=4)]
    sc = draw_scenario(3, network=replace(TINY, comm_bytes=10_000_000), world_size=8, pattern="bursts")
    together = run_plans([sc] * 5, plans)
    alone = [run_plans([sc], [plan])[0] for plan in plans]
    assert together == alone


def test_a_slow_rank_is_left_out_and_a_slow_link_too() -> None:
    network = replace(TINY, compute_s=0.1, comm_bytes=20_000_000)
    slow = Scenario(
        cluster=Cluster(world_size=8),
        network=network,
        episodes=(Episode(rank=3, kind="compute", start_s=2.0, end_s=math.inf, factor=4.0),),
    )
    link = replace(slow, episodes=(replace(slow.episodes[0], kind="link", factor=20.0),))
    starved = replace(slow, episodes=(replace(slow.episodes[0], kind="starved"),))
    members = [0, 1, 2, 4, 5, 6, 7]
    plans = [Plan.sync(8), Plan.partial(8, 7), Plan.subgroup(8, members), Plan.ps(8, 7)]
    sync, partial, subgroup, ps = (o.time_s for o in run_plans([slow] * 4, plans))
    assert partial < 0.5 * sync and subgroup < 0.5 * sync and ps < sync
    sync, partial, subgroup, ps = (o.time_s for o in run_plans([link] * 4, plans))
    assert partial == pytest.approx(sync, rel=0.05) and subgroup < 0.5 * sync and ps < 0.6 * sync
    # Architecture section 3: partial needs a processor for the helper of the slow rank.
    assert run_plans([starved], [plans[1]])[0].time_s > 1.1 * run_plans([slow], [plans[1]])[0].time_s


@pytest.mark.slow
def test_equal_workers_train_fastest_in_sync() -> None:
    for seed in range(cases(3)):
        sc = draw_scenario(seed, world_size=8, pattern="none", steps=120)
        # Where links, a collective's latency or jitter are the bottleneck local steps are faster, and rightly so.
        equal = replace(sc.cluster, relative_s=(), link_bytes_per_s=(1e12,) * 8, jitter=0.01)
        sc = replace(sc, cluster=equal, network=replace(sc.network, compute_s=max(0.3, sc.network.compute_s)))
        plans = [Plan.sync(8), Plan.partial(8, 4), Plan.ps(8, 4), Plan.ps(8, 1), Plan.local(8, steps=8)]
        sync, *others = run_plans([sc] * len(plans), plans)
        again = sync.time_s
        assert all(other.expected_s(again) >= 0.98 * sync.expected_s(again) for other in others), seed


@pytest.mark.slow
def test_drift_lowers_the_chance_to_reach_the_target() -> None:
    sc = scenario(8)
    plans = [Plan.sync(8), Plan.ps(8, 1), Plan.ps(8, 1, lr_rule="none")]
    sync, asgd, wild = run_plans([sc] * 3, plans, limit_s=1000.0)
    assert sync.reach == 1.0 and asgd.reach <= 1.0 and asgd.drift == pytest.approx(7 / 8, abs=0.02)
    assert math.isinf(wild.time_s)
    nervous = replace(sc, network=replace(sc.network, drift_limit=0.3, target_steps=100.0))
    assert run_plans([nervous], [Plan.ps(8, 1)])[0].reach < 0.1


def test_the_rule_policy_drives_a_job() -> None:
    network = replace(TINY, compute_s=0.1, comm_bytes=1_000_000, target_steps=400.0)
    sc = Scenario(
        cluster=Cluster(world_size=8),
        network=network,
        episodes=(Episode(rank=3, kind="compute", start_s=5.0, end_s=25.0, factor=4.0),),
    )
    auto = Job(sc, policy=RulePolicy(8)).run(label="rule")
    labels = [label for _, label, _ in auto.switches]
    assert labels[0] == "partial(7)" and labels[-1] == "sync"
    assert auto.time_s < 0.8 * run_plans([sc], [Plan.sync(8)])[0].time_s


class Walk:
    """Goes through every mode, one after the other."""

    def __init__(self, n: int) -> None:
        names = ["partial(5)", "subgroup(0,1,2,4)", "ps(3)", "ps(ssp=2)", "grouped(2)", "local(3)"]
        names += ["sync", "ps(dynamic)"]
        self.names = names * 3
        self.n = n

    def decide(self, window: Window, active: Plan) -> Plan | None:
        assert window.world_size == self.n and all(len(r.steps) == len(r.compute_s) for r in window.ranks)
        return parse_mode(self.names.pop(), self.n) if self.names else None


@pytest.mark.parametrize("seed", range(6))
def test_any_switches_leave_a_job_that_goes_on(seed: int) -> None:
    sc = draw_scenario(seed, world_size=6, pattern="mixed", steps=150)
    walker = Job(sc, policy=Walk(6), every_steps=3)
    before = 0.0
    for _ in range(150):
        walker.advance()
        assert before <= walker.now_s < math.inf
        before = walker.now_s
    assert len(walker.switches) == 24 and walker.state.account.gain[0] > 0.0


def test_median_step_of_many_ranks() -> None:
    n = 256
    sc = scenario(n, slow={5: 4.0}, jitter=0.02)
    outcome = run_plans([replace(sc, network=replace(sc.network, target_steps=47.0))], [Plan.partial(n, n - 1)])[0]
    assert outcome.step_s < 1.5 and outcome.updates <= 48


@pytest.mark.parametrize("name", ["ps(1)", "ps(1,background)", "ssp(3)", "ssp(0)"])
def test_batches_of_arrivals_are_the_server_rule(name: str) -> None:
    cluster = Cluster(world_size=64, relative_s=(1.0,) * 60 + (2.0, 2.5, 3.0, 4.0), jitter=0.2, server_s=1e-4)
    sc = Scenario(cluster=cluster, network=Network(comm_bytes=100_000, compute_s=0.1, target_steps=200.0))
    plan = parse_mode(name, 64)
    assert plan is not None
    one, two = job(sc, plan), job(sc, plan)
    batches = make_mode(one, [plan])
    assert isinstance(batches, Stream)
    exact = Server(two, [plan])
    for _ in range(40):
        batches.step()
        while int(two.step[0]) < int(one.step[0]):
            exact.step()
        assert one.now_s[0] == pytest.approx(two.now_s[0], rel=1e-3)
    assert one.account.updates[0] == two.account.updates[0] > 400
    assert one.account.progress[0] == pytest.approx(two.account.progress[0], rel=2e-3)
    assert one.account.drift[0] == pytest.approx(two.account.drift[0], rel=5e-3)


def test_similar_ranks_push_together() -> None:
    sc = scenario(6, slow={4: 3.0, 5: 3.0})
    plan = Plan.ps(6, 1, rule="groups", groups=((0, 1, 2, 3), (4, 5)))
    found = Job(sc, plan).run()
    # Four gradients every step and two every third one: rates add up.
    assert found.step_s == pytest.approx(1.0 / (1.0 + 1.0 / 3.0), rel=0.03)


# ---- transfers behind compute ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ps(4)", "ps(dynamic)", "local(8)"])
@pytest.mark.parametrize("rate", [5e5, 2e6, 2e8])
def test_simulated_steps_behind_compute_are_as_long_as_they_are_priced(name: str, rate: float) -> None:
    base = scenario(4, slow={3: 1.5})
    cluster = replace(base.cluster, link_bytes_per_s=(rate,) * 4)
    slow = replace(base, cluster=cluster, network=replace(base.network, comm_bytes=1_000_000))
    found = [parse_mode(each, 4, **{} if "local" in each else {"servers": (0, 1, 2, 3)}) for each in
             (name, f"{name[:-1]},background)")]
    plans = [plan for plan in found if plan is not None]
    if "ps" in name:  # With pushes that begin with `step()`, too.
        plans.append(plans[0].replace(transmission=Transmission(False)))
    plain, behind, *late = run_plans([slow] * len(plans), plans)
    assert behind.step_s <= plain.step_s * (1.0 + 1e-9)
    times_s = np.ones((8, 4))
    times_s[:, 3] = 1.5
    now = Conditions(times_s=times_s, rate=np.full(4, rate), comm_bytes=1e6)
    priced = [predict(plan, now).interval_s for plan in plans]
    assert behind.step_s / plain.step_s == pytest.approx(priced[1] / priced[0], rel=0.1)
    for one in late:
        assert one.step_s / plain.step_s == pytest.approx(priced[2] / priced[0], rel=0.1)
        assert rate > 1e8 or one.step_s > 1.05 * plain.step_s
    if rate < 1e8:
        assert behind.step_s < 0.96 * plain.step_s


def test_a_mode_without_a_simulation_is_not_simulated_as_another() -> None:
    plan = Plan.local(4, steps=4)
    object.__setattr__(plan, "mode", "new")
    with pytest.raises(ValueError, match="mode new has no simulation"):
        make_mode(job(scenario(4), plan), [plan])


class Keep:
    def decide(self, window: Window, active: Plan) -> Plan | None:
        return None


@pytest.mark.parametrize(
    ("plan", "losses"), [(Plan.sync(4), 24), (Plan.ps(4, 1), 6), (Plan.ps(4, 3), 18), (Plan.grouped(4, 2), 12)]
)
def test_a_loss_is_recorded_per_step_s_worth_of_gradients(plan: Plan, losses: int) -> None:
    simulated = Job(Scenario(network=TINY, cluster=Cluster(world_size=4)), plan, Keep())
    simulated.advance(24)
    assert len(simulated.window().losses) == losses


def test_programs_of_all_kinds_are_drawn() -> None:
    drawn = [draw_scenario(seed) for seed in range(60)]
    assert {(sc.batch > 0, sc.microbatches > 0) for sc in drawn} == {(False, False), (True, False), (True, True)}
    assert {sc.has_link_rates for sc in drawn} == {sc.records_loss for sc in drawn} == {False, True}
    assert all(sc.allowed == {"sync"} for sc in drawn if sc.microbatches)


@pytest.mark.parametrize("known", [False, True])
def test_a_window_has_what_the_job_measures(known: bool) -> None:
    sc = Scenario(network=TINY, cluster=Cluster(world_size=4), has_link_rates=known, records_loss=known)
    job = Job(sc, policy=Keep())
    job.advance(8)
    seen = job.window()
    assert np.isfinite(seen.table.link_bytes_per_s).all() == known
    assert bool(seen.losses) == bool(seen.loss_steps) == known
