"""While ranks wait for another one, that one says where in the program it stands."""

from __future__ import annotations

import pytest

from tests.multiproc.waiting_job import AWAITED, SLOW, STANDS
from tests.support.launch import JOB_LIMIT_S, run_job

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(JOB_LIMIT_S + 60)]


def test_the_awaited_rank_logs_the_call_in_which_it_stands() -> None:
    output = run_job("tests.multiproc.waiting_job", ranks=3).check().output
    lines = [line for line in output.splitlines() if STANDS in line]
    # On a busy machine ranks may also wait for others for a second.
    standing = [line for line in lines if line.startswith(f"[{SLOW}]<stderr>") and line.endswith(" in nap")]
    assert standing and "multiproc/waiting_job.py" in standing[0], output
    assert all(line.startswith(f"[{line.split('this rank, ')[1][0]}]<stderr>") for line in lines), lines
    assert AWAITED in output
