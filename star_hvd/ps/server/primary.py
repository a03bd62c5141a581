"""Shard 0 orders the updates: it alone runs the rule, and writes every decision to the journal before sending it.

Orders are numbered, and every shard executes them in that sequence, chunk by chunk. They stay in the log until all
shards have executed them, so a restarted shard or primary gets the orders it missed.
"""

from __future__ import annotations

import math
import pickle
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from scheduler.plan.plan import Plan
from scheduler.rules.grace import UpdateGrace
from scheduler.rules.server_rule import Drop, Event, Push, ServerRule, Update, pushers
from star_hvd.errors import ChannelError

__all__ = ["Links", "Primary"]

_NOTES_KEPT = 512
_TELLER = 0  # The rank that records the updates of all ranks, for reports; others need only the notes on their own.
_MOST_MENTIONS = 16_384  # Ranks named in the notes of one message: about 20 bytes each, of at most 1 MiB.
Order = dict[str, Any]
PushId = tuple[int, int]


@dataclass(frozen=True)
class Links:
    """Outputs of the primary.

    Attributes:
        order: Sends an order to the shard of an index.
        push_result: Sends a rank the result of its push of a step.
        event: Sends an event to the owner.
        journal: Writes the journal to memory that survives this process.
    """

    order: Callable[[int, Order], None]
    push_result: Callable[[int, int, dict[str, Any]], None]
    event: Callable[[dict[str, Any]], None]
    journal: Callable[[bytes], None]


@dataclass
class _Memory:
    """The state that survives the death of the process, through the journal."""

    rule: ServerRule
    plan_id: int
    seq: int = 0
    log: list[Order] = field(default_factory=list)
    fed: dict[int, tuple[int, dict[str, Any]]] = field(default_factory=dict)
    # Announcements of the pushes that the rule holds.
    metas: dict[PushId, dict[str, Any]] = field(default_factory=dict)
    push_results: dict[int, tuple[int, dict[str, Any]]] = field(default_factory=dict)
    applied: dict[int, int] = field(default_factory=dict)
    dropped: dict[int, tuple[int, str]] = field(default_factory=dict)  # Step and reason, of ranks to be released.
    inactive: set[int] = field(default_factory=set)  # By their own report: they push nothing for now.
    silent: set[int] = field(default_factory=set)  # By the owner's report: the coordinator does not hear them.
    # Steps and hyperparameters of each rank's last push in an update; as bytes, since they are pickled with every push.
    rows: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    row: list[float] | None = None
    cut: dict[str, int] | None = None
    cut_seq: int = 0


class Primary:
    """Decides for all shards of one optimizer.

    Args:
        plan: The active plan.
        version: Version of the parameters at the start.
        n_servers: Number of shards.
        holders: Shards that hold chunks; a push has arrived when all of these have it.
        links: Outputs.
        journal: The previous process's journal, None at the first start.
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
        self._grace = UpdateGrace(self._memory.rule, time.monotonic())
        self._arrived: dict[PushId, dict[int, tuple[float, float, float] | None]] = {}
        self._unfed: dict[PushId, dict[str, Any]] = {}
        self._done = dict.fromkeys(range(n_servers), 0)
        self._reported_cut = False
        self._notes: deque[dict[str, Any]] = deque(maxlen=_NOTES_KEPT)
        self._noted: dict[int, int] = {}
        self._told: dict[str, Any] | None = None  # The latest result of `_TELLER`, with notes on all ranks.
        self._to_answer: list[tuple[int, int, dict[str, Any]]] = []
        self._held: list[tuple[int, int, dict[str, Any]]] = []  # `moved` results, until the last update is mirrored.
        self._to_order: list[Order] = []
        self._to_note: list[dict[str, Any]] = []
        self._newer_plan = plan if journal and plan.plan_id > self._memory.plan_id else None
        self._grace.look(time.monotonic())  # The journal's rule may hold an update.

    def adopt_newer_plan(self) -> None:
        """After a restart, take up the plan that the owner has been given since the journal was written.

        Call it once this process's own shard has joined: what is ordered for the plan comes behind older orders, which
        that shard would otherwise take for executed.
        """
        plan, self._newer_plan = self._newer_plan, None
        if plan is not None:
            self.set_plan(plan)

    @property
    def version(self) -> int:
        """Version of the parameters once all orders are executed."""
        return self._memory.rule.version

    @property
    def known_pushes(self) -> set[PushId]:
        """The pushes of which parts have arrived at any shard and that have no result yet, as rank and step."""
        return set(self._arrived)

    @property
    def _absent(self) -> set[int]:
        """The ranks that no update waits for."""
        return self._memory.inactive | self._memory.silent

    @property
    def guards(self) -> bool:
        """Whether pushes are compared with the recent updates."""
        return self._memory.rule.plan.guard != "none"

    @property
    def next_s(self) -> float:
        """When to call `tick`, by `time.monotonic`; infinite if there is nothing to do."""
        return math.inf if self._grace.due_s is None else self._grace.due_s

    def tick(self) -> None:
        """Close an update whose grace is over."""
        events = self._grace.expire(time.monotonic())
        if events:
            self._take(events)
            self._feed()
            self._flush()

    # ---- what comes in ------------------------------------------------------------------------------------

    def push(self, rank: int, step: int, meta: dict[str, Any]) -> None:
        """Handle a rank's announcement of a push; `again` names the shard whose restart made the rank send it again.

        Raises:
            ChannelError: There is no such rank or shard.
        """
        memory = self._memory
        self._check_rank(rank)
        if meta.get("again") is not None:
            self._check_shard(meta["again"])
        push_result = memory.push_results.get(rank)
        if push_result is not None and step <= push_result[0]:
            if step == push_result[0]:
                self._repeat(rank, step, push_result[1], meta.get("again"))
            return
        if memory.fed.get(rank, (-1, {}))[0] == step:
            return
        if memory.cut is not None:
            self._answer_cut(rank, step)
        else:
            self._unfed.setdefault((rank, step), meta)
            # Forget pushes that the rank abandoned for this one: their parts arrived, but never an announcement.
            for void in [each for each in self._arrived if each[0] == rank and each[1] < step]:
                if void not in self._unfed and void not in memory.metas:
                    del self._arrived[void]
            self._feed()
        self._flush()

    def arrived(self, shard: int, rank: int, step: int, products: Sequence[float] | None) -> None:
        """Note that a shard has all of its chunks of a push.

        Raises:
            ChannelError: There is no such rank or shard.
        """
        self._check_rank(rank)
        self._check_shard(shard)
        if step <= self._memory.push_results.get(rank, (-1, {}))[0]:
            return
        values = (products[0], products[1], products[2]) if products else None
        self._arrived.setdefault((rank, step), {})[shard] = values
        self._feed()
        self._flush()

    def join(self, shard: int, seq: int) -> None:
        """Send a shard that connects, for the first time or after a restart, the orders it has not received.

        Args:
            shard: The shard.
            seq: Number of the last order it has received.

        Raises:
            ChannelError: There is no such shard.
        """
        self._check_shard(shard)
        for order in self._memory.log:
            if order["seq"] > seq:
                self._links.order(shard, order)

    def done(self, shard: int, seq: int) -> None:
        """Note that a shard has executed and mirrored all orders up to `seq`.

        Raises:
            ChannelError: There is no such shard or order; trimming the log by it would lose orders.
        """
        self._check_shard(shard)
        if seq > self._memory.seq:
            raise ChannelError(f"shard {shard} reports order {seq} as done; expected at most {self._memory.seq}")
        self._done[shard] = max(self._done.get(shard, 0), seq)
        everywhere = min(self._done.values())
        # A cut leaves no trace in the parameters, so a shard that restarts after it must get the order again.
        self._memory.log = [each for each in self._memory.log if each["seq"] > everywhere or each["op"] == "cut"]
        if self._memory.cut is not None and everywhere >= self._memory.cut_seq and not self._reported_cut:
            self._reported_cut = True
            held, self._held = self._held, []
            for result in held:
                self._links.push_result(*result)
            self._links.event({"event": "cut", **self._memory.cut})

    def read(self, kind: str, rank: int, request: int, *, known: int | None = None, empty: bool = False) -> None:
        """Order the shards to send a rank the parameters or the complete state, all of one version.

        Args:
            kind: `pull` for the parameters, `state` for the complete state.
            rank: The rank.
            request: The rank's number of this request.
            known: With `pull`, the version the rank already has, which is not sent again; None if it has none.
            empty: With `pull`, whether the rank wants only an answer, without parameters.

        Raises:
            ChannelError: There is no such rank.
        """
        self._check_rank(rank)
        what = {"known": known, "empty": empty} if kind == "pull" else {}
        self._order({"op": kind, "rank": rank, "request": request, **what})
        self._flush()

    def member(self, rank: int, what: str, *, own: bool = False) -> None:
        """Note that a rank is `absent` or `present`.

        No update waits for a rank that is absent by its own report or by the owner's. The two arrive on different
        connections: the owner's "present" can arrive after the rank has reported that it pushes nothing for now.
        Waiting for such a rank would not end if it waits for the others, for example at the end of an epoch.

        Args:
            rank: The rank.
            what: One of these states.
            own: Whether the rank itself reports it.

        Raises:
            ChannelError: There is no such rank or state.
        """
        memory = self._memory
        self._check_rank(rank)
        if what not in ("absent", "present"):
            raise ChannelError(f"the state of rank {rank} is {what!r}; expected absent or present")
        said = memory.inactive if own else memory.silent
        (said.discard if what == "present" else said.add)(rank)
        self._take((memory.rule.absent if rank in self._absent else memory.rule.present)(rank))
        self._feed()
        self._flush()

    def set_plan(self, plan: Plan) -> None:
        """Continue under another plan with servers. A plan that the rule rejects is reported and changes nothing."""
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
        """Make the last update from the complete pushes; all other pushes get the result `moved`."""
        memory = self._memory
        if memory.cut is not None:
            if self._reported_cut:
                self._links.event({"event": "cut", **memory.cut})
            return
        memory.plan_id = max(memory.plan_id, plan_id)
        waiting = {rank: step for rank, step in self._unfed} | {rank: step for rank, (step, _) in memory.fed.items()}
        self._take(memory.rule.drain(), answer=False)
        memory.cut = {"plan_id": plan_id, "version": memory.rule.version}
        memory.metas.clear()
        self._unfed.clear()
        for rank, step in waiting.items():
            self._answer_cut(rank, step)
        self._order({"op": "cut", "version": memory.rule.version})
        memory.cut_seq = memory.seq
        self._flush()

    def _check_rank(self, rank: int) -> None:
        size = self._memory.rule.plan.world_size
        if not 0 <= rank < size:
            raise ChannelError(f"a message is of rank {rank}; expected 0..{size - 1}")

    def _check_shard(self, shard: int) -> None:
        if not 0 <= shard < self._n_servers:
            raise ChannelError(f"a message is of shard {shard}; expected 0..{self._n_servers - 1}")

    # ---- decisions ----------------------------------------------------------------------------------------

    def _feed(self) -> None:
        """Pass the rule all pushes that have arrived, and announced ones if its next update needs all ranks."""
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
        """Return whether a push of `rank` may be ordered once announced, as the next update needs all ranks anyway."""
        plan, rule = self._memory.rule.plan, self._memory.rule
        if plan.guard != "none":
            return False
        expected = rule.expected(rank)
        present = set(pushers(plan)) - self._absent
        return expected is not None and present <= set(expected)

    def _cosine(self, push: PushId) -> float | None:
        found = [values for values in self._arrived[push].values() if values is not None]
        if not found:
            return None
        # Not `fsum`: it raises on infinities of both signs, which a diverging job produces.
        dot, mine, recent = (sum(values[i] for values in found) for i in range(3))
        cosine = dot / (math.sqrt(mine) * math.sqrt(recent)) if mine > 0.0 and recent > 0.0 else math.nan
        return cosine if math.isfinite(cosine) else None

    def _take(self, events: Sequence[Event], *, answer: bool = True) -> None:
        for event in events:
            if isinstance(event, Update):
                self._update(event, answer)
            elif isinstance(event, Drop):
                self._memory.metas.pop((event.rank, event.step), None)
                self._order({"op": "drop", "rank": event.rank, "step": event.step})
                note = {"kind": "drop", "ranks": [event.rank], "reason": event.reason}
                self._to_note.append(note)
                self._memory.dropped[event.rank] = event.step, event.reason
                self._release(event.release, answer)
            else:
                self._release(event.ranks, answer)

    def _update(self, update: Update, answer: bool) -> None:
        memory = self._memory
        # By rank, so that the sum does not depend on the order of arrival.
        chosen = sorted(update.parts, key=lambda part: (part.rank, part.step))
        metas = [memory.metas.pop((part.rank, part.step)) for part in chosen]
        for part, meta in zip(chosen, metas, strict=True):
            memory.applied[part.rank] = part.step
            self._arrived.pop((part.rank, part.step), None)
            if meta.get("row") is not None:
                memory.rows[part.rank] = int(meta["own_steps"]), array("d", meta["row"]).tobytes()
        self._choose_row({part.rank for part in chosen})
        weights = [float(meta["weight"]) for meta in metas]
        losses = [(w, float(m["loss"])) for w, m in zip(weights, metas, strict=True) if m.get("loss") is not None]
        total = sum(w for w, _ in losses)
        note = {
            "kind": "update",
            "version": update.number + 1,
            "ranks": [part.rank for part in chosen],
            "staleness": [part.staleness for part in chosen],
            "gradients": update.gradients,
            "damped": [part.damped for part in chosen],
            "loss": sum(w * loss for w, loss in losses) / total if total > 0.0 else None,
        }
        self._notes.append(note)
        self._to_note.append(note)
        send = [[rank, memory.fed[rank][0]] for rank in update.release if rank in memory.fed] if answer else []
        self._order(
            {
                "op": "update",
                "version": update.number,
                "parts": [[part.rank, part.step, part.factor] for part in chosen],
                "lr_factor": update.lr_factor,
                "row": memory.row,
                "send": send,
            }
        )
        self._release(update.release, answer, sent=True)

    def _choose_row(self, in_update: set[int]) -> None:
        """Take the hyperparameters of the rank with the most steps.

        A rank that is absent counts only in its own updates: its schedule may have ended, and the others' has not.
        """
        memory = self._memory
        found = [each for rank, each in memory.rows.items() if rank in in_update or rank not in self._absent]
        if found:
            memory.row = array("d", max(found, key=lambda each: each[0])[1]).tolist()

    def _release(self, ranks: Sequence[int], answer: bool, sent: bool = False) -> None:
        memory = self._memory
        if not answer:
            return
        released = [(rank, memory.fed.pop(rank)[0]) for rank in ranks if rank in memory.fed]
        if released and not sent:
            self._order({"op": "send", "to": [list(each) for each in released]})
        for rank, step in released:
            dropped_step, reason = memory.dropped.pop(rank, (-1, ""))
            dropped = dropped_step == step  # Otherwise the rank has abandoned that push for this one.
            self._answer(rank, step, "dropped" if dropped else "params", reason if dropped else "")

    def _answer(self, rank: int, step: int, kind: str, reason: str = "", **more: Any) -> None:
        memory = self._memory
        notes = self._notes_since(self._noted.get(rank, 0))
        push_result = {
            "kind": kind,
            "version": memory.rule.version,
            "plan_id": memory.plan_id,
            "applied": memory.applied.get(rank, -1) >= step,
            "reason": reason,
            "notes": _newest([note for note in notes if rank in note["ranks"]]),
            **more,
        }
        self._noted[rank] = memory.rule.version
        memory.push_results[rank] = (step, push_result)
        self._arrived.pop((rank, step), None)
        if rank == _TELLER:
            # Not in the journal, which is written with every decision: notes on others only fill reports.
            push_result = self._told = {**push_result, "notes": _newest(notes)}
        self._to_answer.append((rank, step, push_result))

    def _notes_since(self, version: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for note in reversed(self._notes):
            if note["version"] <= version:
                break
            found.append(note)
        return found[::-1]

    def _answer_cut(self, rank: int, step: int) -> None:
        assert self._memory.cut is not None
        self._memory.fed.pop(rank, None)
        self._answer(rank, step, "moved", version=self._memory.cut["version"], plan_id=self._memory.cut["plan_id"])

    def _refuse(self, rank: int, step: int, reason: str) -> None:
        self._memory.fed.pop(rank, None)
        self._memory.metas.pop((rank, step), None)
        self._order({"op": "drop", "rank": rank, "step": step})
        self._answer(rank, step, "error", reason)

    def _repeat(self, rank: int, step: int, push_result: dict[str, Any], shard: int | None) -> None:
        """Repeat a result, and have the restarted shard send its chunks again."""
        if push_result["kind"] in ("params", "dropped") and shard is not None:
            self._order({"op": "send", "to": [[rank, step]], "only": shard})
        if rank == _TELLER and self._told is not None:
            push_result = self._told
        self._to_answer.append((rank, step, push_result))
        self._flush()

    # ---- what goes out ------------------------------------------------------------------------------------

    def _order(self, order: Order) -> None:
        self._memory.seq += 1
        order["seq"] = self._memory.seq
        self._memory.log.append(order)
        self._to_order.append(order)

    def _flush(self) -> None:
        """Write the decisions to the journal, then send them."""
        self._grace.look(time.monotonic())
        orders, push_results, notes = self._to_order, self._to_answer, self._to_note
        if not (orders or push_results or notes):
            return
        self._to_order, self._to_answer, self._to_note = [], [], []
        self._links.journal(pickle.dumps(self._memory))
        # Other shards first: executing an order here includes the updates and replies, and any shard may hold what a
        # rank needs first.
        self._send_orders(orders, range(1, self._n_servers))
        # A rank frees its buffers once it has its result and all parameters, or the result `moved` alone. So `moved`
        # waits until every shard has mirrored the last update (`done`): a shard that died before could not get the
        # gradient again.
        for result in push_results:
            if result[2]["kind"] == "moved" and not self._reported_cut:
                self._held.append(result)
            else:
                self._links.push_result(*result)
        self._send_orders(orders, range(1))
        for note in notes:
            self._links.event({"event": note["kind"], **{k: v for k, v in note.items() if k != "kind"}})

    def _send_orders(self, orders: Sequence[Order], shards: range) -> None:
        for order in orders:
            for shard in shards:
                self._links.order(shard, order)


def _newest(notes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the newest notes, as many as fit in a message of 1 MiB."""
    mentions, first = 0, len(notes)
    while first > 0 and mentions + len(notes[first - 1]["ranks"]) <= _MOST_MENTIONS:
        first -= 1
        mentions += len(notes[first]["ranks"])
    return notes[first:]
