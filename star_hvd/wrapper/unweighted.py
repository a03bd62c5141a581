"""Track optimizers whose gradients Horovod averages itself: with one of them all ranks need batches of equal size."""

from __future__ import annotations

import weakref
from typing import Protocol

__all__ = ["HorovodsOwn", "Reducing", "note_reducing", "unweighted"]


class Reducing(Protocol):
    """The core of an optimizer that uses Horovod's own reductions."""

    @property
    def reduces(self) -> bool:
        """Whether backward passes reduce gradients through this optimizer."""
        ...


class HorovodsOwn:
    """Placeholder for one of Horovod's own optimizers; must be kept alive as long as that optimizer."""

    reduces = True


_cores: weakref.WeakSet[Reducing] = weakref.WeakSet()


def note_reducing(core: Reducing) -> None:
    """Track a core while it lives."""
    _cores.add(core)


def unweighted() -> str:
    """Return why batches have to be equal if an optimizer reduces without their weights, else an empty string."""
    reducing = any(core.reduces for core in list(_cores))
    return "an optimizer's gradients are reduced by Horovod itself, without weights" if reducing else ""
