"""Warn once about the effect of batch shares on batch normalization."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable

import torch

__all__ = ["warn_of_shares"]

logger = logging.getLogger("star_hvd")


def warn_of_shares(params: Iterable[torch.nn.Parameter]) -> bool:
    """Warn if a network with batch normalization is about to train with batches of different sizes.

    With the given statistics its gradient is still that of the global batch, but each rank takes mean and variance over
    its own batch, so a small share makes them noisy. Shares have no other effect.

    Args:
        params: The trained parameters.

    Returns:
        Whether a warning was given.
    """
    trained = {id(param) for param in params}
    # Once per job: layers are found by their parameters, since an optimizer does not know its network.
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
