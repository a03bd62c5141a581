"""The predictor that arrives while the job trains: no step waits for it, and its arrival starts no back and forth."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest

from scheduler.cost.conditions import Conditions
from scheduler.learning.simulated_rows import in_order
from scheduler.plan.plan import Plan
from scheduler.policy.candidates import candidates
from scheduler.policy.cost_policy import CostPolicy
from star_hvd.runtime.model_loader import ModelLoader
from tests.support.threads import await_end
from tests.support.windows import steady, window

pytest.importorskip("lightgbm")


def test_it_is_loaded_after_the_first_step_and_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAR_MODEL", "")
    stepped, asked = threading.Event(), threading.Event()

    def begun() -> bool:
        asked.set()
        return stepped.is_set()

    ranker = ModelLoader(8)
    began_s = time.monotonic()
    ranker.load_after(begun)
    assert asked.wait(60.0) and ranker.facts is None
    given, active = window(steady(8, slow={1: 3.0})), Plan.sync(8)
    conditions = Conditions.from_window(given)
    assert conditions is not None
    offered = candidates(conditions, active)
    predicted = ranker(offered, conditions, given, active)
    assert sorted(map(str, predicted)) == sorted(map(str, in_order(offered, conditions)))
    stepped.set()
    ranker.load_after(lambda: False)  # A second optimizer changes nothing.
    await_end("star-model")
    assert ranker.facts is not None and ranker.facts["source"] == "shipped"
    assert any(one.learned for one in ranker(offered, conditions, given, active))
    assert time.monotonic() - began_s < 60.0


def test_without_a_first_step_it_is_loaded_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAR_MODEL", "cost_model")
    ranker = ModelLoader(8, latest_s=0.1)
    ranker.load_after(lambda: False)
    await_end("star-model")
    assert ranker.facts == {"source": "cost_model"}


def test_a_model_for_other_numbers_of_ranks_is_not_said_to_decide(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The shipped model knows 2 to 32 ranks."""
    monkeypatch.setenv("STAR_MODEL", "")
    ranker, reason = ModelLoader(64), "64 ranks: the model was trained on 2 to 32; the cost model decides"
    ranker.load_after(lambda: True)
    await_end("star-model")
    assert ranker.facts == {"source": "shipped", "fallback": f"cost_model: {reason}"}
    given, active = window(steady(64, slow={1: 3.0})), Plan.sync(64)
    conditions = Conditions.from_window(given)
    assert conditions is not None
    predicted = ranker(candidates(conditions, active), conditions, given, active)
    assert predicted and not any(one.learned for one in predicted)
    said = [record.getMessage() for record in caplog.records if record.name == "star_hvd"]
    assert said == [reason], "once, when it is loaded"


def _drive(policy: CostPolicy, active: Plan, ends: Sequence[int], n: int, slow: dict[int, float]) -> list[Plan]:
    """Plans in force, beginning with the first one."""
    taken = [active]
    for end in ends:
        plan = policy.decide(window(steady(n, slow=slow), end=end), taken[-1])
        if plan is not None:
            taken.append(plan)
    return taken


@pytest.mark.slow
@pytest.mark.parametrize("slow", [{}, {1: 1.3}, {1: 2.0}, {1: 4.0, 2: 2.0}])
@pytest.mark.parametrize("arrival", [40, 120])
def test_its_arrival_changes_the_plan_once_at_most(
    slow: dict[int, float], arrival: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAR_MODEL", "")
    n = 8
    ranker = ModelLoader(n)
    policy = CostPolicy(n, ranker=ranker)
    before = _drive(policy, Plan.sync(n), range(32, arrival, 8), n, slow)
    assert ranker.facts is None
    ranker.load_after(lambda: True)
    await_end("star-model")
    after = _drive(policy, before[-1], range(arrival, 600, 8), n, slow)
    assert len(after) <= 2, [plan.label for plan in after]
