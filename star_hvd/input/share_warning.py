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
    trained = list(params)
    vectors = [len(param) for param in trained if param.dim() == 1]
    if len(set(vectors)) == len(vectors):
        return False  # A normalization has a weight and a bias of one length.
    # Once per job, tens of milliseconds: layers are found by their parameters, since an optimizer does not know its
    # network.
    classes, known = _subclasses(torch.nn.modules.batchnorm._BatchNorm), {id(param) for param in trained}
    layers = [each for each in gc.get_objects() if type(each) in classes and id(each.weight) in known]
    if layers:
        logger.warning(
            "batch shares differ between ranks and the network has %d layers of batch normalization, whose statistics "
            "are of each rank's own batch: small shares make them noisier; use GroupNorm or LayerNorm, or mode sync",
            len(layers),
        )
    return bool(layers)


def _subclasses(of: type) -> set[type]:
    return {of}.union(*map(_subclasses, of.__subclasses__()))
