"""Which steps' means programs worked on between `synchronize` and `step`: helpers cannot replay those."""

from __future__ import annotations

from star_hvd.engine.header import Header
from star_hvd.engine.records import OpenStep

__all__ = ["ManualSteps"]


class ManualSteps:
    """Not thread-safe: the engine calls it under its lock.

    A header that left within backward cannot say what the program is going to do. A program that ever worked on a mean
    is taken to do so again; where one does for the first time, the next header says so, or a meeting of all ranks.

    Args:
        can_replay: Whether the optimizer's steps can be replayed on a copy at all.

    Attributes:
        unreported: The step in which this rank's program did so first, where the header of that step did not say so.
    """

    def __init__(self, *, can_replay: bool) -> None:
        self.unreported: int | None = None
        self._can_replay = can_replay
        self._ever = False  # Whether a program has ever worked on the mean of a step.
        self._proxied: int | None = None  # The last step, where the helper completed it.

    def in_header(self, *, manual: bool) -> bool:
        """What a header that leaves on arrival says of its step."""
        return manual or not self._can_replay

    def in_early_header(self) -> bool:
        """What a header that leaves within backward says."""
        return self._ever or not self._can_replay

    def arrived(self, step: OpenStep, *, manual: bool, early: bool) -> None:
        """The training thread has arrived in a step; `early`: its header had left before."""
        if early and manual and not self._ever:
            self.unreported = step.number
        self._ever = self._ever or manual

    def report(self, step: OpenStep) -> bool:
        """Whether the header of `step`, which leaves now, says it of the step before."""
        before, self.unreported = self.unreported == step.number - 1, None
        return before

    def read(self, step: OpenStep, header: Header, *, complete: bool) -> bool:
        """Act on a reduced header. Whether the step before it, which the helper completed, cannot be replayed."""
        self._ever = self._ever or header.manual
        lost = header.manual_before and self.proxied(step.number - 1)
        self._proxied = step.number if step.owner == "helper" else None
        if self.unreported == step.number and complete:
            self.unreported = None  # There is no helper whom it would concern.
        return lost

    def proxied(self, step: int) -> bool:
        """Whether `step` was the last and the helper completed it; asked once."""
        found = self._proxied == step
        if found:
            self._proxied = None
        return found
