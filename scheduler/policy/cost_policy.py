"""A policy that switches to the fastest candidate, by the cost model or another ranker, once the switch pays.

Ski-rental (`scheduler.policy.ski_rental`): the active plan is replaced when its accumulated loss against the best
candidate reaches the price of the switch. A disturbance that ends before costs no switch; one that lasts costs at most
twice the optimum in hindsight. Until then a better mode that costs almost nothing to switch to and from (`partial` from
`sync`) is used. Hysteresis: a candidate must be 5 % better than the active plan; the return to `sync` when no rank is
slow needs no gain. Guard of accuracy (`scheduler.policy.accuracy_guard`): a rising loss or noise scale ends a relaxed
mode at once and excludes relaxed modes for some time.

An exact mode that already counters the stragglers (`sync(balanced)`, `sync(steal)`) is left for a relaxed one only for
a gain that is certain: its 95 % quantile, with the cost model's own error, must be faster too. Where both are about as
fast, the exact one is chosen.

The outcome of a switch is measured (`scheduler.policy.switch_outcome`): a plan with costlier steps than the plan it
replaced is reverted, and its mode is held back. A switch with a small gain waits until the active plan was measured;
otherwise its outcome could not be judged. An active plan that is faster than predicted is compared as measured. A
relaxed plan is left for one of another family only for a clear gain, because predictions of different families err
independently, by more than a few percent.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from scheduler.cost.bounds import bounded
from scheduler.cost.conditions import Conditions
from scheduler.cost.cost_model import Prediction, predict, rank
from scheduler.cost.priors import prior_of
from scheduler.cost.staleness_price import StalenessPrice
from scheduler.diagnosis.freezes import Freezes
from scheduler.diagnosis.links import LinkMemory
from scheduler.diagnosis.slow_episodes import SlowSince
from scheduler.diagnosis.window_stats import Readings
from scheduler.plan.plan import SET_IDLE_S, Plan
from scheduler.policy.accuracy_guard import AccuracyGuard
from scheduler.policy.candidates import (
    LEAST_SHARE,
    StragglerSummary,
    candidates,
    place,
    reachable,
    same_plan,
    summarize_stragglers,
)
from scheduler.policy.explanation import comparison, describe_stragglers
from scheduler.policy.loss_stretches import LossStretches
from scheduler.policy.ski_rental import SkiRental
from scheduler.policy.switch_outcome import CostFactors, ModeBackoff, OutcomeCheck, SlownessProfile, SwitchOutcome
from scheduler.records import Window
from scheduler.rules.local_walk import mean_steps
from scheduler.transmission.behind_compute import WORTH

__all__ = ["CostPolicy", "Ranker"]

Ranker = Callable[[Sequence[Plan], Conditions, Window, Plan], list[Prediction]]

_GAIN = 0.05
"""Least predicted gain. Intervals over 24 rows are known to 2 to 5 % where jitter is 10 %."""

_GAIN_CROWDED = 0.15
"""The same if most ranks wait for a processor: intervals of such a job differ by 10 to 20 % between two windows."""

_SWITCH_S, _HANDOVER_S = 0.02, 0.2
"""Time lost by a switch between modes of Horovod's collectives, and by one to or from servers (`benchmarks.switches`:
10 ms, and 30 to 150 ms, on a machine with half a core per rank). Servers are started before the switch."""

_SET_S = 0.3
"""Creating a process set delays every collective by this (`benchmarks.sets`: 307 ms with 4 ranks). The set is kept for
`SET_IDLE_S`."""

_COLD_S, _COLD_STEPS = 2.0, 48.0
"""Time that servers take to start, and number of steps over which a plan's gain by new servers must exceed what the
active plan loses meanwhile: about the horizon of a prediction."""

_SOON = 0.25
"""Fraction of a switch's price that must be lost before its plan is prepared: starting a server takes more than two CPU
seconds, wasted if several plans alternate as the best one."""

_COPIES = 3.0  # Parameters and two moments: what ranks fetch when they rejoin the others or leave servers.
_RISK = 1.25
"""A plan whose 95 % quantile of time relative to `sync` reaches this is not chosen."""

_ALIKE = 0.02
"""Relative difference below which predictions of `partial` count as equal: the largest quorum is chosen."""

_CALM_STEPS = 12
"""Steps without stragglers before the job returns to `sync`: STAR's stragglers last 3.4 steps, 10 at the 95th
percentile, and come back."""

_CALM_PARTIAL_STEPS = 96
"""The same for `partial`, which costs nothing while no rank is slow; a straggler may come back."""

_CALM_LOSS = 1.1

_PAUSE_S, _PAUSE_STEPS = 0.2, 3.0
"""A time in which no rank trains is a pause of the program, such as an evaluation, if it is longer than both: seconds,
and usual steps of the slowest rank. What `partial` leaves a straggler out for is not: the others report meanwhile."""

_AVERAGINGS = 8  # The newest ones, whose steps are counted.

_CLEAR, _EARLY_STEPS = 0.85, 40
"""Predicted time relative to the active plan's below which a switch does not wait for measurements of the active plan
and a relaxed plan is left for another family, and the most steps that other switches wait for measurements."""


class CostPolicy:
    """Chooses plans by predictions.

    Args:
        world_size: Number of ranks.
        ranker: Predicts for candidates, in any order; the cost model if None.
        hosts: Host of every rank, to place servers; None if unknown.
        gain: Least predicted gain for a switch, 0 to below 1.
        least_share: Share of the ranks whose fresh gradients a plan has to wait for (`candidates.enough_ranks`).
        background: The user's setting for transfers behind compute; None to choose them where they pay.

    Attributes:
        price: The price of staleness as learned so far.
        last: Predictions of the last decision, best first.
        coming: A plan that may be chosen soon and takes time to prepare, or None.
        guard: The guard of accuracy.
        outcomes: Measured outcomes of switches, the latest last; a reader may empty the list.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        world_size: int,
        *,
        ranker: Ranker | None = None,
        hosts: Sequence[str] | None = None,
        gain: float = _GAIN,
        least_share: float = LEAST_SHARE,
        background: bool | None = None,
    ) -> None:
        if world_size < 1 or not 0.0 <= gain < 1.0:
            raise ValueError(f"world_size is {world_size} and gain {gain}; expected at least 1, and 0 <= gain < 1")
        if hosts is not None and len(hosts) != world_size:
            raise ValueError(f"{len(hosts)} hosts for {world_size} ranks; expected one for each")
        if not 0.0 < least_share <= 1.0:
            raise ValueError(f"least_share is {least_share}; expected a share of the ranks, above 0 and at most 1")
        self.world_size = world_size
        self.price = StalenessPrice()
        self._sized_bytes = 0  # Gradient bytes for which its prior was set.
        self.last: list[Prediction] = []
        self.coming: Plan | None = None
        self.guard = AccuracyGuard()
        self._ranker = ranker
        self._hosts = hosts
        self._gain = self._least_gain = gain
        self._least_share = least_share
        self._background = background
        self.outcomes: list[SwitchOutcome] = []
        self._outcome: SwitchOutcome | None = None  # Of the active plan or, in `sync`, of the plan before it.
        self._check, self._backoff = OutcomeCheck(), ModeBackoff()
        self._profile = SlownessProfile(())
        self._factors = CostFactors(1.0, 0.0, math.nan, math.nan)  # Of the active plan.
        self._rental, self._near_rental = SkiRental(), SkiRental()
        self._freezes = Freezes()
        self._slow_since = SlowSince()
        self._links = LinkMemory()
        self._stretches = LossStretches()
        self._calm_since: int | None = None
        self._noise = 4.0
        self._conditions: Conditions | None = None  # Of the last decision.
        self._now: tuple[Window, Plan, StragglerSummary | None] | None = None
        self._waiting: tuple[Prediction, float] | None = None
        self._walks: dict[str, float] = {}  # Counted steps between two averagings, by the label of the plan.
        self._going: Plan | None = None
        self._uncertain: Prediction | None = None  # Best plan of the last decision for which an exact mode is kept.
        self._unclear: Prediction | None = None  # The same for a relaxed plan and one of another family.
        self._unmeasured = False  # Whether the last decision waits for measurements of the active plan.
        self._cold: Plan | None = None  # Best plan of the last decision, not chosen because its servers do not run yet.
        self._warm: set[int] = set()  # Ranks whose servers run or were asked to start.
        self._started_s = -math.inf  # When the servers that were asked to start last are expected to run.
        self._sets: dict[tuple[int, ...], int] = {}  # Process sets of active plans, with the last step of their use.

    def decide(self, window: Window, active: Plan) -> Plan | None:
        """Return the plan to switch to, or None to keep the active one.

        Raises:
            ValueError: The window or the plan is for another number of ranks.
        """
        for what, size in (("window", window.world_size), ("plan", active.world_size)):
            if size != self.world_size:
                raise ValueError(f"the {what} is for {size} ranks; expected {self.world_size}, as in this job")
        self._warm.update(active.servers, self.coming.servers if self.coming is not None else ())
        self._now, self._waiting, self._going, self.coming = (window, active, None), None, None, None
        self._cold = self._uncertain = self._unclear = None
        self._unmeasured = False
        if self.world_size < 2:
            return None
        self._learn(window, active)
        self._sets.update(dict.fromkeys(active.sets, window.step))
        alarm = self.guard.check(window, active)
        if alarm:
            return self._safe(active, alarm)
        conditions = self._measured(window, active)
        if conditions is None:
            return None
        stragglers = summarize_stragglers(conditions, self._least_share)
        self._now = (window, active, stragglers)
        self._profile = SlownessProfile.of(conditions, stragglers.links)
        self._factors = self._factors_of(window, active, conditions)
        self._check.set_normalized_step(self._factors.normalized_step, stragglers.links)
        back = self._revert(window, conditions, active)
        if back is not None:
            self._going = back
            return back
        self._calm_since = None if stragglers else window.step if self._calm_since is None else self._calm_since
        lost_s = self._freezes.take_lost_s()
        if self.guard.holds(window.step):
            window = dataclasses.replace(window, allowed=window.allowed & {"sync"})  # Its exact forms, too.
        if active.plain and not stragglers:
            self._prepare(self._prepared_servers(window, conditions, stragglers), window)
            self._reset_rentals(window)
            self.last = []
            return None
        self.last = self._rated(window, conditions, active, stragglers)
        return self._choose(window, conditions, active, stragglers, lost_s) if self.last else None

    def alarmed(self, window: Window, active: Plan) -> bool:
        """Whether the guard of accuracy wants the active plan replaced; to be asked about every window.

        The guard compares the last losses with those before them: with short steps, all of them are new by the next
        decision, and a rise between two decisions would be taken for the level.
        """
        return self.world_size > 1 and bool(self.guard.check(window, active))

    def _measured(self, window: Window, active: Plan) -> Conditions | None:
        """Note what a window shows, and return the conditions of a decision; None if not every rank has reported."""
        if window.comm_bytes != self._sized_bytes and not self.price.observations:
            self._sized_bytes, self.price = window.comm_bytes, StalenessPrice(prior_of(window.comm_bytes))
        conditions = Conditions.from_window(window, self.price)
        if conditions is None:
            return None
        self.watch(window, active)
        conditions = conditions.with_freezes(
            self._freezes.per_step_s, self._freezes.freezing, self._freezes.froze
        )
        self._count_walk(window, active)
        counted = self._steps_counted(window, active, conditions)
        rate = self._links.note(window, active, conditions.rate, steps_per_report=counted)
        conditions = dataclasses.replace(conditions, rate=rate, background=self._background)
        self._noise, self._conditions = conditions.noise, conditions
        self._least_gain = max(self._gain, _GAIN_CROWDED) if conditions.crowded else self._gain
        return conditions

    def _count_walk(self, window: Window, active: Plan) -> None:
        """Note how many steps ranks make between two averagings of `local(2.5s)`.

        On busy machines fewer fit than by `usual_s`, which leaves out waits for a processor: by that, the plan would
        seem several times as fast as it is.
        """
        if active.mode == "local" and not active.local_steps and not window.counts_local:
            counted = Readings.of(window).reports_per_step(_AVERAGINGS)
            if counted > 0.0:
                self._walks[active.label] = counted

    def _steps_counted(self, window: Window, plan: Plan, conditions: Conditions) -> float:
        """Mean steps of a rank per step of the window: an averaging in `local`, or a step of the fastest rank there."""
        counted = 0.0 if window.counts_local else self._walks.get(plan.label, 0.0)
        return counted or mean_steps(plan, conditions.usual_s, counts_local=window.counts_local)

    def _factors_of(self, window: Window, plan: Plan, conditions: Conditions) -> CostFactors:
        return _factors(plan, conditions, self._steps_counted(window, plan, conditions))

    def _learn(self, window: Window, active: Plan) -> None:
        """Learn the price of staleness from the loss decrease under a plan (see `StalenessPrice.observe`)."""
        stretch = self._stretches.note(window, active)
        if stretch is None:
            return
        plan, n = stretch.plan, self.world_size
        length = plan.quorum / n if plan.mode == "ps" and plan.lr_rule == "linear" else 1.0
        gradients = float(plan.quorum) if plan.mode in ("ps", "partial", "subgroup") else float(n)
        if plan.mode == "grouped" or plan.rule == "groups":
            count = plan.updates_per_step
            length, gradients = 1.0 / count if plan.lr_rule == "linear" else 1.0, n / count
        self.price.observe(
            decrease=stretch.decrease,
            updates=stretch.updates,
            drift=self._drift(plan),
            length=length,
            gradients=gradients,
            noise=self._noise,
            world=n,
            error=stretch.error,
            skipped=stretch.skipped,
        )

    def _drift(self, plan: Plan) -> float:
        """Return the predicted drift of a plan's gradients: arrivals are measured, the parameters' movement is not."""
        if plan.mode == "sync":
            return 0.0
        return next((p.drift for p in self.last if p.plan.label == plan.label), math.nan)

    def _rated(
        self, window: Window, conditions: Conditions, active: Plan, stragglers: StragglerSummary
    ) -> list[Prediction]:
        """Return the predictions of all candidates, the best first."""
        offered = candidates(
            conditions, active, allowed=window.allowed, blocked=window.blocked, hosts=self._hosts,
            stragglers=stragglers, least_share=self._least_share,
        )
        found = (
            rank(offered, conditions)
            if self._ranker is None
            else self._ranker(offered, conditions, window, active)
        )
        found = bounded(_worth_hiding(found, active), conditions)
        return _as_measured(found, active, self._check.measured_s(self._factors)) if active.relaxed else found

    def watch(self, window: Window, active: Plan, *, preparing: bool = False) -> None:
        """Record slow and frozen ranks; also called while a switch is under way and nothing is decided.

        Args:
            window: Recent reports.
            active: The active plan.
            preparing: Whether another plan is being prepared: servers that start and process sets that are made delay
                steps, which must not count as steps of the active plan.
        """
        for rental in (self._rental, self._near_rental):
            if not rental.lost_s:
                rental.reset(window.step)  # The first loss is that of a step; those since the last decision had none.
        self._slow_since.note(window)
        typical_s = Readings.of(window).typical_s
        if not math.isnan(typical_s):
            self._freezes.note(window, active, typical_s)
        starting = window.now_s < self._started_s
        disturbed = self._freezes.now or preparing or starting
        self._check.note(window.step, window.now_s, active, frozen=disturbed, pause_s=self._pause_s(window, active))

    def _pause_s(self, window: Window, active: Plan) -> float:
        """How long all ranks did something else than training since the window before; 0 if they did not."""
        if self._conditions is None:
            return 0.0
        usual_s = float(self._conditions.usual_s.max()) * _steps_per_report(active, self._conditions)
        return window.pause_s if window.pause_s > max(_PAUSE_S, _PAUSE_STEPS * usual_s) else 0.0

    def explain(self) -> str:
        """One sentence about the current choice, also when the plan is kept: `no rank is slow: sync`."""
        if self._now is None:
            return "no window was evaluated yet"
        window, active, stragglers = self._now
        if self.guard.holds(window.step):
            exact = self._going or active
            label = "sync" if exact.relaxed else exact.label
            return f"{self.guard.reason}: {label} until step {self.guard.until_step} at least"
        if stragglers is None:
            return f"not every rank has reported yet: {active.label}"
        if self._going is not None:
            return self._going.reason
        if not active.plain:
            calm = f"; no rank is slow since step {self._calm_since}" if self._calm_since is not None else ""
            return f"{active.reason or active.label}{calm}{self._was(active)}{self._kept()}"
        text = self._stragglers(window, stragglers)
        if not stragglers or not self.last:
            return f"{text}: sync{self._held_back(window)}"
        if self._waiting is not None:
            best, left_s = self._waiting
            more = self._beside_servers(best.plan)
            return f"{text}: {comparison(self.last, best, None)}{more}; sync until staying has cost {left_s:.2g} s more"
        other = next((p for p in self.last if not p.plan.plain), None)
        if other is None:
            return f"{text}: sync, no other mode can run{self._beside_servers(active)}"
        speed = 1.0 / max(other.relative, 1e-9)
        now = next((p for p in self.last if p.plan.plain), None)
        if self._held(window, other, now):
            why = self._held_back(window)
        else:
            why = f"{self._why_not(other)}{self._held_back(window, but=_held_as(other.plan))}"
        return f"{text}: sync, {other.plan.label} is predicted {speed:.2f}x as fast{why}{self._beside_servers(active)}"

    def _stragglers(self, window: Window, stragglers: StragglerSummary) -> str:
        since, links = self._slow_since.steps, self._links.last_slow
        return describe_stragglers(window, stragglers, self._freezes.freezing, since, links)

    def _why_not(self, one: Prediction) -> str:
        """Why `sync` is not left for the best other plan, if that is not held back."""
        if self._unmeasured:
            return "; sync is measured first, to judge the outcome"
        if one.high >= _RISK and one.relative < 1.0 - self._least_gain:
            return ", too uncertain for a switch"
        return f", too little for a switch{' where ranks wait for processors' if self._least_gain > self._gain else ''}"

    def _kept(self) -> str:
        """`; ps(1) at 3x as fast as sync, 90 % interval 1.5-3.7, is too uncertain to give up exact steps`, or empty."""
        if self._uncertain is None:
            return self._kept_relaxed()
        low, high = (1.0 / max(end, 1e-9) for end in reversed(self._uncertain.reported_interval))
        speed = 1.0 / max(self._uncertain.relative, 1e-9)
        return (
            f"; {self._uncertain.plan.label} at {speed:.2g}x as fast as sync, 90 % interval {low:.2g}-{high:.2g}, is "
            "too uncertain to give up exact steps"
        )

    def _kept_relaxed(self) -> str:
        """`; ps(grace=1), predicted 2.20x as fast as sync, would have to be 2.40x to be worth a switch`, or empty."""
        if self._unclear is None or self._now is None:
            return ""
        now = next((p for p in self.last if same_plan(p.plan, self._now[1])), None)
        if now is None:
            return ""
        least = 1.0 / max(_CLEAR * now.relative, 1e-9)
        return (
            f"; {self._unclear.plan.label}, predicted {1.0 / max(self._unclear.relative, 1e-9):.2f}x as fast as sync, "
            f"would have to be {least:.2f}x to be worth a switch"
        )

    def _beside_servers(self, plan: Plan) -> str:
        """Describe the other load that rules out servers altogether, or that keeps those of `plan` off some hosts."""
        assert self._now is not None
        stragglers, conditions = self._now[2], self._conditions
        if stragglers is None or conditions is None or not conditions.headroom:
            return ""
        placed = place(conditions, stragglers, self._hosts)
        if placed.slows and not plan.servers and not stragglers.frozen:
            return f"; servers are not offered, because they would make another job slower on {', '.join(placed.slows)}"
        avoided = placed.avoided if plan.servers == placed.servers else ""
        return f"; its servers avoid {avoided}" if avoided else ""

    def _choose(
        self, window: Window, conditions: Conditions, active: Plan, stragglers: StragglerSummary, lost_s: float
    ) -> Plan | None:
        now = next((p for p in self.last if same_plan(p.plan, active)), None)
        sync = next((p for p in self.last if p.plan.plain), None)
        sane = [p for p in self.last if p.high < _RISK or p is now or p is sync] or self.last
        sane = [p for p in sane if p is now or p is sync or not self._held(window, p, now)] or self.last
        if now is not None and not stragglers.frozen:
            self._uncertain = next((p for p in sane if _doubtful(p, now)), None)
            self._unclear = next((p for p in sane if self._gains_little(p, now)), None)
            sane = [p for p in sane if not _doubtful(p, now) and not self._gains_little(p, now)]
        gain = 0.0 if stragglers.frozen else self._least_gain
        best = _preferred(sane, gain, now)
        if now is None:
            return self._go(window, best, active, None, stragglers)
        keeps = sync is None or active.plain or self._balance_pays(now, sync)
        if sync is not None and not keeps and self._calm(window, active, sync.relative / now.relative):
            self._reset_rentals(window)
            return self._safe(active, f"no rank was slow since step {self._calm_since}")
        if best is now or not best.relative < (1.0 - self._least_gain) * now.relative:
            self._reset_rentals(window)
            return None
        best = self._sooner(best, sane, now, stragglers)
        if self._too_early(window, best, now, stragglers):
            self._unmeasured = True
            return None
        price_s = self._price_s(conditions, active, best.plan)
        near_by = [p for p in sane if _same_family(active, p.plan)]
        free = _preferred(near_by, gain, now) if near_by else now
        if not free.relative < (1.0 - self._least_gain) * now.relative:
            free = now  # It would take the place of a plan that is worth a switch.
        counted = self._steps_counted(window, active, conditions)
        just_lost_s = _just_lost_s(conditions, active, free.plan)
        near = self._near(window, free, now, counted, just_lost_s) if free is not best else None
        if best.plan.mode == "ps":
            self._rental.lost_s += lost_s  # Time lost to freezes, which servers would have avoided.
        if self._rental.pays(window.step, counted * self._loss_s(best, now), price_s):
            # A gain of a few percent over the almost free candidate does not justify the price.
            worth = best.relative < (1.0 - self._least_gain) * free.relative
            return self._go(window, best if worth else free, active, now, stragglers)
        if self._rental.lost_s >= _SOON * price_s:
            self._prepare(best.plan, window)
        if near is not None:
            so_far_s = self._rental.lost_s
            plan = self._go(window, near, active, now, stragglers)
            self._rental.lost_s = so_far_s  # The loss against the best candidate keeps accumulating.
            return plan
        self._waiting = (best, price_s - self._rental.lost_s)
        return None

    def _sooner(
        self, best: Prediction, sane: Sequence[Prediction], now: Prediction, stragglers: StragglerSummary
    ) -> Prediction:
        """The best plan or, if its servers must be started first, one without servers that is hardly worse.

        While servers start, the active plan's slower steps continue, which can cost more than a small gain brings.
        """
        if best.plan.mode != "ps" or stragglers.frozen or self._warm.issuperset(best.plan.servers):
            return best
        ready = [p for p in sane if p.plan.mode not in ("ps", "grouped") and p is not now]
        other = min(ready, key=lambda p: p.relative, default=best)
        loses_s = _COLD_S * (1.0 - best.relative / now.relative)
        gains_s = _COLD_STEPS * now.interval_s * (other.relative - best.relative) / now.relative
        clear = other.relative < (1.0 - self._least_gain) * now.relative
        if not clear or gains_s >= loses_s:
            return best
        self._cold = best.plan
        return _largest_quorum([other, *ready])

    def _prepare(self, plan: Plan | None, window: Window) -> None:
        """Ask for a plan's preparation; steps are not measured while its servers start."""
        self.coming = plan
        if plan is not None and not self._warm.issuperset(plan.servers):
            self._started_s = window.now_s + _COLD_S

    def _prepared_servers(self, window: Window, conditions: Conditions, stragglers: StragglerSummary) -> Plan | None:
        """A plan to prepare once a rank froze: another freeze needs servers, which take seconds to start."""
        if not self._freezes.froze or "ps" not in window.allowed:
            return None
        expected = dataclasses.replace(stragglers, frozen=tuple(sorted(self._freezes.froze)))
        offered = candidates(conditions, allowed=("ps",), hosts=self._hosts, stragglers=expected)
        return next((plan for plan in offered if plan.mode == "ps"), None)

    def _near(
        self, window: Window, free: Prediction, now: Prediction, counted: float, just_lost_s: float
    ) -> Prediction | None:
        """The best plan that costs almost nothing to switch to, once a switch to it pays."""
        if free is now or not free.relative < (1.0 - self._least_gain) * now.relative:
            self._near_rental.reset(window.step)
            return None
        loss_s = counted * self._loss_s(free, now)
        once_s = max(0.0, just_lost_s - loss_s)
        return free if self._near_rental.pays(window.step, loss_s, _SWITCH_S, once_s=once_s) else None

    @staticmethod
    def _loss_s(best: Prediction, now: Prediction) -> float:
        """Seconds that a rank's step of the active plan loses against a better plan."""
        return now.interval_s * (1.0 - best.relative / now.relative)

    def _reset_rentals(self, window: Window) -> None:
        self._rental.reset(window.step)
        self._near_rental.reset(window.step)

    def _balance_pays(self, now: Prediction, sync: Prediction) -> bool:
        """Whether batch shares make steps shorter: ranks can differ all the time without one that counts as slow.

        Not `sync(steal)`: of jitter alone it is predicted to gain 7 %.
        """
        return now.plan.balanced and now.relative < (1.0 - self._least_gain) * sync.relative

    def _calm(self, window: Window, active: Plan, slower: float) -> bool:
        """Whether no rank was slow for long enough; under servers more steps are needed, because steps are updates.

        Args:
            window: The window.
            active: The active plan.
            slower: Predicted time of `sync` over the active plan's; above `_CALM_LOSS` more steps are needed.
        """
        if self._calm_since is None:
            return False
        calm = float(window.step - self._calm_since)
        if self._conditions is not None:
            calm *= self._steps_counted(window, active, self._conditions)
        if active.mode == "partial":
            return calm >= _CALM_PARTIAL_STEPS
        least = _CALM_STEPS if slower <= _CALM_LOSS else _CALM_PARTIAL_STEPS
        return calm >= least * active.updates_per_step

    def _price_s(self, conditions: Conditions, active: Plan, plan: Plan) -> float:
        """Seconds that a switch costs.

        Replicas are equal at the end of a step of family `all_ranks`, so no state is transferred on a switch from it;
        on the way back ranks fetch the state from the others or from servers.
        """
        if _same_family(active, plan):
            return _SWITCH_S
        price_s = _HANDOVER_S if {active.family, plan.family} & {"ps", "grouped"} else _SWITCH_S
        price_s += _SET_S * sum(not self._set_exists(ranks, conditions) for ranks in plan.sets)
        if active.family == "all_ranks":
            return price_s
        fetched_s = _COPIES * conditions.comm_bytes / float(conditions.rate.min())
        return price_s + fetched_s + float(conditions.usual_s.max())

    def _set_exists(self, ranks: tuple[int, ...], conditions: Conditions) -> bool:
        """Whether a process set was used recently enough not to have been removed."""
        assert self._now is not None
        window, active, _ = self._now
        since = window.step - self._sets.get(ranks, -(10**9))
        steps = since * self._steps_counted(window, active, conditions) / active.updates_per_step
        return ranks in active.sets or steps * float(np.median(conditions.usual_s)) <= SET_IDLE_S

    def _safe(self, active: Plan, why: str) -> Plan:
        """Return to `sync`. Server modes have their own damping, unless it is `none`."""
        damping = active.damping if active.mode not in ("ps", "grouped") or active.damping == "none" else "inverse"
        return Plan.sync(
            self.world_size,
            damping=damping,
            max_staleness=active.max_staleness,
            plan_id=active.plan_id + 1,
            reason=f"{why}: sync",
        )

    def _go(
        self, window: Window, best: Prediction, active: Plan, now: Prediction | None, stragglers: StragglerSummary
    ) -> Plan | None:
        self._reset_rentals(window)
        if same_plan(best.plan, active):
            return None
        why = self._stragglers(window, stragglers)
        if now is None:
            why = f"{active.label} can no longer run; {why}"
        passed_over = self._cold is not None and not _same_family(active, best.plan)  # Otherwise the price decides.
        cold = f"; the servers of {self._cold.label} would have to start first" if self._cold and passed_over else ""
        reason = f"{why}: {comparison(self.last, best, now)}{cold}{self._beside_servers(best.plan)}"
        self._going = best.plan.replace(plan_id=active.plan_id + 1, reason=reason)
        if now is not None:
            self._check.expect(
                self._going,
                active,
                predicted=now.relative / best.relative,
                over_sync=1.0 / best.relative,
                replaced_s=self._factors.interval_s / self._factors.gain,
                normalized_step=self._factors.normalized_step,
            )
        else:
            self._expect_over_sync(self._going, 1.0 / best.relative)
        return self._going

    def _expect_over_sync(self, plan: Plan, speed: float) -> None:
        """Let a plan be judged against measured steps of `sync` only: it replaces one that cannot be returned to."""
        self._check.expect(
            plan, Plan.sync(self.world_size), predicted=speed, over_sync=speed, replaced_s=math.inf,
            normalized_step=math.nan,
        )

    # ---- outcome of the last switch ---------------------------------------------------------------------------------

    def _revert(self, window: Window, conditions: Conditions, active: Plan) -> Plan | None:
        """The plan that the active one replaced, if measurements show that it was better; else None."""
        expected = self._check.expected
        if expected is None or active.plain:
            return None
        plans = {one.label: one for one in (active, expected.replaced, Plan.sync(self.world_size))}
        outcome = self._check.judge(
            {label: self._factors_of(window, one, conditions) for label, one in plans.items()}
        )
        if outcome is None:
            return None
        self._outcome = outcome
        self.outcomes.append(outcome)
        if not outcome.harmful:
            self._backoff.forgive(_held_as(active))
            return None
        self._backoff.hold(_held_as(active), outcome, self._profile, window.step, window.now_s)
        self._reset_rentals(window)
        before = plans[outcome.against]
        if before.plain or before.mode not in window.allowed or not reachable(before, active):
            return self._safe(active, outcome.sentence)
        back = before.replace(plan_id=active.plan_id + 1, reason=f"{outcome.sentence}: {before.label}")
        self._expect_over_sync(back, expected.over_sync / expected.predicted)
        return back

    def _held(self, window: Window, one: Prediction, now: Prediction | None) -> bool:
        """Whether a plan is held back because its mode did harm recently."""
        speed = (now.relative if now is not None else 1.0) / max(one.relative, 1e-9)
        return self._backoff.holds(_held_as(one.plan), speed, self._profile, window.step, window.now_s)

    def _too_early(self, window: Window, best: Prediction, now: Prediction, stragglers: StragglerSummary) -> bool:
        """Whether the gain is small and the active plan not yet measured, so that no outcome could be judged."""
        if math.isnan(window.now_s) or stragglers.frozen or best.relative < _CLEAR * now.relative:
            return False
        # Bounded, because under changing conditions the plan may never be measured.
        return self._check.steps < _EARLY_STEPS and not self._check.measured(now.plan, self._factors.normalized_step)

    def _gains_little(self, one: Prediction, now: Prediction) -> bool:
        """Whether a plan of another family is better than the active relaxed one, but not clearly."""
        if one.plan.plain or not now.plan.relaxed or _same_family(now.plan, one.plan):
            return False
        return _CLEAR * now.relative <= one.relative < (1.0 - self._least_gain) * now.relative

    def _was(self, active: Plan) -> str:
        """`; predicted 1.1x faster than sync, was 0.83x`, for the active plan; empty before it was measured."""
        outcome = self._outcome
        if outcome is None or outcome.plan_id != active.plan_id:
            return ""
        return f"; predicted {outcome.predicted:.2g}x faster than {outcome.against}, was {outcome.measured:.2g}x"

    def _held_back(self, window: Window, but: str = "") -> str:
        """`; partial did harm and is excluded until step 240 at least`; empty if no mode is held back, except `but`."""
        parts = []
        for mode, (until_step, until_s) in sorted(self._backoff.held(window.step, window.now_s).items()):
            if mode == but:
                continue
            waits = until_step > window.step
            left = f"until step {until_step}" if waits else f"for {until_s - window.now_s:.0f} s more"
            parts.append(f"; {mode} did harm and is excluded {left} at least")
        return "".join(parts)


def _factors(plan: Plan, conditions: Conditions, steps: float = 1.0) -> CostFactors:
    """The factors that convert measurements of a plan, per `steps` of a rank, to current conditions."""
    found = predict(plan, conditions)
    frozen_s = 0.0 if plan.mode == "ps" else conditions.frozen_s
    unfrozen = predict(plan, dataclasses.replace(conditions, frozen_s=0.0)) if frozen_s else found
    normalized_step = unfrozen.interval_s * steps / conditions.typical_s
    return CostFactors(max(1e-6, found.progress) * steps, frozen_s, normalized_step, found.interval_s * steps)


def _preferred(ranked: Sequence[Prediction], gain: float, now: Prediction | None) -> Prediction:
    """The best plan; if that is relaxed, an exact one that counters the stragglers and is slower by at most `gain`.

    The exact one has to be active or worth a switch itself; else it would only keep the job from the relaxed one.

    Not whenever the relaxed one's gain is uncertain, as where an exact one is active (`_doubtful`): that raises the
    regret of `star-scheduler evaluate` from 4.4 to 5.9 % (36 jobs of one seed). A relaxed plan's 95 % quantile contains
    that slow ranks recover, and then an exact plan gains nothing either.
    """
    best = _largest_quorum(ranked)
    exact = next((p for p in ranked if not p.plan.relaxed and not p.plan.plain), None)
    if exact is None or not best.plan.relaxed or (1.0 - gain) * exact.relative > best.relative:
        return best
    worth = now is None or exact is now or exact.relative < (1.0 - gain) * now.relative
    return exact if worth else best


def _doubtful(one: Prediction, now: Prediction) -> bool:
    """Whether a relaxed plan may gain nothing over an active exact one that counters the stragglers."""
    counters = not now.plan.relaxed and not now.plan.plain
    return counters and one.plan.relaxed and one.reported_interval[1] >= now.relative


def _as_measured(predictions: list[Prediction], active: Plan, cost_s: float) -> list[Prediction]:
    """Replace the active plan's prediction by its measured cost per synchronous step, if that is less; the best first.

    What makes a plan costlier than predicted may make the others costlier too; that is left to `OutcomeCheck.judge`.
    Only time is measured: the cost of a missed target stays as predicted.
    """
    sync_s = next((one.interval_s for one in predictions if one.plan.plain), math.nan)
    found = []
    for one in predictions:
        missed = 1.0 - one.reach
        part = cost_s / sync_s / one.relative_time if same_plan(one.plan, active) else 1.0
        if part < 1.0:
            one = dataclasses.replace(
                one, relative=part * one.relative_time + missed, low=part * (one.low - missed) + missed,
                high=part * (one.high - missed) + missed, interval_s=part * one.interval_s,
            )  # fmt: skip
        found.append(one)
    return sorted(found, key=lambda one: one.relative)


def _worth_hiding(predictions: list[Prediction], active: Plan) -> list[Prediction]:
    """Remove variants behind compute (except the active plan) whose interval is not clearly shorter than without."""
    interval_s = {one.plan.label: one.interval_s for one in predictions if one.plan.transmission is None}
    found = []
    for one in predictions:
        plain = one.plan if one.plan.transmission is None else one.plan.replace(transmission=None)
        without_s = interval_s.get(plain.label, math.inf)
        if plain is one.plan or same_plan(one.plan, active) or one.interval_s <= WORTH * without_s:
            found.append(one)
    return found


def _held_as(plan: Plan) -> str:
    """What is held back after harm by a plan: its mode; of the forms of `sync` only that one."""
    return plan.label if plan.mode == "sync" else plan.mode


def _same_family(active: Plan, plan: Plan) -> bool:
    """Whether a switch to a plan, and the switch back, only change a rule."""
    same = active.family == plan.family and plan.mode not in ("subgroup", "grouped")
    return same and active.servers == plan.servers


def _largest_quorum(ranked: Sequence[Prediction]) -> Prediction:
    """The first; if it is `partial`, the one with the largest quorum of those within `_ALIKE`."""
    first = ranked[0]
    if first.plan.mode != "partial":
        return first
    alike = [p for p in ranked if p.plan.mode == "partial" and p.relative <= (1.0 + _ALIKE) * first.relative]
    return max(alike, key=lambda p: p.plan.quorum)


def _just_lost_s(conditions: Conditions, active: Plan, plan: Plan) -> float:
    """Seconds the latest step took longer in `sync` than it would have in a `partial` plan; 0 for other pairs.

    At first few of the expected steps are slow, so the expected loss underestimates that of a slow step.
    """
    if active.mode != "sync" or plan.mode != "partial":
        return 0.0
    latest = np.sort(conditions.times_s[-1])
    return float(latest[-1] - latest[plan.quorum - 1])


def _steps_per_report(plan: Plan, conditions: Conditions) -> float:
    """Mean steps of a rank per global step of a job; predictions are per step of a rank."""
    return mean_steps(plan, conditions.usual_s)
