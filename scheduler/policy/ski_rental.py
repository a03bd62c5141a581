"""Ski-rental: when to pay for a switch without knowing how long what calls for it will last.

The loss against the best plan is added up while that plan is better. The switch is made when the sum has reached its
price: the break-even rule (Karlin et al. 1988). A disturbance that ends before costs no switch. One that lasts costs
the price twice, once as loss and once as price, where hindsight pays it once: never more than twice the best, but for
the loss between two decisions.
"""

from __future__ import annotations

import math

__all__ = ["SkiRental"]


class SkiRental:
    """Adds up one loss at a time.

    Attributes:
        lost_s: Seconds lost so far against the best plan.
    """

    def __init__(self) -> None:
        self.lost_s = 0.0
        self._step: int | None = None

    def rest(self, step: int) -> None:
        """Nothing is better at this step, or it has just been taken up: what was lost is forgotten."""
        self.lost_s, self._step = 0.0, step

    def pays(self, step: int, loss_s: float, price_s: float) -> bool:
        """Whether the switch pays by now.

        Args:
            step: Present step. Asking again at the same step adds nothing; the first loss counts one step at least.
            loss_s: Loss of a step against the best plan, 0 or more.
            price_s: What the switch costs; the loss of one step is always allowed to be spared.

        Raises:
            ValueError: A loss that is none.
        """
        if not 0.0 <= loss_s < math.inf:
            raise ValueError(f"the loss of a step is {loss_s} s; expected a finite number, 0 or more")
        steps = max(0 if self.lost_s else 1, 0 if self._step is None else step - self._step)
        self._step = step
        self.lost_s += steps * loss_s
        return self.lost_s >= price_s
