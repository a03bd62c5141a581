"""A rank's stock of samples: leased ahead of its work by the coordinator, formed into batches, begun one by one.

The training thread forms batches for the worker processes and asks for more samples while there is still plenty, so
that it waits for no answer, and continues with them while the coordinator's process is frozen.

A batch is begun when it is handed to the training loop. Until then it can be called back at any time, in the agent's
thread, even if the workers have loaded it: what comes out of them is then thrown away, and another rank loads it
again. Where batches may overtake each other (`in_order=False`) those on their way count as begun, because the
coordinator knows what was begun by the number of samples alone; if the loop is left, they are named one by one.

Batches have the sizes that a `BatchSizer` plans. Where these are batch shares, a batch of less is formed only if the
coordinator has nothing more for it, and a rank that has had its share of the epoch returns what is left in its stock.
"""

from __future__ import annotations

import abc
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from scheduler.rules.leasing import Span, joined, without
from star_hvd.channel.messages.base import Message
from star_hvd.channel.messages.leases import Consumed, Lease, LeaseAsk, LeaseRecall, LeaseReturn, ReportConsumed
from star_hvd.errors import DeadlineError
from star_hvd.locks import ordered_condition

__all__ = ["Batch", "BatchSizer", "ConstantBatches", "Consumption", "LeaseStock"]

_LOOK_S = 0.5  # Between two looks whether the wait has become pointless.
_ASK_BELOW = 0.75  # Of what there was behind the last answer.
_STEPS_KEPT = 512  # Batches of which the step they were for is known.


class BatchSizer(abc.ABC):
    """Says how many samples the batches of this rank have."""

    @property
    def balanced(self) -> bool:
        """Whether ranks take their shares of the samples: batches have their sizes even where a lease ends in one."""
        return False

    @abc.abstractmethod
    def size(self, batch_index: int) -> int | None:
        """Samples in a batch, at least 1; asked for when it is to be formed, several batches before it is worked on.

        None where it cannot be said yet. Does not wait.

        Args:
            batch_index: Number of the batch in the sequence that this rank delivers in the epoch, from 0. If batches
                are called back before they were delivered, later ones get their numbers, and are asked for again.
        """

    def beyond(self, batch_index: int) -> bool:
        """Whether this rank has had its share of the epoch before this batch."""
        return False


@dataclass(frozen=True, slots=True)
class ConstantBatches(BatchSizer):
    """All batches have the same size."""

    samples: int

    def size(self, batch_index: int) -> int:
        """See `BatchSizer`."""
        return self.samples


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch on its way through the workers.

    Attributes:
        number: Of all batches formed of this stock.
        spans: Its positions.
        formed_s: When it was formed, where none was on its way before; else 0.
    """

    number: int
    spans: tuple[Span, ...]
    formed_s: float = 0.0

    @property
    def samples(self) -> int:
        """How many positions it has."""
        return sum(stop - start for start, stop in self.spans)


class Consumption:
    """Which positions a rank has begun, and for which training steps the recent ones."""

    def __init__(self) -> None:
        self._before: list[Span] = []
        self._recent: deque[tuple[int, tuple[Span, ...]]] = deque(maxlen=_STEPS_KEPT)  # Step and spans of batches.

    def note(self, spans: tuple[Span, ...], step: int) -> None:
        """A batch is begun, for the step behind so many; -1 where that is not known."""
        if len(self._recent) == _STEPS_KEPT:
            self._before = joined([*self._before, *self._recent[0][1]])
        self._recent.append((step, spans))

    def forget(self, spans: tuple[Span, ...]) -> None:
        """The last batch was not begun after all."""
        if self._recent and self._recent[-1][1] == spans:
            self._recent.pop()

    def by(self, step: int) -> list[Span]:
        """The samples of all batches that were for steps up to this one."""
        late = [span for for_step, spans in self._recent if 0 <= step <= for_step for span in spans]
        return without([*self._before, *(span for _, spans in self._recent for span in spans)], late)


class LeaseStock:
    """See the module's text.

    Args:
        rank: This rank, for messages.
        loader: Number of the loader.
        epoch: The epoch.
        samples: Of the whole epoch.
        batch: Samples in a batch.
        drop_last: Whether a short last batch of the epoch is left out.
        send: Sends a control message; does not wait.
        ahead: Batches that are to be in stock beyond the one in work: what the workers load ahead, and one more.
        in_order: Whether batches come out of the workers in the order in which they were formed.
        load_s: Seconds until a batch is loaded where none is on its way, from earlier epochs.
        sizer: Says how many samples each batch has; `batch` where left out.
        fixed: Whether the sizes cannot follow batch shares.
        even: Whether every rank needs as many batches as the others, see `LeaseAsk.even`.
    """

    def __init__(
        self,
        rank: int,
        loader: int,
        epoch: int,
        *,
        samples: int,
        batch: int,
        drop_last: bool,
        send: Callable[[Message], None],
        ahead: int = 0,
        in_order: bool = True,
        load_s: float = 0.0,
        sizer: BatchSizer | None = None,
        fixed: bool = False,
        even: bool = False,
    ) -> None:
        self._rank = rank
        self._sizer, self._fixed = sizer or ConstantBatches(batch), fixed
        self.even = even
        self.loader, self.epoch, self.samples, self.batch = loader, epoch, samples, batch
        self.load_s = load_s
        self.closed = False
        self._drop_last, self._ahead, self._in_order = drop_last, ahead, in_order
        self._digest, self._done = 0, list[int]()
        self._send = send
        # Guards what follows; messages are queued for sending under it.
        self._changed = ordered_condition("LeaseStock._changed")
        self._spans: deque[Span] = deque()
        self._formed: dict[int, Batch] = {}  # On their way, in the order in which they were formed.
        self._numbers = self._delivered = 0  # Batches formed, and begun.
        self._begun = 0
        self._consumption = Consumption()
        self._level = 0  # Samples in stock behind the last answer.
        self._reported = (-1, -1)  # Samples begun, and batches delivered, at the last request.
        self._largest = batch  # Samples in a batch.
        self._asked = self._over = self._exhausted = False
        self._idle = False  # The training thread has nothing to work on, until a batch is begun.
        # Indices of batches, -1 for none: more was asked for it, no more comes for it, the rest was returned at it.
        self._asked_for = self._nothing_more_for = self._returned_for = -1
        self._refused = ""

    def open(self) -> None:
        """Ask for the first samples; the answer may come at once, so its receiver must know this stock before."""
        with self._changed:
            self._ask()

    # ---- training thread ------------------------------------------------------------------------------------

    def begin(self, digest: int, done: list[int]) -> None:
        """The epoch begins: say in which order this rank has the samples, and what was consumed before."""
        with self._changed:
            self._digest, self._done = digest, done
            self._idle = True
            self._send_ask(again=self._asked)
            self._asked = True

    def ready(self, limit_s: float) -> bool:
        """Wait until there is a batch or the epoch is over for this rank; whether it came to that in time."""
        with self._changed:
            self._note_idle()
            return self._changed.wait_for(self._is_ready, limit_s)

    def _note_idle(self) -> None:
        """The training thread has nothing to work on; a request that waits for other ranks is then made again."""
        if not self._idle:
            self._idle = True
            if self._asked and not (self._spans or self._formed or self._over):
                self._send_ask(again=True)

    def _is_ready(self) -> bool:
        """Whether a batch can be formed, or no more come; asks for what the next one lacks."""
        if not self._spans and (self._over or not self._sizer.balanced):
            return self._over
        size = self._sizer.size(self._next_index)
        return size is not None and self._suffices(size)

    def _suffices(self, size: int) -> bool:
        """Whether the next batch can be formed of what is in stock; returns or asks for samples where it cannot."""
        index = self._next_index
        exact = self._sizer.balanced
        if self._over or not (exact or size != self.batch):
            return bool(self._spans)
        if exact and self._returned_for != index and self._sizer.beyond(index):
            if self._asked:
                return False  # What is on its way cannot be returned.
            self._returned_for = index
            self._return_rest()
        if self._left() >= size or self._nothing_more_for == index:
            return bool(self._spans)
        if not self._asked:
            self._ask(index)
        return False

    def _return_rest(self) -> None:
        """This rank has had its share: return what no batch was formed of. What is left over may come back."""
        if self._spans:
            self._spans.clear()
            self._send_return(self._on_their_way() if self._in_order else 0, unasked=True)

    def _send_return(self, kept: int, *, unasked: bool = False) -> None:
        undelivered = 0 if self._in_order else self._on_their_way()
        self._send(
            LeaseReturn(
                self.loader, self.epoch, self._begun, False, kept=kept, unasked=unasked, undelivered=undelivered
            )
        )

    @property
    def _next_index(self) -> int:
        return self._delivered + len(self._formed)

    @property
    def delivered(self) -> int:
        """Batches of the epoch that were begun."""
        with self._changed:
            return self._delivered

    @property
    def had_share(self) -> bool:
        """Whether the next batch, if there is one, is of what other ranks leave over."""
        with self._changed:
            return self._sizer.beyond(self._next_index)

    def wake(self) -> None:
        """The sizes of batches may have changed."""
        with self._changed:
            self._nothing_more_for = -1
            self._changed.notify_all()

    @property
    def in_stock(self) -> int:
        """Samples that no batch has been formed of."""
        with self._changed:
            return self._left()

    def next(
        self,
        deadline_s: float,
        check: Callable[[], None],
        silent_s: Callable[[], float],
        *,
        longest_s: float | None = None,
    ) -> Span | None:
        """Form and begin the next batch: its positions, None when the epoch is over for this rank.

        Raises:
            DeadlineError: The coordinator did not answer.
        """
        while self.wait(deadline_s, check, silent_s, longest_s=longest_s):
            with self._changed:
                if self._spans:  # Not called back meanwhile.
                    self._idle = False
                    span = self._pop(self.batch)
                    self._begun += span[1] - span[0]
                    self._delivered += 1
                    self._consumption.note((span,), -1)
                    self._ask_ahead()
                    return span
        return None

    def wait(
        self,
        deadline_s: float,
        check: Callable[[], None],
        silent_s: Callable[[], float],
        *,
        longest_s: float | None = None,
    ) -> bool:
        """Wait for samples; False when the epoch is over for this rank.

        Args:
            deadline_s: Longest wait for a coordinator that is silent.
            check: Raises what makes the wait pointless.
            silent_s: Seconds since the coordinator was heard.
            longest_s: Longest wait while it is heard: another rank then stands still with what is left.

        Raises:
            DeadlineError: The coordinator did not answer.
            ValueError: This rank's samples are not those of the others.
        """
        began_s = time.monotonic()
        while True:
            with self._changed:
                self._note_idle()
                if self._changed.wait_for(self._is_ready, _LOOK_S):
                    if self._refused:
                        raise ValueError(self._refused)
                    self._exhausted = not self._spans
                    return not self._exhausted
                undecided = bool(self._sizer.balanced or self._spans) and self._sizer.size(self._next_index) is None
            check()
            waited_s = time.monotonic() - began_s
            if undecided and waited_s > deadline_s:
                raise DeadlineError(
                    f"rank {self._rank} waited {waited_s:.1f} s for the coordinator on rank 0 to say from which step "
                    "on the batch shares change"
                )
            heard = longest_s is not None and silent_s() < 0.5 * deadline_s
            if waited_s > (longest_s if heard and longest_s is not None else deadline_s):
                raise DeadlineError(
                    f"rank {self._rank} waited {waited_s:.0f} s for samples after it had used up all that was leased "
                    f"to it; the coordinator on rank 0 was last heard {silent_s():.1f} s ago"
                )

    def form(self) -> Batch | None:
        """Form the next batch for the workers; None where there are not enough samples, or its size is open, for now.

        Does not wait.
        """
        with self._changed:
            if not self._spans:
                return None
            index = self._next_index
            wanted = self._sizer.size(index)
            if wanted is None:
                return None
            if wanted < 1:
                raise ValueError(f"batch {index} of rank {self._rank} is to have {wanted} samples; expected at least 1")
            if not self._suffices(wanted):
                return None
            spans: list[Span] = []
            while self._spans and wanted:
                spans.append(self._pop(wanted))
                wanted -= spans[-1][1] - spans[-1][0]
            formed_s = 0.0 if self._formed else time.monotonic()
            batch = Batch(self._numbers, tuple(spans), formed_s)
            self._largest = max(self._largest, batch.samples)
            self._numbers += 1
            self._formed[batch.number] = batch
            if not self._in_order:
                self._begun += batch.samples
            self._ask_ahead()
            return batch

    def take(self, number: int, step: int = -1) -> Batch | None:
        """A batch came out of the workers: begin it. None where it was called back meanwhile.

        Args:
            number: Of the batch.
            step: Steps that the parameters have had; the batch is for the next one. -1 without an optimizer.
        """
        with self._changed:
            batch = self._formed.pop(number, None)
            if batch is None:
                return None
            if batch.formed_s:
                load_s = time.monotonic() - batch.formed_s
                self.load_s = min(self.load_s, load_s) if self.load_s else load_s
            if self._in_order:
                self._begun += batch.samples
            self._delivered += 1
            self._idle = False
            self._consumption.note(batch.spans, step)
            self._ask_ahead()
            return batch

    def end(self) -> None:
        """This rank takes no more, and goes to the end of the epoch."""
        with self._changed:
            self._exhausted = True

    def close(self) -> None:
        """The loop was left: say so, and give back what was not begun."""
        with self._changed:
            if not self.closed:
                self.closed = True
                undone = [] if self._in_order else [b for each in self._formed.values() for s in each.spans for b in s]
                self._spans.clear()
                self._formed.clear()
                early = not self._exhausted
                self._send(LeaseReturn(self.loader, self.epoch, self._begun, True, early, 0, undone))

    def _pop(self, wanted: int) -> Span:
        start, end = self._spans.popleft()
        stop = min(end, start + wanted)
        if stop < end:
            self._spans.appendleft((stop, end))
        return start, stop

    def _left(self) -> int:
        return sum(stop - start for start, stop in self._spans)

    def _ask_ahead(self) -> None:
        """Ask for more while there is plenty, and something was begun since: else the answer would be the same."""
        if self._asked or self._over or (self._begun, self._delivered) == self._reported:
            return
        short = self._left() <= max(1, self._ahead // 2) * self._largest
        if short or self._held() < _ASK_BELOW * self._level:
            self._ask()

    def _ask(self, index: int = -1) -> None:
        """Ask for more samples, for the batch of this index if it lacks some."""
        self._asked, self._asked_for, self._nothing_more_for = True, index, -1
        self._send_ask()

    def _send_ask(self, *, again: bool = False) -> None:
        self._reported = (self._begun, self._delivered)
        self._send(
            LeaseAsk(
                self.loader,
                self.epoch,
                self.samples,
                self.batch,
                self._drop_last,
                self._begun,
                self._ahead,
                self.load_s,
                self._digest,
                self._done,
                0 if self._in_order else self._on_their_way(),
                self._fixed,
                self._idle and not self._formed,
                again,
                self.even,
            )
        )
        self._done = []

    # ---- agent's thread -------------------------------------------------------------------------------------

    def on_message(self, message: Message) -> None:
        """An answer, a recall, or the question what was consumed."""
        with self._changed:
            if isinstance(message, ReportConsumed):
                spans = [bound for span in self._consumption.by(message.step) for bound in span]
                self._send(Consumed(self.loader, self.epoch, message.step, spans))
                return
            if self.closed:
                return  # All was given back.
            if isinstance(message, Lease):
                self._asked = False
                self._over, self._refused = message.over, message.refused
                self._nothing_more_for = self._asked_for if message.stop == message.start else -1
                if message.stop > message.start:
                    self._spans.append((message.start, message.stop))
                self._level = self._held()
            elif isinstance(message, LeaseRecall):
                kept = self._give_back(message.keep)
                self._send_return(kept)
            if not self._spans and not self._formed and not self._over and not self._asked:
                self._ask()  # The answer was of a time when there still was something here.
            self._changed.notify_all()

    def _held(self) -> int:
        return self._left() + (self._on_their_way() if self._in_order else 0)

    def _on_their_way(self) -> int:
        return sum(batch.samples for batch in self._formed.values())

    def _give_back(self, keep: int) -> int:
        """Forget all but the first `keep` samples that were not begun, whole batches of those formed; what is left.

        While there is nothing in work here the first batch stays: ranks would take it from each other for ever. Unless
        every rank has its share, which none takes from another.
        """
        kept, first = 0, next(iter(self._formed.values()), None)
        self._returned_for = -1  # Batches get other numbers.
        if self._idle and not self._sizer.balanced and (first is None or self._in_order):
            keep = max(keep, self.batch if first is None else first.samples)
        if self._in_order:
            for number, batch in list(self._formed.items()):
                if kept + batch.samples > keep:
                    keep = kept  # It and all behind it go.
                    del self._formed[number]
                else:
                    kept += batch.samples
        spans, self._spans = self._spans, deque()
        for start, end in spans:
            stop = min(end, start + keep - kept)
            if stop > start:
                self._spans.append((start, stop))
                kept += stop - start
        return kept
