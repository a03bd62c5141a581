"""Batches of an iterable data set, which each rank reads for itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import default_collate

from star_hvd.input.feeder import collates_here

__all__ = ["Stream"]


class Stream:
    """Batches of an iterable data set: one pass continues across the ends of epochs until it is exhausted.

    Args:
        dataset: This rank's share.
        batch_size: Samples per batch; None if the data set gives whole batches.
        drop_last: Whether a short last batch of a pass is dropped.
        options: Further keyword arguments of `DataLoader`.

    Attributes:
        batch_size: Samples of a usual batch, 1 if unknown.
    """

    def __init__(
        self, dataset: IterableDataset[Any], batch_size: int | None, *, drop_last: bool, options: Mapping[str, Any]
    ) -> None:
        collate = options.get("collate_fn")
        # The first dimension of what another function makes need not be the batch's.
        self._stacked = batch_size is None or collate in (None, default_collate)
        if collate is not None and not self._stacked and collates_here(options):
            options = {**options, "collate_fn": _Counting(collate)}
        self._loader: DataLoader[Any] = DataLoader(dataset, batch_size=batch_size, drop_last=drop_last, **options)
        self.batch_size = batch_size or 1
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

    def take(self) -> tuple[int, Any]:
        """Return the loaded batch, behind its number of samples."""
        batch = self._next.pop()
        if isinstance(batch, _Counted):
            return batch.samples, batch.batch
        return (self._first_size(batch) if self._stacked else 0) or self.batch_size, batch

    def _first_size(self, data: Any) -> int:
        """Return the size of the first dimension of the first tensor, 0 if there is none."""
        if isinstance(data, torch.Tensor) and data.ndim:
            return int(data.shape[0])
        parts = data.values() if isinstance(data, Mapping) else data if isinstance(data, (list, tuple)) else ()
        return next((self._first_size(part) for part in parts), 0)


class _Counting:
    """A collate function that returns the batch together with the number of its samples."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: Any) -> _Counted:
        count = len(samples)  # First: the function may empty the list.
        return _Counted(count, self._collate(samples))


class _Counted:
    """A batch and its number of samples."""

    def __init__(self, samples: int, batch: Any) -> None:
        self.samples, self.batch = samples, batch

    def pin_memory(self) -> _Counted:
        """Called by the loader, which pins objects other than tensors and containers by this method."""
        self.batch = torch.utils.data._utils.pin_memory.pin_memory(self.batch)
        return self
