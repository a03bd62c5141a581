"""Track which thread submits and which completes each step on one rank; `step_exchange.py` does the sending.

`current` collects what is submitted for `next_step`. The thread that submits the header, always the last tensor of a
step, claims the step: it is then in flight, and that thread completes it. The helper can take it over from a training
thread that is elsewhere. At most one step is in flight, so steps end in order.
"""

from __future__ import annotations

from star_hvd.engine.records import OpenStep

__all__ = ["Claims"]


class Claims:
    """Not thread-safe: the engine calls it under its lock.

    Args:
        n_buckets: Number of buckets in a step.

    Attributes:
        next_step: The first step that this rank has not wholly submitted. Outside common steps it is the step of the
            live parameters, and nothing is submitted.
        current: What is submitted of `next_step`.
        in_flight: The step that is claimed and has not ended, or None.
    """

    def __init__(self, n_buckets: int) -> None:
        self.next_step = 0
        self.current = OpenStep.open(0, n_buckets)
        self.in_flight: OpenStep | None = None
        self._closed_upto = -1

    def begin(self, step: int, n_buckets: int) -> None:
        """Make `step` the next step, with nothing submitted yet."""
        self.next_step, self.current = step, OpenStep.open(step, n_buckets)

    @property
    def begun(self) -> bool:
        """Whether any bucket of the current step is submitted."""
        return any(buffer is not None for buffer in self.current.buffers)

    @property
    def missing(self) -> list[int]:
        """Indices of the current step's buckets that are not submitted."""
        return [index for index, buffer in enumerate(self.current.buffers) if buffer is None]

    def claim(self, owner: str) -> OpenStep:
        """Put the current step in flight: its header is submitted, and `owner` (`trainer` or `helper`) completes it."""
        # The last owner applied or queued its step before any thread can get here.
        assert self.in_flight is None, "two steps in flight"
        step = self.in_flight = self.current
        step.owner = owner
        self.begin(step.number + 1, len(step.buffers))
        return step

    def end(self) -> None:
        """Note that the step in flight has ended."""
        self.in_flight = None

    def owned_by(self, owner: str) -> OpenStep | None:
        """Return the step in flight if `owner` has to complete it, else None."""
        step = self.in_flight
        return step if step is not None and step.owner == owner else None

    @property
    def early(self) -> OpenStep | None:
        """The step in flight if the training thread has claimed it but does not wait for it yet."""
        step = self.in_flight
        return step if step is not None and step.early else None

    def hand_to_helper(self) -> None:
        """Have the helper complete what the training thread has claimed; handles it collected count as ended."""
        if (step := self.owned_by("trainer")) is not None:
            step.early, step.owner = False, "helper"

    def close(self, step: int) -> None:
        """Note that the coordinator has closed `step`: the helper may submit its missing parts."""
        self._closed_upto = max(self._closed_upto, step)

    @property
    def closed(self) -> bool:
        """Whether the coordinator has closed the next step."""
        return self._closed_upto >= self.next_step
