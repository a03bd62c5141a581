"""The fan-in tree: a parent adds its children's gradients to its own push and forwards the parameters.

The servers then receive one push per parent instead of one per worker. The tree is meant for updates that wait for all
ranks (x = n): a parent waits for all of its children, so a late child delays its siblings, as it would without it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgpack
import torch
import zmq

from star_hvd.channel.link import Router
from star_hvd.channel.reliable import TENSORS
from star_hvd.errors import ChannelError
from star_hvd.ps.common.auth import Door, Endpoint, JobKey
from star_hvd.ps.common.identities import worker_identity
from star_hvd.ps.common.layout import Layout
from star_hvd.ps.common.validation import check_push, check_push_result
from star_hvd.ps.common.wire import Assembly, Header, Kind, pack, read_meta, unpack

__all__ = ["Relay"]


class _Child:
    """A child's partially received push."""

    def __init__(self) -> None:
        self.step = -1
        self.meta: dict[str, Any] | None = None
        self.chunks: dict[int, torch.Tensor] = {}
        self.partial: dict[int, Assembly] = {}

    def begin(self, step: int) -> None:
        if step != self.step:
            self.step, self.meta = step, None
            self.chunks.clear()
            self.partial.clear()

    def drop(self) -> None:
        """Forget the push."""
        self.meta = None
        self.chunks.clear()
        self.partial.clear()


class Relay:
    """The parent's side of the tree; used on its client's thread.

    Args:
        context: The client's ZeroMQ context.
        key: The job's key.
        host: Address to listen on.
        optimizer_id, session: Of the client.
        layout: The layout.
        children: Ranks that push through this one.

    Attributes:
        router: Receives the children's messages.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        key: JobKey,
        host: str,
        optimizer_id: int,
        session: int,
        layout: Layout,
        children: Iterable[int],
    ) -> None:
        children = tuple(children)
        self._door = Door(context, key, host)
        self._optimizer_id, self._session, self._layout = optimizer_id, session, layout
        names = {worker_identity(optimizer_id, session, rank) for rank in children}
        self.router = Router(self._door.router, TENSORS, names.__contains__)
        self._children = {rank: _Child() for rank in children}
        self._absent: set[int] = set()
        self._answering: dict[int, int] = {}
        self._moved: dict[str, Any] | None = None

    @property
    def endpoint(self) -> Endpoint:
        """The endpoint that the children connect to."""
        return self._door.endpoint

    def close(self) -> None:
        """Stop listening."""
        self.router.bye()
        self._door.close()

    def take(self, frames: list[Any]) -> None:
        """Handle a child's message.

        Raises:
            ChannelError: The message is invalid.
        """
        if len(frames) != 3:
            raise ChannelError(f"a child sent {len(frames) - 1} frames; expected a header and a payload")
        header = unpack(frames[1])
        child = self._children.get(header.rank)
        expected = worker_identity(self._optimizer_id, self._session, header.rank)
        if child is None or frames[0].bytes != expected or (header.optimizer_id, header.session) != self._key:
            raise ChannelError(f"rank {header.rank} pushed to a parent; expected one of ranks {sorted(self._children)}")
        if header.kind == Kind.PUSH:
            meta = read_meta(frames[2])
            check_push(meta)
            child.begin(header.step)
            child.meta = meta
        elif header.kind == Kind.CHUNK:
            child.begin(header.step)
            self._chunk(child, header, frames[2].buffer)
        elif header.kind == Kind.PRESENCE:
            what = read_meta(frames[2]).get("what")
            self.note(header.rank, what == "present")
            if what == "withdrawn":
                child.drop()
        elif header.kind != Kind.HELLO:
            raise ChannelError(f"a parent got a message of kind {Kind(header.kind).name}; expected a worker's")
        if self._moved is not None and self._whole(child):
            self._send(header.rank, child.step, Header(Kind.VERDICT, *self._key), msgpack.packb(self._moved))

    @property
    def _key(self) -> tuple[int, int]:
        return self._optimizer_id, self._session

    def _chunk(self, child: _Child, header: Header, data: Any) -> None:
        if header.chunk >= len(self._layout.chunks):
            raise ChannelError(f"a child sent chunk {header.chunk}; there are {len(self._layout.chunks)}")
        chunk = self._layout.chunks[header.chunk]
        if header.size != self._layout.nbytes(chunk):
            raise ChannelError(f"a child sent {header.size} bytes of a chunk of {self._layout.nbytes(chunk)}")
        assembly = child.partial.setdefault(chunk.index, Assembly(header.size))
        if assembly.add(header.offset, data):
            child.chunks[chunk.index] = assembly.buffer.view(self._layout.dtype(chunk))
            del child.partial[chunk.index]

    def _whole(self, child: _Child) -> bool:
        return child.meta is not None and len(child.chunks) == len(self._layout.chunks)

    def note(self, rank: int, present: bool) -> None:
        """Note that a child is absent, or present again."""
        (self._absent.discard if present else self._absent.add)(rank)

    def ready(self) -> bool:
        """Whether the pushes of all present children are complete."""
        return all(self._whole(child) or rank in self._absent for rank, child in self._children.items())

    def add(self, meta: dict[str, Any], flats: list[torch.Tensor]) -> dict[str, Any]:
        """Add the children's gradients to `flats`; returns the announcement of the combined push."""
        metas = [meta]
        for rank, child in self._children.items():
            if not self._whole(child):
                continue
            assert child.meta is not None
            metas.append(child.meta)
            for index, gradient in child.chunks.items():
                chunk = self._layout.chunks[index]
                flats[chunk.bucket][chunk.start : chunk.stop].add_(gradient)
            self._answering[rank] = child.step
            child.drop()
        leader = max(metas, key=lambda each: int(each["own_steps"]) if each["row"] is not None else -1)
        losses = [(float(m["weight"]), float(m["loss"])) for m in metas if m["loss"] is not None]
        total = sum(weight for weight, _ in losses)
        return {
            "version": min(int(each["version"]) for each in metas),
            "weight": sum(float(each["weight"]) for each in metas),
            "count": sum(int(each["count"]) for each in metas),
            "own_steps": leader["own_steps"],
            "row": leader["row"],
            "loss": sum(weight * loss for weight, loss in losses) / total if total > 0.0 else None,
        }

    def forward(self, header: Header, payload: Any) -> None:
        """Forward the servers' answer to the children whose gradients are in the push, without copying it."""
        if header.kind == Kind.VERDICT:
            result = read_meta(payload)
            check_push_result(result)
            if result["kind"] == "moved":
                self._moved = {**result, "applied": False}
        for rank, step in self._answering.items():
            self._send(rank, step, header, payload)

    def done(self) -> None:
        """The push is answered completely."""
        self._answering.clear()

    def _send(self, rank: int, step: int, header: Header, payload: Any) -> None:
        head = pack(header._replace(rank=rank, step=step))
        self.router.send(worker_identity(*self._key, rank), [head, payload])
