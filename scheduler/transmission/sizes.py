"""How many buckets are reduced at once, measured during warm-up: six blocks of ten steps.

Every reduction costs a negotiation and a filling of the ring, whatever its size, and a large one is waited for as a
whole. The best size depends on network, ranks and model. All ranks record the same step times (they travel with the
gradients), so all decide alike after the same step.
"""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.transmission.blocks import Blocks
from scheduler.transmission.decision import TOGETHER, Decision

__all__ = ["SizeSearch"]

_CHOICES = (1, 2, 4)
_BLOCKS = 2  # Blocks of each choice, in turn.
_BLOCK_STEPS = 10
_WARM_STEPS = 4
_LEAST_GAIN = 0.03


class SizeSearch:
    """Tries each choice, then keeps one: one bucket at a time unless several at once save at least 3 % of a step.

    Args:
        buckets: Number of buckets.

    Attributes:
        together: Buckets that the next step reduces at once.
        decided: Whether the search is over.
    """

    def __init__(self, buckets: int) -> None:
        choices: Sequence[int] = [choice for choice in _CHOICES if choice < max(buckets, 2)]
        self.together, self.decided = choices[0], len(choices) == 1
        self.times_s: dict[int, list[float]] = {choice: [] for choice in choices}
        self._left = [choice for _ in range(_BLOCKS) for choice in choices]
        self._steps = Blocks(_WARM_STEPS, _BLOCK_STEPS)

    def note(self, step_s: float) -> bool:
        """Record the time of a step. Return whether the search ends with it."""
        if self.decided:
            return False
        typical_s = self._steps.note(step_s)
        if typical_s is None:
            return False
        self.times_s[self._left.pop(0)].append(typical_s)
        self.decided = not self._left
        self.together = self._left[0] if self._left else self._best()
        return self.decided

    def _best(self) -> int:
        # The better block of each choice: a disturbance makes steps longer, nothing makes them shorter.
        least_s = {choice: min(times) for choice, times in self.times_s.items()}
        best = min(least_s, key=lambda choice: least_s[choice])
        return best if least_s[best] < (1.0 - _LEAST_GAIN) * least_s[_CHOICES[0]] else _CHOICES[0]

    def describe(self) -> str:
        """The result of the search, as a sentence; empty before."""
        if not self.decided or len(self.times_s) == 1:
            return ""
        times = ", ".join(f"{1e3 * min(times):.1f} ms with {choice}" for choice, times in self.times_s.items())
        return f"buckets reduced at once: {self.together} (a step took {times})"

    @property
    def decision(self) -> Decision:
        """The search's decision, after it."""
        least_s = {choice: min(times) for choice, times in self.times_s.items()}
        options = least_s.keys() - {_CHOICES[0]} if self.together == _CHOICES[0] else {self.together}
        gain = 1.0 - min(least_s[choice] for choice in options) / max(1e-9, least_s[_CHOICES[0]])
        return Decision(TOGETHER, str(self.together), self.describe(), gain)
