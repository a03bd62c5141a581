"""What every mode would cost now: step interval from recent times, progress per update, price of staleness.

    relative time to progress = (interval / progress of an update) / (the same of sync)

Intervals come from replaying the ranks' recent times, row by row, under the rules of the mode: a closed form of the
static order (STAR section 4.3) is 7.5 times too optimistic for seven equal ranks and one of twice the time, where the
event simulation of section 4.4 gives .13 .29 .50 .67 1.0 1.0 1.0 2.0. Communication is bytes over link rates, behind
what computing hides. The progress of an update is `scheduler.progress`; with a price of staleness of 0 equal ranks
would choose ASGD (section 4.10), with any price of at least the learning-rate ratio they choose `sync`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from scheduler.causes import MIN_REPORTS, PERSISTENCE, Readings, lower_median
from scheduler.grouping import progressive_groups, similar_groups, speed_groups
from scheduler.plans import LOCAL_COPIES, Plan
from scheduler.priors import prior_of
from scheduler.progress import alignment, update_progress
from scheduler.records import Window
from scheduler.replay import Flow, order_interval, partial_flow, server_flow
from scheduler.staleness import StalenessPrice

__all__ = ["NOISE", "Conditions", "Prediction", "order_interval", "predict", "rank", "settle"]

Array = npt.NDArray[np.float64]
_Ranks = npt.NDArray[np.int64]

NOISE = 4.0
"""phi, in gradients of one rank, where nothing is known: in the middle of STAR's tables at a batch of 128."""

_OVERLAP = 0.4
"""Part of the compute time under which an all-reduce hides: the backward pass but for its first bucket."""

_CYCLE_S, _WAY_S = 1.5e-3, 2e-4  # A collective's negotiation; a message's latency both ways, and a server's work.
_PAUSE_S = 0.05  # Half a cgroup period: what a starved helper keeps a collective waiting.
_ROWS, _ROWS_MANY, _MANY = 24, 5, 128
_FEW = 4  # Kinds of gradients in an update.
_SERVED = 0.7
"""What a push and its answer take beyond their bytes, as a part of what a collective does: measured with 4 ranks on 2
cores, where it is 10 of 15 ms."""
_FREEZE, _FREEZE_S = 5.0, 0.5  # A report of a freezing rank above both was made around a freeze.


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What a decision knows of a moment.

    Attributes:
        times_s: Compute times to expect, one row per step, shape (n_steps, n_ranks), seconds.
        rate: Link of every rank in bytes per second; infinite where unknown.
        comm_bytes: Gradient bytes.
        noise: phi in gradients of one rank.
        starved: Part of its time a rank is without a processor, 0 to 1, shape (n_ranks,).
        beyond_s: What a collective was measured to take beyond latency and bytes over the link, seconds: on a machine
            with fewer cores than ranks it is more than both.
        frozen_s: Mean time per step that a rank which freezes keeps every collective waiting, seconds.
        freezing: Those ranks.
        price: Price of staleness; with it what else is assumed of the network, rho and the drift it bears.
        usual_s: Mean time of every rank, shape (n_ranks,).
        typical_s: Lower median of them.
        prices: The price, its 5 % and its 95 % quantile.
    """

    times_s: Array
    rate: Array
    comm_bytes: float = 0.0
    noise: float = NOISE
    starved: Array = field(default_factory=lambda: np.zeros(0))
    beyond_s: float = 0.0
    frozen_s: float = 0.0
    freezing: tuple[int, ...] = ()
    price: StalenessPrice = field(default_factory=StalenessPrice)
    usual_s: Array = field(init=False)
    typical_s: float = field(init=False)
    prices: Array = field(init=False)

    def __post_init__(self) -> None:
        usual_s = np.asarray(self.times_s.mean(axis=0))
        object.__setattr__(self, "usual_s", usual_s)
        object.__setattr__(self, "typical_s", float(np.sort(usual_s)[(len(usual_s) - 1) // 2]))
        object.__setattr__(self, "prices", np.array([self.price.value, *self.price.quantiles(0.05, 0.95)]))

    @property
    def world_size(self) -> int:
        return int(self.times_s.shape[1])

    @classmethod
    def from_window(cls, window: Window, price: StalenessPrice | None = None) -> Conditions | None:
        """Read a window; None while a rank has not reported yet, or too little while nothing is known of links.

        Times to come are those of a rank's present slow run where it is in one, else its recent ones: what comes and
        goes is expected to come again as often as it did; what came once is not. Freezes are not in a window: see
        `with_freezes`.
        """
        readings = Readings.of(window)
        if window.world_size == 0 or not readings.counts.all():
            return None
        known = np.isfinite(window.table.link_bytes_per_s) & (window.table.link_bytes_per_s > 0.0)
        rate = np.where(known, window.table.link_bytes_per_s, math.inf)
        rows = _ROWS if window.world_size <= _MANY else _ROWS_MANY
        times = readings.newest(rows).T.copy()
        if not math.isnan(readings.reference_s):
            for one in np.flatnonzero((readings.run_lengths() >= PERSISTENCE) | (readings.counts < rows)).tolist():
                times[:, one] = _expected(readings, one, rows)
            _forget_single(times, readings)
        elif known.any():
            # Too early to judge a rank by its times, not by its link: all are taken to be equal.
            times[:] = readings.typical_s
        else:
            return None
        starved = np.minimum(0.99, window.table.starved_share)
        return cls(
            times_s=times,
            rate=rate,
            comm_bytes=float(window.comm_bytes),
            noise=_known(window.noise_scale, NOISE),
            beyond_s=_beyond_s(window, rate),
            starved=np.where(times.mean(axis=0) > 1.2 * readings.reference_s, starved, 0.0),
            price=price or StalenessPrice(prior_of(window.comm_bytes)),
        )

    def with_freezes(self, frozen_s: float, freezing: Collection[int], froze: Collection[int]) -> Conditions:
        """The same where ranks were frozen.

        Their longest times are taken out: a freeze that does not come again says nothing of the steps to come, and
        one that does is counted by `frozen_s`, as it costs all ranks of a collective, whoever computes meanwhile.

        Args:
            frozen_s: Mean time per step that freezes cost.
            freezing: Who freezes again and again.
            froze: Who was frozen at least once.
        """
        if not froze:
            return self
        times = self.times_s.copy()
        for one in froze:
            own = times[:, one]
            usual_s = min(float(np.median(own)), _FREEZE * self.typical_s)
            own[own > max(_FREEZE * self.typical_s, _FREEZE_S)] = usual_s
        return dataclasses.replace(self, times_s=times, frozen_s=frozen_s, freezing=tuple(sorted(freezing)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a plan is predicted to do.

    Attributes:
        plan: The plan.
        relative: Expected time to equal progress over that of `sync`; below 1 is faster. A target that may be missed
            counts with the time to train again in `sync`.
        low: 5 % quantile of it.
        high: 95 % quantile.
        interval_s: Time between two updates, seconds.
        progress: Of an update, in synchronous steps.
        drift: Mean drift of its gradients.
        reach: Chance to reach the target's accuracy.
    """

    plan: Plan
    relative: float
    low: float
    high: float
    interval_s: float
    progress: float
    drift: float
    reach: float


def _known(value: float, instead: float) -> float:
    return value if math.isfinite(value) and value > 0.0 else instead


def _expected(readings: Readings, rank: int, rows: int) -> Array:
    run = min(int(readings.run_lengths()[rank]), rows)
    if run >= PERSISTENCE:
        # Again and again, the newest last in every column, so that what all ranks shared in a step stays in one row.
        return readings.latest(rank, run)[::-1][np.arange(rows) % run][::-1]
    times = readings.latest(rank, rows)
    # Not the same few again: one long step among six would be four among 24, and look like a habit.
    return np.concatenate((np.full(rows - len(times), np.median(times)), times))


def _beyond_s(window: Window, rate: Array) -> float:
    """What the collectives took beyond latency and wire, by the rank with the slowest link; 0 where not measured.

    Bytes over the whole of the link's rate, as if computing hid none: what is beyond is surely something else.
    """
    slowest = int(rate.argmin())
    times = [time_s for time_s in window.table.comm_s[slowest] if math.isfinite(time_s) and time_s >= 0.0]
    if len(times) < MIN_REPORTS:
        return 0.0
    n = window.world_size
    wire_s = 2.0 * (n - 1) / n * window.comm_bytes / float(rate[slowest])
    return max(0.0, lower_median(times) - _CYCLE_S - wire_s)


def _forget_single(times: Array, readings: Readings) -> None:
    """Take out of the expected times the only slow step that a rank had: a pause may be anything, two are a habit."""
    slow = readings.slow()
    rows, width = len(times), slow.shape[1]
    for one in np.flatnonzero(slow.sum(axis=1) == 1).tolist():
        row = int(slow[one].argmax()) - width + rows
        if row >= 0:
            times[row, one] = float(np.median(times[:, one]))


def settle(plan: Plan, conditions: Conditions) -> Plan:
    """The plan with its groups, where it leaves them to be formed."""
    times = conditions.usual_s.tolist()
    if plan.mode == "grouped" and not plan.groups:
        groups = speed_groups(times, plan.group_count) if plan.group_count else progressive_groups(times)
        return plan.replace(groups=groups, group_count=len(groups))
    if plan.mode == "ps" and plan.rule == "groups" and not plan.groups:
        return plan.replace(groups=similar_groups(times))
    return plan


def rank(candidates: Sequence[Plan], conditions: Conditions) -> list[Prediction]:
    """Predictions for all candidates, the fastest first; of equals the one named first."""
    basis = _flow(Plan.sync(conditions.world_size), conditions, {})
    shared: dict[str, Flow] = _partials(candidates, conditions)
    found = [predict(plan, conditions, basis=basis, shared=shared) for plan in candidates]
    return sorted(found, key=lambda prediction: prediction.relative)


def predict(
    plan: Plan, conditions: Conditions, *, basis: Flow | None = None, shared: dict[str, Flow] | None = None
) -> Prediction:
    """What one plan would do. `basis` is the flow of `sync`, `shared` flows computed before, by label."""
    flow = _flow(plan, conditions, shared or {})
    sync = flow if plan.mode == "sync" else basis or _flow(Plan.sync(conditions.world_size), conditions, {})
    gains = np.maximum(_progress(flow, conditions), 1e-6)
    relative = flow.interval_s / gains / sync.interval_s
    reach = _reach(flow.drift, conditions)
    missed = 1.0 - reach
    # Errors of interval and price are independent; the interval of sync moves with the others.
    scatter = flow.scatter if plan.mode != "sync" else 0.0
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
    """Chance to reach the target under a mean drift: 1 without any, falling around the network's limit."""
    prior = conditions.price.prior
    limit, softness = prior.drift_limit, prior.drift_softness
    chance = 1.0 / (1.0 + math.exp(min(50.0, (drift - limit) / softness)))
    return min(1.0, chance * (1.0 + math.exp(-limit / softness)))


def _progress(flow: Flow, conditions: Conditions) -> Array:
    """Mean progress of an update for the price and its quantiles."""
    if len(flow.weights) <= _FEW:  # Quicker one by one.
        kinds = list(zip(flow.weights.tolist(), flow.drifts.tolist(), strict=True))
        signals = [sum(w * float(alignment(d, price)) for w, d in kinds) for price in conditions.prices.tolist()]
        found = [
            update_progress(
                flow.length, flow.length * signal, flow.gradients, conditions.noise, conditions.world_size,
                conditions.price.prior.lr_ratio,
            )
            for signal in signals
        ]
        return np.array(found, dtype=np.float64)
    signal = (flow.weights[:, None] * alignment(flow.drifts[:, None], conditions.prices[None, :])).sum(axis=0)
    return np.asarray(
        update_progress(
            flow.length, flow.length * signal, flow.gradients, conditions.noise, conditions.world_size,
            conditions.price.prior.lr_ratio,
        )
    )


# ---- flows of the modes ---------------------------------------------------------------------------------------------


def _wire_s(conditions: Conditions, rate: Array) -> float:
    """2 (m - 1) / m of the bytes over the slowest of m links."""
    return 2.0 * (len(rate) - 1) / len(rate) * conditions.comm_bytes / float(rate.min())


def _ring_s(conditions: Conditions, members: Sequence[int] | _Ranks | None = None) -> float:
    """What an all-reduce takes besides what computing hides."""
    rate = conditions.rate if members is None else conditions.rate[np.asarray(members)]
    if len(rate) < 2:
        return 0.0
    wire_s = _wire_s(conditions, rate)
    # What is beyond is negotiation, which takes as long for few, and the hops of the ring, which are fewer then.
    hops = (len(rate) - 1) / (conditions.world_size - 1)
    beyond_s = conditions.beyond_s * 0.5 * (1.0 + hops)
    return _CYCLE_S + beyond_s + max(0.1 * wire_s, wire_s - _OVERLAP * conditions.typical_s)


def _served_s(conditions: Conditions) -> float:
    """What a push and its answer take besides their bytes."""
    return _WAY_S + _SERVED * conditions.beyond_s


def _averaging_s(conditions: Conditions) -> float:
    """What an averaging takes, which nothing hides."""
    if conditions.world_size < 2:
        return 0.0
    return _CYCLE_S + conditions.beyond_s + LOCAL_COPIES * _wire_s(conditions, conditions.rate)


def _helpers_s(conditions: Conditions, ranks: _Ranks) -> float:
    """What a collective waits for the helpers of starved ranks that are late, and for frozen ones."""
    starved = float(conditions.starved[ranks].max(initial=0.0)) if len(conditions.starved) else 0.0
    return _PAUSE_S * starved + conditions.frozen_s


def _flow(plan: Plan, conditions: Conditions, shared: dict[str, Flow]) -> Flow:
    if plan.mode == "partial" and plan.label in shared:
        return shared[plan.label]
    return _MODES[plan.mode](plan, conditions)


def _sync(plan: Plan, conditions: Conditions) -> Flow:
    steps = conditions.times_s.max(axis=1)
    interval_s = float(steps.mean()) + _ring_s(conditions) + conditions.frozen_s
    return Flow.fresh(interval_s, conditions.world_size, float(steps.std()) / math.sqrt(len(steps)) / interval_s)


def _partials(candidates: Sequence[Plan], conditions: Conditions) -> dict[str, Flow]:
    """Flows of all candidates of mode `partial`, replayed together."""
    plans = [plan for plan in candidates if plan.mode == "partial"]
    if not plans:
        return {}
    fixed_s = _ring_s(conditions)
    flows = partial_flow(
        conditions.times_s, [plan.quorum for plan in plans], fixed_s, relative=[p.damping != "inverse" for p in plans]
    )
    late_s = _helpers_s(conditions, np.flatnonzero(conditions.usual_s > 1.2 * conditions.typical_s))
    return {plan.label: flow.slower(late_s) for plan, flow in zip(plans, flows, strict=True)}


def _partial(plan: Plan, conditions: Conditions) -> Flow:
    return _partials([plan], conditions)[plan.label]


def _subgroup(plan: Plan, conditions: Conditions) -> Flow:
    members = np.array(plan.members)
    inside = np.zeros(conditions.world_size, dtype=np.bool_)
    inside[members] = True
    outside = np.flatnonzero(~inside)
    steps = conditions.times_s[:, members].max(axis=1)
    interval_s = float(steps.mean()) + _ring_s(conditions, members) + _helpers_s(conditions, outside)
    way_s = 2.0 * conditions.comm_bytes / conditions.rate[outside] + _WAY_S
    late = np.maximum(1.0, np.ceil((conditions.usual_s[outside] + way_s) / interval_s))
    kept = np.where(late > plan.max_staleness, 0.0, 1.0 / (1.0 + late) if plan.damping == "inverse" else 1.0)
    # A child gives a gradient every `late` steps.
    weights = np.concatenate([np.ones(len(members)), kept / late])
    drifts = np.concatenate([np.zeros(len(members)), late])
    scatter = float(steps.std()) / math.sqrt(len(steps)) / interval_s
    return Flow.mean(interval_s, weights, drifts, scatter)


def _ps(plan: Plan, conditions: Conditions) -> Flow:
    way_s = _served_s(conditions) + 2.0 * conditions.comm_bytes / conditions.rate
    if plan.rule == "groups":
        return _crews(settle(plan, conditions), conditions, conditions.times_s + way_s, 0.0)
    rates = conditions.rate[list(plan.servers)] if plan.servers else conditions.rate.max(keepdims=True)
    capacity = len(rates) * float(rates.min())
    x = 1 if plan.rule == "ssp" else plan.quorum
    times = conditions.times_s + way_s
    if plan.rule == "ssp":
        # Nobody gets further ahead than the slack: in the long run all go at the pace of the slowest.
        times = np.maximum(times, times.mean(axis=0).max() * np.ones_like(times) * (1.0 if plan.slack < 64 else 0.0))
    return server_flow(plan, times, x, x * conditions.comm_bytes / capacity)


def _grouped(plan: Plan, conditions: Conditions) -> Flow:
    settled = settle(plan, conditions)
    return _crews(settled, conditions, conditions.times_s, _served_s(conditions))


def _crews(plan: Plan, conditions: Conditions, times: Array, way_s: float) -> Flow:
    """Groups that each wait for their own: rates add up, the drift of one is what the others did meanwhile."""
    n = conditions.world_size
    groups = plan.groups or (tuple(range(n)),)
    size = np.array([float(len(group)) for group in groups])
    cycle = []
    for group in groups:
        one_s = float(times[:, list(group)].max(axis=1).mean())
        if plan.mode == "grouped":
            rate = float(conditions.rate[group[0]])
            one_s += _ring_s(conditions, group) + way_s + 2.0 * conditions.comm_bytes / rate
        cycle.append(one_s)
    rates = 1.0 / np.array(cycle)
    stale = (rates.sum() - rates) / rates
    kept = np.ones(len(size))
    if plan.damping == "inverse":
        kept = 1.0 / (1.0 + stale)
    elif plan.damping == "relative":
        kept = np.minimum(1.0, n / size / (1.0 + stale))
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
    """Walks of `count` steps: their sums even out what is slow only now and then."""
    times, n = conditions.times_s, conditions.world_size
    if plan.local_steps:
        count = float(plan.local_steps)
        starts = range(0, len(times), 4)
        walks = [np.resize(np.roll(times, -i, axis=0), (plan.local_steps, n)).sum(axis=0) for i in starts]
        round_s = float(np.mean([walk.max() for walk in walks]))
        counts = np.full(n, count)
    else:
        counts = np.maximum(1.0, np.floor(plan.local_s / conditions.usual_s))
        round_s = float((counts * conditions.usual_s).max())
        count = float(counts.mean())
    # Freezes come with time, not with rounds.
    interval_s = (round_s + _averaging_s(conditions)) / count + conditions.frozen_s
    drift = 0.15 * 0.5 * (count - 1.0) * (1.0 - 1.0 / n)
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
