"""What every rank runs to test plans that say how they transmit: random switches between variants of the same modes."""

from __future__ import annotations

import sys

from tests.multiproc import modes

MODES = ["sync", "local(3)", "local(3,background)", "ps(2)", "ps(2,background)", "local(0.05s,background)"]
MODES += ["subgroup(0,1,2)", "subgroup(0,1,2,background)", "ps(4,background)", "local(2)"]


def varied(seen: list[str]) -> bool:
    """Whether both kinds of modes that can send behind compute were there in the variant that does."""
    return {"local", "ps"} <= {mode.partition("(")[0] for mode in seen if mode.endswith("background)")}


if __name__ == "__main__":
    modes.MODES[:] = MODES
    modes.varied = varied
    modes.main(sys.argv[1:])
