"""Tells what is installed here and which modes it allows: `star-hvd doctor`."""

from __future__ import annotations

import functools
import importlib.util
import json
from pathlib import Path

__all__ = ["CHEAP_DYNAMIC", "NO_GIL", "SURVIVE_DEATH", "horovod_patches"]

SURVIVE_DEATH = "0003"
CHEAP_DYNAMIC = "0004"
NO_GIL = "0005"

_PATCH_LIST = "star_patches.json"


@functools.cache
def horovod_patches() -> frozenset[str]:
    """Numbers of the patches that the installed Horovod was built with, `0003` for example.

    Empty for a Horovod that was built elsewhere, and without one. Horovod itself is not imported.
    """
    return frozenset(entry["number"] for entry in _patch_list())


def _patch_list() -> list[dict[str, str]]:
    spec = importlib.util.find_spec("horovod")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / _PATCH_LIST
        if path.is_file():
            found: list[dict[str, str]] = json.loads(path.read_text(encoding="utf-8"))["patches"]
            return found
    return []
