"""What every choice says of its decision: what was chosen, and what the option gains, chosen or not."""

from __future__ import annotations

import math

import pytest

from scheduler.transmission.decision import GRADIENTS, LATE, OVERLAP, PACE_UP, TOGETHER, WHAT, Decision
from scheduler.transmission.off_switch import OffSwitch
from scheduler.transmission.pace import SHARE, Pace
from scheduler.transmission.push_form import PushChoice
from scheduler.transmission.sizes import SizeSearch
from scheduler.transmission.wire import FORMS, LOW_RANK, NONE, WireChoice


@pytest.mark.parametrize(
    ("took_s", "chosen", "gain"),
    [((1.0, 0.5, 0.1), "low rank", 0.9), ((1.0, 0.5, 0.49), "fp16", 0.5), ((1.0, 1.2, 1.1), "none", -0.1)],
)
def test_the_form_of_gradients(took_s: tuple[float, ...], chosen: str, gain: float) -> None:
    choice = WireChoice()
    while not choice.observe(choice.wanted, took_s[choice.wanted], 0.5 * took_s[choice.wanted]):
        pass
    made = choice.decision
    assert (made.what, made.chosen, made.gain) == (GRADIENTS, chosen, pytest.approx(gain))
    assert made.text.startswith(f"gradients travel as {chosen}: ")


def test_where_no_form_is_tried_the_gain_is_unknown() -> None:
    choice = WireChoice()
    while not choice.observe(NONE, 1.0, 0.0):
        pass
    assert choice.decision.chosen == FORMS[NONE] and math.isnan(choice.decision.gain)
    assert choice.decision.as_record()["gain"] is None


def test_a_rank_that_comes_too_late_decides_for_no_form() -> None:
    choice = WireChoice()
    while not choice.observe(choice.wanted, (1.0, 0.5, 0.1)[choice.wanted], 0.09):
        pass
    assert choice.wanted == LOW_RANK
    assert [choice.miss() for _ in range(8)] == [False] * 7 + [True]
    assert choice.decision.chosen == FORMS[NONE] and "too late" in choice.decision.text


@pytest.mark.parametrize(("with_s", "chosen"), [(0.8, "kept"), (1.1, "off")])
def test_an_option_that_is_tried(with_s: float, chosen: str) -> None:
    switch = OffSwitch()
    while not switch.note(with_s if switch.on else 1.0):
        pass
    made = switch.decision(OVERLAP, "overlap")
    assert (made.what, made.chosen, made.gain) == (OVERLAP, chosen, pytest.approx(1.0 - with_s))
    assert made.text == switch.describe("overlap")


@pytest.mark.parametrize(("times_s", "chosen", "gain"), [((1.0, 0.9, 0.8), "4", 0.2), ((1.0, 1.1, 1.3), "1", -0.1)])
def test_how_many_buckets_are_reduced_at_once(times_s: tuple[float, ...], chosen: str, gain: float) -> None:
    search = SizeSearch(16)
    while not search.note(dict(zip((1, 2, 4), times_s, strict=True))[search.together]):
        pass
    made = search.decision
    assert (made.what, made.chosen, made.gain) == (TOGETHER, chosen, pytest.approx(gain))


@pytest.mark.parametrize(("small_s", "chosen"), [(0.25, "int8"), (1.5, "whole")])
def test_the_form_of_late_gradients(small_s: float, chosen: str) -> None:
    choice = PushChoice()
    while not choice.observe(choice.small, small_s if choice.small else 1.0):
        pass
    made = choice.decision
    assert (made.what, made.chosen, made.gain) == (LATE, chosen, pytest.approx(1.0 - small_s))
    assert made.text.startswith("late gradients travel as ")


def test_a_pace_is_told_once_until_it_is_clearly_another_one() -> None:
    pace, told = Pace(), list[Decision]()

    def transfers(link: float, count: int) -> None:
        for _ in range(count):
            rate = pace.bytes_per_s(1_000_000)
            pace.took(1_000_000, 1_000_000 / min(link, rate or link), rate)
            told.extend(filter(None, [pace.news(PACE_UP, 1_000_000)]))

    transfers(2.5e6, 500)
    assert [made.chosen for made in told] == ["2 MB/s"] and "of the 2.5 MB/s" in told[0].text
    transfers(2.6e6, 500)
    assert len(told) == 1
    transfers(0.5e6, 100)
    assert told[-1].chosen == f"{SHARE * 0.5:g} MB/s"
    transfers(1e9, 1000)
    assert told[-1].chosen == "full" and "full speed" in told[-1].text
    assert {made.what for made in told} == {PACE_UP} <= set(WHAT)
