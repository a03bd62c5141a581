"""How a rank gets a state that it lacks: the interface of a source, the order of asking, one deadline for all.

A state is the parameters and optimizer state after a step (`Snapshot`). The sources and what they have:

* `Replica`, this rank: the state of its live parameters or its shadow, given to other ranks and to servers that start.
* `EndedServers`, servers of a mode that has ended: the step they ended at, until their connections are closed.
* `Parent` (`modes/subgroup_child.py`), for a rank outside the subgroup: the members' newest step.
* `OtherRanks` (`channel/state_transfer.py`): the state of any rank that lacks no step itself.

`StateSources` asks the last three in this order: servers that ended may be the only source of a step, and all ranks ask
them at the same time; the parent is already connected; among other ranks the coordinator has to choose one first.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from star_hvd.engine.records import Snapshot
from star_hvd.errors import DeadlineError
from star_hvd.telemetry.wait_time import WaitTime

__all__ = ["EndedServers", "StateSource", "StateSources"]

_POLL_S = 0.002
_LEAST_ASKED = 8  # A call of a source counts as a quarter of the deadline at most (`WaitTime`).


class StateSource(Protocol):
    """Something that may have the state of a step."""

    def snapshot(self, min_step: int, deadline_s: float) -> Snapshot | None:
        """Ask once for the state of step `min_step` or later; None if it is not available here now.

        A source whose training thread is inactive may return an older state: it would not get a newer one.

        Args:
            min_step: The oldest step that is of use.
            deadline_s: Longest wait for the answer, and longest time without a part of a rank's transfer, which may use
                a slow link. A parent answers at once; its transfer has the step's deadline.

        Raises:
            StarError: This rank cannot continue, whatever other sources have.
        """
        ...


@dataclass(frozen=True, slots=True)
class EndedServers:
    """Servers that have made their last update.

    Attributes:
        step: The step at which they ended.
        read: Reads their state within a deadline; None if it is no longer available.
    """

    step: int
    read: Callable[[float], Snapshot | None]

    def snapshot(self, min_step: int, deadline_s: float) -> Snapshot | None:
        """See `StateSource`."""
        return self.read(deadline_s) if self.step >= min_step else None


@dataclass(frozen=True, slots=True)
class StateSources:
    """The sources that a rank currently has; see the module docstring."""

    ended: StateSource | None = None
    parent: StateSource | None = None
    ranks: StateSource | None = None

    def find(self, min_step: int, deadline_s: float, wanted: Callable[[], bool]) -> Snapshot | None:
        """Ask the sources in turn, repeatedly.

        Args:
            min_step: The oldest step that is of use.
            deadline_s: Longest wait. Each source gets a share of the remaining time, and none counts for more than a
                part of it, so that neither a silent one nor a transfer that stops after minutes uses it up.
            wanted: Whether the state is still wanted; may raise an error that makes the wait pointless.

        Returns:
            The state; None if it is no longer wanted, or no source had it in time.
        """
        wait = WaitTime(deadline_s / _LEAST_ASKED, lambda: f"the state of step {min_step} or later")
        sources = [source for source in (self.ended, self.parent, self.ranks) if source is not None]
        while wanted():
            for number, source in enumerate(sources):
                left_s = max(0.0, deadline_s - wait.count())
                snapshot = source.snapshot(min_step, left_s / (len(sources) - number))
                if snapshot is not None:
                    return snapshot
            if wait.count() >= deadline_s:
                return None
            time.sleep(_POLL_S)
        return None

    def require(self, rank: int, min_step: int, deadline_s: float, wanted: Callable[[], bool]) -> Snapshot | None:
        """Call `find` for rank `rank`; None only if the state is no longer wanted.

        Raises:
            DeadlineError: No source had it, or sent all of it, within `deadline_s`.
        """
        snapshot = self.find(min_step, deadline_s, wanted)
        if snapshot is None and wanted():
            raise DeadlineError(
                f"rank {rank} is behind: no source had the state of step {min_step} or later, or went on sending it, "
                f"within {deadline_s:g} s; see the log of this rank for transfers that stopped, those of the other "
                "ranks for those that are gone, or raise Config.control_deadline_s"
            )
        return snapshot
