"""Ski-rental: when to pay for a switch without knowing how long its cause will last.

The loss against the best plan is accumulated while that plan is better; the switch is made when the sum reaches its
price: the break-even rule (Karlin et al. 1988). A disturbance that ends earlier costs no switch. One that lasts costs
the price twice, as loss and as price: at most twice the optimum in hindsight, plus the loss between two decisions.
"""

from __future__ import annotations

import math

__all__ = ["SkiRental"]


class SkiRental:
    """Accumulates the loss against the best plan.

    Attributes:
        lost_s: Seconds lost so far.
    """

    def __init__(self) -> None:
        self.lost_s = 0.0
        self._step: int | None = None

    def reset(self, step: int) -> None:
        """Reset the loss: no plan is better at this step, or a switch was made."""
        self.lost_s, self._step = 0.0, step

    def pays(self, step: int, loss_s: float, price_s: float, *, once_s: float = 0.0) -> bool:
        """Add the loss since the last call and return whether the switch pays.

        Args:
            step: Current step. A second call at the same step adds nothing; the first loss counts at least one step.
            loss_s: Loss per step against the best plan, 0 or more.
            price_s: Price of the switch.
            once_s: Loss of the latest step beyond `loss_s`, which the steps before it did not have.

        Raises:
            ValueError: `loss_s` is negative or not finite.
        """
        if not 0.0 <= loss_s < math.inf:
            raise ValueError(f"the loss of a step is {loss_s} s; expected a finite number, 0 or more")
        steps = max(0 if self.lost_s else 1, 0 if self._step is None else step - self._step)
        self._step = step
        self.lost_s += steps * loss_s + (once_s if steps else 0.0)
        return self.lost_s >= price_s
