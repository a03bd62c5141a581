"""Plans that change while training threads are elsewhere: nobody is left without a state, or without its servers."""

from __future__ import annotations

import pytest

from tests.multiproc.elsewhere import SCENARIOS, SERVED
from tests.multiproc.test_modes import check, facts_of

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(400)]

NAMES = tuple(SCENARIOS)
MODULE = "tests.multiproc.elsewhere"


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("met")])
def test_who_waits_in_a_collective_gives_its_state_to_the_rank_it_waits_for(name: str) -> None:
    facts = facts_of(NAMES, name, MODULE)
    check(facts)
    assert {rank["mode"] for rank in facts} == {"subgroup(1,2)"}
    assert facts[1]["stats"]["fetched"] > 0, "rank 1 had nothing to ask for"


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("long_step")])
def test_modes_of_servers_come_and_go_while_a_rank_is_inside_one_step(name: str) -> None:
    facts = facts_of(NAMES, name, MODULE)
    check(facts)
    assert facts[0]["passed"] == list(SERVED), "a plan was given up"


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("excluded")])
def test_a_plan_without_a_rank_that_is_fetching_the_state(name: str) -> None:
    facts = facts_of(NAMES, name, MODULE)
    check(facts)
    assert {rank["mode"] for rank in facts} == {name.partition(":")[2]}


def test_epochs_end_where_a_parent_of_the_tree_has_fewer_batches_than_its_children() -> None:
    facts = facts_of(NAMES, "tree", MODULE)
    check(facts)
    assert {rank["mode"] for rank in facts} == {"ps(tree=2)"}
    assert [sum(counts) for counts in zip(*(rank["counts"] for rank in facts), strict=True)] == [43] * 5


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("averaged")])
def test_local_steps_and_many_others_pass_while_a_rank_is_in_a_collective(name: str) -> None:
    facts = facts_of(NAMES, name, MODULE)
    check(facts)
    assert {rank["mode"] for rank in facts} == {"sync"}
