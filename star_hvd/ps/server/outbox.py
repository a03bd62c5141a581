"""Sends a server's chunks, in buffers that are reused once acknowledged, and its short messages.

A stream keeps references to what it sends until the receiver has acknowledged it. A buffer is reused only when no
reference is left: `Lent` tracks the references to every part, including the stream's.
"""

from __future__ import annotations

from typing import Any

import msgpack
import torch

from star_hvd.channel.link import Router
from star_hvd.ps.common.wire import Header, Kind, Lent, pack, parts
from star_hvd.ps.server.chunk_store import ChunkStore

__all__ = ["Outbox"]

_POOLED = 256


class Outbox:
    """Sends on the server's ROUTER.

    A chunk is sent from the mirror's memory, which the next update does not overwrite; without a mirror it is copied
    once for all receivers. So is a complete record: every rank asks for those of all chunks when a mode ends. Messages
    for a peer that has not sent `HELLO` yet are parked until then.

    Args:
        router: Used by the calling thread.
    """

    def __init__(self, router: Router) -> None:
        self._router = router
        self._known: set[bytes] = set()
        self._parked: dict[bytes, dict[tuple[int, ...], Any]] = {}
        self._pool: list[Lent] = []
        self._last: tuple[tuple[int, ...], Lent] | None = None
        self._records: dict[tuple[int, ...], tuple[int, Lent]] = {}  # By chunk: version and complete record.

    def welcome(self, identity: bytes) -> None:
        """Send the parked messages of a peer that has sent `HELLO` or `JOIN`."""
        self._known.add(identity)
        for header, item in self._parked.pop(identity, {}).values():
            if isinstance(item, ChunkStore):
                self.chunk(identity, header._replace(version=item.version), item)
            elif item is None:
                self.none(identity, header)
            else:
                self.meta(identity, header, item)

    def forget(self, prefix: bytes) -> None:
        """Forget the peers of an ended session, by their identities' prefix; sent messages are still delivered."""
        self._router.forget(prefix)
        self._records.clear()
        self._known = {identity for identity in self._known if not identity.startswith(prefix)}
        self._parked = {identity: kept for identity, kept in self._parked.items() if not identity.startswith(prefix)}

    def discard_sent(self) -> None:
        """Release the memory of complete records that all their receivers have; called from time to time."""
        self._records = {place: kept for place, kept in self._records.items() if not kept[1].free()}

    def meta(self, identity: bytes, header: Header, values: dict[str, Any]) -> None:
        """Send a short message."""
        if identity in self._known:
            self._router.send(identity, [pack(header), msgpack.packb(values)])
        else:
            self._parked.setdefault(identity, {})[header.kind, header.step, header.chunk] = (header, values)

    def chunk(self, identity: bytes, header: Header, store: ChunkStore) -> None:
        """Send a chunk's current parameters, or its complete record if the message is `STATED`."""
        if identity not in self._known:
            self._parked.setdefault(identity, {})[header.kind, header.step, header.chunk] = (header, store)
            return
        buffer = self._filled(header, store)
        size = buffer.data.numel()
        for begin, end in parts(size):
            head = pack(header._replace(offset=begin, size=size))
            self._router.send(identity, [head, buffer.frame(begin, end)])

    def none(self, identity: bytes, header: Header) -> None:
        """Send a chunk's version only (in the header), without its parameters."""
        if identity in self._known:
            self._router.send(identity, [pack(header), b""])
        else:
            self._parked.setdefault(identity, {})[header.kind, header.step, header.chunk] = (header, None)

    def _filled(self, header: Header, store: ChunkStore) -> Lent:
        place = (header.optimizer_id, header.session, header.chunk)
        if place in self._records and self._records[place][0] != store.version:
            del self._records[place]
        if header.kind == Kind.STATED:
            return self._record(place, store)
        if store.mirrored is not None:
            return store.mirrored
        key = (*place, store.version)
        if self._last is not None and self._last[0] == key:
            return self._last[1]
        source = store.params.view(torch.uint8)
        buffer = self._take(source.numel())
        buffer.data.copy_(source)
        self._last = (key, buffer)
        return buffer

    def _record(self, place: tuple[int, ...], store: ChunkStore) -> Lent:
        if place not in self._records:
            record = store.record()
            buffer = Lent(torch.empty(record.nbytes, dtype=torch.uint8))  # Rare: not pooled.
            record.write(buffer.data)
            self._records[place] = (store.version, buffer)
        return self._records[place][1]

    def _take(self, size: int) -> Lent:
        self._last = None
        for position, buffer in enumerate(self._pool):
            if buffer.data.numel() == size and buffer.free():
                self._pool.append(self._pool.pop(position))
                return buffer
        buffer = Lent(torch.empty(size, dtype=torch.uint8))
        if len(self._pool) < _POOLED:
            self._pool.append(buffer)
        return buffer
