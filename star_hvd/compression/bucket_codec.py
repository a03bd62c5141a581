"""Lossy forms of one bucket with error feedback: what is not sent, the residual, is added to the next contribution.

A contribution with little weight, as of the short last batch of an epoch, takes only a part of the residual with it.
The sum is divided by the weights, so the whole residual would count a multiple of the gradients it comes from. (Not so
what is sent to one rank alone, which adds it to its own contribution.)

Both forms are linear in what is sent, so that one sum over the ranks is the sum of their weighted contributions,
whether these are whole gradients, late ones, those of unequal batches, or zeros.

Low rank (PowerSGD, Vogels et al. 2019, in the alternating form of ACP-SGD, Zhang et al. 2023): for every matrix M, the
gradient plus the residual, a rank sends P = M Q, where Q has orthonormal columns and is equal on all ranks, and keeps
the residual M - P Q^T. All ranks use (sum P) Q^T. The next step multiplies M^T with the orthonormalized sum of the P.
So there is one reduction per step, and the basis follows the gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from scheduler.transmission.wire import HALF, LOW_RANK, NONE
from star_hvd.compression.pushes import shrunk, small_bytes, whole_bytes
from star_hvd.engine.buckets import Bucket, memory_format_of, set_weight
from star_hvd.engine.device import DONE, KEPT, Streams

__all__ = ["RANK", "BucketCodec", "without_form"]

RANK = 8  # With 4, a small convolutional network lost 0.6 points of accuracy in 160 steps; with 8 it did not.
_DOWN, _ACROSS, _HALF = _SUFFIXES = "p", "q", "f"
_MOST_HALF = 60_000.0  # The largest float16 is 65504.
_USUAL_FROM = 0.5  # A contribution with this part of the usual weight takes the whole residual with it.
_USUAL_KEPT = 0.9  # Part of the usual weight that is left after one smaller contribution.


@dataclass(slots=True)
class _Matrix:
    """One parameter in the bucket: its offset, its shape as a matrix, the first basis, and the next step's basis."""

    start: int
    rows: int
    cols: int
    first: torch.Tensor
    basis: torch.Tensor

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.start : self.start + self.rows * self.cols].view(self.rows, self.cols)


def without_form(name: str) -> str:
    """Return a tensor's name without the suffix of its form."""
    return name.rstrip("".join(_SUFFIXES))


class BucketCodec:
    """Encodes contributions to a bucket and decodes their sum. Encoding and decoding take turns.

    Args:
        bucket: The bucket.
        streams: Creates the fences, as different threads may encode and decode.
        world_size: Ranks whose contributions are summed.
    """

    def __init__(self, bucket: Bucket, streams: Streams, world_size: int) -> None:
        self._bucket = bucket
        self._dtype = bucket.average_dtype
        self._residual: torch.Tensor | None = None
        self._matrices = self._layout()
        self._dense = self._between()
        self._sent = NONE
        self._unit = 1.0
        self._usual_weight = 0.0  # Of this rank's contributions; 0 before the first.
        self._largest: torch.Tensor | None = None  # Magnitude in the decoded tensor, until the host has checked it.
        self.begin(streams, world_size)

    def begin(self, streams: Streams, world_size: int) -> None:
        """Start with the basis common to all ranks; keep the residual, which is this rank's own."""
        self._streams, self._fence = streams, DONE
        self._most = _MOST_HALF / world_size
        self.restart()

    def restart(self) -> None:
        """Return to the first basis, as in `begin`, within the same job."""
        self._across = False  # Whether the transposed matrices are projected, as in every second step.
        for matrix in self._matrices:
            matrix.basis = matrix.first

    # ---- layout ---------------------------------------------------------------------------------------------

    def _layout(self) -> list[_Matrix]:
        found, start = [], 0
        for param in self._bucket.params:
            rows = _rows(param)
            cols = param.numel() // rows if rows else 0
            if rows and 2 * RANK * (rows + cols) < param.numel():  # On average, less than a quarter is sent.
                first = self._first_basis(start, cols)
                found.append(_Matrix(start, rows, cols, first, first))
            start += param.numel()
        return found

    def _between(self) -> list[tuple[int, int]]:
        """Return begin and end of the runs of elements that are sent unchanged."""
        runs, begin = [], 0
        for matrix in self._matrices:
            runs.append((begin, matrix.start))
            begin = matrix.start + matrix.rows * matrix.cols
        runs.append((begin, self._bucket.numel))
        return [(first, last) for first, last in runs if last > first]

    def _first_basis(self, start: int, cols: int) -> torch.Tensor:
        """Create the basis on the host, so that it is equal on all devices; once, since the copy waits for them."""
        generator = torch.Generator().manual_seed(1_000_003 * self._bucket.index + start)
        values = torch.randn(cols, RANK, generator=generator, dtype=self._dtype, device="cpu")
        return _orthonormal(values).to(self._bucket.flat.device)

    # ---- one step -------------------------------------------------------------------------------------------

    def suffix(self, form: int) -> str:
        """Return the suffix of the tensor's name: Horovod caches a shape per name, and each form has its own shape."""
        if form == LOW_RANK and self._matrices:
            return _ACROSS if self._across else _DOWN
        return _HALF if form == HALF else ""

    def encode(self, flat: torch.Tensor, form: int, *, weight: float, unit: float = 1.0) -> torch.Tensor:
        """Return the tensor to reduce for `flat`.

        Args:
            flat: The contribution: gradients times weight, then the weight.
            form: One of `FORMS`.
            weight: Its weight, known without reading it from the device. 0 if it contains no gradient: the residual is
                not sent with zeros, and only in part with a weight much smaller than usual.
            unit: What weights and weighted gradients are divided by in float16: a power of two near a usual weight,
                equal on all ranks.
        """
        self._sent, self._unit = form if form != LOW_RANK or self._matrices else NONE, unit
        self._order(flat)
        held = self._hold_back(weight)
        if self._sent == NONE:
            if self._residual is not None:
                flat[:-1].add_(self._residual)
                self._residual = None
            reduced = self._bucket.to_wire(flat, weight)
        elif not weight:
            reduced = self._new(flat)
        elif self._sent == HALF:
            reduced = self._to_half(flat, weight)
        else:
            reduced = self._to_factors(flat, weight)
        self._release(held)
        self._fence = self._streams.give_one(KEPT, flat)
        return reduced

    def decode(self, reduced: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
        """Return the sum of all contributions, see `Wire.decode`. After a step's buckets, call `to_check`."""
        if self._sent == NONE:
            return self._bucket.sum_of(reduced, flat)
        self._order(reduced, flat)
        # A half-precision buffer would round the weight, by which all of the sum is divided.
        total = flat if flat.dtype == self._dtype else torch.empty_like(flat, dtype=self._dtype)
        if self._sent == HALF:
            total.copy_(reduced)
            if self._unit != 1.0:
                total.mul_(self._unit)
        else:
            self._from_factors(reduced, total)
        lowest, highest = torch.aminmax(reduced)  # A sum needs a wider type, to which torch would copy all of it.
        self._largest = torch.maximum(highest, -lowest)
        self._fence = self._streams.give_one(KEPT, flat)
        return total

    def to_check(self) -> torch.Tensor | None:
        """Return once the largest magnitude in the last decoded tensor, on its device.

        If it is not finite, so that a value of the tensor is not, call `drop_infinite`.
        """
        found, self._largest = self._largest, None
        if found is not None:
            self._fence.order(found)
        return found

    def _order(self, *tensors: torch.Tensor) -> None:
        kept = [] if self._residual is None else [self._residual]
        self._fence.order(*tensors, *kept, *(matrix.basis for matrix in self._matrices))

    def _new(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a zeroed tensor of the form, followed by the bucket's tail if a header can be sent there."""
        if self._sent == HALF:
            return torch.zeros(flat.numel(), dtype=torch.float16, device=flat.device)
        size = sum(last - first for first, last in self._dense) + 1 + self._bucket.tail
        size += sum(RANK * (matrix.cols if self._across else matrix.rows) for matrix in self._matrices)
        return torch.zeros(size, dtype=self._dtype, device=flat.device)

    def _hold_back(self, weight: float) -> torch.Tensor | None:
        """Reduce the residual to the part that is sent; return the rest for `_release`, None if there is none."""
        if weight == 0.0:
            held, self._residual = self._residual, None
            return held
        if not 0.0 < weight < math.inf:
            return None
        # A rank that gives little weight for good soon has another usual weight, so that its residual does not stay.
        self._usual_weight = max(weight, _USUAL_KEPT * self._usual_weight)
        share = weight / (_USUAL_FROM * self._usual_weight)
        if share >= 1.0 or self._residual is None:
            return None
        held = self._residual * (1.0 - share)
        self._residual.mul_(share)
        return held

    def _release(self, held: torch.Tensor | None) -> None:
        """Add what `_hold_back` returned to the new residual."""
        if held is not None:
            self._residual = held if self._residual is None else self._residual.add_(held)

    def _total(self, flat: torch.Tensor) -> torch.Tensor:
        """Add the gradient to the residual and return that sum, which is to be sent."""
        if self._residual is None:
            self._residual = torch.zeros(flat.numel() - 1, dtype=self._dtype, device=flat.device)
        return self._residual.add_(flat[:-1])

    def _to_half(self, flat: torch.Tensor, weight: float) -> torch.Tensor:
        total, reduced = self._total(flat), self._new(flat)
        scaled = total / self._unit
        reduced[:-1] = torch.where(scaled.isinf(), scaled, scaled.clamp(-self._most, self._most))
        set_weight(reduced, weight / self._unit)
        total.sub_(reduced[:-1], alpha=self._unit)
        return reduced

    def _to_factors(self, flat: torch.Tensor, weight: float) -> torch.Tensor:
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
        set_weight(reduced[: self._weight_at(reduced) + 1], weight)
        return reduced

    def _from_factors(self, reduced: torch.Tensor, flat: torch.Tensor) -> None:
        at = 0
        for first, last in self._dense:
            flat[first:last] = reduced[at : at + last - first]
            at += last - first
        for matrix, factor in self._factors(reduced, at):
            mean = matrix.of(flat)
            mean = mean.T if self._across else mean
            # Into an output tensor: otherwise autocast, if a program steps inside it, would compute in half precision.
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
        """Keep a non-finite gradient, which is in this step on all ranks, out of all later steps."""
        self._order()
        self.restart()
        if (left := self._residual) is not None:  # Without synchronizing the host with the device.
            self._residual = torch.where(torch.isfinite(left).all(), left, torch.zeros_like(left))
            self._fence = self._streams.give_one(KEPT, self._bucket.flat)

    # ---- to one rank ----------------------------------------------------------------------------------------

    def pack(self, flat: torch.Tensor, *, small: bool) -> tuple[bytes, torch.Tensor | None] | None:
        """Return the bytes to send to one rank for a contribution plus residual, and the new residual for `keep`.

        Args:
            flat: The contribution, in host memory or on the bucket's device.
            small: Whether as int8, or whole if that is smaller; returns None if a value is not finite.
        """
        self._order()
        total = flat[:-1].detach().to("cpu", self._dtype, copy=True)
        if self._residual is not None:
            total.add_(self._residual.cpu())
        weight, dtype = float(flat[-1]), self._bucket.flat.dtype
        return small_bytes(total, weight, dtype) if small else (whole_bytes(total, weight, dtype), None)

    def shrink(self, flat: torch.Tensor, ranges: Sequence[tuple[int, int]], *, small: bool) -> list[bytes | None]:
        """Encode a contribution in host memory, plus residual, for the servers; keep the new residual.

        Args:
            flat: The contribution; overwritten with the values that the receiver decodes.
            ranges: Begin and end of the ranges that are sent separately.
            small: Whether as int8. A range for which that is impossible or not smaller is sent unchanged from `flat`.

        Returns:
            Per range its payload, None if it is sent from `flat`.
        """
        if not small and self._residual is None:
            return [None] * len(ranges)
        self._order()
        held = self._hold_back(float(flat[-1]))
        total, found = self._total(flat), list[bytes | None]()
        for start, stop in ranges:
            part = total[start:stop]
            made = shrunk(part, flat.dtype) if small else None
            flat[start:stop] = part if made is None else made[1]
            part.copy_(torch.zeros_like(part) if made is None else part - made[1])
            found.append(None if made is None else made[0])
        self.keep(total if small else None)
        self._release(held)
        return found

    def keep(self, left: torch.Tensor | None) -> None:
        """Store the new residual, once the bytes from `pack` have been sent."""
        self._residual = None if left is None else left.to(self._bucket.flat.device)
        self._fence = self._streams.give_one(KEPT, self._bucket.flat)

    # ---- state ----------------------------------------------------------------------------------------------

    def residuals(self) -> list[torch.Tensor] | None:
        """Return the residual, one tensor per parameter; None if there is none."""
        if self._residual is None:
            return None
        self._order()
        padded = torch.cat([self._residual, self._residual.new_zeros(1)])
        self._fence = self._streams.give_one(KEPT, self._bucket.flat)
        return [view.clone() for view in self._bucket.split(padded)]

    def load(self, residuals: list[torch.Tensor] | None) -> None:
        """Replace the residual."""
        self._order()
        self._residual = None
        if residuals is not None:
            padded = torch.zeros(self._bucket.numel + 1, dtype=self._dtype, device=self._bucket.flat.device)
            for view, value in zip(self._bucket.split(padded), residuals, strict=True):
                view.copy_(value)
            self._residual = padded[:-1]
        self._fence = self._streams.give_one(KEPT, self._bucket.flat)


def _rows(param: torch.Tensor) -> int:
    """Return the length of the outermost dimension in memory, 0 with fewer than two dimensions."""
    if param.dim() < 2:
        return 0
    strides = memory_format_of(param)
    return int(param.shape[max(range(param.dim()), key=lambda dim: (strides[dim], param.shape[dim]))])


def _orthonormal(columns: torch.Tensor) -> torch.Tensor:
    """Return an orthonormal basis whose span contains `columns`; of full rank even if these are dependent or zero."""
    basis: torch.Tensor = torch.linalg.qr(columns)[0].contiguous()
    return basis
