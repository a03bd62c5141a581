"""Late gradients of `subgroup` under `Compression.auto`: uncompressed, or as int8 with error feedback.

The residual of int8 stays with this rank, in the same memory as the residual of a reduction (`BucketCodec`). It is
added to the next push, or to the rank's next contribution once it reduces again, and is part of `state_dict()`.

An uncompressed push and one of int8 have different sizes, by which the parent tells them apart. Buckets of one or two
elements are smaller as they are, and are sent like that in both.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from scheduler.transmission.decision import Decision
from scheduler.transmission.push_form import PushChoice
from star_hvd.compression import int8
from star_hvd.engine.buckets import Bucket
from star_hvd.errors import ChannelError

__all__ = ["PushCodec", "Residuals", "shrunk", "small_bytes", "small_size_bytes", "unpack", "whole_bytes"]

logger = logging.getLogger("star_hvd")

_WEIGHT = struct.Struct("<d")


class Residuals(Protocol):
    """The part of `LossyWire` used here."""

    forbidden: str

    def pack(self, flats: Sequence[torch.Tensor], *, small: bool) -> bytes | None: ...


class PushCodec:
    """Encodes one rank's pushes in the form that takes less time; used by one thread at a time.

    Args:
        residuals: Encodes, and keeps this rank's residuals.
        rank: This rank.
        choice: Chooses the form.
        note: Called with every decision.
    """

    def __init__(
        self,
        residuals: Residuals,
        rank: int,
        choice: PushChoice | None = None,
        note: Callable[[Decision], None] = lambda decision: None,
    ) -> None:
        self.choice = choice or PushChoice()
        self._residuals, self._rank, self._note = residuals, rank, note
        self._small = False

    def pack(self, flats: Sequence[torch.Tensor]) -> bytes:
        """Return the bytes to send for contributions to all buckets: gradients times weight, then the weight."""
        wanted = self.choice.small and not self._residuals.forbidden
        body = self._residuals.pack(flats, small=True) if wanted else None
        self._small = body is not None
        if body is None:
            body = self._residuals.pack(flats, small=False)
        assert body is not None
        return body

    def took(self, time_s: float) -> None:
        """Note how long the last push took, including encoding, decoding and the parent's answer."""
        if self._residuals.forbidden:
            return
        if self.choice.observe(self._small, time_s):
            logger.info("rank %d: late gradients travel as %s", self._rank, self.choice.reason)
            self._note(self.choice.decision)


def whole_bytes(total: torch.Tensor, weight: float, dtype: torch.dtype) -> bytes:
    """Return an uncompressed contribution: the vector, then the weight, in the bucket's dtype."""
    flat = torch.empty(total.numel() + 1, dtype=dtype, device="cpu")
    flat[:-1] = total
    flat[-1] = weight
    return flat.view(torch.uint8).numpy().tobytes()


def small_bytes(total: torch.Tensor, weight: float, dtype: torch.dtype) -> tuple[bytes, torch.Tensor] | None:
    """Return a contribution as int8, or whole if that is smaller, and the residual of `total`; None if not finite.

    The weight is sent in full precision. The residual is relative to the decoded vector in the bucket's dtype, which is
    what the parent gets.
    """
    if not _smaller(total.numel(), dtype):
        sent = total.to(dtype)
        whole = whole_bytes(total, weight, dtype), total - sent
        return whole if bool(torch.isfinite(sent).all()) else None
    if (made := _encoded(total, dtype)) is None:
        return None
    payload, sent = made
    return payload + _WEIGHT.pack(weight), total - sent


def small_size_bytes(numel: int, dtype: torch.dtype) -> int:
    """Return the size of a bucket's part of a push of int8."""
    return min(int8.size_bytes(numel) + _WEIGHT.size, (numel + 1) * dtype.itemsize)


def shrunk(part: torch.Tensor, dtype: torch.dtype) -> tuple[bytes, torch.Tensor] | None:
    """Return some elements as int8, and as the receiver decodes them; None if not finite or int8 is not smaller."""
    return _encoded(part, dtype) if int8.size_bytes(part.numel()) < part.numel() * dtype.itemsize else None


def _encoded(total: torch.Tensor, dtype: torch.dtype) -> tuple[bytes, torch.Tensor] | None:
    payload = int8.encode(total)
    sent = int8.decode(payload, total.numel(), total.dtype).to(dtype)
    return (payload, sent) if bool(torch.isfinite(sent.sum(dtype=torch.float64))) else None


def unpack(body: bytes | bytearray, buckets: Sequence[Bucket]) -> list[torch.Tensor]:
    """Return the contributions of a push in host memory, one per bucket.

    Raises:
        ChannelError: The size fits neither form of a push for these buckets.
    """
    whole = [(bucket.numel + 1) * bucket.flat.element_size() for bucket in buckets]
    if len(body) == sum(whole):
        parts = zip(_cut(body, whole), buckets, strict=True)
        return [_from_whole(part, bucket) for part, bucket in parts]
    small = [small_size_bytes(bucket.numel, bucket.flat.dtype) for bucket in buckets]
    if len(body) != sum(small):
        raise ChannelError(f"a late gradient has {len(body)} bytes; expected {sum(whole)}, or {sum(small)} as int8")
    return [_from_small(part, bucket) for part, bucket in zip(_cut(body, small), buckets, strict=True)]


def _from_whole(part: bytes | bytearray, bucket: Bucket) -> torch.Tensor:
    return torch.frombuffer(bytearray(part), dtype=bucket.flat.dtype)


def _from_small(part: bytes | bytearray, bucket: Bucket) -> torch.Tensor:
    if not _smaller(bucket.numel, bucket.flat.dtype):
        return _from_whole(part, bucket)
    flat = torch.empty(bucket.numel + 1, dtype=bucket.flat.dtype, device="cpu")
    flat[:-1] = int8.decode(part[: -_WEIGHT.size], bucket.numel, bucket.average_dtype)
    flat[-1] = _WEIGHT.unpack(part[-_WEIGHT.size :])[0]
    return flat


def _cut(body: bytes | bytearray, sizes: Sequence[int]) -> list[bytes | bytearray]:
    parts, position = [], 0
    for size in sizes:
        parts.append(body[position : position + size])
        position += size
    return parts


def _smaller(numel: int, dtype: torch.dtype) -> bool:
    """Whether a bucket is smaller as int8."""
    return small_size_bytes(numel, dtype) < (numel + 1) * dtype.itemsize
