"""Late gradients from a rank outside the subgroup to its parent, and current parameters back, on a tensor socket.

A push is a sequence of two-frame messages: a fixed binary header and at most one chunk of raw bytes. A push that takes
long is sent below the link's rate, as are the parameters sent back (`scheduler.transmission.pace`): otherwise the
members, whose negotiation crosses that link in every step, would wait behind it. The parent answers the last message
with the first step whose parameters will contain the gradient.

After a broken connection the whole push is resent over a new socket, as its next attempt: on the old one it would wait
behind the rest of the attempt before, of which the parent has no use. A push that takes longer than any connection
lasts is thus never complete. The parent remembers the last push of every link and repeats its answer without accepting
the push twice. A child has two links at once if its former mode ended in the middle of a push: this push goes on while
the next mode sends on its own link. (This is not a `Stream`: the training thread cannot acknowledge while it computes,
and one request at a time needs no more than this.)
"""

from __future__ import annotations

import math
import secrets
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from scheduler.transmission import pace as pacing
from scheduler.transmission.decision import PACE_DOWN, PACE_UP, Decision
from star_hvd.channel.keys import Keyring
from star_hvd.channel.state_transfer import LOOK_S, PUSH_MAGIC, Caller, PacedReplies, ask, next_due_s
from star_hvd.engine.records import Snapshot
from star_hvd.errors import ChannelError, DeadlineError
from star_hvd.telemetry.wait_time import WaitTime

__all__ = [
    "MAX_PROBE_BYTES",
    "PROBE",
    "PUSH_HEADER",
    "LatePushes",
    "Packer",
    "ParentLink",
    "is_measured",
    "probe",
    "rate_of",
    "take_weights",
    "weights_size_bytes",
]

MAX_PROBE_BYTES = 64 * 1024 * 1024
PROBE = 0xFFFFFFFF  # Reserved optimizer number: pushes to it measure the link.

PUSH_HEADER = struct.Struct("<4sBIIQQIQQQ")
"""Of every part of a late gradient: magic, protocol, optimizer, rank, link, push, attempt, version, offset, size."""

_MAGIC, _PROTOCOL = PUSH_MAGIC, 2
_ACK = struct.Struct("<4sQQ")  # magic, push, first version that contains it
_MAX_PUSH_BYTES = 1 << 40
_WEIGHT_BYTES = 8
_MAX_VERSION = 1 << 62
_MOST_LINKS = 4096  # Links whose last push is remembered.
_MOST_AT_ONCE = 2  # Links of one child on which a push may be incomplete.
_MOST_BURSTS, _BURST_PAUSE_S, _BURSTS_S = 6, 0.015, 0.25
_ITS_OWN = 3.0  # A full burst that takes this many times an empty one's time is limited by the link, not by threads.
_LINKS_PART = 0.1  # Least part of a burst's time that is attributed to the link.


class Packer(Protocol):
    """Encodes pushes, and receives how long each one took (`star_hvd.compression.pushes.PushCodec`)."""

    def pack(self, flats: Sequence[torch.Tensor]) -> bytes: ...
    def took(self, time_s: float) -> None: ...


class ParentLink:
    """A child's connection to its parent; used by one thread at a time.

    Args:
        keyring: Keys and addresses of the job.
        parent: The parent's rank.
        rank: This rank.
        optimizer_id: Number of the optimizer.
        chunk_bytes: Size of a message.
        pace_bytes_per_s: Rate of pushes; 0 to choose it from how long they take.
        deadline_s: Longest wait for an answer.
        packer: Encodes pushes; with None gradients are sent unchanged.
        link_bytes_per_s: Rate of this rank's link as measured earlier, 0 if unknown.
        paced: Whether transfers that take long are sent below the link's rate.
        check: Called every few seconds of a wait; raises an error that makes it pointless, as the loss of a rank does.
        note: Called with every clear change of the pace.
    """

    def __init__(
        self,
        keyring: Keyring,
        parent: int,
        rank: int,
        optimizer_id: int,
        *,
        chunk_bytes: int,
        pace_bytes_per_s: float,
        deadline_s: float,
        packer: Packer | None = None,
        link_bytes_per_s: float = 0.0,
        paced: bool = True,
        check: Callable[[], None] = lambda: None,
        note: Callable[[Decision], None] = lambda decision: None,
    ) -> None:
        self.parent = parent
        self._check, self._note = check, note
        self._packer = packer
        self._rank, self._optimizer_id = rank, optimizer_id
        self._chunk_bytes = chunk_bytes
        self._pace_bytes_per_s = pace_bytes_per_s
        self._deadline_s = deadline_s
        self._keyring = keyring
        self._caller = self._connect()
        self._link = secrets.randbits(64)
        self._pushes = 0
        self._up = pacing.Pace(link_bytes_per_s) if paced and not pace_bytes_per_s else None
        self._down = PacedReplies(pacing.Pace(link_bytes_per_s)) if paced else None

    def _connect(self) -> Caller:
        return Caller(self._keyring, self.parent)

    def push(self, flats: Sequence[torch.Tensor], version: int, weights: Sequence[float] = ()) -> int:
        """Send one gradient, one flat buffer per bucket. Return the first version that will contain it.

        Args:
            flats: The buffers.
            version: Step of the parameters it was computed on.
            weights: Their weights, which buffers of bfloat16 round; sent behind them.

        Raises:
            DeadlineError: The parent did not answer in time.
        """
        began_s = time.monotonic()
        wait = WaitTime(LOOK_S, lambda: f"rank {self.parent} to take a late gradient", lasts=True)
        self._pushes += 1
        body = self._packer.pack(flats) if self._packer is not None else _as_they_are(flats)
        body += struct.pack(f"<{len(weights)}d", *weights)
        up = self._up
        pace = up.bytes_per_s(len(body)) if up is not None else self._pace_bytes_per_s
        measures = up is not None and up.measures(len(body))
        self._caller.begin()
        attempt = 0
        while True:
            sent_s = time.monotonic()
            contained = self._answer(wait) if self._send(body, version, attempt, pace, wait) else None
            if contained is not None:
                now_s = time.monotonic()
                if up is not None:
                    up.took(len(body), now_s - sent_s, pace)
                    self._tell(up.news(PACE_UP, len(body)))
                if self._down is not None:
                    self._down.size_bytes = self._down.size_bytes or len(body)
                if self._packer is not None and not measures:  # The time of a measuring push is not comparable.
                    self._packer.took(now_s - began_s)
                return contained
            self._check_limit(wait)
            self._caller.close()  # With what it has queued of this attempt.
            self._caller = self._connect()
            attempt += 1

    def _send(self, body: bytes, version: int, attempt: int, pace: float, wait: WaitTime) -> bool:
        """Send a push. Return whether its connection held: if not, the parent has no use for the rest."""
        size = pacing.chunk_bytes(pace, self._chunk_bytes)
        due_s = time.monotonic()
        for offset in range(0, max(1, len(body)), size):
            part = body[offset : offset + size]
            names = (self._optimizer_id, self._rank, self._link, self._pushes, attempt)
            header = PUSH_HEADER.pack(_MAGIC, _PROTOCOL, *names, version, offset, len(body))
            self._caller.socket.send_multipart([header, part])
            if pace:
                due_s = next_due_s(due_s, len(part), pace)
                time.sleep(max(0.0, due_s - time.monotonic()))
            wait.count()
            if self._caller.reopened():
                return False
        return True

    def _answer(self, wait: WaitTime) -> int | None:
        """Return the answer to the last push, None if its connection broke."""
        while True:
            self._check_limit(wait)
            frames = self._caller.wait(time.monotonic() + min(LOOK_S, self._deadline_s - wait.passed_s))
            if frames is None:
                if self._caller.reopened():
                    return None
                self._check()
            if frames is not None and len(frames) == 1 and len(frames[0]) == _ACK.size:
                magic, push, contained = _ACK.unpack(frames[0])
                if magic == _MAGIC and push == self._pushes:
                    return int(contained)

    def _check_limit(self, wait: WaitTime) -> None:
        if wait.count() >= self._deadline_s:
            raise DeadlineError(
                f"rank {self.parent} did not accept a late gradient within {self._deadline_s:g} s; see its log, or "
                "raise Config.step_deadline_s"
            )

    def state(self, min_step: int, *, state_too: bool, awaited: bool = False) -> Snapshot | None:
        """Get parameters of step `min_step` or later, None if the parent has none now; requests them once.

        Args:
            min_step: The earliest step of use.
            state_too: Whether the optimizer's state is wanted, too.
            awaited: Whether all ranks wait for this one; the reply then comes at full speed.

        Raises:
            DeadlineError: No more of the parent's answer arrived within the deadline.
        """
        pace = None if awaited or state_too else self._down
        found = ask(
            self._caller, self.parent, self._optimizer_id, self._deadline_s, state_too=state_too, min_step=min_step,
            pace=pace, check=self._check,
        )  # fmt: skip
        if pace is not None:
            self._tell(pace.pace.news(PACE_DOWN, pace.size_bytes))
        return found

    def _tell(self, decision: Decision | None) -> None:
        if decision is not None:
            self._note(decision)

    def close(self) -> None:
        """Close the socket."""
        self._caller.close()


def weights_size_bytes(n_buckets: int) -> int:
    """Return the size of the weights behind the buffers of a push."""
    return _WEIGHT_BYTES * n_buckets


def take_weights(body: bytearray, n_buckets: int) -> list[float]:
    """Cut the weights off a push, which leaves its buffers as they were encoded; return them.

    Raises:
        ChannelError: It is shorter than its weights, or these are none.
    """
    start = len(body) - weights_size_bytes(n_buckets)
    if start < 0:
        raise ChannelError(f"a late gradient has {len(body)} bytes; expected {n_buckets} weights behind its buffers")
    weights = list(struct.unpack(f"<{n_buckets}d", body[start:]))
    if not all(0.0 <= weight < math.inf for weight in weights):
        raise ChannelError(f"a late gradient has the weights {weights}; expected finite numbers from 0")
    del body[start:]
    return weights


def _as_they_are(flats: Sequence[torch.Tensor]) -> bytes:
    return b"".join(flat.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() for flat in flats)


def probe(keyring: Keyring, target: int, rank: int, size_bytes: int, *, chunk_bytes: int, deadline_s: float) -> float:
    """Measure the rate in bytes per second at which this rank can send to another one, alongside other traffic.

    A message's time includes thread scheduling at both ends: a training thread that holds the interpreter lock
    typically costs 5 ms, and 512 KB in 20 ms look like 26 MB/s on any link. So several bursts are sent, each after an
    empty one; the difference between the fastest of each kind is the link's time. One burst is enough if it takes
    long: reductions cross the same link meanwhile, and the decision that would relieve it waits for the rate.

    Raises:
        DeadlineError: There was no answer within `deadline_s`.
    """
    link = ParentLink(
        keyring, target, rank, PROBE, chunk_bytes=chunk_bytes, pace_bytes_per_s=0.0, deadline_s=deadline_s, paced=False
    )

    empty = [torch.zeros(1, dtype=torch.uint8, device="cpu")]
    full = [torch.zeros(size_bytes, dtype=torch.uint8, device="cpu")]

    def time_s(flats: Sequence[torch.Tensor]) -> float:
        began_s = time.monotonic()
        link.push(flats, 0)
        return time.monotonic() - began_s

    try:
        time_s(empty)  # The handshake is not the link's rate.
        empty_s: list[float] = []
        full_s: list[float] = []
        began_s = time.monotonic()
        while len(full_s) < _MOST_BURSTS:
            empty_s.append(time_s(empty))
            full_s.append(time_s(full))
            if is_measured(empty_s, full_s, time.monotonic() - began_s):
                break  # Do not keep a slow link busy.
            time.sleep(_BURST_PAUSE_S)
        return rate_of(size_bytes, empty_s, full_s)
    finally:
        link.close()


def is_measured(empty_s: Sequence[float], full_s: Sequence[float], spent_s: float) -> bool:
    """Return whether a link is so slow that these bursts have measured it well enough.

    Args:
        empty_s: Times of the one-byte bursts, one per full burst.
        full_s: Times of the full bursts.
        spent_s: Time since the first burst started.
    """
    alone = full_s[-1] > max(_BURSTS_S, _ITS_OWN * empty_s[-1])
    return alone or (len(full_s) > 1 and spent_s > _BURSTS_S)


def rate_of(size_bytes: int, empty_s: Sequence[float], full_s: Sequence[float]) -> float:
    """Return the rate of a link in bytes per second, from the times of some bursts.

    Args:
        size_bytes: Size of a full burst.
        empty_s: Times of the one-byte bursts.
        full_s: Times of the full bursts.
    """
    fastest_s = min(full_s)
    # If empty bursts take nearly as long, most of the time is not the link's.
    return size_bytes / max(1e-9, fastest_s - min(empty_s), _LINKS_PART * fastest_s)


_Link = tuple[int, int, int]  # Optimizer, rank and link.


@dataclass(slots=True)
class _Partial:
    attempt: tuple[int, int]  # Push and attempt.
    body: bytearray


class LatePushes:
    """The parent's side: assembles chunks and delivers each complete gradient once.

    Args:
        accept: Gets (optimizer_id, rank, version, bytes) and returns the first version that will contain the gradient.
        most_bytes: Returns the size of an optimizer's largest gradient, by its number; a larger one is refused at its
            first chunk, before memory is allocated.
    """

    def __init__(
        self,
        accept: Callable[[int, int, int, bytearray], int],
        most_bytes: Callable[[int], int] = lambda optimizer_id: _MAX_PUSH_BYTES,
    ) -> None:
        self._accept, self._most_bytes = accept, most_bytes
        self._partial: dict[_Link, _Partial] = {}
        self._done: dict[_Link, tuple[int, int]] = {}  # Push and the answer, the latest last.

    def take(self, frames: Sequence[bytes]) -> bytes | None:
        """Handle a child's message. Return the answer to send, None before the last chunk.

        Raises:
            ChannelError: The message is invalid or out of sequence; no part of it is kept.
        """
        if len(frames) != 2 or len(frames[0]) != PUSH_HEADER.size:
            sizes, expected = [len(frame) for frame in frames], PUSH_HEADER.size
            raise ChannelError(f"a late gradient has frames of {sizes} bytes; expected {expected} and a payload")
        magic, protocol, optimizer_id, rank, link, push, attempt, version, offset, size = PUSH_HEADER.unpack(frames[0])
        if magic != _MAGIC or protocol != _PROTOCOL or size > _MAX_PUSH_BYTES or version > _MAX_VERSION:
            got = f"protocol {protocol}, {size} bytes and step {version}"
            raise ChannelError(f"a late gradient has {got}; expected protocol {_PROTOCOL} and possible sizes")
        if size > self._most_bytes(optimizer_id):
            raise ChannelError(f"a late gradient of {size} bytes; expected at most {self._most_bytes(optimizer_id)}")
        key = (optimizer_id, rank, link)
        done = self._done.get(key)
        if done is not None and push <= done[0]:
            whole = push == done[0] and offset + len(frames[1]) >= size
            return _ACK.pack(_MAGIC, push, done[1]) if whole else None
        body = self._collect(key, (push, attempt), offset, size, frames[1])
        if body is None:
            return None
        contained = self._accept(optimizer_id, rank, version, body)
        self._done.pop(key, None)
        self._done[key] = (push, contained)
        for kept in (self._done, self._partial):
            while len(kept) > _MOST_LINKS:
                del kept[next(iter(kept))]
        return _ACK.pack(_MAGIC, push, contained)

    def _collect(self, key: _Link, attempt: tuple[int, int], offset: int, size: int, part: bytes) -> bytearray | None:
        """Add a chunk. Return the whole gradient if this was its last chunk, otherwise None."""
        partial = self._partial.get(key)
        if partial is not None and partial.attempt[0] == attempt[0] and attempt < partial.attempt:
            return None  # Left over from a broken connection; the push is resent.
        if partial is None or partial.attempt != attempt:
            partial = self._partial[key] = _Partial(attempt, bytearray())
        if offset > len(partial.body):
            del self._partial[key]  # A part was lost with its connection; the push is resent.
            return None
        if offset != len(partial.body) or offset + len(part) > size:
            del self._partial[key]
            raise ChannelError(f"a late gradient has a chunk at byte {offset}; expected {len(partial.body)} of {size}")
        partial.body += part
        if len(partial.body) < size:
            if offset == 0:
                self._forget_older(key)
            return None
        del self._partial[key]
        return partial.body

    def _forget_older(self, key: _Link) -> None:
        """Forget incomplete pushes of a child's older links, each as large as its gradient: they may never end."""
        links = [each for each in self._partial if each[:2] == key[:2] and each != key]
        for each in links[: max(0, len(links) + 1 - _MOST_AT_ONCE)]:
            del self._partial[each]
