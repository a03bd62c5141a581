"""Batch shares change at the same step on all ranks: a job of loaders, stocks and a coordinator in one thread.

Ranks work in lockstep: a step ends when every rank that has not ended its epoch has begun its batch. Messages take
random times, in order; changes of the shares are asked for at random moments.
"""

from __future__ import annotations

import random
import threading
from collections import defaultdict, deque
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.balance.batch_shares import LastStep
from scheduler.balance.time_curves import TimeCurves
from scheduler.plan.plan import Plan
from scheduler.records import StepTimes
from scheduler.rules.runs import Span, without
from star_hvd.channel.messages.base import Message
from star_hvd.channel.messages.leases import LeaseAsk, LeaseReturn, flat
from star_hvd.channel.messages.shares import EPOCH_START, MemoryLimit, ShareOrder, ShareProposal, ShareReady
from star_hvd.config import Config
from star_hvd.coordinator.lease_service import LeaseService
from star_hvd.coordinator.share_control import ShareControl, ShareState
from star_hvd.errors import ChannelError, DeadlineError
from star_hvd.input.batch_sizes import BatchSizes
from star_hvd.input.lease_stock import LeaseStock
from tests.support.effort import cases
from tests.support.leases import lease
from tests.support.sending import sending_to

BATCH = 6


class Job:
    """Ranks in lockstep; one small thing happens per tick, picked at random.

    Args:
        seed: Fixes the interleaving.
        ranks: How many.
        samples: Of an epoch.
        epochs: How many.
        changes: Changes of the shares.
        ahead: Batches that a loader forms ahead of the training.
        in_order: Whether they come out in the order in which they were formed.
        leaves: Ranks that leave their loops somewhere in every epoch; not all.
        patient: Whether a step waits for ranks that wait for samples, which are inactive after a while.
        ends: Whether a change may also be that ranks take samples as they need them again.
        in_step: Whether epochs start in rows.
        done: Spans of the first epoch that were consumed before.
        drop_last: Whether a short last batch is left out.
        apart: How often a step ends without the ranks that have not begun it.
        least: Fewest samples that a rank should have.
    """

    def __init__(
        self,
        seed: int,
        ranks: int,
        samples: int,
        epochs: int,
        changes: int,
        ahead: int,
        *,
        in_order: bool = True,
        leaves: frozenset[int] = frozenset(),
        patient: bool = True,
        ends: bool = False,
        in_step: bool = False,
        done: tuple[Span, ...] = (),
        drop_last: bool = False,
        apart: float = 0.0,
        least: int = 0,
    ) -> None:
        self.done, self.drop_last, self.apart = done, drop_last, apart
        self.in_order, self.leaves, self.patient, self.ends = in_order, leaves, patient, ends
        self.random = random.Random(seed)
        self.ranks, self.samples, self.epochs, self.ahead = ranks, samples, epochs, ahead
        self.up: list[deque[Message]] = [deque() for _ in range(ranks)]
        self.down: list[deque[Message]] = [deque() for _ in range(ranks)]
        self.leases = LeaseService(ranks, lambda to, message: self.down[to].append(message))
        self.state = ShareState(ranks, lambda message: [queue.append(message) for queue in self.down] and None)
        self.state.in_step = in_step
        self.leases.shares = self.state.opens
        self.state.deal = lambda loader, change, now_s: self.leases.deal(
            loader, change.epoch, change.shares, change.planned, now_s, change.last
        )
        self.step = [0] * ranks
        clock = lambda: 0.05 * self.random.random()  # noqa: E731  # Batches take longer than messages, or do not.
        self.sizes = [
            BatchSizes(rank, 0, send=self.up[rank].append, step=self._step_of(rank), clock=clock, least=least)
            for rank in range(ranks)
        ]
        self.epoch = 0
        self.changes_left = changes
        self.formed: list[deque[int]] = []  # Numbers of batches.
        self.stocks: list[LeaseStock] = []
        self.next: dict[int, LeaseStock] = {}  # Of ranks that have asked for the next epoch.
        self.ended: set[int] = set()
        self.began: set[int] = set()
        self.totals: dict[tuple[int, int], list[int]] = defaultdict(lambda: [0] * ranks)  # By epoch and step in it.
        self.first = 0
        self.taken: list[int] = []
        self.rows: dict[tuple[int, int], list[int]] = defaultdict(list)  # Positions, likewise.
        self.ordered = 0

    def _step_of(self, rank: int) -> Callable[[], int]:
        return lambda: self.step[rank]

    def run(self) -> None:
        self._begin_epoch()
        for _ in range(200_000):
            if self.epoch == self.epochs:
                return
            self._tick()
        raise AssertionError(f"the job hangs in epoch {self.epoch} at steps {self.step}, {len(self.ended)} ended")

    def _begin_epoch(self) -> None:
        self.first = max(self.step)
        self.step = [self.first] * self.ranks
        self.formed = [deque() for _ in range(self.ranks)]
        self.stocks, self.ended, self.began, self.taken = [], set(), set(), []
        done = self.done if self.epoch == 0 else ()
        end = self.samples - (self.samples % BATCH if self.drop_last else 0)
        self.expected = [p for start, stop in without([(0, end)], done) for p in range(start, stop)]
        for rank in range(self.ranks):
            self.stocks.append(self.next.pop(rank, None) or self._stock(rank, self.epoch))
            self.sizes[rank].begin_epoch(self.epoch, len(self.expected), BATCH)
            self.stocks[rank].begin(7, flat(done))

    def _stock(self, rank: int, epoch: int) -> LeaseStock:
        return LeaseStock(
            rank, 0, epoch, samples=self.samples, batch=BATCH, drop_last=self.drop_last, ahead=self.ahead,
            in_order=self.in_order, send=sending_to(self.up[rank]), sizer=self.sizes[rank],
        )  # fmt: skip

    def _tick(self) -> None:
        pick, rank = self.random.random(), self.random.randrange(self.ranks)
        if pick < 0.3 and self.up[rank]:
            self._handle(rank, self.up[rank].popleft())
        elif pick < 0.6 and self.down[rank]:
            message = self.down[rank].popleft()
            epoch = getattr(message, "epoch", self.epoch)
            if isinstance(message, (ShareProposal, ShareOrder)):
                self.sizes[rank].on_message(message)
                self.stocks[rank].wake()
            elif epoch == self.epoch:
                self.stocks[rank].on_message(message)
            elif epoch == self.epoch + 1:
                self.next[rank].on_message(message)
        elif pick < 0.62 and self.changes_left and self.state.loader == 0 and not self.state.pending:
            self.changes_left -= 1
            over = self.ends and self.state.shares and self.random.random() < 0.5
            self.state.propose([] if over else self.some_shares(), 0.0)
        elif pick < 0.8:
            self._form(rank)
        else:
            self._train(rank)

    def some_shares(self) -> list[int]:
        total = BATCH * self.ranks
        cuts = sorted(self.random.sample(range(1, total), self.ranks - 1))
        return [end - begin for begin, end in zip([0, *cuts], [*cuts, total], strict=True)]

    def _handle(self, rank: int, message: Message) -> None:
        if isinstance(message, LeaseAsk):
            self.leases.ask(rank, message, None, 0.0)
        elif isinstance(message, LeaseReturn):
            self.leases.give_back(rank, message, 0.0)
        else:
            assert isinstance(message, ShareReady)
            self.ordered += self.state.ready(rank, message, max(self.step) + 1, 0.0) is not None

    def _form(self, rank: int) -> None:
        """The loader of a rank forms a batch ahead of its training."""
        if rank in self.ended or len(self.formed[rank]) > self.ahead:
            return
        stock = self.stocks[rank]
        batch = stock.form()
        if batch is not None:
            self.formed[rank].append(batch.number)
        elif not self.formed[rank] and stock.ready(0.0) and not stock.wait(0.0, lambda: None, lambda: 0.0):
            self._end(rank)

    def _end(self, rank: int) -> None:
        self.sizes[rank].end_epoch(self.epoch)
        self.stocks[rank].close()
        self.ended.add(rank)
        if self.epoch + 1 < self.epochs and self.random.random() < 0.7:
            self.next[rank] = self._stock(rank, self.epoch + 1)
            self.next[rank].open()

    def _train(self, rank: int) -> None:
        """A rank begins its next batch; the step ends when all have that have one."""
        if rank in self.leaves - self.ended and self.random.random() < 0.02:
            self.formed[rank].clear()
            self._end(rank)
            self.began.discard(rank)
        self._maybe_end_step()
        if rank in self.began or not self.formed[rank]:
            if len(self.ended) == self.ranks and not any(self.formed):
                self.epoch += 1
                missing = set(self.expected) - set(self.taken)
                assert len(self.taken) + len(missing) == len(self.expected), "a sample was taken twice"
                assert len(missing) < BATCH * self.ranks * self.drop_last + 1, "a sample is missing"
                if self.epoch < self.epochs:
                    self._begin_epoch()
            return
        if not self.in_order:
            self.formed[rank].rotate(self.random.randrange(len(self.formed[rank])))
        batch = self.stocks[rank].take(self.formed[rank].popleft())
        if batch is None:
            return  # It was called back.
        self.sizes[rank].delivered(self.stocks[rank].delivered - 1)
        self.totals[self.epoch, self.step[rank] - self.first][rank] = batch.samples
        positions = [p for start, stop in batch.spans for p in range(start, stop)]
        self.rows[self.epoch, self.step[rank] - self.first] += positions
        self.taken += positions
        self.began.add(rank)
        self._maybe_end_step()

    def _maybe_end_step(self) -> None:
        if self.began and self.random.random() < self.apart:
            for rank in self.began:  # The others are late, and make this step later or leave it out.
                self.step[rank] = self.random.choice((self.step[rank], max(self.step))) + 1
            self.began = set()
            return
        # One that waits for the end, or for what others leave over, says that it is inactive.
        done = {r for r in range(self.ranks) if not self.formed[r] and (r in self.ended or self._is_inactive(r))}
        waited_for = set(range(self.ranks)) - done - self.began
        if self.began and not waited_for:
            self.began = set()
            self.step = [max(self.step) + 1] * self.ranks

    def _is_inactive(self, rank: int) -> bool:
        return (self.stocks[rank].had_share or not self.patient) and not self.stocks[rank].ready(0.0)


def checked(job: Job) -> None:
    """Every step of an epoch has the global batch, its row of the epoch's order; the last one has what is left."""
    whole, end = BATCH * job.ranks, len(job.expected)
    end -= end % whole if job.drop_last else 0
    for (_, step), found in job.rows.items():
        assert sorted(found) == list(range(step * whole, min((step + 1) * whole, end))), step
    steps = max(step for epoch, step in job.totals)
    for (epoch, step), sizes in sorted(job.totals.items()):
        last = (epoch, step + 1) not in job.totals
        expected = end % whole if last else whole
        assert sum(sizes) in (expected or whole, whole), (epoch, step, sizes)
        assert steps == -(-end // whole) - 1
        if last and end % whole:
            few = {1} if end % whole == 1 else set(range(2, whole))
            assert job.state.least == 1 or set(sizes) - {0} <= few, "what batch normalization cannot do"


def _job_in_step(seed: int, ranks: int, steps: int, rest: int, ahead: int, drop_last: bool) -> Job:
    """Run a job whose epochs start with shares, and in which five other ones are proposed."""
    whole = BATCH * ranks
    job = Job(seed, ranks, steps * whole + rest % whole, epochs=3, changes=0, ahead=ahead, drop_last=drop_last, least=2)
    left = job.samples - (job.samples % BATCH if drop_last else 0)
    job.state.opens(LeaseAsk(0, 0, job.samples, BATCH, drop_last, 0), left)
    job.state.shares, job.state.last = tuple(job.some_shares()), LastStep(drop_last, 2)
    for rank, sizes in enumerate(job.sizes):  # As after an order before the epoch.
        sizes.on_message(ShareProposal(0, 1, list(job.state.shares)))
        sizes.on_message(ShareOrder(0, 1, True, list(job.state.shares), 0, EPOCH_START, left, drop_last, 2))
        job.up[rank].clear()  # The state takes that order to be carried out.
    job.changes_left = 5
    job.run()
    return job


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6), ranks=st.integers(2, 4), steps=st.integers(3, 30), rest=st.integers(0, 20),
    ahead=st.integers(0, 6), drop_last=st.booleans(),
)  # fmt: skip
def test_the_global_batch_is_constant_and_every_sample_is_taken_once(
    seed: int, ranks: int, steps: int, rest: int, ahead: int, drop_last: bool
) -> None:
    checked(_job_in_step(seed, ranks, steps, rest, ahead, drop_last))


def test_shares_that_are_proposed_within_such_epochs_are_ordered() -> None:
    """Not all are: some come between two epochs, or give a rank fewer samples than the least."""
    ordered = [_job_in_step(seed, 2 + seed % 3, 12, 0, 1, False).ordered for seed in range(10)]
    assert sum(ordered) >= 20


@settings(max_examples=cases(200), deadline=None)
@given(
    seed=st.integers(0, 10**6), ranks=st.integers(2, 4), samples=st.integers(0, 400), ahead=st.integers(0, 9),
    changes=st.integers(0, 60), in_order=st.booleans(), leaves=st.frozensets(st.integers(1, 3)), in_step=st.booleans(),
    done=st.lists(st.tuples(st.integers(0, 400), st.integers(1, 60)), max_size=3), drop_last=st.booleans(),
    apart=st.sampled_from((0.0, 0.2, 0.5)),
)  # fmt: skip
def test_every_sample_is_taken_once_though_ranks_leave_and_batches_overtake_each_other(
    seed: int, ranks: int, samples: int, ahead: int, changes: int, in_order: bool, leaves: frozenset[int],
    in_step: bool, done: list[Span], drop_last: bool, apart: float,
) -> None:  # fmt: skip
    """Also where the rank that leaves was the only one with a part in the last step; `Job._train` compares."""
    consumed = without([(0, samples)], without([(0, samples)], [(start, start + count) for start, count in done]))
    job = Job(
        seed, ranks, samples, epochs=3, changes=changes, ahead=ahead, in_order=in_order, leaves=leaves,
        patient=False, ends=True, in_step=in_step, done=tuple(consumed),
        drop_last=drop_last, apart=apart,
    )  # fmt: skip
    job.run()


def test_ranks_form_nothing_from_where_they_said_on_until_the_order_and_wait_no_longer_than_the_deadline() -> None:
    sent: list[Message] = []
    sizes = BatchSizes(1, 0, send=sent.append, step=lambda: 7)
    sizes.begin_epoch(0, 1000, 10)
    stock = LeaseStock(1, 0, 0, samples=1000, batch=10, drop_last=False, send=sending_to([]), sizer=sizes)
    stock.begin(7, [])
    stock.on_message(lease(0, 0, 0, 200))
    formed = [stock.form(), stock.form()]
    sizes.on_message(ShareProposal(0, 1, [15, 5]))
    assert sent == [ShareReady(0, 1, 0, 10, 1, 30, [0, 10], 0)], "two batches were formed, and one more may be"
    formed += [stock.form()]
    assert [batch.samples for batch in formed if batch is not None] == [10] * 3
    assert stock.form() is None and not stock.ready(0.0)
    with pytest.raises(DeadlineError, match=r"rank 1 waited \d+\.\d s .* from which step on the batch shares change"):
        stock.wait(0.05, lambda: None, lambda: 0.0, longest_s=600.0)
    threading.Timer(
        0.2, lambda: (sizes.on_message(ShareOrder(0, 1, True, [15, 5], 0, 12, 1000 - 100)), stock.wake())
    ).start()
    assert stock.wait(60.0, lambda: None, lambda: 0.0)
    later = [stock.form(), stock.form(), stock.form()]
    assert [batch.samples for batch in later if batch is not None] == [10, 10, 5], "the other rank was two steps on"


def test_a_change_waits_for_no_further_batch_where_those_take_longer_than_messages() -> None:
    sent: list[Message] = []
    now_s = [0.0]
    sizes = BatchSizes(0, 0, send=sent.append, step=lambda: round(now_s[0] / 0.05), clock=lambda: now_s[0])
    sizes.begin_epoch(0, 1000, 10)
    for index in range(3):
        now_s[0] = 0.05 * index
        sizes.size(index)
        sizes.delivered(index)
    sizes.on_message(ShareProposal(0, 1, [15, 5]))
    assert sent == [ShareReady(0, 1, 0, 3, 1, 30, [0, 10], 0)]


def test_a_batch_that_was_called_back_has_its_size_again() -> None:
    sent: list[Message] = []
    sizes = BatchSizes(0, 0, send=sent.append, step=lambda: 0)
    sizes.begin_epoch(0, 1000, 10)
    assert [sizes.size(index) for index in range(6)] == [10] * 6
    assert [sizes.size(index) for index in (3, 4)] == [10] * 2, "3 to 5 were called back, 3 and 4 are formed again"
    sizes.on_message(ShareProposal(0, 1, [15, 5]))
    assert sent == [ShareReady(0, 1, 0, 6, 1, 60, [0, 10], 0)]
    sizes.on_message(ShareOrder(0, 1, True, [15, 5], 0, 6, 1000 - 120))
    assert [sizes.size(index) for index in (4, 5, 6, 7, 5, 6)] == [10, 10, 15, 15, 10, 15]
    sizes.on_message(ShareProposal(0, 2, [10, 10]))
    assert sent[1:] == [ShareReady(0, 2, 0, 8, 1, 90, [0, 15], 0)]


def test_an_order_that_was_given_up_leaves_sizes_alone() -> None:
    sent: list[Message] = []
    sizes = BatchSizes(0, 0, send=sent.append, step=lambda: 0)
    sizes.begin_epoch(0, 100, 10)
    sizes.on_message(ShareProposal(0, 1, [15, 5]))
    assert sizes.size(2) is None
    sizes.on_message(ShareOrder(0, 1, False, [], 0, 0, 0))
    assert [sizes.size(index) for index in range(5)] == [10] * 5 and not sizes.balanced


def test_the_training_thread_waits_for_shares_until_they_are_ordered_or_cannot_be() -> None:
    sizes = BatchSizes(0, 0, send=lambda message: None, step=lambda: 0)
    sizes.begin_epoch(0, 100, 10)

    def wait_while(*orders: ShareOrder) -> bool:
        """Start a wait, which the orders are to end, and return whether it goes on behind all but the last."""
        waiting = threading.Thread(target=sizes.await_shares, args=(60.0,))
        waiting.start()
        for order in orders[:-1]:
            sizes.on_message(ShareProposal(0, order.number, [10, 10]))
            sizes.on_message(order)
        waiting.join(0.05)
        went_on = waiting.is_alive()
        sizes.on_message(ShareProposal(0, orders[-1].number, [10, 10]))
        sizes.on_message(orders[-1])
        waiting.join(60.0)
        assert not waiting.is_alive()
        return went_on

    refused = [ShareOrder(0, number, False, [], 0, 0, 0) for number in (1, 2, 3)]
    assert wait_while(*refused) and not sizes.balanced
    sizes.begin_epoch(1, 100, 10)
    assert wait_while(ShareOrder(0, 4, False, [], 0, 0, 0), ShareOrder(0, 5, True, [10, 10], 1, 2, 60))
    assert sizes.balanced
    sizes.await_shares(60.0)


def test_a_rank_that_does_not_answer_or_cannot_hold_so_much_ends_the_proposal() -> None:
    sent: list[Message] = []
    state = ShareState(2, sent.append)
    state.opens(LeaseAsk(0, 0, 1000, 10, False, 0), 1000)
    state.propose((15, 5), now_s=0.0)
    assert state.ready(0, ShareReady(0, 1, 0, 5, 1, 50, [0, 10], 0), 9, 0.0) is None and state.pending
    state.tick(100.0)
    assert not state.pending and sent[-1] == ShareOrder(0, 1, False, [], 0, 0, 0)
    state.propose((15, 5), now_s=100.0)
    state.ready(1, ShareReady(0, 2, 0, 6, 1, 60, [0, 10], 12), 9, 0.0)
    assert state.ready(0, ShareReady(0, 2, 0, 5, 1, 50, [0, 10], 12), 9, 0.0) is None, "rank 0 can have 12 samples"
    assert state.most == [12, 12] and not state.shares and sent[-1] == ShareOrder(0, 2, False, [], 0, 0, 0)
    with pytest.raises(ChannelError, match="loader 3"):
        state.ready(0, ShareReady(3, 2, 0, 5, 1, 50, [0, 10], 12), 9, 0.0)


def test_a_change_begins_at_the_latest_step_and_says_what_every_rank_gets_of_the_epoch() -> None:
    sent: list[Message] = []
    state = ShareState(2, sent.append)
    assert state.opens(LeaseAsk(0, 0, 1007, 10, False, 0), 1007) == ((), LastStep())
    state.propose((15, 5), now_s=0.0)
    state.ready(0, ShareReady(0, 1, 0, 5, 1, 50, [0, 10], 0), 9, 0.0)
    change = state.ready(1, ShareReady(0, 1, 0, 7, 1, 70, [0, 10], 0), 9, 0.0)
    assert sent[-1] == ShareOrder(0, 1, True, [15, 5], 0, 7, 1007 - 140)
    assert change is not None and change.planned == (70, 70)
    assert [state.samples(0, step) for step in (6, 7)] == [10, 15]
    assert state.opens(LeaseAsk(0, 1, 1007, 10, False, 0), 1007) == ((15, 5), LastStep())


def _ready(loader: int, number: int) -> ShareReady:
    return ShareReady(loader, number, 0, 5, 1, 50, [0, 10], 0)


def test_shares_follow_the_loader_whose_batches_gradients_follow() -> None:
    sent: list[Message] = []
    state = ShareState(2, sent.append)
    state.in_step = True
    for loader in (0, 1, 2):  # For validation, for training, and one whose sizes are fixed.
        shares, _ = state.opens(LeaseAsk(loader, 0, 1000, 10, False, 0, fixed=loader == 2), 1000)
        assert shares == (() if loader == 2 else (10, 10)), "each step has the samples of plain Horovod"
    assert state.loader == 0 and not state.bind(0, 5)
    assert state.bind(2, 5) and state.loader == -1 and not state.bind(7, 5) and state.bind(0, 5)
    state.propose((15, 5), now_s=0.0)
    state.ready(0, _ready(0, 1), 9, 0.0)
    assert state.bind(1, 6) and state.loader == 1 and not state.pending
    assert sent[-1] == ShareOrder(0, 1, False, [], 0, 0, 0), "what was proposed for the first one is given up"
    assert state.ready(1, _ready(0, 1), 9, 0.0) is None, "an answer may come later"
    assert state.shares == (10, 10) and state.opens(LeaseAsk(0, 1, 1000, 10, False, 0), 1000)[0] == (10, 10)
    state.propose((15, 5), now_s=0.0)
    assert state.ready(0, _ready(1, 2), 9, 0.0) is None
    change = state.ready(1, _ready(1, 2), 9, 0.0)
    assert change is not None and sent[-1] == ShareOrder(1, 2, True, [15, 5], 0, 5, 900)
    assert state.opens(LeaseAsk(1, 1, 1000, 10, False, 0), 1000)[0] == (15, 5)
    assert state.opens(LeaseAsk(0, 2, 1000, 10, False, 0), 1000)[0] == (10, 10)


def test_speeds_are_kept_where_the_next_loader_has_equal_batches_and_learned_anew_where_not() -> None:
    control = ShareControl(2, lambda message: None)
    for loader, batch in ((0, 10), (1, 10), (2, 64)):
        control.state.opens(LeaseAsk(loader, 0, 1000, batch, False, 0), 1000)
    first = control.policy
    control.bind(1, 5)
    assert control.policy is first
    control.bind(2, 9)
    assert control.policy is not first and control.state.samples(0, 3) == 64


def test_shares_are_for_the_next_loader_at_once_in_every_epoch() -> None:
    """A program with a new loader for every epoch: that each starts with equal shares is no flap of the old ones."""
    sent: list[Message] = []
    control = ShareControl(2, sent.append)
    control.state.in_step = True
    plan, now_s, step = Plan.sync(2, balanced=True), 0.0, 0
    for loader in range(6):
        control.state.opens(LeaseAsk(loader, 0, 10_000, 10, False, 0), 10_000)
        control.bind(loader, step)
        if loader:
            control.tick(plan, now_s)
            number = len(sent) // 2 + 1
            assert sent[-1] == ShareProposal(loader, number, [15, 5]), "the speeds are known"
            for rank in range(2):
                control.ready(rank, ShareReady(loader, number, 0, step, 1, 50, [0, 10], 0), step, now_s)
        for _ in range(8):
            step, now_s = step + 1, now_s + 1.0
            for rank in range(2):
                control.note(rank, step, StepTimes((1.0, 3.0)[rank] * control.state.samples(rank, step) / 10.0))
            if not loader and step == 5:
                control.tick(plan, now_s)
                _answers(control, sent)
                assert control.state.shares == (15, 5)


@pytest.mark.parametrize("other", [-1, 7])
def test_no_shares_are_in_force_once_gradients_follow_input_that_has_none(other: int) -> None:
    """A stream, micro-batches or a plain DataLoader: its batches are of the usual size on all ranks."""
    sent: list[Message] = []
    control = ShareControl(2, sent.append)
    control.state.in_step = True
    plan = Plan.sync(2, balanced=True)
    control.state.opens(LeaseAsk(0, 0, 10_000, 10, False, 0), 10_000)
    control.state.propose((15, 5), 0.0)
    _answers(control, sent)
    assert control.scale_of(0, 20)[1] == pytest.approx(10 / 15)
    control.bind(other, 20)
    assert control.scale_of(0, 19)[1] == pytest.approx(10 / 15) and control.scale_of(0, 20) == (1.0, 1.0)
    assert control.sentence() == "" and control.sizable == 0
    control.state.opens(LeaseAsk(1, 0, 10_000, 10, False, 0), 10_000)  # Of an evaluation, say.
    for step in range(20, 40):
        for rank in range(2):
            control.note(rank, step, StepTimes((1.0, 3.0)[rank]))
        control.tick(plan, float(step))
    assert len(sent) == 2 and control.state.loader == -1, "nothing is proposed"
    control.bind(0, 40)
    assert control.state.shares == (15, 5) and control.sizable == 10


@pytest.mark.parametrize("given", [(), (15, 5)])
def test_shares_are_equal_while_gradients_are_of_several_loaders_batches(given: tuple[int, ...]) -> None:
    """Else each of the other loader's samples would count by the shares of this one."""
    sent: list[Message] = []
    control = ShareControl(2, sent.append)
    control.state.in_step = True
    for loader in range(3):
        control.state.opens(LeaseAsk(loader, 0, 10_000, 10, False, 0), 10_000)
    plan = Plan.sync(2, balanced=not given, batch_shares=given)
    control.state.propose((15, 5), 0.0)
    _answers(control, sent)
    assert control.sizable == 10
    control.bind(0, 4, mixed=True)
    control.tick(plan, 1.0)
    _answers(control, sent)
    assert control.state.shares == (10, 10) and control.sizable == 0
    for step in range(5, 30):
        for rank in range(2):
            control.note(rank, step, StepTimes((1.0, 3.0)[rank]))
        control.tick(plan, 1.0 + step)
    assert control.state.shares == (10, 10) and not control.state.pending
    control.bind(1, 40)
    assert control.sizable == 10 and not control.mixed


def test_the_first_steps_of_another_loader_count_as_steps_with_its_shares() -> None:
    """Which loader feeds the training is known two gradients later: reports of these steps may have come by then."""
    sent: list[Message] = []
    control = ShareControl(2, sent.append)
    control.state.in_step = True
    for loader in range(2):
        control.state.opens(LeaseAsk(loader, 0, 10_000, 10, False, 0), 10_000)
    control.state.propose((15, 5), 0.0)
    _answers(control, sent)
    speeds_s, fixed = (1.0, 3.0), 0.2

    def report(rank: int, step: int, samples: int) -> None:
        control.note(rank, step, StepTimes(speeds_s[rank] * (fixed + (1.0 - fixed) * samples / 10.0)))

    for step in range(20):
        for rank in range(2):
            report(rank, step, control.state.samples(rank, step))
    report(0, 20, 10), report(1, 20, 10), report(0, 21, 10)  # With the next loader.
    control.bind(1, 20)
    assert control.state.all_samples(np.array([[19, 20, 21]] * 2)).tolist() == [[15, 10, 10], [5, 10, 10]]
    policy = control.policy
    for step in (22, 23):
        for rank in range(2):
            report(rank, step, 10)
    assert policy is not None and policy.curves.fixed == pytest.approx(fixed)
    for count in (2, 5, 12):
        assert policy.curves.levels_s(count) == pytest.approx(speeds_s), "the wrong reports are forgotten"


def test_a_loader_that_follows_at_once_leaves_no_estimate_of_the_fixed_part() -> None:
    curves = TimeCurves(1, 10)
    for samples in (10, 10, 5, 5):
        curves.note(0, samples, 1.0)
    assert curves.fixed == 0.95, "as if half a batch took as long as a whole one"
    curves.forget_latest(0, 2)
    assert not curves.known and curves.latest_levels_s() == [1.0]
    curves.forget_latest(0, 3)
    assert curves.latest_levels_s() is None


def test_a_limit_of_memory_is_known_for_the_next_loader_and_for_one_that_does_not_feed_the_training_yet() -> None:
    control = ShareControl(2, lambda message: None)
    for loader, batch in ((0, 10), (1, 10), (2, 10), (3, 64)):
        control.state.opens(LeaseAsk(loader, 0, 1000, batch, False, 0), 1000)
    control.limit(1, MemoryLimit(0, 8))
    control.limit(0, MemoryLimit(2, 7))
    control.limit(0, MemoryLimit(9, 7))
    assert control.state.most == [0, 8]
    for loader, most in ((1, [0, 8]), (2, [7, 8]), (3, [0, 0])):
        control.bind(loader, 5 * loader)
        assert control.state.most == most


def test_batches_are_counted_by_the_steps_of_an_optimizer_that_replaces_the_first_one() -> None:
    sent: list[Message] = []
    at = [500]
    sizes = BatchSizes(0, 0, send=sent.append, step=lambda: at[0])
    sizes.begin_epoch(0, 1000, 10)
    for index, at[0] in enumerate((500, 501, 0, 1)):
        assert sizes.size(index) == 10
        sizes.delivered(index)
    sizes.on_message(ShareProposal(0, 1, [15, 5]))
    ready = sent[-1]
    assert isinstance(ready, ShareReady) and ready.step - ready.taken // 10 == -2 and ready.batches == 1


def test_ranks_between_two_epochs_are_asked_again_and_all_of_them_begin_the_next_one_with_the_shares() -> None:
    sent: list[Message] = []
    state = ShareState(2, sent.append)
    state.opens(LeaseAsk(0, 0, 1000, 10, False, 0), 1000)
    state.propose((15, 5), now_s=0.0)
    state.ready(0, ShareReady(0, 1, 1, 60, 1, 50, [0, 10], 0), 60, 0.0)
    assert state.ready(1, ShareReady(0, 1, 1, EPOCH_START, 1, 0, [0, 10], 0), 60, 0.0) is None and not state.shares
    state.propose((15, 5), now_s=0.0)
    state.ready(0, ShareReady(0, 2, 0, 49, 1, 490, [0, 10], 0), 50, 0.0)
    change = state.ready(1, ShareReady(0, 2, 1, EPOCH_START, 1, 0, [0, 10], 0), 50, 0.0)
    assert change is not None and sent[-1] == ShareOrder(0, 2, True, [15, 5], 1, EPOCH_START, 1000)
    assert change.planned == (0, 0)


def _answers(control: ShareControl, sent: list[Message], least: int = 1) -> None:
    """Both ranks answer the proposal that was sent last."""
    proposal = sent[-1]
    assert isinstance(proposal, ShareProposal)
    for rank in range(2):
        control.ready(rank, ShareReady(0, proposal.number, 0, 5, 1, 50, [0, 10], 0, least), 9, 0.0)


def test_what_the_plan_in_force_asks_for_is_proposed() -> None:
    sent: list[Message] = []
    control = ShareControl(2, sent.append)
    control.tick(Plan.sync(2, balanced=True), 0.0)
    assert not sent, "no loader feeds the ranks yet"
    control.state.opens(LeaseAsk(0, 0, 1000, 10, False, 0), 1000)
    control.tick(Plan.sync(2), 1.0)
    assert not sent
    for step, (plan, shares) in enumerate(
        [
            (Plan.sync(2, balanced=True), [10, 10]),
            (Plan.sync(2, batch_shares=(12, 8)), [12, 8]),
            (Plan.sync(2), [10, 10]),  # Still in step with each other, as leases alone would not keep them.
            (Plan.partial(2, 1), []),
        ]
    ):
        control.tick(plan, 2.0 + step)
        assert sent[-1] == ShareProposal(0, step + 1, shares)
        control.tick(plan, 2.5 + step)
        assert sent[-1] == ShareProposal(0, step + 1, shares), "one at a time"
        _answers(control, sent)
        assert control.state.shares == tuple(shares)


def test_shares_follow_the_reports() -> None:
    sent: list[Message] = []
    control = ShareControl(2, sent.append)
    control.state.opens(LeaseAsk(0, 0, 10_000, 10, False, 0), 10_000)
    plan = Plan.sync(2, balanced=True)
    control.tick(plan, 0.0)
    _answers(control, sent)
    for step in range(5, 20):
        control.note(0, step, StepTimes(1.0))
        control.note(1, step, StepTimes(3.0))
    control.tick(plan, 1.0)
    assert sent[-1] == ShareProposal(0, 2, [15, 5])
    _answers(control, sent)
    assert control.sentence() == "rank 1 gets 5 of 20 samples, step 0.50 of that with equal batches"


def test_a_rank_that_ran_out_of_memory_gets_fewer_samples_at_once() -> None:
    sent: list[Message] = []
    control = ShareControl(2, sent.append)
    control.state.opens(LeaseAsk(0, 0, 10_000, 10, False, 0), 10_000)
    plan = Plan.sync(2, balanced=True)
    control.tick(plan, 0.0)
    _answers(control, sent)
    control.limit(1, MemoryLimit(3, 2))  # Of another loader.
    control.tick(plan, 1.0)
    assert len(sent) == 2
    control.limit(1, MemoryLimit(0, 8))
    control.tick(plan, 2.0)
    assert sent[-1] == ShareProposal(0, 2, [12, 8]), "before any report"
    _answers(control, sent)
    control.state.most[:] = [11, 8]
    control.tick(plan, 3.0)
    assert len(sent) == 4, "the ranks cannot have 20 samples: nothing is better than what is"


def test_the_user_s_own_shares_and_usual_batches_are_not_given_up_for_a_limit() -> None:
    sent: list[Message] = []
    control = ShareControl(2, sent.append)
    control.state.opens(LeaseAsk(0, 0, 10_000, 10, False, 0), 10_000)
    for step, (plan, shares) in enumerate(
        [(Plan.sync(2, batch_shares=(12, 8)), [12, 8]), (Plan.sync(2, balanced=True), [10, 10])]
    ):
        control.tick(plan, float(step))
        assert sent[-1] == ShareProposal(0, step + 1, shares)
        for rank in range(2):
            control.ready(rank, ShareReady(0, step + 1, 0, 5, 1, 50, [0, 10], 9), 9, 0.0)
        assert control.state.shares == tuple(shares)
        control.state.shares = ()


def test_ranks_that_meet_within_a_pass_get_equal_shares_in_plain_sync() -> None:
    sent: list[Message] = []
    control = ShareControl(2, sent.append)
    control.state.opens(LeaseAsk(0, 0, 10_000, 10, False, 0), 10_000)
    control.tick(Plan.sync(2), 0.0)
    assert not sent
    control.tick(Plan.sync(2), 1.0, even=True)
    assert sent == [ShareProposal(0, 1, [10, 10])]


def test_ranks_are_told_of_the_equal_shares_with_which_an_epoch_began_once_they_need_to_know() -> None:
    sent: list[Message] = []
    control = ShareControl(2, sent.append)
    control.state.in_step = True
    assert control.state.opens(LeaseAsk(0, 0, 10_000, 10, False, 0), 10_000) == ((10, 10), LastStep())
    control.tick(Plan.sync(2), 0.0)
    assert not sent
    assert control.state.opens(LeaseAsk(0, 1, 10_000, 10, True, 0), 10_000) == ((10, 10), LastStep(whole=True))
    control.tick(Plan.sync(2), 1.0, even=True)
    assert sent == [ShareProposal(0, 1, [10, 10])]
    _answers(control, sent)
    control.tick(Plan.sync(2), 2.0, even=True)
    assert len(sent) == 2, "the proposal and its order"
    assert isinstance(sent[-1], ShareOrder) and sent[-1].whole and sent[-1].least == 1, "a part for every rank, or none"


def test_shares_do_not_fall_below_what_a_rank_says_is_its_least() -> None:
    sent: list[Message] = []
    control = ShareControl(2, sent.append)
    control.state.opens(LeaseAsk(0, 0, 10_000, 10, True, 0), 10_000)
    control.state.propose((19, 1), 0.0)
    _answers(control, sent, least=2)
    refused = sent[-1]
    assert isinstance(refused, ShareOrder) and not refused.accepted and control.state.least == 2
    plan = Plan.sync(2, balanced=True)
    control.tick(plan, 1.0)
    _answers(control, sent, least=2)
    for step in range(5, 20):
        control.note(0, step, StepTimes(1.0))
        control.note(1, step, StepTimes(30.0))
    control.tick(plan, 2.0)
    _answers(control, sent, least=2)
    order = sent[-1]
    assert isinstance(order, ShareOrder) and order.accepted and order.shares == [18, 2]
    assert order.whole and order.least == 2


def test_times_of_a_window_are_those_of_equal_batches() -> None:
    sent: list[Message] = []
    control = ShareControl(2, sent.append)
    control.state.opens(LeaseAsk(0, 0, 10_000, 10, False, 0), 10_000)
    control.tick(Plan.sync(2, batch_shares=(15, 5)), 0.0)
    _answers(control, sent)
    steps = np.array([[4, 5, 6]] * 2)
    assert control.state.all_samples(steps).tolist() == [[10, 15, 15], [10, 5, 5]]
    times = np.array([[1.0, 1.5, 1.5], [3.0, 1.5, 1.5]])
    computing, loading = control.scale(steps)
    assert np.allclose(times * computing, [[1.0] * 3, [3.0] * 3])
    assert np.allclose(loading, [[1.0, 10 / 15, 10 / 15], [1.0, 2.0, 2.0]])
    for rank, row in enumerate(steps.tolist()):
        for at, step in enumerate(row):
            assert control.scale_of(rank, step) == pytest.approx((computing[rank, at], loading[rank, at]))


def test_a_rank_with_slow_input_keeps_its_small_share_though_it_waits_for_nothing_then() -> None:
    """Rank 1 loads a sample in 0.4 s and computes like rank 0, half of its time for any batch."""
    sent: list[Message] = []
    control = ShareControl(2, sent.append)
    control.state.opens(LeaseAsk(0, 0, 10_000, 10, False, 0), 10_000)
    plan, told = Plan.sync(2, balanced=True), 0
    for step in range(60):
        for rank in range(2):
            samples = control.state.samples(rank, step)
            own_s, load_s = 0.5 + 0.05 * samples, 0.4 * samples if rank else 0.01 * samples
            waited_s = max(0.0, load_s - max(own_s, 1.2))  # An own step or the wait for the other rank hides loading.
            control.note(rank, step, StepTimes(own_s + waited_s, waited_s, load_s=load_s))
        control.tick(plan, float(step))
        if len(sent) > told:
            _answers(control, sent)
            told = len(sent)
    assert control.state.shares[1] <= 3
    orders = [message for message in sent if isinstance(message, ShareOrder) and message.accepted]
    assert sum(order.shares != [10, 10] for order in orders) <= 3, "the shares do not flap"
    assert control.policy is not None
    assert control.policy.curves.levels_s(5) == pytest.approx([1.0, 4.0], rel=0.01)


def test_a_least_batch_above_the_largest_one_is_refused() -> None:
    with pytest.raises(ValueError, match="min_batch is 9 and max_batch 8"):
        Config(min_batch=9, max_batch=8)
    assert Config(min_batch=8, max_batch=8).min_batch == 8
