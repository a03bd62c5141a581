"""A worker's side of the parameter servers: one per optimizer, with a thread of its own for the sockets."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import msgpack
import torch
import zmq

from star_hvd.config import Config
from star_hvd.errors import ChannelError, DeadlineError
from star_hvd.execute.state import Snapshot
from star_hvd.ps.auth import Endpoint, JobKey, connect
from star_hvd.ps.exchange import Exchange, Reply, StateExchange
from star_hvd.ps.layout import Layout
from star_hvd.ps.outbox import worker_identity
from star_hvd.ps.relay import Relay
from star_hvd.ps.wire import Header, Kind, pack, parts, raw, read_meta, unpack

__all__ = ["Client", "Reply"]

logger = logging.getLogger("star_hvd")

_POLL_MS = 500


class _Push:
    """A push without a complete reply: what has to be sent again to a server that died."""

    __slots__ = ("exchange", "flats", "meta", "step")

    def __init__(self, step: int, meta: dict[str, Any], flats: list[torch.Tensor], exchange: Exchange) -> None:
        self.step, self.meta, self.flats, self.exchange = step, meta, flats, exchange


class Client:
    """Pushes gradients and gets parameters.

    The methods may be called from any thread, `push` and `wait` by one at a time: a worker has one push in flight.

    Args:
        rank: This worker.
        engine: Number of the optimizer.
        session: As given to `ServerProcess.open`.
        endpoints: Of all shards, in order.
        layout: The layout.
        key: The job's key.
        config: Its deadlines.
    """

    def __init__(
        self,
        rank: int,
        engine: int,
        session: int,
        endpoints: Sequence[Endpoint],
        layout: Layout,
        key: JobKey,
        config: Config | None = None,
    ) -> None:
        self.rank, self.engine, self.session = rank, engine, session
        self.malformed = 0
        self._endpoints = list(endpoints)
        self._layout, self._key, self._config = layout, key, config or Config()
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket[Any]] = []
        self._gate: zmq.Socket[Any] = None  # type: ignore[assignment]  # Made by the thread: where pushes go.
        self._poller = zmq.Poller()
        self._todo: deque[tuple[str, Any]] = deque()
        self._bell = os.pipe()
        os.set_blocking(self._bell[0], False)
        os.set_blocking(self._bell[1], False)
        self._changed = threading.Condition()
        self._push: _Push | None = None
        self._reads: dict[int, Exchange] = {}
        self._requests = 0
        self._woken = False
        self._closed = False
        self._error: str | None = None
        self._flats: list[torch.Tensor] = []
        self._lent: list[torch.Tensor] = []
        self._relay: Relay | None = None
        self._held: _Push | None = None
        self._parent: Endpoint | None = None
        self._orphaned = False
        self._taken_back = False  # The push under way goes nowhere: its parent is, or was, absent.
        self._thread = threading.Thread(target=self._run, name="star-ps-client", daemon=True)

    # ---- life ---------------------------------------------------------------------------------------------

    def adopt(self, children: Iterable[int], host: str) -> Endpoint:
        """Before `start`: take these ranks' pushes in, add them to every own push, and pass answers on.

        A push then goes out when all children that are not absent have pushed too.

        Returns:
            Where the children find this client (`follow`).
        """
        self._relay = Relay(self._context, self._key, host, self.engine, self.session, self._layout, children)
        return self._relay.endpoint

    def follow(self, parent: Endpoint) -> None:
        """Before `start`: push through a parent, and get its answers, instead of through the servers."""
        self._parent = parent

    def reach(self, endpoints: Sequence[Endpoint]) -> None:
        """Before `start`: the servers, where they were not known when this client was made."""
        self._endpoints = list(endpoints)

    def start(self) -> None:
        """Connect to the servers; they need not listen yet."""
        self._thread.start()

    def close(self, deadline_s: float = 5.0) -> None:
        """Disconnect; whoever waits gets a `ChannelError`."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._ring()
            self._thread.join(deadline_s)
        self._context.destroy(linger=500)
        for end in self._bell:
            os.close(end)

    # ---- what the worker does -----------------------------------------------------------------------------

    def push(
        self,
        *,
        step: int,
        version: int,
        flats: Sequence[torch.Tensor],
        weight: float,
        count: int = 1,
        own_steps: int = 0,
        row: Sequence[float] | None = None,
        loss: float | None = None,
        keep: bool = False,
    ) -> None:
        """Send a gradient; returns at once, `wait` gives the answer.

        Args:
            step: This worker's own counter, higher than in any push before it.
            version: Version of the parameters the gradient was computed on.
            flats: Per bucket the sum of weight * gradient, the weight behind it, as in `Bucket.flat`.
            weight: The sum of the weights.
            count: Gradients in the sum.
            own_steps: Steps this worker has made; the hyperparameters of the one with most count.
            row: Its hyperparameters (`HyperRow.read`).
            loss: Its loss, for the log.
            keep: The buffers are lent: nobody changes them until the answer has come, and no copy is made.

        Raises:
            ChannelError: The push before has no answer yet, or the client is closed.
        """
        with self._changed:
            self._check()
            if self._push is not None:
                raise ChannelError(f"rank {self.rank} pushed step {step}; the answer to {self._push.step} has not come")
            if len(flats) != len(self._layout.buckets):
                raise ValueError(f"a push has {len(flats)} buffers; expected {len(self._layout.buckets)}")
            lent = self._borrow(flats, keep)
            meta = {
                "version": version,
                "weight": float(weight),
                "count": count,
                "own_steps": own_steps,
                "row": None if row is None else [float(number) for number in row],
                "loss": None if loss is None else float(loss),
            }
            if not self._flats:
                self._flats = [torch.empty(b.numel, dtype=b.dtype) for b in self._layout.buckets]
            self._push = _Push(step, meta, lent, Exchange(self._layout, self._flats))
            self._taken_back = self._orphaned
        if not self._taken_back:
            self._do("push", self._push)

    def _borrow(self, flats: Sequence[torch.Tensor], keep: bool) -> list[torch.Tensor]:
        """The buffers themselves where they may be kept, else copies in memory that is used again."""
        if keep and self._relay is None and all(flat.device.type == "cpu" and flat.is_contiguous() for flat in flats):
            return list(flats)
        if not self._lent:
            self._lent = [torch.empty(b.numel, dtype=b.dtype) for b in self._layout.buckets]
        for mine, flat in zip(self._lent, flats, strict=True):
            mine.copy_(flat[: mine.numel()])
        return self._lent

    def wait(self, deadline_s: float) -> Reply:
        """The answer to the push.

        Returns:
            `params`: parameters to go on with. `dropped`: the same, but the push was thrown away. `moved`: the mode
            ended; `state` gives what there is. `interrupted`: somebody called `wake`; the push is still under way.

        Raises:
            DeadlineError: No answer within `deadline_s`; the push is still under way.
            ChannelError: There was no push, the servers refused it, or the client was closed.
        """
        limit_s = time.monotonic() + deadline_s
        with self._changed:
            if self._push is None:
                raise ChannelError(f"rank {self.rank} waits for an answer without having pushed")
            while True:
                self._check()
                if self._push.exchange.complete:
                    reply, self._push = self._push.exchange.reply(), None
                    if reply.kind == "error":
                        raise ChannelError(f"the servers refused the push of rank {self.rank}: {reply.reason}")
                    return reply
                if self._taken_back:
                    break
                if self._woken:
                    self._woken = False
                    return Reply("interrupted")
                if not self._changed.wait(max(0.0, limit_s - time.monotonic())) and time.monotonic() >= limit_s:
                    raise DeadlineError(
                        f"rank {self.rank} waited {deadline_s:g} s for parameters; "
                        f"{self._push.exchange.describe()} (is a server dead or a rank very late?)"
                    )

        # Only parents push: until it is back this worker follows the parameters, and its gradients count as dropped.
        reply = self.pull(max(0.0, limit_s - time.monotonic()))
        with self._changed:
            self._push, self._taken_back = None, False
        return dataclasses.replace(reply, kind="dropped", reason="the parent in the fan-in tree is absent")

    def wake(self) -> None:
        """Interrupt `wait`, now or the next time."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def pull(self, deadline_s: float) -> Reply:
        """The parameters of one version, as `params`.

        Raises:
            DeadlineError: Not within `deadline_s`.
            ChannelError: The client was closed.
        """
        flats = [torch.empty(b.numel, dtype=b.dtype) for b in self._layout.buckets]
        return self._read(Exchange(self._layout, flats, kind=Kind.PULLED), deadline_s).reply()

    def state(self, deadline_s: float) -> Snapshot:
        """Parameters and optimizer state of one version; after the end of the mode those it ended with.

        Raises:
            DeadlineError: Not within `deadline_s`.
            ChannelError: The client was closed, or the state cannot be read.
        """
        exchange = StateExchange(self._layout)
        self._read(exchange, deadline_s)
        return exchange.snapshot()

    def _read(self, exchange: Exchange, deadline_s: float) -> Exchange:
        limit_s = time.monotonic() + deadline_s
        with self._changed:
            self._check()
        self._do("read", exchange)
        with self._changed:
            while not exchange.complete:
                self._check()
                if not self._changed.wait(max(0.0, limit_s - time.monotonic())) and time.monotonic() >= limit_s:
                    raise DeadlineError(
                        f"rank {self.rank} waited {deadline_s:g} s for parameters; {exchange.describe()}"
                    )
            self._reads = {number: each for number, each in self._reads.items() if each is not exchange}
        return exchange

    def child(self, rank: int, *, present: bool) -> None:
        """A child is absent, or back: own pushes go on without it."""
        self._do("child", (rank, present))

    def orphan(self, alone: bool) -> None:
        """The parent is absent, or back. A push it has not answered is taken back and counts as dropped."""
        with self._changed:
            if alone == self._orphaned or self._parent is None:
                return
            self._orphaned = alone
            self._taken_back = self._taken_back or (alone and self._push is not None)
            self._changed.notify_all()
        self._do("presence", "withdrawn" if alone else "present")

    def absent(self, away: bool) -> None:
        """Tell the servers that this worker will not push for a while, or that it will again."""
        self._do("presence", "absent" if away else "present")

    def replace(self, index: int, endpoint: Endpoint) -> None:
        """A shard has a new process: connect to it and send it again what it may have lost."""
        self._do("replace", (index, endpoint))

    def _do(self, what: str, argument: Any) -> None:
        self._todo.append((what, argument))
        self._ring()

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # Full: it rings already.
            os.write(self._bell[1], b"!")

    def _check(self) -> None:
        if self._closed:
            raise ChannelError(f"the connection of rank {self.rank} to the parameter servers is closed")
        if self._error is not None:
            raise ChannelError(self._error)

    # ---- thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._poller.register(self._bell[0], zmq.POLLIN)
            for index in range(len(self._endpoints)):
                self._sockets.append(self._connect(self._endpoints[index]))
            self._gate = self._sockets[0] if self._parent is None else self._connect(self._parent)
            if self._relay is not None:
                self._poller.register(self._relay.socket, zmq.POLLIN)
            while not self._closed:
                for source, _ in self._poller.poll(_POLL_MS):
                    if source == self._bell[0]:
                        with contextlib.suppress(BlockingIOError):
                            os.read(self._bell[0], 4096)
                    elif self._relay is not None and source is self._relay.socket:
                        self._drain(source, self._relay)
                        self._send_held()
                    else:
                        self._drain(source)
                while self._todo:
                    self._carry_out(*self._todo.popleft())
        except Exception as error:
            logger.exception("the connection of rank %d to the parameter servers failed", self.rank)
            with self._changed:
                self._error = f"the connection to the parameter servers failed: {type(error).__name__}: {error}"
                self._changed.notify_all()
        finally:
            for each in self._sockets:
                each.close()
            if self._parent is not None and self._gate is not None:
                self._gate.close()
            if self._relay is not None:
                self._relay.close()

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
            if self._relay is not None:
                self._relay.note(*argument)
                self._send_held()
        else:
            self._reconnect(*argument)

    def _send_held(self) -> None:
        """Send the push, once the children's are in."""
        push = self._held
        if push is None or (self._relay is not None and not self._relay.ready()):
            return
        self._held = None
        if self._relay is not None:
            push.meta = self._relay.add(push.meta, push.flats)
        self._announce(push)
        for index, socket in enumerate(self._sockets):
            self._send_chunks(push, index, socket if self._parent is None else self._gate)

    def _announce(self, push: _Push, again: int | None = None) -> None:
        self._meta(Kind.PUSH, push.step, push.meta if again is None else {**push.meta, "again": again})

    def _meta(self, kind: Kind, step: int, meta: dict[str, Any]) -> None:
        through = self._gate if kind in (Kind.PUSH, Kind.PRESENCE) else self._sockets[0]
        through.send_multipart([pack(self._header(kind, step)), msgpack.packb(meta)])

    def _send_chunks(self, push: _Push, index: int, socket: zmq.Socket[Any]) -> None:
        header = self._header(Kind.CHUNK, push.step)
        for chunk in self._layout.of_server(index):
            data = raw(push.flats[chunk.bucket][chunk.start : chunk.stop])
            for begin, end in parts(len(data)):
                head = pack(header._replace(chunk=chunk.index, offset=begin, size=len(data)))
                socket.send_multipart([head, data[begin:end]], copy=False)

    def _ask(self, exchange: Exchange) -> None:
        self._requests += 1
        exchange.reset()
        self._reads[self._requests] = exchange
        kind = Kind.STATE if isinstance(exchange, StateExchange) else Kind.PULL
        self._meta(kind, self._requests, {})

    def _reconnect(self, index: int, endpoint: Endpoint) -> None:
        self._poller.unregister(self._sockets[index])
        self._sockets[index].close(linger=0)
        self._endpoints[index] = endpoint
        self._sockets[index] = self._connect(endpoint)
        if self._parent is None:
            self._gate = self._sockets[0]
        push = self._push
        # What goes through a parent is sent again by the parent.
        if push is not None and not push.exchange.complete and push is not self._held and self._parent is None:
            self._announce(push, again=index)
            self._send_chunks(push, index, self._sockets[index])
        with self._changed:
            unanswered = [each for each in self._reads.values() if not each.complete]
            self._reads.clear()
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
        push = self._push
        exchange: Exchange | None = None
        if header.kind in (Kind.PARAMS, Kind.VERDICT):
            exchange = push.exchange if push is not None and push.step == header.step else None
        elif header.kind in (Kind.PULLED, Kind.STATED):
            exchange = self._reads.get(header.step)
        else:
            raise ChannelError(f"a worker got a message of kind {Kind(header.kind).name}")
        if exchange is None or exchange.complete:
            return  # Sent twice after a server's death.
        if self._relay is not None and header.kind in (Kind.PARAMS, Kind.VERDICT):
            self._relay.forward(header, payload.buffer)
        if header.kind == Kind.VERDICT:
            exchange.judge(read_meta(payload))
        else:
            exchange.add(header, payload.buffer)
        self._announce_complete(exchange)

    def _announce_complete(self, exchange: Exchange) -> None:
        if exchange.complete:
            if self._relay is not None and self._push is not None and exchange is self._push.exchange:
                self._relay.done()
            with self._changed:
                self._changed.notify_all()
