"""The complete state of a chunk as bytes: in a mirror, in a seed and in a reply to a request for state."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import torch

from star_hvd.errors import ChannelError
from star_hvd.ps.common.layout import State
from star_hvd.ps.common.validation import is_whole

__all__ = ["Record", "check_states", "make_record", "read_record"]

_SPAN = struct.Struct("<Q")
_ALIGN_BYTES = 16


@dataclass(frozen=True)
class Record:
    """A chunk at one version: a manifest and tensors, each aligned to 16 bytes.

    Attributes:
        manifest: Everything but the tensors, as msgpack.
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
        """Range of the first tensor's bytes."""
        if not self.tensors:
            return slice(0, 0)
        begin = self._offsets()[0][0]
        return slice(begin, begin + self.tensors[0].numel() * self.tensors[0].element_size())

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self._offsets()[1]

    def write(self, target: torch.Tensor) -> None:
        """Write the record to the beginning of a uint8 tensor."""
        head = _SPAN.pack(len(self.manifest)) + self.manifest
        target[: len(head)].copy_(torch.frombuffer(bytearray(head), dtype=torch.uint8))
        for offset, tensor in zip(self._offsets()[0], self.tensors, strict=True):
            flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
            target[offset : offset + flat.numel()].copy_(flat)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGN_BYTES) * _ALIGN_BYTES


def check_states(states: Iterable[Mapping[str, Any]]) -> None:
    """Check that records can hold an optimizer's state.

    Raises:
        ChannelError: It holds something other than tensors, numbers, strings and None.
    """
    for state in states:
        for key, value in state.items():
            if not (value is None or isinstance(value, (torch.Tensor, bool, int, float, str))):
                got = type(value).__name__
                raise ChannelError(f"optimizer state {key!r} is a {got}; servers keep tensors, numbers, strings, None")


def make_record(
    params: torch.Tensor,
    states: Sequence[State],
    version: int,
    seq: int = 0,
    applied: Mapping[int, int] | None = None,
    row: Sequence[float] | None = None,
) -> Record:
    """Return a chunk's record; nothing is copied.

    Raises:
        ChannelError: The optimizer's state holds something other than tensors, numbers, strings and None.
    """
    check_states(states)
    tensors = [params]
    described = []
    for state in states:
        entry: list[list[Any]] = []
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                tensors.append(value)
                entry.append([key, "t", str(value.dtype).removeprefix("torch."), list(value.shape)])
            else:
                entry.append([key, "v", value, None])
        described.append(entry)
    manifest = [version, seq, list((applied or {}).items()), None if row is None else list(row), described]
    return Record(bytes(msgpack.packb(manifest)), tensors)


def read_record(
    data: torch.Tensor, like: torch.Tensor
) -> tuple[int, int, dict[int, int], list[float] | None, torch.Tensor, list[State]]:
    """Return a record's version, order number, applied pushes, row, parameters and state per piece, all copied.

    Args:
        data: The bytes.
        like: A tensor of the parameters' dtype and shape.

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
                raise ValueError(f"a tensor has dtype {dtype!r} and shape {shape!r}")
            size = math.prod(shape) * dtype.itemsize
            if position + size > data.numel():
                raise ValueError(f"the record has {data.numel()} bytes; expected {position + size} or more")
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
        raise ValueError(f"version {version!r}, seq {seq!r} or the applied pushes are not whole numbers from 0")
    if not (row is None or (isinstance(row, list) and all(type(number) in (int, float) for number in row))):
        raise ValueError("a row of hyperparameters is not a list of numbers")


def _value(value: Any) -> Any:
    if not (value is None or isinstance(value, (bool, int, float, str))):
        raise ValueError(f"a state's value is a {type(value).__name__}; expected a number, a string or None")
    return value
