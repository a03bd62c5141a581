"""Parameters and environment of a job, as known to one process.

Also whether its optimizer has state from an earlier training: a time to the target that only continues one says nothing
about a mode (`scheduler/learning/logged_rows.py`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import psutil

from scheduler.redact import redacted

__all__ = ["environment", "has_trained_state", "note_initial_state", "optimizer_facts"]

_PACKAGES = ("torch", "horovod", "star-hvd", "numpy", "mlflow")

_MARK = "_star_initial_state"  # In the optimizer's `__dict__`, which it shares with the object that wraps it.


def environment(hosts: Sequence[str] = ()) -> dict[str, Any]:
    """Return hosts, hardware, versions, the program and its commit. Call it off the training thread: git takes 10 ms.

    Args:
        hosts: Address or name of every rank's host, in order of rank.
    """
    names = list(dict.fromkeys(hosts))
    return {
        "hosts": names,
        "ranks_per_host": [list(hosts).count(name) for name in names],
        "program": redacted(" ".join([Path(sys.argv[0]).name if sys.argv else "", *sys.argv[1:]]))[:400],
        "git_commit": _commit_here(),
        "hardware": _hardware(),
        "versions": {"python": platform.python_version(), **dict(_versions())},
    }


def optimizer_facts(optimizer: Any, bucket_bytes: Iterable[int] = ()) -> dict[str, Any]:
    """Return class, hyperparameters and size of a `torch.optim` optimizer.

    Args:
        optimizer: Anything with `param_groups`.
        bucket_bytes: Sizes of the gradient buffers.
    """
    groups = optimizer.param_groups
    sizes = [(param.numel(), param.element_size()) for group in groups for param in group["params"]]
    hyper = {name: _plain(value) for name, value in groups[0].items() if name != "params"} if groups else {}
    buckets = list(bucket_bytes)
    return {
        "class": type(optimizer).__name__,
        "hyper": {name: value for name, value in hyper.items() if isinstance(value, (int, float, str, bool, tuple))},
        "groups": len(groups),
        "tensors": len(sizes),
        "parameters": sum(count for count, _ in sizes),
        "parameter_bytes": sum(count * width for count, width in sizes),
        "buckets": len(buckets),
        "bucket_bytes": max(buckets, default=0),
    }


def _plain(value: Any) -> Any:
    """Return the number in a tensor of one element or a scalar of numpy, of tuples likewise; other values stay."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    # Without importing torch or numpy, which readers of logs may lack.
    size = value.numel() if hasattr(value, "numel") else getattr(value, "size", 0)
    return value.item() if size == 1 and hasattr(value, "item") else value


def note_initial_state(optimizer: Any) -> None:
    """Note that the present state is from no training step, but from the one on zero gradients that Horovod makes.

    Under weight decay this step makes momentum that looks like that of a training.
    """
    state = vars(optimizer).get("state")
    if state:
        # A loaded state has other entries, so it is not taken for this one.
        vars(optimizer)[_MARK] = next(iter(state.values()))


def has_trained_state(optimizer: Any) -> bool:
    """Whether the optimizer has state from training steps: a tensor of different numbers, momentum for example.

    Initial states are constant, zero in most optimizers. Without state (SGD without momentum) it is unknown: False.
    """
    state = vars(optimizer).get("state")
    # Forgotten here: after steps the same entries have the state of a training.
    initial = vars(optimizer).pop(_MARK, None)
    if not state or next(iter(state.values())) is initial:
        return False
    return any(_varies(value) for entry in state.values() if isinstance(entry, dict) for value in entry.values())


def _varies(value: Any) -> bool:
    import torch  # Not above: readers of logs have no torch.

    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.numel() < 2:
        return False
    return bool((value != value.reshape(-1)[0]).any())


def _commit_here() -> str:
    with contextlib.suppress(OSError):  # The current directory was removed.
        return _git_commit(os.getcwd())
    return ""


@functools.lru_cache(maxsize=1)
def _git_commit(folder: str) -> str:
    """Return the commit of a folder, empty if it is in no repository. Cached for all optimizers of a job."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", folder, "rev-parse", "HEAD"]  # Its errors may contain names that are not UTF-8.
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=5.0)
        if done.returncode == 0:
            return done.stdout.strip()
    return ""


def _hardware() -> dict[str, Any]:
    facts: dict[str, Any] = {
        "machine": platform.machine(),
        "cpu": cpu_name(),
        "cpus": os.cpu_count() or 0,
        "usable_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0,
        "memory_bytes": int(psutil.virtual_memory().total),
        "kernel": platform.release(),
    }
    torch = sys.modules.get("torch")  # Not imported here, because a process may not need it.
    if torch is not None:
        with contextlib.suppress(Exception):
            if torch.cuda.is_initialized():  # Reading the name would initialize CUDA in a CPU job.
                facts |= {"gpus": int(torch.cuda.device_count()), "gpu": torch.cuda.get_device_name()}
    return facts


def cpu_name() -> str:
    """Return the name of the processor's model."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


@functools.lru_cache(maxsize=1)
def _versions() -> tuple[tuple[str, str], ...]:
    found = []
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append((name, importlib.metadata.version(name)))
    return tuple(found)
