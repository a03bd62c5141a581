"""The modes of `test_modes.py` with transfers behind compute, in jobs of their own."""

from __future__ import annotations

import pytest

from tests.multiproc.modes import LEAST_SWITCHES
from tests.multiproc.modes_transmission import varied
from tests.multiproc.test_modes import check, check_counted, check_reloaded, facts_of
from tests.support.shared import SHARED_LIMIT_S

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(SHARED_LIMIT_S)]

BACKGROUND = ("local(5)", "local(0.2s)", "checkpoint:local(4)", "ssgd", "ps(2)", "ps(backup=1)", "checkpoint:ps(2)")
BACKGROUND += ("counted:local(0.2s)", "reload:ps(2)", "subgroup(0,1,2)", "checkpoint:subgroup(0,1,2)")
BACKGROUND += ("switch:3:30:slow",)
TRANSMISSION = ("switch:11:30:slow",)


@pytest.mark.parametrize("name", BACKGROUND)
def test_with_transfers_behind_compute_replicas_are_equal_where_ranks_meet(name: str) -> None:
    facts = facts_of(BACKGROUND, name, "tests.multiproc.modes_background")
    check(facts)
    if name.startswith("reload"):
        check_reloaded(facts)
    elif name.startswith("counted"):
        check_counted(facts)
    elif name.startswith("checkpoint"):
        assert len({rank["loaded"] for rank in facts}) == 1 and all(rank["same"] for rank in facts)
    elif name.startswith("switch"):
        assert len(facts[0]["seen"]) > LEAST_SWITCHES
    else:
        assert all(rank["modes"] != ["sync"] and rank["state"] == 4 for rank in facts)


@pytest.mark.parametrize("name", TRANSMISSION)
def test_switches_between_variants_that_send_behind_compute_and_those_that_do_not(name: str) -> None:
    facts = facts_of(TRANSMISSION, name, "tests.multiproc.modes_transmission")
    check(facts)
    seen = facts[0]["seen"]
    assert len(seen) > LEAST_SWITCHES
    assert varied(seen), seen
