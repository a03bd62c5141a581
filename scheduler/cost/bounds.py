"""Upper bounds of the speed of each mode, which limit the predictions of any model.

A relaxed mode saves waiting only: compute time and the common part of communication remain. The bounds assume no
staleness and, from measured times,

    compute   the steps' median rank (`partial`) or slowest member (`subgroup`), the slowest rank's mean (`local`),
              1 / sum of rates (`ps`, `grouped`)
    wire      transfer over the links that the plan still uses
    beyond    the other cost of collectives, in full, in every mode

Two equal ranks have a bound of about 1 for any compute and communication times. Without it, a report that mistakes the
time of a kernel launch for compute time makes communication look like nearly all of a step, and a plan without
communication look 31 times faster. The communication that `local` saves is deliberately ignored: `local` is chosen
against stragglers only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from scheduler.cost.conditions import CYCLE_S, Conditions
from scheduler.cost.cost_model import Prediction, ring_s
from scheduler.cost.progress import update_progress
from scheduler.plan.completion import with_groups
from scheduler.plan.plan import Plan

__all__ = ["bounded", "least_relative"]

_ROOM = 1.1
"""Factor by which a prediction may exceed the bound: the replay of a mode combines the ranks' times differently."""


def bounded(predictions: Sequence[Prediction], conditions: Conditions) -> list[Prediction]:
    """Limit predictions to their modes' bounds and sort them, the fastest first (stable)."""
    sync_s = _sync_s(conditions)
    return sorted((_bounded(one, conditions, sync_s) for one in predictions), key=lambda one: one.relative)


def _bounded(one: Prediction, conditions: Conditions, sync_s: float) -> Prediction:
    if one.plan.mode == "sync":
        return one
    # The bound is one of time, to which the cost of a missed target is added.
    least = least_relative(one.plan, conditions, sync_s=sync_s) / _ROOM + 1.0 - one.reach
    if one.relative >= least:
        return one
    return dataclasses.replace(
        one, relative=least, low=max(one.low, least), high=max(one.high, least), bound=1.0 / least
    )


def least_relative(plan: Plan, conditions: Conditions, *, sync_s: float | None = None) -> float:
    """Lower bound of the plan's time to equal progress relative to `sync`.

    Args:
        plan: The plan.
        conditions: Measured conditions.
        sync_s: Interval of `sync`, if the caller has it.
    """
    n, plan = conditions.world_size, with_groups(plan, conditions.usual_s.tolist())
    sync_s = _sync_s(conditions) if sync_s is None else sync_s
    compute = _COMPUTE.get(plan.mode)
    if compute is None or n < 2:
        return 1.0
    interval_s, length, gradients = compute(plan, conditions)
    gain = float(
        update_progress(length, length, gradients, conditions.noise, float(n), conditions.price.prior.lr_ratio)
    )
    return interval_s / max(gain, 1e-6) / sync_s


def _sync_s(conditions: Conditions) -> float:
    return float(conditions.times_s.max(axis=1).mean()) + ring_s(conditions) + conditions.frozen_s


def _beyond_s(conditions: Conditions) -> float:
    return CYCLE_S + conditions.beyond_s


def _partial(plan: Plan, conditions: Conditions) -> tuple[float, float, float]:
    # Ranks that are already late do not count, so a step may close with fewer than the quorum.
    place = min(plan.quorum, (conditions.world_size + 1) // 2) - 1
    steps_s = np.partition(conditions.times_s, place, axis=1)[:, place]
    return float(steps_s.mean()) + ring_s(conditions) + conditions.frozen_s, 1.0, float(conditions.world_size)


def _subgroup(plan: Plan, conditions: Conditions) -> tuple[float, float, float]:
    members = list(plan.members)
    steps_s = conditions.times_s[:, members].max(axis=1)
    alone = _beyond_s(conditions) if len(members) < 2 else ring_s(conditions, members)
    return float(steps_s.mean()) + alone + conditions.frozen_s, 1.0, float(conditions.world_size)


def _ps(plan: Plan, conditions: Conditions) -> tuple[float, float, float]:
    n, x = conditions.world_size, 1 if plan.rule == "ssp" else plan.quorum
    rates = 1.0 / (conditions.usual_s + _beyond_s(conditions))
    if plan.rule == "groups":
        x = max(1, n // max(1, len(plan.groups)))
    length = {"linear": x / n, "noise": 1.0, "none": 1.0}[plan.lr_rule]
    return x / float(rates.sum()), length, float(x)


def _grouped(plan: Plan, conditions: Conditions) -> tuple[float, float, float]:
    groups = plan.groups or (tuple(range(conditions.world_size)),)
    cycles_s = [
        float(conditions.times_s[:, list(group)].max(axis=1).mean()) + _beyond_s(conditions) + conditions.frozen_s
        for group in groups
    ]
    rates = [1.0 / cycle_s for cycle_s in cycles_s]
    # Mean over updates, of which the faster groups, usually the larger ones, make more.
    size = sum(rate * len(group) for rate, group in zip(rates, groups, strict=True)) / sum(rates)
    length = size / conditions.world_size if plan.lr_rule == "linear" else 1.0
    return 1.0 / sum(rates), length, size


def _local(plan: Plan, conditions: Conditions) -> tuple[float, float, float]:
    n = conditions.world_size
    if plan.local_steps:
        step_s = float(conditions.usual_s.max())
    else:
        step_s = n / float((1.0 / conditions.usual_s).sum())
    return step_s + _beyond_s(conditions) + conditions.frozen_s, 1.0, float(n)


_COMPUTE = {"partial": _partial, "subgroup": _subgroup, "ps": _ps, "grouped": _grouped, "local": _local}
