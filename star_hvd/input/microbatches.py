"""A rank's micro-batches: those of its share of each step, and those it takes over from other ranks.

The coordinator (`scheduler.rules.microbatches`) decides what is in a step, in tasks; a micro-batch is a run of tasks
that are computed in one pass. This module forms the passes of this rank's shares for the loader's workers, steps
ahead, and begins them one by one. Until a micro-batch is begun the agent's thread can call it back, or only its last
tasks; what the workers have loaded of it is then discarded. A micro-batch that is taken over is loaded by the training
thread, since it is due at once while the workers are at later steps; so is the rest of a loaded one that was cut.

A rank whose pass took far longer than expected returns the tasks of the step it has not begun; the coordinator
redistributes them, and the rank may get none back, since it could not finish them in time. The shares of the next step
may have been made before that was known: then the rank begins its first pass with as many tasks as it can compute in
the expected time, and returns the others.

The training thread reserves a micro-batch when the optimizer is asked to step, or when the loop asks for the next one.
If there is one in this step it counts as begun, so the step is not over for this rank, and no other rank can take it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from scheduler.rules.runs import Span
from scheduler.rules.step_layout import StepLayout
from star_hvd.channel.messages.base import Message
from star_hvd.channel.messages.leases import Consumed, Lease, LeaseReturn, ReportConsumed, flat
from star_hvd.channel.messages.microbatches import (
    MicrobatchBegin,
    MicrobatchesClosed,
    MicrobatchGrant,
    MicrobatchOpen,
    MicrobatchRecall,
    MicrobatchReturn,
    MicrobatchShares,
)
from star_hvd.errors import StarError
from star_hvd.input.lease_stock import Batch, Consumption
from star_hvd.locks import ordered_condition

__all__ = ["Microbatch", "MicrobatchInHand", "MicrobatchStock", "in_hand_around"]

_LATE = 1.5  # A pass that takes this many times its expected time shows that the rank has become slow.


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Tasks of a step that are computed in one pass.

    Attributes:
        step: The step of the epoch.
        task: Number of its first task in the step.
        spans: Its positions.
        own: Whether the loader's workers load it.
        tasks: Number of tasks.
        granted: Whether it was another rank's.
    """

    step: int
    task: int
    spans: tuple[Span, ...]
    own: bool = True
    tasks: int = 1
    granted: bool = False

    @property
    def stop(self) -> int:
        """The number after that of the last task."""
        return self.task + self.tasks


class MicrobatchStock:
    """This rank's micro-batches of one epoch; see the module docstring.

    Args:
        rank: This rank.
        loader: Number of the loader.
        epoch: Number of the epoch.
        layout: Positions of the micro-batches.
        opening: Message that tells the coordinator that this rank begins the epoch.
        send: Sends a control message; does not wait.

    Attributes:
        batch: Approximate number of samples in one of the user's micro-batches.
        own_part: Expected time of this step's passes so far, relative to a user's batch in `parts` passes at equal
            pace.
        taken_over: Number of begun micro-batches that were in another rank's share.
    """

    def __init__(
        self, rank: int, layout: StepLayout, opening: MicrobatchOpen, *, send: Callable[[Message], None]
    ) -> None:
        self.loader, self.epoch, self.samples = opening.loader, opening.epoch, opening.samples
        self.batch = max(1, opening.batch // opening.parts)
        self.load_s = 0.0  # As in `LeaseStock`; loading is not timed here.
        self.closed = False
        self.taken_over = 0
        self.own_part = 0.0
        self._rank, self._layout, self._opening, self._send = rank, layout, opening, send
        layout.limit_passes(opening.most)
        # Guards the fields below; messages are queued for sending under it.
        self._changed = ordered_condition("MicrobatchStock._changed")
        self._queue: deque[Microbatch] = deque()  # Of this rank's shares, not formed yet.
        self._formed: dict[int, Microbatch] = {}  # In progress in the workers, by number.
        self._granted: deque[Microbatch] = deque()
        self._numbers = 0
        self._step = 0
        self._closed_upto = -1
        self._reserved: Microbatch | None = None
        self._begun: set[Microbatch] = set()  # Of this step.
        self._shares: dict[int, MicrobatchShares] = {}  # By step, as far as known.
        self._consumption = Consumption()
        self._began_s, self._present = 0.0, 0  # Start time of the training thread's current pass, and its tasks.
        self._last_s = 0.0  # Time of the last ended micro-batch, until it is reported.
        self._latest = (0.0, 0)  # Time and tasks of the last pass.
        self._gave_up = False  # Whether this rank has become slow in this step.
        self._said_idle = False
        self._refused = ""

    def open(self) -> None:
        """Tell the coordinator that this rank begins the epoch."""
        self._send(self._opening)

    # ---- training thread ------------------------------------------------------------------------------------

    def decided(self, limit_s: float) -> bool:
        """Wait until there is another micro-batch of this step for this rank, or the step is closed.

        Returns:
            Whether that happened within `limit_s`.

        Raises:
            ValueError: This rank's samples differ from those of the others.
        """
        with self._changed:
            self._end_present()
            if not self._is_decided() and not self._said_idle:
                self._said_idle = True
                self._report(-1)
            decided = self._changed.wait_for(self._is_decided, limit_s)
            if self._refused:
                raise ValueError(self._refused)
            return decided

    def reserve(self, steps_made: int) -> bool | None:
        """Reserve this rank's next micro-batch of the step. Does not wait.

        Args:
            steps_made: Steps that the parameters have had.

        Returns:
            True if there is one (it now counts as begun), False if the step is over for this rank, None if undecided.
        """
        with self._changed:
            found = self._find()
            if found is not None and self._reserved is None:
                given = self._shorten(found)
                self._begin((found if not given else self._find()) or found, steps_made, given)
            return True if found is not None else False if self._closed_upto >= self._step else None

    def next_step(self) -> bool:
        """Go to the next step, since this one is over for this rank. Return whether the epoch has another one."""
        with self._changed:
            self._shares.pop(self._step, None)
            self._step, self._said_idle, self._gave_up, self.own_part = self._step + 1, False, False, 0.0
            self._begun.clear()
            more = self._step < self._layout.steps
            if not more and self._last_s:  # The next epoch's shares depend on it, and no later pass reports it.
                self._report(-1)
            return more

    @property
    def left_out(self) -> bool:
        """Whether this rank has no part in this step unless it takes over something."""
        with self._changed:
            shares = self._shares.get(self._step)
            return shares is not None and not shares.sizes and not self._begun

    @property
    def went_by(self) -> bool:
        """Whether the step is over without this rank having had a part in it."""
        with self._changed:
            return not self._begun and self._find() is None and self._closed_upto >= self._step

    @property
    def begun(self) -> int:
        """Number of this step's micro-batches that this rank has begun."""
        with self._changed:
            return len(self._begun)

    @property
    def at_work(self) -> bool:
        """Whether the training thread works on a micro-batch whose end it has not reported."""
        with self._changed:
            return self._began_s != 0.0

    def take(self) -> Microbatch:
        """Return the reserved micro-batch, which the training thread works on from now on."""
        with self._changed:
            assert self._reserved is not None
            found, self._reserved = self._reserved, None
            self._began_s, self._present = time.monotonic(), found.tasks
            return found

    def ended(self) -> None:
        """Note that the training thread has computed the gradient of its micro-batch."""
        with self._changed:
            self._end_present()

    def is_in(self, number: int, wanted: Microbatch) -> bool | None:
        """Whether the batch with a number is that micro-batch; None if it was called back."""
        with self._changed:
            found = self._formed.get(number)
            return None if found is None else found == wanted

    def formed(self, number: int) -> Batch | None:
        """Return a batch that came out of the workers; None if it was called back meanwhile."""
        with self._changed:
            found = self._formed.get(number)
            return None if found is None else Batch(number, found.spans)

    def delivered(self, number: int) -> None:
        """Note that a batch is given to the training loop."""
        with self._changed:
            self._formed.pop(number, None)

    @property
    def in_stock(self) -> int:
        """Approximate number of samples that are not formed into batches yet."""
        with self._changed:
            return sum(found.tasks for found in self._queue) * self.batch // self._layout.grain

    def form(self) -> Batch | None:
        """Form the next micro-batch of this rank's shares for the workers; None if none is known yet."""
        with self._changed:
            if not self._queue:
                return None
            found = self._queue.popleft()
            self._numbers += 1
            self._formed[self._numbers] = found
            return Batch(self._numbers, found.spans)

    def wake(self) -> None:
        """Does nothing: batch shares, which may have changed, do not apply to this loader."""

    def close(self) -> None:
        """End the loop; other ranks get what was not begun."""
        with self._changed:
            if not self.closed:
                self.closed = True
                self._queue.clear()
                self._formed.clear()
                early = self._step < self._layout.steps
                if self._reserved is not None:  # Reported as begun, but the loop ended before it was delivered.
                    found, self._reserved = self._reserved, None
                    self._consumption.forget(found.spans)
                    self._send(MicrobatchReturn(self.loader, self.epoch, found.step, found.task, True, found.tasks))
                self._send(LeaseReturn(self.loader, self.epoch, 0, True, early))

    # ---- agent's thread -------------------------------------------------------------------------------------

    def on_message(self, message: Message) -> None:
        """Handle a message of the coordinator."""
        with self._changed:
            if isinstance(message, ReportConsumed):
                runs = flat(self._consumption.by(message.step))
                self._send(Consumed(self.loader, self.epoch, message.step, runs))
            elif self.closed:
                return
            elif isinstance(message, MicrobatchShares):
                self._note_shares(message)
            elif isinstance(message, MicrobatchGrant):
                stop = message.task + message.tasks
                for first, end in self._cut(message.task, stop):
                    self._granted.append(self._run(message.step, first, end - first, own=False, granted=True))
            elif isinstance(message, MicrobatchRecall):
                given = self._give_back(message.step, message.task, message.task + message.tasks)
                self._send(MicrobatchReturn(self.loader, self.epoch, message.step, message.task, given > 0, given))
            elif isinstance(message, MicrobatchesClosed):
                self._closed_upto = max(self._closed_upto, message.step)
            elif isinstance(message, Lease):
                self._refused = message.refused
            self._changed.notify_all()

    def _run(self, step: int, task: int, tasks: int, *, own: bool = True, granted: bool = False) -> Microbatch:
        return Microbatch(step, task, self._layout.spans(step, task, tasks), own, tasks, granted)

    def _note_shares(self, message: MicrobatchShares) -> None:
        task = sum(message.counts[: self._rank])
        self._shares[message.step] = message
        for size in message.sizes:
            for first, end in self._cut(task, task + size):
                self._queue.append(self._run(message.step, first, end - first))
            task += size

    def _cut(self, first: int, stop: int) -> Iterator[Span]:
        """Cut a run into passes that fit in this rank's memory, whose limit the coordinator may not have known yet."""
        return ((at, min(stop, at + self._layout.longest)) for at in range(first, stop, self._layout.longest))

    def _give_back(self, step: int, first: int, stop: int) -> int:
        """Forget the tasks of a step from `first` to `stop` that are not begun. Return how many."""
        given = 0
        for where in (self._queue, self._granted):
            for found in [each for each in where if self._is_wanted(each, step, first, stop)]:
                given += found.stop - max(first, found.task)
                at = where.index(found)
                del where[at]
                if found.task < first:
                    where.insert(at, self._run(step, found.task, first - found.task, own=found.own,
                                               granted=found.granted))  # fmt: skip
        for number, found in list(self._formed.items()):
            if self._is_wanted(found, step, first, stop):
                given += found.stop - max(first, found.task)
                del self._formed[number]
                if found.task < first:  # The workers load its samples together with those that are returned.
                    self._granted.append(self._run(step, found.task, first - found.task, own=False))
        return given

    def _is_wanted(self, found: Microbatch, step: int, first: int, stop: int) -> bool:
        return found.step == step and found.task < stop and found.stop > first and found not in self._begun

    # ---- inside, under the condition ------------------------------------------------------------------------

    def _find(self) -> Microbatch | None:
        """Return the next micro-batch of this step: reserved, in progress, not formed yet, or taken over."""
        if self._reserved is not None:
            return self._reserved
        for where in (self._formed.values(), self._queue, self._granted):
            for found in where:
                if found.step == self._step and found not in self._begun:
                    return found
        return None

    def _is_decided(self) -> bool:
        return bool(self._refused) or self._find() is not None or self._closed_upto >= self._step

    def _begin(self, found: Microbatch, steps_made: int, given: Sequence[int] = ()) -> None:
        self._reserved = found
        self._begun.add(found)
        self._said_idle = False
        if not found.own:
            self._granted.remove(found)
            self.taken_over += found.granted
        shares = self._shares.get(found.step)
        fixed = shares.fixed if shares is not None else 0.0
        self.own_part += (fixed + found.tasks) / (self._layout.parts * fixed + self._layout.share)
        self._consumption.note(found.spans, steps_made)
        self._report(found.task, found.tasks, given)

    def _shorten(self, found: Microbatch) -> list[int]:
        """Return what this rank cannot compute in time of a step whose shares were made before it was slow.

        Returns:
            Bounds of the runs that it gives back, which all come after those it keeps; empty if it is as fast as
            expected.
        """
        shares, (last_s, tasks) = self._shares.get(self._step), self._latest
        if shares is None or not shares.sizes or shares.first_s <= 0.0 or self._begun or not tasks or not found.own:
            return []
        pace_s = last_s / (shares.fixed + tasks)
        expected_s = shares.first_s * (shares.fixed + found.tasks) / (shares.fixed + shares.sizes[0])
        if pace_s * (shares.fixed + found.tasks) <= _LATE * expected_s:
            return []
        kept = found.task + max(1, min(found.tasks, int(expected_s / pace_s - shares.fixed)))
        given = [(max(first, kept), stop) for first, stop in self._unbegun() if stop > kept]
        if given:
            self._gave_up = True
            self._give_back(self._step, kept, given[-1][1])
        return [bound for run in given for bound in run]

    def _give_up(self) -> None:
        """Return all tasks of the step that are not begun, since this rank has become slow."""
        self._gave_up = True
        given = self._unbegun()
        if given:
            self._give_back(self._step, given[0][0], given[-1][1])
            self._said_idle = True
            self._report(-1, given=[bound for run in given for bound in run])

    def _unbegun(self) -> list[Span]:
        """Return the runs of this step that are not begun, in order."""
        where = (*self._formed.values(), *self._queue, *self._granted)
        return sorted((each.task, each.stop) for each in where if each.step == self._step and each not in self._begun)

    def _report(self, task: int, tasks: int = 1, given: Sequence[int] = ()) -> None:
        last_s, self._last_s = self._last_s, 0.0
        self._send(MicrobatchBegin(self.loader, self.epoch, self._step, task, last_s, tasks, list(given)))

    def _end_present(self) -> None:
        if self._began_s:
            self._last_s, self._began_s = time.monotonic() - self._began_s, 0.0
            shares, tasks = self._shares.get(self._step), self._present
            self._latest = self._last_s, tasks
            # A rank that opened late may have no pass of its own left.
            if shares is not None and shares.sizes and shares.first_s > 0.0 and not self._gave_up:
                expected_s = shares.first_s * (shares.fixed + tasks) / (shares.fixed + shares.sizes[0])
                if self._last_s > _LATE * expected_s:
                    self._give_up()


class MicrobatchInHand:
    """The micro-batch that the training thread works on, for the optimizers that accumulate its gradient.

    Args:
        samples: Samples in it.
        reference: Samples that count as weight 1.
        more: Returns whether this rank has another one in this step; may wait.
        own_part: See `MicrobatchStock.own_part`; including this one.
        covered: Parameters that already have its gradient, from a pass that ran out of memory.
        behind: Whether the loop got it although no micro-batch before it in the epoch has given a gradient.
        loader: Number of its loader.
        outer: The micro-batch of the loop inside of which its own loop runs, as an evaluation inside a step does.

    Attributes:
        over: Whether its loop has ended.
    """

    def __init__(
        self,
        samples: int,
        reference: float,
        more: Callable[[], bool],
        own_part: float,
        covered: frozenset[torch.nn.Parameter] = frozenset(),
        *,
        behind: bool = False,
        loader: int = -1,
        outer: MicrobatchInHand | None = None,
    ) -> None:
        self.own_part, self.covered, self.behind = own_part, covered, behind
        self.loader, self.outer, self.over = loader, outer, False
        self._weight, self._reference, self._more = samples / reference, reference, more
        self._used = False
        self._last: bool | None = None

    @property
    def used(self) -> bool:
        """Whether it has given a gradient."""
        return self._used

    @property
    def step_called(self) -> bool:
        """Whether `step()` was called with it, also where that only accumulates."""
        return self._last is not None

    @property
    def weight(self) -> float:
        """Its weight in the step's gradient; fixed once read."""
        self._used = True
        return self._weight

    @property
    def is_last(self) -> bool:
        """Whether it completes this rank's gradient of the step; waits while that is undecided."""
        if self._last is None:
            self._last = not self._more()
        return self._last

    def weigh(self, count: float) -> None:
        """Weigh it by `count` items, over which its loss is a mean.

        Raises:
            StarError: Its gradient is accumulated already.
        """
        if self._used:
            raise StarError("hvd.weigh was called behind backward(); call it before, for each micro-batch")
        self._weight = count / self._reference


def in_hand_around(part: MicrobatchInHand | None, loader: int) -> MicrobatchInHand | None:
    """Return the micro-batch of the loop inside of which one over `loader` runs, None if it runs inside of no other.

    Args:
        part: That in hand. Its loop may have ended since, or be an abandoned one over the same loader, which cannot go
            on: then it is the one around that loop.
        loader: Number of the loader.
    """
    while part is not None and (part.over or part.loader == loader):
        part = part.outer
    return part
