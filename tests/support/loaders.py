"""All ranks of a loader in one process: their clients, and the coordinator in a thread of its own."""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from scheduler.records import Plan
from star_hvd.channel.messages.base import EpochEnd, Message, Register
from star_hvd.channel.messages.leases import (
    Consumed,
    ConsumedRequest,
    Lease,
    LeaseAsk,
    LeaseRecall,
    LeaseReturn,
    ReportConsumed,
)
from star_hvd.config import Config
from star_hvd.coordinator.job_state import ALL, JobState
from star_hvd.coordinator.lease_service import LeaseService
from star_hvd.input.microbatches import MicrobatchStock
from star_hvd.loader import ShardLoader, shard
from star_hvd.runtime import runtime
from star_hvd.runtime.asked_plans import AskedPlans
from star_hvd.runtime.coordinator_client import CoordinatorClient
from star_hvd.runtime.memory_limits import MemoryLimits

__all__ = ["Numbers", "ReadyBatches", "World"]

PATIENCE_S = 300.0
_FOR_CLIENTS = (Consumed, EpochEnd, Lease, LeaseRecall, ReportConsumed)


class Numbers(torch.utils.data.Dataset[int]):
    """Samples equal to their own index."""

    def __init__(self, length: int, load_s: float = 0.0) -> None:
        self._length, self._load_s = length, load_s

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        time.sleep(self._load_s)
        return index


class ReadyBatches:
    """Stands for a feeder: every batch is there as soon as it is formed."""

    def begin(self, stock: MicrobatchStock, indices: Any) -> None:
        self.form = stock.form

    def next(self, stock: MicrobatchStock, formed: Any) -> Any:
        return self.form(), "data"

    def end(self, stock: MicrobatchStock) -> None:
        pass


class World:
    """Some ranks of one job.

    Args:
        ranks: Number of ranks.
        monkeypatch: Of pytest; a loader uses the runtime of the rank assigned to the calling thread.
        plan: The plan of an optimizer. The ranks then have the whole state of a coordinator, and end epochs together;
            without it they have a lease service, and go on at the end of an epoch.

    Attributes:
        meetings: For each rank whether the ranks met, at the end of each epoch that it ended.
        in_training_threads: Whether the loops are in the ranks' training threads.
    """

    def __init__(self, ranks: int, monkeypatch: Any, plan: Plan | None = None) -> None:
        self.service = LeaseService(ranks, self._to_rank)
        self.meetings: list[list[bool]] = [[] for _ in range(ranks)]
        self.in_training_threads = True
        self.state = self._coordinator(ranks, plan) if plan is not None else None
        self.weights: list[float] = []
        self.steps = [-1] * ranks
        self.own_steps = [0] * ranks
        self.lacking: list[dict[int, int]] = [{} for _ in range(ranks)]  # See `Consumption.by`.
        self.ahead = False  # Whether loops fetch a batch ahead.
        self.alone = False  # Whether ranks make their steps without the others.
        self._here = threading.local()
        self._inbox: queue.SimpleQueue[tuple[int, Message] | None] = queue.SimpleQueue()
        self.runs = [self._run(rank, ranks) for rank in range(ranks)]
        monkeypatch.setattr(runtime, "ensure", lambda config=None: self.runs[self.rank])
        monkeypatch.setattr(runtime, "current", lambda: self.runs[self.rank])
        threading.Thread(target=_coordinate, args=(weakref.ref(self), self._inbox), daemon=True).start()
        weakref.finalize(self, self._inbox.put, None)

    @property
    def rank(self) -> int:
        """Return the rank assigned to the calling thread."""
        return getattr(self._here, "rank", 0)

    @rank.setter
    def rank(self, rank: int) -> None:
        self._here.rank = rank

    def loaders(self, *args: Any, **options: Any) -> list[ShardLoader]:
        """Make the loader of every rank."""
        found = []
        for rank in range(len(self.runs)):
            self.rank = rank
            found.append(shard(*args, **options))
        return found

    def iterators(self, loaders: list[ShardLoader]) -> list[Iterator[Any]]:
        """Make an iterator on every rank."""
        found = []
        for rank, loader in enumerate(loaders):
            self.rank = rank
            found.append(iter(loader))
        return found

    def next(self, rank: int, batches: Iterator[Any]) -> Any:
        """Return the next batch of a rank; None at the end of its epoch."""
        self.rank = rank
        return next(batches, None)

    def epoch(self, loaders: list[ShardLoader], until: int | None = None) -> list[list[Any]]:
        """Return the batches each rank takes of an epoch, or the first `until` of each rank."""
        found: list[list[Any]] = [[] for _ in loaders]

        def work(rank: int) -> None:
            if until == 0:
                return  # An iterator counts as an epoch.
            batches = iter(loaders[rank])
            while len(found[rank]) != until and (batch := next(batches, None)) is not None:
                found[rank].append(batch)
            batches.close()  # type: ignore[attr-defined]

        self.run(work)
        return found

    def run(self, program: Callable[[int], None], patience_s: float = PATIENCE_S) -> None:
        """Run a program on all ranks, in a thread for each; it gets its rank."""

        def work(rank: int) -> None:
            self.rank = rank
            program(rank)
            ended.add(rank)

        ended = set[int]()
        threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(len(self.runs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(patience_s)
        assert ended == set(range(len(threads))), "these ranks have ended"

    def say(self, rank: int, message: Message) -> None:
        """Send a message of a rank."""
        self._inbox.put((rank, message))

    def _run(self, rank: int, ranks: int) -> SimpleNamespace:
        def send(message: Message, *, urgent: bool = True) -> None:
            self._inbox.put((rank, message))

        agent = SimpleNamespace(send=send, last_heard_s=time.monotonic())
        client = CoordinatorClient(
            Config(), rank, agent, lambda: None, lambda: self.steps[rank],  # type: ignore[arg-type]
            meets=lambda: self.in_training_threads,
            fetched_ahead=lambda loader: self.ahead,
            lacking=lambda own: math.inf if own >= self.own_steps[rank] else self.lacking[rank].get(own, -1),
        )  # fmt: skip
        if self.state is None:
            client.await_epoch_end = lambda loader, epoch: False  # type: ignore[method-assign]
        return SimpleNamespace(
            world_size=ranks,
            client=client,
            drivers={},
            loops=SimpleNamespace(inside=lambda parts, trains: contextlib.nullcontext()),
            program_waits=SimpleNamespace(watch=lambda: None, in_loop=lambda loader, epoch: None),
            reference_samples=0.0,
            catch_up=lambda: None,
            rank=rank,
            memory=MemoryLimits(0),
            in_hand=None,
            steps_ended=0,
            meets=self.in_training_threads,
            steps_made=lambda: self.steps[rank],
            own_steps=lambda: self.own_steps[rank],
            batch_begins=lambda: (self.steps[rank], self.own_steps[rank] if self.alone else -1),
            asked=AskedPlans(ranks, 0),
            batch_delivered=lambda loader, index: client.batch_sizes(loader).delivered(index),
            note_input=lambda *_: None,
            feeding=SimpleNamespace(
                loader=-1,
                begin=lambda loader: None,
                end=lambda loader, *, exhausted: None,
                used=lambda loader: None,
                fetches_ahead=lambda loader: self.ahead,
                note=lambda loader, weight: self.weights.append(weight),
            ),
            inactive=lambda reason: contextlib.nullcontext(),
            meeting=lambda reason, *, out_of_data, if_true: self._meet(rank, if_true),
        )

    @contextlib.contextmanager
    def _meet(self, rank: int, if_true: Callable[[], bool]) -> Iterator[None]:
        self.meetings[rank].append(if_true())
        yield

    def _coordinator(self, ranks: int, plan: Plan) -> JobState:
        state = JobState(ranks, Config(), time.monotonic())
        for rank in range(ranks):
            state.handle(rank, Register(0, Plan.sync(ranks).to_dict(), plan.to_dict()), time.monotonic())
        return state

    def handle(self, rank: int, message: Message) -> None:
        """Handle a rank's message in the coordinator's thread."""
        now_s = time.monotonic()
        if self.state is not None:
            self.state.handle(rank, message, now_s)
            outbox, self.state.outbox = self.state.outbox, []
            for to, answer in outbox:
                for each in range(len(self.runs)) if to == ALL else [to]:
                    if isinstance(answer, _FOR_CLIENTS):
                        self._to_rank(each, answer)
        elif isinstance(message, LeaseAsk):
            self.service.ask(rank, message, None, now_s)
        elif isinstance(message, LeaseReturn):
            self.service.give_back(rank, message, now_s)
        elif isinstance(message, ConsumedRequest):
            self.service.request_consumed(rank, message)
        elif isinstance(message, Consumed):
            self.service.consumed(rank, message)

    def _to_rank(self, rank: int, message: Message) -> None:
        self.runs[rank].client.on_message(message)


def _coordinate(world: weakref.ref[World], inbox: queue.SimpleQueue[tuple[int, Message] | None]) -> None:
    """Run the coordinator's thread; it ends with its world."""
    while (item := inbox.get()) is not None:
        one = world()
        if one is None:
            return
        one.handle(*item)
        del one
