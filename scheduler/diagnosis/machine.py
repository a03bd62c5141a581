"""Evidence from a slow rank's machine for the cause: CPU quota, pressure, clocks. Pure.

Measurements are compared with those of the other ranks: pressure that all ranks share explains no straggler.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from scheduler.stats import lower_median

__all__ = ["MachineStats", "machine_evidence", "throttled_shares"]

_THROTTLED = 0.1  # Share of time below which throttling by a quota costs less than jitter.
_PRESSURE, _PRESSURE_LEAD = 0.4, 0.25
_CLOCK = 0.85  # Fraction of the other ranks' clock share: GPUs of one model boost within a few percent of each other.
_DROPS_PER_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineStats:
    """A rank's latest measurements; NaN if not available on its machine.

    Attributes:
        throttled_share: Share of the time its control group was throttled by a CPU quota.
        pressure_share: Share of the time some task of its host waited for a processor.
        gpu_clock_share: Clock of its GPU relative to the highest one.
        gpu_throttled: 1 while power, heat or a hardware brake reduces that clock, else 0.
        gpu_temperature_c: Degrees Celsius.
        nic_drops_per_s: Packets per second that its network interface dropped or received damaged.
        free_cpu_cores: Idle processors of its host, of those it may use and within its quota.
        own_cpu_cores: Processors that its process uses.
        usable_cpu_cores: Processors it may use.
        neighbour_ranks: Ranks of this user's other jobs on the same processors.
    """

    throttled_share: float = math.nan
    pressure_share: float = math.nan
    gpu_clock_share: float = math.nan
    gpu_throttled: float = math.nan
    gpu_temperature_c: float = math.nan
    nic_drops_per_s: float = math.nan
    free_cpu_cores: float = math.nan
    own_cpu_cores: float = math.nan
    usable_cpu_cores: float = math.nan
    neighbour_ranks: float = math.nan

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Names of the measurements."""
        return tuple(item.name for item in fields(cls))


def machine_evidence(rank: int, machines: Sequence[MachineStats]) -> str:
    """Phrases on what slows a rank's machine, joined by `; `; empty if nothing was found.

    Args:
        rank: The slow rank.
        machines: Measurements of all ranks, in order.
    """
    own = machines[rank]
    others = [machine for index, machine in enumerate(machines) if index != rank]
    found = []
    if own.throttled_share > _THROTTLED:
        found.append(f"a CPU quota throttles it {_percent(own.throttled_share)} of the time")
    usual = _median([machine.pressure_share for machine in others])
    if own.pressure_share > _PRESSURE and own.pressure_share > usual + _PRESSURE_LEAD:
        found.append(f"tasks of its host wait for a CPU {_percent(own.pressure_share)} of the time")
    usual = _median([machine.gpu_clock_share for machine in others])
    if own.gpu_clock_share < _CLOCK * (usual if math.isfinite(usual) else 1.0):
        why = " for power or heat" if own.gpu_throttled > 0.0 else ""
        hot = f" at {own.gpu_temperature_c:.0f} C" if math.isfinite(own.gpu_temperature_c) else ""
        found.append(f"its GPU is clocked down to {_percent(own.gpu_clock_share)}{why}{hot}")
    if own.nic_drops_per_s > _DROPS_PER_S:
        found.append(f"its network interface loses {own.nic_drops_per_s:.0f} packets per second")
    return "; ".join(found)


def throttled_shares(machines: Sequence[MachineStats]) -> list[float]:
    """Share of the time each rank is throttled by its quota, less the lower median over all ranks, at least 0."""
    shares = np.array([machine.throttled_share for machine in machines], dtype=np.float64)
    shares[~np.isfinite(shares)] = 0.0
    return list(np.clip(shares - lower_median(shares), 0.0, 1.0).tolist())


def _median(values: Sequence[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return lower_median(known) if known else math.nan


def _percent(share: float) -> str:
    return f"{100.0 * share:.0f} %"
