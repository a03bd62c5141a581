"""What a logged run would have cost in other modes, and without each rank.

Input are the step reports of a run, one JSON object per line: `rank`, `step`, `compute_s` and, where known, `wait_s`.
Lines of another `kind` than `step` are skipped. What waiting ranks do is not counted: a step of `sync` takes the
longest compute time and the communication, which is the least wait of the step (the slowest rank waits for nobody).

`slowdown` is S of ByteDance's what-if analysis: the time of the run over that of the same run with every rank at its
step's median. `gain_without` fixes one rank to the median of the others and leaves the rest as it was.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scheduler.conditions import NOISE, Conditions
from scheduler.cost_model import rank
from scheduler.mode_names import parse_mode
from scheduler.plans import Plan
from scheduler.priors import prior_of
from scheduler.staleness import StalenessPrice

__all__ = ["ModeCost", "RankGain", "WhatIf", "read_reports", "what_if"]

Array = npt.NDArray[np.float64]

_MODES = ("sync", "partial", "ps", "asgd", "ps(dynamic)", "grouped(2)", "local(4)")
_CHUNK = 32
"""Steps that are replayed together: long against a rotation, short against a training phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeCost:
    """What a mode would have cost.

    Attributes:
        label: The mode.
        relative: Time to the same progress over that of `sync`.
        low: 5 % quantile.
        high: 95 % quantile.
        time_s: For the progress of the logged steps, seconds.
    """

    label: str
    relative: float
    low: float
    high: float
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGain:
    """What one rank costs the job in `sync`.

    Attributes:
        rank: The rank.
        gain: Part of the time saved were it as fast as the others; 0.3 is 30 % faster.
        slowest_share: Part of the steps in which it was the slowest.
    """

    rank: int
    gain: float
    slowest_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """The answer.

    Attributes:
        steps: Steps that all ranks reported.
        world_size: Ranks.
        sync_s: Time of these steps in `sync`.
        slowdown: Over the same run with every rank at its step's median.
        ranks: Every rank, in order.
        modes: Every mode, the fastest first.
    """

    steps: int
    world_size: int
    sync_s: float
    slowdown: float
    ranks: tuple[RankGain, ...]
    modes: tuple[ModeCost, ...]


def read_reports(paths: Iterable[Path]) -> tuple[Array, Array]:
    """Compute and wait times from JSONL files, one or all ranks per file.

    Returns:
        (compute_s, wait_s), shape (n_steps, n_ranks). Where some rank did not report a step (it was late, in a
        relaxed mode), its last time is put in; steps before all have reported once are left out. Waits unknown are
        NaN.

    Raises:
        ValueError: No reports, or a line that is none.
    """
    rows: dict[int, dict[int, tuple[float, float]]] = {}
    ranks: set[int] = set()
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            found = _report(path, number, line)
            if found is not None:
                rank_, step, compute_s, wait_s = found
                rows.setdefault(step, {})[rank_] = (compute_s, wait_s)
                ranks.add(rank_)
    if not rows:
        raise ValueError("no step reports found; expected lines with rank, step and compute_s")
    n = max(ranks) + 1
    last, compute, wait = [math.nan] * n, [], []
    for step in sorted(rows):
        row = rows[step]
        last = [row[r][0] if r in row else last[r] for r in range(n)]
        if not any(math.isnan(value) for value in last):
            compute.append(list(last))
            wait.append([row[r][1] if r in row else math.nan for r in range(n)])
    if not compute:
        missing = sorted(set(range(n)) - ranks) or [r for r in range(n) if math.isnan(last[r])]
        raise ValueError(f"ranks {missing} reported no step; expected reports of all ranks 0..{n - 1}")
    return np.array(compute), np.array(wait)


def _report(path: Path, number: int, line: str) -> tuple[int, int, float, float] | None:
    if not line.strip():
        return None
    try:
        item: Any = json.loads(line)
    except ValueError:
        # The last line of a killed run is cut off.
        return None
    if not isinstance(item, dict) or item.get("kind", "step") != "step" or "compute_s" not in item:
        return None
    try:
        compute_s, wait_s = float(item["compute_s"]), item.get("wait_s")
        rank_, step = int(item["rank"]), int(item["step"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}, line {number}: {error}; expected rank, step and compute_s") from None
    if not (math.isfinite(compute_s) and compute_s > 0.0 and rank_ >= 0):
        return None
    return rank_, step, compute_s, float(wait_s) if isinstance(wait_s, (int, float)) else math.nan


def what_if(
    compute_s: Array,
    wait_s: Array | None = None,
    *,
    comm_bytes: float = 0.0,
    link_bytes_per_s: Sequence[float] | None = None,
    noise: float = math.nan,
    modes: Sequence[str] = _MODES,
) -> WhatIf:
    """Replay logged times in every mode.

    Args:
        compute_s: Shape (n_steps, n_ranks).
        wait_s: Same shape, NaN where unknown; the least of a step is its communication.
        comm_bytes: Gradient bytes, 0 to take communication from the waits alone.
        link_bytes_per_s: Of every rank, where known.
        noise: phi in gradients of one rank, NaN where unknown.
        modes: Names of modes, as users give them; subgroups of the fast ranks are added.

    Raises:
        ValueError: An empty table or one with times that are none.
    """
    times = np.asarray(compute_s, dtype=np.float64)
    if times.ndim != 2 or not times.size or not (np.isfinite(times) & (times > 0.0)).all():
        raise ValueError(f"compute_s has shape {times.shape}; expected (steps, ranks) of times above 0")
    comm_s = _comm_s(times, wait_s)
    steps_s = times.max(axis=1) + comm_s
    n = times.shape[1]
    median = np.sort(times, axis=1)[:, (n - 1) // 2]
    ideal_s = float((median + comm_s).sum())
    sync_s = float(steps_s.sum())
    rates = np.full(n, math.inf) if link_bytes_per_s is None else np.asarray(link_bytes_per_s, dtype=np.float64)
    costs = _modes(times, comm_s, rates, comm_bytes, noise, modes)
    return WhatIf(
        steps=len(times),
        world_size=n,
        sync_s=sync_s,
        slowdown=sync_s / ideal_s,
        ranks=tuple(_gain(times, rank_, comm_s, sync_s) for rank_ in range(n)),
        modes=tuple(
            ModeCost(label=label, relative=mean[0], low=mean[1], high=mean[2], time_s=mean[0] * sync_s)
            for label, mean in sorted(costs.items(), key=lambda item: (item[1][0], item[0] != "sync"))
        ),
    )


def _comm_s(times: Array, wait_s: Array | None) -> float:
    """Median over steps of the least wait, 0 where nothing is known."""
    if wait_s is None:
        return 0.0
    waits = np.asarray(wait_s, dtype=np.float64)
    full = waits[np.isfinite(waits).all(axis=1)]
    return float(np.median(full.min(axis=1))) if len(full) else 0.0


def _gain(times: Array, rank_: int, comm_s: float, sync_s: float) -> RankGain:
    others = np.delete(times, rank_, axis=1)
    if not others.size:
        return RankGain(rank=rank_, gain=0.0, slowest_share=1.0)
    fixed = np.minimum(times[:, rank_], np.median(others, axis=1))
    without_s = float((np.maximum(others.max(axis=1), fixed) + comm_s).sum())
    return RankGain(
        rank=rank_,
        gain=sync_s / without_s - 1.0,
        slowest_share=float((times.argmax(axis=1) == rank_).mean()),
    )


def _modes(
    times: Array, comm_s: float, rates: Array, comm_bytes: float, noise: float, modes: Sequence[str]
) -> dict[str, tuple[float, float, float]]:
    """Relative time of every mode: weighted by the time of each chunk in `sync`."""
    n = times.shape[1]
    plans = _plans(times, modes)
    sums = {plan.label: np.zeros(3) for plan in plans}
    total = 0.0
    for begin in range(0, len(times), _CHUNK):
        chunk = times[begin : begin + _CHUNK]
        # What a step takes besides computing is in every mode's path: it is added to the times.
        conditions = Conditions(
            times_s=chunk + comm_s, rate=rates, comm_bytes=comm_bytes if np.isfinite(rates).all() else 0.0,
            starved=np.zeros(n), price=StalenessPrice(prior_of(comm_bytes)),
            noise=noise if math.isfinite(noise) else NOISE,
        )
        weight = float((chunk.max(axis=1) + comm_s).sum())
        total += weight
        for found in rank(plans, conditions):
            sums[found.plan.label] += weight * np.array([found.relative, found.low, found.high])
    return {label: (float(v[0]), float(v[1]), float(v[2])) for label, v in ((k, s / total) for k, s in sums.items())}


def _plans(times: Array, modes: Sequence[str]) -> list[Plan]:
    n = times.shape[1]
    plans: dict[str, Plan] = {}
    for name in modes:
        plan = parse_mode(name, n)
        if plan is not None:
            plans[plan.label] = plan
    usual = times.mean(axis=0)
    middle = float(np.sort(usual)[(n - 1) // 2])
    late = (times > 1.3 * np.median(times)).sum(axis=1)
    out = max(1, int(np.quantile(late, 0.9)))
    if n > 2 and out <= n // 2:
        plans.setdefault(f"partial({n - out})", Plan.partial(n, n - out))
    fast = [r for r in range(n) if usual[r] <= 1.3 * middle]
    if n // 2 <= len(fast) < n:
        plan = Plan.subgroup(n, fast)
        plans[plan.label] = plan
    plans.setdefault("sync", Plan.sync(n))
    return list(plans.values())
