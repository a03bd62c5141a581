"""Process sets that are kept, and those that go: never one in which a rank may still have something queued."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from scheduler.records import Plan
from star_hvd.channel.messages import base as m
from star_hvd.channel.messages.switch import DropSet, MakeSet
from star_hvd.coordinator.plans.set_ledger import MOST_SETS, SetLedger
from tests.support.job_states import Job

PAIRS = [(0, 1), (0, 2), (0, 3), (1, 3), (1, 2), (2, 3)]  # Each with a rank of the one before.


def made(*sets: tuple[int, ...]) -> list[m.Message]:
    return [MakeSet(list(ranks)) for ranks in sets]


def reach(ledger: SetLedger, epoch: int, optimizer_id: int = 0) -> None:
    for rank in range(4):
        ledger.acted(optimizer_id, rank, epoch)


def test_the_set_not_asked_for_longest_makes_room() -> None:
    ledger = SetLedger(4, most=3)
    for epoch, ranks in enumerate(PAIRS[:3]):
        assert ledger.order(0, [ranks], epoch) == made(ranks)
    assert ledger.order(0, [PAIRS[0]], 3) == made(PAIRS[0])  # There already; ranks that have it answer at once.
    reach(ledger, 3)
    assert ledger.order(0, [(3, 1)], 4) == [DropSet([0, 2]), *made((1, 3))]
    assert (3, 1) in ledger and (0, 2) not in ledger and len(ledger) == 3


def test_a_set_stays_while_one_rank_may_use_it() -> None:
    ledger = SetLedger(4, most=1)
    ledger.order(0, [PAIRS[0]], 1)
    for rank in range(3):
        ledger.acted(0, rank, 2)
    assert ledger.order(0, [PAIRS[1]], 2) == made(PAIRS[1]), "rank 3 was never heard of"
    ledger.acted(0, 3, 1)
    assert ledger.order(0, [PAIRS[2]], 3) == made(PAIRS[2]), "rank 3 acts on the plan with the first set"
    ledger.acted(0, 3, 3)
    ledger.acted(0, 3, 1)  # Said before; it came late.
    assert ledger.order(0, [PAIRS[3]], 4) == [DropSet([0, 1]), *made(PAIRS[3])]
    reach(ledger, 4)
    assert ledger.order(0, [PAIRS[3]], 5) == [DropSet([0, 2]), DropSet([0, 3]), *made(PAIRS[3])]


def test_a_set_stays_while_another_optimizer_needs_it() -> None:
    ledger = SetLedger(4, most=1)
    ledger.order(0, [PAIRS[0]], 1)
    ledger.order(1, [PAIRS[0]], 1)
    reach(ledger, 2, optimizer_id=0)
    assert ledger.order(0, [PAIRS[1]], 2) == made(PAIRS[1])
    ledger.ended(1)
    assert ledger.order(0, [PAIRS[1]], 3) == [DropSet([0, 1]), *made(PAIRS[1])]


def test_all_groups_of_a_plan_are_made_whatever_their_number() -> None:
    ledger = SetLedger(4, most=1)
    ledger.order(0, [PAIRS[0]])  # On suspicion; no plan ever used it.
    assert ledger.order(0, [(2, 3), (0, 1), (1, 2)], 1) == made((2, 3), (0, 1), (1, 2))
    reach(ledger, 2)
    assert ledger.order(0, [(0, 3)], 2) == [DropSet([2, 3]), DropSet([0, 1]), DropSet([1, 2]), *made((0, 3))]


def test_a_set_that_nobody_has_needed_for_long_goes() -> None:
    ledger = SetLedger(4)
    ledger.order(0, [(0, 1)], 1)
    reach(ledger, 1)
    assert ledger.tidy(0.0) == ledger.tidy(1000.0) == [], "the plan in force needs it"
    reach(ledger, 2)
    assert ledger.tidy(2000.0) == ledger.tidy(2059.0) == []
    ledger.order(0, [(0, 1)], 3)
    reach(ledger, 4)
    assert ledger.tidy(2061.0) == ledger.tidy(2120.0) == [], "asked for again meanwhile"
    assert ledger.tidy(2122.0) == [DropSet([0, 1])]
    assert len(ledger) == 0 and ledger.order(0, [(0, 1)], 5) == made((0, 1))


def test_a_set_made_on_suspicion_waits_longer_for_its_plan() -> None:
    ledger = SetLedger(4)
    ledger.order(0, [(2, 3)])
    assert ledger.tidy(0.0) == ledger.tidy(599.0) == []
    assert ledger.tidy(601.0) == [DropSet([2, 3])]


def test_sets_of_plans_that_were_given_up_go_like_others() -> None:
    ledger = SetLedger(4, most=1)
    reach(ledger, 0)
    for epoch, ranks in enumerate(PAIRS, start=1):
        ledger.order(0, [ranks], epoch)
        ledger.abandoned(0, epoch)
        assert len(ledger) <= 2
    ledger.order(0, [PAIRS[0]], 10)
    reach(ledger, 10)
    ledger.order(0, [PAIRS[0]], 11)
    ledger.abandoned(0, 11)
    assert ledger.tidy(0.0) == ledger.tidy(100.0) == [] and PAIRS[0] in ledger, "the plan in force has it too"


def test_a_closed_optimizers_sets_go() -> None:
    ledger = SetLedger(4)
    ledger.order(3, [(0, 1)], 1)
    ledger.ended(3)
    assert ledger.tidy(0.0) == [] and ledger.tidy(61.0) == [DropSet([0, 1])]


@given(st.data())
def test_nobody_loses_a_set_that_it_may_be_in(data: st.DataObject) -> None:
    """Two optimizers, ranks that follow plans at their own pace and reports that come late or not at all."""
    ledger, there = SetLedger(4, most=data.draw(st.integers(1, 4))), set[tuple[int, ...]]()
    plans: dict[int, list[list[tuple[int, ...]]]] = {0: [[]], 1: [[]]}
    at = {(engine, rank): 0 for engine in plans for rank in range(4)}
    for now in range(data.draw(st.integers(1, 40))):
        engine = data.draw(st.integers(0, 1))
        if data.draw(st.booleans()):
            sets = data.draw(st.lists(st.sampled_from(PAIRS), max_size=2, unique=True))
            plans[engine].append(sets)
            for message in [*ledger.tidy(40.0 * now), *ledger.order(engine, sets, len(plans[engine]) - 1)]:
                assert isinstance(message, MakeSet | DropSet)
                ranks = tuple(message.ranks)
                if isinstance(message, MakeSet):
                    there.add(ranks)
                    continue
                there.remove(ranks)
                for (who, rank), epoch in at.items():
                    assert all(ranks not in later for later in plans[who][epoch:]), f"rank {rank} may use {ranks}"
            assert set(sets) <= there
        else:
            rank = data.draw(st.integers(0, 3))
            at[engine, rank] = data.draw(st.integers(at[engine, rank], len(plans[engine]) - 1))
            if data.draw(st.booleans()):
                ledger.acted(engine, rank, data.draw(st.integers(0, at[engine, rank])))
    assert len(ledger) == len(there) and all(ranks in ledger for ranks in there)


def test_a_job_through_all_its_subgroups_keeps_a_few_sets() -> None:
    job, there = Job(4), set[tuple[int, ...]]()
    job.register(None)
    for epoch, members in enumerate([*PAIRS, (0, 2), *PAIRS], start=1):
        job.engine.publish(Plan.subgroup(4, members), job.now_s)
        orders: list[Any] = [x for x in job.sent() if isinstance(x, MakeSet | DropSet | m.PlanMessage)]
        assert isinstance(orders.pop(), m.PlanMessage), "a plan comes after its sets"
        for order in orders:
            (there.add if isinstance(order, MakeSet) else there.remove)(tuple(order.ranks))
        assert members in there and len(there) <= MOST_SETS + 1
        for rank in range(4):
            job.arrive(rank, 10 * epoch, plan_id=epoch)
