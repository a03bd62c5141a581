"""The coordinator's end of leases: one queue per epoch of a loader, and what ranks hear of it. Pure, as `JobState`.

A loader with micro-batches has a pool of them for each epoch in place of the queue.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from scheduler.rules.leasing import Answer, LeaseQueue, Span, joined
from scheduler.rules.microbatches import Action, Kind, MicrobatchPool
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

__all__ = ["LeaseDesk", "MicrobatchDesk", "flat", "spans_of"]

Key = tuple[int, int]  # Loader and epoch.


def flat(spans: Iterable[Span]) -> list[int]:
    """Starts and stops one after the other, as messages have them."""
    return [bound for span in spans for bound in span]


def spans_of(bounds: list[int]) -> list[Span]:
    """The inverse of `flat`.

    Raises:
        ChannelError: Not pairs of a start and a later stop.
    """
    spans = list(zip(bounds[::2], bounds[1::2], strict=False))
    if len(bounds) % 2 or any(not 0 <= start < stop for start, stop in spans):
        raise ChannelError(f"{len(bounds)} bounds of spans of samples are no pairs of a start and a later stop")
    return spans


@dataclass(slots=True)
class _Census:
    """What ranks have consumed up to one step, while they are being asked.

    Attributes:
        found: Spans by rank.
        wanted: Ranks that asked, and the numbers of their requests.
    """

    found: dict[int, list[Span]] = field(default_factory=dict)
    wanted: list[tuple[int, int]] = field(default_factory=list)


class LeaseDesk:
    """See the module's text.

    Args:
        world_size: Number of ranks.
        send: Sends a message to a rank.
    """

    def __init__(self, world_size: int, send: Callable[[int, Message], None]) -> None:
        self._world_size = world_size
        self._send = send
        self._queues: dict[Key, LeaseQueue] = {}
        # What ranks get of a new epoch, which has so many samples; None for as many as they get done.
        self.totals: Callable[[LeaseAsk, int], Sequence[int] | None] = lambda message, samples: None
        self._pace_s: dict[tuple[int, int], float] = {}  # Of a loader's batches on a rank.
        self._orders: dict[Key, tuple[int, int]] = {}  # Digest of the order, and the rank that said it.
        self._done: dict[Key, list[Span]] = {}  # What was consumed before an epoch was interrupted.
        self._census: dict[tuple[int, int, int], _Census] = {}  # By loader, epoch and step.

    @property
    def epochs(self) -> list[Key]:
        """Loaders and epochs of which it has a queue."""
        return sorted(self._queues)

    def ask(self, rank: int, message: LeaseAsk, pace_s: float | None, now_s: float) -> None:
        """A rank asks for more samples.

        Args:
            rank: The rank.
            message: Its message.
            pace_s: Recent seconds per batch, None where unknown.
            now_s: The time.

        Raises:
            ChannelError: It says what it cannot.
        """
        key = (message.loader, message.epoch)
        refused = self._compare(rank, key, message)
        if refused:
            self._send(rank, Lease(*key, 0, 0, True, refused))
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
        self._answer(key, rank, answer)
        self._serve(key, queue, now_s)

    def forecast(self, rank: int, pace_s: float) -> None:
        """A rank's present seconds per batch, for the epochs that are open."""
        for (loader, _), queue in self._queues.items():
            self._pace_s[loader, rank] = pace_s
            queue.forecast(rank, pace_s)

    def entitle(
        self, loader: int, epoch: int, totals: Sequence[int] | None, later: Sequence[int] | None, now_s: float
    ) -> None:
        """What every rank gets of an epoch from now on, see `LeaseQueue.entitle`.

        Args:
            loader: Number of the loader.
            epoch: The epoch.
            totals: What every rank gets of it.
            later: Likewise of later epochs: ranks that have ended this one may have asked for the next.
            now_s: The time.
        """
        for key, queue in self._queues.items():
            if key[0] == loader and key[1] >= epoch:
                queue.entitle(totals if key[1] == epoch else later)
                self._serve(key, queue, now_s)

    def give_back(self, rank: int, message: LeaseReturn, now_s: float) -> None:
        """A rank gives back what it has not begun.

        Raises:
            ChannelError: It says what it cannot.
        """
        key = (message.loader, message.epoch)
        queue = self._queues.get(key)
        if queue is None:
            return  # An epoch long over.
        try:
            undone = spans_of(message.undone)
            queue.give_back(
                rank,
                message.begun,
                now_s,
                message.kept,
                undone,
                undelivered=message.undelivered,
                unasked=message.unasked,
            )
        except ValueError as error:
            raise ChannelError(str(error)) from error
        if message.leaves:
            queue.leave(rank)
        self._serve(key, queue, now_s)

    def request_consumed(self, rank: int, message: ConsumedRequest) -> None:
        """A rank wants to know what all have consumed: one question to all, however many ranks want to know it."""
        key = (message.loader, message.epoch, message.step)
        for old in [each for each in self._census if each[0] == message.loader and each != key]:
            if not self._census[old].wanted:
                del self._census[old]
        census = self._census.get(key)
        if census is None or message.step < 0:  # Without a step the answer changes all the time.
            census = self._census[key] = _Census(wanted=census.wanted if census else [])
            for other in range(self._world_size):
                self._send(other, ReportConsumed(*key))
        census.wanted.append((rank, message.number))
        self._answer_census(key, census)

    def consumed(self, rank: int, message: Consumed) -> None:
        """A rank says what it has consumed."""
        key = (message.loader, message.epoch, message.step)
        census = self._census.get(key)
        if census is not None:
            census.found[rank] = spans_of(message.spans)
            self._answer_census(key, census)

    def _answer_census(self, key: tuple[int, int, int], census: _Census) -> None:
        if len(census.found) == self._world_size:
            done = self._done.get(key[:2], [])
            spans = flat(joined([*done, *(span for each in census.found.values() for span in each)]))
            for rank, number in census.wanted:
                self._send(rank, Consumed(*key, spans, number))
            census.wanted.clear()

    def interrupted(self, key: Key, done: list[Span]) -> None:
        """What was consumed of an epoch before it was interrupted, where it has no queue here."""
        self._done = {k: each for k, each in self._done.items() if k[0] != key[0] or k[1] >= key[1] - 1} | {key: done}

    def leave(self, rank: int, now_s: float) -> None:
        """A rank's program has ended: what it held is for the others."""
        for key, queue in self._queues.items():
            queue.leave(rank)
            self._serve(key, queue, now_s)

    def _compare(self, rank: int, key: Key, message: LeaseAsk) -> str:
        """Why this rank cannot take part: it has the samples in another order; empty as a rule."""
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
                    "states; give the sampler a generator with the same seed on all ranks, and load the same state"
                )
        return ""

    def _open(self, key: Key, message: LeaseAsk) -> LeaseQueue:
        loader, epoch = key
        for old in [k for k, each in self._queues.items() if k[0] == loader and k[1] < epoch - 1 and each.over]:
            del self._queues[old]  # A rank that leaves its loop may be epochs ahead of the others.
            self._orders.pop(old, None)
            self._done.pop(old, None)
        done = spans_of(message.done)
        queue = LeaseQueue(message.samples, message.batch, self._world_size, drop_last=message.drop_last, done=done)
        self._done[key] = done
        for (other, rank), pace_s in self._pace_s.items():
            if other == loader:
                queue.forecast(rank, pace_s)
        queue.entitle(self.totals(message, queue.free))
        self._queues[key] = queue
        return queue

    def _serve(self, key: Key, queue: LeaseQueue, now_s: float) -> None:
        """Tell ranks that wait what there is, and ask those for it that hold what others would end sooner."""
        for rank, answer in list(queue.answers(now_s)):
            self._answer(key, rank, answer)
        for rank, keep in list(queue.recalls(now_s)):
            self._send(rank, LeaseRecall(*key, keep))

    def _answer(self, key: Key, rank: int, answer: Span | Answer) -> None:
        if answer is Answer.WAIT:
            return
        start, stop = answer if isinstance(answer, tuple) else (0, 0)
        self._send(rank, Lease(*key, start, stop, answer is Answer.END))


class MicrobatchDesk:
    """The pools of loaders with micro-batches, and what ranks hear of them.

    Args:
        world_size: Number of ranks.
        send: Sends a message to a rank.

    Attributes:
        steals: Whether micro-batches are taken over at present.
        parts: Micro-batches of a rank in a step, of the first loader that has some; 0 before.
        batch: Samples of a rank in a step, likewise.
    """

    def __init__(self, world_size: int, send: Callable[[int, Message], None]) -> None:
        self.steals = False
        self.parts = self.batch = 0
        self._world_size = world_size
        self._send = send
        self._pools: dict[Key, MicrobatchPool] = {}
        self._orders: dict[Key, tuple[MicrobatchOpen, int]] = {}  # What the first rank said of an epoch.
        # By rank and loader: it begins an epoch while some rank is still in the one before.
        self._early: dict[tuple[int, int], MicrobatchOpen] = {}

    @property
    def taken_over(self) -> int:
        """Tasks that were begun by another rank than the one that had them first, of the epochs kept."""
        return sum(pool.taken_over for pool in self._pools.values())

    @property
    def fixed_part(self) -> float:
        """Part of the time of a batch in micro-batches that does not depend on its size, NaN where it is not known."""
        pool = next(reversed(self._pools.values()), None)
        return pool.times.fixed_part(pool.layout.parts, pool.layout.share) if pool is not None else math.nan

    def open(self, rank: int, message: MicrobatchOpen, now_s: float) -> None:
        """A rank begins an epoch.

        Raises:
            ChannelError: It says what it cannot.
        """
        key = (message.loader, message.epoch)
        before = self._pools.get((message.loader, message.epoch - 1))
        if before is not None and not before.abandoned:
            # The rank left its loop. A step of the new epoch would wait for ranks that make one of the old epoch,
            # which wait for this rank; without micro-batches it is inactive, and its helper takes part for it.
            self._early[rank, message.loader] = message
            return
        first, other = self._orders.setdefault(key, (message, rank))
        if dataclasses.replace(message, ahead=first.ahead, most=first.most) != first:
            self._send(rank, Lease(*key, 0, 0, True, _differs(rank, message, other, first)))
            return
        pool = self._pools.get(key) or self._make(key, message)
        pool.layout.limit_passes(message.most)
        self._do(key, pool, pool.open(rank, message.ahead, now_s))

    def begin(self, rank: int, message: MicrobatchBegin, now_s: float) -> None:
        """A rank begins a pass over some tasks, or has none.

        Raises:
            ChannelError: It says what it cannot.
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
        """A rank has given tasks back, or has not."""
        key = (message.loader, message.epoch)
        pool = self._pools.get(key)
        if pool is not None:
            given = message.tasks if message.given else 0
            self._do(key, pool, pool.returned(rank, message.step, message.task, given, now_s))

    def leave(self, rank: int, now_s: float, key: Key | None = None) -> None:
        """A rank takes no more, of one epoch or of all."""
        for each, pool in self._pools.items():
            if key in (None, each):
                self._do(each, pool, pool.leave(rank, now_s))
        early, self._early = self._early, {}
        for (other, _), message in early.items():
            if key is not None or other != rank:  # One that has gone opens nothing.
                self.open(other, message, now_s)

    def tick(self, now_s: float) -> float:
        """What time alone brings about; returns when to look again."""
        again_s = math.inf
        for key, pool in self._pools.items():
            if not pool.over:
                pool.steals = self.steals
                actions, at_s = pool.tick(now_s)
                self._do(key, pool, actions)
                again_s = min(again_s, at_s)
        return again_s

    def _make(self, key: Key, message: MicrobatchOpen) -> MicrobatchPool:
        try:
            layout = StepLayout(
                message.samples, message.batch, message.parts, self._world_size, drop_last=message.drop_last,
                done=spans_of(message.done), grain=grain(message.batch, message.parts),
            )  # fmt: skip
        except ValueError as error:
            raise ChannelError(str(error)) from error
        loader, epoch = key
        before = self._pools.get((loader, epoch - 1))
        for old in [k for k, each in self._pools.items() if k[0] == loader and k[1] < epoch - 1 and each.over]:
            del self._pools[old]
            self._orders.pop(old, None)
        pool = self._pools[key] = MicrobatchPool(layout, before.times if before is not None else None, epoch)
        if not self.parts and message.samples:
            self.parts, self.batch = message.parts, message.batch
        return pool

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
    """Why a rank cannot take part in an epoch."""
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
