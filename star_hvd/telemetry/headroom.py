"""Processors that a host has left for one more process: idle time of the usable ones, within the CPU quota.

An idle processor counts less if tasks of this process's control group wait nevertheless (pressure stall information):
this shows that the idle time comes in pieces too short, or on processors too far away, to be used. The pressure of the
whole host is no indication: with many processors some task waits nearly always.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path

__all__ = ["CpuHeadroom", "idle_seconds", "quota_cores", "usable_cpus"]

_STAT = Path("/proc/stat")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_IDLE, _USED = "idle_cores", "quota_used_cores"  # Counters in processor seconds.


def usable_cpus() -> frozenset[int]:
    """Return the processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def idle_seconds(stat: str, cpus: Iterable[int], *, yielding: bool = False) -> float:
    """Return the idle time of some processors since the machine's start, from the text of `/proc/stat`.

    Args:
        stat: The text.
        cpus: Numbers of the processors.
        yielding: Whether time of niced processes counts as idle, since they yield to others.

    Raises:
        ValueError: The text contains none of these processors.
    """
    wanted = {f"cpu{number}" for number in cpus}
    # cpu0 user nice system idle iowait irq softirq steal guest guest_nice
    rows = [fields for line in stat.splitlines() if (fields := line.split()) and fields[0] in wanted]
    if not rows:
        raise ValueError("no line of a usable processor in /proc/stat")
    columns = (2, 4, 5) if yielding else (4, 5)
    return sum(float(fields[column]) for fields in rows for column in columns) / _TICKS_PER_S


def quota_cores(cgroup: Path) -> float:
    """Return a control group's CPU quota in processors, infinite without one: `cpu.max`, or the files of version 1."""
    with contextlib.suppress(OSError):
        quota, period = (cgroup / "cpu.max").read_text(encoding="ascii").split()
        return math.inf if quota == "max" else float(quota) / float(period)
    quota_us = float((cgroup / "cpu.cfs_quota_us").read_text(encoding="ascii"))
    return math.inf if quota_us <= 0.0 else quota_us / float((cgroup / "cpu.cfs_period_us").read_text(encoding="ascii"))


_LIMITS_EVERY = 16  # Samples between two searches for the limiting group.


def limiting(cgroup: Path) -> Path:
    """Return the control group whose quota limits this one: itself, or a group above it with a smaller quota."""
    found, least = cgroup, math.inf
    for place in (cgroup, *cgroup.parents):
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            if (cores := quota_cores(place)) < least:
                found, least = place, cores
    return found


class CpuHeadroom:
    """Idle processors of this process's host, as counters and from their rates.

    Args:
        cgroup: Control group of this process, None if there is none.
        stat: The file with the processors' times.
        cpus: Returns the processors that this process may run on.
    """

    def __init__(
        self, cgroup: Path | None, stat: Path = _STAT, cpus: Callable[[], frozenset[int]] = usable_cpus
    ) -> None:
        self._cgroup, self._stat, self._cpus = cgroup, stat, cpus
        self._limiting, self._samples = cgroup, 0

    def counters(self) -> dict[str, float]:
        """Return the counters whose rates `free_cores` takes; those that cannot be read are missing."""
        found = {}
        with contextlib.suppress(OSError, ValueError, IndexError):
            text = self._stat.read_text(encoding="ascii")
            found[_IDLE] = idle_seconds(text, self._cpus(), yielding=os.nice(0) < 1)
        if self._cgroup is not None and self._limiting is not None:
            if self._samples % _LIMITS_EVERY == 0:  # Quotas hardly ever change, and each group means reading a file.
                self._limiting = limiting(self._cgroup)
            self._samples += 1
            with contextlib.suppress(OSError, ValueError, IndexError):
                found[_USED] = _used_seconds(self._limiting)
        return found

    def free_cores(self, rates: dict[str, float]) -> float:
        """Return the processors left for another process, NaN if unknown; removes its own rates from `rates`.

        Args:
            rates: Rates of all counters of a sample, including pressure.
        """
        idle, used = rates.pop(_IDLE, math.nan), rates.pop(_USED, math.nan)
        left = math.nan
        if self._limiting is not None:
            with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
                left = quota_cores(self._limiting) - (used if math.isfinite(used) else 0.0)
        if math.isnan(idle):
            return idle
        idle = min(idle, float(len(self._cpus())))  # The usable processors may have changed between two samples.
        pressure = rates.get("psi_cgroup_share", math.nan)
        free = idle * (1.0 - min(1.0, pressure)) if math.isfinite(pressure) else idle
        return max(0.0, min(free, left) if math.isfinite(left) else free)


def _used_seconds(cgroup: Path) -> float:
    """Return the CPU time used by a control group; version 1 may count it in a separate hierarchy."""
    for place in (cgroup, Path(str(cgroup).replace("/cpu/", "/cpuacct/", 1))):
        with contextlib.suppress(OSError):
            return 1e-9 * float((place / "cpuacct.usage").read_text(encoding="ascii"))
    for line in (cgroup / "cpu.stat").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(" ")
        if name == "usage_usec":
            return 1e-6 * float(value)
    raise ValueError("no usage_usec in cpu.stat")
