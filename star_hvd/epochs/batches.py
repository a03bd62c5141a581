"""An epoch in whole batches on this rank, from leased samples or from this rank's own stream."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

from star_hvd.errors import StarError
from star_hvd.input.batch_sizes import BatchSizes
from star_hvd.input.feeder import Feeder
from star_hvd.input.lease_stock import Batch, LeaseStock
from star_hvd.input.network import trained, warn_of_shares
from star_hvd.input.sample_order import EpochOrder
from star_hvd.input.stream import Stream
from star_hvd.runtime.out_of_memory import Repeats, cut_batch
from star_hvd.runtime.runtime import Runtime

__all__ = ["SOON_S", "EqualRanges", "LeasedBatches", "Leases", "Note", "StreamBatches"]

logger = logging.getLogger("star_hvd")

SOON_S = 0.25  # An answer takes milliseconds; a rank that waits longer becomes inactive, since it gives no gradient.
_ORDER_S = 5.0  # Longest wait for equal batch shares once they are needed; the order takes milliseconds.

Note = Callable[[int, float, float], None]
"""Called before the training loop gets a batch, with its number of samples, the seconds it was waited for, and the
fewest in which the rank can load it, 0 if unknown."""


class Leases:
    """The training thread's waits for samples to be leased to this rank.

    Attributes:
        waits: Number of times this rank needed samples while others held all of them, and then got some.
    """

    def __init__(self, run: Runtime, stock: LeaseStock) -> None:
        self._run, self._stock = run, stock
        self.waits = 0

    def more(self) -> bool:
        """Wait until samples are in stock. Return False when the epoch is over for this rank."""
        run, stock = self._run, self._stock
        if stock.ready(0.0):
            return run.client.await_samples(stock)
        if not stock.had_share and stock.ready(SOON_S):
            more = run.client.await_samples(stock)
        else:  # Others still work on what was leased to them, some of which may be returned.
            run.program_waits.in_loop(stock.loader, stock.epoch)
            with run.inactive("waiting for samples"):
                more = run.client.await_samples(stock)
        self.waits += more  # Does not count the wait for the others at the end.
        return more


class LeasedBatches:
    """The batches that the workers load from leased samples; iterated once.

    Args:
        run: The runtime of this process.
        stock: The samples leased to this rank; closed if the iteration ends in the middle of the epoch, so that other
            ranks get the rest.
        order: The order of the epoch's samples.
        feeder: Loads them.
        batch_size: Samples per batch if all are equal.
        n_samples: Samples that all ranks together consume in this epoch, a short last step included.
        drop_last: Whether that is left out where all ranks have their parts of every step.
        shares: Sets other batch sizes; None if they are constant.
        repeats: Repeats batches that ran out of memory.
        equal_because: Why all ranks need equally many batches, besides reasons of the runtime's optimizers.
        note: See `Note`.

    Attributes:
        leases: How it waits for samples.
    """

    def __init__(
        self,
        run: Runtime,
        stock: LeaseStock,
        order: EpochOrder,
        feeder: Feeder,
        *,
        batch_size: int,
        n_samples: int,
        drop_last: bool,
        shares: BatchSizes | None,
        repeats: Repeats,
        equal_because: str,
        note: Note,
    ) -> None:
        self._equal_because = equal_because
        self._run, self._stock, self._order, self._feeder = run, stock, order, feeder
        self._batch_size, self._n_samples, self._drop_last = batch_size, n_samples, drop_last
        self._shares, self._repeats, self._note = shares, repeats, note
        self.leases = Leases(run, stock)
        self._steps_before = run.steps_ended

    def __iter__(self) -> Iterator[Any]:
        try:
            self._feeder.begin(self._stock, self._order.indices)
            yield from self._loaded()
        except BaseException:
            self._stock.close()
            raise
        finally:
            self._feeder.end(self._stock)
            if self._shares is not None:
                self._shares.end_epoch(self._stock.epoch)

    def _loaded(self) -> Iterator[Any]:
        stock, order, feeder = self._stock, self._order, self._feeder
        began_s = time.monotonic()
        while True:
            found = self._next()
            if found is not None:
                batch, data = found
                samples = order.samples(batch.spans)
                self._note(samples, time.monotonic() - began_s, feeder.pace_s(samples))
                if self._shares is not None:
                    self._note_delivery(stock.delivered - 1)
                yield from self._whole_or_parts(batch, data)
                began_s = time.monotonic()
            elif self.leases.more():
                feeder.start()
            else:
                feeder.load_s = stock.load_s
                self._raise_if_uneven(at_end=True)
                return

    def _next(self) -> tuple[Batch, Any] | None:
        """Return the next loaded batch, see `Feeder.next`; warn of an error in loading, which a program may catch."""
        try:
            return self._feeder.next(self._stock, self._take)
        except StarError:
            raise
        except Exception:
            self._stock.close()
            logger.warning(
                "an error in loading a batch ended this epoch on rank %d, also if the program catches it: %d samples "
                "go to other ranks; to continue after what cannot be read, catch it in the data set or collate_fn",
                self._run.rank,
                self._stock.returned,
            )
            raise

    def _take(self, number: int) -> Batch | None:
        return self._stock.take(number, *self._run.batch_begins())

    def _whole_or_parts(self, batch: Batch, data: Any) -> Iterator[Any]:
        """Yield a batch, or its parts if it does not fit in memory."""
        order, feeder = self._order, self._feeder
        size = order.samples(batch.spans)

        def load(start: int, stop: int) -> Any:
            if feeder.collates_by_default:
                return cut_batch(data, start, stop, size)
            return feeder.load([index for span in batch.spans for index in order.indices(*span)][start:stop])

        return self._repeats.deliver(self._run, self._stock.loader, size, data, load)

    def _note_delivery(self, index: int) -> None:
        """Check and warn when a batch is delivered, since batch sizes may differ between ranks from here on."""
        run = self._run
        if index == 1:
            self._raise_if_uneven()
        if run.batch_delivered(self._stock.loader, index) and run.rank == 0:
            warn_of_shares(trained(driver.engine.applier.optimizer for driver in run.drivers.values()))

    def _raise_if_uneven(self, *, at_end: bool = False) -> None:
        """Check that all ranks get equally many batches if they meet within their passes: else one would wait in vain.

        Equal batch shares ensure that, if the epoch's last step has a sample for every rank.

        Args:
            at_end: Whether this rank has had its last batch.

        Raises:
            StarError: The epoch cannot be divided that way.
        """
        run, size = self._run, self._batch_size
        reasons = (self._equal_because, *(driver.equal_batches for driver in run.drivers.values()))
        reason = next(filter(None, reasons), "")
        if not reason or run.steps_ended == self._steps_before:  # Without steps no rank waits.
            return
        ranks, rest = run.world_size, self._n_samples % (run.world_size * size)
        uneven = bool(-(-rest // size) % ranks)
        if uneven and self._shares is not None and not at_end:  # The reason may be as new as the step before.
            self._shares.await_shares(_ORDER_S)
        divided = self._stock.dealt_evenly or (self._shares is not None and (not at_end or self._shares.balanced))
        if 0 < rest < ranks and not self._drop_last if divided else uneven:
            raise StarError(
                f"an epoch of {self._n_samples} samples gives {ranks} ranks with batch_size {size} "
                f"different numbers of batches, which cannot be here: {reason}; leave samples out so that the last "
                "step has one for every rank, or pass drop_last=True"
            )


class EqualRanges:
    """Checks that ranks which meet within their passes get equally much of a stream or of `hvd.work`.

    There are no batch shares for these, which could still be changed in an epoch: it is dealt evenly if the reason is
    known when it begins.

    Args:
        run: The runtime of this process.
        stock: The leases of the epoch.
        because: Why all ranks need equally many batches, besides reasons of the runtime's optimizers; else empty.
        total: Positions of the epoch, of which every rank needs as many.
        what: What they are, for the error.
    """

    def __init__(self, run: Runtime, stock: LeaseStock, because: str, total: int, what: str) -> None:
        self._run, self._stock, self._because, self._total, self._what = run, stock, because, total, what
        self._steps_before = run.steps_ended

    def check(self, *, ended: int = -1) -> None:
        """Raise an error if a rank would wait in vain for another one. Call it before the second range, and at the end.

        Args:
            ended: Positions that this rank has had if there is no more data for it, else -1.

        Raises:
            StarError: Ranks get different numbers of batches.
        """
        run, total = self._run, self._total
        reasons = (self._because, *(driver.equal_batches for driver in run.drivers.values()))
        reason = next(filter(None, reasons), "")
        if not reason or run.world_size == 1 or run.steps_ended == self._steps_before:
            return
        parts = f"an epoch of {total} {self._what} cannot be divided evenly here, which is needed: {reason}"
        if total % run.world_size:
            raise StarError(f"{parts}; take a multiple of {run.world_size}, the number of ranks")
        if not self._stock.dealt_evenly:
            raise StarError(
                f"{parts}; this was found out only after the epoch had begun: make the optimizer before it begins and "
                "let it update the layers concerned, or pass a map-style data set to hvd.shard"
            )
        if 0 <= ended < total // run.world_size:
            raise StarError(
                f"{parts}; the data of rank {run.rank} ended after {ended} of {total // run.world_size} of its "
                f"{self._what}: give each rank as much data, or name fewer"
            )


class StreamBatches:
    """Batches of this rank's own stream, as many as the queue allows; iterated once.

    Args:
        run: The runtime of this process.
        stock: Leases of future batches; closed if the iteration ends in the middle of the epoch.
        stream: The stream, which continues from epoch to epoch.
        equal_because: Why all ranks need equally many batches, besides reasons of the runtime's optimizers.
        note: See `Note`.

    Attributes:
        leases: How it waits for samples.
    """

    def __init__(self, run: Runtime, stock: LeaseStock, stream: Stream, equal_because: str, note: Note) -> None:
        self._run, self._stock, self._stream, self._note = run, stock, stream, note
        self._equal = EqualRanges(run, stock, equal_because, stock.samples, "batches")
        self.leases = Leases(run, stock)

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self._loaded()
        except BaseException:
            self._stock.close()
            raise

    def _loaded(self) -> Iterator[Any]:
        stock, stream = self._stock, self._stream
        stream.begin_epoch()
        began_s = time.monotonic()
        while stream.load():
            if not self.leases.more() or self._run.client.begin_batch(stock) is None:
                self._equal.check()
                return  # The loaded batch becomes the first one of the next epoch.
            if stock.delivered == 2:
                self._equal.check()
            samples, data = stream.take()
            self._note(samples, time.monotonic() - began_s, 0.0)
            yield data
            began_s = time.monotonic()
        self._equal.check(ended=stock.delivered)
        stock.end()  # This rank's share is used up; the others continue.
