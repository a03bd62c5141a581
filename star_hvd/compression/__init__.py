"""Compressed gradients: Horovod's `Compression`, with `auto` added."""

from __future__ import annotations

from horovod.torch.compression import Compression as _Horovods
from horovod.torch.compression import NoneCompressor

__all__ = ["Compression"]


class AutoCompressor(NoneCompressor):  # type: ignore[misc]
    """Allows lossy compression where it makes steps faster; see `star_hvd.compression.lossy_wire`.

    If gradients are reduced one by one, exactly as in Horovod, they are sent uncompressed.
    """


class Compression(_Horovods):  # type: ignore[misc]
    """Horovod's `none` and `fp16`, and `auto`: none, fp16 or low rank with error feedback, chosen by measurement."""

    auto: type[AutoCompressor] = AutoCompressor
