"""A plan on its way, completed from measurements; links measured in turn; the closing rule across a handover."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from scheduler.plan.completion import resolve
from scheduler.plan.headroom import Headroom
from scheduler.plan.plan import Plan, PlanError
from scheduler.rules.step_closing import ClosingRule
from star_hvd.channel.late_push import PUSH_HEADER, LatePushes, is_measured, rate_of
from star_hvd.channel.messages.base import Abandon, Message, PlanMessage
from star_hvd.channel.messages.switch import Commit, MakeSet, Servers
from star_hvd.coordinator.links import LinkSurvey
from star_hvd.coordinator.plans.set_ledger import SetLedger
from star_hvd.coordinator.plans.switch import Published, Switch
from star_hvd.engine.buckets import pack
from star_hvd.engine.exchange.late_gradients import LateGradients
from star_hvd.engine.records import Counters
from star_hvd.errors import ChannelError

SYNC = Plan.sync(4)


def completed(plan: Plan, active: Plan = SYNC, **known: Any) -> Plan:
    given: dict[str, Any] = {
        "times_s": [0.1, 0.1, 0.1, 0.4],
        "hosts": ("a", "a", "b", "b"),
        "slow": [],
        "link_bytes_per_s": [math.nan] * 4,
        "headroom": [Headroom()] * 4,
        "state_bytes": 1000,
    }
    return resolve(plan, active, **{**given, **known})


def test_a_switch_waits_for_all_ranks_and_says_once_that_they_are_ready() -> None:
    plan = Plan.subgroup(4, [0, 1, 2], plan_id=3)
    switch = Switch(7, plan, SYNC, 10.0)
    assert [switch.rank_ready(rank) for rank in (2, 0, 0, 1)] == [[]] * 4
    assert switch.rank_ready(3) == [Commit(7, 3)]
    assert switch.rank_ready(3) == [] and switch.committed and not switch.irrevocable


def published(*plans: Plan) -> tuple[Published, SetLedger, list[list[Message]]]:
    """Plans published one after the other beside `sync`, and the messages of each."""
    sets = SetLedger(4)
    made = Published(7, sets)
    return made, sets, [made.publish(plan, SYNC, 0.0, 60.0) for plan in plans]


def test_a_plans_process_sets_are_ordered_before_it_and_the_next_one_takes_its_place() -> None:
    made, _, (first, second) = published(Plan.subgroup(4, [0, 1]), Plan.partial(4, 3))
    *ordered, plan = first
    assert MakeSet([0, 1]) in ordered and isinstance(plan, PlanMessage) and plan.plan["epoch"] == 1
    assert [type(message) for message in second] == [PlanMessage]
    assert made.newest(SYNC) == made.revocable == Plan.partial(4, 3, plan_id=2) and made.next_id == 3


def test_an_abandoned_plan_may_still_come_into_force_and_then_ends_those_before() -> None:
    made, _, _ = published(Plan.partial(4, 3), Plan.partial(4, 2))
    assert made.abandon("too slow") == [Abandon(7, 2, "too slow")]
    assert made.pending is made.revocable is None and made.newest(SYNC) is SYNC and 2 in made
    made.publish(Plan.subgroup(4, [0, 1]), SYNC, 0.0, 60.0)
    assert made.activate(2).label == "partial(2)"
    assert [number in made for number in (1, 2, 3)] == [False, False, True] and made.pending is not None
    made.activate(3)
    assert made.pending is None and 3 not in made


def test_sets_of_an_abandoned_plan_are_kept_if_some_ranks_may_have_activated_it() -> None:
    for committed in (False, True):
        made, sets, _ = published(Plan.subgroup(4, [0, 1]))
        assert made.pending is not None
        made.pending.committed = committed
        made.abandon("too slow")
        sets.tidy(0.0)
        assert bool(sets.tidy(1e6)) is not committed


def test_a_plan_that_was_never_published_frees_no_set() -> None:
    made, sets, _ = published(Plan.subgroup(4, [0, 1]))
    for plan_id, free in ((5, False), (2, True)):
        if free:
            made.publish(SYNC, SYNC, 0.0, 60.0)
        for rank in range(4):
            made.acted(rank, plan_id)
        sets.tidy(0.0)
        assert bool(sets.tidy(1e6)) is free


def test_servers_are_told_once_all_of_them_run() -> None:
    switch = Switch(0, Plan.ps(4, 2, plan_id=2, servers=(1, 3)), SYNC, 10.0)
    assert switch.server_up(1, ["b", "2", ""]) == []
    assert switch.server_up(0, ["a", "1", ""]) == [Servers(0, 2, ["a", "1", "", "b", "2", ""])]


def test_only_servers_that_were_told_to_end_cannot_be_taken_back() -> None:
    served = Plan.ps(4, 2, plan_id=1)
    for new, irrevocable in (
        (Plan.sync(4, plan_id=2), True),
        (Plan.ps(4, 3, plan_id=2), False),
        (Plan.grouped(4, [[0, 1], [2, 3]], plan_id=2), True),
    ):
        switch = Switch(0, new, served, 10.0)
        assert not switch.irrevocable
        for rank in range(4):
            switch.rank_ready(rank)
        assert switch.irrevocable == irrevocable


def test_groups_are_formed_by_speed() -> None:
    assert {frozenset(g) for g in completed(Plan.grouped(4, 2)).groups} == {frozenset({0, 1, 2}), frozenset({3})}
    dynamic = completed(Plan.ps(4, 1, rule="groups"))
    assert {frozenset(group) for group in dynamic.groups} == {frozenset({0, 1, 2}), frozenset({3})}
    unknown = completed(Plan.grouped(4, 2), times_s=[math.nan] * 4)
    assert sorted(rank for group in unknown.groups for rank in group) == [0, 1, 2, 3]


def test_servers_are_placed_where_nobody_is_slow_and_stay_under_another_rule() -> None:
    assert completed(Plan.ps(4, 2), slow=[0]).servers == (2,)
    assert completed(Plan.ps(4, 2), slow=[0], hosts=("a",) * 4).servers == (1,)
    assert completed(Plan.ps(4, 2, servers=(3,))).servers == (3,)
    assert completed(Plan.ps(4, 2), Plan.ps(4, 1, servers=(2,))).servers == (2,)
    assert completed(Plan.ps(4, 2), Plan.subgroup(4, [1, 2])).servers[0] in (1, 2), "only members have the state"


def test_a_subgroup_needs_somebody_of_the_one_before() -> None:
    assert completed(Plan.subgroup(4, [1, 2]), Plan.subgroup(4, [2, 3])).members == (1, 2)
    with pytest.raises(PlanError, match="switch to sync first"):
        completed(Plan.subgroup(4, [0, 1]), Plan.subgroup(4, [2, 3]))


def survey_links(survey: LinkSurvey, links: list[float], begin_s: float, end_s: float) -> list[tuple[int, int]]:
    """Answer a survey's probes for a while, each at the rate of the slower of both links; who sent to whom."""
    asked = []
    for tenth in range(round(10 * begin_s), round(10 * end_s)):
        due = survey.due(tenth / 10, wanted=lambda: True)
        if due is not None:
            rank, probe = due
            asked.append((rank, probe.target))
            survey.note(rank, min(links[rank], links[probe.target]))
    return asked


def test_links_are_measured_in_turn_and_only_when_wanted() -> None:
    survey = LinkSurvey(3)
    assert survey.due(0.0, wanted=lambda: False) is None
    asked = survey_links(survey, [5.0, 6.0, 7.0], 0.0, 7.0)
    assert asked[:6] == [(0, 1), (1, 2), (2, 0), (0, 2), (1, 0), (2, 1)]
    assert survey.bytes_per_s == [5.0, 5.0, 6.0]
    assert LinkSurvey(1).due(0.0, wanted=lambda: True) is None


@pytest.mark.parametrize("slow", [{3}, {0}, {1}, {2, 3}])
def test_whoever_sends_to_a_slow_link_is_not_taken_for_slow(slow: set[int]) -> None:
    links = [2.0 if rank in slow else 20.0 for rank in range(4)]
    survey = LinkSurvey(4)
    for half in range(8):
        survey_links(survey, links, half / 2, (half + 1) / 2)
        assert all(math.isnan(rate) or rate == links[rank] for rank, rate in enumerate(survey.bytes_per_s))
    assert survey.bytes_per_s == links


def test_a_ring_in_which_every_neighbour_is_slow_is_seen_through_by_the_next_one() -> None:
    links = [2.0, 20.0, 2.0, 20.0]
    survey = LinkSurvey(4)
    survey_links(survey, links, 0.0, 3.0)
    assert survey.bytes_per_s == [2.0] * 4
    survey_links(survey, links, 3.0, 7.0)
    assert survey.bytes_per_s == links


def test_ranks_of_one_host_have_no_link_between_them() -> None:
    survey = LinkSurvey(4, ["10.0.0.1"] * 4)
    assert survey_links(survey, [1.0, 20.0, 20.0, 20.0], 0.0, 20.0) == [], "nothing is sent"
    assert all(math.isnan(rate) for rate in survey.bytes_per_s)
    hosts = ["a", "a", "b", "b", "b"]
    survey = LinkSurvey(5, hosts)
    asked = survey_links(survey, [20.0, 20.0, 20.0, 20.0, 2.0], 0.0, 30.0)
    assert {rank for rank, _ in asked} == set(range(5))
    assert all(hosts[rank] != hosts[target] for rank, target in asked)
    assert survey.bytes_per_s == [20.0, 20.0, 20.0, 20.0, 2.0]


@pytest.mark.parametrize("disturbed", [0, 2])
def test_a_measurement_beside_other_work_blames_nobody(disturbed: int) -> None:
    """The first time a rank sends, its interpreter is busy: 2.8 times slower than everybody else, seen once."""
    survey, sent = LinkSurvey(4), 0
    for tenth in range(60):
        due = survey.due(tenth / 10, wanted=lambda: True)
        if due is not None:
            sent += due[0] == disturbed
            survey.note(due[0], 20.0 / 2.8 if due[0] == disturbed and sent == 1 else 20.0)
        assert all(math.isnan(rate) or rate == 20.0 for rate in survey.bytes_per_s)
    assert survey.bytes_per_s == [20.0] * 4 and sent > 1


def test_a_slow_link_is_measured_twice_before_it_is_blamed() -> None:
    survey, links, times = LinkSurvey(4), [20.0, 20.0, 20.0, 2.0], 0
    for tenth in range(60):
        due = survey.due(tenth / 10, wanted=lambda: True)
        if due is not None:
            times += 3 in (due[0], due[1].target)
            survey.note(due[0], min(links[due[0]], links[due[1].target]))
        assert survey.bytes_per_s[3] != 2.0 or times >= 2
    assert survey.bytes_per_s == links


def test_a_link_that_is_slow_from_both_sides_is_not_measured_again() -> None:
    survey, asked = LinkSurvey(4), []
    for tenth in range(10):
        due = survey.due(tenth / 10, wanted=lambda: True)
        if due is not None:
            asked.append((due[0], due[1].target))
            survey.note(due[0], 2.0 if 3 in asked[-1] else 20.0)
    assert asked == [(0, 1), (1, 2), (2, 3), (3, 0), (2, 0)] and survey.bytes_per_s == [20.0, 20.0, 20.0, 2.0]


def test_a_disturbed_measurement_is_not_confirmed_by_what_comes_from_a_slow_link() -> None:
    """Seen beside other work: rank 2 was disturbed once, and what rank 3 sent to it came over a slow link."""
    survey, once = LinkSurvey(4, sweep=2), {(2, 1): 1.8}  # The ranks send to (0, 3), (1, 0), (2, 1), (3, 2).
    for tenth in range(40):
        due = survey.due(tenth / 10, wanted=lambda: True)
        if due is not None:
            pair = (due[0], due[1].target)
            survey.note(due[0], once.pop(pair, 2.0 if 3 in pair else 20.0))
        assert math.isnan(survey.bytes_per_s[2]) or survey.bytes_per_s[2] == 20.0
    assert not once and survey.bytes_per_s == [20.0, 20.0, 20.0, 2.0]


def first_probes(survey: LinkSurvey, rates: dict[tuple[int, int], float]) -> list[tuple[int, int]]:
    """Answer the probes at these rates until one comes for which there is none; all that came."""
    asked = []
    for tenth in range(10):
        due = survey.due(tenth / 10, wanted=lambda: True)
        if due is not None:
            asked.append((due[0], due[1].target))
            if asked[-1] not in rates:
                break
            survey.note(due[0], rates[asked[-1]])
    return asked


def test_a_rank_that_received_fast_confirms_a_slow_link_before_it_has_sent_again() -> None:
    """Measured beside reductions, which cross the slow link too: 512 kB to and from it took a second."""
    survey = LinkSurvey(4)
    asked = first_probes(survey, {(0, 1): 31.2, (1, 2): 30.6, (2, 3): 0.77, (3, 0): 1.33})
    assert asked[-1] == (2, 0), "it sends again"
    assert survey.bytes_per_s == [31.2, 30.6, 30.6, 1.33], "and until then its rate is that at which it received"
    survey.note(2, 34.0)
    survey.due(1.0, wanted=lambda: True)
    assert survey.bytes_per_s == [31.2, 30.6, 34.0, 1.33]


@pytest.mark.parametrize(("there", "back", "confirmed"), [(1.91, 0.8, True), (14.0, 6.0, False), (6.0, 2.0, False)])
def test_measurements_of_a_far_slower_link_may_differ_more(there: float, back: float, confirmed: bool) -> None:
    survey = LinkSurvey(4)
    first_probes(survey, {(0, 1): 34.6, (1, 2): 31.5, (2, 3): there, (3, 0): back})
    assert math.isnan(survey.bytes_per_s[3]) != confirmed


def test_a_rank_that_receives_fast_and_sends_slowly_is_found() -> None:
    survey = LinkSurvey(4)
    for tenth in range(20):
        due = survey.due(tenth / 10, wanted=lambda: True)
        if due is not None:
            survey.note(due[0], 2.0 if due[0] == 2 else 20.0)
    assert survey.bytes_per_s == [20.0, 20.0, 2.0, 20.0]


def test_one_burst_is_enough_where_it_takes_long_and_empty_ones_do_not() -> None:
    assert is_measured([0.02], [0.4], 0.42), "512 kB over a link of 20 Mbit/s, beside a reduction"
    assert not is_measured([0.2], [0.4], 0.6), "threads wait that long"
    assert not is_measured([0.002], [0.02], 0.022)
    assert is_measured([0.002, 0.002], [0.15, 0.15], 0.31), "two of a slow one"
    assert not is_measured([0.002, 0.002], [0.02, 0.02], 0.05)


def test_the_rate_is_what_the_link_takes_and_not_what_threads_wait() -> None:
    megabyte = 1_000_000
    # 10 ms on the link; 6 ms at least, and often 30, until threads get their turn.
    empty_s, full_s = [0.030, 0.006, 0.021], [0.040, 0.045, 0.016]
    assert rate_of(megabyte, empty_s, full_s) == pytest.approx(1e8)
    assert rate_of(megabyte, [0.02, 0.02], [0.02, 0.02]) == pytest.approx(megabyte / 0.002), "too quick to tell"
    assert rate_of(megabyte, [0.001, 0.002], [1.0, 1.1]) == pytest.approx(1e6, rel=0.01)


def test_a_rank_that_does_not_answer_holds_no_sweep_up() -> None:
    survey = LinkSurvey(3)
    for tenth in range(300):
        due = survey.due(tenth / 10, wanted=lambda: True)
        if due is not None and due[0] != 1:
            survey.note(due[0], 4.0)
    assert survey.bytes_per_s[0] == survey.bytes_per_s[2] == 4.0 and math.isnan(survey.bytes_per_s[1])


def test_arrivals_told_before_the_end_of_the_old_mode_are_kept() -> None:
    rule = ClosingRule(Plan.sync(2))
    rule.skip_to(10)
    rule.arrive(0, 10, 0.1, 1.0)
    rule.restart(10, 1.1)
    assert rule.ready == (0,) and rule.step == 10
    rule.restart(12, 1.2)
    assert rule.ready == () and rule.step == 12


def test_a_subgroup_closes_without_its_members_that_are_away_and_never_waits_for_children() -> None:
    rule = ClosingRule(Plan.subgroup(4, [0, 1, 2]))
    rule.arrive(0, 0, 0.1, 1.0)
    rule.arrive(1, 0, 0.1, 1.0)
    assert rule.evaluate(100.0) == (None, None), "a member that is only slow is waited for"
    rule.deactivate(2)
    order, _ = rule.evaluate(100.0)
    assert order is not None and order.missing == (2,) and order.reason == "away"


def push_frames(body: bytes, chunk: int, *, number: int = 1, attempt: int = 0, link: int = 77) -> list[list[bytes]]:
    return [
        [PUSH_HEADER.pack(b"STAL", 2, 0, 3, link, number, attempt, 5, offset, len(body)), body[offset : offset + chunk]]
        for offset in range(0, len(body), chunk)
    ]


def test_late_gradients_are_put_together_once_and_damaged_ones_leave_nothing() -> None:
    taken: list[tuple[int, int, int, bytes]] = []

    def accept(optimizer_id: int, rank: int, version: int, body: bytearray) -> int:
        taken.append((optimizer_id, rank, version, bytes(body)))
        return 9

    pushes = LatePushes(accept)
    frames = push_frames(b"abcdefgh", 3)
    assert pushes.take(frames[0]) is None and pushes.take(frames[1]) is None
    answer = pushes.take(frames[2])
    assert answer is not None and taken == [(0, 3, 5, b"abcdefgh")]
    assert pushes.take(frames[2]) == answer and len(taken) == 1, "sent again, taken once"
    assert pushes.take(push_frames(b"abcdefgh", 3, attempt=1)[2]) == answer and len(taken) == 1, "a second attempt"
    second = push_frames(b"ijklmnop", 3, number=2)
    pushes.take(second[0])
    assert pushes.take(second[2]) is pushes.take(second[1]) is None, "a part was lost: the next attempt brings all"
    pushes.take(second[0])
    with pytest.raises(ChannelError, match="chunk at byte"):
        pushes.take(second[0])
    with pytest.raises(ChannelError, match="and a payload"):
        pushes.take([b"x", b"y"])
    assert len(taken) == 1


def test_pushes_of_one_child_on_two_links_do_not_end_each_other() -> None:
    """The former mode's push may still be sent when the next mode, with the same parent, pushes on its own link."""
    taken: list[bytes] = []
    pushes = LatePushes(lambda optimizer_id, rank, version, body: len(taken.append(bytes(body)) or taken))  # type: ignore[func-returns-value]
    old, new = push_frames(b"abcdefgh", 2, link=77), push_frames(b"ijklmnop", 2, link=78)
    answers = [pushes.take(frame) for pair in zip(old, new, strict=True) for frame in pair]
    assert taken == [b"abcdefgh", b"ijklmnop"] and answers[:6] == [None] * 6 and None not in answers[6:]
    assert [pushes.take(frames[-1]) for frames in (old, new)] == answers[6:], "sent again, taken once"
    assert len(taken) == 2


def test_of_the_pushes_that_a_child_gave_up_few_are_kept() -> None:
    taken: list[bytes] = []
    pushes = LatePushes(lambda optimizer_id, rank, version, body: len(taken.append(bytes(body)) or taken))  # type: ignore[func-returns-value]
    begun = [push_frames(b"abcd", 2, link=link) for link in range(5)]
    for frames in begun:
        pushes.take(frames[0])
    for frames in begun:
        pushes.take(frames[1])
    assert len(taken) == 2, "those of the newest two links"


def test_a_late_gradient_that_leaves_with_a_push_is_not_yet_applied() -> None:
    buckets = pack([torch.nn.Parameter(torch.zeros(3))], 1024)
    counters = Counters(produced_weight=1.0)
    late = LateGradients(buckets, counters)
    late.keep(buckets[0], 1.0, 0)
    flat = buckets[0].new_flat()
    assert late.fold(buckets[0], flat, 1, Plan.partial(2, 1), count=False)
    assert float(flat[-1]) == 0.5 and counters.applied_weight == 0.0 and counters.damped_weight == 0.5
