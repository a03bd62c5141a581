"""Settings for all tests."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support.effort import cases

# How long an example takes says how busy the machine is, and nothing about the code.
settings.register_profile("star", max_examples=cases(100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("star")

# Every lock of the package is compared with the order of `star_hvd.locks`, here and in the jobs that tests start.
os.environ.setdefault("STAR_CHECK_LOCKS", "1")

gc.disable()  # Until everything is imported.

TESTS = Path(__file__).parent
# Files whose jobs take longest come first, and the many short ones last: then all workers end together.
FIRST = (
    "contract/test_contract.py",
    "multiproc/test_modes.py",
    "fault/test_freezes.py",
    "multiproc/test_scenarios.py",
    "multiproc/test_compression.py",
    "fault",
    "multiproc",
    "contract",
    "fuzz",
    "tools",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by `FIRST`; what is not named there comes behind it. (`make test` has xdist keep the order.)"""

    def place(item: pytest.Item) -> int:
        path = item.path.relative_to(TESTS).as_posix() if item.path.is_relative_to(TESTS) else ""
        return next((i for i, first in enumerate(FIRST) if path == first or path.startswith(f"{first}/")), len(FIRST))

    items.sort(key=place)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let collections of garbage skip what was imported: they took a seventh of the unit tests' time."""
    gc.collect()
    gc.freeze()
    gc.enable()
