"""Attempts that the ranks of a job make together until one shows on all of them what a busy machine may hide."""

from __future__ import annotations

import time

import star_hvd as hvd

__all__ = ["agreed"]


def agreed(done: bool, end_s: float) -> bool:
    """Return, the same on all ranks, whether every rank is done, or rank 0's time is over. Collective.

    Args:
        done: Whether this rank is.
        end_s: Until when there are attempts, by `time.monotonic()`.
    """
    told = hvd.allgather_object((done, time.monotonic() >= end_s), name="test.attempt")
    return all(rank_done for rank_done, _ in told) or bool(told[0][1])
