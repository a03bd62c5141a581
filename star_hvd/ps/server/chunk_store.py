"""One chunk on a server: its parameters, and an optimizer of the user's class over its pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from star_hvd.ps.common.layout import Chunk, Layout, State
from star_hvd.ps.common.optimizer_spec import OptimizerSpec, RowReader, _own
from star_hvd.ps.common.record import Record, make_record, read_record
from star_hvd.ps.common.wire import Lent

__all__ = ["ChunkStore"]

_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
_MEMORY = 0.9  # Decay of the reference direction per update: about the last ten count.


class ChunkStore:
    """The parameters and the optimizer state of one chunk.

    Args:
        layout: The whole layout.
        chunk: Which chunk.
        spec: The user's optimizer.
        reader: Reads the workers' rows.

    Attributes:
        version: Updates applied so far.
        applied: Per rank, the step of its last push that was applied to the parameters.
        params: The parameters, one flat tensor.
        mirrored: The mirror's copy of `params`, None until it is written or if it may not be sent.
        seq: Number of the last order that changed `params`.
        wide: dtype in which gradients are summed.
    """

    def __init__(self, layout: Layout, chunk: Chunk, spec: OptimizerSpec, reader: RowReader) -> None:
        self.chunk = chunk
        self.version = 0
        self.seq = 0
        self.applied: dict[int, int] = {}
        self.row: list[float] | None = None
        self.mirrored: Lent | None = None
        self.params = torch.zeros(chunk.numel, dtype=layout.dtype(chunk))
        self.reference: torch.Tensor | None = None
        self._reader = reader
        self.wide = _WIDE.get(self.params.dtype, self.params.dtype)
        self._pieces = [torch.nn.Parameter(view) for view in self._views(self.params)]
        members: dict[int, list[torch.nn.Parameter]] = {}
        for piece, param in zip(chunk.pieces, self._pieces, strict=True):
            members.setdefault(piece.group, []).append(param)
        self._groups = list(members)
        self.optimizer = spec.build(members)

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        views, position = [], 0
        for piece in self.chunk.pieces:
            views.append(flat[position : position + piece.numel].view(piece.shape))
            position += piece.numel
        return views

    def load(self, params: torch.Tensor, states: Sequence[State], version: int) -> None:
        """Set parameters (copied) and optimizer state (not copied)."""
        self._invalidate_mirrored()
        self.params.copy_(params)
        self.optimizer.state.clear()
        for param, state in zip(self._pieces, states, strict=True):
            if state:
                self.optimizer.state[param] = dict(state)
        self.version = version

    def _invalidate_mirrored(self) -> None:
        if self.mirrored is not None:
            self.mirrored.drop()
        self.mirrored = None

    def states(self) -> list[State]:
        """Optimizer state per piece, not copied."""
        return [dict(self.optimizer.state[p]) if p in self.optimizer.state else {} for p in self._pieces]

    def use_row(self, row: Sequence[float] | None) -> None:
        """Set the hyperparameters from the next step on; None leaves them unchanged."""
        if row is None or row == self.row:
            return
        self.row = list(row)
        values = self._reader.values(row)
        for group, number in zip(self.optimizer.param_groups, self._groups, strict=True):
            group.update(_own(values[number]))

    def apply(
        self,
        parts: Sequence[float],
        buffers: Sequence[torch.Tensor],
        row: Sequence[float] | None = None,
        lr_factor: float = 1.0,
    ) -> None:
        """Make one optimizer step with the sum of factor * buffer, summed in the given order; may overwrite buffers.

        The gradient keeps the size that it has in synchronous training, and so does the optimizer's state: a smaller
        update is made by a smaller learning rate. Adam would divide a factor of all gradients out again, and weight
        decay would not follow it.

        Args:
            parts: The factors.
            buffers: One flat tensor per factor, in the parameters' dtype. If empty, only the version is incremented.
            row: Hyperparameters from this step on.
            lr_factor: Factor on the learning rates in this step alone; on the gradient in groups without one and with
                ASGD, which keeps it in its state. Rprop steps by the signs of a gradient alone and ignores it.
        """
        self.use_row(row)
        self._invalidate_mirrored()
        if buffers:
            total = self._sum(parts, buffers)
            if self.reference is not None:
                self.reference.mul_(_MEMORY).add_(total, alpha=lr_factor)
            for param, grad in zip(self._pieces, self._views(total.to(self.params.dtype)), strict=True):
                param.grad = grad
            with self._scaled(lr_factor):
                self.optimizer.step()
            self._gather()
        self.version += 1

    @contextmanager
    def _scaled(self, lr_factor: float) -> Iterator[None]:
        """Scale the learning rates inside the block, or the gradients; see `apply`."""
        before: list[tuple[dict[str, Any], Any, Any]] = []
        # Rprop's step sizes begin as the learning rate of its first step: they would stay too small.
        unscaled = lr_factor == 1.0 or isinstance(self.optimizer, torch.optim.Rprop)
        keeps_lr = isinstance(self.optimizer, torch.optim.ASGD)  # As `eta` of its next step.
        for group in () if unscaled else self.optimizer.param_groups:
            lr = None if keeps_lr else group.get("lr")
            if isinstance(lr, (int, float)) or (isinstance(lr, torch.Tensor) and lr.numel() == 1):
                group["lr"] = lr * lr_factor
                before.append((group, lr, group["lr"]))
            else:
                for param in group["params"]:
                    param.grad.mul_(lr_factor)
        try:
            yield
        finally:
            for group, lr, scaled in before:
                if group["lr"] is scaled:  # Else the optimizer itself has set another one.
                    group["lr"] = lr

    def _sum(self, factors: Sequence[float], buffers: Sequence[torch.Tensor]) -> torch.Tensor:
        first = buffers[0]
        total = first.to(self.wide) if first.dtype != self.wide else first
        if factors[0] != 1.0:
            total.mul_(factors[0])
        for factor, buffer in zip(factors[1:], buffers[1:], strict=True):
            total.add_(buffer.to(self.wide), alpha=factor)
        return total

    def _gather(self) -> None:
        """Copy parameters that the optimizer moved to other memory back into `params`."""
        for param, view in zip(self._pieces, self._views(self.params), strict=True):
            param.grad = None
            if param.data_ptr() != view.data_ptr():
                view.copy_(param.detach())
                param.data = view

    def watch(self, on: bool) -> None:
        """Switch tracking of the recent updates' direction, which the guard needs, on or off."""
        if on and self.reference is None:
            self.reference = torch.zeros(self.chunk.numel, dtype=self.wide)
        elif not on:
            self.reference = None

    def compare(self, buffer: torch.Tensor) -> tuple[float, float, float]:
        """Return the dot product of a gradient with the recent updates' direction, and both squared norms."""
        if self.reference is None:
            return 0.0, 0.0, 0.0
        wide = buffer.to(self.wide)
        products = (torch.dot(wide, self.reference), torch.dot(wide, wide), torch.dot(self.reference, self.reference))
        dot, mine, recent = (float(product) for product in products)
        return dot, mine, recent

    # ---- as bytes -----------------------------------------------------------------------------------------

    def record(self) -> Record:
        """Return the chunk's current state as a record, not copied.

        Raises:
            ChannelError: The optimizer's state holds something that a record cannot (`make_record`).
        """
        return make_record(self.params, self.states(), self.version, self.seq, self.applied, self.row)

    def restore(self, data: torch.Tensor) -> None:
        """Load the bytes of a record.

        Raises:
            ChannelError: The record is damaged or of another chunk.
        """
        version, seq, applied, row, params, states = read_record(data, self.params)
        self.use_row(row)
        self.load(params, states, version)
        self.seq, self.applied = seq, applied
