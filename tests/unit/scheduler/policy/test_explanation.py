"""What a decision says of slow ranks agrees with what it was made of."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.cost.conditions import Conditions
from scheduler.plan.plan import Plan
from scheduler.policy import cost_policy
from scheduler.policy.candidates import StragglerSummary, summarize_stragglers
from scheduler.policy.cost_policy import CostPolicy
from scheduler.policy.explanation import describe_stragglers
from tests.support.windows import steady, window

NONE = "no rank is slow"


def test_a_link_that_is_normal_for_now_is_named() -> None:
    policy, decided = CostPolicy(4), []
    for end in range(40, 120, 4):
        rates = [1e9, 1e9, 1e9, 1e7 if end < 100 else 1e9]
        seen = window(
            steady(4), rates=rates, comm_bytes=4_000_000, end=end, allowed=("sync", "partial", "subgroup")
        )
        decided.append(policy.decide(seen, Plan.sync(4)))
    assert decided[-1] is not None
    assert decided[-1].reason.startswith("rank 3 had a slow link until step 96, which is expected again: subgroup(")
    assert policy.explain() == decided[-1].reason


@pytest.mark.parametrize(
    ("links", "last_slow", "said"),
    [
        ((1,), {1: 12}, "rank 1 had a slow link until step 12, which is expected again"),
        ((1, 2), {1: 12, 2: 20}, "ranks 1 and 2 had slow links until step 20, which are expected again"),
        ((1,), {}, "rank 1 had a slow link, which is expected again"),
        ((1, 2), {1: 32}, "rank 1 has a slow link; rank 2 had a slow link, which is expected again"),
    ],
)
def test_links_that_the_window_does_not_show(links: tuple[int, ...], last_slow: dict[int, int], said: str) -> None:
    stragglers = StragglerSummary(slow=(), intermittent=(), links=links, at_once=(1,))
    assert describe_stragglers(window(steady(4), end=32), stragglers, {}, {}, last_slow) == said


def test_a_slow_link_of_a_slow_rank_is_named_besides() -> None:
    stragglers = StragglerSummary(slow=(1,), intermittent=(), links=(1,), at_once=(1,))
    said = describe_stragglers(window(steady(4, slow={1: 3.0}), end=32), stragglers, {}, {}, {1: 8})
    assert said.startswith("rank 1 computes 3.0x slower since step 0; rank 1 had a slow link until step 8")


def test_ranks_at_the_limit_of_slow_are_named() -> None:
    """By the means rank 3 is slow, by no report: the others' median is above their mean."""
    times = np.full((32, 4), 0.1)
    times[::4, :3], times[:, 3] = 0.08, 0.125
    seen = window(times, end=32)
    conditions = Conditions.from_window(seen)
    assert conditions is not None
    stragglers = summarize_stragglers(conditions)
    assert stragglers.slow == (3,)
    assert describe_stragglers(seen, stragglers, {}) == "rank 3 is expected to be slower"


def summarized(found: list[StragglerSummary], conditions: Conditions, least_share: float) -> StragglerSummary:
    found.append(summarize_stragglers(conditions, least_share))
    return found[-1]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), n=st.integers(2, 6), steps=st.integers(3, 40))
def test_stragglers_are_never_nobody(data: st.DataObject, n: int, steps: int) -> None:
    factors = st.sampled_from([0.9, 1.0, 1.0, 1.0, 1.25, 1.31, 1.5, 4.0])
    rates = st.sampled_from([1e6, 1e7, 1e8, 1e9])
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    policy = CostPolicy(n)
    for end in range(40, 60, 4):
        always = np.array(data.draw(st.lists(factors, min_size=n, max_size=n)))
        times = 0.1 * always * rng.choice([1.0, 1.0, 1.3, 3.0], size=(steps, n))
        seen = window(times, rates=data.draw(st.lists(rates, min_size=n, max_size=n)), end=end)
        found: list[StragglerSummary] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cost_policy, "summarize_stragglers", partial(summarized, found))
            plan = policy.decide(seen, Plan.sync(n))
        if found[0]:
            assert NONE not in policy.explain() and (plan is None or NONE not in plan.reason)
