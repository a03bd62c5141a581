"""Sums that go through the hosts: those of Horovod to 1e-6, on all ranks alike, in `sync` only."""

from __future__ import annotations

from typing import Any

import pytest

from tests.multiproc.hierarchy_job import TOUR
from tests.support.launch import JOB_LIMIT_S, run_job

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(2 * JOB_LIMIT_S)]

ASKED = {"HOROVOD_HIERARCHICAL_ALLREDUCE": "1"}


def _job(what: str, ranks: int, hosts: str, **env: str) -> list[dict[str, Any]]:
    job = run_job("tests.multiproc.hierarchy_job", what, ranks=ranks, env=env, horovodrun_args=("-H", hosts))
    return job.check().results


@pytest.mark.parametrize("ranks, hosts", [(4, "localhost:2,127.0.0.1:2"), (3, "localhost:2,127.0.0.1:1")])
def test_parameters_are_those_of_horovod(ranks: int, hosts: str) -> None:
    results = _job("equal", ranks, hosts, **ASKED)
    assert [result["leads"] for result in results] == [True, False, True, False][:ranks]
    for variant in ("sync", "overlap", "fp16"):
        found = [result[variant] for result in results]
        assert len({each["digest"] for each in found}) == 1, f"replicas differ with {variant}"
        assert found[0]["difference"] <= (1e-2 if variant == "fp16" else 1e-6)
        assert [each["handed_out"] > 0 for each in found] == [True, True, ranks == 4, True][:ranks]


def test_relaxed_modes_reduce_over_all_ranks_at_once() -> None:
    results = _job("tour", 4, "localhost:2,127.0.0.1:2", **ASKED)
    assert len({result["digest"] for result in results}) == 1
    for result in results:
        assert result["used"] == {f"{place} {mode}": mode == "sync" for place, mode in enumerate(TOUR)}
        assert not result["lost"] and result["mismatches"] == 0


def test_not_without_being_asked_nor_on_one_host() -> None:
    for hosts, env in (("localhost:2,127.0.0.1:1", {}), ("localhost:3", ASKED)):
        assert not any(result["sets"] for result in _job("equal", 3, hosts, **env))
