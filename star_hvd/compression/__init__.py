"""Gradients that travel smaller than they are: `Compression` with `auto`."""

from __future__ import annotations

from horovod.torch.compression import Compression as _Horovods
from horovod.torch.compression import NoneCompressor

__all__ = ["Compression"]


class AutoCompressor(NoneCompressor):  # type: ignore[misc]
    """Allows loss where it makes steps faster; see `star_hvd.compression.lossy_wire`.

    Where gradients are reduced one by one, exactly as in Horovod, they travel as they are.
    """


class Compression(_Horovods):  # type: ignore[misc]
    """Horovod's `none` and `fp16`, and `auto`: none, fp16 or low rank with error feedback, by what is measured."""

    auto: type[AutoCompressor] = AutoCompressor
