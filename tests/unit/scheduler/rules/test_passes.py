"""Times of passes over several tasks, their sizes, and steps that ranks divide by them on a simulated clock."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.lab.scenarios import make_scenario
from scheduler.rules.microbatches import moves, stolen_makespan
from scheduler.rules.passes import PassTimes, earliest_end, pass_sizes, spread
from scheduler.rules.step_layout import LONGEST
from tests.support.steal_world import StealWorld

FIXED_S, SAMPLE_S, BATCH, RANKS = 0.006, 0.00075, 32, 4


def _fitted(fixed: float = 8.0, slow: float = 1.0) -> PassTimes:
    times, rng = PassTimes(RANKS), random.Random(1)
    for step in range(20):
        for rank in range(RANKS):
            for tasks in (9, 32):
                pace_s = 0.001 * (slow if rank == 3 else 1.0) * rng.uniform(1.0, 1.02)
                times.note(rank, tasks, pace_s * (fixed + tasks), (0, step))
    return times


@pytest.mark.parametrize("fixed", [0.0, 0.5, 8.0, 40.0])
def test_what_a_pass_takes_whatever_its_size_is_found_in_pairs_of_passes(fixed: float) -> None:
    times = _fitted(fixed)
    assert times.fixed == pytest.approx(fixed, abs=0.1 * fixed + 0.7)
    assert times.expected_s(0, 20) == pytest.approx(0.001 * (fixed + 20), rel=0.05)
    assert times.fixed_part(4, 32) == pytest.approx(4 * fixed / (4 * fixed + 32), abs=0.05)


def test_a_rank_that_becomes_slow_between_two_passes_changes_only_its_own_pace() -> None:
    times = _fitted()
    times.note(1, 9, 4.0 * 0.001 * 17, (0, 20))
    assert times.fixed == pytest.approx(8.0, rel=0.15)
    assert times.pace_s(1) == pytest.approx(0.004, rel=0.15) and times.pace_s(0) == pytest.approx(0.001, rel=0.1)
    assert times.likely_s(0.017, 0.018) == 0.018
    assert times.likely_s(0.017, 0.030) == pytest.approx(4.0 * 0.017, rel=0.1)  # As late as the one before.
    assert math.isnan(PassTimes(2).pace_s(0)) and math.isnan(PassTimes(2).fixed_part(4, 32))


@pytest.mark.parametrize("seed", range(40))
def test_passes_are_all_of_a_ranks_tasks_and_none_is_larger_than_a_batch(seed: int) -> None:
    rng = random.Random(seed)
    count, cap, fixed = rng.randint(1, 200), rng.randint(1, 64), rng.choice((0.0, 1.0, 8.0, 90.0))
    first = rng.choice((math.inf, rng.uniform(0.0, 100.0)))
    sizes = pass_sizes(count, cap, rng.randint(1, cap), fixed, first)
    assert sum(sizes) == count and min(sizes) >= 1 and max(sizes) <= cap
    if fixed > cap:
        assert len(sizes) == -(-count // cap)


def _sizes(times: PassTimes, step: int) -> list[int]:
    first_s = times.first_pass_s(np.full(RANKS, 0.001), np.full(RANKS, 32), 32, (0, step))
    return pass_sizes(32, 32, 8, times.fixed, first_s / 0.001)


def test_one_pass_where_a_pass_costs_much_and_no_rank_becomes_slow_a_short_first_one_where_one_does() -> None:
    moving = _fitted()
    for step in range(20, 60):
        moving.note(step % 4, 32, 4.0 * 0.040 if step % 4 == 0 else 0.040, (0, step))
        moving.note(step % 4, 9, 0.017, (0, step))
    assert _sizes(_fitted(), 20) == [32]
    assert _sizes(moving, 60)[0] <= 16 and len(_sizes(moving, 60)) == 2
    free = _sizes(_fitted(0.0), 20)
    assert free[0] <= 8 and len(free) > 2  # It costs nothing.


def _mean_step_s(
    surprise: Callable[[int], bool], steps: int = 600, *, always: int = 0, scatter: float = 0.0
) -> float:
    """Mean time of steps of equal ranks, one of which needs four times as long for its first pass in some steps.

    Args:
        surprise: Whether a step is one of these; the rank returns the rest of its tasks.
        steps: Number of steps.
        always: Length of each step's first pass in tasks, 0 to choose it.
        scatter: By which fraction passes take longer than they should, as half a normal distribution.
    """
    times, total_s, rng = _fitted(), 0.0, random.Random(3)

    def note(rank: int, tasks: int, time_s: float, step: int) -> None:
        times.note(rank, tasks, time_s * (1.0 + abs(rng.gauss(0.0, scatter))), (0, step))

    for step in range(20, 20 + steps):
        first = always or _sizes(times, step)[0]
        first_s, slow = 0.001 * (8.0 + first), 4.0 if surprise(step) else 1.0
        total_s += max(0.040 + (0.008 if first < 32 else 0.0), slow * first_s)
        for rank in range(RANKS):
            is_slow = slow > 1.0 and rank == step % RANKS
            note(rank, first, first_s * (slow if is_slow else 1.0), step)
            if first < 32 and not is_slow:
                note(rank, 32 - first, 0.001 * (8.0 + 32 - first), step)
    return total_s / steps


def test_first_passes_are_short_in_steps_in_which_a_rank_may_become_slow_and_not_soon_behind_one() -> None:
    short_s = _mean_step_s(lambda step: step % 5 == 0, always=4)
    for scatter in (0.0, 0.1):  # Usual passes take a little longer or shorter, which tells nothing.
        lasting_s = _mean_step_s(lambda step: step % 5 == 0, scatter=scatter)
        assert lasting_s < 0.9 * short_s, "slowness that lasts five steps"
        assert _mean_step_s(lambda step: step % 5 == 0, 100, scatter=scatter) < 0.95 * short_s, "learnt soon"
        for seed in range(5):  # Without a pattern there is little to lose.
            surprises = set(random.Random(seed).sample(range(20, 620), 120))
            assert _mean_step_s(surprises.__contains__, scatter=scatter) < 1.08 * short_s
        assert _mean_step_s(lambda step: False, scatter=scatter) < 0.041


def test_a_late_pass_tells_before_it_has_ended_that_its_rank_has_become_slow() -> None:
    """The shares of the next step are made meanwhile, and soon behind a change no first pass is short."""
    times = _fitted()
    for step in range(20, 60):
        slow = 4.0 if step % 5 == 0 else 1.0
        for rank in range(RANKS):
            times.note(rank, 32, 0.040 * (slow if rank == 1 else 1.0), (0, step))
    times.note(1, 32, 0.040, (0, 60))  # Expected again.
    times.note_late(1, 32, 1.2 * 0.040, (0, 60))
    assert len(_sizes(times, 61)) == 2, "the change of step 60 is not known"
    times.note_late(1, 32, 2.0 * 0.040, (0, 60))
    assert len(_sizes(times, 61)) == 1
    PassTimes(RANKS).note_late(0, 9, 1.0, (0, 0))  # Nothing is known, so nothing is late.


@pytest.mark.parametrize("seed", range(40))
def test_tasks_end_as_early_as_they_can(seed: int) -> None:
    rng = random.Random(seed)
    ranks, cap = rng.randint(2, 3), rng.randint(1, 6)
    pace_s = [rng.uniform(0.5, 4.0) for _ in range(ranks)]
    free_s = [rng.choice((0.0, rng.uniform(0.0, 6.0))) for _ in range(ranks)]
    fixed, tasks, least = rng.choice((0.0, 0.7, 3.0)), rng.randint(ranks, 10), rng.choice((0, 1))

    def end_s(rank: int, count: int) -> float:
        return free_s[rank] + pace_s[rank] * (fixed * -(-count // cap) + count) if count else 0.0

    every = (c for c in itertools.product(range(least, tasks + 1), repeat=ranks) if sum(c) == tasks)
    best_s = min(max(end_s(rank, count) for rank, count in enumerate(counts)) for counts in every)
    found_s = float(earliest_end(np.array(free_s), np.array(pace_s), tasks, fixed, cap, least))
    assert found_s == pytest.approx(best_s, rel=1e-5)
    after_s, counts = spread(free_s, pace_s, tasks, fixed, cap, least)
    assert sum(counts) == tasks and min(counts) >= least
    assert max(end_s(rank, count) for rank, count in enumerate(counts)) == pytest.approx(best_s, rel=1e-5)
    assert after_s == pytest.approx(best_s, rel=1e-5)


def _world(scenario: str, fixed_s: float, sample_s: float, epochs: int = 5) -> tuple[StealWorld, float]:
    """Steps behind the first epochs, and the bound of one."""
    slow = make_scenario(scenario, RANKS)
    world = StealWorld(lambda step, rank: slow.slowdown(rank, step), fixed_s=fixed_s, sample_s=sample_s)
    for _ in range(epochs):
        world.epoch(10)
    batch_s = fixed_s + sample_s * BATCH
    return world, (batch_s + world.reduce_s) * RANKS / slow.capacity(fixed_s / batch_s)


@pytest.mark.parametrize(
    ("scenario", "fixed_s", "sample_s", "most", "passes"),
    [
        ("rotating", FIXED_S, SAMPLE_S, 1.21, 8.5),
        ("rotating", 0.0, 0.03 / BATCH, 1.08, 99.0),
        ("one-slow", FIXED_S, SAMPLE_S, 1.05, 4.5),
        ("none", FIXED_S, SAMPLE_S, 1.05, 4.5),
    ],
)
def test_steps_come_near_the_bound_though_every_pass_has_its_fixed_cost(
    scenario: str, fixed_s: float, sample_s: float, most: float, passes: float
) -> None:
    """Four micro-batches of every rank, each in a pass of its own, take 1.6 times the bound in the first case."""
    world, bound_s = _world(scenario, fixed_s, sample_s)
    assert statistics.mean(world.steps_s[20:]) < most * bound_s
    assert statistics.mean(world.passes[20:]) < passes
    assert world.most <= LONGEST * BATCH


@pytest.mark.parametrize("scenario", ["rotating", "one-slow", "two-slow"])
def test_the_price_of_taking_over_is_what_steps_take(scenario: str) -> None:
    world, _ = _world(scenario, FIXED_S, SAMPLE_S)
    slow = make_scenario(scenario, RANKS)
    parts = 4
    times_s = np.array([slow.rows[step % len(slow.rows)] for step in range(20, 50)])
    times_s = times_s * (parts * FIXED_S + SAMPLE_S * BATCH)
    fixed_part = parts * FIXED_S / (parts * FIXED_S + SAMPLE_S * BATCH)
    moving = moves(times_s)
    assert moving == (scenario == "rotating")
    priced_s = stolen_makespan(times_s, parts, grain=8, fixed_part=fixed_part, moving=moving).mean() + world.reduce_s
    assert priced_s == pytest.approx(statistics.mean(world.steps_s[20:]), rel=0.08)


@pytest.mark.parametrize("limit, most", [(0, 2 * BATCH), (20, 20), (8, 8), (3, 8)])
def test_no_pass_has_more_samples_than_fit_unless_a_micro_batch_of_the_users_has(limit: int, most: int) -> None:
    """All samples of an epoch are in passes, asserted by the world; a pass that may be long is, for its fixed cost."""
    world = StealWorld(
        lambda step, rank: 4.0 if rank == step // 5 % 4 else 1.0, fixed_s=0.006, sample_s=0.001, limit=limit
    )
    for _ in range(3):
        world.epoch(10)
    assert min(most, 40) - 4 < world.most <= most
