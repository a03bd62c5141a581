"""Plans that change while training threads are elsewhere: nobody is left without a state, or without its servers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.multiproc.elsewhere import SCENARIOS, SERVED
from tests.multiproc.test_modes import check, facts_of
from tests.support.shared import SHARED_LIMIT_S

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(SHARED_LIMIT_S)]

MODULE = "tests.multiproc.elsewhere"


def names_of(kind: str) -> tuple[str, ...]:
    """Scenarios of a kind."""
    return tuple(name for name in SCENARIOS if name.partition(":")[0] == kind)


def facts(name: str) -> list[dict[str, Any]]:
    """What the ranks found out, of which all hold that must hold."""
    found = facts_of(tuple(SCENARIOS), name, MODULE)
    check(found)
    return found


@pytest.mark.parametrize("name", names_of("met"))
def test_who_waits_in_a_collective_gives_its_state_to_the_rank_it_waits_for(name: str) -> None:
    ranks = facts(name)
    assert {rank["mode"] for rank in ranks} == {"subgroup(1,2)"}
    assert ranks[1]["stats"]["fetched"] > 0, "rank 1 had nothing to ask for"


@pytest.mark.parametrize("name", names_of("long_step"))
def test_modes_of_servers_come_and_go_while_a_rank_is_inside_one_step(name: str) -> None:
    ranks = facts(name)
    assert ranks[0]["passed"] == list(SERVED), "a plan was given up"


@pytest.mark.parametrize("name", names_of("excluded"))
def test_a_plan_without_a_rank_that_is_fetching_the_state(name: str) -> None:
    ranks = facts(name)
    assert {rank["mode"] for rank in ranks} == {name.partition(":")[2]}


@pytest.mark.parametrize("name", names_of("averaged"))
def test_local_steps_and_many_others_pass_while_a_rank_is_in_a_collective(name: str) -> None:
    ranks = facts(name)
    assert {rank["mode"] for rank in ranks} == {"sync"}
