"""What is got ready before a plan asks for it."""

from __future__ import annotations

import math

import pytest

from scheduler.plan.plan import Plan
from scheduler.policy.cost_policy import CostPolicy
from star_hvd.channel.messages.base import Message, decode, encode
from star_hvd.channel.messages.switch import MakeSet, WarmServers
from star_hvd.coordinator.plans.prewarm import Readiness
from star_hvd.coordinator.plans.set_ledger import SetLedger
from tests.support.windows import steady, window


@pytest.fixture
def said() -> list[Message]:
    return []


@pytest.fixture
def readiness(said: list[Message]) -> Readiness:
    return Readiness(0, SetLedger(8), lambda message: said.append(decode(encode(message))))


def test_a_server_is_asked_for_once_and_a_set_which_stalls_all_never(readiness: Readiness, said: list[Message]) -> None:
    readiness.for_plan(None)
    readiness.for_plan(Plan.partial(4, 3))
    assert said == []
    for _ in range(3):
        readiness.for_plan(Plan.ps(4, 3, servers=(0, 2)))
        readiness.for_plan(Plan.subgroup(4, (0, 1, 2)))
    readiness.for_plan(Plan.ps(4, 3, servers=(1, 2)))
    assert said == [WarmServers([0, 2]), WarmServers([1])]


def test_nothing_for_a_mode_that_cannot_run_here(readiness: Readiness, said: list[Message]) -> None:
    nowhere = {"subgroup": "no process sets", "ps": "no servers"}
    readiness.for_plan(Plan.ps(4, 3, servers=(0, 2)), nowhere)
    readiness.for_links([2.5e7, 2.5e7, 2.5e7, 2.5e6], 1_000_000, nowhere)
    assert said == []


def test_a_few_sets_on_suspicion_and_no_more(readiness: Readiness, said: list[Message]) -> None:
    for out in range(8):
        readiness.for_links([2.5e6 if rank == out else 2.5e7 for rank in range(8)], 1_000_000)
    assert said == [MakeSet([rank for rank in range(8) if rank != out]) for out in range(4)]


@pytest.mark.parametrize(
    ("rates", "gradient_bytes", "wanted"),
    [
        ([2.5e7, 2.5e7, 2.5e7, 2.5e6], 1_000_000, [0, 1, 2]),
        ([2.5e6, 2.5e7, 2.4e7, 2.6e7], 1_000_000, [1, 2, 3]),
        ([2.5e7, 2.5e7, 2.5e7, 2.5e6], 10_000, None),  # Over in no time anyway.
        ([2.5e7, 2.4e7, 2.6e7, 2.5e7], 1_000_000_000, None),
        ([2.5e7, math.nan, 2.5e7, 2.5e6], 1_000_000, None),
        ([1e8, 1e6], 1_000_000_000, None),
    ],
)
def test_a_set_without_slow_links(
    readiness: Readiness, said: list[Message], rates: list[float], gradient_bytes: int, wanted: list[int] | None
) -> None:
    for _ in range(2):
        readiness.for_links(rates, gradient_bytes)
    assert said == ([MakeSet(wanted)] if wanted else [])


def test_servers_are_coming_after_a_first_freeze_and_while_their_price_is_not_paid() -> None:
    policy, sync = CostPolicy(4), Plan.sync(4)
    for end in (40, 540):
        assert policy.decide(window(steady(4), end=end), sync) is None and policy.coming is None
    # One freeze in so long a time is not worth leaving for, a second one would be.
    frozen = window(steady(4), end=544, silent_s={3: 1.9})
    assert policy.decide(frozen, sync) is None
    assert policy.coming is not None and policy.coming.mode == "ps" and 3 not in policy.coming.servers
    # A fast network: a step gains a millisecond, the way to servers costs some hundred.
    policy = CostPolicy(4)
    coming = []
    for end in range(40, 300):
        slow = window(steady(4, slow={3: 2.0}, usual_s=0.01), comm_bytes=20_000, end=end, allowed=("sync", "ps"))
        if policy.decide(slow, sync) is not None:
            break
        coming.append(policy.coming.mode if policy.coming is not None else "")
    first = coming.index("ps")
    assert set(coming[:first]) == {""} and set(coming[first:]) == {"ps"}, "not at the first loss, and then in time"
    assert 0.2 < first / len(coming) < 0.3
