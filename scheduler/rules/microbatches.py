"""Micro-batches of a step, taken over by ranks that have done theirs (after EPSP, Zhou et al. 2019).

A step's B samples are `parts` micro-batches per rank, tasks for short. Every rank begins with a share of them by its
pace, and works them off in order. A rank whose own are all begun takes over the last task, not begun yet, of the rank
that would end last, if it ends that task sooner:

    free_i + TRANSFER_S + pace_i < end_j        end_j = end of its present task + (tasks not begun) * pace_j

A running task that takes longer than the pace sets the pace. Every rank keeps at least one task of a whole step, so
that all take part in its reduction. The step closes, for all ranks, when every task is begun: nothing is left that
could be taken over, and no rank waits for the message, because the last task is still to be computed.

A task is always in exactly one state: in one rank's queue, free because its rank left, or begun by one rank.
"""

from __future__ import annotations

import bisect
import enum
import heapq
import itertools
import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from scheduler.rules.leasing import Span, joined, without

__all__ = ["TRANSFER_S", "Action", "Kind", "MicrobatchPool", "StepLayout", "forecast_shares", "stolen_makespan"]

Array = npt.NDArray[np.float64]

TRANSFER_S = 1e-3
"""Four messages between processes of one host, until a task that was taken over can begin."""

_GAIN = 0.03
"""Least gain of a step's predicted time for which shares are unequal."""

_PACES = 3
"""Tasks whose median time is a rank's pace: the fewest that tolerate an outlier; taking over corrects the rest."""

_HALVINGS = 30  # Of an interval that is a few times as long as what is sought.

_LOOK, _LOOK_S = 0.25, 2e-5
"""Part of the fastest rank's pace after which ranks without tasks are looked at again; at least so long per rank."""

_MANY = 16
"""Ranks above which a rank's end is reckoned anew only where it may be the last one, and all of them by the clock."""


class StepLayout:
    """Where the micro-batches of an epoch lie; the same on all ranks and at the coordinator.

    Args:
        samples: Positions in the epoch.
        batch: Samples of a rank in a step, as the user gave it.
        parts: Micro-batches of a rank in a step.
        world_size: Number of ranks.
        drop_last: Omit what does not fill a rank's batch.
        done: Positions that were consumed before the epoch was interrupted.

    Raises:
        ValueError: A count is out of range.
    """

    def __init__(
        self, samples: int, batch: int, parts: int, world_size: int, *, drop_last: bool = False,
        done: Iterable[Span] = (),
    ) -> None:  # fmt: skip
        if samples < 0 or not 1 <= parts <= batch or world_size < 1:
            raise ValueError(
                f"{samples} samples in batches of {batch} with {parts} micro-batches on {world_size} ranks; expected "
                "at most one micro-batch for each sample of a batch"
            )
        stop = samples - samples % batch if drop_last else samples
        self.parts, self.world_size = parts, world_size
        self.whole = parts * world_size
        self._spans = without([(0, stop)], done)
        self._ends = list(itertools.accumulate(end - start for start, end in self._spans))
        self.samples = self._ends[-1] if self._ends else 0
        self._per_step = batch * world_size

    @property
    def steps(self) -> int:
        """Steps of the epoch."""
        return -(-self.samples // self._per_step)

    @property
    def total(self) -> int:
        """Micro-batches of the epoch."""
        return (self.steps - 1) * self.whole + self.tasks(self.steps - 1) if self.steps else 0

    def tasks(self, step: int) -> int:
        """Micro-batches of a step; fewer in the last one where it is short."""
        left = self._left(step)
        return self.whole if left >= self._per_step else -(-left * self.whole // self._per_step)

    def spans(self, step: int, task: int) -> tuple[Span, ...]:
        """The positions of a task."""
        count, left = self.tasks(step), min(self._left(step), self._per_step)
        if not 0 <= task < count:
            raise ValueError(f"task {task} of step {step}; expected 0..{count - 1}")
        first = step * self._per_step
        return tuple(self._positions(first + task * left // count, first + (task + 1) * left // count))

    def _left(self, step: int) -> int:
        return max(0, self.samples - step * self._per_step)

    def _positions(self, begin: int, end: int) -> list[Span]:
        found: list[Span] = []
        at = bisect.bisect_right(self._ends, begin)
        while begin < end:
            start, stop = self._spans[at]
            offset = begin - (self._ends[at] - (stop - start))
            count = min(end - begin, stop - start - offset)
            found.append((start + offset, start + offset + count))
            begin, at = begin + count, at + 1
        return joined(found)


def forecast_shares(paces_s: Sequence[float], tasks: int, parts: int) -> tuple[int, ...]:
    """Tasks of every rank at the beginning of a step: the least time of the slowest, equal ones where they are as good.

    Args:
        paces_s: Seconds per task of every rank, NaN where unknown: as the others.
        tasks: Tasks of the step.
        parts: Tasks of every rank in a whole step.
    """
    n = len(paces_s)
    known = [pace_s for pace_s in paces_s if math.isfinite(pace_s) and pace_s > 0.0]
    if tasks < n or not known:
        return _equal(tasks, n, parts)
    usual_s = statistics.median_low(known)
    own_s = [pace_s if math.isfinite(pace_s) and pace_s > 0.0 else usual_s for pace_s in paces_s]
    counts, end_s = _least_time(own_s, tasks)
    equal = _equal(tasks, n, parts)
    equal_s = max(count * pace_s for count, pace_s in zip(equal, own_s, strict=True))
    return equal if equal_s <= (1.0 + _GAIN) * end_s else tuple(counts)


def stolen_makespan(times_s: Array, parts: int) -> Array:
    """Time of steps whose tasks end as early as they can, each rank having at least one: what taking over comes to.

    Args:
        times_s: Seconds of every rank for its own `parts` tasks, shape (..., n_ranks).
        parts: Tasks of a rank.
    """
    pace_s = times_s / parts
    tasks = parts * times_s.shape[-1]
    low_s, high_s = pace_s.max(axis=-1), times_s.max(axis=-1)
    for _ in range(_HALVINGS):
        middle_s = 0.5 * (low_s + high_s)
        done = np.maximum(1.0, np.floor(middle_s[..., None] / pace_s + 1e-9)).sum(axis=-1)
        enough = done >= tasks
        low_s, high_s = np.where(enough, low_s, middle_s), np.where(enough, middle_s, high_s)
    return np.asarray(high_s)


def _least_time(paces_s: Sequence[float], tasks: int) -> tuple[list[int], float]:
    """Counts of at least 1 with the least time of the slowest: one task after the other where it ends first."""
    counts = [1] * len(paces_s)
    heap = [(2.0 * pace_s, rank) for rank, pace_s in enumerate(paces_s)]
    heapq.heapify(heap)
    for _ in range(tasks - len(counts)):
        end_s, rank = heap[0]
        counts[rank] += 1
        heapq.heapreplace(heap, (end_s + paces_s[rank], rank))
    return counts, max(count * pace_s for count, pace_s in zip(counts, paces_s, strict=True))


def _equal(tasks: int, ranks: int, parts: int) -> tuple[int, ...]:
    """`parts` tasks for every rank; what is short goes to all alike."""
    if tasks == parts * ranks:
        return (parts,) * ranks
    return tuple(tasks // ranks + (rank < tasks % ranks) for rank in range(ranks))


class Kind(enum.Enum):
    """Kind of message to a rank."""

    SHARES = "shares"  # How many tasks every rank has of a step; rank i's follow those of rank i - 1.
    RECALL = "recall"  # A task is to be given back, if it is not begun.
    GRANT = "grant"  # A task of another rank is this rank's now.
    CLOSED = "closed"  # All tasks of the step, and of those before it, are begun.


@dataclass(frozen=True, slots=True)
class Action:
    """A message to a rank.

    Attributes:
        rank: The rank.
        kind: What the message says.
        step: The step.
        task: The task, -1 for none.
        counts: Tasks of every rank, for `SHARES`.
    """

    rank: int
    kind: Kind
    step: int
    task: int = -1
    counts: tuple[int, ...] = ()


@dataclass(slots=True)
class _Step:
    """A step of which not all tasks are begun.

    Attributes:
        counts: The shares with which it began.
        queues: Tasks not begun, by rank, in the order in which they are begun.
        begun: Number of tasks begun, by rank.
        free: Tasks of ranks that left.
        asked: Tasks wanted back, and for which rank.
    """

    counts: tuple[int, ...]
    queues: list[deque[int]]
    begun: list[int]
    free: deque[int] = field(default_factory=deque)
    asked: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Worker:
    """State of a rank.

    Attributes:
        opened: It has begun the epoch; before that it gets no messages.
        left: It takes no more tasks.
        step: The step it works on.
        began_s: When it began its present task, NaN where it works on none.
        paces_s: Recent seconds per task.
    """

    opened: bool = False
    left: bool = False
    step: int = 0
    began_s: float = math.nan
    paces_s: deque[float] = field(default_factory=lambda: deque(maxlen=_PACES))

    @property
    def pace_s(self) -> float:
        return statistics.median_low(self.paces_s) if self.paces_s else math.nan


class MicrobatchPool:
    """The tasks of one epoch: which rank has which, and the messages to ranks. Pure; times are seconds on one clock.

    Args:
        layout: Where the tasks lie.
        paces_s: Seconds per task of every rank, NaN where unknown; from earlier epochs.

    Attributes:
        steals: Whether shares follow the ranks' pace and tasks are taken over; else every rank keeps equal ones.
        taken_over: Tasks that were begun by another rank than the one whose share they were in.
    """

    def __init__(self, layout: StepLayout, paces_s: Sequence[float] = ()) -> None:
        self.layout = layout
        self.steals = False
        self.taken_over = 0
        self._ahead = 1  # Steps beyond the present one of which shares are known.
        self._steps: dict[int, _Step] = {}  # Open ones.
        self._made = 0  # Steps that have had shares.
        self._look_at_s = 0.0
        self._ends: list[tuple[float, int]] = []  # When ranks would end, negative, as a heap; and of which step.
        self._ends_of = -1
        self._workers = [_Worker() for _ in range(layout.world_size)]
        for worker, pace_s in zip(self._workers, paces_s, strict=False):
            if math.isfinite(pace_s):
                worker.paces_s.append(pace_s)

    @property
    def paces_s(self) -> list[float]:
        """Seconds per task of every rank, NaN where unknown."""
        return [worker.pace_s for worker in self._workers]

    @property
    def over(self) -> bool:
        """Whether all tasks are begun, or no rank is there that would."""
        closed = self._made == self.layout.steps and not self._steps
        return closed or self.abandoned

    @property
    def abandoned(self) -> bool:
        """Whether all ranks have left the epoch."""
        return all(worker.left for worker in self._workers)

    def queued(self, rank: int, step: int) -> list[int]:
        """Tasks of a step that a rank has and has not begun."""
        found = self._steps.get(step)
        return list(found.queues[rank]) if found is not None else []

    # ---- events ---------------------------------------------------------------------------------------------

    def open(self, rank: int, ahead: int, now_s: float) -> list[Action]:
        """A rank begins the epoch; its workers load `ahead` micro-batches ahead."""
        worker = self._workers[rank]
        if worker.opened:
            return []
        worker.opened = True
        self._ahead = max(self._ahead, 1 + -(-ahead // self.layout.parts))
        closed = [step for step in range(self._made) if step not in self._steps]
        sent = [Action(rank, Kind.CLOSED, closed[-1])] if closed else []
        sent += [Action(rank, Kind.SHARES, step, counts=each.counts) for step, each in sorted(self._steps.items())]
        moved = [  # What changed before it was there: it has lost tasks, as if it had returned them.
            Action(rank, Kind.RECALL, step, task)
            for step, each in sorted(self._steps.items())
            for task in self._first_tasks(each, rank)
            if task not in each.queues[rank]
        ]
        return [*sent, *moved, *self._make_steps()]

    def begin(self, rank: int, step: int, task: int, task_s: float, now_s: float) -> list[Action]:
        """A rank begins a task, or has nothing to work on.

        Args:
            rank: The rank.
            step: The step.
            task: The task, -1 if it has none.
            task_s: Seconds that the task before took it, 0 where there was none.
            now_s: The time.

        Raises:
            ValueError: It does not have that task; nothing has changed.
        """
        worker, found = self._workers[rank], self._steps.get(step)
        if task >= 0 and (found is None or task not in found.queues[rank]):
            raise ValueError(f"rank {rank} begins task {task} of step {step}, which it does not have")
        if task_s > 0.0:
            worker.paces_s.append(task_s)
        worker.step = max(worker.step, step)
        worker.began_s = now_s if task >= 0 else math.nan
        actions: list[Action] = []
        if task >= 0 and found is not None:
            found.queues[rank].remove(task)
            found.begun[rank] += 1
            self.taken_over += task not in self._first_tasks(found, rank)
            actions += self._maybe_close(step)
        if task < 0:
            self._look_at_s = min(self._look_at_s, now_s + self._look_s())
        return [*actions, *self._make_steps(), *self._steal(now_s, rank)]

    def returned(self, rank: int, step: int, task: int, given: bool, now_s: float) -> list[Action]:
        """A rank's answer to a recall: it has given the task back, or has begun it (and says so elsewhere)."""
        found = self._steps.get(step)
        if found is None or task not in found.asked:
            return []
        taker = found.asked.pop(task)
        if not given or task not in found.queues[rank]:
            return self._steal(now_s, taker)
        found.queues[rank].remove(task)
        if self._workers[taker].left:
            found.free.append(task)
            return self._steal(now_s)
        found.queues[taker].append(task)
        return [Action(taker, Kind.GRANT, step, task)]

    def leave(self, rank: int, now_s: float) -> list[Action]:
        """A rank takes no more: what it has not begun is for the others."""
        worker = self._workers[rank]
        if worker.left:
            return []
        worker.left, worker.began_s = True, math.nan
        for found in self._steps.values():
            for task in found.queues[rank]:
                found.asked.pop(task, None)
            found.free.extend(found.queues[rank])
            found.queues[rank].clear()
        return [*self._make_steps(), *self._steal(now_s)]

    def tick(self, now_s: float) -> tuple[list[Action], float]:
        """What time alone brings about, and when to look again (infinite where nothing can come of it)."""
        if not self.steals or now_s < self._look_at_s:
            return [], self._look_at_s if self.steals else math.inf
        self._ends_of = -1
        actions = self._steal(now_s)
        waits = any(self._is_free(rank) and math.isnan(w.began_s) for rank, w in enumerate(self._workers))
        self._look_at_s = now_s + self._look_s() if waits else math.inf
        return actions, self._look_at_s

    # ---- inside ---------------------------------------------------------------------------------------------

    def _first_tasks(self, found: _Step, rank: int) -> range:
        """The tasks that a rank's share of a step began with."""
        first = sum(found.counts[:rank])
        return range(first, first + found.counts[rank])

    def _make_steps(self) -> list[Action]:
        """Shares of the steps that ranks come to next."""
        actions: list[Action] = []
        there = [worker.step for worker in self._workers if worker.opened and not worker.left]
        while self._made < self.layout.steps and there and self._made <= max(there) + self._ahead:
            step, tasks = self._made, self.layout.tasks(self._made)
            self._made += 1
            if self.steals:
                counts = forecast_shares(self.paces_s, tasks, self.layout.parts)
            else:
                counts = _equal(tasks, self.layout.world_size, self.layout.parts)
            numbers = iter(range(tasks))
            queues = [deque(itertools.islice(numbers, count)) for count in counts]
            found = self._steps[step] = _Step(counts, queues, [0] * len(counts))
            actions += [
                Action(rank, Kind.SHARES, step, counts=counts)
                for rank, worker in enumerate(self._workers)
                if worker.opened and not worker.left
            ]
            for rank, worker in enumerate(self._workers):
                if worker.left:
                    found.free.extend(queues[rank])
                    queues[rank].clear()
        return actions

    def _maybe_close(self, step: int) -> list[Action]:
        found = self._steps[step]
        if found.free or any(found.queues):
            return []
        del self._steps[step]
        return [
            Action(rank, Kind.CLOSED, step)
            for rank, worker in enumerate(self._workers)
            if worker.opened and not worker.left
        ]

    def _is_free(self, rank: int) -> bool:
        """Whether a rank has begun all that it has of the step it works on, and none is on its way to it."""
        worker = self._workers[rank]
        found = self._steps.get(worker.step)
        if found is None or not worker.opened or worker.left or found.queues[rank]:
            return False
        return rank not in found.asked.values()

    def _present_pace_s(self, rank: int, now_s: float) -> float:
        """Seconds per task, at least what the present one has taken so far; 0 where nothing is known."""
        worker = self._workers[rank]
        known_s = worker.pace_s
        elapsed_s = now_s - worker.began_s  # NaN where it works on none.
        return max(0.0 if math.isnan(known_s) else known_s, 0.0 if math.isnan(elapsed_s) else elapsed_s)

    def _free_s(self, rank: int, now_s: float) -> float:
        """When a rank ends its present task."""
        began_s = self._workers[rank].began_s
        return now_s if math.isnan(began_s) else max(now_s, began_s + self._present_pace_s(rank, now_s))

    def _look_s(self) -> float:
        """Time from one look at ranks without tasks to the next."""
        known = [pace_s for pace_s in self.paces_s if not math.isnan(pace_s)]
        return max(2.0 * TRANSFER_S, _LOOK * min(known, default=0.0), _LOOK_S * len(self._workers))

    def _steal(self, now_s: float, rank: int = -1) -> list[Action]:
        """What ranks without tasks are given, those first that are free first; with many ranks `rank` alone."""
        actions: list[Action] = []
        if not self.steals and not any(each.free for each in self._steps.values()):
            return actions
        few = len(self._workers) <= _MANY
        among = range(len(self._workers)) if rank < 0 or few else (rank,)
        free = sorted((self._free_s(each, now_s), each) for each in among if self._is_free(each))
        self._ends_of = -1 if few else self._ends_of
        for _, each in free:
            step = self._workers[each].step
            found = self._steps[step]
            if found.free:
                task = found.free.popleft()
                found.queues[each].append(task)
                actions.append(Action(each, Kind.GRANT, step, task))
            elif self.steals:
                actions += self._take_over(each, step, found, now_s)
        return actions

    def _last(self, step: int, found: _Step, now_s: float) -> tuple[float, int]:
        """When the rank would end that would end last, of those that have tasks to give away; and which it is."""
        if self._ends_of != step:
            ranks = range(len(self._workers))
            self._ends_of, self._ends = step, [(-self._end_s(rank, step, found, now_s), rank) for rank in ranks]
            heapq.heapify(self._ends)
        while self._ends:
            before, rank = self._ends[0]
            now = -self._end_s(rank, step, found, now_s)
            if now < math.inf and now <= before:  # As it was, or later.
                return -now, rank
            heapq.heapreplace(self._ends, (now, rank)) if now < math.inf else heapq.heappop(self._ends)
        return -math.inf, -1

    def _take_over(self, rank: int, step: int, found: _Step, now_s: float) -> list[Action]:
        """The last task of the rank that would end last, if this one ends it sooner."""
        end_s, victim = self._last(step, found, now_s)
        # The same reckoning for both, or they would take a task from each other for ever.
        own_s = self._free_s(rank, now_s) + self._present_pace_s(rank, now_s)
        if victim < 0 or victim == rank or own_s + TRANSFER_S >= end_s:
            return []
        task = next(task for task in reversed(found.queues[victim]) if task not in found.asked)
        if not self._workers[victim].opened:
            found.queues[victim].remove(task)
            found.queues[rank].append(task)
            return [Action(rank, Kind.GRANT, step, task)]
        found.asked[task] = rank
        return [Action(victim, Kind.RECALL, step, task)]

    def _end_s(self, rank: int, step: int, found: _Step, now_s: float) -> float:
        """When a rank would end the tasks that it still has of a step; -inf where none can be taken from it."""
        worker, queue = self._workers[rank], found.queues[rank]
        left = sum(task not in found.asked for task in queue)
        if left - (found.begun[rank] == 0) < 1:  # One stays, so that it has a part in the step.
            return -math.inf
        began = worker.step == step
        return (self._free_s(rank, now_s) if began else now_s) + left * self._present_pace_s(rank, now_s)
