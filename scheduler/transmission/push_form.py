"""The form in which a rank sends late gradients to another: chosen from the times of pushes, both forms tried in turn.

The time of a push includes encoding, transfer and decoding. The smaller form is used only if it saves 3 % of that time.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

from scheduler.transmission.decision import LATE, Decision

__all__ = ["PushChoice"]

_LEAST_GAIN = 0.03
_CLEAR = 1.5  # If the times differ by this factor, one push of each form is enough.
_PAIRS = 3  # Pushes of each form in a trial if they do not.
_MOST_REFUSED = 3  # Pushes of a trial that could not have the smaller form, each after encoding it in vain.
_FIRST_REST, _LONGEST_REST = 64, 4096  # Pushes until the next trial; doubled if a trial changes nothing.


@dataclass(slots=True)
class PushChoice:
    """The form of a rank's next push.

    Attributes:
        small: Whether it is the smaller, lossy one.
        reason: The last decision with its measurements, empty before the first.
        saved: Fraction of a push's time that the smaller form saved in the last trial; NaN if it was not possible.
    """

    small: bool = False
    reason: str = ""
    saved: float = math.nan
    _chosen: bool = False
    _trial: bool = True
    _first: bool = True  # The first push opens the connection.
    _rest: int = _FIRST_REST
    _left: int = 0
    _refused: int = 0
    _whole_s: list[float] = field(default_factory=list)
    _small_s: list[float] = field(default_factory=list)

    def observe(self, small: bool, time_s: float) -> bool:
        """Record the end of a push.

        Args:
            small: The form it had, which differs from the wanted one if its values did not allow that.
            time_s: Its duration.

        Returns:
            Whether a decision was made.
        """
        if self._first:
            self._first = False
            return False
        if not self._trial:
            self._left -= 1
            if self._left <= 0:
                self._trial, self.small, self._refused = True, False, 0
                self._whole_s.clear()
                self._small_s.clear()
            return False
        if small != self.small:
            self._refused += 1
            return self._refused >= _MOST_REFUSED and self._end(
                False, "they are: their values do not allow int8", math.nan
            )
        (self._small_s if small else self._whole_s).append(time_s)
        self.small = not small
        return len(self._whole_s) == len(self._small_s) and self._decide()

    def _decide(self) -> bool:
        whole_s, small_s = statistics.median(self._whole_s), statistics.median(self._small_s)
        ratio = max(whole_s, small_s) / max(1e-9, min(whole_s, small_s))
        if ratio < _CLEAR and len(self._whole_s) < _PAIRS:
            return False
        chosen = small_s < (1.0 - _LEAST_GAIN) * whole_s
        name = "int8" if chosen else "they are"
        reason = f"{name}: a push took {1e3 * whole_s:.1f} ms, {1e3 * small_s:.1f} ms as int8"
        return self._end(chosen, reason, 1.0 - small_s / max(1e-9, whole_s))

    def _end(self, chosen: bool, reason: str, saved: float) -> bool:
        """End the trial; returns True, as a decision was made."""
        self.reason, self.saved = reason, saved
        self._rest = min(_LONGEST_REST, 2 * self._rest) if chosen == self._chosen else _FIRST_REST
        self.small = self._chosen = chosen
        self._trial, self._left = False, self._rest
        return True

    @property
    def decision(self) -> Decision:
        """The last decision."""
        form = "int8" if self._chosen else "whole"
        return Decision(LATE, form, f"late gradients travel as {self.reason}", self.saved)
