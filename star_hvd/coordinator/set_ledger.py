"""Which process sets the ranks were told to make, and which are told to go when others are wanted. Pure.

A set stays when its plan ends, since the same ranks are often slow again; but its members wait for each other once for
every set in every cycle of Horovod's, used or not, so that only a few stay, and not for ever. A reduction of 4 KB over
four ranks on two cores took 12 ms in the mean beside one idle set, 15 beside four, 28 beside eight (`benchmarks.sets`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

from scheduler.plan.plan import SET_IDLE_S
from star_hvd.channel.messages.base import Message
from star_hvd.channel.messages.switch import DropSet, MakeSet

__all__ = ["MOST_SETS", "SetLedger"]

MOST_SETS = 4
"""Sets that are kept beside those still needed."""
_SUSPECTED_S = 600.0
"""For so long, where no plan ever used it; else for `SET_IDLE_S`. To make a set again holds a job up for a third of a
second, and cannot be done while a collective crawls over a slow link."""

Ranks = tuple[int, ...]


@dataclass(slots=True)
class _Known:
    """A set: when it was asked for last, the plans with it as (optimizer, epoch), and since when no rank needs it."""

    asked: int
    plans: set[tuple[int, int]] = field(default_factory=set)
    used: bool = False
    idle_since_s: float | None = None


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

    def acted(self, optimizer_id: int, rank: int, plan_id: int) -> None:
        """A rank makes steps of the plan of this id."""
        seen = self._acts_on.setdefault(optimizer_id, [-1] * self._world_size)
        if plan_id > seen[rank]:
            seen[rank] = plan_id

    def ended(self, optimizer_id: int) -> None:
        """An optimizer is gone on all ranks, and needs nothing."""
        self._acts_on.pop(optimizer_id, None)
        for known in self._known.values():
            known.plans = {plan for plan in known.plans if plan[0] != optimizer_id}

    def abandoned(self, optimizer_id: int, plan_id: int) -> None:
        """A plan was given up before all ranks were ready for it, so that none of them can have entered it."""
        for known in self._known.values():
            known.plans.discard((optimizer_id, plan_id))

    def order(self, optimizer_id: int, sets: Iterable[Ranks], plan_id: int | None = None) -> list[Message]:
        """The messages after which all of these sets are there.

        Args:
            optimizer_id: Number of the optimizer.
            sets: Ranks of each.
            plan_id: Of the plan that uses them; None where they are made on suspicion.
        """
        wanted = [tuple(sorted(ranks)) for ranks in sets]
        for ranks in wanted:
            known = self._known.setdefault(ranks, _Known(0))
            known.asked, known.idle_since_s = next(self._clock), None
            if plan_id is not None:
                known.plans.add((optimizer_id, plan_id))
                known.used = True
        gone = sorted(self._unneeded(), key=lambda ranks: self._known[ranks].asked)
        gone = [ranks for ranks in gone if ranks not in wanted][: max(0, len(self._known) - self._most)]
        return [*self._drop(gone), *(MakeSet(list(ranks)) for ranks in wanted)]

    def tidy(self, now_s: float) -> list[Message]:
        """The messages that remove sets which were used, and by nobody for long."""
        gone = []
        for ranks in self._unneeded():
            known = self._known[ranks]
            if known.idle_since_s is None:
                known.idle_since_s = now_s
            elif now_s - known.idle_since_s > (SET_IDLE_S if known.used else _SUSPECTED_S):
                gone.append(ranks)
        return self._drop(gone)

    def _drop(self, gone: Iterable[Ranks]) -> list[Message]:
        for ranks in gone:
            del self._known[ranks]
        return [DropSet(list(ranks)) for ranks in gone]

    def _unneeded(self) -> list[Ranks]:
        """Sets in which no rank can have anything queued, now or by a plan that is on its way."""
        reached = {engine: min(epochs) for engine, epochs in self._acts_on.items()} if self._known else {}
        for known in self._known.values():
            known.plans = {(engine, plan_id) for engine, plan_id in known.plans if reached.get(engine, -1) <= plan_id}
        return [ranks for ranks, known in self._known.items() if not known.plans]
