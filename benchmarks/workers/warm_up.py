"""Untimed steps of a rank before those that count: until its mode is in force."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from scheduler.records import Plan

__all__ = ["LONGEST_START_S", "await_mode"]

LONGEST_START_S = 90.0  # Of servers, on a heavily loaded machine.


def await_mode(step: Callable[[], object], engine: Any, plan: Plan, limit_s: float = LONGEST_START_S) -> None:
    """Make steps until a fixed mode is in force: every job of star_hvd starts in `sync`.

    Args:
        step: Makes a step.
        engine: Engine of star_hvd's optimizer.
        plan: What was asked for; `asgd`, for example, is in force as `ps`.
        limit_s: Longest time.

    Raises:
        RuntimeError: It is not in force by then, so steps would be those of another mode.
    """
    at_s = time.monotonic() + limit_s
    while engine.plan.mode != plan.mode:
        if time.monotonic() > at_s:
            raise RuntimeError(f"{plan.label} is not in force after {limit_s:g} s, but {engine.plan.label}")
        step()
