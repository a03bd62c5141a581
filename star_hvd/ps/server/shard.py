"""One shard of one optimizer: receives pushes, executes the primary's orders, sends parameters back.

Every chunk has its own queue of orders: a chunk whose gradients are here is updated and sent back while others still
arrive. All shards execute the same sequence of orders, so every chunk of a reply has exactly the version it names.
"""

from __future__ import annotations

import logging
import os
import signal
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from star_hvd.compression import int8
from star_hvd.errors import ChannelError
from star_hvd.ps.common.layout import Layout
from star_hvd.ps.common.mirror import Mirror
from star_hvd.ps.common.optimizer_spec import OptimizerSpec, RowReader
from star_hvd.ps.common.validation import check_order
from star_hvd.ps.common.wire import Assembly, Kind
from star_hvd.ps.server.chunk_store import ChunkStore

__all__ = ["Outlet", "Shard", "ShardError"]

logger = logging.getLogger("star_hvd")
PushId = tuple[int, int]


class ShardError(Exception):
    """An update failed half-way, for example in the user's optimizer; the shard's state must not be used any more."""


class Outlet(Protocol):
    """Outputs of a shard; the server implements them."""

    def send(self, rank: int, kind: Kind, step: int, store: ChunkStore) -> None:
        """Send a chunk's current parameters to a rank, or its complete record if `kind` is `STATED`."""

    def send_none(self, rank: int, step: int, store: ChunkStore) -> None:
        """Answer a rank's `PULL` with a chunk's version only, without its parameters."""

    def arrived(self, rank: int, step: int, products: Sequence[float] | None) -> None:
        """Report to the primary that all chunks of a push are here."""

    def done(self, seq: int) -> None:
        """Report to the primary that all orders up to `seq` are executed."""


class _Running:
    """An order, and the number of chunks on which it has yet to be executed."""

    __slots__ = ("left", "order")

    def __init__(self, order: dict[str, Any], left: int) -> None:
        self.order, self.left = order, left


class Shard:
    """The chunks of one server and their queues of orders.

    Args:
        index: Which shard.
        layout: The whole layout.
        spec: The user's optimizer.
        mirror: Where every chunk is written after each update, None for nowhere.
        outlet: Outputs.
        guard: Whether pushes are compared with the recent updates.
        faults: For tests: `{"at": "after_journal" | "before_mirror" | "after_mirror" | "after_reply", "update": k}`
            kills this process while it makes version k + 1, at the middle chunk; `"at": "in_push"` while it receives
            that chunk of the first push of step k.
    """

    def __init__(
        self,
        index: int,
        layout: Layout,
        spec: OptimizerSpec,
        mirror: Mirror | None,
        outlet: Outlet,
        *,
        guard: bool = False,
        faults: dict[str, Any] | None = None,
    ) -> None:
        self.index = index
        self.layout = layout
        reader = RowReader(spec)
        self._reader, self.row_size = reader, reader.size
        self.stores = {c.index: ChunkStore(layout, c, spec, reader) for c in layout.of_server(index)}
        self.seeded = False
        self.duplicates = 0
        self.finished = 0
        self._mirror, self._outlet, self._faults = mirror, outlet, faults or {}
        self._queues: dict[int, deque[_Running]] = {chunk: deque() for chunk in self.stores}
        self._staged: dict[PushId, dict[int, torch.Tensor]] = {}
        self._seen: dict[PushId, set[int]] = {}
        self._parts: dict[tuple[int, int, int], Assembly] = {}
        self._over: dict[int, int] = {}
        self._seq = 0
        self._unseeded = set(self.stores)
        self._cut = False
        self._guard = guard
        self._watch(guard)
        if not self.stores:
            self.seeded = True

    # ---- parameters ---------------------------------------------------------------------------------------

    def seed(self, chunk: int, data: torch.Tensor) -> bool:
        """Load a chunk's initial state from a record's bytes. Return whether all chunks of the shard are seeded.

        Raises:
            ChannelError: The chunk is not of this shard, or the record is invalid.
        """
        if chunk not in self.stores:
            raise ChannelError(f"shard {self.index} got chunk {chunk}; expected one of {sorted(self.stores)[:20]}")
        if chunk in self._unseeded:
            self.stores[chunk].restore(data)
            self._write(chunk)
            self._unseeded.discard(chunk)
        if not self._unseeded and not self.seeded:
            self.seeded = True
            for each in self.stores:
                self._run(each)
        return self.seeded

    def recover(self) -> bool:
        """Load the mirror's records. Return False if any is missing: the shard must then be seeded again."""
        if self._mirror is None:
            return not self.stores
        found = {chunk: self._mirror.read(chunk + 1) for chunk in self.stores}
        if any(data is None for data in found.values()):
            return False
        for chunk, data in found.items():
            assert data is not None
            self.stores[chunk].restore(data)
        self._unseeded.clear()
        self.seeded = True
        self._seq = self.finished = self.written
        return True

    def check_row(self, row: Sequence[float] | None) -> None:
        """Check that a row of hyperparameters can be used; an integral one cannot be infinite, for example.

        Raises:
            ChannelError: The row cannot be used.
        """
        if row is not None:
            try:
                self._reader.values(row)
            except (OverflowError, ValueError, RuntimeError) as error:
                raise ChannelError(f"a row of hyperparameters cannot be used: {error}") from None

    @property
    def seq(self) -> int:
        """Number of the last order received."""
        return self._seq

    @property
    def written(self) -> int:
        """Number of the last order applied to the parameters of every chunk."""
        return min((store.seq for store in self.stores.values()), default=0)

    @property
    def known_pushes(self) -> dict[PushId, int]:
        """The pushes that are remembered, by rank and step, with the number of their chunks that have arrived."""
        return {push: len(chunks) for push, chunks in self._seen.items()}

    def _write(self, chunk: int) -> None:
        if self._mirror is not None:
            self.stores[chunk].mirrored = self._mirror.write(chunk + 1, self.stores[chunk].record())

    # ---- pushes -------------------------------------------------------------------------------------------

    def part(self, rank: int, step: int, chunk: int, offset: int, size: int, data: Any) -> None:
        """Receive a part of a chunk of a push.

        Raises:
            ChannelError: It fits no chunk of this shard.
        """
        store = self.stores.get(chunk)
        expected = self.layout.nbytes(store.chunk) if store is not None else -1
        small = int8.size_bytes(store.chunk.numel) if store is not None else -1
        if store is None or (size != expected and not size == small < expected):
            raise ChannelError(
                f"rank {rank} pushed {size} bytes of chunk {chunk}; expected {expected}, or {small} as int8 (-1: none)"
            )
        # A worker has one push in flight, so a part of an earlier push is a duplicate.
        if chunk in self._seen.get((rank, step), ()) or step <= self._over.get(rank, -1) or step < self._newest(rank):
            self.duplicates += 1
            return
        self.fault("in_push", step, chunk)
        dtype = self.layout.dtype(store.chunk)
        if offset == 0 and len(data) == size:
            whole = torch.frombuffer(data, dtype=torch.uint8)
            self._chunk(rank, step, store, _typed(whole, dtype) if size == expected else _decoded(whole, store))
            return
        key = (rank, step, chunk)
        assembly = self._parts[key] if key in self._parts else Assembly(size)
        if assembly.size != size:
            raise ChannelError(f"rank {rank} pushed chunk {chunk} as {assembly.size} bytes and as {size}")
        complete = assembly.add(offset, data)
        self._parts[key] = assembly  # Only now: a part that does not fit must leave nothing behind.
        if complete:
            del self._parts[key]
            whole = assembly.buffer
            self._chunk(rank, step, store, whole.view(dtype) if size == expected else _decoded(whole, store))

    def _newest(self, rank: int) -> int:
        """Return the step of a rank's newest push with at least one chunk here, -1 if there is none."""
        return max((step for each, step in self._seen if each == rank), default=-1)

    def _chunk(self, rank: int, step: int, store: ChunkStore, gradient: torch.Tensor) -> None:
        push, chunk = (rank, step), store.chunk.index
        if push not in self._seen:
            self._purge(rank, step)
        seen = self._seen.setdefault(push, set())
        seen.add(chunk)
        if step > store.applied.get(rank, -1) and not self._cut_off(push):
            self._staged.setdefault(push, {})[chunk] = gradient
            self._run(chunk)
        if len(seen) == len(self.stores):
            self._outlet.arrived(rank, step, self._products(push))

    def _cut_off(self, push: PushId) -> bool:
        """Return whether a push can no longer be applied: the servers were drained and no order waits for it."""
        if not self._cut:
            return False
        waiting = (run.order for queue in self._queues.values() for run in queue if run.order["op"] == "update")
        return not any([*push] == part[:2] for order in waiting for part in order["parts"])

    def _products(self, push: PushId) -> list[float] | None:
        staged = self._staged.get(push)
        if not self._guard or staged is None:
            return None
        values = [self.stores[chunk].compare(gradient) for chunk, gradient in staged.items()]
        return [sum(column) for column in zip(*values, strict=True)]

    def _purge(self, rank: int, step: int) -> None:
        """Forget a rank's pushes before `step`: each was answered, or abandoned by its rank (`Client.give`)."""
        for push in [push for push in self._seen if push[0] == rank and push[1] < step]:
            del self._seen[push]
        for push in [push for push in self._staged if push[0] == rank and push[1] < step]:
            del self._staged[push]
        for key in [key for key in self._parts if key[0] == rank and key[1] < step]:
            del self._parts[key]

    def whole(self) -> list[tuple[int, int, list[float] | None]]:
        """Return the complete, unapplied pushes as (rank, step, products), to report to a restarted primary."""
        complete = [push for push, seen in self._seen.items() if len(seen) == len(self.stores)]
        return [(rank, step, self._products((rank, step))) for rank, step in complete]

    # ---- orders -------------------------------------------------------------------------------------------

    def order(self, order: dict[str, Any]) -> None:
        """Execute an order of the primary; ignore one that was received before.

        Raises:
            ChannelError: The order is invalid; no part of it was executed.
        """
        check_order(order, self.row_size)
        self.check_row(order.get("row"))
        if order["seq"] <= self._seq:
            return
        self._seq = order["seq"]
        kind = order["op"]
        if kind in ("drop", "guard"):
            self._at_once(order)
        if not self.stores:
            self._done(order["seq"])
            return
        running = _Running(order, len(self.stores))
        for chunk in reversed(self._queues):  # The next forward pass needs the last buckets first.
            self._queues[chunk].append(running)
            self._run(chunk)

    def _at_once(self, order: dict[str, Any]) -> None:
        rank, step = order.get("rank", -1), order.get("step", -1)
        if order["op"] == "drop":
            self._over[rank] = max(step, self._over.get(rank, -1))
            self._staged.pop((rank, step), None)
        else:
            self._guard = bool(order["on"])
            self._watch(self._guard)

    def _watch(self, on: bool) -> None:
        for store in self.stores.values():
            store.watch(on)

    def _run(self, chunk: int) -> None:
        """Execute a chunk's queued orders up to the first one that waits for a push."""
        if not self.seeded:
            return
        queue = self._queues[chunk]
        while queue and self._execute_checked(queue[0].order, self.stores[chunk]):
            running = queue.popleft()
            running.left -= 1
            if running.left == 0:
                self._finish(running.order)

    def _execute_checked(self, order: dict[str, Any], store: ChunkStore) -> bool:
        try:
            return self._execute(order, store)
        except Exception as error:  # The user's optimizer may raise anything, half-way.
            raise ShardError(f"{type(error).__name__}: {error}") from error

    def _execute(self, order: dict[str, Any], store: ChunkStore) -> bool:
        """Execute an order on a chunk; False if it waits for a push."""
        kind = order["op"]
        if kind == "update":
            if store.version > order["version"]:
                return True  # It was already in the mirror when this process started.
            return self._update(order, store)
        if kind == "send" and order.get("only") in (None, self.index):
            for rank, step in order["to"]:
                self._outlet.send(rank, Kind.PARAMS, step, store)
        elif kind == "pull" and (order.get("empty") or order.get("known") == store.version):
            self._outlet.send_none(order["rank"], order["request"], store)
        elif kind in ("pull", "state"):
            self._outlet.send(order["rank"], Kind.PULLED if kind == "pull" else Kind.STATED, order["request"], store)
        return True

    def _update(self, order: dict[str, Any], store: ChunkStore) -> bool:
        chunk = store.chunk.index
        factors, buffers = [], []
        for rank, step, factor in order["parts"]:
            gradient = self._staged.get((rank, step), {}).get(chunk)
            if gradient is None:
                return False
            factors.append(factor)
            buffers.append(gradient)
        if not any(factors):  # Every rank skipped the step, say. A zero gradient would move momentum and decay weights.
            factors, buffers = [], []
        store.apply(factors, buffers, order.get("row"), order["lr_factor"])
        store.seq = order["seq"]
        for rank, step, _ in order["parts"]:
            store.applied[rank] = step
            self._staged.get((rank, step), {}).pop(chunk, None)
        self.fault("before_mirror", order["version"], chunk)
        self._write(chunk)
        self.fault("after_mirror", order["version"], chunk)
        for rank, step in order["send"]:
            self._outlet.send(rank, Kind.PARAMS, step, store)
        self.fault("after_reply", order["version"], chunk)
        return True

    def _finish(self, order: dict[str, Any]) -> None:
        if order["op"] == "update":
            for rank, step, _ in order["parts"]:
                self._staged.pop((rank, step), None)
                self._seen.pop((rank, step), None)
                self._over[rank] = max(step, self._over.get(rank, -1))
        elif order["op"] == "cut":
            self._cut = True
            self._staged.clear()
            self._parts.clear()
        self._done(order["seq"])

    def _done(self, seq: int) -> None:
        self.finished = seq
        self._outlet.done(seq)

    def fault(self, where: str, update: int, chunk: int | None = None) -> None:
        """For tests: kill this process here if `faults` says so."""
        if self._faults.get("at") == where and self._faults.get("update") == update:
            held = list(self.stores)
            if chunk in (None, held[len(held) // 2]):
                os.kill(os.getpid(), signal.SIGKILL)


def _decoded(data: torch.Tensor, store: ChunkStore) -> torch.Tensor:
    """Decode an int8 gradient in the dtype its rank used to compute the residual; return it in the parameters'."""
    decoded = int8.decode(data.numpy().data, store.chunk.numel, store.wide)
    return decoded.to(store.params.dtype)


def _typed(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """View a message's bytes as `dtype`; copied where its address is not aligned."""
    if data.data_ptr() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype)
