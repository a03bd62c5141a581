"""Messages between workers and parameter servers: a fixed binary header, then raw bytes or msgpack. Nothing is pickled.

A chunk is sent as bytes in parts of at most `PART_BYTES`; `offset` and `size` in the header are the part's position in
its chunk and the chunk's size.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgpack
import torch
import zmq

from star_hvd.channel.handshake_limiter import SLACK_BYTES
from star_hvd.errors import ChannelError

__all__ = [
    "HEADER_BYTES",
    "MAX_MESSAGE_BYTES",
    "PART_BYTES",
    "Assembly",
    "Gathering",
    "Header",
    "Kind",
    "Lent",
    "pack",
    "parts",
    "raw",
    "read_meta",
    "unpack",
]

_LAYOUT = struct.Struct("<4sBBIIIqIqQQ")
_MAGIC, _PROTOCOL = b"STPS", 1
HEADER_BYTES = _LAYOUT.size
# 40 MB messages were 4 times slower than 4 MB ones; 1 MiB bounds what an unauthenticated connection can make us hold.
PART_BYTES = 1024 * 1024
MAX_MESSAGE_BYTES = PART_BYTES + SLACK_BYTES
_MAX_CHUNK_BYTES = 1 << 42


class Kind(enum.IntEnum):
    """Kinds of messages. `rank` in the header is the worker's rank, between servers the shard's index."""

    HELLO = 1
    PUSH = 2
    CHUNK = 3
    PULL = 4
    STATE = 5
    PRESENCE = 6
    PARAMS = 7
    PULLED = 8
    STATED = 9
    VERDICT = 10
    ORDER = 11
    ARRIVED = 12
    DONE = 13
    JOIN = 14


class Header(NamedTuple):
    """Fixed part of every message.

    `step` is the worker's own push counter, or the number of a request; `version` is that of the parameters.
    """

    kind: int
    optimizer_id: int
    session: int
    rank: int = 0
    step: int = 0
    chunk: int = 0
    version: int = 0
    offset: int = 0
    size: int = 0


def pack(header: Header) -> bytes:
    """Return a header as bytes."""
    return _LAYOUT.pack(_MAGIC, _PROTOCOL, *header)


def unpack(frame: Any) -> Header:
    """The inverse of `pack`, from bytes or a ZeroMQ frame.

    Raises:
        ChannelError: Not a header of this protocol, or one with impossible values.
    """
    data = getattr(frame, "buffer", frame)
    if len(data) != HEADER_BYTES:
        raise ChannelError(f"a message has a header of {len(data)} bytes; expected {HEADER_BYTES}")
    magic, protocol, *values = _LAYOUT.unpack(data)
    header = Header(*values)
    if magic != _MAGIC or protocol != _PROTOCOL:
        raise ChannelError(f"a message is of protocol {magic!r} {protocol}; expected {_MAGIC!r} {_PROTOCOL}")
    if header.kind not in Kind._value2member_map_:
        raise ChannelError(f"a message is of kind {header.kind}; expected one of 1..{max(Kind)}")
    if header.size > _MAX_CHUNK_BYTES or header.offset > header.size or header.step < 0 or header.version < 0:
        raise ChannelError(f"a message has an impossible header: {header}")
    return header


def read_meta(frame: Any) -> dict[str, Any]:
    """Return the msgpack mapping in a frame.

    Raises:
        ChannelError: The frame is no msgpack mapping.
    """
    try:
        found = msgpack.unpackb(getattr(frame, "buffer", frame))
    except Exception as error:  # Damaged data makes msgpack raise various types.
        raise ChannelError(f"a message is no valid msgpack: {type(error).__name__}: {error}") from error
    if not isinstance(found, dict):
        raise ChannelError(f"a message holds a {type(found).__name__}; expected a mapping")
    return found


def raw(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, not copied."""
    data: memoryview = tensor.detach().view(-1).view(torch.uint8).numpy().data
    return data


def parts(size: int) -> Iterator[tuple[int, int]]:
    """Yield begin and end of the parts in which a chunk of `size` bytes is sent."""
    for begin in range(0, max(size, 1), PART_BYTES):
        yield begin, min(size, begin + PART_BYTES)


class Lent:
    """Memory lent to ZeroMQ for sending, possibly to several receivers; it must not change until `free`."""

    __slots__ = ("_frames", "_trackers", "data")

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data
        self._frames: dict[int, zmq.Frame] = {}
        self._trackers: list[zmq.MessageTracker] = []

    def frame(self, begin: int, end: int) -> zmq.Frame:
        """Return a part as a ZeroMQ frame, not copied; the same frame for all receivers."""
        if begin not in self._frames:
            frame = zmq.Frame(raw(self.data)[begin:end], copy=False, track=True)
            self._frames[begin] = frame
            self._trackers.append(frame.tracker)
        return self._frames[begin]

    def drop(self) -> None:
        """Release the frames, as there are no further receivers; frames in flight stay valid."""
        self._frames.clear()

    def free(self) -> bool:
        """Return whether none of its frames is still in flight."""
        self.drop()
        self._trackers = [tracker for tracker in self._trackers if not tracker.done]
        return not self._trackers


class Gathering:
    """A chunk whose size only its sender knows: memory is allocated for received bytes, not for the announced size."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._parts: dict[int, bytes] = {}
        self._came = 0

    def add(self, offset: int, data: Any) -> torch.Tensor | None:
        """Add a part. Return the complete chunk once nothing is missing, otherwise None.

        Raises:
            ChannelError: The part does not fit the chunk.
        """
        _check_part(offset, len(data), self.size)
        if offset not in self._parts:
            self._parts[offset] = bytes(data)
            self._came += len(data)
        if self._came < self.size:
            return None
        whole = b"".join(part for _, part in sorted(self._parts.items()))
        self._parts.clear()
        return torch.frombuffer(bytearray(whole), dtype=torch.uint8) if whole else torch.empty(0, dtype=torch.uint8)


def _check_part(offset: int, length: int, size: int) -> None:
    if offset % PART_BYTES or offset + length != min(size, offset + PART_BYTES):
        raise ChannelError(f"a part of {length} bytes at {offset} does not fit a chunk of {size} bytes")


class Assembly:
    """A chunk received in several parts, in any order, possibly some of them twice."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
        self._missing = {begin: end for begin, end in parts(size)}

    def add(self, offset: int, data: Any) -> bool:
        """Copy a part to its place. Return whether the chunk is complete.

        Raises:
            ChannelError: The part does not fit the chunk.
        """
        _check_part(offset, len(data), self.buffer.numel())
        end = offset + len(data)
        if self._missing.pop(offset, None) is not None and end > offset:
            self.buffer[offset:end].copy_(torch.frombuffer(data, dtype=torch.uint8))
        return not self._missing
