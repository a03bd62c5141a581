"""Horovod's cycles in a job that trains with plain Horovod and with star_hvd in turn."""

from __future__ import annotations

import sys

__all__ = ["set_cycles"]


def set_cycles(plain: bool) -> None:
    """Make Horovod's thread negotiate as often as in a job of plain Horovod, or as `star_hvd.init` has it."""
    if "star_hvd" in sys.modules:
        from star_hvd.engine.collective import IDLE_CYCLE_MS, set_idle_cycle

        set_idle_cycle(0.0 if plain else IDLE_CYCLE_MS)
