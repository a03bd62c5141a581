"""Sparse gradients, reduced individually as in Horovod; in their buckets once a relaxed mode has been in force."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["SparseGradients"]


class SparseGradients:
    """Reduces the sparse gradients of a step separately from the flat buckets.

    Args:
        as_dense: Whether to reduce them inside the bucket and make the mean sparse afterwards.
        summed: Whether the reduction is `op=Sum`; inside the bucket the engine scales the mean.
        replayed: Whether helpers replay relaxed steps. They have dense means: a sparse one may give other last bits.
    """

    def __init__(self, as_dense: bool, *, summed: bool = False, replayed: bool = False) -> None:
        self._as_dense = as_dense
        self._replayed = replayed
        self._summed = summed
        self._seen: set[torch.nn.Parameter] = set()
        self._waiting: dict[torch.nn.Parameter, Callable[[], Any]] = {}

    @property
    def any(self) -> bool:
        """Whether a gradient has ever been sparse."""
        return bool(self._seen)

    def is_sparse(self, param: torch.nn.Parameter) -> bool:
        """Whether this parameter's gradient is sparse, now or in an earlier step (a missing one is then empty)."""
        if param.grad is not None and param.grad.is_sparse:
            self._seen.add(param)
        return param in self._seen

    def give(self, param: torch.nn.Parameter, view: torch.Tensor, name: str, *, in_bucket: bool = False) -> None:
        """Start the reduction of one gradient.

        Args:
            param: The parameter.
            view: Its gradient's place in the bucket.
            name: Name of a reduction by itself.
            in_bucket: Whether it is reduced inside the bucket whatever the user wants.
        """
        if param.grad is None:
            param.grad = torch.zeros_like(param).to_sparse()
        if self._as_dense or in_bucket:
            view.copy_(param.grad.to_dense())
            stays_dense = in_bucket and self._replayed
            self._waiting[param] = lambda: view.detach() if stays_dense else view.to_sparse()
            return
        from horovod.torch import mpi_ops

        view.zero_()
        op = mpi_ops.Sum if self._summed else mpi_ops.Average
        finish = mpi_ops.sparse_allreduce_async(param.grad, name=name, op=op)
        self._waiting[param] = lambda: _as_sparse(finish())

    def collect(self) -> None:
        """Put the reduced gradients into `param.grad`."""
        waiting, self._waiting = self._waiting, {}
        for param, finish in waiting.items():
            param.grad = finish()


def _as_sparse(reduced: torch.Tensor) -> torch.Tensor:
    return reduced if reduced.is_sparse else reduced.to_sparse()
