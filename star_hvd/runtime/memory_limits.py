"""Maximum samples in a batch on this rank, by the user's limit, free memory, and past out-of-memory errors.

An out-of-memory error at b samples permanently lowers the limit of that loader to 0.85 b, and of those that follow it
with equal batches. On a GPU the allocator also reports that memory nearly ran out: it flushed its cache to satisfy a
request (`num_alloc_retries`), or an error was caught below the program (`num_ooms`). Then batches may not become larger
than the largest so far.

What fits in free memory is judged by the largest batch so far and the peak of memory use. The two belong together: the
peak is the process's, so a loader that follows one with equal batches starts with the largest batch of that one; and a
program may reset the peak (`torch.cuda.reset_peak_memory_stats`), so a lower peak than before tells nothing of the
largest batch, and what was known before holds.
"""

from __future__ import annotations

import torch

from star_hvd.telemetry.resources import samples_in_memory

__all__ = ["MemoryLimits"]

_LEFT = 0.85
"""Limit as a fraction of a size that failed: memory per batch varies from step to step, and fragments the rest."""


class MemoryLimits:
    """See the module's text. Sizes are samples; 0 stands for no limit.

    Args:
        user_most: `Config.max_batch`.
    """

    def __init__(self, user_most: int) -> None:
        self._user_most = user_most
        self._failed: dict[int, int] = {}  # By loader; written by the training thread alone.
        self._inherited: dict[int, int] = {}  # By loader: the limit of the one before. Its loop may not allow parts.
        self._batches: dict[int, int] = {}  # Samples of a usual batch, by loader.
        self._known: dict[int, tuple[int, int]] = {}  # By loader: samples of its largest batch, and the peak in bytes.
        self._retried = self._retries = 0

    def begin(self, loader: int, batch: int, before: int) -> None:
        """Note an epoch of a loader.

        Args:
            loader: Number of the loader.
            batch: Samples of its usual batch.
            before: Number of the loader that fed the training last. If its batches have as many samples, one that ran
                out of memory limits this loader's too, and its largest one counts for this loader.
        """
        limit = self._failed.get(before, self._inherited.get(before, 0))
        if loader not in self._batches and self._batches.get(before) == batch:
            if limit:
                self._inherited[loader] = limit
            self._known[loader] = self._known.get(before, (0, 0))
        self._batches[loader] = batch

    def lower(self, loader: int, samples: int) -> int:
        """Lower the limit of a loader after `samples` samples ran out of memory; return the new limit."""
        limit = max(1, int(_LEFT * samples))
        self._failed[loader] = min(limit, self._failed.get(loader, limit))
        return self._failed[loader]

    def failed(self, loader: int) -> int:
        """Return the limit from out-of-memory errors alone."""
        return self._failed.get(loader, 0)

    def most(self, loader: int, fed: int, largest: int, device: torch.device | None) -> int:
        """Return the limit of a loader's batch.

        Args:
            loader: Number of the loader.
            fed: Number of the loader that feeds the training.
            largest: Samples of that one's largest batch so far.
            device: Device of the parameters, None if there are none.
        """
        by_memory = 0
        if device is not None:
            by_memory = samples_in_memory(*self._largest(fed, largest, device), device)
            if by_memory and self._came_near(device):
                self._retried = min(largest, self._retried or largest)
        failed = self._failed.get(loader, 0), self._inherited.get(loader, 0)
        limits = (self._user_most, by_memory, self._retried, *failed)
        return min((limit for limit in limits if limit), default=0)

    def _largest(self, fed: int, largest: int, device: torch.device) -> tuple[int, int]:
        """Return the largest batch known of the loader that feeds the training, and the peak that belongs to it."""
        before, peak_before_bytes = self._known.get(fed, (0, 0))
        peak_bytes = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
        if largest and peak_bytes >= peak_before_bytes:  # Else it was reset.
            self._known[fed] = max(largest, before), peak_bytes
        return self._known.get(fed, (largest, peak_bytes))

    def _came_near(self, device: torch.device) -> bool:
        """Whether the allocator has had to retry since the last call."""
        stats = torch.cuda.memory_stats(device)
        before, self._retries = self._retries, stats.get("num_alloc_retries", 0) + stats.get("num_ooms", 0)
        return self._retries > before
