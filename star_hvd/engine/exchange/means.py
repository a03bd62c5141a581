"""Compute the mean of a reduced bucket, and the gradient norms behind the noise scale."""

from __future__ import annotations

import torch

from star_hvd.engine.device import NORM, Fence, Streams

__all__ = ["LocalNorm", "divide", "norm"]


def norm(flat: torch.Tensor) -> torch.Tensor:
    """Return the norm of a flat buffer's gradients, accumulated in float32 or wider."""
    wide = torch.float64 if flat.dtype == torch.float64 else torch.float32
    found: torch.Tensor = torch.linalg.vector_norm(flat[:-1], dtype=wide)
    return found


def divide(total: torch.Tensor, flat: torch.Tensor, streams: Streams, ranks: int) -> torch.Tensor:
    """Write the mean times `ranks` into `flat`, without reading from a device, and return `flat`.

    Args:
        total: The sum, weight last: `flat` itself, or a tensor of a wider type, so that only the quotient is rounded.
        flat: The buffer.
        streams: Streams of the buffers' devices.
        ranks: What the mean is multiplied by.
    """
    if total is not flat:
        flat[-1:].copy_(total[-1:])
    if streams.queues(flat):
        whole = total[-1:].clamp_min(torch.finfo(total.dtype).tiny)  # Without any contribution the sum stays zero.
        torch.div(total[:-1], whole if ranks == 1 else whole.div_(ranks), out=flat[:-1])
        return flat
    factor = float(total[-1]) / ranks
    if factor not in (0.0, 1.0):  # If no rank contributed a gradient, the sum stays zero.
        torch.div(total[:-1], factor, out=flat[:-1])
    elif total is not flat:
        flat[:-1].copy_(total[:-1])
    return flat


class LocalNorm:
    """Squared norm of this rank's own gradient, measured every few steps.

    `add`, `take` and `clear` are called under the engine's lock, `read` by the training thread without it.

    Args:
        streams: Streams of the buffers' devices.
        interval_steps: Steps from one measurement to the next.

    Attributes:
        sqr: The sum so far in the current step.
    """

    def __init__(self, streams: Streams, interval_steps: int) -> None:
        self.sqr = 0.0
        self._streams = streams
        self._interval_steps = interval_steps
        self._queued: list[tuple[torch.Tensor, Fence]] = []  # Still on devices.

    def due(self, step: int) -> bool:
        """Whether it is measured in a step."""
        return step % self._interval_steps == 0

    def add(self, flat: torch.Tensor) -> None:
        """Add a complete bucket; if the host would have to wait for its norm, `read` adds it later."""
        if self._streams.queues(flat):
            self._queued.append((norm(flat), self._streams.give_one(NORM, flat)))
        else:
            self.sqr += float(norm(flat)) ** 2

    def take(self) -> list[tuple[torch.Tensor, Fence]]:
        """Return and clear the norms that are still on devices."""
        queued, self._queued = self._queued, []
        return queued

    def read(self, queued: list[tuple[torch.Tensor, Fence]]) -> None:
        """Wait for the devices and add the norms that `take` returned."""
        for found, fence in queued:
            fence.order(found)
        if queued:
            self._streams.await_host()
            self.sqr += sum(float(found) ** 2 for found, _ in queued)

    def clear(self) -> None:
        """Start over for another gradient."""
        self.sqr = 0.0
        self._queued.clear()
