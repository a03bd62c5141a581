"""Micro-batches in real jobs of four ranks: exact to one process with the global batch, slow ranks compute fewer."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.rules.step_layout import LONGEST
from tests.multiproc.shares_job import SAMPLES
from tests.multiproc.steal_job import BATCH, LESS, PARTS, RANKS, SLOW_EPOCHS
from tests.support.launch import JOB_LIMIT_S, run_job

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(2 * JOB_LIMIT_S)]

WHOLE = RANKS * BATCH


def _job(scenario: str) -> list[dict[str, Any]]:
    return run_job("tests.multiproc.steal_job", scenario, ranks=RANKS).check().results


def _check(results: list[dict[str, Any]]) -> None:
    """Every step but the last one of an epoch has the global batch, every sample is taken once, nothing is late, every
    rank has a part, and no pass more samples than two of the user's batches."""
    for result in results:
        assert all(result["once"])
        assert result["error"] < 1e-6 and result["steps"][0] == result["steps"][1]
        assert result["stats"]["max_staleness"] == result["stats"]["folds"] == result["stats"]["drops"] == 0
        assert result["samples"] == [[WHOLE] * (SAMPLES // WHOLE) + [SAMPLES % WHOLE]] * len(result["samples"])
        for epoch in zip(*result["parts"], strict=True):
            for counts in list(zip(*epoch, strict=True))[:-1]:
                assert min(counts) >= 1
        assert result["most"] <= LONGEST * BATCH


def _mean_part(results: list[dict[str, Any]], rank: int, epochs: slice) -> float:
    """Samples of a rank in a step over those of the user's batch."""
    found = [count for epoch in results[0]["own"][rank][epochs] for count in epoch[:-1]]
    return sum(found) / len(found) / BATCH


def _parts_of_epoch(results: list[dict[str, Any]], epoch: int) -> list[float]:
    """The same of every rank, in one epoch."""
    return [_mean_part(results, rank, slice(epoch, epoch + 1)) for rank in range(RANKS)]


def test_in_sync_every_rank_has_its_own_micro_batches() -> None:
    results = _job("plain")
    _check(results)
    for rank in results[0]["parts"]:
        assert all(set(epoch[:-1]) == {PARTS} for epoch in rank)


@pytest.mark.parametrize("scenario", ["steal", "auto"])
def test_a_slow_rank_computes_fewer_micro_batches_and_one_that_is_well_again_more(scenario: str) -> None:
    results = _job(scenario)
    _check(results)
    assert "sync(steal)" in results[0]["report"]
    slow, later = SLOW_EPOCHS[2], SLOW_EPOCHS[0]
    if scenario == "auto":  # On a machine whose cores are taken away it may find for a while that `sync` does as well.
        assert min(_mean_part(results, 2, slow), _mean_part(results, 0, later)) < LESS
        return
    # Both together against their own other epochs: on a busy machine a rank of full speed may get less for a while.
    while_slow = _mean_part(results, 2, slow) + _mean_part(results, 0, later)
    assert while_slow < _mean_part(results, 2, later) + _mean_part(results, 0, slow)


def test_micro_batches_that_workers_load_ahead_are_taken_over_too() -> None:
    results = _job("loaded_ahead")
    _check(results)
    # Each of them has been slow for an epoch, or is from its beginning.
    slow = {(epoch, rank): _parts_of_epoch(results, epoch) for epoch, rank in ((1, 2), (2, 0), (3, 0))}
    assert any(parts[rank] < (sum(parts) - parts[rank]) / (RANKS - 1) for (_, rank), parts in slow.items()), slow


def test_micro_batches_of_different_sizes_weigh_what_they_have() -> None:
    _check(_job("uneven"))


def test_an_evaluation_in_micro_batches_inside_a_step_leaves_its_gradients_alone() -> None:
    _check(_job("inside"))


@pytest.mark.parametrize("scenario", ["weighed", "by_hand"])
def test_the_gradient_is_the_mean_over_the_step(scenario: str) -> None:
    """Over its tokens; and where it is clipped by hand, which inside a step has nothing to work on."""
    for result in _job(scenario):
        assert result["error"] < 1e-6
        assert all(stepped == seen for stepped, seen in result.get("norms", []))


def test_ranks_without_a_part_in_a_short_last_step_have_its_parameters_too() -> None:
    results = _job("short")
    assert all(result["error"] < 1e-6 and result["steps"] == 27 for result in results)
    assert sorted(result["own"] for result in results)[0] < 27  # Of its own; the others' were applied for it.


@pytest.mark.parametrize("scenario", ["left", "left_inside", "resumed", "kept"])
def test_every_sample_once_where_a_rank_leaves_or_an_epoch_goes_on_elsewhere(scenario: str) -> None:
    assert sorted(i for result in _job(scenario) for i in result["taken"]) == list(range(SAMPLES))


@pytest.mark.parametrize("scenario", ["all_leave_inside", "one_leaves_inside"])
def test_a_loop_that_is_left_inside_a_step_leaves_nothing_behind(scenario: str) -> None:
    for rank, result in enumerate(_job(scenario)):
        first, *others = result["means"]
        assert len(first) == (4 if scenario == "one_leaves_inside" and rank != 1 else 1)
        assert all(mean == pytest.approx(1000.0) for mean in first)
        assert [len(means) for means in others] == [4, 4]
        assert all(mean == pytest.approx(1.0) for means in others for mean in means)


def test_without_micro_batches_it_is_refused_with_the_reason() -> None:
    for result in _job("unfed"):
        assert "needs hvd.shard(..., microbatches=k)" in result["explain"] and result["mode"] == "sync"


def test_what_cannot_be_is_refused_with_what_to_do() -> None:
    for result in _job("wrong"):
        ahead, many, relaxed, shares, stream = result["errors"]
        assert "second micro-batch before the first gave a gradient" in ahead and "leave it out" in ahead
        assert "1 to the batch_size, 20" in many and "leave microbatches out" in relaxed
        assert "leave microbatches out" in shares and "IterableDataset" in stream
