"""Find layers of a network that limit how its batches may be divided, and warn once about batch normalization."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable

import torch
from horovod.torch.sync_batch_norm import SyncBatchNorm

__all__ = ["NORMALIZES", "SPARSE", "meets_in_pass", "normalizations", "trained", "warn_of_parts", "warn_of_shares"]

logger = logging.getLogger("star_hvd")

NORMALIZES = "SyncBatchNorm reduces over all ranks inside forward"
SPARSE = "sparse gradients are reduced by Horovod itself"


def warn_of_shares(params: Iterable[torch.nn.Parameter]) -> bool:
    """Warn if a network with batch normalization is about to train with batches of different sizes.

    With the given statistics its gradient is still that of the global batch, but each rank takes mean and variance over
    its own batch, so a small share makes them noisy. Shares have no other effect.

    Args:
        params: The trained parameters.

    Returns:
        Whether a warning was given.
    """
    layers = normalizations(params)
    if layers:
        logger.warning(
            "batch shares differ between ranks and the network has %d layers of batch normalization, whose statistics "
            "are of each rank's own batch: small shares make them noisier; use GroupNorm or LayerNorm, or mode sync",
            layers,
        )
    return bool(layers)


def warn_of_parts(params: Iterable[torch.nn.Parameter]) -> None:
    """Warn if a network with batch normalization is about to train with micro-batches."""
    layers = normalizations(params)
    if layers:
        logger.warning(
            "hvd.shard cuts batches and the network has %d layers of batch normalization, whose statistics are of one "
            "pass over micro-batches: they are noisier than those of a batch, and a pass of one sample fails; use "
            "GroupNorm or LayerNorm, or leave microbatches out",
            layers,
        )


def trained(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.nn.Parameter]:
    """Return the parameters of these optimizers."""
    return [param for each in optimizers for group in each.param_groups for param in group["params"]]


def normalizations(params: Iterable[torch.nn.Parameter]) -> int:
    """Return the number of layers of batch normalization whose weights are among these parameters.

    Takes tens of milliseconds: layers are found by their parameters, since an optimizer does not know its network.
    """
    params = list(params)
    vectors = [len(param) for param in params if param.dim() == 1]
    if len(set(vectors)) == len(vectors):
        return 0  # A normalization has a weight and a bias of one length.
    classes, known = _subclasses(torch.nn.modules.batchnorm._BatchNorm), {id(param) for param in params}
    return sum(type(each) in classes and id(each.weight) in known for each in gc.get_objects())


def meets_in_pass(params: Iterable[torch.nn.Parameter]) -> str:
    """Return which layer with some of these parameters reduces over all ranks within a pass, empty if none does.

    As far as layers show: these are Horovod's `SyncBatchNorm` and embeddings with sparse gradients.
    """
    known = {id(param) for param in params}
    normalizing, embedding = _subclasses(SyncBatchNorm), _subclasses(torch.nn.Embedding)
    embedding |= _subclasses(torch.nn.EmbeddingBag)
    for each in gc.get_objects():
        if type(each) in normalizing and id(each.weight) in known:
            return NORMALIZES
        if type(each) in embedding and each.sparse and id(each.weight) in known:
            return SPARSE
    return ""


def _subclasses(of: type) -> set[type]:
    return {of}.union(*map(_subclasses, of.__subclasses__()))
