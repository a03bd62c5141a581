"""The coordinator's end of batch shares: a change takes effect at a step for which no rank has formed a batch. Pure.

Two phases (`star_hvd.channel.messages.shares`): a change is proposed to all ranks, and ordered once all have answered.
There is one change at a time; it is given up if a rank does not answer.
"""

from __future__ import annotations

import bisect
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from scheduler.balance.batch_shares import LastStep
from scheduler.balance.share_policy import SharePolicy, share_sentence
from scheduler.plan.plan import Plan
from scheduler.records import StepTimes
from star_hvd.channel.messages.base import Message
from star_hvd.channel.messages.leases import LeaseAsk
from star_hvd.channel.messages.shares import EPOCH_START, MemoryLimit, ShareOrder, ShareProposal, ShareReady
from star_hvd.errors import ChannelError

__all__ = ["Change", "ShareControl", "ShareState"]

logger = logging.getLogger("star_hvd")

_ANSWER_S = 20.0
"""Deadline for the ranks' answers: a third of the time that a rank waits for the order, so that a rank always hears in
time of a change that was given up."""

_EVERY_S, _MANY = 0.1, 64  # Between two checks of the times; longer with more ranks, as their medians take longer.
_AGAIN_S = 0.2  # Pause behind a refused proposal; one may come at a bad moment, between two epochs for example.
_LEAST_S = 1e-6  # Least own time of a rank in a step.
_KEPT = 256  # Changes whose first step is remembered.
_LATE_FOUND = 8  # Most steps with a loader before it is known to feed the training; it takes two, and a message.
_FEEDS_KEPT = 16  # Loaders remembered besides the one that feeds the training.


@dataclass(frozen=True, slots=True)
class Change:
    """Batch shares that were ordered.

    Attributes:
        step: First step with these shares.
        shares: Samples of every rank, empty for equal batches.
        epoch: Epoch of the loader in which they start.
        planned: Samples of that epoch that every rank takes before.
        last: How the last step of an epoch is divided.
    """

    step: int
    shares: tuple[int, ...]
    epoch: int
    planned: tuple[int, ...]
    last: LastStep


@dataclass(slots=True)
class _Proposal:
    number: int
    shares: tuple[int, ...]
    deadline_s: float
    bounded: bool
    even: bool
    answers: dict[int, ShareReady] = field(default_factory=dict)


@dataclass(slots=True)
class _Feed:
    """What is known of a loader whose batches can have shares.

    Attributes:
        loader: Its number.
        batch: Samples in each of its batches if all are equal.
        shares: The shares ordered last, empty for equal batches.
        announced: Whether the ranks know of `shares`, see `ShareState`.
        last: How the last step of an epoch is divided, as ordered last.
        drop_last: Whether short batches are left out.
        samples: Samples handed out, by epoch.
        most: Maximum samples of every rank, see `ShareState.most`.
    """

    loader: int
    batch: int
    most: list[int]
    shares: tuple[int, ...] = ()
    announced: bool = True
    last: LastStep = field(default_factory=LastStep)
    drop_last: bool = False
    samples: dict[int, int] = field(default_factory=dict)


class ShareState:
    """See the module's text.

    Args:
        world_size: Number of ranks.
        send: Sends a message to all ranks.

    Attributes:
        least: Fewest samples that a rank should have in a step.
        in_step: Whether all ranks make every step together, as far as is known: an epoch then starts with equal shares,
            so that its steps have the samples of plain Horovod's.
        deal: Called with the loader, a change and the time before the change is ordered: deals its samples
            (`LeaseService.deal`). Returns whether that was possible; if not, the change is given up.
    """

    def __init__(self, world_size: int, send: Callable[[Message], None]) -> None:
        self.least = 1
        self.in_step = False
        self.deal: Callable[[int, Change, float], bool] = lambda loader, change, now_s: True
        self._world_size = world_size
        self._send = send
        self._feed = _Feed(-1, 0, [0] * world_size)  # Of the loader that feeds the training.
        self._feeds: dict[int, _Feed] = {}
        self._proposal: _Proposal | None = None
        self._proposals = 0
        self._steps: list[int] = []
        self._ordered: list[tuple[int, ...]] = []

    @property
    def loader(self) -> int:
        """The loader that feeds the training: the first one until gradients follow another's batches; -1 before.

        Also -1 while gradients follow batches that cannot have shares, as those of a stream or of a plain DataLoader.
        """
        return self._feed.loader

    @property
    def batch(self) -> int:
        """Samples in each of its batches if all are equal; of the loader before if none feeds the training any more."""
        return self._feed.batch

    @property
    def most(self) -> list[int]:
        """Maximum samples of every rank in one of its batches, by memory or the user's limit, 0 for no limit."""
        return self._feed.most

    @property
    def shares(self) -> tuple[int, ...]:
        """The shares ordered last for it, empty for equal batches."""
        return self._feed.shares

    @shares.setter
    def shares(self, shares: tuple[int, ...]) -> None:
        self._feed.shares = shares

    @property
    def announced(self) -> bool:
        """Whether the ranks know of `shares`.

        They need not for equal ones with which an epoch starts, since each batch has the usual size, and a rank's last
        one is what is left.
        """
        return self._feed.announced

    @property
    def last(self) -> LastStep:
        """How the last step of its epochs is divided, as ordered last."""
        return self._feed.last

    @last.setter
    def last(self, last: LastStep) -> None:
        self._feed.last = last

    @property
    def pending(self) -> bool:
        """Whether a change has been proposed and not yet ordered or given up."""
        return self._proposal is not None

    def opens(self, message: LeaseAsk, samples: int) -> tuple[tuple[int, ...], LastStep]:
        """Open an epoch of a loader; return the shares with which it starts, empty if there are none.

        Also returned: how its last step is divided. Ranks expect that as they were told with the latest shares.

        Args:
            message: The first request of the epoch.
            samples: Samples that are handed out in it.
        """
        if message.fixed or (samples <= 0 and message.loader not in self._feeds):
            return (), LastStep()
        feed = self._feeds.setdefault(message.loader, _Feed(message.loader, message.batch, [0] * self._world_size))
        if not self.batch:
            self._feed = feed
        for old in [each for each in self._feeds if each not in (self.loader, message.loader)][:-_FEEDS_KEPT]:
            del self._feeds[old]
        if (message.even or self.in_step) and not feed.shares:
            feed.shares, feed.announced = (feed.batch,) * self._world_size, bool(message.even)
        feed.samples = {epoch: count for epoch, count in feed.samples.items() if epoch > message.epoch - 2}
        feed.samples[message.epoch] = samples
        feed.drop_last, self.least = message.drop_last, max(self.least, message.least)
        if message.even:
            return feed.shares, LastStep(feed.drop_last)
        return feed.shares, feed.last if feed.announced else LastStep(feed.drop_last, self.least)

    def bind(self, loader: int, step: int) -> bool:
        """Note that gradients follow a loader's batches. Return whether shares are for another loader from now on.

        Args:
            loader: The loader.
            step: The step of the first of these gradients.
        """
        feed = self._feeds.get(loader)
        if feed is None and self.loader >= 0:  # Their batches have no shares: from here on times are of usual ones.
            feed = _Feed(-1, self.batch, list(self.most))
        if feed is None or feed is self._feed:
            return False
        self.cancel()
        if feed.batch != self.batch:
            self._steps, self._ordered = [], []
        else:  # A batch takes as much memory as one of the loader before.
            known = zip(feed.most, self.most, strict=True)
            feed.most = [min(one, other) or max(one, other) for one, other in known]
        self._feed = feed
        self._remember(step, feed.shares)
        return True

    def limit(self, loader: int, rank: int, most: int) -> None:
        """Note the most samples that a rank can have in a batch of a loader, whether it feeds the training yet or not.

        A batch may run out of memory before a gradient shows that its loader feeds the training.
        """
        feed = self._feeds.get(loader)
        if feed is not None:
            feed.most[rank] = most

    def restart(self) -> None:
        """Note that the steps are another optimizer's from now on: they are counted anew, with the present shares."""
        self.cancel()  # Ranks may have answered with steps of either optimizer.
        self._steps, self._ordered = [0], [self.shares]

    def propose(self, shares: Sequence[int], now_s: float, *, bounded: bool = True, even: bool = False) -> None:
        """Ask all ranks from which step on they can use other shares.

        Args:
            shares: Samples of every rank, empty for equal batches.
            now_s: Current time.
            bounded: Give the change up if a share exceeds its rank's limit; False for shares given by the user.
            even: Every rank needs a part of the last step of an epoch.
        """
        self._proposals += 1
        self._proposal = _Proposal(self._proposals, tuple(shares), now_s + _ANSWER_S, bounded, even)
        self._send(ShareProposal(self.loader, self._proposals, list(shares)))

    def ready(self, rank: int, message: ShareReady, next_step: int, now_s: float) -> Change | None:
        """Take in a rank's answer; the last one orders the change, which is then returned.

        Args:
            rank: The rank.
            message: Its answer.
            next_step: The first step of an epoch that no rank has begun.
            now_s: Current time.

        Raises:
            ChannelError: The answer is impossible.
        """
        if message.loader not in self._feeds or message.batches < 1:
            raise ChannelError(f"a share_ready message is of loader {message.loader}; {self.loader} was asked")
        proposal = self._proposal
        if message.loader != self.loader or proposal is None or message.number != proposal.number:
            return None
        self.most[rank] = message.most
        proposal.answers[rank] = message
        if len(proposal.answers) < self._world_size:
            return None
        self._proposal = None
        self.least = max(self.least, *(each.least for each in proposal.answers.values()))
        refused = proposal.bounded and (self._too_much(proposal.shares) or self._too_few(proposal.shares))
        found = None if refused else self._place(proposal, next_step)
        if found is None or not self.deal(self.loader, found[1], now_s):
            self._give_up(proposal)
            return None
        order, change = found
        self.shares, self.last, self._feed.announced = proposal.shares, change.last, True
        self._remember(change.step, self.shares)
        self._send(order)
        return change

    def tick(self, now_s: float) -> None:
        """Give up a proposal that not all ranks have answered."""
        if self._proposal is not None and now_s > self._proposal.deadline_s:
            self.cancel()

    def cancel(self) -> None:
        """Give up a change that has been proposed and not yet ordered."""
        if self._proposal is not None:
            proposal, self._proposal = self._proposal, None
            self._give_up(proposal)

    def samples(self, rank: int, step: int) -> int:
        """Return a rank's samples in a step that is not the last of an epoch."""
        at = bisect.bisect_right(self._steps, step) - 1
        shares = self._ordered[at] if at >= 0 else ()
        return shares[rank] if shares else self.batch

    def all_samples(self, steps: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the samples for many steps at once, shape (n_ranks, n_steps)."""
        found = np.full(steps.shape, self.batch, dtype=np.int64)
        for step, shares in zip(self._steps, self._ordered, strict=True):
            own = np.array(shares or (self.batch,) * len(steps), dtype=np.int64)[:, None]
            found = np.where(steps >= step, own, found)
        return found

    # ---- inside ---------------------------------------------------------------------------------------------

    def _remember(self, step: int, shares: tuple[int, ...]) -> None:
        before = bisect.bisect_left(self._steps, step)  # What was ordered from a later step on holds no longer.
        self._steps, self._ordered = self._steps[:before], self._ordered[:before]
        self._steps, self._ordered = [*self._steps, step][-_KEPT:], [*self._ordered, shares][-_KEPT:]

    def _too_much(self, shares: Sequence[int]) -> bool:
        """Whether a share exceeds its rank's limit; batches of the usual size are split if they do not fit."""
        return any(0 < most < share > self.batch for share, most in zip(shares, self.most, strict=False))

    def _too_few(self, shares: Sequence[int]) -> bool:
        """Whether a share is below what the ranks should have, and not for its rank's limit."""
        least = min(self.least, self.batch)
        limits = [min(least, most or least) for most in self.most]
        return any(share < limit for share, limit in zip(shares, limits, strict=False))

    def _last_step(self, *, even: bool) -> LastStep:
        """Return how the last step of an epoch is divided.

        Args:
            even: Every rank needs a part.
        """
        return LastStep(self._feed.drop_last, 1 if even else self.least)

    def _give_up(self, proposal: _Proposal) -> None:
        self._send(ShareOrder(self.loader, proposal.number, False, [], 0, 0, 0))

    def _place(self, proposal: _Proposal, next_step: int) -> tuple[ShareOrder, Change] | None:
        """Return the order and its change; None while the first step is undetermined: some ranks are between epochs."""
        answers = [proposal.answers[rank] for rank in range(self._world_size)]
        epoch = max(each.epoch for each in answers)
        there = [each for each in answers if each.epoch == epoch]
        started = [each for each in there if each.step != EPOCH_START]
        if started and (len(started) < self._world_size or len({each.batches for each in started}) > 1):
            return None
        counts = self._feed.samples
        samples = counts.get(epoch, max(counts.values(), default=0))  # Without those consumed earlier.
        step, remaining, taken = EPOCH_START, samples, [0] * self._world_size
        if started:
            step = max(each.step for each in started)
            taken = [each.taken + _planned(each.ahead, (step - each.step) * each.batches) for each in answers]
            remaining = samples - sum(taken)
            if remaining < sum(proposal.shares or self.shares or (self.batch * self._world_size,)):
                return None  # Less than a step is left: the next epoch is soon enough.
        last = self._last_step(even=proposal.even)
        order = ShareOrder(
            self.loader, proposal.number, True, list(proposal.shares), epoch, step, remaining, last.whole, last.least
        )
        return order, Change(step if started else next_step, proposal.shares, epoch, tuple(taken), last)


def _planned(ahead: Sequence[int], batches: int) -> int:
    """Return the samples in a rank's next `batches` batches, as planned in its answer."""
    begins, sizes = ahead[::2], ahead[1::2]
    ends = [min(batches, begin) for begin in (*begins[1:], batches)]
    return sum(max(0, end - begin) * size for begin, end, size in zip(begins, ends, sizes, strict=True))


class ShareControl:
    """Decides on batch shares for the optimizer that a `shard` loader feeds, and requests them.

    Args:
        world_size: Number of ranks.
        send: Sends a message to all ranks.
        least: Fewest samples that a rank should have in a step, if the user says so; else ranks know.

    Attributes:
        state: Holds the shares in force and changes them.
        changed: Whether other shares were ever ordered, so that batches may have had other sizes.
        mixed: Whether gradients are of another loader's batches too. A gradient has one weight, which follows the
            samples of the loader that has shares, so shares that differ would weigh the other one's samples by these.
    """

    def __init__(self, world_size: int, send: Callable[[Message], None], least: int = 1) -> None:
        self.state = ShareState(world_size, send)
        self.state.least = max(1, least)
        self.changed = self.mixed = False
        self._world_size = world_size
        self._policy: SharePolicy | None = None
        self._warm: set[int] = set()  # Ranks whose first report has arrived; it is not typical of later steps.
        # Steps of each rank's latest reports: some may have come before it was known which loader feeds these steps.
        self._reported: list[deque[int]] = [deque(maxlen=_LATE_FOUND) for _ in range(world_size)]
        self._again_s = self._decide_s = 0.0

    @property
    def policy(self) -> SharePolicy | None:
        """The policy that decides; None before a loader feeds the ranks."""
        if self._policy is None and self.state.batch:
            self._policy = SharePolicy(self._world_size, self.state.batch)
            self._policy.moved(self.state.shares)
        return self._policy

    def note(self, rank: int, step: int, times: StepTimes) -> None:
        """Take in a rank's times of a step."""
        if self.policy is None:
            self._warm.add(rank)
        elif self.state.loader < 0:
            return
        elif rank in self._warm:
            # Where loading is known it replaces the waits, which are 0 where the batches are small.
            own_s = max(_LEAST_S, times.compute_s - times.input_s) if times.load_s else times.compute_s
            self.policy.note(rank, self.state.samples(rank, step), own_s, times.load_s)
            self._reported[rank].append(step)
        else:
            self._warm.add(rank)
            self.policy.note_first(rank, max(times.compute_s, times.load_s))

    def tick(self, plan: Plan, now_s: float, *, even: bool = False) -> None:
        """Propose other shares if the plan in force or the measured times call for them.

        Args:
            plan: The plan in force.
            now_s: Current time.
            even: Whether all ranks need equally many batches, because they meet within forward or backward passes.
        """
        self.state.tick(now_s)
        if self.policy is None or self.state.loader < 0 or self.state.pending or now_s < self._again_s:
            return
        wanted = self._wanted(plan, now_s, even=even)
        if wanted is not None and (wanted != self.state.shares or (even and not self.state.announced)):
            self._again_s = now_s + _AGAIN_S
            self.state.propose(wanted, now_s, bounded=plan.balanced, even=even)

    def ready(self, rank: int, message: ShareReady, next_step: int, now_s: float) -> Change | None:
        """Take in a rank's answer, see `ShareState.ready`."""
        change = self.state.ready(rank, message, next_step, now_s)
        if change is not None and self.policy is not None:
            self._again_s = 0.0
            self.policy.changed(change.shares)
            self.changed = True
        return change

    def bind(self, loader: int, step: int, *, mixed: bool = False) -> None:
        """Note that gradients follow a loader's batches, see `ShareState.bind`.

        Reports of its steps that have come already were taken for steps with the shares of the loader before.

        Args:
            loader: The loader.
            step: The step of the first of these gradients.
            mixed: See the attribute.
        """
        if mixed and not self.mixed:
            logger.info("each gradient is of batches of several loaders, so all ranks get equal batches")
            self.state.cancel()
        self.mixed = mixed
        batch = self.state.batch
        if not self.state.bind(loader, step) or self._policy is None:
            return
        self._again_s = self._decide_s = 0.0
        if self.state.batch == batch:  # The ranks' speed is known.
            self._policy.moved(self.state.shares, [sum(each >= step for each in steps) for steps in self._reported])
        else:
            self._policy = None
        for steps in self._reported:
            steps.clear()

    @property
    def sizable(self) -> int:
        """Samples of a usual batch if a rank can have more or fewer of them, else 0."""
        return 0 if self.mixed or self.state.loader < 0 else self.state.batch

    def restart(self) -> None:
        """Note that another optimizer's steps count the batches, see `ShareState.restart`: it may train otherwise."""
        self.state.restart()
        self._policy = None
        self._warm.clear()
        for steps in self._reported:
            steps.clear()
        self._again_s = self._decide_s = 0.0

    def limit(self, rank: int, message: MemoryLimit) -> None:
        """Note the limit of a rank that ran out of memory; shares above it are changed at once."""
        self.state.limit(message.loader, rank, message.most)
        self._decide_s = 0.0

    def sentence(self) -> str:
        """Describe the shares in force, `rank 2 gets 12 of 76 samples` for example; empty for plain `sync`."""
        if not self.state.shares or self.policy is None:
            return ""
        return share_sentence(self.state.shares, self.policy.ratio)

    @property
    def fixed_part(self) -> float:
        """Part of a rank's time that does not depend on its batch; NaN until a change of size has shown it."""
        return self.policy.curves.fixed if self.policy is not None and self.policy.curves.known else math.nan

    def scale(self, steps: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Return the time of a usual batch over that of the batches of these steps, for computing and for loading.

        Loading has no fixed part. Both have shape (n_ranks, n_steps).
        """
        fixed = self.policy.curves.fixed if self.policy is not None else 0.0
        ratio = self.state.all_samples(steps) / max(1, self.state.batch)
        return np.asarray(1.0 / (fixed + (1.0 - fixed) * ratio)), np.asarray(1.0 / np.maximum(ratio, 1e-9))

    def scale_of(self, rank: int, step: int) -> tuple[float, float]:
        """Return the same for one step of one rank, for every message."""
        fixed = self.policy.curves.fixed if self.policy is not None else 0.0
        ratio = self.state.samples(rank, step) / max(1, self.state.batch)
        return 1.0 / (fixed + (1.0 - fixed) * ratio), 1.0 / max(ratio, 1e-9)

    def _wanted(self, plan: Plan, now_s: float, *, even: bool) -> tuple[int, ...] | None:
        """Return the shares to propose, None to keep those in force."""
        assert self.policy is not None
        # Equal shares keep ranks at the same step to the end of an epoch; ranks that take what they can would diverge.
        if plan.plain and (self.state.shares or even):
            return (self.state.batch,) * self._world_size
        if not plan.uneven:
            return ()
        if self.mixed:
            return (self.state.batch,) * self._world_size
        if not plan.balanced:
            return plan.batch_shares
        found = None
        if now_s >= self._decide_s:
            found = self.policy.decide(self.state.shares, self.state.most, self.state.least)
            if self.policy.informed:  # Else nothing was solved, and the next report may complete what is needed.
                self._decide_s = now_s + _EVERY_S * max(1.0, self._world_size / _MANY)
        if found is None and not self.state.shares:
            return (self.state.batch,) * self._world_size
        return found
