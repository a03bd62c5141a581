"""A server's optimizers without torch's compiler.

The first optimizer of a process makes torch import its compiler, only to ask that it leaves the optimizer alone: 1.4 of
the 3.7 s of a processor that a server's start took, beside ranks that train. Nothing is compiled on a server.
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
    """Leave a function as it is; without one, as a decorator."""
    return function if function is not None else lambda decorated: decorated


class _Absent(types.ModuleType):
    """Answers what optimizers ask of the compiler; makes way for it as soon as anybody asks for more."""

    def __init__(self) -> None:
        super().__init__(_NAME)
        self.disable = _disable
        self.graph_break = lambda *unused, **options: None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # Whoever walks over all modules wants no compiler.
            raise AttributeError(f"module {_NAME!r} has no attribute {name!r}")
        if sys.modules.get(_NAME) is self:
            sys.modules.pop(_NAME, None)  # Another thread may have been faster.
        return getattr(importlib.import_module(_NAME), name)


def leave_out() -> None:
    """Keep torch from importing its compiler for an optimizer; without effect where it is there already."""
    if _NAME not in sys.modules:
        absent = _Absent()
        sys.modules[_NAME] = absent
        setattr(torch, "_dynamo", absent)  # noqa: B010  # Not a name that torch exports.
