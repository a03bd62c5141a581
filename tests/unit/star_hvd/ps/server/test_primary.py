"""What a primary remembers when its process is killed, on its own: no sockets, no parameters."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

import pytest

from scheduler.plan.plan import Plan
from star_hvd.ps.server.primary import Links, Primary

META = {"version": 0, "weight": 1.0, "count": 1, "own_steps": 1, "row": None, "loss": None}


class Process:
    """A primary of two shards, and what it said."""

    def __init__(self, journal: bytes | None = None, plan: Plan | None = None) -> None:
        self.orders: list[tuple[int, dict[str, Any]]] = []
        self.seq = 0  # Of the latest order.
        self.sent: list[str] = []  # In sequence: orders by shard, results by rank.
        self.events: list[dict[str, Any]] = []
        self.push_results: list[tuple[int, int, dict[str, Any]]] = []
        self.journal = journal
        links = Links(
            order=self.order,
            push_result=self.push_result,
            event=self.events.append,
            journal=self.write,
        )
        self.primary = Primary(plan or Plan.ps(2, 2), 0, 2, frozenset((0, 1)), links, journal)

    def order(self, shard: int, order: dict[str, Any]) -> None:
        self.orders.append((shard, order))
        self.seq = max(self.seq, order["seq"])
        self.sent.append(f"{order['op']} to {shard}")

    def push_result(self, rank: int, step: int, result: dict[str, Any]) -> None:
        self.push_results.append((rank, step, result))
        self.sent.append(f"{result['kind']} to rank {rank}")

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
    again.primary.done(1, first.seq)  # The other shard has carried out everything.
    assert [(shard, order["op"]) for shard, order in again.orders] == [(0, "cut")]
    assert not again.cuts()
    again.carry_out()
    assert [event["plan_id"] for event in again.cuts()] == [4]


def test_a_rank_that_has_left_sets_no_hyperparameters_for_the_others() -> None:
    first = Process(plan=Plan.ps(3, 1))
    step = 0

    def row(rank: int, own_steps: int, lr: float) -> list[float]:
        nonlocal step
        step += 1
        meta = {**META, "own_steps": own_steps, "row": [lr]}
        first.primary.push(rank, step, meta)
        for shard in (0, 1):
            first.primary.arrived(shard, rank, step, None)
        found: list[float] = [order for _, order in first.orders if order["op"] == "update"][-1]["row"]
        return found

    assert row(2, 3, 0.5) == [0.5] and row(1, 6, 0.25) == [0.25] and row(0, 9, 0.0) == [0.0]
    assert row(2, 4, 0.5) == [0.0]
    first.primary.member(0, "absent", own=True)
    assert row(2, 5, 0.5) == [0.25] and row(2, 7, 0.125) == [0.125]
    assert row(0, 10, 0.0) == [0.0], "it counts in its own update"
    again = Process(first.journal, Plan.ps(3, 1))
    first, again = again, first
    assert row(2, 8, 0.125) == [0.125]
    first.primary.member(0, "present", own=True)
    assert row(2, 9, 0.125) == [0.0]


def test_what_others_wait_for_is_sent_before_the_own_part_of_an_order_is_executed() -> None:
    first = Process()
    for rank in (0, 1):
        first.primary.push(rank, 1, META)
    assert first.sent == ["update to 1", "params to rank 0", "params to rank 1", "update to 0"]


def test_the_last_update_is_in_every_mirror_before_its_result_is_sent() -> None:
    """A rank whose push was the last gives its gradient up with the result, which no parameters follow."""
    first = Process()
    first.primary.push(0, 1, META)
    for shard in (0, 1):
        first.primary.arrived(shard, 0, 1, None)
    first.sent.clear()
    first.primary.cut(4)
    assert first.sent == ["update to 1", "cut to 1", "update to 0", "cut to 0"]
    first.primary.done(0, first.seq)
    assert not first.push_results and not first.cuts(), "shard 1 may die and ask for the gradient again"
    again = Process(first.journal)  # The primary dies, too: the rank announces its push again.
    again.primary.push(0, 1, {**META, "again": 0})
    again.primary.done(0, first.seq)
    assert not again.push_results
    for each in (first, again):
        each.primary.done(1, first.seq)
        assert [(rank, step, result["kind"]) for rank, step, result in each.push_results] == [(0, 1, "moved")]
        assert len(each.cuts()) == 1
    first.primary.push(1, 1, META)
    assert first.sent[-1] == "moved to rank 1", "nothing is left to wait for"


def test_a_grace_ends_also_behind_a_restart() -> None:
    plan = Plan.ps(3, 2, rule="grace", lr_rule="none")
    first = Process(plan=plan)
    for rank in (0, 1):
        first.primary.push(rank, 1, META)
        for shard in (0, 1):
            first.primary.arrived(shard, rank, 1, None)
    assert not first.orders and math.isfinite(first.primary.next_s), "rank 2 may be in time"
    first.primary.read("pull", 2, 1)  # Which is why a journal is written.
    again = Process(first.journal, plan)
    for each in (first, again):
        each.sent.clear()
        limit_s = time.monotonic() + 60.0
        while not each.sent and time.monotonic() < limit_s:
            time.sleep(max(0.0, min(0.1, each.primary.next_s - time.monotonic())))
            each.primary.tick()
        assert each.sent == ["update to 1", "params to rank 0", "params to rank 1", "update to 0"]
        assert each.primary.next_s == math.inf
    again.primary.push(2, 1, META)  # Too late.
    for shard in (0, 1):
        again.primary.arrived(shard, 2, 1, None)
    assert not [result for result in again.push_results if result[0] == 2], "it gets the next version with the others"
    for rank in (0, 1):
        again.primary.push(rank, 2, {**META, "version": 1})
        for shard in (0, 1):
            again.primary.arrived(shard, rank, 2, None)
    (result,) = [result for rank, step, result in again.push_results if rank == 2]
    assert (result["kind"], result["version"], result["applied"]) == ("dropped", 2, False)


@pytest.mark.parametrize("losses", [(math.inf, -math.inf), (1e308, 1e308), (math.nan, 1.0)])
def test_a_diverging_job_s_losses_end_no_server(losses: tuple[float, float]) -> None:
    first = Process()
    for rank, loss in enumerate(losses):
        first.primary.push(rank, 1, {**META, "weight": 10.0, "loss": loss})
    first.carry_out()
    assert [result[2]["version"] for result in first.push_results] == [1, 1]


@pytest.mark.parametrize("products", [[(math.inf,) * 3, (-math.inf, 1.0, 1.0)], [(1e308,) * 3] * 2])
def test_a_diverging_job_s_products_end_no_server(products: list[tuple[float, float, float]]) -> None:
    first = Process(plan=dataclasses.replace(Plan.ps(2, 1), guard="damp"))
    first.primary.push(0, 1, META)
    for shard, values in enumerate(products):
        first.primary.arrived(shard, 0, 1, values)
    first.carry_out()
    assert [result[2]["version"] for result in first.push_results] == [1]


def test_a_weight_that_no_sum_can_hold_is_refused() -> None:
    first = Process()
    first.primary.push(0, 1, {**META, "weight": 1e308})
    first.carry_out()
    assert "1e+308" in first.push_results[0][2]["reason"]


def pushed(process: Process, rank: int, step: int) -> list[tuple[int, int]]:
    """One push that both shards have; whose pushes have got their results so far."""
    process.primary.push(rank, step, META)
    for shard in (0, 1):
        process.primary.arrived(shard, rank, step, None)
    return [(each, of) for each, of, _ in process.push_results]


SSP = Plan.ps(2, 1, rule="ssp", slack=1)


@pytest.mark.parametrize("plan", [SSP, Plan.ps(2, 2)], ids=["ssp", "all"])
@pytest.mark.parametrize("again", [False, True], ids=["", "server anew"])
def test_a_rank_without_work_is_not_waited_for_because_it_is_heard_again(plan: Plan, again: bool) -> None:
    """It waits for the others, at the end of an epoch, when the owner's word comes late, or is repeated."""
    made = Process(plan=plan)
    made.primary.member(1, "absent")  # The coordinator has not heard it for a while,
    made.primary.member(1, "absent", own=True)  # it has begun all of its samples,
    if not again:
        made.primary.member(1, "present")  # and is heard again.
    assert pushed(made, 0, 1) == [(0, 1)]
    if again:  # A new process begins with what its owner knows, and with what the former one has written.
        made = Process(made.journal, plan=plan)
        made.primary.member(1, "present")
    for step in range(2, 6):
        assert (0, step) in pushed(made, 0, step), "it waits for a rank that waits for it"
    made.primary.member(1, "present", own=True)
    assert pushed(made, 0, 6)[-1] == ((0, 6) if plan is SSP else (0, 5)), "one ahead, as the plan says"
    assert (0, 7) not in pushed(made, 0, 7)


def test_a_silent_rank_is_not_waited_for_because_it_says_that_it_has_work() -> None:
    made = Process()
    made.primary.member(1, "absent")
    made.primary.member(1, "present", own=True)
    assert pushed(made, 0, 1) == [(0, 1)]
    made.primary.member(1, "present")
    assert pushed(made, 0, 2) == [(0, 1)]


def test_what_a_newer_plan_brings_comes_behind_orders_that_were_not_carried_out() -> None:
    """The own shard counts orders: told of a later one first, it would take the earlier ones for carried out."""
    first = Process(plan=Plan.ps(3, 3))
    for rank in (0, 1, 2):
        first.primary.push(rank, 1, META)
    assert [order["seq"] for shard, order in first.orders if shard == 0] == [1]
    for rank in (0, 1):  # Enough for the rule that the owner has been told of meanwhile.
        first.primary.push(rank, 2, META)
        for shard in (0, 1):
            first.primary.arrived(shard, rank, 2, None)
    again = Process(first.journal, plan=Plan.ps(3, 2).replace(plan_id=1))
    again.primary.join(0, 0)
    again.primary.adopt_newer_plan()
    assert next(order["seq"] for shard, order in again.orders if shard == 0) == 1
    assert again.primary.version == 1


def test_results_have_the_notes_on_the_own_pushes_and_on_rank_0_all_of_them() -> None:
    """With one push per update a rank misses the updates of all others: their notes would be most of a result."""
    plan = Plan.ps(4, 1)
    process = Process(plan=plan)
    for step in (1, 2):
        for rank in (1, 2, 3, 0):
            pushed(process, rank, step)
    noted = [[note["ranks"] for note in result["notes"]] for _, _, result in process.push_results]
    every = [[1], [2], [3], [0]]
    assert noted == [[[1]], [[2]], [[3]], every] * 2
    process.primary.push(0, 2, META)
    assert process.push_results[-1] == process.push_results[-2], "repeated because the connection was made again"
    again = Process(process.journal, plan)
    again.primary.push(0, 2, META)
    (_, _, repeated), told = again.push_results[-1], process.push_results[-1][2]
    assert repeated == {**told, "notes": told["notes"][-1:]}, "the journal has only what concerns the rank itself"


def test_a_rank_s_notes_on_its_own_pushes_do_not_depend_on_the_number_of_ranks() -> None:
    plan = Plan.ps(32, 1)
    process, sizes = Process(plan=plan), []
    for step in (1, 2, 3):
        for rank in range(32):
            pushed(process, rank, step)
            process.carry_out()
        sizes.append(len(process.journal or b""))
    assert all(len(result["notes"]) == 1 for rank, _, result in process.push_results if rank)
    assert sizes[2] - sizes[1] < 512, "notes on 32 updates are larger"
