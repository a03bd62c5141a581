"""The steps of a benchmark's rank before those that count."""

from __future__ import annotations

import types
from typing import Any

import pytest

from benchmarks.workers.transmission import VARIANTS
from benchmarks.workers.warm_up import await_mode, await_trials
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


class TestTrials:
    def made(self, ends_after: int, others: tuple[bool, ...] = (), **limits: Any) -> int:
        count = types.SimpleNamespace(steps=0)

        def step() -> None:
            count.steps += 1

        values: dict[str, Any] = {"most_steps": 160, "settling": 8, **limits}
        await_trials(step, lambda: count.steps >= ends_after, lambda own: [own, *others], **values)
        return int(count.steps)

    def test_one_that_has_ended_takes_no_steps(self) -> None:
        assert self.made(0) == 0

    def test_a_late_one_is_awaited_and_its_decision_acts_before_steps_count(self) -> None:
        assert self.made(33) == 48 + 8

    def test_one_that_does_not_end_fails(self) -> None:
        with pytest.raises(RuntimeError, match="not ended after 160 more steps"):
            self.made(1000)

    def test_it_has_to_end_on_all_ranks(self) -> None:
        with pytest.raises(RuntimeError, match="not ended"):
            self.made(0, (True, False))

    def test_every_variant_with_a_trial_has_a_limit(self) -> None:
        tried = {name for name, variant in VARIANTS.items() if "auto" in variant.options.values()}
        assert tried == {name for name, variant in VARIANTS.items() if variant.longest_warm}
        assert all(v.longest_warm > v.least_warm for name, v in VARIANTS.items() if name in tried)
