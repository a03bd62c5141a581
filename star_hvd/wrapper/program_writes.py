"""Whether the program changes parameters itself between steps: weights that are clamped, a norm that is kept, SAM.

In `sync` every rank does so alike. A rank that is late cannot repeat it, and servers know nothing of it, so replicas
would differ, or the change be lost, without a word.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from star_hvd.engine.applier import Applier

__all__ = ["ProgramWrites"]

_COMPARED_STEPS = 4  # Memory is compared in these; later the counts of changes, which `param.data` does not raise.
_OFTEN_STEPS = 64  # A state that is loaded in the middle of training is one change, twice within these is a habit.


class ProgramWrites:
    """Looks at parameters where a step ended and where the next one begins; used by the training thread.

    Args:
        applier: Has the parameters.
    """

    def __init__(self, applier: Applier) -> None:
        self._applier = applier
        self._steps = 0
        self._left: tuple[int, Sequence[int], int | None] | None = None  # How the last step left the parameters.
        self._changed_in: int | None = None

    def step_ended(self, writes: int) -> None:
        """A step has ended, or its mean is there, and the program goes on with its parameters.

        Args:
            writes: How often this package has written to them.
        """
        self._steps += 1
        self._left = writes, self._versions(), self._memory()

    def parameters_added(self) -> None:
        """What was seen is not comparable any more."""
        self._left = None

    def found(self, writes: int) -> bool:
        """Gradients come. Whether the program has a habit of changing parameters, or did in the first steps.

        Args:
            writes: As for `step_ended`; a difference is this package's, and nothing is known then.
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
        # Through the base class: of a parameter behind a gate it is read without waiting.
        with torch._C.DisableTorchFunctionSubclass():
            return [param._version for bucket in self._applier.buckets for param in bucket.params]

    def _memory(self) -> int | None:
        if self._steps > _COMPARED_STEPS or self._applier.streams.devices:
            return None
        return self._applier.checksum()
