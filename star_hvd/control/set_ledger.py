"""Which process sets the ranks were told to make, and which are told to go when others are wanted. Pure.

A set stays when its plan ends, since the same ranks are often slow again; but its members wait for each other once for
every set in every cycle of Horovod's, used or not, so that only a few stay.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

from star_hvd.control.messages import Message
from star_hvd.control.switch_messages import DropSet, MakeSet

__all__ = ["MOST_SETS", "SetLedger"]

MOST_SETS = 4
"""Sets that are kept beside those still needed."""

Ranks = tuple[int, ...]


@dataclass(slots=True)
class _Known:
    """A set: when it was asked for last, and per optimizer the newest plan that used it."""

    asked: int
    epochs: dict[int, int] = field(default_factory=dict)


class SetLedger:
    """What was ordered, over all optimizers of a job. All ranks have to get its messages in the order it gave them.

    A set goes only after every rank has acted on a later plan than the last one with that set: then nobody has
    anything queued on it. If a rank is late, or says nothing any more, the set stays.

    Args:
        world_size: Number of ranks.
        most: Sets that are kept.
    """

    def __init__(self, world_size: int, most: int = MOST_SETS) -> None:
        self._world_size, self._most = world_size, most
        self._known: dict[Ranks, _Known] = {}
        self._acts_on: dict[int, list[int]] = {}
        self._clock = itertools.count()

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, ranks: Iterable[int]) -> bool:
        return tuple(sorted(ranks)) in self._known

    def acted(self, engine: int, rank: int, epoch: int) -> None:
        """A rank makes steps of the plan of this epoch."""
        seen = self._acts_on.setdefault(engine, [-1] * self._world_size)
        if epoch > seen[rank]:
            seen[rank] = epoch

    def ended(self, engine: int) -> None:
        """An optimizer is gone on all ranks, and needs nothing."""
        self._acts_on.pop(engine, None)
        for known in self._known.values():
            known.epochs.pop(engine, None)

    def order(self, engine: int, sets: Iterable[Ranks], epoch: int | None = None) -> list[Message]:
        """The messages after which all of these sets are there.

        Args:
            engine: Number of the optimizer.
            sets: Ranks of each.
            epoch: Of the plan that uses them; None where they are made on suspicion.
        """
        wanted = [tuple(sorted(ranks)) for ranks in sets]
        for ranks in wanted:
            known = self._known.setdefault(ranks, _Known(0))
            known.asked = next(self._clock)
            if epoch is not None:
                known.epochs[engine] = epoch
        gone = self._too_many(wanted)
        for ranks in gone:
            del self._known[ranks]
        return [*(DropSet(list(ranks)) for ranks in gone), *(MakeSet(list(ranks)) for ranks in wanted)]

    def _too_many(self, wanted: Iterable[Ranks]) -> list[Ranks]:
        """Sets to remove, those first that were not asked for longest."""
        surplus = len(self._known) - self._most
        if surplus <= 0:
            return []
        reached = {engine: min(epochs) for engine, epochs in self._acts_on.items()}
        kept = set(wanted)
        idle = [
            ranks
            for ranks, known in self._known.items()
            if ranks not in kept and all(reached.get(engine, -1) > epoch for engine, epoch in known.epochs.items())
        ]
        return sorted(idle, key=lambda ranks: self._known[ranks].asked)[:surplus]
