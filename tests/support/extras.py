"""Optional packages that are slow to import: detected without importing them during test collection."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def needs(package: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test, or as `pytestmark` a test file, if a package is not installed."""
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed")
