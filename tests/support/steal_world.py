"""A `MicrobatchPool` and simulated ranks on one simulated clock, to evaluate the step times that its rules give."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from scheduler.rules.microbatches import Action, Kind, MicrobatchPool
from scheduler.rules.passes import PassTimes
from scheduler.rules.step_layout import LONGEST, StepLayout, grain

__all__ = ["StealWorld"]

MESSAGE_S = 0.0005
LATE = 1.5  # As in `star_hvd.input.microbatches`.


@dataclass
class _Rank:
    """A rank's state in an epoch."""

    runs: dict[int, deque[tuple[int, int]]] = field(default_factory=dict)  # By step: first task and number of tasks.
    expected_s: dict[int, tuple[float, int, float]] = field(default_factory=dict)  # Of the first pass; tasks, fixed.
    latest: tuple[float, int] = (0.0, 0)  # Time and tasks of the last pass.
    step: int = 0
    closed: int = -1
    busy: bool = False
    idle: bool = False
    whole: bool = False
    last_s: float = 0.0
    passes: int = 0


class StealWorld:
    """See the module's docstring.

    Args:
        slowdown: Maps rank and step to the rank's slowdown.
        fixed_s: Time of a pass independent of its size.
        sample_s: Additional time per sample.
        ranks: Number of ranks.
        batch: Samples of a rank in a step.
        parts: Micro-batches of a batch.
        reduce_s: Time of a step after the last pass.
        jitter: Relative jitter of a pass.
        seed: Random seed of the jitter.

    Attributes:
        times: The fitted pass times, over the epochs.
        steps_s: Time of every step.
        passes: Passes of every step, of all ranks.
        most: Largest number of samples in a pass.
    """

    def __init__(
        self, slowdown: Callable[[int, int], float], *, fixed_s: float, sample_s: float, ranks: int = 4,
        batch: int = 32, parts: int = 4, reduce_s: float = 0.003, jitter: float = 0.02, seed: int = 0, limit: int = 0,
    ) -> None:  # fmt: skip
        self.slowdown, self.fixed_s, self.sample_s = slowdown, fixed_s, sample_s
        self.n, self.batch, self.parts, self.reduce_s, self.jitter = ranks, batch, parts, reduce_s, jitter
        self.random, self.limit = random.Random(seed), limit
        self.times = PassTimes(ranks)
        self.now_s = 0.0
        self.steps_s: list[float] = []
        self.passes: list[int] = []
        self.most = 0
        self._epochs = 0

    def epoch(self, steps: int) -> None:
        """Train an epoch of `steps` steps, every sample once."""
        self._layout = StepLayout(
            steps * self.batch * self.n, self.batch, self.parts, self.n, grain=grain(self.batch, self.parts)
        )
        self._layout.limit_passes(self.limit or LONGEST * self.batch)
        self._pool = MicrobatchPool(self._layout, self.times, self._epochs)
        self._pool.steals = True
        self._epochs += 1
        self._ranks = [_Rank() for _ in range(self.n)]
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._began_s, self._left, self._first = self.now_s, steps, len(self.steps_s)
        seen: set[tuple[int, int]] = set()
        self._seen = seen
        for rank in range(self.n):
            self._up(lambda rank=rank: self._pool.open(rank, 0, self.now_s))
        while self._left:
            self.now_s, _, happen = heapq.heappop(self._events)
            happen()
        assert len(seen) == sum(self._layout.tasks(step) for step in range(steps))

    def _at(self, after_s: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + after_s, next(self._order), happen))

    def _up(self, event: Callable[[], list[Action]]) -> None:
        def arrives() -> None:
            self._send(event())
            self._tick()

        self._at(MESSAGE_S, arrives)

    def _tick(self) -> None:
        actions, again_s = self._pool.tick(self.now_s)
        self._send(actions)
        if self.now_s < again_s < 1e9 and not self._pool.over:
            self._at(again_s - self.now_s, self._tick)

    def _send(self, actions: list[Action]) -> None:
        for action in actions:
            self._at(MESSAGE_S, lambda action=action: self._down(action))

    def _down(self, action: Action) -> None:
        rank = self._ranks[action.rank]
        runs = rank.runs.setdefault(action.step, deque())
        if action.kind is Kind.SHARES:
            first = sum(action.counts[: action.rank])
            for size in action.sizes:
                runs.append((first, size))
                first += size
            if action.sizes:
                rank.expected_s[action.step] = action.first_s, action.sizes[0], action.fixed
        elif action.kind is Kind.RECALL:
            given = self._give_back(runs, action.task, action.task + action.tasks)
            self._up(lambda: self._pool.returned(action.rank, action.step, action.task, given, self.now_s))
        elif action.kind is Kind.GRANT:
            runs.append((action.task, action.tasks))
        else:
            rank.closed = max(rank.closed, action.step)
        self._go_on(action.rank)

    def _give_back(self, runs: deque[tuple[int, int]], first: int, stop: int) -> int:
        given = 0
        for at, (task, size) in reversed(list(enumerate(runs))):
            if task < stop and task + size > first:
                kept = max(0, first - task)
                given += size - kept
                del runs[at]
                if kept:
                    runs.insert(at, (task, kept))
        return given

    def _go_on(self, number: int) -> None:
        rank = self._ranks[number]
        runs = rank.runs.get(rank.step)
        if rank.busy or rank.whole:
            return
        if runs:
            self._begin(number, rank, runs)
        elif rank.closed >= rank.step:
            rank.whole = True
            if all(each.whole for each in self._ranks):
                self._at(self.reduce_s, self._reduced)
        elif not rank.idle:
            rank.idle = True
            self._report(number, -1, 1)

    def _begin(self, number: int, rank: _Rank, runs: deque[tuple[int, int]]) -> None:
        given = self._shorten(rank, runs)
        task, size = runs.popleft()
        step = rank.step
        for each in range(task, task + size):
            assert (step, each) not in self._seen
            self._seen.add((step, each))
        samples = sum(stop - start for start, stop in self._layout.spans(step, task, size))
        self.most = max(self.most, samples)
        rank.busy, rank.idle = True, False
        rank.passes += 1
        self._report(number, task, size, given)
        slowdown = self.slowdown(len(self.steps_s), number)
        time_s = slowdown * (self.fixed_s + self.sample_s * samples) * (1.0 + abs(self.random.gauss(0.0, self.jitter)))
        self._at(time_s, lambda: self._ended(number, time_s, size))

    def _shorten(self, rank: _Rank, runs: deque[tuple[int, int]]) -> list[tuple[int, int]]:
        """Give back what a rank cannot compute in time of a step whose shares were made before it was slow."""
        (last_s, tasks), (expected_s, first, fixed) = rank.latest, rank.expected_s.get(rank.step, (0.0, 0, 0.0))
        task, size = runs[0]
        if not tasks or expected_s <= 0.0:
            return []
        pace_s, expected_s = last_s / (fixed + tasks), expected_s * (fixed + size) / (fixed + first)
        if pace_s * (fixed + size) <= LATE * expected_s:
            return []
        kept = max(1, min(size, int(expected_s / pace_s - fixed)))
        given = [(max(at, task + kept), at + n) for at, n in runs if at + n > task + kept]
        runs.clear()
        runs.append((task, kept))
        rank.expected_s.pop(rank.step)
        return given

    def _report(self, number: int, task: int, tasks: int, given: Sequence[tuple[int, int]] = ()) -> None:
        rank = self._ranks[number]
        step, last_s, rank.last_s = rank.step, rank.last_s, 0.0
        self._up(lambda: self._pool.begin(number, step, task, last_s, self.now_s, tasks, list(given)))

    def _ended(self, number: int, time_s: float, size: int) -> None:
        rank = self._ranks[number]
        rank.busy, rank.last_s, rank.latest = False, time_s, (time_s, size)
        expected_s, first, fixed = rank.expected_s.pop(rank.step, (0.0, 1, 0.0))
        expected_s *= (fixed + size) / (fixed + first)
        runs = rank.runs[rank.step]
        if runs and time_s > LATE * expected_s > 0.0:
            self._give_up(number, runs)
        self._go_on(number)

    def _give_up(self, number: int, runs: deque[tuple[int, int]]) -> None:
        rank = self._ranks[number]
        given, step, last_s = [(task, task + size) for task, size in runs], rank.step, rank.last_s
        runs.clear()
        rank.idle, rank.last_s = True, 0.0
        self._up(lambda: self._pool.begin(number, step, -1, last_s, self.now_s, 1, given))

    def _reduced(self) -> None:
        self.steps_s.append(self.now_s - self._began_s)
        self.passes.append(sum(rank.passes for rank in self._ranks))
        self._began_s, self._left = self.now_s, self._left - 1
        for rank in self._ranks:
            rank.whole, rank.idle, rank.passes = False, False, 0
            rank.step += 1
        if not self._left:  # As `MicrobatchStock.next_step`: the times of an epoch's last passes.
            for number, rank in enumerate(self._ranks):
                self._send(self._pool.begin(number, rank.step, -1, rank.last_s, self.now_s))
        if self._left:
            for number in range(self.n):
                self._go_on(number)
