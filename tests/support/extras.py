"""Packages that are optional, and slow to import: looked for without importing them while tests are collected."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def needs(package: str) -> pytest.MarkDecorator:
    """A mark that skips a test, or as a `pytestmark` a file of tests, where a package is not installed."""
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed")
