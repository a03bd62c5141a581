"""What a job is to reach, as `STAR_TARGET` says it: `accuracy>=0.95`. Read alike by the log and by its readers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

__all__ = ["Target"]

_FORM = re.compile(r"\s*([\w./ -]+?)\s*(>=|<=|>|<)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Target:
    """A bound on one curve.

    Attributes:
        name: Of the curve, as `record_metric` tells it.
        relation: `>=`, `<=`, `>` or `<`.
        bound: The number.
    """

    name: str
    relation: str
    bound: float

    @classmethod
    def parse(cls, text: Any) -> Target | None:
        """Read `NAME>=NUMBER`; None where it is none."""
        found = _FORM.fullmatch(str(text))
        return None if found is None else cls(found.group(1), found.group(2), float(found.group(3)))

    def reached(self, value: float) -> bool:
        """Whether a value is at the target or beyond; never where it is no number."""
        if self.relation in (">=", "<="):
            return value >= self.bound if self.relation == ">=" else value <= self.bound
        return value > self.bound if self.relation == ">" else value < self.bound
