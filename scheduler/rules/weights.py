"""Weights of late gradients and of updates of few gradients: the only implementation of both formulas."""

from __future__ import annotations

import math
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from scheduler.plan.plan import Plan

__all__ = ["damped", "damping", "damping_scale", "lr_factor"]

_Array = npt.NDArray[np.float64]
_Number = TypeVar("_Number", float, _Array)


def damping_scale(plan: Plan, gradients: _Number) -> _Number | float:
    """The c of a late gradient's weight, min(1, c / (1 + s)) at staleness s.

    `inverse`: 1 (DynSGD, Jiang et al. 2017). `relative`: n / x, the updates made during a gradient by equally fast
    ranks, so that only gradients staler than that are damped. `none`: infinite.

    Args:
        plan: The plan.
        gradients: x, the gradients of an update; n in a step of `partial` or `subgroup`.
    """
    if plan.damping == "relative":
        return plan.world_size / gradients
    return 1.0 if plan.damping == "inverse" else math.inf


def damping(plan: Plan, staleness: int, gradients: int) -> float:
    """Weight, 0 to 1, of a gradient of that staleness in an update of `gradients` gradients."""
    return float(damped(damping_scale(plan, float(max(1, gradients))), np.float64(staleness)))


def damped(scale: _Array | float, staleness: _Array | np.float64) -> _Array:
    """Weights of many gradients, min(1, c / (1 + s)); `scale` is c, the result of `damping_scale`."""
    return np.minimum(1.0, scale / (1.0 + staleness))


def lr_factor(plan: Plan, gradients: int) -> float:
    """Factor on the learning rate in an update of x = `gradients`: x / n, (1 + phi / n) / (1 + phi / x), or 1."""
    if plan.lr_rule == "linear":
        return gradients / plan.world_size
    if plan.lr_rule == "noise":
        return (1.0 + plan.noise_scale / plan.world_size) / (1.0 + plan.noise_scale / max(1, gradients))
    return 1.0
