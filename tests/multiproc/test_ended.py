"""The newest optimizer state is on every rank after `close` and `shutdown`, also if it was elsewhere until then."""

from __future__ import annotations

import pytest

from tests.multiproc.ended_job import MORE
from tests.support.launch import JOB_LIMIT_S, run_job

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(JOB_LIMIT_S + 60)]


@pytest.mark.parametrize("end", ["close", "shutdown"])
@pytest.mark.parametrize("mode", ["ps(1)", "grouped(2)", "subgroup(0,1)"])
def test_the_state_is_here_when_its_mode_has_ended(mode: str, end: str) -> None:
    """A program saves it then, or trains on after another `init`."""
    results = run_job("tests.multiproc.ended_job", mode, end, ranks=3).check().results
    assert {result["mode"] for result in results} == {mode}
    assert min(result["more"] for result in results) >= MORE
    for what in ("digest", "later"):
        assert len({result[what] for result in results}) == 1, what
