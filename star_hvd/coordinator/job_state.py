"""The coordinator's state of the job: ranks, optimizers, work queues. Pure: no sockets, no clock, no threads."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from scheduler.diagnosis.host_headroom import HostHeadroom
from scheduler.diagnosis.machine import MachineStats
from scheduler.policy.cost_policy import Ranker
from scheduler.records import Plan
from scheduler.rules.work_queue import WorkQueue
from star_hvd.channel.messages.base import (
    CLOSE,
    Arrive,
    Away,
    Bye,
    EpochEnd,
    FindStateSource,
    Finished,
    GradientSizes,
    Grant,
    HeaderNote,
    Heartbeat,
    Hello,
    Join,
    Late,
    Message,
    ModeUnsupported,
    OptimizerDropped,
    OptimizerOver,
    Register,
    ReportImmediately,
    RequestBatch,
    StateSource,
    StepWaits,
    TransmissionNote,
    Unregister,
)
from star_hvd.channel.messages.joins import JoinCalled, JoinedRanks, ProgramCollective
from star_hvd.channel.messages.leases import (
    Consumed,
    ConsumedRequest,
    Lease,
    LeaseAsk,
    LeaseReturn,
    LoaderClosed,
    spans_of,
)
from star_hvd.channel.messages.microbatches import MicrobatchBegin, MicrobatchOpen, MicrobatchReturn
from star_hvd.channel.messages.shares import Feeds, MemoryLimit, ShareReady
from star_hvd.channel.messages.switch import (
    Drained,
    LinkRate,
    MachineNote,
    Prepared,
    PrepareFailed,
    Presence,
    Restart,
    ServerRestarted,
    ServerUp,
    StepNote,
    Switched,
)
from star_hvd.channel.messages.waits import Deadlock, ProgramWait
from star_hvd.config import Config
from star_hvd.coordinator.alerts import EndAlert
from star_hvd.coordinator.lease_service import LeaseService, MicrobatchService
from star_hvd.coordinator.links import LinkSurvey
from star_hvd.coordinator.optimizer_state import OptimizerState
from star_hvd.coordinator.plans.set_ledger import SetLedger
from star_hvd.coordinator.share_control import ShareControl
from star_hvd.coordinator.validation import check
from star_hvd.errors import ChannelError
from star_hvd.input.deadlocks import Deadlocks

__all__ = ["ALL", "JobState"]

logger = logging.getLogger("star_hvd")

ALL = -1  # Destination: every rank.
_TIDY_INTERVAL_S = 5.0  # Between two searches for unused process sets.
_UNLIKELY = 3  # Every third state source named is a rank that is not known to have the state.
_JOINS_INTERVAL_S = 0.05  # Between two lists of the ranks in `join`, in jobs of more than `_FEW` ranks.
_FEW = 16
_APART = 2  # A rank that ends an epoch with so many times the samples of those that left it did not leave with them.
_MAX_OPEN = 4096  # Maximum number of optimizers, and of loaders' epochs, that are kept.
_OWN_PACE = ("subgroup", "ps", "grouped")  # Families of plans in which all or some ranks step on their own.
_EPOCHS_KEPT = 64  # Epochs that have ended on all ranks: a state of the middle of one may still be wanted.
_GRANTS_KEPT = 64  # Per rank: more than it has requests in flight.
_REPORT_IMMEDIATELY_S = 0.1
"""How long ranks go on reporting immediately after the last rank became active again, since the user's collectives come
in bursts. Not longer: a message per step wakes two threads of rank 0 besides its training thread, and if a rank becomes
inactive again, the order reaches all ranks within a millisecond."""


@dataclass(slots=True)
class _Epoch:
    queue: WorkQueue | None = None  # None where samples are leased.
    ended: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)  # Those of `ended` that left their loop before its end.
    left_at: int = 0  # Most samples that one of these had begun.
    announced: bool = False  # The ranks that are in `ended` without having left know of the end.
    over: bool = False  # All ranks have ended it.


class JobState:
    """Handles the ranks' messages and appends (destination, message) answers to `outbox`.

    Args:
        world_size: Number of ranks.
        config: Settings.
        now_s: Current time, on the clock used for all later calls.
        hosts: Address of every rank's host; if empty, all ranks are on one host.
        ranker: The predictor behind mode `auto`, None for the cost model.
    """

    def __init__(
        self,
        world_size: int,
        config: Config,
        now_s: float,
        hosts: Sequence[str] = (),
        ranker: Ranker | None = None,
    ) -> None:
        self.world_size = world_size
        self.outbox: list[tuple[int, Message]] = []
        self.optimizers: dict[int, OptimizerState] = {}
        self.finished: set[int] = set()
        self.lost: set[int] = set()
        self._config = config
        self._hosts = tuple(hosts)
        self._ranker = ranker
        self._epochs: dict[tuple[int, int], _Epoch] = {}  # By loader and number.
        self._over: deque[tuple[int, int]] = deque()  # Those that are over, the last one last.
        self._at_end: dict[int, tuple[int, int]] = {}  # The epoch at whose end a rank's training thread waits.
        self._closers: dict[int, set[int]] = {}  # By loader: ranks that have closed it, until all have.
        self._now_s = 0.0  # The time of the present call.
        self._leases = LeaseService(world_size, self._send_lease)
        self.microbatches = MicrobatchService(world_size, lambda to, message: self.outbox.append((to, message)))
        self.shares = ShareControl(world_size, self._broadcast, config.min_batch)
        self._leases.shares, deal = self.shares.state.opens, self._leases.deal
        self._leases.changes = lambda loader: self.shares.state.pending and self.shares.state.loader == loader
        self.shares.state.deal = lambda loader, change, now_s: deal(
            loader, change.epoch, change.shares, change.planned, now_s, change.last
        )
        self._granted: list[dict[int, Grant]] = [{} for _ in range(world_size)]
        self._stopped_s = 0.0  # Time in which the coordinator's process was stopped; see `paused`.
        self._last_seen_s = [now_s] * world_size
        self._sent_bye = self._warned_apart = False
        self._end_alert = EndAlert()
        self._asked = [0] * world_size
        self._closed: set[int] = set()
        self._inactive: dict[int, float] = {}  # Inactive ranks and since when.
        self._joined: list[int] = []  # Ranks in the program's `join`, in the order in which they came.
        self._joins_due_s = now_s  # When the next list of them may be sent.
        self._joins_sent = True  # Whether all ranks have been sent the present list.
        # By counter and position in `_joined`, the latest operation described to that rank.
        self._described: dict[str, list[int]] = {}
        self._closing: set[int] = set()  # Ranks that are closing an optimizer.
        self._in_collective: set[int] = set()  # Ranks in a collective of the user's program.
        self._absent: set[int] = set()
        self._deadlocks = Deadlocks(world_size)
        self._machines = [MachineStats()] * world_size
        self._headroom = HostHeadroom(self._hosts or ("localhost",) * world_size)
        self.links = LinkSurvey(world_size, hosts)
        self._sets = SetLedger(world_size)
        self._next_tidy_s = now_s
        self._immediate_until_s: float | None = None
        self._check_lost_at_s = now_s  # No rank can exceed its silence limit before this time.

    def handle(self, rank: int, message: Message, now_s: float) -> None:
        """Act on one message of `rank`.

        Raises:
            ChannelError: The message is invalid in this job; nothing has changed.
        """
        if not 0 <= rank < self.world_size:
            raise ChannelError(f"a message came from rank {rank}; this job has ranks 0..{self.world_size - 1}")
        check(message, self.world_size, self._step_of)
        self._check_room(message)
        now_s -= self._stopped_s
        self._last_seen_s[rank] = self._now_s = now_s
        if getattr(message, "optimizer_id", -1) in self._closed:
            return  # Sent before the rank learned that the optimizer has ended.
        if rank in self.lost:
            self.lost.discard(rank)
            logger.warning("rank %d sends messages again", rank)
        if rank in self._absent:
            self._absent.discard(rank)
            self._broadcast(Presence(rank, True))
        HANDLERS[type(message)](self, rank, message, now_s)

    def tick(self, now_s: float) -> float:
        """Act on what is due; return the latest time for the next call."""
        return self._tick(now_s - self._stopped_s) + self._stopped_s

    def _tick(self, now_s: float) -> float:
        self._now_s = now_s
        self._check_lost(now_s)
        self._break_deadlock(now_s)
        waits = self._end_alert.waits(self.finished, self.world_size, now_s)
        if waits is not None:
            self._broadcast(StepWaits(0, -1, waits[1], waits[0]))
        if self._immediate_until_s is not None and not self._inactive and now_s >= self._immediate_until_s:
            self._immediate_until_s = None
            self._broadcast(ReportImmediately(False))
        wake_s = min(now_s + self._config.heartbeat_s, self._send_joined(now_s))
        optimizers = self.optimizers.values()
        due = self.links.due(
            now_s,
            wanted=lambda: any(each.suspects_links for each in optimizers),
            surprised=lambda: any(each.surprised_by_links(now_s) for each in optimizers),
        )
        if due is not None:
            self.outbox.append(due)
        if now_s >= self._next_tidy_s:
            self._next_tidy_s = now_s + _TIDY_INTERVAL_S
            self.outbox.extend((ALL, message) for message in self._sets.tidy(now_s))
        fed = self._fed
        self._pass_equal_batches()
        if fed is not None and self.shares.state.batch:
            fed.loader.shares = self.shares
            if not fed.dropped:
                self.shares.tick(fed.feeding, now_s, even=bool(fed.loader.equal_batches))
        self.microbatches.steals = fed is not None and fed.feeding.steal
        if fed is not None and fed.loader.splits:
            fed.loader.microbatch_fixed_part = self.microbatches.fixed_part
        wake_s = min(wake_s, self.microbatches.tick(now_s))
        for optimizer in self.optimizers.values():
            if optimizer.decides(now_s):
                silent_s = [0.0 if r in self.finished else s for r, s in enumerate(self._silent_s(now_s))]
                optimizer.links.bytes_per_s, optimizer.silent_s = self.links.bytes_per_s, silent_s
                optimizer.links.suspected = self.links.suspected(now_s)
                optimizer.machines = self._machines
            optimizer.closing = bool(self._closing or optimizer.dropped)
            wake_s = min(wake_s, optimizer.tick(now_s))
        return wake_s

    def paused(self, paused_s: float) -> None:
        """Do not count `paused_s`, in which the coordinator's process was stopped, before times after that are given.

        It read no message meanwhile, so that ranks are not silent, nor do plans, steps or loops take longer for it.
        """
        self._stopped_s += paused_s
        self._deadlocks.look_anew()

    def clock_s(self, own_s: float) -> float:
        """Return, on the caller's clock, a time kept here, which does not count pauses; exact since the last one."""
        return own_s + self._stopped_s

    def silent_for_s(self, now_s: float) -> list[float]:
        """Return the seconds since the last message of each rank."""
        return self._silent_s(now_s - self._stopped_s)

    def _silent_s(self, now_s: float) -> list[float]:
        return [now_s - seen for seen in self._last_seen_s]

    def _check_room(self, message: Message) -> None:
        """Bound the memory for optimizers and epochs, whose numbers the ranks choose."""
        number = getattr(message, "optimizer_id", None)
        if number is not None and number not in self.optimizers and len(self.optimizers) >= _MAX_OPEN:
            raise ChannelError(f"a message is of optimizer {number}; this job has {_MAX_OPEN}, the maximum; close some")
        if not isinstance(message, (RequestBatch, LeaseAsk, MicrobatchOpen)) or len(self._epochs) < _MAX_OPEN:
            return
        if (message.loader, message.epoch) not in self._epochs:
            raise ChannelError(f"a batch of loader {message.loader} is requested; {_MAX_OPEN} epochs are open already")

    # ---- handlers -------------------------------------------------------------------------------------------

    def _register(self, rank: int, message: Register, now_s: float) -> None:
        plan = Plan.from_dict(message.plan) if message.plan else None
        optimizer = self._optimizer(message.optimizer_id)
        optimizer.gradients.registered(message)
        optimizer.exact = message.exact
        optimizer.register(rank, Plan.from_dict(message.initial), plan, now_s)

    def _arrive(self, rank: int, message: Arrive, now_s: float) -> None:
        optimizer = self._optimizer(message.optimizer_id)
        optimizer.arrive(rank, message, now_s)
        if optimizer is self._fed:
            self.shares.note(rank, message.step, message.times)

    def _step_note(self, rank: int, message: StepNote, now_s: float) -> None:
        optimizer = self._optimizer(message.optimizer_id)
        optimizer.step_note(rank, message, now_s)
        pace_s = self._own_pace_s(rank)
        if optimizer.active.family in _OWN_PACE and pace_s is not None:
            # The other ranks wait for it at the end of the epoch, and its next request for samples may come too late.
            self._leases.forecast(rank, pace_s)

    def _optimizer_dropped(self, rank: int, message: OptimizerDropped, now_s: float) -> None:
        optimizer = self._optimizer(message.optimizer_id)
        if optimizer is self._fed:
            self.shares.state.cancel()  # Ranks without it count their batches by another optimizer's steps.
        ended = optimizer.drop(rank, message)
        self._count_optimizers()
        if ended:
            self._broadcast(OptimizerOver(message.optimizer_id))
            self._forget(message.optimizer_id)

    def _machine_note(self, rank: int, message: MachineNote, now_s: float) -> None:
        self._machines[rank] = MachineStats(**{n: getattr(message, n) for n in MachineStats.names()})
        self._headroom.note(rank, self._machines[rank])

    def _away_message(self, rank: int, message: Away, now_s: float) -> None:
        (self._closing.add if message.away and message.reason == CLOSE else self._closing.discard)(rank)
        (self._in_collective.add if message.away and not message.out_of_data else self._in_collective.discard)(rank)
        self._set_inactive(rank, message.away, now_s, out_of_data=message.out_of_data)
        self._unblock(now_s)

    def _join_called(self, rank: int, message: JoinCalled, now_s: float) -> None:
        if rank not in self._joined:
            self._joined.append(rank)
        self._joins_sent = False
        self._send_joined(now_s)
        self._unblock(now_s)
        if len(self._joined) == self.world_size:
            self._joined.clear()
            self._described.clear()
            self._align(now_s)

    def _send_joined(self, now_s: float) -> float:
        """Send all ranks the list of those in `join` if it has changed; return when to call this again.

        A message to all ranks for each of many joins, which come at about the same time, would take rank 0 seconds.
        """
        if self._joins_sent:
            return math.inf
        if now_s < self._joins_due_s and _FEW < self.world_size != len(self._joined):
            return self._joins_due_s
        self._joins_sent, self._joins_due_s = True, now_s + _JOINS_INTERVAL_S
        self._broadcast(JoinedRanks(list(self._joined)))
        return math.inf

    def _program_collective(self, rank: int, message: ProgramCollective, now_s: float) -> None:
        """Pass on a collective, which all active ranks describe, once to each joined rank: it would drop the others."""
        if not self._joined:
            return
        if len(self._described) >= _MAX_OPEN:  # Ranks choose the names. What is described again is dropped there.
            self._described.clear()
        numbers = self._described.setdefault(message.counter, [])
        numbers += [0] * (len(self._joined) - len(numbers))
        # A rank that joined later has been described no later operation, so the ranks that lack it are the last ones.
        first = len(numbers)
        while first and numbers[first - 1] < message.number:
            first -= 1
            numbers[first] = message.number
        self.outbox.extend((joined, message) for joined in self._joined[first:])

    def _lease_return(self, rank: int, message: LeaseReturn, now_s: float) -> None:
        self._leases.give_back(rank, message, now_s)
        if message.leaves:
            self.microbatches.leave(rank, now_s, (message.loader, message.epoch))
            self._epoch_ended((message.loader, message.epoch), rank, message, now_s)
        self._unblock(now_s)

    def _finished(self, rank: int, message: Finished, now_s: float) -> None:
        self.finished.add(rank)
        self._set_inactive(rank, True, now_s)
        self._leases.leave(rank, now_s)
        self.microbatches.leave(rank, now_s)
        for key, epoch in list(self._epochs.items()):  # It may have left its loop in the middle of one.
            self._maybe_end(key, epoch, now_s)
        self._unblock(now_s)
        for loader in list(self._closers):
            self._close_if_unused(loader)
        self._end_job_if_over()

    def _loader_closed(self, rank: int, message: LoaderClosed, now_s: float) -> None:
        if message.loader in self._closers or any(loader == message.loader for loader, _ in self._epochs):
            self._closers.setdefault(message.loader, set()).add(rank)
            self._close_if_unused(message.loader)

    def _close_if_unused(self, loader: int) -> None:
        """Forget a loader that all ranks have closed: also the epoch that they requested ahead and never began."""
        if len(self._closers[loader] | self.finished) == self.world_size:
            del self._closers[loader]
            for key in [each for each in self._epochs if each[0] == loader]:
                self._forget_epoch(key)

    def _forget(self, optimizer_id: int) -> None:
        """Forget an optimizer that has ended on all ranks."""
        fed = self._fed
        self.optimizers.pop(optimizer_id, None)
        self._count_optimizers()
        if fed is not self._fed:
            self.shares.restart()
        self._sets.ended(optimizer_id)
        self._closed.add(optimizer_id)

    def _broadcast(self, message: Message) -> None:
        self.outbox.append((ALL, message))

    def _optimizer(self, optimizer_id: int) -> OptimizerState:
        if optimizer_id not in self.optimizers:
            self.optimizers[optimizer_id] = OptimizerState(
                optimizer_id, self.world_size, self._config, self._broadcast, self._hosts, self._ranker, self._sets
            )
            self.optimizers[optimizer_id].links.bytes_per_s = self.links.bytes_per_s
            self.optimizers[optimizer_id].headroom = self._headroom
            self._count_optimizers()
        return self.optimizers[optimizer_id]

    def _count_optimizers(self) -> None:
        """Tell the optimizers whether the program has several.

        One that some ranks have not dropped yet counts: these may step it, and refuse plans that are not possible
        beside it (`StepDriver.others`).
        """
        several = sum(len(each.dropped) < self.world_size for each in self.optimizers.values()) > 1
        for each in self.optimizers.values():
            each.others.exist = several

    def _step_of(self, optimizer_id: int) -> int:
        """Return the current step of an optimizer, 0 if it is not registered yet."""
        return self.optimizers[optimizer_id].rule.step if optimizer_id in self.optimizers else 0

    def _set_inactive(self, rank: int, inactive: bool, now_s: float, *, out_of_data: bool = True) -> None:
        if inactive:
            self._inactive.setdefault(rank, now_s)
        else:
            self._inactive.pop(rank, None)
        if inactive and self._immediate_until_s is None:
            self._broadcast(ReportImmediately(True))
        if inactive or self._immediate_until_s is not None:  # At an epoch's end `_maybe_end` activates ranks first.
            self._immediate_until_s = now_s + _REPORT_IMMEDIATELY_S
        for optimizer in self.optimizers.values():
            if inactive:
                optimizer.rule.deactivate(rank, now_s, out_of_data=out_of_data)
            elif rank not in optimizer.dropped:
                optimizer.rule.activate(rank, now_s)

    def _request_batch(self, rank: int, message: RequestBatch, now_s: float) -> None:
        given = self._granted[rank]
        if 0 < message.number <= max(given, default=0):
            if message.number in given:  # A repeated request gets the same answer: no batch is lost or granted twice.
                self.outbox.append((rank, given[message.number]))
            return
        key = (message.loader, message.epoch)
        if key not in self._epochs:
            self._epochs[key] = _Epoch(WorkQueue(message.samples, message.batch, drop_last=message.drop_last))
            self._forget_epochs(message.loader, message.epoch - 1)
        epoch = self._epochs[key]
        if epoch.queue is None:
            raise ChannelError(
                f"rank {rank} requests single batches of loader {message.loader}, whose samples are leased; "
                "use the same arguments of star_hvd.shard on all ranks"
            )
        granted = epoch.queue.take() if rank not in epoch.ended else None
        start, stop = granted if granted is not None else (0, 0)
        grant = Grant(message.loader, message.epoch, start, stop, message.number)
        self.outbox.append((rank, grant))
        if message.number:
            given[message.number] = grant
            given.pop(message.number - _GRANTS_KEPT, None)
        if granted is None:
            epoch.ended.add(rank)
            self._maybe_end(key, epoch, now_s)

    def _forget_epochs(self, loader: int, before: int) -> None:
        for old in [k for k, each in self._epochs.items() if k[0] == loader and k[1] < before and each.over]:
            self._forget_epoch(old)

    def _forget_epoch(self, key: tuple[int, int]) -> None:
        if self._epochs.pop(key).over and key in self._over:
            self._over.remove(key)
        self._at_end = {rank: each for rank, each in self._at_end.items() if each != key}
        self._leases.forget(key)
        self.microbatches.forget(key)

    def _lease(self, rank: int, message: LeaseAsk, now_s: float) -> None:
        key = (message.loader, message.epoch)
        self._epochs.setdefault(key, _Epoch())
        self._forget_epochs(message.loader, message.epoch - 1)
        for optimizer in self.optimizers.values():
            optimizer.loader.leased(message)
        self._start_fed(now_s)
        self.shares.state.in_step = self._fed is not None and self._fed.in_step
        self._leases.ask(rank, message, self._own_pace_s(rank), now_s)
        self._unblock(now_s)

    def _microbatch_open(self, rank: int, message: MicrobatchOpen, now_s: float) -> None:
        key = (message.loader, message.epoch)
        done = spans_of(message.done)
        self._epochs.setdefault(key, _Epoch())
        self._forget_epochs(message.loader, message.epoch - 1)
        self._leases.interrupted(key, done)
        for optimizer in self.optimizers.values():
            optimizer.loader.opened(rank, message)
        self._start_fed(now_s)
        self.microbatches.open(rank, message, now_s)

    def _send_lease(self, rank: int, message: Message) -> None:
        self.outbox.append((rank, message))
        if not isinstance(message, Lease) or not message.runs or rank in self._at_end or rank in self.finished:
            return
        ended = (each for (loader, _), each in self._epochs.items() if loader == message.loader and rank in each.ended)
        if not all(each.over for each in ended):
            return  # These are for the next epoch.
        for optimizer in self.optimizers.values():  # Its step would be closed before it could say so itself.
            optimizer.rule.has_data(rank, self._now_s)

    def _start_fed(self, now_s: float) -> None:
        """Publish at once the mode that needs the loader which has just asked for its first samples."""
        fed = self._fed
        if fed is not None:
            self._pass_equal_batches()
            fed.start(now_s)
            self.microbatches.steals = fed.feeding.steal

    def _pass_equal_batches(self) -> None:
        """Tell the optimizer that the loader feeds why batches must be equal: others use the same ones."""
        if self._fed is not None:
            reasons = (each.loader.equal_batches for each in self.optimizers.values())
            self._fed.loader.equal_batches = next(filter(None, reasons), "")

    @property
    def _fed(self) -> OptimizerState | None:
        """The optimizer whose steps count the batches of `shard`: the first one."""
        return next(iter(self.optimizers.values()), None)

    def _feeds(self, rank: int, message: Feeds, now_s: float) -> None:
        before, optimizer = self.shares.state.loader, self._fed
        self.shares.bind(message.loader, message.step, mixed=message.mixed)
        if optimizer is not None and self.shares.state.loader != before:
            optimizer.shares_changed(message.step, self.shares.state.shares, self.shares.sentence())

    def _share_ready(self, rank: int, message: ShareReady, now_s: float) -> None:
        optimizer = self._fed
        change = self.shares.ready(rank, message, 0 if optimizer is None else optimizer.rule.step + 1, now_s)
        if change is None or optimizer is None:
            return
        logger.info("step %d: %s", change.step, self.shares.sentence() or "all ranks get equal batches")
        optimizer.shares_changed(change.step, change.shares, self.shares.sentence())

    def _epoch_ended(self, key: tuple[int, int], rank: int, message: LeaseReturn, now_s: float) -> None:
        """Note that a rank has reached the end of an epoch, or left its loop before."""
        epoch = self._epochs.get(key)
        if not message.early and (epoch is None or epoch.announced):  # The others have not waited for it.
            self.outbox.append((rank, EpochEnd(*key, together=False)))
        if epoch is None:
            return
        if not message.early:
            self._warn_if_apart(key, epoch, rank, message)
        epoch.ended.add(rank)
        if message.early:
            epoch.left.add(rank)
            epoch.left_at = max(epoch.left_at, message.begun)
        elif message.meets and not epoch.announced:
            self._at_end[rank] = key
        self._maybe_end(key, epoch, now_s)

    def _warn_if_apart(self, key: tuple[int, int], epoch: _Epoch, rank: int, message: LeaseReturn) -> None:
        """Warn, once, if ranks that should be in step are in different iterations over a loader.

        That is so if one of them takes a batch to look at it: its training is the loader's next iteration, and the
        others' training is that one. All may leave a loop at the same step, though.
        """
        # Ranks that reach the end ask for the next epoch behind it, so only one that left can have opened it.
        begun = epoch.left and epoch.left == epoch.ended and (key[0], key[1] + 1) in self._epochs
        if self._warned_apart or not begun or message.begun <= _APART * epoch.left_at:
            return
        if self._fed is None or not self._fed.in_step:
            return
        self._warned_apart = True
        logger.warning(
            "ranks %s left an iteration over a loader of hvd.shard early and began the next one, while rank %d came to "
            "the end of the first: if they go on in step, they will wait for each other in vain. Every iteration is of "
            "all ranks; to look at a batch on one rank, take it from the DataLoader or the data set itself",
            sorted(epoch.left), rank,
        )  # fmt: skip

    def _own_pace_s(self, rank: int) -> float | None:
        """Return the median time of a rank's last 5 batches in seconds, from the first optimizer with reports.

        For a rank that steps on its own, this includes waits for its parent or for servers between two batches, which
        take most of the time on a slow link.
        """
        for optimizer in self.optimizers.values():
            recent = optimizer.history.latest_s(rank, 5)
            if optimizer.active.family in _OWN_PACE and rank not in optimizer.active.members:
                recent = optimizer.history.latest_s(rank, 5, with_waits=True) or recent
            if recent and min(recent) > 0.0:
                return sorted(recent)[len(recent) // 2]
        return None

    def _maybe_end(self, key: tuple[int, int], epoch: _Epoch, now_s: float) -> None:
        if epoch.over or len(epoch.ended | self.finished) < self.world_size:
            return
        epoch.over = True
        if not epoch.announced:
            if epoch.left:  # No common end: ranks that left early may be in the next epoch already.
                self._announce(key, epoch, together=False)
            else:
                self._broadcast(EpochEnd(*key))
                self._announced(key, epoch)
                self._align(now_s)
        if epoch.queue is None:
            self._over.append(key)
            if len(self._over) > _EPOCHS_KEPT:
                self._forget_epoch(self._over[0])

    def _announce(self, key: tuple[int, int], epoch: _Epoch, *, together: bool) -> None:
        """Let the ranks go on that wait at the end of an epoch, and no others."""
        self.outbox.extend((rank, EpochEnd(*key, together=together)) for rank in sorted(epoch.ended - epoch.left))
        self._announced(key, epoch)

    def _announced(self, key: tuple[int, int], epoch: _Epoch) -> None:
        epoch.announced = True
        self._at_end = {rank: each for rank, each in self._at_end.items() if each != key}

    def _align(self, now_s: float) -> None:
        """Make all ranks active at once, as they leave an epoch, or `join`, together.

        Otherwise the last to leave could have its first step closed without it.
        """
        self._inactive = dict.fromkeys(self.finished, now_s)
        for optimizer in self.optimizers.values():
            optimizer.rule.align(now_s)
            for rank in self.finished.union(optimizer.dropped):
                optimizer.rule.deactivate(rank)

    def _unblock(self, now_s: float, inside: Collection[int] = ()) -> bool:
        """Let ranks go on that wait for each other, in different loaders that they draw from in one loop.

        Then every rank waits for samples that others hold, or at the end of an epoch that others have not ended, and no
        message would change that. Samples go to the ranks that wait for them. If there are none, the ranks at an end go
        on without the others, and if all ranks are at one, they meet first.

        Args:
            now_s: Current time.
            inside: Further ranks that wait in a collective of the program.

        Returns:
            Whether a rank goes on, or will.
        """
        waiting = self._leases.waiting
        blocked = self._at_end.keys() | waiting.keys()
        if not blocked:
            return False
        free = set(range(self.world_size)) - blocked - self.finished
        if not all(self._has_passed(rank, blocked, inside) for rank in free):
            return False
        if self._leases.reclaim(now_s):
            return True
        together = not waiting and not free
        ends = set(self._at_end.values())
        for key in sorted(ends):
            self._announce(key, self._epochs[key], together=together)
        if together:
            self._align(now_s)
        if not ends:
            self._leases.end_one(now_s)
        return True

    def _has_passed(self, rank: int, blocked: set[int], inside: Collection[int]) -> bool:
        """Whether a rank does nothing for those that are blocked.

        It has left all the loops in which they are. Or it waits in a collective, or in `join`, and is ahead of them: it
        has left one of these loops, or has ended an epoch without them which they have yet to end.
        """
        left = [rank in self._epochs[key].left for key in (*self._at_end.values(), *self._leases.waiting.values())]
        if all(left) or not (rank in self._in_collective or rank in self._joined or rank in inside):
            return all(left)
        return any(left) or any(
            each.announced and rank in each.ended and blocked.isdisjoint(each.ended)
            for each in self._epochs.values()
            if not each.over
        )

    def _break_deadlock(self, now_s: float) -> None:
        """End what would last for ever: ranks in a collective wait for ranks that wait for them in a loop.

        Samples that the former have not begun may still let the latter go on, or one of these loops may not need them.
        Else the ranks in the loop raise an error with the reason: those in the collective are inside Horovod.
        """
        in_loops = self._leases.stuck | self._at_end
        if not in_loops:
            return
        found = self._deadlocks.look(in_loops, self.finished.union(self._joined), now_s)
        if found is None:
            return
        if self._unblock(now_s, found.inside) or self._leases.reclaim(now_s):
            self._deadlocks.look_anew()
            return
        self._deadlocks.told(found.in_loops)
        logger.error("%s", found.reason)
        self.outbox.extend((rank, Deadlock(found.reason)) for rank in sorted(found.in_loops))

    def _find_state_source(self, rank: int, message: FindStateSource) -> None:
        optimizer = self._optimizer(message.optimizer_id)
        silent = {rank} | self.lost | self._absent
        likely = [r for r in optimizer.rule.up_to_date() if r not in silent]
        # Name ranks in turn, since a source may turn out to be behind. Inactive ranks serve too, at the end of an epoch
        # for example; every third answer is a rank without fresh gradients, which may be the last one with the state.
        # Each rank begins at another source: ranks that fall behind together would all fetch from the first.
        others = sorted(set(range(self.world_size)) - silent - set(likely))
        turns, rest = divmod(self._asked[rank], _UNLIKELY)
        if others and (rest == _UNLIKELY - 1 or not likely):
            source = others[(rank + turns) % len(others)]
        else:
            source = likely[(rank + self._asked[rank] - turns) % len(likely)] if likely else -1
        self._asked[rank] += 1
        self.outbox.append((rank, StateSource(message.optimizer_id, source)))

    def _check_lost(self, now_s: float) -> None:
        if now_s < self._check_lost_at_s:
            return
        patience_s = min(self._config.absent_after_s, self._config.lost_after_s)
        self._check_lost_at_s = min(self._last_seen_s) + patience_s
        if now_s < self._check_lost_at_s:
            return
        for rank, seen_s in enumerate(self._last_seen_s):
            silent = now_s - seen_s >= self._config.absent_after_s
            if silent and rank not in self._absent and rank not in self.finished:
                self._absent.add(rank)
                self._broadcast(Presence(rank, False))
            if rank in self.lost or rank in self.finished or now_s - seen_s < self._config.lost_after_s:
                continue
            self.lost.add(rank)
            # It may be frozen and come back, so it keeps its samples; Horovod ends or resets a job with a dead rank.
            logger.error("rank %d has sent no message for %.1f s and counts as lost", rank, now_s - seen_s)

    def _end_job_if_over(self) -> None:
        # Lost ranks may come back and train on. Those that wait look themselves whether one has left (`Departures`).
        if not self._sent_bye and len(self.finished) == self.world_size:
            self._sent_bye = True
            self._broadcast(Bye())


_Handler = Callable[[JobState, int, Any, float], None]


def _on_optimizer(handler: Callable[[OptimizerState, int, Any, float], None]) -> _Handler:
    """Return the handler of a message that concerns one optimizer."""
    return lambda job, rank, message, now_s: handler(job._optimizer(message.optimizer_id), rank, message, now_s)


HANDLERS: dict[type[Message], _Handler] = {
    Hello: lambda job, rank, message, now_s: None,
    Heartbeat: lambda job, rank, message, now_s: None,
    Register: JobState._register,
    Unregister: lambda job, rank, message, now_s: job._forget(message.optimizer_id),
    OptimizerDropped: JobState._optimizer_dropped,
    Arrive: JobState._arrive,
    Late: _on_optimizer(OptimizerState.late),
    Join: _on_optimizer(lambda optimizer, rank, message, now_s: optimizer.rule.join(rank, message.version, now_s)),
    GradientSizes: _on_optimizer(lambda optimizer, rank, message, now_s: optimizer.gradients.resized(message)),
    TransmissionNote: _on_optimizer(
        lambda optimizer, rank, message, now_s: optimizer.transmissions.note(rank, optimizer.active.plan_id, message)
    ),
    HeaderNote: _on_optimizer(lambda optimizer, rank, message, now_s: optimizer.header_note(message, now_s)),
    ModeUnsupported: _on_optimizer(OptimizerState.mode_unsupported),
    LinkRate: lambda job, rank, message, now_s: job.links.note(rank, message.bytes_per_s),
    MachineNote: JobState._machine_note,
    PrepareFailed: _on_optimizer(OptimizerState.prepare_failed),
    Prepared: _on_optimizer(lambda optimizer, rank, message, now_s: optimizer.prepared(rank, message)),
    Restart: _on_optimizer(lambda optimizer, rank, message, now_s: optimizer.restart(now_s)),
    ServerUp: _on_optimizer(lambda optimizer, rank, message, now_s: optimizer.server_up(message)),
    ServerRestarted: lambda job, rank, message, now_s: job._broadcast(message),
    Drained: _on_optimizer(lambda optimizer, rank, message, now_s: optimizer.switched(message, now_s)),
    Switched: _on_optimizer(lambda optimizer, rank, message, now_s: optimizer.switched(message, now_s)),
    StepNote: JobState._step_note,
    Away: JobState._away_message,
    JoinCalled: JobState._join_called,
    ProgramCollective: JobState._program_collective,
    ProgramWait: lambda job, rank, message, now_s: job._deadlocks.note(rank, message),
    RequestBatch: JobState._request_batch,
    LeaseAsk: JobState._lease,
    LeaseReturn: JobState._lease_return,
    LoaderClosed: JobState._loader_closed,
    ConsumedRequest: lambda job, rank, message, now_s: job._leases.request_consumed(rank, message),
    Consumed: lambda job, rank, message, now_s: job._leases.consumed(rank, message),
    ShareReady: JobState._share_ready,
    Feeds: JobState._feeds,
    MemoryLimit: lambda job, rank, message, now_s: job.shares.limit(rank, message),
    MicrobatchOpen: JobState._microbatch_open,
    MicrobatchBegin: lambda job, rank, message, now_s: job.microbatches.begin(rank, message, now_s),
    MicrobatchReturn: lambda job, rank, message, now_s: job.microbatches.returned(rank, message, now_s),
    FindStateSource: lambda job, rank, message, now_s: job._find_state_source(rank, message),
    Finished: JobState._finished,
}
"""Handlers by message class: exactly the classes that `validation.check` accepts from a rank."""
