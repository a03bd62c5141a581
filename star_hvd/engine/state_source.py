"""Where a rank gets the state that it lacks: what a source is, the order of trial, one deadline, one way to give up.

A state is the parameters and the optimizer's state after a step (`Snapshot`). The sources and what they have:

* `Replica`, this rank: what is on its live parameters or its shadow. Given to other ranks and to servers that begin.
* `EndedServers`, servers of a mode that has ended: the step they ended at, until their connections are closed.
* `Parent` (`modes/subgroup_child.py`), for a rank outside the subgroup: the members' newest step.
* `OtherRanks` (`channel/state_transfer.py`): whatever a rank that lacks no step itself has.

`StateSources` asks the last three, in this order: servers that ended may be the only ones to have a step, and all ranks
ask them at the same time; the parent is connected already; of the other ranks the coordinator has to name one first.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from star_hvd.engine.records import Snapshot
from star_hvd.errors import DeadlineError

__all__ = ["EndedServers", "StateSource", "StateSources"]

_POLL_S = 0.002


class StateSource(Protocol):
    """What may have the state of a step."""

    def snapshot(self, min_step: int, deadline_s: float) -> Snapshot | None:
        """The state of step `min_step` or later, asked for once; None while there is none to be had here.

        A source whose training thread is inactive may give what it has though it is older: nothing newer would follow.

        Args:
            min_step: The least step that is of use.
            deadline_s: Longest wait for the answer. That of a parent, who answers at once, has the step's deadline from
                when it begins: it may come over a slow link.

        Raises:
            StarError: This rank cannot go on, whatever another source has.
        """
        ...


@dataclass(frozen=True, slots=True)
class EndedServers:
    """Servers that have made their last update.

    Attributes:
        step: The step at which they ended.
        read: Reads their state within a deadline, None where it is not to be had any more.
    """

    step: int
    read: Callable[[float], Snapshot | None]

    def snapshot(self, min_step: int, deadline_s: float) -> Snapshot | None:
        """See `StateSource`."""
        return self.read(deadline_s) if self.step >= min_step else None


@dataclass(frozen=True, slots=True)
class StateSources:
    """The sources that a rank has now; see the module's text."""

    ended: StateSource | None = None
    parent: StateSource | None = None
    ranks: StateSource | None = None

    def find(self, min_step: int, deadline_s: float, wanted: Callable[[], bool]) -> Snapshot | None:
        """Ask one source after the other, again and again.

        Args:
            min_step: The least step that is of use.
            deadline_s: Longest wait. Each source has its share of what is left, so that none uses it up.
            wanted: Whether the state is still wanted; may raise what makes the wait pointless.

        Returns:
            None once it is not wanted any more, or when no source had it in time.
        """
        limit_s = time.monotonic() + deadline_s
        sources = [source for source in (self.ended, self.parent, self.ranks) if source is not None]
        while wanted():
            for number, source in enumerate(sources):
                left_s = max(0.0, limit_s - time.monotonic())
                snapshot = source.snapshot(min_step, left_s / (len(sources) - number))
                if snapshot is not None:
                    return snapshot
            if time.monotonic() >= limit_s:
                return None
            time.sleep(_POLL_S)
        return None

    def require(self, rank: int, min_step: int, deadline_s: float, wanted: Callable[[], bool]) -> Snapshot | None:
        """`find` for rank `rank`; None only once the state is not wanted any more.

        Raises:
            DeadlineError: No source had it within `deadline_s`.
        """
        snapshot = self.find(min_step, deadline_s, wanted)
        if snapshot is None and wanted():
            raise DeadlineError(
                f"rank {rank} is behind: no source had the state of step {min_step} or later within {deadline_s:g} s; "
                "see the logs of the other ranks for those that are gone, or raise Config.control_deadline_s"
            )
        return snapshot
