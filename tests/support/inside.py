"""The one place where tests look behind a wrapped optimizer, whose user sees a torch optimizer."""

from __future__ import annotations

from typing import Any

from star_hvd.modes.driver import StepDriver

__all__ = ["driver_of", "inside"]


def inside(optimizer: Any) -> Any:
    """What a wrapped optimizer is made of: its `core`, and the `base` class of the user's optimizer."""
    return optimizer._star


def driver_of(optimizer: Any) -> StepDriver:
    """The driver of a wrapped optimizer: its engine, its number, its switcher."""
    driver: StepDriver = inside(optimizer).core.driver
    return driver
