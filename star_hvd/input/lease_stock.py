"""A rank's stock of samples: leased ahead of its work by the coordinator, formed into batches, begun one by one.

The training thread forms batches for the worker processes and requests more samples while many are left, so that it
never waits for an answer and can continue while the coordinator's process is frozen.

A batch is begun when it is handed to the training loop. Until then the agent's thread can call it back at any time,
even if the workers have loaded it: their output is then discarded, and another rank loads the batch again. Where
batches may overtake each other (`in_order=False`) all batches in progress count as begun, because the coordinator
identifies begun samples only by their number; if the loop is abandoned, they are listed one by one.

A `BatchSizer` plans the batch sizes. With batch shares, the rank holds its part of all steps, a smaller batch is formed
only if the coordinator has no more samples for it. When shares change, what lies behind the first batch with the new
ones is replaced.
"""

from __future__ import annotations

import abc
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from scheduler.rules.runs import Run, Span, append, first, samples
from star_hvd.channel.messages.base import Message, Send
from star_hvd.channel.messages.leases import (
    Consumed,
    Lease,
    LeaseAsk,
    LeaseRecall,
    LeaseReturn,
    ReportConsumed,
    flat,
    runs_of,
)
from star_hvd.errors import DeadlineError
from star_hvd.locks import ordered_condition
from star_hvd.telemetry.wait_time import WaitTime

__all__ = ["Batch", "BatchSizer", "ConstantBatches", "Consumption", "LeaseStock"]

_LOOK_S = 0.5  # Interval between checks whether the wait has become pointless.
_ASK_BELOW = 0.5  # Request more when less than this fraction of the stock after the last answer is left.
_URGENT_S = 0.25  # A request waits for other messages (0.1 s at most) if the stock lasts longer than this.
_SMOOTHING = 0.2  # Weight of the newest interval between two batches in the mean.
_STEPS_KEPT = 512  # Number of latest batches whose step is remembered.


class BatchSizer(abc.ABC):
    """Decides how many samples the batches of this rank have."""

    @property
    def balanced(self) -> bool:
        """Whether ranks have batch shares: batches keep their sizes even if a lease ends within one."""
        return False

    @abc.abstractmethod
    def size(self, batch_index: int) -> int | None:
        """Return the samples in a batch, at least 1; called when it is formed, several batches before it is used.

        Returns None if that is not decided yet. Does not wait.

        Args:
            batch_index: Index of the batch, from 0, among those that this rank delivers in the epoch. If batches are
                called back before delivery, later ones take their indices, for which this is called again.
        """

    @property
    def least(self) -> int:
        """Fewest samples that a batch should have."""
        return 1

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
    """A batch being loaded by the workers.

    Attributes:
        number: Its number among all batches formed from this stock.
        spans: Its positions.
        formed_s: When it was formed, if no other was in progress then; else 0.
    """

    number: int
    spans: tuple[Span, ...]
    formed_s: float = 0.0

    @property
    def samples(self) -> int:
        """Number of positions."""
        return sum(stop - start for start, stop in self.spans)


@dataclass(frozen=True, slots=True)
class _Begun:
    """A batch that was begun.

    Attributes:
        spans: Its positions.
        step: Steps that the parameters had had by then, -1 if unknown.
        own: Steps that this rank had made by then, if it makes this one alone; else -1.
    """

    spans: tuple[Span, ...]
    step: int
    own: int


class Consumption:
    """The positions a rank has begun, and for recent ones the training step they were for.

    Where all ranks make a step together, a batch begun behind s steps is contained in parameters of s + 1. Where this
    rank makes it alone, with servers or a parent or by itself, it is contained in those that the rank has afterwards:
    their number shows with the next batch, or is that of the rank's parameters at present. Averagings that end without
    the training thread do not contain the step it computes.
    """

    def __init__(self) -> None:
        self._before: list[Run] = []
        self._recent: deque[_Begun] = deque(maxlen=_STEPS_KEPT)

    def note(self, spans: tuple[Span, ...], step: int, own: int = -1) -> None:
        """Note that a batch is begun, see `_Begun`."""
        if len(self._recent) == _STEPS_KEPT:
            for span in self._recent[0].spans:
                append(self._before, span)
        self._recent.append(_Begun(spans, step, own))

    def forget(self, spans: tuple[Span, ...]) -> None:
        """Note that the last batch was not begun after all."""
        if self._recent and self._recent[-1].spans == spans:
            self._recent.pop()

    def by(
        self, step: int, now: int = -1, lacking: Callable[[int], float] = lambda own: -1, *, ahead: bool = False
    ) -> list[Run]:
        """Return the samples of all batches that parameters of a step contain.

        Args:
            step: The step; -1 for all batches that were begun.
            now: Steps that this rank's parameters have had.
            lacking: Returns the last step whose parameters lack a step that this rank made alone, by its number
                (`_Begun.own`); infinity if it has not made it yet, -1 if unknown.
            ahead: Whether the loop takes each batch before the step of the one before it.
        """
        later, contained, contains = float(now), math.inf, deque[bool]()
        recent = self._used(ahead=ahead and step >= 0)
        for each in reversed(recent):
            contained, later = (later if each.step < later else contained), float(each.step)
            lacked = lacking(each.own) if each.own >= 0 else each.step
            contains.appendleft(step < 0 or (lacked < step and (each.own < 0 or contained <= step)))
        found = list(self._before)
        for each, contain in zip(recent, contains, strict=True):
            for span in each.spans if contain else ():
                append(found, span)
        return found

    def made(self, own: int, *, ahead: bool = False) -> list[Span]:
        """Return the samples of recent steps that this rank has made alone; it has made `own` steps by now."""
        return [span for each in self._used(ahead=ahead) if 0 <= each.own < own for span in each.spans]

    def _used(self, *, ahead: bool) -> list[_Begun]:
        """Return recent batches that have been used; if fetched ahead, each when the next one is taken."""
        recent = list(self._recent)
        return [_Begun(each.spans, then.step, then.own) for each, then in pairwise(recent)] if ahead else recent


class LeaseStock:
    """Samples leased to this rank for one epoch of one loader; see the module docstring.

    Args:
        rank: This rank, for messages.
        loader: Number of the loader.
        epoch: The epoch.
        samples: Samples in the whole epoch.
        batch: Samples in a batch.
        drop_last: Whether a short last batch of the epoch is dropped.
        send: Sends a control message; does not wait.
        ahead: Batches to keep in stock besides the one in use: what the workers load ahead, and one more.
        in_order: Whether the workers deliver batches in the order in which they were formed.
        load_s: Seconds to load a batch when no other is in progress, from earlier epochs.
        sizer: Decides how many samples each batch has; `batch` if left out.
        fixed: Whether the sizes cannot follow batch shares.
        even: Whether all ranks need equally many batches, see `LeaseAsk.even`.
        step: Returns the steps that the parameters have had.
        lacking: See `Consumption.by`.
        meets: Returns whether the calling thread would meet the other ranks at the end of the epoch.
        fetched_ahead: Returns whether the loop over a loader takes each batch before the step of the one before it.
        clock: The time in seconds; only differences count.

    Attributes:
        returned: Samples that it returned when it was closed.
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
        send: Send,
        ahead: int = 0,
        in_order: bool = True,
        load_s: float = 0.0,
        sizer: BatchSizer | None = None,
        fixed: bool = False,
        even: bool = False,
        step: Callable[[], int] = lambda: -1,
        lacking: Callable[[int], float] = lambda own: -1,
        meets: Callable[[], bool] = lambda: True,
        fetched_ahead: Callable[[int], bool] = lambda loader: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rank, self._clock, self._step, self._meets = rank, clock, step, meets
        self._lacking, self._fetched_ahead = lacking, fetched_ahead
        self._sizer, self.fixed = sizer or ConstantBatches(batch), fixed
        self.even = even
        self.loader, self.epoch, self.samples, self.batch = loader, epoch, samples, batch
        self.load_s = load_s
        self.closed, self.returned = False, 0
        self._drop_last, self._ahead, self._in_order = drop_last, ahead, in_order
        self._digest, self._done = 0, list[int]()
        self._send = send
        # Guards the fields below; messages are queued for sending under it.
        self._changed = ordered_condition("LeaseStock._changed")
        self._runs: deque[Run] = deque()  # Not formed into batches yet.
        self._formed: dict[int, Batch] = {}  # In progress, in the order in which they were formed.
        self._numbers = self._delivered = 0  # Number of batches formed, and of batches begun.
        self._begun = 0
        self._consumption = Consumption()
        self._level = 0  # Samples in stock after the last answer.
        self._was_empty = False  # Whether that answer gave none.
        self._begun_s = math.nan  # When the last batch was begun.
        self._interval_s = 0.0  # Smoothed time between two batches; 0 before the second.
        self._reported = (-1, -1)  # Samples begun, and batches delivered, at the last request.
        self._largest = batch  # Most samples in a batch so far.
        self._asked = self._over = self._exhausted = False
        self._even = False  # Whether the epoch is dealt so that all ranks get equally many batches.
        self._idle = False  # Whether the training thread has no work, until a batch is begun.
        self._asked_for = self._nothing_more_for = -1  # Indices of batches, -1 for none.
        self._refused = ""

    def open(self) -> None:
        """Request the first samples; the answer may come at once, so its receiver must know this stock already."""
        with self._changed:
            self._ask()

    # ---- training thread ------------------------------------------------------------------------------------

    def begin(self, digest: int, done: list[int]) -> None:
        """Begin the epoch: send this rank's order of the samples (`digest`) and what was consumed before (`done`)."""
        with self._changed:
            self._digest, self._done = digest, done
            self._idle = True
            self._send_ask(again=self._asked)
            self._asked = True

    def leave_unbegun(self, digest: int, done: list[int]) -> None:
        """Leave the epoch; the coordinator must know of it first if other ranks begin it later. Arguments: `begin`."""
        with self._changed:
            self._digest, self._done = digest, done
            self._send_ask(again=self._asked)
        self.close()

    def ready(self, limit_s: float) -> bool:
        """Wait until there is a batch or the epoch is over for this rank. Return whether that happened in time."""
        with self._changed:
            self._note_idle()
            return self._changed.wait_for(self._is_ready, limit_s)

    def _note_idle(self) -> None:
        """Note that the training thread has no work; a request that waits for other ranks is then repeated."""
        if not self._idle:
            self._idle = True
            if self._asked and not (self._runs or self._formed or self._over):
                self._send_ask(again=True)

    def _is_ready(self) -> bool:
        """Whether a batch can be formed or no more will come; requests what the next batch lacks."""
        if not self._runs and (self._over or not self._sizer.balanced):
            return self._over
        size = self._sizer.size(self._next_index)
        return size is not None and self._suffices(size)

    def _suffices(self, size: int) -> bool:
        """Whether the stock suffices for the next batch; if not, requests more."""
        index = self._next_index
        exact = self._sizer.balanced
        if self._over or not (exact or size != self.batch):
            return bool(self._runs)
        if self._left() >= size or self._nothing_more_for == index:
            return bool(self._runs)
        if not self._asked:
            self._ask(index)
        return False

    def _send_return(self, kept: int) -> None:
        undelivered = 0 if self._in_order else self._on_their_way()
        self._send(LeaseReturn(self.loader, self.epoch, self._begun, False, kept=kept, undelivered=undelivered))

    @property
    def _next_index(self) -> int:
        return self._delivered + len(self._formed)

    @property
    def delivered(self) -> int:
        """Number of the epoch's batches that were begun."""
        with self._changed:
            return self._delivered

    @property
    def had_share(self) -> bool:
        """Whether the next batch, if there is one, consists of samples that other ranks leave over."""
        with self._changed:
            return self._sizer.beyond(self._next_index)

    def wake(self) -> None:
        """Wake a waiting thread, since batch sizes may have changed."""
        with self._changed:
            self._nothing_more_for = -1
            self._changed.notify_all()

    @property
    def dealt_evenly(self) -> bool:
        """Whether the epoch is dealt so that all ranks get equally many batches, if each gets a sample of the last."""
        with self._changed:
            return self._even

    @property
    def in_stock(self) -> int:
        """Samples that are not formed into batches yet."""
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
        """Form and begin the next batch. Return its positions, None when the epoch is over for this rank.

        Raises:
            DeadlineError: The coordinator did not answer.
        """
        while self.wait(deadline_s, check, silent_s, longest_s=longest_s):
            with self._changed:
                if self._runs:  # Not called back meanwhile.
                    self._idle = False
                    span = self._pop(self.batch)
                    self._begun += span[1] - span[0]
                    self._delivered += 1
                    self._consumption.note((span,), -1)
                    self._note_interval()
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
        """Wait for samples. Return False when the epoch is over for this rank.

        Args:
            deadline_s: Longest wait for a silent coordinator.
            check: Raises an error that makes the wait pointless.
            silent_s: Returns the seconds since the coordinator was last heard.
            longest_s: Longest wait while it is heard: then another rank has stopped with the remaining samples.

        Raises:
            DeadlineError: The coordinator did not answer.
            ValueError: This rank's samples differ from those of the others.
        """
        wait = WaitTime(_LOOK_S, "samples that other ranks hold", lasts=True)
        while True:
            with self._changed:
                self._note_idle()
                if self._changed.wait_for(self._is_ready, _LOOK_S):
                    if self._refused:
                        raise ValueError(self._refused)
                    self._exhausted = not self._runs
                    return not self._exhausted
                undecided = bool(self._sizer.balanced or self._runs) and self._sizer.size(self._next_index) is None
            check()
            waited_s = wait.count(silent_s())
            if undecided and waited_s > deadline_s:
                raise DeadlineError(
                    f"rank {self._rank} waited {waited_s:.1f} s for the coordinator on rank 0 to say from which step "
                    "on the batch shares change; see its log for a rank that has not answered"
                )
            heard = longest_s is not None and wait.silent_s < 0.5 * deadline_s
            if waited_s > (longest_s if heard and longest_s is not None else deadline_s):
                raise DeadlineError(
                    f"rank {self._rank} waited {waited_s:.0f} s for samples after it had used up all that was leased "
                    f"to it; the coordinator on rank 0 was last heard {wait.silent_s:.1f} s ago; see its log for a "
                    "rank that is missing"
                )

    def form(self) -> Batch | None:
        """Form the next batch for the workers. None if samples are missing, or its size is undecided, for now.

        Does not wait.
        """
        with self._changed:
            if not self._runs:
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
            while self._runs and wanted:
                spans.append(self._pop(wanted))
                wanted -= spans[-1][1] - spans[-1][0]
            formed_s = 0.0 if self._formed else self._clock()
            batch = Batch(self._numbers, tuple(spans), formed_s)
            self._largest = max(self._largest, batch.samples)
            self._numbers += 1
            self._formed[batch.number] = batch
            if not self._in_order:
                self._begun += batch.samples
            self._ask_ahead()
            return batch

    def take(self, number: int, step: int = -1, own: int = -1) -> Batch | None:
        """Begin a batch that came out of the workers. Return None if it was called back meanwhile.

        Args:
            number: Number of the batch.
            step: Steps that the parameters have had; the batch is for the next one. -1 without an optimizer.
            own: Steps that this rank has made, if it makes this one alone; else -1.
        """
        with self._changed:
            batch = self._formed.pop(number, None)
            if batch is None:
                return None
            if batch.formed_s:
                load_s = self._clock() - batch.formed_s
                self.load_s = min(self.load_s, load_s) if self.load_s else load_s
            if self._in_order:
                self._begun += batch.samples
            self._delivered += 1
            self._idle = False
            self._consumption.note(batch.spans, step, own)
            self._note_interval()
            self._ask_ahead()
            return batch

    def made(self, own: int) -> list[Span]:
        """Return the samples of recent steps that this rank has made alone; it has made `own` steps by now."""
        with self._changed:
            return self._consumption.made(own, ahead=self._fetched_ahead(self.loader))

    def end(self) -> None:
        """Note that this rank takes no more samples, and waits for the end of the epoch."""
        with self._changed:
            self._exhausted = True

    def close(self, *, meets: bool | None = None) -> None:
        """Report that the loop has ended, and return what was not begun.

        Args:
            meets: Whether the calling thread meets the other ranks at the end of the epoch; found out if left out.
        """
        with self._changed:
            if not self.closed:
                self.closed, self.returned = True, self._left() + self._on_their_way()
                undone = [] if self._in_order else [b for each in self._formed.values() for s in each.spans for b in s]
                self._runs.clear()
                self._formed.clear()
                early = not self._exhausted
                meets = early or (self._meets() if meets is None else meets)
                self._send(LeaseReturn(self.loader, self.epoch, self._begun, True, early, 0, undone, meets=meets))

    def _pop(self, wanted: int) -> Span:
        """Remove and return the first samples, `wanted` at most; fewer if they are not adjacent."""
        run = self._runs.popleft()
        count = min(run.size, wanted)
        if run.pieces > 1:
            self._runs.appendleft(run._replace(start=run.start + run.stride, pieces=run.pieces - 1))
        if count < run.size:
            self._runs.appendleft(Run(run.start + count, run.size - count, run.size - count, 1))
        return run.start, run.start + count

    def _left(self) -> int:
        return samples(self._runs)

    def _note_interval(self) -> None:
        """Note that a batch is begun now."""
        now_s = self._clock()
        if not math.isnan(self._begun_s):
            interval_s = now_s - self._begun_s
            self._interval_s += (_SMOOTHING if self._interval_s else 1.0) * (interval_s - self._interval_s)
        self._begun_s = now_s

    def _ask_ahead(self) -> None:
        """Request more while many are left and something was begun since (else the answer would be the same)."""
        if self._asked or self._over or (self._begun, self._delivered) == self._reported:
            return
        # An answer arrives long before the workers have loaded what is formed. After an empty answer the next would be
        # empty too, unless another rank returns samples.
        left = self._left()
        short = left <= self._largest and not self._was_empty
        if not short and left > _ASK_BELOW * self._level:
            return  # In most calls, of which there are two for each batch.
        held = self._held()
        if short or held <= _ASK_BELOW * self._level:
            self._ask(urgent=held * self._interval_s < _URGENT_S * self.batch)

    def _ask(self, index: int = -1, *, urgent: bool = True) -> None:
        """Request more samples, for the batch of this index if that lacks some."""
        self._asked, self._asked_for, self._nothing_more_for = True, index, -1
        self._send_ask(urgent=urgent)

    def _send_ask(self, *, again: bool = False, urgent: bool = True) -> None:
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
                self.fixed,
                self._idle and not self._formed,
                again,
                self.even,
                self._sizer.least,
            ),
            urgent=urgent,
        )
        self._done = []

    # ---- agent's thread -------------------------------------------------------------------------------------

    def on_message(self, message: Message) -> None:
        """Handle an answer, a recall, or a question about consumed samples."""
        with self._changed:
            if isinstance(message, ReportConsumed):
                ahead = self._fetched_ahead(self.loader)
                runs = self._consumption.by(message.step, self._step(), self._lacking, ahead=ahead)
                self._send(Consumed(self.loader, self.epoch, message.step, flat(runs)))
                return
            if self.closed:
                return  # Everything was returned.
            if isinstance(message, Lease):
                self._take_lease(message, runs_of(message.runs))
            elif isinstance(message, LeaseRecall):
                kept = self._give_back(message.keep)
                self._send_return(kept)
            if not self._runs and not self._formed and not self._over and not self._asked:
                self._ask()  # The answer was sent when there still was something here.
            self._changed.notify_all()

    def _take_lease(self, message: Lease, runs: list[Run]) -> None:
        dealt, self._even = message.behind >= 0, message.even
        if dealt:
            self._nothing_more_for = -1
            keep = message.behind - self._begun - (self._on_their_way() if self._in_order else 0)
            if keep < 0:
                self._over, runs = True, []
                self._refused = (
                    f"rank {self._rank} formed batches of {-keep} samples that were dealt to other ranks; this is an "
                    "error of star_hvd, please report it"
                )
            self._runs = deque(first(self._runs, keep))
        else:
            self._asked = False
            self._over, self._refused = message.over, message.refused or self._refused
            self._nothing_more_for = -1 if runs else self._asked_for
        self._runs.extend(runs)
        self._level, self._was_empty = self._held(), not runs
        if dealt and self._left() <= self._largest and not (self._asked or self._over):
            self._ask()  # Samples are handed out on request again.

    def _held(self) -> int:
        return self._left() + (self._on_their_way() if self._in_order else 0)

    def _on_their_way(self) -> int:
        return sum(batch.samples for batch in self._formed.values())

    def _give_back(self, keep: int) -> int:
        """Forget samples that were not begun except the first `keep`, formed batches as a whole. Return how many stay.

        While this rank is idle its first batch stays, else ranks would take it from each other forever. That does not
        apply with batch shares, which no rank takes from another.
        """
        kept, head = 0, next(iter(self._formed.values()), None)
        if self._idle and not self._sizer.balanced and (head is None or self._in_order):
            keep = max(keep, self.batch if head is None else head.samples)
        if self._in_order:
            for number, batch in list(self._formed.items()):
                if kept + batch.samples > keep:
                    keep = kept  # This one and all after it go.
                    del self._formed[number]
                else:
                    kept += batch.samples
        runs = first(self._runs, keep - kept)
        kept += samples(runs)
        self._runs = deque(runs)
        return kept
