"""Which of the program's loaders feeds the training, and how much the gradient of a batch weighs.

A program may iterate over several loaders: for training, for validation in the middle of an epoch, a new one every
epoch or in every stage. A loader feeds the training if gradients follow its batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

__all__ = ["Feeding"]

_KEPT = 64  # Weights of each loader; at least as many as `backward_passes_per_step`.
_LOADERS_KEPT = 8
_SURE = 2  # Gradients after which a loader counts as the one that feeds the training.


class Feeding:
    """The loaders of one rank, for the training thread. Numbers of loaders are equal on all ranks.

    Args:
        found: Called with a loader's number when gradients have followed its batches `_SURE` times in a row, unless
            it was the last to be named.

    Attributes:
        loader: The loader that feeds the training, -1 before any has.
    """

    def __init__(self, found: Callable[[int], None]) -> None:
        self.loader = -1
        self._found = found
        self._open: list[int] = []  # Loaders that the program iterates over.
        self._weights: dict[int, deque[float]] = {}
        self._since: list[int] = []  # Those that gave batches since the last gradient, in this order.
        self._times, self._named = 0, -1
        self._given: deque[float] = deque(maxlen=_KEPT)  # Weights that the user gave to the passes of a gradient.
        self._is_given, self._used = False, False  # Whether the latest batch has one; whether a gradient had these.

    def begin(self, loader: int) -> None:
        """Note that the program starts an iteration over a loader."""
        self._open.append(loader)

    def end(self, loader: int) -> None:
        """Note that an iteration over a loader is over: no gradient is of its batches from here on."""
        if loader in self._open:
            self._open.remove(loader)
        if loader not in self._open:
            self._since = [each for each in self._since if each != loader]

    def note(self, loader: int, weight: float) -> None:
        """Note a batch that a loader hands out.

        Args:
            loader: The loader.
            weight: The batch's weight: its samples over those of a usual batch.
        """
        if loader not in self._weights:
            for old in [each for each in self._weights if each not in self._open][: 1 - _LOADERS_KEPT]:
                del self._weights[old]
            self._weights[loader] = deque(maxlen=_KEPT)
        self._weights[loader].append(weight)
        if loader not in self._since:
            self._since.append(loader)
        self._is_given = False

    def weigh(self, weight: float) -> None:
        """Note the weight that the user gives to the latest batch."""
        if self._used:
            self._given.clear()
        self._given.append(weight)
        self._is_given, self._used = True, False

    def weight(self, passes: int) -> float:
        """Return the weight of a gradient that is complete: the mean of the last `passes` batches of the loader.

        If the user weighed the latest one, it is the mean of what was given since the last gradient. 1 outside of
        iterations, as for the batches of any other loader.
        """
        self._choose()
        self._used = True
        if self._is_given:
            return _mean(self._given, passes)
        if self.loader not in self._open:
            return 1.0
        return _mean(self._weights.get(self.loader, ()), passes)

    @property
    def largest(self) -> float:
        """The largest recent weight of the loader that feeds the training, 0 if unknown. For any thread."""
        return max(list(self._weights.get(self.loader, ())), default=0.0)

    def _choose(self) -> None:
        """Find out which loader the gradient is of: the same as before if it has given a batch since."""
        if not self._since:
            return  # Another bucket, or another step with the same batch.
        since, self._since = self._since, []
        before, self.loader = self.loader, self.loader if self.loader in since else since[0]
        self._times = self._times + 1 if self.loader == before else 1
        if self._times >= _SURE and self.loader != self._named:
            self._named = self.loader
            self._found(self.loader)


def _mean(weights: Iterable[float], passes: int) -> float:
    """Return the mean of the last `passes` weights, 1 if there are none."""
    recent = list(weights)[-passes:]
    return sum(recent) / len(recent) if recent else 1.0
