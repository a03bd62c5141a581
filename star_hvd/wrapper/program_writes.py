"""Detect whether the program itself changes parameters between steps, e.g. clamps weights, fixes a norm, or uses SAM.

In `sync` every rank does so alike. But a rank that is late cannot repeat the change, and servers do not know of it, so
replicas would differ, or the change be lost, silently.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from star_hvd.engine.applier import Applier

__all__ = ["ProgramWrites"]

_COMPARED_STEPS = 4  # In these, memory is compared; later, tensor versions, which `param.data` does not raise.
_OFTEN_STEPS = 64  # Loading a state during training is one change; two changes within this many steps are a habit.


class ProgramWrites:
    """Compares the parameters at the end of a step and the start of the next; used by the training thread.

    Args:
        applier: Holds the parameters.
    """

    def __init__(self, applier: Applier) -> None:
        self._applier = applier
        self._steps = 0
        self._left: tuple[int, Sequence[int], int | None] | None = None  # The parameters as the last step left them.
        self._changed_in: int | None = None

    def step_ended(self, writes: int) -> None:
        """Record the parameters after a step has ended, or its mean was handed to the program.

        Args:
            writes: Number of writes by this package so far.
        """
        self._steps += 1
        self._left = writes, self._versions(), self._memory()

    def parameters_added(self) -> None:
        """Discard the record, which is no longer comparable."""
        self._left = None

    def found(self, writes: int) -> bool:
        """Whether the program changes parameters repeatedly, or did in the first steps; called when gradients arrive.

        Args:
            writes: As for `step_ended`; if it differs, this package wrote in between, and the answer is False.
        """
        left = self._left
        if left is None or left[0] != writes:
            return False
        if left[1] == self._versions() and (left[2] is None or left[2] == self._memory()):
            return False
        self._left = None
        before, self._changed_in = self._changed_in, self._steps
        return self._steps <= _COMPARED_STEPS or (before is not None and self._steps - before <= _OFTEN_STEPS)

    def _versions(self) -> list[int]:
        # Through the base class, to read it without waiting for a parameter behind a gate.
        with torch._C.DisableTorchFunctionSubclass():
            return [param._version for bucket in self._applier.buckets for param in bucket.params]

    def _memory(self) -> int | None:
        if self._steps > _COMPARED_STEPS or self._applier.streams.devices:
            return None
        return self._applier.checksum()
