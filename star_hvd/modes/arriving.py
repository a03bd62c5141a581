"""Write parameters that arrive from servers after `step` has returned; each bucket is written when it is first used.

The servers send first what the next forward pass needs first. A gate in front of a parameter waits only for that
parameter's bucket; all other readers of parameters pass the gates too, so nothing reads a bucket before it has arrived.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from star_hvd.engine.step_engine import StepEngine
from star_hvd.errors import DeadlineError
from star_hvd.telemetry.wait_time import WaitTime

__all__ = ["Arrivals", "ArrivingParameters", "Gates"]

logger = logging.getLogger("star_hvd")

_LOOK_S = 5.0


class Gates(Protocol):
    """The part of `star_hvd.wrapper.forward_gates.ForwardGates` used here."""

    wait: Callable[[int], None]

    def passed_by(self) -> bool: ...
    def close(self, index: int, params: Sequence[torch.nn.Parameter]) -> None: ...
    def open(self, index: int) -> None: ...
    def remove(self) -> None: ...


class Arrivals(Protocol):
    """The part of a client of servers used here."""

    def wait_bucket(self, index: int, deadline_s: float) -> None: ...
    def finish(self, deadline_s: float) -> int: ...
    def describe(self) -> str: ...


class ArrivingParameters:
    """Parameters that are still arriving; see the module docstring. Any thread that uses a parameter may call `wait`.

    Args:
        engine: This rank's engine.
        client: Client from which the parameters come.
        gates: Gates in front of the parameters.
        deadline_s: Longest wait for a bucket.
        on_wait: Gets the duration in seconds of every wait of the thread that makes the steps.
        check_ranks: Called during a wait; raises what makes it pointless, as that another rank's process has ended.
        look_s: Interval between checks whether this rank has failed.
    """

    def __init__(
        self,
        engine: StepEngine,
        client: Arrivals,
        gates: Gates,
        deadline_s: float,
        on_wait: Callable[[float], None] = lambda seconds: None,
        check_ranks: Callable[[], None] = lambda: None,
        look_s: float = _LOOK_S,
    ) -> None:
        self._check_ranks, self._look_s = check_ranks, look_s
        self._engine, self._client, self._gates, self._deadline_s = engine, client, gates, deadline_s
        self._on_wait = on_wait
        self._pid = os.getpid()
        self._stepper = 0  # Id of the thread that makes the steps.
        self._waited_s = 0.0
        self._left: set[int] = set()
        self._under_way = False
        self._refused = False  # Whether this was logged.
        self._flats: Sequence[torch.Tensor] = ()
        gates.wait = self.wait

    def allowed(self) -> bool:
        """Whether the next parameters may arrive while the training thread continues; if not, log why, once."""
        passed_by = self._gates.passed_by()
        if passed_by and not self._refused:
            self._refused = True
            logger.warning(
                "parameters do not arrive in the background: torch.compile is in use, whose code reads parameters "
                "where that is not seen"
            )
        return not passed_by

    def begin(self, flats: Sequence[torch.Tensor]) -> None:
        """Note that parameters will arrive in these buffers, one per bucket, while the training thread continues."""
        self._flats, self._under_way, self._stepper = flats, True, threading.get_ident()
        for bucket in self._engine.applier.buckets:
            self._left.add(bucket.index)
            self._gates.close(bucket.index, bucket.params)

    def wait(self, index: int) -> None:
        """Wait until a bucket's parameters are written. A forked process keeps those that it has.

        Raises:
            DeadlineError: They did not arrive.
        """
        if index in self._left and not self._left_behind():
            self._until(lambda: self._client.wait_bucket(index, self._look_s))
            self._write(index)

    def finish(self) -> int | None:
        """Wait for all parameters and return their version, None if none were arriving.

        Raises:
            DeadlineError: They did not arrive.
        """
        if not self._under_way or self._left_behind():
            return None
        for index in sorted(self._left, reverse=True):
            self.wait(index)
        versions: list[int] = []
        self._until(lambda: versions.append(self._client.finish(self._look_s)))
        self._under_way = False
        return versions[0]

    def take_waited_s(self) -> float:
        """Return the seconds that the thread that makes the steps has waited since the last call."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    def stop(self) -> None:
        """Remove the gates without waiting: the arriving parameters are replaced by another state or not needed."""
        with self._engine.replica.apply_lock:
            self._gates.remove()
            self._left.clear()
            self._under_way = False

    def _left_behind(self) -> bool:
        """Whether this is a forked process, which keeps its parameters since no thread here receives any."""
        if self._pid == os.getpid():
            return False
        # Without the lock, which another thread may have held at the fork. The gates first: see `_write`.
        self._gates.remove()
        self._left.clear()
        self._under_way = False
        return True

    def _until(self, wait: Callable[[], None]) -> None:
        began_s = time.monotonic()
        try:
            self._look_until(wait)
        finally:
            if threading.get_ident() == self._stepper:
                waited_s = time.monotonic() - began_s
                self._waited_s += waited_s
                self._on_wait(waited_s)

    def _look_until(self, wait: Callable[[], None]) -> None:
        waited = WaitTime(self._look_s, self._missing)
        while True:
            if self._engine.failure is not None:
                raise self._engine.failure
            try:
                return wait()
            except DeadlineError:
                self._check_ranks()
                if waited.count() > self._deadline_s:
                    raise

    def _missing(self) -> str:
        return f"parameters of {self._engine.plan.label} ({self._client.describe()})"

    def _write(self, index: int) -> None:
        replica, bucket = self._engine.replica, self._engine.applier.buckets[index]
        with replica.apply_lock:
            if index not in self._left:
                return  # Another thread has written it.
            with replica.writing(), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                for param, view in zip(bucket.params, bucket.split(self._flats[index]), strict=True):
                    param.copy_(view)
            self._gates.open(index)  # First: a thread that finds the bucket written does not wait.
            self._left.discard(index)
