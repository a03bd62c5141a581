"""What a logged run would have cost in other modes, and without each rank's slowness.

A step of `sync` takes the longest compute time plus the communication, which is the shortest wait of the step (the
slowest rank waits for no other). Each logged step is weighted by the progress that the cost model gives to an update of
the mode in force, because updates of relaxed modes make less progress than steps of `sync`. All times are for the
progress of the whole run.

`slowdown` is S of ByteDance's what-if analysis: the time of the run relative to the same run with every rank at its
step's median. `gain` sets one rank to the median of the others and leaves the rest unchanged.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler.balance.share_policy import FIXED
from scheduler.cost.conditions import NOISE, Conditions
from scheduler.cost.cost_model import predict, rank, ring_s
from scheduler.cost.priors import prior_of
from scheduler.cost.staleness_price import StalenessPrice
from scheduler.diagnosis.window_stats import THRESHOLD, always_slow
from scheduler.plan.mode_names import parse_mode
from scheduler.plan.plan import Plan
from scheduler.stats import lower_median
from scheduler.transmission.behind_compute import EDGE

__all__ = ["InForce", "ModeCost", "RankGain", "WhatIf", "what_if"]

Array = npt.NDArray[np.float64]

_MODES = ("sync", "partial", "ps", "asgd", "ps(dynamic)", "grouped(2)", "local(4)")
_BEHIND_COMPUTE = ("ps(background)", "local(4,background)")  # Added if transfers can be priced.
_CHUNK = 32
"""Steps replayed together, and least number for a mean of waits: more than a rotating straggler stays on a rank, fewer
than a phase of training."""

_NO_PAUSE = 0.98  # Share of the waits that are no pause, such as that for a checkpoint; longer ones count like it.


@dataclass(frozen=True, slots=True, kw_only=True)
class InForce:
    """The plans under which the logged steps were made.

    Attributes:
        plans: The plans.
        which: Index of the plan of every row, shape (n_rows,).
        updates: Updates per row, same shape; under `local` mean steps of a rank.
    """

    plans: tuple[Plan, ...]
    which: npt.NDArray[np.int64]
    updates: Array

    def share(self, label: str) -> float:
        """Share of the steps, 0 to 1, made under plans of that label."""
        same = np.array([plan.label == label for plan in self.plans])
        return float(self.updates[same[self.which]].sum() / self.updates.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeCost:
    """Predicted cost of a mode.

    Attributes:
        label: The mode.
        relative: Time to the same progress relative to `sync`.
        low: 5 % quantile, from the cost model's errors (`scheduler.cost.intervals`).
        high: 95 % quantile.
        time_s: Seconds for the progress of the logged steps.
        share: Share of the logged steps, 0 to 1, made in this mode; NaN if unknown.
    """

    label: str
    relative: float
    low: float
    high: float
    time_s: float
    share: float = math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGain:
    """What one rank costs the job in `sync`.

    Attributes:
        rank: The rank.
        gain: Fraction of the time saved if it were as fast as the others; 0.3 is 30 % less time.
        slowest_share: Share of the steps in which it was the slowest.
    """

    rank: int
    gain: float
    slowest_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """Result of `what_if`.

    Attributes:
        steps: Logged updates; under `local` mean steps of a rank.
        sync_steps: Steps of `sync` with the same progress.
        world_size: Ranks.
        sync_s: Time of the same progress in `sync`.
        replayed_s: Replayed time of the logged steps under the plans in force, NaN if those are unknown; compare it
            with the measured time to judge the other predictions.
        slowdown: Time of `sync` relative to the same run with every rank at its step's median.
        ranks: All ranks, in order.
        modes: All modes, the fastest first.
    """

    steps: int
    sync_steps: float
    world_size: int
    sync_s: float
    replayed_s: float
    slowdown: float
    ranks: tuple[RankGain, ...]
    modes: tuple[ModeCost, ...]


@dataclass(slots=True)
class _Totals:
    """Sums over the chunks of a run."""

    worth: Array
    relative: dict[str, Array]
    sync_s: float = 0.0
    replayed_s: float = 0.0


def what_if(
    compute_s: Array,
    wait_s: Array | None = None,
    *,
    comm_bytes: float = 0.0,
    edge_part: float = EDGE,
    reduced_part: float = 1.0,
    pushed_part: float = 1.0,
    fixed_part: float = math.nan,
    batch: int = 0,
    microbatches: int = 0,
    link_bytes_per_s: Sequence[float] | None = None,
    noise: float = math.nan,
    modes: Sequence[str] = (),
    in_force: InForce | None = None,
) -> WhatIf:
    """Replay logged times in every mode.

    Args:
        compute_s: Compute times of batches of the usual size, shape (n_steps, n_ranks).
        wait_s: Waits, same shape, NaN if unknown; the shortest of a step is its communication.
        comm_bytes: Gradient bytes; 0 to take communication from the waits alone.
        edge_part: Fraction of them that compute cannot hide at servers, see `Conditions`.
        reduced_part: Fraction of them that a reduction sends, below 1 with compression.
        pushed_part: The same for a push to a server or another rank.
        fixed_part: Fraction of a compute time that does not depend on the batch size, NaN if unknown.
        batch: Samples of a rank's batch if batch shares are possible, else 0.
        microbatches: Micro-batches of a rank in a step if others can take them over, else 0.
        link_bytes_per_s: Bandwidth of every rank, if known.
        noise: Noise scale phi in gradients of one rank, NaN if unknown.
        modes: Names of modes, as users give them; if empty a few usual ones, the exact ones that are possible, and
            variants behind compute if links are known. The modes in force and subgroups of the fast ranks are added.
        in_force: The plans that were active; without it, all steps count as steps of `sync`.

    Raises:
        ValueError: `compute_s` is empty or has times that are not above 0.
    """
    times = np.asarray(compute_s, dtype=np.float64)
    if times.ndim != 2 or not times.size or not (np.isfinite(times) & (times > 0.0)).all():
        raise ValueError(f"compute_s has shape {times.shape}; expected (steps, ranks) of times above 0")
    steps, n = times.shape
    rates = np.full(n, math.inf) if link_bytes_per_s is None else np.asarray(link_bytes_per_s, dtype=np.float64)
    basis = Conditions(
        times_s=times, rate=rates, comm_bytes=comm_bytes if np.isfinite(rates).all() else 0.0, starved=np.zeros(n),
        price=StalenessPrice(prior_of(comm_bytes)), noise=noise if math.isfinite(noise) else NOISE,
        edge_part=edge_part, reduced_part=reduced_part, pushed_part=pushed_part,
        fixed_part=fixed_part if math.isfinite(fixed_part) else FIXED, batch=batch, microbatches=microbatches,
    )
    known = in_force or InForce(plans=(Plan.sync(n),), which=np.zeros(steps, dtype=np.int64), updates=np.ones(steps))
    in_sync = np.array([plan.mode == "sync" for plan in known.plans])[known.which]
    comm_s = _comm_s(wait_s, in_sync)
    totals = _replay(basis, comm_s, _plans(times, modes or _usual_modes(basis), known.plans), known)
    median = np.sort(times, axis=1)[:, (n - 1) // 2]
    return WhatIf(
        steps=round(float(known.updates.sum())),
        sync_steps=float(totals.worth.sum()),
        world_size=n,
        sync_s=totals.sync_s,
        replayed_s=totals.replayed_s if in_force else math.nan,
        slowdown=totals.sync_s / float((totals.worth * (median + comm_s)).sum()),
        ranks=tuple(_gain(times, rank_, comm_s, totals) for rank_ in range(n)),
        modes=_mode_costs(totals, in_force),
    )


def _usual_modes(basis: Conditions) -> tuple[str, ...]:
    if basis.world_size < 2:
        return ("sync",)
    exact = (("sync(balanced)", basis.batch), ("sync(steal)", basis.microbatches))
    return (
        *_MODES,
        *(name for name, possible in exact if possible),
        *(_BEHIND_COMPUTE if basis.comm_bytes else ()),
    )


def _mode_costs(totals: _Totals, in_force: InForce | None) -> tuple[ModeCost, ...]:
    """All modes, the fastest first, `sync` first among equals."""
    costs = {label: (found / totals.sync_s).tolist() for label, found in totals.relative.items()}
    return tuple(
        ModeCost(
            label=label, relative=mean, low=low, high=high, time_s=mean * totals.sync_s,
            share=in_force.share(label) if in_force else math.nan,
        )
        for label, (mean, low, high) in sorted(costs.items(), key=lambda item: (item[1][0], item[0] != "sync"))
    )


def _comm_s(wait_s: Array | None, in_sync: npt.NDArray[np.bool_]) -> float:
    """Communication time of a step: the shortest wait, 0 if none is known.

    Steps of `sync` are preferred: under servers and `local` ranks wait for something else. The mean counts, since the
    sum is what a run takes, and waits are skewed: on a busy machine the median was 0.6 of it. If there are few steps,
    they are the first of the run, which starting servers may slow down: then it is the lower quartile.
    """
    if wait_s is None:
        return 0.0
    waits = np.asarray(wait_s, dtype=np.float64)
    known = np.isfinite(waits)
    for rows in (known.all(axis=1) & in_sync, known.all(axis=1), known.any(axis=1)):
        if rows.any():
            shortest = np.nanmin(waits[rows], axis=1)
            if len(shortest) < _CHUNK:
                return float(np.quantile(shortest, 0.25))
            return float(np.minimum(shortest, np.quantile(shortest, _NO_PAUSE)).mean())
    return 0.0


def _gain(times: Array, rank_: int, comm_s: float, totals: _Totals) -> RankGain:
    others = np.delete(times, rank_, axis=1)
    if not others.size:
        return RankGain(rank=rank_, gain=0.0, slowest_share=1.0)
    fixed = np.minimum(times[:, rank_], np.median(others, axis=1))
    without_s = float((totals.worth * (np.maximum(others.max(axis=1), fixed) + comm_s)).sum())
    return RankGain(
        rank=rank_,
        gain=max(0.0, 1.0 - without_s / totals.sync_s),
        slowest_share=float((times.argmax(axis=1) == rank_).mean()),
    )


def _replay(basis: Conditions, comm_s: float, plans: Sequence[Plan], known: InForce) -> _Totals:
    """Replay the run in chunks; relative times are weighted by the time of each chunk in `sync`."""
    totals = _Totals(worth=np.zeros(len(known.which)), relative={plan.label: np.zeros(3) for plan in plans})
    # What the cost model does not tell from known links and bytes; it counts it for each mode as often as that has it.
    basis = dataclasses.replace(basis, beyond_s=max(0.0, comm_s - ring_s(basis)))
    for begin in range(0, len(basis.times_s), _CHUNK):
        rows = slice(begin, begin + _CHUNK)
        conditions = dataclasses.replace(basis, times_s=basis.times_s[rows])
        found = {one.plan.label: one for one in rank(plans, conditions)}
        active, which = np.unique(known.which[rows], return_inverse=True)
        under = [predict(_as_it_ran(known.plans[index]), conditions) for index in active.tolist()]
        updates = known.updates[rows]
        worth = updates * np.array([one.progress for one in under])[which]
        totals.worth[rows] = worth
        totals.replayed_s += float((updates * np.array([one.interval_s for one in under])[which]).sum())
        chunk_s = float((worth * (basis.times_s[rows].max(axis=1) + comm_s)).sum())
        totals.sync_s += chunk_s
        for label, one in found.items():
            totals.relative[label] += chunk_s * np.array([one.relative, *one.reported_interval])
    return totals


def _as_it_ran(plan: Plan) -> Plan:
    """The plan with the batch shares that it had; a prediction of `sync(balanced)` is for the best ones."""
    return plan.replace(balanced=False) if plan.balanced and plan.batch_shares else plan


def _plans(times: Array, modes: Sequence[str], in_force: Sequence[Plan]) -> list[Plan]:
    n = times.shape[1]
    plans: dict[str, Plan] = {}
    for plan in (parse_mode(name, n) for name in modes):
        if plan is not None:
            plans[plan.label] = plan
    plans.update({plan.label: plan for plan in in_force})
    usual = times.mean(axis=0)
    middle = lower_median(usual)
    late = (times > THRESHOLD * np.median(times)).sum(axis=1)
    out = max(1, int(np.quantile(late, 0.9)))
    if n > 2 and out <= n // 2:
        plans.setdefault(f"partial({n - out})", Plan.partial(n, n - out))
    fast = [r for r in range(n) if not always_slow(float(usual[r]), middle)]
    if n // 2 <= len(fast) < n:
        plan = Plan.subgroup(n, fast)
        plans.setdefault(plan.label, plan)
    plans.setdefault("sync", Plan.sync(n))
    return list(plans.values())
