"""What followed a switch against what was predicted: series of step times with known answers."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.cost.cost_model import Prediction
from scheduler.plan.plan import Plan
from scheduler.policy.cost_policy import CostPolicy, _held_as
from scheduler.policy.switch_outcome import (
    CostFactors,
    ModeBackoff,
    OutcomeCheck,
    SlownessProfile,
    SwitchOutcome,
    compare,
)
from tests.support.windows import steady, window

CALM, ONE_SLOW = SlownessProfile((1.1, 1.0)), SlownessProfile((4.0, 1.1))
SYNC = Plan.sync(4)
PARTIAL = Plan.partial(4, 2, plan_id=1)


class Training:
    """A job whose steps take given times, looked at every tenth of a second."""

    def __init__(self, seed: int = 0) -> None:
        self.check = OutcomeCheck()
        self.rng = np.random.default_rng(seed)
        self.now_s, self.step, self.look_s = 100.0, 0, 0.0
        self.step_times = {"sync": 1.1, "partial(2)": 1.0, "partial(3)": 1.0, "ps(3)": 0.75}
        self.gains = {"sync": 1.0, "partial(2)": 1.0, "partial(3)": 1.0, "ps(3)": 0.75}
        self.frozen_s = dict.fromkeys(self.gains, 0.0)
        self.found: list[SwitchOutcome] = []

    def go(self, plan: Plan, steps: int, step_s: float, jitter: float = 0.0, *, until_harm: bool = False) -> int:
        """Make steps under a plan; how many it were."""
        for made in range(1, steps + 1):
            self.now_s += step_s * math.exp(jitter * float(self.rng.standard_normal()))
            self.step += 1
            if self.now_s < self.look_s:
                continue
            self.look_s = self.now_s + 0.1
            self.check.set_normalized_step(self.step_times[plan.label])
            self.check.note(self.step, self.now_s, plan, frozen=False)
            outcome = self.check.judge(
                {name: CostFactors(self.gains[name], self.frozen_s[name], self.step_times[name]) for name in self.gains}
            )
            if outcome is not None:
                self.found.append(outcome)
                if until_harm and outcome.harmful:
                    return made
        return steps

    def expect(self, plan: Plan, replaced: Plan = SYNC, predicted: float = 1.1, replaced_s: float = 0.1) -> None:
        self.check.expect(
            plan, replaced, predicted=predicted, over_sync=predicted, replaced_s=replaced_s,
            normalized_step=self.step_times[replaced.label],
        )

    @property
    def harmful(self) -> list[SwitchOutcome]:
        return [one for one in self.found if one.harmful]


@pytest.mark.parametrize("step_s", [0.004, 0.03, 0.1, 1.0])
def test_a_plan_that_makes_steps_dearer_is_found_out(step_s: float) -> None:
    steps = []
    for seed in range(8):
        job = Training(seed)
        job.go(SYNC, max(80, round(3.0 / step_s)), step_s, 0.15)
        job.expect(PARTIAL)
        steps.append(job.go(PARTIAL, 2000, 1.25 * step_s, 0.15, until_harm=True))
        assert job.found[-1].harmful and job.found[-1].against == "sync"
        assert 0.65 < job.found[-1].measured < 0.95
    assert min(steps) >= 20 and max(steps) * step_s <= max(6.0, 120 * step_s)


def test_the_sentence_names_both_figures() -> None:
    job = Training()
    job.go(SYNC, 100, 0.05)
    job.expect(PARTIAL)
    job.go(PARTIAL, 100, 0.06, until_harm=True)
    said = job.found[-1].sentence
    assert said.startswith("partial(2) was predicted 1.1x faster than sync, was 0.83x over "), said


@pytest.mark.slow
def test_a_plan_that_changes_nothing_is_hardly_ever_left() -> None:
    left = 0
    for seed in range(40):
        job = Training(seed)
        job.go(SYNC, 120, 0.04, 0.3)
        job.expect(PARTIAL)
        job.go(PARTIAL, 600, 0.04, 0.3)
        left += bool(job.harmful)
    assert left <= 4, "of 40 jobs of 600 steps with 30 % of jitter"


def test_a_plan_that_pays_is_told_once_and_kept() -> None:
    for seed in range(10):
        job = Training(seed)
        job.go(SYNC, 120, 0.05, 0.2)
        job.expect(PARTIAL, predicted=1.4)
        job.go(PARTIAL, 400, 0.04, 0.2)
        assert len(job.found) == 1 and not job.harmful
        assert job.found[0].predicted == 1.4 and 1.1 < job.found[0].measured < 1.4


def test_nothing_is_compared_across_a_change_of_trouble() -> None:
    job = Training()
    job.go(SYNC, 100, 0.05, 0.05)
    job.step_times["sync"] = 4.0
    job.expect(PARTIAL, replaced_s=0.2, predicted=3.0)
    job.go(PARTIAL, 200, 0.06, 0.05)
    assert not job.harmful, "dearer than sync was, when nobody was slow; sync would take 0.2 s now"
    assert job.found and job.found[0].measured == pytest.approx(0.2 / 0.06, rel=0.1), "by what was predicted of sync"
    job.step_times["sync"] = 1.1
    job.go(PARTIAL, 400, 0.06, 0.05, until_harm=True)
    assert job.harmful, "and now nobody is slow again"


def test_what_was_measured_in_less_trouble_is_scaled_to_the_present() -> None:
    """From `partial(3)` at its ease to `partial(2)`, when two ranks became slow: 1.7 times what it would take now."""
    job, three = Training(), Plan.partial(4, 3)
    job.go(three, 100, 0.05, 0.05)
    job.step_times["partial(3)"] = 1.7
    job.expect(PARTIAL, three, predicted=1.5)
    job.go(PARTIAL, 200, 0.06, 0.05)
    assert job.found and not job.harmful
    assert job.found[0].measured == pytest.approx(1.7 * 0.05 / 0.06, rel=0.05)


def test_who_is_slow_may_change_all_the_time() -> None:
    """On a busy machine what is predicted of a step goes up and down with every look."""
    job, turn = Training(), 0
    rng = np.random.default_rng(3)

    def go(plan: Plan, step_s: float) -> None:
        nonlocal turn
        for _ in range(60):
            for name in job.step_times:
                job.step_times[name] = math.exp(0.2 * float(rng.standard_normal()))
            if not job.harmful:
                turn += job.go(plan, 4, step_s, 0.15, until_harm=True)

    go(SYNC, 0.05)
    job.expect(PARTIAL)
    turn = 0
    go(PARTIAL, 0.065)
    assert job.harmful and turn < 240


def test_updates_count_by_their_progress() -> None:
    for interval_s, harmful in ((0.75 * 0.05, False), (0.05, True)):
        job, servers = Training(), Plan.ps(4, 3, plan_id=1)
        job.go(SYNC, 100, 0.05, 0.05)
        job.expect(servers)
        job.go(servers, 300, interval_s, 0.05)
        assert bool(job.harmful) is harmful


def test_freezes_are_no_steps_and_cost_what_is_expected_of_them() -> None:
    """Servers whose steps take longer are worth it where collectives stand still for two seconds now and then."""
    for frozen_s, harmful in ((0.0, True), (0.02, False)):
        job, servers = Training(), Plan.ps(4, 3, plan_id=1)
        job.frozen_s["sync"] = frozen_s
        job.go(SYNC, 50, 0.05)
        job.check.note(job.step, job.now_s, SYNC, frozen=True)
        job.now_s += 2.0
        job.check.note(job.step + 1, job.now_s, SYNC, frozen=True)
        job.go(SYNC, 50, 0.05)
        job.expect(servers)
        job.go(servers, 200, 0.75 * 0.06)
        assert bool(job.harmful) is harmful


def test_an_evaluation_is_no_step() -> None:
    job = Training()
    job.go(SYNC, 200, 0.05, 0.05)
    job.expect(PARTIAL)
    for _ in range(4):
        job.go(PARTIAL, 50, 0.05, 0.05)
        job.now_s += 0.6
    assert not job.harmful


def test_the_plan_before_the_last_one_is_sync() -> None:
    """From `partial(3)`, good, to servers, less good, and back; `sync` is no better than either."""
    job, three, servers = Training(), Plan.partial(4, 3, plan_id=1), Plan.ps(4, 3, plan_id=2)
    job.step_times["sync"] = 4.0
    job.go(SYNC, 60, 0.2, 0.05)
    job.expect(three, predicted=3.0)
    job.go(three, 150, 0.06, 0.1)
    job.expect(servers, three, predicted=1.2)
    assert job.check.references == ("sync",), "until it is in force"
    job.go(servers, 400, 0.75 * 0.09, 0.1, until_harm=True)
    assert job.harmful and job.harmful[0].against == "partial(3)"
    assert job.harmful[0].measured == pytest.approx(0.06 / 0.09, rel=0.15)


def test_an_old_prediction_of_the_plan_before_is_no_reference() -> None:
    """All ranks become slower alike, long after a switch at the first steps of a job."""
    job = Training()
    job.expect(PARTIAL)
    job.go(PARTIAL, 1500, 0.1)
    assert not job.harmful
    job.go(PARTIAL, 400, 0.2)
    assert not job.harmful, "sync would take as much longer"


def test_a_plan_nobody_chose_for_its_speed_is_not_judged() -> None:
    job = Training()
    job.go(SYNC, 100, 0.05)
    job.go(PARTIAL, 200, 0.2)
    assert job.found == [] and job.check.references == ()


def test_a_switch_that_never_came_is_forgotten() -> None:
    job = Training()
    job.go(SYNC, 60, 0.05)
    job.expect(PARTIAL)
    job.go(SYNC, 60, 0.05)
    job.go(Plan.partial(4, 3, plan_id=2), 100, 0.2)
    assert job.found == []


@pytest.mark.parametrize("back", [PARTIAL, Plan.partial(4, 3)])
def test_a_plan_that_comes_back_after_a_load_is_judged(back: Plan) -> None:
    """The coordinator puts it in force again by itself. Another plan was not chosen for its speed."""
    job = Training()
    job.go(SYNC, 100, 0.05)
    job.expect(PARTIAL)
    job.go(PARTIAL, 5, 0.05)
    job.go(SYNC.replace(plan_id=2), 10, 0.05)
    job.go(back.replace(plan_id=3), 200, 0.065, until_harm=True)
    assert bool(job.harmful) is (back is PARTIAL)


def test_so_is_one_that_was_not_in_force_yet_as_the_load_began() -> None:
    job = Training()
    job.go(SYNC, 100, 0.05)
    job.expect(PARTIAL)
    job.go(SYNC.replace(plan_id=2), 10, 0.05)
    job.go(PARTIAL.replace(plan_id=3), 200, 0.065, until_harm=True)
    assert job.harmful


def test_so_is_one_whose_absence_was_too_short_to_be_seen() -> None:
    job = Training()
    job.go(SYNC, 100, 0.05)
    job.expect(PARTIAL)
    job.go(PARTIAL, 5, 0.05)
    job.go(PARTIAL.replace(plan_id=3), 200, 0.065, until_harm=True)
    assert job.harmful


def test_so_is_one_beside_a_plan_that_was_chosen_and_never_came() -> None:
    job = Training()
    job.go(SYNC, 100, 0.05)
    job.expect(PARTIAL)
    job.go(PARTIAL, 5, 0.05)
    job.expect(Plan.partial(4, 3, plan_id=2))
    job.go(SYNC.replace(plan_id=3), 10, 0.05)
    job.go(PARTIAL.replace(plan_id=4), 200, 0.065, until_harm=True)
    assert job.harmful


def test_what_was_predicted_of_the_plan_before_counts_no_more_after_a_load() -> None:
    """All ranks have become slower alike since."""
    job = Training()
    job.expect(PARTIAL)
    job.go(PARTIAL, 1500, 0.1)
    job.go(SYNC.replace(plan_id=2), 5, 0.2)
    job.go(PARTIAL.replace(plan_id=3), 400, 0.2)
    assert not job.harmful


def test_another_run_knows_nothing_of_a_plan_that_was_left() -> None:
    job = Training()
    job.go(SYNC, 50, 0.05)
    job.expect(PARTIAL)
    job.go(PARTIAL, 5, 0.05)
    job.step = 0
    job.go(SYNC.replace(plan_id=2), 100, 0.05)
    job.go(PARTIAL.replace(plan_id=3), 200, 0.1)
    assert job.found == []


def test_without_a_clock_nothing_is_measured() -> None:
    check = OutcomeCheck()
    check.set_normalized_step(1.0)
    for step in range(100):
        check.note(step, math.nan, SYNC, frozen=False)
    assert not check.measured(SYNC, 1.0)


@settings(max_examples=60, deadline=None)
@given(
    costs=st.lists(st.floats(0.01, 1.0), min_size=6, max_size=30),
    scale=st.floats(1e-3, 1e3),
    slower=st.floats(0.5, 3.0),
)
def test_a_comparison_knows_no_unit_and_sees_a_factor(costs: list[float], scale: float, slower: float) -> None:
    one = compare([slower * cost for cost in costs], costs, 50.0)
    other = compare([scale * slower * cost for cost in costs], [scale * cost for cost in costs], 50.0)
    assert one.ratio == pytest.approx(slower, rel=1e-6)
    assert (other.ratio, other.error) == (pytest.approx(one.ratio), pytest.approx(one.error))
    if slower <= 1.05:
        assert not one.harmful


def _bad(predicted: float = 1.1, measured: float = 0.83) -> SwitchOutcome:
    return SwitchOutcome(
        plan_id=1, label="partial(2)", step=100, against="sync", predicted=predicted, measured=measured, steps=30.0,
        harmful=True,
    )  # fmt: skip


def test_a_mode_that_did_harm_waits_longer_each_time() -> None:
    backoff, step, now_s = ModeBackoff(), 100, 0.0
    for turn in range(4):
        backoff.hold("partial", _bad(), CALM, step, now_s)
        waits = 200 * 2**turn
        assert backoff.holds("partial", 1.2, CALM, step + waits - 1, now_s + 1e6)
        assert backoff.holds("partial", 1.2, CALM, step + waits, now_s + 60.0 * 2**turn - 1.0), "both have to pass"
        assert not backoff.holds("partial", 1.2, CALM, step + waits, now_s + 60.0 * 2**turn)
        assert not backoff.holds("ps", 1.2, CALM, step, now_s)
        step, now_s = step + waits, now_s + 60.0 * 2**turn


def test_plans_that_do_no_harm_shorten_the_next_wait() -> None:
    backoff = ModeBackoff()
    for _ in range(4):
        backoff.hold("partial", _bad(), CALM, 100, 0.0)
    backoff.forgive("partial")
    backoff.forgive("ps")
    assert backoff.held(100, 0.0) == {"partial": (100 + 200 * 8, 60.0 * 8)}, "that under way stays as it is"
    for waits in (4, 8):
        backoff.hold("partial", _bad(), CALM, 100, 0.0)
        assert backoff.held(100, 0.0) == {"partial": (100 + 200 * waits, 60.0 * waits)}
    for _ in range(3):
        backoff.forgive("partial")
    backoff.hold("partial", _bad(), CALM, 100, 0.0)
    assert backoff.held(100, 0.0) == {"partial": (300, 60.0)}


def test_other_trouble_and_a_promise_beyond_the_error_end_the_wait() -> None:
    backoff = ModeBackoff()
    backoff.hold("partial", _bad(), CALM, 100, 0.0)
    assert backoff.holds("partial", 3.0, CALM, 120, 1.0), "as before, so that the promise is worth as little"
    assert backoff.holds("partial", 1.3, ONE_SLOW, 120, 1.0), "it erred by 1.33"
    assert not backoff.holds("partial", 3.0, ONE_SLOW, 120, 1.0)


# ---- the policy ---------------------------------------------------------------------------------------------------


def _tempted(offered, conditions, win, active):  # type: ignore[no-untyped-def]
    """A predictor that likes `partial`, whatever happens."""
    return [
        Prediction(
            plan=p, relative=0.9 if p.mode == "partial" else 1.0, low=0.8, high=1.0, interval_s=0.1, progress=1.0,
            drift=0.0, reach=1.0,
        )
        for p in offered
    ]  # fmt: skip


def _run(policy: CostPolicy, steps: int, cost: dict[str, float], start: int = 40, now_s: float = 0.0) -> list[Plan]:
    """A job of 8 ranks, rank 5 1.45x slower, whose steps take what `cost` says of their mode; the plans taken."""
    active, taken = Plan.sync(8), []
    for step in range(start, start + steps, 4):
        now_s += 4.0 * cost[active.mode]
        times = steady(8, slow={5: 1.45})
        plan = policy.decide(window(times, end=step, allowed=("sync", "partial"), now_s=now_s), active)
        if plan is not None:
            active = plan
            taken.append(plan)
    return taken


def test_the_policy_leaves_a_plan_that_makes_steps_dearer() -> None:
    policy = CostPolicy(8, ranker=_tempted)
    taken = _run(policy, 200, {"sync": 0.1, "partial": 0.12})
    assert [plan.mode for plan in taken] == ["partial", "sync"], "and does not try it again at once"
    assert taken[1].reason.startswith(f"{taken[0].label} was predicted 1.1x faster than sync, was 0.8")
    assert [one.harmful for one in policy.outcomes] == [True]
    assert "partial did harm and is excluded until step" in policy.explain()


@pytest.mark.slow
def test_the_policy_tries_again_after_a_while_and_waits_longer_then() -> None:
    policy = CostPolicy(8, ranker=_tempted)
    taken = _run(policy, 2000, {"sync": 0.1, "partial": 0.12})
    assert 4 <= len(taken) <= 7
    assert [plan.mode for plan in taken[:4]] == ["partial", "sync", "partial", "sync"]


@pytest.mark.parametrize(("cost_s", "forgiven"), [(0.08, ["partial"]), (0.12, [])])
def test_a_plan_that_pays_makes_up_for_harm_by_its_mode(
    cost_s: float, forgiven: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(ModeBackoff, "forgive", lambda self, mode: told.append(mode))
    _run(CostPolicy(8, ranker=_tempted), 200, {"sync": 0.1, "partial": cost_s})
    assert told == forgiven


def test_the_policy_keeps_a_plan_that_pays_and_says_so() -> None:
    policy = CostPolicy(8, ranker=_tempted)
    taken = _run(policy, 400, {"sync": 0.1, "partial": 0.08})
    assert [plan.mode for plan in taken] == ["partial"]
    assert policy.explain().endswith("; predicted 1.1x faster than sync, was 1.2x")


def test_little_is_not_taken_before_the_present_plan_was_measured() -> None:
    policy = CostPolicy(8, ranker=_tempted)
    active = Plan.sync(8)
    for step in range(40, 52, 2):
        times = steady(8, slow={5: 1.45})
        found = policy.decide(window(times, end=step, allowed=("sync", "partial"), now_s=0.1 * step), active)
        assert found is None, "nothing could be compared afterwards"


def test_what_is_said_of_a_wait_is_true() -> None:
    policy, slow = CostPolicy(8, ranker=_tempted), steady(8, slow={5: 1.45})
    allowed = ("sync", "partial")
    policy.decide(window(slow, end=40, allowed=allowed, now_s=4.0), Plan.sync(8))
    assert policy.explain().endswith("x as fast; sync is measured first, to judge the outcome")
    policy._backoff.hold("partial", _bad(), SlownessProfile.of(policy._conditions, ()), 40, 4.0)
    for end, left in ((44, "until step 240"), (244, "for 40 s more")):
        policy.decide(window(slow, end=end, allowed=allowed, now_s=0.1 * end), Plan.sync(8))
        assert policy.explain().endswith(f"; partial did harm and is excluded {left} at least"), policy.explain()


def test_harm_by_another_mode_is_no_reason() -> None:
    """A plan that is not held back stays out for its own reason; what is held back comes behind it."""

    def ranker(offered, conditions, win, active):  # type: ignore[no-untyped-def]
        relative = {"sync": 1.0, "partial": 0.9, "subgroup": 0.97}
        found = _tempted(offered, conditions, win, active)
        found = [dataclasses.replace(one, relative=relative[one.plan.mode]) for one in found]
        return sorted(found, key=lambda one: one.relative)

    policy = CostPolicy(8, ranker=ranker)
    assert [plan.mode for plan in _run(policy, 200, {"sync": 0.1, "partial": 0.12})] == ["partial", "sync"]
    seen = window(steady(8, slow={5: 1.45}), end=244, allowed=("sync", "subgroup"), now_s=30.0)
    assert policy.decide(seen, Plan.sync(8)) is None
    why = policy.explain().split("subgroup(0,1,2,3,4,6,7) is predicted 1.03x as fast")[1]
    assert why.startswith(", too little for a switch; partial did harm and is excluded until step")


def test_a_gain_that_is_uncertain_is_not_called_little() -> None:
    def unsure(offered, conditions, win, active):  # type: ignore[no-untyped-def]
        found = _tempted(offered, conditions, win, active)
        found = [dataclasses.replace(p, relative=p.relative**4, high=1.4) for p in found]
        return sorted(found, key=lambda p: p.relative)

    policy = CostPolicy(8, ranker=unsure)
    seen = window(steady(8, slow={5: 1.45}), end=40, allowed=("sync", "partial"))
    assert policy.decide(seen, Plan.sync(8)) is None
    assert policy.explain().endswith("is predicted 1.52x as fast, too uncertain for a switch")


def test_an_outcome_is_that_of_one_plan_and_harm_that_of_one_form_of_sync() -> None:
    policy = CostPolicy(4)
    policy._outcome = _bad()
    assert policy._was(Plan.partial(4, 2, plan_id=1)) and not policy._was(Plan.partial(4, 2, plan_id=7))
    balanced, steal = Plan.sync(4, balanced=True, batch_shares=(4, 4, 4, 4)), Plan.sync(4, steal=True)
    policy._backoff.hold(_held_as(balanced), _bad(), policy._profile, 100, 0.0)
    held = [policy._backoff.holds(_held_as(one), 1.0, policy._profile, 120, 1.0) for one in (balanced, steal, SYNC)]
    assert held == [True, False, False]


@pytest.mark.parametrize("warmed", [False, True])
def test_steps_beside_a_preparation_are_no_reference(warmed: bool) -> None:
    """Steps of `sync` take half as long again while servers start, for a switch or ahead of one."""
    policy, calm, now_s = CostPolicy(4, ranker=_tempted), steady(4), 0.0
    for step in range(40, 100, 4):
        now_s += 0.4
        policy.decide(window(calm, end=step, now_s=now_s, allowed=("sync", "ps")), SYNC)
    if warmed:
        policy._prepare(Plan.ps(4, 3, servers=(1,)), window(calm, end=100, now_s=now_s))
    for step in range(104, 112 if warmed else 184, 4):
        now_s += 0.6
        policy.watch(window(calm, end=step, now_s=now_s), SYNC, preparing=not warmed)
    assert policy._check.measured_s(policy._factors) == pytest.approx(0.1, rel=0.02)
    for step in range(184, 284, 4):
        now_s += 0.6
        policy.watch(window(calm, end=step, now_s=now_s), SYNC)
    assert policy._check.measured_s(policy._factors) > 0.12, "later on, slow steps are the plan's"


def _of_local(
    plan: Plan, averaging_s: float, *, each: int = 1, counts_local: bool = False, walks: tuple[int, ...] = (6, 6, 1, 1)
) -> Prediction:
    """The prediction for `local` on two fast ranks and two slow ones, after averagings of that length."""
    policy, times = CostPolicy(4), np.tile([0.1, 0.1, 0.4, 0.4], (32, 1))
    reports = {} if counts_local or plan.local_steps else {"each": walks}
    for count in range(150, 250):
        now_s = averaging_s * count
        policy.decide(window(times, end=each * count, now_s=now_s, counts_local=counts_local, **reports), plan)
    return next(one for one in policy.last if one.plan.label == plan.label)


@pytest.mark.parametrize("averaging_s", [0.602, 0.45])
def test_averagings_progress_by_the_ranks_mean_number_of_steps(averaging_s: float) -> None:
    """In `local(0.6s)` two ranks make six steps and two make one: an averaging is worth 3.5 steps, not six."""
    local = Plan.local(4, seconds=0.6, plan_id=1)
    predicted, found = _of_local(local, math.nan), _of_local(local, averaging_s)
    part = averaging_s / (3.5 * predicted.interval_s)
    assert found.relative_time / predicted.relative_time == pytest.approx(part, rel=0.02)


def test_steps_that_waits_for_a_processor_keep_from_fitting_do_not_count() -> None:
    """The times of a decision are without such waits: by these six steps of 0.1 s would fit."""
    local = Plan.local(4, seconds=0.6, plan_id=1)
    quiet, busy = _of_local(local, 0.45), _of_local(local, 0.45, walks=(5, 5, 1, 1))
    assert busy.relative_time / quiet.relative_time == pytest.approx(3.5 / 3.0, rel=0.02)


@pytest.mark.parametrize(
    ("local", "averaging_s"),
    [(Plan.local(4, steps=4, plan_id=1), 1.2), (Plan.local(4, seconds=0.6, plan_id=1), 0.45)],
)
def test_simulated_steps_between_averagings_are_not_counted_twice(local: Plan, averaging_s: float) -> None:
    """A window of a job counts averagings, one of the simulator the steps of the fastest rank."""
    in_a_job = _of_local(local, averaging_s)
    simulated = _of_local(local, averaging_s, each=local.local_steps or 6, counts_local=True)
    assert simulated.relative == pytest.approx(in_a_job.relative, rel=0.02)


# ---- measured and predicted, compared -------------------------------------------------------------------------------


@pytest.mark.parametrize("took_s", [0.05, 0.1])
def test_the_cost_of_the_active_plan_is_known_after_some_blocks(took_s: float) -> None:
    job, factors = Training(), CostFactors(0.8, 0.01, 1.0)
    assert job.check.measured_s(factors) == math.inf
    job.go(PARTIAL, 8, took_s)
    assert job.check.measured_s(factors) == math.inf, "too few steps"
    job.go(PARTIAL, 80, took_s)
    assert job.check.measured_s(factors) == pytest.approx(took_s / 0.8 + 0.01, rel=0.02)


@pytest.mark.parametrize(
    ("servers", "took_s", "left"), [(0.55, 0.11, False), (0.50, 0.11, True), (0.40, 0.08, False), (0.33, 0.08, True)]
)
def test_a_measured_relaxed_plan_is_left_for_another_family_only_for_a_clear_gain(
    servers: float, took_s: float, left: bool
) -> None:
    """Steps of `sync` take 0.2 s. `partial` is predicted at 0.6 of that and takes `took_s`; then servers get better."""

    def ranker(offered, conditions, win, active):  # type: ignore[no-untyped-def]
        relative = {"sync": 1.0, "partial": 0.6, "ps": servers if win.step >= 120 else 0.6}
        return [
            Prediction(
                plan=p, relative=relative[p.mode], low=0.3, high=1.1, interval_s=0.2 * relative[p.mode], progress=1.0,
                drift=0.0, reach=1.0,
            )
            for p in (*offered, active)
            if p.mode != "partial" or p is active
        ]  # fmt: skip

    policy, active, found = CostPolicy(4, ranker=ranker), Plan.partial(4, 3, plan_id=1), None
    for step in range(40, 240, 2):
        seen = window(steady(4, slow={2: 4.0}), end=step, now_s=took_s * step, allowed=("sync", "partial", "ps"))
        found = found or policy.decide(seen, active)
    assert (found is not None and found.mode == "ps") == left
    assert left or "would have to be" in policy.explain()


def test_measured_steps_are_no_reason_to_expect_the_target() -> None:
    def last(reach: float) -> Prediction:
        def ranker(offered, conditions, win, active):  # type: ignore[no-untyped-def]
            plain, missed = next(plan for plan in offered if plan.plain), 1.0 - reach
            kinds = {plain: (1.0, 0.0), active: (0.6, missed)}
            return [
                Prediction(
                    plan=plan, relative=middle + extra, low=0.9 * middle + extra, high=1.1 * middle + extra,
                    interval_s=0.2 * middle, progress=1.0, drift=0.0, reach=1.0 - extra,
                )
                for plan, (middle, extra) in kinds.items()
            ]  # fmt: skip

        policy, active = CostPolicy(4, ranker=ranker), Plan.partial(4, 3, plan_id=1)
        for step in range(40, 240, 2):
            seen = window(steady(4, slow={2: 4.0}), end=step, now_s=0.08 * step, allowed=("sync", "partial"))
            policy.decide(seen, active)
        return next(one for one in policy.last if one.plan is active)

    sure, doubtful = last(1.0), last(0.9)
    assert sure.relative < 0.5, "faster than predicted"
    for name in ("relative", "low", "high"):
        assert getattr(doubtful, name) == pytest.approx(getattr(sure, name) + 0.1), name
    assert doubtful.interval_s == pytest.approx(sure.interval_s)
