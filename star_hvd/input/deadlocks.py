"""Finds ranks that wait for each other for ever: some in a collective of the program, others in a loop over `shard`.

Every rank calls the collectives of all ranks in the same order and counts them. A rank that waits in a loop has called
as many as it reported when it began to wait, and can call no other before the coordinator answers it. So a rank in a
later collective waits for it, however long that takes. If each rank is one or the other, nothing can go on: no message
is under way that would change anything, but those that the coordinator itself sends (`JobState._break_deadlock`).

A rank that computes, however slowly, is neither of them. Its last report is of the end of a collective, or of a loop
that the coordinator has answered.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from star_hvd.channel.messages.waits import ProgramWait

__all__ = ["SURE_S", "Deadlocks", "Stuck"]

SURE_S = 2.0
"""For so long nothing must have changed: a collective may end right behind its report, and its end is not urgent."""


class Stuck(NamedTuple):
    """Ranks that wait for each other.

    Attributes:
        in_loops: Ranks that wait in a loop, and where.
        inside: Ranks that wait in a collective, and in which.
    """

    in_loops: dict[int, ProgramWait]
    inside: dict[int, ProgramWait]

    @property
    def reason(self) -> str:
        """What is wrong and what to do, for the user."""
        operations = " and ".join(sorted({f"hvd.{each.operation}" for each in self.inside.values()}))
        return (
            f"ranks {sorted(self.inside)} wait in {operations} for ranks {sorted(self.in_loops)}, which wait for them "
            "in a loop over an hvd.shard loader: nothing can go on. Such a loop has different numbers of batches on "
            "different ranks, and all ranks have to make it: add up on each rank and call the collective once, behind "
            "the loop; where it has to be inside, use a DataLoader with torch's DistributedSampler without hvd.shard"
        )


class Deadlocks:
    """See the module's text.

    Args:
        world_size: Number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._waits: dict[int, ProgramWait] = {}  # The latest report of each rank.
        self._seen: Stuck | None = None
        self._since_s = 0.0

    def note(self, rank: int, message: ProgramWait) -> None:
        """Take in a rank's report."""
        self._waits[rank] = message
        self.look_anew()

    def look_anew(self) -> None:
        """Note that something has changed, or that messages may not have been read for a while."""
        self._seen = None

    def told(self, ranks: Iterable[int]) -> None:
        """Note that these ranks' waits in a loop have been ended: until they report another, they are elsewhere."""
        for rank in ranks:
            self._waits.pop(rank, None)
        self.look_anew()

    def look(self, in_loops: Mapping[int, tuple[int, int]], gone: Collection[int], now_s: float) -> Stuck | None:
        """Return the ranks that wait for each other, once nothing has changed for `SURE_S`; else None.

        Args:
            in_loops: Ranks that wait in a loop until the coordinator answers, and the loader and epoch of each.
            gone: Ranks that have finished, or are in `join`; they call no collectives until the others do, too.
            now_s: Current time.
        """
        found = self._stuck(in_loops, gone)
        if found is None or found != self._seen:
            self._seen, self._since_s = found, now_s
        return found if found is not None and now_s - self._since_s >= SURE_S else None

    def _stuck(self, in_loops: Mapping[int, tuple[int, int]], gone: Collection[int]) -> Stuck | None:
        # Only with the report of this very wait: what was called before an earlier one would be too few.
        reported = ((rank, self._waits.get(rank), key) for rank, key in in_loops.items() if rank not in gone)
        loops = {rank: each for rank, each, key in reported if each is not None and (each.loader, each.epoch) == key}
        if not loops:
            return None
        least = min((each.joins, each.calls) for each in loops.values())
        inside = {
            rank: each
            for rank, each in self._waits.items()
            if each.operation and rank not in gone and (each.joins, each.calls) > least
        }
        return Stuck(loops, inside) if inside and len({*loops, *inside, *gone}) == self._world_size else None
