"""Recent reports of the ranks, kept for windows and decisions: step reports, arrivals and losses. Pure: no clock.

`History` holds the step reports as arrays, so that a window needs no loop over reports. `Arrivals` separates the time
ranks wait for each other from the time of communication, without comparing clocks. `Losses` are those that the user
records.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from scheduler.diagnosis.window_stats import queueing
from scheduler.records import RankTable, StepReport, StepTimes

__all__ = ["Arrivals", "History", "Losses", "Pauses", "Scale"]

_Floats = npt.NDArray[np.float64]
Scale = Callable[[npt.NDArray[np.int64]], tuple[_Floats, _Floats]]

_COMPUTE, _INPUT, _RUNQUEUE, _LOAD, _WAIT, _CPU, _LATE = range(7)

_USUAL = 16
"""Reports over which a rank's usual time is taken when it has to be recent."""


class History:
    """The last reports of every rank, newest last.

    Args:
        world_size: Number of ranks.
        depth: Reports kept per rank.
    """

    def __init__(self, world_size: int, depth: int) -> None:
        self._values = np.zeros((world_size, 7, depth))
        self._steps = np.zeros((world_size, depth), dtype=np.int64)
        self._counts = np.zeros(world_size, dtype=np.int64)
        self._depth = depth
        self._waits_out = np.zeros(world_size)  # Part of its waits for a processor that the latest table subtracts.

    def append(self, report: StepReport) -> None:
        """Take in a report; the oldest of its rank is dropped once there are `depth`."""
        rank = report.rank
        values, steps = self._values[rank], self._steps[rank]
        values[:, :-1] = values[:, 1:]
        times = report.times
        values[:, -1] = (
            times.compute_s, times.input_s, times.runqueue_s, times.load_s, report.wait_s, times.cpu_s,
            float(report.late),
        )  # fmt: skip
        steps[:-1] = steps[1:]
        steps[-1] = report.step
        if self._counts[rank] < self._depth:
            self._counts[rank] += 1

    def __len__(self) -> int:
        return len(self._counts)

    def __getitem__(self, rank: int) -> list[StepReport]:
        """Return a rank's reports, oldest first; fields that are not kept have their defaults."""
        count = int(self._counts[rank])
        values = self._values[rank, :, self._depth - count :].T.tolist()
        steps = self._steps[rank, self._depth - count :].tolist()
        return [
            StepReport(
                rank=rank,
                step=step,
                times=StepTimes(row[_COMPUTE], row[_INPUT], row[_CPU], row[_RUNQUEUE], row[_LOAD]),
                wait_s=row[_WAIT],
                late=row[_LATE] > 0.0,
            )
            for step, row in zip(steps, values, strict=True)
        ]

    def latest_s(self, rank: int, count: int, *, with_waits: bool = False) -> list[float]:
        """Return a rank's latest compute times in seconds, at most `count`, oldest first.

        Args:
            rank: The rank.
            count: How many of its reports to look at.
            with_waits: Return compute time plus wait, and only for reports with a wait above 0.
        """
        known = min(count, int(self._counts[rank]))
        latest = self._values[rank, :, self._depth - known :]
        if not with_waits:
            return list(latest[_COMPUTE].tolist())
        return list((latest[_COMPUTE] + latest[_WAIT])[latest[_WAIT] > 0.0].tolist())

    def usual_s(self) -> list[float]:
        """Return the median of every rank's latest compute times in seconds; NaN for a rank without reports."""
        recent = self._values[:, _COMPUTE, -_USUAL:]
        counts = np.minimum(self._counts, recent.shape[1])
        if int(counts.min(initial=_USUAL)) == _USUAL:
            middle = (_USUAL - 1) // 2
            two = np.partition(recent, (middle, middle + 1), axis=1)[:, middle : middle + 2]
            return list((0.5 * (two[:, 0] + two[:, 1])).tolist())
        known = np.arange(recent.shape[1]) >= recent.shape[1] - counts[:, None]
        ordered = np.sort(np.where(known, recent, math.inf), axis=1)
        ranks = np.arange(len(counts))
        two_of_each = ordered[ranks, np.maximum(counts - 1, 0) // 2], ordered[ranks, counts // 2 * (counts > 0)]
        return list(np.where(counts > 0, 0.5 * (two_of_each[0] + two_of_each[1]), math.nan).tolist())

    def table(
        self,
        *,
        oversubscribed_share: float,
        starved_share: Sequence[float],
        link_bytes_per_s: Sequence[float],
        silent_s: Sequence[float],
        comm_s: tuple[float, ...],
        scale: Scale | None = None,
    ) -> RankTable:
        """Return the reports as the ranks of a window; later reports do not change it.

        Waits for a processor are subtracted if most ranks have them (`scheduler.diagnosis.window_stats.queueing`), of a
        starved rank only the usual ones. A rank's time is at least that in which it can load a batch.

        Args:
            oversubscribed_share: Median share of waits for a processor above which they are subtracted.
            starved_share: Part of the time that each rank is otherwise known to be kept off its processor, 0 to 1.
            link_bytes_per_s: Rate of every rank's link, NaN if unknown.
            silent_s: Time since each rank's last message.
            comm_s: Recent times of the job's communication, without waiting for others.
            scale: Returns, for every rank and step, the time of a usual batch over the time of the actual batch, for
                computing and for loading.
        """
        runqueue_s, total_s = self._values[:, _RUNQUEUE].sum(axis=1), self._values[:, _COMPUTE].sum(axis=1)
        queued, self._waits_out = queueing(runqueue_s, total_s, self._counts, oversubscribed_share)
        queued_s = self._waits_out[:, None] * self._values[:, _RUNQUEUE]
        compute_s, input_s = self._of_usual_batches(self._values[:, _COMPUTE] - queued_s, scale)
        waiting = _share(input_s.sum(axis=1), (compute_s + queued_s).sum(axis=1))
        return RankTable(
            compute_s=compute_s,
            steps=self._steps.copy(),
            counts=self._counts.copy(),
            input_share=waiting,
            starved_share=np.maximum(queued, starved_share),
            late_share=self._values[:, _LATE].sum(axis=1) / np.maximum(self._counts, 1),
            link_bytes_per_s=np.array(link_bytes_per_s, dtype=np.float64),
            silent_s=np.array(silent_s, dtype=np.float64),
            comm_s=[comm_s] * len(self),
        )

    def newest_s(self, rank: int, scale: tuple[float, float] | None = None) -> float:
        """Return a rank's latest compute time in seconds as the next table will have it, by what the last one knew.

        Args:
            rank: The rank; without a report its time is 0.
            scale: Its factors of that step, for computing and for loading; see `table`.
        """
        latest = self._values[rank, :, -1].tolist()
        compute_s, input_s, load_s = latest[_COMPUTE], latest[_INPUT], latest[_LOAD]
        compute_s -= float(self._waits_out[rank]) * latest[_RUNQUEUE]
        if scale is not None:
            compute_s -= input_s if load_s > 0.0 else 0.0
            compute_s, load_s = scale[0] * max(0.0, compute_s), scale[1] * load_s
        return float(max(compute_s, load_s))

    def _of_usual_batches(self, compute_s: _Floats, scale: Scale | None) -> tuple[_Floats, _Floats]:
        """Return the times that usual batches would have taken, and how much of them is input; at least the loading."""
        input_s, load_s = self._values[:, _INPUT], self._values[:, _LOAD]
        if scale is not None:
            computing, loading = scale(self._steps)
            # Where loading is known it replaces the waits: those of a small batch show nothing of a usual one.
            waited_s = np.where(load_s > 0.0, 0.0, input_s)
            compute_s = computing * np.maximum(0.0, compute_s - input_s + waited_s)
            input_s, load_s = computing * waited_s, loading * load_s
        hidden_s = np.where(load_s > 0.0, np.maximum(0.0, load_s - compute_s), 0.0)
        return compute_s + hidden_s, input_s + hidden_s


def _share(part_s: _Floats, total_s: _Floats) -> _Floats:
    """Return the ratio of one of the reports' times to the compute time, 0 to 1."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(total_s > 0.0, np.minimum(1.0, part_s / total_s), 0.0)


_KEPT = 64


_STEPS_KEPT = 4 * _KEPT
_BOUNDS = 3  # Upper bounds in a row that must be high for a reduction to count as slow.


@dataclass(slots=True)
class _RelaxedStep:
    """A step that may close without some ranks: those that were fresh, and how long they waited."""

    ranks: set[int] = field(default_factory=set)
    last_s: float = math.nan  # When the last of them arrived, on the coordinator's clock.
    held_s: float = 0.0  # How long the step waited for others after that.
    waits_s: dict[int, float] = field(default_factory=dict)


class Arrivals:
    """Recent waits and arrivals of every rank.

    Args:
        world_size: Number of ranks.

    Attributes:
        comm_s: Recent times of a step's communication without waiting for others, oldest first; in lockstep only.
        reduced_s: The same, and upper bounds in steps that may close without some ranks, whose helpers take part.
    """

    def __init__(self, world_size: int) -> None:
        self.comm_s: deque[float] = deque(maxlen=_KEPT)
        self.reduced_s: deque[float] = deque(maxlen=_KEPT)
        self._is_bound = False  # Whether the latest of them is an upper bound.
        self._wait_s: list[deque[float]] = [deque(maxlen=_KEPT) for _ in range(world_size)]
        self._offset_s: list[deque[float]] = [deque(maxlen=_KEPT) for _ in range(world_size)]
        self._first_s: dict[int, float] = {}
        self._step_waits_s: dict[int, dict[int, float]] = {}
        self._relaxed: dict[int, _RelaxedStep] = {}  # The latest two.

    def waited(self, rank: int, wait_s: float) -> None:
        """Note how long a rank was inside a collective."""
        self._wait_s[rank].append(wait_s)

    def in_lockstep(self, rank: int, step: int, wait_s: float) -> None:
        """Note a rank's wait in a step that waited for all ranks.

        Waiting ended at the same moment on all ranks, so the longest wait minus a rank's own is its arrival after the
        first rank.
        """
        if step < 0:
            return  # Reported with a rank's first step: there was no step before it.
        waits = self._step_waits_s.setdefault(step, {})
        waits[rank] = wait_s
        if len(waits) == len(self._wait_s):
            del self._step_waits_s[step]
            self.comm_s.append(min(waits.values()))  # Wait of the last rank to arrive, which waited for no other.
            self.reduced_s.append(self.comm_s[-1])
            self._is_bound = False
            longest_s = max(waits.values())
            for other, other_s in waits.items():
                self._offset_s[other].append(longest_s - other_s)
        elif len(self._step_waits_s) > _STEPS_KEPT:  # Drop the oldest step that not all ranks reported.
            del self._step_waits_s[next(iter(self._step_waits_s))]

    def came(self, rank: int, step: int, now_s: float) -> None:
        """Note the arrival, on the coordinator's clock, of a rank's gradient for a step that may close without it."""
        if step not in self._first_s:
            self._first_s[step] = now_s
            if len(self._first_s) > _STEPS_KEPT:
                del self._first_s[next(iter(self._first_s))]
        self._offset_s[rank].append(now_s - self._first_s[step])

    def fresh(self, rank: int, step: int, wait_s: float, now_s: float) -> None:
        """Note a fresh gradient for a step that may close without some ranks, and the rank's wait in its last step.

        Of the ranks that were fresh in a step, the last one waited for the order to close it and for the reduction.
        """
        known = self._relaxed.setdefault(step, _RelaxedStep())
        known.ranks.add(rank)
        known.last_s = now_s
        before = self._relaxed.get(step - 1)
        # The wait of a rank that was late is that of an earlier step.
        if before is not None and rank in before.ranks:
            before.waits_s[rank] = wait_s
            if len(before.waits_s) == len(before.ranks):
                self.reduced_s.append(max(0.0, min(before.waits_s.values()) - before.held_s))
                self._is_bound = True
        for old in [each for each in self._relaxed if each < step - 1]:
            del self._relaxed[old]

    def closed(self, step: int, now_s: float) -> None:
        """Note that a step was ordered to close: until then it waited for ranks, not for a reduction."""
        if step in self._relaxed:
            self._relaxed[step].held_s = max(0.0, now_s - self._relaxed[step].last_s)

    @property
    def latest_reduced_s(self) -> float:
        """Latest of `reduced_s`, of upper bounds the least of the latest three; NaN if unknown.

        A late rank's helper may take part late, if that rank is starved for example, but hardly so in every step.
        """
        if not self.reduced_s:
            return math.nan
        return min(list(self.reduced_s)[-_BOUNDS:]) if self._is_bound else self.reduced_s[-1]

    @property
    def usual_comm_s(self) -> float:
        """Median of `comm_s`; NaN if unknown."""
        return statistics.median(self.comm_s) if self.comm_s else math.nan

    def offsets_s(self) -> list[float]:
        """Return every rank's median arrival after the first rank of the step; NaN if unknown.

        A gradient that missed its step counts with the time at which it finally arrived.
        """
        return [statistics.median(items) if items else math.nan for items in self._offset_s]

    def waits_s(self) -> list[float]:
        """Return every rank's median time inside the collective, NaN if unknown; the slowest rank has the least."""
        return [statistics.median(items) if items else math.nan for items in self._wait_s]


class Pauses:
    """Times in which all ranks do something else than training: an evaluation, a checkpoint.

    They end with the first report of a step. While the others wait for a straggler there are reports of the step, and
    time that the reporting rank spent in communication is no pause.

    Args:
        world_size: Number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self._last_s = math.inf
        self._own_s = [math.inf] * world_size
        self._step = -1
        self._longest_s = 0.0

    def reported(self, rank: int, step: int, wait_s: float, now_s: float) -> None:
        """Take in the time of a report, and how long its rank waited or communicated since its report before."""
        if step > self._step:
            self._step = step
            self._longest_s = max(self._longest_s, min(now_s - self._last_s, now_s - self._own_s[rank] - wait_s))
        self._last_s = self._own_s[rank] = now_s

    def take_longest_s(self) -> float:
        """Return the longest pause that ended since the last call, the time of a usual step if there was none."""
        longest_s, self._longest_s = self._longest_s, 0.0
        return longest_s


_LOSSES_KEPT = 256


class Losses:
    """Recorded losses, the last 256.

    Attributes:
        values: Means over the ranks, under servers over as many pushes as ranks; infinite if a loss was NaN.
        steps: Their steps.
        usual: Exponential moving average of the finite ones; NaN before the first.
    """

    def __init__(self) -> None:
        self.values: deque[float] = deque(maxlen=_LOSSES_KEPT)
        self.steps: deque[int] = deque(maxlen=_LOSSES_KEPT)
        self.usual = math.nan
        self._pushed: list[float] = []  # Losses of the latest pushes, NaN where the user recorded none.

    def note(self, step: int, loss: float) -> None:
        """Take in the loss of a step; NaN if the user recorded none."""
        if math.isnan(loss):
            return
        self.values.append(loss)
        self.steps.append(step)
        if math.isfinite(loss):
            self.usual = loss if math.isnan(self.usual) else 0.9 * self.usual + 0.1 * loss

    def note_push(self, step: int, loss: float, world_size: int) -> None:
        """Take in the loss of one rank's push; `world_size` pushes, the gradients of a step of `sync`, count as one.

        With a loss per push, the 24 losses in which the accuracy guard looks for a rise would be those of 24 pushes
        only, less than one step of `sync` among many ranks.

        Args:
            step: The global step, as the rank knows it.
            loss: Its loss; NaN if the user recorded none.
            world_size: Number of ranks.
        """
        self._pushed.append(loss)
        if len(self._pushed) < world_size:
            return
        known = [each for each in self._pushed if not math.isnan(each)]
        self._pushed.clear()
        if known:
            self.note(step, statistics.fmean(known) if all(map(math.isfinite, known)) else math.inf)

    def drop_pushes(self) -> None:
        """Forget pushes that are not counted yet: a mean must not mix losses of two plans."""
        self._pushed.clear()
