"""Horovod's thread, waits and short reductions in a job that trains with plain Horovod and with star_hvd in turn."""

from __future__ import annotations

import sys

__all__ = ["set_waits"]


def set_waits(plain: bool) -> None:
    """Make Horovod negotiate, reduce and wait as in a job of plain Horovod, or as `star_hvd.init` has it."""
    if "star_hvd" in sys.modules:
        from star_hvd.engine.collective import tune_horovod

        tune_horovod(not plain)
