"""What is said, and barred, for an optimizer of a program that has others; jobs: `test_optimizer_state_several.py`."""

from __future__ import annotations

import pytest

from scheduler.plan.mode_names import MAY_WAIT, NOT_LOCAL, ONLY_EXACT
from scheduler.records import Plan
from star_hvd.coordinator.plans.other_optimizers import OtherOptimizers

PARTIAL, LOCAL, BALANCED = Plan.partial(4, 3), Plan.local(4, steps=4), Plan.sync(4, balanced=True)


def others(*, auto: bool = False, exist: bool = True) -> OtherOptimizers:
    made = OtherOptimizers(1)
    made.auto, made.exist = auto, exist
    return made


def test_a_single_optimizer_has_all_modes(caplog: pytest.LogCaptureFixture) -> None:
    for auto in (False, True):
        alone = others(auto=auto, exist=False)
        assert not any(alone.bar(plan) or alone.refuse(plan) for plan in (PARTIAL, LOCAL, BALANCED))
        alone.tell(PARTIAL, 100.0, might_relax=True)
        assert not alone.confine(might_relax=True) and not caplog.messages


def test_what_a_user_asked_for_is_refused_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    beside = others()
    assert beside.bar(LOCAL) == NOT_LOCAL and not caplog.messages
    assert beside.refuse(LOCAL) == beside.refuse(LOCAL) == NOT_LOCAL
    assert caplog.messages == [f"optimizer 1: local(4) is not possible: {NOT_LOCAL}"]
    assert not beside.refuse(PARTIAL) and not beside.refuse(BALANCED)


def test_auto_is_confined_to_exact_modes_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    beside = others(auto=True)
    assert beside.refuse(PARTIAL) == ONLY_EXACT and not beside.refuse(BALANCED) and not caplog.messages
    assert beside.confine(might_relax=True) and not beside.confine(might_relax=False)
    for now_s in (10.0, 10.9, 11.0, 12.0):
        beside.tell(None, now_s, might_relax=True)
        assert len(caplog.messages) == (now_s >= 11.0)
    assert caplog.messages == [f"optimizer 1: {ONLY_EXACT}"]


def test_nothing_is_said_where_auto_has_exact_modes_only_anyway(caplog: pytest.LogCaptureFixture) -> None:
    beside = others(auto=True)
    for now_s in (10.0, 20.0):
        beside.tell(None, now_s, might_relax=False)
    assert not caplog.messages


def test_a_relaxed_mode_that_stays_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    beside = others()
    for now_s in (10.0, 11.0, 12.0):
        for asked in (None, BALANCED, LOCAL, PARTIAL):
            beside.tell(asked, now_s, might_relax=True)
    assert caplog.messages == [f"optimizer 1: partial(3): {MAY_WAIT}"]


def test_an_optimizer_that_replaces_another_one_is_no_other_for_long(caplog: pytest.LogCaptureFixture) -> None:
    beside = others()
    for now_s in (10.0, 10.5):
        beside.tell(PARTIAL, now_s, might_relax=True)
    beside.exist = False
    beside.tell(PARTIAL, 11.0, might_relax=True)
    beside.exist = True
    beside.tell(PARTIAL, 11.5, might_relax=True)
    assert not caplog.messages, "the time is counted anew"
