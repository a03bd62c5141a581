"""What headers say of programs that work on a step's mean, and what that means for what a helper completed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from star_hvd.engine.exchange.manual_steps import ManualSteps
from star_hvd.engine.records import OpenStep


def step(number: int, owner: str = "trainer") -> OpenStep:
    made = OpenStep.open(number, 1)
    made.owner = owner
    return made


def header(*, manual: bool = False, manual_before: bool = False) -> Any:
    return cast(Any, SimpleNamespace(manual=manual, manual_before=manual_before))


def test_what_an_early_header_could_not_say_the_next_one_says_once() -> None:
    steps = ManualSteps(can_replay=True)
    assert not steps.in_early_header()
    steps.arrived(step(4), manual=True, early=True)
    assert steps.unreported == 4
    assert steps.report(step(5)) and steps.unreported is None
    assert not steps.report(step(6)) and steps.in_early_header(), "a program that did so once does so again"
    steps.arrived(step(6), manual=True, early=True)
    assert steps.unreported is None, "the header of that step said so"


def test_what_no_helper_has_completed_needs_no_report() -> None:
    steps = ManualSteps(can_replay=True)
    steps.arrived(step(4), manual=True, early=True)
    assert not steps.read(step(4), header(), complete=True) and steps.unreported is None
    steps = ManualSteps(can_replay=True)
    steps.arrived(step(4), manual=True, early=True)
    assert not steps.read(step(4), header(), complete=False) and steps.unreported == 4


def test_a_step_the_helper_completed_is_lost_when_the_next_header_says_so() -> None:
    steps = ManualSteps(can_replay=True)
    assert not steps.read(step(3, "helper"), header(), complete=False)
    assert steps.read(step(4, "helper"), header(manual_before=True), complete=False)
    assert not steps.read(step(6, "helper"), header(manual_before=True), complete=False), "step 5 was not the helper's"
    assert steps.proxied(6) and not steps.proxied(6), "asked once"


def test_an_optimizer_that_cannot_be_replayed_always_says_so() -> None:
    steps = ManualSteps(can_replay=False)
    assert steps.in_early_header() and steps.in_header(manual=False)
    assert not ManualSteps(can_replay=True).in_header(manual=False)
