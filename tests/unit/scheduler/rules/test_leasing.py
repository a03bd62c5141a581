"""Leases: every sample once, whoever is slow, stops or leaves; nobody waits for a rank that holds too much."""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import FrameType, SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.balance.batch_shares import LastStep
from scheduler.rules.leasing import Answer, LeaseQueue
from scheduler.rules.runs import Span, dealt, samples, spans, without
from star_hvd.channel.messages.base import EpochEnd, Message
from star_hvd.channel.messages.leases import Lease, LeaseAsk, LeaseRecall, LeaseReturn, runs_of
from star_hvd.config import Config
from star_hvd.coordinator.lease_service import LeaseService
from star_hvd.errors import ChannelError, DeadlineError
from star_hvd.input.lease_stock import LeaseStock
from star_hvd.runtime.coordinator_client import CoordinatorClient
from tests.support.effort import cases
from tests.support.leases import lease
from tests.support.sending import sending_to

LATENCY_S = 0.001
HELD_BACK_S = 0.1  # A message that is not urgent.


class Job:
    """Ranks with stocks and a service, on a clock of its own; messages take `LATENCY_S` and arrive in order.

    Args:
        samples: Of the epoch.
        batch: Of a batch.
        pace: Seconds of a batch, by rank and time.
        frozen: Times from when to when the coordinator hears and says nothing.
        leaves: By rank the time at which it leaves its loop.
        ahead: Batches that the workers of a rank load ahead; each takes `load_s` and a worker of its own.
        in_order: Whether they come out in the order in which they were formed.
        done: Positions consumed before.
        load_s: Seconds to load a batch.
        begins: By rank the time at which its training thread begins the epoch, whose first samples it asks for at 0.
    """

    def __init__(
        self,
        samples: int,
        batch: int,
        ranks: int,
        pace: Callable[[int, float], float],
        *,
        frozen: tuple[float, float] = (math.inf, math.inf),
        leaves: dict[int, float] | None = None,
        ahead: int = 0,
        in_order: bool = True,
        done: list[tuple[int, int]] | None = None,
        load_s: float = 0.0,
        begins: dict[int, float] | None = None,
    ) -> None:
        self.ahead, self.in_order, self.done, self.load_s = ahead, in_order, done or [], load_s
        self.on_their_way: list[list[tuple[int, float]]] = [[] for _ in range(ranks)]  # Numbers, and when loaded.
        self.thrown_away = 0
        self.now_s, self.frozen, self.pace, self.leaves = 0.0, frozen, pace, leaves or {}
        self.events: list[Any] = []
        self.order = itertools.count()
        self.begun: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
        self.ends_s = [0.0] * ranks
        self.idle_s = [0.0] * ranks
        self.over: set[int] = set()
        self.messages = 0
        self.unsent: list[list[Message]] = [[] for _ in range(ranks)]
        self.service = LeaseService(ranks, self.to_rank)
        self.waiting: dict[int, float] = {}
        self.stocks = [self.stock(rank, samples, batch) for rank in range(ranks)]
        for rank in range(ranks):
            begins_s = (begins or {}).get(rank, 0.0)
            if begins_s > 0.0:
                self.stocks[rank].open()
            if begins_s < math.inf:
                self.at(begins_s, functools.partial(self.begin, rank))
        self.turns = 0
        while self.events:
            self.turns += 1
            assert self.turns < 200_000, "no end"
            self.now_s, _, work = heapq.heappop(self.events)
            work()

    def begin(self, rank: int) -> None:
        self.stocks[rank].begin(17, [bound for span in self.done for bound in span])
        self.work(rank)

    def stock(self, rank: int, samples: int, batch: int) -> LeaseStock:
        def send(message: Message, *, urgent: bool = True) -> None:
            self.unsent[rank].append(message)
            if urgent:
                self.flush(rank)
            else:
                self.at(self.now_s + HELD_BACK_S, functools.partial(self.flush, rank))

        return LeaseStock(
            rank, 0, 0, samples=samples, batch=batch, drop_last=False, send=send, ahead=self.ahead,
            in_order=self.in_order, clock=lambda: self.now_s,
        )  # fmt: skip

    def flush(self, rank: int) -> None:
        unsent, self.unsent[rank] = self.unsent[rank], []
        for message in unsent:
            self.to_desk(rank, message)

    def at(self, time_s: float, work: Callable[[], None]) -> None:
        heapq.heappush(self.events, (time_s, next(self.order), work))

    def at_desk_s(self) -> float:
        begin_s, end_s = self.frozen
        arrives_s = self.now_s + LATENCY_S
        return end_s if begin_s <= arrives_s < end_s else arrives_s

    def to_desk(self, rank: int, message: Message) -> None:
        self.messages += 1

        def handle() -> None:
            if isinstance(message, LeaseAsk):
                self.service.ask(rank, message, None, self.now_s)
            else:
                assert isinstance(message, LeaseReturn)
                self.service.give_back(rank, message, self.now_s)
                if message.leaves and not message.early:
                    self.over.add(rank)

        self.at(self.at_desk_s(), handle)

    def to_rank(self, rank: int, message: Message) -> None:
        def handle() -> None:
            self.stocks[rank].on_message(message)
            if rank in self.waiting:
                self.work(rank)

        self.at(self.now_s + LATENCY_S, handle)

    def work(self, rank: int) -> None:
        """The training thread of a rank is free."""
        stock = self.stocks[rank]
        if self.now_s >= self.leaves.get(rank, math.inf):
            stock.close()
            self.waiting.pop(rank, None)
            return
        if not stock.ready(0.0) and not self.on_their_way[rank]:
            self.waiting.setdefault(rank, self.now_s)
            return
        self.idle_s[rank] = max(self.idle_s[rank], self.now_s - self.waiting.pop(rank, self.now_s))
        taken = self.loaded(rank) if self.ahead else self.taken(stock)
        if taken is None:
            return
        self.begun[rank] += taken
        self.ends_s[rank] = self.now_s + self.pace(rank, self.now_s)
        self.at(self.ends_s[rank], lambda: self.work(rank))

    def taken(self, stock: LeaseStock) -> list[tuple[int, int]] | None:
        taken = stock.next(0.0, lambda: None, lambda: 0.0)
        if taken is None:
            stock.close()
            return None
        return [taken]

    def loaded(self, rank: int) -> list[tuple[int, int]] | None:
        """The next batch out of the workers; None where this rank has to wait, or has come to the end."""
        stock, numbers = self.stocks[rank], self.on_their_way[rank]
        while len(numbers) < self.ahead and (batch := stock.form()) is not None:
            numbers.append((batch.number, self.now_s + self.load_s * (1 + batch.number * 7 % 3)))
        if not numbers:
            if not stock.ready(0.0):
                self.waiting[rank] = self.now_s
            elif stock.wait(0.0, lambda: None, lambda: 0.0) or stock.in_stock:
                self.at(self.now_s + LATENCY_S, lambda: self.work(rank))  # It lacks the rest of a batch.
            else:
                stock.close()
            return None
        first = numbers[0] if self.in_order else min(numbers, key=lambda each: each[1])
        if first[1] > self.now_s:
            self.at(first[1], lambda: self.work(rank))
            return None
        numbers.remove(first)
        batch = stock.take(first[0])
        if batch is None:
            self.thrown_away += 1
            return self.loaded(rank)
        return list(batch.spans)

    def positions(self) -> list[int]:
        return sorted(p for spans in self.begun for start, stop in spans for p in range(start, stop))


def steady(*paces_s: float) -> Callable[[int, float], float]:
    return lambda rank, now_s: paces_s[rank]


def test_equal_ranks_take_equal_parts_and_hardly_ever_ask() -> None:
    job = Job(40_000, 4, 4, steady(0.1, 0.1, 0.1, 0.1))
    assert job.positions() == list(range(40_000)) and job.over == {0, 1, 2, 3}
    counts = [len(spans) for spans in job.begun]
    assert max(counts) - min(counts) <= 3
    assert job.messages < 400, "one in 25 batches"
    assert max(job.ends_s) - min(job.ends_s) < 0.3


@pytest.mark.parametrize("batches", [88, 93, 200, 4000])
def test_a_slow_rank_takes_fewer_and_nobody_waits_for_it(batches: int) -> None:
    job = Job(batches * 8, 8, 4, steady(1.0, 1.0, 1.0, 4.0))
    assert job.positions() == list(range(batches * 8))
    assert max(job.ends_s) <= batches / 3.25 + 4.0
    assert job.ends_s[3] <= min(job.ends_s[:3]) + 4.0
    assert max(job.ends_s[:3]) - min(job.ends_s[:3]) <= 2.1


def test_what_a_rank_that_becomes_slow_holds_is_called_back() -> None:
    job = Job(4000, 1, 4, lambda rank, now_s: 2.0 if rank == 3 and now_s > 20.0 else 0.1)
    assert job.positions() == list(range(4000))
    others = (4000 - len(job.begun[3])) * 0.1 / 3
    assert max(job.ends_s) <= others + 4.1, "it held a minute's work by its old pace, twenty by its new one"


@pytest.mark.parametrize("begin_s", [5.0, 40.0, 100.0])
def test_ranks_go_on_for_half_a_minute_without_the_coordinator(begin_s: float) -> None:
    job = Job(100_000, 4, 4, steady(0.1, 0.1, 0.1, 0.4), frozen=(begin_s, begin_s + 31.0))
    assert job.positions() == list(range(100_000))
    assert max(job.idle_s) <= 0.01


def test_what_a_rank_that_leaves_its_loop_has_not_begun_is_for_the_others() -> None:
    job = Job(2000, 1, 3, steady(0.1, 0.1, 0.1), leaves={1: 10.0})
    assert job.positions() == list(range(2000)) and job.over == {0, 2}
    assert len(job.begun[1]) == 100


@settings(max_examples=cases(150), deadline=None)
@given(
    samples=st.integers(0, 600),
    batch=st.integers(1, 9),
    paces=st.lists(st.floats(0.01, 50.0), min_size=1, max_size=5),
    changes_s=st.floats(0.0, 60.0),
    factor=st.floats(0.1, 30.0),
    frozen=st.tuples(st.floats(0.0, 60.0), st.floats(0.0, 90.0)),
    left=st.integers(1, 5),
    leaves_s=st.floats(0.0, 100.0),
)
def test_every_sample_once_and_nobody_left_waiting(
    samples: int,
    batch: int,
    paces: list[float],
    changes_s: float,
    factor: float,
    frozen: tuple[float, float],
    left: int,
    leaves_s: float,
) -> None:
    leaves = {left: leaves_s} if left < len(paces) else {}
    job = Job(
        samples,
        batch,
        len(paces),
        lambda rank, now_s: paces[rank] * (factor if rank == 0 and now_s > changes_s else 1.0),
        frozen=(frozen[0], frozen[0] + frozen[1]),
        leaves=leaves,
    )
    positions = job.positions()
    assert len(positions) == len(set(positions)), "handed out twice"
    assert job.over | leaves.keys() == set(range(len(paces))) and not job.waiting
    if len(leaves) < len(paces):
        assert positions == list(range(samples)), "what one leaves is for the others, whenever it leaves"


@settings(max_examples=cases(120), deadline=None)
@given(
    samples=st.integers(0, 400),
    batch=st.integers(1, 9),
    paces=st.lists(st.floats(0.01, 20.0), min_size=1, max_size=5),
    factor=st.floats(0.1, 30.0),
    ahead=st.integers(1, 9),
    in_order=st.booleans(),
    load_s=st.floats(0.0, 5.0),
    leaves=st.dictionaries(st.integers(0, 4), st.floats(0.0, 60.0), max_size=4),
    consumed=st.lists(st.tuples(st.integers(0, 400), st.integers(1, 60)), max_size=4),
)
def test_every_sample_once_with_batches_loaded_ahead(
    samples: int,
    batch: int,
    paces: list[float],
    factor: float,
    ahead: int,
    in_order: bool,
    load_s: float,
    leaves: dict[int, float],
    consumed: list[tuple[int, int]],
) -> None:
    """What was loaded and never delivered is delivered by another rank, and what a state says is left out."""
    leaves = {rank: at_s for rank, at_s in leaves.items() if rank < len(paces)}
    done = without([(0, samples)], without([(0, samples)], [(at, at + length) for at, length in consumed]))
    job = Job(
        samples,
        batch,
        len(paces),
        lambda rank, now_s: paces[rank] * (factor if rank == 0 and now_s > 10.0 else 1.0),
        leaves=leaves,
        ahead=ahead,
        in_order=in_order,
        done=done,
        load_s=load_s,
    )
    positions = job.positions()
    assert len(positions) == len(set(positions)), "delivered twice"
    assert job.over | leaves.keys() == set(range(len(paces))) and not job.waiting
    if len(leaves) < len(paces):
        before = {p for start, stop in done for p in range(start, stop)}
        assert positions == [p for p in range(samples) if p not in before]


@settings(max_examples=cases(150), deadline=None)
@given(
    samples=st.integers(0, 60),
    batch=st.integers(1, 9),
    begins=st.lists(st.sampled_from([0.0, 0.5, 3.0, math.inf]), min_size=2, max_size=5),
    ahead=st.integers(0, 4),
    load_s=st.floats(0.0, 1.0),
)
def test_ranks_that_do_not_train_exchange_no_messages_for_ever(
    samples: int, batch: int, begins: list[float], ahead: int, load_s: float
) -> None:
    """Samples are asked for before the epoch begins; a rank may evaluate or save a checkpoint for long before it."""
    job = Job(
        samples, batch, len(begins), lambda rank, now_s: 0.1, ahead=ahead, load_s=load_s,
        begins=dict(enumerate(begins)),
    )  # fmt: skip
    positions = job.positions()
    train = {rank for rank, begins_s in enumerate(begins) if begins_s < math.inf}
    assert len(positions) == len(set(positions)) and job.over == train and not job.waiting
    if train:
        assert positions == list(range(samples)), "those of ranks that never begin, too"


@pytest.mark.parametrize("in_order", [True, False])
def test_ranks_of_equal_pace_end_together_though_their_workers_load_ahead(in_order: bool) -> None:
    job = Job(1600, 4, 4, steady(0.1, 0.1, 0.1, 0.1), ahead=9, load_s=0.05, in_order=in_order)
    assert job.positions() == list(range(1600))
    assert max(job.ends_s) - min(job.ends_s) < 0.5 and job.thrown_away <= 16


def test_ranks_of_equal_pace_end_an_epoch_in_the_same_step_and_ask_at_most_once_per_batch() -> None:
    """A batch that stays free to the end is loaded while its rank has nothing else to work on."""
    job = Job(60 * 16, 16, 2, steady(0.1, 0.1), ahead=4, load_s=0.05)
    assert [len(spans) for spans in job.begun] == [30, 30] and job.thrown_away == 0
    assert max(job.ends_s) - min(job.ends_s) < 0.01, "the last batches were loaded like all others"
    assert job.messages <= 26, "begin and end of the epoch, and one for every third batch"


def test_ranks_that_have_yet_to_begin_an_epoch_get_their_share_of_it() -> None:
    """The first samples are requested at the end of the epoch before, and an evaluation may follow that."""
    queue = LeaseQueue(60 * 16, 16, 2)
    for rank in (0, 1):
        queue.forecast(rank, 0.1)
        queue.ask(rank, 0, 0.0, ahead=5)
    queue.ask(1, 0, 60.0, ahead=5, idle=True)
    assert queue.held(1) <= 30 * 16, "half of the epoch is rank 0's, which has been silent for a minute"


def test_what_another_rank_has_begun_since_its_last_request_is_estimated() -> None:
    """Else who asks just before it gets part of its share, and it runs dry before the end."""
    queue = LeaseQueue(60 * 16, 16, 2)
    for rank in (0, 1):
        queue.forecast(rank, 0.1)
        assert answered(queue, rank, 0, 0.0, ahead=5) == [(rank * 15 * 16, (rank + 1) * 15 * 16)]
    assert queue.ask(1, 16, 0.1, ahead=5) is Answer.LATER, "it holds nearly half of its share of 30"
    queue.ask(0, 11 * 16, 1.15, ahead=5)
    assert queue.held(0) == 10 * 16, "rank 1 has 4 of its 14 batches left, so half of the share is 9; 10 may be held"


def test_what_a_slow_rank_has_loaded_and_not_begun_is_called_back_at_the_end() -> None:
    slow_from = 8.0
    job = Job(
        1600, 4, 4, lambda rank, now_s: 3.0 if rank == 3 and now_s > slow_from else 0.1, ahead=9, load_s=0.05
    )
    assert job.positions() == list(range(1600)) and job.thrown_away > 0
    assert max(job.ends_s) <= 11.0 + 3.0 + 0.5, "the batch in work, and not nine more"


def test_claims_that_cannot_be_are_refused_and_change_nothing() -> None:
    queue = LeaseQueue(100, 4, 2)
    ((start, stop),) = answered(queue, 0, 0, 0.0)
    for begun in (-1, stop - start + 1):
        with pytest.raises(ValueError, match="samples begun; expected"):
            queue.ask(0, begun, 1.0)
        with pytest.raises(ValueError, match="samples begun; expected"):
            queue.give_back(0, begun, 1.0)
    assert queue.held(0) == stop - start and queue.free == 100 - stop
    with pytest.raises(ValueError, match="expected 0 <= rank < 2"):
        queue.ask(2, 0, 0.0)
    for wrong in ((-1, 4, 2), (10, 0, 2), (10, 4, 0)):
        with pytest.raises(ValueError, match="expected at least"):
            LeaseQueue(*wrong)
    with pytest.raises(ValueError, match="positive"):
        queue.forecast(0, 0.0)


def test_drop_last_and_an_empty_epoch() -> None:
    assert LeaseQueue(10, 4, 1, drop_last=True).free == 8
    assert LeaseQueue(3, 4, 1, drop_last=True).ask(0, 0, 0.0) is Answer.END
    assert LeaseQueue(0, 4, 2).ask(1, 0, 0.0) is Answer.END


def test_the_desk_forgets_old_epochs_and_turns_nonsense_away() -> None:
    said: list[tuple[int, Message]] = []
    service = LeaseService(1, lambda to, message: said.append((to, message)))
    for epoch in range(5):
        service.ask(0, LeaseAsk(0, epoch, 8, 4, False, 0), 0.5, float(epoch))
        if epoch < 3:
            service.give_back(0, LeaseReturn(0, epoch, 4, True, early=True), float(epoch))
    assert service.epochs == [(0, 3), (0, 4)]
    service.give_back(0, LeaseReturn(0, 0, 4, False), 9.0)
    with pytest.raises(ChannelError):
        service.ask(0, LeaseAsk(0, 4, 8, 4, False, 7000), None, 9.0)
    with pytest.raises(ChannelError):
        service.give_back(0, LeaseReturn(0, 4, 7000, False), 9.0)
    assert len(said) == 5


def test_a_stock_that_runs_dry_names_the_coordinator_and_asks_again_after_a_recall() -> None:
    sent: list[Message] = []
    stock = LeaseStock(2, 0, 1, samples=100, batch=4, drop_last=False, send=sending_to(sent))
    stock.open()
    with pytest.raises(DeadlineError, match=r"rank 2 waited \d s .* coordinator on rank 0 was last heard 7.0 s ago"):
        stock.next(0.0, lambda: None, lambda: 7.0)
    stock.on_message(lease(0, 1, 0, 40))
    assert [stock.next(1.0, lambda: None, lambda: 0.0) for _ in range(2)] == [(0, 4), (4, 8)]
    stock.on_message(LeaseRecall(0, 1))
    assert sent[1] == replace(cast(LeaseAsk, sent[0]), idle=True, again=True), "asked for ahead, and now waited for"
    assert sent[2:] == [LeaseReturn(0, 1, 8, False), LeaseAsk(0, 1, 100, 4, False, 8)]
    stock.on_message(lease(0, 1, 96, 100))
    stock.close()
    stock.close()
    assert sent[-1] == LeaseReturn(0, 1, 8, True, early=True)
    stock.on_message(lease(0, 1, 40, 44))  # It was on its way; the coordinator has it back already.
    assert len(sent) == 5


def test_what_a_rank_is_dealt_takes_the_place_of_what_lies_behind_its_next_batches() -> None:
    sent: list[Message] = []
    stock = LeaseStock(0, 0, 0, samples=100, batch=4, drop_last=False, send=sending_to(sent))
    stock.open()
    stock.on_message(lease(0, 0, 0, 40))
    first = stock.form()
    assert first is not None and stock.take(first.number) is not None and stock.form() is not None
    stock.on_message(Lease(0, 0, [50, 2, 10, 3, 90, 1, 1, 1], behind=10))
    formed = []
    while (batch := stock.form()) is not None:
        formed.append(batch.spans)
    assert formed == [((8, 10), (50, 52)), ((60, 62), (70, 72)), ((90, 91),)], "ten of the first forty stay"
    stock.on_message(Lease(0, 0, [95, 2, 2, 1], behind=12))
    with pytest.raises(ValueError, match=r"formed batches of 5 samples that were dealt to other ranks; .* report it"):
        stock.wait(1.0, lambda: None, lambda: 0.0)


def test_numbers_that_are_no_runs_are_refused() -> None:
    for numbers in ([1, 2, 3], [-1, 1, 1, 1], [0, 0, 0, 1], [0, 3, 2, 1], [0, 1, 1, 0]):
        with pytest.raises(ChannelError, match="no runs"):
            runs_of(numbers)
    assert runs_of([]) == []


def test_an_answer_that_comes_at_once_finds_its_stock() -> None:
    def answer(message: Message, *, urgent: bool = True) -> None:
        assert isinstance(message, LeaseAsk)
        requests.on_message(lease(message.loader, message.epoch, 0, 4))

    agent = SimpleNamespace(send=answer, last_heard_s=0.0)
    requests = CoordinatorClient(Config(), 0, agent, lambda: None)  # type: ignore[arg-type]
    assert requests.begin_batch(requests.open_stock(3, 0, 4, 4, False)) == (0, 4)


def stocked() -> CoordinatorClient:
    """Requests whose coordinator leases four samples at once and then says that the epoch is over."""
    def answer(message: Message, *, urgent: bool = True) -> None:
        if isinstance(message, LeaseAsk):
            start = message.begun
            requests.on_message(lease(message.loader, message.epoch, start, 4 if start == 0 else start, over=start > 0))

    agent = SimpleNamespace(send=answer, last_heard_s=time.monotonic())
    requests = CoordinatorClient(Config(), 0, agent, lambda: None)  # type: ignore[arg-type]
    return requests


def test_the_end_of_another_loader_s_epoch_is_kept_for_who_waits_for_it() -> None:
    requests = stocked()
    requests.on_message(EpochEnd(0, 5))  # Of the training, which came while its last batch is worked on,
    requests.on_message(EpochEnd(1, 5))
    requests.await_epoch_end(1, 5)  # and this loop evaluates with another loader.
    requests.await_epoch_end(0, 5)


def test_two_epochs_of_a_loader_may_be_open_at_once() -> None:
    requests = stocked()
    one, other = requests.open_stock(3, 0, 4, 4, False), requests.open_stock(3, 1, 4, 4, False)
    assert requests.begin_batch(other) == (0, 4) and requests.begin_batch(one) == (0, 4)
    assert requests.begin_batch(one) is None and requests.begin_batch(other) is None


def test_while_the_coordinator_is_heard_another_rank_is_waited_for_longer() -> None:
    stock = LeaseStock(2, 0, 1, samples=100, batch=4, drop_last=False, send=sending_to([]))
    stock.open()
    threading.Timer(1.5, lambda: stock.on_message(lease(0, 1, 0, 4))).start()
    assert stock.next(1.0, lambda: None, lambda: 0.1, longest_s=600.0) == (0, 4)
    with pytest.raises(DeadlineError):
        stock.next(0.5, lambda: None, lambda: 0.4, longest_s=600.0)


@pytest.mark.parametrize("batch_s", [5e-324, 1e300])
def test_a_batch_of_no_time_or_of_all_time_is_no_error(batch_s: float) -> None:
    queue = LeaseQueue(1 << 40, 4, 2)
    queue.forecast(0, batch_s)
    queue.forecast(1, 5e-324)
    for now_s in (0.0, 1.0):
        for rank in (0, 1):
            assert queue.ask(rank, 0, now_s) is not Answer.END


def answered(queue: LeaseQueue, *asked: Any, **given: Any) -> Any:
    """The positions, or the answer without any, that a rank gets for its request."""
    answer = queue.ask(*asked, **given)
    return answer if isinstance(answer, Answer) else spans(answer)


def test_dealt_rows_are_held_from_the_first_request_on() -> None:
    queue = LeaseQueue(47, 10, 2)
    queue.deal((6, 4), (0, 0))
    rows = answered(queue, 0, 0, 0.0), answered(queue, 1, 0, 0.0)
    assert rows == ([(0, 6), (10, 16), (20, 26), (30, 36), (40, 44)], [(6, 10), (16, 20), (26, 30), (36, 40), (44, 47)])
    assert queue.free == 0 and answered(queue, 0, 6, 1.0) is Answer.LATER
    assert answered(queue, 0, 28, 2.0) is Answer.WAIT and not list(queue.recalls(2.0))
    queue.leave(1)
    assert [(rank, spans(found)) for rank, found in queue.answers(2.0)] == [(0, [(6, 10), (16, 20), (26, 28)])]


def test_a_change_of_shares_keeps_what_comes_before_it_and_deals_what_is_left() -> None:
    queue = LeaseQueue(60, 10, 2)
    assert answered(queue, 0, 0, 0.0) == [(0, 10)] and answered(queue, 1, 0, 0.0) == [(10, 20)]
    with pytest.raises(ValueError, match="3 shares and 2 plans"):
        queue.deal((6, 4, 1), (5, 10))
    told = queue.deal((6, 4), (5, 12))  # Rank 1 would have asked for two more.
    assert [(rank, spans(runs)) for rank, runs in told] == [
        (0, [(7, 10), (20, 23), (27, 33), (37, 43), (47, 53), (57, 59)]),  # The first row is 7 to 10 and 20 to 27.
        (1, [(5, 7), (23, 27), (33, 37), (43, 47), (53, 57), (59, 60)]),
    ]
    assert queue.held(0) == 5 + 26 and queue.held(1) == 12 + 17
    told = queue.deal((), (11, 16))
    assert [(rank, runs) for rank, runs in told] == [(0, []), (1, [])] and queue.held(0) == 11
    assert queue.free == 60 - 27 and answered(queue, 1, 16, 1.0) == [(27, 37)]


def asked(service: LeaseService, rank: int, epoch: int, begun: int, **given: Any) -> None:
    service.ask(rank, LeaseAsk(0, epoch, 40, 5, bool(given.pop("drop_last", False)), begun, **given), None, 0.0)


def test_a_rank_whose_program_has_ended_gets_no_part_of_an_epoch_that_is_opened_later() -> None:
    said: list[tuple[int, Message]] = []
    service = LeaseService(2, lambda to, message: said.append((to, message)))
    service.shares = lambda message, samples: ((5, 5), LastStep())
    asked(service, 0, 0, 0)
    asked(service, 1, 0, 0)
    service.leave(1, 0.0)
    said.clear()
    asked(service, 0, 1, 0)
    assert said == [(0, Lease(0, 1, [0, 5, 10, 4], even=True))]
    asked(service, 0, 1, 20, idle=True, ahead=8)
    assert said[1:] == [(0, Lease(0, 1, [5, 5, 10, 4], even=True))], "the part of the rank that is gone"


def test_a_short_last_row_is_left_out_where_short_batches_are_dropped_so_that_all_ranks_make_equally_many() -> None:
    said: list[tuple[int, Message]] = []
    service = LeaseService(3, lambda to, message: said.append((to, message)))
    service.shares = lambda message, samples: ((5, 5, 5), LastStep(whole=message.drop_last))
    for rank in range(3):
        asked(service, rank, 0, 0, drop_last=True)  # Two rows of 15, and 10 samples.
    assert said == [(rank, Lease(0, 0, [5 * rank, 5, 15, 2], even=True)) for rank in range(3)]
    for rank in range(3):
        asked(service, rank, 0, 10, drop_last=True, idle=True)
    ends = [(rank, Lease(0, 0, [], True, even=True)) for rank in range(3)]
    assert len(said) == 6 and all(end in said for end in ends), "nobody waits for the rest"


@pytest.mark.parametrize("done", [[], [(0, 512 * 20)], [(0, 300 * 7)]])
def test_with_drop_last_every_rank_has_as_many_batches_as_with_horovod_s_sampler(done: list[Span]) -> None:
    """Also in an epoch that goes on where it was interrupted, by as many ranks or more."""
    queue = LeaseQueue(50_000, 128, 4, drop_last=True, done=done)
    queue.deal((128,) * 4, [0] * 4, last=LastStep(whole=True))
    found = [answered(queue, rank, 0, 0.0) for rank in range(4)]
    begun = sum(stop - start for start, stop in done)
    assert [len(each) for each in found if isinstance(each, list)] == [(49_920 - begun) // 512] * 4
    assert queue.even and queue.free == 0


def test_a_row_that_was_left_out_is_handed_out_if_the_rows_end_before_the_epoch() -> None:
    queue = LeaseQueue(43, 5, 3, drop_last=True)
    queue.deal((5, 5, 5), [0] * 3, last=LastStep(whole=True))
    assert [queue.held(rank) for rank in range(3)] == [10] * 3 and queue.free == 0
    queue.deal((7, 5, 3), [5] * 3, last=LastStep(whole=True))
    assert [queue.held(rank) for rank in range(3)] == [12, 10, 8] and queue.free == 0
    queue.deal((), [5] * 3)
    assert [queue.held(rank) for rank in range(3)] == [5] * 3 and queue.free == 25


def test_an_epoch_whose_batches_have_fixed_sizes_is_not_dealt() -> None:
    said: list[tuple[int, Message]] = []
    service = LeaseService(2, lambda to, message: said.append((to, message)))
    asked(service, 0, 0, 0, fixed=True)
    said.clear()
    assert service.deal(0, 0, (7, 3), (0, 0), 0.0) and not said


def test_a_request_of_an_epoch_that_is_over_for_all_opens_it_not_again() -> None:
    said: list[tuple[int, Message]] = []
    service = LeaseService(1, lambda to, message: said.append((to, message)))
    for epoch in (0, 1, 2):
        asked(service, 0, epoch, 0)
        asked(service, 0, epoch, 40, idle=True)
        said.clear()
    asked(service, 0, 0, 40, idle=True, again=True)
    assert not said and service.epochs == [(0, 1), (0, 2)]


def test_an_epoch_of_a_billion_samples_is_dealt_and_left_as_quickly_as_a_small_one() -> None:
    queue = LeaseQueue(10**9, 19, 4)
    queue.deal((24, 12, 16, 24), (0, 0, 0, 0))
    for rank in range(4):
        answer = queue.ask(rank, 0, 0.0)
        assert isinstance(answer, list) and len(answer) <= 2
    queue.deal((19, 19, 19, 19), (2400, 1200, 1600, 2400))
    queue.leave(3)
    assert queue.free == samples([run for run in dealt([(7600, 10**9)], (19,) * 4, (14,) * 4)[3]]) + 2400
    assert queue.ask(0, 2400, 1.0) is Answer.LATER


def test_no_rows_are_dealt_while_a_rank_gives_positions_back() -> None:
    queue = LeaseQueue(20, 10, 2)
    assert answered(queue, 0, 0, 0.0, idle=True) == [(0, 10)]
    queue.forecast(0, 10.0)
    queue.forecast(1, 0.1)
    assert answered(queue, 1, 0, 0.0, idle=True) == [(10, 20)]
    assert answered(queue, 1, 10, 0.1, idle=True) is Answer.WAIT
    assert list(queue.recalls(0.1)) == [(0, 0)] and not queue.dealable((0, 10))
    with pytest.raises(ValueError, match="get no rows"):
        queue.deal((5, 5), (0, 10))
    queue.give_back(0, 0, 0.2)
    assert queue.dealable((0, 10)) and not queue.dealable((0, 9))


def test_batches_that_may_come_back_keep_an_epoch_with_shares_open() -> None:
    queue = LeaseQueue(20, 10, 2)
    queue.deal((10, 10), (0, 0))
    assert (answered(queue, 0, 0, 0.0), answered(queue, 1, 0, 0.0)) == ([(0, 10)], [(10, 20)])
    queue.give_back(1, 10, 1.0, undelivered=10)
    assert answered(queue, 0, 10, 2.0) is Answer.WAIT
    queue.give_back(1, 10, 3.0, undone=[(10, 20)])
    queue.leave(1)
    assert [(rank, spans(runs)) for rank, runs in queue.answers(4.0)] == [(0, [(10, 20)])]


def all_held(held: list[int], begun: list[int], asks: list[dict[str, Any]], paces_s: list[float]) -> LeaseQueue:
    """A queue without free positions; who has begun all of its batches waits.

    Args:
        held: Batches of 10 that each rank got.
        begun: How many of these each has begun at 1 s.
        asks: More of what each says then.
        paces_s: Of each; NaN if unknown.
    """
    queue = LeaseQueue(10 * sum(held), 10, len(held))
    queue.deal([10 * count for count in held], [0] * len(held))
    queue.deal((), [10 * count for count in held])
    for rank, pace_s in enumerate(paces_s):
        if not math.isnan(pace_s):
            queue.forecast(rank, pace_s)
        queue.ask(rank, 0, 0.0)
    for rank, (count, more) in enumerate(zip(begun, asks, strict=True)):
        queue.ask(rank, 10 * count, 1.0, **more)
    assert not queue.free
    return queue


def next_batch_s(more: dict[str, Any], begun: int, pace_s: float, holder_s: float) -> float:
    """How soon a waiting rank would have ended a batch of a holder, with a batch of margin."""
    own_s = pace_s
    if math.isnan(own_s):
        own_s = holder_s if begun else 0.0
    if math.isnan(own_s) and more["idle"]:
        own_s = 0.0
    return float(more["load_s"]) + (math.inf if math.isnan(own_s) else 2.0 * own_s)


NUMBERS = st.integers(0, 4)
ASKS = st.fixed_dictionaries({
    "idle": st.booleans(), "load_s": st.sampled_from([0.0, 0.5, 4.0]), "ahead": st.integers(0, 2),
})  # fmt: skip


@settings(max_examples=cases(300))
@given(
    ranks=st.lists(st.tuples(NUMBERS, NUMBERS, ASKS, st.sampled_from([0.125, 1.0, 8.0, math.nan])), min_size=2),
    now_s=st.sampled_from([1.0, 2.0, 16.0]),
)
def test_what_a_waiting_rank_would_end_sooner_is_called_back(
    ranks: list[tuple[int, int, dict[str, Any], float]], now_s: float
) -> None:
    """Every waiting rank compared with every rank that holds something, as the rule is meant."""
    held = [1, *(count for count, *_ in ranks)]
    begun = [0, *(min(count, done) for count, done, *_ in ranks)]
    asks = [{"idle": False, "load_s": 0.0, "ahead": 0}, *(more for _, _, more, _ in ranks)]
    paces_s = [4.0, *(pace_s for *_, pace_s in ranks)]
    queue = all_held(held, begun, asks, paces_s)
    waiting = [r for r, count in enumerate(held) if begun[r] == count and (begun[r] or asks[r]["idle"])]
    expected = []
    for rank, pace_s in enumerate(paces_s):
        left = held[rank] - begun[rank]
        end_s = math.inf if math.isnan(pace_s) else 1.0 + (left + 1) * pace_s
        end_s = end_s if end_s >= now_s else 2.0 * now_s - 1.0
        soon_s = [next_batch_s(asks[each], begun[each], paces_s[each], pace_s) for each in waiting]
        gains_s = [each_s for each_s in soon_s if left and end_s > now_s + each_s]
        if gains_s:
            keeps = asks[rank]["ahead"] and not math.isnan(pace_s) and min(gains_s) >= pace_s
            expected.append((rank, 10 * int(min(min(gains_s) / pace_s, left - 1)) if keeps else 0))
    assert list(queue.recalls(now_s)) == expected
    assert not list(queue.recalls(now_s)), "who has been asked is not asked again before it answers"


def calls_of_recalls(ranks: int) -> int:
    """Functions called where half of the ranks wait for what the others will have ended before."""
    half = ranks // 2
    asks: list[dict[str, Any]] = [{"idle": True}] * ranks
    queue = all_held([4] * ranks, [4] * half + [2] * half, asks, [8.0] * half + [1.0] * half)
    called = 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal called
        called += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        found = list(queue.recalls(1.0))
    finally:
        sys.setprofile(before)
    assert not found
    return called


def test_at_the_end_of_an_epoch_not_all_ranks_are_compared_with_all() -> None:
    """Each request comes to it, and rank 0 answers those of all ranks."""
    assert calls_of_recalls(256) < 2.5 * calls_of_recalls(128)
