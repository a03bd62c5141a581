"""What batch shares change in a network with batch normalization, said once."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable

import torch

__all__ = ["warn_of_shares"]

logger = logging.getLogger("star_hvd")


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
