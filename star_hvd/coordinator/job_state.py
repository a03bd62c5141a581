"""What the coordinator knows about the job: ranks, optimizers, work queues. Pure: no sockets, no clock, no threads."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

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
    Unregister,
)
from star_hvd.channel.messages.leases import LeaseAsk, LeaseReturn
from star_hvd.channel.messages.shares import ShareReady
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
from star_hvd.config import Config
from star_hvd.coordinator.lease_desk import LeaseDesk
from star_hvd.coordinator.links import LinkSurvey
from star_hvd.coordinator.optimizer_state import OptimizerState
from star_hvd.coordinator.set_ledger import SetLedger
from star_hvd.coordinator.share_desk import ShareControl
from star_hvd.coordinator.validation import check
from star_hvd.errors import ChannelError

__all__ = ["ALL", "JobState"]

logger = logging.getLogger("star_hvd")

ALL = -1  # Destination: every rank.
_TIDY_S = 5.0  # Between two looks for process sets that nobody needs.
_UNLIKELY = 3  # Of so many answers to who has the state, one names a rank that is not known to have it.
_PARENT_AWAY_S = 0.5  # Collectives of the user's are shorter, as a rule.
_MOST_AT_ONCE = 4096  # Optimizers, and epochs of loaders, that are kept.
_GRANTS_KEPT = 64  # Per rank: more than it has requests under way.
_HURRY_S = 1.0  # After the last rank came back; collectives of the user's come in swarms.


@dataclass(slots=True)
class _Epoch:
    queue: WorkQueue | None = None  # None where samples are leased.
    ended: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)  # Those of them that left their loop before its end.
    announced: bool = False


class JobState:
    """Takes the ranks' messages and leaves its answers in `outbox`.

    Args:
        world_size: Number of ranks.
        config: Settings.
        now_s: The present, on the clock used for all later calls.
        hosts: Address of every rank's host; all on one where empty.
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
        self.engines: dict[int, OptimizerState] = {}
        self.finished: set[int] = set()
        self.lost: set[int] = set()
        self._config = config
        self._hosts = tuple(hosts)
        self._ranker = ranker
        self._epochs: dict[tuple[int, int], _Epoch] = {}
        self._leases = LeaseDesk(world_size, lambda to, message: self.outbox.append((to, message)))
        self.shares = ShareControl(world_size, self._broadcast)
        self._leases.totals = self.shares.desk.opens
        self._granted: list[dict[int, Grant]] = [{} for _ in range(world_size)]
        self._last_seen_s = [now_s] * world_size
        self._said_bye = False
        self._asked = [0] * world_size
        self._closed: set[int] = set()
        self._away: dict[int, float] = {}  # Since when.
        self._waited_for: set[int] = set()  # Parents of a fan-in tree that are away and were said to be absent.
        self._closing: set[int] = set()  # Ranks where an optimizer is being ended.
        self._absent: set[int] = set()
        self._machines = [MachineStats()] * world_size
        self.links = LinkSurvey(world_size, hosts)
        self._sets = SetLedger(world_size)
        self._tidy_at_s = now_s
        self._hurrying_until_s: float | None = None
        self._look_at_s = now_s  # Before that nobody can have been silent for long.

    def handle(self, rank: int, message: Message, now_s: float) -> None:
        """Act on one message of `rank`.

        Raises:
            ChannelError: The message makes no sense in this job; nothing has changed then.
        """
        if not 0 <= rank < self.world_size:
            raise ChannelError(f"a message came from rank {rank}; this job has ranks 0..{self.world_size - 1}")
        check(message, self.world_size, self._step_of)
        self._check_room(message)
        self._last_seen_s[rank] = now_s
        if getattr(message, "optimizer_id", -1) in self._closed:
            return  # What other ranks said of an optimizer while its end was on its way.
        if rank in self.lost:
            self.lost.discard(rank)
            logger.warning("rank %d is heard again", rank)
        if rank in self._absent:
            self._absent.discard(rank)
            self._broadcast(Presence(rank, True))
        match message:
            case Hello() | Heartbeat():
                pass
            case Register():
                plan = Plan.from_dict(message.plan) if message.plan else None
                engine = self._engine(message.optimizer_id)
                engine.gradient_bytes = message.gradient_bytes
                engine.exact = message.exact
                engine.register(rank, Plan.from_dict(message.initial), plan, now_s)
            case Unregister():
                self._forget(message.optimizer_id)
            case OptimizerDropped():
                if self._engine(message.optimizer_id).drop(rank, message):
                    self._broadcast(OptimizerOver(message.optimizer_id))
                    self._forget(message.optimizer_id)
            case Arrive():
                engine = self._engine(message.optimizer_id)
                engine.arrive(rank, message, now_s)
                if engine is self._fed:
                    self.shares.note(rank, message.step, message.compute_s)
            case Late():
                self._engine(message.optimizer_id).late(rank, message, now_s)
            case Join():
                self._engine(message.optimizer_id).rule.join(rank, message.version, now_s)
            case HeaderNote():
                self._engine(message.optimizer_id).round_note(message)
            case ModeUnsupported():
                self._engine(message.optimizer_id).refuse(rank, message, now_s)
            case LinkRate():
                self.links.note(rank, message.bytes_per_s)
            case MachineNote():
                self._machines[rank] = MachineStats(**{n: getattr(message, n) for n in MachineStats.names()})
            case PrepareFailed():
                self._engine(message.optimizer_id).cannot(rank, message, now_s)
            case Prepared():
                self._engine(message.optimizer_id).ready(rank, message)
            case Restart():
                self._engine(message.optimizer_id).restart(now_s)
            case ServerUp():
                self._engine(message.optimizer_id).server_up(message)
            case ServerRestarted():
                self._broadcast(message)
            case Drained() | Switched():
                self._engine(message.optimizer_id).moved(message, now_s)
            case StepNote():
                self._engine(message.optimizer_id).step_note(rank, message)
            case Away():
                (self._closing.add if message.away and message.reason == CLOSE else self._closing.discard)(rank)
                self._set_away(rank, message.away, now_s, out_of_data=message.out_of_data)
            case RequestBatch():
                self._take(rank, message, now_s)
            case LeaseAsk():
                self._lease(rank, message, now_s)
            case LeaseReturn():
                self._leases.give_back(rank, message, now_s)
                if message.leaves:
                    self._over((message.loader, message.epoch), rank, early=message.early, now_s=now_s)
            case ShareReady():
                self._share_ready(rank, message, now_s)
            case FindStateSource():
                self._source(rank, message)
            case Finished():
                self.finished.add(rank)
                self._set_away(rank, True, now_s)
                self._leases.leave(rank, now_s)
                for key, epoch in self._epochs.items():  # It may have left its loop in the middle of one.
                    self._maybe_end(key, epoch, now_s)
                self._maybe_bye()

    def tick(self, now_s: float) -> float:
        """Act on what is due; the time at which to be called again at the latest."""
        self._look_for_lost(now_s)
        if self._hurrying_until_s is not None and not self._away and now_s >= self._hurrying_until_s:
            self._hurrying_until_s = None
            self._broadcast(ReportImmediately(False))
        wake_s = min(now_s + self._config.heartbeat_s, self._look_for_parents(now_s))
        due = self.links.due(now_s, wanted=lambda: any(engine.suspects_links for engine in self.engines.values()))
        if due is not None:
            self.outbox.append(due)
        if now_s >= self._tidy_at_s:
            self._tidy_at_s = now_s + _TIDY_S
            self.outbox.extend((ALL, message) for message in self._sets.tidy(now_s))
        fed = self._fed
        if fed is not None and self.shares.desk.batch:
            fed.shares = self.shares
            self.shares.tick(fed.active, now_s)
        for engine in self.engines.values():
            if engine.decides(now_s):
                silent_s = [0.0 if r in self.finished else s for r, s in enumerate(self.silent_for_s(now_s))]
                engine.links.bytes_per_s, engine.silent_s = self.links.bytes_per_s, silent_s
                engine.machines = self._machines
            engine.closing = bool(self._closing or engine.dropped)
            wake_s = min(wake_s, engine.tick(now_s))
        return wake_s

    def stood_still(self, stood_s: float, now_s: float) -> None:
        """The coordinator's own process was stopped for so long: it says nothing of the ranks that it did not hear."""
        self._last_seen_s = [min(now_s, seen_s + stood_s) for seen_s in self._last_seen_s]

    def silent_for_s(self, now_s: float) -> list[float]:
        """Seconds since each rank was last heard."""
        return [now_s - seen for seen in self._last_seen_s]

    def _check_room(self, message: Message) -> None:
        """Refuse what would be kept without end: the ranks choose the numbers of optimizers and loaders."""
        number = getattr(message, "optimizer_id", None)
        if number is not None and number not in self.engines and len(self.engines) >= _MOST_AT_ONCE:
            raise ChannelError(f"a message is of optimizer {number}; this job has {_MOST_AT_ONCE} of them already")
        if not isinstance(message, (RequestBatch, LeaseAsk)) or len(self._epochs) < _MOST_AT_ONCE:
            return
        if (message.loader, message.epoch) not in self._epochs:
            raise ChannelError(f"a batch of loader {message.loader} is wanted; {_MOST_AT_ONCE} epochs are open")

    # ---- inside ---------------------------------------------------------------------------------------------

    def _forget(self, optimizer_id: int) -> None:
        """An optimizer has ended on all ranks."""
        self.engines.pop(optimizer_id, None)
        self._sets.ended(optimizer_id)
        self._closed.add(optimizer_id)

    def _broadcast(self, message: Message) -> None:
        self.outbox.append((ALL, message))

    def _engine(self, optimizer_id: int) -> OptimizerState:
        if optimizer_id not in self.engines:
            self.engines[optimizer_id] = OptimizerState(
                optimizer_id, self.world_size, self._config, self._broadcast, self._hosts, self._ranker, self._sets
            )
            self.engines[optimizer_id].links.bytes_per_s = self.links.bytes_per_s
        return self.engines[optimizer_id]

    def _step_of(self, optimizer_id: int) -> int:
        """The step an optimizer is at, 0 for one not heard of yet."""
        return self.engines[optimizer_id].rule.step if optimizer_id in self.engines else 0

    def _set_away(self, rank: int, away: bool, now_s: float, *, out_of_data: bool = True) -> None:
        if away:
            self._away.setdefault(rank, now_s)
        else:
            self._away.pop(rank, None)
            self._say_back(rank)
        if away and self._hurrying_until_s is None:
            self._broadcast(ReportImmediately(True))
        if away or self._hurrying_until_s is not None:  # A rank may say that it is back after an epoch's end said so.
            self._hurrying_until_s = now_s + _HURRY_S
        for engine in self.engines.values():
            if away:
                engine.rule.leave(rank, out_of_data=out_of_data)
            elif rank not in engine.dropped:
                engine.rule.back(rank, now_s)

    def _look_for_parents(self, now_s: float) -> float:
        """A parent that is away pushes nothing, and so nothing of its children's: they go on without it, or it might
        wait, where all ranks meet, for a child that waits for it. When to look again."""
        again_s = now_s + _TIDY_S
        if not self._away:
            return again_s
        served = [engine.active for engine in self.engines.values() if engine.active.mode == "ps"]
        parents = {rank for plan in served for rank in plan.relays}
        for rank in parents & self._away.keys() - self._waited_for:
            due_s = self._away[rank] + _PARENT_AWAY_S
            if now_s >= due_s:
                self._waited_for.add(rank)
                self._broadcast(Presence(rank, False))
            else:
                again_s = min(again_s, due_s)
        return again_s

    def _say_back(self, rank: int) -> None:
        if rank in self._waited_for:
            self._waited_for.discard(rank)
            if rank not in self._absent:
                self._broadcast(Presence(rank, True))

    def _take(self, rank: int, message: RequestBatch, now_s: float) -> None:
        given = self._granted[rank]
        if 0 < message.number <= max(given, default=0):
            if message.number in given:  # Asked again: what was handed out is neither lost nor handed out twice.
                self.outbox.append((rank, given[message.number]))
            return
        key = (message.loader, message.epoch)
        if key not in self._epochs:
            self._epochs[key] = _Epoch(WorkQueue(message.samples, message.batch, drop_last=message.drop_last))
            self._forget_epochs(message.loader, message.epoch - 1)
        epoch = self._epochs[key]
        if epoch.queue is None:
            raise ChannelError(f"a rank takes single batches of loader {message.loader}, whose samples are leased")
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
        for old in [k for k, each in self._epochs.items() if k[0] == loader and k[1] < before and each.announced]:
            del self._epochs[old]

    def _lease(self, rank: int, message: LeaseAsk, now_s: float) -> None:
        key = (message.loader, message.epoch)
        self._epochs.setdefault(key, _Epoch())
        self._forget_epochs(message.loader, message.epoch - 1)
        for engine in self.engines.values():
            engine.has_queue = engine.has_queue or message.samples > 0
        self._leases.ask(rank, message, self._own_pace_s(rank), now_s)

    @property
    def _fed(self) -> OptimizerState | None:
        """The optimizer whose steps the batches of `shard` are counted by: the first one."""
        return next(iter(self.engines.values()), None)

    def _share_ready(self, rank: int, message: ShareReady, now_s: float) -> None:
        engine = self._fed
        change = self.shares.ready(rank, message, 0 if engine is None else engine.rule.step + 1)
        if change is None or engine is None:
            return
        self._leases.entitle(self.shares.desk.loader, change.epoch, change.totals, now_s)
        logger.info("step %d: %s", change.step, self.shares.sentence() or "all ranks get equal batches")
        engine.shares_changed(change.step, change.shares, self.shares.sentence())

    def _over(self, key: tuple[int, int], rank: int, *, early: bool, now_s: float) -> None:
        """A rank has ended an epoch, or left it."""
        epoch = self._epochs.get(key)
        if epoch is not None:
            epoch.ended.add(rank)
            if early:
                epoch.left.add(rank)
            self._maybe_end(key, epoch, now_s)

    def _own_pace_s(self, rank: int) -> float | None:
        """Recent time per batch of a rank, from the first optimizer it feeds."""
        for engine in self.engines.values():
            recent = [report.compute_s for report in engine.history[rank]][-5:]
            if recent and min(recent) > 0.0:
                return sorted(recent)[len(recent) // 2]
        return None

    def _maybe_end(self, key: tuple[int, int], epoch: _Epoch, now_s: float) -> None:
        if not epoch.announced and epoch.ended | self.finished == set(range(self.world_size)):
            epoch.announced = True
            if epoch.left:  # Nobody meets: whoever left is anywhere, in the next epoch for example.
                self.outbox.extend((rank, EpochEnd(*key, together=False)) for rank in epoch.ended - epoch.left)
                return
            self._broadcast(EpochEnd(*key))
            # They leave one after another; whoever leaves last must not lose its first gradient for it.
            self._away = dict.fromkeys(self.finished, now_s)
            for rank in self._waited_for - self.finished:
                self._say_back(rank)
            for engine in self.engines.values():
                engine.rule.align(now_s)
                for rank in self.finished.union(engine.dropped):
                    engine.rule.leave(rank)

    def _source(self, rank: int, message: FindStateSource) -> None:
        engine = self._engine(message.optimizer_id)
        silent = {rank} | self.lost | self._absent
        likely = [r for r in engine.rule.up_to_date() if r not in silent]
        # In turns: one may be behind after all. Whoever is away, at the end of an epoch for example, serves too, and
        # now and then it is somebody who takes part no more, and may have been the last to have the state.
        others = sorted(set(range(self.world_size)) - silent - set(likely))
        turns, rest = divmod(self._asked[rank], _UNLIKELY)
        if others and (rest == _UNLIKELY - 1 or not likely):
            source = others[turns % len(others)]
        else:
            source = likely[(self._asked[rank] - turns) % len(likely)] if likely else -1
        self._asked[rank] += 1
        self.outbox.append((rank, StateSource(message.optimizer_id, source)))

    def _look_for_lost(self, now_s: float) -> None:
        if now_s < self._look_at_s:
            return
        patience_s = min(self._config.absent_after_s, self._config.lost_after_s)
        self._look_at_s = min(self._last_seen_s) + patience_s
        if now_s < self._look_at_s:
            return
        for rank, seen_s in enumerate(self._last_seen_s):
            silent = now_s - seen_s >= self._config.absent_after_s
            if silent and rank not in self._absent and rank not in self.finished:
                self._absent.add(rank)
                self._broadcast(Presence(rank, False))
            if rank in self.lost or rank in self.finished or now_s - seen_s < self._config.lost_after_s:
                continue
            self.lost.add(rank)
            # It may be frozen and come back, so its samples stay its own; a dead one ends the job, or resets it.
            logger.error("rank %d has given no sign of life for %.1f s", rank, now_s - seen_s)
            self._maybe_bye()

    def _maybe_bye(self) -> None:
        # Where nobody has finished nobody waits for the end, and who is lost may come back.
        if not self._said_bye and self.finished and self.finished | self.lost == set(range(self.world_size)):
            self._said_bye = True
            self._broadcast(Bye(sorted(self.lost - self.finished)))
