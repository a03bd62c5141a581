"""The thread and the sockets behind `Client`, what is requested of the servers, and the waits for their answers."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import msgpack
import torch
import zmq

from star_hvd.channel.closing import CLOSE_S, close_within
from star_hvd.channel.link import Dealer
from star_hvd.channel.reliable import TENSORS
from star_hvd.errors import ChannelError, DeadlineError
from star_hvd.locks import ordered_condition
from star_hvd.ps.common.auth import Endpoint, JobKey, connect
from star_hvd.ps.common.identities import worker_identity
from star_hvd.ps.common.layout import Chunk, Layout
from star_hvd.ps.common.wire import Header, Kind, pack, parts, raw, read_meta, unpack
from star_hvd.ps.worker.exchange import Exchange, Reply, StateExchange
from star_hvd.telemetry.wait_time import WaitTime

__all__ = ["LOOK_S", "Line", "Push"]

logger = logging.getLogger("star_hvd")

T = TypeVar("T")

LOOK_S = 5.0
"""Interval of the checks in a wait for an answer."""

_POLL_MS = 500
_ASK_S = 2.0  # Interval between requests for an acknowledgement while an answer is awaited.
_BATCH = 1024  # Messages taken from one socket before the others are served.


class Push:
    """A push in flight, kept so that it can be resent to a restarted server.

    Attributes:
        carriers: Connections that carry its parts, with the number of the last message on each.
        again: Servers restarted since it was sent, which have to send their part of the answer again.
        sent: Buckets that were sent before its announcement.
        small: Per chunk index, what is sent instead of its part of the buffer.
        piecewise: Whether the caller waits separately for the result and for each bucket of the answer.
    """

    __slots__ = ("again", "carriers", "exchange", "flats", "meta", "piecewise", "sent", "small", "step")

    def __init__(self, step: int, meta: dict[str, Any], flats: list[torch.Tensor], exchange: Exchange) -> None:
        self.step, self.meta, self.flats, self.exchange = step, meta, flats, exchange
        self.carriers: dict[Dealer, int] = {}
        self.again: set[int] = set()
        self.sent: set[int] = set()
        self.small: dict[int, bytes] = {}
        self.piecewise = False

    @property
    def answered(self) -> bool:
        """Whether the answer is complete and the buffers may be changed.

        Connections hold the buffers themselves, to resend them if needed. After most answers, changing them does no
        harm: the gradient is in the parameters, or was dropped. Only a drain (`moved`) may apply a gradient of which
        parts are still in flight, so it also requires that all parts are acknowledged.
        """
        if not self.exchange.complete:
            return False
        if not self.exchange.counts_at_the_end:
            return True
        carriers = list(self.carriers.items())  # The thread may replace one concurrently.
        return all(dealer.stream.acknowledged >= number or dealer.stream.ended for dealer, number in carriers)


class Line:
    """Executes its client's requests in order, on the only thread that uses the sockets.

    Args:
        rank: This worker.
        optimizer_id: Number of the optimizer.
        session: As given to `ServerProcess.open`.
        endpoints: Of all shards, in order.
        layout: The layout.
        key: The job's key.

    Attributes:
        changed: Guards `push`, `error` and `closed`; notified when an answer is complete or the connection failed.
        push: The push in flight. The client may take its answer while the thread, which takes no lock for it, still
            handles this answer: the thread looks once per use.
        error: Why the connection failed, None while it works.
        closed: Whether it was closed.
        reads: Reads that are waited for, by the number of their latest request; only for the thread.
        malformed: Invalid messages, which were dropped.
    """

    def __init__(
        self, rank: int, optimizer_id: int, session: int, endpoints: Sequence[Endpoint], layout: Layout, key: JobKey
    ) -> None:
        self.rank, self.optimizer_id, self.session = rank, optimizer_id, session
        self.endpoints = list(endpoints)
        self.changed = ordered_condition("Line.changed")
        self.push: Push | None = None
        self.reads: dict[int, Exchange] = {}
        self.error: str | None = None
        self.closed = False
        self.malformed = 0
        self._key = key
        self._chunks: dict[tuple[int, int], list[Chunk]] = {}  # By server and bucket.
        for chunk in layout.chunks:
            self._chunks.setdefault((chunk.server, chunk.bucket), []).append(chunk)
        self._context = zmq.Context()
        self._sockets: list[Dealer] = []
        self._poller = zmq.Poller()
        self._todo: deque[tuple[str, Any]] = deque()
        self._wakeup = os.pipe()
        os.set_blocking(self._wakeup[0], False)
        os.set_blocking(self._wakeup[1], False)
        self._requests = 0
        self._begun: Push | None = None  # A push of which buckets were sent, but which is not announced yet.
        self._unheard: set[int] = set()  # Servers that have not answered on their new connection yet.
        self._ask_s = 0.0  # When acknowledgements are requested next.
        self._presence: str | None = None  # Last announced presence of this worker.
        self._thread = threading.Thread(target=self._run, name="star-ps-client", daemon=True)

    # ---- for the client -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Connect to the servers, which need not listen yet."""
        self._thread.start()

    def close(self, deadline_s: float) -> None:
        """Disconnect; callers that wait get a `ChannelError`."""
        with self.changed:
            if self.closed:
                return
            self.closed = True
            self.changed.notify_all()
        if self._thread.ident is not None:
            self._wake()
            self._thread.join(deadline_s)
        close_within(lambda: self._context.destroy(linger=500), "the connection to the parameter servers", CLOSE_S)
        for end in self._wakeup:
            os.close(end)

    def check(self) -> None:
        """Raise a `ChannelError` if the connection is closed or has failed."""
        if self.closed:
            raise ChannelError(f"the connection of rank {self.rank} to the parameter servers is closed")
        if self.error is not None:
            raise ChannelError(self.error)

    def do(self, what: str, argument: Any) -> None:
        """Queue a request for the thread (`_execute`); without effect after `close`."""
        with self.changed:  # `close` closes the pipe; its descriptor may then be another file's.
            if not self.closed:
                self._todo.append((what, argument))
                self._wake()

    def send(self, push: Push) -> None:
        """Send a push, of which buckets may have been sent before; it is in flight until its client has the answer."""
        with self.changed:
            self.check()
            self.push = push
            self.do("push", push)

    def in_flight(self) -> Push:
        """Return the push in flight; a `ChannelError` if there is none."""
        if (push := self.push) is None:
            raise ChannelError(f"rank {self.rank} waits for parameters without a push; call push first")
        return push

    def take_answer(self, push: Push) -> Reply:
        """Return the complete answer to the push in flight, which is over with that."""
        self.push = None
        return push.exchange.reply()

    def read(
        self,
        exchange: Exchange,
        deadline_s: float,
        check: Callable[[], None] = lambda: None,
        look_s: float = LOOK_S,
    ) -> None:
        """Request `exchange` and wait until it is complete; arguments and errors as of `wait`."""
        self.do("read", exchange)
        try:
            self.wait(
                lambda: exchange.complete, exchange, deadline_s, check=check, look_s=look_s,
                what=lambda: f"parameter servers ({exchange.describe()})",
            )  # fmt: skip
        finally:
            self.do("end of read", exchange)

    def wait(
        self,
        found: Callable[[], T | None],
        exchange: Exchange,
        deadline_s: float,
        cause: str = "is a server dead?",
        *,
        check: Callable[[], None] = lambda: None,
        look_s: float = LOOK_S,
        what: str | Callable[[], str] = "",
    ) -> T:
        """Wait until `found`, called under `changed`, returns something true, and return that.

        Args:
            found: The condition.
            exchange: The answer it depends on.
            deadline_s: Longest wait.
            cause: The likely cause if that is exceeded.
            check: Called without a lock held during the wait; raises what makes it pointless.
            look_s: Interval between these calls.
            what: As of `WaitTime`; empty where the caller's wait, of which this is a slice, is logged.

        Raises:
            DeadlineError: It took longer.
            ChannelError: The connection is closed or has failed.
        """
        wait = WaitTime(look_s, what)
        while not (result := self._until(found, time.monotonic() + min(look_s, deadline_s - wait.passed_s))):
            if wait.count() >= deadline_s:
                raise DeadlineError(
                    f"rank {self.rank} waited {deadline_s:g} s for parameters; {exchange.describe()} ({cause})"
                )
            check()
        return result

    def _until(self, found: Callable[[], T | None], limit_s: float) -> T | None:
        """Wait until `found` returns something true and return that, or what it returns at this time."""
        with self.changed:
            while not (result := found()):
                self.check()
                left_s = limit_s - time.monotonic()
                if left_s <= 0.0:
                    break
                self.changed.wait(left_s)
            return result

    def notify(self) -> None:
        """Have a `wait` in progress ask `found` again."""
        with self.changed:
            self.changed.notify_all()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # The pipe is full: the thread will wake anyway.
            os.write(self._wakeup[1], b"!")

    # ---- the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._poller.register(self._wakeup[0], zmq.POLLIN)
            for index in range(len(self.endpoints)):
                self._sockets.append(self._connect(self.endpoints[index]))
            while not self.closed:
                ready = dict(self._poller.poll(self._tick()))
                if self._wakeup[0] in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wakeup[0], 4096)
                for dealer in self._sockets:
                    if not ready.keys().isdisjoint(dealer.sockets):
                        self._drain(dealer)
                while self._todo:
                    self._execute(*self._todo.popleft())
        except Exception as error:
            logger.exception("the connection of rank %d to the parameter servers failed", self.rank)
            with self.changed:
                self.error = f"the connection to the parameter servers failed: {type(error).__name__}: {error}"
                self.changed.notify_all()
        finally:
            for each in self._sockets:
                each.close(linger_ms=500)

    def _tick(self) -> int:
        """Run the connections' due timers. Return the milliseconds until the next one, at most `_POLL_MS`."""
        now_s = time.monotonic()
        for dealer in self._sockets:
            if dealer.next_s <= now_s:
                dealer.tick()
        self._look_for_lost(now_s)
        for dealer in self._sockets:
            if dealer.stream.broken is not None and not dealer.stream.replaced and not dealer.stream.ended:
                raise ChannelError(dealer.stream.broken)
        left_s = min((dealer.next_s for dealer in self._sockets), default=math.inf) - now_s
        return _POLL_MS if left_s > 1e-3 * _POLL_MS else max(0, math.ceil(1e3 * left_s))

    def _look_for_lost(self, now_s: float) -> None:
        """Have connections show that they are lost, while an answer is awaited.

        A former connection of this worker that a server takes in after the present one takes its identity, and nothing
        the server sends arrives here any more. ZeroMQ does not notice while nothing is sent either: heartbeats are
        still answered. What is sent stays unread, so that the connection ends and is made again.
        """
        push = self.push
        if now_s >= self._ask_s and (self.reads or (push is not None and not push.answered)):
            self._ask_s = now_s + _ASK_S
            for dealer in self._sockets:
                dealer.ask()

    def _connect(self, endpoint: Endpoint) -> Dealer:
        identity = worker_identity(self.optimizer_id, self.session, self.rank)
        dealer = Dealer(connect(self._context, self._key, endpoint, identity), TENSORS)
        dealer.register(self._poller)
        self._send(dealer, [pack(self._header(Kind.HELLO)), b""])
        return dealer

    def _send(self, dealer: Dealer, frames: list[Any]) -> None:
        """Send a message, unless the server closed its end or was restarted: `_reconnect` then sends what it needs.

        Raises:
            ChannelError: The connection was abandoned.
        """
        stream = dealer.stream
        if not stream.replaced and not stream.ended:
            dealer.send(frames)

    def _header(self, kind: Kind, step: int = 0) -> Header:
        return Header(kind, self.optimizer_id, self.session, self.rank, step)

    def _execute(self, what: str, argument: Any) -> None:
        if what == "push":
            self._begun = None
            self._send_push(argument)
        elif what == "bucket":
            self._begun, index = argument
            self._send_bucket(self._begun, index)
        elif what == "forget":
            self._begun = None
        elif what == "read":
            self._ask(argument)
        elif what == "end of read":
            self.reads = {number: each for number, each in self.reads.items() if each is not argument}
        elif what == "presence":
            self._presence = argument
            self._meta(Kind.PRESENCE, 0, {"what": argument})
        else:
            self._reconnect(*argument)

    def _send_push(self, push: Push) -> None:
        self._announce(push)
        left = [bucket for bucket in range(len(push.flats)) if bucket not in push.sent]
        for index, socket in enumerate(self._sockets):
            self._send_chunks(push, index, socket, left)

    def _send_bucket(self, push: Push, bucket: int) -> None:
        push.sent.add(bucket)
        for index, socket in enumerate(self._sockets):
            self._send_chunks(push, index, socket, {bucket})

    def _announce(self, push: Push, again: int | None = None) -> None:
        self._meta(Kind.PUSH, push.step, push.meta if again is None else {**push.meta, "again": again})

    def _meta(self, kind: Kind, step: int, meta: dict[str, Any]) -> None:
        self._send(self._sockets[0], [pack(self._header(kind, step)), msgpack.packb(meta)])

    def _send_chunks(self, push: Push, index: int, dealer: Dealer, buckets: Iterable[int]) -> None:
        header = self._header(Kind.CHUNK, push.step)
        for chunk in [each for bucket in buckets for each in self._chunks.get((index, bucket), ())]:
            small = push.small.get(chunk.index)
            data = raw(push.flats[chunk.bucket][chunk.start : chunk.stop]) if small is None else memoryview(small)
            for begin, end in parts(len(data)):
                head = pack(header._replace(chunk=chunk.index, offset=begin, size=len(data)))
                self._send(dealer, [head, data[begin:end]])
        push.carriers[dealer] = dealer.stream.sent

    def _ask(self, exchange: Exchange) -> None:
        self._requests += 1
        exchange.reset()
        self.reads[self._requests] = exchange
        kind = Kind.STATE if isinstance(exchange, StateExchange) else Kind.PULL
        self._meta(kind, self._requests, exchange.asks)

    def _reconnect(self, index: int, endpoint: Endpoint) -> None:
        push = self.push
        if push is not None:
            push.carriers.pop(self._sockets[index], None)
        self._sockets[index].unregister(self._poller)
        self._sockets[index].close()
        self.endpoints[index] = endpoint
        self._sockets[index] = self._connect(endpoint)
        if index == 0 and self._presence is not None:  # The new process may not know it.
            self._meta(Kind.PRESENCE, 0, {"what": self._presence})
        push = self.push
        if push is not None and not push.answered:
            self._send_chunks(push, index, self._sockets[index], range(len(push.flats)))
        if self._begun is not None:
            self._send_chunks(self._begun, index, self._sockets[index], self._begun.sent)
        self._unheard.add(index)
        if index == 0:
            self._repeat(index)

    def _repeat(self, index: int) -> None:
        """Ask again for what a restarted server may not have sent, or may have sent to the former connection."""
        push = self.push
        if push is not None and not push.answered:
            push.again.add(index)
            # The former server 0 may not have handled the announcements for other restarted servers.
            for restarted in sorted(push.again) if index == 0 else (index,):
                self._announce(push, again=restarted)
        unanswered = [each for each in self.reads.values() if not each.complete]
        self.reads.clear()
        for exchange in unanswered:
            self._ask(exchange)

    def _note_heard(self) -> None:
        """Repeat requests at servers that now know their new connection: from now on their answers arrive.

        A server whose restart is reported twice, or that the worker found by itself, answers on the former connection
        until it has received something on the new one; so requests are not repeated earlier. Server 0 is asked on its
        own connection and needs no such wait.
        """
        for index in [each for each in self._unheard if self._sockets[each].stream.peer]:
            self._unheard.discard(index)
            if index:
                self._repeat(index)

    def _drain(self, source: Dealer) -> None:
        for frames in source.receive(_BATCH):
            try:
                if isinstance(frames, ChannelError):
                    raise frames
                if len(frames) != 2:
                    raise ChannelError(f"a message has {len(frames)} frames; expected a header and a payload")
                self._take(unpack(frames[0]), frames[1])
            except (ChannelError, KeyError, TypeError, ValueError) as error:
                self.malformed += 1
                if self.malformed <= 10:
                    logger.warning("rank %d dropped a message of a parameter server: %s", self.rank, error)
        if self._unheard:
            self._note_heard()
        push = self.push
        if push is not None and push.exchange.complete and push.answered:
            self.notify()  # The last event may have been an acknowledgement, see `Push.answered`.

    def _take(self, header: Header, payload: Any) -> None:
        push = self.push
        exchange: Exchange | None = None
        if header.kind in (Kind.PARAMS, Kind.VERDICT):
            exchange = push.exchange if push is not None and push.step == header.step else None
        elif header.kind in (Kind.PULLED, Kind.STATED):
            exchange = self.reads.get(header.step)
        else:
            raise ChannelError(f"a worker got a message of kind {Kind(header.kind).name}, which only servers get")
        if exchange is None or exchange.complete:
            return  # A duplicate, after a server's restart.
        if header.kind == Kind.VERDICT:
            exchange.set_result(read_meta(payload))
        else:
            exchange.add(header, payload.buffer)
        self._announce_progress(exchange)

    def _announce_progress(self, exchange: Exchange) -> None:
        push = self.push  # None as soon as the client, which need not wait for this, has taken the answer.
        piecewise = push is not None and push.exchange is exchange and push.piecewise
        if exchange.complete or piecewise:
            self.notify()
