"""A worker's connection to the parameter servers: the thread and the sockets behind `Client`."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import msgpack
import torch
import zmq

from star_hvd.errors import ChannelError
from star_hvd.ps.auth import Endpoint, JobKey, connect
from star_hvd.ps.exchange import Exchange, StateExchange
from star_hvd.ps.layout import Layout
from star_hvd.ps.outbox import worker_identity
from star_hvd.ps.relay import Relay
from star_hvd.ps.wire import Header, Kind, pack, parts, raw, read_meta, unpack

__all__ = ["Line", "Push"]

logger = logging.getLogger("star_hvd")

_POLL_MS = 500


class Push:
    """A push without a complete reply: what has to be sent again to a server that died."""

    __slots__ = ("exchange", "flats", "meta", "step")

    def __init__(self, step: int, meta: dict[str, Any], flats: list[torch.Tensor], exchange: Exchange) -> None:
        self.step, self.meta, self.flats, self.exchange = step, meta, flats, exchange


class Line:
    """Carries out what its client asks for, one thing after another, on a thread that alone touches the sockets.

    Args:
        rank: This worker.
        engine: Number of the optimizer.
        session: As given to `ServerProcess.open`.
        endpoints: Of all shards, in order.
        layout: The layout.
        key: The job's key.

    Attributes:
        changed: Guards the following, and is notified when an answer is complete or the line broke.
        push: The push that has no answer yet.
        reads: Reads without an answer, by their number.
        error: Why the line broke, if it did.
        closed: Whether it was closed.
        malformed: Messages that made no sense.
    """

    def __init__(
        self, rank: int, engine: int, session: int, endpoints: Sequence[Endpoint], layout: Layout, key: JobKey
    ) -> None:
        self.rank, self.engine, self.session = rank, engine, session
        self.endpoints = list(endpoints)
        self.parent: Endpoint | None = None
        self.relay: Relay | None = None
        self.changed = threading.Condition()
        self.push: Push | None = None
        self.reads: dict[int, Exchange] = {}
        self.error: str | None = None
        self.closed = False
        self.malformed = 0
        self._layout, self._key = layout, key
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket[Any]] = []
        self._gate: zmq.Socket[Any] = None  # type: ignore[assignment]  # Made by the thread: where pushes go.
        self._poller = zmq.Poller()
        self._todo: deque[tuple[str, Any]] = deque()
        self._bell = os.pipe()
        os.set_blocking(self._bell[0], False)
        os.set_blocking(self._bell[1], False)
        self._requests = 0
        self._held: Push | None = None
        self._thread = threading.Thread(target=self._run, name="star-ps-client", daemon=True)

    # ---- for the client -----------------------------------------------------------------------------------

    def adopt(self, children: Iterable[int], host: str) -> Endpoint:
        """Before `start`: see `Client.adopt`."""
        self.relay = Relay(self._context, self._key, host, self.engine, self.session, self._layout, children)
        return self.relay.endpoint

    def start(self) -> None:
        """Connect to the servers; they need not listen yet."""
        self._thread.start()

    def close(self, deadline_s: float) -> None:
        """Disconnect; whoever waits gets a `ChannelError`."""
        with self.changed:
            if self.closed:
                return
            self.closed = True
            self.changed.notify_all()
        if self._thread.ident is not None:
            self._ring()
            self._thread.join(deadline_s)
        self._context.destroy(linger=500)
        for end in self._bell:
            os.close(end)

    def check(self) -> None:
        """Raise a `ChannelError` if the line is closed or broken."""
        if self.closed:
            raise ChannelError(f"the connection of rank {self.rank} to the parameter servers is closed")
        if self.error is not None:
            raise ChannelError(self.error)

    def do(self, what: str, argument: Any) -> None:
        """Have the thread carry something out (`_carry_out`), after what it was asked for before."""
        self._todo.append((what, argument))
        self._ring()

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # Full: it rings already.
            os.write(self._bell[1], b"!")

    # ---- the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._poller.register(self._bell[0], zmq.POLLIN)
            for index in range(len(self.endpoints)):
                self._sockets.append(self._connect(self.endpoints[index]))
            self._gate = self._sockets[0] if self.parent is None else self._connect(self.parent)
            if self.relay is not None:
                self._poller.register(self.relay.socket, zmq.POLLIN)
            while not self.closed:
                for source, _ in self._poller.poll(_POLL_MS):
                    if source == self._bell[0]:
                        with contextlib.suppress(BlockingIOError):
                            os.read(self._bell[0], 4096)
                    elif self.relay is not None and source is self.relay.socket:
                        self._drain(source, self.relay)
                        self._send_held()
                    else:
                        self._drain(source)
                while self._todo:
                    self._carry_out(*self._todo.popleft())
        except Exception as error:
            logger.exception("the connection of rank %d to the parameter servers failed", self.rank)
            with self.changed:
                self.error = f"the connection to the parameter servers failed: {type(error).__name__}: {error}"
                self.changed.notify_all()
        finally:
            for each in self._sockets:
                each.close()
            if self.parent is not None and self._gate is not None:
                self._gate.close()
            if self.relay is not None:
                self.relay.close()

    def _connect(self, endpoint: Endpoint) -> zmq.Socket[Any]:
        identity = worker_identity(self.engine, self.session, self.rank)
        socket = connect(self._context, self._key, endpoint, identity)
        self._poller.register(socket, zmq.POLLIN)
        socket.send_multipart([pack(self._header(Kind.HELLO)), b""])
        return socket

    def _header(self, kind: Kind, step: int = 0) -> Header:
        return Header(kind, self.engine, self.session, self.rank, step)

    def _carry_out(self, what: str, argument: Any) -> None:
        if what == "push":
            self._held = argument
            self._send_held()
        elif what == "read":
            self._ask(argument)
        elif what == "presence":
            self._meta(Kind.PRESENCE, 0, {"what": argument})
        elif what == "child":
            if self.relay is not None:
                self.relay.note(*argument)
                self._send_held()
        else:
            self._reconnect(*argument)

    def _send_held(self) -> None:
        """Send the push, once the children's are in."""
        push = self._held
        if push is None or (self.relay is not None and not self.relay.ready()):
            return
        self._held = None
        if self.relay is not None:
            push.meta = self.relay.add(push.meta, push.flats)
        self._announce(push)
        for index, socket in enumerate(self._sockets):
            self._send_chunks(push, index, socket if self.parent is None else self._gate)

    def _announce(self, push: Push, again: int | None = None) -> None:
        self._meta(Kind.PUSH, push.step, push.meta if again is None else {**push.meta, "again": again})

    def _meta(self, kind: Kind, step: int, meta: dict[str, Any]) -> None:
        through = self._gate if kind in (Kind.PUSH, Kind.PRESENCE) else self._sockets[0]
        through.send_multipart([pack(self._header(kind, step)), msgpack.packb(meta)])

    def _send_chunks(self, push: Push, index: int, socket: zmq.Socket[Any]) -> None:
        header = self._header(Kind.CHUNK, push.step)
        for chunk in self._layout.of_server(index):
            data = raw(push.flats[chunk.bucket][chunk.start : chunk.stop])
            for begin, end in parts(len(data)):
                head = pack(header._replace(chunk=chunk.index, offset=begin, size=len(data)))
                socket.send_multipart([head, data[begin:end]], copy=False)

    def _ask(self, exchange: Exchange) -> None:
        self._requests += 1
        exchange.reset()
        self.reads[self._requests] = exchange
        kind = Kind.STATE if isinstance(exchange, StateExchange) else Kind.PULL
        self._meta(kind, self._requests, {})

    def _reconnect(self, index: int, endpoint: Endpoint) -> None:
        self._poller.unregister(self._sockets[index])
        self._sockets[index].close(linger=0)
        self.endpoints[index] = endpoint
        self._sockets[index] = self._connect(endpoint)
        if self.parent is None:
            self._gate = self._sockets[0]
        push = self.push
        # What goes through a parent is sent again by the parent.
        if push is not None and not push.exchange.complete and push is not self._held and self.parent is None:
            self._announce(push, again=index)
            self._send_chunks(push, index, self._sockets[index])
        with self.changed:
            unanswered = [each for each in self.reads.values() if not each.complete]
            self.reads.clear()
        for exchange in unanswered:
            self._ask(exchange)

    def _drain(self, socket: zmq.Socket[Any], relay: Relay | None = None) -> None:
        while True:
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                if relay is not None:
                    relay.take(frames)
                    continue
                if len(frames) != 2:
                    raise ChannelError(f"a message has {len(frames)} frames; expected a header and a payload")
                self._take(unpack(frames[0]), frames[1])
            except (ChannelError, KeyError, TypeError, ValueError) as error:
                self.malformed += 1
                if self.malformed <= 10:
                    logger.warning("rank %d dropped a message of a parameter server: %s", self.rank, error)

    def _take(self, header: Header, payload: Any) -> None:
        push = self.push
        exchange: Exchange | None = None
        if header.kind in (Kind.PARAMS, Kind.VERDICT):
            exchange = push.exchange if push is not None and push.step == header.step else None
        elif header.kind in (Kind.PULLED, Kind.STATED):
            exchange = self.reads.get(header.step)
        else:
            raise ChannelError(f"a worker got a message of kind {Kind(header.kind).name}")
        if exchange is None or exchange.complete:
            return  # Sent twice after a server's death.
        if self.relay is not None and header.kind in (Kind.PARAMS, Kind.VERDICT):
            self.relay.forward(header, payload.buffer)
        if header.kind == Kind.VERDICT:
            exchange.judge(read_meta(payload))
        else:
            exchange.add(header, payload.buffer)
        self._announce_complete(exchange)

    def _announce_complete(self, exchange: Exchange) -> None:
        if exchange.complete:
            if self.relay is not None and self.push is not None and exchange is self.push.exchange:
                self.relay.done()
            with self.changed:
                self.changed.notify_all()
