"""Server rules under anything: every push ends exactly once, and nobody is blocked."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.plan.plan import Plan
from scheduler.rules.server_rule import Drop, Event, Push, ServerRule, Update, pushers
from tests.support.effort import cases
from tests.unit.scheduler.rules.test_server_rule import released, updates


def plans(n: int) -> st.SearchStrategy[Plan]:
    dampings = st.sampled_from(["inverse", "relative", "none"])
    guards = st.sampled_from(["none", "none", "damp", "reject"])

    def groups_of(labels: list[int]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(r for r in range(n) if labels[r] == g) for g in sorted(set(labels)))

    groups = st.lists(st.integers(0, 2), min_size=n, max_size=n).map(groups_of)
    order = st.builds(
        lambda x, d, g, rule: Plan.ps(n, x, damping=d, guard=g, rule=rule),
        st.integers(1, n),
        dampings,
        guards,
        st.sampled_from(["x", "backup", "grace"]),
    )
    ssp = st.builds(
        lambda s, d, g: Plan.ps(n, 1, rule="ssp", slack=s, damping=d, guard=g), st.integers(0, 3), dampings, guards
    )
    dynamic = st.builds(lambda gs, d: Plan.ps(n, 1, rule="groups", groups=gs, damping=d), groups, dampings)
    leaders = st.builds(lambda gs, d: Plan.grouped(n, gs, damping=d), groups, dampings)
    return st.one_of(order, order, ssp, dynamic, leaders)


class Check:
    """Carries a random history out and checks what must hold after every event."""

    def __init__(self, n: int, plan: Plan) -> None:
        self.n, self.rule = n, ServerRule(plan, version=0)
        self.version = [0] * n
        self.step = [0] * n
        self.sent: set[tuple[int, int]] = set()
        self.done: set[tuple[int, int]] = set()
        self.away: set[int] = set()
        self.made = 0

    def push(self, rank: int, cosine: float | None, weight: float) -> None:
        if rank in self.rule.waiting:
            return
        expected = self.rule.expected(rank)
        before = self.version[rank]
        made = Push(rank=rank, step=self.step[rank], version=before, weight=weight, cosine=cosine)
        self.sent.add((rank, self.step[rank]))
        self.step[rank] += 1
        events = self.rule.push(made)
        assert self.rule.push(made) == []  # exactly once
        self.take(events)
        mine = [u for u in updates(events) if rank in [part.rank for part in u.parts]]
        if expected is not None and mine:
            assert {part.rank for part in mine[0].parts} == set(expected)

    def take(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Update):
                assert event.number == self.made
                self.made += 1
                self.parts(event)
            elif isinstance(event, Drop):
                self.apply(event.rank, event.step)
            for rank in released([event]):
                self.version[rank] = self.made
        freed = released(events)
        assert not set(freed) & set(self.rule.waiting)
        assert self.rule.version == self.made
        pending = self.sent - self.done
        assert {rank for rank, _ in pending} <= set(self.rule.waiting)
        present = {rank for rank in pushers(self.rule.plan) if rank not in self.away}
        assert not present or not present <= set(self.rule.waiting), "everybody waits"

    def parts(self, update: Update) -> None:
        assert update.parts and update.gradients == len(update.parts)
        assert 0.0 < update.lr_factor < np.inf
        for part in update.parts:
            self.apply(part.rank, part.step)
            assert part.staleness == update.number - self.version[part.rank] >= 0
            assert 0.0 <= part.damped <= 1.0 and 0.0 <= part.factor < np.inf

    def apply(self, rank: int, step: int) -> None:
        assert (rank, step) in self.sent and (rank, step) not in self.done
        self.done.add((rank, step))


@pytest.mark.slow
@settings(max_examples=cases(120))
@given(data=st.data(), n=st.integers(1, 6))
def test_every_push_ends_once_and_nobody_is_blocked(data: st.DataObject, n: int) -> None:
    check = Check(n, data.draw(plans(n)))
    for _ in range(data.draw(st.integers(1, 40))):
        what = data.draw(st.sampled_from(["push"] * 8 + ["absent", "present", "plan", "close"]))
        rank = data.draw(st.integers(0, n - 1))
        if what == "push":
            check.push(rank, data.draw(st.sampled_from([None, 0.5, -0.1, -0.9])), data.draw(st.floats(0.0, 3.0)))
        elif what == "absent":
            check.away.add(rank)
            check.take(check.rule.absent(rank))
        elif what == "close":
            held = check.rule.holding
            events = check.rule.close()
            assert bool(updates(events)) == held
            check.take(events)
        elif what == "present":
            check.away.discard(rank)
            check.take(check.rule.present(rank))
        else:
            check.take(check.rule.set_plan(data.draw(plans(n))))
    events = check.rule.drain()
    check.away = set(range(n))
    check.take(events)
    assert check.sent == check.done and check.rule.waiting == ()


@settings(max_examples=cases(60))
@given(data=st.data(), n=st.integers(1, 6))
def test_whoever_is_left_keeps_moving(data: st.DataObject, n: int) -> None:
    """All but one rank stop pushing and are reported absent: the last one is never held."""
    check = Check(n, data.draw(plans(n)))
    for rank in data.draw(st.lists(st.integers(0, n - 1), max_size=20)):
        check.push(rank, None, 1.0)
    last = data.draw(st.integers(0, n - 1))
    for rank in set(range(n)) - {last}:
        check.away.add(rank)
        check.take(check.rule.absent(rank))
    for _ in range(5):
        check.push(last, None, 1.0)
        assert last not in check.rule.waiting
