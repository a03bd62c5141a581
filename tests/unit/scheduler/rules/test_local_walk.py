"""Steps between two averagings of `local`: one rule for the job, the cost model and the simulator."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.cost.conditions import Conditions
from scheduler.cost.cost_model import part_behind_compute, predict
from scheduler.plan.plan import Plan
from scheduler.plan.transmission import Transmission
from scheduler.rules.local_walk import another_step_fits, steps_between_averagings
from scheduler.simulator import Cluster, Job, Scenario


def walked(local_s: float, step_s: float) -> int:
    """Steps of a rank that asks after each whether another one fits."""
    made = 1
    while another_step_fits(made * step_s, step_s, local_s):
        made += 1
    return made


@settings(deadline=None)
@given(st.floats(0.01, 20.0), st.lists(st.floats(0.02, 5.0), min_size=1, max_size=8))
def test_counts_are_those_of_asking_after_each_step(local_s: float, step_s: list[float]) -> None:
    # Not where a step fits to the last bit.
    step_s = [each for each in step_s if abs((local_s / each + 0.25) - round(local_s / each + 0.25)) > 1e-6]
    found = steps_between_averagings(Plan.local(2, seconds=local_s), np.array(step_s))
    assert found.tolist() == [walked(local_s, each) for each in step_s]


def test_a_number_of_steps_does_not_depend_on_chance_where_it_just_fits() -> None:
    """`auto` offers `local` of six typical times."""
    step_s = np.array([0.0998, 0.0999, 0.1001, 0.1003])
    plan = Plan.local(4, seconds=0.5994)
    assert steps_between_averagings(plan, step_s).tolist() == [6.0] * 4
    found = predict(plan, Conditions(times_s=np.tile(step_s, (24, 1)), rate=np.full(4, math.inf)))
    assert found.interval_s == pytest.approx(0.1, rel=0.03)


def test_other_modes_and_counted_steps() -> None:
    step_s = np.array([0.1, 0.4])
    assert steps_between_averagings(Plan.local(2, steps=5), step_s).tolist() == [5.0, 5.0]
    assert steps_between_averagings(Plan.partial(2, 1), step_s).tolist() == [1.0, 1.0]


def test_the_simulator_makes_as_many() -> None:
    plan = Plan.local(4, seconds=0.58)
    cluster = Cluster(world_size=4, relative_s=(1.0, 1.0, 4.0, 4.0), jitter=0.0, common_jitter=0.0)
    job = Job(Scenario(cluster=cluster), plan)
    job.advance(4)
    counts = steps_between_averagings(plan, np.array([0.1, 0.1, 0.4, 0.4]))
    assert counts.tolist() == [6.0, 6.0, 1.0, 1.0]
    assert job.outcome().updates == pytest.approx(4 * counts.mean())


def test_behind_compute_is_worth_what_the_replay_says() -> None:
    """Slow ranks make fewer steps, so their walks do not hide more of an averaging."""
    times = np.tile([0.1, 0.1, 0.1, 0.4], (24, 1))
    now = Conditions(times_s=times, rate=np.full(4, 1e7), comm_bytes=4_000_000)
    plan = Plan.local(4, seconds=0.6)
    behind = plan.replace(transmission=Transmission(background=True))
    replayed = predict(behind, now).interval_s / predict(plan, now).interval_s
    assert part_behind_compute(plan, now) == pytest.approx(replayed, rel=1e-6)
