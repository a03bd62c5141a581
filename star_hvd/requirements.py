"""Imported first: raises an error with instructions if Horovod is missing or was built for another torch."""

from __future__ import annotations

__all__: list[str] = []

try:
    from horovod.torch import mpi_ops as _mpi_ops  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"star_hvd needs Horovod built for the installed torch, and importing it failed: {error}. "
        "Build it with: python scripts/build_horovod.py (or make setup) in a checkout of this project"
    ) from error
