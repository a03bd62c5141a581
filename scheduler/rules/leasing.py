"""Leases: spans of an epoch that a rank holds ahead of its work, so that it need not request every batch.

All ranks compute the same permutation of the samples from (seed, epoch). A lease is a span of positions in it: whole
batches, which the rank begins in order. Far from the end of the epoch a rank holds `LEASE_S` seconds of work, so that
it can continue while the coordinator does not answer. Toward the end it holds at most half of its share of the
remaining positions (the share is proportional to its speed), so that spans shrink to single batches and all ranks end
together (guided self-scheduling). Further rules:

- A rank gets no batch if the other ranks could finish all free positions before it would finish that batch.
- When no position is free and a rank is idle, spans not yet begun are recalled from ranks that would end later, except
  what they would finish before the idle rank could.
- After a recall, a rank is asked again only if meanwhile a batch was begun, a rank arrived or left, or one became idle:
  otherwise ranks that are not training would keep taking the last positions from each other.
- The epoch ends for no rank while another holds positions it has not begun: a rank may leave its loop at any time, and
  another must take what it returns. All positions are processed as long as one rank continues to the end.

A rank whose worker processes load batches ahead (`ahead`) holds up to twice as many as are being loaded, up to the end
of the epoch, but never more than its share of the remaining positions: with fewer it would have to request each of the
last batches.

With batch shares (`LeaseQueue.entitle`) one number per rank replaces these rules: how many positions of the epoch the
rank gets in total. All ranks then take their share in every step and end at the same step.

A position is always in exactly one state: free, held by one rank, or begun by one rank. A begun position changes state
only if the rank reports that it was never delivered (`undone`: its loop was left while batches were loading).
"""

from __future__ import annotations

import enum
import math
import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

__all__ = ["LEASE_S", "Answer", "LeaseQueue", "Span", "joined", "without"]

LEASE_S = 80.0
"""More than twice the time a coordinator may be unreachable without effect (30 s): a rank requests more when half is
used up, and it may become faster than its measured pace."""

_FIRST = 8
"""Batches of the first lease, before a pace is known."""
_LEAST_PACE_S = 1e-9
"""Lower bound for a pace: requests read in the same poll can have equal timestamps, and ratios of paces must stay
finite."""

_OVERDUE = 3.0
"""A rank that is silent for this many batch times beyond the work it holds may be dead and is not counted on."""

_INTERVALS = 5
"""Recent intervals whose median is a rank's pace: the fewest that tolerate two outliers."""

_SLOW = 1.25
"""A rank whose batch time is at least this multiple of the fastest rank's does not get its share rounded up."""

Span = tuple[int, int]


def joined(spans: Iterable[Span]) -> list[Span]:
    """The same positions in order, in as few spans as possible."""
    found: list[Span] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        elif stop > start:
            found.append((start, stop))
    return found


def without(spans: Iterable[Span], gone: Iterable[Span]) -> list[Span]:
    """The positions of `spans` that are not in `gone`."""
    found, holes = [], joined(gone)
    for start, stop in joined(spans):
        for begin, end in holes:
            if end > start and begin < stop:
                if begin > start:
                    found.append((start, begin))
                start = max(start, end)
        if start < stop:
            found.append((start, stop))
    return found


class Answer(enum.Enum):
    """The answer to a rank that gets no span."""

    LATER = "later"  # It holds enough for now.
    WAIT = "wait"  # It holds nothing, and others may return positions; an answer follows.
    END = "end"  # The epoch is over for it.


@dataclass(slots=True)
class _Holder:
    """State of one rank.

    Attributes:
        held: Spans not begun, in the order in which it begins them.
        begun: Positions it has begun.
        done: The spans of these positions.
        ahead: Batches that its workers load ahead.
        load_s: Seconds from requesting a batch to its arrival, if none is being loaded.
        undelivered: Positions it has begun that may still come back.
        heard_s: When it last asked for or gave back positions, seconds; NaN before.
        paces_s: Recent seconds per batch.
        forecast_s: Seconds per batch given to `forecast`, NaN without one.
        ended: The epoch is over for it, or it left.
        recalled: It was asked to return positions it has not begun, and has not answered.
        keep: Positions that it was told to keep in that recall.
        keeps: Positions it kept beyond `keep` because it has nothing else to work on; they are not recalled again.
        waits: It holds nothing and waits for positions that others return, or for the end.
        idle: Its training thread waits for them as well.
        recalled_at: `LeaseQueue._progress` when it was last asked to return positions.
    """

    held: deque[Span] = field(default_factory=deque)
    begun: int = 0
    done: list[Span] = field(default_factory=list)
    ahead: int = 0
    load_s: float = 0.0
    undelivered: int = 0
    heard_s: float = math.nan
    paces_s: deque[float] = field(default_factory=lambda: deque(maxlen=_INTERVALS))
    forecast_s: float = math.nan
    ended: bool = False
    recalled: bool = False
    keep: int = 0
    keeps: int = 0
    waits: bool = False
    idle: bool = False
    recalled_at: int = -1

    @property
    def pace_s(self) -> float:
        """Seconds per batch, `_LEAST_PACE_S` at least; NaN where unknown."""
        if not math.isnan(self.forecast_s):
            return max(self.forecast_s, _LEAST_PACE_S)
        return max(statistics.median(self.paces_s), _LEAST_PACE_S) if self.paces_s else math.nan


class LeaseQueue:
    """Hands out every position of an epoch exactly once, in spans.

    Not thread-safe: the coordinator calls it from one thread. Times are seconds on one clock.

    Args:
        n_samples: Positions in the epoch.
        batch_size: Positions in a batch; the last of the epoch may be shorter.
        world_size: Number of ranks.
        drop_last: Omit a short last batch.
        lease_s: Seconds of work a rank holds ahead.
        done: Positions that were consumed before the epoch was interrupted; they are not handed out.

    Raises:
        ValueError: A count is out of range.
    """

    def __init__(
        self,
        n_samples: int,
        batch_size: int,
        world_size: int,
        *,
        drop_last: bool = False,
        lease_s: float = LEASE_S,
        done: Iterable[Span] = (),
    ) -> None:
        for name, value, least in (
            ("n_samples", n_samples, 0), ("batch_size", batch_size, 1), ("world_size", world_size, 1)
        ):
            if value < least:
                raise ValueError(f"lease queue {name} is {value}; expected at least {least}")
        self.n_samples, self.batch_size = n_samples, batch_size
        stop = n_samples - n_samples % batch_size if drop_last else n_samples
        self._free: deque[Span] = deque(without([(0, stop)], done))
        self._holders = [_Holder() for _ in range(world_size)]
        self._lease_s = lease_s
        self._totals: tuple[int, ...] | None = None
        self._progress = 0  # Counts the events after which another recall from the same rank may be useful.

    @property
    def free(self) -> int:
        """Positions that no rank holds."""
        return sum(stop - start for start, stop in self._free)

    def held(self, rank: int) -> int:
        """Positions that a rank holds and has not begun, by its last report."""
        return sum(stop - start for start, stop in self._holder(rank).held)

    def forecast(self, rank: int, seconds_per_batch: float) -> None:
        """Set a rank's seconds per batch, which overrides the pace measured from its requests.

        Raises:
            ValueError: The value is not positive and finite.
        """
        if not 0.0 < seconds_per_batch < math.inf:
            raise ValueError(f"forecast of rank {rank} is {seconds_per_batch} s; expected a positive number")
        self._holder(rank).forecast_s = seconds_per_batch

    def entitle(self, totals: Sequence[int] | None) -> None:
        """Set how many positions of the epoch each rank gets in total; None for as many as it can process.

        Raises:
            ValueError: Not one number for each rank.
        """
        if totals is not None and len(totals) != len(self._holders):
            raise ValueError(f"{len(totals)} totals for {len(self._holders)} ranks; expected one for each")
        self._totals = None if totals is None else tuple(totals)

    def ask(
        self,
        rank: int,
        begun: int,
        now_s: float,
        ahead: int = 0,
        load_s: float = 0.0,
        undelivered: int = 0,
        idle: bool = False,
        again: bool = False,
    ) -> Span | Answer:
        """Record a rank's request and return the answer; a rank told `LATER` asks again when it becomes idle.

        Args:
            rank: The rank.
            begun: Positions it has begun in this epoch.
            now_s: The time.
            ahead: Batches that its workers load ahead.
            load_s: Seconds until its next batch would be loaded, if none is being loaded.
            undelivered: Positions it has begun that may still come back.
            idle: Its training thread has nothing to work on.
            again: It repeats its last request; if that was answered, there is no second answer.

        Raises:
            ValueError: `begun` is impossible; nothing is changed.
        """
        holder = self._holder(rank)
        first = math.isnan(holder.heard_s)
        self._confirm(rank, begun, now_s)
        self._progress += first or (idle and not holder.idle)
        holder.idle = idle
        holder.ahead, holder.load_s, holder.undelivered = ahead, load_s, undelivered
        if again and not holder.waits:
            return Answer.WAIT
        if holder.ended:
            return Answer.END
        if holder.recalled:  # Its positions are being returned; the answer follows that.
            holder.waits = True
            return Answer.WAIT
        return self._decide(rank, now_s)

    def give_back(
        self,
        rank: int,
        begun: int,
        now_s: float,
        kept: int = 0,
        undone: Iterable[Span] = (),
        *,
        undelivered: int = 0,
        unasked: bool = False,
    ) -> None:
        """Take back the positions that a rank has not begun.

        Args:
            rank: The rank.
            begun: Positions it has begun in this epoch.
            now_s: The time.
            kept: Positions after the begun ones that it still holds.
            undone: Positions it had begun that were never delivered.
            undelivered: Positions it has begun that may still come back.
            unasked: It was not recalled; a recall already on its way to the rank still needs an answer.

        Raises:
            ValueError: It cannot have begun, kept or not delivered these positions; nothing is changed.
        """
        holder, undone = self._holder(rank), joined(undone)
        count, held = begun - holder.begun, self.held(rank)
        if not 0 <= kept <= max(0, held - count):
            raise ValueError(f"rank {rank} says it keeps {kept} samples; it held {held} and has begun {count} of them")
        if without(undone, [*holder.done, *self._first_held(holder, count)]):
            raise ValueError(f"rank {rank} gives back samples that it had not begun")
        self._confirm(rank, begun, now_s)
        holder.undelivered = undelivered
        if not unasked:
            holder.recalled = False
            holder.keeps = kept if kept > holder.keep else 0
        self._free.extendleft(reversed(self._behind(holder, kept)))
        if undone:
            self._progress += 1
            holder.done = without(holder.done, undone)
            self._free.extendleft(reversed(undone))

    @property
    def over(self) -> bool:
        """Whether the epoch is over for all ranks."""
        return all(holder.ended for holder in self._holders)

    def leave(self, rank: int) -> None:
        """Remove a rank, which begins no more positions; those it holds become free."""
        holder = self._holder(rank)
        self._progress += 1
        self._free.extendleft(reversed(holder.held))
        holder.held.clear()
        holder.undelivered = 0
        holder.ended, holder.recalled, holder.waits = True, False, False

    def answers(self, now_s: float) -> Iterator[tuple[int, Span | Answer]]:
        """Yield answers for the waiting ranks: a span, or the end of the epoch."""
        waiting = [rank for rank, each in enumerate(self._holders) if each.waits and not each.recalled]
        pace_s = {rank: self._holders[rank].pace_s for rank in waiting}
        idle = {rank: self._holders[rank].idle for rank in waiting}
        # Idle ranks first, and among them the fastest first.
        waiting.sort(key=lambda rank: (not idle[rank], 0.0 if math.isnan(pace_s[rank]) else pace_s[rank]))
        for rank in waiting:
            self._holders[rank].waits = False
            answer = self._decide(rank, now_s)
            if answer is not Answer.WAIT:
                yield rank, answer

    def recalls(self, now_s: float) -> Iterator[tuple[int, int]]:
        """Yield the ranks to ask now for positions they have not begun, and how many each of them keeps."""
        waiting = [holder for holder in self._holders if holder.waits]
        if self._totals is not None:
            yield from self._recalls_of_shares()
        elif waiting and not self._free:
            for rank, holder in enumerate(self._holders):
                gains = [each for each in waiting if self._would_gain(each, holder, now_s)]
                if gains and not holder.recalled and holder.recalled_at != self._progress:
                    holder.recalled, holder.recalled_at = True, self._progress
                    holder.keep = self._keeps(holder, min(self._next_s(each, holder, now_s) for each in gains), now_s)
                    yield rank, holder.keep

    def _holder(self, rank: int) -> _Holder:
        if not 0 <= rank < len(self._holders):
            raise ValueError(f"a lease request is from rank {rank}; expected 0 <= rank < {len(self._holders)}")
        return self._holders[rank]

    def _confirm(self, rank: int, begun: int, now_s: float) -> None:
        """Record what a rank has begun since its last report."""
        holder = self._holder(rank)
        count = begun - holder.begun
        if not 0 <= count <= self.held(rank):
            raise ValueError(
                f"rank {rank} reports {begun} samples begun; expected {holder.begun}..{holder.begun + self.held(rank)}"
            )
        if count and holder.begun and now_s > holder.heard_s:  # Not before the first batch has begun.
            holder.paces_s.append((now_s - holder.heard_s) * self.batch_size / count)
        holder.begun, holder.heard_s = begun, now_s
        if count:
            self._progress += 1
            holder.keeps = max(0, holder.keeps - count)
            taken = self._first_held(holder, count)
            holder.held = deque(self._behind(holder, count))
            holder.done = joined([*holder.done, *taken])

    def _first_held(self, holder: _Holder, count: int) -> list[Span]:
        """The first `count` positions that a rank holds."""
        found = []
        for start, end in holder.held:
            if count > 0:
                found.append((start, min(end, start + count)))
                count -= end - start
        return found

    def _behind(self, holder: _Holder, count: int) -> list[Span]:
        """Truncate a rank's held positions to the first `count` and return the rest."""
        first = self._first_held(holder, count)
        rest, skipped = [], count
        for start, end in holder.held:
            begin = min(end, start + max(0, skipped))
            skipped -= end - start
            if begin < end:
                rest.append((begin, end))
        holder.held = deque(first)
        return rest

    def _wanted(self, rank: int) -> int:
        """Positions missing from a rank's share of the epoch, beyond those begun or held; negative if it holds more."""
        assert self._totals is not None
        return self._totals[rank] - self._holders[rank].begun - self.held(rank)

    def _recalls_of_shares(self) -> Iterator[tuple[int, int]]:
        """Yield ranks that hold more than their share while another has too little, and what each keeps."""
        ranks = range(len(self._holders))
        if not self._free and any(self._holders[r].waits and self._wanted(r) > 0 for r in ranks):
            for rank in ranks:
                holder = self._holders[rank]
                held, surplus = self.held(rank), -self._wanted(rank)
                if held > holder.keeps and not holder.recalled and surplus > 0:
                    holder.recalled, holder.keep = True, max(0, held - surplus)
                    yield rank, holder.keep

    def _decide_share(self, rank: int) -> Span | Answer:
        """Give a rank half of what is left of its share of the epoch; toward the end all of it."""
        holder, wanted = self._holders[rank], self._wanted(rank)
        if wanted > 0 and self._free:
            least = max(_FIRST, 2 * holder.ahead) * self.batch_size
            holder.held.append(self._pop(wanted if wanted <= least else max(least, wanted // 2)))
            return holder.held[-1]
        others = [r for r, each in enumerate(self._holders) if not each.ended and r != rank]
        surplus = (self._wanted(other) < 0 and self._holders[other].held for other in others)
        missing = wanted > 0 and any(surplus)  # A recall brings it back from there.
        if (holder.held or holder.undelivered) and not missing:
            return Answer.LATER
        if self._free and all(self._wanted(other) <= 0 for other in others):
            holder.held.append(self._pop(self.batch_size))  # Left over from a rank that left its loop.
            return holder.held[-1]
        if self._free or any(each.held or each.undelivered for each in self._holders):
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
            if wanted < 1 and not held and not self._others_finish_first(rank, now_s):
                wanted = 1
            if wanted >= 1:
                holder.held.append(self._pop(wanted * self.batch_size))
                return holder.held[-1]
        if held or holder.undelivered:
            return Answer.LATER
        if self._free or any(each.held or each.undelivered for each in self._holders):
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
        """Batches a rank may hold: half its share of what is left, at most `lease_s` seconds of its work.

        It may always hold twice the batches its workers load ahead, up to its share. The share is rounded to the
        nearest batch, or down if the rank is slow: a batch left free until the end would be loaded with nothing to
        overlap it.
        """
        own_s = self._holders[rank].pace_s
        left = self._batches(self._free) + sum(self._holds_now(each, now_s) for each in self._holders)
        most, rate, ahead = _FIRST, 1.0, self._holders[rank].ahead
        slowness = 1.0
        if not math.isnan(own_s):
            most = math.ceil(min(self._lease_s / own_s, left))  # The quotient may be infinite.
        for other, each in enumerate(self._holders):
            if other != rank and not each.ended and not self._overdue(each, now_s):
                pace_s = each.pace_s
                ratio = 1.0 if math.isnan(own_s) or math.isnan(pace_s) else own_s / pace_s
                rate, slowness = rate + ratio, max(slowness, ratio)
        share = left / rate
        half = share / 2.0 if rate > 1.0 else share  # All of it if no other rank takes part.
        whole = int(share + 0.5) if slowness < _SLOW else int(share)
        return max(min(max(most, 2 * ahead), int(half)), min(2 * ahead, whole))

    def _holds_now(self, holder: _Holder, now_s: float) -> int:
        """Batches that a rank has probably not begun by now: it reports them only when it requests more."""
        held = self._batches(holder.held)
        if not held or not holder.begun or math.isnan(holder.pace_s):
            return held
        return max(0, held - int(min((now_s - holder.heard_s) / holder.pace_s, float(held))))

    def _overdue(self, holder: _Holder, now_s: float) -> bool:
        """Whether a rank's report is long overdue; never before it has begun the epoch.

        All ranks request their first samples at the end of the epoch before, and may evaluate before they begin.
        """
        pace_s = holder.pace_s
        if not holder.begun or math.isnan(pace_s):
            return False
        return now_s - holder.heard_s > (_OVERDUE + self._batches(holder.held)) * pace_s

    def _ends_s(self, holder: _Holder, now_s: float) -> float:
        """When a rank ends its current batch and all it holds; infinite if its pace is unknown."""
        pace_s = holder.pace_s
        if math.isnan(pace_s):
            return math.inf
        end_s = holder.heard_s + (self._batches(holder.held) + 1) * pace_s
        return end_s if end_s >= now_s else 2.0 * now_s - holder.heard_s  # Overdue: assume as long again.

    def _next_s(self, waiting: _Holder, holder: _Holder, now_s: float) -> float:
        """When a waiting rank could have finished a batch of `holder`, plus one batch time of margin."""
        own_s = waiting.pace_s
        if math.isnan(own_s):  # Pace unknown: assume the holder's, or 0 if the rank has not begun anything.
            own_s = holder.pace_s if waiting.begun else 0.0
        if math.isnan(own_s) and waiting.idle:
            own_s = 0.0
        return now_s + waiting.load_s + (math.inf if math.isnan(own_s) else 2.0 * own_s)

    def _would_gain(self, waiting: _Holder, holder: _Holder, now_s: float) -> bool:
        """Whether the waiting rank would finish the holder's last batch before the holder."""
        if holder is waiting or holder.ended or sum(stop - start for start, stop in holder.held) <= holder.keeps:
            return False
        if not waiting.begun and not waiting.idle:
            return False  # It does not train yet.
        return self._ends_s(holder, now_s) > self._next_s(waiting, holder, now_s)

    def _keeps(self, holder: _Holder, until_s: float, now_s: float) -> int:
        """Positions that a rank has ended or begun before another could take them: its workers may have loaded them."""
        pace_s, left_s = holder.pace_s, until_s - now_s
        if not holder.ahead or math.isnan(pace_s) or math.isnan(left_s) or left_s < pace_s:
            return 0
        batches = min(left_s / pace_s, float(self._batches(holder.held) - 1))  # At least one is returned.
        return int(batches) * self.batch_size

    def _others_finish_first(self, rank: int, now_s: float) -> bool:
        """Whether the others can finish all free positions before this rank would end one more batch."""
        holder = self._holders[rank]
        if math.isnan(holder.pace_s):
            return False
        # A rank requests more when it begins the last batch it holds.
        end_s = now_s + (2.0 if holder.begun else 1.0) * holder.pace_s
        batches, needed = 0, self._batches(self._free)
        for other, each in enumerate(self._holders):
            pace_s = each.pace_s
            if other == rank or each.ended or each.waits or math.isnan(each.heard_s) or math.isnan(pace_s):
                continue  # A waiting rank requests nothing: two ranks that rely on each other would wait forever.
            if self._overdue(each, now_s):
                continue
            share = (end_s - self._ends_s(each, now_s)) / pace_s + 1e-9
            if share >= needed:  # May be infinite.
                return True
            if share >= 1.0:  # False for NaN.
                batches += math.floor(share)
        return batches >= needed
