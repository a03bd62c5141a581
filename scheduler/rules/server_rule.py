"""Which pushes make an update on a parameter server, with which factors, and who gets parameters back.

A pure state machine: pushes, absences and plans go in, events come out, to be carried out in the order given. It
neither knows a clock nor a tensor, so a server process, a simulator and a test run the same rules.

With P_i the pushed sums of weight * gradient and w_i their weights, an update's gradient is
lr_factor * sum(damping_i * P_i) / sum(w_i). With x = n nothing is stale and lr_factor is 1: the weighted mean, SSGD.
With x = 1 and `linear` it is P / (w n): the ASGD of STAR, whose server always divides by n (Zhang and Shen 2025).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from scheduler.plan.plan import Plan
from scheduler.rules.weights import damping, lr_factor

__all__ = ["Drop", "Event", "Part", "Push", "Release", "ServerRule", "Update", "pushers"]

GUARD_REJECT_COSINE = -0.2
"""`reject` drops a push below it. Independent directions have a cosine of 0 +- 1 / sqrt(d), 0.03 with 1,000
parameters, so noise alone does not get there."""

_GUARD_PATIENCE = 3
"""Pushes in a row that are rejected, at least, before one is let through (one of every rank if there are more): when
everybody points against the recent updates, it is those that are wrong."""

_LEAST_WEIGHT = 1e-30
"""An update of less weight counts as one of nothing: its inverse must fit a 32-bit float."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """One gradient, or one sum of gradients, that arrived complete.

    Attributes:
        rank: Who pushed it.
        step: The rank's own counter, increasing from push to push.
        version: Server version of the parameters it was computed on.
        weight: The pushed buffer is the sum of weight * gradient; this is the sum of the weights.
        count: Gradients in it: the size of the group, or the parent and its children.
        cosine: Cosine to the running mean update, for the guard; None where unknown.
    """

    rank: int
    step: int
    version: int
    weight: float
    count: int = 1
    cosine: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One push in an update: multiply its buffer by `factor` and add.

    Attributes:
        rank: Who pushed it.
        step: The rank's own counter.
        factor: Everything that multiplies the pushed sum: learning-rate rule, damping, guard, 1 / sum of weights.
        staleness: Updates made since the parameters it was computed on.
        damped: 1 minus damping and guard: the part of the push that is lost.
    """

    rank: int
    step: int
    factor: float
    staleness: int
    damped: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One optimizer step: makes version `number` + 1 out of version `number`.

    Attributes:
        number: Version before the update.
        parts: What it is made of, in order of arrival.
        release: Ranks that get the new parameters.
        gradients: Gradients in it (the sum of the counts), for logs; the factors have it in them.
    """

    number: int
    parts: tuple[Part, ...]
    release: tuple[int, ...]
    gradients: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """A push that is thrown away, to be counted; `release` are the ranks that get the current parameters."""

    rank: int
    step: int
    reason: str
    release: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Ranks that get the current parameters without a new update."""

    ranks: tuple[int, ...]


Event = Update | Drop | Release


def pushers(plan: Plan) -> tuple[int, ...]:
    """The ranks that push to a server: leaders (the first of each group) in `grouped`, else all but the children."""
    if plan.mode == "grouped" and plan.groups:
        return tuple(sorted(group[0] for group in plan.groups))
    children = {child for child, _ in plan.parents}
    return tuple(rank for rank in range(plan.world_size) if rank not in children)


class ServerRule:
    """Decides for one server, or for all shards of one, what happens at each push.

    A rank that pushed waits until an event releases it. A rank that is late is waited for only as far as the rule
    says, and not at all while it is absent; its pushes count whenever they come. At no time do all present ranks
    wait: x never exceeds what the present ranks, and those whose push is in, can deliver.

    Args:
        plan: A plan of mode `ps` or `grouped`. With rule `groups` and no groups all ranks are one group.
        version: Version of the parameters the server has.
        ranks: Who pushes at all; `pushers(plan)` if not given.

    Attributes:
        plan: The plan in force.
        version: Version of the parameters once all events returned so far are carried out.

    Raises:
        ValueError: A plan of another mode, or a version or a rank out of range.
    """

    def __init__(self, plan: Plan, *, version: int, ranks: Iterable[int] | None = None) -> None:
        if version < 0:
            raise ValueError(f"server version is {version}; expected 0 or more")
        self.version = version
        self._pending: list[Push] = []
        self._waiting: dict[int, None] = {}  # in order of arrival
        self._absent: set[int] = set()
        self._last: dict[int, int] = {}
        self._rejects = 0
        self._adopt(plan, plan.world_size, ranks)

    def push(self, push: Push) -> list[Event]:
        """Take a complete push. A second one of the same rank and step, or one of an earlier step, is ignored.

        Raises:
            ValueError: A rank, version, count or weight out of range; nothing is changed then.
        """
        self._check(push)
        if push.step <= self._last.get(push.rank, push.step - 1):
            return []
        self._last[push.rank] = push.step
        self._waiting[push.rank] = None
        if push.rank in self._clock:
            self._clock[push.rank] += 1
        if self._rejected(push):
            return [self._drop(push, f"points against the recent updates, cosine {push.cosine:.2f}"), *self._settle()]
        self._pending.append(push)
        return self._settle()

    def absent(self, rank: int) -> list[Event]:
        """Wait for `rank` no longer: it finished, is away or is lost. What it has pushed stays in."""
        self._check_rank(rank)
        self._absent.add(rank)
        self._clock.pop(rank, None)
        return self._settle()

    def present(self, rank: int) -> list[Event]:
        """Wait for `rank` again. Under `ssp` it joins beside the slowest rank."""
        self._check_rank(rank)
        if rank in self._absent:
            self._absent.remove(rank)
            if rank in self._ranks:
                self._clock[rank] = min(self._clock.values(), default=0)
        return self._settle()

    def forget(self, rank: int) -> None:
        """A new process has this rank: its counter may start anywhere."""
        self._last.pop(rank, None)

    def set_plan(self, plan: Plan, ranks: Iterable[int] | None = None) -> list[Event]:
        """Take another plan at this version; pending pushes are judged by it at once, so no rank stays blocked.

        Args:
            plan: A plan of mode `ps` or `grouped` for the same ranks.
            ranks: Who pushes from now on; `pushers(plan)` if not given.

        Raises:
            ValueError: A plan that cannot be taken up; the old one stays.
        """
        self._adopt(plan, self.plan.world_size, ranks)
        return self._settle()

    def cut(self) -> list[Event]:
        """End of the mode: all pending pushes make one last update and everybody who waits is released.

        The caller refuses later pushes.
        """
        if self._pending:
            return [self._update(list(self._pending), everybody=True)]
        released = self._release(everybody=True)
        return [Release(ranks=released)] if released else []

    @property
    def waiting(self) -> tuple[int, ...]:
        """Ranks with a push in that are not released yet, in order of arrival."""
        return tuple(self._waiting)

    def expected(self, rank: int) -> tuple[int, ...] | None:
        """The ranks, `rank` among them, that make up its next update; None where the order of arrival decides.

        Lets a server add up chunks before all have arrived. It holds until a rank becomes absent or present or the
        plan changes. Where pushes may be dropped (guard `reject`, rule `backup`) nothing is certain.
        """
        if self.plan.guard == "reject" or (self.plan.rule == "backup" and self.plan.mode == "ps"):
            return None
        if self._alone():
            return (rank,)
        if self.plan.rule == "groups":
            return tuple(sorted(self._available(self._group_of(rank)) | {rank}))
        everybody = tuple(sorted(self._available() | {rank}))
        # A push that counts for several gradients can reach x before the others are in.
        single = not self.plan.parents and all(push.count == 1 for push in self._pending)
        certain = self._barrier() or (single and self.plan.quorum >= len(everybody))
        return everybody if certain else None

    def _settle(self) -> list[Event]:
        """Make every update, drop and release that is due."""
        events: list[Event] = []
        while self._pending:
            late = self._late()
            chosen = self._ready()
            if late is not None:
                reason = f"computed on version {late.version}, the server is at {self.version}"
                events.append(self._drop(late, reason))
            elif chosen:
                events.append(self._update(chosen))
            else:
                break
        released = self._release()
        return [*events, Release(ranks=released)] if released else events

    def _late(self) -> Push | None:
        """A pending push that Sync-opt throws away: computed on parameters before the current ones."""
        if self.plan.mode != "ps" or self.plan.rule != "backup":
            return None
        return next((push for push in self._pending if push.version < self.version), None)

    def _ready(self) -> list[Push]:
        """The pushes that make the next update, in order of arrival; none while it is not complete."""
        if self._alone():
            return self._pending[:1]
        if self.plan.rule == "groups":
            for push in self._pending:
                group = self._group_of(push.rank)
                inside = [other for other in self._pending if other.rank in group]
                if {other.rank for other in inside} == self._available(group):
                    return inside
            return []
        available = len(self._available())
        counts: dict[int, int] = {}
        for index, push in enumerate(self._pending):
            # A rank counts once, however often it pushed.
            counts[push.rank] = max(push.count, counts.get(push.rank, 0))
            if not self._barrier() and sum(counts.values()) >= self.plan.quorum:
                return self._pending[: index + 1]
        return list(self._pending) if len(counts) == available else []

    def _alone(self) -> bool:
        """Whether every push is an update of its own."""
        x_of_one = self.plan.rule == "x" and self.plan.quorum == 1
        return self.plan.mode == "grouped" or self.plan.rule == "ssp" or x_of_one

    def _barrier(self) -> bool:
        """Whether x = n: then no number of gradients stands for a rank that is still to come."""
        return self.plan.quorum == self.plan.world_size

    def _group_of(self, rank: int) -> frozenset[int]:
        everybody = frozenset(range(self.plan.world_size))
        return next((frozenset(group) for group in self.plan.groups if rank in group), everybody)

    def _available(self, group: frozenset[int] | None = None) -> frozenset[int]:
        """Ranks, of the group or of all, that push or have pushed."""
        ranks = (self._ranks - self._absent) | {push.rank for push in self._pending}
        return ranks if group is None else ranks & group

    def _update(self, chosen: list[Push], *, everybody: bool = False) -> Update:
        gradients = sum(push.count for push in chosen)
        weight = math.fsum(push.weight for push in chosen)
        scale = lr_factor(self.plan, gradients) / weight if weight >= _LEAST_WEIGHT else 0.0
        parts = []
        for push in chosen:
            staleness = self.version - push.version
            kept = damping(self.plan, staleness, gradients) * self._guard(push)
            parts.append(
                Part(rank=push.rank, step=push.step, factor=scale * kept, staleness=staleness, damped=1.0 - kept)
            )
        self._remove(chosen)
        self.version += 1
        return Update(
            number=self.version - 1, parts=tuple(parts), release=self._release(everybody), gradients=gradients
        )

    def _drop(self, push: Push, reason: str) -> Drop:
        self._remove([push])
        return Drop(rank=push.rank, step=push.step, reason=reason, release=self._release())

    def _remove(self, pushes: list[Push]) -> None:
        gone = set(map(id, pushes))
        self._pending = [push for push in self._pending if id(push) not in gone]

    def _release(self, everybody: bool = False) -> tuple[int, ...]:
        """Take out of `waiting` who need not wait: no push of theirs is pending and they are not too far ahead."""
        held = set() if everybody else {push.rank for push in self._pending}
        if not everybody and self.plan.mode == "ps" and self.plan.rule == "ssp":
            slowest = min(self._clock.values(), default=0)
            held |= {rank for rank, clock in self._clock.items() if clock - slowest > self.plan.slack}
        free = tuple(rank for rank in self._waiting if rank not in held)
        for rank in free:
            del self._waiting[rank]
        return free

    # Guard: after Zeno++ (Xie et al. 2020), with the recent updates in place of a validation batch.

    def _rejected(self, push: Push) -> bool:
        # A cosine that is None or NaN is no evidence.
        if self.plan.guard != "reject" or push.cosine is None or not push.cosine < GUARD_REJECT_COSINE:
            self._rejects = 0
            return False
        self._rejects += 1
        if self._rejects > max(_GUARD_PATIENCE, len(self._ranks - self._absent)):
            self._rejects = 0
            return False
        return True

    def _guard(self, push: Push) -> float:
        """`damp`: 1 for what points along the recent updates, down to 0 for their opposite, smooth at both ends."""
        if self.plan.guard != "damp" or push.cosine is None or math.isnan(push.cosine):
            return 1.0
        against = min(max(-push.cosine, 0.0), 1.0)
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * against)))

    def _adopt(self, plan: Plan, world_size: int, ranks: Iterable[int] | None) -> None:
        """Take the plan up, or raise and change nothing."""
        if plan.mode not in ("ps", "grouped"):
            raise ValueError(f"a server got a plan of mode {plan.mode}; expected ps or grouped")
        if plan.world_size != world_size:
            raise ValueError(f"the plan is for {plan.world_size} ranks; expected {world_size}, as before")
        chosen = frozenset(pushers(plan) if ranks is None else ranks)
        bad = sorted(rank for rank in chosen if not 0 <= rank < world_size)
        if bad or not chosen:
            raise ValueError(f"pushing ranks are {sorted(chosen)}; expected some of 0..{world_size - 1}")
        self.plan = plan
        self._ranks = chosen
        # Pushes under this plan: the own counters of ranks that came at different times cannot be compared.
        self._clock = {rank: 0 for rank in chosen if rank not in self._absent}

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.plan.world_size:
            raise ValueError(f"rank is {rank}; expected 0..{self.plan.world_size - 1}")

    def _check(self, push: Push) -> None:
        self._check_rank(push.rank)
        if not 0 <= push.version <= self.version:
            raise ValueError(
                f"rank {push.rank} pushed a gradient of version {push.version}; expected 0..{self.version}, the "
                "versions this server has given out: the rank must fetch parameters first"
            )
        if not 0.0 <= push.weight < math.inf:
            raise ValueError(f"rank {push.rank} pushed weight {push.weight}; expected a finite number, 0 or more")
        if push.count < 1:
            raise ValueError(f"rank {push.rank} pushed {push.count} gradients; expected at least 1")
