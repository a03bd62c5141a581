"""How often a policy is asked, what it learns from the loss, and what happens when it fails."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from scheduler.cost.conditions import Conditions
from scheduler.cost.cost_model import Prediction, rank
from scheduler.diagnosis.stragglers import find_stragglers
from scheduler.plan.plan import Plan
from scheduler.policy.rule_policy import RulePolicy
from scheduler.records import RankStats, Window
from star_hvd.config import Config
from star_hvd.coordinator.plans.mode_chooser import Choice

HOSTS = ("localhost",) * 4


def window(step: int = 60, *, slow: float = 4.0, losses: Sequence[float] = ()) -> Window:
    ranks = tuple(
        RankStats(
            rank=r,
            compute_s=tuple(0.1 * (slow if r == 3 else 1.0) for _ in range(32)),
            steps=tuple(range(step - 32, step)),
            comm_s=(0.001,) * 4,
        )
        for r in range(4)
    )
    return Window(
        step=step,
        ranks=ranks,
        comm_bytes=1000,
        noise_scale=2.0,
        losses=tuple(losses),
        loss_steps=tuple(range(step - len(losses), step)),
    )


class Counting:
    """The cost model, counting how often it is asked."""

    def __init__(self, *, fail: bool = False) -> None:
        self.asked, self.fail = 0, fail

    def __call__(self, offered: Sequence[Plan], conditions: Conditions, win: Window, active: Plan) -> list[Prediction]:
        self.asked += 1
        if self.fail:
            raise RuntimeError("broken")
        return rank(offered, conditions)


def decide(choice: Choice, win: Window, active: Plan, now_s: float) -> Plan | None:
    return choice.decide(win, active, find_stragglers(win), now_s)


@pytest.mark.slow
def test_what_does_not_change_is_asked_less_and_less_often() -> None:
    ranker = Counting()
    choice, active = Choice(4, Config(), HOSTS, ranker), Plan.partial(4, 3)
    for tenth in range(600):
        decide(choice, window(), active, 0.1 * tenth)
    assert 30 <= ranker.asked <= 40, "every two seconds in the end"
    before = ranker.asked
    decide(choice, window(slow=1.0), active, 60.05)
    assert ranker.asked == before + 1, "somebody is slow no more: at once"


def test_a_job_is_looked_at_more_often_at_its_beginning() -> None:
    ranker = Counting()
    choice, active = Choice(4, Config(), HOSTS, ranker), Plan.partial(4, 3)
    for tenth in range(6):
        decide(choice, window(), active, 0.1 * tenth)
    assert ranker.asked >= 4


def test_two_slow_reports_in_a_row_are_looked_at_immediately_in_sync() -> None:
    def begins(count: int) -> Window:
        """Rank 3 was slow in its last steps, too few to be named."""
        calm = window(slow=1.0)
        times = calm.ranks[3].compute_s[:-count] + (0.4,) * count
        return replace(calm, ranks=(*calm.ranks[:3], replace(calm.ranks[3], compute_s=times)))

    for active, immediately in ((Plan.sync(4), True), (Plan.partial(4, 3), False)):
        ranker = Counting()
        choice = Choice(4, Config(), HOSTS, ranker)
        for tenth in range(600):
            decide(choice, window(slow=1.0), active, 0.1 * tenth)
        before = ranker.asked
        choice.decide(begins(2), active, (), 60.01)
        assert (ranker.asked > before) is immediately
        assert not find_stragglers(begins(2)) and find_stragglers(begins(3))


@pytest.mark.slow
@pytest.mark.parametrize(("active", "most"), [(Plan.partial(4, 3), 18), (Plan.sync(4), 110)])
def test_what_changes_all_the_time_is_looked_at_a_few_times_a_second(active: Plan, most: int) -> None:
    ranker = Counting()
    choice = Choice(4, Config(), HOSTS, ranker)
    for tenth in range(100):
        choice.decide(window(), active, find_stragglers(window()) if tenth % 2 else (), 0.1 * tenth)
    assert most // 3 <= ranker.asked <= most
    before = ranker.asked
    # A change after calm, and one of plan, are answered as fast as ever.
    choice.decide(window(), active, find_stragglers(window()), 20.0)
    choice.decide(window(), active, (), 20.4)
    choice.decide(window(), active.replace(plan_id=1), (), 20.71)
    assert ranker.asked == before + 3


def test_a_loss_that_rises_is_answered_at_once_however_short_the_steps() -> None:
    """Steps of 5 ms: 400 of them between two decisions while nothing changes, and 256 losses are kept."""
    choice, active = Choice(4, Config(), HOSTS, Counting()), Plan.partial(4, 3)
    rng, losses = random.Random(0), [0.6] * 256
    for tenth in range(200):
        assert decide(choice, window(20 * tenth + 256, losses=losses), active, 0.1 * tenth) is None
        losses = losses[20:] + [0.6 + 0.02 * rng.random() for _ in range(20)]
    answered = []
    for tenth in range(200, 206):
        losses = losses[20:] + [2.3 + 0.02 * rng.random() for _ in range(20)]
        answered.append(decide(choice, window(20 * tenth + 256, losses=losses), active, 0.1 * tenth))
    plan = next(plan for plan in answered if plan is not None)
    assert plan.plain and "the loss" in plan.reason


def test_a_policy_that_fails_gives_way_to_the_rule(caplog: pytest.LogCaptureFixture) -> None:
    choice, active = Choice(4, Config(), HOSTS, Counting(fail=True)), Plan.sync(4)
    assert decide(choice, window(), active, 0.0) is None
    assert "the rule-based policy decides" in caplog.text
    plan = decide(choice, window(), active, 0.1)
    assert plan is not None and plan.mode == "partial"
    assert choice.explain() == "" and choice.predictions() == {}


def test_a_rule_that_fails_keeps_the_plan_and_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(RulePolicy, "decide", fail)
    choice = Choice(4, Config(policy="rule"), HOSTS)
    assert [decide(choice, window(), Plan.sync(4), 0.1 * tenth) for tenth in range(3)] == [None] * 3
    assert caplog.text.count("the rule-based policy failed; the active plan stays") == 1


def test_predictions_that_failed_are_tried_again_later_and_later() -> None:
    ranker = Counting(fail=True)
    choice, active = Choice(4, Config(), HOSTS, ranker), Plan.sync(4)
    times_s = [0.0, 59.0, 61.0, 120.0, 182.0, 300.0]
    asked = []
    for now_s in times_s:
        decide(choice, window(), active, now_s)
        asked.append(ranker.asked)
    assert asked == [1, 1, 2, 2, 3, 3]
    ranker.fail = False
    assert decide(choice, window(), active, 500.0) is not None and choice.predictions()


def test_an_hour_of_predictions_ends_what_failures_before_it_cost() -> None:
    ranker = Counting(fail=True)
    choice, active = Choice(4, Config(), HOSTS, ranker), Plan.sync(4)
    for now_s in (0.0, 61.0, 182.0):  # The next pause is of 480 s.
        decide(choice, window(), active, now_s)
    ranker.fail = False
    for now_s in (500.0, 2000.0, 4101.0):
        decide(choice, window(), active, now_s)
    ranker.fail = True
    before = ranker.asked
    for now_s in (4110.0, 4169.0, 4171.0):
        decide(choice, window(), active, now_s)
    assert ranker.asked == before + 2, "after a minute, as at first"


def test_a_rank_silent_for_long_under_servers_is_no_defect() -> None:
    choice, active = Choice(4, Config(policy="cost"), HOSTS), Plan.ps(4, 1, servers=(0,), plan_id=3)
    for tick in range(400):
        silent = (0.0, 0.0, 0.0, 0.3 * tick)
        calm = window(40 + 20 * tick, slow=1.0)
        ranks = tuple(replace(each, silent_s=s) for each, s in zip(calm.ranks, silent, strict=True))
        decide(choice, replace(calm, ranks=ranks), active, 0.3 * tick)
        assert choice.explain(), "predictions were given up"


def test_predictions_and_a_sentence_stand_behind_a_decision() -> None:
    choice = Choice(4, Config(policy="cost"), HOSTS)
    plan = decide(choice, window(), Plan.sync(4), 0.0)
    assert plan is not None and plan.label in choice.predictions()
    assert set(choice.predictions()[plan.label]) == {"relative", "low", "high", "reach", "interval_s"}
    logged = choice.predictions()[plan.label]
    assert logged["high"] > 1.5 * logged["low"], "what is logged is what is told, wide where the cost model speaks"
    assert "rank 3" in choice.explain() and "slower" in choice.explain()


def test_losses_teach_the_price_of_staleness() -> None:
    choice, active = Choice(4, Config(policy="cost"), HOSTS), Plan.sync(4)
    assert choice.policy is not None
    falling = [2.0 - 0.01 * i for i in range(100)]
    decide(choice, window(200), active, 0.0)
    decide(choice, window(300), active, 10.0)
    assert not choice.policy.price.observations, "without losses nothing is learned"
    decide(choice, window(400, losses=falling), active, 20.0)
    assert choice.policy.price.observations == 1


def test_windows_between_two_decisions_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    choice, active = Choice(4, Config(), HOSTS, Counting()), Plan.sync(4)
    seen: list[int] = []
    monkeypatch.setattr(
        "scheduler.policy.cost_policy.CostPolicy.watch", lambda self, win, plan, **_: seen.append(win.step)
    )
    for number in range(4):
        decide(choice, window(60 + number), active, 0.1 * number)
    assert seen == [60, 61, 62, 63]
