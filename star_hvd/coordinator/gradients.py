"""What the coordinator knows of an optimizer's gradients: their bytes, their weights, and their noise. Pure."""

from __future__ import annotations

import statistics
from collections import deque

from scheduler.diagnosis.noise_scale import NoiseScale
from star_hvd.channel.messages.base import GradientSizes, HeaderNote, Register

__all__ = ["Gradients"]

_SENT_STEPS = 32  # Steps that say what is usual: more than a trial of a form of gradients takes.


class Gradients:
    """The gradients of one optimizer.

    Args:
        world_size: Number of ranks.

    Attributes:
        total_bytes: Bytes of a gradient of all parameters.
        edge_part: Fraction of them in the bucket that is filled last and needed first, see `Register`.
        pushed_part: Fraction of them that a push to one rank has in the smallest allowed form.
        noise: The gradient noise scale, in usual gradients of one rank.
    """

    def __init__(self, world_size: int) -> None:
        self.total_bytes, self.edge_part, self.pushed_part = 0, 1.0, 1.0
        self.noise = NoiseScale()
        self._world_size = world_size
        self._since_step = 0  # First step with gradients of these sizes.
        self._sent_bytes: deque[int] = deque(maxlen=_SENT_STEPS)  # Of the latest steps that reduced gradients.
        self._weights: deque[float] = deque(maxlen=_SENT_STEPS)  # Mean weights of a rank in the latest such steps.

    def registered(self, message: Register) -> None:
        """Take in what a rank says of its gradients when it makes the optimizer."""
        self.total_bytes = message.gradient_bytes
        self.edge_part, self.pushed_part = message.edge_part, message.pushed_part

    def resized(self, message: GradientSizes) -> None:
        """Take in the sizes since parameters were added, which every rank sends; the newest ones count."""
        same = message.gradient_bytes == self.total_bytes and message.step == self._since_step
        if message.step < self._since_step or same:
            return
        self.total_bytes, self._since_step = message.gradient_bytes, message.step
        self.edge_part, self.pushed_part = message.edge_part, message.pushed_part
        self._sent_bytes.clear()  # Smaller gradients would pass for a form of compression.

    def note(self, message: HeaderNote) -> None:
        """Take in the statistics of a step's reduced header."""
        if message.sent_bytes > 0 and message.step >= self._since_step:
            self._sent_bytes.append(message.sent_bytes)
        if message.local_count == self._world_size and message.folds == 0 and message.weight > 0:
            # Weights may be in any unit, as tokens are; the noise scale is in usual gradients of one rank.
            mean_weight = message.weight / self._world_size
            self._weights.append(mean_weight)
            usual = statistics.median(self._weights)
            whole, part = message.weight / usual, mean_weight / usual
            self.noise.update(message.local_sqr / message.weight, message.mean_sqr, part, whole)

    @property
    def reduced_part(self) -> float:
        """Fraction of the gradient's bytes that steps send: of the smallest of the latest ones, since a form of
        `Compression.auto` is left for some steps after every change of plan, and for later trials."""
        if not (self._sent_bytes and self.total_bytes):
            return 1.0
        return min(1.0, min(self._sent_bytes) / self.total_bytes)
