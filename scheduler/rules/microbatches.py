"""Micro-batches of a step, taken over by ranks that have done theirs (after EPSP, Zhou et al. 2019).

A step's B samples are cut finer than into the user's micro-batches, in `grain` tasks for each of these. A rank computes
a run of neighbouring tasks in one pass, at most as many as fit in its memory (`scheduler.rules.passes`): every pass has
its fixed cost. Every rank begins a step with a share of the tasks by its pace, divided into passes, of which a
short first one shows whether it has become slow. A rank that has begun all its passes takes over tasks that no one has
begun, from the end of the rank that would end last: as many as it ends by the time T at which all would end if what is
left were divided anew,

    sum over i of tasks that i ends in T - free_i  =  tasks not begun

and at least TRANSFER_S sooner than the other rank would. A pass that takes longer than was expected is expected to take
as long as late ones have taken before. Every rank keeps at least one task of a whole step, so that all take part in its
reduction. The step closes, for all ranks, when every task is begun: nothing is left that could be taken over, and no
rank waits for the message, because the last pass is still to be computed. Shares of the next step are made then, from
the latest times; earlier where workers of the loader load ahead.

Without taking over every rank has equal shares, and its passes are the user's micro-batches.

A task is always in exactly one state: in one rank's queue, free because its rank left, or begun by one rank.
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

from scheduler.rules.leasing import Span
from scheduler.rules.passes import PassTimes, earliest_end, pass_sizes, spread
from scheduler.rules.step_layout import LONGEST, StepLayout

__all__ = ["TRANSFER_S", "Action", "Kind", "MicrobatchPool", "forecast_shares", "moves", "stolen_makespan"]

Array = npt.NDArray[np.float64]

TRANSFER_S = 1e-3
"""Four messages between processes of one host, until a task that was taken over can begin."""

_GAIN = 0.03
"""Least gain of a step's predicted time for which shares are unequal."""

_MOVED, _OFTEN = 1.5, 0.05
"""Change of a rank's time against the others' with which its slowness has moved; part of the steps in which one has."""

_LOOK, _LOOK_S = 0.25, 2e-5
"""Part of the fastest rank's micro-batch after which ranks without tasks are looked at again; at least so long per
rank."""

_MANY = 16
"""Ranks above which what is left of a step is divided anew by the clock, not at every event."""

_AHEAD_S = 4.0 * TRANSFER_S
"""How long before a rank ends its last pass it is given more: so late that what the others do meanwhile is known."""

_NEVER_S = 1e30  # Pace of a rank that takes nothing; infinite ones would make NaN of a product with 0.


def forecast_shares(
    paces_s: Sequence[float], tasks: int, share: int, *, longest: int = 0, fixed: float = 0.0,
    more: Sequence[int] = (),
) -> tuple[int, ...]:  # fmt: skip
    """Tasks of every rank at the beginning of a step: the least time of the slowest, equal ones where they are as good.

    Args:
        paces_s: Seconds per task of every rank, NaN where unknown: as the others.
        tasks: Tasks of the step.
        share: Tasks of every rank in a whole step.
        longest: Most tasks of a pass; 0 for `share`.
        fixed: Time of a pass whatever its size, in tasks.
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
    """Time of steps whose tasks end as early as they can, each rank having at least one: what taking over comes to.

    Args:
        times_s: Seconds of every rank for its own `parts` micro-batches, shape (..., n_ranks).
        parts: Micro-batches of a rank.
        grain: Tasks of a micro-batch.
        fixed_part: Part of these times that does not depend on the batch: that of `parts` passes.
        moving: Whether ranks become slow and fast again, see `moves`: short first passes, which show it, come to passes
            of no more than a batch.
    """
    share = parts * grain
    fixed = share * fixed_part / (1.0 - fixed_part) / parts
    pace_s = times_s / (share + parts * fixed)
    cap = share if moving else LONGEST * share
    return earliest_end(np.zeros_like(pace_s), pace_s, share * times_s.shape[-1], fixed, cap, 1)


def moves(times_s: Array) -> bool:
    """Whether ranks become slow and fast again, so often that short first passes are worth their cost.

    Args:
        times_s: Seconds of every rank in steps that follow each other, shape (n_steps, n_ranks).
    """
    relative = times_s / times_s.min(axis=-1, keepdims=True)
    changes = np.maximum(relative[1:] / relative[:-1], relative[:-1] / relative[1:])
    return bool(len(changes)) and float((changes.max(axis=-1) > _MOVED).mean()) > _OFTEN


def _known(paces_s: Sequence[float]) -> list[float] | None:
    """The paces, those not known as the usual one; None where none is known."""
    known = sorted(pace_s for pace_s in paces_s if math.isfinite(pace_s) and pace_s > 0.0)
    if not known:
        return None
    usual_s = known[(len(known) - 1) // 2]
    return [pace_s if math.isfinite(pace_s) and pace_s > 0.0 else usual_s for pace_s in paces_s]


def _equal(tasks: int, ranks: int, share: int) -> tuple[int, ...]:
    """`share` tasks for every rank; what is short goes to all alike."""
    if tasks == share * ranks:
        return (share,) * ranks
    return tuple(tasks // ranks + (rank < tasks % ranks) for rank in range(ranks))


class Kind(enum.Enum):
    """Kind of message to a rank."""

    SHARES = "shares"  # How many tasks every rank has of a step; rank i's follow those of rank i - 1.
    RECALL = "recall"  # Tasks are to be given back, as far as they are not begun.
    GRANT = "grant"  # Tasks of another rank are this rank's now.
    CLOSED = "closed"  # All tasks of the step, and of those before it, are begun.


@dataclass(frozen=True, slots=True)
class Action:
    """A message to a rank.

    Attributes:
        rank: The rank.
        kind: What the message says.
        step: The step.
        task: The first of the tasks, -1 for none.
        tasks: Their number.
        counts: Tasks of every rank, for `SHARES`.
        sizes: Tasks of each of this rank's passes, likewise.
        fixed: Time of a pass whatever its size, in tasks, likewise.
        first_s: Expected time of its first pass, 0 where it is not known, likewise.
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
    """Tasks wanted back: from which rank, and for which."""

    rank: int
    taker: int
    first: int
    stop: int


@dataclass(slots=True)
class _Division:
    """What is left of a step, divided anew.

    Attributes:
        until_s: How long it is good for.
        counts: Tasks of every rank, so that all would end as early as they can.
        late: Ranks that have more than that, those that would end last first.
    """

    until_s: float
    counts: list[int]
    late: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Step:
    """A step of which not all tasks are begun.

    Attributes:
        counts: The shares with which it began.
        queues: Tasks not begun, by rank, as runs; each is begun from its front and taken over from its end.
        shares: The messages of its shares, by rank.
        began: Whether the rank has begun a pass of it.
        free: Tasks of ranks that left.
        asked: Tasks wanted back.
        divided: The last division of what is left.
    """

    counts: tuple[int, ...]
    queues: list[deque[Span]]
    shares: list[Action]
    began: list[bool]
    free: deque[Span] = field(default_factory=deque)
    asked: list[_Recall] = field(default_factory=list)
    divided: _Division | None = None

    def left(self, rank: int) -> int:
        """Tasks that a rank has not begun, without those wanted back."""
        queued = sum(stop - first for first, stop in self.queues[rank])
        return queued - sum(one.stop - max(one.first, self._front(rank, one)) for one in self.asked if one.rank == rank)

    def _front(self, rank: int, one: _Recall) -> int:
        """The first task that is not begun of those in the run in which a recall is."""
        return next((first for first, stop in self.queues[rank] if stop >= one.stop > first), one.stop)

    def tail(self, rank: int, most: int) -> Span:
        """The last tasks of a rank that can be wanted back: at most so many, of one run."""
        for first, stop in reversed(self.queues[rank]):
            for one in self.asked:
                if one.rank == rank and first < one.stop <= stop:
                    stop = min(stop, max(first, one.first))
            if first < stop:
                return max(first, stop - most), stop
        return 0, 0

    def remove(self, rank: int, gone: Span) -> bool:
        """Take tasks out of a rank's queue; False where they are not all in it."""
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
        """A rank gives these runs back; False, and nothing has changed, where it does not have them all."""
        before = deque(self.queues[rank])
        if not all(first < stop and self.remove(rank, (first, stop)) for first, stop in runs):
            self.queues[rank] = before
            return False
        self.free.extend(runs)
        # Of what was wanted back of them the answer will be that nothing is left.
        kept = [one for one in self.asked if one.rank != rank or not _overlap((one.first, one.stop), runs)]
        self.asked, self.divided = kept, None
        return True


def _overlap(run: Span, runs: Sequence[Span]) -> bool:
    return any(first < run[1] and run[0] < stop for first, stop in runs)


@dataclass(slots=True)
class _Worker:
    """State of a rank.

    Attributes:
        opened: It has begun the epoch; before that it gets no messages.
        left: It takes no more tasks.
        step: The step it works on.
        began_s: When it began its present pass, NaN where it works on none.
        first: The first task of that pass, or of the last one.
        tasks: Its tasks.
        of_step: The step that it is of.
    """

    opened: bool = False
    left: bool = False
    step: int = 0
    began_s: float = math.nan
    first: int = 0
    tasks: int = 0
    of_step: int = 0


def _shortened(shares: Action, count: int) -> Action:
    """The message of a rank's share of which the first so many tasks are left: others were there before it."""
    ends = (min(end, count) for end in itertools.accumulate(shares.sizes, initial=0))
    sizes = tuple(end - begin for begin, end in itertools.pairwise(ends) if begin < end)
    return dataclasses.replace(shares, sizes=sizes)


class MicrobatchPool:
    """The tasks of one epoch: which rank has which, and the messages to ranks. Pure; times are seconds on one clock.

    Args:
        layout: Where the tasks lie.
        times: Times of passes, from earlier epochs.
        epoch: Its number.

    Attributes:
        steals: Whether shares follow the ranks' pace and tasks are taken over; else every rank keeps equal ones.
        taken_over: Tasks that were begun by another rank than the one whose share they were in.
    """

    def __init__(self, layout: StepLayout, times: PassTimes | None = None, epoch: int = 0) -> None:
        self.layout = layout
        self.times = times or PassTimes(layout.world_size)
        self.epoch = epoch
        self.steals = False
        self.taken_over = 0
        self._ahead = 1  # Steps beyond the present one of which shares are known.
        self._loads_ahead = False
        self._steps: dict[int, _Step] = {}  # Open ones.
        self._made = 0  # Steps that have had shares.
        self._look_at_s = 0.0
        self._workers = [_Worker() for _ in range(layout.world_size)]

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
        return [task for run in found.queues[rank] for task in range(*run)] if found is not None else []

    # ---- events ---------------------------------------------------------------------------------------------

    def open(self, rank: int, ahead: int, now_s: float) -> list[Action]:
        """A rank begins the epoch; its workers load `ahead` micro-batches ahead."""
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
        """A rank begins a pass, or has nothing to work on.

        Args:
            rank: The rank.
            step: The step.
            task: The first task of the pass, -1 if it has none.
            task_s: Seconds that the pass before took it, 0 where there was none.
            now_s: The time.
            tasks: Tasks of the pass.
            given: Runs that it has not begun and gives back, because it has become slow: for whom they suit best.

        Raises:
            ValueError: It does not have these tasks; nothing has changed.
        """
        worker, found = self._workers[rank], self._steps.get(step)
        if task >= 0 and (found is None or tasks < 1 or not found.remove(rank, (task, task + tasks))):
            raise ValueError(f"rank {rank} begins {tasks} tasks from {task} of step {step}, which it does not have")
        if given and (found is None or not found.free_all(rank, given)):
            raise ValueError(f"rank {rank} gives back tasks {list(given)} of step {step}, which it does not have")
        if task_s > 0.0 and worker.tasks:
            self.times.note(rank, worker.tasks, task_s, (self.epoch, worker.of_step))
        if all(step > each.step for each in self._workers):  # So the step before was reduced, on all ranks.
            for each in self._workers:
                each.began_s = math.nan
        worker.step = max(worker.step, step)
        worker.began_s = now_s if task >= 0 else math.nan
        actions: list[Action] = []
        if task >= 0 and found is not None:
            worker.first, worker.tasks, worker.of_step = task, tasks, step
            found.began[rank] = True
            first, stop = self._first_run(found, rank)
            self.taken_over += 0 if first <= task < stop else tasks
            actions += self._maybe_close(step)
        else:
            self._look_at_s = min(self._look_at_s, now_s + self._look_s())
        return [*actions, *self._make_steps(now_s), *self._steal(now_s, rank)]

    def returned(self, rank: int, step: int, task: int, given: int, now_s: float) -> list[Action]:
        """A rank's answer to a recall: the last so many of these tasks it has given back, the others it has begun (and
        says so elsewhere). Unasked: a pass that it has said to begin and will not, because it leaves."""
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
        """A rank takes no more: what it has not begun is for the others."""
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
        """What time alone brings about, and when to look again (infinite where nothing can come of it)."""
        if not self.steals or now_s < self._look_at_s:
            return [], self._look_at_s if self.steals else math.inf
        self._look_at_s = math.inf
        actions = self._steal(now_s)
        if any(self._is_free(rank) and math.isnan(w.began_s) for rank, w in enumerate(self._workers)):
            self._look_at_s = min(self._look_at_s, now_s + self._look_s())
        return actions, self._look_at_s

    # ---- shares ---------------------------------------------------------------------------------------------

    def _first_run(self, found: _Step, rank: int) -> Span:
        """The tasks that a rank's share of a step began with."""
        first = sum(found.counts[:rank])
        return first, first + found.counts[rank]

    def _make_steps(self, now_s: float) -> list[Action]:
        """Shares of the steps that ranks come to next."""
        actions: list[Action] = []
        there = [worker.step for worker in self._workers if worker.opened and not worker.left]
        while self._made < self.layout.steps and there and self._made <= max(there) + self._ahead:
            if self.steals and not self._loads_ahead and self._made > max(there) and self._steps:
                break  # Until all is begun: then more is known of the ranks' paces, and there is still time.
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
        """Shares of a step, and passes of the ranks."""
        layout, tasks, n = self.layout, self.layout.tasks(step), self.layout.world_size
        fixed, share, cap = self.times.fixed, layout.share, layout.longest
        paces_s = _known([self._pace_s(rank, now_s) for rank in range(n)]) if self.steals else None
        counts, sizes = _equal(tasks, n, share), []
        if paces_s is not None:
            counts = forecast_shares(paces_s, tasks, share, longest=cap, fixed=fixed)
            first_s = self.times.first_pass_s(np.array(paces_s), np.array(counts), cap)
            sizes = [pass_sizes(c, cap, layout.grain, fixed, first_s / p) for c, p in zip(counts, paces_s, strict=True)]
            more = [len(each) - -(-count // cap) for each, count in zip(sizes, counts, strict=True)]
            if any(more) and fixed:  # Passes cost time, and the others can do more meanwhile.
                counts = forecast_shares(paces_s, tasks, share, longest=cap, fixed=fixed, more=more)
                sizes = [
                    pass_sizes(c, cap, layout.grain, fixed, first_s / p) for c, p in zip(counts, paces_s, strict=True)
                ]
        elif self.steals:  # Nothing is known yet: several passes of different sizes, from which much is learnt.
            sizes = [pass_sizes(count, cap, layout.grain, 0.0, layout.grain) for count in counts]
        else:
            sizes = [self._equal_passes(count) for count in counts]
        begins = list(itertools.accumulate(counts, initial=0))
        queues = [deque([run] if run[0] < run[1] else []) for run in itertools.pairwise(begins)]
        shares = [
            Action(rank, Kind.SHARES, step, counts=counts, sizes=tuple(each), fixed=fixed,
                   first_s=paces_s[rank] * (fixed + each[0]) if paces_s is not None and each else 0.0)
            for rank, each in enumerate(sizes)
        ]  # fmt: skip
        return _Step(counts, queues, shares, [False] * n)

    def _equal_passes(self, count: int) -> list[int]:
        """The user's micro-batches."""
        size = self.layout.grain
        return [min(size, count - first) for first in range(0, count, size)]

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
        """Whether a rank has begun all that it has of the step it works on, and none is on its way to it."""
        worker = self._workers[rank]
        found = self._steps.get(worker.step)
        if found is None or not worker.opened or worker.left or found.queues[rank]:
            return False
        return all(one.taker != rank for one in found.asked)

    def _present_s(self, rank: int, now_s: float) -> float:
        """Time of a rank's present pass as a whole, 0 where nothing is known of it."""
        worker = self._workers[rank]
        expected_s = self.times.expected_s(rank, worker.tasks)
        elapsed_s = now_s - worker.began_s
        return elapsed_s if math.isnan(expected_s) else self.times.likely_s(expected_s, elapsed_s)

    def _pace_s(self, rank: int, now_s: float) -> float:
        """Seconds per task, as its present pass shows; NaN where nothing is known."""
        known_s, worker = self.times.pace_s(rank), self._workers[rank]
        if math.isnan(worker.began_s):
            return known_s
        present_s = self._present_s(rank, now_s) / (self.times.fixed + worker.tasks)
        return max(0.0 if math.isnan(known_s) else known_s, present_s) or math.nan

    def _free_s(self, rank: int, now_s: float) -> float:
        """When a rank ends its present pass."""
        began_s = self._workers[rank].began_s
        return now_s if math.isnan(began_s) else max(now_s, began_s + self._present_s(rank, now_s))

    def _look_s(self) -> float:
        """Time from one look at ranks without tasks to the next."""
        size = self.times.fixed + self.layout.grain
        known = [size * pace_s for rank in range(len(self._workers)) if (pace_s := self.times.pace_s(rank)) > 0.0]
        return max(2.0 * TRANSFER_S, _LOOK * min(known, default=0.0), _LOOK_S * len(self._workers))

    def _steal(self, now_s: float, rank: int = -1) -> list[Action]:
        """What ranks without tasks are given, those first that are free first; with many ranks `rank` alone."""
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
        """Tasks that no rank has: as many as this one ends when all could end, if the ranks' paces are known."""
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
        """What is left of a step divided anew."""
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
                return found.divided  # No rank without tasks would end a single one sooner.
            end_s, counts = spread(start_s, paces_s, tasks, fixed, cap)
            found.divided.counts = counts
            late = (r for r in ranks if left[r] > found.divided.counts[r] and ends_s[r] > end_s + TRANSFER_S)
            found.divided.late = sorted(late, key=lambda rank: -ends_s[rank])
        return found.divided

    def _take_over(self, rank: int, step: int, found: _Step, now_s: float) -> list[Action]:
        """Tasks of the rank that would end last, as many as this one ends when all could end."""
        divided = self._divide(step, found, now_s)
        wanted = min(divided.counts[rank], self.layout.longest)
        for victim in list(divided.late) if wanted > 0 else ():
            left = found.left(victim)
            # One stays, so that it has a part in the step.
            spare = min(left - divided.counts[victim], left - (not found.began[victim]))
            first, stop = found.tail(victim, min(wanted, spare)) if spare > 0 and victim != rank else (0, 0)
            if first < stop:
                divided.counts[rank] -= stop - first
                return [self._ask(step, found, _Recall(victim, rank, first, stop))]
            if spare <= 0:
                divided.late.remove(victim)
        return []

    def _ask(self, step: int, found: _Step, recall: _Recall) -> Action:
        """Ask a rank for tasks; one that has not begun the epoch has not heard of them."""
        run = recall.first, recall.stop
        if not self._workers[recall.rank].opened:
            found.remove(recall.rank, run)
            found.queues[recall.taker].append(run)
            return Action(recall.taker, Kind.GRANT, step, run[0], run[1] - run[0])
        found.asked.append(recall)
        return Action(recall.rank, Kind.RECALL, step, run[0], run[1] - run[0])
