"""Server rules: exact arithmetic on a recorded order, and published step times."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest

from scheduler.plan.plan import Plan
from scheduler.rules.server_rule import (
    Drop,
    Event,
    Part,
    Push,
    Release,
    ServerRule,
    Update,
    pushers,
)
from scheduler.rules.weights import damping, lr_factor

Vector = npt.NDArray[np.float64]


def push(rank: int, step: int = 0, version: int = 0, **fields: object) -> Push:
    return Push(rank=rank, step=step, version=version, **{"weight": 1.0, **fields})  # type: ignore[arg-type]


def released(events: Iterable[Event]) -> list[int]:
    return [rank for event in events for rank in (event.ranks if isinstance(event, Release) else event.release)]


def updates(events: Iterable[Event]) -> list[Update]:
    return [event for event in events if isinstance(event, Update)]


@dataclass
class Server:
    """Carries events out: plain SGD on a vector, and every rank that is released gets the parameters of that moment."""

    plan: Plan
    theta: Vector
    eta: float = 0.1
    ranks: tuple[int, ...] | None = None
    log: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rule = ServerRule(self.plan, version=0, ranks=self.ranks)
        self.given = {rank: (0, self.theta.copy()) for rank in range(self.plan.world_size)}
        self.step = [0] * self.plan.world_size
        self.buffers: dict[tuple[int, int], Vector] = {}

    def send(self, rank: int, gradient: Callable[[Vector], Vector], weight: float = 1.0, count: int = 1) -> None:
        version, theta = self.given[rank]
        self.buffers[rank, self.step[rank]] = weight * gradient(theta)
        made = Push(rank=rank, step=self.step[rank], version=version, weight=weight, count=count)
        self.step[rank] += 1
        self.carry_out(self.rule.push(made))

    def carry_out(self, events: list[Event]) -> None:
        for event in events:
            self.log.append(event)
            if isinstance(event, Update):
                total = sum(part.factor * self.buffers.pop((part.rank, part.step)) for part in event.parts)
                self.theta = self.theta - self.eta * event.lr_factor * total
                assert event.number + 1 <= self.rule.version
            for rank in released([event]):
                self.given[rank] = (self.made, self.theta.copy())

    @property
    def made(self) -> int:
        return len(updates(self.log))


def quadratics(n: int) -> list[Callable[[Vector], Vector]]:
    """A gradient of its own for every rank."""
    rng = np.random.default_rng(3)
    pairs = [(rng.uniform(0.5, 2.0, 5), rng.normal(size=5)) for _ in range(n)]
    return [lambda theta, a=a, c=c: a * (theta - c) for a, c in pairs]  # type: ignore[misc]


ORDER = [0, 1, 3, 2, 1, 0, 2, 3, 3, 2, 1, 0, 0, 1, 2, 3]
"""A recorded order of arrivals of four ranks in which each rank comes once in every four."""


def run(plan: Plan, order: Iterable[int] = ORDER, weights: tuple[float, ...] = (1.0,) * 4) -> Server:
    server = Server(plan, np.ones(5))
    for rank in order:
        server.send(rank, quadratics(4)[rank], weights[rank])
    return server


@pytest.mark.parametrize(
    "plan",
    [
        Plan.ps(4, 4),
        Plan.ps(4, 4, rule="backup"),
        Plan.ps(4, 1, rule="groups", groups=((0, 1, 2, 3),)),
        Plan.ps(4, 1, rule="groups"),
    ],
)
@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0, 1.0), (2.0, 0.5, 1.0, 3.0)])
def test_x_of_n_and_one_group_are_synchronous_sgd(plan: Plan, weights: tuple[float, ...]) -> None:
    theta = np.ones(5)
    for _ in range(4):
        theta = theta - 0.1 * np.average([g(theta) for g in quadratics(4)], axis=0, weights=weights)
    server = run(plan, weights=weights)
    np.testing.assert_allclose(server.theta, theta, rtol=1e-14)
    assert server.made == 4
    assert all(part.staleness == 0 for update in updates(server.log) for part in update.parts)


def test_x_of_one_is_asgd_with_division_by_n() -> None:
    theta = np.ones(5)
    seen = [theta] * 4
    for rank in ORDER:
        theta = theta - 0.1 / 4 * quadratics(4)[rank](seen[rank])
        seen[rank] = theta
    server = run(Plan.ps(4, 1, damping="none"), weights=(2.0, 0.5, 1.0, 3.0))
    np.testing.assert_allclose(server.theta, theta, rtol=1e-14)


def test_dynsgd_divides_by_staleness_plus_one() -> None:
    theta, order = np.ones(5), [0, 0, 0, 3, 1, 0, 2, 3]
    seen = [(0, theta)] * 4
    for version, rank in enumerate(order):
        base, old = seen[rank]
        theta = theta - 0.1 * quadratics(4)[rank](old) / (version - base + 1)
        seen[rank] = (version + 1, theta)
    server = run(Plan.ps(4, 1, damping="inverse", lr_rule="none"), order)
    np.testing.assert_allclose(server.theta, theta, rtol=1e-14)


def test_static_x_order_as_star_has_it() -> None:
    """theta -= eta / n * sum of the x arrivals; the others' gradients fall into a later update."""
    plan = Plan.ps(4, 2, damping="none")
    theta = np.ones(5)
    gs = quadratics(4)
    first = theta - 0.1 / 4 * (gs[0](theta) + gs[1](theta))
    second = first - 0.1 / 4 * (gs[3](theta) + gs[0](first))
    server = run(plan, [0, 1, 3, 0])
    np.testing.assert_allclose(server.theta, second, rtol=1e-14)
    assert [released([event]) for event in server.log] == [[0, 1], [3, 0]]
    assert [part.staleness for part in updates(server.log)[1].parts] == [1, 0]


def test_equal_ranks_of_any_x_are_not_damped() -> None:
    """Round robin: n / x updates pass while a gradient is made."""
    for x in (1, 2, 4):
        server = run(Plan.ps(4, x), [0, 1, 2, 3] * 6)
        assert all(part.damped == 0.0 for update in updates(server.log) for part in update.parts)


def test_grouped_pushes_of_leaders() -> None:
    plan = Plan.grouped(4, [[0, 1, 2], [3]])
    assert pushers(plan) == (0, 3)
    rule = ServerRule(plan, version=5)
    (update,) = rule.push(push(0, version=5, weight=3.0, count=3))
    assert isinstance(update, Update) and update.release == (0,) and update.number == 5
    assert update.parts[0].factor == pytest.approx(1 / 3.0) and update.lr_factor == 3 / 4
    (slow,) = rule.push(push(3, version=5, weight=1.0))
    assert isinstance(slow, Update) and slow.parts[0] == Part(rank=3, step=0, factor=1.0, staleness=1, damped=0.0)
    assert slow.lr_factor == 0.25
    assert rule.expected(0) == (0,)


def test_dynamic_groups_are_barriers_of_their_own() -> None:
    rule = ServerRule(Plan.ps(4, 1, rule="groups", groups=((0, 2), (1, 3)), damping="none"), version=0)
    assert rule.push(push(0)) == [] and rule.push(push(1)) == []
    (update,) = rule.push(push(2))
    assert isinstance(update, Update) and update.release == (0, 2) and update.parts[0].factor == 0.5
    assert update.lr_factor == 0.5
    assert rule.expected(1) == (1, 3) and rule.waiting == (1,)
    assert released(rule.absent(3)) == [1]
    assert rule.expected(0) == (0, 2)


def test_ssp_holds_who_is_more_than_slack_ahead_of_the_slowest() -> None:
    rule = ServerRule(Plan.ps(3, 1, rule="ssp", slack=2), version=0)
    for step in range(2):
        assert released(rule.push(push(0, step, version=rule.version))) == [0]
    (update,) = rule.push(push(0, 2, version=2))
    assert isinstance(update, Update) and update.release == () and rule.waiting == (0,)
    assert released(rule.push(push(1, 7, version=0))) == [1]  # own counters need not start together
    (last,) = rule.push(push(2, 0, version=0))
    assert isinstance(last, Update) and set(last.release) == {0, 2} and rule.version == 5
    for step in range(3, 9):
        rule.push(push(0, step, version=rule.version))
        rule.push(push(1, step + 9, version=rule.version))
        if rule.waiting:
            break
    assert rule.absent(2) != []  # the slowest is gone
    assert rule.waiting == ()


def test_under_ssp_a_rank_joins_beside_the_slowest() -> None:
    rule = ServerRule(Plan.ps(3, 1, rule="ssp", slack=1), version=0)
    rule.absent(2)
    for step in range(5):
        rule.push(push(0, step, version=rule.version))
        rule.push(push(1, step, version=rule.version))
    rule.present(2)
    assert released(rule.push(push(0, 5, version=rule.version))) == [0]  # not held, as if rank 2 began at zero
    assert released(rule.push(push(0, 6, version=rule.version))) == []
    assert released(rule.push(push(2, 0, version=0))) == [2]


def test_backup_workers_drop_what_comes_late() -> None:
    rule = ServerRule(Plan.ps(4, 3, rule="backup", lr_rule="none"), version=0)
    for rank in (2, 0):
        assert rule.push(push(rank)) == []
    (update,) = rule.push(push(3))
    assert isinstance(update, Update) and set(update.release) == {0, 2, 3}
    assert all(part.factor == pytest.approx(1 / 3) for part in update.parts)
    (drop,) = rule.push(push(1))
    assert isinstance(drop, Drop) and drop.release == (1,) and "version 0" in drop.reason
    assert rule.version == 1 and rule.expected(0) is None


def test_a_push_counts_exactly_once() -> None:
    rule = ServerRule(Plan.ps(2, 2), version=0)
    rule.push(push(0, 4))
    assert rule.push(push(0, 4)) == [] and rule.push(push(0, 3)) == []
    (update,) = rule.push(push(1, 0))
    assert isinstance(update, Update) and [(part.rank, part.step) for part in update.parts] == [(0, 4), (1, 0)]
    assert rule.push(push(0, 4)) == [] and rule.waiting == ()


def test_nobody_waits_for_ranks_that_are_away() -> None:
    rule = ServerRule(Plan.ps(4, 3, damping="none"), version=0)
    rule.push(push(0))
    assert rule.absent(1) == [] and rule.absent(2) == []
    assert rule.absent(1) == []
    (update,) = rule.push(push(3))  # x = 3, but only two are there
    assert isinstance(update, Update) and update.release == (0, 3) and update.gradients == 2
    assert [part.factor for part in update.parts] == [0.5, 0.5] and update.lr_factor == 0.5
    (alone,) = [*rule.push(push(0, 1, version=1)), *rule.absent(3)]
    assert isinstance(alone, Update) and alone.release == (0,)
    rule.present(1)
    assert rule.push(push(0, 2, version=2)) == []


def test_push_of_a_rank_that_then_is_lost_is_used() -> None:
    rule = ServerRule(Plan.ps(3, 3), version=0)
    rule.push(push(2))
    assert rule.absent(2) == []  # its gradient is in; ranks 0 and 1 are still to come
    assert rule.push(push(0)) == []
    (update,) = rule.push(push(1))
    assert isinstance(update, Update) and [part.rank for part in update.parts] == [2, 0, 1]


def test_a_smaller_x_applies_at_once() -> None:
    """In STAR's own server it is applied at the next arrival, which may be the straggler's."""
    rule = ServerRule(Plan.ps(5, 5), version=0)
    for rank in (3, 0, 4, 1):
        assert rule.push(push(rank)) == []
    events = rule.set_plan(Plan.ps(5, 3))
    assert released(events) == [3, 0, 4] and rule.waiting == (1,)
    assert released(rule.set_plan(Plan.ps(5, 1, rule="groups", groups=((0, 2), (1,), (3, 4))))) == [1]


def test_from_ssp_to_a_barrier_frees_the_ranks_that_were_held() -> None:
    rule = ServerRule(Plan.ps(2, 1, rule="ssp", slack=0), version=0)
    rule.push(push(0))
    assert rule.waiting == (0,)
    assert rule.set_plan(Plan.ps(2, 2)) == [Release(ranks=(0,))]


def test_cut_makes_one_last_update() -> None:
    rule = ServerRule(Plan.ps(4, 4), version=7)
    assert rule.drain() == []
    rule.push(push(2, version=7))
    rule.push(push(0, version=6))
    (update,) = rule.drain()
    assert isinstance(update, Update) and update.release == (2, 0) and rule.version == 8
    held = ServerRule(Plan.ps(2, 1, rule="ssp", slack=0), version=0)
    held.push(push(1))
    assert held.drain() == [Release(ranks=(1,))]


def test_a_rule_that_was_stored_goes_on_where_it_was() -> None:
    rule = ServerRule(Plan.ps(3, 2), version=4)
    rule.push(push(2, version=4))
    again = pickle.loads(pickle.dumps(rule))
    assert again.waiting == (2,) and again.push(push(2, version=4)) == []
    assert again.push(push(0, version=3)) == rule.push(push(0, version=3)) != []


def test_learning_rate_rules() -> None:
    assert lr_factor(Plan.ps(8, 2), 2) == 0.25
    assert lr_factor(Plan.ps(8, 2, lr_rule="none"), 2) == 1.0
    noise = Plan.ps(8, 2, lr_rule="noise", noise_scale=16.0)
    assert lr_factor(noise, 2) == pytest.approx(3.0 / 9.0)
    assert lr_factor(noise, 8) == 1.0
    assert lr_factor(noise.replace(noise_scale=1e9), 2) == pytest.approx(0.25)  # noise alone: x / n
    assert lr_factor(noise.replace(noise_scale=0.0), 2) == 1.0


def test_damping_rules() -> None:
    plan = Plan.ps(8, 2)
    assert [damping(plan, s, 2) for s in (0, 3, 7)] == [1.0, 1.0, 0.5]
    assert [damping(plan.replace(damping="inverse"), s, 2) for s in (0, 3)] == [1.0, 0.25]
    assert damping(plan.replace(damping="none"), 9, 2) == 1.0


def test_the_usual_damping_is_of_the_learning_rate_and_the_rest_of_the_gradient() -> None:
    """Adam would divide out a factor that all gradients have."""
    rule = ServerRule(Plan.ps(4, 1, damping="inverse", lr_rule="none"), version=0)
    fetched = [0] * 4
    for step in range(40):
        for rank in range(4):
            (update,) = updates(rule.push(push(rank, step, version=fetched[rank])))
            assert update.parts[0].factor * update.lr_factor == pytest.approx(1.0 - update.parts[0].damped)
            fetched[rank] = rule.version
    assert update.lr_factor == pytest.approx(0.25, rel=0.01) and update.parts[0].factor == pytest.approx(1.0, rel=0.01)
    (stale,) = updates(rule.push(push(0, 40, version=rule.version - 39)))
    assert stale.lr_factor == pytest.approx(0.25, rel=0.06) and stale.parts[0].factor == pytest.approx(0.1, rel=0.06)


def test_guard_damps_smoothly() -> None:
    rule = ServerRule(Plan.ps(2, 1, damping="none", lr_rule="none", guard="damp"), version=0)
    cosines = [1.0, 0.0, -0.2, -0.5, -1.0, None, float("nan"), -1.0000001]
    kept = []
    for step, cosine in enumerate(cosines):
        (update,) = updates(rule.push(push(0, step, version=rule.version, cosine=cosine)))
        kept.append(update.parts[0].factor)
    assert kept == [pytest.approx(v, abs=1e-12) for v in (1.0, 1.0, 0.9045084971874737, 0.5, 0.0, 1.0, 1.0, 0.0)]
    assert update.parts[0].damped == pytest.approx(1.0)


def test_guard_rejects_but_never_a_whole_job() -> None:
    rule = ServerRule(Plan.ps(4, 2, guard="reject"), version=0)
    (drop,) = rule.push(push(0, 0, cosine=-0.4))
    assert isinstance(drop, Drop) and drop.release == (0,) and "cosine -0.40" in drop.reason
    assert rule.push(push(1, 0, cosine=-0.1)) == []  # noise; and the count starts again
    outcomes = [rule.push(push(0, 1 + i, cosine=-0.9)) for i in range(5)]
    assert [bool(updates(events)) for events in outcomes] == [False] * 4 + [True]
    assert rule.expected(0) is None


def test_one_bad_rank_among_good_ones_is_rejected_for_good() -> None:
    rule = ServerRule(Plan.ps(4, 1, guard="reject"), version=0)
    for step in range(50):
        for rank in range(4):
            events = rule.push(push(rank, step, version=rule.version, cosine=-0.9 if rank == 2 else 0.3))
            assert isinstance(events[0], Drop) == (rank == 2)


def test_a_sum_of_no_weight_changes_nothing() -> None:
    (update,) = ServerRule(Plan.ps(2, 1), version=0).push(push(0, weight=0.0))
    assert isinstance(update, Update) and update.parts[0].factor == 0.0


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ({"rank": 4}, r"rank is 4; expected 0\.\.3"),
        ({"version": 3}, "version 3; expected 0..2"),
        ({"weight": float("nan")}, "weight nan"),
        ({"weight": -1.0}, "weight -1.0"),
        ({"count": 0}, "0 gradients; expected at least 1"),
    ],
)
def test_bad_pushes_change_nothing(bad: dict[str, float], text: str) -> None:
    rule = ServerRule(Plan.ps(4, 2), version=2)
    fields = {"rank": 1, "step": 0, "version": 2, "weight": 1.0, **bad}
    with pytest.raises(ValueError, match=text):
        rule.push(Push(**fields))  # type: ignore[arg-type]
    assert rule.waiting == () and rule.push(push(1, 0, version=2)) == [] and rule.waiting == (1,)


def test_bad_plans_are_refused_and_the_old_one_stays() -> None:
    with pytest.raises(ValueError, match="mode sync; expected ps or grouped"):
        ServerRule(Plan.sync(4), version=0)
    with pytest.raises(ValueError, match="version is -1"):
        ServerRule(Plan.ps(4, 2), version=-1)
    with pytest.raises(ValueError, match=r"expected some of 0\.\.3"):
        ServerRule(Plan.ps(4, 2), version=0, ranks=[0, 4])
    rule = ServerRule(Plan.ps(4, 2), version=0)
    with pytest.raises(ValueError, match="is for 3 ranks; expected 4"):
        rule.set_plan(Plan.ps(3, 2))
    assert rule.plan.quorum == 2


STEPS_WITH_THE_RULE = 200


@pytest.mark.parametrize(("backup", "mean_step"), [(0, 2.49), (1, 1.50), (2, 1.15), (4, 1.06)])
def test_mean_steps_of_sync_opt(backup: int, mean_step: float) -> None:
    """32 workers of 1 +- 5 % (normal), each 4x slow with 2 % per step; late ones stop when the update is out."""
    n, steps, rng = 32, 8000, random.Random(1)
    rule = ServerRule(Plan.ps(n, n - backup, rule="backup", lr_rule="none"), version=0)
    total = 0.0
    for step in range(steps):
        times = [(4.0 if rng.random() < 0.02 else 1.0) * rng.gauss(1.0, 0.05) for _ in range(n)]
        if step >= STEPS_WITH_THE_RULE:  # By then it is known which push ends a step.
            total += sorted(times)[n - backup - 1]
            continue
        dropped = 0
        for rank in sorted(range(n), key=times.__getitem__):
            for event in rule.push(push(rank, step, version=step)):
                dropped += isinstance(event, Drop)
                if isinstance(event, Update):
                    total += times[rank]
                    assert times[rank] == sorted(times)[n - backup - 1]
                    assert len(event.parts) == n - backup
        assert dropped == backup and rule.version == step + 1
    assert total / steps == pytest.approx(mean_step, abs=0.05)
