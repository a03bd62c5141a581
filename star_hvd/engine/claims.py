"""Who submits and who completes which step on one rank; what travels is in `step_exchange.py`.

What is submitted for `next_step` is in `current`. The thread that submits the header, always the last tensor of a step,
claims the step: it is in flight then, and that thread completes it, or the helper, which can take it over from a
training thread that is elsewhere. At most one step is in flight, so steps end in their order.
"""

from __future__ import annotations

from star_hvd.engine.records import OpenStep

__all__ = ["Claims"]


class Claims:
    """Not thread-safe: the engine calls it under its lock.

    Args:
        n_buckets: Buckets of a step.

    Attributes:
        next_step: The first step that this rank has not wholly submitted. Outside common steps it is that of the live
            parameters, and nothing is submitted.
        current: What is submitted of it.
        in_flight: The step that was claimed and has not ended, None without.
    """

    def __init__(self, n_buckets: int) -> None:
        self.next_step = 0
        self.current = OpenStep.open(0, n_buckets)
        self.in_flight: OpenStep | None = None
        self._closed_upto = -1

    def begin(self, step: int, n_buckets: int) -> None:
        """The next step is `step`; nothing is submitted of it."""
        self.next_step, self.current = step, OpenStep.open(step, n_buckets)

    @property
    def begun(self) -> bool:
        """Whether a bucket of the current step is submitted."""
        return any(buffer is not None for buffer in self.current.buffers)

    @property
    def missing(self) -> list[int]:
        """Buckets of the current step that are not submitted."""
        return [index for index, buffer in enumerate(self.current.buffers) if buffer is None]

    def claim(self, owner: str) -> OpenStep:
        """The header of the current step is submitted: `owner`, `trainer` or `helper`, completes it."""
        # The last owner applied or queued its step before any thread can get here.
        assert self.in_flight is None, "two steps in flight"
        step = self.in_flight = self.current
        step.owner = owner
        self.begin(step.number + 1, len(step.buffers))
        return step

    def end(self) -> None:
        """The step in flight has ended."""
        self.in_flight = None

    def owned_by(self, owner: str) -> OpenStep | None:
        """The step in flight where it is `owner`'s to complete."""
        step = self.in_flight
        return step if step is not None and step.owner == owner else None

    @property
    def early(self) -> OpenStep | None:
        """The step in flight where the training thread has claimed it and does not wait for it."""
        step = self.in_flight
        return step if step is not None and step.early else None

    def hand_to_helper(self) -> None:
        """The helper completes what the training thread has claimed; handles that this has collected count as ended."""
        if (step := self.owned_by("trainer")) is not None:
            step.early, step.owner = False, "helper"

    def close(self, step: int) -> None:
        """The coordinator has closed `step`: what is missing of it may be submitted for the training thread."""
        self._closed_upto = max(self._closed_upto, step)

    @property
    def closed(self) -> bool:
        """Whether it has closed the next step."""
        return self._closed_upto >= self.next_step
