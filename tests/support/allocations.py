"""What operations on tensors in host memory allocate, temporary copies inside them included."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["largest_allocation_bytes"]


def largest_allocation_bytes(work: Callable[[], object]) -> int:
    """Return the size of the largest tensor that was allocated while `work` ran."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    return max((event.cpu_memory_usage for event in profile.events()), default=0)
