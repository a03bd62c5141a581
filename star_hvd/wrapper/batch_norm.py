"""Horovod's `SyncBatchNorm`, which runs collectives inside forward and so needs every rank in lockstep.

A layer that is used keeps every optimizer of the job in `sync`, whether the model has it from here or, in a module of
its own, from `horovod.torch`: Horovod's class itself says so.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from horovod.torch.sync_batch_norm import SyncBatchNorm as _SyncBatchNorm

from star_hvd.input.network import NORMALIZES
from star_hvd.runtime import runtime

__all__ = ["SyncBatchNorm"]


class SyncBatchNorm(_SyncBatchNorm):  # type: ignore[misc]  # Horovod is untyped.
    """Batch normalization over all ranks; its presence keeps every optimizer of the job in `sync`."""


_forward = _SyncBatchNorm.forward


@functools.wraps(_forward)
def _staying_in_sync(layer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    run = runtime.current()
    if run is not None and layer.training:
        for driver in run.drivers.values():
            driver.pin(NORMALIZES, equal_batches=True)
    output: torch.Tensor = _forward(layer, *args, **kwargs)
    return output


_SyncBatchNorm.forward = _staying_in_sync
