"""Decides which process sets the ranks make and remove. Pure: returns the messages.

A set is kept when its plan ends, since the same ranks are often slow again. But in every cycle of Horovod the members
of each set synchronize, used or not, so only a few are kept, and for a limited time. A 4 KB reduction over four ranks
on two cores took 12 ms in the mean with one idle set, 15 ms with four, 28 ms with eight (`benchmarks.sets`).
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
"""Sets up to which unused ones are kept, those still needed included."""
_SUSPECTED_S = 600.0
"""How long a set is kept that no plan has used; others are kept for `SET_IDLE_S`. Making a set blocks the job for a
third of a second and is impossible while a collective is slow over a slow link."""

Ranks = tuple[int, ...]


@dataclass(slots=True)
class _Known:
    """A set: order of its last request, its plans as (optimizer_id, plan_id), and since when no rank needs it."""

    asked: int
    plans: set[tuple[int, int]] = field(default_factory=set)
    used: bool = False
    idle_since_s: float | None = None


class SetLedger:
    """Process sets of all optimizers of a job. All ranks must get its messages in the order returned.

    A set is removed only after every rank has acted on a later plan than the last one with that set: then no rank has
    a collective queued on it. While a rank is late or silent, the set stays.

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
        """Note that a rank makes steps under a plan."""
        seen = self._acts_on.setdefault(optimizer_id, [-1] * self._world_size)
        if plan_id > seen[rank]:
            seen[rank] = plan_id

    def ended(self, optimizer_id: int) -> None:
        """Note that an optimizer has ended on all ranks and needs no set."""
        self._acts_on.pop(optimizer_id, None)
        for known in self._known.values():
            known.plans = {plan for plan in known.plans if plan[0] != optimizer_id}

    def abandoned(self, optimizer_id: int, plan_id: int) -> None:
        """Note that a plan was abandoned before all ranks had prepared it, so that none can have activated it."""
        for known in self._known.values():
            known.plans.discard((optimizer_id, plan_id))

    def order(self, optimizer_id: int, sets: Iterable[Ranks], plan_id: int | None = None) -> list[Message]:
        """Return the messages after which all of these sets exist; unneeded sets over the limit are removed first.

        Args:
            optimizer_id: Number of the optimizer.
            sets: Ranks of each set.
            plan_id: The plan that uses them; None if they are made in advance.
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
        """Return the messages that remove sets which have been idle for too long."""
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
        """Return the sets on which no rank can have a collective queued, now or under a pending plan."""
        reached = {optimizer_id: min(plans) for optimizer_id, plans in self._acts_on.items()} if self._known else {}
        for known in self._known.values():
            known.plans = {(number, plan_id) for number, plan_id in known.plans if reached.get(number, -1) <= plan_id}
        return [ranks for ranks, known in self._known.items() if not known.plans]
