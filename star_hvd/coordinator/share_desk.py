"""The coordinator's end of batch shares: a change takes effect at a step of which no rank has formed its batch. Pure.

Two phases, as `star_hvd.channel.messages.shares` has it: proposed to all ranks, ordered once all have answered. Only
one change is on its way at a time; it is given up where a rank does not answer.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from scheduler.balance.batch_shares import divide
from scheduler.balance.share_policy import SharePolicy, share_sentence
from scheduler.plan.plan import Plan
from star_hvd.channel.messages.base import Message
from star_hvd.channel.messages.leases import LeaseAsk
from star_hvd.channel.messages.shares import EPOCH_START, MemoryLimit, ShareOrder, ShareProposal, ShareReady
from star_hvd.errors import ChannelError

__all__ = ["Change", "ShareControl", "ShareDesk"]

_ANSWER_S = 20.0
"""A third of the time that a rank waits for the order: it never waits in vain for one that was given up."""

_EVERY_S, _MANY = 0.1, 64  # Between two looks at the times; longer with more ranks, whose medians take as much longer.
_AGAIN_S = 0.2  # After a proposal that came at a bad moment, between two epochs for example.
_KEPT = 256  # Changes of which the first step is remembered.


@dataclass(frozen=True, slots=True)
class Change:
    """Batch shares that were ordered.

    Attributes:
        step: From which on.
        shares: Samples of every rank, empty for equal batches.
        epoch: Of the loader.
        totals: What every rank gets of that epoch, None where it takes what it gets done.
        later: Likewise of later epochs.
    """

    step: int
    shares: tuple[int, ...]
    epoch: int
    totals: tuple[int, ...] | None
    later: tuple[int, ...] | None


@dataclass(slots=True)
class _Proposal:
    number: int
    shares: tuple[int, ...]
    deadline_s: float
    bounded: bool
    answers: dict[int, ShareReady] = field(default_factory=dict)


class ShareDesk:
    """See the module's text.

    Args:
        world_size: Number of ranks.
        send: Sends a message to all ranks.

    Attributes:
        loader: The loader that feeds the training, -1 before there is one.
        batch: Samples in each of its batches where all are equal.
        shares: What was ordered last, empty for equal batches.
        most: Most samples of every rank by its memory or the user's limit, 0 where it names none.
    """

    def __init__(self, world_size: int, send: Callable[[Message], None]) -> None:
        self.loader, self.batch = -1, 0
        self.shares: tuple[int, ...] = ()
        self.most = [0] * world_size
        self._world_size = world_size
        self._send = send
        self._samples: dict[int, int] = {}  # Of an epoch, of which none is left out.
        self._proposal: _Proposal | None = None
        self._proposals = 0
        self._steps: list[int] = []
        self._ordered: list[tuple[int, ...]] = []

    @property
    def pending(self) -> bool:
        """Whether a change is on its way."""
        return self._proposal is not None

    def opens(self, message: LeaseAsk, samples: int) -> tuple[int, ...] | None:
        """An epoch of a loader begins: what every rank gets of it, None where it takes what it gets done.

        Args:
            message: The first request of the epoch.
            samples: That are handed out in it.
        """
        if self.loader < 0 and samples > 0 and not message.fixed:
            self.loader, self.batch = message.loader, message.batch
        if message.loader != self.loader or message.fixed:
            return None
        if message.even and not self.shares:
            self.shares = (self.batch,) * self._world_size
        self._samples = {epoch: count for epoch, count in self._samples.items() if epoch > message.epoch - 2}
        self._samples[message.epoch] = samples
        return self._totals(self.shares, samples, [0] * self._world_size)

    def propose(self, shares: Sequence[int], now_s: float, *, bounded: bool = True) -> None:
        """Ask all ranks from where on they can have other shares; empty for equal batches.

        Args:
            shares: Samples of every rank.
            now_s: The present.
            bounded: Give them up where one is above its rank's limit; shares of the user's own stay.
        """
        self._proposals += 1
        self._proposal = _Proposal(self._proposals, tuple(shares), now_s + _ANSWER_S, bounded)
        self._send(ShareProposal(self.loader, self._proposals, list(shares)))

    def ready(self, rank: int, message: ShareReady, next_step: int) -> Change | None:
        """A rank's answer; with the last one the change is ordered.

        Args:
            rank: The rank.
            message: Its answer.
            next_step: The first step of an epoch that no rank has begun.

        Raises:
            ChannelError: The answer says what it cannot.
        """
        if message.loader != self.loader or message.batches < 1:
            raise ChannelError(f"a share_ready message is of loader {message.loader}; {self.loader} was asked")
        proposal = self._proposal
        if proposal is None or message.number != proposal.number:
            return None
        self.most[rank] = message.most
        proposal.answers[rank] = message
        if len(proposal.answers) < self._world_size:
            return None
        self._proposal = None
        found = None if proposal.bounded and self._too_much(proposal.shares) else self._place(proposal, next_step)
        if found is None:
            self._give_up(proposal)
            return None
        order, change = found
        self.shares = proposal.shares
        self._steps, self._ordered = [*self._steps, change.step][-_KEPT:], [*self._ordered, self.shares][-_KEPT:]
        self._send(order)
        return change

    def tick(self, now_s: float) -> None:
        """Give up a proposal that not all ranks have answered."""
        if self._proposal is not None and now_s > self._proposal.deadline_s:
            proposal, self._proposal = self._proposal, None
            self._give_up(proposal)

    def samples(self, rank: int, step: int) -> int:
        """Samples of a rank in a step, the last one of an epoch aside."""
        at = bisect.bisect_right(self._steps, step) - 1
        shares = self._ordered[at] if at >= 0 else ()
        return shares[rank] if shares else self.batch

    def all_samples(self, steps: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The same for many steps at once, shape (n_ranks, n_steps)."""
        found = np.full(steps.shape, self.batch, dtype=np.int64)
        for step, shares in zip(self._steps, self._ordered, strict=True):
            own = np.array(shares or (self.batch,) * len(steps), dtype=np.int64)[:, None]
            found = np.where(steps >= step, own, found)
        return found

    # ---- inside ---------------------------------------------------------------------------------------------

    def _too_much(self, shares: Sequence[int]) -> bool:
        """Whether a share is above its rank's limit; usual batches are cut where they do not fit."""
        return any(0 < most < share > self.batch for share, most in zip(shares, self.most, strict=False))

    def _give_up(self, proposal: _Proposal) -> None:
        self._send(ShareOrder(self.loader, proposal.number, False, [], 0, 0, 0))

    def _place(self, proposal: _Proposal, next_step: int) -> tuple[ShareOrder, Change] | None:
        """Where the change begins; None where that cannot be said now: some ranks are between two epochs."""
        answers = [proposal.answers[rank] for rank in range(self._world_size)]
        epoch = max(each.epoch for each in answers)
        there = [each for each in answers if each.epoch == epoch]
        started = [each for each in there if each.step != EPOCH_START]
        if started and (len(started) < self._world_size or len({each.batches for each in started}) > 1):
            return None
        samples = self._samples.get(epoch, max(self._samples.values(), default=0))  # Without those consumed before.
        step, remaining, taken = EPOCH_START, samples, [0] * self._world_size
        if started:
            step = max(each.step for each in started)
            taken = [each.taken + _planned(each.ahead, (step - each.step) * each.batches) for each in answers]
            remaining = samples - sum(taken)
            if remaining < sum(proposal.shares or self.shares or (self.batch * self._world_size,)):
                return None  # The next epoch is soon enough.
        order = ShareOrder(self.loader, proposal.number, True, list(proposal.shares), epoch, step, remaining)
        at = step if started else next_step
        later = self._totals(proposal.shares, max(self._samples.values(), default=0), [0] * self._world_size)
        return order, Change(at, proposal.shares, epoch, self._totals(proposal.shares, remaining, taken), later)

    def _totals(self, shares: Sequence[int], remaining: int, taken: Sequence[int]) -> tuple[int, ...] | None:
        if not shares:
            return None
        steps, rest = divmod(remaining, sum(shares))
        last = divide(rest, shares)
        return tuple(before + steps * share + one for before, share, one in zip(taken, shares, last, strict=True))


def _planned(ahead: Sequence[int], batches: int) -> int:
    """Samples in a rank's next batches, as its answer plans them."""
    begins, sizes = ahead[::2], ahead[1::2]
    ends = [min(batches, begin) for begin in (*begins[1:], batches)]
    return sum(max(0, end - begin) * size for begin, end, size in zip(begins, ends, sizes, strict=True))


class ShareControl:
    """Batch shares wanted for the optimizer that a `shard` loader feeds, and whether they may be requested.

    Args:
        world_size: Number of ranks.
        send: Sends a message to all ranks.

    Attributes:
        desk: Has the shares in force and changes them.
        changes: What was ordered: first steps and shares, the latest last.
    """

    def __init__(self, world_size: int, send: Callable[[Message], None]) -> None:
        self.desk = ShareDesk(world_size, send)
        self.changes: list[tuple[int, tuple[int, ...], str]] = []
        self._world_size = world_size
        self._policy: SharePolicy | None = None
        self._warm: set[int] = set()  # Ranks whose first report has come, which tells nothing of the steps to come.
        self._again_s = self._decide_s = 0.0

    @property
    def policy(self) -> SharePolicy | None:
        """What decides, None before a loader feeds the ranks."""
        if self._policy is None and self.desk.batch:
            self._policy = SharePolicy(self._world_size, self.desk.batch)
        return self._policy

    def note(self, rank: int, step: int, compute_s: float) -> None:
        """Take in a rank's time of a step."""
        if rank not in self._warm:
            self._warm.add(rank)
        elif self.policy is not None:
            self.policy.note(rank, self.desk.samples(rank, step), compute_s)

    def tick(self, plan: Plan, now_s: float, *, even: bool = False) -> None:
        """Ask the ranks for other shares where the plan in force, or what was measured, wants them.

        Args:
            plan: The plan in force.
            now_s: The present.
            even: Every rank needs as many batches as the others: it meets them within its backward or forward passes.
        """
        self.desk.tick(now_s)
        if self.policy is None or self.desk.pending or now_s < self._again_s:
            return
        wanted = self._wanted(plan, now_s, even=even)
        if wanted is not None and wanted != self.desk.shares:
            self._again_s = now_s + _AGAIN_S
            self.desk.propose(wanted, now_s, bounded=plan.balanced)

    def ready(self, rank: int, message: ShareReady, next_step: int) -> Change | None:
        """A rank's answer, see `ShareDesk.ready`."""
        change = self.desk.ready(rank, message, next_step)
        if change is not None and self.policy is not None:
            self.policy.changed(change.shares)
            self.changes.append((change.step, change.shares, self.sentence()))
        return change

    def limit(self, rank: int, message: MemoryLimit) -> None:
        """A rank ran out of memory: shares above its limit are changed at once."""
        if message.loader == self.desk.loader:
            self.desk.most[rank] = message.most
            self._decide_s = 0.0

    def sentence(self) -> str:
        """What the shares in force are, `rank 2 gets 12 of 76 samples` for example; empty for plain `sync`."""
        if not self.desk.shares or self.policy is None:
            return ""
        return share_sentence(self.desk.shares, self.policy.ratio)

    @property
    def fixed_part(self) -> float:
        """Part of a rank's time that does not depend on its batch; NaN where no change of size has shown it."""
        return self.policy.curves.fixed if self.policy is not None and self.policy.curves.known else math.nan

    def scale(self, steps: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Time of a usual batch over that of the batches of these steps, shape (n_ranks, n_steps)."""
        fixed = self.policy.curves.fixed if self.policy is not None else 0.0
        ratio = self.desk.all_samples(steps) / max(1, self.desk.batch)
        return np.asarray(1.0 / (fixed + (1.0 - fixed) * ratio))

    def _wanted(self, plan: Plan, now_s: float, *, even: bool) -> tuple[int, ...] | None:
        """The shares to ask for, None to keep those in force."""
        assert self.policy is not None
        # Equal shares keep ranks in step to the end of an epoch; ranks that take what they get done would not be.
        if plan.plain and (self.desk.shares or even):
            return (self.desk.batch,) * self._world_size
        if not plan.uneven:
            return ()
        if not plan.balanced:
            return plan.batch_shares
        found = None
        if now_s >= self._decide_s:
            self._decide_s = now_s + _EVERY_S * max(1.0, self._world_size / _MANY)
            found = self.policy.decide(self.desk.shares, self.desk.most)
        if found is None and not self.desk.shares:
            return (self.desk.batch,) * self._world_size
        return found
