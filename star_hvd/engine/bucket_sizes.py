"""Choose the sizes of an optimizer's buckets, and which parameters share one."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["limits_of", "partition"]

_LEAST_BUCKETS = 4  # With fewer, the first gradients of a small network would wait for its last ones.
_SMALL_BUCKETS = 16  # Where the forward pass waits for each bucket by itself, or other buckets queue behind it.
# Lower bound for a small bucket, as long as that leaves four of them: each costs a negotiation and an optimizer step.
# 1 MB of gradients, 4 ranks on 2 cores, without and with overlap: 85 and 81 ms a step with 64 KiB at 200 Mbit/s, 87
# and 78 with 128, 91 and 84 with 256 (Horovod 82); at 50 Mbit/s 328 and 280, 334 and 291, 350 and 320 (Horovod 326).
_SMALL_BYTES = 64 * 1024


def limits_of(size_bytes: int, most_bytes: int, *, by_bucket: bool) -> list[int]:
    """Return the size limit of each bucket, in backward order; the last limit applies to all further buckets.

    The first bucket is small, so that the link has work soon after backward starts (as in PyTorch's DDP). Each further
    one is up to twice as large: while a link slower than backward sends one bucket, backward fills the next. No limit
    exceeds a quarter of the gradient.

    Args:
        size_bytes: Size of all gradients.
        most_bytes: The user's limit.
        by_bucket: Whether the next forward pass waits for each bucket by itself: then all have the small size.
    """
    quarter = max(1, -(-size_bytes // _LEAST_BUCKETS))
    small = max(-(-size_bytes // _SMALL_BUCKETS), min(_SMALL_BYTES, quarter))
    if by_bucket:
        return [min(small, most_bytes)]
    limits = [small]
    while limits[-1] < quarter:
        limits.append(min(2 * limits[-1], quarter))
    return [min(limit, most_bytes) for limit in limits]


def partition(sizes_bytes: Sequence[int], limits_bytes: Sequence[int]) -> list[list[int]]:
    """Cut a sequence of sizes into consecutive runs within these limits; a larger item gets a run of its own.

    Every index appears exactly once (torchft's bucketing advances by the capacity and loses tensors that did not fit;
    the test replays its failing sizes).

    Args:
        sizes_bytes: Sizes of the items, in order.
        limits_bytes: Limits of the runs, in order; the last one applies to all further runs.

    Raises:
        ValueError: There are no limits, or one is not positive.
    """
    if not limits_bytes or min(limits_bytes) < 1:
        raise ValueError(f"limits of buckets are {list(limits_bytes)} bytes; expected at least 1 each")
    runs: list[list[int]] = []
    filled = 0
    for index, size in enumerate(sizes_bytes):
        if not runs or filled + size > limits_bytes[min(len(runs), len(limits_bytes)) - 1]:
            runs.append([])
            filled = 0
        runs[-1].append(index)
        filled += size
    return runs
