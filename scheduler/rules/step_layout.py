"""Positions of the steps and tasks of an epoch whose batches a loader cuts into micro-batches."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable

from scheduler.rules.runs import Span, joined, without

__all__ = ["LONGEST", "StepLayout", "grain"]

LONGEST = 2
"""Most user batches in a pass: a rank twice as fast as the others computes its share in one."""

_GRAIN = 8
"""Most tasks of a micro-batch: the share of a rank four times slower than the others is right to a sixteenth of a
step."""


def grain(batch: int, parts: int) -> int:
    """Tasks of a micro-batch, if a user's batch has `parts` micro-batches."""
    return max(1, min(_GRAIN, batch // parts))


class StepLayout:
    """Where the micro-batches of an epoch lie; the same on all ranks and at the coordinator.

    Args:
        samples: Positions in the epoch.
        batch: Samples of a rank in a step, as the user gave it.
        parts: Micro-batches of a rank in a step.
        world_size: Number of ranks.
        drop_last: Omit samples that do not fill a step.
        done: Positions that were consumed before the epoch was interrupted.
        grain: Tasks of a micro-batch.

    Attributes:
        batch, parts, grain: As given.
        share: Tasks of a rank in a step if all ranks are equally fast.
        longest: Most tasks of a pass: those of `LONGEST` user batches, unless `limit_passes` sets less.
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
        self.parts, self.grain, self.world_size = parts, grain, world_size
        self.share = parts * grain
        self.longest = LONGEST * self.share
        self.whole = self.share * world_size
        self._spans = without([(0, samples)], done)
        self._ends = list(itertools.accumulate(end - start for start, end in self._spans))
        self.samples = self._ends[-1] if self._ends else 0
        self.batch, self._per_step = batch, batch * world_size
        self.samples -= self.samples % self._per_step if drop_last else 0

    def limit_passes(self, samples: int) -> None:
        """Limit the samples of a pass, to not less than a micro-batch; 0 limits it to one user batch."""
        self.longest = min(self.longest, max(self.grain, (samples or self.batch) * self.share // self.batch))

    @property
    def steps(self) -> int:
        """Steps of the epoch."""
        return -(-self.samples // self._per_step)

    @property
    def total(self) -> int:
        """Tasks of the epoch."""
        return (self.steps - 1) * self.whole + self.tasks(self.steps - 1) if self.steps else 0

    def tasks(self, step: int) -> int:
        """Tasks of a step; fewer in a short last step."""
        left = self._left(step)
        if left >= self._per_step:
            return self.whole
        return min(left, self.grain * -(-left * self.parts * self.world_size // self._per_step))

    def spans(self, step: int, task: int, tasks: int = 1) -> tuple[Span, ...]:
        """The positions of `tasks` consecutive tasks, from `task` on."""
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
