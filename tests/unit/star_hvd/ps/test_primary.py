"""What a primary remembers when its process is killed, on its own: no sockets, no parameters."""

from __future__ import annotations

from typing import Any

from scheduler.plan.plan import Plan
from star_hvd.ps.server.primary import Links, Primary

META = {"version": 0, "weight": 1.0, "count": 1, "own_steps": 1, "row": None, "loss": None}


class Process:
    """A primary of two shards, and what it said."""

    def __init__(self, journal: bytes | None = None) -> None:
        self.orders: list[tuple[int, dict[str, Any]]] = []
        self.events: list[dict[str, Any]] = []
        self.push_results: list[tuple[int, int, dict[str, Any]]] = []
        self.journal = journal
        links = Links(
            order=lambda shard, order: self.orders.append((shard, order)),
            push_result=lambda rank, step, result: self.push_results.append((rank, step, result)),
            event=self.events.append,
            journal=self.write,
        )
        self.primary = Primary(Plan.ps(2, 2), 0, 2, frozenset((0, 1)), links, journal)

    def write(self, data: bytes) -> None:
        self.journal = data

    def cuts(self) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == "cut"]

    def carry_out(self) -> None:
        """Both shards carry out what they were told, and say so."""
        orders, self.orders = self.orders, []
        for shard, order in orders:
            self.primary.done(shard, order["seq"])


def test_a_cut_is_told_again_to_a_shard_that_was_started_anew_after_it() -> None:
    """Parameters do not show it, and by then nobody waits for it any more."""
    first = Process()
    first.primary.cut(4)
    first.carry_out()
    assert [event["plan_id"] for event in first.cuts()] == [4]
    first.primary.push(0, 2, META)  # One that comes after it has its result in the journal.
    assert first.push_results and first.journal is not None
    again = Process(first.journal)
    again.primary.join(0, 0)
    again.primary.done(1, again.primary._memory.seq)  # The other shard has carried out everything.
    assert [(shard, order["op"]) for shard, order in again.orders] == [(0, "cut")]
    assert not again.cuts()
    again.carry_out()
    assert [event["plan_id"] for event in again.cuts()] == [4]
