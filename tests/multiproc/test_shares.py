"""Batch shares in real jobs of four ranks: exact to one process with the global batch, which never changes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.multiproc.shares_job import BATCH, LESS, SAMPLES, check
from tests.support.launch import JOB_LIMIT_S, run_job

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(2 * JOB_LIMIT_S)]

RANKS = 4
WHOLE = RANKS * BATCH


def _job(scenario: str) -> list[dict[str, Any]]:
    return run_job("tests.multiproc.shares_job", scenario, ranks=RANKS).check().results


def test_unequal_batches_are_one_process_with_the_global_batch() -> None:
    """AdamW with weight decay and clipping; b = (24, 12, 16, 24) of 76."""
    results = _job("exact")
    check(results)
    assert results[0]["sizes"][-1][-2] == [24, 12, 16, 24]
    assert sum(sizes == [24, 12, 16, 24] for epoch in results[0]["sizes"] for sizes in epoch) >= SAMPLES // WHOLE
    assert results[0]["mode"] == "sync(24,12,16,24)"


@pytest.mark.parametrize("scenario", ["balanced", "loaded_ahead", "several", "auto"])
def test_a_slow_rank_gets_fewer_samples(scenario: str) -> None:
    results = _job(scenario)
    check(results)
    steps = [sizes for epoch in results[0]["sizes"] for sizes in epoch]
    assert min(sizes[2] for sizes in steps if sum(sizes) == WHOLE) < LESS
    assert "sync(balanced)" in results[0]["report"]


def test_what_refuses_relaxed_modes_leaves_the_exact_ones() -> None:
    results = _job("scaled")
    check(results)
    assert "sync(balanced)" in results[0]["report"] and "only exact modes: a GradScaler" in results[0]["explain"]


def test_without_shard_shares_are_refused_with_the_reason() -> None:
    for result in _job("unfed"):
        assert "sync(balanced) needs hvd.shard" in result["explain"] and result["mode"] == "sync"


def test_what_cannot_be_is_refused_with_what_to_do() -> None:
    for result in _job("wrong"):
        few, empty, inexact, unknown, other = result["errors"]
        assert "one for each of the 4 ranks" in few and "at least 1" in empty
        assert "'bounded'" in inexact and "expected 'exact'" in unknown
        assert "sum to 10" in other and "76 samples" in other


def test_a_batch_normalized_network_is_warned_of_once_and_gets_whole_steps_alone_with_drop_last() -> None:
    results = _job("normalized")
    assert [len(result["warnings"]) for result in results] == [1, 0, 0, 0]
    assert "GroupNorm" in results[0]["warnings"][0]
    assert all(result["once"] for result in results)
    assert len(results[0]["sizes"]) >= 3, "the shares are ordered within some epoch"
    for epoch in results[0]["sizes"][-3:]:
        assert epoch == [[30] * 4, [26] * 4, [18] * 4, [2] * 4]
