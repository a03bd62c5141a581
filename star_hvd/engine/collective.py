"""The few operations a step engine needs from a communication library, and their Horovod implementation."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from star_hvd.errors import DeadlineError

__all__ = ["Collective", "HorovodCollective", "wait_all"]


class Collective(Protocol):
    """Sum all-reduce over all ranks, matched by name and by the order of submissions under a name."""

    def submit(self, name: str, tensor: torch.Tensor) -> int:
        """Start an in-place sum of `tensor` over all ranks and return its handle."""
        ...

    def poll(self, handle: int) -> bool:
        """Whether the operation has ended. Only the handle's owner may call this."""
        ...

    def finish(self, handle: int) -> None:
        """Collect the result after `poll` returned True. Raises the operation's own errors."""
        ...


class HorovodCollective:
    """Horovod's all-reduce. Names carry no step number, so every step hits Horovod's response cache.

    Args:
        process_set: The ranks; the global set where None.
    """

    def __init__(self, process_set: Any = None) -> None:
        from horovod.torch import mpi_ops

        self._ops = mpi_ops  # Importing on each call would take as long as polling a handle.
        self._process_set = process_set if process_set is not None else mpi_ops.global_process_set

    def submit(self, name: str, tensor: torch.Tensor) -> int:
        ops = self._ops
        return int(ops.allreduce_async_(tensor, name=name, op=ops.Sum, process_set=self._process_set))

    def poll(self, handle: int) -> bool:
        # Horovod forgets a handle when its result is collected, and raises if it is polled afterwards.
        return handle not in self._ops._handle_map or bool(self._ops.poll(handle))

    def finish(self, handle: int) -> None:
        self._ops.synchronize(handle)


# Horovod's own wait spins until the end and shows 110 % CPU on waiting ranks; on a host with fewer cores than ranks
# that slows the rank all others wait for. So we sleep between polls. Yielding the core instead would keep the
# interpreter lock (in Python 3.11): beside two processes that use a core each, rank 0's coordinator then got so little
# of it that a change of mode took minutes; with a core for every rank it was no faster (36.0 against 35.6 ms a step).
_POLL_S = 0.0001
_LONG_POLL_S = 0.0005
_LONG_AFTER_S = 0.005


def wait_all(
    collective: Collective,
    handles: Iterable[int],
    deadline_s: float,
    what: str,
    look: Callable[[], object] | None = None,
) -> None:
    """Wait for operations to end, sleeping between polls.

    Args:
        collective: The collective that runs the operations.
        handles: The operations.
        deadline_s: Longest wait.
        what: Their purpose, for the error.
        look: Called between two polls.

    Raises:
        DeadlineError: They did not end within `deadline_s`.
    """
    began_s = time.monotonic()
    for handle in handles:
        while not collective.poll(handle):
            if look is not None:
                look()
            waited_s = time.monotonic() - began_s
            if waited_s > deadline_s:
                raise DeadlineError(
                    f"{what} did not end within {deadline_s:g} s; some rank did not take part. "
                    "See which one in the log of rank 0, or raise Config.step_deadline_s"
                )
            if waited_s > _LONG_AFTER_S:
                time.sleep(_LONG_POLL_S)
            else:
                time.sleep(_POLL_S)
        collective.finish(handle)
