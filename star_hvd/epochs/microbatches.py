"""An epoch in micro-batches on this rank: its own, and those it takes over from other ranks."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterator
from typing import Any

from star_hvd.epochs.batches import SOON_S, Note
from star_hvd.errors import StarError
from star_hvd.input.feeder import Feeder
from star_hvd.input.lease_stock import Batch
from star_hvd.input.microbatches import Microbatch, MicrobatchInHand, MicrobatchStock, in_hand_around
from star_hvd.input.sample_order import EpochOrder
from star_hvd.runtime.runtime import Runtime
from star_hvd.telemetry.wait_time import WaitTime

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
        trains: Whether the loop gives gradients; without, no step follows its own.
        uneven: Raises an error if ranks meet within their passes, whose numbers differ in this epoch; else None.
    """

    def __init__(
        self,
        run: Runtime,
        stock: MicrobatchStock,
        order: EpochOrder,
        feeder: Feeder,
        steps: int,
        note: Note,
        *,
        trains: bool = True,
        uneven: Callable[[], None] | None = None,
    ) -> None:
        self._uneven = uneven if trains else None
        self._present: MicrobatchInHand | None = None
        self._outer: MicrobatchInHand | None = None  # Of the loop inside of which this one runs.
        self._run, self._stock, self._order, self._feeder = run, stock, order, feeder
        self._steps, self._note, self._trains = steps, note, trains
        self._loaded: collections.deque[tuple[Batch, Any]] = collections.deque()  # Possibly of later steps.

    def __iter__(self) -> Iterator[Any]:
        ended = False
        self._feeder.begin(self._stock, self._order.indices)
        self._begin_inside()
        try:
            yield from self._parts()
            ended = True
        finally:
            if not ended:
                self._stock.close()
            self._feeder.end(self._stock)
            self._end_inside(ended)

    def _begin_inside(self) -> None:
        """Find the loop inside of which this one runs, and whose step goes on when this one has ended."""
        run = self._run
        if run.in_hand is not None:
            run.in_hand = self._outer = in_hand_around(run.in_hand, self._stock.loader)
            if self._outer is None:  # An abandoned loop that is not closed yet; this one has taken its place.
                self._forget_parts()

    def _end_inside(self, ended: bool) -> None:
        run, present = self._run, self._present
        if present is None:
            return
        present.over, self._present = True, None
        if run.in_hand is not present:  # This loop was abandoned earlier, and the one now under way has its own.
            return
        run.in_hand = in_hand_around(self._outer, self._stock.loader)
        # Gradients accumulated for an abandoned step must not get into another step: those of this loop, or of the
        # outer one, if that was closed before this one.
        if run.in_hand is None and (self._outer is not None or not ended):
            self._forget_parts()

    def _forget_parts(self) -> None:
        for driver in self._run.drivers.values():
            driver.forget_parts()

    def _put_in_hand(self, samples: int, *, behind: bool) -> MicrobatchInHand:
        run, outer, loader = self._run, self._outer, self._stock.loader
        if outer is not None and run.in_hand is not None and run.in_hand.loader == outer.loader:
            outer = self._outer = run.in_hand  # It has gone on meanwhile.
        reference = run.reference_samples or 1.0  # Unknown before the first training; an evaluation has no weights.
        part = MicrobatchInHand(
            samples, reference, self._await_part, self._stock.own_part, behind=behind, loader=loader, outer=outer
        )
        run.in_hand = self._present = part
        return part

    def _parts(self) -> Iterator[Any]:
        run, stock = self._run, self._stock
        first: MicrobatchInHand | None = None
        if self._uneven is not None and self._steps == 1:  # A rank's only pass may be one too many.
            self._uneven()
        while self._steps:
            if not self._await_part():
                self._raise_if_unfinished()
                if self._outer is None:  # Otherwise the outer loop is in the middle of a step.
                    run.end_step_of_parts()
                if not stock.next_step():
                    return
                continue
            if self._uneven is not None and first is not None and first is self._present and first.used:
                self._uneven()  # In the first pass ranks have found out whether they meet there.
            began_s, part = time.monotonic(), stock.take()
            data = self._load(part)
            samples = sum(stop - start for start, stop in part.spans)
            self._note(samples, time.monotonic() - began_s, 0.0)
            present = self._present
            behind = present is not None and (present is first or present.behind) and not present.used
            present = self._put_in_hand(samples, behind=behind)
            first = first or present
            yield data

    def _raise_if_unfinished(self) -> None:
        """Check that the step that is over for this rank has its gradient: else the others would wait for it in vain.

        Raises:
            StarError: `step()` was not called with its last micro-batch.
        """
        present = self._present
        if present is None or present.step_called or not self._trains or self._outer is not None:
            return  # Inside of another loop, what is accumulated is of that loop's step.
        if any(driver.has_parts() for driver in self._run.drivers.values()):
            raise StarError(
                "the last micro-batch of a step gave no gradient, and step() was not called, so the other ranks would "
                "wait for this one; call backward() and step() for every micro-batch; to leave one out, give it a loss "
                "of 0 instead of `continue`, such as 0.0 * sum(p.sum() for p in model.parameters())"
            )

    def _await_part(self) -> bool:
        """Reserve the next micro-batch of this step. False if the step is over for this rank."""
        run, stock = self._run, self._stock
        if stock.at_work:  # Kernels of a whole share are launched at once; then nothing of it could be taken over.
            run.await_devices()
        began_s, wait = time.monotonic(), WaitTime(SOON_S, "micro-batches of a step")
        if not stock.begun and (not stock.decided(0.0 if stock.left_out else SOON_S) or stock.went_by):
            # This rank has no part in the step, and gives no gradient unless it takes over something.
            with run.inactive("waiting for samples"):
                # No step follows where nothing is trained, or where this loop runs inside of a step.
                steps = run.steps_begun() if self._trains and self._outer is None else []
                while not stock.decided(SOON_S):
                    run.client.check_wait(wait, "micro-batches")
                # If the step ended without this rank, its helper makes it; until then no later gradient may be given.
                while stock.went_by and steps and run.steps_begun() == steps:
                    run.client.check_wait(wait, "the other ranks' gradients")
                    time.sleep(_LOOK_S)
            if self._outer is None:  # Otherwise the training is in the middle of a step.
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
