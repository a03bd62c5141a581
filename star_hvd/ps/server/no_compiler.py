"""Keeps torch from importing its compiler in servers.

The first optimizer of a process makes torch import `torch._dynamo`, only to exclude the optimizer from compilation.
Measured while ranks trained, that took 1.4 of the 3.7 s of CPU time of a server's start. Servers compile nothing.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

import torch

__all__ = ["leave_out"]

_NAME = "torch._dynamo"


def _disable(function: Any = None, *unused: Any, **options: Any) -> Any:
    """Return a function unchanged; without one, act as a decorator."""
    return function if function is not None else lambda decorated: decorated


class _Absent(types.ModuleType):
    """Provides what optimizers use of the compiler; any other access imports the real module."""

    def __init__(self) -> None:
        super().__init__(_NAME)
        self.disable = _disable
        self.graph_break = lambda *unused, **options: None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # Code that inspects all modules needs no compiler.
            raise AttributeError(f"module {_NAME!r} has no attribute {name!r}")
        if sys.modules.get(_NAME) is self:
            sys.modules.pop(_NAME, None)  # Another thread may have been faster.
        return getattr(importlib.import_module(_NAME), name)


def leave_out() -> None:
    """Install the substitute module; no effect if the compiler is already imported."""
    if _NAME not in sys.modules:
        absent = _Absent()
        sys.modules[_NAME] = absent
        setattr(torch, "_dynamo", absent)  # noqa: B010  # Not a name that torch exports.
