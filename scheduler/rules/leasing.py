"""Leases: parts of an epoch that a rank holds ahead of its work, so that it need not ask for every batch.

Every rank makes the same permutation of the samples from (seed, epoch). A lease is a span of positions in it, whole
batches that the rank begins in order. Far from the end of the epoch a rank holds what it works on for `LEASE_S`
seconds: it goes on while the coordinator does not answer. Toward the end a rank holds at most half of its share of what
is left, by its own pace, so spans shrink to single batches and all ranks end together (guided self-scheduling). Three
rules see to the rest:

- A rank whose next batch would end after the others could have begun and ended all that is free gets none.
- When nothing is free and a rank has nothing to do, spans not begun are called back from ranks that would end later.
- The epoch is over for no rank while another holds what it has not begun: a rank may leave its loop at any time,
  and what it gives back needs a taker. Nothing can be left over as long as one rank goes on to the end.

Where batch shares are in force (`LeaseQueue.entitle`) one number for every rank replaces all of this, what it gets of
the epoch, so that all ranks take their share in every step and end at the same one.

A position is always in exactly one place: free, held by one rank, or begun by one rank, which it never leaves again.
"""

from __future__ import annotations

import enum
import math
import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

__all__ = ["LEASE_S", "Answer", "LeaseQueue", "Span"]

LEASE_S = 60.0
"""Twice as long as a coordinator may be unreachable without effect: a rank asks when a quarter is used up, and may
become faster than its pace says."""

_FIRST = 8
"""Batches of the first lease, while no pace is known."""

_OVERDUE = 3.0
"""A rank that is silent for this many of its batch times beyond what it holds is not counted on: it may be dead."""

_INTERVALS = 5
"""Recent intervals whose median is a rank's pace: the fewest that outvote two outliers."""

Span = tuple[int, int]


class Answer(enum.Enum):
    """The answer to a rank when there is no span for it."""

    LATER = "later"  # It holds enough for now.
    WAIT = "wait"  # It has nothing, and others hold what may come back; an answer follows.
    END = "end"  # The epoch is over for it.


@dataclass(slots=True)
class _Holder:
    """What is known of one rank.

    Attributes:
        held: Spans not begun, in the order in which it begins them.
        begun: Positions it has begun.
        heard_s: When it last asked or gave back, seconds; NaN before.
        paces_s: Recent seconds per batch.
        forecast_s: Seconds per batch given to `forecast`, NaN where none was.
        ended: The epoch is over for it, or it left.
        recalled: It was asked to give back what it has not begun.
        waits: It has nothing and waits for what others give back, or for the end.
    """

    held: deque[Span] = field(default_factory=deque)
    begun: int = 0
    heard_s: float = math.nan
    paces_s: deque[float] = field(default_factory=lambda: deque(maxlen=_INTERVALS))
    forecast_s: float = math.nan
    ended: bool = False
    recalled: bool = False
    waits: bool = False

    @property
    def pace_s(self) -> float:
        """Seconds per batch; NaN where unknown."""
        if not math.isnan(self.forecast_s):
            return self.forecast_s
        return statistics.median(self.paces_s) if self.paces_s else math.nan


class LeaseQueue:
    """Hands every position of an epoch out exactly once, in spans.

    Not thread-safe: its owner, the coordinator, calls it from one thread. Times are seconds on one clock.

    Args:
        n_samples: Positions in the epoch.
        batch_size: Positions in a batch; the last of the epoch may be shorter.
        world_size: Number of ranks.
        drop_last: Leave the positions of a short last batch out.
        lease_s: Seconds of work a rank holds ahead.

    Raises:
        ValueError: A count out of range.
    """

    def __init__(
        self, n_samples: int, batch_size: int, world_size: int, *, drop_last: bool = False, lease_s: float = LEASE_S
    ) -> None:
        for name, value, least in (
            ("n_samples", n_samples, 0), ("batch_size", batch_size, 1), ("world_size", world_size, 1)
        ):
            if value < least:
                raise ValueError(f"lease queue {name} is {value}; expected at least {least}")
        self.batch_size = batch_size
        stop = n_samples - n_samples % batch_size if drop_last else n_samples
        self._free: deque[Span] = deque([(0, stop)] if stop else [])
        self._holders = [_Holder() for _ in range(world_size)]
        self._lease_s = lease_s
        self._totals: tuple[int, ...] | None = None

    @property
    def free(self) -> int:
        """Positions that no rank holds."""
        return sum(stop - start for start, stop in self._free)

    def held(self, rank: int) -> int:
        """Positions that a rank holds and, by its last report, has not begun."""
        return sum(stop - start for start, stop in self._holder(rank).held)

    def forecast(self, rank: int, seconds_per_batch: float) -> None:
        """Say how long a batch takes a rank; it goes before what was learned from its requests.

        Raises:
            ValueError: Not a positive number.
        """
        if not 0.0 < seconds_per_batch < math.inf:
            raise ValueError(f"forecast of rank {rank} is {seconds_per_batch} s; expected a positive number")
        self._holder(rank).forecast_s = seconds_per_batch

    def entitle(self, totals: Sequence[int] | None) -> None:
        """Say how many positions of the epoch every rank gets in all, None for as many as it gets done.

        Raises:
            ValueError: Not one number for each rank.
        """
        if totals is not None and len(totals) != len(self._holders):
            raise ValueError(f"{len(totals)} totals for {len(self._holders)} ranks; expected one for each")
        self._totals = None if totals is None else tuple(totals)

    def ask(self, rank: int, begun: int, now_s: float) -> Span | Answer:
        """A rank asks for more.

        Args:
            rank: The rank.
            begun: Positions it has begun in this epoch.
            now_s: The time.

        Raises:
            ValueError: It cannot have begun so many; nothing has changed then.
        """
        holder = self._holder(rank)
        self._confirm(rank, begun, now_s)
        if holder.ended:
            return Answer.END
        if holder.recalled:  # What it holds is on its way back, and with it the answer.
            holder.waits = True
            return Answer.WAIT
        return self._decide(rank, now_s)

    def give_back(self, rank: int, begun: int, now_s: float) -> None:
        """A rank has given back all that it has not begun.

        Raises:
            ValueError: It cannot have begun so many; nothing has changed then.
        """
        self._confirm(rank, begun, now_s)
        holder = self._holder(rank)
        holder.recalled = False
        self._free.extendleft(reversed(holder.held))
        holder.held.clear()

    @property
    def over(self) -> bool:
        """Whether the epoch is over for all ranks."""
        return all(holder.ended for holder in self._holders)

    def leave(self, rank: int) -> None:
        """A rank begins nothing more; what it holds goes to the others."""
        holder = self._holder(rank)
        self._free.extendleft(reversed(holder.held))
        holder.held.clear()
        holder.ended, holder.recalled, holder.waits = True, False, False

    def answers(self, now_s: float) -> Iterator[tuple[int, Span | Answer]]:
        """The answers for ranks that wait: a span, or that the epoch is over for them."""
        waiting = [rank for rank, each in enumerate(self._holders) if each.waits and not each.recalled]
        pace_s = {rank: self._holders[rank].pace_s for rank in waiting}
        waiting.sort(key=lambda rank: 0.0 if math.isnan(pace_s[rank]) else pace_s[rank])  # The fastest goes first.
        for rank in waiting:
            self._holders[rank].waits = False
            answer = self._decide(rank, now_s)
            if answer is not Answer.WAIT:
                yield rank, answer

    def recalls(self, now_s: float) -> Iterator[int]:
        """Ranks to be asked now for what they have not begun."""
        waiting = [holder for holder in self._holders if holder.waits]
        if self._totals is not None:
            yield from self._recalls_of_shares()
        elif waiting and not self._free:
            for rank, holder in enumerate(self._holders):
                if not holder.recalled and any(self._would_gain(each, holder, now_s) for each in waiting):
                    holder.recalled = True
                    yield rank

    # ---- inside ---------------------------------------------------------------------------------------------

    def _holder(self, rank: int) -> _Holder:
        if not 0 <= rank < len(self._holders):
            raise ValueError(f"rank {rank} asked for work; expected 0 <= rank < {len(self._holders)}")
        return self._holders[rank]

    def _confirm(self, rank: int, begun: int, now_s: float) -> None:
        """Record what a rank has begun since its last report."""
        holder = self._holder(rank)
        count = begun - holder.begun
        if not 0 <= count <= self.held(rank):
            raise ValueError(
                f"rank {rank} says it has begun {begun} samples; it had begun {holder.begun} and held {self.held(rank)}"
            )
        if count and holder.begun and now_s > holder.heard_s:  # The first interval ends with the first batch's begin.
            holder.paces_s.append((now_s - holder.heard_s) * self.batch_size / count)
        holder.begun, holder.heard_s = begun, now_s
        while count:
            start, stop = holder.held.popleft()
            taken = min(count, stop - start)
            if start + taken < stop:
                holder.held.appendleft((start + taken, stop))
            count -= taken

    def _wanted(self, rank: int) -> int:
        """Positions of its share of the epoch that a rank neither holds nor has begun; below 0 where it holds more."""
        assert self._totals is not None
        return self._totals[rank] - self._holders[rank].begun - self.held(rank)

    def _recalls_of_shares(self) -> Iterator[int]:
        """Ranks that hold more than their share, where another has too little."""
        ranks = range(len(self._holders))
        if not self._free and any(self._holders[r].waits and self._wanted(r) > 0 for r in ranks):
            for rank in ranks:
                holder = self._holders[rank]
                if holder.held and not holder.recalled and self._wanted(rank) < 0:
                    holder.recalled = True
                    yield rank

    def _decide_share(self, rank: int) -> Span | Answer:
        """Half of what a rank still gets of the epoch, toward the end all of it."""
        holder, wanted = self._holders[rank], self._wanted(rank)
        if wanted > 0 and self._free:
            least = _FIRST * self.batch_size
            holder.held.append(self._pop(wanted if wanted <= least else max(least, wanted // 2)))
            return holder.held[-1]
        others = [r for r, each in enumerate(self._holders) if not each.ended and r != rank]
        missing = wanted > 0 and any(self._wanted(other) < 0 for other in others)  # It comes back from there.
        if holder.held and not missing:
            return Answer.LATER
        if self._free and all(self._wanted(other) <= 0 for other in others):
            holder.held.append(self._pop(self.batch_size))  # A rank left its loop, and what it gave back is left over.
            return holder.held[-1]
        if self._free or any(each.held for each in self._holders):
            holder.waits = True
            return Answer.WAIT
        holder.ended = True
        return Answer.END

    def _decide(self, rank: int, now_s: float) -> Span | Answer:
        if self._totals is not None:
            return self._decide_share(rank)
        holder, held = self._holders[rank], self._batches(self._holders[rank].held)
        if self._free:
            wanted = self._allowed(rank, now_s) - held
            if wanted < 1 and not held and not self._drained(rank, now_s):
                wanted = 1
            if wanted >= 1:
                holder.held.append(self._pop(wanted * self.batch_size))
                return holder.held[-1]
        if held:
            return Answer.LATER
        if self._free or any(each.held for each in self._holders):
            holder.waits = True
            return Answer.WAIT
        holder.ended = True
        return Answer.END

    def _batches(self, spans: deque[Span]) -> int:
        return sum(-(-(stop - start) // self.batch_size) for start, stop in spans)

    def _pop(self, count: int) -> Span:
        start, end = self._free.popleft()
        stop = min(end, start + count)
        if stop < end:
            self._free.appendleft((stop, end))
        return start, stop

    def _allowed(self, rank: int, now_s: float) -> int:
        """Batches a rank may hold: half its share of what is left, at most what it works on for the lease's time."""
        own_s = self._holders[rank].pace_s
        left = self._batches(self._free) + sum(self._batches(each.held) for each in self._holders)
        most, rate = _FIRST, 1.0
        if not math.isnan(own_s):
            most = math.ceil(min(self._lease_s / own_s, left))  # Infinite where a batch takes next to nothing.
        for other, each in enumerate(self._holders):
            if other != rank and not each.ended and not self._overdue(each, now_s):
                pace_s = each.pace_s
                rate += 1.0 if math.isnan(own_s) or math.isnan(pace_s) else own_s / pace_s
        return min(most, int(left / rate / 2.0))

    def _overdue(self, holder: _Holder, now_s: float) -> bool:
        """Whether a report of a rank is long overdue; never before its first report."""
        pace_s = holder.pace_s
        if math.isnan(holder.heard_s) or math.isnan(pace_s):
            return False
        return now_s - holder.heard_s > (_OVERDUE + self._batches(holder.held)) * pace_s

    def _ends_s(self, holder: _Holder, now_s: float) -> float:
        """When a rank has ended what it holds and the batch it has begun; infinite where its pace is unknown."""
        pace_s = holder.pace_s
        if math.isnan(pace_s):
            return math.inf
        return max(now_s, holder.heard_s + (self._batches(holder.held) + 1) * pace_s)

    def _would_gain(self, waiting: _Holder, holder: _Holder, now_s: float) -> bool:
        """Whether a rank with nothing to do would end another's next batch before that one came to its end."""
        if holder is waiting or holder.ended or not holder.held:
            return False
        own_s = waiting.pace_s
        return self._ends_s(holder, now_s) > now_s + (0.0 if math.isnan(own_s) else 2.0 * own_s)

    def _drained(self, rank: int, now_s: float) -> bool:
        """Whether the others can end all that is free before this rank would end one batch more."""
        holder = self._holders[rank]
        if math.isnan(holder.pace_s):
            return False
        # A rank asks when it begins the last batch it holds.
        end_s = now_s + (2.0 if holder.begun else 1.0) * holder.pace_s
        batches, needed = 0, self._batches(self._free)
        for other, each in enumerate(self._holders):
            pace_s = each.pace_s
            if other == rank or each.ended or each.waits or math.isnan(each.heard_s) or math.isnan(pace_s):
                continue  # A rank that waits asks no more: two that rely on each other would wait for ever.
            if self._overdue(each, now_s):
                continue
            share = (end_s - self._ends_s(each, now_s)) / pace_s + 1e-9
            if share >= needed:  # Infinite, maybe, where a batch takes next to nothing.
                return True
            if share >= 1.0:  # Not a number, maybe, where it takes for ever.
                batches += math.floor(share)
        return batches >= needed
