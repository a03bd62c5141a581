"""Trials of a way to communicate: alternating blocks of steps without and with it show whether it pays.

After a trial, step times are watched in blocks of the same length: once they differ clearly from those in the trial, as
on a link that has become slow, there is another trial. Ranks that record the same step times decide alike after the
same step: those of `sync` travel with the gradients.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from scheduler.transmission.blocks import Blocks
from scheduler.transmission.decision import Decision

__all__ = ["OffSwitch", "lower_bound"]

_WARM_STEPS = 8
_BLOCK_STEPS = 16
_LEAST_GAIN = 0.03
_LEAST_PAIRS, _MOST_PAIRS = 3, 8
_SHIFT = 1.3  # Steps have changed if the medians of two blocks in a row are beyond this factor, in the same direction.
_FIRST_REST, _LONGEST_REST = 1024, 16_384  # Steps without a trial after one that changed nothing, doubled each time.
# One-sided 90 % quantiles of Student's t distribution, by the number of values.
_T90 = {2: 3.078, 3: 1.886, 4: 1.638, 5: 1.533, 6: 1.476, 7: 1.440, 8: 1.415}


def lower_bound(gains: Sequence[float]) -> float:
    """Lower 90 % bound of the mean of 2 to 8 gains."""
    error: float = statistics.stdev(gains) / len(gains) ** 0.5
    return statistics.mean(gains) - _T90[len(gains)] * error


class OffSwitch:
    """Tries an option, then keeps it on or off until step times have changed, and tries it again.

    It is kept only if the lower 90 % bound of the gain is above 0 and its median above 3 %, and given up if the upper
    90 % bound is below 3 %, or after 8 pairs of blocks. So that trials stay cheap where step times keep changing, there
    is none for some time after one that changed nothing.

    Attributes:
        on: Whether the next step uses the option.
        decided: Whether no trial is in progress, as the last one has ended.
        gains: Fraction of the step time saved, for every pair of blocks of the present or last trial.
    """

    def __init__(self) -> None:
        self.on, self.decided = False, False
        self.gains: list[float] = []
        self._steps = Blocks(_WARM_STEPS, _BLOCK_STEPS)
        self._typical_s: dict[bool, list[float]] = {False: [], True: []}  # Of the trial's blocks, without and with it.
        self._verdict: bool | None = None  # Of the last trial.
        self._shifts = 0  # Blocks in a row beyond the usual times: above 0 slower, below 0 faster.
        self._rest, self._next_rest = 0, _FIRST_REST
        self._again = ""

    def note(self, step_s: float) -> bool:
        """Record the time of a step. Return whether a trial ends with it."""
        typical_s = self._steps.note(step_s)
        self._rest = max(0, self._rest - 1)
        if typical_s is None:
            return False
        if self.decided:
            self._watch(typical_s)
            return False
        self._typical_s[self.on].append(typical_s)
        if not self.on:
            self.on = True
            return False
        without_s = self._typical_s[False][-1]
        self.gains.append(1.0 - typical_s / without_s if without_s > 0.0 else 0.0)
        self.on = False
        self._decide()
        return self.decided

    def _decide(self) -> None:
        if len(self.gains) < _LEAST_PAIRS:
            return
        lower = lower_bound(self.gains)
        upper = 2.0 * statistics.mean(self.gains) - lower
        if lower > 0.0 and statistics.median(self.gains) > _LEAST_GAIN:
            self.on = self.decided = True
        elif upper < _LEAST_GAIN or len(self.gains) >= _MOST_PAIRS:
            self.decided = True
        if self.decided:
            self._end_trial()

    def _end_trial(self) -> None:
        if self.on == self._verdict:
            self._rest, self._next_rest = self._next_rest, min(_LONGEST_REST, 2 * self._next_rest)
        else:
            self._rest, self._next_rest = 0, _FIRST_REST
        self._verdict, self._shifts = self.on, 0

    def _watch(self, typical_s: float) -> None:
        """Begin another trial if the last two blocks show that steps have become longer or shorter."""
        usual_s = statistics.median(self._typical_s[self.on])
        slower, faster = typical_s > _SHIFT * usual_s, _SHIFT * typical_s < usual_s
        if not (slower or faster):
            self._shifts = 0
            return
        self._shifts = max(1, self._shifts + 1) if slower else min(-1, self._shifts - 1)
        if abs(self._shifts) < 2 or self._rest:
            return
        self._again = f"a step took {1e3 * typical_s:.1f} ms instead of {1e3 * usual_s:.1f} ms"
        self.on = self.decided = False
        self.gains, self._typical_s = [], {False: [], True: []}

    def describe(self, name: str) -> str:
        """The result of the last trial, or how far the present one is, as a sentence."""
        again = f", tried again as {self._again}" if self._again else ""
        if not self.decided:
            return f"{name} is being tried{again}: {len(self.gains)} pairs of blocks of {_BLOCK_STEPS} steps so far"
        median = statistics.median(self.gains)
        return (
            f"{name} is {'kept' if self.on else 'off'}: it saved {100.0 * median:.1f} % of a step "
            f"(median of {len(self.gains)} pairs of blocks of {_BLOCK_STEPS} steps, lower 90 % bound "
            f"{100.0 * lower_bound(self.gains):.1f} %){again}"
        )

    def decision(self, what: str, name: str, kept: str = "kept", off: str = "off") -> Decision:
        """Return the last trial's decision.

        Args:
            what: What it is about, see `Decision`.
            name: The option's name in the sentence.
            kept: What was chosen if it was kept.
            off: What was chosen if not.
        """
        return Decision(what, kept if self.on else off, self.describe(name), statistics.median(self.gains))
