"""The targets by name."""

from __future__ import annotations

from tests.fuzz.run import Target
from tests.fuzz.targets import channel, control, logs, models, plans, servers

__all__ = ["TARGETS"]

TARGETS: dict[str, Target] = {
    target.name: target for module in (channel, control, logs, models, plans, servers) for target in module.TARGETS
}
