"""Rule `grace` on a clock: nobody who is usually in time is left out, and who is not costs little."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from scheduler.plan.plan import Plan
from scheduler.rules.grace import UpdateGrace
from scheduler.rules.server_rule import Drop, Event, Push, Release, ServerRule, Update

STEP_S = 0.1


class World:
    """Ranks whose batches take `batch_s(rank, update)` seconds, and a server whose answers take none."""

    def __init__(self, n: int, batch_s: Callable[[int, int], float], *, quorum: int | None = None) -> None:
        plan = Plan.ps(n, n - 1 if quorum is None else quorum, rule="grace", lr_rule="none")
        self.rule = ServerRule(plan, version=0)
        self.grace = UpdateGrace(self.rule, 0.0)
        self.batch_s = batch_s
        self.base, self.sent = [0] * n, [0] * n
        self.arrive_s: dict[int, float] = {rank: batch_s(rank, 0) for rank in range(n)}
        self.now_s = 0.0
        self.updates: list[tuple[float, tuple[int, ...]]] = []
        self.dropped: list[int] = []

    def run(self, updates: int) -> World:
        while len(self.updates) < updates:
            rank = min(self.arrive_s, key=self.arrive_s.__getitem__)
            due_s = self.grace.due_s
            if due_s is not None and due_s < self.arrive_s[rank]:
                self.now_s = due_s
                self._take(self.grace.expire(due_s))
                continue
            self.now_s = self.arrive_s.pop(rank)
            self.sent[rank] += 1
            self._take(self.rule.push(Push(rank=rank, step=self.sent[rank], version=self.base[rank], weight=1.0)))
            self.grace.look(self.now_s)
        return self

    def _take(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Update):
                self.updates.append((self.now_s, tuple(sorted(part.rank for part in event.parts))))
                assert all(part.staleness == 0 for part in event.parts)
            elif isinstance(event, Drop):
                self.dropped.append(event.rank)
            for rank in event.ranks if isinstance(event, Release) else event.release:
                self.base[rank] = event.number + 1 if isinstance(event, Update) else self.rule.version
                self.arrive_s[rank] = self.now_s + self.batch_s(rank, len(self.updates))

    def intervals_s(self, begin: int = 0) -> list[float]:
        ends = [0.0, *(end_s for end_s, _ in self.updates)]
        return [after - before for before, after in zip(ends[begin:], ends[begin + 1 :], strict=False)]


@pytest.mark.parametrize("n", [2, 4, 16])
def test_equally_fast_ranks_are_in_every_update(n: int) -> None:
    dice = random.Random(n)
    world = World(n, lambda rank, update: STEP_S * (1.0 + 0.05 * dice.random())).run(300)
    assert not world.dropped and all(len(ranks) == n for _, ranks in world.updates)


def test_a_freeze_costs_one_grace_and_one_gradient() -> None:
    """The rank freezes for 20 steps, in the middle of a batch, and is in time again as soon as it is back."""
    frozen_at, lasts_s = 50, 20.3 * STEP_S
    world = World(4, lambda rank, update: STEP_S + (lasts_s if rank == 3 and update == frozen_at else 0.0)).run(100)
    without = [index for index, (_, ranks) in enumerate(world.updates) if 3 not in ranks]
    assert 20 <= len(without) <= 22 and without == list(range(frozen_at, frozen_at + len(without)))
    assert world.dropped == [3], "what it had begun before"
    lost_s = world.updates[-1][0] - 100 * STEP_S
    assert 0.0 < lost_s <= 0.3 * STEP_S, "one grace, of a quarter of a step"


def test_a_rank_that_stays_slow_is_waited_for_ever_more_rarely() -> None:
    world = World(4, lambda rank, update: STEP_S * (4.3 if rank == 0 else 1.0)).run(600)
    waited = sum(interval_s > 1.1 * STEP_S for interval_s in world.intervals_s())
    assert 3 <= waited <= 9, "the first, and then after 1, 2, 4, ... of its pushes"
    assert world.now_s <= 600 * STEP_S * 1.01
    assert {ranks for _, ranks in world.updates} == {(1, 2, 3)}


def test_a_rank_that_was_slow_is_in_again() -> None:
    world = World(4, lambda rank, update: STEP_S * (4.3 if rank == 0 and update < 100 else 1.0)).run(400)
    back = next(index for index, (_, ranks) in enumerate(world.updates) if 0 in ranks)
    assert back <= 100 + 2 * 100, "at latest when as many of its pushes were dropped again"
    assert all(len(ranks) == 4 for _, ranks in world.updates[back:])


def test_two_that_freeze_of_three_that_are_needed_hold_up_the_others_only_while_both_do() -> None:
    until = {2: 30.5, 3: 10.5}

    def batch_s(rank: int, update: int) -> float:
        return STEP_S * (1.0 + (until[rank] if update == 20 and rank in until else 0.0))

    world = World(4, batch_s, quorum=3).run(60)
    assert sum(interval_s > 2.0 * STEP_S for interval_s in world.intervals_s()) == 1, "10 steps until the first is back"
    assert world.dropped == [2] and world.updates[-1][1] == (0, 1, 2, 3)


def test_a_rank_alone_with_a_dropped_push_goes_on() -> None:
    """All others are gone: no update will come that would give it the parameters."""
    rule = ServerRule(Plan.ps(3, 2, rule="grace", lr_rule="none"), version=0)
    for rank in (0, 1):
        rule.push(Push(rank=rank, step=1, version=0, weight=1.0))
    assert [type(event) for event in rule.close()] == [Update]
    late = rule.push(Push(rank=2, step=1, version=0, weight=1.0))
    assert late == [Drop(rank=2, step=1, reason="computed on version 0, the server is at 1", release=())]
    assert rule.absent(0) == [] and rule.absent(1) == [Release(ranks=(2,))]
    (update,) = rule.push(Push(rank=2, step=2, version=1, weight=1.0))
    assert isinstance(update, Update) and update.release == (2,)


def test_an_update_has_a_deadline_whatever_plans_change_meanwhile() -> None:
    """The quorum is complete, then no more under another plan, and again under a third one."""
    plans = [Plan.ps(4, x, rule="grace", lr_rule="none") for x in (2, 3, 2)]
    rule = ServerRule(plans[0], version=0)
    grace = UpdateGrace(rule, 0.0)
    for rank in (0, 1):
        rule.push(Push(rank=rank, step=1, version=0, weight=1.0))
    due_s = []
    for at_s, plan in enumerate(plans, start=1):
        assert rule.set_plan(plan) == []
        grace.look(float(at_s))
        due_s.append(grace.due_s)
    assert due_s[0] is not None and due_s[1] is None and due_s[2] is not None
    assert [type(event) for event in grace.expire(due_s[2])] == [Update]


def test_a_journal_keeps_the_grace() -> None:
    rule = ServerRule(Plan.ps(3, 2, rule="grace", lr_rule="none"), version=0)
    for rank in (0, 1):
        rule.push(Push(rank=rank, step=1, version=0, weight=1.0))
    grace = UpdateGrace(rule, 5.0)  # Of a restarted server.
    grace.look(6.0)
    assert rule.holding and grace.due_s is not None and grace.expire(grace.due_s - 1e-6) == []
    assert [type(event) for event in grace.expire(grace.due_s)] == [Update] and grace.due_s is None
