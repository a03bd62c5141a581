"""The work queue of an epoch: ranges of positions for whichever rank asks next.

Every rank makes the same permutation of the samples from (seed, epoch); the queue hands out ranges of
positions in it and nothing else. A rank that is twice as slow asks half as often and gets half as much, so
all ranks end together without anybody measuring speeds, except for the tail: a rank four times slower that
takes one of the last batches lets the others wait for three of their batch times. The queue therefore
declines a rank whose next batch would end after the others could have drained the rest.

Declining is a bet on the others. It only counts ranks that have taken something in this epoch, are not
declined, finished or gone, and are not long overdue; without such a rank nobody is ever declined. A declined
rank may ask again and is judged anew, so samples that a dying rank leaves behind find a taker as long as
anybody asks.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

__all__ = ["WorkQueue"]

_OVERDUE = 3.0
"""A rank that has not asked for this many of its batch times is not counted on: it may be dead. Three, so
that a step of validation or a pause of the collector does not make everybody doubt it."""

_INTERVALS = 5
"""Recent intervals whose median is a rank's learned time per batch: the fewest that outvote two outliers."""


@dataclass(slots=True)
class _Taker:
    """What the queue knows of one rank.

    Attributes:
        held: Ranges taken and not confirmed, oldest first.
        took_s: When the rank last took a range, seconds; NaN before.
        intervals_s: Recent times between takes.
        forecast_s: Seconds per batch as told by `forecast`, NaN where nobody did.
        ended: Told or said that the epoch is over for it, declined, or gone.
    """

    held: deque[tuple[int, int]] = field(default_factory=deque)
    took_s: float = math.nan
    intervals_s: deque[float] = field(default_factory=lambda: deque(maxlen=_INTERVALS))
    forecast_s: float = math.nan
    ended: bool = False

    @property
    def batch_s(self) -> float:
        """Seconds a batch takes the rank; NaN where unknown."""
        if not math.isnan(self.forecast_s):
            return self.forecast_s
        return statistics.median(self.intervals_s) if self.intervals_s else math.nan


class WorkQueue:
    """Hands every position of an epoch out exactly once.

    Not thread-safe: its owner, the coordinator, calls it from one thread. Times are seconds on one clock.

    Args:
        n_samples: Positions in the epoch.
        batch_size: Positions in a range; the last range of the epoch may be shorter.
        world_size: Number of ranks.
        drop_last: Leave the positions of a short last range out.
        prefetch: Ranges a rank holds beyond the one it works on. With 1 a rank asks for its next range when
            it begins a batch, so no round trip stands between two batches; a take then confirms the range
            before the last.
        split_tail: Near the end give a slow rank the part of a batch that it can finish in time, rather than
            decline it. Off by default: short batches suit neither batch normalization nor `drop_last`.

    Raises:
        ValueError: A count out of range.
    """

    def __init__(
        self,
        n_samples: int,
        batch_size: int,
        world_size: int,
        *,
        drop_last: bool = False,
        prefetch: int = 0,
        split_tail: bool = False,
    ) -> None:
        for name, value, least in (
            ("n_samples", n_samples, 0),
            ("batch_size", batch_size, 1),
            ("world_size", world_size, 1),
            ("prefetch", prefetch, 0),
        ):
            if value < least:
                raise ValueError(f"work queue {name} is {value}; expected at least {least}")
        self.batch_size = batch_size
        self.stop = n_samples - n_samples % batch_size if drop_last else n_samples
        self._next = 0
        self._returned: deque[tuple[int, int]] = deque()
        self._prefetch = prefetch
        self._split_tail = split_tail
        self._takers = [_Taker() for _ in range(world_size)]

    @property
    def remaining(self) -> int:
        """Positions that no rank holds and nobody has finished."""
        return self.stop - self._next + sum(stop - start for start, stop in self._returned)

    @property
    def finished(self) -> bool:
        """Whether every position was handed out and confirmed; only then can no death undo it."""
        return self.remaining == 0 and not any(taker.held for taker in self._takers)

    def take(self, rank: int, now_s: float) -> tuple[int, int] | None:
        """The next range for a rank.

        It confirms the ranges the rank took before, except the last `prefetch` ones.

        Args:
            rank: The rank that asks.
            now_s: The time.

        Returns:
            (start, stop), or `None` when the epoch is over for this rank: nothing is left, or others finish it
            before this rank could finish one more batch. It should then finish what it holds and call `done`.
            It may ask again until `finished`, for what came back or nobody fetched.
        """
        taker = self._taker(rank)
        while len(taker.held) > self._prefetch:
            start, stop = taker.held.popleft()
            if taker.took_s < now_s:
                # Only a take that confirms a batch ends one: filling the prefetch at the start says nothing.
                taker.intervals_s.append((now_s - taker.took_s) * self.batch_size / (stop - start))
        size = self._share(rank, now_s)
        if size == 0:
            taker.ended = True
            return None
        taker.ended = False
        taker.took_s = now_s
        taker.held.append(self._pop(size))
        return taker.held[-1]

    def done(self, rank: int) -> None:
        """Confirm all ranges of a rank, which will not ask again."""
        taker = self._taker(rank)
        taker.held.clear()
        taker.ended = True

    def give_back(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Put the unconfirmed ranges of a rank that disappeared back, first in line.

        Should the rank turn up again, it must forget those ranges: they belong to others now.

        Returns:
            The ranges put back.
        """
        taker = self._taker(rank)
        ranges = tuple(taker.held)
        self._returned.extendleft(reversed(ranges))
        taker.held.clear()
        taker.ended = True
        return ranges

    def forecast(self, rank: int, seconds_per_batch: float) -> None:
        """Say how long a batch takes a rank; it goes before what the queue learned from the intervals of
        takes.

        Raises:
            ValueError: Not a positive number. NaN withdraws the forecast.
        """
        if not math.isnan(seconds_per_batch) and not 0.0 < seconds_per_batch < math.inf:
            raise ValueError(f"forecast of rank {rank} is {seconds_per_batch} s; expected a positive number")
        self._taker(rank).forecast_s = seconds_per_batch

    def _taker(self, rank: int) -> _Taker:
        if not 0 <= rank < len(self._takers):
            raise ValueError(f"rank {rank} asked for work; expected 0 <= rank < {len(self._takers)}")
        return self._takers[rank]

    def _pop(self, size: int) -> tuple[int, int]:
        """The first `size` positions in line: given back ones first, never across two ranges."""
        if self._returned:
            start, end = self._returned.popleft()
            if end - start > size:
                self._returned.appendleft((start + size, end))
            return start, min(end, start + size)
        start = self._next
        self._next = min(self.stop, start + size)
        return start, self._next

    def _share(self, rank: int, now_s: float) -> int:
        """Positions to hand to a rank now, 0 to decline it."""
        if self.remaining == 0:
            return 0
        taker = self._takers[rank]
        batch_s = taker.batch_s
        if math.isnan(batch_s):
            return self.batch_size
        begin = now_s + len(taker.held) * batch_s
        if not self._drained(rank, now_s, begin + batch_s):
            return self.batch_size
        if not self._split_tail:
            return 0
        return self._part(rank, now_s, begin, batch_s)

    def _part(self, rank: int, now_s: float, begin: float, batch_s: float) -> int:
        """The largest part of a batch that ends before the others have drained the rest, in samples."""
        low, high = 0, self.batch_size
        while high - low > 1:
            middle = (low + high) // 2
            if self._drained(rank, now_s, begin + batch_s * middle / self.batch_size):
                high = middle
            else:
                low = middle
        return low

    def _drained(self, rank: int, now_s: float, end_s: float) -> bool:
        """Whether the other ranks can finish all that remains by `end_s`, each at its own pace."""
        batches = 0
        needed = len(self._returned) + math.ceil((self.stop - self._next) / self.batch_size)
        for other, taker in enumerate(self._takers):
            batch_s = taker.batch_s
            if other == rank or taker.ended or math.isnan(taker.took_s) or math.isnan(batch_s):
                continue
            if now_s - taker.took_s > _OVERDUE * batch_s:
                continue
            free = max(now_s, taker.took_s + len(taker.held) * batch_s)
            share = (end_s - free) / batch_s + 1e-9
            if share >= needed:  # Infinite, maybe, where a batch takes next to nothing.
                return True
            if share >= 1.0:  # Minus infinity, maybe, where it takes for ever.
                batches += math.floor(share)
        return batches >= needed
