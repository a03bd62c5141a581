"""What the connection's thread and the threads that use the client do at the same time, in the orders that hurt."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scheduler.plan.plan import Plan
from star_hvd.errors import ChannelError
from star_hvd.ps.common.wire import Header, Kind
from star_hvd.ps.worker.connection import Line, Push
from star_hvd.ps.worker.exchange import Exchange
from tests.support.ps_cluster import DEADLINE_S, Cluster, cluster, run_all

RESULT: dict[str, Any] = {
    "kind": "params", "version": 4, "plan_id": 0, "applied": True, "reason": "", "notes": [],
}  # fmt: skip


def unstarted() -> Cluster:
    """A cluster for its layout alone."""
    return Cluster(Plan.ps(1, 1))


def exchange_of(made: Cluster, kind: type[Exchange] = Exchange) -> Exchange:
    return kind(made.layout, [torch.empty(b.numel, dtype=b.dtype) for b in made.layout.buckets])


def messages(made: Cluster) -> list[tuple[Header, bytearray]]:
    """Parameters of version 4, a message per chunk."""
    sizes = {chunk.index: made.layout.nbytes(chunk) for chunk in made.layout.chunks}
    return [(Header(Kind.PARAMS, 0, 0, 0, 1, i, 4, 0, size), bytearray(size)) for i, size in sizes.items()]


class ThreadOnly(dict[int, Any]):
    """A dictionary that only the connection's thread may use."""

    uses = 0

    def _check(self) -> None:
        self.uses += 1
        name = threading.current_thread().name
        assert name == "star-ps-client", f"used by {name}, while the connection's thread may add a read"

    def __setitem__(self, number: int, exchange: Any) -> None:
        self._check()
        super().__setitem__(number, exchange)

    def items(self) -> Any:
        self._check()
        return super().items()


def test_reads_are_kept_by_one_thread() -> None:
    """Two threads may read at once; if each removed its own read, it would lose the other's or break its iteration."""
    with cluster(Plan.ps(1, 1)) as made:
        client = made.clients[0]
        reads = client._line.reads = ThreadOnly()
        steps = run_all(*[lambda: client.state(DEADLINE_S).step] * 3)
        assert steps == [0, 0, 0] and reads.uses >= 3


def test_nothing_is_kept_of_a_read_that_nobody_waits_for() -> None:
    with cluster(Plan.ps(1, 1), seed=False) as made:  # There is no answer before the seed.
        client = made.clients[0]
        for _ in range(3):
            with pytest.raises(Exception, match="waited 0.01 s"):
                client.pull(0.01)
        made.seed()
        client.pull(DEADLINE_S)
        client.pull(DEADLINE_S)  # What was queued before has been executed.
        assert len(client._line.reads) <= 1


class TakenAtOnce(Line):
    """A connection whose client takes a complete answer as soon as the thread has looked at the push once."""

    _push: Push | None = None

    @property
    def push(self) -> Push | None:  # type: ignore[override]
        found = self._push
        if found is not None and found.exchange.complete:
            self._push = None
        return found

    @push.setter
    def push(self, push: Push | None) -> None:
        self._push = push


def line_of(made: Cluster, push: Push) -> TakenAtOnce:
    line = TakenAtOnce(0, 0, 0, [], made.layout, made.key)
    line.push = push
    return line


def test_a_client_may_take_an_answer_while_the_thread_still_handles_it() -> None:
    made = unstarted()
    exchange = exchange_of(made)
    line = line_of(made, Push(1, {}, [], exchange))
    exchange.set_result(RESULT)
    for header, data in messages(made):
        line._take(header, SimpleNamespace(buffer=memoryview(data)))
    assert exchange.complete and line.push is None
    line.close(0.0)


def test_a_client_may_take_an_answer_while_the_thread_reconnects(monkeypatch: pytest.MonkeyPatch) -> None:
    made = unstarted()
    exchange = exchange_of(made)
    exchange.set_result({**RESULT, "kind": "moved"})
    line = line_of(made, Push(1, {}, [], exchange))
    old: Any = SimpleNamespace(unregister=lambda poller: None, close=lambda: None)
    line._sockets, line.endpoints = [old], [None]  # type: ignore[list-item]
    monkeypatch.setattr(line, "_connect", lambda endpoint: old)
    line._reconnect(0, None)  # type: ignore[arg-type]
    line.close(0.0)


def test_what_is_asked_of_a_closed_connection_touches_no_descriptor() -> None:
    """A server's restart can be told of while the session is being closed; the pipe may be another file by then."""
    with cluster(Plan.ps(1, 1)) as made:
        client = made.clients[0]
        client.close()
        client.replace(0, made.endpoints[0])
        client.absent(True)
        with pytest.raises(ChannelError, match="closed"):
            client.pull(1.0)


def test_what_is_missing_is_told_while_messages_arrive() -> None:
    made = unstarted()
    exchange = exchange_of(made)
    coming = messages(made)

    class Chunks(tuple[Any, ...]):
        """Chunks of which another arrives whenever one is looked at."""

        def __getitem__(self, index: Any) -> Any:
            if coming:
                exchange.add(*coming.pop())
            return super().__getitem__(index)

    object.__setattr__(made.layout, "chunks", Chunks(made.layout.chunks))
    count = len(coming)
    assert exchange.describe() == f"{count} messages of servers [0] are missing, and the push's result"


class LastOnesArrive(Exchange):
    """An answer that becomes complete when it is asked for its version."""

    coming: list[tuple[Header, bytearray]] = []

    @property
    def version(self) -> int:
        found = super().version
        while self.coming:
            self.add(*self.coming.pop())
        return found


def test_the_version_of_a_reply_is_right_while_the_last_parameters_arrive() -> None:
    """A small model is a single message: no version is known at one moment, and nothing missing at the next."""
    made = unstarted()
    exchange = exchange_of(made, LastOnesArrive)
    exchange.set_result(RESULT)
    LastOnesArrive.coming = messages(made)
    assert exchange.reply().version == RESULT["version"]
    assert exchange.complete and exchange.reply().version == RESULT["version"]
