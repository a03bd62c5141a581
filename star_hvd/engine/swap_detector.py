"""Detect that the program has temporarily swapped in other weights, e.g. moving averages of them for an evaluation.

While it evaluates other weights, a rank must neither apply steps to its parameters, nor copy them as the state of their
step: the program will put the former values back. A few values of the parameters are enough to tell, since such an
swap changes all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from star_hvd.engine.buckets import Bucket

__all__ = ["SwapDetector"]

_MOST = 16  # Parameters of which a value is remembered.


class SwapDetector:
    """Remembers where some parameters are in memory and, in host memory, one value of each.

    Comparing values on a device would have to wait for the program's kernels: there only parameters whose memory was
    exchanged (`param.data = other`) are noticed, not those that were overwritten.

    Args:
        buckets: Hold the parameters; the list may grow.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = buckets
        self._params: list[torch.nn.Parameter] = []
        self._values: list[npt.NDArray[np.uint8]] = []  # Views of the parameters' memory.
        self._places: list[int] = []
        self._seen: list[bytes] = []
        self._versions: list[int] = []

    def note(self) -> None:
        """Remember the parameters as they are."""
        if not self._params or self._places != self._present_places():
            self._choose()
        self._seen = [value.tobytes() for value in self._values]
        self._versions = self._present_versions()

    def moved(self) -> bool:
        """Whether the parameters differ from those remembered; False before the first `note`."""
        if self._places != self._present_places():
            return True
        return any(seen != value.tobytes() for seen, value in zip(self._seen, self._values, strict=True))

    def written(self) -> bool:
        """As `moved`, but on a device also if tensors were written to, e.g. by `load_state_dict`.

        True for good, too, if former values were put back in this way, so it is only for where a state is loaded.
        """
        return self.moved() or self._versions != self._present_versions()

    def _present_versions(self) -> list[int]:
        with torch._C.DisableTorchFunctionSubclass():
            return [param._version for param in self._params if param.device.type != "cpu"]

    def _present_places(self) -> list[int]:
        # Through the base class, to read it without waiting for a parameter behind a gate.
        with torch._C.DisableTorchFunctionSubclass():
            return [param.data_ptr() for param in self._params]

    def _choose(self) -> None:
        """Choose parameters spread over the network, and of each the value in the middle."""
        with torch._C.DisableTorchFunctionSubclass():
            every = [param for bucket in self._buckets for param in bucket.params if param.numel()]
            self._params = every[:: max(1, -(-len(every) // _MOST))]
            self._values = [_middle(param) for param in self._params if param.device.type == "cpu"]
        self._places = self._present_places()


def _middle(param: torch.nn.Parameter) -> npt.NDArray[np.uint8]:
    """Return a view of the bytes of one value."""
    raw = param.detach()
    one = raw.as_strided((1,), (1,), raw.storage_offset() + raw.numel() // 2)
    view: npt.NDArray[np.uint8] = one.view(torch.uint8).numpy()
    return view
