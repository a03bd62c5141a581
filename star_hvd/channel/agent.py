"""The thread on every rank that communicates with the coordinator; it alone uses the socket.

Messages survive broken connections (`channel.link`); heartbeats may be lost, as the next one replaces them.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import zmq

from star_hvd.channel.link import Dealer
from star_hvd.channel.messages.base import Finished, Heartbeat, Hello, Message, decode, encode
from star_hvd.channel.reliable import CONTROL
from star_hvd.channel.wakeup import Wakeup
from star_hvd.errors import ChannelError
from star_hvd.threads import supervised

__all__ = ["Agent"]

logger = logging.getLogger("star_hvd")

_BATCH_S = 0.1  # Longest time that a non-urgent message waits for others.
_DRAIN_S = 2.0


class Agent:
    """Sends this rank's messages and passes the coordinator's to `handler`, in the agent's thread.

    Args:
        rank: This rank.
        connect: Makes the DEALER; called in the agent's thread, which owns the socket.
        handler: Gets every message of the coordinator. It must not block.
        heartbeat_s: Interval of heartbeats.
        drain_s: Longest wait at the end for the coordinator to acknowledge the last messages.

    Attributes:
        coordinator_ended: Whether the coordinator has closed its end: it has ended, not merely fallen silent.
    """

    def __init__(
        self,
        rank: int,
        connect: Callable[[], zmq.Socket[Any]],
        handler: Callable[[Message], None],
        heartbeat_s: float,
        drain_s: float = _DRAIN_S,
    ) -> None:
        self.rank = rank
        self.malformed = 0
        self.last_heard_s = time.monotonic()
        self.coordinator_ended = False
        self._connect = connect
        self._handler = handler
        self._heartbeat_s, self._drain_s = heartbeat_s, drain_s
        self._outbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._wakeup = Wakeup()
        self._stop = threading.Event()
        self._thread = supervised(self._run, "star-agent")

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def send(self, message: Message, *, urgent: bool = True) -> None:
        """Queue a message, from any thread, without blocking.

        Args:
            message: The message.
            urgent: Whether to send it at once, rather than with the next urgent one or after `_BATCH_S`. Waking this
                thread in every step would take the interpreter lock from the training thread, and a core of the host.
        """
        self._outbox.put(message)
        if urgent:
            self._wakeup.wake()

    def stop(self, deadline_s: float = 5.0) -> None:
        """Send what is queued, end the thread and wait for it."""
        self._stop.set()
        self._wakeup.end(self._thread, deadline_s)

    def _run(self) -> None:
        dealer = Dealer(self._connect(), CONTROL, copy=True)
        poller = zmq.Poller()
        dealer.register(poller)
        poller.register(self._wakeup, zmq.POLLIN)
        dealer.send([encode(Hello(self.rank))])
        next_beat_s = time.monotonic() + self._heartbeat_s
        linger_ms = 1000
        try:
            while True:
                stopping = self._stop.is_set()
                self._flush(dealer)
                if stopping:
                    if time.monotonic() - self.last_heard_s < self._drain_s + 2.0 * self._heartbeat_s:
                        dealer.drain(self._drain_s)
                        linger_ms = 100  # Only a BYE is left, perhaps to a coordinator that has gone.
                    return
                now_s = time.monotonic()
                if now_s >= next_beat_s:
                    dealer.note([encode(Heartbeat(self.rank))])
                    next_beat_s = now_s + self._heartbeat_s
                if now_s >= dealer.next_s:
                    dealer.tick()
                wait_s = min(next_beat_s - now_s, _BATCH_S, dealer.next_s - now_s)
                events = dict(poller.poll(max(1, round(1e3 * wait_s))))
                if self._wakeup.fileno() in events:
                    self._wakeup.clear()
                if not events.keys().isdisjoint(dealer.sockets):
                    self._receive(dealer)
        except (zmq.ZMQError, ChannelError):
            if not self._stop.is_set():
                raise  # Without this channel the rank cannot continue; `supervised` reports it.
        finally:
            dealer.close(linger_ms=linger_ms)

    def _flush(self, dealer: Dealer) -> None:
        while True:
            try:
                message = self._outbox.get_nowait()
            except queue.Empty:
                return
            if dealer.stream.ended:
                continue  # The coordinator has ended; training continues without it.
            dealer.send([encode(message)])
            if isinstance(message, Finished):
                logger.debug("rank %d: finished", self.rank)

    def _receive(self, dealer: Dealer) -> None:
        for frames in dealer.receive():
            self.last_heard_s = time.monotonic()
            try:
                if isinstance(frames, ChannelError):
                    raise frames
                if len(frames) != 1:
                    raise ChannelError(f"a control message has {len(frames)} frames; expected one")
                message = decode(frames[0])
            except ChannelError as error:
                self.malformed += 1
                logger.warning("rank %d: dropped a message of the coordinator: %s", self.rank, error)
                continue
            try:
                self._handler(message)
            except Exception:
                logger.exception("rank %d: the handler of a %s message failed", self.rank, message.kind)
        self.coordinator_ended = dealer.stream.ended
        if dealer.stream.broken is not None and not dealer.stream.ended:
            raise ChannelError(dealer.stream.broken)
