"""The coordinator's state and decisions for one optimizer. Pure: no sockets, no clock, no threads."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

from scheduler.diagnosis.host_headroom import HostHeadroom
from scheduler.diagnosis.machine import MachineStats, throttled_shares
from scheduler.diagnosis.stragglers import Straggler, find_stragglers
from scheduler.diagnosis.window_stats import OVERSUBSCRIBED, Readings
from scheduler.plan.completion import resolve
from scheduler.plan.mode_names import ONLY_EXACT
from scheduler.policy.candidates import same_plan
from scheduler.policy.cost_policy import Ranker
from scheduler.policy.switch_outcome import SwitchOutcome
from scheduler.records import MODES, Plan, PlanError, StepReport, StepTimes, Window
from scheduler.rules.step_closing import Close, ClosingRule
from star_hvd.channel.messages.base import (
    Arrive,
    CloseStep,
    HeaderNote,
    Late,
    Message,
    ModeUnsupported,
    OptimizerDropped,
    StepWaits,
)
from star_hvd.channel.messages.switch import Drained, PlanActive, Prepared, PrepareFailed, ServerUp, StepNote, Switched
from star_hvd.config import Config
from star_hvd.coordinator.alerts import Alerts
from star_hvd.coordinator.feeding_loader import FeedingLoader
from star_hvd.coordinator.gradients import Gradients
from star_hvd.coordinator.links import LinkRelevance
from star_hvd.coordinator.plans.asked_mode import AskedMode
from star_hvd.coordinator.plans.mode_backoff import PreparationBackoff
from star_hvd.coordinator.plans.mode_chooser import Choice
from star_hvd.coordinator.plans.other_optimizers import OtherOptimizers
from star_hvd.coordinator.plans.prewarm import Readiness
from star_hvd.coordinator.plans.report_trigger import DecisionTimer
from star_hvd.coordinator.plans.set_ledger import SetLedger
from star_hvd.coordinator.plans.switch import Published
from star_hvd.coordinator.reports import Arrivals, History, Losses, Pauses
from star_hvd.coordinator.transmissions import Transmissions

__all__ = ["OptimizerState"]

logger = logging.getLogger("star_hvd")

_HISTORY, _HISTORY_MANY, _MANY = 64, 32, 128
"""Reports kept per rank, over which medians are taken; fewer with more than `_MANY` ranks, because the time of a
decision grows with the bytes it reads."""
_OUTCOMES = 256  # Outcomes of switches kept for the report and the run log.
_MAX_UNLOGGED_PREDICTIONS = 64  # Plans whose predictions are kept for the log.
_SHARES = "; now "
_RESTARTS = "a state is loaded, or parameters are added, and servers would not have them"
_EXACT = frozenset(("sync",))  # It includes `sync(balanced)` and `sync(steal)`.


class OptimizerState:
    """State of one optimizer on the coordinator.

    Args:
        optimizer_id: Number of the optimizer.
        world_size: Number of ranks.
        config: Settings.
        send: Queues a message to all ranks.
        hosts: Address of every rank's host.
        ranker: The predictor behind mode `auto`, None for the cost model.
        sets: The process sets of all optimizers of the job.
    """

    def __init__(
        self,
        optimizer_id: int,
        world_size: int,
        config: Config,
        send: Callable[[Message], None],
        hosts: Sequence[str] = (),
        ranker: Ranker | None = None,
        sets: SetLedger | None = None,
    ) -> None:
        sets = SetLedger(world_size) if sets is None else sets
        self._hosts = tuple(hosts) or ("localhost",) * world_size
        self._config, self._send, self._ranker = config, send, ranker
        self.optimizer_id = optimizer_id
        self.world_size = world_size
        self.active = Plan.sync(world_size)
        self.plans: list[tuple[int, Plan]] = [(0, self.active)]  # By first step; a plan has its latest batch shares.
        self.plans_began_s = [0.0]  # When each of them became active.
        self.shares_step = 0  # First step of the latest batch shares of the active plan.
        self.rule = ClosingRule(
            self.active,
            grace_fraction=config.grace_fraction,
            grace_mads=config.grace_mads,
            quorum_deadline_s=config.quorum_deadline_s,
        )

        self.history = History(world_size, _HISTORY if world_size <= _MANY else _HISTORY_MANY)
        self.arrivals, self._pauses = Arrivals(world_size), Pauses(world_size)
        self.losses, self.gradients, self.loader = Losses(), Gradients(world_size), FeedingLoader()
        self.transmissions = Transmissions()
        self.steps = self.closed = 0
        self.folds = 0.0  # Late gradients of all ranks that were folded into a later step.
        self.dropped: dict[int, OptimizerDropped] = {}  # Latest message of ranks that dropped the optimizer.
        self._warm: set[int] = set()  # Ranks whose first report has arrived.
        self.silent_s: Sequence[float] = [0.0] * world_size
        self.machines: Sequence[MachineStats] = [MachineStats()] * world_size
        self.headroom = HostHeadroom(self._hosts)
        self.links = LinkRelevance(self.history, self.arrivals, world_size)

        self.asked = AskedMode(optimizer_id, world_size, self._hosts)
        self.choice: Choice | None = None
        self.exact = False  # Whether `auto` may choose only modes that do not change the mathematics.
        self.others = OtherOptimizers(optimizer_id)
        self.refused: str | None = None
        self._refused_by = -1
        self.blocked = PreparationBackoff()

        self.stragglers: tuple[Straggler, ...] = ()
        self.predictions_by_plan: dict[int, dict[str, Any]] = {}  # By plan_id, the predictions behind a plan.
        self.outcomes: list[SwitchOutcome] = []  # Outcomes of switches, the latest last.
        self.closing = False  # Some ranks have made their last step: no further plan is published.
        self._published = Published(optimizer_id, sets)
        self._plan_after_load: Plan | None = None
        self._restarting = False  # Loading a state waits for servers that are draining.
        self._timer = DecisionTimer(world_size, config.decide_interval_s)
        self._alerts = Alerts(config)
        self.readiness = Readiness(optimizer_id, sets, send)

    # ---- events ---------------------------------------------------------------------------------------------

    def register(self, rank: int, initial: Plan, plan: Plan | None, now_s: float) -> None:
        """Register a rank's optimizer, which starts with `initial` and requests `plan`, None for `auto`.

        Once all ranks have registered, rank 0's request is carried out; others that differ are warned about.
        """
        self.asked.request(rank, plan)
        if rank == 0:
            self.active = self.rule.plan = initial
            self.plans, self.plans_began_s = [(0, initial)], [now_s]
        if not self.asked.complete:  # A rank that has not made this optimizer does not get its plans.
            return
        wanted = self.asked.begin(self.active, now_s)
        if self.asked.auto:
            self.choice, self.others.auto = Choice(self.world_size, self._config, self._hosts, self._ranker), True
        elif wanted is not None:
            if self.asked.awaits_rates(self.links.bytes_per_s):
                with contextlib.suppress(PlanError):  # `publish` logs it.
                    self.readiness.for_plan(self._resolve(wanted))  # Start servers at their probable places meanwhile.
            elif not self.asked.needs_loader:
                self.publish(wanted, now_s)
        self.start(now_s)

    def start(self, now_s: float) -> None:
        """Publish at once, if a loader feeds the ranks, the mode that needs it.

        That is the user's mode, or where `auto` may choose exact modes only, `sync(balanced)`, or with micro-batches
        `sync(steal)`. These cost nothing while no rank is slow, and one that is slow from the start computes less some
        steps earlier. Not where only other optimizers confine `auto` to exact modes, since it decides again once they
        are gone.
        """
        if self.switching or self._is_bound or self.closing or self.plans != [(0, self.active)]:
            return
        if self.asked.needs_loader:
            self._retry_asked(now_s)
        elif self.choice is not None and not self._might_relax:
            plan = self.loader.exact_mode(self.active)
            if plan is not None:
                self.publish(plan, now_s)

    def arrive(self, rank: int, message: Arrive, now_s: float) -> None:
        """Note that a rank's fresh gradient for its current step is ready."""
        self._acted(rank, message.plan_id, message.step, now_s)
        self._note_report(rank, message.step, message.times, late=False)
        local = self.active.mode == "local"  # Its averagings are not timed: the wait is that of an earlier mode.
        self._pauses.reported(rank, message.step, 0.0 if local else message.previous_wait_s, now_s)
        if not local:
            self.arrivals.waited(rank, message.previous_wait_s)
        if self.active.may_close:
            self.arrivals.came(rank, message.step, now_s)
            self.arrivals.fresh(rank, message.step, message.previous_wait_s, now_s)
        else:
            if not local:
                self.arrivals.in_lockstep(rank, message.step - 1, message.previous_wait_s)
            self.links.arrived(rank, now_s)
        if self.rule.step < message.step or not self.rule.begun:
            self._alerts.waiting(now_s)
        compute_s = message.times.compute_s
        self.rule.arrive(rank, message.step, compute_s, now_s)
        if self.choice is None or self.active.mode != "sync":
            return
        self._timer.note(rank, self.history.newest_s(rank, self.loader.scale_of(rank, message.step)), now_s)

    def late(self, rank: int, message: Late, now_s: float) -> None:
        """Note that a rank's gradient became ready after its step was closed."""
        self._pauses.reported(rank, message.version, 0.0, now_s)
        self.arrivals.came(rank, message.version, now_s)
        self.arrivals.waited(rank, 0.0)  # It did not wait; without this, its waits in `sync` would stay its usual ones.
        self._note_report(rank, message.version, message.times, late=True)
        self.rule.late(rank, message.times.compute_s)

    def header_note(self, message: HeaderNote, now_s: float) -> None:
        """Take in the statistics of a step's reduced header, reported by rank 0."""
        self._note_plan(message.plan_id, message.step, now_s)
        self.steps = max(self.steps, message.step + 1)
        self.losses.note(message.step, message.loss)
        self.folds += message.folds
        self.gradients.note(message)

    def mode_unsupported(self, rank: int, message: ModeUnsupported, now_s: float) -> None:
        """Abandon a plan because a rank cannot run relaxed modes at all; return to `sync` if the plan is active."""
        if self.refused is None:
            where = "sync" if message.equal_batches else "the exact modes"
            logger.warning("optimizer %d stays in %s: rank %d: %s", self.optimizer_id, where, rank, message.reason)
        self.refused = message.reason
        self._refused_by = rank
        if message.equal_batches:
            self.loader.equal_batches = message.reason
        # Servers that are already ending accept no other plan: this one becomes active, and `sync` follows.
        coming = self._published.revocable
        # A rank that detects it later has dropped the pending plan and names the active one.
        if coming is not None and (coming.relaxed or coming.plan_id == message.plan_id):
            self._abandon(message.reason)
        self._maybe_return_to_sync(now_s)

    def publish(self, plan: Plan, now_s: float) -> None:
        """Send a plan to all ranks, which switch to it at a common step once all have prepared it."""
        if self.others.refuse(plan):
            return
        try:
            plan = self._resolve(plan)
        except PlanError as error:
            logger.warning("plan %s is not possible in this job: %s", plan.label, error)
            return
        self._send_all(self._published.publish(plan, self.active, now_s, self._config.plan_deadline_s))

    def _resolve(self, plan: Plan) -> Plan:
        return resolve(
            plan,
            self.active,
            times_s=self.history.usual_s(),
            hosts=self._hosts,
            slow=[straggler.rank for straggler in self.stragglers],
            link_bytes_per_s=self.links.bytes_per_s,
            headroom=self.headroom.levels(),
            state_bytes=2 * self.gradients.total_bytes,
        )

    def _is_active(self, plan: Plan) -> bool:
        """Whether a plan, once completed, is the active one: under a new id it would be chosen again and again."""
        try:
            return same_plan(self._resolve(plan), self.active)
        except PlanError:
            return False  # `publish` logs it.

    @property
    def switching(self) -> bool:
        """Whether a published plan is not active yet; publishing another one replaces it."""
        return self._published.pending is not None

    @property
    def feeding(self) -> Plan:
        """The plan whose batch sizes the loader uses: in plain `sync` the pending one, if that only changes sizes."""
        coming = self._published.newest(self.active)
        return coming if (coming.balanced or coming.steal) and self.active.plain else self.active

    def prepare_failed(self, rank: int, message: PrepareFailed, now_s: float) -> None:
        """Abandon the pending plan, which a rank failed to prepare, and block its mode for a while."""
        coming = self._published.revocable
        if coming is not None and coming.plan_id == message.plan_id:
            self._block_mode(f"rank {rank}: {message.reason}", now_s)

    def prepared(self, rank: int, message: Prepared) -> None:
        """Note that a rank has prepared the pending plan."""
        switch = self._published.pending
        if switch is not None and message.plan_id == switch.plan.plan_id:
            self._send_all(switch.rank_ready(rank))

    def restart(self, now_s: float) -> None:
        """Switch to `sync`, and later back to the same plan: all ranks are about to load a state that servers lack."""
        self._restarting = False
        if self.switching and self._published.revocable is None:
            self._restarting = True  # The old servers are draining already and take no other plan.
            return
        self._plan_after_load = self._published.newest(self.active)
        if self.switching:
            self._abandon(_RESTARTS)
        self.publish(self._sync(_RESTARTS), now_s)

    def server_up(self, message: ServerUp) -> None:
        """Note that a server of the pending plan is running."""
        switch = self._published.pending
        if switch is not None and message.plan_id == switch.plan.plan_id:
            self._send_all(switch.server_up(message.index, message.address))

    def switched(self, message: Drained | Switched, now_s: float) -> None:
        """Send all ranks the step at which the old mode ended, which only some of them know."""
        if message.plan_id not in self._published and message.plan_id != self.active.plan_id:
            return
        self._send(PlanActive(self.optimizer_id, message.plan_id, message.step))
        self._note_plan(message.plan_id, message.step, now_s)
        self.rule.restart(message.step, now_s)

    def step_note(self, rank: int, message: StepNote, now_s: float) -> None:
        """Take in a rank's step in a mode without a common reduction."""
        self._acted(rank, message.plan_id, message.version, now_s)
        self._note_report(rank, message.version, message.times, late=message.staleness > 0, wait_s=message.comm_s)
        self._pauses.reported(rank, message.version, message.comm_s, now_s)
        self.arrivals.waited(rank, message.comm_s)
        served = self.active.family in ("ps", "grouped")  # A subgroup's members report their own steps.
        if served and message.plan_id == self.active.plan_id:
            self.rule.skip_to(message.version)
        self.steps = max(self.steps, message.version)
        if message.plan_id == self.active.plan_id:
            self.losses.note_push(message.version, message.loss, self.world_size)

    def drop(self, rank: int, message: OptimizerDropped) -> bool:
        """Note that a rank has dropped this optimizer; return whether all have and no collective of it is in flight.

        The helpers of all ranks complete a step that some ranks have started: a reduction that not all ranks have
        submitted would stay in Horovod's tables until the end of the job.
        """
        self.dropped[rank] = message
        self.rule.deactivate(rank)
        if len(self.dropped) < self.world_size:
            return False
        steps = [message.step for message in self.dropped.values()]
        if min(steps) < 0:
            return True  # With servers there are no common steps.
        last = max(message.step + message.begun for message in self.dropped.values())
        if min(steps) < last:
            self._send(CloseStep(self.optimizer_id, last - 1, 0.0))
            return False
        return not any(message.in_flight for message in self.dropped.values())

    def _send_all(self, items: Sequence[Message]) -> None:
        for message in items:
            self._send(message)

    # ---- time -----------------------------------------------------------------------------------------------

    def decides(self, now_s: float) -> bool:
        """Whether the next tick builds a `Window`; the ranks' readings must be set before."""
        return now_s >= self._timer.due_s

    def tick(self, now_s: float) -> float:
        """Act on what is due; return the latest time for the next call."""
        wake_s = now_s + 1.0
        self.rule.several, self.rule.awaits_all = self.others.exist, bool(self.others.bar(self.active))
        order, again_s = self.rule.evaluate(now_s)
        if order is not None:
            self._close(order, now_s)
        if again_s is not None:
            wake_s = min(wake_s, again_s)
        switch = self._published.pending
        if switch is not None and switch.overdue(self.rule.step, now_s):
            missed = "some rank did not switch to it" if switch.prepared else "not all ranks prepared it"
            self._block_mode(f"{missed} within {self._config.plan_deadline_s:g} s", now_s)
        self._alerts.draining(self._published.pending, now_s)
        self.others.tell(self.asked.plan, now_s, might_relax=self._might_relax)
        self._maybe_return_to_sync(now_s)
        if self._restarting and not self.switching:
            self._restarting = self.active.family in ("ps", "grouped")
            if self._restarting:
                self.restart(now_s)
        if self.decides(now_s):
            self._timer.begin(now_s)
            self.links.new_decision(round(self.gradients.total_bytes * self.gradients.reduced_part))
            self._decide(now_s)
        waited_s = self._alerts.stall(self.rule, now_s)
        if waited_s is not None:
            self._send(StepWaits(self.optimizer_id, self.rule.step, waited_s, list(self.rule.missing)))
        decides_soon = self.choice is not None or self.asked.awaits_rates(self.links.bytes_per_s)
        return min(wake_s, self._timer.due_s) if decides_soon else wake_s

    def window(self, now_s: float = math.nan) -> Window:
        """Return recent reports of all ranks, links and losses, as a decision sees them.

        Args:
            now_s: Current time, needed if the policy measures the outcome of a switch with this window.
        """
        possible = frozenset(MODES) if self._may_relax else _EXACT
        return Window(
            step=self.rule.step,
            ranks=self.history.table(
                oversubscribed_share=OVERSUBSCRIBED,
                starved_share=throttled_shares(self.machines),
                link_bytes_per_s=self.links.rates(self.active),
                silent_s=self.silent_s,
                comm_s=tuple(self.arrivals.comm_s),
                scale=self.loader.scale,
            ),
            noise_scale=self.gradients.noise.value,
            comm_bytes=self.gradients.total_bytes,
            edge_part=self.gradients.edge_part,
            reduced_part=self.gradients.reduced_part,
            pushed_part=self.gradients.pushed_part,
            allowed=possible.difference(self.blocked),
            blocked=possible.intersection(self.blocked),
            batch=self.loader.batch,
            microbatches=self.loader.microbatches,
            headroom=tuple(self.headroom.levels()),
            fixed_part=self.loader.fixed_part,
            losses=tuple(self.losses.values),
            loss_steps=tuple(self.losses.steps),
            now_s=now_s,
        )

    def explain(self) -> str:
        """Explain in one sentence why the active plan is active."""
        chosen = self.choice.explain() if self.choice is not None and not self._is_bound else ""
        only_exact = self.refused or (ONLY_EXACT if self.others.confine(might_relax=self._might_relax) else "")
        return f"{chosen}; only exact modes: {only_exact}" if chosen and only_exact else chosen or self._plain_reason()

    def _plain_reason(self) -> str:
        crosses = self.others.bar(self.asked.plan) if self.asked.plan is not None else ""
        if self.others.confine(might_relax=self._might_relax):
            crosses = ONLY_EXACT
        hindrance = self.asked.no_loader_reason or self.refused or crosses or self.asked.failure
        if hindrance and self.active.plain:
            return f"{self.active.label}: {hindrance}"
        return f"{self.active.label}: {self.active.reason or 'asked for'}"

    @property
    def suspects_links(self) -> bool:
        """Whether the links should be measured: once at the start, and while they matter."""
        if self.asked.awaits_rates(self.links.bytes_per_s):
            return True
        return self.choice is not None and self.links.suspects(self.active)

    def surprised_by_links(self, now_s: float) -> bool:
        """Whether reductions take far longer than the known rates of links explain, so that these are outdated."""
        timed = self.active.mode in ("sync", "partial")
        return self.choice is not None and timed and self.links.surprised(now_s)

    def _sync(self, reason: str) -> Plan:
        return Plan.sync(
            self.world_size, damping=self.active.damping, max_staleness=self.active.max_staleness, reason=reason
        )

    def _maybe_return_to_sync(self, now_s: float) -> None:
        """Return to `sync` if the active mode is not possible, on a rank or at all, which was not known before."""
        coming = self._published.revocable
        if coming is not None and (crosses := self.others.refuse(coming)):
            self._abandon(crosses)
        if self.switching:
            return
        if crosses := self.others.bar(self.active):
            self.publish(self._sync(crosses), now_s)
            return
        if self.refused is not None and self.active.relaxed:
            self.publish(self._sync(f"rank {self._refused_by}: {self.refused}"), now_s)
        elif self.loader.equal_batches and not self.active.relaxed and not self.active.plain:
            self.publish(self._sync(self.loader.equal_batches), now_s)

    def _note_report(self, rank: int, step: int, times: StepTimes, *, late: bool, wait_s: float = 0.0) -> None:
        if rank not in self._warm:
            # A first step allocates, compiles and opens files, so its time is not typical.
            self._warm.add(rank)
            return
        self.history.append(StepReport(rank=rank, step=step, times=times, wait_s=wait_s, late=late))

    def _acted(self, rank: int, plan_id: int, step: int, now_s: float) -> None:
        self._published.acted(rank, plan_id)
        self._note_plan(plan_id, step, now_s)

    def _note_plan(self, plan_id: int, step: int, now_s: float) -> None:
        """Activate a newer plan that a rank acts on: all ranks agreed on it in a header, maybe as it was abandoned."""
        if plan_id <= self.active.plan_id or plan_id not in self._published:
            return
        self.active = self._published.activate(plan_id)
        self.losses.drop_pushes()
        self.blocked.succeeded(self.active.mode)
        self.asked.activated(self.active)
        self.rule.plan = self.active
        self.plans.append((step, self.active))
        self.plans_began_s.append(now_s)
        logger.warning("step %d: %s: %s", step, self.active.label, self.active.reason or "asked for")
        shares = self.loader.shares
        if shares is not None and shares.state.shares:  # Ordered while the plan was on its way.
            self.shares_changed(step, shares.state.shares, shares.sentence())

    def _block_mode(self, reason: str, now_s: float) -> None:
        """Abandon the pending plan and block its mode for a while: an immediate retry would probably fail as well."""
        switch = self._published.pending
        assert switch is not None
        mode = switch.plan.mode
        if mode != "sync":
            first, advice = self.blocked.block(mode, now_s), self.asked.failed(switch, reason, self.active)
            level = logging.WARNING if first else logging.INFO
            logger.log(level, "mode %s is not possible at present: %s%s", mode, reason, advice if first else "")
        self._abandon(reason)

    def _abandon(self, reason: str) -> None:
        logger.info("plan %s is abandoned: %s", self._published.newest(self.active).label, reason)
        self._send_all(self._published.abandon(reason))

    def _close(self, order: Close, now_s: float) -> None:
        self.closed += 1
        self.arrivals.closed(order.step, now_s)
        self._alerts.closing(order, has_queue=self.loader.has_queue)
        self._send(CloseStep(self.optimizer_id, order.step, order.typical_compute_s))

    def _decide(self, now_s: float) -> None:
        self.blocked.expire(now_s)
        window = dataclasses.replace(self.window(now_s), pause_s=self._pauses.take_longest_s())
        self._timer.trigger.set_typical(Readings.of(window).typical_s)
        self.stragglers = self._alerts.stragglers(window, find_stragglers(window), self.machines, now_s)
        if self.switching or self._is_bound or self.closing:
            if self.choice is not None:
                self.choice.watch(window, self.active, now_s, preparing=self.switching)
            return
        if self._plan_after_load is not None and self.active.mode == "sync" and self.rule.ready:
            restored, self._plan_after_load = self._plan_after_load, None
            self.publish(restored.replace(servers=(), reason="the loaded state is in force"), now_s)
            return
        if self.choice is None:
            self._retry_asked(now_s)
            regrouped = self.asked.regrouped(self.active, self._resolve, self.history.usual_s)
            if regrouped is not None:
                self.publish(regrouped, now_s)
            return
        plan = self.choice.decide(window, self.active, self.stragglers, now_s)
        self._note_outcomes(self.choice.take_outcomes())
        if self._may_relax and (plan is None or plan.family == "all_ranks"):
            self.readiness.for_links(self.links.to_prepare_for(now_s), self.gradients.total_bytes, self.blocked)
            self.readiness.for_plan(self.choice.coming, self.blocked)
        if plan is not None and not self._is_active(plan):
            plan_id = self._published.next_id
            self.predictions_by_plan[plan_id] = self.choice.predictions()
            self.predictions_by_plan.pop(plan_id - _MAX_UNLOGGED_PREDICTIONS, None)  # Without a run log.
            self.publish(plan, now_s)

    @property
    def _may_relax(self) -> bool:
        """Whether `auto` may choose modes that change the mathematics."""
        return self._might_relax and not self.others.exist

    @property
    def _might_relax(self) -> bool:
        """Whether it may if this is the program's only optimizer."""
        return not (self.exact or self.loader.splits or self.refused is not None)

    @property
    def in_step(self) -> bool:
        """Whether all ranks make every step together, and will as far as is known: no relaxed mode was asked for."""
        return self.active.lockstep and self.asked.lockstep

    @property
    def _is_bound(self) -> bool:
        """Whether only plain `sync` is possible: relaxed modes are refused, and so are other exact modes.

        Exact modes are forms of `sync`; the refusal of relaxed modes says whether it covers them too
        (`FeedingLoader.equal_batches`).
        """
        if self.refused is None:
            return False
        exact_asked = self.asked.plan is not None and not self.asked.plan.relaxed
        return bool(self.loader.equal_batches) or not (self.loader.has_shares or self.loader.splits or exact_asked)

    def _note_outcomes(self, found: Sequence[SwitchOutcome]) -> None:
        for outcome in found:
            logger.log(
                logging.WARNING if outcome.harmful else logging.INFO, "step %d: %s", outcome.step, outcome.sentence
            )
        self.outcomes = [*self.outcomes, *found][-_OUTCOMES:]

    def _retry_asked(self, now_s: float) -> None:
        """Publish the user's mode if it is not in force and nothing hinders it, for example again after its backoff."""
        wanted = self.asked.plan
        if wanted is None or self._plan_after_load is not None:  # A state is being loaded; the plan comes after that.
            return
        if (self.refused is not None and wanted.relaxed) or self.others.refuse(wanted):
            return
        if not self.asked.has_loader(self.loader.lack(wanted), self.loader.equal_batches, self.rule.step):
            return
        plan = self.asked.due(self.active, self.blocked, self.links.bytes_per_s, now_s)
        if plan is None:
            return
        self.publish(plan, now_s)
        if not self.switching:  # Not possible in this job, which `publish` has logged.
            self.blocked.block(plan.mode, now_s)

    def shares_changed(self, step: int, shares: tuple[int, ...], sentence: str) -> None:
        """Record new batch shares from a step on, for the run log and `explain()`.

        They belong to the plan in force: of a rank that is slow on and off, a job of days has tens of thousands. There
        are none, and nothing to say of them, while gradients follow input that has no shares.
        """
        if not self.active.balanced or shares == self.active.batch_shares:
            return
        why = self.active.reason.partition(_SHARES)[0]
        self.active = self.active.replace(batch_shares=shares, reason=f"{why}{_SHARES}{sentence}" if sentence else why)
        self.plans[-1], self.shares_step = (self.plans[-1][0], self.active), step
