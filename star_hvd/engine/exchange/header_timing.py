"""When a step's header leaves: within backward, with the last bucket, or alone.

The header travels behind the weight of the last bucket where it can, the one backward fills last: a tensor of its own
would often miss Horovod's cycle of 1 ms that took the bucket. Where all ranks wait for each other the header is claimed
as soon as the whole gradient is there, so that the reduction goes on beside whatever the program does between
`backward` and `step`. Where steps close without late ranks (`partial`) it is claimed on arrival, and the last bucket
waits for it, but not for long: a rank whose program works there says so in its header, and as all ranks read it in the
same step, in the next one the header travels alone on all of them.
"""

from __future__ import annotations

from collections.abc import Callable

from scheduler.records import Plan
from star_hvd.engine.header import Header

__all__ = ["HeaderTiming"]

_HEADER_WAIT_S = 0.002
"""Two of Horovod's cycles. The way from the last hook through `backward` into `step` takes a tenth of it."""


class HeaderTiming:
    """Not thread-safe: the engine calls it under its lock.

    Args:
        early_after_steps: See `StepEngine`.
        clock: The time in seconds; only differences count.

    Attributes:
        alone: The header of the step to come travels as a tensor of its own.
    """

    def __init__(self, early_after_steps: int, clock: Callable[[], float]) -> None:
        self.alone = False
        self._early_after_steps = early_after_steps
        self._clock = clock
        self._whole_at_s: float | None = None  # When the carrier's gradient of this step was whole.
        self._waited = 0  # Steps in a row in which it then waited for the header.
        self._complete_run = 0  # Steps in a row with the fresh gradients of all members.

    def may_be_early(self, plan: Plan, *, mixed: bool) -> bool:
        """Whether a header may leave before the training thread arrives.

        Where steps close without late ranks the header goes with the arrival, which the coordinator counts. Else it may
        go early as long as helpers have nothing to do: what they replay must be known to be replayable.
        """
        if plan.may_close or plan.mode == "local":
            return False
        return not mixed or self._complete_run >= self._early_after_steps

    def carrier_is_whole(self) -> None:
        """The gradient of the bucket that carries the header is there."""
        self._whole_at_s = self._clock()

    def waits(self) -> bool:
        """Whether it was there long before the header, which leaves now, in this step and the one before."""
        whole_at_s, self._whole_at_s = self._whole_at_s, None
        waited = whole_at_s is not None and self._clock() - whole_at_s > _HEADER_WAIT_S
        self._waited = self._waited + 1 if waited else 0
        return self._waited >= 2

    def read(self, header: Header, *, complete: bool) -> None:
        """Act on a reduced header."""
        self.alone = header.waited
        self._complete_run = self._complete_run + 1 if complete else 0

    def restart(self) -> None:
        """Another plan is in force. A rank that joins has not read the last headers: all begin alike."""
        self.alone, self._complete_run = False, 0
