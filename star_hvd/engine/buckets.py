"""Flat gradient buffers: parameters packed in reverse registration order, followed by one weight element.

A bucket's buffer holds w * g followed by w, so one sum over the ranks gives sum(w * g) and sum(w). Their quotient is
the mean, whatever the ranks contributed: fresh gradients, late ones, gradients of unequal batches, or nothing.

A gradient has its parameter's memory format (e.g. `channels_last`), as autograd would give it: fused optimizers pair
the elements of parameter and gradient by memory position, and do not report differing formats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from scheduler.transmission.decision import Decision
from star_hvd.engine.bucket_sizes import partition
from star_hvd.errors import StarError

__all__ = ["Bucket", "Wire", "in_format_of", "memory_format_of", "pack", "set_weight", "wire_dtype"]

Key = tuple[torch.dtype, torch.device]


def wire_dtype(dtype: torch.dtype, *, fp16: bool) -> torch.dtype:
    """Type used on the wire: Horovod rejects bfloat16, so float32 replaces it; fp16 compression halves wide floats."""
    if dtype == torch.bfloat16:
        return torch.float16 if fp16 else torch.float32
    if fp16 and dtype in (torch.float32, torch.float64):
        return torch.float16
    return dtype


@dataclass(slots=True, eq=False)
class Bucket:
    """One flat buffer and the parameters whose gradients live in it.

    Attributes:
        index: Position among the optimizer's buckets; part of the collective's name.
        params: The parameters, in buffer order.
        flat: Shape (numel + 1,): the gradients, then the weight.
        views: One view of `flat` per parameter, in the parameter's shape and memory format.
        wire: The tensor that is reduced; `flat` itself unless it travels in another type.
        tail: Number of elements behind `flat` in the same memory that are reduced with it, for the step's header.
    """

    index: int
    params: tuple[torch.nn.Parameter, ...]
    flat: torch.Tensor
    views: tuple[torch.Tensor, ...]
    wire: torch.Tensor
    tail: int = 0
    _shown: dict[int, torch.Tensor] = field(default_factory=dict, init=False, repr=False)  # Gradients, by position.

    @property
    def can_carry(self) -> bool:
        """Whether a header can travel behind the weight: that requires float32 in host memory."""
        return self.flat.dtype == torch.float32 and self.wire is self.flat and not self.flat.is_cuda

    def carry(self, tail: int) -> None:
        """Reserve `tail` elements behind the weight; the buffer's contents are lost."""
        self.tail = tail
        self.flat = self.wire = self.new_flat()
        self.views = tuple(_views(self.flat, self.params))

    @property
    def numel(self) -> int:
        """Number of gradient elements, without the weight."""
        return self.flat.numel() - 1

    def new_flat(self) -> torch.Tensor:
        """Return another zeroed buffer of the same shape, with the tail behind it, for a proxy contribution."""
        size = self.flat.numel()
        return torch.zeros(size + self.tail, dtype=self.flat.dtype, device=self.flat.device)[:size]

    @property
    def average_dtype(self) -> torch.dtype:
        """Type in which parameters and optimizer state are averaged: float64 for float64 parameters, else float32."""
        return torch.float64 if self.flat.dtype == torch.float64 else torch.float32

    def new_average(self) -> torch.Tensor:
        """Return a zeroed buffer for an average of the parameters, which are reduced without compression.

        Shape (numel + 1,), type `average_dtype`.
        """
        return torch.zeros(self.flat.numel(), dtype=self.average_dtype, device=self.flat.device)

    def to_wire(self, flat: torch.Tensor, weight: float | None = None) -> torch.Tensor:
        """Return the tensor to reduce for `flat`: the buffer itself with its tail, or a copy in the wire's type.

        Args:
            flat: The buffer.
            weight: Its weight, which a copy gets unrounded; None for that in the buffer.
        """
        if self.tail:
            return flat.as_strided((flat.numel() + self.tail,), (1,))
        if self.wire.dtype == flat.dtype:
            return flat
        target = self.wire if flat is self.flat else torch.empty_like(self.wire)
        target.copy_(flat)
        if weight is not None:  # bfloat16 has 8 bits, and a rounded weight would scale the whole mean.
            set_weight(target, weight)
        return target

    def sum_of(self, wire: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
        """Return the reduced values, weight last, in a type that does not round the weight to few bits.

        That is `flat`, into which they are copied, except for bfloat16: there they have to be divided first.
        """
        if flat.dtype == torch.bfloat16:
            return wire.to(self.average_dtype)
        self.from_wire(wire, flat)
        return flat

    def from_wire(self, wire: torch.Tensor, flat: torch.Tensor) -> None:
        """Copy the reduced values back into `flat`."""
        if wire.dtype != flat.dtype:
            flat.copy_(wire)

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return views of another buffer of this bucket, one per parameter."""
        return _views(flat, self.params)

    def adopt(self, position: int) -> None:
        """Make one parameter's gradient what the buffer holds, copying it there if it is elsewhere."""
        self._follow_format(position)  # Without a gradient, too: other ranks may have one.
        grad, view = self.params[position].grad, self.views[position]
        if grad is None:
            view.zero_()
        elif grad.data_ptr() != view.data_ptr() or grad.stride() != view.stride():
            self._check_kind(position)
            view.copy_(grad)
        self.show(position)

    def _follow_format(self, position: int) -> None:
        """Give a view the memory format that its parameter has by now: the program may change that after wrapping.

        Fused optimizers pair values of a parameter and its gradient by their place in memory. As under Horovod, all
        ranks have to change it alike.
        """
        param, view = self.params[position], self.views[position]
        if param.stride() != view.stride() and (strides := memory_format_of(param)) != view.stride():
            self._check_kind(position)
            followed = view.as_strided(param.shape, strides, view.storage_offset())
            self.views = (*self.views[:position], followed, *self.views[position + 1 :])
            self._shown.pop(position, None)

    def show(self, position: int) -> None:
        """Let one parameter have what the buffer holds as its gradient.

        The gradient is not the view itself, since programs may exchange a gradient's memory: `model.cpu()` does, and
        `param.grad.data = other`.
        """
        param, view = self.params[position], self.views[position]
        shown = self._shown.get(position)
        if shown is None or shown.data_ptr() != view.data_ptr():
            shown = self._shown[position] = view.detach()
        if param.grad is not shown:
            self._check_kind(position)
            param.grad = shown

    def _check_kind(self, position: int) -> None:
        """Check that a parameter is still what the buffer was made for: the program may cast or move its model.

        Raises:
            StarError: It is of another type or shape, or on another device.
        """
        param, view = self.params[position], self.views[position]
        if param.dtype != view.dtype or param.device != view.device or param.shape != view.shape:
            raise StarError(
                f"a parameter is {param.dtype} on {param.device} with the shape {tuple(param.shape)}, and was "
                f"{view.dtype} on {view.device} with the shape {tuple(view.shape)} when the optimizer was wrapped; "
                "cast or move the model before hvd.DistributedOptimizer, or wrap the optimizer again by it afterwards"
            )

    def show_all(self) -> None:
        """Let every parameter have what the buffer holds as its gradient."""
        for position in range(len(self.params)):
            self._follow_format(position)
            self.show(position)

    def shows(self, position: int) -> bool:
        """Whether a parameter's gradient is in the buffer."""
        grad = self.params[position].grad
        return grad is not None and not grad.is_sparse and grad.data_ptr() == self.views[position].data_ptr()

    def take_out(self, position: int) -> None:
        """Give one parameter a copy as its gradient if that is in the buffer, which is then independent of it."""
        grad = self.params[position].grad
        if grad is not None and self.shows(position):
            self.params[position].grad = grad.clone()


def set_weight(flat: torch.Tensor, weight: float) -> None:
    """Write the weight behind a buffer's gradients.

    `flat[-1] = weight` would copy a number from the host, which waits until the device has done all that was queued.
    """
    flat[-1:].fill_(weight)


def _views(flat: torch.Tensor, params: Iterable[torch.nn.Parameter]) -> list[torch.Tensor]:
    views, offset = [], 0
    for param in params:
        views.append(flat.as_strided(param.shape, memory_format_of(param), flat.storage_offset() + offset))
        offset += param.numel()
    return views


def memory_format_of(param: torch.Tensor) -> tuple[int, ...]:
    """Return the strides that a dense tensor in the memory format of `param` has."""
    return torch.empty_like(param, device="meta").stride()


def in_format_of(param: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return `value` in the memory format of `param`; it is copied only if the shapes agree and the formats differ."""
    if value.shape != param.shape or value.stride() == (strides := memory_format_of(param)):
        return value
    return torch.empty_strided(param.shape, strides, dtype=value.dtype, device=value.device).copy_(value)


def pack(
    params: Sequence[torch.nn.Parameter], limits_bytes: int | Sequence[int], *, fp16: bool = False, first_index: int = 0
) -> list[Bucket]:
    """Pack `params` into buckets, in reverse order because backward produces the last layers' gradients first.

    Args:
        params: Parameters that require gradients, in registration order.
        limits_bytes: Size limit of a bucket in the parameters' own type, or one per bucket (`bucket_sizes.limits_of`).
        fp16: Whether wide floats travel as float16 (`Compression.fp16`).
        first_index: Index of the first bucket, when more are added later.
    """
    limits = [limits_bytes] if isinstance(limits_bytes, int) else limits_bytes
    by_key: dict[Key, list[torch.nn.Parameter]] = {}
    for param in reversed(params):
        by_key.setdefault((param.dtype, param.device), []).append(param)
    buckets: list[Bucket] = []
    for (dtype, device), members in by_key.items():
        sizes = [param.numel() * param.element_size() for param in members]
        for run in partition(sizes, limits):
            chosen = tuple(members[i] for i in run)
            flat = torch.zeros(sum(p.numel() for p in chosen) + 1, dtype=dtype, device=device)
            travels_as = wire_dtype(dtype, fp16=fp16)
            wire = flat if travels_as == dtype else torch.zeros_like(flat, dtype=travels_as)
            views = tuple(_views(flat, chosen))
            buckets.append(Bucket(first_index + len(buckets), chosen, flat, views, wire))
    return buckets


class Wire:
    """Encoding of one optimizer's buckets for the all-reduce: none here. `star_hvd.compression` has the lossy one.

    Attributes:
        wanted: Encoding that this rank, if it leads, requests for the next step's gradients; 0 is unchanged.
        leader: The rank that leads, whose request counts.
        lossy: Whether the next step's encoding loses information.
        has_tail: Whether a header can travel behind the weight of a bucket that has room for it.
    """

    wanted: int = 0
    leader: int = 0
    lossy: bool = False
    has_tail: bool = True

    @property
    def pushed_part(self) -> float:
        """Fraction of a gradient's bytes that a push to one rank has in the smallest allowed form."""
        return 1.0

    def report_to(self, note: Callable[[Decision], None]) -> None:
        """Report this rank's decisions on the encoding through `note`, from any thread."""

    def begin(self, streams: Any, rank: int, world_size: int) -> None:
        """Start, with the engine, on all ranks alike."""

    def restart(self) -> None:
        """Start over after a new plan or added buckets; ranks may join that have seen no earlier step."""

    def name(self, bucket: Bucket) -> str:
        """Return the name under which the next step's tensor for a bucket is reduced."""
        return f"b{bucket.index}"

    def encode(self, bucket: Bucket, flat: torch.Tensor, *, weight: float) -> torch.Tensor:
        """Return the tensor to reduce for `flat`, whose gradients have the weight `weight`, 0 if it holds none."""
        return bucket.to_wire(flat, weight)

    def decode(self, bucket: Bucket, reduced: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
        """Return the sum, weight last: `flat`, into which it is copied, or another tensor of a wider type."""
        return bucket.sum_of(reduced, flat)

    def decoded(self) -> None:
        """All buckets of a step are decoded, by this thread or earlier. The host may wait for the device here."""

    def arrived(self) -> None:
        """The training thread starts to wait for the reduction."""

    def computed(self, ago_s: float) -> None:
        """The awaited step's gradient was finished on a device `ago_s` seconds ago; `arrived` was called earlier."""

    def waited(self, wait_s: float) -> None:
        """Since `arrived` the training thread has waited `wait_s` for the reduction, and worked otherwise."""

    def ended(self, asked: int, mean_weight: float = 0.0) -> None:
        """A step of gradients has ended, whose leader requested the encoding `asked` for the next one.

        Its fresh gradients had the weight `mean_weight` on average, 0 if there were none.
        """

    def packer(self) -> Any:
        """Return the encoder of late gradients to a parent (`star_hvd.channel.late_push.Packer`), None for none."""
        return None

    def server_pushes(self) -> Any:
        """Return the encoder of pushes to servers (`star_hvd.compression.server_pushes`), None for none."""
        return None

    def explain(self) -> str:
        """Describe for the user how gradients travel and why; empty if there was no choice."""
        return ""
