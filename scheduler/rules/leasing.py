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

With batch shares (`LeaseQueue.deal`) these rules do not apply: all positions are dealt in rows
(`scheduler.rules.runs`), and every rank holds its part of all steps. All ranks then take their share in every step and
end at the same step; only what a rank gives back, since it leaves its loop for example, is handed out behind that. A
short last row is omitted if short batches are (`LastStep.whole`), as its batches would be a step that some ranks do not
make; if the rows end before the epoch does, it is handed out again.

Where a program draws from several loaders in one loop, a rank may wait for samples that another rank holds, which waits
for something else. Once no rank trains any more (`LeaseQueue.reclaim`), what is not begun goes to those that wait, also
in rows.

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

from scheduler.balance.batch_shares import LastStep
from scheduler.rules.runs import (
    Run,
    Span,
    append,
    behind,
    dealt,
    first,
    joined,
    positions,
    removed,
    run_of,
    samples,
    spans,
    without,
)

__all__ = ["LEASE_S", "Answer", "LeaseQueue"]

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


class Answer(enum.Enum):
    """The answer to a rank that gets no span."""

    LATER = "later"  # It holds enough for now.
    WAIT = "wait"  # It holds nothing, and others may return positions; an answer follows.
    END = "end"  # The epoch is over for it.


@dataclass(slots=True)
class _Holder:
    """State of one rank.

    Attributes:
        held: Positions not begun, in the order in which it begins them.
        begun: Number of positions it has begun.
        done: These positions.
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
        unsent: What it was dealt is sent with the answer to its first request.
        needs: It gets the next free positions, as no rank goes on before it does.
        reclaimed_at: `LeaseQueue._progress` when `reclaim` last asked it to return positions.
    """

    held: list[Run] = field(default_factory=list)
    begun: int = 0
    done: list[Run] = field(default_factory=list)
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
    unsent: bool = False
    needs: bool = False
    reclaimed_at: int = -1

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
        drop_last: Omit a short last batch, where positions are handed out on request.
        lease_s: Seconds of work a rank holds ahead.
        done: Positions that were consumed before the epoch was interrupted; they are not handed out.

    Attributes:
        even: Whether the rest of the epoch is dealt in rows of which every rank has a part.

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
        self._free: deque[Run] = deque(map(run_of, without([(0, stop)], done)))
        self._holders = [_Holder() for _ in range(world_size)]
        self._lease_s = lease_s
        self._omitted: list[Run] = []  # A short last row.
        self._rows = False  # Whether ranks hold their parts of all rows.
        self.even = False
        self._reclaimed = False  # Whether ranks no longer hold their parts as dealt.
        self._progress = 0  # Counts the events after which another recall from the same rank may be useful.

    @property
    def free(self) -> int:
        """Positions that no rank holds."""
        return samples(self._free)

    def held(self, rank: int) -> int:
        """Positions that a rank holds and has not begun, by its last report."""
        return samples(self._holder(rank).held)

    def forecast(self, rank: int, seconds_per_batch: float) -> None:
        """Set a rank's seconds per batch, which overrides the pace measured from its requests.

        Raises:
            ValueError: The value is not positive and finite.
        """
        if not 0.0 < seconds_per_batch < math.inf:
            raise ValueError(f"forecast of rank {rank} is {seconds_per_batch} s; expected a positive number")
        self._holder(rank).forecast_s = seconds_per_batch

    def dealable(self, planned: Sequence[int]) -> bool:
        """Whether `deal` is possible: no rank is about to give positions back, or has begun more than planned."""
        if self._reclaimed and not self.over:
            return False
        return not any(
            each.recalled or (count < each.begun and not each.ended)
            for each, count in zip(self._holders, planned, strict=True)
        )

    def deal(
        self, shares: Sequence[int], planned: Sequence[int], *, last: LastStep | None = None
    ) -> list[tuple[int, list[Run]]]:
        """Deal the rest of the epoch in rows, or end that.

        Every rank keeps what it takes before the change; what it holds beyond that is dealt with what no rank holds.

        Args:
            shares: Positions of each rank in a row; empty to hand positions out on request again.
            planned: Positions of the epoch that each rank takes before the change, those it has begun included.
            last: How a short last row is divided, if it is; in the proportion of the shares by default.

        Returns:
            The ranks to send it to, and what each of them gets behind the first `planned` positions it was given. The
            others get theirs with the answer to their first request.

        Raises:
            ValueError: Not one number for each rank, or not `dealable`; nothing is changed.
        """
        if not len(planned) == len(shares or planned) == len(self._holders):
            raise ValueError(
                f"deal got {len(shares)} shares and {len(planned)} plans; expected one for each of the "
                f"{len(self._holders)} ranks"
            )
        if not self.dealable(planned):
            raise ValueError(f"ranks that take {list(planned)} positions before get no rows; ask `dealable`")
        kept = [max(0, count - each.begun) for each, count in zip(self._holders, planned, strict=True)]
        rest = [run for each, keep in zip(self._holders, kept, strict=True) for run in behind(each.held, keep)]
        pool = [run_of(span) for span in positions([*self._free, *rest, *self._omitted])]
        found: list[list[Run]] = []
        for each, keep in zip(self._holders, kept, strict=True):
            each.held = first(each.held, keep)
            lacks = 0 if each.ended else keep - samples(each.held)  # It would have asked for them.
            found.append(first(pool, lacks))
            pool = behind(pool, lacks)
        self._rows = self.even = bool(shares)
        self._omitted = []
        if shares:
            short, last = samples(pool) % sum(shares), last or LastStep()
            parts = last.parts(short, shares)
            self.even = not short or last.whole or min(parts) > 0
            self._omitted = behind(pool, samples(pool) - short) if last.whole else []
            for own, part in zip(found, dealt(spans(pool), shares, parts), strict=True):
                own += part
            pool = [run for own, each in zip(found, self._holders, strict=True) if each.ended for run in own]
        self._free = deque(pool)
        return [(rank, own) for rank, own in enumerate(found) if self._hold(self._holders[rank], own)]

    @staticmethod
    def _hold(holder: _Holder, own: list[Run]) -> bool:
        """Let a rank hold what it was dealt. Return whether that is to be sent now."""
        if holder.ended:
            return False
        holder.held += own
        holder.unsent = math.isnan(holder.heard_s) and bool(holder.held)
        return not math.isnan(holder.heard_s)

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
    ) -> list[Run] | Answer:
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
        arrives = math.isnan(holder.heard_s)
        self._confirm(rank, begun, now_s)
        self._progress += arrives or (idle and not holder.idle)
        holder.idle = idle
        holder.ahead, holder.load_s, holder.undelivered = ahead, load_s, undelivered
        if holder.unsent:
            holder.unsent = False
            return list(holder.held)
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
    ) -> None:
        """Take back the positions that a rank has not begun.

        Args:
            rank: The rank.
            begun: Positions it has begun in this epoch.
            now_s: The time.
            kept: Positions after the begun ones that it still holds.
            undone: Positions it had begun that were never delivered.
            undelivered: Positions it has begun that may still come back.

        Raises:
            ValueError: It cannot have begun, kept or not delivered these positions; nothing is changed.
        """
        holder, undone = self._holder(rank), joined(undone)
        count, held = begun - holder.begun, self.held(rank)
        if not 0 <= kept <= max(0, held - count):
            raise ValueError(f"rank {rank} says it keeps {kept} samples; it held {held} and has begun {count} of them")
        if removed([*holder.done, *first(holder.held, count)], undone) is None:
            raise ValueError(f"rank {rank} gives back samples that it had not begun")
        self._confirm(rank, begun, now_s)
        holder.undelivered = undelivered
        holder.recalled = False
        holder.keeps = kept if kept > holder.keep else 0
        self._free.extendleft(reversed(behind(holder.held, kept)))
        holder.held = first(holder.held, kept)
        if undone:
            self._progress += 1
            holder.done = removed(holder.done, undone) or []
            self._free.extendleft(run_of(span) for span in reversed(undone))

    @property
    def over(self) -> bool:
        """Whether the epoch is over for all ranks."""
        return all(holder.ended for holder in self._holders)

    def leave(self, rank: int) -> None:
        """Remove a rank, which begins no more positions; those it holds become free."""
        holder = self._holder(rank)
        self._progress += 1
        self._free.extendleft(reversed(holder.held))
        holder.held = []
        holder.undelivered = 0
        holder.ended, holder.recalled, holder.waits, holder.unsent = True, False, False, False

    def answers(self, now_s: float) -> Iterator[tuple[int, list[Run] | Answer]]:
        """Yield answers for the waiting ranks: positions, or the end of the epoch."""
        waiting = [rank for rank, each in enumerate(self._holders) if each.waits and not each.recalled]
        if not self._free and any(each.held or each.undelivered for each in self._holders):
            # The others go on waiting. At the end of an epoch many ranks wait, and each request calls this.
            waiting = [rank for rank in waiting if self._holders[rank].held or self._holders[rank].undelivered]
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
        # A rank that has neither begun anything nor is idle does not train yet.
        waiting = [each for each in self._holders if each.waits and (each.begun or each.idle)]
        if waiting and not self._free and not self._rows:
            soonest = self._soonest(waiting, now_s)
            for rank, holder in enumerate(self._holders):
                if not self._recallable(holder):
                    continue
                # Comparing all with all at every request would take long at the end of an epoch among many ranks.
                others = waiting if holder.waits else soonest
                next_s = [self._next_s(each, holder, now_s) for each in others if each is not holder]
                if next_s and self._ends_s(holder, now_s) > min(next_s):
                    holder.recalled, holder.recalled_at = True, self._progress
                    holder.keep = self._keeps(holder, min(next_s), now_s)
                    yield rank, holder.keep

    def _recallable(self, holder: _Holder) -> bool:
        """Whether a rank holds positions that it may be asked for now."""
        asked = holder.recalled or holder.recalled_at == self._progress
        return not asked and not holder.ended and samples(holder.held) > holder.keeps

    def _soonest(self, waiting: Sequence[_Holder], now_s: float) -> list[_Holder]:
        """Return those of the waiting ranks of which one has the least `_next_s` for every holder.

        That of a rank of unknown pace depends on the holder's pace, and if that is unknown, on whether it is idle.
        """
        groups: dict[tuple[bool, bool], tuple[float, _Holder]] = {}
        for each in waiting:
            depends = bool(each.begun) and math.isnan(each.pace_s)
            least_s = each.load_s if depends else self._next_s(each, each, now_s)
            group = (depends, depends and each.idle)
            if group not in groups or least_s < groups[group][0]:
                groups[group] = least_s, each
        return [each for _, each in groups.values()]

    def stuck(self, rank: int) -> bool:
        """Whether a rank's training thread waits for positions that others hold."""
        holder = self._holder(rank)
        return holder.waits and holder.idle

    def reclaim(self) -> tuple[list[int], bool]:
        """Take what is held and not begun for the ranks that are stuck, since no rank trains until they get samples.

        Returns:
            The ranks to ask for all positions they have not begun, and whether positions are free now or will be.
        """
        asked = []
        for rank, holder in enumerate(self._holders):
            holder.needs = self.stuck(rank)
            if not holder.held or holder.needs:
                continue
            if math.isnan(holder.heard_s):  # Nothing was sent to it yet.
                self._free.extend(holder.held)
                holder.held, holder.unsent = [], False
            elif not holder.recalled and holder.reclaimed_at != self._progress:
                holder.recalled, holder.reclaimed_at, holder.keep = True, self._progress, 0
                asked.append(rank)
        coming = bool(self._free) or any(holder.recalled for holder in self._holders)
        if coming and self._rows:
            self._reclaimed, self.even = True, False
        return asked, coming

    def end(self, rank: int) -> None:
        """End the epoch for a rank that is stuck, though others hold positions; they begin these themselves."""
        holder = self._holder(rank)
        holder.ended, holder.waits = True, False

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
            for run in first(holder.held, count):
                if run.pieces > 1:
                    holder.done.append(run)
                else:
                    append(holder.done, (run.start, run.start + run.size))
            holder.held = behind(holder.held, count)

    def _decide_in_rows(self, rank: int) -> list[Run] | Answer:
        """Give a rank that has had its part of all rows what others leave over."""
        holder = self._holders[rank]
        if holder.held or holder.undelivered:
            return Answer.LATER
        if self._free:
            ranks = sum(not each.ended for each in self._holders)
            return self._lease(holder, max(1, min(2 * holder.ahead, self._batches(self._free) // ranks)))
        return self._wait_or_end(holder)

    def _wait_or_end(self, holder: _Holder) -> Answer:
        if self._free or any(each.held or each.undelivered for each in self._holders):
            holder.waits = True
            return Answer.WAIT
        holder.ended = True
        return Answer.END

    def _decide(self, rank: int, now_s: float) -> list[Run] | Answer:
        if self._rows:
            return self._decide_in_rows(rank)
        holder, held = self._holders[rank], self._batches(self._holders[rank].held)
        if self._free:
            wanted = self._allowed(rank, now_s) - held
            if wanted < 1 and not held and (holder.needs or not self._others_finish_first(rank, now_s)):
                wanted = 1
            if wanted >= 1:
                return self._lease(holder, wanted)
        if held or holder.undelivered:
            return Answer.LATER
        return self._wait_or_end(holder)

    def _batches(self, runs: Iterable[Run]) -> int:
        return sum(-(-run.size * run.pieces // self.batch_size) for run in runs)

    def _lease(self, holder: _Holder, batches: int) -> list[Run]:
        """Give a rank the first free positions, `batches` batches at most."""
        found, left = list[Run](), batches * self.batch_size
        while self._free and left > 0:
            run = self._free.popleft()
            found += first([run], left)
            self._free.extendleft(reversed(behind([run], left)))
            left -= run.size * run.pieces
        holder.held += found
        holder.needs = False
        return found

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
