"""Detect whether the program itself changes parameters between steps, e.g. clamps weights, fixes a norm, or uses SAM.

In `sync` every rank does so alike. But a rank that is late cannot repeat the change, and servers do not know of it, so
replicas would differ, or the change be lost, silently.

Other weights that the program puts in for an evaluation, and takes out again before the next batch, are no change.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch

from star_hvd.engine.applier import Applier
from star_hvd.engine.buckets import Bucket

__all__ = ["ProgramWrites"]

_COMPARED_STEPS = 4  # In these, memory is compared; later, tensor versions, which `param.data` does not raise.
# Behind a change, for as many steps as would make another one a habit, memory is compared again where versions differ:
# a version does not tell a change from weights that were exchanged and put back.
_OFTEN_STEPS = 64  # Loading a state during training is one change; two changes within this many steps are a habit.
_SAMPLE_BYTES = 1 << 14  # Of every parameter, compared then: all of it would take as long as a small network's step.
_IN_A_ROW = 3  # So many steps with a write each are a habit even if no value changes yet, as with a bound not reached.


class ProgramWrites:
    """Compares the parameters at the end of a step and the start of the next; used by the training thread, where not
    said otherwise.

    Args:
        applier: Holds the parameters.
    """

    def __init__(self, applier: Applier) -> None:
        self._applier = applier
        self._steps = 0
        # The parameters as the last step left them: number of writes, then versions and checksum of every bucket. Where
        # there is a checksum, it alone decides.
        self._left: tuple[int, list[tuple[list[int], int | None]]] | None = None
        self._applied: dict[int, tuple[list[int], int | None]] = {}  # Likewise, of a step that is not over yet.
        self._changed_in: int | None = None
        self._in_a_row = 0  # Number of latest steps behind each of which the program wrote, whatever it wrote.

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
        """Record buckets before a step ends, as the program may change them by then.

        It may if they are applied before others, and in step hooks.

        Called in the thread that applies them, under a lock that `step_ended` is then called under, too.
        """
        for bucket in buckets:
            self._applied[bucket.index] = self._contents(bucket, self._steps + 1)

    def superseded(self) -> None:
        """Discard what `applied` recorded: other steps followed, from which a change of a hook cannot be told."""
        self._applied = {}

    def discard(self) -> None:
        """Discard the record: parameters were added, or all ranks have received others."""
        self._left, self._applied, self._in_a_row = None, {}, 0

    def found(self, writes: int) -> bool:
        """Whether the program changes parameters repeatedly, or did in the first steps; called when gradients arrive.

        Args:
            writes: As for `step_ended`; if it differs, this package wrote in between, and the answer is False.
        """
        left = self._left
        if left is None or left[0] != writes:
            return False
        with torch._C.DisableTorchFunctionSubclass():
            pairs = zip(self._applier.buckets, left[1], strict=True)
            written = any(versions != _versions(bucket) for bucket, (versions, _) in pairs)
            self._in_a_row = self._in_a_row + 1 if written else 0
            if self._in_a_row < _IN_A_ROW and all(
                self._is_unchanged(bucket, versions, memory)
                for bucket, (versions, memory) in zip(self._applier.buckets, left[1], strict=True)
            ):
                return False
        self._left = None
        before, self._changed_in = self._changed_in, self._steps
        first = self._steps <= _COMPARED_STEPS or self._in_a_row >= _IN_A_ROW
        return first or (before is not None and self._steps - before <= _OFTEN_STEPS)

    def _is_unchanged(self, bucket: Bucket, versions: list[int], memory: int | None) -> bool:
        first = self._steps <= _COMPARED_STEPS
        if memory is None or (not first and versions == _versions(bucket)):
            return versions == _versions(bucket)
        return memory == _checksum(bucket, whole=first)

    def _contents(self, bucket: Bucket, step: int) -> tuple[list[int], int | None]:
        soon = self._changed_in is not None and step - self._changed_in <= _OFTEN_STEPS
        first = step <= _COMPARED_STEPS
        compared = (soon or first) and not self._applier.streams.devices
        # Through the base class, to read it without waiting for a parameter behind a gate.
        with torch._C.DisableTorchFunctionSubclass():
            return _versions(bucket), _checksum(bucket, whole=first) if compared else None


def _versions(bucket: Bucket) -> list[int]:
    return [param._version for param in bucket.params]


def _checksum(bucket: Bucket, *, whole: bool) -> int:
    """Return a checksum of a bucket's parameters, or of a sample of each; they are in host memory.

    Not `Applier.checksum`: a sum does not change if values change places or signs, and takes longer.
    """
    value = 0
    for param in bucket.params:
        flat = param.detach().contiguous().view(-1)
        part = flat if whole else flat[: _SAMPLE_BYTES // flat.element_size()]
        value = zlib.crc32(part.view(torch.uint8).numpy().data, value)
    return value
