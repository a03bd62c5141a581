"""Decide when a step's header is sent: within backward, with the last bucket, or alone.

If possible, the header travels behind the weight of the last bucket, the one backward fills last; a separate tensor
would often miss the 1 ms Horovod cycle that took the bucket. Where all ranks wait for each other, the header is
claimed as soon as the gradient is complete, so that the reduction overlaps whatever the program does between
`backward` and `step`. It takes the hyperparameters of that moment, so not if the program sets them later. Where steps
close without late ranks (`partial`), it is claimed on arrival, and the last bucket waits for it. To keep that wait
short, a rank whose program does work there reports it in its header; all ranks read that in the same step, and from
the next step on all send the header alone.
"""

from __future__ import annotations

from collections.abc import Callable

from scheduler.records import Plan
from star_hvd.engine.header import Header

__all__ = ["HeaderTiming"]

_WATCHED_STEPS = 3  # First steps in which it is seen whether the program changes hyperparameters behind backward.
_HEADER_WAIT_S = 0.002
"""Two of Horovod's cycles. From the last hook through `backward` into `step` takes a tenth of that."""


class HeaderTiming:
    """Not thread-safe: the engine calls it under its lock.

    Args:
        early_after_steps: See `StepEngine`.
        clock: The time in seconds; only differences count.

    Attributes:
        alone: Whether the next step's header travels as a separate tensor.
    """

    def __init__(self, early_after_steps: int, clock: Callable[[], float]) -> None:
        self.alone = False
        self._early_after_steps = early_after_steps
        self._clock = clock
        self._complete_at_s: float | None = None  # When the carrier's gradient of this step was complete.
        self._waited = 0  # Consecutive steps in which it then waited for the header.
        self._complete_run = 0  # Consecutive steps with fresh gradients of all members.
        self._watched = 0  # Steps in which the hyperparameters of both moments were compared.
        self._row: list[float] | None = None  # Those with which the header of the current step left within backward.
        self._row_changes = False  # Whether the program has ever changed them between that moment and its arrival.

    def may_be_early(self, plan: Plan, *, mixed: bool) -> bool:
        """Whether a header may leave before the training thread arrives.

        Where steps close without late ranks, the header marks the arrival, which the coordinator counts, so it may not.
        Elsewhere it may while helpers have nothing to do, since whether a step can be replayed must be known in time.
        """
        if plan.may_close or plan.mode == "local" or self._row_changes:
            return False
        return not mixed or self._complete_run >= self._early_after_steps

    def left_early(self, read: Callable[[], list[float]], *, mixed: bool) -> None:
        """Note that the header leaves now, before the training thread arrives.

        Args:
            read: Returns this rank's hyperparameters.
            mixed: Whether steps are applied with the leader's.
        """
        if mixed or self._watched < _WATCHED_STEPS:
            self._watched += 1
            self._row = read()

    def arrived(self, read: Callable[[], list[float]]) -> None:
        """Note that the training thread has arrived in a step whose header had left."""
        row, self._row = self._row, None
        self._row_changes |= row is not None and row != read()

    def carrier_complete(self) -> None:
        """Note that the gradient of the bucket that carries the header is complete."""
        self._complete_at_s = self._clock()

    def waits(self) -> bool:
        """Whether the carrier was complete long before the header, which leaves now, in this and the previous step."""
        complete_at_s, self._complete_at_s = self._complete_at_s, None
        waited = complete_at_s is not None and self._clock() - complete_at_s > _HEADER_WAIT_S
        self._waited = self._waited + 1 if waited else 0
        return self._waited >= 2

    def read(self, header: Header, *, complete: bool) -> None:
        """Update from a reduced header."""
        self.alone = header.waited
        self._complete_run = self._complete_run + 1 if complete else 0

    def restart(self) -> None:
        """Reset for a new plan: a joining rank has not read the last headers, so all ranks start alike."""
        self.alone, self._complete_run = False, 0
