"""The predicted cost of every mode: step interval from recent times, progress per update, price of staleness.

    relative time to progress = (interval / progress of an update) / (the same of sync)

Intervals come from replaying the ranks' recent times under the rules of the mode: the closed form of the static order
(STAR section 4.3) is 7.5 times too optimistic for seven equal ranks and one of twice the time, for which the event
simulation of section 4.4 gives .13 .29 .50 .67 1.0 1.0 1.0 2.0. Communication is bytes over link rates, less what
computing hides. For the progress of an update see `scheduler.cost.progress`: with a price of staleness of 0 equal ranks
would choose ASGD (section 4.10), with a price of at least the learning-rate ratio they choose `sync`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler.balance.share_policy import share_factors, solve_shares
from scheduler.cost.conditions import CYCLE_S, Array, Conditions
from scheduler.cost.intervals import widened
from scheduler.cost.progress import alignment, local_drift, update_progress
from scheduler.cost.replay import Flow, partial_flow, server_flow
from scheduler.diagnosis.links import ring_bytes
from scheduler.diagnosis.window_stats import always_slow, slow_limit_s
from scheduler.plan.completion import with_groups
from scheduler.plan.plan import LOCAL_COPIES, Plan
from scheduler.plan.transmission import Transmission
from scheduler.rules.local_walk import steps_between_averagings
from scheduler.rules.microbatches import TRANSFER_S, moves, stolen_makespan
from scheduler.rules.step_layout import grain
from scheduler.rules.weights import damped, damping_scale
from scheduler.transmission.behind_compute import averaging_left_s, push_left_s, reply_left_s, steps_behind
from scheduler.transmission.pace import paced_s

__all__ = ["Prediction", "part_behind_compute", "predict", "rank", "ring_s"]

_Ranks = npt.NDArray[np.int64]

_OVERLAP = 0.4
"""Fraction of the compute time that can hide an all-reduce: the backward pass except its first bucket."""

_WAY_S = 2e-4  # Latency of a message both ways, plus a server's processing.
_CODED_BYTES_PER_S = 7e8
"""Gradient bytes that a core encodes to int8 and decodes per second (measured, torch 2.13, one thread)."""

_PAUSE_S = 0.05  # Half a cgroup period: mean delay of a collective by a starved helper.
_USUAL_BATCH = 64  # Samples of a batch if unknown; shares are rounded to samples.
_FOLLOWED_STEPS = 5.0
"""Steps with batch shares that fit no longer, whenever another rank becomes slow: two reports show it, some are on
their way, and a change that is soon undone is made after `SHORT` reports only."""
_USUAL_PARTS = 4  # Micro-batches of a rank in a step if unknown.
_FEW = 4  # Up to this many kinds of gradients in an update a loop is faster than arrays.
_SERVED = 0.7
"""Time of a push and its reply without their transfer, as a fraction of `Conditions.beyond_s`: measured with 4 ranks on
2 cores, 10 of 15 ms."""

_CLOSED, _LEFT_OUT = 0.2, 0.6
"""Cost of closing a step without some ranks, in units of the same time: a constant (order and proxy contribution), and
a part proportional to the share of ranks left out (their late work). Measured there: 3 ms for one of four ranks, 4 for
two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Predicted cost of a plan.

    Attributes:
        plan: The plan.
        relative: Expected time to equal progress relative to `sync`; below 1 is faster. It includes the probability of
            missing the target, times the cost of training again in `sync`.
        low: Its 5 % quantile, as used by the policy.
        high: Its 95 % quantile, as used by the policy.
        interval_s: Time between two updates, seconds.
        progress: Progress of an update, in synchronous steps.
        drift: Mean drift of its gradients, in synchronous steps.
        reach: Probability of reaching the target accuracy.
        learned: Whether the learned predictor made it, whose interval is calibrated.
        bound: Speed relative to `sync` to which it was limited (`scheduler.cost.bounds`); 0 if it was not.
    """

    plan: Plan
    relative: float
    low: float
    high: float
    interval_s: float
    progress: float
    drift: float
    reach: float
    learned: bool = False
    bound: float = 0.0

    @property
    def relative_time(self) -> float:
        """`relative` without the cost of a missed target, above 0."""
        return max(self.relative - (1.0 - self.reach), 1e-9)

    @property
    def reported_interval(self) -> tuple[float, float]:
        """90 % interval for reports: `low` and `high`, widened if the cost model made the prediction."""
        if self.learned:
            return self.low, self.high
        missed = 1.0 - self.reach
        form = self.plan.label if self.plan.mode == "sync" else self.plan.mode
        low, high = widened(form, self.relative_time, self.low - missed, self.high - missed)
        return low + missed, high + missed


def rank(candidates: Sequence[Plan], conditions: Conditions) -> list[Prediction]:
    """Predict for all candidates and sort, the fastest first (stable)."""
    basis = _flow(Plan.sync(conditions.world_size), conditions, {})
    shared: dict[str, Flow] = _partials(candidates, conditions)
    found = [predict(plan, conditions, basis=basis, shared=shared) for plan in candidates]
    return sorted(found, key=lambda prediction: prediction.relative)


def predict(
    plan: Plan, conditions: Conditions, *, basis: Flow | None = None, shared: dict[str, Flow] | None = None
) -> Prediction:
    """Predict for one plan. `basis` is the flow of `sync`; `shared` holds flows computed before, by label."""
    flow = _flow(plan, conditions, shared or {})
    sync = flow if plan.plain else basis or _flow(Plan.sync(conditions.world_size), conditions, {})
    gains = np.maximum(_progress(flow, conditions), 1e-6)
    relative = flow.interval_s / gains / sync.interval_s
    reach = _reach(flow.drift, conditions)
    missed = 1.0 - reach
    # Errors of interval and price are independent; the interval of sync correlates with the others.
    scatter = flow.scatter if not plan.plain else 0.0
    down = math.hypot(math.log(relative[0] / relative[1]), 1.645 * scatter)
    up = math.hypot(math.log(relative[2] / relative[0]), 1.645 * scatter)
    middle = float(relative[0])
    return Prediction(
        plan=plan,
        relative=middle + missed,
        low=middle * math.exp(-down) + missed,
        high=middle * math.exp(up) + missed,
        interval_s=flow.interval_s,
        progress=float(gains[0]),
        drift=flow.drift,
        reach=reach,
    )


def _reach(drift: float, conditions: Conditions) -> float:
    """Probability of reaching the target under a mean drift: 1 at 0, logistic around the network's limit."""
    prior = conditions.price.prior
    limit, softness = prior.drift_limit, prior.drift_softness
    chance = 1.0 / (1.0 + math.exp(min(50.0, (drift - limit) / softness)))
    return min(1.0, chance * (1.0 + math.exp(-limit / softness)))


def _progress(flow: Flow, conditions: Conditions) -> Array:
    """Mean progress of an update, for the price and for its quantiles."""
    prices = conditions.early * conditions.prices
    if len(flow.weights) <= _FEW:
        kinds = list(zip(flow.weights.tolist(), flow.drifts.tolist(), strict=True))
        signals = [sum(w * float(alignment(d, price)) for w, d in kinds) for price in prices.tolist()]
        found = [
            update_progress(
                flow.length, flow.length * signal, flow.gradients, conditions.noise, conditions.world_size,
                conditions.price.prior.lr_ratio,
            )
            for signal in signals
        ]
        return np.array(found, dtype=np.float64)
    signal = (flow.weights[:, None] * alignment(flow.drifts[:, None], prices[None, :])).sum(axis=0)
    return np.asarray(
        update_progress(
            flow.length, flow.length * signal, flow.gradients, conditions.noise, conditions.world_size,
            conditions.price.prior.lr_ratio,
        )
    )


# ---- flows of the modes ---------------------------------------------------------------------------------------------


def _wire_s(conditions: Conditions, rate: Array) -> float:
    """Ring all-reduce transfer: 2 (m - 1) / m of the bytes over the slowest of m links."""
    return ring_bytes(len(rate), conditions.reduced_bytes) / float(rate.min())


def ring_s(conditions: Conditions, members: Sequence[int] | _Ranks | None = None) -> float:
    """Exposed time of an all-reduce among `members` (all if None), seconds."""
    rate = conditions.rate if members is None else conditions.rate[np.asarray(members)]
    if len(rate) < 2:
        return 0.0
    wire_s = _wire_s(conditions, rate)
    # `beyond_s` is half negotiation, which does not depend on the number of members, and half hops of the ring.
    hops = (len(rate) - 1) / (conditions.world_size - 1)
    beyond_s = conditions.beyond_s * 0.5 * (1.0 + hops)
    return CYCLE_S + beyond_s + max(0.1 * wire_s, wire_s - _OVERLAP * conditions.typical_s)


def _coding_s(conditions: Conditions) -> float:
    """Time to encode and decode a push in a smaller form; 0 if none is allowed."""
    return conditions.comm_bytes / _CODED_BYTES_PER_S if conditions.pushed_part < 1.0 else 0.0


def _served_s(conditions: Conditions) -> float:
    """Time of a push and its reply without their transfer."""
    return _WAY_S + _SERVED * conditions.beyond_s


def _averaging_s(conditions: Conditions) -> float:
    """Time of an averaging that is not hidden behind compute."""
    if conditions.world_size < 2:
        return 0.0
    wire_s = ring_bytes(conditions.world_size, conditions.comm_bytes) / float(conditions.rate.min())  # As they are.
    return CYCLE_S + conditions.beyond_s + LOCAL_COPIES * wire_s


def _helpers_s(conditions: Conditions, ranks: _Ranks) -> float:
    """Delay of a collective by the helpers of starved ranks, if those are late, and by frozen ranks."""
    late = ranks[always_slow(conditions.usual_s[ranks], conditions.typical_s)]
    starved = float(conditions.starved[late].max(initial=0.0)) if len(conditions.starved) else 0.0
    return _PAUSE_S * starved + conditions.frozen_s


def _flow(plan: Plan, conditions: Conditions, shared: dict[str, Flow]) -> Flow:
    if plan.mode == "partial" and plan.label in shared:
        return shared[plan.label]
    return _MODES[plan.mode](plan, conditions)


def _sync(plan: Plan, conditions: Conditions) -> Flow:
    times = conditions.times_s
    if plan.uneven:
        factors = _share_factors(plan, conditions)
        behind = min(1.0, _FOLLOWED_STEPS * conditions.changes) if plan.balanced else 0.0
        # Until the shares follow, the slow rank may have the share of the fastest.
        times = (1.0 - behind) * times * factors + behind * times * float(factors.max())
    steps = times.max(axis=1)
    if plan.steal:
        # Ranks see the times of a step while it runs, so slowness that moves costs no more than slowness that stays.
        parts = conditions.microbatches or _USUAL_PARTS
        fine = grain(conditions.batch or _USUAL_BATCH, parts)
        fixed_part = conditions.fixed_part
        steps = stolen_makespan(times, parts, grain=fine, fixed_part=fixed_part, moving=moves(times)) + TRANSFER_S
    interval_s = float(steps.mean()) + ring_s(conditions) + conditions.frozen_s
    return Flow.fresh(interval_s, conditions.world_size, float(steps.std()) / math.sqrt(len(steps)) / interval_s)


def _share_factors(plan: Plan, conditions: Conditions) -> Array:
    """Every rank's time with its batch share relative to a usual batch; `sync(balanced)` has the best shares."""
    shares, batch = plan.batch_shares, conditions.batch or _USUAL_BATCH
    if plan.balanced:
        shares = solve_shares(conditions.usual_s.tolist(), batch, conditions.fixed_part)
    else:
        batch = round(sum(shares) / len(shares))
    return np.array(share_factors(shares, batch, conditions.fixed_part))


def _partials(candidates: Sequence[Plan], conditions: Conditions) -> dict[str, Flow]:
    """Flows of all candidates of mode `partial`, replayed together."""
    plans = [plan for plan in candidates if plan.mode == "partial"]
    if not plans:
        return {}
    fixed_s = ring_s(conditions)
    scales = [damping_scale(plan, float(plan.world_size)) for plan in plans]
    flows = partial_flow(conditions.times_s, [plan.quorum for plan in plans], fixed_s, scales=scales)
    late_s = _helpers_s(conditions, np.arange(conditions.world_size))
    return {
        plan.label: flow.slower(late_s + _closed_s(plan, conditions)) for plan, flow in zip(plans, flows, strict=True)
    }


def _closed_s(plan: Plan, conditions: Conditions) -> float:
    """Extra time of a step that is closed without the slow ranks."""
    if not conditions.beyond_s:
        return 0.0
    n = conditions.world_size
    slow = (conditions.times_s > slow_limit_s(conditions.typical_s)).sum(axis=1)
    left_out = np.minimum(slow, n - plan.quorum)
    return conditions.beyond_s * float(_CLOSED * (left_out > 0).mean() + _LEFT_OUT / n * left_out.mean())


def _partial(plan: Plan, conditions: Conditions) -> Flow:
    return _partials([plan], conditions)[plan.label]


def _subgroup(plan: Plan, conditions: Conditions) -> Flow:
    members = np.array(plan.members)
    is_member = np.zeros(conditions.world_size, dtype=np.bool_)
    is_member[members] = True
    children = np.flatnonzero(~is_member)
    steps = conditions.times_s[:, members].max(axis=1)
    interval_s = float(steps.mean()) + ring_s(conditions, members) + _helpers_s(conditions, children)
    rate = conditions.rate[children]
    coded_s = _coding_s(conditions)
    push_s = np.minimum(
        paced_s(conditions.comm_bytes, rate), paced_s(conditions.comm_bytes * conditions.pushed_part, rate) + coded_s
    )
    way_s = push_s + paced_s(conditions.comm_bytes, rate) + _WAY_S
    own_s, each_s = conditions.usual_s[children], conditions.usual_s[children] + way_s
    late = np.maximum(1.0, np.ceil(each_s / interval_s))
    pace = late  # A child contributes a gradient every `late` steps.
    if plan.in_background(conditions.background):
        # It contributes all its gradients, each as old as the oldest of those summed during the previous push.
        pace = np.maximum(1.0, own_s / interval_s)
        late = np.maximum(1.0, np.ceil((each_s + np.maximum(0.0, way_s - own_s)) / interval_s))
    weight = damped(damping_scale(plan, float(plan.world_size)), late)
    kept = np.where(late > plan.max_staleness, 0.0, weight)
    weights = np.concatenate([np.ones(len(members)), kept / pace])
    drifts = np.concatenate([np.zeros(len(members)), late])
    scatter = float(steps.std()) / math.sqrt(len(steps)) / interval_s
    return Flow.mean(interval_s, weights, drifts, scatter)


def _way_s(plan: Plan, conditions: Conditions) -> Array:
    """Exposed time of a push and its reply, for every rank, or for every rank in every step."""
    reply_s = np.asarray(conditions.comm_bytes / conditions.rate)
    push_s = np.minimum(reply_s, conditions.pushed_part * reply_s + _coding_s(conditions))
    if plan.pushes_early(conditions.background):
        push_s = push_left_s(push_s, conditions.times_s, conditions.edge_part)
    if plan.in_background(conditions.background):
        reply_s = reply_left_s(reply_s, conditions.times_s, conditions.edge_part)
    return _served_s(conditions) + push_s + reply_s


def part_behind_compute(plan: Plan, conditions: Conditions) -> float:
    """Time of a step with transfers behind compute relative to the same plan without `transmission`; 1 if not priced.

    Computed without a replay, to choose which plans are worth one. With servers it is the step of the rank that
    completes an update, at least of a typical rank: a slower rank's link is not waited for. With `subgroup` it is 1,
    because no step of the members waits for a child.
    """
    if plan.mode == "ps":
        last = max(plan.quorum, (plan.world_size + 1) // 2) - 1
        both = (plan.replace(transmission=each) for each in (None, Transmission(background=True)))
        times_s = [conditions.times_s + _way_s(one, conditions) for one in both]
        step_s = [float(np.sort(each_s.mean(axis=0))[last]) for each_s in times_s]
    elif plan.mode == "local":
        counts, averaging_s = steps_between_averagings(plan, conditions.usual_s), _averaging_s(conditions)
        walk_s = float((counts * conditions.usual_s).max())
        step_s = [walk_s + averaging_s, walk_s + float(averaging_left_s(averaging_s, walk_s))]
    else:
        return 1.0
    return step_s[1] / step_s[0]


def _ps(plan: Plan, conditions: Conditions) -> Flow:
    way_s = _way_s(plan, conditions)
    if plan.rule == "groups":
        plan = with_groups(plan, conditions.usual_s.tolist())
        return _group_flow(plan, conditions, conditions.times_s + way_s, 0.0)
    rates = conditions.rate[list(plan.servers)] if plan.servers else conditions.rate.max(keepdims=True)
    capacity = len(rates) * float(rates.min())
    x = 1 if plan.rule == "ssp" else plan.quorum
    times = conditions.times_s + way_s
    if plan.rule == "ssp":
        # No rank gets further ahead than the slack: in the long run all proceed at the rate of the slowest.
        times = np.maximum(times, times.mean(axis=0).max() * np.ones_like(times) * (1.0 if plan.slack < 64 else 0.0))
    return server_flow(plan, times, x, x * conditions.comm_bytes / capacity)


def _grouped(plan: Plan, conditions: Conditions) -> Flow:
    plan = with_groups(plan, conditions.usual_s.tolist())
    return _group_flow(plan, conditions, conditions.times_s, _served_s(conditions))


def _group_flow(plan: Plan, conditions: Conditions, times: Array, way_s: float) -> Flow:
    """Independent groups: rates add up; a group's drift is the length of the other groups' updates meanwhile."""
    n = conditions.world_size
    groups = plan.groups or (tuple(range(n)),)
    size = np.array([float(len(group)) for group in groups])
    cycle = []
    for group in groups:
        one_s = float(times[:, list(group)].max(axis=1).mean())
        if plan.mode == "grouped":
            rate = float(conditions.rate[group[0]])
            # A freeze delays the collectives of all groups, each once in the time of a step.
            one_s += ring_s(conditions, group) + way_s + 2.0 * conditions.comm_bytes / rate + conditions.frozen_s
        cycle.append(one_s)
    rates = 1.0 / np.array(cycle)
    stale = (rates.sum() - rates) / rates
    kept = damped(damping_scale(plan, size), stale)
    length = size / n * kept if plan.lr_rule == "linear" else kept
    moved = (rates * length).sum()
    drift = (moved - rates * length) / rates
    share = rates * length / moved
    return Flow(
        interval_s=float(1.0 / rates.sum()),
        length=float(moved / rates.sum()),
        weights=share,
        drifts=drift,
        gradients=float((share * size).sum()),
        drift=float((share * drift).sum()),
        scatter=0.03,
    )


def _local(plan: Plan, conditions: Conditions) -> Flow:
    """Walks of `count` steps, whose sums average out intermittent slowness."""
    times, n = conditions.times_s, conditions.world_size
    counts = steps_between_averagings(plan, conditions.usual_s)
    count = float(counts.mean())
    if plan.local_steps:
        starts = range(0, len(times), 4)
        walks = [np.resize(np.roll(times, -i, axis=0), (plan.local_steps, n)).sum(axis=0) for i in starts]
        walk_s = float(np.mean([walk.max() for walk in walks]))
    else:
        walk_s = float((counts * conditions.usual_s).max())
    averaging_s, behind = _averaging_s(conditions), 0.0
    if plan.in_background(conditions.background):
        behind = float(steps_behind(averaging_s, walk_s, count))
        averaging_s = float(averaging_left_s(averaging_s, walk_s))
    # Freezes occur per time, not per averaging.
    interval_s = (walk_s + averaging_s) / count + conditions.frozen_s
    drift = float(local_drift(count + behind, n))
    gradients = float(counts.sum() ** 2 / (counts * counts).sum())
    return Flow(
        interval_s=interval_s,
        length=1.0,
        weights=np.ones(1),
        drifts=np.array([drift]),
        gradients=gradients,
        drift=drift,
        scatter=0.03,
    )


_MODES: dict[str, Callable[[Plan, Conditions], Flow]] = {
    "sync": _sync,
    "partial": _partial,
    "subgroup": _subgroup,
    "ps": _ps,
    "grouped": _grouped,
    "local": _local,
}
