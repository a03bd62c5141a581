"""How the epochs of a `shard` loader are numbered at the coordinator, and whether what was requested ahead fits.

All ranks count the iterations over a loader alike, whatever each of them takes of an epoch. A rank that has ended one
requests the first samples of the next one at once, as what it expects that one to be; if it turns out to be another,
those samples are returned, and the epoch has the next number on all ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from scheduler.rules.runs import Span
from star_hvd.input.lease_stock import BatchSizer, LeaseStock
from star_hvd.input.microbatches import MicrobatchStock
from star_hvd.input.sample_order import EpochOrder
from star_hvd.runtime.runtime import Runtime

__all__ = ["Coming", "Interrupted", "Passes", "Terms", "digest", "end_epoch", "spans"]


class Coming:
    """The epoch of an iterator.

    All that the number of its iteration depends on is of when the iterator is made, which all ranks do alike.

    Args:
        epoch: Its number.
        order: The order of its samples.
        resumed: The state in which it was interrupted, if it was.
        expected: Positions of the epoch behind it, None if unknown.
        evaluates: Whether nothing is trained in it.

    Attributes:
        iterator: The iterator.
    """

    def __init__(
        self, epoch: int, order: EpochOrder, resumed: dict[str, Any] | None, expected: int | None, *, evaluates: bool
    ) -> None:
        self.epoch, self.order, self.resumed = epoch, order, resumed
        self.expected, self.evaluates = expected, evaluates
        self.iterator: weakref.ref[Any] | None = None

    @property
    def done(self) -> list[int]:
        """Bounds of the spans that were consumed before the epoch was interrupted."""
        return list(self.resumed["consumed"]) if self.resumed else []

    @property
    def alive(self) -> bool:
        """Whether the iterator can still be begun."""
        return self.iterator is not None and self.iterator() is not None


class Interrupted:
    """What a state needs of the current epoch: number, key at the coordinator, order and length.

    Attributes:
        stock: What this rank has of it.
        left: Whether its loop has ended.
    """

    def __init__(self, coming: Coming, stock: LeaseStock | MicrobatchStock) -> None:
        self.epoch, self.order, self.positions = coming.epoch, coming.order.saved, len(coming.order)
        self.stock, self.key = stock, stock.epoch
        self.left = False


class Terms(NamedTuple):
    """What a loader's stock is opened with at present, besides its number and length.

    Attributes:
        batch_size: Samples in a batch.
        drop_last: Whether a short last batch of the epoch is left out.
        ahead: Batches to hold in stock beyond the one being worked on.
        in_order: Whether batches are begun in the order in which they are formed.
        load_s: Seconds until a batch is loaded if none is being loaded yet.
        sizer: Gives the number of samples of each batch; None if all are equal.
        even: Whether all ranks need equally many batches.
        fixed: Whether the sizes cannot follow batch shares.
    """

    batch_size: int
    drop_last: bool
    ahead: int
    in_order: bool
    load_s: float
    sizer: BatchSizer | None
    even: bool
    fixed: bool


class Passes:
    """The iterations over a loader under its number at the coordinator, and what was requested ahead of the next one.

    A loader's `terms` are given with each call and not kept: they refer to the loader, and a circle would leave it to
    the garbage collector, which many programs switch off, to return what was requested ahead. They are evaluated only
    where a stock or its key needs them, as they may change until then and the first look at a network takes long.

    Attributes:
        count: Number of the next iteration; not the epoch, which may be chosen again.
    """

    def __init__(self) -> None:
        self.count = 0
        self._ahead: LeaseStock | None = None
        self._asked_as: tuple[Any, ...] | None = None  # What `_ahead` is for, also on a rank that asked for none.

    def restart(self) -> None:
        """Count from 0 in a new world; what was requested ahead was of the world before, and is not returned."""
        self.count, self._ahead, self._asked_as = 0, None, None

    def stock_for(self, run: Runtime, number: int, coming: Coming, terms: Callable[[], Terms]) -> LeaseStock:
        """Return the stock of the epoch that starts: the one requested ahead, if the epoch is as expected.

        Args:
            run: The runtime of this process.
            number: Number of the loader.
            coming: The epoch.
            terms: Returns what the stock has to be opened with.
        """
        positions = len(coming.order)
        stock, self._ahead = self._ahead, None
        if self._asked_as is not None and self._asked_as != _key(positions, terms):
            if stock is not None:
                stock.close()
            # Also on a rank that has asked for none: it left its loop before the end, and other ranks did not.
            stock, self.count = None, self.count + 1
        if stock is None:
            stock = self._open(run, number, positions, terms(), ask=False)
        self.count += 1
        self._asked_as = _key(coming.expected, terms)  # Now too: the iterator may be kept, and never end.
        return stock

    def left(self, expected: int | None, terms: Callable[[], Terms]) -> None:
        """Note that this rank's loop has ended: ranks that reached the end request the next epoch as it is now.

        Args:
            expected: Positions of the next epoch, None if unknown.
            terms: Returns what a stock would be opened with.
        """
        self._asked_as = _key(expected, terms)

    def ask_for_next(self, run: Runtime, number: int, expected: int | None, terms: Callable[[], Terms]) -> None:
        """Request the first samples of the next epoch, so that they are here when it starts.

        Args:
            run: The runtime of this process.
            number: Number of the loader.
            expected: Positions of that epoch; if unknown, None, nothing is requested.
            terms: Returns what the stock has to be opened with.
        """
        if expected is not None:
            self._ahead = self._open(run, number, expected, terms(), ask=True)

    def forget(self, *, close: bool) -> None:
        """Drop what was requested ahead: the next epoch is another one.

        Args:
            close: Whether to return it, which is possible only in the world that it is of.
        """
        if close and self._ahead is not None:
            self._ahead.close()
        self._ahead = self._asked_as = None
        self.count += self.count > 0  # Maybe not all ranks requested that epoch ahead; none does before the first.

    def _open(self, run: Runtime, number: int, positions: int, terms: Terms, *, ask: bool) -> LeaseStock:
        return run.client.open_stock(
            number,
            self.count,
            positions,
            terms.batch_size,
            terms.drop_last,
            ahead=terms.ahead,
            in_order=terms.in_order,
            load_s=terms.load_s,
            sizer=terms.sizer,
            even=terms.even,
            ask=ask,
        )


def _key(positions: int | None, terms: Callable[[], Terms]) -> tuple[Any, ...] | None:
    """Return what a stock requested ahead has to be for; None if the length of the next epoch is unknown."""
    if positions is None:
        return None
    now = terms()
    return positions, now.batch_size, now.even, now.fixed


def spans(bounds: list[int]) -> list[Span]:
    """Return the spans with these bounds, each start followed by its stop."""
    return list(zip(bounds[::2], bounds[1::2], strict=True))


def digest(order: EpochOrder, done: list[int]) -> int:
    """Return a digest that is equal if the order and the spans consumed before are equal."""
    return order.digest + len(done) + sum(done) % (1 << 32)


def end_epoch(run: Runtime, loader: int, epoch: int, close: Callable[[bool], None]) -> None:
    """Wait until all ranks have ended the epoch, then meet them, unless one has left its loop.

    Args:
        run: The runtime of this process.
        loader: Number of the loader.
        epoch: The epoch.
        close: Reports that this rank's loop has ended, given whether the rank meets the others.
    """
    meets = run.meets

    def together() -> bool:  # Else a rank left its loop: it is elsewhere, and the ranks meet at their next collective.
        # Behind the message that this rank is inactive. The last rank's report makes all ranks active again; one that
        # became inactive after that would have the first step of the next epoch closed without it.
        close(meets)
        run.program_waits.in_loop(loader, epoch)
        return run.client.await_epoch_end(loader, epoch)

    with run.meeting("the end of an epoch", out_of_data=True, if_true=together):
        pass
