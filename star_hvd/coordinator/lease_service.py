"""The coordinator's end of leases: a queue per epoch of a loader, and the messages to the ranks. Pure, like `JobState`.

A loader with micro-batches has a pool of them per epoch instead of the queue.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from scheduler.balance.batch_shares import LastStep
from scheduler.rules.leasing import Answer, LeaseQueue
from scheduler.rules.microbatches import Action, Kind, MicrobatchPool
from scheduler.rules.passes import PassTimes
from scheduler.rules.runs import Run, Span, joined, positions, run_of
from scheduler.rules.step_layout import StepLayout, grain
from star_hvd.channel.messages.base import Message
from star_hvd.channel.messages.leases import (
    Consumed,
    ConsumedRequest,
    Lease,
    LeaseAsk,
    LeaseRecall,
    LeaseReturn,
    ReportConsumed,
    flat,
    runs_of,
    spans_of,
)
from star_hvd.channel.messages.microbatches import (
    MicrobatchBegin,
    MicrobatchesClosed,
    MicrobatchGrant,
    MicrobatchOpen,
    MicrobatchRecall,
    MicrobatchReturn,
    MicrobatchShares,
)
from star_hvd.errors import ChannelError

__all__ = ["LeaseService", "MicrobatchService"]

Key = tuple[int, int]  # Loader and epoch.


@dataclass(slots=True)
class _ConsumedQuery:
    """Answers of the ranks, as they come in, on what they have consumed up to one step.

    Attributes:
        found: By rank.
        wanted: Ranks that want the result, and the numbers of their requests.
    """

    found: dict[int, list[Run]] = field(default_factory=dict)
    wanted: list[tuple[int, int]] = field(default_factory=list)


class LeaseService:
    """See the module's text.

    Args:
        world_size: Number of ranks.
        send: Sends a message to a rank.

    Attributes:
        waiting: Ranks whose training threads wait for samples that others hold, and of which epoch.
    """

    def __init__(self, world_size: int, send: Callable[[int, Message], None]) -> None:
        self.waiting: dict[int, Key] = {}
        self._world_size = world_size
        self._send = send
        self._queues: dict[Key, LeaseQueue] = {}
        self._open_queues: dict[Key, LeaseQueue] = {}  # Those of them that are not over for all ranks.
        # Batch shares with which a new epoch starts, by its number of samples; empty without. And how its last step is
        # divided.
        self.shares: Callable[[LeaseAsk, int], tuple[Sequence[int], LastStep]] = lambda ask, samples: ((), LastStep())
        self.changes: Callable[[int], bool] = lambda loader: False  # Whether a loader's shares are being changed.
        self._finished: set[int] = set()
        self._fixed: set[Key] = set()  # Epochs whose batch sizes cannot follow shares.
        self._pace_s: dict[tuple[int, int], float] = {}  # Seconds per batch, by loader and rank.
        self._orders: dict[Key, tuple[int, int]] = {}  # Digest of the order, and the rank that reported it.
        self._done: dict[Key, list[Span]] = {}  # What was consumed before an epoch was interrupted.
        self._queries: dict[tuple[int, int, int], _ConsumedQuery] = {}  # By loader, epoch and step.

    @property
    def epochs(self) -> list[Key]:
        """Loaders and epochs that have a queue."""
        return sorted(self._queues)

    @property
    def stuck(self) -> dict[int, Key]:
        """Those of `waiting` that get samples only if others return some.

        Left out are epochs that are dealt in rows by shares, or may be in a moment: that gives samples, too.
        """
        waiting = self.waiting.items()
        return {rank: key for rank, key in waiting if self._queues[key].stuck(rank) and not self._deals(key)}

    def _deals(self, key: Key) -> bool:
        return key not in self._fixed and (self._queues[key].even or self.changes(key[0]))

    def ask(self, rank: int, message: LeaseAsk, pace_s: float | None, now_s: float) -> None:
        """Handle a rank's request for more samples.

        Args:
            rank: The rank.
            message: Its message.
            pace_s: Recent seconds per batch, None if unknown.
            now_s: Current time.

        Raises:
            ChannelError: The message is impossible.
        """
        key = (message.loader, message.epoch)
        if key not in self._queues and any(k[0] == key[0] and k[1] > key[1] + 1 for k in self._queues):
            return  # A repeated request of an epoch that is over for all ranks, this one included.
        refused = self._compare(rank, key, message)
        if refused:
            self._send(rank, Lease(*key, [], True, refused))
            return
        queue = self._queues.get(key) or self._open(key, message)
        if pace_s is not None:
            self._pace_s[message.loader, rank] = pace_s
            queue.forecast(rank, pace_s)
        try:
            answer = queue.ask(
                rank,
                message.begun,
                now_s,
                message.ahead,
                message.load_s,
                undelivered=message.undelivered,
                idle=message.idle,
                again=message.again,
            )
        except ValueError as error:
            raise ChannelError(str(error)) from error
        if queue.stuck(rank):
            self.waiting[rank] = key
        self._answer(key, rank, answer)
        self._serve(key, queue, now_s)

    def forecast(self, rank: int, pace_s: float) -> None:
        """Set a rank's current seconds per batch for all open epochs."""
        for (loader, _), queue in self._open_queues.items():
            self._pace_s[loader, rank] = pace_s
            queue.forecast(rank, pace_s)

    def deal(
        self,
        loader: int,
        epoch: int,
        shares: Sequence[int],
        planned: Sequence[int],
        now_s: float,
        last: LastStep | None = None,
    ) -> bool:
        """Deal an epoch and all later ones in rows of these shares, see `LeaseQueue.deal`, and tell the ranks.

        Args:
            loader: Number of the loader.
            epoch: The epoch.
            shares: Samples of every rank in a step; empty to hand samples out on request again.
            planned: Samples of this epoch that each rank takes before the change; no later one has been begun, though
                ranks that have ended this one may have requested the next.
            now_s: Current time.
            last: How the last step of an epoch is divided; in the proportion of the shares if omitted.

        Returns:
            Whether that was possible now; if not, nothing is changed.
        """
        none = [0] * self._world_size
        queues = [
            (key, queue, planned if key[1] == epoch else none)
            for key, queue in self._queues.items()
            if key[0] == loader and key[1] >= epoch and key not in self._fixed
        ]
        if not all(queue.dealable(before) for _, queue, before in queues):
            return False
        for key, queue, before in queues:
            for rank, runs in queue.deal(shares, before, last=last):
                self._send(rank, Lease(*key, flat(runs), behind=before[rank], even=queue.even))
            self._serve(key, queue, now_s)
        return True

    def give_back(self, rank: int, message: LeaseReturn, now_s: float) -> None:
        """Take back samples that a rank has not begun.

        Raises:
            ChannelError: The message is impossible.
        """
        key = (message.loader, message.epoch)
        queue = self._queues.get(key)
        if queue is None:
            return  # The epoch ended long ago.
        try:
            undone = spans_of(message.undone)
            queue.give_back(rank, message.begun, now_s, message.kept, undone, undelivered=message.undelivered)
        except ValueError as error:
            raise ChannelError(str(error)) from error
        if message.leaves:
            self._leave(key, queue, rank)
        self._serve(key, queue, now_s)

    def reclaim(self, now_s: float) -> bool:
        """Give the ranks that wait what others hold, see `LeaseQueue.reclaim`. Return whether they get any, or will."""
        found = False
        for key in sorted(set(self.waiting.values())):
            asked, coming = self._queues[key].reclaim()
            for rank in asked:
                self._send(rank, LeaseRecall(*key, 0))
            self._serve(key, self._queues[key], now_s)
            found = found or coming
        return found

    def end_one(self, now_s: float) -> None:
        """End an epoch for the ranks that wait in it, where the samples that others hold cannot be had."""
        key = min(self.waiting.values())
        for rank in [rank for rank, each in self.waiting.items() if each == key]:
            self._queues[key].end(rank)
            self._answer(key, rank, Answer.END)

    def forget(self, key: Key) -> None:
        """Forget an epoch that all ranks have ended, or that they never begin."""
        for kept in (self._queues, self._open_queues, self._orders, self._done):
            kept.pop(key, None)
        self._fixed.discard(key)
        self.waiting = {rank: each for rank, each in self.waiting.items() if each != key}
        loader = key[0]
        self._queries = {each: query for each, query in self._queries.items() if each[:2] != key}
        if not any(each[0] == loader for each in self._queues):
            self._pace_s = {each: pace_s for each, pace_s in self._pace_s.items() if each[0] != loader}

    def request_consumed(self, rank: int, message: ConsumedRequest) -> None:
        """Find out for a rank what all ranks have consumed; all are asked only once, however many want the result."""
        key = (message.loader, message.epoch, message.step)
        for old in [each for each in self._queries if each[0] == message.loader and each != key]:
            if not self._queries[old].wanted:
                del self._queries[old]
        query = self._queries.get(key)
        if query is None or message.step < 0:  # Without a step the answer changes all the time.
            query = self._queries[key] = _ConsumedQuery(wanted=query.wanted if query else [])
            for other in range(self._world_size):
                self._send(other, ReportConsumed(*key))
        query.wanted.append((rank, message.number))
        self._answer_query(key, query)

    def consumed(self, rank: int, message: Consumed) -> None:
        """Take in what a rank has consumed."""
        key = (message.loader, message.epoch, message.step)
        query = self._queries.get(key)
        if query is not None:
            query.found[rank] = runs_of(message.runs)
            self._answer_query(key, query)

    def _answer_query(self, key: tuple[int, int, int], query: _ConsumedQuery) -> None:
        if len(query.found) == self._world_size:
            done = self._done.get(key[:2], [])
            try:
                consumed = positions(run for each in query.found.values() for run in each)
            except ValueError as error:
                raise ChannelError(str(error)) from error
            found = joined([*done, *consumed])
            for rank, number in query.wanted:
                self._send(rank, Consumed(*key, flat(map(run_of, found)), number))
            query.wanted.clear()

    def interrupted(self, key: Key, done: list[Span]) -> None:
        """Note what was consumed of an epoch before it was interrupted, if it has no queue here."""
        self._done = {k: each for k, each in self._done.items() if k[0] != key[0] or k[1] >= key[1] - 1} | {key: done}

    def leave(self, rank: int, now_s: float) -> None:
        """Free the samples held by a rank whose program has ended, for the other ranks, now and in later epochs."""
        self._finished.add(rank)
        self.waiting.pop(rank, None)
        for key, queue in list(self._open_queues.items()):
            self._leave(key, queue, rank)
            self._serve(key, queue, now_s)

    def _leave(self, key: Key, queue: LeaseQueue, rank: int) -> None:
        queue.leave(rank)
        if self.waiting.get(rank) == key:
            del self.waiting[rank]
        if queue.over:
            self._open_queues.pop(key, None)

    def _compare(self, rank: int, key: Key, message: LeaseAsk) -> str:
        """Return why this rank cannot take part (its samples or their order differ); empty if it can."""
        queue = self._queues.get(key)
        if queue is not None and queue.n_samples != message.samples:
            return (
                f"rank {rank} has {message.samples} samples in this epoch, other ranks {queue.n_samples}; all ranks "
                "must pass the same data and a sampler of the same length"
            )
        if message.digest:
            digest, first = self._orders.setdefault(key, (message.digest, rank))
            if digest != message.digest:
                return (
                    f"ranks {first} and {rank} have the samples in different orders, or continue from different "
                    "states; a sampler has to give every rank the whole order, not a part of it, and needs a generator "
                    "with the same seed on all ranks, and all ranks load the same state"
                )
        return ""

    def _open(self, key: Key, message: LeaseAsk) -> LeaseQueue:
        loader, epoch = key
        for old in [k for k, each in self._queues.items() if k[0] == loader and k[1] < epoch - 1 and each.over]:
            self.forget(old)  # A rank that leaves its loop may be epochs ahead of the others.
        done = spans_of(message.done)
        queue = LeaseQueue(message.samples, message.batch, self._world_size, drop_last=message.drop_last, done=done)
        self._done[key] = done
        for (other, rank), pace_s in self._pace_s.items():
            if other == loader:
                queue.forecast(rank, pace_s)
        for rank in self._finished:
            queue.leave(rank)
        if message.fixed:
            self._fixed.add(key)
        shares, last = self.shares(message, queue.free)
        if message.fixed and message.even:
            shares = (message.batch,) * self._world_size
        if shares:
            queue.deal(shares, [0] * self._world_size, last=last)
        self._queues[key] = self._open_queues[key] = queue
        return queue

    def _serve(self, key: Key, queue: LeaseQueue, now_s: float) -> None:
        """Answer waiting ranks, and recall samples from ranks where others would finish them sooner."""
        for rank, answer in list(queue.answers(now_s)):
            self._answer(key, rank, answer)
        for rank, keep in list(queue.recalls(now_s)):
            self._send(rank, LeaseRecall(*key, keep))

    def _answer(self, key: Key, rank: int, answer: list[Run] | Answer) -> None:
        if answer is not Answer.WAIT:
            if self.waiting.get(rank) == key:
                del self.waiting[rank]
            runs = flat(answer) if isinstance(answer, list) else []
            self._send(rank, Lease(*key, runs, answer is Answer.END, even=self._queues[key].even))


class MicrobatchService:
    """The pools of loaders with micro-batches, and the messages to the ranks.

    Args:
        world_size: Number of ranks.
        send: Sends a message to a rank.

    Attributes:
        steals: Whether ranks currently take over micro-batches.
        parts: Micro-batches per rank and step of the first loader that has any; 0 before.
        batch: Samples per rank and step of that loader.
    """

    def __init__(self, world_size: int, send: Callable[[int, Message], None]) -> None:
        self.steals = False
        self.parts = self.batch = 0
        self._world_size = world_size
        self._send = send
        self._pools: dict[Key, MicrobatchPool] = {}
        self._last_fixed_part = math.nan  # That of the last pool that was forgotten and had one.
        self._last: MicrobatchPool | None = None  # The last pool of a training that was forgotten.
        self._orders: dict[Key, tuple[MicrobatchOpen, int]] = {}  # The first message of an epoch, and its rank.
        self._finished: set[int] = set()
        # By rank, loader and epoch: epochs that a rank opened while another rank is still in an older one; and those of
        # them that the rank has left again.
        self._early: dict[tuple[int, int, int], MicrobatchOpen] = {}
        self._left_early: set[tuple[int, int, int]] = set()

    @property
    def fixed_part(self) -> float:
        """Part of a training batch's time in micro-batches that does not depend on its size; NaN if unknown."""
        pool = next(self._training_pools(), None)
        if pool is None:
            return self._last_fixed_part
        found = pool.times.fixed_part(pool.layout.parts, pool.layout.share)
        return self._last_fixed_part if math.isnan(found) else found

    def open(self, rank: int, message: MicrobatchOpen, now_s: float) -> None:
        """Handle a rank's opening of an epoch.

        Raises:
            ChannelError: The message is impossible.
        """
        if self._waits(message):
            # The rank left its loop. A step of the new epoch would wait for ranks that are making a step of the old
            # epoch, and these wait for this rank. While it has no micro-batches it is inactive, and its helper
            # contributes in its place.
            self._early[rank, message.loader, message.epoch] = message
        else:
            self._admit(rank, message, now_s)

    def _waits(self, message: MicrobatchOpen) -> bool:
        """Whether a rank is still in an older epoch of the loader; it may be epochs behind the one that opens this."""
        return any(
            loader == message.loader and epoch < message.epoch and not pool.abandoned
            for (loader, epoch), pool in self._pools.items()
        )

    def _admit(self, rank: int, message: MicrobatchOpen, now_s: float) -> None:
        key = (message.loader, message.epoch)
        first, other = self._orders.setdefault(key, (message, rank))
        if dataclasses.replace(message, ahead=first.ahead, most=first.most, trains=first.trains) != first:
            self._send(rank, Lease(*key, [], True, _differs(rank, message, other, first)))
            return
        pool = self._pools.get(key) or self._make(key, message, now_s)
        pool.layout.limit_passes(message.most)
        self._do(key, pool, pool.open(rank, message.ahead, now_s))

    def begin(self, rank: int, message: MicrobatchBegin, now_s: float) -> None:
        """Note that a rank begins a pass over some tasks, or has none.

        Raises:
            ChannelError: The message is impossible.
        """
        key = (message.loader, message.epoch)
        pool = self._pools.get(key)
        if pool is not None:
            try:
                actions = pool.begin(
                    rank, message.step, message.task, message.compute_s, now_s, message.tasks, spans_of(message.given)
                )
            except ValueError as error:
                raise ChannelError(str(error)) from error
            self._do(key, pool, actions)

    def returned(self, rank: int, message: MicrobatchReturn, now_s: float) -> None:
        """Handle a rank's answer to a recall: it gives tasks back, or refuses."""
        key = (message.loader, message.epoch)
        pool = self._pools.get(key)
        if pool is not None:
            given = message.tasks if message.given else 0
            self._do(key, pool, pool.returned(rank, message.step, message.task, given, now_s))

    def leave(self, rank: int, now_s: float, key: Key | None = None) -> None:
        """Note that a rank takes no more micro-batches, of one epoch or of all."""
        for each, pool in self._pools.items():
            if key in (None, each):
                self._do(each, pool, pool.leave(rank, now_s))
        if key is None:  # A rank that has left opens nothing, and no later epoch waits for it.
            self._finished.add(rank)
            self._forget_early(lambda each: each[0] == rank)
        elif (rank, *key) in self._early:
            self._left_early.add((rank, *key))
        self._admit_early(now_s)

    def _admit_early(self, now_s: float) -> None:
        """Admit ranks to the epochs that no older one holds back any longer, older epochs first."""
        for early in sorted(self._early, key=lambda each: (each[1:], each[0])):
            message = self._early[early]
            if self._waits(message):
                continue
            del self._early[early]
            self._admit(early[0], message, now_s)
            if early in self._left_early:
                self._left_early.remove(early)
                pool = self._pools.get(early[1:])
                if pool is not None:
                    self._do(early[1:], pool, pool.leave(early[0], now_s))

    def _forget_early(self, gone: Callable[[tuple[int, int, int]], bool]) -> None:
        self._early = {each: message for each, message in self._early.items() if not gone(each)}
        self._left_early = {each for each in self._left_early if not gone(each)}

    def forget(self, key: Key) -> None:
        """Forget an epoch that all ranks have ended."""
        if key in self._pools:
            self._last_fixed_part = self.fixed_part
            if self._trains(key):
                self._last = self._pools[key]
            del self._pools[key]
        self._orders.pop(key, None)
        self._forget_early(lambda each: each[1:] == key)

    def tick(self, now_s: float) -> float:
        """Act on what is due; return when to call again."""
        again_s = math.inf
        for key, pool in self._pools.items():
            if not pool.over:
                pool.steals = self.steals
                actions, at_s = pool.tick(now_s)
                self._do(key, pool, actions)
                again_s = min(again_s, at_s)
        return again_s

    def _make(self, key: Key, message: MicrobatchOpen, now_s: float) -> MicrobatchPool:
        try:
            layout = StepLayout(
                message.samples, message.batch, message.parts, self._world_size, drop_last=message.drop_last,
                done=spans_of(message.done), grain=grain(message.batch, message.parts),
            )  # fmt: skip
        except ValueError as error:
            raise ChannelError(str(error)) from error
        loader, epoch = key
        before = self._pools.get((loader, epoch - 1))
        continues = before is not None and self._trains((loader, epoch - 1)) == message.trains
        times = before.times if before is not None and continues else self._times_like(layout, epoch)
        for old in [k for k, each in self._pools.items() if k[0] == loader and k[1] < epoch - 1 and each.over]:
            del self._pools[old]
            self._orders.pop(old, None)
        pool = self._pools[key] = MicrobatchPool(layout, times, epoch)
        pool.steals = self.steals  # Before the first rank opens it, which makes the first steps.
        for rank in self._finished:
            self._do(key, pool, pool.leave(rank, now_s))
        if not self.parts and message.samples:
            self.parts, self.batch = message.parts, message.batch
        return pool

    def _times_like(self, layout: StepLayout, epoch: int) -> PassTimes | None:
        """Return times for an epoch that continues none: those of the latest training with equal batches and parts."""
        latest = [*self._training_pools(), *([self._last] if self._last is not None else [])]
        wanted = (layout.batch, layout.parts, layout.grain)
        alike = (pool for pool in latest if (pool.layout.batch, pool.layout.parts, pool.layout.grain) == wanted)
        found = next(alike, None)
        return None if found is None else found.times.continued(epoch)

    def _training_pools(self) -> Iterator[MicrobatchPool]:
        """Yield the pools of epochs that train, latest first: a pass without gradients takes another time."""
        return (pool for key, pool in reversed(self._pools.items()) if self._trains(key))

    def _trains(self, key: Key) -> bool:
        return self._orders[key][0].trains

    def _do(self, key: Key, pool: MicrobatchPool, actions: Sequence[Action]) -> None:
        pool.steals = self.steals
        for action in actions:
            if action.kind is Kind.SHARES:
                counts, sizes = list(action.counts), list(action.sizes)
                shares = MicrobatchShares(*key, action.step, counts, sizes, action.fixed, action.first_s)
                self._send(action.rank, shares)
            elif action.kind is Kind.RECALL:
                self._send(action.rank, MicrobatchRecall(*key, action.step, action.task, action.tasks))
            elif action.kind is Kind.GRANT:
                self._send(action.rank, MicrobatchGrant(*key, action.step, action.task, action.tasks))
            else:
                self._send(action.rank, MicrobatchesClosed(*key, action.step))


def _differs(rank: int, message: MicrobatchOpen, other: int, first: MicrobatchOpen) -> str:
    """Return why a rank cannot take part in an epoch."""
    if message.digest != first.digest or message.done != first.done:
        return (
            f"ranks {other} and {rank} have the samples in different orders, or continue from different states; give "
            "the sampler a generator with the same seed on all ranks, and load the same state"
        )
    return (
        f"rank {rank} has {message.samples} samples, batch_size {message.batch} and microbatches {message.parts}, rank "
        f"{other} {first.samples}, {first.batch} and {first.parts}; use the same data and arguments of star_hvd.shard "
        "on all ranks"
    )
