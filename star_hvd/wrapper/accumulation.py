"""Gradients of micro-batches, accumulated until a step is whole.

While a loader cuts the batches (`hvd.shard(..., microbatches=k)`), each backward pass gives the gradient g_m of one
micro-batch. The buckets' own buffers take up sum(w_m g_m), and `param.grad` is None in between: clipping by hand and
`zero_grad` find nothing to work on inside a step. Behind the last micro-batch of the step the buffers hold the mean
sum(w_m g_m) / sum(w_m), which is reduced once with the weight sum(w_m).
"""

from __future__ import annotations

import torch

from star_hvd.engine.buckets import Bucket
from star_hvd.errors import StarError
from star_hvd.input.microbatches import MicrobatchInHand

__all__ = ["Accumulation"]


class Accumulation:
    """The gradient of one optimizer's step, as far as it has come.

    Args:
        sparse_as_dense: Whether sparse gradients are made dense.

    Attributes:
        weight: Sum of the weights of the micro-batches.
        count: How many they are.
    """

    def __init__(self, sparse_as_dense: bool) -> None:
        self.weight, self.count = 0.0, 0
        self._sparse_as_dense = sparse_as_dense
        self._latest: MicrobatchInHand | None = None
        self._filled: dict[torch.nn.Parameter, torch.Tensor] = {}  # Views into the buckets that hold a sum.
        self._held: dict[torch.nn.Parameter, torch.Tensor] = {}  # Views that hold the gradient of a whole batch.
        self._taken: set[torch.nn.Parameter] = set()  # Parameters that have had the latest micro-batch.

    def add(self, param: torch.nn.Parameter, bucket: Bucket, position: int, part: MicrobatchInHand) -> None:
        """Take over the gradient that a backward pass has left in `param.grad`.

        Raises:
            StarError: It is sparse.
        """
        grad, view = param.grad, bucket.views[position]
        assert grad is not None
        if grad.is_sparse:
            if not self._sparse_as_dense:
                raise StarError(
                    "micro-batches need dense gradients; pass sparse_as_dense=True to DistributedOptimizer, or leave "
                    "microbatches out of hvd.shard"
                )
            grad = grad.to_dense()
        weight = part.weight
        if part is not self._latest:
            self._latest, self.weight, self.count = part, self.weight + weight, self.count + 1
            self._taken = set()
        self._taken.add(param)
        if param in part.covered:
            param.grad = None
            return
        with torch.no_grad():
            if param in self._filled:
                view.add_(grad, alpha=weight)
            else:  # Maybe the view itself, where it was zeroed and not let go of.
                torch.mul(grad, weight, out=view)
                self._filled[param] = view
        param.grad = None

    def hold(
        self, failed: MicrobatchInHand | None, given: dict[torch.nn.Parameter, torch.Tensor]
    ) -> frozenset[torch.nn.Parameter]:
        """A backward pass ran out of memory and is repeated in parts; returns the parameters that need nothing of them.

        Args:
            failed: The micro-batch that it was of, None for a whole batch.
            given: Parameters that have the gradient of the whole batch, with their views into the buckets.
        """
        covered = frozenset(given)
        for param in given:  # Autograd would add to a buffer that is being reduced.
            param.grad = None
        self._held.update(given)
        if failed is not None and failed is self._latest:
            covered |= self._taken
            self._latest, self.weight, self.count = None, self.weight - failed.weight, self.count - 1
        return covered

    def finish(self) -> None:
        """The step is whole: its mean is each parameter's gradient from here on."""
        for param, view in self._held.items():
            param.grad = view
        self._held.clear()
        for param, view in self._filled.items():
            param.grad = view.div_(self.weight) if self.weight > 0.0 else view
        self._filled.clear()

    def clear(self) -> None:
        """Begin the next step."""
        self.weight, self.count = 0.0, 0
        self._filled.clear()
        self._held.clear()
