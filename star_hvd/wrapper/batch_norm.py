"""Horovod's `SyncBatchNorm`, which runs collectives inside forward and so needs every rank in lockstep."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable
from typing import Any

import torch
from horovod.torch.sync_batch_norm import SyncBatchNorm as _SyncBatchNorm

from star_hvd.runtime import runtime

__all__ = ["SyncBatchNorm", "warn_of_shares"]

logger = logging.getLogger("star_hvd")


class SyncBatchNorm(_SyncBatchNorm):  # type: ignore[misc]  # Horovod is untyped.
    """Batch normalization over all ranks; its presence keeps every optimizer of the job in `sync`."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Normalize; the statistics are reduced over all ranks while training."""
        run = runtime.current()
        if run is not None and self.training:
            for driver in run.drivers.values():
                driver.pin("SyncBatchNorm reduces over all ranks inside forward")
        output: torch.Tensor = super().forward(*args, **kwargs)
        return output


def warn_of_shares(params: Iterable[torch.nn.Parameter]) -> bool:
    """Warn where a network with batch normalization is about to train with batches of different sizes.

    Its gradient is still the one of the global batch for the statistics there are, but each rank takes mean and
    variance over its own batch, so a small share makes noisy ones: this is the only thing that shares change.

    Args:
        params: Those that are trained.

    Returns:
        Whether there was reason to.
    """
    trained = {id(param) for param in params}
    # Once in a job: a layer is found by what it trains, as an optimizer does not know its network.
    layers = [
        layer
        for layer in gc.get_objects()
        if issubclass(type(layer), torch.nn.modules.batchnorm._BatchNorm) and id(layer.weight) in trained
    ]
    if layers:
        logger.warning(
            "batch shares differ between ranks and the network has %d layers of batch normalization, whose statistics "
            "are of each rank's own batch: small shares make them noisier; use GroupNorm or LayerNorm, or mode sync",
            len(layers),
        )
    return bool(layers)
