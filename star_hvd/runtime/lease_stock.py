"""A rank's stock of samples: leased ahead of its work by the coordinator, begun one batch after the other.

The training thread takes batches from the stock and asks for more while there is still plenty, so that it waits for no
answer, and while the coordinator's process stands still it goes on with what it has. What it has not begun can be
called back at any time, in the agent's thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from star_hvd.channel.messages.base import Message
from star_hvd.channel.messages.leases import Lease, LeaseAsk, LeaseRecall, LeaseReturn
from star_hvd.errors import DeadlineError

__all__ = ["LeaseStock"]

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
    ) -> None:
        self._rank = rank
        self.loader, self.epoch = loader, epoch
        self._samples, self._batch, self._drop_last = samples, batch, drop_last
        self._send = send
        self._changed = threading.Condition()  # Guards what follows; messages are queued for sending under it.
        self._spans: deque[tuple[int, int]] = deque()
        self._begun = 0
        self._level = 0  # Samples in stock behind the last answer.
        self._asked = self._over = self._closed = self._exhausted = False

    def open(self) -> None:
        """Ask for the first samples; the answer may come at once, so whoever passes it on has to know this stock."""
        with self._changed:
            self._ask()

    # ---- training thread ------------------------------------------------------------------------------------

    def ready(self, limit_s: float) -> bool:
        """Wait until there is a batch or the epoch is over for this rank; whether it came to that in time."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._spans) or self._over, limit_s)

    def next(
        self,
        deadline_s: float,
        check: Callable[[], None],
        silent_s: Callable[[], float],
        *,
        longest_s: float | None = None,
    ) -> tuple[int, int] | None:
        """Begin the next batch: its positions, None when the epoch is over for this rank.

        Args:
            deadline_s: Longest wait for a coordinator that is silent.
            check: Raises what makes the wait pointless.
            silent_s: Seconds since the coordinator was heard.
            longest_s: Longest wait while it is heard: another rank then stands still with what is left.

        Raises:
            DeadlineError: The coordinator did not answer.
        """
        began_s = time.monotonic()
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: bool(self._spans) or self._over, _LOOK_S):
                    if self._spans:
                        return self._begin()
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

    def _begin(self) -> tuple[int, int]:
        start, end = self._spans.popleft()
        stop = min(end, start + self._batch)
        if stop < end:
            self._spans.appendleft((stop, end))
        self._begun += stop - start
        left = self._left()
        if not self._asked and not self._over and (left <= self._batch or left < _ASK_BELOW * self._level):
            self._ask()
        return start, stop

    def close(self) -> None:
        """The loop was left: say so, and give back what was not begun."""
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
                self._asked = False
                self._over = message.over
                if message.stop > message.start:
                    self._spans.append((message.start, message.stop))
                self._level = self._left()
            elif isinstance(message, LeaseRecall):
                self._spans.clear()
                self._send(LeaseReturn(self.loader, self.epoch, self._begun, False))
            if not self._spans and not self._over and not self._asked:
                self._ask()  # The answer was of a time when there still was something here.
            self._changed.notify_all()
