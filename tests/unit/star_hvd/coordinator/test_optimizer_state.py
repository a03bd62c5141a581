"""Plans of one optimizer that come into force, or do not: repeated ones, and deadlines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from scheduler.records import Plan
from star_hvd.channel.messages import base as m
from tests.support.job_states import Job, only


def choosing(job: Job, plan: Plan) -> None:
    """Have a policy choose the same plan every time."""
    silent: dict[str, Any] = {"take_outcomes": list, "predictions": dict, "coming": None, "watch": lambda *a, **k: None}
    job.engine.choice = SimpleNamespace(decide=lambda *unused: plan, explain=lambda: "", **silent)


def test_a_plan_that_completes_to_the_active_one_is_not_published() -> None:
    """From servers to servers these stay, so a policy that moves them would be given the same plan for ever."""
    job = Job(4)
    job.register(None)
    job.engine.active = Plan.ps(4, 3, servers=(0,))
    choosing(job, Plan.ps(4, 3, servers=(1,), plan_id=1))
    assert not only(job.pass_time(5.0), m.PlanMessage)
    choosing(job, Plan.ps(4, 2, servers=(1,), plan_id=1))
    (published,) = only(job.pass_time(5.0), m.PlanMessage)
    assert published.plan["servers"] == [0] and published.plan["quorum"] == 2
