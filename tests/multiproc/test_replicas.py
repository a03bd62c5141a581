"""Behind every collective of the user's all replicas are the same, in every relaxed mode, with and without `shard`."""

from __future__ import annotations

import pytest

from tests.multiproc.test_modes import facts_of
from tests.support.shared import SHARED_LIMIT_S

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(SHARED_LIMIT_S)]

PLAIN = ("partial(3)", "partial(1)", "subgroup(0,1,2)", "subgroup(1,2)", "local(3)", "grouped(2)", "ps(1)", "ps(3)")
PLAIN += ("ssp(2)", "switching")
EXCHANGED = tuple(f"exchanged:partial(2):{how}" for how in ("copied", "replaced", "copied,met", "copied,saved"))
EXCHANGED += ("exchanged:ps(2):copied,met", "exchanged:grouped(2):copied,met")
EXCHANGED += ("exchanged:local(3):copied,met", "exchanged:local(3):replaced", "exchanged:local(3):copied,saved")
BETWEEN = ("between:partial(1):eager", "between:subgroup(0,1,2):eager", "between:local(3):eager")
BETWEEN += ("between:grouped(2):eager", "between:ps(1):eager", "between:partial(1):compiled")
LOADED = ("loaded:partial(2):model", "loaded:partial(2):both", "loaded:subgroup(0,1,2):both", "loaded:local(3):both")
LOADED += ("loaded:ps(2):model", "loaded:grouped(2):both")
# Last: its job has no Horovod afterwards.
NAMES = PLAIN + tuple(f"{name}:shard" for name in ("partial(3)", "subgroup(1,2)", "local(3)", "ps(2)"))
NAMES += (*EXCHANGED, *LOADED, *BETWEEN, "shutdown")


@pytest.mark.parametrize("name", NAMES[: NAMES.index(EXCHANGED[0])])
def test_replicas_are_equal_behind_a_collective_of_the_users(name: str) -> None:
    facts = facts_of(NAMES, name, "tests.multiproc.replicas")
    for rank in facts:
        assert [one for one in rank["schedules"] if one["wrong"] or not one["losses_equal"]] == []
        assert rank["at_the_end"] == []
        assert rank["stats"]["mismatches"] == 0
    if not name.startswith("switching"):
        assert {one["mode"] for one in facts[0]["schedules"]} != {"sync"}, "the mode never was in force"


@pytest.mark.parametrize("name", EXCHANGED)
def test_weights_that_a_rank_evaluates_in_place_of_its_own_are_left_alone_and_not_taken_for_them(name: str) -> None:
    facts = facts_of(NAMES, name, "tests.multiproc.replicas")
    assert facts[0]["touched"] == [False] * 3
    for rank in facts:
        assert rank["wrong"] == rank["at_the_end"] == []
        assert rank["stats"]["mismatches"] == 0


@pytest.mark.parametrize("name", BETWEEN)
def test_a_collective_between_forward_and_backward_leaves_the_parameters_of_the_pass_alone(name: str) -> None:
    facts = facts_of(NAMES, name, "tests.multiproc.replicas")
    for rank in facts:
        assert rank["changed"] == 0 and rank["wrong"] == rank["at_the_end"] == []
        assert rank["stats"]["mismatches"] == 0
    if name.startswith("between:partial"):
        assert any(rank["behind"] for rank in facts), "no rank was behind in a collective"


@pytest.mark.parametrize("name", LOADED)
def test_what_a_rank_loads_while_the_others_train_is_what_all_get_by_its_broadcast(name: str) -> None:
    facts = facts_of(NAMES, name, "tests.multiproc.replicas")
    for rank in facts:
        assert rank["wrong"] == rank["at_the_end"] == []
        assert rank["stats"]["mismatches"] == 0


def test_replicas_are_equal_after_shutdown() -> None:
    facts = facts_of(NAMES, "shutdown", "tests.multiproc.replicas")
    assert len({rank["digest"] for rank in facts}) == 1
