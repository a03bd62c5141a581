"""Reads the reasons of plans, which are sentences for people."""

from __future__ import annotations

import re

__all__ = ["names"]


def names(reason: str, rank: int) -> bool:
    """Whether a plan's reason names a rank: alone ("rank 2"), or among others that were slow too ("ranks 0 and 2")."""
    return re.search(rf"\branks? (\d+(, | and ))*{rank}\b", reason) is not None
