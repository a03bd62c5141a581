"""The steps of a benchmark's rank before those that count."""

from __future__ import annotations

import pytest

from benchmarks.workers.warm_up import await_mode
from scheduler.plan.mode_names import parse_mode
from scheduler.plan.plan import Plan


class Engine:
    """In force after some steps."""

    def __init__(self, plan: Plan, after: int) -> None:
        self.plan, self.made = Plan.sync(4), 0
        self._next, self._after = plan, after

    def step(self) -> None:
        self.made += 1
        if self.made == self._after:
            self.plan = self._next


@pytest.mark.parametrize("mode", ["asgd", "ps(3)", "ssp(3)", "partial(3)", "local(8)", "subgroup(0,1,2)"])
def test_a_mode_is_awaited_under_any_of_its_names(mode: str) -> None:
    plan = parse_mode(mode, 4)
    assert plan is not None
    engine = Engine(plan, after=300)
    await_mode(engine.step, engine, plan)
    assert engine.made == 300


def test_a_mode_that_is_in_force_takes_no_steps() -> None:
    engine = Engine(Plan.sync(4), after=1)
    await_mode(engine.step, engine, Plan.sync(4))
    assert engine.made == 0


def test_steps_of_sync_are_not_measured_as_those_of_another_mode() -> None:
    engine = Engine(Plan.sync(4), after=1)
    with pytest.raises(RuntimeError, match=r"ps\(3\) is not in force after 0\.01 s, but sync"):
        await_mode(engine.step, engine, Plan.ps(4, 3), limit_s=0.01)
