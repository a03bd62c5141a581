"""One simulated job under a policy, or many under fixed plans, until the target is reached.

The policy is a live job's: `decide(window, active)` returns a plan or None. A plan becomes active one step after the
decision. A switch costs `switch_s` between modes of collectives and `handover_s` to or from servers; a switch from
another family than `all_ranks` also waits for the current batches and transfers the state.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from scheduler.plan.completion import with_groups
from scheduler.plan.plan import SET_IDLE_S, Plan
from scheduler.records import RankStats, Window
from scheduler.simulator.account import Account
from scheduler.simulator.base import HISTORY, Mode, State
from scheduler.simulator.machines import Array, Ints, Machines
from scheduler.simulator.rounds import Rounds
from scheduler.simulator.scenario import Scenario
from scheduler.simulator.servers import Arrivals, Server
from scheduler.simulator.stream import Stream, streams
from scheduler.simulator.subsets import Local, Subgroup
from scheduler.stats import lower_median

__all__ = ["Job", "Outcome", "Policy", "make_mode", "mean_times_s", "run_plans", "vectorised"]

_STATE_COPIES = 3.0
"""Parameters and two moments: what ranks fetch when they rejoin the others or leave servers."""

_SILENT_S, _SILENT_STEPS = 1.2, 12.0
"""Seconds and usual step times after which the coordinator decides while a step is still open."""

_LOSSES = 256
_LOSS, _LOSS_NOISE = (0.2, 2.1, 3.0), 0.08
"""Loss from 2.3 (ten classes, untrained) to 0.3 at the target, with 8 % noise: measured on the digits task."""

_UPDATES = 60.0
"""A job ends short of its target after this many times the gradients that synchronous steps would take."""


class Policy(Protocol):
    """The interface of a policy that a simulated job calls."""

    def decide(self, window: Window, active: Plan) -> Plan | None:
        """Return the plan to switch to, None to keep the active one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of a simulated job.

    Attributes:
        label: Name of the plan, or of the policy.
        time_s: Time to the target; infinite if it was not reached before the limit.
        reach: Probability that the target accuracy is reached at all, given noise and drift.
        updates: Updates made.
        step_s: Mean time between updates.
        drift: Mean drift of updates.
        switches: Switches of plans as (time in seconds, label, reason).
    """

    label: str
    time_s: float
    reach: float
    updates: float
    step_s: float
    drift: float
    switches: tuple[tuple[float, str, str], ...] = ()

    def expected_s(self, again_s: float) -> float:
        """Expected time to the target if a job that misses it is repeated at a cost of `again_s`."""
        return self.time_s + (1.0 - self.reach) * again_s


def vectorised(plan: Plan) -> bool:
    """Whether many replicas of the plan can be simulated together in arrays."""
    fixed = not streams(plan) and plan.rule in ("x", "backup") and plan.guard == "none"
    return plan.mode in ("sync", "partial", "subgroup", "local") or (plan.mode == "ps" and fixed)


def make_mode(state: State, plans: Sequence[Plan]) -> Mode:
    """Create the mode of these plans, one per replica, all of one kind.

    Raises:
        ValueError: Plans of different kinds.
    """
    kinds = {_kind(plan) for plan in plans}
    if len(kinds) != 1:
        raise ValueError(f"plans are of kinds {sorted(kind.__name__ for kind in kinds)}; expected one kind")
    return kinds.pop()(state, plans)


def _kind(plan: Plan) -> type[Mode]:
    if plan.mode in ("sync", "partial"):
        return Rounds
    if streams(plan):
        return Stream
    if plan.mode in ("ps", "grouped"):
        return Arrivals if vectorised(plan) else Server
    if plan.mode == "subgroup":
        return Subgroup
    if plan.mode == "local":
        return Local
    raise ValueError(f"mode {plan.mode} has no simulation; add one to scheduler/simulator and choose it here")


def mean_times_s(scenario: Scenario) -> list[float]:
    """Mean seconds per gradient of every rank over the expected length of the job, with contention."""
    network, n = scenario.network, scenario.world_size
    horizon_s = 1.5 * network.target_steps * network.compute_s
    speed = np.ones((200, n))
    at_s = (np.arange(200) + 0.5) / 200 * horizon_s
    for e in scenario.episodes:
        active = (at_s >= e.start_s) & (at_s < e.end_s)
        if e.kind != "link":
            speed[active, e.rank] *= 0.0 if e.kind == "frozen" else 1.0 / e.factor
    for row in scenario.rows[:1000]:
        speed = np.concatenate([speed, 1.0 / np.asarray(row)[None, :n]])
    if scenario.rows:
        speed = speed[200:]
    mean = np.maximum(speed.mean(axis=0), 1e-3)
    return [float(v) for v in network.compute_s * np.asarray(scenario.cluster.relative_s) / mean]


class Job:
    """One job under a policy.

    Args:
        scenario: The job to simulate.
        plan: The first plan; `sync` if None.
        policy: The policy; without one the plan never changes.
        every_steps: Steps between two decisions.
    """

    def __init__(
        self, scenario: Scenario, plan: Plan | None = None, policy: Policy | None = None, *, every_steps: int = 4
    ) -> None:
        self.scenario, self.policy, self.every_steps = scenario, policy, every_steps
        self.state = State(Machines([scenario]), Account([scenario]))
        self.state.machines.advance_to(self.state.now_s)
        usual = [scenario.network.compute_s * relative for relative in scenario.cluster.relative_s]
        self.plan = with_groups(plan or Plan.sync(scenario.world_size), usual)
        self.mode = make_mode(self.state, [self.plan])
        self.switches: list[tuple[float, str, str]] = []
        self.steps = 0
        self._pending: Plan | None = None
        self._left_s: dict[tuple[int, ...], float] = {}  # When a plan with that process set ended.
        self._frozen = sorted((e.start_s, e.end_s, e.rank) for e in scenario.episodes if e.kind == "frozen")
        self._rng = np.random.default_rng(scenario.seed + 1)
        self._measured = (0.0, np.zeros(scenario.world_size))
        self._losses: deque[tuple[int, float]] = deque(maxlen=_LOSSES)
        self._loss_at = 0.0  # Gradients behind the recorded losses.
        self._loss_rng = np.random.default_rng(scenario.seed + 2)

    @property
    def now_s(self) -> float:
        return float(self.state.now_s[0])

    @property
    def reached(self) -> bool:
        return bool(np.isfinite(self.state.account.reached_s[0]))

    def run(self, *, label: str = "", limit_s: float = math.inf) -> Outcome:
        """Run to the target, to `limit_s`, or to the largest number of gradients."""
        network = self.scenario.network
        most = _UPDATES * network.target_steps * self.scenario.world_size
        while not self.reached and self.now_s < limit_s and float(self.state.account.gradients[0]) < most:
            self.advance()
        return self.outcome(label)

    def advance(self, steps: int = 1) -> None:
        """Advance by `steps` updates and make the decisions due in them."""
        for _ in range(steps):
            if self._pending is not None:
                self._switch(self._pending)
                self._pending = None
            before_s = self.now_s
            self.mode.step()
            self.steps += 1
            if self.policy is None:
                continue
            self._note_loss()
            usual_s = self.scenario.network.compute_s
            if self.now_s - before_s > max(_SILENT_S, _SILENT_STEPS * usual_s):
                self._decide(self._silences(before_s))
            if self._pending is None and self.steps % self.every_steps == 0:
                self._decide({})

    def outcome(self, label: str = "") -> Outcome:
        """The result so far."""
        return _outcome(self.state, 0, label or self.plan.label, tuple(self.switches))

    def window(self, silent_s: dict[int, float] | None = None) -> Window:
        """The window the coordinator would see now, with measurement errors of links (3 %) and noise scale (20 %)."""
        state, scenario = self.state, self.scenario
        state.machines.advance_to(state.now_s)
        noise, links = self._errors()
        losses = self._losses if scenario.records_loss else ()
        silent = {rank: self.now_s - start for start, end, rank in self._frozen if start < self.now_s < end}
        silent.update(silent_s or {})
        ranks = [
            self._rank_stats(rank, math.exp(0.03 * links[rank]), silent.get(rank, 0.0))
            for rank in range(scenario.world_size)
        ]
        return Window(
            step=int(state.step[0]),
            ranks=tuple(ranks),
            noise_scale=float(state.account.noise[0]) * math.exp(0.2 * noise),
            comm_bytes=scenario.network.comm_bytes,
            allowed=scenario.allowed,
            losses=tuple(loss for _, loss in losses),
            loss_steps=tuple(step for step, _ in losses),
            batch=scenario.batch,
            fixed_part=scenario.fixed_part,
            microbatches=scenario.microbatches,
            now_s=self.now_s,
            counts_local=True,
        )

    def _rank_stats(self, rank: int, link_error: float, silent_s: float) -> RankStats:
        """What the coordinator knows of a rank; its link is measured times `link_error`."""
        state, scenario = self.state, self.scenario
        reported = int(state.reported[0, rank])
        count = min(reported, HISTORY)
        slots = np.arange(reported - count, reported) % HISTORY
        total_s = max(float(state.history_s[0, rank, slots].sum()), 1e-12)
        rate = float(state.machines.rate[0, rank]) * link_error
        ring = 2.0 * (scenario.world_size - 1) / scenario.world_size
        return RankStats(
            rank=rank,
            compute_s=tuple(state.history_s[0, rank, slots].tolist()),
            steps=tuple(state.history_step[0, rank, slots].tolist()),
            input_share=float(state.history_input_s[0, rank, slots].sum()) / total_s,
            starved_share=float(state.history_starved_s[0, rank, slots].sum()) / total_s,
            late_share=float(state.history_late[0, rank, slots].mean()) if count else 0.0,
            link_bytes_per_s=rate if scenario.has_link_rates else math.nan,
            comm_s=(ring * scenario.network.comm_bytes / rate + scenario.cluster.cycle_s,) * min(count, 3),
            silent_s=silent_s,
        )

    def _errors(self) -> tuple[float, Array]:
        """Measurement errors of noise scale and link rates: autocorrelated, of unit variance."""
        noise, links = self._measured
        keep, new = 0.9, math.sqrt(1.0 - 0.9 * 0.9)
        noise = keep * noise + new * float(self._rng.standard_normal())
        links = keep * links + new * self._rng.standard_normal(len(links))
        self._measured = (noise, links)
        return noise, links

    def _note_loss(self) -> None:
        """Record a training loss as a job would: it falls with progress and has a batch's noise.

        Under servers it is recorded once per as many gradients as ranks, as `star_hvd.coordinator.reports` does.
        """
        if self.plan.family in ("ps", "grouped"):
            steps = (float(self.state.account.gradients[0]) - self._loss_at) // self.scenario.world_size
            if steps < 1.0:
                return
            self._loss_at += steps * self.scenario.world_size
        loss = _LOSS[0] + _LOSS[1] * math.exp(-_LOSS[2] * float(self.state.account.progress[0]))
        loss *= 1.0 + _LOSS_NOISE * float(self._loss_rng.standard_normal())
        self._losses.append((int(self.state.step[0]), loss))

    def _silences(self, since_s: float) -> dict[int, float]:
        """Ranks that were frozen during the last step, and for how many seconds."""
        found: dict[int, float] = {}
        for start, end, rank in self._frozen:
            silent_s = min(end, self.now_s) - max(start, since_s)
            if silent_s > 0.0:
                found[rank] = max(found.get(rank, 0.0), silent_s)
        return found

    def _decide(self, silent_s: dict[int, float]) -> None:
        assert self.policy is not None
        plan = self.policy.decide(self.window(silent_s), self.plan)
        if plan is not None:
            self._pending = plan

    def _switch(self, plan: Plan) -> None:
        state = self.state
        plan = with_groups(plan, self._usual_s())
        before, self.plan = self.plan, plan
        self._loss_at = float(state.account.gradients[0])
        self.switches.append((self.now_s, plan.label, plan.reason))
        self._left_s.update(dict.fromkeys(before.sets, self.now_s))
        new = [one for one in plan.sets if self.now_s - self._left_s.get(one, -math.inf) > SET_IDLE_S]
        self.mode = _switched(state, self.mode, before, plan, self.scenario.cluster.set_s * len(new))

    def _usual_s(self) -> list[float]:
        """Median of the last 16 compute times of every rank."""
        state, usual = self.state, []
        for rank in range(self.scenario.world_size):
            count = int(state.reported[0, rank])
            slots = np.arange(max(0, count - 16), count) % HISTORY
            usual.append(lower_median(state.history_s[0, rank, slots]) if count else math.nan)
        known = [time_s for time_s in usual if not math.isnan(time_s)]
        return [time_s if not math.isnan(time_s) else lower_median(known or [1.0]) for time_s in usual]


def _switched(state: State, mode: Mode, before: Plan, plan: Plan, sets_s: float) -> Mode:
    """Switch to `plan`: wait for batches, transfer the state, make process sets; returns the new mode."""
    machines = state.machines
    if isinstance(mode, Rounds) and plan.mode in ("sync", "partial"):
        mode.set_plans([plan] * machines.replicas)
        state.now_s = state.now_s + machines.switch_s
        return mode
    machines.advance_to(np.maximum(state.now_s, 0.0))
    machines.share_factor.fill(1.0)
    # Replicas are equal at the end of every step of Rounds: no wait, no transfer.
    end_s = machines.thawed(state.now_s if isinstance(mode, Rounds) else mode.leave_s())
    served = bool({before.family, plan.family} & {"ps", "grouped"}) and before.family != plan.family
    cost_s = machines.handover_s if served else machines.switch_s
    if before.family != "all_ranks" and before.family != plan.family:
        cost_s = cost_s + _STATE_COPIES * machines.bytes / machines.rate.min(axis=1)
    state.now_s = end_s + cost_s + sets_s
    state.step = np.maximum(state.step, state.batch_step.max(axis=1)) + 1
    all_ranks = np.arange(state.batch_step.size)
    state.report(all_ranks)
    state.begin(all_ranks, np.repeat(state.now_s, machines.n), np.repeat(state.step, machines.n))
    return make_mode(state, [plan] * machines.replicas)


def _outcome(state: State, row: int, label: str, switches: tuple[tuple[float, str, str], ...] = ()) -> Outcome:
    account = state.account
    updates = max(float(account.updates[row]), 1e-12)
    return Outcome(
        label=label,
        time_s=float(account.reached_s[row]),
        reach=float(account.reach[row]),
        updates=updates,
        step_s=float(state.now_s[row]) / updates,
        drift=float(account.drift[row]) / updates,
        switches=switches,
    )


def run_plans(scenarios: Sequence[Scenario], plans: Sequence[Plan], *, limit_s: float = math.inf) -> list[Outcome]:
    """Run one job per (scenario, plan) to its target; jobs of one kind run together in arrays.

    Args:
        scenarios: One per job, of equal world size; equal scenarios should be the same object.
        plans: One per job. Groups that a plan leaves open are formed from the mean times of the whole job (hindsight).
        limit_s: Time after which a job ends without its target.

    Returns:
        Outcomes in the order of the jobs.
    """
    found: dict[int, Outcome] = {}
    kinds: dict[type[Mode], list[int]] = {}
    plans_to_run = []
    for index, (scenario, plan) in enumerate(zip(scenarios, plans, strict=True)):
        plans_to_run.append(with_groups(plan, mean_times_s(scenario)))
        kinds.setdefault(_kind(plans_to_run[-1]), []).append(index)
    for kind, jobs in kinds.items():
        if kind in (Server, Stream):
            for index in jobs:
                found[index] = Job(scenarios[index], plans_to_run[index]).run(limit_s=limit_s)
            continue
        found.update(_run_together(scenarios, plans_to_run, jobs, limit_s))
    return [dataclasses.replace(found[index], label=plan.label) for index, plan in enumerate(plans)]


def _run_together(
    scenarios: Sequence[Scenario], plans: Sequence[Plan], jobs: Sequence[int], limit_s: float
) -> dict[int, Outcome]:
    chosen = [scenarios[index] for index in jobs]
    state = State(Machines(chosen), Account(chosen))
    state.machines.advance_to(state.now_s)
    mode = make_mode(state, [plans[index] for index in jobs])
    most = np.array([_UPDATES * s.network.target_steps * s.world_size for s in chosen])
    left: Ints = np.arange(len(jobs))
    found: dict[int, Outcome] = {}
    while len(left):
        for _ in range(8):
            mode.step()
        state = mode.state
        over = np.isfinite(state.account.reached_s) | (state.now_s > limit_s)
        over |= state.account.gradients > most[left]
        for row in np.flatnonzero(over):
            job = jobs[int(left[row])]
            found[job] = _outcome(state, int(row), plans[job].label)
        if over.any():
            rows = np.flatnonzero(~over)
            left, mode = left[rows], mode.take(rows)
    return found
