"""The few operations a step engine needs from a communication library, and their Horovod implementation."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from star_hvd import env
from star_hvd.errors import DeadlineError
from star_hvd.telemetry.wait_time import WaitTime

__all__ = ["Collective", "HorovodCollective", "poll_for", "tune_horovod", "wait_all"]

_IDLE_CYCLE_MS = 5.0
"""Longest sleep of Horovod's thread while its rank has nothing submitted: a fifth of the usual idle negotiations. A
tensor ends it; only a shutdown is noticed so much later.
"""


class Collective(Protocol):
    """Sum all-reduce over all ranks, matched by name and by the order of submissions under a name."""

    def submit(self, name: str, tensor: torch.Tensor) -> int:
        """Start an in-place sum of `tensor` over all ranks and return its handle."""
        ...

    def hurry(self) -> None:
        """Reduce what was submitted at once: nothing that could travel with it follows soon."""
        ...

    def poll(self, handle: int) -> bool:
        """Whether the operation has ended. Only the handle's owner may call this."""
        ...

    def wait(self, handle: int, longest_s: float) -> bool:
        """Wait until `poll` returns True, at most that long, and return whether it does. Holds no lock meanwhile."""
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
        self._wait_for = getattr(mpi_ops.mpi_lib, "horovod_torch_wait_for", None)  # With patch 0014.
        self._hurry = getattr(mpi_ops.mpi_lib, "horovod_torch_hurry", None)  # With patch 0015.

    def submit(self, name: str, tensor: torch.Tensor) -> int:
        ops = self._ops
        return int(ops.allreduce_async_(tensor, name=name, op=ops.Sum, process_set=self._process_set))

    def hurry(self) -> None:
        if self._hurry is not None:
            self._hurry()

    def poll(self, handle: int) -> bool:
        # Horovod forgets a handle when its result is collected, and raises if it is polled afterwards.
        return handle not in self._ops._handle_map or bool(self._ops.poll(handle))

    def wait(self, handle: int, longest_s: float) -> bool:
        if self._wait_for is None:
            return poll_for(self, handle, longest_s)
        return handle not in self._ops._handle_map or bool(self._wait_for(handle, longest_s))

    def finish(self, handle: int) -> None:
        self._ops.synchronize(handle)


# Horovod's own wait spins until the end and shows 110 % CPU on waiting ranks; on a host with fewer cores than ranks
# that slows the rank all others wait for. So without patch 0014 we sleep between polls. Yielding the core instead would
# keep the interpreter lock (in Python 3.11): beside two processes that use a core each, rank 0's coordinator then got
# so little of it that a change of mode took minutes; with a core for every rank it was no faster (36.0 against 35.6 ms
# a step).
_POLL_S = 0.0001
_LONG_POLL_S = 0.0005
_LONG_AFTER_S = 0.005

# Longest wait without returning to the interpreter, which handles signals only then.
_SLICE_S = 0.1
_LOOK_S = 0.0005


def poll_for(collective: Collective, handle: int, longest_s: float) -> bool:
    """Wait as `Collective.wait` does, by polling."""
    began_s = time.monotonic()
    while not collective.poll(handle):
        waited_s = time.monotonic() - began_s
        if waited_s >= longest_s:
            return False
        time.sleep(min(_LONG_POLL_S if waited_s > _LONG_AFTER_S else _POLL_S, longest_s - waited_s))
    return True


def wait_all(
    collective: Collective,
    handles: Iterable[int],
    deadline_s: float,
    what: str,
    look: Callable[[], bool] | None = None,
    wait: WaitTime | None = None,
    first: int = 0,
) -> None:
    """Wait for operations to end, and collect them.

    Args:
        collective: The collective that runs the operations.
        handles: The operations.
        deadline_s: Longest wait.
        what: Their purpose, for the error and, unless `wait` is given, for the log.
        look: Called again and again while waiting, until it returns False.
        wait: The wait that this is a part of, to which the deadline applies; this alone if None.
        first: The first of the ranks that take part, in whose log Horovod names those that are missing.

    Raises:
        DeadlineError: They did not end within `deadline_s`.
    """
    wait = wait or WaitTime(what=what)
    for handle in handles:
        while not collective.wait(handle, _SLICE_S if look is None else _LOOK_S):
            if look is not None and not look():
                look = None
            if wait.count() > deadline_s:
                raise DeadlineError(
                    f"{what} did not end within {deadline_s:g} s; some rank did not take part. "
                    f"See which one in the log of rank {first}, or raise Config.step_deadline_s"
                )
        collective.finish(handle)


def tune_horovod(on: bool) -> None:
    """Have Horovod's threads take less of the cores that ranks share, and reduce short tensors sooner.

    Args:
        on: Whether blocking collectives sleep instead of asking again and again (with Horovod's patch 0017), Horovod
            negotiates less often while a rank has nothing submitted (0016), and, while all ranks want it, negotiates
            and reduces short tensors in fewer messages that wait for each other (0018); False for Horovod's own ways.
            Not the last in elastic jobs: it outlives a world in those that stay, and who joins begins without it.
    """
    from horovod.torch import mpi_ops

    for name, value in (
        ("horovod_torch_set_idle_cycle_ms", _IDLE_CYCLE_MS if on else 0.0),
        ("horovod_torch_set_waits_sleep", on),
        ("horovod_torch_set_few_hops", on and not env.elastic()),
    ):
        if (setter := getattr(mpi_ops.mpi_lib, name, None)) is not None:
            setter(value)
