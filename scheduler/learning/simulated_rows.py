"""Training rows from simulated jobs: at moments of a job, every candidate is simulated from that state.

A job runs under a policy with random exploration, so that there are moments under all modes. At some of its decisions
the job is forked: each candidate continues from there, with the same contention, for the time of `HORIZON_STEPS`
synchronous steps. The results are the labels. They exclude the cost of the switch, which the policy accounts for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scheduler.cost.conditions import Conditions
from scheduler.cost.cost_model import Prediction, rank
from scheduler.learning.features import rows, speed
from scheduler.plan.completion import with_groups
from scheduler.plan.plan import Plan
from scheduler.policy.cost_policy import CostPolicy
from scheduler.records import Window
from scheduler.simulator.base import Mode
from scheduler.simulator.job import Job, make_mode, vectorised
from scheduler.simulator.machines import Array
from scheduler.simulator.rounds import Rounds
from scheduler.simulator.scenario import Scenario, draw_scenario

__all__ = ["HORIZON_STEPS", "Moment", "collect_scenario", "fork", "in_order", "moment_rows"]

HORIZON_STEPS = 32
"""Horizon of a label in synchronous steps: half of the reports in a window, so that these are informative."""

_LONGEST = 6.0
"""Longest horizon, in usual steps per step: enough for a frozen rank, or one 20 times slower."""

_CLIP = 3.5
"""Bound of the logarithm of a relative time, a factor of 33."""

_LONG_SHARE = 0.3
"""Share of the moments at which plans that are slow to simulate are included."""

_HARM = 4.0  # As in `simulator.account`.


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """All candidates of one decision, with their labels.

    Attributes:
        step: Global step.
        plans: The candidates.
        features: Feature rows, shape (n_candidates, n_features).
        log_relative: Logarithm of the time to equal progress relative to `sync`.
        reached: Probability of reaching the target if the whole job continued like this.
        cost: The cost model's relative times.
    """

    step: int
    plans: tuple[Plan, ...]
    features: Array
    log_relative: Array
    reached: Array
    cost: Array


def in_order(offered: Sequence[Plan], conditions: Conditions) -> list[Prediction]:
    """The cost model's predictions in the order of the candidates."""
    found = {id(prediction.plan): prediction for prediction in rank(offered, conditions)}
    return [found[id(plan)] for plan in offered]


def moment_rows(
    offered: Sequence[Plan], more: Sequence[Plan], conditions: Conditions, window: Window, active: Plan
) -> Array:
    """Feature rows of candidates and of further plans, as live decisions would compute them.

    Some features depend on all candidates, such as their number and the best one's time. The candidates' are those of a
    decision without the further plans, and each of these is a candidate of its own decision beside them.
    """
    found = [rows(offered, conditions, window, active, in_order(offered, conditions))]
    for plan in more:
        plans = [*offered, plan]
        found.append(rows(plans, conditions, window, active, in_order(plans, conditions))[-1:])
    return np.concatenate(found)


def fork(job: Job, plans: Sequence[Plan], *, steps: int = HORIZON_STEPS) -> tuple[Array, Array]:
    """Simulate each plan from the job's current state; the job itself is not changed.

    Args:
        job: A simulated job between two steps.
        plans: The plans; the first is `sync`, whose time for `steps` steps is the horizon of all.
        steps: Length of the horizon.

    Returns:
        (log of the time to equal progress relative to `sync`, probability of the target), each (n_plans,).
    """
    usual = job._usual_s()
    completed = [with_groups(plan, usual) for plan in plans]
    nominal_s = max(usual) if usual else job.scenario.network.compute_s
    first = _branch(job, [completed[0]])
    begin_s = _begin(first)
    limit_s = begin_s + _LONGEST * steps * min(nominal_s, 4.0 * job.scenario.network.compute_s)
    done = 0
    while done < steps and (float(first.state.now_s[0]) < limit_s[0] or done < 3):
        first.step()
        done += 1
    base = _achieved(first, begin_s, job)
    horizon_s = float(first.state.now_s[0] - begin_s[0])
    speeds, harms = np.full(len(plans), base[0][0]), np.full(len(plans), base[1][0])
    for chosen in _kinds(completed):
        mode = _branch(job, [completed[i] for i in chosen])
        begin_s = _begin(mode)
        speeds[chosen], harms[chosen] = _run(mode, begin_s, horizon_s, job)
    relative = np.log(base[0][0] / np.maximum(speeds, 1e-3 * base[0][0]))
    return np.clip(relative, -_CLIP, _CLIP), np.exp(-_HARM * np.minimum(harms, 5.0))


def _kinds(plans: Sequence[Plan]) -> list[list[int]]:
    """Indices of plans that can be simulated together, without the first (`sync`)."""
    kinds: dict[object, list[int]] = {}
    for index, plan in enumerate(plans):
        if index == 0:
            continue
        key: object = index
        if vectorised(plan):
            # Updates of one gradient are far more frequent, and the others would have to be simulated as long.
            key = "rounds" if plan.mode in ("sync", "partial") else (plan.mode, plan.mode == "ps" and plan.quorum == 1)
        kinds.setdefault(key, []).append(index)
    return list(kinds.values())


def _branch(job: Job, plans: Sequence[Plan]) -> Mode:
    """Replicas of the job, one per plan, each after the switch to its plan."""
    rows_ = np.zeros(len(plans), dtype=np.int64)
    if len(plans) == 1 and plans[0] == job.plan and vectorised(job.plan):
        return job.mode.take(rows_)
    if isinstance(job.mode, Rounds) and plans[0].mode in ("sync", "partial"):
        copied = job.mode.take(rows_)
        copied.set_plans(plans)
        return copied
    # Only the state is copied, not the mode: servers' queues are objects.
    left_s = job.mode.leave_s()
    state = job.mode.state.take(rows_)
    state.machines.advance_to(state.now_s)
    state.now_s = state.machines.thawed(np.repeat(left_s[:1], len(plans)))
    state.step = np.maximum(state.step, state.batch_step.max(axis=1)) + 1
    all_ranks = np.arange(state.batch_step.size)
    state.report(all_ranks)
    state.begin(all_ranks, np.repeat(state.now_s, state.machines.n), np.repeat(state.step, state.machines.n))
    return make_mode(state, plans)


def _begin(mode: Mode) -> Array:
    account = mode.state.account
    account.gain[:] = 0.0
    account.harm[:] = 0.0
    account.reached_s[:] = math.inf
    return mode.state.now_s.copy()


def _achieved(mode: Mode, begin_s: Array, job: Job) -> tuple[Array, Array]:
    """Progress in synchronous steps per second, and harm extrapolated to the whole job."""
    account = mode.state.account
    took_s = np.maximum(mode.state.now_s - begin_s, 1e-9)
    share = np.maximum(account.gain, 1e-3) / job.scenario.network.target_steps
    return account.gain / took_s, account.harm / share


def _run(mode: Mode, begin_s: Array, horizon_s: float, job: Job) -> tuple[Array, Array]:
    """Simulate until every replica has passed the horizon, and record each one's result when it does."""
    speeds, harms = np.zeros(len(begin_s)), np.zeros(len(begin_s))
    open_ = np.ones(len(begin_s), dtype=np.bool_)
    most = 64 * HORIZON_STEPS * job.scenario.world_size
    for _ in range(most):
        mode.step()
        over = open_ & (mode.state.now_s - begin_s >= horizon_s)
        if over.any():
            now = _achieved(mode, begin_s, job)
            speeds[over], harms[over] = now[0][over], now[1][over]
            open_ &= ~over
            if not open_.any():
                break
    if open_.any():
        now = _achieved(mode, begin_s, job)
        speeds[open_], harms[open_] = now[0][open_], now[1][open_]
    return speeds, harms


class _Collector:
    """A cost policy that collects moments and sometimes chooses a random plan."""

    def __init__(self, scenario: Scenario, rng: np.random.Generator, moments: int) -> None:
        n = scenario.world_size
        self.moments: list[Moment] = []
        self.job: Job | None = None
        self._rng, self._most = rng, moments
        self._chance = 2.0 * moments / (scenario.network.target_steps / 4.0)
        self._explore_rate = float(rng.choice((0.0, 0.01, 0.05)))
        self._inner = CostPolicy(n, ranker=self._rank, hosts=[f"host{r}" for r in range(n)])

    @property
    def done(self) -> bool:
        return len(self.moments) >= self._most

    def decide(self, window: Window, active: Plan) -> Plan | None:
        decided = self._inner.decide(window, active)
        if self._inner.last and self._rng.random() < self._explore_rate:
            plan = self._inner.last[int(self._rng.integers(len(self._inner.last)))].plan
            return None if plan == active else plan.replace(plan_id=active.plan_id + 1, reason="tried")
        return decided

    def _rank(
        self, offered: Sequence[Plan], conditions: Conditions, window: Window, active: Plan
    ) -> list[Prediction]:
        if not self.done and self._rng.random() < self._chance:
            self._collect(offered, conditions, window, active)
        return in_order(offered, conditions)

    def _collect(self, offered: Sequence[Plan], conditions: Conditions, window: Window, active: Plan) -> None:
        assert self.job is not None
        n = conditions.world_size
        more = [Plan.partial(n, quorum) for quorum in sorted({max(1, n // 2), max(1, 3 * n // 4)})]
        seen = {plan.label for plan in offered}
        more = [plan for plan in more if plan.label not in seen]
        plans = [*offered, *more]
        predictions = in_order(plans, conditions)
        features = moment_rows(offered, more, conditions, window, active)
        chosen = [i for i, plan in enumerate(plans) if i == 0 or not _long(plan) or self._rng.random() < _LONG_SHARE]
        log_relative, reached = fork(self.job, [plans[i] for i in chosen])
        self.moments.append(
            Moment(
                step=window.step,
                plans=tuple(plans[i] for i in chosen),
                features=features[chosen],
                log_relative=log_relative,
                reached=reached,
                cost=np.array([speed(predictions[i]) for i in chosen]),
            )
        )


def _long(plan: Plan) -> bool:
    """Whether a plan is slow to simulate: an update per gradient, or event by event."""
    return not vectorised(plan) or (plan.mode == "ps" and plan.quorum == 1)


def collect_scenario(
    seed: int,
    *,
    moments: int = 8,
    steps: float = 0.0,
    pattern: str = "",
    world_size: int = 0,
) -> tuple[Scenario, list[Moment]]:
    """Simulate one job and collect moments.

    Args:
        seed: Seed of the scenario and of the exploration.
        moments: Most moments.
        steps: Synchronous steps to the target; the network's own if 0.
        pattern: Pattern of contention (`simulator.episodes.PATTERNS`); drawn if empty.
        world_size: Ranks; drawn if 0.
    """
    scenario = draw_scenario(seed, steps=steps, pattern=pattern, world_size=world_size)
    rng = np.random.default_rng((seed, 7))
    collector = _Collector(scenario, rng, moments)
    job = Job(scenario, policy=collector)
    collector.job = job
    limit_s = 20.0 * scenario.network.target_steps * scenario.network.compute_s
    most = 40.0 * scenario.network.target_steps
    while not (job.reached or collector.done or job.now_s > limit_s or job.steps > most):
        job.advance()
    return scenario, collector.moments
