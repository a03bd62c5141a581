"""All ranks of a loader in one process: their clients, and the coordinator's lease service in a thread of its own."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from star_hvd.channel.messages.base import Message
from star_hvd.channel.messages.leases import Consumed, ConsumedRequest, LeaseAsk, LeaseReturn
from star_hvd.config import Config
from star_hvd.coordinator.lease_service import LeaseService
from star_hvd.loader import ShardLoader, shard
from star_hvd.runtime import runtime
from star_hvd.runtime.asked_plans import AskedPlans
from star_hvd.runtime.coordinator_client import CoordinatorClient
from star_hvd.runtime.memory_limits import MemoryLimits

__all__ = ["Numbers", "World"]

PATIENCE_S = 300.0


class Numbers(torch.utils.data.Dataset[int]):
    """Samples equal to their own index."""

    def __init__(self, length: int, load_s: float = 0.0) -> None:
        self._length, self._load_s = length, load_s

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        time.sleep(self._load_s)
        return index


class World:
    """Some ranks of one job.

    Args:
        ranks: Number of ranks.
        monkeypatch: Of pytest; a loader uses the runtime of the rank assigned to the calling thread.
    """

    def __init__(self, ranks: int, monkeypatch: Any) -> None:
        self.service = LeaseService(ranks, self._to_rank)
        self.weights: list[float] = []
        self.steps = [-1] * ranks
        self.own_steps = [0] * ranks
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

    def next(self, rank: int, batches: Iterator[Any]) -> Any:
        """Return the next batch of a rank; None at the end of its epoch."""
        self.rank = rank
        return next(batches, None)

    def epoch(self, loaders: list[ShardLoader], until: int | None = None) -> list[list[Any]]:
        """Return the batches each rank takes of an epoch, or the first `until` of each rank."""
        found: list[list[Any]] = [[] for _ in loaders]

        def work(rank: int) -> None:
            self.rank = rank
            batches = iter(loaders[rank])
            while len(found[rank]) != until and (batch := next(batches, None)) is not None:
                found[rank].append(batch)
            batches.close()  # type: ignore[attr-defined]

        threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(len(loaders))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        return found

    def _run(self, rank: int, ranks: int) -> SimpleNamespace:
        def send(message: Message, *, urgent: bool = True) -> None:
            self._inbox.put((rank, message))

        agent = SimpleNamespace(send=send, last_heard_s=time.monotonic())
        client = CoordinatorClient(Config(), rank, agent, lambda: None, lambda: self.steps[rank])  # type: ignore[arg-type]
        client.await_epoch_end = lambda loader, epoch: False  # type: ignore[method-assign]
        return SimpleNamespace(
            world_size=ranks,
            client=client,
            drivers={},
            reference_samples=0.0,
            catch_up=lambda: None,
            rank=rank,
            memory=MemoryLimits(0),
            in_hand=None,
            steps_ended=0,
            steps_made=lambda: self.steps[rank],
            own_steps=lambda: self.own_steps[rank],
            batch_begins=lambda: (self.steps[rank], self.own_steps[rank] if self.alone else -1),
            asked=AskedPlans(ranks, 0),
            batch_delivered=lambda loader, index: client.batch_sizes(loader).delivered(index),
            note_input=lambda *_: None,
            feeding=SimpleNamespace(
                begin=lambda loader: None,
                end=lambda loader: None,
                note=lambda loader, weight: self.weights.append(weight),
            ),
            inactive=lambda reason: contextlib.nullcontext(),
            meeting=lambda reason, *, out_of_data, if_true: contextlib.nullcontext(if_true()),
        )

    def handle(self, rank: int, message: Message) -> None:
        """Handle a rank's message in the coordinator's thread."""
        now_s = time.monotonic()
        if isinstance(message, LeaseAsk):
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
