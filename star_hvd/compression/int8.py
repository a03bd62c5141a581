"""Encodes a vector as 8-bit integers with one scale per block, for transfers from one rank to another.

A block's scale is its largest magnitude over 127. Rounding is deterministic: the sender knows exactly what the receiver
decodes, and keeps the difference for its next transfer (error feedback).
"""

from __future__ import annotations

import torch

__all__ = ["BLOCK", "decode", "encode", "size_bytes"]

BLOCK = 1024  # Scales add 0.4 % to the size; in larger blocks, one large value costs more values their precision.
_MOST = 127


def size_bytes(numel: int) -> int:
    """Return the size of an encoded vector of `numel` elements."""
    return 4 * _blocks(numel) + numel


def encode(vector: torch.Tensor) -> bytes:
    """Encode a vector of float32 or float64 in host memory: the scales, then the integers."""
    rows = vector.new_zeros(_blocks(vector.numel()) * BLOCK)
    rows[: vector.numel()] = vector
    rows = rows.view(-1, BLOCK)
    scales = (rows.abs().amax(dim=1) / _MOST).to(torch.float32)
    divisors = torch.where(scales > 0, scales, 1.0).to(vector.dtype)
    numbers = (rows / divisors.unsqueeze(1)).round_().clamp_(-_MOST, _MOST).to(torch.int8)
    return scales.numpy().tobytes() + numbers.view(-1)[: vector.numel()].numpy().tobytes()


def decode(payload: bytes | bytearray | memoryview, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Decode the result of `encode` to float32 or float64. If a value was not finite, its whole block is not.

    Args:
        payload: `size_bytes(numel)` bytes.
        numel: Number of elements.
        dtype: dtype of the vector.
    """
    if not numel:
        return torch.empty(0, dtype=dtype)
    own, count = bytearray(payload), _blocks(numel)
    scales = torch.frombuffer(own, dtype=torch.float32, count=count).to(dtype)
    numbers = torch.frombuffer(own, dtype=torch.int8, offset=4 * count).to(dtype)
    return numbers.mul_(scales.repeat_interleave(BLOCK)[:numel])


def _blocks(numel: int) -> int:
    return -(-numel // BLOCK)
