"""A published plan until it is active or abandoned: prepared ranks, servers' addresses, the next messages. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler.plan.plan import Plan
from star_hvd.channel.messages.base import Message
from star_hvd.channel.messages.switch import Commit, Servers

__all__ = ["Switch"]

_STEPS = 4
"""Steps within which a prepared plan comes into force: two of a rank's own before it may raise its flag, the one in
which the plan or `Commit` arrives, and one more."""


@dataclass(slots=True)
class Switch:
    """One switch; its methods return the messages for all ranks.

    Attributes:
        optimizer_id: Number of the optimizer.
        plan: The plan, complete.
        active: The plan that was active when this one was published.
        deadline_s: Time at which it is abandoned; see `overdue`.
        limit_s: Longest preparation, and longest time from its last step on in which a prepared plan is awaited.
        ready: Ranks that have prepared it.
        committed: Whether `Commit`, which drains the old mode, was sent.
    """

    optimizer_id: int
    plan: Plan
    active: Plan
    deadline_s: float
    limit_s: float = 60.0
    ready: set[int] = field(default_factory=set)
    committed: bool = False
    _addresses: dict[int, list[str]] = field(default_factory=dict)
    _prepared_at: int = -1  # The step at which it was first seen to be prepared.

    @property
    def irrevocable(self) -> bool:
        """Whether servers are draining for it, after which the old plan cannot continue."""
        same = self.plan.family == self.active.family == "ps"
        return self.committed and self.active.family in ("ps", "grouped") and not same

    @property
    def prepared(self) -> bool:
        """Whether only steps are awaited: all ranks have prepared the plan, or it needs no preparation."""
        return self.committed or self.plan.family == self.active.family == "all_ranks"

    def overdue(self, step: int, now_s: float) -> bool:
        """Whether the plan is to be abandoned.

        A prepared plan comes into force at the end of a step, so time in which the program makes none (an evaluation,
        a compilation, a very long step) does not count: it says nothing about the plan.

        Args:
            step: The current step.
            now_s: Current time.
        """
        if self.irrevocable:
            return False
        if self.prepared:
            if self._prepared_at < 0:
                self._prepared_at = step
            if step < self._prepared_at + _STEPS:
                self.deadline_s = now_s + self.limit_s
        return now_s > self.deadline_s

    def server_up(self, index: int, address: list[str]) -> list[Message]:
        """Note that a server is running; once all are, their addresses are sent."""
        wanted = len(self.plan.servers)
        if not 0 <= index < wanted:
            return []  # Not a server of this plan.
        self._addresses[index] = address
        if len(self._addresses) < wanted:
            return []
        flat = [part for i in range(wanted) for part in self._addresses.get(i, [])]
        return [Servers(self.optimizer_id, self.plan.plan_id, flat)]

    def rank_ready(self, rank: int) -> list[Message]:
        """Note that a rank has prepared the plan; once all have, the old mode is drained."""
        self.ready.add(rank)
        if len(self.ready) < self.plan.world_size or self.committed:
            return []
        self.committed = True
        return [Commit(self.optimizer_id, self.plan.plan_id)]
