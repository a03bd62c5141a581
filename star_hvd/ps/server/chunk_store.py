"""One chunk on a server: its parameters, and an optimizer of the user's class over its pieces."""

from __future__ import annotations

import inspect
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import torch

from star_hvd.engine.hyperparameters import HyperRow
from star_hvd.errors import ChannelError
from star_hvd.ps.common.layout import Chunk, Layout, LayoutError, State, class_path, load_class
from star_hvd.ps.common.validation import is_whole
from star_hvd.ps.common.wire import Lent

__all__ = ["ChunkStore", "OptimizerSpec", "Record", "RowReader", "make_record", "read_record"]

_EXECUTION = frozenset({"fused", "foreach", "capturable", "differentiable"})
"""Options that say how a device carries a step out, not what it computes: those of a GPU do not fit a server."""
_SPAN = struct.Struct("<Q")
_ALIGN_BYTES = 16
_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
_MEMORY = 0.9  # of the reference direction, per update: about the last ten count.


def _plain(value: Any, where: str) -> list[Any]:
    if value is None or isinstance(value, (bool, int, float, str)):
        return ["v", value]
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return ["t", str(value.dtype).removeprefix("torch."), list(value.shape), value.item()]
    if isinstance(value, (tuple, list)):
        return ["s", [_plain(part, where) for part in value], isinstance(value, tuple)]
    raise LayoutError(f"{where} is a {type(value).__name__}; a server can be given numbers, strings and None only")


def _restore(item: Sequence[Any]) -> Any:
    if item[0] == "v":
        return item[1]
    if item[0] == "t":
        if any(size != 1 for size in item[2]):
            raise ValueError("a tensor of more than one number")
        return torch.full(tuple(item[2]), item[3], dtype=getattr(torch, item[1]), device="cpu")
    if item[0] != "s":
        raise ValueError("a value of an unknown kind")
    parts = [_restore(part) for part in item[1]]
    return tuple(parts) if item[2] else parts


@dataclass(frozen=True)
class OptimizerSpec:
    """The user's optimizer without its parameters.

    Attributes:
        path: Where its class is, `module:name`.
        groups: Hyperparameters of every parameter group.
    """

    path: str
    groups: tuple[dict[str, Any], ...]

    @classmethod
    def of(
        cls, base: type[torch.optim.Optimizer], param_groups: Sequence[Mapping[str, Any]], hyper: HyperRow
    ) -> OptimizerSpec:
        """Describe an optimizer.

        Args:
            base: The user's class.
            param_groups: The groups as they are now.
            hyper: The layout of the rows the workers will send. Entries that groups got since (`initial_lr` of a
                scheduler) are left out, because they are not in the rows.

        Raises:
            LayoutError: The class or a hyperparameter cannot be given to another process.
        """
        groups = [{k: v for k, v in group.items() if k != "params"} for group in param_groups]
        later = ("initial_lr", "base_momentum", "max_momentum", "min_lr", "max_lr")
        for name in ("", *later):
            for group in groups:
                group.pop(name, None)
            if HyperRow(groups).size == hyper.size:
                break
        else:
            raise LayoutError(f"the groups hold {HyperRow(groups).size} numbers; expected {hyper.size}, as in the rows")
        spec = cls(class_path(base), tuple(groups))
        spec.to_dict()
        return spec

    def to_dict(self) -> dict[str, Any]:
        """Plain values for msgpack."""
        groups = [
            {key: _plain(value, f"hyperparameter {key!r} of group {i}") for key, value in group.items()}
            for i, group in enumerate(self.groups)
        ]
        return {"path": self.path, "groups": groups}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> OptimizerSpec:
        """The inverse of `to_dict`.

        Raises:
            LayoutError: The values are no description of an optimizer.
        """
        try:
            path, groups = values["path"], values["groups"]
            if not isinstance(path, str) or not isinstance(groups, list) or not groups:
                raise ValueError("expected a class and its groups")
            return cls(path, tuple({str(k): _restore(v) for k, v in group.items()} for group in groups))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError) as error:
            raise LayoutError(f"an optimizer cannot be read: {type(error).__name__}: {str(error)[:200]}") from None

    def on_host(self) -> OptimizerSpec:
        """The same without the options of a GPU."""
        host = {"fused": None, "foreach": None, "capturable": False}
        return OptimizerSpec(
            self.path, tuple({k: host.get(k, v) if k in host else v for k, v in group.items()} for group in self.groups)
        )

    def build(self, params: Mapping[int, list[torch.nn.Parameter]]) -> torch.optim.Optimizer:
        """An optimizer of the class.

        Args:
            params: Parameters per group; groups without any are left out.

        Raises:
            LayoutError: The class's constructor fails.
        """
        base = load_class(self.path)
        groups = [_own(self.groups[number]) | {"params": chosen} for number, chosen in params.items()]
        accepted = inspect.signature(base).parameters
        keywords = {k: v for k, v in _own(self.groups[0]).items() if k in accepted}
        try:
            return base(groups, **keywords)
        except Exception as error:  # The user's code may raise anything.
            raise LayoutError(f"a server cannot make a {self.path}: {type(error).__name__}: {error}") from error


def _own(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in values.items()}


class RowReader:
    """Turns the rows of hyperparameters that workers send into values per group."""

    def __init__(self, spec: OptimizerSpec) -> None:
        self._groups = [dict(group) for group in spec.groups]
        self._hyper = HyperRow(self._groups)
        self._last: tuple[tuple[float, ...], list[dict[str, Any]]] | None = None

    @property
    def size(self) -> int:
        """Numbers in a row."""
        return self._hyper.size

    def values(self, row: Sequence[float]) -> list[dict[str, Any]]:
        """Hyperparameters of every group."""
        key = tuple(row)
        if self._last is None or self._last[0] != key:
            with self._hyper.applied(self._groups, key):
                found = [{k: v for k, v in _own(g).items() if k not in _EXECUTION} for g in self._groups]
            self._last = (key, found)
        return self._last[1]


@dataclass(frozen=True)
class Record:
    """A chunk at one version: a manifest and tensors. As bytes it is what the mirror and a state reply hold.

    Attributes:
        manifest: Everything that is no tensor.
        tensors: The parameters, then the tensors of the optimizer state.
    """

    manifest: bytes
    tensors: list[torch.Tensor]

    def _offsets(self) -> tuple[list[int], int]:
        offset = _aligned(_SPAN.size + len(self.manifest))
        offsets = []
        for tensor in self.tensors:
            offsets.append(offset)
            offset = _aligned(offset + tensor.numel() * tensor.element_size())
        return offsets, offset

    @property
    def first(self) -> slice:
        """Where the bytes of the first tensor are."""
        if not self.tensors:
            return slice(0, 0)
        begin = self._offsets()[0][0]
        return slice(begin, begin + self.tensors[0].numel() * self.tensors[0].element_size())

    @property
    def nbytes(self) -> int:
        """Size as bytes."""
        return self._offsets()[1]

    def write(self, target: torch.Tensor) -> None:
        """Put the bytes at the begin of a tensor of bytes."""
        head = _SPAN.pack(len(self.manifest)) + self.manifest
        target[: len(head)].copy_(torch.frombuffer(bytearray(head), dtype=torch.uint8))
        for offset, tensor in zip(self._offsets()[0], self.tensors, strict=True):
            flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
            target[offset : offset + flat.numel()].copy_(flat)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGN_BYTES) * _ALIGN_BYTES


class ChunkStore:
    """The parameters and the optimizer state of one chunk.

    Args:
        layout: The whole layout.
        chunk: Which chunk.
        spec: The user's optimizer.
        reader: Reads the workers' rows.

    Attributes:
        version: Updates applied so far.
        applied: Per rank the last of its pushes that is in the parameters.
        params: The parameters, one flat tensor.
        mirrored: The mirror's copy of them, None until it is made.
        seq: Number of the last order that changed them.
    """

    def __init__(self, layout: Layout, chunk: Chunk, spec: OptimizerSpec, reader: RowReader) -> None:
        self.chunk = chunk
        self.version = 0
        self.seq = 0
        self.applied: dict[int, int] = {}
        self.row: list[float] | None = None
        self.mirrored: Lent | None = None
        self.params = torch.zeros(chunk.numel, dtype=layout.dtype(chunk))
        self.reference: torch.Tensor | None = None
        self._reader = reader
        self._wide = _WIDE.get(self.params.dtype, self.params.dtype)
        self._pieces = [torch.nn.Parameter(view) for view in self._views(self.params)]
        members: dict[int, list[torch.nn.Parameter]] = {}
        for piece, param in zip(chunk.pieces, self._pieces, strict=True):
            members.setdefault(piece.group, []).append(param)
        self._groups = list(members)
        self.optimizer = spec.build(members)

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        views, position = [], 0
        for piece in self.chunk.pieces:
            views.append(flat[position : position + piece.numel].view(piece.shape))
            position += piece.numel
        return views

    def load(self, params: torch.Tensor, states: Sequence[State], version: int) -> None:
        """Take parameters and optimizer state over; nothing of them is copied but the parameters."""
        self._outdate()
        self.params.copy_(params)
        self.optimizer.state.clear()
        for param, state in zip(self._pieces, states, strict=True):
            if state:
                self.optimizer.state[param] = dict(state)
        self.version = version

    def _outdate(self) -> None:
        if self.mirrored is not None:
            self.mirrored.drop()
        self.mirrored = None

    def states(self) -> list[State]:
        """Optimizer state per piece, not copied."""
        return [dict(self.optimizer.state[p]) if p in self.optimizer.state else {} for p in self._pieces]

    def use_row(self, row: Sequence[float] | None) -> None:
        """Step with these hyperparameters from now on; None leaves them as they are."""
        if row is None or row == self.row:
            return
        self.row = list(row)
        values = self._reader.values(row)
        for group, number in zip(self.optimizer.param_groups, self._groups, strict=True):
            group.update(_own(values[number]))

    def apply(
        self, parts: Sequence[float], buffers: Sequence[torch.Tensor], row: Sequence[float] | None = None
    ) -> None:
        """One optimizer step with the sum of factor * buffer, in the order given. Buffers may be overwritten.

        Args:
            parts: The factors.
            buffers: One flat tensor per factor, in the parameters' type. None at all: only the version goes on.
            row: Hyperparameters from this step on.
        """
        self.use_row(row)
        self._outdate()
        if buffers:
            total = self._sum(parts, buffers)
            if self.reference is not None:
                self.reference.mul_(_MEMORY).add_(total)
            for param, grad in zip(self._pieces, self._views(total.to(self.params.dtype)), strict=True):
                param.grad = grad
            self.optimizer.step()
            self._gather()
        self.version += 1

    def _sum(self, factors: Sequence[float], buffers: Sequence[torch.Tensor]) -> torch.Tensor:
        first = buffers[0]
        total = first.to(self._wide) if first.dtype != self._wide else first
        if factors[0] != 1.0:
            total.mul_(factors[0])
        for factor, buffer in zip(factors[1:], buffers[1:], strict=True):
            total.add_(buffer.to(self._wide), alpha=factor)
        return total

    def _gather(self) -> None:
        """Undo what an optimizer did that gave its parameters other memory."""
        for param, view in zip(self._pieces, self._views(self.params), strict=True):
            param.grad = None
            if param.data_ptr() != view.data_ptr():
                view.copy_(param.detach())
                param.data = view

    def watch(self, on: bool) -> None:
        """Keep the direction of the recent updates, for the guard."""
        if on and self.reference is None:
            self.reference = torch.zeros(self.chunk.numel, dtype=self._wide)
        elif not on:
            self.reference = None

    def compare(self, buffer: torch.Tensor) -> tuple[float, float, float]:
        """Dot product of a gradient with the direction of the recent updates, and both squared norms."""
        if self.reference is None:
            return 0.0, 0.0, 0.0
        wide = buffer.to(self._wide)
        products = (torch.dot(wide, self.reference), torch.dot(wide, wide), torch.dot(self.reference, self.reference))
        dot, mine, recent = (float(product) for product in products)
        return dot, mine, recent

    # ---- as bytes -----------------------------------------------------------------------------------------

    def record(self) -> Record:
        """Parameters and state as they are now, not copied.

        Raises:
            ChannelError: The optimizer keeps something that is neither a tensor nor a number.
        """
        return make_record(self.params, self.states(), self.version, self.seq, self.applied, self.row)

    def restore(self, data: torch.Tensor) -> None:
        """Take over what `Record.write` wrote.

        Raises:
            ChannelError: It does not fit this chunk.
        """
        version, seq, applied, row, params, states = read_record(data, self.params)
        self.use_row(row)
        self.load(params, states, version)
        self.seq, self.applied = seq, applied


def make_record(
    params: torch.Tensor,
    states: Sequence[State],
    version: int,
    seq: int = 0,
    applied: Mapping[int, int] | None = None,
    row: Sequence[float] | None = None,
) -> Record:
    """A chunk's record; nothing is copied.

    Raises:
        ChannelError: The optimizer keeps something that is neither a tensor nor a number.
    """
    tensors = [params]
    described = []
    for state in states:
        entry: list[list[Any]] = []
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                tensors.append(value)
                entry.append([key, "t", str(value.dtype).removeprefix("torch."), list(value.shape)])
            elif value is None or isinstance(value, (bool, int, float, str)):
                entry.append([key, "v", value, None])
            else:
                raise ChannelError(
                    f"optimizer state {key!r} is a {type(value).__name__}; a server can keep tensors and numbers"
                )
        described.append(entry)
    manifest = [version, seq, list((applied or {}).items()), None if row is None else list(row), described]
    return Record(bytes(msgpack.packb(manifest)), tensors)


def read_record(
    data: torch.Tensor, like: torch.Tensor
) -> tuple[int, int, dict[int, int], list[float] | None, torch.Tensor, list[State]]:
    """Version, order number, applied pushes, row, parameters and state per piece of a record, copied.

    Args:
        data: The bytes.
        like: A tensor of the parameters' type and length.

    Raises:
        ChannelError: The record is damaged or of another chunk.
    """
    try:
        (length,) = _SPAN.unpack(bytes(data[: _SPAN.size].numpy()))
        head = bytes(data[_SPAN.size : _SPAN.size + length].numpy())
        version, seq, applied, row, described = msgpack.unpackb(head)
        _check_manifest(version, seq, applied, row)
        position = _aligned(_SPAN.size + length)

        def tensor(dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
            nonlocal position
            if not isinstance(dtype, torch.dtype) or not all(map(is_whole, shape)):
                raise ValueError("a tensor without a type, or with a shape that is none")
            size = math.prod(shape) * dtype.itemsize
            if position + size > data.numel():
                raise ValueError(f"{data.numel()} bytes are too few")
            found = data[position : position + size].clone().view(dtype).reshape(tuple(shape))
            position = _aligned(position + size)
            return found

        params = tensor(like.dtype, like.shape)
        states = [
            {str(key): tensor(getattr(torch, a), b) if kind == "t" else _value(a) for key, kind, a, b in entry}
            for entry in described
        ]
        return version, seq, dict(applied), row, params, states
    except Exception as error:
        raise ChannelError(f"a chunk's record cannot be read: {type(error).__name__}: {error}") from error


def _check_manifest(version: Any, seq: Any, applied: Any, row: Any) -> None:
    pushes = isinstance(applied, list) and all(map(is_whole, (number for pair in applied for number in pair)))
    if not (is_whole(version) and is_whole(seq) and pushes):
        raise ValueError(f"version {version!r}, order {seq!r} or the pushes in it are none")
    if not (row is None or (isinstance(row, list) and all(type(number) in (int, float) for number in row))):
        raise ValueError("a row of hyperparameters that is none")


def _value(value: Any) -> Any:
    if not (value is None or isinstance(value, (bool, int, float, str))):
        raise ValueError("a value that is neither a number nor a text")
    return value
