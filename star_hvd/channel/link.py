"""Sockets whose messages survive a broken connection: a DEALER and a ROUTER with a `Stream` per peer.

The owner polls `sockets`, calls `receive` when one of them is ready, and calls `tick` at `next_s`, all on one thread.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from star_hvd.channel.reliable import Frames, Limits, Stream
from star_hvd.errors import ChannelError

__all__ = ["Dealer", "Router"]

logger = logging.getLogger("star_hvd")

_MOST_PEERS = 1 << 14
_FORGET_S = 30.0  # Time in which a forgotten peer may still receive what is queued.


def _received(
    socket: zmq.Socket[Any], most: int, take: Callable[[Frames], Frames | None], *, copy: bool
) -> Generator[Frames | ChannelError, None, bool]:
    """Yield what `take` makes of at most `most` messages, or its error. Return whether the socket is empty."""
    for _ in range(most):
        try:
            frames = socket.recv_multipart(zmq.NOBLOCK, copy=copy)
        except zmq.Again:
            return True
        try:
            message = take(frames)
        except ChannelError as error:
            yield error
            continue
        if message is not None:
            yield message
    return False


class Dealer:
    """The connecting side.

    Args:
        socket: A DEALER, owned by this object and its thread from now on.
        limits: Limits of the stream.
        copy: Receive messages as bytes, which is faster for short ones, rather than as ZeroMQ frames.
    """

    def __init__(self, socket: zmq.Socket[Any], limits: Limits, *, copy: bool = False) -> None:
        self.socket = socket
        self._copy = copy
        self.stream = Stream(limits, accepts=False)
        self._monitor: zmq.Socket[Any] = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        # The connection may already exist, and the peer may have queued messages before it knew this incarnation.
        self.stream.connected(time.monotonic())
        self._flush()

    @property
    def sockets(self) -> tuple[zmq.Socket[Any], zmq.Socket[Any]]:
        """The sockets to poll for input."""
        return self.socket, self._monitor

    @property
    def next_s(self) -> float:
        """When `tick` is due, on the monotonic clock."""
        return self.stream.next_s

    def register(self, poller: zmq.Poller) -> None:
        """Add the sockets to a poller."""
        for each in self.sockets:
            poller.register(each, zmq.POLLIN)

    def unregister(self, poller: zmq.Poller) -> None:
        """Remove the sockets from a poller."""
        for each in self.sockets:
            poller.unregister(each)

    def send(self, frames: Sequence[Any]) -> None:
        """Send a message, delivered exactly once as long as both processes live.

        Raises:
            ChannelError: The stream is over.
        """
        self.stream.send(frames, time.monotonic())
        self._flush()

    def note(self, frames: Sequence[Any]) -> None:
        """Send a message that may be lost with its connection."""
        self.stream.note(frames)
        self._flush()

    def tick(self) -> None:
        """Send due acknowledgements and probes."""
        self.stream.tick(time.monotonic())
        self._flush()

    def ask(self) -> None:
        """Request an acknowledgement; a connection that is lost then shows within ZeroMQ's heartbeat timeout."""
        self.stream.ask(time.monotonic())
        self._flush()

    def receive(self, most: int = 64) -> Iterator[Frames | ChannelError]:
        """Yield at most `most` received messages, with an error in place of an invalid one."""
        self._check_monitor()
        yield from _received(self.socket, most, self._take, copy=self._copy)
        self.tick()

    def _take(self, frames: Frames) -> Frames | None:
        return self.stream.receive(frames, time.monotonic())

    def _check_monitor(self) -> None:
        while int(self._monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            recv_monitor_message(self._monitor)
            self.stream.connected(time.monotonic())
            self._flush()

    def drain(self, deadline_s: float) -> bool:
        """Wait at most `deadline_s` until the peer has acknowledged everything. Return whether it has."""
        limit_s = time.monotonic() + deadline_s
        poller = zmq.Poller()
        self.register(poller)
        if self.stream.unacknowledged:
            self.stream.ask(time.monotonic())
            self._flush()
        while self.stream.unacknowledged:
            left_s = min(limit_s, self.next_s) - time.monotonic()
            if time.monotonic() >= limit_s:
                return False
            poller.poll(max(0, math.ceil(1e3 * left_s)))
            for _ in self.receive():
                pass  # Messages are discarded at the end.
        return self.stream.broken is None

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket, after a final acknowledgement and a BYE to the peer."""
        with contextlib.suppress(zmq.ZMQError):
            self.stream.acknowledge()
            self.stream.bye()
            self._flush()
            self.socket.disable_monitor()
            self._monitor.close(linger=0)
            self.socket.close(linger=linger_ms)

    def _flush(self) -> None:
        for frames in self.stream.emitted():
            self.socket.send_multipart(frames, copy=False)


class Router:
    """The accepting side.

    Args:
        socket: A bound ROUTER, owned by this object and its thread from now on.
        limits: Limits of every stream.
        known: Returns whether an identity is a valid peer's.
        copy: As in `Dealer`.

    Attributes:
        lost: Messages for peers that had ended, or whose stream is over.
        drained: Whether the latest `receive` emptied the socket.
    """

    def __init__(
        self, socket: zmq.Socket[Any], limits: Limits, known: Callable[[bytes], bool], *, copy: bool = False
    ) -> None:
        self.socket = socket
        self._copy = copy
        self.lost = 0
        self.drained = True
        self._limits, self._known = limits, known
        self._streams: dict[bytes, Stream] = {}
        self._leaving: dict[bytes, float] = {}

    @property
    def next_s(self) -> float:
        """When `tick` is due, on the monotonic clock."""
        soonest_s = min((stream.next_s for stream in self._streams.values()), default=math.inf)
        return min(soonest_s, *self._leaving.values()) if self._leaving else soonest_s

    @property
    def repeated(self) -> int:
        """Messages repeated in either direction after a broken connection; callable from any thread."""
        return sum(stream.resent + stream.duplicates for stream in list(self._streams.values()))

    def stream(self, identity: bytes) -> Stream:
        """Return the stream of a peer; create it if there is none."""
        found = self._streams.get(identity)
        if found is None:
            found = self._streams[identity] = Stream(self._limits, accepts=True)
        return found

    def send(self, identity: bytes, frames: Sequence[Any]) -> None:
        """Send a message, delivered exactly once as long as the peer's process lives, even if it is not connected now.

        A message for a peer that has closed its end, or whose stream is over, is counted in `lost`.
        """
        stream = self.stream(identity)
        if stream.broken is not None:
            self.lost += 1
            return
        try:
            stream.send(frames, time.monotonic())
        except ChannelError as error:
            self.lost += 1
            logger.error("messages for %r are lost: %s", identity, error)
        self._flush(identity, stream)

    def note(self, identity: bytes, frames: Sequence[Any]) -> None:
        """Send a message that may be lost with its connection."""
        stream = self.stream(identity)
        stream.note(frames)
        self._flush(identity, stream)

    def tick(self) -> None:
        """Send due acknowledgements and probes, and delete forgotten peers."""
        now_s = time.monotonic()
        for identity, stream in self._streams.items():
            if now_s >= stream.next_s:
                stream.tick(now_s)
                self._flush(identity, stream)
        for identity, limit_s in list(self._leaving.items()):
            if now_s >= limit_s or not self._streams[identity].unacknowledged:
                del self._leaving[identity], self._streams[identity]

    def receive(self, most: int = 64) -> Iterator[Frames | ChannelError]:
        """Yield at most `most` received messages, each after its identity, with an error in place of an invalid one."""
        self.drained = False
        self.drained = yield from _received(self.socket, most, self._take, copy=self._copy)
        self.tick()

    def _take(self, frames: Frames) -> Frames | None:
        identity = bytes(frames[0])
        if identity[:1] == b"\0" and len(identity) == 5:
            return None  # ZeroMQ's own identity for a connection that a newer one replaced; that repeats this message.
        if not self._known(identity):
            raise ChannelError(f"a message came from {identity!r}, which is no peer of this socket")
        if identity not in self._streams and len(self._streams) >= _MOST_PEERS:
            raise ChannelError(f"a message came from {identity!r}; expected at most {_MOST_PEERS} peers")
        fresh = Stream(self._limits, accepts=True) if identity not in self._streams else None
        stream = fresh or self._streams[identity]
        message = stream.receive(frames[1:], time.monotonic())
        if stream.peer:  # Invalid messages, and those of a former incarnation, create no stream.
            self._streams[identity] = stream
        self._flush(identity, stream)
        return None if message is None else [frames[0], *message]

    def refuse(self, identity: bytes) -> None:
        """Take back the message that `receive` has just yielded, for which there is no room now; it will come again."""
        self._streams[identity].refuse()

    def forget(self, prefix: bytes) -> None:
        """Delete peers whose identity begins with `prefix`, once they have acknowledged everything or after 30 s."""
        limit_s = time.monotonic() + _FORGET_S
        for identity in self._streams:
            if identity.startswith(prefix):
                self._leaving.setdefault(identity, limit_s)

    def bye(self) -> None:
        """Send final acknowledgements and BYE to all peers, before the socket is closed."""
        with contextlib.suppress(zmq.ZMQError):
            for identity, stream in self._streams.items():
                stream.acknowledge()
                stream.bye()
                self._flush(identity, stream)

    def _flush(self, identity: bytes, stream: Stream) -> None:
        for frames in stream.emitted():
            self.socket.send_multipart([identity, *frames], copy=False)
