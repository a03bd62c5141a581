"""A job's target as in `STAR_TARGET`: `accuracy>=0.95`. The run log and its readers share this parser."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

__all__ = ["Target"]

_FORM = re.compile(r"\s*([\w./ -]+?)\s*(>=|<=|>|<)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Target:
    """A bound on one metric.

    Attributes:
        name: Name of the metric, as in `record_metric`.
        relation: `>=`, `<=`, `>` or `<`.
        bound: The bound.
    """

    name: str
    relation: str
    bound: float

    @classmethod
    def parse(cls, text: Any) -> Target | None:
        """Parse `NAME>=NUMBER`; None if it is invalid."""
        found = _FORM.fullmatch(str(text))
        return None if found is None else cls(found.group(1), found.group(2), float(found.group(3)))

    def reached(self, value: float) -> bool:
        """Whether a value satisfies the bound; NaN does not."""
        if self.relation in (">=", "<="):
            return value >= self.bound if self.relation == ">=" else value <= self.bound
        return value > self.bound if self.relation == ">" else value < self.bound
