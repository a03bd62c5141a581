"""Published plans: the pending one until it is active or abandoned, with prepared ranks, servers' addresses and the
next messages, and those that may still come into force. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler.plan.plan import Plan
from star_hvd.channel.messages.base import Abandon, Message, PlanMessage
from star_hvd.channel.messages.switch import Commit, Servers
from star_hvd.coordinator.plans.set_ledger import SetLedger

__all__ = ["Published", "Switch"]

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


class Published:
    """The plans of an optimizer that were published and are not active yet; methods return messages for all ranks.

    An abandoned plan stays one of them until a later one is active: where all flags were up already it still comes
    into force.

    Args:
        optimizer_id: Number of the optimizer.
        sets: The process sets of all optimizers of the job.

    Attributes:
        pending: The latest plan's switch; None if that is active or abandoned.
        next_id: Id of the plan that is published next.
    """

    def __init__(self, optimizer_id: int, sets: SetLedger) -> None:
        self.pending: Switch | None = None
        self.next_id = 1
        self._optimizer_id, self._sets = optimizer_id, sets
        self._plans: dict[int, Plan] = {}

    def __contains__(self, plan_id: int) -> bool:
        return plan_id in self._plans

    @property
    def revocable(self) -> Plan | None:
        """The pending plan; None as well if it is irrevocable."""
        return None if self.pending is None or self.pending.irrevocable else self.pending.plan

    def newest(self, active: Plan) -> Plan:
        """Return the pending plan, the active one if none is pending."""
        return active if self.pending is None else self.pending.plan

    def publish(self, plan: Plan, active: Plan, now_s: float, limit_s: float) -> list[Message]:
        """Make a plan the pending one, under the next id and in place of an earlier one.

        Args:
            plan: The plan, complete.
            active: The active plan.
            now_s: Current time.
            limit_s: See `Switch`.
        """
        plan = plan.replace(plan_id=self.next_id)
        self.next_id += 1
        self.pending = Switch(self._optimizer_id, plan, active, now_s + limit_s, limit_s)
        self._plans[plan.plan_id] = plan
        ordered = self._sets.order(self._optimizer_id, plan.sets, plan.plan_id)
        return [*ordered, PlanMessage(self._optimizer_id, plan.to_dict(), active.plan_id)]

    def abandon(self, reason: str) -> list[Message]:
        """Give up the pending plan, which there must be."""
        assert self.pending is not None
        plan_id = self.pending.plan.plan_id
        if not self.pending.committed:
            self._sets.abandoned(self._optimizer_id, plan_id)
        self.pending = None
        return [Abandon(self._optimizer_id, plan_id, reason)]

    def acted(self, rank: int, plan_id: int) -> None:
        """Note that a rank makes steps under a plan, for the process sets that it then needs no more."""
        if plan_id < self.next_id:  # A later one was never published; noting it would free process sets in use.
            self._sets.acted(self._optimizer_id, rank, plan_id)

    def activate(self, plan_id: int) -> Plan:
        """Return the published plan of this id, which is active from now on; it and earlier ones are over."""
        plan = self._plans[plan_id]
        self._plans = {number: later for number, later in self._plans.items() if number > plan_id}
        if self.pending is not None and self.pending.plan.plan_id <= plan_id:
            self.pending = None
        return plan
