"""An epoch in micro-batches on this rank: its own, and those it takes over from other ranks."""

from __future__ import annotations

import collections
import time
from collections.abc import Iterator
from typing import Any

from star_hvd.epochs.batches import SOON_S, Note
from star_hvd.input.feeder import Feeder
from star_hvd.input.lease_stock import Batch
from star_hvd.input.microbatches import Microbatch, MicrobatchInHand, MicrobatchStock
from star_hvd.input.sample_order import EpochOrder
from star_hvd.runtime.runtime import Runtime

__all__ = ["LeasedMicrobatches"]

_LOOK_S = 0.002  # Interval between checks whether a helper has made a step.


class LeasedMicrobatches:
    """This rank's micro-batches of an epoch, step by step; iterated once.

    Args:
        run: The runtime of this process.
        stock: This rank's micro-batches; closed when the iteration ends.
        order: The order of the epoch's samples.
        feeder: Loads them.
        steps: Number of steps in the epoch.
        note: See `Note`.
    """

    def __init__(
        self, run: Runtime, stock: MicrobatchStock, order: EpochOrder, feeder: Feeder, steps: int, note: Note
    ) -> None:
        self._run, self._stock, self._order, self._feeder = run, stock, order, feeder
        self._steps, self._note = steps, note
        self._loaded: collections.deque[tuple[Batch, Any]] = collections.deque()  # Possibly of later steps.

    def __iter__(self) -> Iterator[Any]:
        ended = False
        self._feeder.begin(self._stock, self._order.indices)
        try:
            yield from self._parts()
            ended = True
        finally:
            self._stock.close()
            self._feeder.end(self._stock)
            self._run.in_hand = None
            if not ended:  # Gradients accumulated for an abandoned step must not get into another step.
                for driver in self._run.drivers.values():
                    driver.forget_parts()

    def _parts(self) -> Iterator[Any]:
        run, stock = self._run, self._stock
        first: MicrobatchInHand | None = None
        present: MicrobatchInHand | None = None
        while self._steps:
            if not self._await_part():
                run.end_step_of_parts()
                if not stock.next_step():
                    return
                continue
            began_s, part = time.monotonic(), stock.take()
            data = self._load(part)
            samples = sum(stop - start for start, stop in part.spans)
            self._note(samples, time.monotonic() - began_s, 0.0)
            behind = present is not None and (present is first or present.behind) and not present.used
            present = MicrobatchInHand(
                samples, run.reference_samples, self._await_part, stock.own_part, behind=behind
            )
            first, run.in_hand = first or present, present
            yield data

    def _await_part(self) -> bool:
        """Reserve the next micro-batch of this step. False if the step is over for this rank."""
        run, stock = self._run, self._stock
        if stock.at_work:  # Kernels of a whole share are launched at once; then nothing of it could be taken over.
            run.await_devices()
        began_s = time.monotonic()
        if not stock.begun and (not stock.decided(0.0 if stock.left_out else SOON_S) or stock.went_by):
            # This rank has no part in the step, and gives no gradient unless it takes over something.
            with run.inactive("waiting for samples"):
                steps = run.steps_begun()
                while not stock.decided(SOON_S):
                    run.client.check_wait(began_s, "micro-batches")
                # If the step ended without this rank, its helper makes it; until then no later gradient may be given.
                while stock.went_by and steps and run.steps_begun() == steps:
                    run.client.check_wait(began_s, "the other ranks' gradients")
                    time.sleep(_LOOK_S)
            run.catch_up()
            return not stock.went_by and self._await_part()
        found = run.client.await_microbatch(stock, run.steps_made())
        for driver in run.drivers.values():
            driver.timer.add_outside(time.monotonic() - began_s)
        return found

    def _load(self, part: Microbatch) -> Any:
        """Return the data of a micro-batch: from the workers, or loaded here if it was another rank's."""
        stock, feeder = self._stock, self._feeder
        if not part.own:
            return feeder.load([index for span in part.spans for index in self._order.indices(*span)])
        while True:
            for _ in range(len(self._loaded)):
                batch, data = self._loaded.popleft()
                found = stock.is_in(batch.number, part)
                if found:
                    stock.delivered(batch.number)
                    return data
                if found is False:  # Of a later step; None means that it was called back.
                    self._loaded.append((batch, data))
            more = feeder.next(stock, stock.formed)
            if more is None:
                feeder.start()
            else:
                self._loaded.append(more)
