"""What a server copies to send it, and how long it keeps the copy."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from star_hvd.ps.common.record import Record
from star_hvd.ps.common.wire import Header, Kind
from star_hvd.ps.server.outbox import Outbox

NUMEL = 123_457  # ZeroMQ copies what is small.
RECORD_BYTES = Record(b"", [torch.empty(NUMEL)]).nbytes


class Sent:
    """A router that keeps what is sent, as a receiver does that has not acknowledged it."""

    def __init__(self) -> None:
        self.frames: list[Any] = []

    def send(self, identity: bytes, frames: list[Any]) -> None:
        self.frames.append(frames[1])

    def forget(self, prefix: bytes) -> None:
        pass


class Store:
    """A chunk on a server without a mirror."""

    def __init__(self) -> None:
        self.version, self.mirrored, self.params, self.records = 0, None, torch.zeros(NUMEL), 0

    def record(self) -> Record:
        self.records += 1
        return Record(b"", [self.params])


class Sending:
    """An outbox, its receivers and two chunks."""

    def __init__(self) -> None:
        self.sent, self.stores = Sent(), [Store(), Store()]
        self.outbox = Outbox(cast(Any, self.sent))
        for rank in range(3):
            self.outbox.welcome(b"W%d" % rank)

    def send(self, kind: Kind, ranks: int = 3) -> None:
        """Answer rank after rank, each with all chunks, as `Shard.order` does."""
        for rank in range(ranks):
            for chunk, store in enumerate(self.stores):
                self.outbox.chunk(b"W%d" % rank, Header(kind, 0, 0, rank, chunk=chunk), cast(Any, store))


def copies() -> int:
    """Number of complete records in memory."""
    found = (each for each in gc.get_objects() if isinstance(each, torch.Tensor) and each.dtype == torch.uint8)
    return len({each.data_ptr() for each in found if each.numel() == RECORD_BYTES})


def released(count: int, act: Callable[[], None]) -> bool:
    for _ in range(1000):
        act()
        if copies() == count:
            return True
        time.sleep(0.01)
    return False


def test_all_ranks_get_the_same_copy_of_a_record() -> None:
    made = Sending()
    made.send(Kind.STATED)
    assert [store.records for store in made.stores] == [1, 1] and copies() == 2
    assert made.sent.frames[0] is made.sent.frames[2] is made.sent.frames[4] is not made.sent.frames[1]
    made.outbox.discard_sent()
    assert copies() == 2, "they are on their way"
    made.stores[0].version, made.stores[0].params = 1, torch.ones(NUMEL)
    made.send(Kind.STATED, ranks=1)
    assert [store.records for store in made.stores] == [2, 1]
    assert made.sent.frames[-2].buffer[16:20] != made.sent.frames[0].buffer[16:20]


@pytest.mark.parametrize("end", ["all have it", "the session is over", "there is a newer version"])
def test_a_record_is_not_kept_for_ever(end: str) -> None:
    made = Sending()
    made.send(Kind.STATED)
    made.sent.frames.clear()
    if end == "the session is over":
        made.outbox.forget(b"W")
    elif end == "there is a newer version":
        for store in made.stores:
            store.version += 1
        made.send(Kind.PARAMS)
        made.sent.frames.clear()
    assert released(0, made.outbox.discard_sent if end == "all have it" else gc.collect)
