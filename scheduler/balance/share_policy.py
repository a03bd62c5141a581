"""When batch shares change: on a lasting difference of speed, and back as soon as it is over. Pure: no clock.

Shares are solved exactly (`scheduler.balance.batch_shares`), again after every few reports, from the latest times. They
change if that is predicted to save 3 % of a step and more than the scatter of the times. Times are judged over several
periods: the last `SHORT` reports show a rank that has just become slow or recovered, the last `LONG` ones show small
permanent differences, and `FIRST` ones suffice for a change that saves a fifth of a step: to be wrong about a rank that
recovers costs a few steps with shares that fit no longer, which is less than to go on with a slow rank. A change that
is soon undone answered a disturbance that comes and goes: shares become equal instead of following it, and each such
case doubles the number of reports that the next decision uses, from `SHORT` on, so that shares follow lasting
differences only. To become equal again, `FIRST` reports always suffice.

A rank's first report contains what is done only once and is no time of a usual step. But if it shows the same rank to
be slow as the second one does, and the change saves a third of a step by either, no third report is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.balance.batch_shares import balance
from scheduler.balance.time_curves import FIRST, LONG, SHORT, TimeCurves

__all__ = ["FIXED", "SharePolicy", "can_hold", "share_factors", "share_sentence", "solve_shares"]

GAIN = 0.03
"""Predicted gain, as a fraction of a step, below which shares stay."""

FIXED = 0.1
"""Fraction of a step's time assumed not to depend on the batch size until a change of size shows it; for predictions
only."""

_CLEAR = 0.2  # The same with fewer than `SHORT` reports.
_CLEAR_AT_START = 1.0 / 3.0  # The same by the first report of each rank and by the second one.
_SIGMAS = 3.0  # A gain must exceed this many standard errors of the times.
_FAR = 0.15  # Move of a share, as a fraction of the usual batch, that can count as undone.
_SOON, _CALM = 3, 12  # In units of `look`: a change undone this soon is a flap, and calm after which `look` is halved.


def share_sentence(shares: Sequence[int], ratio: float) -> str:
    """`rank 2 gets 12 of 76 samples, step 0.62 of that with equal batches`; the ranks that get fewest are named."""
    if not shares or max(shares) - min(shares) <= 1:
        return "all ranks get equal batches"
    least = min(shares)
    ranks = [rank for rank, share in enumerate(shares) if share == least][:4]
    names = f"rank {ranks[0]} gets" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} get"
    return f"{names} {least} of {sum(shares)} samples, step {ratio:.2f} of that with equal batches"


def share_factors(shares: Sequence[int], batch: int, fixed: float) -> list[float]:
    """Every rank's time with its share relative to a usual batch."""
    return [fixed + (1.0 - fixed) * share / batch for share in shares]


def solve_shares(
    levels_s: Sequence[float], batch: int, fixed: float, most: Sequence[int] = (), least: int = 1
) -> tuple[int, ...]:
    """Return the best shares of a step's samples (`batch` times the number of ranks); equal ones if as good.

    Args:
        levels_s: Seconds of every rank for a usual batch.
        batch: Samples of a usual batch.
        fixed: Fraction of that time that does not depend on the batch size.
        most: Most samples of every rank, 0 for no limit.
        least: Fewest samples of every rank; at most `batch`, and what its limit allows.

    Raises:
        ValueError: The limits of all ranks together are too small.
    """
    equal = (batch,) * len(levels_s)
    total = sum(equal)
    if not can_hold(total, most):
        raise ValueError(
            f"the ranks can have at most {list(most)} samples in a step, 0 being no limit, and a step has {total}; use "
            f"a batch_size of at most {sum(most) // len(most)}, or raise Config.max_batch"
        )
    high = [min(total, limit) if limit else total for limit in most] if most else [total] * len(equal)
    alpha, beta = [fixed * one for one in levels_s], [(1.0 - fixed) * one / batch for one in levels_s]
    low = [min(least, batch, limit) for limit in high]
    found = balance(alpha, beta, total, least=low, most=high)
    equal_is_as_good = batch <= min(high) and max(levels_s) <= (1.0 + GAIN) * found.time_s
    return equal if equal_is_as_good else found.sizes


def can_hold(total: int, most: Sequence[int]) -> bool:
    """Whether the ranks together can have `total` samples; 0 in `most` for no limit."""
    return not most or min(most) == 0 or sum(most) >= total


class SharePolicy:
    """Decides the shares of one loader's batches.

    Args:
        world_size: Number of ranks.
        batch: Samples of a usual batch; a step has `world_size` times as many.

    Attributes:
        curves: Fitted times of the ranks.
        ratio: Predicted time of a step relative to equal batches, at the latest decision.
    """

    def __init__(self, world_size: int, batch: int) -> None:
        self.curves = TimeCurves(world_size, batch)
        self.ratio = 1.0
        self._equal = (batch,) * world_size
        self._look = FIRST
        self._since = 0  # Reports of rank 0 since the last change.
        self._previous = self._present = self._equal
        self._forced: tuple[int, ...] | None = None  # Shares decided on for a limit alone.
        self._first_s: dict[int, float] = {}  # First report of each rank, until a change.

    @property
    def informed(self) -> bool:
        """Whether every rank has sent the reports that the quickest decision needs, since its share changed."""
        return self.curves.reports_since_change() >= FIRST

    def note(self, rank: int, samples: int, compute_s: float, load_s: float = 0.0) -> None:
        """Record one step of a rank, see `TimeCurves.note`."""
        self.curves.note(rank, samples, compute_s, load_s)
        if rank == 0:
            self._since += 1
            if self._look > SHORT and self._since > _CALM * self._look:
                self._look, self._since = max(SHORT, self._look // 2), 0

    def note_first(self, rank: int, compute_s: float) -> None:
        """Record the first step of a rank, with a usual batch."""
        self._first_s[rank] = compute_s

    def decide(self, present: Sequence[int], most: Sequence[int] = (), least: int = 1) -> tuple[int, ...] | None:
        """Return the shares to change to, or None to keep `present` (empty for equal ones).

        A share above its rank's limit is changed at once, with the times known so far, unless the limits of all ranks
        together are too small: then each rank cuts its batches.
        """
        now = tuple(present) or self._equal
        too_large = any(0 < limit < share for share, limit in zip(now, most, strict=False))
        at_start = len(self._first_s) == len(now) and now == self._equal and not self.informed
        if at_start and not too_large and can_hold(sum(now), most):
            return self._decide_at_start(now, most, least)
        if not can_hold(sum(self._equal), most):
            return None
        if too_large:
            return self._forced_by(most, least)
        return self._decide_by_times(now, most, least) if self.informed else None

    def _forced_by(self, most: Sequence[int], least: int) -> tuple[int, ...]:
        """Return the best shares within the limits by what is known, be that little: the present ones do not fit."""
        levels_s = self.curves.latest_levels_s() or [1.0] * len(self._equal)
        found = solve_shares(levels_s, self.curves.batch, self.curves.fixed, most, least)
        self.ratio = self._time_s(levels_s, found) / self._time_s(levels_s, self._equal)
        self._forced = found
        return found

    def _decide_by_times(self, now: tuple[int, ...], most: Sequence[int], least: int) -> tuple[int, ...] | None:
        follows = self.curves.reports_since_change() >= self._look
        equal_fits = not any(0 < limit < self.curves.batch for limit in most)
        latest: list[list[float]] = []  # Levels over fewer reports.
        for count in sorted({FIRST, self._look, max(SHORT, self._look), LONG}):
            levels_s = self.curves.levels_s(count)
            if levels_s is None:
                continue
            found = self._equal
            if follows and count >= self._look:
                found = solve_shares(levels_s, self.curves.batch, self.curves.fixed, most, least)
                if now != self._equal and equal_fits and self._is_soon and self._undoes(found):
                    found = self._equal
            elif not equal_fits:
                continue
            if found != now and self._gains(levels_s, latest, now, found, count):
                self.ratio = self._time_s(levels_s, found) / self._time_s(levels_s, self._equal)
                return found
            latest.append(levels_s)
        return None

    def _decide_at_start(self, now: Sequence[int], most: Sequence[int], least: int) -> tuple[int, ...] | None:
        second_s = self.curves.levels_s(1)
        if second_s is None:
            return None
        found = solve_shares(second_s, self.curves.batch, self.curves.fixed, most, least)
        for levels_s in (second_s, [self._first_s[rank] for rank in range(len(now))]):
            present_s = self._time_s(levels_s, now)
            if present_s - self._time_s(levels_s, found) <= _CLEAR_AT_START * present_s:
                return None
        self.ratio = self._time_s(second_s, found) / self._time_s(second_s, self._equal)
        return found

    def _gains(
        self, levels_s: Sequence[float], latest: Sequence[Sequence[float]], now: Sequence[int], found: Sequence[int],
        count: int,
    ) -> bool:  # fmt: skip
        """Whether a change saves enough, judged from `count` reports, and fewer ones (`latest`) do not contradict."""
        if any(self._time_s(each, found) > self._time_s(each, now) for each in latest):
            return False  # The speeds have changed since.
        present_s = self._time_s(levels_s, now)
        least = max(GAIN if count >= SHORT else _CLEAR, _SIGMAS * self.curves.scatter(count))
        return present_s - self._time_s(levels_s, found) > least * present_s

    def changed(self, shares: Sequence[int]) -> None:
        """Record that a change was ordered.

        One that soon undoes the previous one doubles the number of reports that a quick decision needs, unless a limit
        forced it: that says nothing about the ranks' speeds.
        """
        self._first_s = {}
        now = tuple(shares) or self._equal
        forced, self._forced = self._forced, None
        if now == forced:
            self._present = now  # What follows is compared with the shares before those that did not fit.
            return
        if self._undoes(now) and self._is_soon:
            self._look = min(LONG, 2 * max(SHORT, self._look))
        self._previous, self._present, self._since = self._present, now, 0

    def moved(self, shares: Sequence[int], wrong: Sequence[int] = ()) -> None:
        """Record that another loader feeds the ranks from now on, with these shares; speeds are as before.

        Args:
            shares: The shares, empty for equal ones.
            wrong: For every rank, how many of its latest reports are of that loader's steps. They were noted with the
                shares of the loader before and are forgotten.
        """
        for rank, count in enumerate(wrong):
            self.curves.forget_latest(rank, count)
        self._first_s, self._forced = {}, None
        self._previous = self._present = tuple(shares) or self._equal

    @property
    def _is_soon(self) -> bool:
        return self._since < _SOON * max(SHORT, self._look) + SHORT

    def _undoes(self, now: Sequence[int]) -> bool:
        """Whether a rank whose share the last change moved far now moves far in the opposite direction."""
        far = _FAR * self.curves.batch
        moves = zip(self._previous, self._present, now, strict=True)
        return any(min(abs(b - a), abs(c - b)) > far and (b > a) != (c > b) for a, b, c in moves)

    def _time_s(self, levels_s: Sequence[float], shares: Sequence[int]) -> float:
        factors = share_factors(shares, self.curves.batch, self.curves.fixed)
        return max(one * factor for one, factor in zip(levels_s, factors, strict=True))
