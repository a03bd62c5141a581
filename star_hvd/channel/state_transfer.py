"""Transfers the state from a rank that has it to one that is behind: requests, and replies in chunks, on own sockets.

A reply is a sequence of two-frame messages: a fixed binary header and raw bytes. Chunk 0 gives the length of the
manifest (msgpack: shapes, types, scalar state); the others carry the manifest and then the tensors' bytes, so that no
message is larger than a chunk, however many parameters there are. Nothing is pickled.

A request may limit the rate of its reply: on a slow link, a reply at full speed would delay all other traffic.

A request changes nothing at the server, so after a broken connection it is simply repeated. Every attempt has its own
number, which the reply carries, so that the rest of an earlier reply is not mistaken for the current one.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import secrets
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgpack
import torch
import zmq
from zmq.utils.monitor import recv_monitor_message

from scheduler.transmission.pace import Pace, chunk_bytes
from star_hvd.channel.keys import Keyring
from star_hvd.channel.messages import base as messages
from star_hvd.channel.wakeup import Wakeup
from star_hvd.engine.records import Snapshot
from star_hvd.errors import ChannelError, DeadlineError
from star_hvd.telemetry.wait_time import WaitTime
from star_hvd.threads import supervised

__all__ = [
    "MANIFEST_SIZE",
    "PUSH_MAGIC",
    "REPLY_HEADER",
    "REQUEST",
    "Caller",
    "OtherRanks",
    "PacedReplies",
    "TensorServer",
    "ask",
    "fetch",
    "next_due_s",
    "pack_snapshot",
    "unpack_snapshot",
    "unsendable",
]

logger = logging.getLogger("star_hvd")

REPLY_HEADER = struct.Struct("<4sBQIIQQ")
"""Of every part of a reply: magic, protocol, request, number of the chunk, chunks, offset, size of the body."""

MANIFEST_SIZE = struct.Struct("<Q")
"""Contents of chunk 0."""

REQUEST = struct.Struct("<QIBQQ")
"""Request, optimizer, whether the optimizer's state is wanted, least step, pace."""

_MAGIC, _PROTOCOL = b"STAR", 2
PUSH_MAGIC = b"STAL"  # Of late gradients, which use the same sockets; see `late_push`.
_MAX_BODY_BYTES = 1 << 42
_POLL_MS = 1000
LOOK_S = 5.0  # Between two looks at what makes a wait for a rank pointless.
_ANSWER_S = 5.0  # Longest wait for the coordinator to name a rank.
_SOURCES = 4  # Silent ranks that can be asked for a state, one after the other, within the deadline.
_LEAST_PACE = 1 << 14  # Bytes per second: a reply holds memory here until all of it is sent.
_CATCH_UP_S = 0.01  # A delayed paced sender makes up for at most this much time at once.
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_DTYPES = {str(d): d for d in (*_FLOATS, torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64)}


def _raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def unsendable(value: Any) -> str:
    """Return why a value of an optimizer's state cannot be sent, empty if it can."""
    if isinstance(value, torch.Tensor):
        known = str(value.dtype) in _DTYPES
        return "" if known else f"has the type {value.dtype}; expected one of {sorted(_DTYPES)}"
    if value is None or isinstance(value, (bool, int, float, str)):
        return ""
    return f"is a {type(value).__name__}; only tensors and numbers can be fetched"


def pack_snapshot(snapshot: Snapshot) -> tuple[bytes, bytes]:
    """Return a snapshot as a manifest and a body of raw bytes.

    Raises:
        ChannelError: The optimizer's state holds something other than tensors, numbers, strings and None.
    """
    blobs: list[bytes] = []

    def describe(value: Any, where: str) -> list[Any]:
        if reason := unsendable(value):
            raise ChannelError(f"{where} {reason}")
        if not isinstance(value, torch.Tensor):
            return ["v", value]
        blobs.append(_raw(value))
        return ["t", str(value.dtype), list(value.shape)]

    params = [describe(p, f"parameter {i}") for i, p in enumerate(snapshot.params)]
    state = [
        {k: describe(v, f"state {k!r} of parameter {i}") for k, v in entry.items()}
        for i, entry in enumerate(snapshot.state)
    ]
    return bytes(msgpack.packb([snapshot.step, params, state])), b"".join(blobs)


def unpack_snapshot(manifest: bytes, body: bytes) -> Snapshot:
    """The inverse of `pack_snapshot`.

    Raises:
        ChannelError: Manifest and body do not fit together.
    """
    read = _Body(body)
    try:
        version, params, state = msgpack.unpackb(manifest, strict_map_key=True)
        tensors = [read.tensor(item) for item in params]
        states = [
            {str(k): _number(v) if v[0] == "v" else read.tensor(v) for k, v in entry.items()}
            for _, entry in zip(tensors, state, strict=True)
        ]
    except ChannelError:
        raise
    except Exception as error:  # Whatever damage makes msgpack or torch raise.
        raise ChannelError(f"a fetched manifest cannot be read: {type(error).__name__}: {error}") from error
    if type(version) is not int or version < 0:
        raise ChannelError(f"a fetched manifest is of step {version!r}; expected a whole number from 0")
    if read.position != len(body):
        raise ChannelError(f"a fetched body has {len(body)} bytes; its manifest describes {read.position}")
    return Snapshot(version, tensors, states)


class _Body:
    """Reads tensors one after the other, as described by the items of a manifest."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self.position = 0

    def tensor(self, item: Any) -> torch.Tensor:
        kind, name, shape = item
        if kind != "t" or any(type(n) is not int or n < 0 for n in shape):
            raise ValueError("not a tensor")
        dtype = _DTYPES[name]
        start, self.position = self.position, self.position + math.prod(shape) * dtype.itemsize
        if self.position > len(self._body):
            raise ChannelError(f"a fetched tensor of shape {shape} goes beyond the {len(self._body)} bytes that came")
        if self.position == start:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return torch.frombuffer(bytearray(self._body[start : self.position]), dtype=dtype).reshape(shape)


def _number(item: Any) -> Any:
    kind, value = item
    if kind != "v" or not (value is None or isinstance(value, (bool, int, float, str))):
        raise ValueError("a value that is neither a number nor a string")
    return value


def next_due_s(due_s: float, sent_bytes: int, bytes_per_s: float) -> float:
    """Return when the next part of a paced transfer is due, after one of `sent_bytes` that was due at `due_s`."""
    return max(due_s, time.monotonic() - _CATCH_UP_S) + sent_bytes / bytes_per_s


_Part = tuple[int, int, int, int, bytes]  # Number of the chunk, chunks, offset, size of the body, bytes.


@dataclass(slots=True)
class _Paced:
    """A reply being sent at a limited rate: its request, the parts left, and when the next part is due."""

    request: int
    parts: Iterator[_Part]
    bytes_per_s: float
    due_s: float


class TensorServer:
    """Thread that answers fetches.

    Args:
        router: Bound socket; belongs to the server's thread from `start` on.
        snapshot: Returns the snapshot of an optimizer by its number, with or without optimizer state, of a step or
            later; None if there is none here.
        chunk_bytes: Size of a message.
        push: Takes a message with a part of a late gradient; returns the answer, None if there is none yet.
        poll_ms: Longest time that the thread sleeps, in milliseconds.
    """

    def __init__(
        self,
        router: zmq.Socket[Any],
        snapshot: Callable[[int, bool, int], Snapshot | None],
        chunk_bytes: int,
        push: Callable[[list[bytes]], bytes | None] | None = None,
        poll_ms: int = _POLL_MS,
    ) -> None:
        self.malformed = 0
        self._router = router
        self._snapshot = snapshot
        self._push = push
        self._chunk_bytes = chunk_bytes
        self._poll_ms = poll_ms
        self._paced: dict[bytes, _Paced] = {}  # Per peer, the reply to its last request.
        self._stop = threading.Event()
        self._wakeup = Wakeup()
        self._thread = supervised(self._run, "star-tensors")

    @property
    def paced_replies(self) -> int:
        """Number of replies that are being sent at a limited rate."""
        return len(self._paced)

    def start(self) -> None:
        """Start the thread, which calls `answer` and `send_due`."""
        self._thread.start()

    def stop(self, deadline_s: float = 5.0) -> None:
        """End the thread and wait for it."""
        self._stop.set()
        self._wakeup.end(self._thread, deadline_s)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wakeup, zmq.POLLIN)
        try:
            while not self._stop.is_set():
                if self._router in dict(poller.poll(self.send_due())):
                    self.answer(self._router.recv_multipart())
        except zmq.ZMQError as error:
            if not self._stop.is_set():
                logger.error("the tensor server stopped: %s", error)
        finally:
            self._router.close(linger=1000)

    def answer(self, frames: list[bytes]) -> None:
        """Answer a message, given after its sender's identity; an invalid one is counted and dropped."""
        if len(frames) == 3 and self._push is not None:
            self._take_push(frames[0], frames[1:])
            return
        if len(frames) != 2 or len(frames[1]) != REQUEST.size:
            self.malformed += 1
            logger.warning("dropped a malformed fetch")
            return
        peer, (number, optimizer_id, state_too, min_step, pace) = frames[0], REQUEST.unpack(frames[1])
        try:
            snapshot = self._snapshot(optimizer_id, bool(state_too), min_step)
            manifest, body = pack_snapshot(snapshot) if snapshot is not None else (b"", b"")
        except Exception as error:
            logger.warning("cannot serve a fetch: %s", error)
            manifest, body = b"", b""
        parts = _parts(manifest, body, chunk_bytes(pace, self._chunk_bytes))
        self._paced.pop(peer, None)  # The peer has given up its earlier request.
        if pace:
            self._paced[peer] = _Paced(number, parts, max(_LEAST_PACE, pace), time.monotonic())
        else:
            for part in parts:
                self._send(peer, number, *part)

    def send_due(self) -> int:
        """Send the parts of paced replies that are due. Return the milliseconds to poll, until the next one is due."""
        soonest_s = math.inf
        for peer, reply in list(self._paced.items()):
            if time.monotonic() >= reply.due_s:
                part = next(reply.parts, None)
                if part is None:
                    del self._paced[peer]
                    continue
                self._send(peer, reply.request, *part)
                reply.due_s = next_due_s(reply.due_s, len(part[-1]), reply.bytes_per_s)
            soonest_s = min(soonest_s, reply.due_s)
        left_s = max(0.0, soonest_s - time.monotonic())
        return self._poll_ms if left_s > 1e-3 * self._poll_ms else math.ceil(1e3 * left_s)

    def _send(self, peer: bytes, request: int, number: int, total: int, offset: int, size: int, payload: bytes) -> None:
        header = REPLY_HEADER.pack(_MAGIC, _PROTOCOL, request, number, total, offset, size)
        self._router.send_multipart([peer, header, payload])

    def _take_push(self, peer: bytes, frames: list[bytes]) -> None:
        assert self._push is not None
        try:
            answer = self._push(frames)
        except ChannelError as error:
            self.malformed += 1
            logger.warning("dropped a late gradient: %s", error)
            return
        except Exception as error:  # Its optimizer has failed, say: this thread also serves the others.
            logger.warning("cannot take a late gradient: %s", error)
            return
        if answer is not None:
            self._router.send_multipart([peer, answer])


def _parts(manifest: bytes, body: bytes, step: int) -> Iterator[_Part]:
    """Yield a reply in parts of at most `step` bytes, after a first part that gives the manifest's length."""
    size = len(manifest) + len(body)
    chunks = [(part, begin) for part in (manifest, body) for begin in range(0, len(part), step)]
    yield 0, 1 + len(chunks), 0, size, MANIFEST_SIZE.pack(len(manifest)) if manifest else b""
    offset = 0
    for number, (part, begin) in enumerate(chunks, 1):
        payload = part[begin : begin + step]
        yield number, 1 + len(chunks), offset, size, payload
        offset += len(payload)


class Caller:
    """A connection for requests; its user repeats a request if the connection broke before the answer (`reopened`).

    Used by one thread.

    Args:
        keyring: Keys and addresses of the job.
        rank: The rank to connect to.
    """

    def __init__(self, keyring: Keyring, rank: int) -> None:
        self._monitor: zmq.Socket[Any]
        # Without an identity of its own: the server would ignore a second connection under the same one.
        self.socket = keyring.client(rank, b"", port=keyring.peers[rank].tensor_port, watch=self._watch)
        self._connected = self._broke = False
        self._requests = secrets.randbits(32) << 31

    def _watch(self, socket: zmq.Socket[Any]) -> None:
        """Look at the connection's events: at a first handshake that was missed, its break would lose the request."""
        self._monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)

    def begin(self) -> int:
        """Start a new request and return its number; forget what happened to the connection before."""
        self.reopened()
        self._requests += 1
        return self._requests

    def reopened(self) -> bool:
        """Return whether the connection broke and was re-established since the last call."""
        found = False
        while self._monitor.poll(0):
            if recv_monitor_message(self._monitor)["event"] == zmq.EVENT_DISCONNECTED:
                # Before the first handshake nothing has left the socket's queue, and nothing can be lost.
                self._broke = self._connected
            else:
                self._connected = True
                found, self._broke = found or self._broke, False
        return found

    def wait(self, limit_s: float) -> list[bytes] | None:
        """Wait for the next message; None after a connection event, or at `limit_s` on the monotonic clock."""
        left_s = limit_s - time.monotonic()
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        ready = dict(poller.poll(max(1, round(1e3 * left_s)))) if left_s > 0 else {}
        return self.socket.recv_multipart() if self.socket in ready else None

    def close(self) -> None:
        """Close the socket."""
        with contextlib.suppress(zmq.ZMQError):
            self.socket.disable_monitor()
            self._monitor.close(linger=0)
            self.socket.close(linger=0)


class OtherRanks:
    """The other ranks as a source of state (`StateSource`); the coordinator names one of them for each request.

    Args:
        keyring: Keys and addresses of the job.
        optimizer_id: Number of the optimizer.
        send: Sends a control message to the coordinator.
        answers: Receives its answers.
        check: Raises the error that keeps this rank from continuing, if there is one.
    """

    def __init__(
        self,
        keyring: Keyring,
        optimizer_id: int,
        send: Callable[[messages.Message], object],
        answers: queue.SimpleQueue[messages.StateSource],
        check: Callable[[], None],
    ) -> None:
        self._keyring = keyring
        self._optimizer_id = optimizer_id
        self._send = send
        self._answers = answers
        self._check = check

    def snapshot(self, min_step: int, deadline_s: float) -> Snapshot | None:
        """See `StateSource`."""
        self._check()
        began_s = time.monotonic()
        rank = self._named(min(_ANSWER_S, deadline_s))
        if rank < 0:
            return None
        left_s = max(0.1, began_s + deadline_s - time.monotonic())
        # Limited patience: if this rank is frozen, for example, another one may have the state, too.
        patience_s = deadline_s / _SOURCES
        try:
            return fetch(self._keyring, rank, self._optimizer_id, left_s, min_step=min_step, patience_s=patience_s)
        except DeadlineError as error:
            logger.warning("%s", error)
        return None

    def _named(self, deadline_s: float) -> int:
        """Ask the coordinator for a rank; return it, -1 if it knows of none, or does not answer."""
        with contextlib.suppress(queue.Empty):  # Behind answers that came too late, each would be taken for the next.
            while True:
                self._answers.get_nowait()
        self._send(messages.FindStateSource(self._optimizer_id))
        limit_s = time.monotonic() + deadline_s
        with contextlib.suppress(queue.Empty):
            while True:
                answer = self._answers.get(timeout=max(0.0, limit_s - time.monotonic()))
                if answer.optimizer_id == self._optimizer_id:
                    return answer.rank
        return -1


def fetch(
    keyring: Keyring,
    source: int,
    optimizer_id: int,
    deadline_s: float,
    *,
    min_step: int = 0,
    patience_s: float = math.inf,
) -> Snapshot | None:
    """Get the parameters and state of an optimizer from rank `source`; None if that rank is itself behind.

    Raises:
        DeadlineError: No more of the reply arrived for `deadline_s`, or nothing at all for `patience_s`.
        ChannelError: The reply cannot be read.
    """
    caller = Caller(keyring, source)
    try:
        return ask(caller, source, optimizer_id, deadline_s, state_too=True, min_step=min_step, patience_s=patience_s)
    finally:
        caller.close()


@dataclass(slots=True)
class PacedReplies:
    """Chooses the rate of replies that no other rank waits for, from how long earlier ones took.

    Attributes:
        pace: Chooses the rate.
        size_bytes: Expected size of a reply: that of the largest so far.
    """

    pace: Pace
    size_bytes: int = 0

    @property
    def bytes_per_s(self) -> int:
        """Rate of the next reply, 0 for full speed."""
        return round(self.pace.bytes_per_s(self.size_bytes))

    def took(self, size_bytes: int, time_s: float, paced_bytes_per_s: int) -> None:
        """Note the size, time and rate of a complete reply."""
        self.size_bytes = max(self.size_bytes, size_bytes)
        self.pace.took(size_bytes, time_s, paced_bytes_per_s)


def ask(
    caller: Caller,
    source: int,
    optimizer_id: int,
    deadline_s: float,
    *,
    state_too: bool,
    min_step: int = 0,
    patience_s: float = math.inf,
    pace: PacedReplies | None = None,
    check: Callable[[], None] = lambda: None,
) -> Snapshot | None:
    """Get parameters of step `min_step` or later from rank `source`; None if it has none now.

    Args:
        caller: The connection.
        source: The rank.
        optimizer_id: Number of the optimizer.
        deadline_s: Longest time without a part of the reply that had not come before: on a slow link a whole state may
            take longer, while one whose connection breaks again and again never arrives.
        state_too: Whether the optimizer's state is wanted, too.
        min_step: The earliest step of use.
        patience_s: Longest time without a message from the rank.
        pace: Limits the rate of the reply; full speed if None.
        check: Called every `LOOK_S` seconds in which nothing arrives; raises an error that makes the wait pointless.

    Raises:
        DeadlineError: No more of the reply arrived for `deadline_s`, or nothing at all for `patience_s`.
        ChannelError: The reply cannot be read.
    """
    wait, heard_s = WaitTime(LOOK_S, lambda: f"parameters of rank {source}", lasts=True), 0.0
    most, progress_s = 0, 0.0  # Parts that have come of an attempt, and when the last new one did.
    reply = _Reply(source, caller.begin())
    rate = pace.bytes_per_s if pace is not None else 0
    caller.socket.send(REQUEST.pack(reply.request, optimizer_id, state_too, min_step, rate))
    while not reply.complete:
        left_s = min(progress_s + deadline_s, heard_s + patience_s) - wait.count()
        if left_s <= 0.0:
            idle_s = wait.passed_s - min(heard_s, progress_s)
            raise DeadlineError(
                f"parameters of rank {source} were not complete after {wait.passed_s:.3g} s, the last {idle_s:.3g} s "
                f"without progress ({reply}); see its log, and whether its link is slow"
            )
        frames = caller.wait(time.monotonic() + min(left_s, LOOK_S))
        if frames is not None:
            heard_s = wait.count()
            reply.add(frames)
            if reply.received > most:
                most, progress_s = reply.received, heard_s
        elif caller.reopened():
            reply = _Reply(source, caller.begin())
            caller.socket.send(REQUEST.pack(reply.request, optimizer_id, state_too, min_step, rate))
        else:
            check()
    if pace is not None and reply.manifest:
        pace.took(len(reply.manifest) + len(reply.body), time.monotonic() - reply.began_s, rate)
    return unpack_snapshot(bytes(reply.manifest), bytes(reply.body)) if reply.manifest else None


class _Reply:
    """The parts received so far of the reply to one attempt of a request."""

    def __init__(self, source: int, request: int) -> None:
        self.request = request
        self.began_s = math.inf  # When its first message arrived.
        self.manifest = bytearray()
        self.body = bytearray()
        self._described = 0  # Bytes of the manifest.
        self._source = source
        self.received = 0  # Parts.
        self._total, self._size = 1, 0

    def __str__(self) -> str:
        return f"{len(self.manifest) + len(self.body)} of {self._size} bytes" if self.received else "no answer"

    @property
    def complete(self) -> bool:
        return self.received >= self._total

    def add(self, frames: list[bytes]) -> None:
        """Add a message of the server.

        Raises:
            ChannelError: It is malformed, or does not follow the previous ones.
        """
        if len(frames) == 1 and frames[0][:4] == PUSH_MAGIC:
            return  # A late gradient was sent twice, and this is the second answer.
        if len(frames) != 2 or len(frames[0]) != REPLY_HEADER.size:
            raise ChannelError("a tensor message has the wrong frames; expected a header and a payload")
        magic, protocol, request, number, total, offset, size = REPLY_HEADER.unpack(frames[0])
        if magic != _MAGIC or protocol != _PROTOCOL:
            raise ChannelError(f"a tensor message is of protocol {magic!r} {protocol}; expected {_PROTOCOL}")
        if request != self.request:
            return  # The reply to an earlier attempt, or to a request that was given up.
        if number != self.received or number >= total or size > _MAX_BODY_BYTES:
            raise ChannelError(f"a tensor message is number {number} of {total}; expected {self.received}")
        payload = frames[1]
        came = len(self.manifest) + len(self.body)
        if number == 0:
            self.began_s = time.monotonic()
            self._described, self._total, self._size = _manifest_size(payload), total, size
        elif (total, size) != (self._total, self._size) or offset != came or came + len(payload) > size:
            raise ChannelError(f"chunk {number} from rank {self._source} does not follow the {came} bytes before")
        else:
            (self.manifest if len(self.manifest) < self._described else self.body).extend(payload)
        self.received += 1
        if self.complete:
            self._check_sizes()

    def _check_sizes(self) -> None:
        if len(self.manifest) != self._described or self._described + len(self.body) != self._size:
            raise ChannelError(
                f"rank {self._source} sent a manifest of {len(self.manifest)} bytes and {len(self.body)} bytes of "
                f"tensors; it had announced {self._described} and {self._size - self._described}"
            )


def _manifest_size(payload: bytes) -> int:
    if payload and len(payload) != MANIFEST_SIZE.size:
        raise ChannelError(f"a reply begins with {len(payload)} bytes; expected the size of its manifest")
    return int(MANIFEST_SIZE.unpack(payload)[0]) if payload else 0
