"""The coordinator's state and decisions for one optimizer. Pure: no sockets, no clock, no threads."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from scheduler.diagnosis.host_headroom import HostHeadroom
from scheduler.diagnosis.machine import MachineStats, throttled_shares
from scheduler.diagnosis.noise_scale import NoiseScale
from scheduler.diagnosis.stragglers import Straggler, find_stragglers
from scheduler.diagnosis.window_stats import OVERSUBSCRIBED, Readings
from scheduler.plan.completion import resolve
from scheduler.plan.mode_names import MAY_WAIT, ONLY_EXACT, crossing
from scheduler.policy.candidates import same_plan
from scheduler.policy.cost_policy import Ranker
from scheduler.policy.regrouping import Regrouping
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
from star_hvd.coordinator.links import LinkRelevance
from star_hvd.coordinator.plans.mode_backoff import PreparationBackoff
from star_hvd.coordinator.plans.mode_chooser import Choice
from star_hvd.coordinator.plans.prewarm import Readiness
from star_hvd.coordinator.plans.report_trigger import SlowReportTrigger
from star_hvd.coordinator.plans.set_ledger import SetLedger
from star_hvd.coordinator.plans.switch import Published
from star_hvd.coordinator.reports import Arrivals, History, Losses, Pauses, Scale
from star_hvd.coordinator.share_control import ShareControl

__all__ = ["OptimizerState"]

logger = logging.getLogger("star_hvd")

_HISTORY, _HISTORY_MANY, _MANY = 64, 32, 128
"""Reports kept per rank, over which medians are taken; fewer with more than `_MANY` ranks, because the time of a
decision grows with the bytes it reads."""
_OUTCOMES = 256  # Outcomes of switches kept for the report and the run log.
_MAX_UNLOGGED_PREDICTIONS = 64  # Plans whose predictions are kept for the log.
_SOONER = 0.25  # Part of `decide_interval_s` after which slow reports may trigger the next window.
_SHARES = "; now "
_EXACT = frozenset(("sync",))  # It includes `sync(balanced)` and `sync(steal)`.
_FED_BY = 8  # Steps after which a loader of `shard` is known if there is one.
_RATES_S = 3.0  # Longest wait for the rates of links before servers are placed; a sweep takes at most 2 s.
_OTHERS_S = 1.0
"""After this a warning names other optimizers: one that replaces another is made before that has been dropped."""
_SENT_STEPS = 32  # Steps that say what is usual: more than a trial of a form of gradients takes.


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
        self.optimizer_id = optimizer_id
        self.world_size = world_size
        self.active = Plan.sync(world_size)
        self.rule = ClosingRule(
            self.active,
            grace_fraction=config.grace_fraction,
            grace_mads=config.grace_mads,
            quorum_deadline_s=config.quorum_deadline_s,
        )
        self.history = History(world_size, _HISTORY if world_size <= _MANY else _HISTORY_MANY)
        self.arrivals, self._pauses = Arrivals(world_size), Pauses(world_size)
        self.plans: list[tuple[int, Plan]] = [(0, self.active)]  # By first step; a plan has its latest batch shares.
        self.shares_step = 0  # First step of the latest batch shares of the active plan.
        self.refused: str | None = None
        self._refused_by = -1
        self.equal_batches = ""  # Why batches, or numbers of micro-batches, may not differ between ranks.
        self.blocked = PreparationBackoff()
        sets = SetLedger(world_size) if sets is None else sets
        self._published = Published(optimizer_id, sets)
        self.noise = NoiseScale()
        self.stragglers: tuple[Straggler, ...] = ()
        self.losses = Losses()
        self.steps = 0
        self.closed = 0
        self.folds = 0.0  # Late gradients of all ranks that were folded into a later step.
        self.has_queue = self.has_shares = False  # A loader of `shard` feeds the ranks; batches can have other sizes.
        self.microbatches = 0  # Per rank and step, if a loader of `shard` splits its batches.
        # Ranks on which a pass may not have more than a whole batch of that loader, of those that have opened it.
        self.short_passes: set[int] = set()
        self.microbatch_fixed_part = math.nan  # See `MicrobatchService.fixed_part`.
        self.shares: ShareControl | None = None  # Of the loader that feeds this optimizer.
        self.several = False  # Whether the program has other optimizers, which bars some modes (`crossing`).
        self.exact = False  # Whether `auto` may choose only modes that do not change the mathematics.
        self._several_since_s = math.inf
        self._noted_crossing = ""  # What was last logged about modes beside other optimizers.
        self._wanted_failed = ""  # Why the mode that the user asked for could not be prepared when it was last tried.
        self.no_loader_reason = ""  # Why the batch shares or the stealing that the user asked for are not possible.
        self.dropped: dict[int, OptimizerDropped] = {}  # Latest message of ranks that dropped the optimizer.
        self.closing = False  # Some ranks have made their last step: no further plan is published.
        self._config = config
        self._send = send
        self._registered: dict[int, Plan | None] = {}
        self._warm: set[int] = set()  # Ranks whose first report has arrived.
        self.choice: Choice | None = None
        self.predictions_by_plan: dict[int, dict[str, Any]] = {}  # By plan_id, the predictions behind a plan.
        self.outcomes: list[SwitchOutcome] = []  # Outcomes of switches, the latest last.
        self._ranker = ranker
        self._hosts = tuple(hosts) or ("localhost",) * world_size
        self.gradient_bytes, self.edge_part, self.pushed_part = 0, 1.0, 1.0
        self._sent_bytes: deque[int] = deque(maxlen=_SENT_STEPS)  # Of the latest steps that reduced gradients.
        self._weights: deque[float] = deque(maxlen=_SENT_STEPS)  # Mean weights of a rank in the latest such steps.
        self.links = LinkRelevance(self.history, self.arrivals, world_size)
        self.silent_s: Sequence[float] = [0.0] * world_size
        self.machines: Sequence[MachineStats] = [MachineStats()] * world_size
        self.headroom = HostHeadroom(self._hosts)
        self._regrouping = Regrouping()
        self._wanted: Plan | None = None
        self._plan_after_load: Plan | None = None
        self._rates_by_s = math.inf  # Until when the placement of servers waits for the rates of links.
        self._restarting = False  # Loading a state waits for servers that are draining.
        self._decide_at_s = self._decide_next_s = 0.0  # Next window; the same without a trigger.
        self._alerts = Alerts(config)
        self.readiness = Readiness(optimizer_id, sets, send)
        self._trigger = SlowReportTrigger(world_size)

    # ---- events ---------------------------------------------------------------------------------------------

    def register(self, rank: int, initial: Plan, plan: Plan | None, now_s: float) -> None:
        """Register a rank's optimizer, which starts with `initial` and requests `plan`, None for `auto`.

        Once all ranks have registered, rank 0's request is carried out; others that differ are warned about.
        """
        self._registered[rank] = plan
        if rank == 0:
            self.active = self.rule.plan = initial
            self.plans = [(0, initial)]
        if not self.registered:
            return
        wanted = self._registered[0]
        differing = [r for r, p in self._registered.items() if p != wanted]
        if differing:
            logger.warning("ranks %s request another mode than rank 0; rank 0's is used on all ranks", differing)
        if wanted is None:
            self.choice = Choice(self.world_size, self._config, self._hosts, self._ranker)
        elif wanted.mode != self.active.mode or not wanted.plain:
            self._wanted, self._rates_by_s = wanted, now_s + _RATES_S
            if self._awaits_rates:
                with contextlib.suppress(PlanError):  # `publish` logs it.
                    self.readiness.for_plan(self._resolve(wanted))  # Start servers at their probable places meanwhile.
            elif not (wanted.uneven or wanted.steal):  # Otherwise published once a loader feeds the ranks.
                self.publish(wanted, now_s)
        self.start(now_s)

    def start(self, now_s: float) -> None:
        """Publish at once, if a loader feeds the ranks, the mode that needs it.

        That is the user's mode, or where `auto` may choose exact modes only, `sync(balanced)`, or with micro-batches
        `sync(steal)`. These cost nothing while no rank is slow, and one that is slow from the start computes less some
        steps earlier. Not where only other optimizers confine `auto` to exact modes, since it decides again once they
        are gone. Not `sync(steal)` where a pass over more than a batch may not fit in memory on a rank that has opened
        the loader so far; one that opens it later only limits the passes of that epoch.
        """
        if self.switching or self._is_bound or self.closing or self.plans != [(0, self.active)]:
            return
        if self._wanted is not None and (self._wanted.uneven or self._wanted.steal):
            self._retry_wanted(now_s)
        elif self.choice is None or self._might_relax or self.equal_batches:
            return
        elif self.microbatches:
            if not self.short_passes:
                reason = "ranks take over micro-batches from the first step on"
                self.publish(self.active.replace(steal=True, reason=reason), now_s)
        elif self.has_shares:
            reason = "batch shares follow the ranks' speed from the first steps on"
            self.publish(self.active.replace(balanced=True, reason=reason), now_s)

    def arrive(self, rank: int, message: Arrive, now_s: float) -> None:
        """Note that a rank's fresh gradient for its current step is ready."""
        self._acted(rank, message.plan_id, message.step)
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
        scale = self.shares.scale_of(rank, message.step) if self.shares is not None and self.shares.changed else None
        if self._trigger.note(rank, self.history.newest_s(rank, scale)):
            # However many ranks report, the window is brought forward once.
            waited_s = (1.0 - _SOONER) * self._config.decide_interval_s
            self._decide_at_s = min(self._decide_at_s, max(now_s, self._decide_next_s - waited_s))

    def late(self, rank: int, message: Late, now_s: float) -> None:
        """Note that a rank's gradient became ready after its step was closed."""
        self._pauses.reported(rank, message.version, 0.0, now_s)
        self.arrivals.came(rank, message.version, now_s)
        self.arrivals.waited(rank, 0.0)  # It did not wait; without this, its waits in `sync` would stay its usual ones.
        self._note_report(rank, message.version, message.times, late=True)
        self.rule.late(rank, message.times.compute_s)

    def header_note(self, message: HeaderNote) -> None:
        """Take in the statistics of a step's reduced header, reported by rank 0."""
        self._note_plan(message.plan_id, message.step)
        self.steps = max(self.steps, message.step + 1)
        self.losses.note(message.step, message.loss)
        self.folds += message.folds
        if message.sent_bytes > 0:
            self._sent_bytes.append(message.sent_bytes)
        if message.local_count == self.world_size and message.folds == 0 and message.weight > 0:
            # Weights may be in any unit, as tokens are; the noise scale is in usual gradients of one rank.
            mean_weight = message.weight / self.world_size
            self._weights.append(mean_weight)
            usual = statistics.median(self._weights)
            whole, part = message.weight / usual, mean_weight / usual
            self.noise.update(message.local_sqr / message.weight, message.mean_sqr, part, whole)

    def mode_unsupported(self, rank: int, message: ModeUnsupported, now_s: float) -> None:
        """Abandon a plan because a rank cannot run relaxed modes at all; return to `sync` if the plan is active."""
        if self.refused is None:
            where = "sync" if message.equal_batches else "the exact modes"
            logger.warning("optimizer %d stays in %s: rank %d: %s", self.optimizer_id, where, rank, message.reason)
        self.refused = message.reason
        self._refused_by = rank
        if message.equal_batches:
            self.equal_batches = message.reason
        # Servers that are already ending accept no other plan: this one becomes active, and `sync` follows.
        coming = self._published.revocable
        # A rank that detects it later has dropped the pending plan and names the active one.
        if coming is not None and (coming.relaxed or coming.plan_id == message.plan_id):
            self._abandon(message.reason)
        self._maybe_return_to_sync(now_s)

    def publish(self, plan: Plan, now_s: float) -> None:
        """Send a plan to all ranks, which switch to it at a common step once all have prepared it."""
        if crosses := self._crossing(plan):
            self._note_crossing(plan.label, crosses)
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
            state_bytes=2 * self.gradient_bytes,
        )

    def _is_active(self, plan: Plan) -> bool:
        """Whether a plan, once completed, is the active one: under a new id it would be chosen again and again."""
        try:
            return same_plan(self._resolve(plan), self.active)
        except PlanError:
            return False  # `publish` logs it.

    @property
    def registered(self) -> bool:
        """Whether all ranks have made this optimizer; a rank that has not does not get its plans."""
        return len(self._registered) >= self.world_size

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
            self._abandon("a state is being loaded")
        self.publish(self._sync("a state is being loaded"), now_s)

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
        self._note_plan(message.plan_id, message.step)
        self.rule.restart(message.step, now_s)

    def step_note(self, rank: int, message: StepNote, now_s: float) -> None:
        """Take in a rank's step in a mode without a common reduction."""
        self._acted(rank, message.plan_id, message.version)
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
        return now_s >= self._decide_at_s

    def tick(self, now_s: float) -> float:
        """Act on what is due; return the latest time for the next call."""
        wake_s = now_s + 1.0
        self.rule.several, self.rule.awaits_all = self.several, bool(self._crossing(self.active))
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
        self._note_others(now_s)
        self._maybe_return_to_sync(now_s)
        if self._restarting and not self.switching:
            self._restarting = self.active.family in ("ps", "grouped")
            if self._restarting:
                self.restart(now_s)
        if self.decides(now_s):
            self._decide_at_s = self._decide_next_s = now_s + self._config.decide_interval_s
            self.links.new_decision(round(self.gradient_bytes * self.reduced_part))
            self._decide(now_s)
        waited_s = self._alerts.stall(self.rule, now_s)
        if waited_s is not None:
            self._send(StepWaits(self.optimizer_id, self.rule.step, waited_s, list(self.rule.missing)))
        return min(wake_s, self._decide_at_s) if self.choice is not None or self._awaits_rates else wake_s

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
                scale=self._scale,
            ),
            noise_scale=self.noise.value,
            comm_bytes=self.gradient_bytes,
            edge_part=self.edge_part,
            reduced_part=self.reduced_part,
            pushed_part=self.pushed_part,
            allowed=possible.difference(self.blocked),
            blocked=possible.intersection(self.blocked),
            batch=self.shares.sizable if self.shares is not None and not self.equal_batches else 0,
            microbatches=0 if self.equal_batches else self.microbatches,
            headroom=tuple(self.headroom.levels()),
            fixed_part=self.shares.fixed_part if self.shares is not None else self.microbatch_fixed_part,
            losses=tuple(self.losses.values),
            loss_steps=tuple(self.losses.steps),
            now_s=now_s,
        )

    @property
    def _scale(self) -> Scale | None:
        """What converts times to those of usual batches; None while all batches are of the usual size."""
        return self.shares.scale if self.shares is not None and self.shares.changed else None

    @property
    def reduced_part(self) -> float:
        """Fraction of the gradient's bytes that steps send: of the smallest of the latest ones, since a form of
        `Compression.auto` is left for some steps after every change of plan, and for later trials."""
        if not (self._sent_bytes and self.gradient_bytes):
            return 1.0
        return min(1.0, min(self._sent_bytes) / self.gradient_bytes)

    def explain(self) -> str:
        """Explain in one sentence why the active plan is active."""
        chosen = self.choice.explain() if self.choice is not None and not self._is_bound else ""
        only_exact = self.refused or (ONLY_EXACT if self._gave_up_relaxed else "")
        return f"{chosen}; only exact modes: {only_exact}" if chosen and only_exact else chosen or self._plain_reason()

    def _plain_reason(self) -> str:
        crosses = self._crossing(self._wanted) if self._wanted is not None else ""
        if self._gave_up_relaxed:
            crosses = ONLY_EXACT
        hindrance = self.no_loader_reason or self.refused or crosses or self._wanted_failed
        if hindrance and self.active.plain:
            return f"{self.active.label}: {hindrance}"
        return f"{self.active.label}: {self.active.reason or 'asked for'}"

    @property
    def suspects_links(self) -> bool:
        """Whether the links should be measured: once at the start, and while they matter."""
        return self._awaits_rates or (self.choice is not None and self.links.suspects(self.active))

    @property
    def _awaits_rates(self) -> bool:
        """Whether servers that the user asked for have yet to be placed and the rates of some links are unknown.

        In every step the parameters of all ranks cross a server's link; if it is slow, that costs more than the wait.
        """
        wanted = self._wanted
        if wanted is None or wanted.family not in ("ps", "grouped") or wanted.servers or self._rates_by_s == math.inf:
            return False
        return len(set(self._hosts)) > 1 and any(map(math.isnan, self.links.bytes_per_s))

    def surprised_by_links(self, now_s: float) -> bool:
        """Whether reductions take far longer than the known rates of links explain, so that these are outdated."""
        timed = self.active.mode in ("sync", "partial")
        return self.choice is not None and timed and self.links.surprised(now_s)

    def _sync(self, reason: str) -> Plan:
        return Plan.sync(
            self.world_size, damping=self.active.damping, max_staleness=self.active.max_staleness, reason=reason
        )

    def _crossing(self, plan: Plan) -> str:
        """Return why a plan is not possible beside other optimizers, empty if it is or if there are none."""
        return crossing(plan, auto=self.choice is not None) if self.several else ""

    @property
    def _gave_up_relaxed(self) -> bool:
        """Whether `auto` is confined to exact modes because the program has several optimizers, and only for that."""
        return self.several and self.choice is not None and self._might_relax

    def _note_crossing(self, label: str, reason: str) -> None:
        if self.choice is None and self._noted_crossing != label:  # Of what `auto` may choose `_note_others` tells.
            self._noted_crossing = label
            logger.warning("optimizer %d: %s is not possible: %s", self.optimizer_id, label, reason)

    def _note_others(self, now_s: float) -> None:
        """Tell the user, once, what the program's other optimizers mean for the modes of this one."""
        self._several_since_s = min(self._several_since_s, now_s) if self.several else math.inf
        if now_s < self._several_since_s + _OTHERS_S:
            return
        wanted = self._wanted
        if self._gave_up_relaxed and not self._noted_crossing:
            self._noted_crossing = "auto"
            logger.warning("optimizer %d: %s", self.optimizer_id, ONLY_EXACT)
            return
        if not self.several or wanted is None or not wanted.relaxed or self._crossing(wanted):
            return
        if self._noted_crossing != wanted.label:
            self._noted_crossing = wanted.label
            logger.warning("optimizer %d: %s: %s", self.optimizer_id, wanted.label, MAY_WAIT)

    def _maybe_return_to_sync(self, now_s: float) -> None:
        """Return to `sync` if the active mode is not possible, on a rank or at all, which was not known before."""
        coming = self._published.revocable
        if coming is not None and (crosses := self._crossing(coming)):
            self._note_crossing(coming.label, crosses)
            self._abandon(crosses)
        if self.switching:
            return
        if crosses := self._crossing(self.active):
            self.publish(self._sync(crosses), now_s)
            return
        if self.refused is not None and self.active.relaxed:
            self.publish(self._sync(f"rank {self._refused_by}: {self.refused}"), now_s)
        elif self.equal_batches and not self.active.relaxed and not self.active.plain:
            self.publish(self._sync(self.equal_batches), now_s)

    def _note_report(self, rank: int, step: int, times: StepTimes, *, late: bool, wait_s: float = 0.0) -> None:
        if rank not in self._warm:
            # A first step allocates, compiles and opens files, so its time is not typical.
            self._warm.add(rank)
            return
        self.history.append(StepReport(rank=rank, step=step, times=times, wait_s=wait_s, late=late))

    def _acted(self, rank: int, plan_id: int, step: int) -> None:
        self._published.acted(rank, plan_id)
        self._note_plan(plan_id, step)

    def _note_plan(self, plan_id: int, step: int) -> None:
        """Activate a newer plan that a rank acts on: all ranks agreed on it in a header, maybe as it was abandoned."""
        if plan_id <= self.active.plan_id or plan_id not in self._published:
            return
        self.active = self._published.activate(plan_id)
        self.losses.drop_pushes()
        self.blocked.succeeded(self.active.mode)
        if self._wanted is not None and self._wanted.mode == self.active.mode:
            self._wanted_failed = ""
        self.rule.plan = self.active
        self.plans.append((step, self.active))
        logger.warning("step %d: %s: %s", step, self.active.label, self.active.reason or "asked for")
        if self.shares is not None and self.shares.state.shares:  # Ordered while the plan was on its way.
            self.shares_changed(step, self.shares.state.shares, self.shares.sentence())

    def _block_mode(self, reason: str, now_s: float) -> None:
        """Abandon the pending plan and block its mode for a while: an immediate retry would probably fail as well."""
        switch = self._published.pending
        assert switch is not None
        mode = switch.plan.mode
        if mode != "sync":
            first, advice = self.blocked.block(mode, now_s), ""
            if self._wanted is not None and self._wanted.mode == mode:
                failed = "did not come into force" if switch.prepared else "could not be prepared"
                self._wanted_failed = f"{self._wanted.label} {failed}: {reason}"
                advice = (
                    f". Training continues in {self.active.label}, and {self._wanted.label}, which was asked for, is "
                    "tried again in a minute, then less often: remove the cause meanwhile, or ask for another mode"
                )
            level = logging.WARNING if first else logging.INFO
            logger.log(level, "mode %s is not possible at present: %s%s", mode, reason, advice if first else "")
        self._abandon(reason)

    def _abandon(self, reason: str) -> None:
        logger.info("plan %s is abandoned: %s", self._published.newest(self.active).label, reason)
        self._send_all(self._published.abandon(reason))

    def _close(self, order: Close, now_s: float) -> None:
        self.closed += 1
        self.arrivals.closed(order.step, now_s)
        self._alerts.closing(order, has_queue=self.has_queue)
        self._send(CloseStep(self.optimizer_id, order.step, order.typical_compute_s))

    def _decide(self, now_s: float) -> None:
        self.blocked.expire(now_s)
        window = dataclasses.replace(self.window(now_s), pause_s=self._pauses.take_longest_s())
        self._trigger.set_typical(Readings.of(window).typical_s)
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
            self._retry_wanted(now_s)
            self._regroup(now_s)
            return
        plan = self.choice.decide(window, self.active, self.stragglers, now_s)
        self._note_outcomes(self.choice.take_outcomes())
        if self._may_relax and (plan is None or plan.family == "all_ranks"):
            self.readiness.for_links(self.links.to_prepare_for(now_s), self.gradient_bytes, self.blocked)
            self.readiness.for_plan(self.choice.coming, self.blocked)
        if plan is not None and not self._is_active(plan):
            plan_id = self._published.next_id
            self.predictions_by_plan[plan_id] = self.choice.predictions()
            self.predictions_by_plan.pop(plan_id - _MAX_UNLOGGED_PREDICTIONS, None)  # Without a run log.
            self.publish(plan, now_s)

    @property
    def _may_relax(self) -> bool:
        """Whether `auto` may choose modes that change the mathematics."""
        return self._might_relax and not self.several

    @property
    def _might_relax(self) -> bool:
        """Whether it may if this is the program's only optimizer."""
        return not (self.exact or self.microbatches or self.refused is not None)

    @property
    def in_step(self) -> bool:
        """Whether all ranks make every step together, and will as far as is known: no relaxed mode was asked for."""
        asked = self._registered.values()
        return self.active.lockstep and all(plan is None or plan.lockstep for plan in asked)

    @property
    def _is_bound(self) -> bool:
        """Whether only plain `sync` is possible: relaxed modes are refused, and so are other exact modes.

        Exact modes are forms of `sync`; the refusal of relaxed modes says whether it covers them too (`equal_batches`).
        """
        if self.refused is None:
            return False
        asked = self._wanted is not None and not self._wanted.relaxed
        return bool(self.equal_batches) or not (self.has_shares or self.microbatches or asked)

    def _note_outcomes(self, found: Sequence[SwitchOutcome]) -> None:
        for outcome in found:
            logger.log(
                logging.WARNING if outcome.harmful else logging.INFO, "step %d: %s", outcome.step, outcome.sentence
            )
        self.outcomes = [*self.outcomes, *found][-_OUTCOMES:]

    def _retry_wanted(self, now_s: float) -> None:
        """Publish the user's mode again after its backoff."""
        wanted = self._wanted
        if wanted is None or self._plan_after_load is not None:  # A state is being loaded; the plan comes after that.
            return
        if self.refused is not None and wanted.relaxed:
            return
        if crosses := self._crossing(wanted):
            self._note_crossing(wanted.label, crosses)
            return
        if self.equal_batches and (wanted.uneven or wanted.steal):  # Another optimizer needs equal batches.
            self.no_loader_reason = self.equal_batches
            return
        if (wanted.uneven and not self.has_shares) or (wanted.steal and not self.microbatches):
            self._note_no_loader(wanted)
            return
        self.no_loader_reason = ""
        if self._awaits_rates and now_s < self._rates_by_s:
            return
        self._rates_by_s = math.inf
        same = self.active.mode == wanted.mode and self.active.uneven == wanted.uneven
        same = same and self.active.steal == wanted.steal
        if not same and wanted.mode not in self.blocked:
            self.publish(wanted, now_s)
            if not self.switching:  # Not possible in this job, which `publish` has logged.
                self.blocked.block(wanted.mode, now_s)

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

    def _note_no_loader(self, wanted: Plan) -> None:
        """Warn, once some steps were made, that the user's mode needs a loader that the job does not have."""
        if self.rule.step < _FED_BY or self.no_loader_reason:
            return
        why = f"{wanted.label} needs hvd.shard, which forms the batches; without it the sizes are the user's"
        if wanted.steal:
            why = f"{wanted.label} needs hvd.shard(..., microbatches=k), which cuts the batches"
        elif self.microbatches:
            why = f"{wanted.label} is not for micro-batches; use sync(steal), or leave microbatches out"
        elif self.has_queue:
            why = (
                f"{wanted.label} needs batches whose sizes hvd.shard can choose; those of a stream, of hvd.work, of a "
                "batch sampler and of one sample are as they are: use a map-style data set with a batch_size"
            )
        self.no_loader_reason = why
        logger.warning("optimizer %d stays in sync: %s", self.optimizer_id, why)

    def _regroup(self, now_s: float) -> None:
        """Form new groups, if the user gave none, once others have been better for long enough."""
        wanted = self._wanted
        if wanted is None or wanted.groups or self.active.mode != wanted.mode or not self.active.groups:
            return
        if self._regrouping.due(self.active, self._resolve(wanted).groups, self.history.usual_s):
            self.publish(wanted.replace(reason="other ranks are alike by now"), now_s)
