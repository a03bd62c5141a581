"""Which of the program's loaders feeds the training, and how much the gradient of a batch weighs.

A program may iterate over several loaders: for training, for validation in the middle of an epoch, a new one every
epoch or in every stage. A loader feeds the training if gradients follow its batches.

A loop may fetch a batch ahead: it takes the next one before the gradient of the one it works on, as prefetchers to a
GPU do, and programs that have to know which batch is the last. Nothing says which batch a gradient is of, so that is
found from when batches are taken: before an epoch's first gradient there is one too many, before the second not. A loop
that skips its first batch looks alike, and counts as such a one until its epoch has ended without a gradient.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

__all__ = ["SURE", "Feeding"]

_KEPT = 64  # Weights of each loader; at least as many as `backward_passes_per_step`.
_LOADERS_KEPT = 8
SURE = 2  # Gradients after which a loader counts as the one that feeds the training.


class _Batches:
    """The batches of one loader, and the gradients that follow them.

    Attributes:
        ahead: Whether the loop over it fetches a batch ahead.
        last_due: Whether the loop has fetched all batches, and the gradient of the last one is to come.
        largest: The largest weight, 0 if there is none. Not of the latest batches alone: it is compared with the peak
            of memory use since the start.
    """

    def __init__(self) -> None:
        self.ahead = self.last_due = False
        self.largest = 0.0
        self._weights: deque[float] = deque(maxlen=_KEPT)
        self._unused = self._gradients = 0  # Batches since the last gradient, and gradients, of this iteration.
        self._noted, self._passes = 0, 1  # Batches of this iteration, and those of a gradient.
        self._confirmed = self._skips = False  # Whether a gradient has come behind the last batch, or has not.

    def begin(self) -> None:
        """Start an iteration."""
        complete = self._noted - self._gradients * self._passes >= self._passes  # Else too few for another gradient.
        # If none came, the first batch had no gradient, and none was ahead.
        self._skips |= self.last_due and complete and not self._confirmed
        self.last_due, self._unused, self._gradients, self._noted = False, 0, 0, 0

    def note(self, weight: float) -> None:
        """Note a batch."""
        self._weights.append(weight)
        self.largest = max(self.largest, weight)
        self._unused += 1
        self._noted += 1

    def used(self, passes: int) -> None:
        """Note a gradient of `passes` batches."""
        one_more = self._unused == passes + 1
        if self._gradients == 0:
            self.ahead = one_more and not self._skips
        elif self._gradients == 1 and one_more:
            self.ahead = False  # It takes more batches than it uses in every step.
        self._unused, self._gradients, self._passes = 0, self._gradients + 1, passes

    def end(self, *, exhausted: bool) -> None:
        """End the iteration."""
        self.last_due = exhausted and self.ahead

    def confirm(self) -> None:
        """Note a gradient, whatever its weight: behind the last batch it is that one's."""
        self._confirmed |= self.last_due

    def weight(self, passes: int) -> float:
        """Return the mean weight of the last batches that a gradient is of, 1 if there are none."""
        weights = list(self._weights)
        if self.ahead and not self.last_due:
            weights.pop()
        return _mean(weights, passes)

    @property
    def may_be_ahead(self) -> bool:
        """Whether the loop fetches ahead, or has taken several batches before its first gradient, as if it did."""
        return self.ahead or (self._gradients == 0 and self._unused > 1 and not self._skips)


class Feeding:
    """The loaders of one rank, for the training thread. Numbers of loaders are equal on all ranks.

    Args:
        found: Called with a loader's number when gradients have followed its batches `SURE` times in a row, unless
            it was the last to be named; with -1 when gradients of `SURE` steps in a row have been of no loop over one.
        mixed: Called once with the number of a loader, each time that it is named, when `SURE` gradients have been of
            its batches and of another loader's: batch shares would weigh the other one's samples by this one's.
        step: Returns the step that the training is at: a gradient of several buckets counts once.

    Attributes:
        loader: The loader that feeds the training, -1 before any has.
    """

    def __init__(
        self,
        found: Callable[[int], None],
        mixed: Callable[[int], None] = lambda loader: None,
        step: Callable[[], int] = lambda: 0,
    ) -> None:
        self.loader = -1
        self._found, self._mixed, self._step = found, mixed, step
        self._open: list[int] = []  # Loaders that the program iterates over.
        self._batches: dict[int, _Batches] = {}
        self._since: list[int] = []  # Those that gave batches since the last gradient, in this order.
        self._times, self._named = 0, -1
        self._outside: list[int] = []  # Steps with gradients outside of loops since the last one in a loop.
        self._of_several = 0  # Gradients of the named loader's batches and of another's.
        self._given: deque[float] = deque(maxlen=_KEPT)  # Weights that the user gave to the passes of a gradient.
        self._is_given, self._used = False, False  # Whether the latest batch has one; whether a gradient had these.

    def begin(self, loader: int) -> None:
        """Note that the program starts an iteration over a loader."""
        self._open.append(loader)
        if loader in self._batches:
            self._batches[loader].begin()

    def end(self, loader: int, *, exhausted: bool = False) -> None:
        """Note that an iteration over a loader is over: no gradient is of its batches from here on.

        Args:
            loader: The loader.
            exhausted: Whether the loop has asked for a batch behind the last; if it fetches ahead, the last one's
                gradient is to come.
        """
        if loader in self._open:
            self._open.remove(loader)
        if not self._open:
            self._is_given = False  # What the user gave was of a batch of this loop.
        if loader not in self._open:
            self._since = [each for each in self._since if each != loader]
            if loader in self._batches:
                self._batches[loader].end(exhausted=exhausted)

    def used(self, loader: int) -> None:
        """Note that the gradient of a loader's latest batch was weighed elsewhere, part by part."""
        if loader in self._batches:
            self._batches[loader].used(1)

    def fetches_ahead(self, loader: int) -> bool:
        """Whether the loop over a loader takes a batch before the gradient of the last one. For any thread."""
        batches = self._batches.get(loader)
        return batches is not None and batches.ahead

    def may_fetch_ahead(self, loader: int) -> bool:
        """Whether the gradient to come may be of another batch than the one a loader gave last."""
        batches = self._batches.get(loader)
        return batches is not None and batches.may_be_ahead

    def note(self, loader: int, weight: float) -> None:
        """Note a batch that a loader hands out.

        Args:
            loader: The loader.
            weight: The batch's weight: its samples over those of a usual batch.
        """
        if loader not in self._batches:
            for old in [each for each in self._batches if each not in self._open][: 1 - _LOADERS_KEPT]:
                del self._batches[old]
            self._batches[loader] = _Batches()
        self._batches[loader].note(weight)
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
        """Return the weight of a gradient that is complete: the mean of its `passes` batches.

        If the user weighed the latest one, it is the mean of what was given since the last gradient. 1 outside of
        iterations, as for the batches of any other loader.
        """
        self._choose(passes)
        self._used = True
        batches = self._batches.get(self.loader)
        if batches is not None:
            batches.confirm()
        self.note_place()
        if self._is_given:
            return _mean(self._given, passes)
        return batches.weight(passes) if batches is not None and self._in_loop else 1.0

    def note_place(self) -> None:
        """Note a gradient, also one that was weighed part by part: it may be of no loop over the loader."""
        if self._in_loop:
            self._outside.clear()
        elif self._named >= 0:
            self._outside += [step for step in [self._step()] if step not in self._outside]
            if len(self._outside) >= SURE:
                self._named, self._times, self._of_several = -1, 0, 0
                self._outside.clear()
                self._found(-1)

    @property
    def _in_loop(self) -> bool:
        """Whether a gradient that comes now is of a loop over the loader that feeds the training."""
        batches = self._batches.get(self.loader)
        return batches is not None and (self.loader in self._open or batches.last_due)

    @property
    def largest(self) -> float:
        """The largest weight so far of the loader that feeds the training, 0 if unknown. For any thread."""
        batches = self._batches.get(self.loader)
        return 0.0 if batches is None else batches.largest

    def _choose(self, passes: int) -> None:
        """Find out which loader the gradient is of: the same as before if it has given a batch since."""
        if not self._since:
            return  # Another bucket, or another step with the same batch.
        since, self._since = self._since, []
        before, self.loader = self.loader, self.loader if self.loader in since else since[0]
        if self.loader in self._batches:
            self._batches[self.loader].used(passes)
        self._times = self._times + 1 if self.loader == before else 1
        self._of_several = self._of_several + (len(since) > 1) if self.loader == before else int(len(since) > 1)
        if self._times >= SURE and self.loader != self._named:
            self._named = self.loader
            self._found(self.loader)
        if self._of_several == SURE and len(since) > 1 and self.loader == self._named:
            self._mixed(self.loader)


def _mean(weights: Iterable[float], passes: int) -> float:
    """Return the mean of the last `passes` weights, 1 if there are none."""
    recent = list(weights)[-passes:]
    return sum(recent) / len(recent) if recent else 1.0
