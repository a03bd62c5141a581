"""The patches that the installed Horovod was built with, and the modes they allow."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from scheduler.plan.plan import MODES

__all__ = [
    "CHEAP_DYNAMIC",
    "LASTING_THREAD_STATES",
    "NCCL_REMOVAL",
    "NO_GIL",
    "OWN_STREAM",
    "SHARED_SETS",
    "SURVIVE_DEATH",
    "UNEVEN_HOSTS",
    "build_list",
    "forks_can_hang",
    "horovod_patches",
    "horovod_release",
    "mode_limits",
]

# Numbers of Horovod's patches; patches/README.md says what each is for.
SURVIVE_DEATH = "0003"
CHEAP_DYNAMIC = "0004"
NO_GIL = "0005"
UNEVEN_HOSTS = "0006"
OWN_STREAM = "0007"
NCCL_REMOVAL = "0009"
SHARED_SETS = "0010"
LASTING_THREAD_STATES = "0013"
_PATCH_LIST = "star_patches.json"
_PROCESS_SET_MODES = ("subgroup", "grouped")


@functools.cache
def horovod_patches() -> frozenset[str]:
    """Return the numbers of the patches in the installed Horovod, `0003` for example, without importing it.

    Empty for a Horovod that was built elsewhere, and without Horovod.
    """
    return frozenset(entry["number"] for entry in build_list().get("patches", []))


def build_list() -> dict[str, Any]:
    """Return the record of the installed Horovod's build: `horovod`, `patches` and, in newer ones, `build`.

    Empty for a Horovod that was built elsewhere, and without Horovod.
    """
    spec = importlib.util.find_spec("horovod")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / _PATCH_LIST
        if path.is_file():
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return found
    return {}


def horovod_release() -> str | None:
    """Return the version of the installed Horovod without the local part; None without Horovod."""
    try:
        return importlib.metadata.version("horovod").partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


def forks_can_hang(patches: frozenset[str], python: tuple[int, ...] = sys.version_info[:2]) -> bool:
    """Whether a process forked from a rank, a loading worker for example, can hang at its start with these patches."""
    return LASTING_THREAD_STATES not in patches and python < (3, 12)


def mode_limits(patches: frozenset[str]) -> dict[str, dict[str, str]]:
    """Return the limits of the modes with these patches: mode -> circumstance -> reason; empty for an unlimited mode.

    Circumstances: `always`, `elastic` (elastic training), `hosts` (more than one host).
    """
    limits: dict[str, str] = {}
    if CHEAP_DYNAMIC not in patches:
        limits["always"] = f"needs patch {CHEAP_DYNAMIC}; else only sets of all ranks but one, up to 8 ranks"
        limits["elastic"] = f"needs patch {CHEAP_DYNAMIC}: sets made at the start do not outlive a reset"
    if SURVIVE_DEATH not in patches:
        limits["elastic"] = f"needs patch {SURVIVE_DEATH}: one dead rank would abort every survivor"
    if UNEVEN_HOSTS not in patches:
        limits["hosts"] = f"needs patch {UNEVEN_HOSTS}: sets with unequal numbers of ranks per host end the job"
    return {mode: dict(limits) if mode in _PROCESS_SET_MODES else {} for mode in MODES}
