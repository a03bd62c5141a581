"""Which pushes make an update on a parameter server, with which factors, and which ranks get new parameters.

A pure state machine: its inputs are pushes, absences and plans, its outputs events to execute in order. It has no clock
and no tensors, so a server process, the simulator and tests run the same rules.

With P_i the pushed sums of weight * gradient and w_i their weights, an update's gradient is
sum(damping_i / D * P_i) / sum(w_i), and its learning rate lr_factor * D times the usual one. D is the usual damping: it
belongs to the learning rate, because optimizers such as Adam divide a constant factor of all gradients out again. What
remains with the gradient is how much more or less than usual it counts. With x = n nothing is stale, and D and
lr_factor are 1: the weighted mean, SSGD. With x = 1 and `linear`, SGD subtracts lr * P / (w n): the ASGD of STAR, whose
server always divides by n (Zhang and Shen 2025).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from scheduler.plan.plan import Plan
from scheduler.rules.weights import damping, lr_factor

__all__ = ["Drop", "Event", "Part", "Push", "Release", "ServerRule", "Update", "pushers"]

GUARD_REJECT_COSINE = -0.2
"""`reject` drops a push with a lower cosine. Independent directions have a cosine of 0 +- 1 / sqrt(d), 0.03 with 1,000
parameters, so noise alone does not reach it."""

_GUARD_PATIENCE = 3
"""Least number of consecutive rejected pushes before one is accepted (one per rank if there are more): when all pushes
point against the recent updates, the recent updates are wrong."""

_DAMPING_ROUNDS = 4
"""The usual damping is a running mean over about as many pushes of every rank."""

_LEAST_WEIGHT = 1e-30
"""An update of less weight counts as zero: the inverse must fit a 32-bit float."""
_MOST_WEIGHT = 1e30


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """One complete gradient, or sum of gradients.

    Attributes:
        rank: The rank that pushed it.
        step: The rank's own counter, increasing from push to push.
        version: Server version of the parameters it was computed on.
        weight: Sum of the weights; the pushed buffer is the sum of weight * gradient.
        count: Gradients in it: the size of the group, or 1 plus the children of a parent.
        cosine: Cosine to the running mean update, for the guard; None if unknown.
    """

    rank: int
    step: int
    version: int
    weight: float
    count: int = 1
    cosine: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One push in an update, whose buffer is multiplied by `factor` and added.

    Attributes:
        rank: The rank that pushed it.
        step: The rank's own counter.
        factor: Product of damping (relative to the usual one), guard and 1 / sum of weights.
        staleness: Updates made since the parameters it was computed on.
        damped: Share of the push that damping and guard remove, 0 to 1.
    """

    rank: int
    step: int
    factor: float
    staleness: int
    damped: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One optimizer step, from version `number` to `number` + 1.

    Attributes:
        number: Version before the update.
        parts: Its pushes, in order of arrival.
        release: Ranks that get the new parameters.
        gradients: Gradients in it (sum of the counts), for logs; `lr_factor` includes it.
        lr_factor: Factor on the learning rate in this update: learning-rate rule times usual damping. It is no factor
            of the gradient, to which Adam would not respond, nor would weight decay.
    """

    number: int
    parts: tuple[Part, ...]
    release: tuple[int, ...]
    gradients: int
    lr_factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """A push that is dropped and counted; `release` are the ranks that get the current parameters."""

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
    """The ranks that push to servers: in `grouped` the first of each group, else all."""
    if plan.mode == "grouped" and plan.groups:
        return tuple(sorted(group[0] for group in plan.groups))
    return tuple(range(plan.world_size))


class ServerRule:
    """Decides for all shards of one optimizer what happens at each push.

    A rank that pushed waits until an event releases it. Others wait for a late rank only as the rule says, and never
    while it is absent; its pushes count whenever they arrive. The present ranks never all wait: x is limited to what
    the present ranks and those with a pending push can deliver.

    Args:
        plan: A plan of mode `ps` or `grouped`. With rule `groups` and no groups all ranks are one group.
        version: Version of the server's parameters.
        ranks: Ranks that push; `pushers(plan)` if None.

    Attributes:
        plan: The active plan.
        version: Version of the parameters after all events returned so far.

    Raises:
        ValueError: The plan is of another mode, or the version or a rank is out of range.
    """

    def __init__(self, plan: Plan, *, version: int, ranks: Iterable[int] | None = None) -> None:
        if version < 0:
            raise ValueError(f"server version is {version}; expected 0 or more")
        self.version = version
        self._pending: list[Push] = []
        self._waiting: dict[int, None] = {}  # In order of arrival.
        self._absent: set[int] = set()
        self._last: dict[int, int] = {}
        self._rejects = 0
        self._usual_damping = 1.0
        self._missed: dict[int, int] = {}  # Rule `grace`: pushes of a rank that were dropped in succession.
        self._parked: set[int] = set()  # Rule `grace`: ranks whose push was dropped.
        self._adopt(plan, plan.world_size, ranks)

    def push(self, push: Push) -> list[Event]:
        """Process a complete push. A repeated one, or one of an earlier step of the rank, is ignored.

        Raises:
            ValueError: Rank, version, count or weight is out of range; nothing is changed.
        """
        self._check(push)
        if push.step <= self._last.get(push.rank, push.step - 1):
            return []
        self._last[push.rank] = push.step
        self._waiting[push.rank] = None
        if push.rank in self._clock:
            self._clock[push.rank] += 1
        if self._rejected(push):
            dropped = self._drop(push, f"points against the recent updates, cosine {push.cosine:.2f}")
            return [dropped, *self._process_pending()]
        self._pending.append(push)
        return self._process_pending()

    def absent(self, rank: int) -> list[Event]:
        """Stop waiting for `rank`, which finished, is inactive or is lost. Its pending pushes stay."""
        self._check_rank(rank)
        self._absent.add(rank)
        self._clock.pop(rank, None)
        return self._process_pending()

    def present(self, rank: int) -> list[Event]:
        """Wait for `rank` again. Under `ssp` its clock starts at the slowest rank's."""
        self._check_rank(rank)
        if rank in self._absent:
            self._absent.remove(rank)
            if rank in self._ranks:
                self._clock[rank] = min(self._clock.values(), default=0)
        return self._process_pending()

    def set_plan(self, plan: Plan, ranks: Iterable[int] | None = None) -> list[Event]:
        """Switch to another plan at this version; it applies to pending pushes at once, so that no rank stays blocked.

        Args:
            plan: A plan of mode `ps` or `grouped` for the same ranks.
            ranks: Ranks that push from now on; `pushers(plan)` if None.

        Raises:
            ValueError: The plan is invalid here; the old one stays.
        """
        self._adopt(plan, self.plan.world_size, ranks)
        return self._process_pending()

    def drain(self) -> list[Event]:
        """End the mode: all pending pushes make one last update and all waiting ranks are released.

        The caller rejects later pushes.
        """
        if self._pending:
            return [self._update(list(self._pending), release_all=True)]
        released = self._release(release_all=True)
        return [Release(ranks=released)] if released else []

    def close(self) -> list[Event]:
        """End the grace of an update that has its quorum; does nothing if there is none (`holding`)."""
        self._closing = self.holding
        events = self._process_pending()
        self._closing = False
        return events

    @property
    def holding(self) -> bool:
        """Whether an update has its quorum and waits for further ranks until `close` (rule `grace`)."""
        return self._has("grace") and self._quorate() and not self._ready()

    @property
    def fresh(self) -> int:
        """Number of pushes that wait for the next update."""
        return len(self._pending)

    @property
    def waiting(self) -> tuple[int, ...]:
        """Ranks that pushed and are not released yet, in order of arrival."""
        return tuple(self._waiting)

    def expected(self, rank: int) -> tuple[int, ...] | None:
        """The ranks of `rank`'s next update, itself included; None if the order of arrival decides.

        Allows a server to add up chunks before all have arrived. Valid until a rank becomes absent or present or the
        plan changes. None where pushes may be dropped (guard `reject`, rules `backup` and `grace`).
        """
        if self.plan.guard == "reject" or self._has("backup", "grace"):
            return None
        if self._alone():
            return (rank,)
        if self.plan.rule == "groups":
            return tuple(sorted(self._available(self._group_of(rank)) | {rank}))
        all_ranks = tuple(sorted(self._available() | {rank}))
        # A push of several gradients can reach x before the other ranks have pushed.
        single = all(push.count == 1 for push in self._pending)
        certain = self._barrier() or (single and self.plan.quorum >= len(all_ranks))
        return all_ranks if certain else None

    def _process_pending(self) -> list[Event]:
        """Make every update, drop and release that is due."""
        events: list[Event] = []
        while self._pending:
            late = self._late()
            chosen = self._ready()
            if late is not None:
                if self._has("grace"):
                    # It gets the next version with the others: with the current one it would be late again.
                    self._missed[late.rank] = self._missed.get(late.rank, 0) + 1
                    self._parked.add(late.rank)
                reason = f"computed on version {late.version}, the server is at {self.version}"
                events.append(self._drop(late, reason))
            elif chosen:
                events.append(self._update(chosen))
            else:
                break
        released = self._release()
        return [*events, Release(ranks=released)] if released else events

    def _late(self) -> Push | None:
        """A pending push that `backup` and `grace` drop: computed on older parameters than the current ones."""
        if not self._has("backup", "grace"):
            return None
        return next((push for push in self._pending if push.version < self.version), None)

    def _ready(self) -> list[Push]:
        """The pushes of the next update, in order of arrival; empty while it is incomplete."""
        if self._alone():
            return self._pending[:1]
        if self.plan.rule == "groups":
            for push in self._pending:
                group = self._group_of(push.rank)
                found = [other for other in self._pending if other.rank in group]
                if {other.rank for other in found} == self._available(group):
                    return found
            return []
        if self._has("grace"):
            return list(self._pending) if self._quorate() and (self._closing or not self._awaited()) else []
        available = len(self._available())
        counts: dict[int, int] = {}
        for index, push in enumerate(self._pending):
            # A rank counts once, however often it pushed.
            counts[push.rank] = max(push.count, counts.get(push.rank, 0))
            if not self._barrier() and sum(counts.values()) >= self.plan.quorum:
                return self._pending[: index + 1]
        return list(self._pending) if len(counts) == available else []

    def _has(self, *rules: str) -> bool:
        return self.plan.mode == "ps" and self.plan.rule in rules

    def _quorate(self) -> bool:
        """Whether enough ranks have pushed for an update of rule `grace`."""
        pushed = len({push.rank for push in self._pending})
        return pushed >= max(1, min(self.plan.quorum, len(self._available())))

    def _awaited(self) -> set[int]:
        """Rule `grace`: ranks that got the current parameters with the others and have not pushed yet.

        A rank that missed updates is waited for after the first, second, fourth, eighth, ... of its pushes dropped in
        succession: one that stays slow costs ever fewer graces, one that was frozen is in time again at once.
        """
        missed = ((rank, self._missed.get(rank, 0)) for rank in self._together)
        likely = {rank for rank, count in missed if not count & (count - 1)}
        return likely - self._absent - {push.rank for push in self._pending}

    def _alone(self) -> bool:
        """Whether every push makes an update by itself."""
        x_of_one = self.plan.rule == "x" and self.plan.quorum == 1
        return self.plan.mode == "grouped" or self.plan.rule == "ssp" or x_of_one

    def _barrier(self) -> bool:
        """Whether x = n: then every available rank is waited for, whatever the number of gradients."""
        return self.plan.quorum == self.plan.world_size

    def _group_of(self, rank: int) -> frozenset[int]:
        all_ranks = frozenset(range(self.plan.world_size))
        return next((frozenset(group) for group in self.plan.groups if rank in group), all_ranks)

    def _available(self, group: frozenset[int] | None = None) -> frozenset[int]:
        """Ranks of the group (or of all) that are present or have a pending push."""
        ranks = (self._ranks - self._absent) | {push.rank for push in self._pending}
        return ranks if group is None else ranks & group

    def _update(self, chosen: list[Push], *, release_all: bool = False) -> Update:
        gradients = sum(push.count for push in chosen)
        weight = math.fsum(push.weight for push in chosen)
        dampings = [damping(self.plan, self.version - push.version, gradients) for push in chosen]
        scale = 0.0
        if weight >= _LEAST_WEIGHT:
            mean = math.fsum(push.weight * kept for push, kept in zip(chosen, dampings, strict=True)) / weight
            share = min(1.0, gradients / (_DAMPING_ROUNDS * self.plan.world_size))
            self._usual_damping += share * (mean - self._usual_damping)
            scale = 1.0 / (weight * self._usual_damping)
        parts = []
        for push, damped in zip(chosen, dampings, strict=True):
            kept = damped * self._guard(push)
            staleness = self.version - push.version
            parts.append(
                Part(rank=push.rank, step=push.step, factor=scale * kept, staleness=staleness, damped=1.0 - kept)
            )
        self._remove(chosen)
        self.version += 1
        self._parked.clear()
        for push in chosen:
            self._missed.pop(push.rank, None)
        released = self._release(release_all)
        self._together = frozenset(released)
        return Update(
            number=self.version - 1,
            parts=tuple(parts),
            release=released,
            gradients=gradients,
            lr_factor=lr_factor(self.plan, gradients) * self._usual_damping,
        )

    def _drop(self, push: Push, reason: str) -> Drop:
        self._remove([push])
        return Drop(rank=push.rank, step=push.step, reason=reason, release=self._release())

    def _remove(self, pushes: list[Push]) -> None:
        gone = set(map(id, pushes))
        self._pending = [push for push in self._pending if id(push) not in gone]

    def _release(self, release_all: bool = False) -> tuple[int, ...]:
        """Remove ranks from `waiting` that have no pending push and are not too far ahead; returns them."""
        held = set() if release_all else {push.rank for push in self._pending}
        if not release_all and self.plan.mode == "ps" and self.plan.rule == "ssp":
            slowest = min(self._clock.values(), default=0)
            held |= {rank for rank, clock in self._clock.items() if clock - slowest > self.plan.slack}
        if not release_all and not (self._ranks - self._absent) <= self._waiting.keys():
            held |= self._parked  # An update will come: there are ranks that have not pushed.
        free = tuple(rank for rank in self._waiting if rank not in held)
        for rank in free:
            del self._waiting[rank]
        return free

    # Guard: after Zeno++ (Xie et al. 2020), with the recent updates instead of a validation batch.

    def _rejected(self, push: Push) -> bool:
        # Without a cosine (None or NaN) the push is accepted.
        if self.plan.guard != "reject" or push.cosine is None or not push.cosine < GUARD_REJECT_COSINE:
            self._rejects = 0
            return False
        self._rejects += 1
        if self._rejects > max(_GUARD_PATIENCE, len(self._ranks - self._absent)):
            self._rejects = 0
            return False
        return True

    def _guard(self, push: Push) -> float:
        """Factor of guard `damp`: 1 along the recent updates, 0 against them, smooth at both ends."""
        if self.plan.guard != "damp" or push.cosine is None or math.isnan(push.cosine):
            return 1.0
        against = min(max(-push.cosine, 0.0), 1.0)
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * against)))

    def _adopt(self, plan: Plan, world_size: int, ranks: Iterable[int] | None) -> None:
        """Switch to the plan, or raise and change nothing."""
        if plan.mode not in ("ps", "grouped"):
            raise ValueError(f"the plan of a server has mode {plan.mode}; expected ps or grouped")
        if plan.world_size != world_size:
            raise ValueError(f"the plan is for {plan.world_size} ranks; expected {world_size}, as before")
        chosen = frozenset(pushers(plan) if ranks is None else ranks)
        bad = sorted(rank for rank in chosen if not 0 <= rank < world_size)
        if bad or not chosen:
            raise ValueError(f"pushing ranks are {sorted(chosen)}; expected some of 0..{world_size - 1}")
        self.plan = plan
        self._ranks = chosen
        self._together, self._closing = chosen, False  # Ranks that got the current version at the same time.
        self._missed.clear()
        self._parked.clear()
        # Pushes under this plan: ranks may have joined at different times, so their own counters are not comparable.
        self._clock = {rank: 0 for rank in chosen if rank not in self._absent}

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.plan.world_size:
            raise ValueError(f"rank is {rank}; expected 0..{self.plan.world_size - 1}")

    def _check(self, push: Push) -> None:
        self._check_rank(push.rank)
        if not 0 <= push.version <= self.version:
            raise ValueError(
                f"rank {push.rank} pushed a gradient of version {push.version}; expected 0..{self.version}, the "
                "versions of this server: the rank must fetch parameters first"
            )
        if not 0.0 <= push.weight < _MOST_WEIGHT:
            raise ValueError(f"rank {push.rank} pushed weight {push.weight}; expected 0 to {_MOST_WEIGHT:g}")
        if push.count < 1:
            raise ValueError(f"rank {push.rank} pushed {push.count} gradients; expected at least 1")
