"""Horovod's `SyncBatchNorm`, which runs collectives inside forward and so needs every rank in lockstep."""

from __future__ import annotations

from typing import Any

import torch
from horovod.torch.sync_batch_norm import SyncBatchNorm as _SyncBatchNorm

from star_hvd.input.network import NORMALIZES
from star_hvd.runtime import runtime

__all__ = ["SyncBatchNorm"]


class SyncBatchNorm(_SyncBatchNorm):  # type: ignore[misc]  # Horovod is untyped.
    """Batch normalization over all ranks; its presence keeps every optimizer of the job in `sync`."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Normalize; the statistics are reduced over all ranks while training."""
        run = runtime.current()
        if run is not None and self.training:
            for driver in run.drivers.values():
                driver.pin(NORMALIZES, equal_batches=True)
        output: torch.Tensor = super().forward(*args, **kwargs)
        return output
