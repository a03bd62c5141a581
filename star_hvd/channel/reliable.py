"""Two directions between two endpoints: every message exactly once, in order, whatever happens to the connection.

ZeroMQ opens a broken connection again by itself, but what was on its way then is gone, in either direction, and a
ROUTER drops what it sends to a peer that is just not connected. `Stream` repairs that: it is a pure state machine, with
events in and frames out. It owns no socket, no thread and no clock; `now_s` is passed in.

*Numbers.* Every message of the application has a sequence number from 1 on. The sender keeps it until a cumulative
acknowledgement covers it. Acknowledgements ride on whatever goes the other way; only where nothing does within
`Limits.ack_delay_s` does one go alone.

*What is lost* is found without guessing. One connection never reorders, so a PROBE is behind everything sent before it,
and its ECHO says what of that came: exactly the rest is sent again, and nothing because of a peer that is merely slow.
A probe goes out when a connection was opened anew (`connected`) and, as a safety net, when acknowledgements have been
missing for `Limits.probe_s`, at growing intervals. The receiver drops what it had already, and what comes behind a gap.
It does not hold the latter: the sender has it anyway, and so the receiver's memory does not grow.

*Incarnations.* Every stream has a random number. A message names its sender's, and the receiver's as far as the sender
knows it. A process that was started again under the same identity begins a new stream by that, and nothing meant for
its predecessor, or sent by it, counts. The side that was connected to (`accepts`) goes over to the newcomer; for the
side that connects the stream is over, because what its peer had taken in is gone, and somebody who knows more than
this module must decide (the clients of a parameter server are given its successor; see `ps/line.py`).

*References, not copies.* Frames are kept as they are given. Their memory must not change until they are acknowledged,
or what they say must not matter any more; see `Client.push` and `Outbox` for how the parameter servers see to that.

*Bounds.* A stream that has more unacknowledged messages or bytes than `Limits` allow is over, with a reason, on both
sides (`broken`): messages are never dropped in silence.
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
_MOST_PROBES = 16  # Without an echo; each is a few bytes.
_REASON_BYTES = 500

Frames = list[Any]


class Kind(IntEnum):
    """What a message is to a stream."""

    DATA = 1  # Of the application, with a number.
    NOTE = 2  # Of the application, without: it may be lost.
    ACK = 3
    PROBE = 4
    RESUME = 5  # A probe over a new connection: what this side has not acknowledged is to be sent again.
    ECHO = 6
    BROKEN = 7
    BYE = 8


_KINDS = {int(kind): kind for kind in Kind}


@dataclass(frozen=True, slots=True)
class Limits:
    """How a stream behaves.

    Attributes:
        messages: Unacknowledged messages at most.
        nbytes: Unacknowledged bytes at most.
        ack_delay_s: Longest time an acknowledgement waits for something to ride on.
        ack_messages: After as many messages it waits no longer.
        ack_bytes: After as many bytes it waits no longer.
        probe_s: Time without an acknowledgement after which the first probe goes out. Longer than `ack_delay_s`.
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
"""A rank that stands still for a minute is sent some thousand messages of a hundred bytes. The delay is longer than the
usual interval of the signs of life: where nothing else goes the other way, they carry the acknowledgements."""

TENSORS = Limits(
    messages=1 << 18, nbytes=1 << 42, ack_delay_s=0.02, ack_messages=1 << 14, ack_bytes=1 << 30
)
"""A worker has one push or read under way with a server, which is the real bound; the bytes are those of a chunk at
most. The delay is short: until they are acknowledged, a server's buffers cannot be used again."""


@dataclass(slots=True)
class _Sent:
    number: int
    frames: Frames
    nbytes: int


class Stream:
    """See the module's text.

    Args:
        limits: Bounds and intervals.
        accepts: Whether a peer with another incarnation begins anew. Else it ends this stream.
        own: This side's incarnation; random where left out.

    Attributes:
        peer: The peer's incarnation, 0 until something has come of it.
        broken: Why this stream is over, None while it is not.
        ended: Whether the peer said that it sends and takes nothing any more.
        replaced: Whether it is over because the peer was started again.
        duplicates: Messages that came again.
        gaps: Messages that came behind a lost one.
        resent: Messages sent again.
        foreign: Messages from or to another incarnation.
        abandoned: Unacknowledged messages given up because their receiver was replaced.
    """

    def __init__(self, limits: Limits, *, accepts: bool, own: int = 0) -> None:
        self.own = own or secrets.randbits(64) | 1
        self.peer = 0
        self.broken: str | None = None
        self.ended = self.replaced = False
        self.duplicates = self.gaps = self.resent = self.foreign = self.abandoned = 0
        self._limits, self._accepts = limits, accepts
        self._retired: deque[int] = deque(maxlen=_RETIRED)
        self._out: list[Frames] = []
        self._probe_number = 0
        self._begin()

    def _begin(self) -> None:
        """Both directions from the start."""
        self._unacked: deque[_Sent] = deque()
        self._unacked_bytes = 0
        self._number = self._acked = self._received = 0
        self._ack_at_s = self._probe_at_s = math.inf
        self._probe_after_s = self._limits.probe_s
        self._since_ack = self._bytes_since_ack = 0
        self._probes: dict[int, int] = {}  # By number: the last message sent before it.

    # ---- what there is ------------------------------------------------------------------------------------

    @property
    def next_s(self) -> float:
        """When `tick` has something to do; infinite if never."""
        return min(self._ack_at_s, self._probe_at_s)

    @property
    def unacknowledged(self) -> int:
        """Messages sent of which it is not known that they came."""
        return len(self._unacked)

    @property
    def unacknowledged_bytes(self) -> int:
        """Their bytes."""
        return self._unacked_bytes

    @property
    def sent(self) -> int:
        """Number of the last message sent."""
        return self._number

    @property
    def acknowledged(self) -> int:
        """Number of the last message of which it is known that it came."""
        return self._acked

    def emitted(self) -> list[Frames]:
        """What is to be sent now, in this order; each is returned once."""
        out, self._out = self._out, []
        return out

    # ---- events -------------------------------------------------------------------------------------------

    def send(self, frames: Sequence[Any], now_s: float) -> None:
        """Send a message.

        Args:
            frames: The first one is bytes. The others may be anything that has a length and that the socket takes.
            now_s: The present.

        Raises:
            ChannelError: The stream is over, or it is now, because the peer has not acknowledged too much.
        """
        if self.broken is not None:
            raise ChannelError(self.broken)
        nbytes = sum(map(len, frames))
        if len(self._unacked) >= self._limits.messages or self._unacked_bytes + nbytes > self._limits.nbytes:
            self._break(
                f"{len(self._unacked)} messages of {self._unacked_bytes} bytes were not acknowledged; "
                f"at most {self._limits.messages} and {self._limits.nbytes} are kept"
            )
            raise ChannelError(str(self.broken))
        self._number += 1
        if not self._unacked:
            self._probe_at_s = now_s + self._probe_after_s
        self._unacked.append(_Sent(self._number, list(frames), nbytes))
        self._unacked_bytes += nbytes
        self._emit(Kind.DATA, self._number, 0, frames)

    def note(self, frames: Sequence[Any]) -> None:
        """Send a message that may be lost; nothing of it is kept."""
        if self.broken is None:
            self._emit(Kind.NOTE, 0, 0, frames)

    def connected(self, now_s: float) -> None:
        """There is a new connection: find out what was lost on the one before, in both directions."""
        if self.broken is None:
            self._probes.clear()  # Echoes on the old connection are lost, or say nothing about this one.
            self._probe(Kind.RESUME, now_s)

    def ask(self, now_s: float) -> None:
        """Have the peer say at once what has come; it does not wait for something to ride on."""
        if self.broken is None:
            self._probe(Kind.PROBE, now_s)

    def bye(self) -> None:
        """Say that nothing more will be sent or taken."""
        self._emit(Kind.BYE, 0, 0, ())

    def tick(self, now_s: float) -> None:
        """Do what is due."""
        if now_s >= self._ack_at_s:
            self._emit(Kind.ACK, 0, 0, ())
        if now_s >= self._probe_at_s:
            self._probe(Kind.PROBE, now_s)
            self._probe_after_s = min(2.0 * self._probe_after_s, self._limits.most_probe_s)

    def acknowledge(self) -> None:
        """Send the acknowledgement that waits for something to ride on, if there is one."""
        if self._ack_at_s < math.inf:
            self._emit(Kind.ACK, 0, 0, ())

    def receive(self, frames: Sequence[Any], now_s: float) -> Frames | None:
        """Take what came over the socket.

        Returns:
            A message for the application, None if it is none.

        Raises:
            ChannelError: It is not a stream's.
        """
        kind, source, target, number, ack, extra, body = _open(frames)
        if source == self.own or target not in (0, self.own) or source in self._retired:
            self.foreign += 1
            if not self.peer and kind in (Kind.PROBE, Kind.RESUME):
                self._emit(Kind.ECHO, 0, 0, ())  # The one it asks for is no more; by this it knows.
            return None
        if source != self.peer and not self._meet(source):
            return None
        if target == 0 and ack:
            raise ChannelError(f"a message to an unknown receiver acknowledges {ack} messages")
        if ack > self._number:
            raise ChannelError(f"message {ack} was acknowledged; the last one sent was {self._number}")
        self._acknowledged(ack, now_s)
        if kind == Kind.DATA:
            return self._data(number, body, now_s)
        if kind == Kind.NOTE:
            return body
        self._signal(kind, extra, ack, body, now_s)
        return None

    # ---- inside -------------------------------------------------------------------------------------------

    def _meet(self, source: int) -> bool:
        """A new peer under this identity; whether to go on with it."""
        if self.peer:
            self._retired.append(self.peer)
            if not self._accepts:
                self._retired.append(source)
                self.replaced = True
                self._over("the other side was started again; what it had been sent is not known there")
                return False
            self.abandoned += len(self._unacked)
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
        else:
            self.gaps += 1
        many = self._since_ack >= self._limits.ack_messages or self._bytes_since_ack >= self._limits.ack_bytes
        if many or not fresh:  # A message that comes again says that an acknowledgement was lost.
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
            self._over(f"the other side gave this connection up: {reason[:_REASON_BYTES].decode(errors='replace')}")
        elif kind == Kind.BYE:
            self.ended = True
            self._over("the other side has closed its end")

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

    def _emit(self, kind: Kind, number: int, extra: int, frames: Sequence[Any]) -> None:
        first = bytes(frames[0]) if frames else b""
        head = _ENVELOPE.pack(_MAGIC, kind, self.own, self.peer, number, self._received if self.peer else 0, extra)
        self._out.append([head + first, *frames[1:]])
        self._ack_at_s = math.inf
        self._since_ack = self._bytes_since_ack = 0


def _open(frames: Sequence[Any]) -> tuple[Kind, int, int, int, int, int, Frames]:
    """Kind, incarnations of sender and receiver, number, acknowledged number, probe and the message behind them."""
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
        raise ChannelError(f"a message of kind {named.name} has the number {number}")
    return named, source, target, number, ack, extra, [bytes(first[ENVELOPE_BYTES:]), *frames[1:]]
