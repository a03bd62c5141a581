"""With several optimizers in one loop, none is in a mode in which ranks would wait for each other crosswise."""

from __future__ import annotations

import pytest

from scheduler.plan.mode_names import NOT_LOCAL, NOT_SERVERS, ONLY_EXACT
from tests.support.launch import JOB_LIMIT_S, run_job

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(JOB_LIMIT_S + 60)]


@pytest.mark.parametrize(
    ("first", "second", "when"),
    [("local(4)", "local(0.3s)", "before"), ("local(0.3s)", "sync", "before"), ("local(0.3s)", "sync", "later")],
)
def test_a_loop_with_two_optimizers_is_not_held_up_by_local(first: str, second: str, when: str) -> None:
    result = run_job("tests.multiproc.two_optimizers_job", first, second, when, ranks=2).check()
    ranks = result.results
    assert [rank["modes"] for rank in ranks] == [["0 sync", "1 sync"]] * 2
    assert ranks[0]["weights"] == ranks[1]["weights"]
    assert [rank["alone"] for rank in ranks] == [first if when == "later" else ""] * 2
    assert NOT_LOCAL in result.output
    if second != "sync":
        assert NOT_LOCAL in ranks[0]["explain"]


def test_servers_at_which_ranks_would_wait_crosswise_are_left_where_another_optimizer_is_made() -> None:
    result = run_job("tests.multiproc.two_optimizers_job", "ps(2)", "sync", "later", ranks=3).check()
    ranks = result.results
    assert [rank["alone"] for rank in ranks] == ["ps(2)"] * 3
    assert [rank["modes"] for rank in ranks] == [["0 sync", "1 sync"]] * 3
    assert ranks[0]["weights"] == ranks[1]["weights"] == ranks[2]["weights"]
    assert NOT_SERVERS in result.output


def test_auto_stays_in_exact_modes_with_two_steps_of_one_optimizer_to_each_of_the_other() -> None:
    """A rank is two to five times slower than the other: alone the optimizers would leave `sync`."""
    result = run_job("tests.multiproc.two_optimizers_job", "auto", "auto", "before", "2", ranks=2).check()
    ranks = result.results
    assert [rank["modes"] for rank in ranks] == [["0 sync", "1 sync"]] * 2
    assert ranks[0]["weights"] == ranks[1]["weights"]
    assert ONLY_EXACT in result.output and ONLY_EXACT in ranks[0]["explain"]
