"""Untimed steps of a rank before those that count: until its mode is in force, and until trials have ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from scheduler.records import Plan

__all__ = ["LONGEST_START_S", "await_mode", "await_trials"]

LONGEST_START_S = 90.0  # Of servers, on a heavily loaded machine.
_BLOCK_STEPS = 16


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


def await_trials(
    step: Callable[[], object],
    decided: Callable[[], bool],
    of_all: Callable[[bool], list[bool]],
    most_steps: int,
    settling: int,
) -> None:
    """Make steps until trials have ended on all ranks, if they have not yet; all ranks make equally many.

    Args:
        step: Makes a step.
        decided: Whether this rank's trials have ended.
        of_all: Gathers the ranks' answers on all ranks.
        most_steps: Steps until the longest trial has ended.
        settling: Steps to make after a late end: the decision acts from the next step on.

    Raises:
        RuntimeError: They have not ended by then, so steps would be those of a trial.
    """
    made = 0
    while not all(of_all(decided())):
        if made >= most_steps:
            raise RuntimeError(f"a trial has not ended after {most_steps} more steps")
        for _ in range(_BLOCK_STEPS):
            step()
        made += _BLOCK_STEPS
    if made:
        for _ in range(settling):
            step()
