"""With several optimizers in one loop, none is in `local`, where ranks would wait for each other crosswise."""

from __future__ import annotations

import pytest

from scheduler.plan.mode_names import NOT_LOCAL
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
