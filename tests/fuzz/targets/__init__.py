"""The targets by name."""

from __future__ import annotations

from tests.fuzz.run import Target
from tests.fuzz.targets import control, logs, plans

__all__ = ["TARGETS"]

TARGETS: dict[str, Target] = {
    target.name: target for module in (control, logs, plans) for target in module.TARGETS
}
