"""Micro-batches of a step: where they lie, who begins with which, and when one is taken over."""

from __future__ import annotations

import heapq
import itertools
import math
import random
import time
from collections import deque

import numpy as np
import pytest

from scheduler.rules.microbatches import (
    TRANSFER_S,
    Kind,
    MicrobatchPool,
    equal_passes,
    forecast_shares,
    stolen_makespan,
)
from scheduler.rules.step_layout import StepLayout, grain


def _positions(spans: tuple[tuple[int, int], ...]) -> list[int]:
    return [position for start, stop in spans for position in range(start, stop)]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_every_position_is_in_one_micro_batch_and_every_step_but_the_last_has_the_global_batch(
    seed: int, drop_last: bool
) -> None:
    rng = random.Random(seed)
    ranks, batch = rng.randint(1, 5), rng.randint(1, 12)
    parts, samples = rng.randint(1, batch), rng.randint(0, 300)
    cuts = sorted(rng.sample(range(samples + 1), k=min(4, samples + 1)))
    done = list(zip(cuts[::2], cuts[1::2], strict=False))
    layout = StepLayout(samples, batch, parts, ranks, drop_last=drop_last, done=done)
    found = [
        [_positions(layout.spans(step, task)) for task in range(layout.tasks(step))] for step in range(layout.steps)
    ]
    wanted = [p for p in range(samples) if not any(a <= p < b for a, b in done)]
    wanted = wanted[: len(wanted) - len(wanted) % (ranks * batch)] if drop_last else wanted
    assert [p for step in found for task in step for p in task] == wanted
    assert [sum(map(len, step)) for step in found[:-1]] == [ranks * batch] * (len(found) - 1)
    assert all(task for step in found for task in step)
    assert layout.total == sum(map(len, found))
    for step in found[:-1]:
        sizes = [len(task) for task in step]
        assert max(sizes) - min(sizes) <= 1
        assert [sum(sizes[rank * parts : (rank + 1) * parts]) for rank in range(ranks)] == [batch] * ranks


def test_a_layout_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="at most one micro-batch for each sample"):
        StepLayout(100, 4, 5, 2)


@pytest.mark.parametrize("seed", range(60))
def test_shares_have_the_least_time_of_all_that_give_every_rank_a_micro_batch(seed: int) -> None:
    rng = random.Random(seed)
    ranks = rng.randint(2, 4)
    paces_s = [rng.choice((1.0, 1.0, 1.1, 2.0, 4.0, rng.uniform(0.5, 3.0))) for _ in range(ranks)]
    parts = rng.randint(1, 4)
    tasks = parts * ranks
    all_counts = (c for c in itertools.product(range(1, tasks + 1), repeat=ranks) if sum(c) == tasks)
    best = min(max(n * pace for n, pace in zip(counts, paces_s, strict=True)) for counts in all_counts)
    times_s = parts * np.array([paces_s, [2.0 * pace_s for pace_s in paces_s]])
    assert stolen_makespan(times_s, parts) == pytest.approx([best, 2.0 * best])
    shares = forecast_shares(paces_s, tasks, parts)
    assert sum(shares) == tasks and min(shares) >= 1
    found = max(n * pace for n, pace in zip(shares, paces_s, strict=True))
    assert found <= 1.03 * best + 1e-12


def test_without_a_pace_or_a_gain_shares_are_equal() -> None:
    assert forecast_shares([math.nan] * 3, 12, 4) == (4, 4, 4)
    assert forecast_shares([1.0, 1.02, 1.0], 12, 4) == (4, 4, 4)
    assert forecast_shares([1.0, 4.0, 1.0, 1.0], 3, 4) == (1, 1, 1, 0)


def _pool(ranks: int = 2, parts: int = 3) -> MicrobatchPool:
    pool = MicrobatchPool(StepLayout(100 * ranks * parts, parts, parts, ranks))
    pool.steals = True
    for rank in range(ranks):
        pool.open(rank, 0, 0.0)
    return pool


def test_a_rank_that_has_begun_its_last_one_takes_over_the_tail_of_the_one_that_would_end_last() -> None:
    pool = _pool()
    assert pool.begin(1, 0, 3, 0.0, 0.0) == []
    pool.begin(0, 0, 0, 0.0, 0.0)
    pool.begin(0, 0, 1, 1.0, 1.0)
    assert pool.begin(0, 0, 2, 1.0, 2.0) == []  # Much may happen until it is ready for more.
    assert pool.tick(2.9)[0] == []
    actions, _ = pool.tick(2.999)  # Rank 1 has computed its first for 3 s: it would end at 9 s, rank 0 at 4.
    assert [(each.rank, each.kind, each.task, each.tasks) for each in actions] == [(1, Kind.RECALL, 4, 2)]
    granted = pool.returned(1, 0, 4, 1, 3.0)  # It has begun the first of the two meanwhile.
    assert (granted[0].rank, granted[0].kind, granted[0].task, granted[0].tasks) == (0, Kind.GRANT, 5, 1)
    assert pool.queued(1, 0) == [4] and pool.queued(0, 0) == [5]


def test_what_a_rank_gives_back_is_for_those_that_end_it_soonest() -> None:
    pool = _pool(3, 4)
    for rank in range(3):
        pool.begin(rank, 0, 4 * rank, 0.0, 0.0)
    for rank in (0, 1):
        pool.begin(rank, 0, 4 * rank + 1, 1.0, 1.0, 3)
    actions = pool.begin(2, 0, -1, 4.0, 4.0, given=[(9, 12)])  # Both others end at 4 s, this one would at 16.
    taken, now_s = {0: 0, 1: 0}, 4.0
    while actions:
        now_s += 1.0
        for each in actions:
            assert each.kind is Kind.GRANT
            taken[each.rank] += each.tasks
            pool.begin(each.rank, 0, each.task, 1.0, now_s, each.tasks)
        actions = [each for rank in (0, 1) for each in pool.begin(rank, 0, -1, 1.0, now_s + 1.0)]
    assert sorted(taken.values()) == [1, 2] and pool.queued(2, 0) == []


def test_tasks_that_a_rank_does_not_have_it_cannot_give_back() -> None:
    pool = _pool()
    pool.begin(1, 0, 3, 0.0, 0.0)
    with pytest.raises(ValueError, match="gives back tasks"):
        pool.begin(1, 0, -1, 1.0, 1.0, given=[(5, 6), (3, 4)])
    before = pool.queued(1, 0)
    with pytest.raises(ValueError, match="gives back tasks"):
        pool.begin(1, 0, before[0], 1.0, 1.0, given=[(0, 1)])
    assert pool.queued(1, 0) == before, "the pass that came with it is not begun either"
    assert pool.queued(1, 0) == [4, 5]


def test_tasks_given_back_while_they_were_wanted_are_not_granted_twice() -> None:
    pool = _pool()
    pool.begin(1, 0, 3, 0.0, 0.0)
    pool.begin(0, 0, 0, 0.0, 0.0)
    pool.begin(0, 0, 1, 1.0, 1.0)
    pool.begin(0, 0, 2, 1.0, 2.0)
    assert [each.kind for each in pool.tick(2.999)[0]] == [Kind.RECALL]
    granted = pool.begin(1, 0, -1, 3.0, 3.0, given=[(4, 6)])
    assert [(each.rank, each.kind) for each in granted] == [(0, Kind.GRANT)]
    late = pool.returned(1, 0, 4, 0, 3.0)  # The answer: nothing of it is left.
    assert [each for each in late if each.kind is Kind.GRANT and each.task == granted[0].task] == []
    assert sorted(pool.queued(0, 0) + pool.queued(1, 0)) == [4, 5]


def test_nothing_is_taken_over_that_would_not_end_sooner() -> None:
    pool = _pool()
    for rank in (0, 1):
        pool.begin(rank, 0, 3 * rank, 0.0, 0.0)
    for rank in (0, 1):
        pool.begin(rank, 0, 3 * rank + 1, 1.0, 1.0 + 0.01 * rank)
    assert pool.begin(0, 0, 2, 1.0, 2.0) == []  # Rank 1 ends at 3.01 s, rank 0 would at 4.
    pool.steals = False
    assert pool.tick(100.0) == ([], math.inf)


def test_time_alone_shows_that_a_rank_has_become_slow() -> None:
    pool = _pool()
    for task in (0, 1):
        pool.begin(0, 0, task, float(task > 0), float(task))
    pool.begin(1, 0, 3, 0.0, 1.9)
    pool.begin(0, 0, 2, 1.0, 2.0)
    pool.begin(1, 0, 4, 0.5, 2.9)
    assert pool.begin(0, 0, -1, 1.0, 3.0) == []  # It would take 1 s for what rank 1 would end at 3.9 s.
    actions, again_s = pool.tick(3.0)
    assert actions == [] and 3.0 < again_s < 4.0
    assert [each.task for each in pool.tick(5.0)[0]] == [5]
    closed = pool.begin(1, 0, 5, 2.0, 5.0)
    assert {each.rank for each in closed if each.kind is Kind.CLOSED} == {0, 1}
    assert pool.returned(1, 0, 5, False, 5.0) == []  # It was begun before the recall came.


def test_every_rank_keeps_a_micro_batch_of_a_whole_step() -> None:
    pool = _pool()
    for task in range(3):
        pool.begin(0, 0, task, 0.001 * (task > 0), 10.0)
    recalled = []
    for now_s in (10.0, 11.0, 12.0):
        actions = pool.tick(now_s)[0]
        recalled += [each.task for each in actions]
        for each in actions:
            pool.returned(1, 0, each.task, True, now_s)
        for task in pool.queued(0, 0):
            pool.begin(0, 0, task, 0.001, now_s)
    assert recalled in ([5, 4], []) and pool.queued(1, 0)[0] == 3


def test_what_a_rank_does_not_have_it_cannot_begin() -> None:
    pool = _pool()
    with pytest.raises(ValueError, match="rank 1 begins 1 tasks from 0 of step 0"):
        pool.begin(1, 0, 0, 0.0, 0.0)


def test_a_rank_that_leaves_leaves_its_micro_batches_to_the_others_also_without_taking_over() -> None:
    pool = _pool()
    pool.steals = False
    for task in range(3):
        pool.begin(0, 0, task, 0.0, 0.0)
    granted = pool.leave(1, 1.0)
    taken = []
    while granted := [each for each in granted if each.kind is Kind.GRANT]:
        taken.append(granted[0].task)
        granted = pool.begin(0, 0, granted[0].task, TRANSFER_S, 2.0)
    assert sorted(taken) == [3, 4, 5]


@pytest.mark.parametrize("ranks", [2, 40])
def test_two_ranks_that_are_both_overdue_do_not_take_a_task_from_each_other_for_ever(ranks: int) -> None:
    pool = _pool(ranks, 2)
    for rank in range(ranks):
        pool.begin(rank, 0, 2 * rank, 0.01, 0.0)
    pool.begin(0, 0, 1, 0.01, 0.01)
    told, moved = pool.begin(0, 0, -1, 0.01, 1.0), 0  # All others are at their first for 1 s, and have one left.
    while recalled := [each for each in told if each.kind is Kind.RECALL]:
        moved += 1
        assert moved <= ranks
        told = [
            after
            for each in recalled
            for after in [*pool.returned(each.rank, 0, each.task, True, 1.0), *pool.tick(1.0)[0]]
        ]
    assert moved and sum(len(pool.queued(rank, 0)) for rank in range(ranks)) == ranks - 1


def test_a_step_of_many_ranks_is_decided_as_quickly_as_it_is_computed() -> None:
    """512 ranks, some of them slow: deciding a whole step takes part of a second of processor time."""
    ranks, parts = 512, 4
    pool = _pool(ranks, parts)
    paces_s = [4.0 if rank % 17 == 3 else 1.0 + 1e-4 * rank for rank in range(ranks)]
    events: list[tuple[float, int]] = [(0.0, rank) for rank in range(ranks)]
    waiting: set[int] = set()
    began_s, now_s = time.process_time(), 0.0
    while pool.queued(events[0][1], 0) or len(waiting) < ranks:
        now_s, rank = heapq.heappop(events)
        queue = pool.queued(rank, 0)
        told = deque(pool.begin(rank, 0, queue[0] if queue else -1, paces_s[rank] if now_s else 0.0, now_s))
        if queue:
            heapq.heappush(events, (now_s + paces_s[rank], rank))
        else:
            waiting.add(rank)
        while told:
            each = told.popleft()
            if each.kind is Kind.RECALL:
                given = each.task in pool.queued(each.rank, 0)
                told.extend(pool.returned(each.rank, 0, each.task, given, now_s))
            elif each.kind is Kind.GRANT and each.rank in waiting:
                waiting.discard(each.rank)
                heapq.heappush(events, (now_s, each.rank))
        if not any(pool.queued(rank, 0) for rank in range(ranks)):
            break
    assert now_s < 6.0  # Without taking over 16.
    assert time.process_time() - began_s < 20.0


@pytest.mark.parametrize(("ranks", "batch", "parts"), [(2, 8, 4), (3, 8, 3), (4, 32, 4), (8, 32, 2), (2, 8, 8)])
def test_without_taking_over_ranks_have_equally_many_passes_in_a_short_step(ranks: int, batch: int, parts: int) -> None:
    """Ranks that meet within their passes would wait for one that has fewer."""
    size = grain(batch, parts)
    for samples in range(1, 2 * ranks * batch):
        layout = StepLayout(samples, batch, parts, ranks, grain=size)
        pool, shares = MicrobatchPool(layout), []
        for rank in range(ranks):
            shares += [each for each in pool.open(rank, 1, 0.0) if each.kind is Kind.SHARES]
        assert all(0 < each <= size for found in shares for each in found.sizes)
        passes = {step: {len(found.sizes) for found in shares if found.step == step} for step in range(layout.steps)}
        assert equal_passes(layout) == all(len(found) == 1 for found in passes.values()), samples
        last = layout.tasks(layout.steps - 1)
        if size > 1 or last % ranks == 0:
            assert equal_passes(layout) == (last >= ranks), samples
    assert equal_passes(StepLayout(0, batch, parts, ranks, grain=size))
