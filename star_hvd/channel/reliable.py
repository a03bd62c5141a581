"""Exactly-once, in-order delivery in both directions between two endpoints, across broken connections.

ZeroMQ reconnects, but loses what was in flight in either direction, and a ROUTER drops messages for a peer that is not
connected. `Stream` repairs that. It is a pure state machine: events go in, frames come out. It has no socket, thread or
clock; `now_s` is passed in.

*Sequence numbers.* The application's messages are numbered from 1. The sender keeps each one until a cumulative
acknowledgement covers it. Acknowledgements are piggybacked on messages in the other direction; one is sent alone only
if there was no such message within `Limits.ack_delay_s`.

*Loss detection* uses no timeout on data. A connection never reorders, so a PROBE arrives after everything sent before
it, and its ECHO reports how much of that was received. Exactly the rest is resent, and never because a peer is slow. A
probe is sent after a reconnection (`connected`) and, as a safety net, when acknowledgements have been missing for
`Limits.probe_s`, at growing intervals. The receiver drops duplicates and messages after a gap; it does not buffer the
latter, which the sender still has, so the receiver's memory is bounded.

*Incarnations.* Every stream has a random number. A message carries its sender's, and the receiver's if the sender knows
it. A process restarted under the same identity has a new one, so messages to or from its predecessor are ignored. The
accepting side (`accepts`) then starts over with the new peer; on the connecting side the stream is over, because the
peer's state is gone and only the application can recover (clients of a parameter server connect to its new process, see
`ps/worker/connection.py`).

*References, not copies.* Frames are kept as given. Their memory must not change until they are acknowledged or their
content has become irrelevant; see `Client.push` and `Outbox` for how the parameter servers ensure that.

*Bounds.* A stream with more unacknowledged messages or bytes than `Limits` allow is over on both sides, with a reason
in `broken`: messages are never dropped silently.
"""

from __future__ import annotations

import math
import secrets
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from star_hvd.errors import ChannelError

__all__ = ["CONTROL", "ENVELOPE_BYTES", "TENSORS", "Kind", "Limits", "Stream"]

_ENVELOPE = struct.Struct("<4sBQQQQQ")  # magic, kind, sender's and receiver's incarnation, number, acknowledged, probe
_MAGIC = b"STR1"
ENVELOPE_BYTES = _ENVELOPE.size
_RETIRED = 8  # Former incarnations of a peer that are remembered.
_MOST_PROBES = 16  # Probes without an echo that are remembered.
_REASON_BYTES = 500

Frames = list[Any]


class Kind(IntEnum):
    """Kinds of a stream's messages."""

    DATA = 1  # The application's, with a sequence number.
    NOTE = 2  # The application's, without one: it may be lost.
    ACK = 3
    PROBE = 4
    RESUME = 5  # A probe on a new connection: the receiver also sends its own unacknowledged messages again.
    ECHO = 6
    BROKEN = 7
    BYE = 8


_KINDS = {int(kind): kind for kind in Kind}


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds and intervals of a stream.

    Attributes:
        messages: Most unacknowledged messages.
        nbytes: Most unacknowledged bytes.
        ack_delay_s: Longest time an acknowledgement waits for a message to be piggybacked on.
        ack_messages: Received messages after which an acknowledgement is sent at once.
        ack_bytes: Received bytes after which an acknowledgement is sent at once.
        probe_s: Time without an acknowledgement until the first probe. Longer than `ack_delay_s`.
        most_probe_s: Longest time between two probes.
    """

    messages: int
    nbytes: int
    ack_delay_s: float
    ack_messages: int
    ack_bytes: int
    probe_s: float = 0.5
    most_probe_s: float = 1.0


CONTROL = Limits(
    messages=1 << 17,
    nbytes=256 << 20,
    ack_delay_s=0.6,
    ack_messages=256,
    ack_bytes=1 << 20,
    probe_s=1.5,
    most_probe_s=3.0,
)
"""A rank that is frozen for a minute is sent some thousand messages of a hundred bytes. The delay exceeds the usual
heartbeat interval, so that heartbeats carry the acknowledgements if no other message does."""

TENSORS = Limits(
    messages=1 << 18, nbytes=1 << 42, ack_delay_s=0.02, ack_messages=1 << 14, ack_bytes=1 << 30
)
"""The real bound is that a worker has one push or read in flight with a server. The delay is short because a server's
buffers cannot be reused until they are acknowledged."""


@dataclass(slots=True)
class _Sent:
    number: int
    frames: Frames
    nbytes: int


class Stream:
    """One endpoint of the protocol described in the module docstring.

    Args:
        limits: Bounds and intervals.
        accepts: Whether a new incarnation of the peer starts the stream over; otherwise it ends the stream.
        own: This side's incarnation; random by default.

    Attributes:
        peer: The peer's incarnation, 0 before its first message.
        broken: Why this stream is over, None while it works.
        ended: Whether the peer has closed its end (BYE).
        replaced: Whether the stream is over because the peer was restarted.
        duplicates: Messages received again.
        resent: Messages sent again.
    """

    def __init__(self, limits: Limits, *, accepts: bool, own: int = 0) -> None:
        self.own = own or secrets.randbits(64) | 1
        self.peer = 0
        self.broken: str | None = None
        self.ended = self.replaced = False
        self.duplicates = self.resent = 0
        self._limits, self._accepts = limits, accepts
        self._retired: deque[int] = deque(maxlen=_RETIRED)
        self._out: list[Frames] = []
        self._probe_number = 0
        self._begin()

    def _begin(self) -> None:
        """Reset both directions."""
        self._unacked: deque[_Sent] = deque()
        self._unacked_bytes = 0
        self._number = self._acked = self._received = 0
        self._ack_at_s = self._probe_at_s = math.inf
        self._probe_after_s = self._limits.probe_s
        self._since_ack = self._bytes_since_ack = 0
        self._probes: dict[int, int] = {}  # By number: the last message sent before it.

    # ---- state --------------------------------------------------------------------------------------------

    @property
    def next_s(self) -> float:
        """When `tick` is due; infinite if never."""
        return min(self._ack_at_s, self._probe_at_s)

    @property
    def unacknowledged(self) -> int:
        """Number of messages sent and not acknowledged."""
        return len(self._unacked)

    @property
    def sent(self) -> int:
        """Number of the last message sent."""
        return self._number

    @property
    def acknowledged(self) -> int:
        """Number of the last acknowledged message."""
        return self._acked

    @property
    def remembered(self) -> tuple[int, int]:
        """Number of probes without an echo, and of the peer's former incarnations, that are remembered."""
        return len(self._probes), len(self._retired)

    def emitted(self) -> list[Frames]:
        """Remove and return the frames to be sent now, in order."""
        out, self._out = self._out, []
        return out

    # ---- events -------------------------------------------------------------------------------------------

    def send(self, frames: Sequence[Any], now_s: float) -> None:
        """Send a message.

        Args:
            frames: The first one is bytes. The others may be anything with a length that the socket accepts.
            now_s: The present.

        Raises:
            ChannelError: The stream is over, possibly only now because too much is unacknowledged.
        """
        if self.broken is not None:
            raise ChannelError(self.broken)
        nbytes = sum(map(len, frames))
        if len(self._unacked) >= self._limits.messages or self._unacked_bytes + nbytes > self._limits.nbytes:
            self._break(
                f"{len(self._unacked)} messages of {self._unacked_bytes} bytes are not acknowledged; "
                f"expected at most {self._limits.messages} of {self._limits.nbytes} bytes: is the peer frozen?"
            )
            raise ChannelError(str(self.broken))
        self._number += 1
        if not self._unacked:
            self._probe_at_s = now_s + self._probe_after_s
        self._unacked.append(_Sent(self._number, list(frames), nbytes))
        self._unacked_bytes += nbytes
        self._emit(Kind.DATA, self._number, 0, frames)

    def note(self, frames: Sequence[Any]) -> None:
        """Send a message that may be lost; it is not kept."""
        if self.broken is None:
            self._emit(Kind.NOTE, 0, 0, frames)

    def connected(self, now_s: float) -> None:
        """Recover what the old connection lost, in both directions; call when a new connection was made."""
        if self.broken is None:
            self._probes.clear()  # Echoes of the old connection's probes do not apply to this one.
            self._probe(Kind.RESUME, now_s)

    def ask(self, now_s: float) -> None:
        """Request an acknowledgement without delay."""
        if self.broken is None:
            self._probe(Kind.PROBE, now_s)

    def bye(self) -> None:
        """Announce that this side has closed its end."""
        self._emit(Kind.BYE, 0, 0, ())

    def tick(self, now_s: float) -> None:
        """Send a due acknowledgement or probe."""
        if now_s >= self._ack_at_s:
            self._emit(Kind.ACK, 0, 0, ())
        if now_s >= self._probe_at_s:
            self._probe(Kind.PROBE, now_s)
            self._probe_after_s = min(2.0 * self._probe_after_s, self._limits.most_probe_s)

    def acknowledge(self) -> None:
        """Send a delayed acknowledgement now, if there is one."""
        if self._ack_at_s < math.inf:
            self._emit(Kind.ACK, 0, 0, ())

    def receive(self, frames: Sequence[Any], now_s: float) -> Frames | None:
        """Handle frames from the socket.

        Returns:
            A message for the application, None for the protocol's own.

        Raises:
            ChannelError: The frames are not a stream's.
        """
        kind, source, target, number, ack, extra, body = _open(frames)
        if source == self.own or target not in (0, self.own) or source in self._retired:
            if not self.peer and kind in (Kind.PROBE, Kind.RESUME):
                # Shows the peer that the incarnation it probes is gone. Addressed to the probe's sender: a newer
                # connection of the peer has the same identity and may get this message; without an address it would
                # take this stream for its own peer.
                self._emit(Kind.ECHO, 0, 0, (), target=source)
            return None
        if source != self.peer and not self._new_peer(source):
            return None
        if target == 0 and ack:
            raise ChannelError(f"a message without a receiver acknowledges {ack} messages; expected 0")
        if ack > self._number:
            raise ChannelError(f"message {ack} was acknowledged; expected at most {self._number}, the last one sent")
        self._acknowledged(ack, now_s)
        if kind == Kind.DATA:
            return self._data(number, body, now_s)
        if kind == Kind.NOTE:
            return body
        self._signal(kind, extra, ack, body, now_s)
        return None

    def refuse(self) -> None:
        """Take back the message that `receive` has just returned: it is not acknowledged, and the peer resends it.

        For a message that the application has no room for now. What follows it is dropped as after any gap, until the
        peer's next probe shows what is missing.
        """
        self._received -= 1

    # ---- inside -------------------------------------------------------------------------------------------

    def _new_peer(self, source: int) -> bool:
        """Handle a new incarnation of the peer. Return whether the stream continues with it."""
        if self.peer:
            self._retired.append(self.peer)
            if not self._accepts:
                self._retired.append(source)
                self.replaced = True
                self._over("the peer was restarted and has lost the messages that it had received")
                return False
            self.broken, self.ended = None, False
            self._begin()
        self.peer = source
        return True

    def _data(self, number: int, body: Frames, now_s: float) -> Frames | None:
        if self.broken is not None:
            return None
        fresh = number == self._received + 1
        if fresh:
            self._received = number
            self._since_ack += 1
            self._bytes_since_ack += sum(map(len, body))
            self._ack_at_s = min(self._ack_at_s, now_s + self._limits.ack_delay_s)
        elif number <= self._received:
            self.duplicates += 1
        many = self._since_ack >= self._limits.ack_messages or self._bytes_since_ack >= self._limits.ack_bytes
        if many or not fresh:  # A duplicate means that an acknowledgement was lost.
            self._ack_at_s = now_s
        return body if fresh else None

    def _signal(self, kind: Kind, extra: int, ack: int, body: Frames, now_s: float) -> None:
        if kind in (Kind.PROBE, Kind.RESUME):
            self._emit(Kind.ECHO, 0, extra, ())
            if self.broken is not None:
                self._emit(Kind.BROKEN, 0, 0, [self.broken.encode()[:_REASON_BYTES]])
            elif kind == Kind.RESUME:
                self._resend(now_s)
        elif kind == Kind.ECHO:
            if ack < self._probes.pop(extra, 0):
                self._resend(now_s)
        elif kind == Kind.BROKEN:
            reason = bytes(body[0]) if body else b""
            self._over(f"the peer has abandoned this stream: {reason[:_REASON_BYTES].decode(errors='replace')}")
        elif kind == Kind.BYE:
            self.ended = True
            self._over("the peer has closed its end")

    def _acknowledged(self, ack: int, now_s: float) -> None:
        if ack <= self._acked:
            return
        self._acked = ack
        while self._unacked and self._unacked[0].number <= ack:
            self._unacked_bytes -= self._unacked.popleft().nbytes
        self._probe_after_s = self._limits.probe_s
        self._probe_at_s = now_s + self._probe_after_s if self._unacked else math.inf

    def _resend(self, now_s: float) -> None:
        self._probes.clear()
        for each in self._unacked:
            self._emit(Kind.DATA, each.number, 0, each.frames)
        self.resent += len(self._unacked)
        if self._unacked:
            self._probe_at_s = now_s + self._probe_after_s

    def _probe(self, kind: Kind, now_s: float) -> None:
        self._probe_number += 1
        if len(self._probes) >= _MOST_PROBES:
            del self._probes[next(iter(self._probes))]
        self._probes[self._probe_number] = self._number
        self._emit(kind, 0, self._probe_number, ())
        self._probe_at_s = now_s + self._probe_after_s if self._unacked else math.inf

    def _break(self, reason: str) -> None:
        self._over(reason)
        self._emit(Kind.BROKEN, 0, 0, [reason.encode()[:_REASON_BYTES]])

    def _over(self, reason: str) -> None:
        if self.broken is None:
            self.broken = reason
        self._unacked.clear()
        self._unacked_bytes = 0
        self._ack_at_s = self._probe_at_s = math.inf

    def _emit(self, kind: Kind, number: int, extra: int, frames: Sequence[Any], *, target: int = 0) -> None:
        first = bytes(frames[0]) if frames else b""
        received = self._received if self.peer else 0
        head = _ENVELOPE.pack(_MAGIC, kind, self.own, target or self.peer, number, received, extra)
        self._out.append([head + first, *frames[1:]])
        self._ack_at_s = math.inf
        self._since_ack = self._bytes_since_ack = 0


def _open(frames: Sequence[Any]) -> tuple[Kind, int, int, int, int, int, Frames]:
    """Return kind, sender's and receiver's incarnations, number, acknowledged number, probe, application's frames."""
    if not frames:
        raise ChannelError("a message has no frames")
    first = memoryview(getattr(frames[0], "buffer", frames[0]))
    if len(first) < ENVELOPE_BYTES:
        raise ChannelError(f"a message begins with {len(first)} bytes; expected at least {ENVELOPE_BYTES}")
    magic, kind, source, target, number, ack, extra = _ENVELOPE.unpack(first[:ENVELOPE_BYTES])
    named = _KINDS.get(kind)
    if magic != _MAGIC or named is None or source == 0:
        raise ChannelError(f"a message begins with {magic!r} {kind}; expected {_MAGIC!r} and 1..{max(Kind)}")
    if (named is Kind.DATA) != (number > 0):
        raise ChannelError(f"a message of kind {named.name} has number {number}; expected 0 except for DATA")
    return named, source, target, number, ack, extra, [bytes(first[ENVELOPE_BYTES:]), *frames[1:]]
