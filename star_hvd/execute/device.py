"""Ordering between the training thread's and the helper's work on a GPU.

The helper works on a stream of its own, so that standing in for a rank does not queue up behind that rank's slow
kernels. Where tensors pass from one thread to the other, the giver waits for its stream first. That costs one wait
per step in relaxed modes and nothing on a CPU or in `sync`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from star_hvd.buckets import Bucket

__all__ = ["fence", "helper_stream"]


def fence(buckets: Sequence[Bucket]) -> None:
    """Wait until everything this thread has queued on the buckets' devices is done."""
    for device in {bucket.flat.device for bucket in buckets if bucket.flat.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def helper_stream(buckets: Sequence[Bucket]) -> AbstractContextManager[object]:
    """A stream of the helper's own as the current one; does nothing without a GPU."""
    for bucket in buckets:
        if bucket.flat.is_cuda:
            torch.cuda.set_device(bucket.flat.device)
            return torch.cuda.stream(torch.cuda.Stream(bucket.flat.device))
    return contextlib.nullcontext()
