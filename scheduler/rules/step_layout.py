"""Where the steps of an epoch lie that a loader cuts into micro-batches, and the tasks of a step."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable

from scheduler.rules.leasing import Span, joined, without

__all__ = ["LONGEST", "StepLayout", "grain"]

LONGEST = 2
"""Batches of the user's in a pass, at most: a rank twice as fast as the others computes its share in one."""

_GRAIN = 8
"""Tasks of a micro-batch: shares of a rank four times slower than the others are right to a sixteenth of a step."""


def grain(batch: int, parts: int) -> int:
    """Tasks of a micro-batch, of a batch of the user's that has so many of these."""
    return max(1, min(_GRAIN, batch // parts))


class StepLayout:
    """Where the micro-batches of an epoch lie; the same on all ranks and at the coordinator.

    Args:
        samples: Positions in the epoch.
        batch: Samples of a rank in a step, as the user gave it.
        parts: Micro-batches of a rank in a step.
        world_size: Number of ranks.
        drop_last: Omit what does not fill a rank's batch.
        done: Positions that were consumed before the epoch was interrupted.
        grain: Tasks of a micro-batch.

    Attributes:
        share: Tasks of a rank in a step on ranks of equal speed.
        longest: Most tasks of a pass: those of `LONGEST` batches of the user's, unless `limit_passes` says less.
        whole: Tasks of a whole step.

    Raises:
        ValueError: A count is out of range.
    """

    def __init__(
        self, samples: int, batch: int, parts: int, world_size: int, *, drop_last: bool = False,
        done: Iterable[Span] = (), grain: int = 1,
    ) -> None:  # fmt: skip
        if samples < 0 or not 1 <= parts * grain <= batch or parts < 1 or world_size < 1:
            raise ValueError(
                f"{samples} samples in batches of {batch} with {parts} micro-batches on {world_size} ranks; expected "
                "at most one micro-batch for each sample of a batch"
            )
        stop = samples - samples % batch if drop_last else samples
        self.parts, self.grain, self.world_size = parts, grain, world_size
        self.share = parts * grain
        self.longest = LONGEST * self.share
        self.whole = self.share * world_size
        self._spans = without([(0, stop)], done)
        self._ends = list(itertools.accumulate(end - start for start, end in self._spans))
        self.samples = self._ends[-1] if self._ends else 0
        self._batch, self._per_step = batch, batch * world_size

    def limit_passes(self, samples: int) -> None:
        """No pass is to have more samples, where that is not less than a micro-batch; 0 for a batch of the user's."""
        self.longest = min(self.longest, max(self.grain, (samples or self._batch) * self.share // self._batch))

    @property
    def steps(self) -> int:
        """Steps of the epoch."""
        return -(-self.samples // self._per_step)

    @property
    def total(self) -> int:
        """Tasks of the epoch."""
        return (self.steps - 1) * self.whole + self.tasks(self.steps - 1) if self.steps else 0

    def tasks(self, step: int) -> int:
        """Tasks of a step; fewer in the last one where it is short."""
        left = self._left(step)
        if left >= self._per_step:
            return self.whole
        return min(left, self.grain * -(-left * self.parts * self.world_size // self._per_step))

    def spans(self, step: int, task: int, tasks: int = 1) -> tuple[Span, ...]:
        """The positions of a run of tasks."""
        count, left = self.tasks(step), min(self._left(step), self._per_step)
        if not 0 <= task < task + tasks <= count:
            raise ValueError(f"{tasks} tasks from {task} of step {step}; expected some of 0..{count - 1}")
        first = step * self._per_step
        return tuple(self._positions(first + task * left // count, first + (task + tasks) * left // count))

    def _left(self, step: int) -> int:
        return max(0, self.samples - step * self._per_step)

    def _positions(self, begin: int, end: int) -> list[Span]:
        found: list[Span] = []
        at = bisect.bisect_right(self._ends, begin)
        while begin < end:
            start, stop = self._spans[at]
            offset = begin - (self._ends[at] - (stop - start))
            count = min(end - begin, stop - start - offset)
            found.append((start + offset, start + offset + count))
            begin, at = begin + count, at + 1
        return joined(found)
