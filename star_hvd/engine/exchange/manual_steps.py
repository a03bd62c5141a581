"""Track steps whose mean the program changed between `synchronize` and `step`: helpers cannot replay those."""

from __future__ import annotations

from star_hvd.engine.header import Header
from star_hvd.engine.records import OpenStep

__all__ = ["ManualSteps"]


class ManualSteps:
    """Not thread-safe: the engine calls it under its lock.

    A header sent within backward cannot know what the program will do. Once a program has changed a mean, it is assumed
    to do so in every step; the first time, the next header reports it, or a meeting of all ranks.

    Args:
        can_replay: Whether the optimizer's steps can be replayed on a copy at all.

    Attributes:
        unreported: The step in which this rank's program first did so, if the header of that step did not report it.
    """

    def __init__(self, *, can_replay: bool) -> None:
        self.unreported: int | None = None
        self._can_replay = can_replay
        self._ever = False  # Whether a program has ever changed the mean of a step.
        self._proxied: int | None = None  # The last step, if the helper completed it.

    def in_header(self, *, manual: bool) -> bool:
        """Whether a header sent on arrival reports its step as not replayable."""
        return manual or not self._can_replay

    def in_early_header(self) -> bool:
        """Whether a header sent within backward reports its step as not replayable."""
        return self._ever or not self._can_replay

    def arrived(self, step: OpenStep, *, manual: bool, early: bool) -> None:
        """Note that the training thread has arrived in a step; `early`: its header had left before."""
        if early and manual and not self._ever:
            self.unreported = step.number
        self._ever = self._ever or manual

    def report(self, step: OpenStep) -> bool:
        """Whether the header of `step`, which leaves now, reports the previous step as not replayable."""
        before, self.unreported = self.unreported == step.number - 1, None
        return before

    def read(self, step: OpenStep, header: Header, *, complete: bool) -> bool:
        """Act on a reduced header. Return whether the previous step, completed by the helper, cannot be replayed."""
        self._ever = self._ever or header.manual
        lost = header.manual_before and self.proxied(step.number - 1)
        self._proxied = step.number if step.owner == "helper" else None
        if self.unreported == step.number and complete:
            self.unreported = None  # No helper has replayed that step.
        return lost

    def proxied(self, step: int) -> bool:
        """Whether `step` was the last one and the helper completed it; True only once."""
        found = self._proxied == step
        if found:
            self._proxied = None
        return found
