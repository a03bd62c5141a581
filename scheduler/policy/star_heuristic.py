"""STAR's heuristic choice of mode, as published: a baseline of evaluations.

With the predicted iteration times t of the n workers (compute and communication; Zhang and Shen 2025, their code):

* Gate: a worker straggles if it exceeds the fastest by more than 20 %. A mode is chosen when the gate turns on and kept
  until it turns off, when the job returns to SSGD.
* K(x) = 1 + phi / (x b): updates to equal progress with x gradients each.
* Static x-order: tau(x) = T + (t(n) - T) (t(x) - t(1)) / (t(n) - t(1)) with T = 1 / sum(1 / t). x is scanned upwards to
  the first with tau(x) K(x) < tau(x + 1) K(x + 1), the first local minimum; x = n if there is none.
* Dynamic groups: agglomerative, 50 ms; cost 1 / sum over groups of 1 / (K(|G|) max t); taken if below the static one.
* All-reduce variant: the x fastest make the ring, the others are children; cost t(x) K(x), same scan.

Defects of the published code are not reproduced: a scan that never advances its left side, static and dynamic branches
exchanged, a worker's number instead of its group's time, a division by zero for equal times, a comparison instead of an
assignment for x = n, an empty return to SSGD, and ignored changes between groups. Its forecast is an LSTM published
without weights; the mean of the last five times replaces it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from scheduler.plan.grouping import similar_groups
from scheduler.plan.plan import Plan
from scheduler.records import RankStats, Window
from scheduler.stats import lower_median

__all__ = ["StarHeuristic", "choose_dynamic", "choose_static", "predicted_times_s"]

_GATE = 0.2
_GROUP_S = 0.05
_RECENT = 5


class StarHeuristic:
    """The heuristic as a policy.

    Args:
        world_size: Number of ranks.
        architecture: `ps` or `all_reduce`.
        noise: phi in gradients of one rank, if the window has none.

    Raises:
        ValueError: The architecture is unknown.
    """

    def __init__(self, world_size: int, *, architecture: str = "ps", noise: float = 3.0) -> None:
        if architecture not in ("ps", "all_reduce"):
            raise ValueError(f"architecture is {architecture!r}; expected ps or all_reduce")
        self.world_size = world_size
        self._architecture = architecture
        self._noise = noise
        self._straggling = False

    def decide(self, window: Window, active: Plan) -> Plan | None:
        """Return the plan to switch to when the gate changes, else None."""
        times = predicted_times_s(window)
        if times is None:
            return None
        fastest = min(times)
        straggling = (max(times) - fastest) / fastest > _GATE
        flipped, self._straggling = straggling != self._straggling, straggling
        if not flipped:
            return None
        if not straggling:
            calm = Plan.sync(self.world_size)
            return None if active.mode == "sync" else self._finish(calm, active, "no worker straggles")
        phi = window.noise_scale if math.isfinite(window.noise_scale) else self._noise
        plan = self._ring(times, phi) if self._architecture == "all_reduce" else self._order(times, phi)
        if plan.mode == active.mode == "sync" or plan.mode not in window.allowed:
            return None
        return self._finish(plan, active, f"slowest worker {max(times) / fastest:.2f}x the fastest")

    def _order(self, times: Sequence[float], phi: float) -> Plan:
        x, static = choose_static(times, phi)
        groups, dynamic = choose_dynamic(times, phi)
        if dynamic < static:
            return Plan.ps(self.world_size, 1, rule="groups", groups=groups, damping="none")
        if x == self.world_size:
            return Plan.sync(self.world_size)
        return Plan.ps(self.world_size, x, damping="none")

    def _ring(self, times: Sequence[float], phi: float) -> Plan:
        ordered = sorted(times)
        costs = [ordered[x - 1] * _updates(phi, x) for x in range(1, len(times) + 1)]
        x = _first_minimum(costs)
        if x == self.world_size:
            return Plan.sync(self.world_size)
        by_time = sorted(range(len(times)), key=lambda rank: (times[rank], rank))
        return Plan.subgroup(self.world_size, by_time[:x], damping="none")

    def _finish(self, plan: Plan, active: Plan, why: str) -> Plan:
        return plan.replace(plan_id=active.plan_id + 1, reason=f"STAR's heuristic: {why}: {plan.label}")


def predicted_times_s(window: Window) -> list[float] | None:
    """Mean of the last five iteration times of every rank, communication included; None if a rank has none."""
    times = [_time_s(stats) for stats in window.ranks]
    return None if not times or any(not math.isfinite(t) or t <= 0.0 for t in times) else times


def _time_s(stats: RankStats) -> float:
    recent = [t for t in stats.compute_s[-_RECENT:] if math.isfinite(t)]
    comm = [t for t in stats.comm_s[-_RECENT:] if math.isfinite(t)]
    if not recent:
        return math.nan
    return sum(recent) / len(recent) + (sum(comm) / len(comm) if comm else 0.0)


def _updates(phi: float, gradients: int) -> float:
    return 1.0 + phi / gradients


def _first_minimum(costs: Sequence[float]) -> int:
    """The smallest x whose cost is below the next one's; the last if there is none."""
    return next((x for x in range(1, len(costs)) if costs[x - 1] < costs[x]), len(costs))


def choose_static(times_s: Sequence[float], phi: float) -> tuple[int, float]:
    """(x, cost) of the static x-order.

    Args:
        times_s: Predicted iteration times.
        phi: Noise scale in gradients of one rank.
    """
    ordered = np.sort(np.asarray(times_s, dtype=np.float64))
    together = float(1.0 / (1.0 / ordered).sum())
    span = float(ordered[-1] - ordered[0])
    part = (ordered - ordered[0]) / span if span > 0.0 else np.ones(len(ordered))
    tau = together + (float(ordered[-1]) - together) * part
    costs = [float(tau[x - 1]) * _updates(phi, x) for x in range(1, len(ordered) + 1)]
    x = _first_minimum(costs)
    return x, costs[x - 1]


def choose_dynamic(times_s: Sequence[float], phi: float) -> tuple[tuple[tuple[int, ...], ...], float]:
    """(groups, cost) of the dynamic x-order; groups are merged while closer than 50 ms."""
    middle = lower_median(times_s)
    groups = similar_groups(times_s, _GROUP_S / middle)
    rate = sum(1.0 / (_updates(phi, len(group)) * max(times_s[r] for r in group)) for group in groups)
    return groups, 1.0 / rate
