"""Optimizers whose gradients Horovod averages itself: beside one of them the batches of all ranks have to be equal."""

from __future__ import annotations

import weakref
from typing import Protocol

__all__ = ["HorovodsOwn", "Reducing", "note_reducing", "unweighted"]


class Reducing(Protocol):
    """The core of an optimizer that goes through Horovod's own reductions."""

    @property
    def reduces(self) -> bool:
        """Whether backward passes reduce gradients through it."""
        ...


class HorovodsOwn:
    """Stands for an optimizer of Horovod's own, and has to live as long."""

    reduces = True


_cores: weakref.WeakSet[Reducing] = weakref.WeakSet()


def note_reducing(core: Reducing) -> None:
    """Remember a core as long as it lives."""
    _cores.add(core)


def unweighted() -> str:
    """Why batches have to be equal, where an optimizer reduces without their weights; else empty."""
    reducing = any(core.reduces for core in list(_cores))
    return "an optimizer's gradients are reduced by Horovod itself, without weights" if reducing else ""
