"""Training rows from simulated jobs: at moments of a job, every candidate is tried for a while from that very moment.

A job runs under a policy that sometimes does something else, so that moments under all modes are seen. At some of its
decisions it is forked: each candidate goes on from there, contention and all, for as long as `HORIZON_STEPS`
synchronous steps take. Labels are what came of it; switching itself is not in them, its price is the policy's business.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from scheduler.cost.conditions import Conditions
from scheduler.cost.cost_model import Prediction, rank
from scheduler.learning.features import rows, speed
from scheduler.plan.completion import with_groups
from scheduler.plan.plan import Plan
from scheduler.policy.cost_policy import CostPolicy, Ranker
from scheduler.records import Window
from scheduler.simulator.base import Mode
from scheduler.simulator.job import Job, make_mode, vectorised
from scheduler.simulator.machines import Array
from scheduler.simulator.rounds import Rounds
from scheduler.simulator.scenario import Scenario, draw_scenario

__all__ = ["HORIZON_STEPS", "Moment", "collect_scenario", "fork", "in_order"]

HORIZON_STEPS = 32
"""Synchronous steps that a candidate is judged over: half of the reports known, so that what is seen can tell."""

_LONGEST = 6.0
"""A horizon ends after as many usual steps per step: a frozen rank, or one 20 times slower, is understood by then."""

_CLIP = 3.5
"""Bound of the logarithm of a relative time, a factor of 33: worse is not told apart."""

_LONG_SHARE = 0.3
"""Part of the moments at which plans that are simulated slowly are tried too."""

_HARM = 4.0  # As in `simulator.account`.


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """All candidates of one decision, and what came of each.

    Attributes:
        step: Global step.
        plans: The candidates.
        features: Shape (n_candidates, n_features).
        log_relative: Logarithm of the time to equal progress over that of `sync`.
        reached: Chance to reach the target if all of the job went that way.
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


def fork(job: Job, plans: Sequence[Plan], *, steps: int = HORIZON_STEPS) -> tuple[Array, Array]:
    """Try each plan from where the job is; the job itself is not touched.

    Args:
        job: A simulated job between two steps.
        plans: What to try; the first is `sync`, whose time for `steps` steps is what all get.
        steps: Horizon.

    Returns:
        (log of the time to equal progress over that of `sync`, chance to reach the target), each (n_plans,).
    """
    usual = job._usual_s()
    settled = [with_groups(plan, usual) for plan in plans]
    nominal_s = max(usual) if usual else job.scenario.network.compute_s
    first = _branch(job, [settled[0]])
    begin_s = _begin(first)
    limit_s = begin_s + _LONGEST * steps * min(nominal_s, 4.0 * job.scenario.network.compute_s)
    done = 0
    while done < steps and (float(first.state.now_s[0]) < limit_s[0] or done < 3):
        first.step()
        done += 1
    base = _achieved(first, begin_s, job)
    horizon_s = float(first.state.now_s[0] - begin_s[0])
    speeds, harms = np.full(len(plans), base[0][0]), np.full(len(plans), base[1][0])
    for chosen in _kinds(settled):
        mode = _branch(job, [settled[i] for i in chosen])
        begin_s = _begin(mode)
        speeds[chosen], harms[chosen] = _run(mode, begin_s, horizon_s, job)
    relative = np.log(base[0][0] / np.maximum(speeds, 1e-3 * base[0][0]))
    return np.clip(relative, -_CLIP, _CLIP), np.exp(-_HARM * np.minimum(harms, 5.0))


def _kinds(plans: Sequence[Plan]) -> list[list[int]]:
    """Indices of plans that run together, `sync` at the front left out."""
    kinds: dict[object, list[int]] = {}
    for index, plan in enumerate(plans):
        if index == 0:
            continue
        key: object = index
        if vectorised(plan):
            # Updates of one gradient are many: they would keep the others going.
            key = "rounds" if plan.mode in ("sync", "partial") else (plan.mode, plan.mode == "ps" and plan.quorum == 1)
        kinds.setdefault(key, []).append(index)
    return list(kinds.values())


def _branch(job: Job, plans: Sequence[Plan]) -> Mode:
    """Replicas of the job, one per plan, each with its plan begun."""
    rows_ = np.zeros(len(plans), dtype=np.int64)
    if len(plans) == 1 and plans[0] == job.plan and vectorised(job.plan):
        return job.mode.take(rows_)
    if isinstance(job.mode, Rounds) and plans[0].mode in ("sync", "partial"):
        copied = job.mode.take(rows_)
        copied.set_plans(plans)
        return copied
    # Only what outlives a mode is copied: servers' queues are objects.
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
    """Progress per second in synchronous steps, and harm were the whole way like that."""
    account = mode.state.account
    took_s = np.maximum(mode.state.now_s - begin_s, 1e-9)
    share = np.maximum(account.gain, 1e-3) / job.scenario.network.target_steps
    return account.gain / took_s, account.harm / share


def _run(mode: Mode, begin_s: Array, horizon_s: float, job: Job) -> tuple[Array, Array]:
    """Until every replica has had its time; one that is through waits for the others with its result taken."""
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
    """A policy that decides like another one, with an eye on moments to try out, and whims."""

    def __init__(self, scenario: Scenario, rng: np.random.Generator, ranker: Ranker | None, moments: int) -> None:
        n = scenario.world_size
        self.moments: list[Moment] = []
        self.job: Job | None = None
        self._rng, self._ranker, self._most = rng, ranker, moments
        self._chance = 2.0 * moments / (scenario.network.target_steps / 4.0)
        self._whims = float(rng.choice((0.0, 0.01, 0.05)))
        self._inner = CostPolicy(n, ranker=self._rank, hosts=[f"host{r}" for r in range(n)])
        self.observe: Callable[[Plan, float, float, float], None] = self._inner.observe

    @property
    def done(self) -> bool:
        return len(self.moments) >= self._most

    def decide(self, window: Window, active: Plan) -> Plan | None:
        decided = self._inner.decide(window, active)
        if self._inner.last and self._rng.random() < self._whims:
            plan = self._inner.last[int(self._rng.integers(len(self._inner.last)))].plan
            return None if plan == active else plan.replace(plan_id=active.plan_id + 1, reason="tried")
        return decided

    def _rank(
        self, offered: Sequence[Plan], conditions: Conditions, window: Window, active: Plan
    ) -> list[Prediction]:
        if not self.done and self._rng.random() < self._chance:
            self._try(offered, conditions, window, active)
        if self._ranker is None:
            return in_order(offered, conditions)
        return self._ranker(offered, conditions, window, active)

    def _try(self, offered: Sequence[Plan], conditions: Conditions, window: Window, active: Plan) -> None:
        assert self.job is not None
        n = conditions.world_size
        more = [Plan.partial(n, quorum) for quorum in sorted({max(1, n // 2), max(1, 3 * n // 4)})]
        seen = {plan.label for plan in offered}
        plans = [*offered, *(plan for plan in more if plan.label not in seen)]
        predictions = in_order(plans, conditions)
        features = rows(plans, conditions, window, active, predictions)
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
    """Whether a plan takes the simulator long: an update per gradient, or event by event."""
    return not vectorised(plan) or (plan.mode == "ps" and plan.quorum == 1)


def collect_scenario(
    seed: int,
    *,
    moments: int = 8,
    ranker: Ranker | None = None,
    steps: float = 0.0,
    pattern: str = "",
    every_steps: int = 4,
) -> tuple[Scenario, list[Moment]]:
    """Run one job and try out candidates at some of its moments.

    Args:
        seed: Of the scenario and of what is tried.
        moments: At most.
        ranker: Who ranks the candidates for the job itself; the cost model if None.
        steps: Synchronous steps to the target, instead of the network's own.
        pattern: A given pattern of contention (`simulator.episodes.PATTERNS`).
        every_steps: Steps between two decisions.
    """
    scenario = draw_scenario(seed, steps=steps, pattern=pattern)
    rng = np.random.default_rng((seed, 7))
    collector = _Collector(scenario, rng, ranker, moments)
    job = Job(scenario, policy=collector, every_steps=every_steps)
    collector.job = job
    limit_s = 20.0 * scenario.network.target_steps * scenario.network.compute_s
    most = 40.0 * scenario.network.target_steps
    while not (job.reached or collector.done or job.now_s > limit_s or job.steps > most):
        job.advance()
    return scenario, collector.moments
