"""Which form of gradients is asked for: decided by the times of whole steps, tried only where it can pay."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.transmission.wire import FORMS, HALF, LOW_RANK, NONE, WireChoice, gain
from tests.support.effort import cases


def run(choice: WireChoice, steps: int, step_s: Callable[[int], float], exposed: float) -> list[int]:
    """Forms of the steps of a job that asks for the form of each next step."""
    forms, in_force = [], NONE
    for _ in range(steps):
        forms.append(in_force)
        took_s = step_s(in_force)
        choice.observe(in_force, took_s, exposed * took_s)
        in_force = choice.wanted
    return forms


def test_on_a_slow_link_low_rank_is_taken_after_one_block_of_each() -> None:
    choice = WireChoice()
    forms = run(choice, 200, lambda form: (1.0, 0.5, 0.1)[form], 0.9)
    assert set(forms[30:]) == {LOW_RANK} and "low rank" in choice.reason
    assert forms.count(NONE) < 10 and forms.count(HALF) < 12


def test_what_loses_less_is_preferred_where_the_rest_is_within_three_percent() -> None:
    forms = run(WireChoice(), 200, lambda form: (1.0, 0.5, 0.49)[form], 0.5)
    assert set(forms[-50:]) == {HALF}


def test_where_nothing_is_waited_for_nothing_is_tried() -> None:
    assert set(run(WireChoice(), 3000, lambda form: 1.0, 0.01)) == {NONE}


def test_where_nothing_is_saved_trials_cost_less_than_a_percent() -> None:
    """The wait is for a slow rank, say: every form only adds its own work, 5 % of a step."""
    took_s = (1.0, 1.05, 1.05)
    forms = run(WireChoice(), 20_000, lambda form: took_s[form], 0.3)
    assert forms[-1] == NONE
    assert sum(took_s[form] for form in forms) <= 1.01 * len(forms)


def test_where_much_is_saved_later_looks_cost_about_a_percent() -> None:
    took_s = (1.0, 0.5, 0.1)
    forms = run(WireChoice(), 30_000, lambda form: took_s[form], 0.9)[40:]
    assert forms.count(NONE) > 0, "it never looks again"
    assert sum(took_s[form] for form in forms) <= 1.02 * took_s[LOW_RANK] * len(forms)


@pytest.mark.parametrize("half_s, taken", [(0.5, HALF), (1.2, NONE), (1.0, NONE)])
def test_a_form_that_is_excluded_is_not_tried(half_s: float, taken: int) -> None:
    choice = WireChoice(lossiest=HALF)
    forms = run(choice, 2000, lambda form: (1.0, half_s, 0.1)[form], 0.9)
    assert set(forms) == {NONE, HALF} and forms[60] == forms[-1] == taken
    assert "low rank" not in choice.reason


@pytest.mark.parametrize("steps", [10, 18, 26, 100])
def test_without_measurements_no_form_stays(steps: int) -> None:
    """The rank that asks has become the slow one, in a trial or after it."""
    choice = WireChoice()
    run(choice, steps, lambda form: (1.0, 0.5, 0.1)[form], 0.9)
    wanted = choice.wanted
    assert wanted != NONE
    for _ in range(7):
        choice.miss()
    assert choice.wanted == wanted
    choice.observe(wanted + 1, 0.1, 0.05)  # One that it is on time for, with a form that it does not measure.
    for _ in range(8):
        assert choice.wanted == wanted
        choice.miss()
    assert choice.wanted == NONE and "too late" in choice.reason
    assert set(run(choice, 100, lambda form: (1.0, 0.5, 0.1)[form], 0.9)[30:]) == {LOW_RANK}, "it is on time again"


def test_a_link_that_recovers_is_noticed() -> None:
    choice = WireChoice()
    run(choice, 100, lambda form: (1.0, 0.5, 0.1)[form], 0.9)
    assert run(choice, 12_000, lambda form: (0.1, 0.11, 0.12)[form], 0.1)[-1] == NONE


def after(steps: int) -> WireChoice:
    """The choice of a job that hardly waits for reductions for so many steps."""
    choice = WireChoice()
    assert set(run(choice, steps, lambda form: 1.0, 0.01)) == {NONE}
    return choice


@pytest.mark.parametrize("steps", [20, 1_500, 40_000])
def test_a_link_that_becomes_slow_is_noticed_however_long_it_was_fast(steps: int) -> None:
    choice = after(steps)
    forms = run(choice, 100, lambda form: (10.0, 5.0, 1.5)[form], 0.9)
    assert forms.index(HALF) <= 40 and set(forms[60:]) == {LOW_RANK}


def test_a_link_that_becomes_slower_is_noticed_under_a_lossy_form() -> None:
    choice = WireChoice()
    assert run(choice, 300, lambda form: (1.0, 0.9, 1.1)[form], 0.2)[-1] == HALF
    assert run(choice, 80, lambda form: (10.0, 5.5, 2.0)[form], 0.85)[-1] == LOW_RANK


def test_waiting_that_no_form_shortens_does_not_start_a_trial_again_and_again() -> None:
    """A slow rank comes and goes: what ranks wait for it is no time of a transfer."""
    choice, took_s = after(2_000), (1.0, 1.05, 1.05)
    forms = [form for turn in range(200) for form in run(choice, 100, lambda form: took_s[form], (0.4, 0.01)[turn % 2])]
    assert sum(took_s[form] for form in forms) <= 1.01 * len(forms)
    forms = run(choice, 20_000, lambda form: took_s[form], 0.4)
    assert sum(took_s[form] for form in forms) <= 1.01 * len(forms)


def test_noise_in_the_waiting_starts_few_trials() -> None:
    for seed in range(20):
        noise = random.Random(seed)
        choice, form, tried = WireChoice(), NONE, 0
        for _ in range(5_000):
            choice.observe(form, 1.0, min(0.95, noise.lognormvariate(-2.5, 1.0)))  # Median 0.08.
            form = choice.wanted
            tried += form != NONE
        assert tried <= 0.04 * 5_000


def test_a_single_long_wait_starts_no_trial() -> None:
    choice = after(2_000)
    for step in range(300):
        choice.observe(NONE, 1.0, 0.9 if step % 3 == 0 else 0.01)
        assert choice.wanted == NONE


def test_noise_alone_decides_for_no_loss() -> None:
    taken = 0
    for seed in range(100):
        noise = random.Random(seed)
        forms = run(WireChoice(), 120, lambda form: noise.lognormvariate(0.0, 0.2), 0.3)  # noqa: B023
        taken += forms[-1] != NONE
    assert taken <= 25, f"{taken} of 100 jobs took a form that saves nothing"


def test_after_a_restart_nothing_that_was_measured_counts() -> None:
    choice = WireChoice()
    run(choice, 100, lambda form: (1.0, 0.5, 0.1)[form], 0.9)
    choice.restart()
    assert choice.wanted == NONE
    assert run(choice, 100, lambda form: 1.0, 0.01)[-1] == NONE


def test_a_step_with_another_form_than_asked_for_is_not_counted() -> None:
    choice = WireChoice()
    assert not any(choice.observe(LOW_RANK, 1.0, 0.5) for _ in range(100))
    assert choice.wanted == NONE


@settings(max_examples=cases(100))
@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), max_size=300))
def test_any_times_give_a_form(times: list[tuple[float, float]]) -> None:
    choice = WireChoice()
    for step_s, exposed_s in times:
        choice.observe(choice.wanted, step_s, exposed_s)
        assert 0 <= choice.wanted < len(FORMS)


def test_the_gain_is_of_medians() -> None:
    saved, error = gain([1.0, 1.0, 9.0], [0.5, 0.5, 0.5])
    assert saved == pytest.approx(0.5) and error == 0.0
