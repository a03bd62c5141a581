"""Lossy forms of one bucket, with error feedback: what is not sent now is added to the rank's next contribution.

Both forms are linear in what is sent, so that one sum over the ranks is the sum of their weighted contributions,
whatever these are: whole gradients, late ones, those of unequal batches, or nothing.

Low rank (PowerSGD, Vogels et al. 2019, in the alternating form of ACP-SGD, Zhang et al. 2023): of every matrix M, with
what earlier steps left over, a rank sends P = M Q for a Q with orthonormal columns that all ranks have, and keeps
M - P Q^T. All ranks use (sum P) Q^T, and the orthonormalized sum of the P is what M^T is multiplied with in the next
step. One reduction per step, and the basis follows the gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from scheduler.transmission.wire import HALF, LOW_RANK, NONE
from star_hvd.compression.pushes import shrunk, small_bytes, whole_bytes
from star_hvd.engine.buckets import Bucket, memory_format_of
from star_hvd.engine.device import DONE, KEPT, Streams

__all__ = ["RANK", "BucketCodec", "without_form"]

RANK = 8  # With 4, a small convolutional network had lost 0.6 points of accuracy after 160 steps, with 8 it had not.
_DOWN, _ACROSS, _HALF = _SUFFIXES = "p", "q", "f"
_MOST_HALF = 60_000.0  # The largest float16 is 65504.


@dataclass(slots=True)
class _Matrix:
    """One parameter in the bucket: where it begins, its form, the first basis, and that of the next step."""

    start: int
    rows: int
    cols: int
    first: torch.Tensor
    basis: torch.Tensor

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.start : self.start + self.rows * self.cols].view(self.rows, self.cols)


def without_form(name: str) -> str:
    """The name that a tensor has without the suffix of its form."""
    return name.rstrip("".join(_SUFFIXES))


class BucketCodec:
    """Encodes contributions to a bucket and decodes their sum. Encoding and decoding take turns.

    Args:
        bucket: The bucket.
        streams: Makes the fences: one thread may encode what another decodes.
        world_size: Ranks whose contributions are added up.
    """

    def __init__(self, bucket: Bucket, streams: Streams, world_size: int) -> None:
        self._bucket = bucket
        self._dtype = bucket.average_dtype
        self._residual: torch.Tensor | None = None
        self._matrices = self._layout()
        self._dense = self._between()
        self._sent = NONE
        self._sum: torch.Tensor | None = None  # Of what was decoded, until the host has looked at it.
        self.begin(streams, world_size)

    def begin(self, streams: Streams, world_size: int) -> None:
        """Ranks begin with a common basis; the residual, this rank's own, stays."""
        self._streams, self._fence = streams, DONE
        self._most = _MOST_HALF / world_size
        self.restart()

    def restart(self) -> None:
        """As `begin`, in the same job."""
        self._across = False  # Whether the transposed matrices are projected: in every second step.
        for matrix in self._matrices:
            matrix.basis = matrix.first

    # ---- layout ---------------------------------------------------------------------------------------------

    def _layout(self) -> list[_Matrix]:
        found, start = [], 0
        for param in self._bucket.params:
            rows = _rows(param)
            cols = param.numel() // rows if rows else 0
            if rows and 2 * RANK * (rows + cols) < param.numel():  # Less than a quarter travels, on the average.
                first = self._first_basis(start, cols)
                found.append(_Matrix(start, rows, cols, first, first))
            start += param.numel()
        return found

    def _between(self) -> list[tuple[int, int]]:
        """Where the elements that travel as they are begin and end."""
        runs, begin = [], 0
        for matrix in self._matrices:
            runs.append((begin, matrix.start))
            begin = matrix.start + matrix.rows * matrix.cols
        runs.append((begin, self._bucket.numel))
        return [(first, last) for first, last in runs if last > first]

    def _first_basis(self, start: int, cols: int) -> torch.Tensor:
        """Made on the host, so that it is the same whatever the devices; once, since copying it waits for them."""
        generator = torch.Generator().manual_seed(1_000_003 * self._bucket.index + start)
        values = torch.randn(cols, RANK, generator=generator, dtype=self._dtype, device="cpu")
        return _orthonormal(values).to(self._bucket.flat.device)

    # ---- one step -------------------------------------------------------------------------------------------

    def suffix(self, form: int) -> str:
        """What tells the tensor from the bucket's others by name: Horovod caches what it knows of a name's shape."""
        if form == LOW_RANK and self._matrices:
            return _ACROSS if self._across else _DOWN
        return _HALF if form == HALF else ""

    def encode(self, flat: torch.Tensor, form: int, *, given: bool) -> torch.Tensor:
        """What is reduced for `flat`.

        Args:
            flat: The contribution: gradients times weight, then the weight.
            form: One of `FORMS`.
            given: Whether there is a gradient in it; zeros take nothing of the residual along.
        """
        self._sent = form if form != LOW_RANK or self._matrices else NONE
        self._order(flat)
        if self._sent == NONE:
            if given and self._residual is not None:
                flat[:-1].add_(self._residual)
                self._residual = None
            reduced = self._bucket.to_wire(flat)
        elif not given:
            reduced = self._new(flat)
        elif self._sent == HALF:
            reduced = self._to_half(flat)
        else:
            reduced = self._to_factors(flat)
        self._fence = self._streams.give_one(KEPT, flat)
        return reduced

    def decode(self, reduced: torch.Tensor, flat: torch.Tensor) -> None:
        """Put the sum of all contributions into `flat`. Of a step's buckets `to_check` has to follow."""
        if self._sent == NONE:
            self._bucket.from_wire(reduced, flat)
            return
        self._order(reduced, flat)
        if self._sent == HALF:
            flat.copy_(reduced)
        else:
            self._from_factors(reduced, flat)
        self._sum = reduced.sum(dtype=torch.float64)
        self._fence = self._streams.give_one(KEPT, flat)

    def to_check(self) -> torch.Tensor | None:
        """The sum behind the last `decode`, on its device; if it is no number `drop_infinite` has to follow. Once."""
        found, self._sum = self._sum, None
        if found is not None:
            self._fence.order(found)
        return found

    def _order(self, *tensors: torch.Tensor) -> None:
        kept = [] if self._residual is None else [self._residual]
        self._fence.order(*tensors, *kept, *(matrix.basis for matrix in self._matrices))

    def _new(self, flat: torch.Tensor) -> torch.Tensor:
        """A zeroed tensor of the form, with the bucket's tail behind it where a header can travel there."""
        if self._sent == HALF:
            return torch.zeros(flat.numel(), dtype=torch.float16, device=flat.device)
        size = sum(last - first for first, last in self._dense) + 1 + self._bucket.tail
        size += sum(RANK * (matrix.cols if self._across else matrix.rows) for matrix in self._matrices)
        return torch.zeros(size, dtype=self._dtype, device=flat.device)

    def _total(self, flat: torch.Tensor) -> torch.Tensor:
        """The residual with the gradient added: what there is to send."""
        if self._residual is None:
            self._residual = torch.zeros(flat.numel() - 1, dtype=self._dtype, device=flat.device)
        return self._residual.add_(flat[:-1])

    def _to_half(self, flat: torch.Tensor) -> torch.Tensor:
        total, reduced = self._total(flat), self._new(flat)
        reduced[:-1] = torch.where(total.isinf(), total, total.clamp(-self._most, self._most))
        reduced[-1] = flat[-1]
        total.sub_(reduced[:-1])
        return reduced

    def _to_factors(self, flat: torch.Tensor) -> torch.Tensor:
        total, reduced = self._total(flat), self._new(flat)
        at = 0
        for first, last in self._dense:
            reduced[at : at + last - first] = total[first:last]
            total[first:last] = 0
            at += last - first
        for matrix, factor in self._factors(reduced, at):
            left = matrix.of(total)
            left = left.T if self._across else left
            torch.mm(left, matrix.basis, out=factor)
            left.addmm_(factor, matrix.basis.T, alpha=-1.0)
        reduced[self._weight_at(reduced)] = flat[-1]
        return reduced

    def _from_factors(self, reduced: torch.Tensor, flat: torch.Tensor) -> None:
        at = 0
        for first, last in self._dense:
            flat[first:last] = reduced[at : at + last - first]
            at += last - first
        for matrix, factor in self._factors(reduced, at):
            mean = matrix.of(flat)
            mean = mean.T if self._across else mean
            # Into a tensor that is given: else autocast, in which a program may step, would compute in half precision.
            mean.copy_(torch.mm(factor, matrix.basis.T, out=factor.new_empty(mean.shape)))
            matrix.basis = _orthonormal(factor)
        flat[-1] = reduced[self._weight_at(reduced)]
        self._across = not self._across

    def _factors(self, reduced: torch.Tensor, at: int) -> list[tuple[_Matrix, torch.Tensor]]:
        found = []
        for matrix in self._matrices:
            length = matrix.cols if self._across else matrix.rows
            found.append((matrix, reduced[at : at + RANK * length].view(length, RANK)))
            at += RANK * length
        return found

    def _weight_at(self, reduced: torch.Tensor) -> int:
        return reduced.numel() - self._bucket.tail - 1

    def drop_infinite(self) -> None:
        """A gradient that was no number is in this step, on all ranks, and in no later one."""
        self._order()
        self.restart()
        if (left := self._residual) is not None:  # Without a look of the host's at the device.
            self._residual = torch.where(torch.isfinite(left).all(), left, torch.zeros_like(left))
            self._fence = self._streams.give_one(KEPT, self._bucket.flat)

    # ---- to one rank ----------------------------------------------------------------------------------------

    def pack(self, flat: torch.Tensor, *, small: bool) -> tuple[bytes, torch.Tensor | None] | None:
        """What is sent to one rank for a contribution with the residual added, and what that would leave (`keep`).

        Args:
            flat: The contribution, in host memory or the bucket's.
            small: Whether as int8; then None where that is impossible, or no smaller.
        """
        self._order()
        total = flat[:-1].detach().to("cpu", self._dtype, copy=True)
        if self._residual is not None:
            total.add_(self._residual.cpu())
        weight, dtype = float(flat[-1]), self._bucket.flat.dtype
        return small_bytes(total, weight, dtype) if small else (whole_bytes(total, weight, dtype), None)

    def shrink(self, flat: torch.Tensor, ranges: Sequence[tuple[int, int]], *, small: bool) -> list[bytes | None]:
        """Make of a contribution in host memory, with the residual added, what is sent to servers; keep what is left.

        Args:
            flat: The contribution. It becomes what its receiver makes of the payloads.
            ranges: Begin and end of the elements that travel by themselves.
            small: Whether as int8. A range for which that is impossible, or no smaller, travels as it is in `flat`.

        Returns:
            Per range its payload, None where it travels as it is.
        """
        if not small and self._residual is None:
            return [None] * len(ranges)
        self._order()
        total, found = self._total(flat), list[bytes | None]()
        for start, stop in ranges:
            part = total[start:stop]
            made = shrunk(part, flat.dtype) if small else None
            flat[start:stop] = part if made is None else made[1]
            part.copy_(torch.zeros_like(part) if made is None else part - made[1])
            found.append(None if made is None else made[0])
        self.keep(total if small else None)
        return found

    def keep(self, left: torch.Tensor | None) -> None:
        """What `pack` gave has been sent."""
        self._residual = None if left is None else left.to(self._bucket.flat.device)
        self._fence = self._streams.give_one(KEPT, self._bucket.flat)

    # ---- state ----------------------------------------------------------------------------------------------

    def residuals(self) -> list[torch.Tensor] | None:
        """What is left to send, one tensor per parameter; None where nothing is."""
        if self._residual is None:
            return None
        self._order()
        padded = torch.cat([self._residual, self._residual.new_zeros(1)])
        return [view.clone() for view in self._bucket.split(padded)]

    def load(self, residuals: list[torch.Tensor] | None) -> None:
        """Replace what is left to send."""
        self._order()
        self._residual = None
        if residuals is not None:
            padded = torch.zeros(self._bucket.numel + 1, dtype=self._dtype, device=self._bucket.flat.device)
            for view, value in zip(self._bucket.split(padded), residuals, strict=True):
                view.copy_(value)
            self._residual = padded[:-1]
        self._fence = self._streams.give_one(KEPT, self._bucket.flat)


def _rows(param: torch.Tensor) -> int:
    """Length of the outermost dimension in memory, 0 for what is no matrix."""
    if param.dim() < 2:
        return 0
    strides = memory_format_of(param)
    return int(param.shape[max(range(param.dim()), key=lambda dim: (strides[dim], param.shape[dim]))])


def _orthonormal(columns: torch.Tensor) -> torch.Tensor:
    """An orthonormal basis that contains the span of `columns`; complete where these are dependent or zero."""
    basis: torch.Tensor = torch.linalg.qr(columns)[0].contiguous()
    return basis
