"""Times of a logged run's steps as they would be with batches of the usual size.

Under `sync(balanced)` and fixed shares a slow rank computes fewer samples. Its logged times then look like those of the
others, although it would hold up every mode with equal batches, and a fast rank with many samples looks slow. A live
job converts times in the same way (`star_hvd.coordinator.share_control.ShareControl.scale`).
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["UsualBatches"]


class UsualBatches:
    """Converts the times of a run, of whose `events.jsonl` it is given every event, in order.

    Attributes:
        fixed_part: Fraction of a usual batch's time that does not depend on its size, NaN while unknown. The last one
            counts for the whole run: it is an estimate that becomes better.
    """

    def __init__(self) -> None:
        self.fixed_part = math.nan
        self._batches: list[tuple[int, int]] = []  # First step and samples per batch: another loader may have others.
        self._first_steps: list[int] = []
        self._uneven: list[bool] = []

    def take(self, event: Mapping[str, Any]) -> None:
        """Take in facts, a plan or a window; other events are ignored."""
        kind = event.get("kind")
        if kind == "facts" and isinstance(event.get("values"), dict):
            self._take_batch(event["values"].get("batch"), event.get("step"))
        elif kind == "plan" and type(event.get("step")) is int:
            plan = event.get("plan") or {}
            self._first_steps.append(event["step"])
            self._uneven.append(bool(plan.get("balanced") or plan.get("batch_shares")))
        elif kind == "window":
            part = event.get("fixed_part")
            self.fixed_part = float(part) if isinstance(part, (int, float)) and 0.0 <= part < 1.0 else self.fixed_part

    def _take_batch(self, batch: Any, step: Any) -> None:
        if type(batch) is not int or batch <= 0:
            return
        first_step = step if type(step) is int else 0  # Older logs have one batch, without a step.
        while self._batches and self._batches[-1][0] >= first_step:
            self._batches.pop()
        self._batches.append((first_step, batch))

    def usual_s(self, steps: Sequence[int], times_s: Sequence[float], samples: Sequence[Any]) -> list[float]:
        """Return the times for usual batches.

        Args:
            steps: Steps of one rank's reports, in order.
            times_s: Their compute times.
            samples: Their samples as logged; those that are no number above 0 are unknown, and their times stay.
        """
        if not self._batches or not any(self._uneven):
            return list(times_s)
        fixed = self.fixed_part if math.isfinite(self.fixed_part) else 0.0
        known = [float(value) if isinstance(value, (int, float)) and value > 0 else 0.0 for value in samples]
        found = []
        for index, (step, time_s) in enumerate(zip(steps, times_s, strict=True)):
            ratio = _share(known, index) / self._batch(step)
            scaled = ratio > 0.0 and self._is_uneven(step)
            found.append(time_s / (fixed + (1.0 - fixed) * ratio) if scaled else time_s)
        return found

    def _batch(self, step: int) -> int:
        return self._batches[max(0, bisect.bisect_right(self._batches, step, key=_first_step) - 1)][1]

    def _is_uneven(self, step: int) -> bool:
        return self._uneven[max(0, bisect.bisect_right(self._first_steps, step) - 1)]


def _first_step(batch: tuple[int, int]) -> int:
    return batch[0]


def _share(samples: Sequence[float], index: int) -> float:
    """Samples of a report; of one with fewer than both of its neighbours, which is the last of an epoch, theirs.

    Scaling the time of a few samples to a usual batch would mostly scale its error. As it is, it counts too little once
    per epoch, as in every mode.
    """
    if not 0 < index < len(samples) - 1:
        return samples[index]
    return max(samples[index], min(samples[index - 1], samples[index + 1]))
