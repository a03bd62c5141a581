"""The work queue: every sample once, whoever is slow, dies or never asks; and everybody ends together."""

from __future__ import annotations

import heapq
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.rules.work_queue import WorkQueue


class Epoch:
    """Drives a queue with ranks of given seconds per batch until nobody has work.

    Args:
        queue: The queue.
        batch_s: Seconds per full batch, one per rank.
        dies_s: Time at which a rank stops for good, infinity for never.
        starts_s: Time of a rank's first request; infinity if it never asks.
        notice_s: Seconds after its death at which `give_back` is called; infinity for never.
        poll_s: A rank that was declined asks again after this; 0 for never.
    """

    def __init__(
        self,
        queue: WorkQueue,
        batch_s: list[float],
        *,
        dies_s: list[float] | None = None,
        starts_s: list[float] | None = None,
        notice_s: float = math.inf,
        poll_s: float = 0.0,
    ) -> None:
        n = len(batch_s)
        self.queue = queue
        self.ranges: list[list[tuple[int, int]]] = [[] for _ in range(n)]
        self.end_s = [0.0] * n
        self.declined: set[int] = set()
        dies_s = dies_s or [math.inf] * n
        events = [(time, 1, rank) for rank, time in enumerate(starts_s or [0.0] * n) if time < math.inf]
        for rank, time in enumerate(dies_s):
            if time + notice_s < math.inf:
                events.append((time + notice_s, 0, rank))
        heapq.heapify(events)
        for _ in range(20_000):
            if not events:
                break
            now, asks, rank = heapq.heappop(events)
            if not asks:
                for item in queue.give_back(rank):
                    self.ranges[rank].remove(item)
            elif now < dies_s[rank]:
                self._ask(now, rank, batch_s[rank], events, poll_s)

    def _ask(self, now: float, rank: int, batch_s: float, events: list[tuple[float, int, int]], poll_s: float) -> None:
        got = self.queue.take(rank, now)
        if got is None:
            if self.queue.remaining:
                self.declined.add(rank)
            self.queue.done(rank)
            if poll_s and not self.queue.finished:
                heapq.heappush(events, (now + poll_s, 1, rank))
            return
        self.ranges[rank].append(got)
        self.end_s[rank] = now + batch_s * (got[1] - got[0]) / self.queue.batch_size
        heapq.heappush(events, (self.end_s[rank], 1, rank))

    def positions(self) -> list[int]:
        """Every position that some rank worked on and kept, sorted."""
        return sorted(p for ranges in self.ranges for start, stop in ranges for p in range(start, stop))


def test_ranges_in_order_and_a_short_last_one() -> None:
    queue = WorkQueue(10, 4, 2)
    assert [queue.take(0, t) for t in (0.0, 1.0, 2.0, 3.0)] == [(0, 4), (4, 8), (8, 10), None]
    assert queue.remaining == 0 and queue.finished


def test_drop_last_leaves_the_short_range_out() -> None:
    queue = WorkQueue(10, 4, 1, drop_last=True)
    assert [queue.take(0, t) for t in (0.0, 1.0, 2.0)] == [(0, 4), (4, 8), None]
    assert WorkQueue(3, 4, 1, drop_last=True).take(0, 0.0) is None


def test_nothing_to_do() -> None:
    queue = WorkQueue(0, 4, 1)
    assert queue.finished and queue.take(0, 0.0) is None


def test_confirmation_by_the_next_take_and_by_done() -> None:
    queue = WorkQueue(8, 4, 2)
    queue.take(0, 0.0)
    queue.take(1, 0.0)
    assert queue.remaining == 0 and not queue.finished
    assert queue.take(0, 1.0) is None  # confirms
    assert not queue.finished
    queue.done(1)
    assert queue.finished
    assert queue.give_back(0) == () and queue.give_back(1) == ()


def test_given_back_ranges_come_first_and_once() -> None:
    queue = WorkQueue(12, 4, 2)
    queue.take(0, 0.0)
    queue.take(1, 0.0)
    assert queue.give_back(0) == ((0, 4),)
    assert queue.give_back(0) == ()
    assert queue.remaining == 8
    assert [queue.take(1, t) for t in (1.0, 2.0, 3.0)] == [(0, 4), (8, 12), None]


def test_prefetch_holds_one_more_range_back_from_confirmation() -> None:
    queue = WorkQueue(16, 4, 2, prefetch=1)
    for now in (0.0, 0.0, 1.0):
        queue.take(0, now)
    assert queue.give_back(0) == ((4, 8), (8, 12))


def test_filling_the_prefetch_teaches_no_speed() -> None:
    queue = WorkQueue(4000, 4, 2, prefetch=1)
    for rank in (0, 1):
        for now in (0.0, 0.0, 1.0 + rank, 2.0 + 2 * rank):
            queue.take(rank, now)
    assert [taker.batch_s for taker in queue._takers] == [1.0, 2.0]


@pytest.mark.parametrize("batches", [22 * 4, 23 * 4 + 1, 200])
@pytest.mark.parametrize("forecast", [False, True])
def test_one_rank_four_times_slower_keeps_nobody_waiting(batches: int, forecast: bool) -> None:
    batch_s = [1.0, 1.0, 1.0, 4.0]
    queue = WorkQueue(batches * 8, 8, 4)
    for rank, seconds in enumerate(batch_s if forecast else []):
        queue.forecast(rank, seconds)
    plan_id = Epoch(queue, batch_s)
    bound = batches / sum(1.0 / seconds for seconds in batch_s)
    assert plan_id.positions() == list(range(batches * 8))
    assert max(plan_id.end_s) <= 1.10 * bound
    assert max(plan_id.end_s[:3]) - min(plan_id.end_s[:3]) <= 1.0
    assert plan_id.end_s[3] <= min(plan_id.end_s[:3]) + 1.0
    # It ends early by less than one of its own batches: with one more it would have been the last.
    assert max(plan_id.end_s[:3]) - plan_id.end_s[3] < 4.0 + 1.0


@pytest.mark.parametrize("batches", range(88, 101))
def test_splitting_the_tail_ends_all_ranks_within_about_a_fast_batch(batches: int) -> None:
    batch_s = [1.0, 1.0, 1.0, 4.0]
    plan_id = Epoch(WorkQueue(batches * 32, 32, 4, split_tail=True), batch_s)
    assert plan_id.positions() == list(range(batches * 32))
    assert max(plan_id.end_s) - min(plan_id.end_s) <= 1.25
    assert max(plan_id.end_s) <= 1.04 * batches / 3.25


def test_without_declining_the_slow_rank_would_be_last() -> None:
    """The situation the tail rule is for: a rank that takes one of the last batches."""
    saved = []
    for batches in range(88, 101):
        plain, tail = WorkQueue(batches, 1, 4), WorkQueue(batches, 1, 4)
        plain.forecast(3, 1e-9)  # so fast that it is never declined
        ends = [max(Epoch(queue, [1.0, 1.0, 1.0, 4.0]).end_s) for queue in (plain, tail)]
        saved.append(ends[0] - ends[1])
    assert min(saved) >= 0.0
    assert max(saved) >= 2.0


def test_prefetching_ranks_end_together_too() -> None:
    """A prefetching rank asks one batch ahead: what it takes ends two batch times after the request."""
    queue = WorkQueue(100, 1, 4, prefetch=1)
    free, batch_s = [0.0] * 4, [1.0, 1.0, 1.0, 4.0]
    waiting = [[queue.take(rank, 0.0), queue.take(rank, 0.0)] for rank in range(4)]
    events = [(batch_s[rank], rank) for rank in range(4)]
    heapq.heapify(events)
    handed = 8
    while events:
        now, rank = heapq.heappop(events)
        waiting[rank].pop(0)
        free[rank] = now
        got = queue.take(rank, now)
        if got is not None:
            handed += 1
            waiting[rank].append(got)
        if waiting[rank]:
            heapq.heappush(events, (now + batch_s[rank], rank))
    assert handed == 100
    assert max(free) <= 1.10 * 100 / 3.25
    assert free[3] <= max(free[:3]) + 1.0


def test_rank_without_history_and_the_last_rank_are_never_declined() -> None:
    queue = WorkQueue(8, 4, 3)
    queue.forecast(0, 1.0)
    queue.forecast(2, 1000.0)
    assert queue.take(2, 0.0) == (0, 4)  # nobody else has taken anything yet
    assert queue.take(1, 0.0) == (4, 8)  # and nothing is known of this one


def test_slow_rank_gets_all_the_rest_when_the_others_are_finished() -> None:
    queue = WorkQueue(40, 4, 2)
    queue.forecast(0, 1.0)
    queue.forecast(1, 100.0)
    queue.take(0, 0.0)
    queue.done(0)
    plan_id = Epoch(queue, [1.0, 100.0], starts_s=[math.inf, 0.0])
    assert plan_id.positions() == list(range(4, 40))


def test_declined_rank_takes_over_when_the_others_stay_away() -> None:
    queue = WorkQueue(12, 4, 2)
    queue.forecast(0, 1.0)
    queue.forecast(1, 50.0)
    assert queue.take(0, 0.0) == (0, 4)
    assert queue.take(1, 0.5) is None  # rank 0 would be done with the rest in 2 seconds
    assert queue.take(1, 2.0) is None
    assert queue.take(1, 4.0) == (4, 8)  # but it has been silent for four batch times


seconds = st.floats(0.1, 20.0)


@settings(max_examples=300, deadline=None)
@given(
    batch_s=st.lists(seconds, min_size=1, max_size=8),
    samples=st.integers(0, 400),
    batch=st.integers(1, 16),
    split=st.booleans(),
    asking=st.lists(st.booleans(), min_size=8, max_size=8),
)
def test_every_position_once_with_any_speeds_and_ranks_that_never_ask(
    batch_s: list[float], samples: int, batch: int, split: bool, asking: list[bool]
) -> None:
    asking[0] = True
    queue = WorkQueue(samples, batch, len(batch_s), split_tail=split)
    starts_s = [0.0 if asks else math.inf for asks in asking[: len(batch_s)]]
    plan_id = Epoch(queue, batch_s, starts_s=starts_s)
    assert plan_id.positions() == list(range(samples))
    assert queue.finished


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    batch_s=st.lists(seconds, min_size=2, max_size=6),
    samples=st.integers(1, 200),
    batch=st.integers(1, 8),
    prefetch=st.integers(0, 2),
    split=st.booleans(),
    deaths=st.lists(st.floats(0.0, 60.0), min_size=6, max_size=6),
    starts=st.lists(st.floats(0.0, 10.0), min_size=6, max_size=6),
    survivor=st.integers(0, 5),
)
def test_every_position_once_although_ranks_die(
    batch_s: list[float],
    samples: int,
    batch: int,
    prefetch: int,
    split: bool,
    deaths: list[float],
    starts: list[float],
    survivor: int,
) -> None:
    n = len(batch_s)
    dies_s = deaths[:n]
    dies_s[survivor % n] = math.inf
    queue = WorkQueue(samples, batch, n, prefetch=prefetch, split_tail=split)
    plan_id = Epoch(queue, batch_s, dies_s=dies_s, starts_s=starts[:n], notice_s=5.0, poll_s=2.0)
    assert plan_id.positions() == list(range(samples))
    assert queue.finished


@settings(max_examples=200, deadline=None)
@given(
    batch_s=st.lists(seconds, min_size=2, max_size=6),
    samples=st.integers(1, 200),
    deaths=st.lists(st.floats(0.0, 60.0), min_size=6, max_size=6),
)
def test_untaken_samples_only_where_every_living_rank_was_declined(
    batch_s: list[float], samples: int, deaths: list[float]
) -> None:
    """Without polling and without `give_back`: nothing is handed out twice, and a rest needs a decline."""
    n = len(batch_s)
    dies_s = [*deaths[: n - 1], math.inf]
    queue = WorkQueue(samples, 4, n)
    plan_id = Epoch(queue, batch_s, dies_s=dies_s)
    handed = plan_id.positions()
    assert len(handed) == len(set(handed))
    assert len(handed) + queue.remaining == samples
    if queue.remaining:
        assert n - 1 in plan_id.declined


@settings(max_examples=200, deadline=None)
@given(batch_s=st.lists(seconds, min_size=2, max_size=6), batches=st.integers(1, 300))
def test_declining_never_makes_an_epoch_longer(batch_s: list[float], batches: int) -> None:
    """With exact forecasts the tail rule ends no later than the plain queue."""
    plain = WorkQueue(batches, 1, len(batch_s))
    tail = WorkQueue(batches, 1, len(batch_s))
    for rank, value in enumerate(batch_s):
        tail.forecast(rank, value)
        plain.forecast(rank, 1e-9)
    assert max(Epoch(tail, batch_s).end_s) <= max(Epoch(plain, batch_s).end_s) + 1e-6


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="batch_size is 0; expected at least 1"):
        WorkQueue(1, 0, 1)
    with pytest.raises(ValueError, match="n_samples is -1"):
        WorkQueue(-1, 1, 1)
    queue = WorkQueue(1, 1, 2)
    with pytest.raises(ValueError, match="rank 2 asked for work"):
        queue.take(2, 0.0)
    with pytest.raises(ValueError, match="expected a positive number"):
        queue.forecast(0, 0.0)
    queue.forecast(0, 2.0)
    queue.forecast(0, math.nan)


@pytest.mark.parametrize("batch_s", [5e-324, 1e308])
def test_a_batch_of_no_time_or_of_all_time_is_no_error(batch_s: float) -> None:
    """A rank's pace is what it says, and the others' shares are divided by it."""
    queue = WorkQueue(1 << 40, 4, 3)
    for now_s in (1.0, 2.0, 3.0):
        for rank in range(3):
            queue.forecast(rank, batch_s if rank == 0 else 1.0)
            queue.take(rank, now_s)  # Or nothing, where the quick one is thought to finish all.
    assert queue.remaining < 1 << 40
