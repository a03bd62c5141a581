"""Links that come and go: how long a slow one is remembered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from scheduler.diagnosis.links import LinkMemory, link_ratios, slow_links
from scheduler.plan.plan import Plan
from scheduler.policy.cost_policy import CostPolicy
from tests.support.windows import steady, window

FAST, BAD = 1e9, 1e8
SYNC = Plan.sync(4)


class Cluster:
    """Four links, of which the last comes and goes."""

    def __init__(self) -> None:
        self.memory, self.step = LinkMemory(), 0
        self.times = steady(4)

    def go(self, steps: int, last: float, plan: Plan = SYNC) -> npt.NDArray[np.float64]:
        """Windows, four steps apart; the rates to expect at the end."""
        for _ in range(max(1, steps // 4)):
            self.step += 4
            rate = np.array([FAST, FAST, FAST, last])
            expected = self.memory.note(window(self.times, end=self.step, rates=rate.tolist()), plan, rate)
        return expected


def test_a_link_that_is_slow_now_is_slow_at_once() -> None:
    cluster = Cluster()
    cluster.go(40, FAST)
    assert cluster.go(4, BAD)[3] == pytest.approx(BAD)


def test_a_link_that_was_slow_is_trusted_again_step_by_step() -> None:
    cluster = Cluster()
    cluster.go(100, BAD)
    rates = [cluster.go(24, FAST)[3] for _ in range(20)]
    assert BAD < rates[0] < 0.3 * FAST and rates[-1] > 0.9 * FAST
    assert rates == sorted(rates)
    assert cluster.go(4, FAST)[:3] == pytest.approx([FAST] * 3), "the others always were"


def test_the_more_often_it_was_slow_the_later_it_is_trusted() -> None:
    trusted = []
    for times in (1, 2, 3, 4, 5, 6):
        cluster = Cluster()
        for _ in range(times):
            cluster.go(40, FAST)
            cluster.go(400, BAD)
        steps = 0
        while cluster.go(4, FAST)[3] < 0.5 * FAST:
            steps += 4
        trusted.append(steps)
    assert trusted[1] > 1.7 * trusted[0] and trusted[3] > 3.5 * trusted[0]
    assert max(trusted[3:]) - min(trusted[3:]) <= 8, "with a limit"


def test_a_link_between_slow_and_well_is_counted_once() -> None:
    once, often = Cluster(), Cluster()
    for cluster, rates in ((once, (BAD,)), (often, (BAD, 0.6 * FAST) * 5)):
        for rate in rates:
            cluster.go(40, rate)
        cluster.go(400, BAD)
    assert often.go(100, FAST)[3] == pytest.approx(once.go(100, FAST)[3], rel=0.01)


@pytest.mark.parametrize(
    ("plan", "updates"),
    [
        (Plan.ps(4, 2, servers=(0,)), 2),
        (Plan.ps(4, 1), 4),
        (Plan.ps(4, 1, rule="groups", groups=((0, 1, 2), (3,))), 2),
        (Plan.grouped(4, ((0, 1, 2), (3,))), 2),
        (Plan.grouped(4, 3), 3),
        (Plan.partial(4, 2), 1),
        (Plan.subgroup(4, (0, 1)), 1),
    ],
)
def test_under_servers_steps_are_updates_of_fewer_gradients(plan: Plan, updates: int) -> None:
    assert plan.updates_per_step == updates
    rounds, served = Cluster(), Cluster()
    for cluster in (rounds, served):
        cluster.go(100, BAD)
    expected = rounds.go(40, FAST)[3]
    assert served.go(40 * updates, FAST, plan)[3] == pytest.approx(expected, rel=0.01)


def test_an_averaging_of_local_steps_counts_as_the_steps_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []
    note = LinkMemory.note

    def watched(memory: LinkMemory, *given: Any, **named: Any) -> npt.NDArray[np.float64]:
        found = note(memory, *given, **named)
        rates.append(float(found[3]))
        return found

    def after_a_slow_link(plan: Plan, per_window: int, *, counts_local: bool) -> float:
        policy = CostPolicy(4)
        for index in range(40):
            last = BAD if index < 20 else FAST
            seen = window(steady(4), end=100 + per_window * index, rates=[FAST, FAST, FAST, last])
            policy.decide(replace(seen, counts_local=counts_local), plan)
        return rates[-1]

    monkeypatch.setattr(LinkMemory, "note", watched)
    usual, local = after_a_slow_link(SYNC, 4, counts_local=False), Plan.local(4, steps=4)
    assert BAD < usual < 0.9 * FAST
    assert after_a_slow_link(local, 1, counts_local=False) == pytest.approx(usual, rel=0.01)
    assert after_a_slow_link(local, 4, counts_local=True) == pytest.approx(usual, rel=0.01)


def test_a_rank_without_a_known_rate_has_no_past() -> None:
    cluster = Cluster()
    assert cluster.go(4, np.inf)[3] == np.inf
    assert cluster.go(4, BAD)[3] == pytest.approx(BAD)
    assert cluster.go(4, np.inf)[3] == pytest.approx(BAD, rel=0.1), "what is not known now was known a moment ago"
    assert cluster.go(1000, np.inf)[3] > 100.0 * BAD, "and not for ever"


def test_a_link_of_next_to_no_rate_is_trusted_again() -> None:
    """The inverse of the smallest rate a message can carry is infinite."""
    cluster = Cluster()
    cluster.go(4, 5e-324)
    assert cluster.go(4, 5e-324)[3] <= 1.0
    assert cluster.go(10_000, FAST)[3] > 0.0
    cluster.go(100_000, FAST)
    assert cluster.go(4, FAST)[3] > 0.9 * FAST


@pytest.mark.parametrize(
    ("rates", "slow"),
    [
        ([BAD, BAD, FAST, FAST], {0, 1}),
        ([BAD, FAST], {0}),
        ([FAST, BAD, FAST], {1}),
        ([BAD, FAST, FAST, FAST], {0}),
        ([BAD] * 3 + [FAST], set()),
        ([BAD, FAST, np.inf, np.inf], {0}),
        ([BAD, FAST, np.inf, np.inf, np.inf], set()),
        ([np.inf] * 4, set()),
    ],
)
def test_up_to_half_of_the_links_are_slow(rates: list[float], slow: set[int]) -> None:
    found = np.array(rates)
    assert set(np.flatnonzero(slow_links(found)).tolist()) == slow
    if np.isfinite(found).all() and slow:
        assert set(np.flatnonzero(link_ratios(found) < 0.5).tolist()) == slow, "as the diagnosis has it"
