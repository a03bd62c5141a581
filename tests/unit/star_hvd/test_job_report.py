"""What `hvd.explain()` says, and on which ranks."""

from __future__ import annotations

import pytest

from scheduler.records import Plan
from star_hvd.job_report import explain, report
from star_hvd.runtime import runtime
from tests.support.job_states import Job, runtime_of


def test_a_sentence_of_an_old_decision_says_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(3)
    monkeypatch.setattr(runtime, "current", lambda: runtime_of(job.state))
    assert explain() == "no mode is active: no optimizer was made yet"
    job.register(None)
    assert explain() == "step 0: no window was evaluated yet"
    job.engine.steps = 207
    assert explain().startswith("step 207: ")
    plan = Plan.partial(3, 2, plan_id=1, reason="rank 2 computes 4.0x slower since step 1")
    job.engine.active = plan
    job.engine.plans.append((5, plan))
    job.engine.explain = lambda: f"{plan.reason}; no rank is slow since step 90"
    assert explain() == f"step 5: partial(2): {plan.reason}; no rank is slow since step 90"
    job.engine.explain = lambda: f"partial(2): {plan.reason}"
    assert explain() == f"step 5: partial(2): {plan.reason}"
    with pytest.raises(ValueError, match="no optimizer 7"):
        explain(7)


def test_the_table_says_since_when_its_reason_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(3)
    monkeypatch.setattr(runtime, "current", lambda: runtime_of(job.state))
    job.register(None)
    job.engine.steps = 207
    assert str(report()).startswith("step 207: sync since step 0 ")
    plan = Plan.partial(3, 2, plan_id=1, reason="rank 2 is slow")
    job.engine.active = plan
    job.engine.plans.append((5, plan))
    assert str(report()).startswith("step 207: partial(2) since step 5 (rank 2 is slow)")


def test_who_does_not_know_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "current", lambda: runtime_of(None, rank=2))
    assert explain() == "only rank 0 can explain; this is rank 2"
    monkeypatch.setattr(runtime, "current", lambda: None)
    assert explain().startswith("no mode is active: ")
