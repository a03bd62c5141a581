"""The only place where tests access the internals of a wrapped optimizer, which users see as a torch optimizer."""

from __future__ import annotations

from typing import Any

from star_hvd.modes.driver import StepDriver

__all__ = ["driver_of", "inside"]


def inside(optimizer: Any) -> Any:
    """Return the internals of a wrapped optimizer: its `core`, and the `base` class of the user's optimizer."""
    return optimizer._star


def driver_of(optimizer: Any) -> StepDriver:
    """Return the driver of a wrapped optimizer: its engine, its number, its switcher."""
    driver: StepDriver = inside(optimizer).core.driver
    return driver
