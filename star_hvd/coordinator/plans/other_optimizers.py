"""What the program's other optimizers mean for the modes of one optimizer. Pure: no clock.

Ranks that are at other steps of one optimizer would wait for each other crosswise in another one, which bars some modes
(`crossing`) and confines `auto` to exact ones. Each is said once.
"""

from __future__ import annotations

import logging
import math

from scheduler.plan.mode_names import MAY_WAIT, ONLY_EXACT, crossing
from scheduler.plan.plan import Plan

__all__ = ["OtherOptimizers"]

logger = logging.getLogger("star_hvd")

_OTHERS_S = 1.0
"""After this a warning names other optimizers: one that replaces another is made before that has been dropped."""


class OtherOptimizers:
    """The other optimizers of the program, as one of them sees them.

    Args:
        optimizer_id: Number of this optimizer.

    Attributes:
        exist: Whether there are any.
        auto: Whether `auto` chooses the modes of this optimizer.
    """

    def __init__(self, optimizer_id: int) -> None:
        self.exist = self.auto = False
        self._optimizer_id = optimizer_id
        self._since_s = math.inf
        self._noted = ""  # The mode of which was said last that they bar it, or what they mean for it.

    def bar(self, plan: Plan) -> str:
        """Return why a plan is not possible beside them, empty if it is or if there are none."""
        return crossing(plan, auto=self.auto) if self.exist else ""

    def refuse(self, plan: Plan) -> str:
        """Return the same, with a warning if the user asked for the plan's mode."""
        reason = self.bar(plan)
        if reason and not self.auto and self._noted != plan.label:  # Of what `auto` may choose `tell` speaks.
            self._noted = plan.label
            logger.warning("optimizer %d: %s is not possible: %s", self._optimizer_id, plan.label, reason)
        return reason

    def confine(self, *, might_relax: bool) -> bool:
        """Whether `auto` is confined to exact modes because of them, and only for that.

        Args:
            might_relax: Whether it might choose others if there were no other optimizers.
        """
        return self.exist and self.auto and might_relax

    def tell(self, asked: Plan | None, now_s: float, *, might_relax: bool) -> None:
        """Tell the user, once, what they mean for the modes of this optimizer, when they have existed for a while.

        Args:
            asked: The mode that the user asked for, None for `auto` and plain `sync`.
            now_s: Current time.
            might_relax: See `confine`.
        """
        self._since_s = min(self._since_s, now_s) if self.exist else math.inf
        if now_s < self._since_s + _OTHERS_S:
            return
        if self.confine(might_relax=might_relax) and not self._noted:
            self._noted = "auto"
            logger.warning("optimizer %d: %s", self._optimizer_id, ONLY_EXACT)
            return
        if not self.exist or asked is None or not asked.relaxed or self.bar(asked):
            return
        if self._noted != asked.label:
            self._noted = asked.label
            logger.warning("optimizer %d: %s: %s", self._optimizer_id, asked.label, MAY_WAIT)
