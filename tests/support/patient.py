"""Jobs with more ranks than cores."""

from __future__ import annotations

import functools
import time
from typing import Any

import horovod.torch as horovod
from horovod.torch import mpi_ops, optimizer

__all__ = ["wait_without_spinning"]


def wait_without_spinning() -> None:
    """Make Horovod's wait sleep; with more ranks than cores, its spinning takes most of the job's time."""
    spinning = mpi_ops.synchronize

    @functools.wraps(spinning)
    def patient(handle: Any) -> Any:
        while handle in mpi_ops._handle_map and not mpi_ops.poll(handle):
            time.sleep(0.0003)
        return spinning(handle)

    mpi_ops.synchronize = optimizer.synchronize = horovod.synchronize = patient
