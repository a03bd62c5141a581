"""The step reports of a logged run that its moments need.

A run of days has gigabytes of reports. They are read twice, line by line: for the last step of every rank, which
decides at which steps the moments are, and for the newest reports at each of these steps.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from scheduler.run_events import read_run_file

__all__ = ["FIRST_STEP", "HISTORY", "Report", "extent", "moments_until", "newest", "reports"]

HISTORY, _MOMENTS = 64, 6
FIRST_STEP = 8
"""Least number of reports of a rank at a moment."""


class Report(NamedTuple):
    """A rank's measurements of one step, see `scheduler.records.StepTimes`."""

    step: int
    compute_s: float
    late: bool
    runqueue_s: float
    load_s: float

    def own_s(self, waits: float) -> float:
        """The rank's time as a live window has it (`star_hvd.coordinator.reports.History.table`).

        Args:
            waits: Part of its waits for a processor to subtract.
        """
        # Above 0, whatever a damaged log says.
        computed_s = max(1e-3 * self.compute_s, self.compute_s - waits * self.runqueue_s)
        return max(computed_s, self.load_s) if self.load_s > 0.0 else computed_s


def reports(path: Path) -> Iterator[Report]:
    """The reports of a rank, without its first, which the coordinator ignores: a first step allocates and compiles."""
    steps = (item for item in read_run_file(path) if item.get("kind") == "step")
    for item in itertools.islice(steps, 1, None):
        step, time_s = item.get("step"), item.get("compute_s")
        if isinstance(step, int) and isinstance(time_s, float) and time_s > 0.0:
            # Old logs lack some of the times.
            queued_s, load_s = (max(0.0, float(item.get(name) or 0.0)) for name in ("runqueue_s", "load_s"))
            yield Report(step, time_s, bool(item.get("late")), queued_s, load_s)


def extent(found: Iterable[Report]) -> tuple[int, int]:
    """Number of reports and their last step, -1 without any."""
    count, last = 0, -1
    for report in found:
        count, last = count + 1, max(last, report.step)
    return count, last


def moments_until(last: int) -> list[int]:
    """Steps of the moments of a run, ascending, evenly spaced over its steps.

    Args:
        last: The last step that every rank has reported.
    """
    steps = [round(FIRST_STEP + (last - FIRST_STEP) * (i + 1) / _MOMENTS) for i in range(_MOMENTS)]
    return list(dict.fromkeys(max(FIRST_STEP, one) for one in steps))


def newest(found: Iterable[Report], moments: Sequence[int]) -> list[Report]:
    """A rank's reports without those that are among the newest `HISTORY` of no moment, in order of step."""
    # Between two moments only the newest ones can be among the newest of a later moment.
    kept: list[list[Report]] = [[] for _ in moments]
    for report in found:
        index = bisect.bisect_left(moments, report.step)
        if index == len(moments):
            continue
        if len(kept[index]) < HISTORY:
            heapq.heappush(kept[index], report)
        else:
            heapq.heappushpop(kept[index], report)
    return sorted(itertools.chain.from_iterable(kept))
