"""The part of a plan that says when its transfers travel."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["BACKGROUND_MODES", "Transmission"]

BACKGROUND_MODES = ("local", "ps", "subgroup")
"""Modes that can send behind compute: averagings, a server's pushes and parameters, late gradients of a child."""


@dataclass(frozen=True, slots=True)
class Transmission:
    """How a plan's transfers travel.

    Attributes:
        background: Whether they travel behind compute, in a mode of `BACKGROUND_MODES`.
    """

    background: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.background, bool):
            raise ValueError(f"transmission background is {self.background!r}; expected True or False")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for messages and logs."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Transmission:
        """The inverse of `to_dict`.

        Raises:
            ValueError: A field is unknown or has an impossible value.
        """
        known = {item.name for item in dataclasses.fields(cls)}
        unknown = sorted(set(map(str, values)) - known)
        if unknown:
            raise ValueError(f"transmission has unknown fields {unknown}; expected some of {sorted(known)}")
        return cls(**values)
