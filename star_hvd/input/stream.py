"""Batches of an iterable data set, which each rank reads for itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

__all__ = ["Stream"]


class Stream:
    """Batches of an iterable data set: one pass continues across the ends of epochs until it is exhausted.

    Args:
        loader: The loader of this rank's share.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self._pass: Iterator[Any] | None = None
        self._next: list[Any] = []
        self._may_begin = False

    def begin_epoch(self) -> None:
        """Allow the next pass to start once this one has ended."""
        self._may_begin = True

    def load(self) -> bool:
        """Load the next batch. Return False if this rank's share is used up for this epoch."""
        if self._next:
            self._may_begin = False
            return True
        goes_on = self._pass is not None and self._may_begin
        if self._pass is None:
            if not self._may_begin:
                return False
            self._pass = iter(self._loader)
        self._may_begin = False
        try:
            self._next.append(next(self._pass))
        except StopIteration:  # If the last epoch took everything, that shows only now.
            self._pass, self._may_begin = None, goes_on
            return goes_on and self.load()
        return True

    def take(self) -> Any:
        """Return the loaded batch."""
        return self._next.pop()

    def samples(self, data: Any) -> int:
        """Return the number of samples in a batch, taken from its first tensor."""
        if isinstance(data, torch.Tensor) and data.ndim:
            return int(data.shape[0])
        parts = data.values() if isinstance(data, Mapping) else data if isinstance(data, (list, tuple)) else ()
        found = next((self.samples(part) for part in parts), 0)
        return found or self._loader.batch_size or 1
