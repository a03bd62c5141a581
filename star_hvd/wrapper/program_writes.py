"""Detect whether the program itself changes parameters between steps, e.g. clamps weights, fixes a norm, or uses SAM.

In `sync` every rank does so alike. But a rank that is late cannot repeat the change, and servers do not know of it, so
replicas would differ, or the change be lost, silently.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from star_hvd.engine.applier import Applier
from star_hvd.engine.buckets import Bucket

__all__ = ["ProgramWrites"]

_COMPARED_STEPS = 4  # In these, memory is compared; later, tensor versions, which `param.data` does not raise.
_OFTEN_STEPS = 64  # Loading a state during training is one change; two changes within this many steps are a habit.


class ProgramWrites:
    """Compares the parameters at the end of a step and the start of the next; used by the training thread, where not
    said otherwise.

    Args:
        applier: Holds the parameters.
    """

    def __init__(self, applier: Applier) -> None:
        self._applier = applier
        self._steps = 0
        # The parameters as the last step left them: number of writes, then versions and checksum of every bucket.
        self._left: tuple[int, list[tuple[list[int], int | None]]] | None = None
        self._applied: dict[int, tuple[list[int], int | None]] = {}  # Likewise, of a step that is not over yet.
        self._changed_in: int | None = None

    def step_ended(self, writes: int) -> None:
        """Record the parameters after a step has ended, or its mean was handed to the program.

        Args:
            writes: Number of writes by this package so far.
        """
        self._steps += 1
        buckets, applied = self._applier.buckets, self._applied
        self._left = writes, [applied.get(bucket.index) or self._contents(bucket, self._steps) for bucket in buckets]
        self._applied = {}

    def applied(self, buckets: Iterable[Bucket]) -> None:
        """Record buckets to which a step is applied before others, as the program may change them before it ends.

        Called in the thread that applies them, under a lock that `step_ended` is then called under, too.
        """
        for bucket in buckets:
            self._applied[bucket.index] = self._contents(bucket, self._steps + 1)

    def parameters_added(self) -> None:
        """Discard the record, which is no longer comparable."""
        self._left, self._applied = None, {}

    def found(self, writes: int) -> bool:
        """Whether the program changes parameters repeatedly, or did in the first steps; called when gradients arrive.

        Args:
            writes: As for `step_ended`; if it differs, this package wrote in between, and the answer is False.
        """
        left = self._left
        if left is None or left[0] != writes:
            return False
        with torch._C.DisableTorchFunctionSubclass():
            if all(
                versions == _versions(bucket) and (memory is None or memory == self._applier.checksum([bucket]))
                for bucket, (versions, memory) in zip(self._applier.buckets, left[1], strict=True)
            ):
                return False
        self._left = None
        before, self._changed_in = self._changed_in, self._steps
        return self._steps <= _COMPARED_STEPS or (before is not None and self._steps - before <= _OFTEN_STEPS)

    def _contents(self, bucket: Bucket, step: int) -> tuple[list[int], int | None]:
        compared = step <= _COMPARED_STEPS and not self._applier.streams.devices
        # Through the base class, to read it without waiting for a parameter behind a gate.
        with torch._C.DisableTorchFunctionSubclass():
            return _versions(bucket), self._applier.checksum([bucket]) if compared else None


def _versions(bucket: Bucket) -> list[int]:
    return [param._version for param in bucket.params]
