"""How long a batch takes each rank, as a function of its size, fitted from observations. Pure.

    t_i(b) = max(s_i (phi + (1 - phi) b / B_0), l_i b / B_0)

s_i is rank i's time for a usual batch of B_0 samples, phi the fraction of it that does not depend on the batch size,
l_i the time in which its workers load such a batch. They load beside the other work and without a fixed part. A small
batch hides a slow input, so both are reported, and a rank's level is the larger of s_i and l_i.
Neither a rank's fixed part nor its rate can be known while its batches have only one size. So phi is one number for all
ranks, 0 until a size changes: the first shares then move less far than the best ones, in the right direction, and that
change shows phi. The level is a median over the latest reports, so a slow rank's real cost is measured again at each
size.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

__all__ = ["FIRST", "SHORT", "LONG", "TimeCurves", "fixed_part"]

FIRST, SHORT, LONG = 2, 5, 24
"""Number of reports whose median is a rank's time: the fewest that can contradict each other, the fewest that outvote
two outliers, and enough to tell differences of a few percent."""

_BEFORE = 4  # Most reports before a change that are compared with those after it: a rank may just have become slow.
_ALIKE = 1.2  # Ratio of two times of a rank that are taken for one speed.
_MOVED = 0.05  # Fraction of the usual batch: smaller changes show nothing.
_MOVED_FAR = 0.25  # The same for a first estimate from `FIRST` reports.
_MOST_FIXED = 0.95
_ESTIMATES = 256


def fixed_part(before: tuple[float, float], behind: tuple[float, float]) -> float:
    """Compute phi from two points (size relative to the usual one, seconds) of one rank; 0 to 0.95."""
    (size, time_s), (new_size, new_time_s) = before, behind
    ratio = new_time_s / time_s
    part = ratio * size - new_size
    whole = part + 1.0 - ratio
    if abs(whole) < 1e-9:
        return 0.0
    return min(_MOST_FIXED, max(0.0, part / whole))


def _levels_s(reports: npt.NDArray[np.float64], fixed: float) -> npt.NDArray[np.float64]:
    """The level by every report; the last axis holds size, time and loading time."""
    sizes, times_s, loads_s = np.moveaxis(reports, -1, 0)
    return np.asarray(np.maximum(times_s / (fixed + (1.0 - fixed) * sizes), loads_s / sizes))


def _alike(times_s: Sequence[float]) -> bool:
    return max(times_s) <= _ALIKE * min(times_s)


@dataclass(slots=True)
class _Estimate:
    """phi as one change of one rank's size shows it; a larger change tells it more exactly."""

    value: float
    weight: float


@dataclass(slots=True)
class _Reports:
    """Reports of one rank: sizes relative to the usual one with times, and what the next change is compared with."""

    recent: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=LONG))  # The last: loading.
    before: tuple[float, float] | None = None
    since: int = 0  # Reports since the size changed.
    first: _Estimate | None = None  # From the first reports since then; refined by the next ones.


class TimeCurves:
    """Fits the curves.

    Args:
        world_size: Number of ranks.
        batch: Samples of a usual batch.
    """

    def __init__(self, world_size: int, batch: int) -> None:
        self.batch = batch
        self._reports = [_Reports() for _ in range(world_size)]
        self._fixed: deque[_Estimate] = deque(maxlen=_ESTIMATES)

    @property
    def fixed(self) -> float:
        """phi, the median of the estimates from changes of size; 0 before the first."""
        if not self._fixed:
            return 0.0
        ordered = sorted(self._fixed, key=lambda one: one.value)
        half, weight = 0.5 * sum(one.weight for one in ordered), 0.0
        for one in ordered:
            weight += one.weight
            if weight >= half:
                return one.value
        return ordered[-1].value

    @property
    def known(self) -> bool:
        """Whether any size has changed yet."""
        return bool(self._fixed)

    def note(self, rank: int, samples: int, compute_s: float, load_s: float = 0.0) -> None:
        """Record one step of a rank.

        Args:
            rank: The rank.
            samples: Samples of its batch.
            compute_s: Its time, without waits for data if `load_s` is known.
            load_s: Least time in which it can load the batch; 0 if unknown.
        """
        if samples < 1 or not 0.0 < compute_s < math.inf:
            return
        size, reports = samples / self.batch, self._reports[rank]
        if reports.recent and reports.recent[-1][0] != size:
            old = reports.recent[-1][0]
            times = [time_s for one, time_s, _ in list(reports.recent)[-_BEFORE:] if one == old]
            if not _alike(times):
                times = times[-FIRST:]
            reports.before, reports.since, reports.first = (old, float(np.median(times))), 0, None
        reports.recent.append((size, compute_s, load_s))
        reports.since += 1
        if reports.since in (FIRST, SHORT):
            self._estimate(reports)

    def forget_latest(self, rank: int, count: int) -> None:
        """Forget the latest reports of a rank, whose batches had another size, and what they alone have shown."""
        reports = self._reports[rank]
        for _ in range(min(count, len(reports.recent))):
            reports.recent.pop()
        if reports.since < count:
            reports.before = None  # The size before the latest change is unknown now.
        reports.since = max(0, reports.since - count)
        if reports.since < FIRST and reports.first is not None:
            self._fixed = deque((each for each in self._fixed if each is not reports.first), maxlen=_ESTIMATES)
            reports.first = None

    def _estimate(self, reports: _Reports) -> None:
        """Estimate phi from a rank's change of size, if that was large enough."""
        size, count = reports.recent[-1][0], reports.since
        moved = 0.0 if reports.before is None else abs(size - reports.before[0])
        if reports.before is None or moved <= (_MOVED_FAR if count == FIRST else _MOVED):
            return
        times = [time_s for _, time_s, _ in list(reports.recent)[-count:]]
        if count == FIRST and not _alike(times):
            return
        value = fixed_part(reports.before, (size, float(np.median(times))))
        if reports.first is None:
            reports.first = _Estimate(value, moved)
            self._fixed.append(reports.first)
        else:
            reports.first.value = value

    def reports_since_change(self) -> int:
        """Reports since the size changed, of the rank with the fewest."""
        return min(reports.since for reports in self._reports)

    def levels_s(self, count: int) -> list[float] | None:
        """The level of every rank over its last `count` reports; None if one has fewer, or they are too few to tell."""
        if any(len(reports.recent) < count for reports in self._reports):
            return None
        reports = np.array([list(each.recent)[-count:] for each in self._reports])
        times_s = reports[:, :, 1]
        if count < SHORT and (times_s.max(axis=1) > _ALIKE * times_s.min(axis=1)).any():
            return None
        found: list[float] = np.median(_levels_s(reports, self.fixed), axis=1).tolist()
        return found

    def latest_levels_s(self) -> list[float] | None:
        """The level of every rank by up to its last `SHORT` reports, however uncertain; None if one has no report."""
        if not all(reports.recent for reports in self._reports):
            return None
        latest = (np.array(list(each.recent)[-SHORT:]) for each in self._reports)
        return [float(np.median(_levels_s(reports, self.fixed))) for reports in latest]

    def scatter(self, count: int) -> float:
        """Relative standard error of a level over `count` reports, of the rank where it is largest.

        Estimated from all stored reports: a few of them may be alike by chance.
        """
        fixed, worst = self.fixed, 0.0
        for reports in self._reports:
            times = _levels_s(np.array(reports.recent), fixed)
            middle = float(np.median(times))
            # 1.4826 MAD is the standard deviation of normal values, 1.25 s / sqrt(n) the error of their median.
            worst = max(worst, 1.85 * float(np.median(np.abs(times - middle))) / middle / math.sqrt(count))
        return worst
