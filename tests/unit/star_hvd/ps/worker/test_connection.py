"""What the connection's thread and the threads that use the client do at the same time, in the orders that hurt."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest
import torch

from scheduler.plan.plan import Plan
from star_hvd.errors import ChannelError, DeadlineError, RankLostError
from star_hvd.ps.common.auth import Endpoint
from star_hvd.ps.common.wire import Header, Kind
from star_hvd.ps.worker import client as client_module
from star_hvd.ps.worker.connection import Line, Push
from star_hvd.ps.worker.exchange import Exchange
from star_hvd.telemetry.wait_time import warn_after
from tests.support.ps_cluster import DEADLINE_S, Cluster, cluster, run_all
from tests.unit.star_hvd.channel.test_channel import within

RESULT: dict[str, Any] = {
    "kind": "params", "version": 4, "plan_id": 0, "applied": True, "reason": "", "notes": [],
}  # fmt: skip


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


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


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[Line]:
    """The connections of all clients made in the test; what they read is in a `ThreadOnly` at first."""
    made: list[Line] = []

    class Seen(Line):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.reads = ThreadOnly()
            made.append(self)

    monkeypatch.setattr(client_module, "Line", Seen)
    return made


def test_reads_are_kept_by_one_thread(lines: list[Line]) -> None:
    """Two threads may read at once; if each removed its own read, it would lose the other's or break its iteration."""
    with cluster(Plan.ps(1, 1)) as made:
        client, reads = made.clients[0], lines[0].reads
        assert isinstance(reads, ThreadOnly)
        steps = run_all(*[lambda: client.state(DEADLINE_S).step] * 3)
        assert steps == [0, 0, 0] and reads.uses > 0


def test_nothing_is_kept_of_a_read_that_nobody_waits_for(lines: list[Line]) -> None:
    with cluster(Plan.ps(1, 1), seed=False) as made:  # There is no answer before the seed.
        client = made.clients[0]
        for _ in range(3):
            with pytest.raises(Exception, match="waited 0.01 s"):
                client.pull(0.01)
        made.seed()
        client.pull(DEADLINE_S)
        client.pull(DEADLINE_S)  # What was queued before has been executed.
        assert len(lines[0].reads) <= 1


@pytest.mark.parametrize("what", ["pull", "state"])
def test_a_read_that_is_not_answered_is_logged_with_what_is_missing(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    with cluster(Plan.ps(1, 1), seed=False) as made:  # There is no answer before the seed.
        warn_after(0.05, 7)
        try:
            with pytest.raises(DeadlineError):
                getattr(made.clients[0], what)(0.07, look_s=0.01)
        finally:
            warn_after()
    (text,) = [text for text in caplog.messages if "has been waiting" in text]
    assert text.startswith("rank 7 has been waiting for parameter servers (") and "missing" in text


def test_a_wait_that_its_caller_repeats_is_not_logged_here(caplog: pytest.LogCaptureFixture) -> None:
    with cluster(Plan.ps(1, 1), seed=False) as made:
        client = made.clients[0]
        assert client.describe() == "no push is in flight"
        client.push(step=0, version=0, flats=made.gradients(0, 0), weight=1.0)
        warn_after(0.01, 7)
        try:
            with pytest.raises(DeadlineError):
                client.wait(0.05)
        finally:
            warn_after()
        assert "of servers [0] are missing" in client.describe()
    assert "has been waiting" not in caplog.text


@pytest.mark.parametrize("what", ["pull", "state"])
def test_a_read_that_became_pointless_ends_before_its_deadline(what: str) -> None:
    """The servers may be gone together with a rank; only the caller hears of that."""
    # There is no answer before the seed.
    with cluster(Plan.ps(1, 1), seed=False) as made, pytest.raises(RankLostError, match="rank 1"):
        getattr(made.clients[0], what)(DEADLINE_S, check=lose_rank, look_s=0.01)


def lose_rank() -> None:
    raise RankLostError("rank 1 has left the job")


@pytest.mark.parametrize("what", ["pull", "state"])
def test_checks_during_a_read_do_not_repeat_its_request(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    checks: list[None] = []
    do = Line.do

    def noted(line: Line, what: str, argument: Any) -> None:
        asked.append(what)
        do(line, what, argument)

    monkeypatch.setattr(Line, "do", noted)
    with cluster(Plan.ps(1, 1), seed=False) as made:

        def check() -> None:
            checks.append(None)
            if len(checks) == 3:
                made.seed()

        getattr(made.clients[0], what)(DEADLINE_S, check=check, look_s=0.01)
    assert len(checks) >= 3 and asked.count("read") == 1


class TakenAtOnce(Line):
    """A connection whose client takes a complete answer as soon as the thread has looked at the push once."""

    _push: Push | None = None
    taken = False

    @property
    def push(self) -> Push | None:  # type: ignore[override]
        found = self._push
        if found is not None and found.exchange.complete:
            self._push, self.taken = None, True
        return found

    @push.setter
    def push(self, push: Push | None) -> None:
        self._push = push


def test_a_client_may_take_an_answer_while_the_thread_still_handles_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[TakenAtOnce] = []
    monkeypatch.setattr(client_module, "Line", lambda *given: lines.append(TakenAtOnce(*given)) or lines[-1])
    with cluster(Plan.ps(1, 1)) as made:
        client = made.clients[0]
        client.push(step=1, version=0, flats=made.gradients(0, 0), weight=1.0)
        assert within(lambda: lines[0].taken or lines[0].error is not None)
        client.pull(DEADLINE_S)  # The thread goes on.
        assert lines[0].error is None and lines[0].malformed == 0 and lines[0].push is None


def test_a_client_may_take_an_answer_while_the_thread_reconnects() -> None:
    """Nothing listens at either address, so that no message has the thread look at the push earlier."""
    made = unstarted()
    exchange = exchange_of(made)
    exchange.set_result({**RESULT, "kind": "moved"})
    nowhere = Endpoint("127.0.0.1", free_port(), made.key.own.public)
    line = TakenAtOnce(0, 0, 0, [nowhere], made.layout, made.key)
    line.push = Push(1, {}, [], exchange)
    line.start()
    try:
        reads = line.reads
        line.do("replace", (0, Endpoint("127.0.0.1", free_port(), made.key.own.public)))
        line.do("end of read", None)  # Makes `reads` anew, once the request before it has been executed.
        assert within(lambda: line.reads is not reads or line.error is not None)
        line.check()
        assert line.taken and line.endpoints != [nowhere]
    finally:
        line.close(DEADLINE_S)


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
