"""What does not pay is switched off, by all ranks after the same step."""

from __future__ import annotations

import random

import pytest

from scheduler.transmission.off_switch import OffSwitch, lower_bound
from scheduler.transmission.order import order_of

MOST_STEPS = 8 + 8 * 32


def run(gain: float, noise: float, seed: int) -> tuple[OffSwitch, int]:
    rng, switch, steps = random.Random(seed), OffSwitch(), 0
    while not switch.decided:
        switch.note((1.0 - gain * switch.on) * (1.0 + abs(rng.gauss(0.0, noise))))
        steps += 1
        assert steps <= MOST_STEPS
    return switch, steps


@pytest.mark.parametrize("seed", range(5))
def test_a_gain_is_kept(seed: int) -> None:
    switch, steps = run(0.2, 0.05, seed)
    assert switch.on and steps == 8 + 3 * 32
    assert "kept: it saved" in switch.describe("overlap")


@pytest.mark.parametrize("gain", [-0.3, 0.0, 0.01])
def test_what_does_not_pay_is_off(gain: float) -> None:
    switch, steps = run(gain, 0.001, 1)
    assert not switch.on and steps == 8 + 3 * 32
    switch.note(1.0)
    assert not switch.on and "off" in switch.describe("overlap")


def test_noise_seldom_passes_for_a_gain() -> None:
    kept = sum(run(0.0, 0.1, seed)[0].on for seed in range(200))
    assert kept <= 20


def test_a_pause_of_the_program_does_not_count() -> None:
    rng, switch = random.Random(2), OffSwitch()
    while not switch.decided:
        switch.note(50.0 if rng.random() < 0.05 else 1.0 - 0.2 * switch.on)
    assert switch.on


def test_blocks_alternate() -> None:
    switch, seen = OffSwitch(), []
    for _ in range(8 + 64):
        seen.append(switch.on)
        switch.note(1.0)
    assert seen == [False] * 24 + [True] * 16 + [False] * 16 + [True] * 16


def test_the_bound_is_below_the_mean() -> None:
    assert lower_bound([0.1, 0.1]) == pytest.approx(0.1)
    assert lower_bound([0.0, 0.2]) < 0.0


@pytest.mark.parametrize("buckets", [0, 1, 2, 3, 16, 17])
def test_an_order_has_every_bucket_once(buckets: int) -> None:
    order = order_of(buckets)
    assert sorted(order) == list(range(buckets))
    if buckets == 16:
        assert order == (0, 2, 3, 5, 7, 8, 10, 12, 13, 15, 14, 11, 9, 6, 4, 1)


def go_on(switch: OffSwitch, steps: int, without_s: float, with_s: float) -> int:
    """Make steps; return the number of those in trials."""
    tried = 0
    for _ in range(steps):
        tried += not switch.decided
        switch.note(with_s if switch.on else without_s)
    return tried


def test_what_was_off_is_tried_again_once_steps_take_clearly_longer() -> None:
    """Compute hid nothing worth it; then the link becomes slow."""
    switch, _ = run(0.0, 0.001, 1)
    go_on(switch, 3_000, 1.0, 1.0)
    assert switch.decided and not switch.on
    assert 0 < go_on(switch, 200, 3.0, 2.0) <= 3 * 32 + 16
    assert switch.decided and switch.on and "again" in switch.describe("overlap")


def test_what_was_kept_is_tried_again_once_steps_take_clearly_less() -> None:
    switch, _ = run(0.3, 0.001, 1)
    assert switch.on
    assert go_on(switch, 200, 0.3, 0.35) > 0
    assert switch.decided and not switch.on


@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_a_small_shift_or_a_pause_is_no_reason_for_a_trial(factor: float) -> None:
    switch, _ = run(0.2, 0.001, 1)
    assert go_on(switch, 1_000, 1.0 * factor, 0.8 * factor) == 0
    assert go_on(switch, 10, 50.0, 50.0) == 0 and go_on(switch, 500, 1.0, 0.8) == 0


def test_steps_that_take_long_now_and_then_cost_few_trials() -> None:
    switch, _ = run(0.0, 0.001, 1)
    tried = sum(go_on(switch, 100, 1.0 + turn % 2, 1.2 * (1.0 + turn % 2)) for turn in range(400))
    assert tried <= 0.05 * 40_000


def test_ranks_that_record_the_same_times_try_again_alike() -> None:
    rng, ranks = random.Random(3), [OffSwitch() for _ in range(3)]
    for step in range(5_000):
        time_s = (1.0 + (step // 700) % 3) * (1.0 - 0.2 * ranks[0].on) * (1.0 + abs(rng.gauss(0.0, 0.05)))
        assert len({rank.note(time_s) for rank in ranks}) == len({rank.on for rank in ranks}) == 1
