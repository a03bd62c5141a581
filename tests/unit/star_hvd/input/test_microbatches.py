"""Micro-batches of several ranks and their coordinator in one thread, messages in random order between ranks."""

from __future__ import annotations

import random
from collections import Counter, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.rules.runs import Span, joined, spans
from scheduler.rules.step_layout import StepLayout, grain
from star_hvd.channel.messages.base import Message
from star_hvd.channel.messages.leases import Consumed, Lease, LeaseReturn, ReportConsumed, flat, runs_of
from star_hvd.channel.messages.microbatches import (
    MicrobatchBegin,
    MicrobatchGrant,
    MicrobatchOpen,
    MicrobatchReturn,
    MicrobatchShares,
)
from star_hvd.coordinator.lease_service import MicrobatchService
from star_hvd.errors import StarError
from star_hvd.input.microbatches import Microbatch, MicrobatchInHand, MicrobatchStock
from tests.support.effort import cases


class Job:
    """One small thing happens per tick, picked at random; ranks meet at the end of every step.

    Args:
        seed: Fixes the interleaving.
        paces: Ticks of a micro-batch, by rank.
        samples: Of the epoch.
        batch: Samples of a rank in a step.
        parts: Micro-batches of a rank in a step.
        ahead: Micro-batches that a loader forms ahead.
        leaves: Ranks that leave their loops somewhere; not all.
        toggles: Whether taking over begins and ends somewhere.
        done: What was consumed before the epoch was interrupted.
        fixed: Ticks of a pass whatever its size.
    """

    def __init__(
        self, seed: int, paces: list[int], samples: int, batch: int, parts: int, *, ahead: int = 0,
        leaves: frozenset[int] = frozenset(), toggles: bool = False, done: list[Span] | None = None, fixed: int = 0,
    ) -> None:  # fmt: skip
        self.fixed = fixed
        self.random = random.Random(seed)
        self.batch = batch
        self.paces, self.ahead, self.leaves, self.toggles = paces, ahead, leaves, toggles
        self.ranks = range(len(paces))
        self.layout = StepLayout(samples, batch, parts, len(paces), done=done or (), grain=grain(batch, parts))
        self.up: list[deque[Message]] = [deque() for _ in paces]
        self.down: list[deque[Message]] = [deque() for _ in paces]
        self.service = MicrobatchService(len(paces), lambda to, message: self.down[to].append(message))
        self.service.steals = True
        opening = MicrobatchOpen(0, 0, samples, batch, parts, False, ahead, 7, flat(done or ()))
        self.stocks = [MicrobatchStock(r, self.layout, opening, send=self.up[r].append) for r in self.ranks]
        self.step = [0] * len(paces)
        self.until = [0] * len(paces)  # Tick at which the present micro-batch ends.
        self.whole: set[int] = set()  # Ranks whose gradient of the step is whole.
        self.gone: set[int] = set()
        self.taken: dict[int, list[tuple[int, Microbatch]]] = {}  # By step.
        self.numbers: list[deque[int]] = [deque() for _ in paces]
        self.heard: list[tuple[int, MicrobatchBegin]] = []
        self.now = 0
        for stock in self.stocks:
            stock.open()

    def run(self, steps: int | None = None, ticks: int = 0) -> None:
        """To the end, or until all ranks have made so many steps; and so many ticks more."""
        steps = self.layout.steps if steps is None else min(steps, self.layout.steps)
        while ticks > 0 or not all(rank in self.gone or self.step[rank] >= steps for rank in self.ranks):
            ticks -= all(rank in self.gone or self.step[rank] >= steps for rank in self.ranks)
            self.now += 1
            assert self.now < 400_000, "the job stands still"
            up, down = self.move_up, self.move_down
            self.random.choice((up, up, down, down, self._form, self._work, self._time))()

    def move_up(self) -> None:
        rank = self.random.choice(self.ranks)
        if not self.up[rank]:
            return
        message = self.up[rank].popleft()
        if isinstance(message, MicrobatchOpen):
            self.service.open(rank, message, float(self.now))
        elif isinstance(message, MicrobatchBegin):
            self.service.begin(rank, message, float(self.now))
            self.heard.append((rank, message))
        elif isinstance(message, MicrobatchReturn):
            self.service.returned(rank, message, float(self.now))
        elif isinstance(message, LeaseReturn):
            self.service.leave(rank, float(self.now), (0, 0))

    def move_down(self) -> None:
        rank = self.random.choice(self.ranks)
        if self.down[rank]:
            self.stocks[rank].on_message(self.down[rank].popleft())

    def _form(self) -> None:
        rank = self.random.choice(self.ranks)
        if len(self.numbers[rank]) < self.ahead and (batch := self.stocks[rank].form()) is not None:
            self.numbers[rank].append(batch.number)

    def _time(self) -> None:
        self.service.tick(float(self.now))
        if self.toggles and self.random.random() < 0.01:
            self.service.steals = not self.service.steals

    def _work(self) -> None:
        rank = self.random.choice(self.ranks)
        if rank in self.gone or rank in self.whole or self.step[rank] >= self.layout.steps:
            return
        if self.now < self.until[rank]:
            return
        stock = self.stocks[rank]
        if rank in self.leaves and self.random.random() < 0.01:
            self.gone.add(rank)
            stock.close()
            self._meet()
            return
        if not stock.decided(0.0):
            return
        more = stock.reserve(self.step[rank])
        if more:
            part = stock.take()
            self._deliver(rank, part)
            self.taken.setdefault(part.step, []).append((rank, part))
            self.until[rank] = self.now + self.fixed + self.paces[rank] * part.tasks // self.layout.grain
        elif more is False:
            self.whole.add(rank)
            self._meet()

    def _deliver(self, rank: int, part: Microbatch) -> None:
        stock = self.stocks[rank]
        while part.own:
            while not self.numbers[rank]:
                batch = stock.form()
                assert batch is not None
                self.numbers[rank].append(batch.number)
            found = [(number, stock.is_in(number, part)) for number in self.numbers[rank]]
            self.numbers[rank] = deque(number for number, wanted in found if wanted is False)
            if any(wanted for _, wanted in found):
                stock.delivered(next(number for number, wanted in found if wanted))
                return

    def _meet(self) -> None:
        there = [rank for rank in self.ranks if rank not in self.gone]
        if there and all(rank in self.whole for rank in there):
            assert len({self.step[rank] for rank in there}) == 1
            self.whole.clear()
            for rank in there:
                self.step[rank] += 1
                assert self.stocks[rank].next_step() == (self.step[rank] < self.layout.steps)

    def consumed(self, step: int) -> list[Span]:
        """What the ranks say of the steps before one, each in its agent's thread."""
        found: list[Span] = []
        for stock, sent in zip(self.stocks, self.up, strict=True):
            stock.on_message(ReportConsumed(0, 0, step))
            answer = sent.pop()
            assert isinstance(answer, Consumed)
            found += spans(runs_of(answer.runs))
        return joined(found)


def _check(job: Job) -> None:
    """Every sample was computed once, in its step; the global batch is constant; every rank has a part."""
    seen = Counter(p for step in job.taken.values() for _, part in step for a, b in part.spans for p in range(a, b))
    assert len(seen) == job.layout.samples and set(seen.values()) <= {1}
    for step in range(job.layout.steps):
        tasks = sorted(task for _, part in job.taken[step] for task in range(part.task, part.stop))
        assert tasks == list(range(job.layout.tasks(step)))
        assert all(sum(stop - start for start, stop in part.spans) <= job.batch for _, part in job.taken[step])
        there = {rank for rank, _ in job.taken[step]}
        assert step == job.layout.steps - 1 or there | job.gone == set(job.ranks)


@settings(max_examples=cases(60), deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    paces=st.lists(st.sampled_from([1, 20, 60, 400]), min_size=1, max_size=5),
    samples=st.integers(0, 100),
    batch=st.integers(1, 12),
    parts=st.integers(1, 8),
    ahead=st.integers(0, 6),
    toggles=st.booleans(),
    fixed=st.sampled_from([0, 20, 60]),
)
def test_every_sample_is_computed_once_in_its_step(
    seed: int, paces: list[int], samples: int, batch: int, parts: int, ahead: int, toggles: bool, fixed: int
) -> None:
    job = Job(seed, paces, samples, batch, min(parts, batch), ahead=ahead, toggles=toggles, fixed=fixed)
    job.run()
    _check(job)


@settings(max_examples=cases(60), deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    gone=st.frozensets(st.integers(0, 3), min_size=1, max_size=3),
    steals=st.booleans(),
)
def test_what_a_rank_leaves_behind_is_computed_by_the_others(seed: int, gone: frozenset[int], steals: bool) -> None:
    job = Job(seed, [30, 60, 30, 200], 130, 8, 4, ahead=3, leaves=gone, toggles=not steals)
    job.run()
    _check(job)


@settings(max_examples=cases(30), deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    paces=st.lists(st.sampled_from([1, 20, 60, 400]), min_size=2, max_size=5),
    ranks=st.integers(1, 5),
    samples=st.integers(1, 150),
    batch=st.integers(1, 8),
    parts=st.integers(1, 8),
    ahead=st.integers(0, 6),
    steps=st.integers(0, 4),
    ticks=st.integers(0, 2000),
)
def test_an_epoch_that_ends_inside_a_step_goes_on_with_other_ranks_and_every_sample_once(
    seed: int, paces: list[int], ranks: int, samples: int, batch: int, parts: int, ahead: int, steps: int, ticks: int
) -> None:
    """A rank dies, or the job ends, somewhere behind the commit; the state is of the commit, or of inside a step."""
    parts = min(parts, batch)
    first = Job(seed, paces, samples, batch, parts, ahead=ahead)
    first.run(steps)
    at_commit, step = first.consumed(min(steps, first.layout.steps)), min(steps, first.layout.steps)
    first.run(steps, ticks)
    assert first.consumed(step) == at_commit, "what is begun later does not count"
    made = [part for done in range(step) for _, part in first.taken[done]]
    seen = Counter(p for part in made for a, b in part.spans for p in range(a, b))
    assert sorted(seen) == [p for a, b in at_commit for p in range(a, b)]
    again = Job(seed, [20] * ranks, samples, batch, parts, ahead=ahead, done=at_commit)
    again.run()
    _check(again)
    made = [part for taken in again.taken.values() for _, part in taken]
    seen.update(p for part in made for a, b in part.spans for p in range(a, b))
    assert sorted(seen) == list(range(samples)) and set(seen.values()) == {1}


def test_a_slow_rank_computes_less_and_the_work_ends_near_the_bound() -> None:
    job = Job(3, [100, 400, 100, 100], 160, 10, 5, ahead=2)
    job.run()
    counts = Counter(rank for step in job.taken.values() for rank, _ in step)
    assert sum(stock.taken_over for stock in job.stocks) > 0
    assert counts[1] < min(counts[rank] for rank in (0, 2, 3))


@pytest.mark.parametrize("seed", range(5))
def test_the_coordinator_hears_how_long_every_pass_took_also_the_last_ones_of_an_epoch(seed: int) -> None:
    """A rank that becomes slow in an epoch's last step is as slow in the first step of the next epoch."""
    job = Job(seed, [100, 100, 100, 100], 160, 10, 5)
    job.run()
    while any(job.up):  # What comes behind the last step begins nothing, and nothing fails.
        job.move_up()
    for rank in job.ranks:
        said = [message for of, message in job.heard if of == rank]
        assert sum(each.task >= 0 for each in said) == sum(each.compute_s > 0.0 for each in said)


def test_ranks_with_other_data_are_refused() -> None:
    told: list[tuple[int, Message]] = []
    service = MicrobatchService(2, lambda to, message: told.append((to, message)))
    service.open(0, MicrobatchOpen(0, 0, 100, 8, 4, False, 0, 7), 0.0)
    service.open(1, MicrobatchOpen(0, 0, 100, 8, 2, False, 0, 7), 0.0)
    assert told[-1][0] == 1 and isinstance(told[-1][1], Lease) and "microbatches 2" in told[-1][1].refused
    service.open(1, MicrobatchOpen(0, 0, 100, 8, 4, False, 0, 8), 0.0)
    assert isinstance(told[-1][1], Lease) and "different orders" in told[-1][1].refused
    stock = MicrobatchStock(1, StepLayout(100, 8, 4, 2), MicrobatchOpen(0, 0, 100, 8, 4, False, 0, 8), send=print)
    stock.on_message(told[-1][1])
    with pytest.raises(ValueError, match="different orders"):
        stock.decided(0.0)


def test_a_weight_is_given_before_it_is_used() -> None:
    part = MicrobatchInHand(5, 10.0, lambda: False, 1.0)
    part.weigh(20.0)
    assert part.weight == 2.0 and part.is_last
    with pytest.raises(StarError, match="call it before"):
        part.weigh(1.0)


def test_a_pass_that_was_reserved_when_its_loop_was_left_goes_to_the_others() -> None:
    job = Job(0, [1, 1], 16, 8, 4)
    job.service.steals = False
    while job.up[0] or job.up[1] or job.down[0] or job.down[1]:
        job.move_up(), job.move_down()
    for rank in job.ranks:
        assert job.stocks[rank].reserve(-1)
    job.stocks[1].take()
    assert job.stocks[1].decided(0.0) and job.stocks[1].reserve(-1)
    job.stocks[1].close()  # It has taken its first one, reserved its second, and has two more.
    while any(job.up) or any(job.down):
        job.move_up(), job.move_down()
    taken = [job.stocks[0].take()]
    while job.stocks[0].decided(0.0) and job.stocks[0].reserve(-1):
        taken.append(job.stocks[0].take())
        while any(job.up) or any(job.down):
            job.move_up(), job.move_down()
    found = sorted(task for part in taken for task in range(part.task, part.stop))
    assert found == [task for task in range(job.layout.tasks(0)) if not 8 <= task < 10]


def test_a_rank_that_opened_late_and_has_no_pass_of_its_own_ends_what_it_took_over() -> None:
    """Its share's first pass has an expected time, though others have begun all of the share."""
    layout = StepLayout(16, 8, 2, 2, grain=grain(8, 2))
    sent: list[Message] = []
    stock = MicrobatchStock(1, layout, MicrobatchOpen(0, 0, 16, 8, 2, False, 0, 7), send=sent.append)
    share = layout.share
    stock.on_message(MicrobatchShares(0, 0, 0, [share, share], [], 1.0, 1e-9))
    stock.on_message(MicrobatchGrant(0, 0, 0, 0, 1))
    assert stock.decided(0.0) and stock.reserve(0)
    assert stock.take().granted
    stock.ended()
    assert stock.decided(0.0) is False
    assert [each.task for each in sent if isinstance(each, MicrobatchBegin)] == [0, -1]
