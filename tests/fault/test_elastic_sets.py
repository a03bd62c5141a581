"""A rank of an elastic job with process sets is killed: the survivors go on, and make their sets anew."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from tests.support.launch import run_job

pytestmark = [pytest.mark.fault, pytest.mark.timeout(150)]


def test_survivors_with_process_sets_go_on_from_their_last_commit(tmp_path: Path) -> None:
    """Patch 0003: without it every survivor aborts."""
    script = tmp_path / "hosts.sh"
    # Two names of this machine: Horovod gives up the whole host of a rank that dies.
    script.write_text("#!/bin/sh\necho localhost:2\necho 127.0.0.1:2\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    result = run_job(
        "tests.fault.elastic_sets_job",
        ranks=4,
        env={"HOROVOD_GLOO_TIMEOUT_SECONDS": "12"},
        timeout_s=100.0,
        horovodrun_args=("--min-np", "2", "--max-np", "4", "--host-discovery-script", str(script)),
    )
    survivors = [facts for facts in result.results if facts]
    assert len(survivors) == 2, result.tail
    for facts in survivors:
        assert facts["step"] == 40 and facts["size"] == 2 and facts["total"] == 40.0
        (first_step, first_size, why), *_, (last_step, last_size, why_after) = facts["resumed"]
        assert (first_step, first_size, why) == (0, 4, None)
        assert (last_size, why_after) == (2, None) and last_step in (5, 10), "it goes on from a commit, with a set"
