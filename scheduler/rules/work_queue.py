"""Ranges of an epoch's positions, in order, for the next rank that requests one.

It answers `RequestBatch`: ranks wait for each other on an empty epoch, whose end the coordinator announces once all
have requested.
The loader's samples are leased instead (`scheduler.rules.leasing`).
"""

from __future__ import annotations

__all__ = ["WorkQueue"]


class WorkQueue:
    """Hands out every position of an epoch exactly once.

    Args:
        n_samples: Positions in the epoch.
        batch_size: Positions in a range; the last range of the epoch may be shorter.
        drop_last: Omit a short last range.

    Raises:
        ValueError: A count is out of range.
    """

    def __init__(self, n_samples: int, batch_size: int, *, drop_last: bool = False) -> None:
        for name, value, least in (("n_samples", n_samples, 0), ("batch_size", batch_size, 1)):
            if value < least:
                raise ValueError(f"work queue {name} is {value}; expected at least {least}")
        self._batch_size = batch_size
        self._stop = n_samples - n_samples % batch_size if drop_last else n_samples
        self._next = 0

    def take(self) -> tuple[int, int] | None:
        """The next range as (start, stop), None at the end of the epoch."""
        if self._next >= self._stop:
            return None
        start = self._next
        self._next = min(self._stop, start + self._batch_size)
        return start, self._next
