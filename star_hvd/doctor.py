"""What is installed here and which modes it allows: `star-hvd doctor`."""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

from scheduler.plans import MODES

__all__ = [
    "CHEAP_DYNAMIC",
    "NO_GIL",
    "SURVIVE_DEATH",
    "UNEVEN_HOSTS",
    "add_arguments",
    "examine",
    "horovod_patches",
    "mode_limits",
    "run",
]

# Numbers of Horovod's patches; patches/README.md says what each is for.
SURVIVE_DEATH = "0003"
CHEAP_DYNAMIC = "0004"
NO_GIL = "0005"
UNEVEN_HOSTS = "0006"

_PATCH_LIST = "star_patches.json"
_PACKAGES = ("star-hvd", "torch", "horovod", "pyzmq", "msgpack", "psutil", "lightgbm", "mlflow", "nvidia-ml-py")
_PROCESS_SET_MODES = ("subgroup", "grouped")
_BUILD = "build it with: python scripts/build_horovod.py"
_WAIT_S = 10.0  # For a program that is asked something.


# ---- Horovod's patches --------------------------------------------------------------------------------------------


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


def mode_limits(patches: frozenset[str]) -> dict[str, dict[str, str]]:
    """Why a mode is not to be had with these patches: mode -> circumstance -> reason. Nothing for a free mode.

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


# ---- examination --------------------------------------------------------------------------------------------------


def examine() -> dict[str, Any]:
    """Everything `star-hvd doctor` tells, as JSON types. Takes a second: it asks other programs and NVML."""
    horovod = _horovod()
    limits = mode_limits(horovod_patches())
    return {
        "versions": _versions(),
        "horovod": horovod,
        "modes": limits,
        "machine": _machine(),
        "problems": _problems(horovod, limits),
    }


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _horovod() -> dict[str, Any]:
    facts: dict[str, Any] = {"patches": _patch_list(), "gloo": False, "nccl": False, "mpi": False, "error": None}
    try:
        from horovod.torch import mpi_ops

        facts |= {name: bool(getattr(mpi_ops, f"{name}_built")()) for name in ("gloo", "nccl", "mpi")}
    except Exception as error:  # Whatever a library built for another torch raises.
        facts["error"] = f"{type(error).__name__}: {error}"
    return facts


def _problems(horovod: dict[str, Any], limits: dict[str, dict[str, str]]) -> list[str]:
    """What keeps a mode from working, in sentences; empty where all is well."""
    if horovod["error"]:
        return [f"Horovod cannot be used ({horovod['error']}); {_BUILD}"]
    problems = []
    if not horovod["gloo"]:
        problems.append(f"Horovod was built without Gloo, which carries its control messages here; {_BUILD}")
    present = {entry["number"] for entry in horovod["patches"]}
    missing = [number for number in (SURVIVE_DEATH, CHEAP_DYNAMIC, NO_GIL, UNEVEN_HOSTS) if number not in present]
    if missing:
        limited = [mode for mode, reasons in limits.items() if reasons]
        hit = f"limits {' and '.join(limited)}" if limited else "lets one late rank freeze others' threads"
        problems.append(f"Horovod lacks the patches {', '.join(missing)}, which {hit}; {_BUILD}")
    return problems


def _machine() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "cores": len(os.sched_getaffinity(0)),
        "shm_free_bytes": shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else None,
        "cgroup": _cgroup(),
        "network_namespaces": _network_namespaces(),
        "gpus": _gpus(),
        "channel": _channel(),
    }


def _cgroup() -> str:
    """Whether this process may limit the CPU time of others, as the benchmarks' slow hosts need."""
    root = Path("/sys/fs/cgroup")
    version = 2 if (root / "cgroup.controllers").is_file() else 1 if (root / "cpu").is_dir() else 0
    if version == 0:
        return "no: no control groups here"
    writable = os.access(root if version == 2 else root / "cpu", os.W_OK)
    return f"version {version}, {'may be changed' if writable else 'read only: run as root to emulate slow hosts'}"


def _network_namespaces() -> str:
    program = shutil.which("unshare")
    if program is None:
        return "no: the program unshare is missing (package util-linux)"
    try:
        done = subprocess.run([program, "-n", "true"], capture_output=True, text=True, timeout=_WAIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no: {error}"
    return "yes" if done.returncode == 0 else f"no: {done.stderr.strip().splitlines()[-1:] or done.returncode}"


def _gpus() -> str:
    """What NVML sees; without it a slow GPU cannot be told from a slow host."""
    try:
        import pynvml
    except ImportError:
        return "pynvml is missing (package nvidia-ml-py): GPUs are not watched"
    try:
        pynvml.nvmlInit()
        count = int(pynvml.nvmlDeviceGetCount())
        pynvml.nvmlShutdown()
    except Exception as error:  # pynvml's own class, or a damaged driver's OSError.
        return f"pynvml is there, NVML is not: {error}"
    return f"{count} watched by NVML"


def _channel() -> str:
    """Interface and address under which the others would reach this host."""
    from star_hvd import env
    from star_hvd.channel.keys import own_address

    chosen = env.interface() or "the one of the host name"
    try:
        return f"interface {chosen}, address {own_address(single_host=False)}"
    except (OSError, RuntimeError) as error:
        return f"interface {chosen}: {error}"


# ---- command ------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `star-hvd doctor`."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(options: argparse.Namespace) -> int:
    """Print what is here. Exit status 0 if every mode works, else 1."""
    facts = examine()
    if options.json:
        print(json.dumps(facts, indent=1))
    else:
        _show(facts)
    return 1 if facts["problems"] else 0


def _show(facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table("", "", title="installed", title_justify="left", show_header=False)
    for name, version in facts["versions"].items():
        table.add_row(name, version or "absent")
    built = [name for name in ("gloo", "nccl", "mpi") if facts["horovod"][name]]
    table.add_row("horovod has", ", ".join(built) or "nothing")
    for entry in facts["horovod"]["patches"]:
        table.add_row(f"patch {entry['number']}", f"{entry['name']} ({entry['sha256'][:12]})")
    console.print(table)
    columns = ("mode", "always", "elastic training", "several hosts")
    table = Table(*columns, title="modes this Horovod allows", title_justify="left")
    for mode, limits in facts["modes"].items():
        table.add_row(mode, *(limits.get(when, "yes") for when in ("always", "elastic", "hosts")))
    console.print(table)
    table = Table("", "", title="machine", title_justify="left", show_header=False)
    for name, value in facts["machine"].items():
        shown = f"{value / 2**20:.0f} MiB" if name == "shm_free_bytes" and value is not None else str(value)
        table.add_row(name.removesuffix("_bytes").replace("_", " "), shown)
    console.print(table)
    for problem in facts["problems"]:
        console.print(f"problem: {problem}", style="bold red", markup=False)
    if not facts["problems"]:
        console.print("Horovod stands in the way of no mode", style="bold green")
