"""Division of the parameters among the servers.

A chunk is a contiguous range of one bucket and the unit of updates and messages; a piece is a slice of one parameter
inside a chunk. Elementwise optimizers allow cuts anywhere; for all others a chunk holds whole tensors. Chunks are
assigned largest first, each to the server with the fewest bytes. If buckets are sent one by one, each is instead spread
over as many servers as possible: a bucket that all ranks push to one server at once waits for that server's link.
"""

from __future__ import annotations

import functools
import heapq
import importlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from star_hvd.engine.applier import ELEMENTWISE
from star_hvd.engine.buckets import Bucket, memory_format_of

__all__ = ["BucketLayout", "Chunk", "Layout", "LayoutError", "Piece", "class_path", "elementwise", "load_class"]

_ALIGN = 64
"""Parameters are cut at multiples of this many elements: a kernel's vector loop and its scalar remainder then cover the
same elements as without the cut, and results stay bitwise equal."""

_LEAST_PART_BYTES = 128 * 1024
"""A bucket is not cut into smaller parts only to be on every server. Measured once with 8 buckets and 4 hosts at 200
Mbit/s on two cores: an update took 754 ms with parts of 312 KB and 786 ms with 1 MiB chunks; for smaller buckets, 150
ms with parts of 31 KB and 138 ms uncut."""

_MOST_CHUNK_BYTES = (1 << 30) - (1 << 20)
"""A chunk is sent to its server together with its state, up to three times its size, in a message of at most 4 GiB."""

_MOST_ELEMENTS, _MOST_SERVERS = 1 << 42, 1 << 16

State = dict[str, Any]


class LayoutError(ValueError):
    """Servers do not support this model or optimizer; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A slice of one parameter.

    Attributes:
        param: Position of the parameter in the order of the buckets.
        start, stop: Elements of the parameter, in row-major order.
        group: Its parameter group.
        shape: Shape on the server: the parameter's own if the piece is all of it, otherwise one dimension.
    """

    param: int
    start: int
    stop: int
    group: int
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Chunk:
    """A range of one bucket that lives on one server.

    Attributes:
        index: Position among all chunks.
        bucket: Which bucket.
        start, stop: Elements of the bucket.
        server: Index of the shard.
        pieces: Its slices of parameters, in order, without gaps.
    """

    index: int
    bucket: int
    start: int
    stop: int
    server: int
    pieces: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """A bucket: its dtype, and per parameter its shape, group and order of dimensions in memory.

    The orders are not sent to servers: orders other than row-major are allowed for elementwise optimizers only.
    """

    dtype: torch.dtype
    shapes: tuple[tuple[int, ...], ...]
    groups: tuple[int, ...]
    orders: tuple[tuple[int, ...], ...] = field(default=(), compare=False)

    @property
    def numel(self) -> int:
        """Number of elements, without the weight."""
        return sum(math.prod(shape) for shape in self.shapes)


@dataclass(frozen=True)
class Layout:
    """All chunks of one optimizer.

    Attributes:
        buckets: The buckets, in the optimizer's order.
        chunks: The chunks, in order of bucket and position.
        n_servers: Number of shards; some are empty if there are more shards than chunks.
        device_type: Where the workers' parameters live, `cuda` for example.
    """

    buckets: tuple[BucketLayout, ...]
    chunks: tuple[Chunk, ...]
    n_servers: int
    device_type: str = "cpu"

    # ---- building -----------------------------------------------------------------------------------------

    @classmethod
    def build(
        cls,
        buckets: Sequence[Bucket],
        param_groups: Sequence[Mapping[str, Any]],
        base_class: type[torch.optim.Optimizer],
        n_servers: int,
        chunk_bytes: int,
        *,
        each_spread: bool = False,
    ) -> Layout:
        """Divide the buckets among the servers.

        Args:
            buckets: The optimizer's buckets.
            param_groups: Its parameter groups; every parameter of a bucket is in one.
            base_class: The user's optimizer class.
            n_servers: Number of shards.
            chunk_bytes: Largest size of a chunk; a tensor that cannot be cut may exceed it.
            each_spread: Whether each bucket is spread over the servers separately.

        Raises:
            LayoutError: Servers cannot run this optimizer or hold these parameters.
            ValueError: The number of servers or the size is not positive.
        """
        if n_servers < 1 or chunk_bytes < 1:
            raise ValueError(f"n_servers is {n_servers} and chunk_bytes {chunk_bytes}; expected 1 or more of both")
        class_path(base_class)
        group_of = {id(p): number for number, group in enumerate(param_groups) for p in group["params"]}
        described = tuple(_describe(bucket, group_of) for bucket in buckets)
        cut = elementwise(base_class)
        if not cut:
            _check_order(described, base_class)
        ranges: list[tuple[int, int, int, tuple[Piece, ...]]] = []
        first = 0
        for index, bucket in enumerate(described):
            capacity = max(1, chunk_bytes // bucket.dtype.itemsize)
            if each_spread:  # A cut falls short of the capacity by less than `_ALIGN`.
                part = max(_LEAST_PART_BYTES // bucket.dtype.itemsize, math.ceil(bucket.numel / n_servers))
                capacity = min(capacity, part + _ALIGN)
            for pieces in _cut(bucket, first, capacity) if cut else _whole(bucket, first, capacity):
                start = ranges[-1][2] if ranges and ranges[-1][0] == index else 0
                ranges.append((index, start, start + sum(piece.numel for piece in pieces), pieces))
            first += len(bucket.shapes)
        sizes = [(r[2] - r[1]) * described[r[0]].dtype.itemsize for r in ranges]
        if max(sizes, default=0) > _MOST_CHUNK_BYTES:
            raise LayoutError(
                f"a tensor of {max(sizes) >> 20} MiB is more than servers take of {base_class.__name__}, which they "
                f"cannot cut ({_MOST_CHUNK_BYTES >> 20} MiB, for its state comes with it); use one of torch's own "
                "elementwise optimizers, or a mode without servers"
            )
        servers = _spread_each([r[0] for r in ranges], sizes, n_servers) if each_spread else _spread(sizes, n_servers)
        chunks = tuple(
            Chunk(number, bucket, start, stop, servers[number], pieces)
            for number, (bucket, start, stop, pieces) in enumerate(ranges)
        )
        device = next((str(bucket.flat.device.type) for bucket in buckets), "cpu")
        return cls(described, chunks, n_servers, device)

    # ---- reading ------------------------------------------------------------------------------------------

    @functools.cached_property  # As needed for each of thousands of chunks.
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of all parameters, in the order of the buckets."""
        return tuple(shape for bucket in self.buckets for shape in bucket.shapes)

    @functools.cached_property
    def orders(self) -> tuple[tuple[int, ...], ...]:
        """Per parameter, in the order of the buckets: its dimensions in memory, outermost first."""
        return tuple(order for bucket in self.buckets for order in bucket.orders)

    def dtype(self, chunk: Chunk) -> torch.dtype:
        """dtype of a chunk's elements."""
        return self.buckets[chunk.bucket].dtype

    def nbytes(self, chunk: Chunk) -> int:
        """Size of a chunk in bytes."""
        return chunk.numel * self.dtype(chunk).itemsize

    def of_server(self, index: int) -> tuple[Chunk, ...]:
        """Return the chunks of a shard."""
        return tuple(chunk for chunk in self.chunks if chunk.server == index)

    @property
    def holders(self) -> frozenset[int]:
        """Shards that hold at least one chunk."""
        return frozenset(chunk.server for chunk in self.chunks)

    # ---- parameters and optimizer state -------------------------------------------------------------------

    def cut_params(self, params: Sequence[torch.Tensor], chunk: Chunk) -> torch.Tensor:
        """Copy a chunk's parameters into one flat CPU tensor.

        Args:
            params: All parameters, in the order of the buckets.
            chunk: Which chunk.
        """
        flat, orders = torch.empty(chunk.numel, dtype=self.dtype(chunk), device="cpu"), self.orders
        position = 0
        for piece in chunk.pieces:
            source = params[piece.param].detach().permute(orders[piece.param]).reshape(-1)[piece.start : piece.stop]
            flat[position : position + piece.numel].copy_(source)
            position += piece.numel
        return flat

    def cut_state(self, states: Sequence[Mapping[str, Any]], chunk: Chunk) -> list[State]:
        """Copy the optimizer state of a chunk's pieces; tensors of the parameter's shape are cut, others kept whole.

        Args:
            states: State per parameter, in the order of the buckets; empty before the first step.
            chunk: Which chunk.
        """
        shapes, orders = self.shapes, self.orders
        found: list[State] = []
        for piece in chunk.pieces:
            state: State = {}
            for key, value in states[piece.param].items():
                if isinstance(value, torch.Tensor) and tuple(value.shape) == shapes[piece.param]:
                    part = value.detach().permute(orders[piece.param]).reshape(-1)[piece.start : piece.stop]
                    state[key] = part.to("cpu", copy=True).reshape(piece.shape)
                else:
                    state[key] = value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
            found.append(state)
        return found

    def join_params(self, flats: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
        """Return the parameters in their shapes, in the order of the buckets; the inverse of `cut_params`.

        Args:
            flats: The flat tensor of every chunk, by its index.
        """
        orders = self.orders
        joined = [
            torch.empty(math.prod(shape), dtype=b.dtype, device="cpu") for b in self.buckets for shape in b.shapes
        ]
        for chunk in self.chunks:
            position = 0
            for piece in chunk.pieces:
                target = joined[piece.param][piece.start : piece.stop]
                target.copy_(flats[chunk.index][position : position + piece.numel])
                position += piece.numel
        return [_from_memory(*each) for each in zip(joined, self.shapes, orders, strict=True)]

    def join_state(self, states: Mapping[int, Sequence[Mapping[str, Any]]]) -> list[State]:
        """The inverse of `cut_state`.

        Args:
            states: State of every chunk's pieces, by the chunk's index.

        Raises:
            LayoutError: An entry is a tensor of the parameter's shape in one chunk and something else in another.
        """
        shapes, orders = self.shapes, self.orders
        joined: list[State] = [{} for _ in shapes]
        for chunk in self.chunks:
            for piece, state in zip(chunk.pieces, states[chunk.index], strict=True):
                target = joined[piece.param]
                for key, value in state.items():
                    if isinstance(value, torch.Tensor) and tuple(value.shape) == piece.shape:
                        if key not in target:
                            flat = torch.empty(math.prod(shapes[piece.param]), dtype=value.dtype, device="cpu")
                            target[key] = _from_memory(flat, shapes[piece.param], orders[piece.param])
                        before = target[key]
                        if not isinstance(before, torch.Tensor) or before.shape != torch.Size(shapes[piece.param]):
                            raise LayoutError(f"state {key!r} of parameter {piece.param} differs between its chunks")
                        whole = before.permute(orders[piece.param]).view(-1)
                        whole[piece.start : piece.stop].copy_(value.reshape(-1))
                    elif key not in target:
                        target[key] = value.clone() if isinstance(value, torch.Tensor) else value
        return joined

    # ---- wire ---------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Plain values for msgpack."""
        return {
            "buckets": [[str(b.dtype), [list(s) for s in b.shapes], list(b.groups)] for b in self.buckets],
            "chunks": [
                [c.bucket, c.start, c.stop, c.server, [[p.param, p.start, p.stop, p.group] for p in c.pieces]]
                for c in self.chunks
            ],
            "n_servers": self.n_servers,
            "device_type": self.device_type,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Layout:
        """The inverse of `to_dict`.

        Raises:
            LayoutError: The values are no layout.
        """
        try:
            layout = cls._read(values)
            _check_layout(layout)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
            if isinstance(error, LayoutError):
                raise
            reason = f"{type(error).__name__}: {str(error)[:200]}"
            raise LayoutError(f"a layout is invalid; expected the values of `Layout.to_dict`: {reason}") from None
        return layout

    @classmethod
    def _read(cls, values: Mapping[str, Any]) -> Layout:
        buckets = tuple(
            BucketLayout(
                _dtype(name),
                tuple(map(tuple, shapes)),
                tuple(groups),
                tuple(tuple(range(len(shape))) for shape in shapes),
            )
            for name, shapes, groups in values["buckets"]
        )
        shapes = [shape for bucket in buckets for shape in bucket.shapes]
        chunks = tuple(
            Chunk(i, bucket, start, stop, server, tuple(_piece(p, a, b, g, shapes[p]) for p, a, b, g in pieces))
            for i, (bucket, start, stop, server, pieces) in enumerate(values["chunks"])
        )
        return cls(buckets, chunks, int(values["n_servers"]), str(values["device_type"]))


def _dtype(name: Any) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."), None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise LayoutError(f"a bucket's dtype is {str(name)[:40]!r}; expected a floating-point dtype of torch")
    return found


def _check_layout(layout: Layout) -> None:
    """Check a received layout for consistency, because its numbers control allocations and writes."""
    numbers = [layout.n_servers, *(n for b in layout.buckets for n in (*b.groups, *(k for s in b.shapes for k in s)))]
    for chunk in layout.chunks:
        numbers += [chunk.bucket, chunk.start, chunk.stop, chunk.server]
        numbers += [n for piece in chunk.pieces for n in (piece.param, piece.start, piece.stop, piece.group)]
    if not all(type(number) is int and 0 <= number <= _MOST_ELEMENTS for number in numbers):
        raise LayoutError(f"a layout has a number outside 0..{_MOST_ELEMENTS}, or one that is no integer")
    shapes = layout.shapes
    if sum(map(math.prod, shapes)) > _MOST_ELEMENTS or not 1 <= layout.n_servers <= _MOST_SERVERS:
        raise LayoutError(f"a layout is for {layout.n_servers} servers; expected 1 to {_MOST_SERVERS}")
    groups = [group for bucket in layout.buckets for group in bucket.groups]
    if any(len(bucket.groups) != len(bucket.shapes) for bucket in layout.buckets):
        raise LayoutError("a bucket of a layout has another number of groups than of parameters; expected the same")
    for chunk in layout.chunks:
        held = sum(piece.numel for piece in chunk.pieces)
        fits = chunk.server < layout.n_servers and chunk.stop <= layout.buckets[chunk.bucket].numel
        if not fits or not 0 < held == chunk.numel:
            raise LayoutError(f"chunk {chunk.index} of a layout has pieces of {held} elements; expected {chunk.numel}")
        for piece in chunk.pieces:
            whole = math.prod(shapes[piece.param])
            if not piece.start < piece.stop <= whole or piece.group != groups[piece.param]:
                raise LayoutError(f"a piece of chunk {chunk.index} of a layout exceeds its parameter or is in no group")


def elementwise(base: type[torch.optim.Optimizer]) -> bool:
    """Return whether a step treats every element independently; not assumed of subclasses."""
    return base in ELEMENTWISE


def class_path(base: type[torch.optim.Optimizer]) -> str:
    """Return `module:name`, by which a server imports the class.

    Raises:
        LayoutError: Another process cannot import it, or servers cannot run it.
    """
    if issubclass(base, torch.optim.LBFGS):
        raise LayoutError("LBFGS evaluates the loss several times per step, which servers cannot; use another class")
    path = f"{base.__module__}:{base.__qualname__}"
    if base.__module__ == "__main__" or "<locals>" in base.__qualname__:
        raise LayoutError(
            f"optimizer class {base.__qualname__} is defined in {base.__module__}, where a server process cannot "
            "import it; move it to the top level of a module"
        )
    if load_class(path) is not base:
        raise LayoutError(f"importing {path} gives another class than the optimizer's; give it a unique name")
    return path


def load_class(path: str) -> type[torch.optim.Optimizer]:
    """Return the class named by `class_path`.

    Raises:
        LayoutError: It cannot be imported.
    """
    module, _, name = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:  # Importing runs the user's code, which may raise anything.
        raise LayoutError(f"optimizer class {path} cannot be imported: {type(error).__name__}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise LayoutError(f"{path} is not a subclass of torch.optim.Optimizer")
    return found


def _describe(bucket: Bucket, group_of: Mapping[int, int]) -> BucketLayout:
    for param in bucket.params:
        if param.layout != torch.strided:
            raise LayoutError(f"a parameter of shape {tuple(param.shape)} is sparse; servers hold dense ones only")
        if not param.dtype.is_floating_point:
            raise LayoutError(f"a parameter of shape {tuple(param.shape)} is {param.dtype}; servers hold floats only")
        if id(param) not in group_of:
            raise LayoutError(f"a parameter of shape {tuple(param.shape)} is in no parameter group of the optimizer")
    return BucketLayout(
        bucket.flat.dtype,
        tuple(tuple(param.shape) for param in bucket.params),
        tuple(group_of[id(param)] for param in bucket.params),
        tuple(_order_in_memory(param) for param in bucket.params),
    )


def _order_in_memory(param: torch.Tensor) -> tuple[int, ...]:
    strides = memory_format_of(param)
    return tuple(sorted(range(param.dim()), key=lambda dim: (-strides[dim], dim)))


def _from_memory(flat: torch.Tensor, shape: tuple[int, ...], order: tuple[int, ...]) -> torch.Tensor:
    """View a flat tensor, in memory order, as `shape` without a copy."""
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return flat.view([shape[dim] for dim in order]).permute(inverse)


def _check_order(buckets: Sequence[BucketLayout], base: type[torch.optim.Optimizer]) -> None:
    for bucket in buckets:
        for shape, order in zip(bucket.shapes, bucket.orders, strict=True):
            if order != tuple(range(len(shape))):
                raise LayoutError(
                    f"a parameter of shape {shape} is channels_last or transposed; servers hold such parameters only "
                    f"for elementwise optimizers, and {base.__name__} is not known to be one"
                )


def _piece(param: int, start: int, stop: int, group: int, shape: tuple[int, ...]) -> Piece:
    whole = stop - start == math.prod(shape)
    return Piece(param, start, stop, group, shape if whole else (stop - start,))


def _cut(bucket: BucketLayout, first: int, capacity: int) -> Iterator[tuple[Piece, ...]]:
    """Yield the pieces of chunks of at most `capacity` elements (or `_ALIGN`, if that is more)."""
    capacity, filled, pieces = max(capacity, _ALIGN), 0, list[Piece]()
    for number, (shape, group) in enumerate(zip(bucket.shapes, bucket.groups, strict=True)):
        numel, start = math.prod(shape), 0
        while start < numel:
            room = capacity - filled
            take = numel - start
            if take > room:
                take = room // _ALIGN * _ALIGN
            if take:
                pieces.append(_piece(first + number, start, start + take, group, shape))
                filled, start = filled + take, start + take
            if start < numel:
                yield tuple(pieces)
                filled, pieces = 0, []
    if pieces:
        yield tuple(pieces)


def _whole(bucket: BucketLayout, first: int, capacity: int) -> Iterator[tuple[Piece, ...]]:
    """Yield chunks of whole tensors, as many in each as fit into `capacity` elements."""
    filled, pieces = 0, list[Piece]()
    for number, (shape, group) in enumerate(zip(bucket.shapes, bucket.groups, strict=True)):
        numel = math.prod(shape)
        if pieces and filled + numel > capacity:
            yield tuple(pieces)
            filled, pieces = 0, []
        if numel:
            pieces.append(_piece(first + number, 0, numel, group, shape))
            filled += numel
    if pieces:
        yield tuple(pieces)


def _spread(sizes: Sequence[int], n_servers: int) -> list[int]:
    """Assign a server to every size: largest first to the least loaded, ties to the lower index."""
    loads = [(0, server) for server in range(n_servers)]
    chosen = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        load, server = heapq.heappop(loads)
        chosen[index] = server
        heapq.heappush(loads, (load + sizes[index], server))
    return chosen


def _spread_each(buckets: Sequence[int], sizes: Sequence[int], n_servers: int) -> list[int]:
    """Assign a server to every size, per bucket: largest first to the server with the fewest chunks of that bucket."""
    loads, chosen = [0] * n_servers, [0] * len(sizes)
    for bucket in sorted(set(buckets)):
        heap = [(0, load, server) for server, load in enumerate(loads)]
        heapq.heapify(heap)
        own = [index for index, each in enumerate(buckets) if each == bucket]
        for index in sorted(own, key=lambda i: (-sizes[i], i)):
            count, load, server = heapq.heappop(heap)
            chosen[index], loads[server] = server, load + sizes[index]
            heapq.heappush(heap, (count + 1, loads[server], server))
    return chosen
