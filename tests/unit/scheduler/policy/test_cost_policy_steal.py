"""`sync(steal)` among the plans of `auto`: where it is offered, predicted and chosen, and in a simulation."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler.cost.conditions import Conditions
from scheduler.cost.cost_model import predict
from scheduler.plan.mode_names import parse_mode
from scheduler.plan.plan import Plan, PlanError
from scheduler.policy.candidates import candidates
from scheduler.policy.cost_policy import CostPolicy
from scheduler.simulator.job import run_plans
from scheduler.simulator.scenario import Cluster, Network, Scenario
from scheduler.simulator.whatif import what_if
from tests.support.windows import steady, window

EXACT = ("sync",)


def _conditions(times: np.ndarray, microbatches: int = 4, batch: int = 0) -> Conditions:
    return Conditions(times_s=times, rate=np.full(times.shape[1], 1e9), microbatches=microbatches, batch=batch)


def _rotating(jitter: float = 0.0) -> np.ndarray:
    times = steady(4, jitter=jitter)
    for step in range(len(times)):
        times[step, step // 5 % 4] *= 4.0
    return times


def test_a_plan_of_it_has_a_name_and_no_batch_shares() -> None:
    plan = parse_mode("sync(steal)", 4)
    assert plan is not None and plan.steal and plan.label == "sync(steal)" and not plan.plain and not plan.uneven
    assert Plan.from_dict(plan.to_dict()) == plan
    with pytest.raises(PlanError, match="without batch shares"):
        Plan.sync(4, steal=True, balanced=True)
    with pytest.raises(PlanError, match="mode sync"):
        Plan.partial(4, 3, steal=True)
    with pytest.raises(PlanError, match="True or False"):
        Plan.sync(4, steal=1)


def test_it_is_offered_where_the_loader_has_micro_batches_and_a_rank_is_slow_at_times() -> None:
    for times in (steady(4, slow={2: 4.0}), _rotating()):
        assert [plan.label for plan in candidates(_conditions(times), allowed=EXACT)] == ["sync", "sync(steal)"]
        assert [plan.label for plan in candidates(_conditions(times, 0), allowed=EXACT)] == ["sync"]
    assert [plan.label for plan in candidates(_conditions(steady(4)), allowed=EXACT)] == ["sync"]


@pytest.mark.parametrize(("times", "expected"), [(steady(4, slow={2: 4.0}, jitter=0.0), 5 / 16), (_rotating(), 5 / 16)])
def test_it_is_predicted_as_tasks_end_that_are_taken_over(times: np.ndarray, expected: float) -> None:
    """16 tasks, one of the slow rank in 4 times its own quarter: five quarters instead of 16."""
    found = predict(Plan.sync(4, steal=True), _conditions(times))
    assert found.relative == pytest.approx(expected, rel=0.1)
    assert found.drift == 0.0 and found.reach == pytest.approx(1.0, abs=0.01)


def test_it_is_chosen_where_slowness_moves_and_left_when_the_ranks_are_well() -> None:
    policy, active = CostPolicy(4), Plan.sync(4)
    for end in range(40, 80, 4):
        seen = window(_rotating(0.02), end=end, allowed=EXACT, microbatches=4, now_s=0.1 * end)
        active = policy.decide(seen, active) or active
    assert active.steal and active.reason in policy.explain()
    for end in range(80, 400, 4):
        seen = window(steady(4), end=end, allowed=EXACT, microbatches=4, now_s=0.1 * end)
        active = policy.decide(seen, active) or active
    assert active.plain


def test_a_simulated_job_takes_as_long_as_the_shares_of_its_tasks_say() -> None:
    rows = tuple(tuple(4.0 if rank == turn else 1.0 for rank in range(4)) for turn in range(4) for _ in range(5))
    scenario = Scenario(cluster=Cluster(world_size=4), network=Network(compute_s=0.1), rows=rows, microbatches=4)
    plain, steal = run_plans([scenario] * 2, [Plan.sync(4), Plan.sync(4, steal=True)])
    assert steal.time_s / plain.time_s == pytest.approx(5 / 16, rel=0.15)
    assert plain.reach == steal.reach


def test_what_if_shows_it() -> None:
    found = what_if(_rotating(), modes=("sync(steal)",))
    relative = {one.label: one.relative for one in found.modes}
    assert relative["sync(steal)"] < 0.5 < relative["sync"]
