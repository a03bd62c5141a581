"""`star-hvd doctor`: what is installed, and which modes it allows."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import logging
import os
import platform
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

from star_hvd.patches import (
    CHEAP_DYNAMIC,
    LASTING_THREAD_STATES,
    NCCL_REMOVAL,
    NO_GIL,
    OWN_STREAM,
    SHARED_SETS,
    SURVIVE_DEATH,
    UNEVEN_HOSTS,
    build_list,
    forks_can_hang,
    horovod_patches,
    mode_limits,
)

__all__ = ["add_arguments", "build_problems", "examine", "run", "sees_gpu", "torch_facts"]

logger = logging.getLogger("star_hvd")

_PACKAGES = ("star-hvd", "torch", "horovod", "pyzmq", "msgpack", "psutil", "lightgbm", "mlflow", "nvidia-ml-py")
_BUILD = "build it with: python scripts/build_horovod.py"
_WAIT_S = 10.0  # Time limit of a subprocess.


# ---- examination --------------------------------------------------------------------------------------------------


def examine() -> dict[str, Any]:
    """Return all facts of `star-hvd doctor` as JSON types. Takes about a second, for subprocesses and NVML."""
    horovod, gpu_here = _horovod(), sees_gpu()
    limits = mode_limits(horovod_patches())
    return {
        "versions": _versions(),
        "horovod": horovod,
        "torch": torch_facts(),
        "modes": limits,
        "machine": _machine(),
        "problems": problems(horovod, limits, gpu_here=gpu_here),
        "notes": [] if gpu_here or horovod["error"] else _without_cuda(horovod, torch_facts(), gpu_here=False),
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
    listed = build_list()
    facts: dict[str, Any] = {"patches": listed.get("patches", []), "build": listed.get("build", {})}
    facts |= {"gloo": False, "nccl": False, "mpi": False, "cuda": False, "error": None}
    try:
        from horovod.torch import mpi_ops

        facts |= {name: bool(getattr(mpi_ops, f"{name}_built")()) for name in ("gloo", "nccl", "mpi", "cuda")}
    except Exception as error:  # A library built for another torch may raise anything.
        facts["error"] = f"{type(error).__name__}: {error}"
    return facts


def torch_facts() -> dict[str, str | None]:
    """Return the versions of torch, its CUDA and its NCCL; None for one that is absent or not reported."""
    try:
        import torch
    except ImportError:
        return {"torch": None, "cuda": None, "nccl": None}
    cuda, nccl = torch.version.cuda, None
    if cuda is not None:
        try:
            from torch.cuda import nccl as torch_nccl

            nccl = ".".join(str(part) for part in torch_nccl.version()[:3])
        except (AttributeError, ImportError, RuntimeError) as error:  # Built without it.
            logger.debug("torch reports no version of NCCL: %s", error)
    return {"torch": torch.__version__, "cuda": cuda, "nccl": nccl}


def sees_gpu(root: Path = Path("/")) -> bool:
    """Whether there is an NVIDIA GPU: its driver is loaded (as `scripts/gpu_build.py` decides), or torch finds one."""
    if (root / "proc/driver/nvidia/version").exists() or any(root.glob("dev/nvidia[0-9]*")):
        return True
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def _without_cuda(horovod: dict[str, Any], now: dict[str, str | None], *, gpu_here: bool) -> list[str]:
    """Return the sentence on a torch for CUDA beside a Horovod without it, if it is so."""
    if not now["cuda"] or horovod["cuda"]:
        return []
    effect = "so that GPU tensors cannot be reduced;" if gpu_here else "which is enough, as no GPU is here; for GPUs"
    return [
        f"torch is built for CUDA {now['cuda']}, but Horovod without CUDA, {effect} install a CUDA toolkit of that "
        f"version, then {_BUILD}"
    ]


def build_problems(horovod: dict[str, Any], now: dict[str, str | None], *, gpu_here: bool = True) -> list[str]:
    """Return mismatches between Horovod's build and the installed torch, as sentences that say what to do.

    Args:
        horovod: `build` (the versions it was built for, empty if not recorded), `cuda` and `nccl` (whether its library
            has them).
        now: See `torch_facts`.
        gpu_here: Whether this machine has a GPU. If not, Horovod may lack CUDA: the setup builds it so on purpose.
    """
    build, problems = horovod["build"], _other_torch(horovod["build"], now)
    if now["cuda"] and not horovod["cuda"]:
        problems += _without_cuda(horovod, now, gpu_here=True) if gpu_here else []
    elif horovod["cuda"] and not now["cuda"]:
        problems.append(f"Horovod was built for CUDA, but torch {now['torch']} without it; {_BUILD}")
    elif now["cuda"] and build.get("cuda") and _major(build["cuda"]) != _major(now["cuda"]):
        problems.append(
            f"Horovod was built for CUDA {build['cuda']}, but torch for CUDA {now['cuda']}; install that toolkit and "
            f"set HOROVOD_CUDA_HOME, then {_BUILD}"
        )
    if build.get("nccl") and now["nccl"] and build["nccl"] != now["nccl"]:
        problems.append(
            f"Horovod was built with NCCL {build['nccl']}, but torch loads NCCL {now['nccl']}; unset "
            f"HOROVOD_NCCL_HOME, so that torch's own is linked, then {_BUILD}"
        )
    return problems


def _other_torch(build: dict[str, Any], now: dict[str, str | None]) -> list[str]:
    if build.get("torch") and now["torch"] and build["torch"] != now["torch"]:
        return [f"Horovod was built for torch {build['torch']}, but torch {now['torch']} is here; {_BUILD}"]
    return []


def _major(version: str) -> str:
    return version.partition(".")[0]


def problems(horovod: dict[str, Any], limits: dict[str, dict[str, str]], *, gpu_here: bool = True) -> list[str]:
    """Return the problems that prevent or limit a mode, as sentences that say what to do."""
    if horovod["error"]:
        # A library that cannot be loaded does not say what it has; the record of its build may say why.
        unusable = f"Horovod cannot be used ({horovod['error']}); {_BUILD}"
        return [unusable, *_other_torch(horovod["build"], torch_facts())]
    problems = build_problems(horovod, torch_facts(), gpu_here=gpu_here)
    if not horovod["gloo"]:
        problems.append(f"Horovod was built without Gloo, which its control messages need here; {_BUILD}")
    present = {entry["number"] for entry in horovod["patches"]}
    missing = [number for number in (SURVIVE_DEATH, CHEAP_DYNAMIC, NO_GIL, UNEVEN_HOSTS) if number not in present]
    if SHARED_SETS not in present:
        problems.append(
            f"Horovod lacks the patch {SHARED_SETS}: a thread that uses a process set while it is removed can crash "
            f"the process; {_BUILD}"
        )
    if forks_can_hang(frozenset(present)):
        problems.append(
            f"Horovod lacks the patch {LASTING_THREAD_STATES}: with Python before 3.12 a loading worker that is forked "
            f"during a reduction can hang, and the job with it; {_BUILD}"
        )
    if horovod["cuda"] and OWN_STREAM not in present:
        problems.append(
            f"Horovod lacks the patch {OWN_STREAM}: copies from the host wait for the kernels of a late rank; {_BUILD}"
        )
    if horovod["nccl"] and NCCL_REMOVAL not in present:
        problems.append(
            f"Horovod lacks the patch {NCCL_REMOVAL}: under NCCL process sets cannot be removed; {_BUILD}"
        )
    if missing:
        limited = [mode for mode, reasons in limits.items() if reasons]
        hit = f"limits {' and '.join(limited)}" if limited else "lets one late rank block threads of others"
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
    """Whether this process may limit the CPU time of others, which the benchmarks do to emulate slow hosts."""
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
    """Describe the GPUs that NVML finds; without NVML a slow GPU cannot be distinguished from a slow host."""
    try:
        import pynvml
    except ImportError:
        return "pynvml is missing (package nvidia-ml-py): GPUs are not monitored"
    try:
        pynvml.nvmlInit()
        count = int(pynvml.nvmlDeviceGetCount())
        pynvml.nvmlShutdown()
    except Exception as error:  # pynvml's own class, or a damaged driver's OSError.
        return f"pynvml is installed, NVML is not: {error}"
    return f"{count} monitored by NVML"


def _channel() -> str:
    """Describe the interface and address of this host for the other ranks."""
    from star_hvd import env

    chosen = env.interface() or "the one of the host name"
    try:
        from star_hvd.channel.keys import own_address
    except ImportError as error:  # Errors of a job are Horovod's, too.
        return f"interface {chosen}, address not known without Horovod: {error}"
    try:
        return f"interface {chosen}, address {own_address(single_host=False)}"
    except (OSError, RuntimeError) as error:
        return f"interface {chosen}: {error}"


# ---- command ------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `star-hvd doctor`."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(options: argparse.Namespace) -> int:
    """Print the facts; return exit status 0 if there is no problem, else 1."""
    facts = examine()
    if options.json:
        print(json.dumps(facts, indent=1))
    else:
        _show(facts)
    return 1 if facts["problems"] else 0


def _built_for(build: dict[str, str | None], name: str) -> str:
    return (build[name] or "none") if name in build else "not recorded: built elsewhere, or by an older version"


def _show(facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table("", "", title="installed", title_justify="left", show_header=False)
    for name, version in facts["versions"].items():
        table.add_row(name, version or "absent")
    built = [name for name in ("gloo", "cuda", "nccl", "mpi") if facts["horovod"][name]]
    table.add_row("horovod has", ", ".join(built) or "nothing")
    for name in ("torch", "cuda", "toolkit", "nccl"):
        table.add_row(f"built for {name}", _built_for(facts["horovod"]["build"], name))
    for name, version in facts["torch"].items():
        if name != "torch":
            table.add_row(f"torch has {name}", version or "none")
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
    for note in facts["notes"]:
        console.print(f"note: {note}", style="yellow", markup=False)
    if not facts["problems"]:
        console.print("this Horovod allows all modes", style="bold green")
