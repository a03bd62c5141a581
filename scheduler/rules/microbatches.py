"""Micro-batches of a step, taken over by ranks that have finished theirs (after EPSP, Zhou et al. 2019).

The samples of a step are cut finer than the user's micro-batches: each micro-batch is `grain` tasks. A rank computes a
run of adjacent tasks in one pass, at most as many as fit in its memory (`scheduler.rules.passes`), because every pass
has a fixed cost. Each rank starts a step with a share of the tasks that follows its pace, divided into passes; a short
first pass shows whether the rank has become slow. A rank that has started all its passes takes over unstarted tasks
from the end of the queue of the rank that would end last: as many as it can end by the time T at which all ranks would
end if the rest of the step were divided again,

    sum over i of tasks that i ends in T - free_i  =  tasks not started

provided that the other rank would end more than TRANSFER_S after T. A pass that exceeds its expected time is expected
to take as long as earlier late passes. Every rank keeps at least one task of a whole step, so that all take part in its
reduction. The step closes for all ranks when every task is started: nothing is left to take over, and no rank waits for
the message, because the last pass is still being computed. The shares of the next step are then made from the latest
times; earlier if the loader's workers load ahead.

When no tasks are taken over, all ranks have equal shares, and their passes are the user's micro-batches; in a short
last step equally many of at most that size, if there are tasks enough.

A task is always in exactly one state: in one rank's queue, free because its rank left or gave it back, or started by
one rank.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from scheduler.rules.passes import PassTimes, earliest_end, pass_sizes, spread
from scheduler.rules.runs import Span
from scheduler.rules.step_layout import LONGEST, StepLayout
from scheduler.stats import lower_median

__all__ = [
    "TRANSFER_S", "Action", "Kind", "MicrobatchPool", "equal_passes", "forecast_shares", "moves", "stolen_makespan"
]  # fmt: skip

Array = npt.NDArray[np.float64]

TRANSFER_S = 1e-3
"""Four messages between processes of one host: the time until a task that was taken over can start."""

_GAIN = 0.03
"""Least relative gain of a step's predicted time for which shares are made unequal."""

_MOVED, _OFTEN = 1.5, 0.05
"""`_MOVED`: change of a rank's relative time between steps that counts as a change of its slowness. `_OFTEN`: fraction
of steps with such a change above which slowness counts as moving."""

_LOOK, _LOOK_S = 0.25, 2e-5
"""Interval after which ranks without tasks are reconsidered: a fraction of the fastest rank's micro-batch time, and at
least so many seconds per rank."""

_MANY = 16
"""Above this many ranks the rest of a step is divided again at intervals, not at every event."""

_AHEAD_S = 4.0 * TRANSFER_S
"""How long before the end of its last pass a rank is given more: as late as possible, when the others' progress is
known."""

_NEVER_S = 1e30  # Pace of a rank that takes no tasks; an infinite one would give NaN when multiplied by 0.


def forecast_shares(
    paces_s: Sequence[float], tasks: int, share: int, *, longest: int = 0, fixed: float = 0.0,
    more: Sequence[int] = (),
) -> tuple[int, ...]:  # fmt: skip
    """Return each rank's tasks at the start of a step: minimal time of the slowest rank, equal shares if as good.

    Shares are equal unless unequal ones shorten the step by more than `_GAIN`.

    Args:
        paces_s: Seconds per task of every rank; NaN if unknown, which counts as the lower median of the known ones.
        tasks: Tasks of the step.
        share: Tasks of every rank in a whole step.
        longest: Most tasks of a pass; 0 for `share`.
        fixed: Fixed time of a pass, in tasks.
        more: Passes of every rank beyond the fewest.
    """
    n, cap = len(paces_s), longest or share
    own_s = _known(paces_s)
    if tasks < n or own_s is None:
        return _equal(tasks, n, share)
    before_s = [count * fixed * pace_s for count, pace_s in zip(more or [0] * n, own_s, strict=True)]
    end_s, counts = spread(before_s, own_s, tasks, fixed, cap, 1)
    equal = _equal(tasks, n, share)
    equal_s = max(
        first_s + (fixed * -(-count // cap) + count) * pace_s
        for count, pace_s, first_s in zip(equal, own_s, before_s, strict=True)
    )
    return equal if equal_s <= (1.0 + _GAIN) * end_s else tuple(counts)


def stolen_makespan(
    times_s: Array, parts: int, *, grain: int = 1, fixed_part: float = 0.0, moving: bool = False
) -> Array:
    """Return the time of steps whose tasks end as early as possible, each rank having at least one task.

    This is the effect of taking over.

    Args:
        times_s: Seconds of every rank for its own `parts` micro-batches, shape (..., n_ranks).
        parts: Micro-batches of a rank.
        grain: Tasks of a micro-batch.
        fixed_part: Fraction of these times that does not depend on the batch size: the fixed cost of `parts` passes.
        moving: Whether ranks become slow and fast again (see `moves`). The short first passes that detect it are
            modelled by passes of at most one batch.
    """
    share = parts * grain
    fixed = share * fixed_part / (1.0 - fixed_part) / parts
    pace_s = times_s / (share + parts * fixed)
    cap = share if moving else LONGEST * share
    return earliest_end(np.zeros_like(pace_s), pace_s, share * times_s.shape[-1], fixed, cap, 1)


def moves(times_s: Array) -> bool:
    """Return whether ranks become slow and fast again so often that short first passes are worth their cost.

    Args:
        times_s: Seconds of every rank in consecutive steps, shape (n_steps, n_ranks).
    """
    relative = times_s / times_s.min(axis=-1, keepdims=True)
    changes = np.maximum(relative[1:] / relative[:-1], relative[:-1] / relative[1:])
    return bool(len(changes)) and float((changes.max(axis=-1) > _MOVED).mean()) > _OFTEN


def _known(paces_s: Sequence[float]) -> list[float] | None:
    """The paces, with unknown ones replaced by the lower median of the known; None if none is known."""
    known = [pace_s for pace_s in paces_s if math.isfinite(pace_s) and pace_s > 0.0]
    if not known:
        return None
    usual_s = lower_median(known)
    return [pace_s if math.isfinite(pace_s) and pace_s > 0.0 else usual_s for pace_s in paces_s]


def _equal(tasks: int, ranks: int, share: int) -> tuple[int, ...]:
    """Equal counts: `share` tasks for every rank in a whole step, else the tasks divided evenly."""
    if tasks == share * ranks:
        return (share,) * ranks
    return tuple(tasks // ranks + (rank < tasks % ranks) for rank in range(ranks))


def equal_passes(layout: StepLayout) -> bool:
    """Whether all ranks have equally many passes in every step of an epoch in which no tasks are taken over."""
    if not layout.steps:
        return True
    counts = _equal(layout.tasks(layout.steps - 1), layout.world_size, layout.share)
    return len({len(_passes(count, max(counts), layout.grain)) for count in counts}) == 1


def _passes(count: int, most: int, grain: int) -> list[int]:
    """Tasks of each pass, at most a micro-batch: as many passes as a rank with `most` tasks has, if each has a task.

    Ranks that meet within their passes need equally many, also in a short step, whose tasks may not divide evenly.
    """
    passes = min(count, -(-most // grain))
    ends = [i * count // passes for i in range(passes + 1)] if passes else []
    return [stop - first for first, stop in itertools.pairwise(ends)]


class Kind(enum.Enum):
    """Kind of message to a rank."""

    SHARES = "shares"  # How many tasks of a step every rank has; rank i's follow those of rank i - 1.
    RECALL = "recall"  # The rank is to give back tasks, as far as it has not started them.
    GRANT = "grant"  # Tasks of another rank now belong to this rank.
    CLOSED = "closed"  # All tasks of this step, and of those before it, are started.


@dataclass(frozen=True, slots=True)
class Action:
    """A message to a rank.

    Attributes:
        rank: The rank.
        kind: What the message says.
        step: The step.
        task: The first of the tasks, -1 if there are none.
        tasks: Their number.
        counts: Tasks of every rank; only for `SHARES`.
        sizes: Tasks of each of this rank's passes; only for `SHARES`.
        fixed: Fixed time of a pass, in tasks; only for `SHARES`.
        first_s: Expected time of the rank's first pass, 0 if unknown; only for `SHARES`.
    """

    rank: int
    kind: Kind
    step: int
    task: int = -1
    tasks: int = 1
    counts: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    fixed: float = 0.0
    first_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Recall:
    """Tasks asked back from `rank` on behalf of `taker`."""

    rank: int
    taker: int
    first: int
    stop: int


@dataclass(slots=True)
class _Division:
    """A new division of the unstarted tasks of a step.

    Attributes:
        until_s: Time until which it is valid.
        counts: Tasks of every rank with which all end as early as possible.
        late: Ranks that have more than that, the one that would end last first.
    """

    until_s: float
    counts: list[int]
    late: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Step:
    """A step with tasks that are not started.

    Attributes:
        queues: Unstarted tasks by rank, as runs; a rank starts them from the front, others take over from the end.
        shares: The `SHARES` messages, by rank.
        began: Whether the rank has started a pass of this step.
        free: Tasks that ranks left or gave back.
        asked: Recalls without an answer.
        divided: The last division of the rest of the step.
    """

    queues: list[deque[Span]]
    shares: list[Action]
    began: list[bool]
    free: deque[Span] = field(default_factory=deque)
    asked: list[_Recall] = field(default_factory=list)
    divided: _Division | None = None

    def left(self, rank: int) -> int:
        """Unstarted tasks of a rank, without those asked back."""
        queued = sum(stop - first for first, stop in self.queues[rank])
        return queued - sum(one.stop - max(one.first, self._front(rank, one)) for one in self.asked if one.rank == rank)

    def _front(self, rank: int, one: _Recall) -> int:
        """The first unstarted task of the run that contains a recall."""
        return next((first for first, stop in self.queues[rank] if stop >= one.stop > first), one.stop)

    def tail(self, rank: int, most: int) -> Span:
        """The last tasks of a rank that can be asked back: at most `most`, all of one run."""
        for first, stop in reversed(self.queues[rank]):
            for one in self.asked:
                if one.rank == rank and first < one.stop <= stop:
                    stop = min(stop, max(first, one.first))
            if first < stop:
                return max(first, stop - most), stop
        return 0, 0

    def remove(self, rank: int, gone: Span) -> bool:
        """Remove tasks from a rank's queue. Return False if they are not all in one of its runs."""
        queue = self.queues[rank]
        for at, (first, stop) in enumerate(queue):
            if first <= gone[0] and gone[1] <= stop:
                del queue[at]
                for run in ((gone[1], stop), (first, gone[0])):
                    if run[0] < run[1]:
                        queue.insert(at, run)
                return True
        return False

    def free_all(self, rank: int, runs: Sequence[Span]) -> bool:
        """Free runs that a rank gives back. If it does not have all of them, return False and change nothing."""
        before = deque(self.queues[rank])
        if not all(first < stop and self.remove(rank, (first, stop)) for first, stop in runs):
            self.queues[rank] = before
            return False
        self.free.extend(runs)
        # The rank will answer open recalls of these tasks by returning none.
        kept = [one for one in self.asked if one.rank != rank or not _overlap((one.first, one.stop), runs)]
        self.asked, self.divided = kept, None
        return True


def _overlap(run: Span, runs: Sequence[Span]) -> bool:
    return any(first < run[1] and run[0] < stop for first, stop in runs)


@dataclass(slots=True)
class _Worker:
    """State of a rank.

    Attributes:
        opened: It has started the epoch; before that it gets no messages.
        left: It takes no more tasks.
        step: The step it works on.
        began_s: When it started its current pass, NaN if it works on none.
        first: The first task of the current (or last) pass.
        tasks: Number of tasks of that pass.
        of_step: The step of that pass.
    """

    opened: bool = False
    left: bool = False
    step: int = 0
    began_s: float = math.nan
    first: int = 0
    tasks: int = 0
    of_step: int = 0


def _shortened(shares: Action, count: int) -> Action:
    """A `SHARES` message cut to the rank's first `count` tasks: the ranks that came earlier took over the others."""
    ends = (min(end, count) for end in itertools.accumulate(shares.sizes, initial=0))
    sizes = tuple(end - begin for begin, end in itertools.pairwise(ends) if begin < end)
    return dataclasses.replace(shares, sizes=sizes)


class MicrobatchPool:
    """The tasks of one epoch: who has which, and the messages to ranks. No clock: times are seconds on one clock.

    Args:
        layout: Where the tasks lie.
        times: Times of passes, from earlier epochs.
        epoch: Number of the epoch.

    Attributes:
        steals: Whether shares follow the ranks' pace and tasks are taken over; otherwise shares are equal and fixed.
    """

    def __init__(self, layout: StepLayout, times: PassTimes | None = None, epoch: int = 0) -> None:
        self.layout = layout
        self.times = times or PassTimes(layout.world_size)
        self.epoch = epoch
        self.steals = False
        self._ahead = 1  # Steps beyond the current one whose shares are made.
        self._loads_ahead = False
        self._steps: dict[int, _Step] = {}  # Open ones.
        self._made = 0  # Steps whose shares have been made.
        self._look_at_s = 0.0
        self._workers = [_Worker() for _ in range(layout.world_size)]

    @property
    def over(self) -> bool:
        """Whether all tasks are started, or all ranks have left."""
        closed = self._made == self.layout.steps and not self._steps
        return closed or self.abandoned

    @property
    def abandoned(self) -> bool:
        """Whether all ranks have left the epoch."""
        return all(worker.left for worker in self._workers)

    def queued(self, rank: int, step: int) -> list[int]:
        """Tasks of a step that a rank has and has not started."""
        found = self._steps.get(step)
        return [task for run in found.queues[rank] for task in range(*run)] if found is not None else []

    # ---- events ---------------------------------------------------------------------------------------------

    def open(self, rank: int, ahead: int, now_s: float) -> list[Action]:
        """Record that a rank starts the epoch; its workers load `ahead` micro-batches ahead."""
        worker = self._workers[rank]
        if worker.opened:
            return []
        worker.opened = True
        self._loads_ahead |= ahead > 0
        self._ahead = max(self._ahead, 1 + -(-ahead // self.layout.parts))
        closed = [step for step in range(self._made) if step not in self._steps]
        sent = [Action(rank, Kind.CLOSED, closed[-1])] if closed else []
        sent += [_shortened(each.shares[rank], each.left(rank)) for _, each in sorted(self._steps.items())]
        return [*sent, *self._make_steps(now_s)]

    def begin(
        self, rank: int, step: int, task: int, task_s: float, now_s: float, tasks: int = 1, given: Sequence[Span] = ()
    ) -> list[Action]:
        """Record that a rank starts a pass, or has nothing to work on.

        Args:
            rank: The rank.
            step: The step.
            task: The first task of the pass, -1 if it has none.
            task_s: Seconds the rank's previous pass took, 0 if there was none.
            now_s: The time.
            tasks: Tasks of the pass.
            given: Unstarted runs that the rank gives back because it has become slow; they become free.

        Raises:
            ValueError: It does not have these tasks; nothing has changed.
        """
        worker, found = self._workers[rank], self._steps.get(step)
        before = deque(found.queues[rank]) if found is not None else None
        if task >= 0 and (found is None or tasks < 1 or not found.remove(rank, (task, task + tasks))):
            raise ValueError(f"rank {rank} begins {tasks} tasks from {task} of step {step}, which it does not have")
        if given and (found is None or not found.free_all(rank, given)):
            if found is not None and before is not None:
                found.queues[rank] = before
            raise ValueError(f"rank {rank} gives back tasks {list(given)} of step {step}, which it does not have")
        if task_s > 0.0 and worker.tasks:
            self.times.note(rank, worker.tasks, task_s, (self.epoch, worker.of_step))
        if all(step > each.step for each in self._workers):  # So the previous step was reduced, on all ranks.
            for each in self._workers:
                each.began_s = math.nan
        worker.step = max(worker.step, step)
        worker.began_s = now_s if task >= 0 else math.nan
        actions: list[Action] = []
        if task >= 0 and found is not None:
            worker.first, worker.tasks, worker.of_step = task, tasks, step
            found.began[rank] = True
            actions += self._maybe_close(step)
        else:
            self._look_at_s = min(self._look_at_s, now_s + self._look_s())
        return [*actions, *self._make_steps(now_s), *self._steal(now_s, rank)]

    def returned(self, rank: int, step: int, task: int, given: int, now_s: float) -> list[Action]:
        """Record a rank's answer to a recall: it gives back the last `given` of these tasks.

        It has started the others (and reports that elsewhere). An answer without a recall is a pass that the rank
        announced and will not compute, because it leaves.
        """
        found = self._steps.get(step)
        if found is None:
            return []
        asked = next((one for one in found.asked if (one.rank, one.first) == (rank, task)), None)
        if asked is None:
            worker = self._workers[rank]
            if not math.isnan(worker.began_s) and (worker.of_step, worker.first, worker.tasks) == (step, task, given):
                worker.began_s, worker.tasks = math.nan, 0
                found.free.append((task, task + given))
            return []
        found.asked.remove(asked)
        found.divided = None
        run = (max(asked.first, asked.stop - given), asked.stop)
        if given < 1 or not found.remove(rank, run):
            return self._steal(now_s, asked.taker)
        if self._workers[asked.taker].left:
            found.free.append(run)
            return self._steal(now_s)
        found.queues[asked.taker].append(run)
        return [Action(asked.taker, Kind.GRANT, step, run[0], run[1] - run[0])]

    def leave(self, rank: int, now_s: float) -> list[Action]:
        """Record that a rank takes no more tasks; its unstarted ones go to the others."""
        worker = self._workers[rank]
        if worker.left:
            return []
        worker.left, worker.began_s = True, math.nan
        for found in self._steps.values():
            found.asked = [one for one in found.asked if one.rank != rank]
            found.free.extend(found.queues[rank])
            found.queues[rank].clear()
            found.divided = None
        return [*self._make_steps(now_s), *self._steal(now_s)]

    def tick(self, now_s: float) -> tuple[list[Action], float]:
        """Act on elapsed time. Return the messages and when to call again (infinite if that would change nothing)."""
        if not self.steals or now_s < self._look_at_s:
            return [], self._look_at_s if self.steals else math.inf
        self._look_at_s = math.inf
        actions = self._steal(now_s)
        if any(self._is_free(rank) and math.isnan(w.began_s) for rank, w in enumerate(self._workers)):
            self._look_at_s = min(self._look_at_s, now_s + self._look_s())
        return actions, self._look_at_s

    # ---- shares ---------------------------------------------------------------------------------------------

    def _make_steps(self, now_s: float) -> list[Action]:
        """Make the shares of the steps that ranks reach next."""
        actions: list[Action] = []
        there = [worker.step for worker in self._workers if worker.opened and not worker.left]
        while self._made < self.layout.steps and there and self._made <= max(there) + self._ahead:
            if self.steals and not self._loads_ahead and self._made > max(there) and self._steps:
                break  # Wait until all tasks are started: paces are known better then, and it is still early enough.
            found = self._steps[self._made] = self._make(self._made, now_s)
            actions += [
                each
                for each, worker in zip(found.shares, self._workers, strict=True)
                if worker.opened and not worker.left
            ]
            for rank, worker in enumerate(self._workers):
                if worker.left:
                    found.free.extend(found.queues[rank])
                    found.queues[rank].clear()
            self._made += 1
        return actions

    def _make(self, step: int, now_s: float) -> _Step:
        """Make the shares of a step and the passes of each rank."""
        layout, tasks, n = self.layout, self.layout.tasks(step), self.layout.world_size
        fixed, share, cap = self.times.fixed, layout.share, layout.longest
        paces_s = _known([self._pace_s(rank, now_s) for rank in range(n)]) if self.steals else None
        counts, sizes = _equal(tasks, n, share), []
        if paces_s is not None:
            counts = forecast_shares(paces_s, tasks, share, longest=cap, fixed=fixed)
            self._note_late_passes(now_s)
            first_s = self.times.first_pass_s(np.array(paces_s), np.array(counts), cap, (self.epoch, step))
            sizes = [pass_sizes(c, cap, layout.grain, fixed, first_s / p) for c, p in zip(counts, paces_s, strict=True)]
            more = [len(each) - -(-count // cap) for each, count in zip(sizes, counts, strict=True)]
            if any(more) and fixed:  # Extra passes cost a rank time, in which the others can do more.
                counts = forecast_shares(paces_s, tasks, share, longest=cap, fixed=fixed, more=more)
                sizes = [
                    pass_sizes(c, cap, layout.grain, fixed, first_s / p) for c, p in zip(counts, paces_s, strict=True)
                ]
        elif self.steals:  # Nothing is known yet: several passes of different sizes, to learn pace and fixed cost.
            sizes = [pass_sizes(count, cap, layout.grain, 0.0, layout.grain) for count in counts]
        else:
            sizes = [_passes(count, max(counts), layout.grain) for count in counts]
        begins = list(itertools.accumulate(counts, initial=0))
        queues = [deque([run] if run[0] < run[1] else []) for run in itertools.pairwise(begins)]
        shares = [
            Action(rank, Kind.SHARES, step, counts=counts, sizes=tuple(each), fixed=fixed,
                   first_s=paces_s[rank] * (fixed + each[0]) if paces_s is not None and each else 0.0)
            for rank, each in enumerate(sizes)
        ]  # fmt: skip
        return _Step(queues, shares, [False] * n)

    def _note_late_passes(self, now_s: float) -> None:
        """Let the times know of ranks that are becoming slow: shares are made before their passes have ended."""
        for rank, worker in enumerate(self._workers):
            if not math.isnan(worker.began_s):
                self.times.note_late(rank, worker.tasks, now_s - worker.began_s, (self.epoch, worker.of_step))

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

    # ---- taking over ----------------------------------------------------------------------------------------

    def _is_free(self, rank: int) -> bool:
        """Whether a rank has started all its tasks of the step it works on, and none are on their way to it."""
        worker = self._workers[rank]
        found = self._steps.get(worker.step)
        if found is None or not worker.opened or worker.left or found.queues[rank]:
            return False
        return all(one.taker != rank for one in found.asked)

    def _present_s(self, rank: int, now_s: float) -> float:
        """Expected total time of a rank's current pass; its elapsed time if nothing is known."""
        worker = self._workers[rank]
        expected_s = self.times.expected_s(rank, worker.tasks)
        elapsed_s = now_s - worker.began_s
        return elapsed_s if math.isnan(expected_s) else self.times.likely_s(expected_s, elapsed_s)

    def _pace_s(self, rank: int, now_s: float) -> float:
        """Seconds per task, at least what the current pass shows; NaN if nothing is known."""
        known_s, worker = self.times.pace_s(rank), self._workers[rank]
        if math.isnan(worker.began_s):
            return known_s
        present_s = self._present_s(rank, now_s) / (self.times.fixed + worker.tasks)
        return max(0.0 if math.isnan(known_s) else known_s, present_s) or math.nan

    def _free_s(self, rank: int, now_s: float) -> float:
        """When a rank ends its current pass."""
        began_s = self._workers[rank].began_s
        return now_s if math.isnan(began_s) else max(now_s, began_s + self._present_s(rank, now_s))

    def _look_s(self) -> float:
        """Interval between checks of ranks without tasks."""
        size = self.times.fixed + self.layout.grain
        known = [size * pace_s for rank in range(len(self._workers)) if (pace_s := self.times.pace_s(rank)) > 0.0]
        return max(2.0 * TRANSFER_S, _LOOK * min(known, default=0.0), _LOOK_S * len(self._workers))

    def _steal(self, now_s: float, rank: int = -1) -> list[Action]:
        """Give tasks to ranks without any, in the order in which they become free; with many ranks only to `rank`."""
        actions: list[Action] = []
        if not self.steals and not any(each.free for each in self._steps.values()):
            return actions
        among = range(len(self._workers)) if rank < 0 or len(self._workers) <= _MANY else (rank,)
        free = sorted((self._free_s(each, now_s), each) for each in among if self._is_free(each))
        for free_s, each in free:
            if self.steals and free_s > now_s + _AHEAD_S:
                self._look_at_s = min(self._look_at_s, free_s - _AHEAD_S)
                continue
            step = self._workers[each].step
            found = self._steps[step]
            if found.free:
                actions += self._give_free(each, step, found, now_s)
            elif self.steals:
                actions += self._take_over(each, step, found, now_s)
        return actions

    def _give_free(self, rank: int, step: int, found: _Step, now_s: float) -> list[Action]:
        """Give a rank tasks that no rank has: its part of a new division, or a micro-batch if paces are unknown."""
        wanted = self.layout.grain
        if self.steals and any(counts := self._divide(step, found, now_s).counts):
            wanted = min(counts[rank], self.layout.longest)
        if wanted < 1:
            return []
        first, stop = found.free.popleft()
        end = min(stop, first + wanted)
        if end < stop:
            found.free.appendleft((end, stop))
        found.queues[rank].append((first, end))
        found.divided = None
        return [Action(rank, Kind.GRANT, step, first, end - first)]

    def _divide(self, step: int, found: _Step, now_s: float) -> _Division:
        """Divide the rest of a step again."""
        if found.divided is not None and now_s < found.divided.until_s:
            return found.divided
        ranks = range(len(self._workers))
        left = [found.left(rank) for rank in ranks]
        unowned = [*((one.first, one.stop) for one in found.asked), *found.free]
        tasks = sum(left) + sum(stop - first for first, stop in unowned)
        paces_s = _known([self._pace_s(rank, now_s) for rank in ranks])
        found.divided = _Division(now_s + (self._look_s() if len(ranks) > _MANY else 0.0), [0 for _ in ranks])
        if tasks and paces_s is not None:
            fixed, cap = self.times.fixed, self.layout.longest
            free_s = [
                self._free_s(rank, now_s) - now_s if worker.step == step else 0.0
                for rank, worker in enumerate(self._workers)
            ]
            paces_s = [_NEVER_S if w.left else pace_s for w, pace_s in zip(self._workers, paces_s, strict=True)]
            start_s = [free_s[rank] + (0.0 if found.queues[rank] else TRANSFER_S) for rank in ranks]
            ends_s = [free_s[r] + paces_s[r] * (fixed * -(-left[r] // cap) + left[r]) for r in ranks]
            sooner_s = min((start_s[r] + paces_s[r] * (fixed + 1) for r in ranks if not left[r]), default=math.inf)
            if not found.free and max(ends_s) <= sooner_s + TRANSFER_S:
                return found.divided  # No rank without tasks would end even one task sooner.
            end_s, counts = spread(start_s, paces_s, tasks, fixed, cap)
            found.divided.counts = counts
            late = (r for r in ranks if left[r] > found.divided.counts[r] and ends_s[r] > end_s + TRANSFER_S)
            found.divided.late = sorted(late, key=lambda rank: -ends_s[rank])
        return found.divided

    def _take_over(self, rank: int, step: int, found: _Step, now_s: float) -> list[Action]:
        """Ask the rank that would end last for tasks: as many as this rank has in the new division."""
        divided = self._divide(step, found, now_s)
        wanted = min(divided.counts[rank], self.layout.longest)
        for victim in list(divided.late) if wanted > 0 else ():
            left = found.left(victim)
            # It keeps one task, so that it takes part in the step.
            spare = min(left - divided.counts[victim], left - (not found.began[victim]))
            first, stop = found.tail(victim, min(wanted, spare)) if spare > 0 and victim != rank else (0, 0)
            if first < stop:
                divided.counts[rank] -= stop - first
                return [self._ask(step, found, _Recall(victim, rank, first, stop))]
            if spare <= 0:
                divided.late.remove(victim)
        return []

    def _ask(self, step: int, found: _Step, recall: _Recall) -> Action:
        """Recall tasks from a rank; one that has not started the epoch does not know of them: grant them directly."""
        run = recall.first, recall.stop
        if not self._workers[recall.rank].opened:
            found.remove(recall.rank, run)
            found.queues[recall.taker].append(run)
            return Action(recall.taker, Kind.GRANT, step, run[0], run[1] - run[0])
        found.asked.append(recall)
        return Action(recall.rank, Kind.RECALL, step, run[0], run[1] - run[0])
