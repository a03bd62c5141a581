"""Ranks of a loader in one process: their clients, and the coordinator's desk, without sockets or threads."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from star_hvd.channel.messages.base import Message
from star_hvd.channel.messages.leases import Consumed, ConsumedRequest, LeaseAsk, LeaseReturn
from star_hvd.config import Config
from star_hvd.coordinator.lease_desk import LeaseDesk
from star_hvd.loader import ShardLoader, shard
from star_hvd.runtime import runtime
from star_hvd.runtime.coordinator_client import CoordinatorClient

__all__ = ["Numbers", "World"]


class Numbers(torch.utils.data.Dataset[int]):
    """Samples that are their own numbers."""

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
        ranks: How many.
        monkeypatch: Of pytest; the loaders take the runtime of the rank that is `rank`.
    """

    def __init__(self, ranks: int, monkeypatch: Any) -> None:
        self.desk = LeaseDesk(ranks, self._to_rank)
        self.now_s = 0.0
        self.weights: list[float] = []
        self.steps = [-1] * ranks
        self.rank = 0
        self.runs = [self._run(rank, ranks) for rank in range(ranks)]
        monkeypatch.setattr(runtime, "ensure", lambda config=None: self.runs[self.rank])
        monkeypatch.setattr(runtime, "current", lambda: self.runs[self.rank])

    def loaders(self, *args: Any, **options: Any) -> list[ShardLoader]:
        """The loader of every rank."""
        found = []
        for rank in range(len(self.runs)):
            self.rank = rank
            found.append(shard(*args, **options))
        return found

    def next(self, rank: int, batches: Iterator[Any]) -> Any:
        """The next batch of a rank; None at the end of its epoch, which it must not have to wait for."""
        self.rank = rank
        self.now_s += 0.1
        return next(batches, None)

    def _run(self, rank: int, ranks: int) -> SimpleNamespace:
        def send(message: Message, *, urgent: bool = True) -> None:
            if isinstance(message, LeaseAsk):
                self.desk.ask(rank, message, None, self.now_s)
            elif isinstance(message, LeaseReturn):
                self.desk.give_back(rank, message, self.now_s)
            elif isinstance(message, ConsumedRequest):
                self.desk.request_consumed(rank, message)
            elif isinstance(message, Consumed):
                self.desk.consumed(rank, message)

        agent = SimpleNamespace(send=send, last_heard_s=time.monotonic())
        client = CoordinatorClient(Config(), rank, agent, lambda: None)  # type: ignore[arg-type]
        client.await_epoch_end = lambda loader, epoch: False  # type: ignore[method-assign]
        return SimpleNamespace(
            world_size=ranks,
            client=client,
            drivers={},
            reference_samples=0.0,
            catch_up=lambda: None,
            steps_made=lambda: self.steps[rank],
            note_batch=lambda weight, input_s: self.weights.append(weight),
            away=lambda reason: contextlib.nullcontext(),
        )

    def _to_rank(self, rank: int, message: Message) -> None:
        if hasattr(self, "runs"):
            self.runs[rank].client.on_message(message)  # type: ignore[arg-type]
