"""A decision on how something is sent, with what it rests on: for the run log, its page and `explain()`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

__all__ = [
    "GRADIENTS",
    "LATE",
    "OVERLAP",
    "PACE_DOWN",
    "PACE_UP",
    "SERVERS",
    "TOGETHER",
    "WHAT",
    "Decision",
]

GRADIENTS = "gradients"  # Their form in a reduction; common to the ranks that reduce.
OVERLAP = "overlap"
TOGETHER = "buckets together"
LATE = "late gradients"  # Their form on the way to a parent.
PACE_UP = "pace of late gradients"
PACE_DOWN = "pace of parameters"  # On the way back from the parent.
SERVERS = "pushes to servers"  # Their form.
WHAT = (GRADIENTS, OVERLAP, TOGETHER, LATE, PACE_UP, PACE_DOWN, SERVERS)
"""What is decided on."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision on how something is sent.

    Attributes:
        what: What it is about, one of `WHAT`.
        chosen: What was chosen.
        text: The decision with its measurements, as a sentence.
        gain: Fraction of the time of a step or push that the option saves, the best one of several, whether it was
            chosen or not; negative if it costs time, NaN if nothing was compared.
    """

    what: str
    chosen: str
    text: str
    gain: float = math.nan

    def as_record(self) -> dict[str, Any]:
        """Return the fields as JSON types; an unknown gain is None."""
        gain = round(self.gain, 4) if math.isfinite(self.gain) else None
        return {"what": self.what, "chosen": self.chosen, "gain": gain, "text": self.text}
