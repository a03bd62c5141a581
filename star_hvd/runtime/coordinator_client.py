"""A process's requests to the coordinator: samples, the end of an epoch, a meeting of all ranks."""

from __future__ import annotations

import collections
import queue
import time
import weakref
from collections.abc import Callable

from scheduler.rules.runs import joined, spans
from scheduler.rules.step_layout import StepLayout
from star_hvd.channel.agent import Agent
from star_hvd.channel.messages import base as messages
from star_hvd.channel.messages.leases import (
    Consumed,
    ConsumedRequest,
    Lease,
    LeaseRecall,
    LoaderClosed,
    ReportConsumed,
    runs_of,
)
from star_hvd.channel.messages.microbatches import (
    MicrobatchesClosed,
    MicrobatchGrant,
    MicrobatchOpen,
    MicrobatchRecall,
    MicrobatchShares,
)
from star_hvd.channel.messages.shares import ShareOrder, ShareProposal
from star_hvd.config import Config
from star_hvd.errors import DeadlineError
from star_hvd.input.batch_sizes import BatchSizes
from star_hvd.input.lease_stock import BatchSizer, LeaseStock
from star_hvd.input.microbatches import MicrobatchStock
from star_hvd.telemetry.wait_time import WaitTime

__all__ = ["CoordinatorClient"]

_LOOK_S = 0.5  # Between two checks of whether a wait has become pointless.
_ASK_AGAIN_S = 5.0  # Messages are rarely lost; repeating a request has no effect on its result.
_CLOSED_KEPT = 8  # Loaders that are closed here: another rank may still want to know what was consumed of them.
_MEETING = 1 << 20  # Number of the work queue at which all ranks meet.
_WORK = _MEETING + 1  # Number of the queue of ranges that belong to no loader (`work`).


class CoordinatorClient:
    """Asks the coordinator and waits for its answers; nothing waits without a deadline.

    Args:
        config: Settings.
        rank: This rank.
        agent: The connection to the coordinator.
        raise_failure: Called during waits; raises what stopped this process or makes waiting for others pointless, if
            anything did.
        step: Returns the step that the training thread is at.
        most_samples: Returns the most samples in a batch of a loader that fit in memory, 0 if unknown.
        meets: Returns whether the calling thread would meet the other ranks at the end of an epoch.
        lacking: See `Consumption.by`.
        fetched_ahead: Returns whether the loop over a loader takes each batch before the step of the one before it.
        ask_again_s: Time without an answer after which a request for samples is repeated.
    """

    def __init__(
        self,
        config: Config,
        rank: int,
        agent: Agent,
        raise_failure: Callable[[], None],
        step: Callable[[], int] = lambda: 0,
        most_samples: Callable[[int], int] = lambda loader: 0,
        meets: Callable[[], bool] = lambda: True,
        lacking: Callable[[int], float] = lambda own: -1,
        fetched_ahead: Callable[[int], bool] = lambda loader: False,
        ask_again_s: float = _ASK_AGAIN_S,
    ) -> None:
        self._config = config
        self._rank = rank
        self._agent = agent
        self._raise_failure = raise_failure
        self._consumed: queue.SimpleQueue[Consumed] = queue.SimpleQueue()
        self._grants: queue.SimpleQueue[messages.Message] = queue.SimpleQueue()
        self._step, self._most_samples, self._meets = step, most_samples, meets
        self._lacking, self._fetched_ahead = lacking, fetched_ahead
        self._ask_again_s = ask_again_s
        self._sizes: dict[int, BatchSizes] = {}  # By loader.
        # By loader and epoch, of the last two epochs.
        self._stocks: dict[tuple[int, int], LeaseStock | MicrobatchStock] = {}
        # Ends of epochs that arrived during a wait for something else.
        self._ended: dict[tuple[int, int], messages.EpochEnd] = {}
        self._asked: collections.deque[messages.RequestBatch] = collections.deque()
        self._requests = 0
        self._next_loader = 0
        self._gone: queue.SimpleQueue[int] = queue.SimpleQueue()  # Loaders without references; filled from any thread.
        self._closed: collections.deque[int] = collections.deque()
        self._meetings = self._works = 0

    def loader_number(self, owner: object) -> int:
        """Return a number for a `shard` loader, equal on all ranks, which iterate first over loaders in the same order.

        Args:
            owner: The loader. What is kept for it, also at the coordinator, goes some time after it.
        """
        self._close_loaders()
        self._next_loader += 1
        # Not closed by the finalizer itself: that may run in any thread, and under any lock.
        weakref.finalize(owner, self._gone.put, self._next_loader - 1).atexit = False
        return self._next_loader - 1

    def _close_loaders(self) -> None:
        """Close loaders to which the program has no reference, and return what was requested ahead of them."""
        while not self._gone.empty():
            number = self._gone.get()
            for stock in [each for (loader, _), each in self._stocks.items() if loader == number]:
                stock.close()
            self._agent.send(LoaderClosed(number))
            self._closed.append(number)
        old = {self._closed.popleft() for _ in range(len(self._closed) - _CLOSED_KEPT)}
        if old:
            self._stocks = {key: each for key, each in self._stocks.items() if key[0] not in old}
            self._sizes = {loader: each for loader, each in self._sizes.items() if loader not in old}

    def batch_sizes(self, loader: int) -> BatchSizes:
        """Return the object that holds the sizes of a loader's batches."""
        if loader not in self._sizes:
            send = self._agent.send
            found = BatchSizes(
                self._rank,
                loader,
                send=lambda m: send(m),
                step=self._step,
                most=lambda: self._most_samples(loader),
                least=self._config.min_batch,
            )
            self._sizes = {**self._sizes, loader: found}
        return self._sizes[loader]

    def open_stock(
        self,
        loader: int,
        epoch: int,
        samples: int,
        batch: int,
        drop_last: bool,
        *,
        ahead: int = 0,
        in_order: bool = True,
        load_s: float = 0.0,
        sizer: BatchSizer | None = None,
        even: bool = False,
        ask: bool = True,
    ) -> LeaseStock:
        """Open this rank's stock of samples of an epoch; other stocks of the loader may still be in use.

        Args:
            loader: Number of the loader.
            epoch: Number of the epoch, or of the iteration over the loader.
            samples: Samples of the whole epoch.
            batch: Samples in a batch.
            drop_last: Whether a short last batch of the epoch is left out.
            ahead: Batches to hold in stock beyond the one being worked on.
            in_order: Whether batches are begun in the order in which they are formed.
            load_s: Seconds until a batch is loaded if none is being loaded yet.
            sizer: Gives the number of samples of each batch; `batch` samples if omitted.
            even: Whether all ranks need equally many batches.
            ask: Request the first samples now; otherwise `LeaseStock.begin` does.
        """
        stock = LeaseStock(
            self._rank,
            loader,
            epoch,
            samples=samples,
            batch=batch,
            drop_last=drop_last,
            send=self._agent.send,
            ahead=ahead,
            in_order=in_order,
            load_s=load_s,
            sizer=sizer,
            fixed=not isinstance(sizer, BatchSizes),
            even=even,
            step=self._step,
            lacking=self._lacking,
            meets=self._meets,
            fetched_ahead=self._fetched_ahead,
        )
        self._keep(stock)
        if ask:
            stock.open()
        return stock

    def _keep(self, stock: LeaseStock | MicrobatchStock) -> None:
        """Pass messages on to a stock. Closed stocks are still asked what was consumed of them."""
        kept = {
            key: each
            for key, each in self._stocks.items()
            if key[0] != stock.loader or key[1] >= stock.epoch - 1 or not each.closed
        }
        self._stocks = {**kept, (stock.loader, stock.epoch): stock}

    def open_microbatches(self, layout: StepLayout, opening: MicrobatchOpen) -> MicrobatchStock:
        """Open this rank's micro-batches of an epoch."""
        stock = MicrobatchStock(self._rank, layout, opening, send=lambda m: self._agent.send(m))
        self._keep(stock)
        stock.open()
        return stock

    def await_microbatch(self, stock: MicrobatchStock, steps_made: int) -> bool:
        """Reserve this rank's next micro-batch of the current step; False if the step is over for this rank.

        Raises:
            DeadlineError: The coordinator, or a rank that the step is waiting for, did not answer.
            ValueError: This rank's samples differ from those of the others.
        """
        what = "the other ranks to begin the micro-batches of a step"
        wait = WaitTime(_LOOK_S, what)
        while True:
            stock.decided(_LOOK_S)
            found = stock.reserve(steps_made)
            if found is not None:
                return found
            self.check_wait(wait, what)

    def check_wait(self, wait: WaitTime, what: str) -> None:
        """Raise if a wait for the coordinator, or for other ranks through it, has to end; call it in each iteration.

        Raises:
            DeadlineError: It has taken too long.
            RankLostError: A rank has left the job.
        """
        self._raise_failure()
        waited_s = wait.count(time.monotonic() - self._agent.last_heard_s)
        heard = wait.silent_s < 0.5 * self._config.control_deadline_s
        if waited_s > (self._config.step_deadline_s if heard else self._config.control_deadline_s):
            raise DeadlineError(
                f"rank {self._rank} waited {waited_s:.0f} s for {what}; the coordinator on rank 0 was last heard "
                f"{wait.silent_s:.1f} s ago; see its log for a rank that is missing"
            )

    def open_work(self, total: int, chunk: int, *, even: bool = False) -> LeaseStock:
        """Open the next epoch of ranges of numbers, see `star_hvd.work`; all ranks must open them in the same order.

        Args:
            total: How many numbers.
            chunk: Numbers in a range.
            even: Whether all ranks need equally many.
        """
        self._works += 1
        return self.open_stock(_WORK, self._works, total, chunk, False, even=even)

    def await_samples(self, stock: LeaseStock) -> bool:
        """Wait for samples of an epoch; False when it is over for this rank.

        Raises:
            DeadlineError: The coordinator did not answer.
            ValueError: This rank's samples differ from those of the others.
        """
        return stock.wait(
            self._config.control_deadline_s,
            self._raise_failure,
            lambda: time.monotonic() - self._agent.last_heard_s,
            longest_s=self._config.step_deadline_s,
        )

    def consumed(self, loader: int, epoch: int, step: int, own: int = 0) -> list[int]:
        """Return starts and stops of the spans of an epoch that all ranks together have consumed up to `step`.

        The agents' threads answer, so this waits for no training thread.

        Args:
            loader: Number of the loader.
            epoch: The epoch.
            step: Steps that this rank's parameters have had.
            own: Steps that this rank has made. Its parameters contain all that it made alone.

        Raises:
            DeadlineError: A rank, or the coordinator, did not answer.
        """
        self._requests += 1
        asked = ConsumedRequest(loader, epoch, step, self._requests)
        self._agent.send(asked)
        wait = WaitTime(_LOOK_S, "all ranks to say which samples they have consumed")
        while wait.count() < self._config.control_deadline_s:
            try:
                answer = self._consumed.get(timeout=_LOOK_S)
            except queue.Empty:
                self._raise_failure()
                continue
            if answer.number == asked.number:
                stock = self._stocks.get((loader, epoch))
                made = stock.made(own) if isinstance(stock, LeaseStock) else []
                return [bound for span in joined([*spans(runs_of(answer.runs)), *made]) for bound in span]
        raise DeadlineError(
            f"rank {self._rank} waited {self._config.control_deadline_s:g} s to hear which samples all ranks have "
            "consumed; a rank is frozen or lost: see the log of rank 0 for which one"
        )

    def begin_batch(self, stock: LeaseStock) -> tuple[int, int] | None:
        """Return the next range of an epoch's permutation; None when the epoch is over for this rank.

        Raises:
            DeadlineError: The coordinator did not answer.
        """
        return stock.next(
            self._config.control_deadline_s,
            self._raise_failure,
            lambda: time.monotonic() - self._agent.last_heard_s,
            longest_s=self._config.step_deadline_s,
        )

    def on_message(
        self,
        message: Lease
        | LeaseRecall
        | ShareProposal
        | ShareOrder
        | Consumed
        | ReportConsumed
        | MicrobatchShares
        | MicrobatchRecall
        | MicrobatchGrant
        | MicrobatchesClosed
        | messages.Grant
        | messages.EpochEnd,
    ) -> None:
        """Handle an answer or a question of the coordinator, in the agent's thread."""
        if isinstance(message, (ShareProposal, ShareOrder)):
            self._change_shares(message)
            return
        if isinstance(message, Consumed):
            self._consumed.put(message)
            return
        if isinstance(message, (messages.Grant, messages.EpochEnd)):
            self._grants.put(message)
            return
        stock = self._stocks.get((message.loader, message.epoch))
        if stock is not None:
            stock.on_message(message)
        elif isinstance(message, ReportConsumed):  # This rank has not begun that epoch.
            self._agent.send(Consumed(message.loader, message.epoch, message.step, []))

    def _change_shares(self, message: ShareProposal | ShareOrder) -> None:
        self.batch_sizes(message.loader).on_message(message)
        for (loader, _), stock in self._stocks.items():
            if loader == message.loader:
                stock.wake()

    def request(self, loader: int, epoch: int, samples: int, batch: int, drop_last: bool) -> None:
        """Request the next range; `granted` collects it."""
        self._requests += 1
        self._asked.append(messages.RequestBatch(loader, epoch, samples, batch, drop_last, self._requests))
        self._agent.send(self._asked[-1])

    def granted(self, loader: int, epoch: int) -> tuple[int, int] | None:
        """Wait for the answer to the oldest `request` of that epoch; None if no range is left."""
        asked = next(each for each in self._asked if (each.loader, each.epoch) == (loader, epoch))
        self._asked.remove(asked)
        grant = self._await_loader(messages.Grant, loader, epoch, self._config.control_deadline_s, "a batch", asked)
        assert isinstance(grant, messages.Grant)
        return None if grant.stop <= grant.start else (grant.start, grant.stop)

    def await_epoch_end(self, loader: int, epoch: int) -> bool:
        """Wait until all ranks have ended an epoch. Call it while inactive, so that the helper contributes meanwhile.

        Returns:
            Whether all reached its end and meet now; False if one left its loop before.
        """
        deadline_s = self._config.step_deadline_s
        end = self._await_loader(messages.EpochEnd, loader, epoch, deadline_s, "the end of the epoch on all ranks")
        assert isinstance(end, messages.EpochEnd)
        return end.together

    def _await_loader(
        self,
        kind: type[messages.Message],
        loader: int,
        epoch: int,
        deadline_s: float,
        what: str,
        asked: messages.RequestBatch | None = None,
    ) -> messages.Message:
        if kind is messages.EpochEnd and (loader, epoch) in self._ended:
            return self._ended.pop((loader, epoch))
        wait = WaitTime(_LOOK_S, what, lasts=kind is messages.EpochEnd)
        again_s = time.monotonic() + self._ask_again_s
        while True:
            waited_s = wait.count(time.monotonic() - self._agent.last_heard_s)
            try:
                message = self._grants.get(timeout=_LOOK_S)
            except queue.Empty:
                self._raise_failure()
                if waited_s > deadline_s:
                    raise DeadlineError(
                        f"rank {self._rank} waited {deadline_s:g} s for {what}; the coordinator on rank 0 "
                        f"was last heard {wait.silent_s:.1f} s ago; see its log for a "
                        "rank that is missing"
                    ) from None
                if asked is not None and time.monotonic() > again_s:
                    self._agent.send(asked)
                    again_s += self._ask_again_s
                continue
            same = getattr(message, "loader", -1) == loader and getattr(message, "epoch", -1) == epoch
            answers = asked is None or getattr(message, "number", 0) == asked.number
            if isinstance(message, kind) and same and answers:
                return message
            if isinstance(message, messages.EpochEnd):  # Of another loader, used for evaluation inside this one's loop.
                self._ended[message.loader, message.epoch] = message

    def await_all(self, what: str, deadline_s: float) -> None:
        """Wait until all ranks are here. Call it while inactive, so that the helper contributes meanwhile.

        Implemented as an epoch without samples of a separate work queue.
        """
        self._meetings += 1
        self.request(_MEETING, self._meetings, 0, 1, False)
        assert self.granted(_MEETING, self._meetings) is None
        self._await_loader(messages.EpochEnd, _MEETING, self._meetings, deadline_s, f"{what} on all ranks")
