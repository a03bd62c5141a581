"""Shard 0 orders the updates: it alone runs the rule, and every decision is written down before anybody hears of it.

An order has a number; every shard carries the orders out in that sequence, chunk by chunk. Orders stay in the log until
all shards are done with them, so a shard, or the primary itself, that comes back after a death gets what it missed.
"""

from __future__ import annotations

import math
import pickle
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from scheduler.plan.plan import Plan
from scheduler.rules.server_rule import Drop, Event, Push, ServerRule, Update, pushers
from star_hvd.errors import ChannelError

__all__ = ["Links", "Primary"]

_NOTES_KEPT = 512
_MOST_MENTIONS = 16_384  # Of ranks in the notes of one message: some 20 bytes each, 1 MiB is the limit.
Order = dict[str, Any]
PushId = tuple[int, int]


@dataclass(frozen=True)
class Links:
    """How decisions leave the primary.

    Attributes:
        order: Give an order to the shard of an index.
        verdict: Tell a rank what became of its push.
        event: Tell the owner.
        journal: Write the bytes down where they survive this process.
    """

    order: Callable[[int, Order], None]
    verdict: Callable[[int, int, dict[str, Any]], None]
    event: Callable[[dict[str, Any]], None]
    journal: Callable[[bytes], None]


@dataclass
class _Memory:
    """What survives a death of the process."""

    rule: ServerRule
    plan_id: int
    seq: int = 0
    log: list[Order] = field(default_factory=list)
    fed: dict[int, tuple[int, dict[str, Any]]] = field(default_factory=dict)
    # Of pushes that the rule has: a rank can have two, where a new process took its place.
    metas: dict[PushId, dict[str, Any]] = field(default_factory=dict)
    verdicts: dict[int, tuple[int, dict[str, Any]]] = field(default_factory=dict)
    applied: dict[int, int] = field(default_factory=dict)
    absent: set[int] = field(default_factory=set)
    best_steps: int = -1
    row: list[float] | None = None
    cut: dict[str, int] | None = None
    cut_seq: int = 0


class Primary:
    """Decides for all shards of one optimizer.

    Args:
        plan: The plan in force.
        version: Version of the parameters at the begin.
        n_servers: Number of shards.
        holders: Shards that hold chunks; a push has arrived when all of these have it.
        links: Where decisions go.
        journal: What an earlier process left, None at the first start.
    """

    def __init__(
        self,
        plan: Plan,
        version: int,
        n_servers: int,
        holders: frozenset[int],
        links: Links,
        journal: bytes | None = None,
    ) -> None:
        self._links = links
        self._n_servers, self._holders = n_servers, holders
        self._memory: _Memory = (
            pickle.loads(journal) if journal else _Memory(ServerRule(plan, version=version), plan.plan_id)
        )
        self._arrived: dict[PushId, dict[int, tuple[float, float, float] | None]] = {}
        self._unfed: dict[PushId, dict[str, Any]] = {}
        self._done = dict.fromkeys(range(n_servers), 0)
        self._reported_cut = False
        self._notes: deque[dict[str, Any]] = deque(maxlen=_NOTES_KEPT)
        self._told: dict[int, int] = {}
        self._to_tell: list[tuple[int, int, dict[str, Any]]] = []
        self._to_order: list[Order] = []
        self._to_note: list[dict[str, Any]] = []
        if journal and plan.plan_id > self._memory.plan_id:
            self.set_plan(plan)

    @property
    def version(self) -> int:
        """Version of the parameters once all orders are carried out."""
        return self._memory.rule.version

    @property
    def guards(self) -> bool:
        """Whether pushes are compared with the recent updates."""
        return self._memory.rule.plan.guard != "none"

    # ---- what comes in ------------------------------------------------------------------------------------

    def push(self, rank: int, step: int, meta: dict[str, Any]) -> None:
        """A rank announces a push; `again` in it means that it has lost its connection to that shard's predecessor.

        Raises:
            ChannelError: There is no such rank or shard.
        """
        memory = self._memory
        self._check_rank(rank)
        if meta.get("again") is not None:
            self._check_shard(meta["again"])
        verdict = memory.verdicts.get(rank)
        if verdict is not None and step <= verdict[0]:
            if step == verdict[0]:
                self._repeat(rank, step, verdict[1], meta.get("again"))
            return
        if memory.fed.get(rank, (-1, {}))[0] == step:
            return
        if memory.cut is not None:
            self._settle_cut(rank, step)
        else:
            self._unfed.setdefault((rank, step), meta)
            self._feed()
        self._flush()

    def arrived(self, shard: int, rank: int, step: int, products: Sequence[float] | None) -> None:
        """A shard has all of its chunks of a push.

        Raises:
            ChannelError: There is no such rank or shard.
        """
        self._check_rank(rank)
        self._check_shard(shard)
        if step <= self._memory.verdicts.get(rank, (-1, {}))[0]:
            return
        values = (products[0], products[1], products[2]) if products else None
        self._arrived.setdefault((rank, step), {})[shard] = values
        self._feed()
        self._flush()

    def join(self, shard: int, seq: int) -> None:
        """A shard has come, or come back; it has carried out the orders up to `seq`.

        Raises:
            ChannelError: There is no such shard.
        """
        self._check_shard(shard)
        for order in self._memory.log:
            if order["seq"] > seq:
                self._links.order(shard, order)

    def done(self, shard: int, seq: int) -> None:
        """A shard has carried out, and written down, all orders up to `seq`.

        Raises:
            ChannelError: There is no such shard, or no such order: others have yet to get what is in the log.
        """
        self._check_shard(shard)
        if seq > self._memory.seq:
            raise ChannelError(f"shard {shard} is done with order {seq}; the last one is {self._memory.seq}")
        self._done[shard] = max(self._done.get(shard, 0), seq)
        everywhere = min(self._done.values())
        # No parameters tell of the cut, so a shard that is started again after it has to be told of it.
        self._memory.log = [each for each in self._memory.log if each["seq"] > everywhere or each["op"] == "cut"]
        if self._memory.cut is not None and everywhere >= self._memory.cut_seq and not self._reported_cut:
            self._reported_cut = True
            self._links.event({"event": "cut", **self._memory.cut})

    def read(self, kind: str, rank: int, request: int) -> None:
        """A rank asks for the parameters (`pull`) or for everything (`state`) of one version.

        Raises:
            ChannelError: There is no such rank.
        """
        self._check_rank(rank)
        self._order({"op": kind, "rank": rank, "request": request})
        self._flush()

    def member(self, rank: int, what: str) -> None:
        """A rank is `absent`, `present`, `lost` (absent, and nothing more will come of it), or new (`forget`)."""
        memory = self._memory
        if not 0 <= rank < memory.rule.plan.world_size or what not in ("absent", "present", "lost", "forget"):
            raise ChannelError(f"a server was told that rank {rank} is {what!r}; there is no such thing")
        if what == "lost":
            self._lose(rank)
        if what == "forget":
            memory.rule.forget(rank)
            self._forget(rank)
        elif what == "present":
            memory.absent.discard(rank)
            self._take(memory.rule.present(rank))
        else:
            memory.absent.add(rank)
            self._take(memory.rule.absent(rank))
        self._feed()
        self._flush()

    def set_plan(self, plan: Plan) -> None:
        """Go on under another plan of servers. One that the rule refuses is reported and changes nothing."""
        memory = self._memory
        if plan.plan_id < memory.plan_id or memory.cut is not None:
            return
        guarded = self.guards
        try:
            events = memory.rule.set_plan(plan)
        except ValueError as error:
            self._links.event({"event": "refused", "plan_id": plan.plan_id, "reason": str(error)})
            return
        memory.plan_id = plan.plan_id
        if guarded != self.guards:
            self._order({"op": "guard", "on": self.guards})
        self._take(events)
        self._feed()
        self._flush()

    def cut(self, plan_id: int) -> None:
        """The last update: what is in is applied, everybody else hears that the optimizer has moved."""
        memory = self._memory
        if memory.cut is not None:
            if self._reported_cut:
                self._links.event({"event": "cut", **memory.cut})
            return
        memory.plan_id = max(memory.plan_id, plan_id)
        waiting = {rank: step for rank, step in self._unfed} | {rank: step for rank, (step, _) in memory.fed.items()}
        self._take(memory.rule.drain(), tell=False)
        memory.cut = {"plan_id": plan_id, "version": memory.rule.version}
        memory.metas.clear()
        self._unfed.clear()
        for rank, step in waiting.items():
            self._settle_cut(rank, step)
        self._order({"op": "cut", "version": memory.rule.version})
        memory.cut_seq = memory.seq
        self._flush()

    def _check_rank(self, rank: int) -> None:
        size = self._memory.rule.plan.world_size
        if not 0 <= rank < size:
            raise ChannelError(f"a message is of rank {rank}; this job has ranks 0..{size - 1}")

    def _check_shard(self, shard: int) -> None:
        if not 0 <= shard < self._n_servers:
            raise ChannelError(f"a message is of shard {shard}; there are {self._n_servers}")

    # ---- decisions ----------------------------------------------------------------------------------------

    def _feed(self) -> None:
        """Give the rule what has arrived; where its next update waits for everybody, what has been announced."""
        progress = True
        while progress and self._memory.cut is None:
            progress = False
            for (rank, step), meta in list(self._unfed.items()):
                cosine: float | None = None
                whole = self._holders <= self._arrived.get((rank, step), {}).keys()
                if not whole and not self._early(rank):
                    continue
                if whole and self.guards:
                    cosine = self._cosine((rank, step))
                del self._unfed[rank, step]
                progress = True
                self._memory.fed[rank] = (step, meta)
                self._memory.metas[rank, step] = meta
                try:
                    push = Push(
                        rank=rank,
                        step=step,
                        version=int(meta["version"]),
                        weight=float(meta["weight"]),
                        count=int(meta["count"]),
                        cosine=cosine,
                    )
                    events = self._memory.rule.push(push)
                except (ValueError, KeyError, TypeError) as error:
                    self._refuse(rank, step, str(error))
                    continue
                self._take(events)

    def _early(self, rank: int) -> bool:
        """Whether announcing is enough: the next update needs everybody, so nobody can be held up by a slow link."""
        plan, rule = self._memory.rule.plan, self._memory.rule
        if plan.guard != "none":
            return False
        expected = rule.expected(rank)
        everybody = set(pushers(plan)) - self._memory.absent
        return expected is not None and everybody <= set(expected)

    def _cosine(self, push: PushId) -> float | None:
        found = [values for values in self._arrived[push].values() if values is not None]
        if not found:
            return None
        dot, mine, recent = (math.fsum(values[i] for values in found) for i in range(3))
        return dot / math.sqrt(mine * recent) if mine > 0.0 and recent > 0.0 else None

    def _take(self, events: Sequence[Event], *, tell: bool = True) -> None:
        for event in events:
            if isinstance(event, Update):
                self._update(event, tell)
            elif isinstance(event, Drop):
                self._memory.metas.pop((event.rank, event.step), None)
                self._order({"op": "drop", "rank": event.rank, "step": event.step})
                note = {"kind": "drop", "ranks": [event.rank], "reason": event.reason}
                self._to_note.append(note)
                self._release(event.release, tell, dropped={event.rank: event.reason})
            else:
                self._release(event.ranks, tell)

    def _update(self, update: Update, tell: bool) -> None:
        memory = self._memory
        # By rank: the sum is then the same whoever came first.
        chosen = sorted(update.parts, key=lambda part: (part.rank, part.step))
        metas = [memory.metas.pop((part.rank, part.step)) for part in chosen]
        for part, meta in zip(chosen, metas, strict=True):
            memory.applied[part.rank] = part.step
            self._arrived.pop((part.rank, part.step), None)
            if meta.get("row") is not None and int(meta["own_steps"]) > memory.best_steps:
                memory.best_steps, memory.row = int(meta["own_steps"]), list(meta["row"])
        weights = [float(meta["weight"]) for meta in metas]
        losses = [(w, float(m["loss"])) for w, m in zip(weights, metas, strict=True) if m.get("loss") is not None]
        total = math.fsum(w for w, _ in losses)
        note = {
            "kind": "update",
            "version": update.number + 1,
            "ranks": [part.rank for part in chosen],
            "staleness": [part.staleness for part in chosen],
            "gradients": update.gradients,
            "damped": [part.damped for part in chosen],
            "loss": math.fsum(w * loss for w, loss in losses) / total if total > 0.0 else None,
        }
        self._notes.append(note)
        self._to_note.append(note)
        send = [[rank, memory.fed[rank][0]] for rank in update.release if rank in memory.fed] if tell else []
        self._order(
            {
                "op": "update",
                "version": update.number,
                "parts": [[part.rank, part.step, part.factor] for part in chosen],
                "row": memory.row,
                "send": send,
            }
        )
        self._release(update.release, tell, sent=True)

    def _release(
        self, ranks: Sequence[int], tell: bool, dropped: dict[int, str] | None = None, sent: bool = False
    ) -> None:
        memory = self._memory
        if not tell:
            return
        released = [(rank, memory.fed.pop(rank)[0]) for rank in ranks if rank in memory.fed]
        if released and not sent:
            self._order({"op": "send", "to": [list(each) for each in released]})
        for rank, step in released:
            reason = (dropped or {}).get(rank)
            self._tell(rank, step, "params" if reason is None else "dropped", reason or "")

    def _tell(self, rank: int, step: int, kind: str, reason: str = "", **more: Any) -> None:
        memory = self._memory
        since = self._told.get(rank, 0)
        verdict = {
            "kind": kind,
            "version": memory.rule.version,
            "plan_id": memory.plan_id,
            "applied": memory.applied.get(rank, -1) >= step,
            "reason": reason,
            "notes": _newest([note for note in self._notes if note["version"] > since]),
            **more,
        }
        self._told[rank] = memory.rule.version
        memory.verdicts[rank] = (step, verdict)
        self._arrived.pop((rank, step), None)
        self._to_tell.append((rank, step, verdict))

    def _settle_cut(self, rank: int, step: int) -> None:
        assert self._memory.cut is not None
        self._memory.fed.pop(rank, None)
        self._tell(rank, step, "moved", version=self._memory.cut["version"], plan_id=self._memory.cut["plan_id"])

    def _refuse(self, rank: int, step: int, reason: str) -> None:
        self._memory.fed.pop(rank, None)
        self._memory.metas.pop((rank, step), None)
        self._order({"op": "drop", "rank": rank, "step": step})
        self._tell(rank, step, "error", reason)

    def _repeat(self, rank: int, step: int, verdict: dict[str, Any], shard: int | None) -> None:
        """Tell again, and have the shard that lost it send its chunks again."""
        if verdict["kind"] in ("params", "dropped") and shard is not None:
            self._order({"op": "send", "to": [[rank, step]], "only": shard})
        self._to_tell.append((rank, step, verdict))
        self._flush()

    def _lose(self, rank: int) -> None:
        """What a dead rank has announced but not sent is left out, wherever it is missing."""
        for each, step in list(self._unfed):
            if each == rank:
                del self._unfed[each, step]
        steps = {self._memory.applied.get(rank, -1), self._memory.fed.get(rank, (-1, {}))[0]}
        for step in sorted(steps - {-1}):
            self._order({"op": "skip", "rank": rank, "step": step})

    def _forget(self, rank: int) -> None:
        memory = self._memory
        memory.verdicts.pop(rank, None)
        memory.applied.pop(rank, None)
        self._told.pop(rank, None)
        for push in [push for push in self._unfed if push[0] == rank]:
            del self._unfed[push]
        for push in [push for push in self._arrived if push[0] == rank]:
            del self._arrived[push]
        self._order({"op": "forget", "rank": rank})

    # ---- what goes out ------------------------------------------------------------------------------------

    def _order(self, order: Order) -> None:
        self._memory.seq += 1
        order["seq"] = self._memory.seq
        self._memory.log.append(order)
        self._to_order.append(order)

    def _flush(self) -> None:
        """Write down what was decided, then say it."""
        orders, verdicts, notes = self._to_order, self._to_tell, self._to_note
        if not (orders or verdicts or notes):
            return
        self._to_order, self._to_tell, self._to_note = [], [], []
        self._links.journal(pickle.dumps(self._memory))
        for order in orders:
            for shard in range(self._n_servers):
                self._links.order(shard, order)
        for rank, step, verdict in verdicts:
            self._links.verdict(rank, step, verdict)
        for note in notes:
            self._links.event({"event": note["kind"], **{k: v for k, v in note.items() if k != "kind"}})


def _newest(notes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As many of the newest notes as a message holds, with a mention of every rank in the largest jobs."""
    mentions, first = 0, len(notes)
    while first > 0 and mentions + len(notes[first - 1]["ranks"]) <= _MOST_MENTIONS:
        first -= 1
        mentions += len(notes[first]["ranks"])
    return notes[first:]
