"""A real CPU quota on this process, through a control group (v1 or v2) of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["LEAST_QUOTA_S", "LONGEST_PERIOD_S", "CpuGroup", "CpuQuota", "QuotaError", "find_cpu_group", "own_group"]

CGROUP_ROOT = Path("/sys/fs/cgroup")
PROC_CGROUP = Path("/proc/self/cgroup")
LEAST_QUOTA_S, LONGEST_PERIOD_S = 1e-3, 1.0  # The kernel takes no others.


class QuotaError(RuntimeError):
    """No CPU quota can be set here; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuGroup:
    """A control group whose children can have a CPU quota.

    Attributes:
        version: 1 or 2.
        path: Where children are created.
        home: The current group of this process, to which it returns.
    """

    version: int
    path: Path
    home: Path


def own_group(proc_text: str, controller: str) -> str | None:
    """Return this process's group for `controller` ("" for version 2), given the text of /proc/self/cgroup."""
    for line in proc_text.splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if (controller == "" and controllers == "") or (controller and controller in controllers.split(",")):
            return path
    return None


def find_cpu_group(
    root: Path = CGROUP_ROOT,
    proc: Path = PROC_CGROUP,
    writable: Callable[[Path], bool] = lambda path: os.access(path, os.W_OK),
) -> CpuGroup:
    """Find a group in which a child with a CPU quota can be created.

    Args:
        root: Where control groups are mounted.
        proc: The file that names the groups of this process.
        writable: Whether a path can be written; replaced in tests.

    Raises:
        QuotaError: None was found; the message says what is missing.
    """
    try:
        text = proc.read_text(encoding="utf-8")
    except OSError as error:
        raise QuotaError(f"no control groups here: {error}") from None
    if (root / "cgroup.controllers").is_file():
        return _version_2(root, own_group(text, "") or "/", writable)
    for folder in ("cpu", "cpu,cpuacct", "cpuacct,cpu"):
        if (root / folder / "cpu.cfs_quota_us").is_file() or (root / folder / "cgroup.procs").is_file():
            return _version_1(root / folder, own_group(text, "cpu") or "/", writable)
    raise QuotaError(f"{root} has neither version 2 nor the cpu controller of version 1")


def _version_1(mount: Path, own: str, writable: Callable[[Path], bool]) -> CpuGroup:
    path = mount / own.lstrip("/")
    # Inside a container the path in /proc may be the host's, which is not visible here.
    if not path.is_dir():
        path = mount
    if not writable(path):
        raise QuotaError(f"{path} cannot be written: run as root, or in a container with writable control groups")
    return CpuGroup(version=1, path=path, home=path)


def _version_2(root: Path, own: str, writable: Callable[[Path], bool]) -> CpuGroup:
    home = root / own.lstrip("/")
    if not home.is_dir():
        home = root
    # Version 2 allows processes only in leaves, so the new group is created beside ours, not inside.
    parent = home if home == root else home.parent
    for path in (parent, root):
        control = path / "cgroup.subtree_control"
        if control.is_file() and "cpu" in control.read_text(encoding="utf-8").split():
            if not writable(path):
                continue
            return CpuGroup(version=2, path=path, home=home)
    raise QuotaError(
        f"version 2 below {root}: no writable group passes the cpu controller on to its children "
        f"(looked at {parent}): run as root outside a container, or with `--privileged --cgroupns=host`"
    )


class CpuQuota:
    """Limits this process, with all its threads, to part of one core while inside the `with` block."""

    def __init__(self, cores: float, period_s: float, group: CpuGroup | None = None) -> None:
        """Prepare the limit; nothing is changed yet.

        Args:
            cores: Allowed share, 0.25 for a quarter of one core; with the period at least `LEAST_QUOTA_S`.
            period_s: Length of an accounting period: once its share is used, the process is stopped until
                the period ends. Containers use 0.1.
            group: Where to create the group; found automatically if omitted.
        """
        self._quota_us = round(cores * period_s * 1e6)
        self._period_us = round(period_s * 1e6)
        self._group = group or find_cpu_group()
        self._path = self._group.path / f"straggler-{os.getpid()}"

    def __enter__(self) -> CpuQuota:
        try:
            self._path.mkdir(exist_ok=True)
            if self._group.version == 2:
                (self._path / "cpu.max").write_text(f"{self._quota_us} {self._period_us}")
            else:
                (self._path / "cpu.cfs_period_us").write_text(str(self._period_us))
                (self._path / "cpu.cfs_quota_us").write_text(str(self._quota_us))
            (self._path / "cgroup.procs").write_text(str(os.getpid()))
        except OSError as error:
            self.__exit__()
            raise QuotaError(f"cannot set a CPU quota in {self._path}: {error}") from None
        return self

    def __exit__(self, *_: object) -> None:
        try:
            (self._group.home / "cgroup.procs").write_text(str(os.getpid()))
            self._path.rmdir()
        except OSError:  # An empty group remains, which does not affect the result.
            pass
