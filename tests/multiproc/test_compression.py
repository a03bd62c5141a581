"""`Compression.auto` in real jobs: equal replicas, modes and back, checkpoints, accuracy."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.transmission.wire import HALF, LOW_RANK
from tests.multiproc.compression_job import LATE_POINTS, TOUR
from tests.support.launch import JOB_LIMIT_S, run_job

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(2 * JOB_LIMIT_S)]

LONG_S = 1100.0  # Whole trainings, that took 405 s beside another file's job.
SERVER_POINTS = 1.5  # Likewise of pushes; two seeds. A seed differs from itself by half a point.
POINTS = 0.3  # Of accuracy that may be lost, in the mean over the seeds.


def _job(scenario: str, ranks: int, timeout_s: float = JOB_LIMIT_S) -> list[dict[str, Any]]:
    return run_job("tests.multiproc.compression_job", scenario, ranks=ranks, timeout_s=timeout_s).check().results


def test_replicas_are_equal_through_modes_and_back() -> None:
    results = _job("tour", 4)
    assert len({result["digest"] for result in results}) == 1
    for rank, result in enumerate(results):
        assert list(result["forms"]) == [f"{i} {mode}" for i, mode in enumerate(TOUR)]
        for mode, forms in result["forms"].items():
            outside = rank == 3 and "subgroup" in mode
            assert outside or "local" in mode or "low rank" in forms, f"rank {rank} did not compress in {mode}"
        assert result["last"] < 0.7 * result["first"] and result["left"] > 0
    reduced_part, pushed_part = results[0]["parts"]
    assert 0.1 < reduced_part < 0.5 and 0.25 < pushed_part < 0.3, "decisions do not know what is sent"


def test_what_is_left_to_send_is_in_the_optimizers_state() -> None:
    results = _job("resumed", 2)
    assert all(result["same"] and "star_compression" in result["keys"] for result in results)
    with_state, without = zip(*(result["digests"] for result in results), strict=True)
    assert len(set(with_state)) == len(set(without)) == 1
    assert with_state[0] != without[0], "the state that was loaded makes no difference"
    for result in results:
        exact = result["exact"]
        assert not exact["lossy"] and len(set(exact["digests"])) == 1 and len(exact["warnings"]) == 1, exact


def test_accuracy_is_that_of_whole_gradients() -> None:
    results = _job("accuracy", 2)
    assert len({tuple(result["digests"]) for result in results}) == 1, "replicas differ"
    means = {name: sum(values) / len(values) for name, values in results[0]["accuracy"].items()}
    assert means["none"] > 90.0, "the task is not learned at all"
    assert means["low rank"] >= means["none"] - POINTS, means


def test_late_gradients_as_int8_train_as_well_as_whole_ones() -> None:
    results = _job("pushes", 3, LONG_S)
    assert len({result["digest"] for result in results}) == 1, "replicas differ back in sync"
    child = results[2]
    assert all(count > 100 for count in child["sent"]), child["sent"]
    assert child["left"] == [True, False], "what int8 left is in the state, and back in sync it has been sent"
    means = {name: sum(values) / len(values) for name, values in results[0]["accuracy"].items()}
    assert means["whole"] > 90.0, "the task is not learned at all"
    assert means["int8"] >= means["whole"] - LATE_POINTS, means


def test_pushes_to_servers_as_int8_train_as_well_as_whole_ones() -> None:
    results = _job("servers", 2, LONG_S)
    assert len({result["digest"] for result in results}) == 1, "replicas differ back in sync"
    means = {name: sum(values) / len(values) for name, values in results[0]["accuracy"].items()}
    assert all(count > 500 for count in results[0]["sent"]), results[0]["sent"]
    assert results[0]["left"] == [True, False], "what int8 left is in the state, and back in sync it has been sent"
    assert means["whole"] > 90.0, "the task is not learned at all"
    assert means["int8"] >= means["whole"] - SERVER_POINTS, means


def test_the_form_is_chosen_by_what_is_measured() -> None:
    results = _job("chosen", 2)
    assert len({result["digest"] for result in results}) == 1
    assert "reductions are" in results[0]["explain"] or "timed" in results[0]["explain"]


def test_low_rank_is_not_tried_where_ranks_have_different_numbers_of_threads() -> None:
    for result in _job("unequal", 2):
        assert result["lossiest"] == [HALF, LOW_RANK]
        assert "number of threads" in result["explain"][0] and "threads" not in result["explain"][1]
