"""Decide the size of a rank's next batch: a constant, or the rank's batch share of the step it belongs to.

All ranks change their shares at the same step. A loader forms batches ahead of the training, so a change takes effect
at a step for which no rank has formed its batch yet: when the coordinator asks, a rank answers with its first such step
and forms nothing from there on until the coordinator has announced the step for all. A rank hardly ever waits for that,
as the order comes before the next batch is needed: where batches take no longer than messages, a rank may form one
more. Only where ranks could not go on with different numbers of batches, the training thread waits for the order
(`await_shares`): a short epoch would be over before it comes.

A batch's size depends only on its index in the epoch: a batch that is called back and formed again has the same size.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from scheduler.balance.batch_shares import LastStep
from star_hvd.channel.messages.base import Message
from star_hvd.channel.messages.shares import EPOCH_START, ShareOrder, ShareProposal, ShareReady
from star_hvd.input.lease_stock import BatchSizer
from star_hvd.locks import ordered_condition

__all__ = ["NORMALIZED_LEAST", "BatchSizes"]

NORMALIZED_LEAST = 2
"""Fewest samples of a rank in a step of a network with batch normalization, if the user has not set another number."""

_LONG_S = 0.02
"""Time of a batch that exceeds that of a proposal, its answers and the order by far: then a rank may form no further
batch while an order is in transit, since each would delay the change by a step. Otherwise it may form one."""

_REFUSALS = 3
"""Orders given up before `await_shares` stops waiting: the first may have come while some rank opened the epoch, and
the others mean that less than a step of the epoch is left."""


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Shares from some batch of an epoch on, empty for constant batches; and how the last step is divided."""

    index: int
    shares: tuple[int, ...]
    remaining: int
    last: LastStep


@dataclass(frozen=True, slots=True)
class _Held:
    """A proposal that was answered: batches from `index` on wait for the order."""

    number: int
    epoch: int
    index: int
    step: int
    batches: int


class BatchSizes(BatchSizer):
    """Sizes of the batches that one loader forms on this rank. Thread-safe.

    Args:
        rank: This rank.
        loader: Number of the loader.
        send: Sends a control message; does not wait.
        step: Returns the step that the training thread is at.
        most: Returns the most samples per batch that fit in memory, 0 if unknown.
        least: Fewest samples per batch as set by the user, 0 if not.
        clock: The time in seconds; only differences count.
    """

    def __init__(
        self,
        rank: int,
        loader: int,
        *,
        send: Callable[[Message], None],
        step: Callable[[], int],
        most: Callable[[], int] = lambda: 0,
        least: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rank, self._loader = rank, loader
        self._send, self._step, self._most, self._clock = send, step, most, clock
        # Guards the fields below; messages are queued under it.
        self._changed = ordered_condition("BatchSizes._changed")
        self._refused = 0  # Orders given up in this epoch.
        self._epoch = -1
        self._batch = self._samples = 0
        self._sizes: list[_Sizes] = []  # Of the epoch, ascending.
        self._shares: tuple[int, ...] = ()  # Shares with which the next epoch starts.
        self._last = LastStep()  # And how its last step is divided, as ordered.
        self._least = least
        self._formed = 0  # Number of the epoch's batches that have a size; no later batch has been formed.
        self._at = (0, 0)  # The first batch delivered in some step: its index in the epoch, and the step.
        self._batches = 1  # Batches per step.
        self._delivered_s, self._interval_s = math.nan, 0.0  # The last delivery, and the time since the one before.
        self._held: _Held | None = None
        self._open = False

    # ---- loader ---------------------------------------------------------------------------------------------

    def begin_epoch(
        self, epoch: int, samples: int, batch: int, *, even: int = 0, drop_last: bool = False
    ) -> None:
        """Start an epoch on this rank.

        Args:
            epoch: Its number.
            samples: Samples for all ranks, without those consumed before.
            batch: Samples in a batch if all are equal.
            even: Number of ranks if all need equally many batches, else 0. They start with equal shares if none were
                ordered.
            drop_last: Whether a short last step is left out in that case.
        """
        with self._changed:
            self._shares = self._shares or (batch,) * even
            self._epoch, self._samples, self._batch = epoch, samples, batch
            self._sizes = [_Sizes(0, self._shares, samples, LastStep(drop_last) if even else self._last)]
            self._formed = self._refused = 0
            self._at, self._open = (0, self._step()), True

    @property
    def asks_for_network(self) -> bool:
        """Whether `note_network` is still to be called."""
        with self._changed:
            return not self._least

    def note_network(self, *, normalized: bool) -> None:
        """Note whether the network has batch normalization, which fails with batches of one sample."""
        with self._changed:
            self._least = self._least or (NORMALIZED_LEAST if normalized else 1)

    def end_epoch(self, epoch: int) -> None:
        """Note that this rank forms no more batches of an epoch."""
        with self._changed:
            if epoch == self._epoch:  # Else the next one has begun: an error kept the abandoned loop alive.
                self._open = False

    def size(self, batch_index: int) -> int | None:
        """See `BatchSizer`; None while an order is awaited."""
        with self._changed:
            if self._holds(batch_index):
                return None
            self._formed = batch_index + 1
            return self._most_of(batch_index)

    def delivered(self, index: int) -> None:
        """Note that the training loop gets the `index`-th batch of the epoch. Called in the training thread."""
        step, now_s = self._step(), self._clock()
        with self._changed:
            self._interval_s, self._delivered_s = now_s - self._delivered_s, now_s
            index_before, step_before = self._at
            if step < step_before:  # Of another optimizer, which has replaced the first one.
                self._at = (index, step)
            elif step > step_before and index > index_before:
                self._batches = max(1, round((index - index_before) / (step - step_before)))
                self._at = (index, step)

    def await_shares(self, longest_s: float) -> None:
        """Wait until the coordinator has ordered batch shares, or cannot for this epoch, for `longest_s` at most."""
        with self._changed:
            self._changed.wait_for(lambda: self.balanced or self._refused >= _REFUSALS, longest_s)

    def beyond(self, batch_index: int) -> bool:
        """See `BatchSizer`: after its part of the last step a rank gets only samples that others leave over."""
        with self._changed:
            sizes = self._at_index(batch_index)
            if sizes is None or not sizes.shares or self._holds(batch_index):
                return False
            return self._left(sizes, batch_index) <= 0 or self._size_of(batch_index) == 0

    @property
    def least(self) -> int:
        """See `BatchSizer`."""
        with self._changed:
            return max(1, self._least)

    @property
    def uneven(self) -> bool:
        """Whether batch sizes of this epoch, or of the next, differ between ranks."""
        with self._changed:
            return len(set(self._shares)) > 1

    @property
    def balanced(self) -> bool:
        """See `BatchSizer`: whether this epoch, or the next, has or had batch shares."""
        with self._changed:
            return bool(self._shares) or any(each.shares for each in self._sizes)

    # ---- agent's thread -------------------------------------------------------------------------------------

    def on_message(self, message: ShareProposal | ShareOrder) -> None:
        """Answer a proposal at once, or follow an order."""
        with self._changed:
            if isinstance(message, ShareProposal):
                self._answer(message)
            elif isinstance(message, ShareOrder):
                self._follow(message)
                self._changed.notify_all()

    def _answer(self, message: ShareProposal) -> None:
        if not self._open:
            self._held = _Held(message.number, self._epoch + 1, 0, EPOCH_START, self._batches)
            taken, planned = 0, [0, 0]
        else:
            # The first batch of a step after those that are formed, and the margin.
            at, step = self._at
            margin = 0 if self._interval_s > _LONG_S else 1
            steps = max(0, -(-(self._formed + margin - at) // self._batches))
            index = at + steps * self._batches
            self._held = _Held(message.number, self._epoch, index, step + steps, self._batches)
            taken = self._taken_before(index)
            later = [each.index - index for each in self._sizes if each.index > index]
            planned = [part for ahead in (0, *later) for part in (ahead, self._most_of(index + ahead))]
        held = self._held
        self._send(
            ShareReady(
                self._loader, held.number, held.epoch, held.step, held.batches, taken, planned, self._most(),
                self.least,
            )
        )

    def _follow(self, message: ShareOrder) -> None:
        held, self._held = self._held, None
        if held is None or held.number != message.number:
            self._held = held
            return
        if not message.accepted:
            self._refused += 1
            return
        self._shares, self._last = tuple(message.shares), LastStep(message.whole, message.least)
        if message.epoch > self._epoch:
            return  # The next epoch starts with them.
        if message.epoch < self._epoch:  # The request came between two epochs, one of which was skipped.
            self._sizes = [_Sizes(0, self._shares, self._samples, self._last)]
            return
        index = 0
        if message.step != EPOCH_START and held.step != EPOCH_START:
            index = held.index + (message.step - held.step) * held.batches
        self._sizes = [*(each for each in self._sizes if each.index < index)]
        self._sizes.append(_Sizes(index, self._shares, message.remaining, self._last))

    # ---- inside ---------------------------------------------------------------------------------------------

    def _holds(self, index: int) -> bool:
        held = self._held
        return held is not None and (self._epoch, index) >= (held.epoch, held.index)

    def _taken_before(self, index: int) -> int:
        """Return the most samples that this rank takes in the epoch's batches before one."""
        ends = [each.index for each in self._sizes[1:]] + [index]
        taken = 0
        for sizes, end in zip(self._sizes, ends, strict=True):
            count = max(0, min(end, index) - sizes.index)
            if not sizes.shares:
                taken += count * self._batch
                continue
            whole = min(count, sizes.remaining // sum(sizes.shares))
            taken += whole * sizes.shares[self._rank]
            taken += sum(self._most_of(sizes.index + i) for i in range(whole, count))
        return taken

    def _shares_at(self, index: int) -> tuple[int, ...]:
        sizes = self._at_index(index)
        return sizes.shares if sizes is not None else ()

    def _most_of(self, index: int) -> int:
        """Return the samples that a batch may take: behind this rank's part of the epoch, what others leave over."""
        return self._size_of(index) or self._shares_at(index)[self._rank]

    def _size_of(self, index: int) -> int:
        """Return the planned samples of a batch; 0 if this rank has no part in the epoch's last step."""
        sizes = self._at_index(index)
        if sizes is None or not sizes.shares:
            return self._batch
        left = self._left(sizes, index)
        if left <= 0 or left >= sum(sizes.shares):
            return sizes.shares[self._rank]
        return sizes.last.parts(left, sizes.shares)[self._rank]

    def _at_index(self, index: int) -> _Sizes | None:
        return next((each for each in reversed(self._sizes) if each.index <= index), None)

    @staticmethod
    def _left(sizes: _Sizes, index: int) -> int:
        """Return the epoch's samples from a batch on, for all ranks."""
        return sizes.remaining - (index - sizes.index) * sum(sizes.shares)
