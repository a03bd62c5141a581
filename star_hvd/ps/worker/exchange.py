"""A worker's request and its partial answer: chunks from all shards, a push's result from the primary."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from star_hvd.engine.records import Snapshot
from star_hvd.errors import ChannelError
from star_hvd.ps.common.layout import Layout, LayoutError, State
from star_hvd.ps.common.record import read_record
from star_hvd.ps.common.validation import check_push_result
from star_hvd.ps.common.wire import PART_BYTES, Gathering, Header, Kind, parts

_STATE_TIMES, _STATE_BYTES = 64, 16 << 20
"""Limit on a chunk's record: this multiple of its parameters plus a constant. Adam's state is twice the size of the
parameters, four times with half precision."""

__all__ = ["Exchange", "Reply", "StateExchange"]


@dataclass(slots=True)
class Reply:
    """The servers' answer.

    Attributes:
        kind: `params`, `dropped`, `moved` or `interrupted`; `known` if a request for parameters needed none.
        version: Version of the parameters; with `moved` the final one.
        plan_id: Id of the servers' active plan; with `moved` the one they were drained for.
        applied: Whether the push is in the parameters.
        reason: Why a push was dropped.
        params: Flat parameters per bucket, without the weight; overwritten by the next push.
        notes: Updates since the last answer: `version`, `ranks`, `staleness` (per rank), `gradients`, `damped`, `loss`.
    """

    kind: str
    version: int = 0
    plan_id: int = 0
    applied: bool = False
    reason: str = ""
    params: list[torch.Tensor] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)


class Exchange:
    """A partially received answer.

    The connection's thread receives into it without a lock, while other threads ask whether it is complete: so what
    they ask is one operation, and of a message the parameters and the version come before the note that it is here.

    Args:
        layout: The layout.
        flats: Flat tensors that receive the parameters, per bucket.
        kind: Kind of the messages that carry the parameters.
        known: Version that this rank already has, whose chunks need not be sent; None if it has none.
        empty: Whether only the answer is wanted, without parameters.
    """

    def __init__(
        self,
        layout: Layout,
        flats: list[torch.Tensor],
        kind: Kind = Kind.PARAMS,
        known: int | None = None,
        empty: bool = False,
    ) -> None:
        self._layout, self._kind = layout, kind
        self._known, self._empty = known, empty
        self._not_sent: set[int] = set()
        self._bytes = [flat.view(torch.uint8) for flat in flats]
        self._flats = flats
        self._push_result: dict[str, Any] | None = None
        self._missing: set[tuple[int, int]] = set()
        self._left: list[int] = []  # Parts missing, per bucket.
        self._versions: set[int] = set()
        self.reset()

    def reset(self) -> None:
        """Start over: everything is missing."""
        self._versions.clear()
        self._not_sent.clear()
        self._missing = {
            (chunk.index, begin) for chunk in self._layout.chunks for begin, _ in parts(self._layout.nbytes(chunk))
        }
        self._left = [0] * len(self._layout.buckets)
        for chunk, _ in self._missing:
            self._left[self._layout.chunks[chunk].bucket] += 1

    @property
    def asks(self) -> dict[str, Any]:
        """Contents of the request message."""
        return {"known": self._known, "empty": self._empty} if self._known is not None or self._empty else {}

    @property
    def mixed(self) -> bool:
        """Whether some chunks were sent and others held back, which happens if a server restarted meanwhile."""
        return 0 < len(self._not_sent) < len(self._layout.chunks)

    def has(self, bucket: int) -> bool:
        """Return whether all of a bucket's parameters are here."""
        return not self._left[bucket]

    @property
    def promised(self) -> bool:
        """Whether a push has its result, and the answer lacks parameters at most."""
        return self._push_result is not None and self._push_result["kind"] in ("params", "dropped")

    @property
    def complete(self) -> bool:
        """Whether nothing is missing."""
        if self._kind != Kind.PARAMS:
            return not self._missing
        if self._push_result is None:
            return False
        return not self._missing or self._push_result["kind"] in ("moved", "error")

    @property
    def counts_at_the_end(self) -> bool:
        """Whether the servers were drained and this push is in their last update."""
        result = self._push_result
        return result is not None and result["kind"] == "moved" and bool(result["applied"])

    def describe(self) -> str:
        """Describe what is missing, for an error."""
        result = "" if self._kind != Kind.PARAMS or self._push_result is not None else ", and the push's result"
        missing = tuple(self._missing)  # In one operation: messages arrive meanwhile.
        servers = sorted({self._layout.chunks[chunk].server for chunk, _ in missing})
        return f"{len(missing)} messages of servers {servers} are missing{result}"

    def set_result(self, result: dict[str, Any]) -> None:
        """Receive the primary's result of the push.

        Raises:
            ChannelError: The result is invalid.
        """
        check_push_result(result)
        self._push_result = result

    def add(self, header: Header, data: Any) -> None:
        """Receive a part of a chunk.

        Raises:
            ChannelError: It does not fit.
        """
        if header.chunk >= len(self._layout.chunks):
            raise ChannelError(f"a server sent chunk {header.chunk}; there are {len(self._layout.chunks)}")
        chunk = self._layout.chunks[header.chunk]
        if header.size == 0 and self._layout.nbytes(chunk) and self.asks:
            self._note_none(header)
            return
        size, end = self._layout.nbytes(chunk), header.offset + len(data)
        if header.size != size or header.offset % PART_BYTES or end != min(size, header.offset + PART_BYTES):
            raise ChannelError(f"{len(data)} of {header.size} bytes at {header.offset} do not fit a chunk of {size}")
        key = (header.chunk, header.offset)
        if key in self._missing:
            begin = chunk.start * self._layout.dtype(chunk).itemsize + header.offset
            self._bytes[chunk.bucket][begin : begin + len(data)].copy_(torch.frombuffer(data, dtype=torch.uint8))
            self._versions.add(header.version)
            self._missing.discard(key)
            self._left[chunk.bucket] -= 1

    def _note_none(self, header: Header) -> None:
        """Note a chunk that the server held back because the request allowed it."""
        if not self._empty and header.version != self._known:
            raise ChannelError(f"a server kept a chunk of version {header.version} back; expected {self._known}")
        # Its own parts only: all that is missing may be tens of thousands of parts, and there is a note per chunk.
        own = parts(self._layout.nbytes(self._layout.chunks[header.chunk]))
        missing = {key for begin, _ in own if (key := (header.chunk, begin)) in self._missing}
        if missing:
            self._not_sent.add(header.chunk)
            self._versions.add(header.version)
            self._missing -= missing
            self._left[self._layout.chunks[header.chunk].bucket] -= len(missing)

    @property
    def version(self) -> int:
        """Version of the parameters; the lowest if chunks differ, which can happen after a server's restart."""
        return min(self._versions, default=0)

    def reply(self) -> Reply:
        """Return the answer; while parameters are missing, its version is that of the result."""
        partial = bool(self._missing)  # Before the version: the last messages may arrive between the two.
        version = self.version
        if self._not_sent:
            return Reply("known", version)
        if self._push_result is None:
            return Reply("params", version, params=self._flats)
        kind = str(self._push_result["kind"])
        moved = kind in ("moved", "error")
        return Reply(
            kind,
            int(self._push_result["version"]) if moved or partial else version,
            int(self._push_result["plan_id"]),
            bool(self._push_result["applied"]),
            str(self._push_result["reason"]),
            [] if moved else self._flats,
            list(self._push_result["notes"]),
        )


class StateExchange(Exchange):
    """Parameters and optimizer state: a record per chunk."""

    def __init__(self, layout: Layout) -> None:
        self._parts: dict[int, Gathering] = {}
        self._whole: dict[int, torch.Tensor] = {}
        super().__init__(layout, [], kind=Kind.STATED)

    def reset(self) -> None:
        self._parts.clear()
        self._whole.clear()

    @property
    def complete(self) -> bool:
        return len(self._whole) == len(self._layout.chunks)

    def describe(self) -> str:
        """Describe what is missing, for an error."""
        return f"{len(self._layout.chunks) - len(self._whole)} of {len(self._layout.chunks)} chunks are missing"

    def add(self, header: Header, data: Any) -> None:
        if header.chunk >= len(self._layout.chunks):
            raise ChannelError(f"a server sent chunk {header.chunk}; there are {len(self._layout.chunks)}")
        chunk = self._layout.chunks[header.chunk]
        if header.size > _STATE_TIMES * self._layout.nbytes(chunk) + _STATE_BYTES:
            raise ChannelError(f"a server sent {header.size} bytes for a chunk of {self._layout.nbytes(chunk)}")
        gathering = self._parts.setdefault(header.chunk, Gathering(header.size))
        if header.size != gathering.size:
            raise ChannelError(f"chunk {header.chunk} comes as {header.size} and as {gathering.size} bytes")
        whole = gathering.add(header.offset, data)
        if whole is not None:
            self._whole[header.chunk] = whole

    def snapshot(self) -> Snapshot:
        """Return the complete state, in the parameters' shapes.

        Raises:
            ChannelError: A record is damaged, or the chunks are of different versions.
        """
        params: dict[int, torch.Tensor] = {}
        states: dict[int, list[State]] = {}
        versions = set()
        for chunk in self._layout.chunks:
            like = torch.empty(chunk.numel, dtype=self._layout.dtype(chunk), device="cpu")
            record = read_record(self._whole[chunk.index], like)
            versions.add(record[0])
            params[chunk.index], states[chunk.index] = record[4], record[5]
        if len(versions) > 1:
            raise ChannelError(f"the servers sent chunks of versions {sorted(versions)}; expected a single one")
        version = versions.pop() if versions else 0
        try:
            return Snapshot(version, self._layout.join_params(params), self._layout.join_state(states))
        except LayoutError as error:
            raise ChannelError(f"the servers sent an inconsistent state: {error}") from error
