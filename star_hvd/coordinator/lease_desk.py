"""The coordinator's end of leases: one queue per epoch of a loader, and what ranks hear of it. Pure, as the board."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from scheduler.rules.leasing import Answer, LeaseQueue, Span
from star_hvd.channel.messages.base import Message
from star_hvd.channel.messages.leases import Lease, LeaseAsk, LeaseRecall, LeaseReturn
from star_hvd.errors import ChannelError

__all__ = ["LeaseDesk"]

Key = tuple[int, int]  # Loader and epoch.


class LeaseDesk:
    """See the module's text.

    Args:
        world_size: Number of ranks.
        send: Sends a message to a rank.
    """

    def __init__(self, world_size: int, send: Callable[[int, Message], None]) -> None:
        self._world_size = world_size
        self._send = send
        self._queues: dict[Key, LeaseQueue] = {}
        self.totals: Callable[[LeaseAsk], Sequence[int] | None] = lambda _: None  # What ranks get of a new epoch.
        self._pace_s: dict[tuple[int, int], float] = {}  # Of a loader's batches on a rank.

    def ask(self, rank: int, message: LeaseAsk, pace_s: float | None, now_s: float) -> None:
        """A rank asks for more samples.

        Args:
            rank: The rank.
            message: Its message.
            pace_s: Recent seconds per batch, where its steps have told.
            now_s: The time.

        Raises:
            ChannelError: It says what it cannot.
        """
        key = (message.loader, message.epoch)
        queue = self._queues.get(key) or self._open(key, message)
        if pace_s is not None:
            self._pace_s[message.loader, rank] = pace_s
            queue.forecast(rank, pace_s)
        try:
            answer = queue.ask(rank, message.begun, now_s)
        except ValueError as error:
            raise ChannelError(str(error)) from error
        self._answer(key, rank, answer)
        self._serve(key, queue, now_s)

    def entitle(self, loader: int, epoch: int, totals: Sequence[int] | None, now_s: float) -> None:
        """What every rank gets of an epoch from now on, see `LeaseQueue.entitle`."""
        queue = self._queues.get((loader, epoch))
        if queue is not None:
            queue.entitle(totals)
            self._serve((loader, epoch), queue, now_s)

    def give_back(self, rank: int, message: LeaseReturn, now_s: float) -> None:
        """A rank gives back what it has not begun.

        Raises:
            ChannelError: It says what it cannot.
        """
        key = (message.loader, message.epoch)
        queue = self._queues.get(key)
        if queue is None:
            return  # An epoch long over.
        try:
            queue.give_back(rank, message.begun, now_s)
        except ValueError as error:
            raise ChannelError(str(error)) from error
        if message.leaves:
            queue.leave(rank)
        self._serve(key, queue, now_s)

    def leave(self, rank: int, now_s: float) -> None:
        """A rank's program has ended: what it held is for the others."""
        for key, queue in self._queues.items():
            queue.leave(rank)
            self._serve(key, queue, now_s)

    def _open(self, key: Key, message: LeaseAsk) -> LeaseQueue:
        loader, epoch = key
        for old in [k for k, each in self._queues.items() if k[0] == loader and k[1] < epoch - 1 and each.over]:
            del self._queues[old]  # A rank that leaves its loop may be epochs ahead of the others.
        queue = LeaseQueue(message.samples, message.batch, self._world_size, drop_last=message.drop_last)
        for (other, rank), pace_s in self._pace_s.items():
            if other == loader:
                queue.forecast(rank, pace_s)
        queue.entitle(self.totals(message))
        self._queues[key] = queue
        return queue

    def _serve(self, key: Key, queue: LeaseQueue, now_s: float) -> None:
        """Tell ranks that wait what there is, and ask those for it that hold what others would end sooner."""
        for rank, answer in list(queue.answers(now_s)):
            self._answer(key, rank, answer)
        for rank in list(queue.recalls(now_s)):
            self._send(rank, LeaseRecall(*key))

    def _answer(self, key: Key, rank: int, answer: Span | Answer) -> None:
        if answer is Answer.WAIT:
            return
        start, stop = answer if isinstance(answer, tuple) else (0, 0)
        self._send(rank, Lease(*key, start, stop, answer is Answer.END))
