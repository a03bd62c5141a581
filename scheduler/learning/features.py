"""The definition of a feature row, shared by live jobs, the simulator and training.

A row describes one candidate plan at one moment. All features are dimensionless, so that a model generalizes to other
networks and clusters: ratios and their logarithms, shares, quantiles over the ranks, counts over the number of ranks.

The cost model's prediction is part of the row: the model learns its error (`scheduler.learning.predictor`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from scheduler.cost.conditions import Array, Conditions, without_pauses
from scheduler.cost.cost_model import Prediction
from scheduler.diagnosis.freezes import freeze_limit_s
from scheduler.diagnosis.links import ring_bytes, slow_links, usual_rate
from scheduler.diagnosis.window_stats import Readings, slow_limit_s
from scheduler.plan.plan import MODES, Plan
from scheduler.records import Window

__all__ = ["FEATURES", "MOMENT", "PLAN", "SCHEMA_VERSION", "rows", "speed"]

SCHEMA_VERSION = 3
"""Incremented with every change of `FEATURES` or of a feature's meaning; a model of another version is rejected."""

MOMENT: tuple[str, ...] = (
    "ranks_log2",  # Number of ranks.
    "noise_log",  # phi over the number of ranks.
    "wire_log",  # An all-reduce's bytes over the slowest link, over the typical compute time.
    "wire_usual_log",  # The same over the median link.
    "wire_now_log",  # The same over the currently slowest link.
    "cycle_log",  # A collective's negotiation over the typical compute time.
    "slow_share",  # Share of ranks whose mean time is above the limit of slow.
    "link_share",  # Share of ranks whose link has less than half of the median rate.
    "slowest_log",  # Mean time of the slowest rank over the typical one.
    "second_log",
    "upper_quarter_log",
    "mean_log",
    "row_max_log",  # The longest expected time of a step over the typical one: a step of `sync`.
    "row_max_recent_log",  # The same of the newest reports.
    "row_max_past_log",  # The same of the older half of the reports.
    "late_now",  # Share of ranks whose newest report is slow.
    "late_recent",  # Share of slow reports among the newest eight of every rank.
    "late_share",  # Share of slow reports among all.
    "late_ranks",  # Share of ranks with a slow report.
    "late_worst",  # Share of slow reports of the rank with most of them.
    "late_factor_log",  # Mean of slow reports over the typical time.
    "run_log",  # Longest current slow run, in reports.
    "run_whole",  # Its share of the rank's reports.
    "run_mean_log",  # Mean length of a slow run.
    "onset_log",  # Slow runs per report.
    "jitter_log",  # Spread of reports that are not slow.
    "starved",  # Largest share of time that a rank is without a processor.
    "fed",  # Largest share of time that a rank waits for data.
    "silent_log",  # Longest silence that may be a freeze, over the typical time; 0 without one.
    "frozen_log",  # Time per step lost to freezes, over the typical one.
    "frozen_share",  # Share of ranks that freeze repeatedly.
    "age_log",  # Steps so far.
    "known_log",  # Reports per rank.
    "price_log",  # Price of staleness as learned so far.
    "price_low_log",
    "price_high_log",
    "price_seen_log",  # Observations it was learned from.
    "active_mode",
    "active_out",  # Share of ranks the active plan does not wait for.
    "active_log",  # The cost model's relative time of the active plan; 0 if it is not a candidate.
    "best_log",  # The cost model's least relative time.
    "offered",  # Number of candidates.
)
"""Features of the moment, equal for all candidates."""

PLAN: tuple[str, ...] = (
    "mode_index",  # Index in `MODES`.
    "is_active",
    "out",  # Share of ranks the plan does not wait for.
    "out_extra",  # `out` less the share of slow ranks.
    "waited_log",  # Mean time of the slowest rank the plan waits for, over the typical one.
    "waited_link_log",  # The slowest link the plan waits for, over the median one.
    "served_log",  # Transfer time of an update at the servers, over the typical compute time.
    "groups",  # Groups over ranks.
    "local_log",  # Steps between two averagings.
    "servers",  # Servers over ranks.
    "linear",  # Whether the length of an update is proportional to its gradients.
    "drops",  # Whether late gradients are dropped.
    "grace",  # Whether an update waits a grace for ranks not known to be slow before it drops theirs.
    "behind",  # Whether transfers travel behind compute.
    "balanced",  # Whether batches follow the speed of the ranks.
    "steals",  # Whether ranks take over micro-batches from slow ones.
    "cost_log",  # The cost model's relative time.
    "cost_low_log",
    "cost_high_log",
    "cost_gap_log",  # The cost model's relative time over the least of all candidates.
    "cost_interval_log",  # The cost model's time between updates over that of `sync`.
    "cost_progress_log",  # The cost model's progress of an update.
    "cost_drift",
    "cost_reach",
)
"""Features of the candidate."""

FEATURES: tuple[str, ...] = MOMENT + PLAN

Flags = npt.NDArray[np.bool_]

_HISTORY, _HISTORY_MANY, _MANY = 64, 16, 128
_RECENT = 8
_CYCLE_S = 1.5e-3
_TINY = 1e-6


def speed(prediction: Prediction) -> float:
    """Relative time of a prediction without the cost of a missed target, above 0."""
    return max(prediction.relative_time, 1e-3)


def rows(
    offered: Sequence[Plan],
    conditions: Conditions,
    window: Window,
    active: Plan,
    predictions: Sequence[Prediction],
) -> Array:
    """Compute the feature rows of candidates.

    Args:
        offered: The candidates.
        conditions: The conditions of the decision.
        window: Recent reports; late or silent ranks are in it with their last reports.
        active: The active plan.
        predictions: The cost model's predictions, one per candidate, in the same order.

    Returns:
        Shape (n_candidates, n_features), columns as in `FEATURES`; all finite.

    Raises:
        ValueError: Predictions and candidates differ in number.
    """
    if len(predictions) != len(offered):
        raise ValueError(f"{len(predictions)} predictions for {len(offered)} candidates; expected one for each")
    basis_s = next((p.interval_s for p in predictions if p.plan.plain), conditions.typical_s)
    costs = np.log([speed(p) for p in predictions])
    found = np.empty((len(offered), len(FEATURES)))
    found[:, : len(MOMENT)] = _moment(conditions, window, active, offered, costs)
    ordered = np.sort(conditions.usual_s)
    slow = int((conditions.usual_s > slow_limit_s(conditions.typical_s)).sum())
    middle = usual_rate(conditions.rate)
    for index, (plan, prediction) in enumerate(zip(offered, predictions, strict=True)):
        own = _plan(plan, conditions, active, ordered, slow, middle)
        own += _cost(prediction, float(costs[index]), float(costs.min()), basis_s)
        found[index, len(MOMENT) :] = own
    return np.nan_to_num(found, nan=0.0, posinf=20.0, neginf=-20.0)


def _log(value: float) -> float:
    return math.log(max(value, _TINY))


# ---- the moment -----------------------------------------------------------------------------------------------------


def _moment(
    conditions: Conditions, window: Window, active: Plan, offered: Sequence[Plan], costs: Array
) -> list[float]:
    price = conditions.prices
    now = next((float(c) for plan, c in zip(offered, costs, strict=True) if plan is active or plan == active), 0.0)
    return [
        *_size(conditions, window),
        *_times(conditions),
        *_history(conditions, window),
        float(window.table.starved_share.max(initial=0.0)),
        float(window.table.input_share.max(initial=0.0)),
        math.log1p(_silence_s(window, conditions.typical_s) / conditions.typical_s),
        math.log1p(conditions.frozen_s / conditions.typical_s),
        len(conditions.freezing) / conditions.world_size,
        math.log1p(max(window.step, 0)),
        math.log1p(int(window.table.counts[0]) if window.ranks else 0),
        _log(price[0]),
        _log(price[1]),
        _log(price[2]),
        math.log1p(conditions.price.observations),
        float(MODES.index(active.mode)),
        _out(active),
        now,
        float(costs.min()),
        float(len(offered)),
    ]


def _silence_s(window: Window, typical_s: float) -> float:
    """The longest silence that is more than a rank's computing: whenever a decision falls, some time has passed."""
    longest_s = float(window.table.silent_s.max(initial=0.0))
    return longest_s if longest_s > freeze_limit_s(typical_s) else 0.0


def _size(conditions: Conditions, window: Window) -> list[float]:
    n, typical_s = conditions.world_size, conditions.typical_s
    wire_bytes = ring_bytes(n, conditions.reduced_bytes)
    known = window.table.link_bytes_per_s
    now = float(known[known > 0.0].min(initial=math.inf))
    return [
        math.log2(n),
        _log(conditions.noise / n),
        math.log(max(wire_bytes / float(conditions.rate.min()) / typical_s, 1e-4)),
        math.log(max(wire_bytes / usual_rate(conditions.rate) / typical_s, 1e-4)),
        math.log(max(wire_bytes / now / typical_s, 1e-4)),
        _log(_CYCLE_S / typical_s),
    ]


def _times(conditions: Conditions) -> list[float]:
    usual = np.sort(conditions.usual_s) / conditions.typical_s
    n = len(usual)
    return [
        float((conditions.usual_s > slow_limit_s(conditions.typical_s)).mean()),
        float(slow_links(conditions.rate).mean()),
        _log(float(usual[-1])),
        _log(float(usual[max(0, n - 2)])),
        _log(float(usual[(3 * (n - 1)) // 4])),
        _log(float(usual.mean())),
        _log(float(conditions.times_s.max(axis=1).mean()) / conditions.typical_s),
    ]


def _history(conditions: Conditions, window: Window) -> list[float]:
    """Features of length and frequency of slow runs in the reports."""
    reported, late = _reports(window)
    times = reported / conditions.typical_s
    n, kept = times.shape
    known = np.isfinite(times)
    filled = np.where(known, times, 1.0)
    peaks = filled.max(axis=0)
    counts = np.maximum(known.sum(axis=1), 1)
    begins = late & ~np.concatenate([np.zeros((n, 1), dtype=np.bool_), late[:, :-1]], axis=1)
    # Reports since the last one that was not slow.
    run = np.where(late.all(axis=1), kept, np.argmin(late[:, ::-1], axis=1)) if kept else np.zeros(n)
    total, starts, reports = float(late.sum()), float(begins.sum()), float(known.sum())
    usual = np.log(np.maximum(filled[known & ~late], _TINY)) if reports > total else np.zeros(1)
    by_rank = late.sum(axis=1) / counts
    recent = late[:, -_RECENT:]
    return [
        _log(float(peaks[-_RECENT:].mean())) if kept else 0.0,
        _log(float(peaks[: max(1, kept // 2)].mean())) if kept else 0.0,
        float(late[:, -1].mean()) if kept else 0.0,
        float(recent.sum()) / max(1.0, float(known[:, -_RECENT:].sum())),
        total / max(1.0, reports),
        float(late.any(axis=1).mean()),
        float(by_rank.max(initial=0.0)),
        _log(float(filled[late].mean())) if total else 0.0,
        math.log1p(float(run.max(initial=0))),
        float((run / counts).max(initial=0.0)),
        math.log1p(total / starts) if starts else 0.0,
        math.log(max(starts / max(1.0, reports), 1e-4)),
        math.log(max(float(usual.std()), 1e-3)),
    ]


def _reports(window: Window) -> tuple[Array, Flags]:
    """The ranks' newest times and which are slow, newest last, padded with NaN in front, shape (n_ranks, n_reports).

    Without pauses of the whole program, which slow no rank more than another; nor do they in the rest of the row.
    """
    readings = Readings.of(window)
    most = _HISTORY if window.world_size <= _MANY else _HISTORY_MANY
    longest = min(most, int(readings.counts.max(initial=0)))
    slow = readings.slow()
    width = slow.shape[1]
    return without_pauses(readings, longest)[:, width - longest :], slow[:, width - longest :]


# ---- the candidate --------------------------------------------------------------------------------------------------


def _out(plan: Plan) -> float:
    """Share of the ranks that an update does not wait for."""
    if plan.mode in ("sync", "local"):
        return 0.0
    if plan.mode == "subgroup":
        return 1.0 - len(plan.members) / plan.world_size
    if plan.mode == "grouped" or plan.rule == "groups":
        return 1.0 - 1.0 / max(1, len(plan.groups) or plan.group_count)
    return 1.0 - plan.quorum / plan.world_size


def _plan(
    plan: Plan, conditions: Conditions, active: Plan, ordered: Array, slow: int, middle: float
) -> list[float]:
    n, out = plan.world_size, _out(plan)
    if plan.mode == "subgroup":
        waited_s = float(conditions.usual_s[list(plan.members)].max())
    elif plan.mode == "grouped" or plan.rule == "groups":
        waited_s = float(ordered[-1])
    else:
        waited_s = float(ordered[plan.quorum - 1])
    steps = float(plan.local_steps)
    if plan.mode == "local" and not plan.local_steps:
        steps = max(1.0, plan.local_s / conditions.typical_s)
    return [
        float(MODES.index(plan.mode)),
        float(plan is active or plan == active),
        out,
        out - slow / n,
        _log(waited_s / conditions.typical_s),
        *_bytes(plan, conditions, middle),
        (len(plan.groups) or plan.group_count) / n,
        math.log1p(steps),
        len(plan.servers) / n,
        float(plan.mode in ("ps", "grouped") and plan.lr_rule == "linear"),
        float(plan.rule in ("backup", "grace")),
        float(plan.rule == "grace"),
        float(plan.in_background(conditions.background)),
        float(plan.uneven),
        float(plan.steal),
    ]


def _bytes(plan: Plan, conditions: Conditions, middle: float) -> tuple[float, float]:
    """Logarithms of the slowest link waited for over the median one, and of the servers' transfer time."""
    if plan.mode != "subgroup":
        slowest = float(conditions.rate.min())
    else:
        slowest = float(conditions.rate[list(plan.members)].min())
    link = _log(slowest / middle) if math.isfinite(middle) else 0.0
    if not plan.servers:
        return link, math.log(1e-4)
    capacity = len(plan.servers) * float(conditions.rate[list(plan.servers)].min())
    return link, math.log(max(plan.quorum * conditions.comm_bytes / capacity / conditions.typical_s, 1e-4))


def _cost(prediction: Prediction, cost: float, least: float, basis_s: float) -> list[float]:
    missed = 1.0 - prediction.reach
    return [
        cost,
        _log(prediction.low - missed) - cost,
        _log(prediction.high - missed) - cost,
        cost - least,
        _log(prediction.interval_s / basis_s),
        _log(prediction.progress),
        prediction.drift,
        prediction.reach,
    ]
