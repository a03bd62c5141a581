"""When groups that were formed from the ranks' times are formed anew. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from scheduler.plan.completion import groups_gain
from scheduler.plan.grouping import Groups
from scheduler.plan.plan import Plan

__all__ = ["Regrouping"]

_AFTER = 20  # Consecutive decisions that prefer the same other groups before these are formed.
_GAIN = 0.10  # Share of gradients per second that groups of `grouped` must add: a change is a hand-over.


class Regrouping:
    """Asks for new groups after the same others were better for `_AFTER` decisions.

    In `grouped` they must be better by `_GAIN`, since of equally fast ranks noise always makes some others best; fewer
    groups are better because of their lower staleness. For the same reason others that stay better by so much need not
    be the best ones in each decision.
    """

    def __init__(self) -> None:
        self._better: Groups = ()
        self._preferred = 0  # Consecutive decisions that preferred these to the active ones.

    def due(self, active: Plan, best: Groups, usual_s: Callable[[], Sequence[float]]) -> bool:
        """Take in a decision; return whether new groups are due, after which decisions are counted anew.

        Args:
            active: The active plan, which has groups.
            best: The groups that would be formed now.
            usual_s: Returns the usual compute time of every rank, NaN where unknown; called only where it matters.
        """
        if not self._is_better(self._better, best, active, usual_s):
            self._better, self._preferred = best, 0
        self._preferred += self._is_better(self._better, best, active, usual_s)
        if self._preferred < _AFTER:
            return False
        self._preferred = 0
        return True

    @staticmethod
    def _is_better(groups: Groups, best: Groups, active: Plan, usual_s: Callable[[], Sequence[float]]) -> bool:
        """Whether groups, with equally many as the best ones of a decision, are to replace the active ones."""
        present = active.groups
        if len(groups) != len(best) or {frozenset(group) for group in groups} == {frozenset(g) for g in present}:
            return False
        if active.mode != "grouped" or len(groups) < len(present):
            return groups == best
        return groups_gain(groups, present, usual_s()) > _GAIN
