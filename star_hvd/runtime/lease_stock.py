"""A rank's stock of samples: leased ahead of its work by the coordinator, begun one batch after the other.

The training thread takes batches from the stock and asks for more while there is still plenty, so that it waits for no
answer, and while the coordinator's process stands still it goes on with what it has. What it has not begun can be
called back at any time, in the agent's thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from star_hvd.channel.messages.base import Message
from star_hvd.channel.messages.leases import Lease, LeaseAsk, LeaseRecall, LeaseReturn
from star_hvd.errors import DeadlineError
from star_hvd.runtime.batch_sizes import BatchSizes

__all__ = ["LeaseStock", "Spans"]

Spans = Sequence[tuple[int, int]]
"""The positions of a batch; where batch shares change they need not be neighbours."""

_LOOK_S = 0.5  # Between two looks whether the wait has become pointless.
_ASK_BELOW = 0.75  # Of what there was behind the last answer.


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
        sizes: Says how many samples each batch has; `batch` where left out.
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
        sizes: BatchSizes | None = None,
    ) -> None:
        self._rank = rank
        self._sizes = sizes
        self._next_size: int | None = None  # Of the next batch, once it was asked for.
        self.batches = 0  # That were begun.
        self.loader, self.epoch = loader, epoch
        self._samples, self._batch, self._drop_last = samples, batch, drop_last
        self._send = send
        self._changed = threading.Condition()  # Guards what follows; messages are queued for sending under it.
        self._spans: deque[tuple[int, int]] = deque()
        self._begun = 0
        self._level = 0  # Samples in stock behind the last answer.
        self._asked = self._over = self._closed = self._exhausted = False
        self._asked_for = -1  # The batch for which more was asked because the stock is too small for it.
        self._beyond = False  # The epoch should have ended before the next batch, and what is in stock is not for it.
        self._gave_back = False  # And an answer to that has not come.
        self._no_more = False  # There is nothing to add to the stock for the next batch.

    def open(self) -> None:
        """Ask for the first samples; the answer may come at once, so whoever passes it on has to know this stock."""
        if self._sizes is not None:
            samples = self._samples - self._samples % self._batch if self._drop_last else self._samples
            self._sizes.begin_epoch(self.epoch, samples, self._batch)
        with self._changed:
            self._ask()

    # ---- training thread ------------------------------------------------------------------------------------

    def ready(self, limit_s: float) -> bool:
        """Wait until there is a batch or the epoch is over for this rank; whether it came to that in time."""
        size = self._size()
        with self._changed:
            self._fill(size)
            return self._changed.wait_for(lambda: self._can_begin(size), limit_s)

    def _size(self) -> int:
        """Samples of the next batch. Asked for without a lock: it may wait for a change of the batch shares."""
        if self._next_size is None:
            self._next_size = self._batch if self._sizes is None else self._sizes.size(self.batches)
            self._beyond = self._sizes is not None and self._sizes.beyond(self.batches)
        return self._next_size

    def _can_begin(self, size: int) -> bool:
        """Whether there is a batch, or nothing will come any more."""
        if self._over or size == 0:
            return True
        return bool(self._spans) and not self._beyond and (not self._shared or self._no_more or self._left() >= size)

    def _fill(self, size: int) -> None:
        """Ask for more where the stock is too small for the next batch and no answer is on its way."""
        if not self._shared or self._asked or self._over or self._no_more:
            return  # An answer is on its way, or none can help. Nothing may be given back that is on its way.
        if self._beyond:
            self._beyond, self._gave_back = False, True
            self._spans.clear()
            self._send(LeaseReturn(self.loader, self.epoch, self._begun, False))
        if self._left() < size:
            self._asked_for = self.batches
            self._ask()

    @property
    def _shared(self) -> bool:
        """Whether a batch may be made of several spans: what is leased is no multiple of its size."""
        return self._sizes is not None and self._sizes.balanced

    def next(
        self,
        deadline_s: float,
        check: Callable[[], None],
        silent_s: Callable[[], float],
        *,
        longest_s: float | None = None,
    ) -> Spans | None:
        """Begin the next batch: its positions, None when the epoch is over for this rank.

        Args:
            deadline_s: Longest wait for a coordinator that is silent.
            check: Raises what makes the wait pointless.
            silent_s: Seconds since the coordinator was heard.
            longest_s: Longest wait while it is heard: another rank then stands still with what is left.

        Raises:
            DeadlineError: The coordinator did not answer.
        """
        size = self._size()
        began_s = time.monotonic()
        while True:
            with self._changed:
                self._fill(size)
                if self._changed.wait_for(lambda: self._can_begin(size), _LOOK_S):
                    if self._spans and size:
                        return self._begin(size)
                    self._exhausted = True
                    return None
            check()
            waited_s = time.monotonic() - began_s
            heard = longest_s is not None and silent_s() < 0.5 * deadline_s
            if waited_s > (longest_s if heard and longest_s is not None else deadline_s):
                raise DeadlineError(
                    f"rank {self._rank} waited {waited_s:.0f} s for samples after it had used up all that was leased "
                    f"to it; the coordinator on rank 0 was last heard {silent_s():.1f} s ago"
                )

    def _begin(self, size: int) -> Spans:
        taken: list[tuple[int, int]] = []
        while size and self._spans:
            start, end = self._spans.popleft()
            stop = min(end, start + size)
            if stop < end:
                self._spans.appendleft((stop, end))
            taken.append((start, stop))
            self._begun += stop - start
            size = size - (stop - start) if self._shared else 0
        self.batches, self._next_size, self._no_more = self.batches + 1, None, False
        left = self._left()
        if not self._asked and not self._over and (left <= self._batch or left < _ASK_BELOW * self._level):
            self._ask()
        return taken

    def close(self) -> None:
        """The loop was left: say so, and give back what was not begun."""
        if self._sizes is not None:
            self._sizes.end_epoch()
        with self._changed:
            if not self._closed:
                self._closed = True
                self._spans.clear()
                self._send(LeaseReturn(self.loader, self.epoch, self._begun, True, not self._exhausted))

    def _left(self) -> int:
        return sum(stop - start for start, stop in self._spans)

    def _ask(self) -> None:
        self._asked = True
        self._send(LeaseAsk(self.loader, self.epoch, self._samples, self._batch, self._drop_last, self._begun))

    # ---- agent's thread -------------------------------------------------------------------------------------

    def on_message(self, message: Message) -> None:
        """An answer, or a recall."""
        with self._changed:
            if self._closed:
                return  # All was given back.
            if isinstance(message, Lease):
                self._asked = self._gave_back = False
                self._over = message.over
                # An older answer says nothing of what there is for this batch.
                self._no_more = message.stop <= message.start and self._asked_for == self.batches
                if message.stop > message.start:
                    self._spans.append((message.start, message.stop))
                self._level = self._left()
            elif isinstance(message, LeaseRecall) and not self._gave_back:  # Else that is what it got.
                self._spans.clear()
                self._send(LeaseReturn(self.loader, self.epoch, self._begun, False))
            if not self._spans and not self._over and not self._asked:
                self._ask()  # The answer was of a time when there still was something here.
            elif self._next_size is not None:
                self._fill(self._next_size)
            self._changed.notify_all()
