"""`shard`: loaders over several worlds, samplers that the program still sets, and data sets that fail."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from star_hvd.loader import shard
from star_hvd.runtime.runtime import Runtime
from tests.support.loaders import World


class Counting(torch.utils.data.IterableDataset[int]):
    """A stream of numbers."""

    def __init__(self, load_s: float = 0.0) -> None:
        self._load_s = load_s

    def __iter__(self) -> Iterator[int]:
        for i in range(100):
            time.sleep(self._load_s)
            yield i


def trains(world: World, net: torch.nn.Module) -> None:
    """Give each rank an optimizer of a network."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for run in world.runs:
        engine = SimpleNamespace(applier=SimpleNamespace(optimizer=optimizer))
        reporter = SimpleNamespace(note_samples=lambda *_: None)
        driver = SimpleNamespace(engine=engine, equal_batches="", reporter=reporter)
        cast(Runtime, run).drivers[0] = cast(Any, driver)


def test_whether_a_stream_is_dealt_evenly_is_found_out_again_in_a_new_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that grows from one rank, which meets nobody, to two."""
    net = torch.nn.Embedding(3, 2, sparse=True)  # Its gradients are reduced within the ranks' passes.
    trains(World(1, monkeypatch), net)
    first = shard(Counting(), 1, batches=20)
    assert len(list(first)) == 20
    world = World(2, monkeypatch)  # Horovod was initialized again.
    trains(world, net)
    world.rank = 1
    second = shard(Counting(0.02), 1, batches=20)
    assert [len(batches) for batches in world.epoch([first, second])] == [10, 10]
