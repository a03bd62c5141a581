"""Parameters that are fetched, and late gradients, as their messages come from a socket."""

from __future__ import annotations

import random
import time
from typing import Any

import msgpack
import torch

from star_hvd.channel.late_push import PUSH_HEADER, LatePushes
from star_hvd.channel.state_transfer import (
    MANIFEST_SIZE,
    REPLY_HEADER,
    REQUEST,
    TensorServer,
    ask,
    pack_snapshot,
    unpack_snapshot,
)
from star_hvd.engine.records import Snapshot
from star_hvd.errors import ChannelError, DeadlineError
from tests.fuzz.mutate import damaged, damaged_bytes, packed
from tests.fuzz.run import Target

_SNAPSHOT = Snapshot(3, [torch.ones(4, 3), torch.zeros(2)], [{"m": torch.ones(4, 3), "step": 3}, {}])
_MANIFEST, _BODY = pack_snapshot(_SNAPSHOT)
_ATTEMPT = 7


class _Socket:
    """Gives the frames of a script, and takes what is sent."""

    def __init__(self, messages: list[list[bytes]]) -> None:
        self._messages = list(messages)

    def poll(self, wait_ms: int) -> int:
        return len(self._messages)

    def recv_multipart(self) -> list[bytes]:
        return self._messages.pop(0)

    def send_multipart(self, frames: list[bytes]) -> None:
        assert all(isinstance(frame, bytes) for frame in frames)


class _Caller:
    """The connection of a fetch whose only reply is a script."""

    def __init__(self, messages: list[list[bytes]]) -> None:
        self.socket = self
        self._messages = list(messages)

    def send(self, request: bytes) -> None:
        assert len(request) == REQUEST.size

    def begin(self) -> int:
        return _ATTEMPT

    def wait(self, limit_s: float) -> list[bytes]:
        if not self._messages:
            raise DeadlineError("the script is over")
        return self._messages.pop(0)


def _manifest(draw: random.Random) -> bytes:
    if draw.random() < 0.5:
        values = damaged(msgpack.unpackb(_MANIFEST), draw, draw.choice((1, 2)))
        manifest = packed(values)
    else:
        manifest = damaged_bytes(_MANIFEST, draw)
    return packed([manifest, _BODY if draw.random() < 0.7 else damaged_bytes(_BODY, draw)])


def _read_manifest(data: bytes) -> None:
    manifest, body = msgpack.unpackb(data)
    snapshot = unpack_snapshot(manifest, body)
    assert len(snapshot.params) == len(snapshot.state)


def _frames(draw: random.Random) -> bytes:
    step, size = 40, len(_MANIFEST) + len(_BODY)
    chunks = [part[begin : begin + step] for part in (_MANIFEST, _BODY) for begin in range(0, len(part), step)]
    total, offset = 1 + len(chunks), 0
    found = [[REPLY_HEADER.pack(b"STAR", 2, _ATTEMPT, 0, total, 0, size), MANIFEST_SIZE.pack(len(_MANIFEST))]]
    for number, chunk in enumerate(chunks, 1):
        found.append([REPLY_HEADER.pack(b"STAR", 2, _ATTEMPT, number, total, offset, size), chunk])
        offset += len(chunk)
    return packed(damaged(found, draw, draw.choice((0, 1, 1, 2))))


def _list(value: Any) -> list[Any]:
    """The lists in a list: a damaged script may hold, or be, anything."""
    return [each for each in value if isinstance(each, list)] if isinstance(value, list) else []


def _receive(data: bytes) -> None:
    messages = [[part for part in each if isinstance(part, bytes)] for each in _list(msgpack.unpackb(data))]
    ask(_Caller(messages), 1, 0, time.monotonic() + 60.0, state_too=True)  # type: ignore[arg-type]


def _requests(draw: random.Random) -> bytes:
    found: list[Any] = []
    for _ in range(draw.randrange(1, 8)):
        least = draw.choice((0, 1 << 40, (1 << 64) - 1))
        pace = draw.choice((0, 1, 1 << 20, (1 << 64) - 1))
        request = [b"peer", REQUEST.pack(draw.randrange(9), draw.randrange(3), 1, least, pace)]
        push = [b"peer", *_push(draw, draw.randrange(3))]
        message = draw.choice((request, push))
        found.append(damaged(message, draw) if draw.random() < 0.5 else message)
    return packed(found)


def _answer(data: bytes) -> int:
    pushes = LatePushes(lambda engine, rank, version, body: version + 1)
    server = TensorServer(
        _Socket([]), lambda engine, state, least: _SNAPSHOT if engine else None, 40, pushes.take  # type: ignore[arg-type]
    )
    said = _list(msgpack.unpackb(data))
    for frames in said:
        server.answer([frame if isinstance(frame, bytes) else b"" for frame in frames])
        server.send_due()
    return max(1, len(said))


def _push(draw: random.Random, number: int) -> list[bytes]:
    numbers = [draw.choice((0, 1, 2, 1 << 31)) for _ in range(2)]
    size = draw.choice((0, 16, 16, 32, 1 << 39, (1 << 64) - 1))
    version = draw.choice((0, 3, (1 << 64) - 1))
    link, attempt = draw.choice((0, 7)), draw.choice((0, 1, (1 << 32) - 1))
    where = (draw.choice((0, 0, 16)), size)
    return [PUSH_HEADER.pack(b"STAL", 2, *numbers, link, number, attempt, version, *where), bytes(16)]


TARGETS = (
    Target("manifest", _manifest, _read_manifest, (ChannelError,), 6.0),
    Target("fetch", _frames, _receive, (ChannelError, DeadlineError), 4.0),
    Target("tensor-server", _requests, _answer, (), 4.0),
)
