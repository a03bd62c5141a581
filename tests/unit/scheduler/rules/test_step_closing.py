"""When a step may close: quorum, grace, ranks that are slow or away, and reports in any order."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.records import Plan
from scheduler.rules.step_closing import Close, ClosingRule
from tests.support.effort import cases

COMPUTE_S = 0.1


def rule(world_size: int, quorum: int | None = None, **options: float) -> ClosingRule:
    plan = Plan.sync(world_size) if quorum is None else Plan.partial(world_size, quorum)
    return ClosingRule(plan, **options)


def drive(subject: ClosingRule, arrivals: list[tuple[float, int, int, float]]) -> list[tuple[float, Close]]:
    """Feed (time, rank, step, compute time) in order of time, asking again whenever the rule wants to be asked."""
    orders: list[tuple[float, Close]] = []
    again_s: float | None = None

    def ask(now_s: float) -> float | None:
        order, wake_s = subject.evaluate(now_s)
        if order is not None:
            orders.append((now_s, order))
            assert wake_s is None
        assert wake_s is None or wake_s > now_s, "the next look lies in the past"
        return wake_s

    for now_s, rank, step, compute_s in sorted(arrivals):
        while again_s is not None and again_s <= now_s:
            again_s = ask(again_s)
        subject.arrive(rank, step, compute_s, now_s)
        again_s = ask(now_s)
    while again_s is not None:
        again_s = ask(again_s)
    return orders


def steps_of_equal_ranks(
    world_size: int, steps: int, jitter_s: float, seed: int, compute_s: float = COMPUTE_S
) -> list[tuple[float, int, int, float]]:
    """Ranks that start together when the last of the step before has arrived, each late by at most `jitter_s`."""
    source, start_s, arrivals = random.Random(seed), 0.0, []
    for step in range(steps):
        times = [compute_s + jitter_s * source.random() for _ in range(world_size)]
        arrivals += [(start_s + t, rank, step, t) for rank, t in enumerate(times)]
        start_s += max(times)
    return arrivals


@settings(max_examples=cases(100), deadline=None)
@given(st.integers(2, 6), st.integers(1, 6), st.integers(0, 1000), st.floats(0.0, 0.24))
def test_equal_ranks_with_jitter_below_the_grace_are_never_left_out(
    world_size: int, quorum: int, seed: int, jitter: float
) -> None:
    subject = rule(world_size, min(quorum, world_size))
    arrivals = steps_of_equal_ranks(world_size, 30, jitter * COMPUTE_S, seed)
    assert drive(subject, arrivals) == []


def test_a_rank_just_past_the_grace_is_left_out_and_before_it_is_not() -> None:
    for behind_s, left_out in ((0.2499 * COMPUTE_S, False), (0.2501 * COMPUTE_S, True)):
        subject = rule(3, 2)
        drive(subject, steps_of_equal_ranks(3, 5, 0.0, 0))
        start_s = 5 * COMPUTE_S
        times = [COMPUTE_S, COMPUTE_S, COMPUTE_S + behind_s]
        orders = drive(subject, [(start_s + t, rank, 5, t) for rank, t in enumerate(times)])
        assert bool(orders) is left_out
        if left_out:
            assert orders[0][1].missing == (2,) and orders[0][1].reason == "quorum"
            assert orders[0][0] == pytest.approx(start_s + 1.25 * COMPUTE_S)


def test_a_rank_known_to_be_slow_costs_no_grace() -> None:
    subject = rule(3, 2)
    for step in range(6):
        subject.late(2, 4 * COMPUTE_S)
        now_s = (step + 1) * COMPUTE_S
        for rank in (0, 1):
            subject.arrive(rank, step, COMPUTE_S, now_s + 0.001 * rank)
        order, again_s = subject.evaluate(now_s + 0.001)
        assert order is not None and again_s is None
        assert order.missing == (2,) and order.step == step


def test_a_rank_that_is_behind_is_not_waited_for() -> None:
    """It cannot deliver for a step whose parameters it does not have, however fast it is."""
    subject = rule(3, 2)
    drive(subject, steps_of_equal_ranks(3, 3, 0.0, 0))
    for step in (3, 4):
        now_s = (step + 1) * COMPUTE_S
        for rank in (0, 1):
            subject.arrive(rank, step, COMPUTE_S, now_s)
        order, again_s = subject.evaluate(now_s)
        assert (order is None) is (step == 3), "it has a grace in the step it works on, none in the next"
        if again_s is not None:
            assert subject.evaluate(again_s)[0] is not None
    subject.join(2, 5, 5 * COMPUTE_S)
    assert 2 in subject.up_to_date()


def test_a_recovered_rank_is_waited_for_again() -> None:
    subject = rule(2, 1)
    for _ in range(5):
        subject.late(1, 4 * COMPUTE_S)
    subject.arrive(0, 0, COMPUTE_S, 0.1)
    assert subject.evaluate(0.1)[0] is not None
    for _ in range(5):
        subject.late(1, COMPUTE_S)
    subject.join(1, 1, 0.1)
    subject.arrive(0, 1, COMPUTE_S, 0.2)
    order, again_s = subject.evaluate(0.2)
    assert order is None and again_s is not None and again_s > 0.2


def test_sync_closes_only_for_ranks_that_are_away() -> None:
    subject = rule(3)
    subject.arrive(0, 0, COMPUTE_S, 1.0)
    subject.arrive(1, 0, COMPUTE_S, 1.0)
    assert subject.evaluate(1e6) == (None, None)
    subject.deactivate(2)
    order, _ = subject.evaluate(2.0)
    assert order is not None
    assert (order.reason, order.excused, order.missing) == ("away", (2,), (2,))
    subject.arrive(0, 1, COMPUTE_S, 3.0)
    subject.activate(2, 3.5)
    subject.arrive(1, 1, COMPUTE_S, 4.0)
    assert subject.evaluate(1e6) == (None, None), "a rank that is back is waited for in lockstep"


def test_a_rank_that_leaves_after_it_delivered_is_not_excused_from_that_step() -> None:
    subject = rule(3, 2)
    for rank in (0, 1):
        subject.arrive(rank, 0, COMPUTE_S, 1.0)
    subject.deactivate(0)
    subject.deactivate(2)
    order, _ = subject.evaluate(10.0)
    assert order is not None
    assert order.missing == (2,) and order.excused == (2,), "excused are ranks that are missing"


def test_away_ranks_lower_the_quorum_and_everybody_away_closes_nothing() -> None:
    subject = rule(4, 3)
    for rank in (1, 2, 3):
        subject.deactivate(rank)
    assert subject.evaluate(1.0) == (None, None)
    subject.arrive(0, 0, COMPUTE_S, 2.0)
    order, _ = subject.evaluate(2.0)
    assert order is not None and order.excused == (1, 2, 3)


def test_without_a_quorum_a_relaxed_step_closes_at_the_deadline() -> None:
    subject = rule(4, 3, quorum_deadline_s=5.0)
    subject.arrive(1, 0, COMPUTE_S, 10.0)
    assert subject.evaluate(14.999) == (None, 15.0)
    order, _ = subject.evaluate(15.0)
    assert order is not None and order.reason == "deadline" and order.missing == (0, 2, 3)


def test_beside_another_optimizer_a_quorum_is_awaited_only_while_ranks_should_arrive() -> None:
    """They may wait there for the ranks that have arrived here, as with two steps of one to each of the other."""
    subject = rule(4, 3, quorum_deadline_s=60.0)
    drive(subject, steps_of_equal_ranks(4, 3, 0.0, 0))  # Each takes 0.1 s; the last step ends at 0.3 s.
    subject.several = True
    subject.arrive(1, 3, COMPUTE_S, 0.4)
    assert subject.evaluate(0.4) == (None, pytest.approx(0.5 + subject.grace_s()))
    subject.join(2, 3, 0.45)  # It began later, so it should arrive later.
    order, again_s = subject.evaluate(0.5 + subject.grace_s())
    assert order is None and again_s == pytest.approx(0.55 + subject.grace_s())
    subject.deactivate(2)
    order, _ = subject.evaluate(0.5 + subject.grace_s() + 1e-6)
    assert order is not None and order.reason == "elsewhere" and order.missing == (0, 2, 3)


def test_beside_another_optimizer_ranks_that_are_behind_have_the_time_for_both_steps() -> None:
    subject = rule(3, 2, quorum_deadline_s=60.0)
    drive(subject, [*steps_of_equal_ranks(3, 2, 0.0, 0), (0.3, 0, 2, COMPUTE_S), (0.3, 1, 2, COMPUTE_S)])
    subject.several = True
    subject.arrive(0, 3, COMPUTE_S, 0.4)  # Rank 2 has missed step 2, and rank 1 waits elsewhere.
    assert subject.evaluate(0.45) == (None, pytest.approx(0.6 + subject.grace_s()))


def test_beside_another_optimizer_ranks_of_unknown_speed_have_the_whole_deadline() -> None:
    subject = rule(4, 3, quorum_deadline_s=5.0)
    subject.several = True
    subject.arrive(1, 0, COMPUTE_S, 10.0)
    assert subject.evaluate(14.0) == (None, 15.0)


def test_no_step_misses_an_active_rank_while_a_return_to_sync_is_on_its_way() -> None:
    subject = rule(4, 2, quorum_deadline_s=5.0)
    subject.awaits_all = True
    for rank in range(3):
        subject.arrive(rank, 0, COMPUTE_S, 10.0)
    assert subject.evaluate(100.0) == (None, None), "neither by quorum nor by deadline"
    subject.deactivate(3)
    order, _ = subject.evaluate(100.0)
    assert order is not None and order.excused == (3,) and order.reason == "away"


def test_reports_that_are_late_or_twice_change_nothing_but_the_speed() -> None:
    subject = rule(3, 2)
    for rank in (0, 1):
        subject.arrive(rank, 7, COMPUTE_S, 1.0)
        subject.arrive(rank, 7, COMPUTE_S, 1.0)
    assert subject.ready == (0, 1)
    subject.arrive(2, 3, 0.4, 1.0)
    assert subject.step == 7 and subject.ready == (0, 1)
    order, again_s = subject.evaluate(1.0)
    if order is None:
        assert again_s is not None
        order, _ = subject.evaluate(again_s)
    assert order is not None and order.step == 7
    subject.arrive(2, 7, 0.4, 1.2)
    assert subject.evaluate(2.0) == (None, None), "no second order for a step"


Event = tuple[str, int, int, float]
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "arrive", "arrive", "late", "join", "leave", "back", "tick"]),
        st.integers(0, 4),
        st.integers(-1, 2),
        st.floats(0.0, 0.5),
    ),
    max_size=80,
)


@pytest.mark.slow
@settings(max_examples=cases(300), deadline=None)
@given(st.integers(2, 5), st.integers(1, 5), EVENTS)
def test_any_sequence_of_reports(world_size: int, quorum: int, events: list[Event]) -> None:
    """No order twice for a step, none without a quorum but at the deadline, no look in the past."""
    plan = Plan.partial(world_size, min(quorum, world_size))
    subject = ClosingRule(plan, quorum_deadline_s=0.7)
    now_s, closed, first_s = 0.0, -1, {}
    for kind, which, ahead, pause_s in events:
        now_s += pause_s
        rank = which % world_size
        if kind == "arrive":
            step = max(0, subject.step + ahead)
            first_s.setdefault(step, now_s)
            subject.arrive(rank, step, pause_s, now_s)
        elif kind == "late":
            subject.late(rank, pause_s)
        elif kind == "join":
            subject.join(rank, max(0, subject.step + ahead), now_s)
        elif kind == "leave":
            subject.deactivate(rank)
        elif kind == "back":
            subject.activate(rank, now_s)
        ready, away = set(subject.ready), set(subject.inactive)
        order, again_s = subject.evaluate(now_s)
        assert again_s is None or (order is None and again_s > now_s)
        if order is None:
            continue
        assert order.step > closed, "a step was closed twice"
        closed = order.step
        assert set(order.missing) == set(range(world_size)) - ready and ready
        assert set(order.excused) == away - ready
        active = world_size - len(away - ready)
        if order.reason == "deadline":
            assert now_s - first_s[order.step] >= 0.7 - 1e-9
        else:
            assert len(ready) >= min(plan.quorum, active)
            if order.reason == "away":
                assert not plan.relaxed and away - ready
        assert subject.evaluate(now_s + 100.0) == (None, None)


class Fleet:
    """Ranks with compute times of their own under one rule: whoever misses a step joins the newest one when it is
    done. `closes` holds per step when it ended and when each rank's gradient for it was there."""

    def __init__(self, subject: ClosingRule, compute_s: list[float], jitter: float, seed: int) -> None:
        self.rule, self.compute_s, self.jitter = subject, compute_s, jitter
        self.random = random.Random(seed)
        self.step = 0  # The step that is open now.
        self.version = [0] * len(compute_s)
        self.duration_s = [0.0] * len(compute_s)
        self.done_s = [0.0] * len(compute_s)
        self.arrived_s: dict[int, float] = {}
        self.closes: list[tuple[float, dict[int, float]]] = []
        for rank in range(len(compute_s)):
            self._begin(rank, 0.0)

    def run(self, steps: int) -> None:
        """Until this many steps more have ended."""
        until, again_s = len(self.closes) + steps, None
        while len(self.closes) < until:
            rank = min(range(len(self.done_s)), key=self.done_s.__getitem__)
            now_s = self.done_s[rank] if again_s is None else min(self.done_s[rank], again_s)
            if now_s == self.done_s[rank]:
                self._done(rank, now_s)
            order, again_s = self.rule.evaluate(now_s)
            assert again_s is None or again_s > now_s
            if order is not None:
                assert order.step == self.step and len(self.arrived_s) >= self.rule.plan.quorum
            if order is not None or len(self.arrived_s) == len(self.compute_s):
                self._end(now_s)

    def _begin(self, rank: int, now_s: float) -> None:
        self.duration_s[rank] = self.compute_s[rank] * (1 + self.jitter * self.random.random())
        self.done_s[rank] = now_s + self.duration_s[rank]

    def _done(self, rank: int, now_s: float) -> None:
        if self.version[rank] == self.step:
            self.arrived_s[rank] = now_s
            self.done_s[rank] = float("inf")
            self.rule.arrive(rank, self.step, self.duration_s[rank], now_s)
            return
        self.rule.late(rank, self.duration_s[rank])
        self.version[rank] = self.step
        self.rule.join(rank, self.step, now_s)
        self._begin(rank, now_s)

    def _end(self, now_s: float) -> None:
        self.closes.append((now_s, self.arrived_s))
        self.step += 1
        for rank in self.arrived_s:
            self.version[rank] = self.step
            self._begin(rank, now_s)
        self.arrived_s = {}


@settings(max_examples=cases(60), deadline=None)
@given(
    members=st.permutations([1.0, 1.0, 2.0, 2.0]),
    jitter=st.floats(0.0, 0.1),
    seed=st.integers(0, 1000),
    sync_steps=st.integers(0, 8),
)
def test_two_of_four_ranks_at_half_the_speed_are_never_waited_for(
    members: list[float], jitter: float, seed: int, sync_steps: int
) -> None:
    """With or without a past in lockstep, in which the slow ones delivered to every step."""
    subject = rule(4)
    fleet = Fleet(subject, [COMPUTE_S * factor for factor in members], jitter, seed)
    fleet.run(sync_steps)
    assert all(len(there) == 4 for _, there in fleet.closes), "lockstep leaves nobody out"
    subject.plan = Plan.partial(4, 2, plan_id=1)
    learned = 0 if sync_steps else 1  # Before the first late report nothing is known of them: they have the grace.
    fleet.run(40)
    fast = [rank for rank, factor in enumerate(members) if factor == 1.0]
    for ended_s, there in fleet.closes[sync_steps + learned :]:
        assert set(fast) <= set(there), "a fast rank was left out"
        assert ended_s == max(there[rank] for rank in fast), "the step ends when the second fast one is there"
    assert fleet.closes[-1][0] - fleet.closes[sync_steps][0] <= 39 * COMPUTE_S * (1 + jitter) + COMPUTE_S


@settings(max_examples=cases(60), deadline=None)
@given(st.integers(2, 6), st.integers(1, 6), st.floats(0.0, 0.2), st.integers(0, 1000))
def test_equal_ranks_stay_together_through_many_steps(n: int, quorum: int, jitter: float, seed: int) -> None:
    fleet = Fleet(rule(n, min(quorum, n)), [COMPUTE_S] * n, jitter, seed)
    fleet.run(60)
    assert all(len(there) == n for _, there in fleet.closes)


def test_lockstep_waits_a_little_for_a_rank_that_comes_back_from_a_collective() -> None:
    subject = rule(3)
    subject.deactivate(2, 0.5, out_of_data=False)
    for rank in (0, 1):
        subject.arrive(rank, 0, COMPUTE_S, 1.0)
    order, again_s = subject.evaluate(1.0)
    assert order is None and again_s is not None and again_s - 1.0 > 5 * COMPUTE_S, "it may be suspended just then"
    assert subject.evaluate(0.99 * again_s)[0] is None
    order, _ = subject.evaluate(again_s)
    assert order is not None and (order.reason, order.excused) == ("away", (2,))
    for rank in (0, 1):
        subject.arrive(rank, 1, COMPUTE_S, again_s + COMPUTE_S)
    assert subject.evaluate(again_s + COMPUTE_S)[0] is not None, "once is enough for one that stays away"


def test_lockstep_waits_as_long_for_ranks_that_enter_a_collective_behind_the_last_gradient() -> None:
    """As in a process set whose members come to it at different times: the first one waits for them inside."""
    subject = rule(4)
    for rank in (2, 3):
        subject.arrive(rank, 0, COMPUTE_S, 1.0)
    subject.deactivate(1, 1.0, out_of_data=False)
    assert subject.evaluate(5.9) == (None, None), "rank 0 has yet to come"
    subject.deactivate(0, 6.0, out_of_data=False)
    order, again_s = subject.evaluate(6.0)
    assert order is None and again_s is not None and again_s > 6.0 + COMPUTE_S
    subject.activate(0, 6.1)
    subject.activate(1, 6.1)
    assert subject.evaluate(again_s) == (None, None), "both have data"


def test_lockstep_waits_for_a_rank_that_has_got_data_and_does_not_say_so_yet() -> None:
    subject = rule(2)
    subject.deactivate(1, 1.0, out_of_data=True)
    subject.arrive(0, 0, COMPUTE_S, 1.0)
    subject.has_data(1, 2.0)
    order, again_s = subject.evaluate(2.0)
    assert order is None and again_s is not None and again_s > 2.0
    subject.activate(1, 2.1)
    assert subject.evaluate(again_s) == (None, None)


def test_local_does_not_wait_for_a_rank_in_a_collective_that_the_others_have_still_to_come_to() -> None:
    subject = ClosingRule(Plan.local(3, steps=4))
    for rank in range(3):
        subject.activate(rank, 0.5)
    subject.deactivate(2, 1.0, out_of_data=False)
    for step in range(3):
        subject.arrive(0, step, COMPUTE_S, 2.0 + step)
        assert subject.evaluate(2.0 + step) == (None, None), "rank 1 trains"
        subject.arrive(1, step, COMPUTE_S, 2.1 + step)
        order, _ = subject.evaluate(2.1 + step)
        assert order is not None and order.excused == (2,)


@pytest.mark.parametrize("left", [(0,), (0, 1)])
def test_local_waits_for_a_rank_in_a_collective_that_all_others_have_left(left: tuple[int, ...]) -> None:
    """As in a meeting, where ranks catch up by one averaging that they start at slightly different times."""
    subject = ClosingRule(Plan.local(3, steps=4))
    for rank, entered_s in ((2, 1.0), (1, 2.0), (0, 3.0)):
        subject.deactivate(rank, entered_s, out_of_data=False)
    for rank in left:
        subject.activate(rank, 4.0)
        subject.arrive(rank, 0, COMPUTE_S, 4.0)
    order, again_s = subject.evaluate(4.0)
    assert order is None and again_s is not None and again_s > 4.0
    for rank in {0, 1, 2} - set(left):
        subject.activate(rank, 4.1)
        subject.arrive(rank, 0, COMPUTE_S, 4.1)
    assert subject.evaluate(1e6) == (None, None), "all are there"


def test_local_waits_for_a_rank_that_has_got_data_and_does_not_say_so_yet() -> None:
    subject = ClosingRule(Plan.local(2, steps=4))
    subject.deactivate(1, 1.0, out_of_data=True)
    subject.arrive(0, 0, COMPUTE_S, 1.0)
    subject.has_data(1, 2.0)
    order, again_s = subject.evaluate(2.0)
    assert order is None and again_s is not None and again_s > 2.0


def test_lockstep_does_not_wait_for_a_rank_without_data() -> None:
    subject = rule(3)
    subject.deactivate(2, out_of_data=True)
    subject.arrive(0, 0, COMPUTE_S, 1.0)
    assert subject.evaluate(1.0) == (None, None), "rank 1 is neither there nor away"
    subject.arrive(1, 0, COMPUTE_S, 1.0)
    assert subject.evaluate(1.0)[0] is not None


def test_a_rank_whose_return_is_awaited_and_that_delivers_completes_the_step() -> None:
    subject = rule(2)
    subject.deactivate(1, 1.0, out_of_data=False)
    subject.arrive(0, 0, COMPUTE_S, 1.0)
    assert subject.evaluate(1.0)[0] is None
    subject.arrive(1, 0, COMPUTE_S, 1.01)
    assert subject.inactive == () and subject.evaluate(1.01) == (None, None)
    assert subject.evaluate(1e6) == (None, None)


@pytest.mark.parametrize("quorum", [None, 2])
def test_after_an_epoch_all_ranks_start_on_the_next_step_together(quorum: int | None) -> None:
    """A rank left out of the last step has caught up by then: in the first step of the next epoch it has the grace."""
    subject = rule(3, quorum)
    drive(subject, steps_of_equal_ranks(3, 4, 0.0, 0))
    now_s = 5 * COMPUTE_S
    subject.deactivate(2)
    for rank in (0, 1):
        subject.arrive(rank, 4, COMPUTE_S, now_s)
    assert subject.evaluate(now_s)[0] is not None
    subject.align(now_s + 1.0)
    assert subject.inactive == () and subject.up_to_date() == (0, 1, 2)
    now_s += 1.0 + COMPUTE_S
    for rank in (0, 1):
        subject.arrive(rank, 5, COMPUTE_S, now_s)
    order, again_s = subject.evaluate(now_s)
    assert order is None and (again_s is None) is (quorum is None)
    subject.arrive(2, 5, COMPUTE_S, now_s + 0.1 * COMPUTE_S)
    assert subject.evaluate(1e6) == (None, None)


def test_the_grace_covers_the_offsets_seen_and_ends_at_a_usual_compute_time() -> None:
    subject = rule(3, 1)
    offsets_s = (0.0, 0.005, 0.024)
    steps = [
        (0.2 * step + COMPUTE_S + o, rank, step, COMPUTE_S) for step in range(9) for rank, o in enumerate(offsets_s)
    ]
    assert drive(subject, steps) == []
    middle_s, deviation_s = (0.005 + 0.024) / 2, (0.024 - 0.005) / 2
    assert subject.grace_s() == pytest.approx(middle_s + 4 * deviation_s)
    assert subject.grace_s() > 0.25 * COMPUTE_S, "the least value alone would not cover them"
    wide = rule(2, 1, grace_fraction=50.0)
    drive(wide, steps_of_equal_ranks(2, 3, 0.0, 0))
    assert wide.grace_s() == pytest.approx(COMPUTE_S)
