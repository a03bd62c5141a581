"""While ranks wait for another one, that one says where in the program it stands."""

from __future__ import annotations

import pytest

from tests.multiproc.waiting_job import SLOW
from tests.support.launch import run_job

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(240)]


def test_the_awaited_rank_logs_the_call_in_which_it_stands() -> None:
    output = run_job("tests.multiproc.waiting_job", ranks=3, timeout_s=200.0).check().output
    lines = [line for line in output.splitlines() if "has been waiting for this rank" in line]
    assert lines, output
    assert all(f"[{SLOW}]<stderr>" in line and f"this rank, {SLOW}," in line for line in lines), lines
    assert "multiproc/waiting_job.py" in lines[0] and lines[0].endswith(" in nap"), lines
    assert f"has been waiting for ranks [{SLOW}]" in output
