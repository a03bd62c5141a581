"""Accumulate the gradients of micro-batches until a step is complete.

With a loader that cuts batches (`hvd.shard(..., microbatches=k)`), each backward pass gives the gradient g_m of one
micro-batch. The buckets' own buffers accumulate sum(w_m g_m), and `param.grad` is None in between, so that clipping by
hand and `zero_grad` have no effect inside a step. After the last micro-batch of the step the buffers hold the mean
sum(w_m g_m) / sum(w_m), which is reduced once with the weight sum(w_m).
"""

from __future__ import annotations

import torch

from star_hvd.engine.buckets import Bucket
from star_hvd.errors import StarError
from star_hvd.input.microbatches import MicrobatchInHand

__all__ = ["Accumulation"]

_SECOND = (
    "backward gave a gradient behind step() with the same micro-batch, which would count twice; expected one step() "
    "for each, after all of its backward passes. To make several steps with each batch, leave microbatches out of "
    "hvd.shard (and hvd.catch_out_of_memory, which cuts a batch that does not fit). If it is of another optimizer's "
    "loss, set requires_grad_(False) meanwhile for the parameters that this loss does not train"
)


class Accumulation:
    """The partially accumulated gradient of one optimizer's step.

    Args:
        sparse_as_dense: Whether to convert sparse gradients to dense ones.

    Attributes:
        weight: Sum of the micro-batches' weights.
        count: Number of micro-batches.
    """

    def __init__(self, sparse_as_dense: bool) -> None:
        self.weight, self.count = 0.0, 0
        self._sparse_as_dense = sparse_as_dense
        self._latest: MicrobatchInHand | None = None
        self._stepped: MicrobatchInHand | None = None  # That whose gradient is in the latest step, made or to be made.
        self._filled: dict[torch.nn.Parameter, torch.Tensor] = {}  # Views into the buckets that hold a sum.
        self._held: dict[torch.nn.Parameter, torch.Tensor] = {}  # Views that hold the gradient of a whole batch.
        self._taken: set[torch.nn.Parameter] = set()  # Parameters whose gradient of the latest micro-batch was added.

    def add(self, param: torch.nn.Parameter, bucket: Bucket, position: int, part: MicrobatchInHand) -> None:
        """Add the gradient that a backward pass has left in `param.grad`.

        Raises:
            StarError: It is sparse, of another micro-batch than `part`, or behind `step()` with the same one.
        """
        if part is self._stepped:
            raise StarError(_SECOND)
        if part.behind:
            raise StarError(
                "the loop took a second micro-batch before the first gave a gradient; expected backward() and step() "
                "for each. One that is to be left out needs a loss of 0 instead of `continue`, such as 0.0 * "
                "sum(p.sum() for p in model.parameters()). A wrapper that fetches batches ahead (to copy them to a "
                "GPU, for example) cannot know which are taken over by other ranks: leave it out (pin_memory and "
                "non_blocking copies work), or leave microbatches out of hvd.shard"
            )
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
            else:  # `grad` may be the view itself, if it was zeroed instead of set to None.
                torch.mul(grad, weight, out=view)
                self._filled[param] = view
        param.grad = None

    def note_step(self, part: MicrobatchInHand) -> None:
        """Note that `step()` was called while a micro-batch is in hand, whether or not it is the step's last one."""
        if part is self._latest:  # Otherwise it gave no gradient yet, and may still give one.
            self._stepped = part

    def hold(
        self, failed: MicrobatchInHand | None, given: dict[torch.nn.Parameter, torch.Tensor]
    ) -> frozenset[torch.nn.Parameter]:
        """Keep the gradients of a backward pass that ran out of memory and is repeated in parts.

        Args:
            failed: The micro-batch of that pass, None for a whole batch.
            given: Parameters that have the gradient of the whole batch, with their views into the buckets.

        Returns:
            The parameters that need no gradient from the parts.
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
        """Make the mean each parameter's gradient, since the step is complete."""
        for param, view in self._held.items():
            param.grad = view.detach()  # Not the view itself, see `Bucket.show`.
        self._held.clear()
        for param, view in self._filled.items():
            param.grad = (view.div_(self.weight) if self.weight > 0.0 else view).detach()
        self._filled.clear()

    def clear(self) -> None:
        """Reset for the next step."""
        self.weight, self.count, self._latest = 0.0, 0, None
        self._filled.clear()
        self._held.clear()
