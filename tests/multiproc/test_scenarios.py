"""Real `horovodrun` jobs of three ranks, one of them slow: replicas stay bit-equal and nothing is lost."""

from __future__ import annotations

import functools
import statistics
from typing import Any

import pytest

from tests.multiproc.scenarios import SCENARIOS
from tests.support.launch import JOB_LIMIT_S, JobResult, run_job

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(JOB_LIMIT_S + 60)]

RANKS = 3
# `auto` may act on a slow rank by a mode in which no gradient is late: `sync(balanced)` for example.
NOT_FOLDING = (
    "auto_without_a_slow_rank", "auto_with_a_rank_that_recovers", "switching", "shutdown_of_horovod_torch",
)  # fmt: skip
FOLDING = [name for name in SCENARIOS if name not in NOT_FOLDING]
# A rank that fails in the middle of a scenario leaves the others in a collective.
STALL = ("--stall-check-warning-time-seconds", "10", "--stall-check-shutdown-time-seconds", "120")


@functools.cache
def _job() -> JobResult:
    return run_job("tests.multiproc.scenarios", ranks=RANKS, horovodrun_args=STALL, fresh=True)


def facts_of(name: str) -> list[dict[str, Any]]:
    job = _job()
    facts = [result.get("facts", {}).get(name) for result in job.results]
    running = [result.get("running") for result in job.results]
    assert all(facts), f"the job ended during {running}:\n{job.tail}"
    return facts  # type: ignore[return-value]


def values(name: str, fact: str) -> list[Any]:
    return [facts[fact] for facts in facts_of(name)]


@pytest.mark.parametrize("name", SCENARIOS)
def test_replicas_are_bit_equal(name: str) -> None:
    digests = values(name, "digest")
    assert digests == digests[:1] * RANKS
    steps = [stats["steps"] for stats in values(name, "stats")]
    assert steps == steps[:1] * RANKS
    assert [stats["mismatches"] for stats in values(name, "stats")] == [0] * RANKS


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_gradient_is_applied_or_counted(name: str) -> None:
    for all_stats in values(name, "all_stats"):
        for s in all_stats:
            total = s["applied_weight"] + s["damped_weight"] + s["dropped_weight"] + s["pending_weight"]
            assert s["produced_weight"] == pytest.approx(total) and s["produced_weight"] > 0
            closed = name != "shutdown_of_horovod_torch"
            assert not closed or s["pending_weight"] == 0, "an optimizer that is closed keeps nothing"


@pytest.mark.parametrize("name", FOLDING)
def test_late_gradients_are_folded(name: str) -> None:
    stats = values(name, "stats")
    assert sum(s["folds"] for s in stats) > 0 and sum(s["late"] for s in stats) > 0


@pytest.mark.parametrize("mode", ["partial", "subgroup(0,1)", "ps(1)"])
def test_a_grad_scaler_after_a_warm_up_takes_all_ranks_to_sync_as_equals(mode: str) -> None:
    facts = [scaled[mode] for scaled in values("a_grad_scaler_after_a_warm_up", "scaled")]
    assert len({each["digest"] for each in facts}) == 1
    assert [each["finite"] and each["moved"] for each in facts] == [True] * RANKS
    assert len({each["scale"] for each in facts}) == 1 and facts[0]["scale"] >= 2048.0
    assert facts[0]["relaxed"].startswith(mode[:2]), "it came while a relaxed mode was in force"


@pytest.mark.parametrize("mode", ["partial", "subgroup(0,1)", "ps(1)", "grouped(2)", "local(3)"])
def test_a_group_added_in_a_relaxed_mode_is_trained_alike_on_all_ranks(mode: str) -> None:
    facts = [thawed[mode] for thawed in values("a_layer_thawed_in_relaxed_modes", "thawed")]
    assert len({each["digest"] for each in facts}) == 1
    assert all(each["moved"] for each in facts) and facts[0]["relaxed"].startswith(mode[:2])
    for each in facts:
        assert "between backward() and step()" in each["refused"] and each["groups"] == 1, "nothing half-applied"
    for s in (stats for each in facts for stats in each["all_stats"]):
        total = s["applied_weight"] + s["damped_weight"] + s["dropped_weight"] + s["pending_weight"]
        assert s["produced_weight"] == pytest.approx(total)


def test_a_layer_that_no_bucket_holds_is_trained_in_sync() -> None:
    name = "a_layer_thawed_without_a_group"
    assert "partial(2)" in values(name, "relaxed") and values(name, "mode") == ["sync"] * RANKS
    assert "0.weight is trained, but was frozen when the optimizer was wrapped" in values(name, "explain")[0]


@pytest.mark.parametrize("mode", ["sync", "ps(1)", "partial"])
def test_ranks_that_have_joined_add_zeros_to_the_reductions_of_the_others(mode: str) -> None:
    facts = [joined[mode] for joined in values("joining_while_others_reduce", "joined")]
    each = [3.0, pytest.approx(4 / 3, abs=1e-3), 2.0, 4.0, 4.0, pytest.approx(4.0)]
    assert [rank["found"] for rank in facts] == [[each] * 4, [each] * 4, []]
    assert len({rank["joined"] for rank in facts}) == len({rank["digest"] for rank in facts}) == 1
    assert [rank["together"] for rank in facts] == [3.0] * RANKS, "names agree again"
    assert len({rank["last"] for rank in facts}) == 1 and facts[0]["last"] in (0, 1), "not the slow rank"


def test_every_sample_once_per_epoch() -> None:
    per_rank = values("shard_in_partial", "samples")
    epochs = len(per_rank[0])
    assert epochs >= 3
    for epoch in range(epochs):
        taken = sorted(index for samples in per_rank for index in samples[epoch])
        assert taken == list(range(203))
    counts = [sum(len(epoch) for epoch in samples) for samples in per_rank]
    assert counts[RANKS - 1] < counts[0], "the slow rank takes fewer"
    orders = [samples[:2] for samples in per_rank]
    assert all(first != second for first, second in orders), "every epoch has an order of its own"


def test_a_rank_that_leaves_its_loop_early_leaves_its_samples_to_the_others() -> None:
    """Nobody waits for it at the end of that epoch, and all meet at the end of the next that they all come to."""
    per_rank = values("one_rank_leaves_its_loop_early", "samples")
    for epoch in range(6):
        assert sorted(i for samples in per_rank for i in samples[epoch][1]) == list(range(203))
    leavers = [sum(samples[epoch][0] for samples in per_rank) for epoch in range(6)]
    assert sum(leavers) >= 1 and max(leavers) == 1, "a slow rank may come to the end of an epoch before it would leave"
    digests = values("one_rank_leaves_its_loop_early", "digests")
    for epoch in range(6):
        assert leavers[epoch] or len({of_rank[epoch] for of_rank in digests}) == 1


def test_replicas_are_bit_equal_at_the_end_of_every_epoch() -> None:
    digests = values("shard_in_partial", "digests")
    assert digests == digests[:1] * RANKS and len(set(digests[0])) == len(digests[0]) >= 3


def test_epochs_with_fetches_end_equal() -> None:
    digests = values("clipping_by_hand_and_switching_with_shards", "digests")
    assert digests == digests[:1] * RANKS
    assert sum(stats["fetched"] for stats in values("clipping_by_hand_and_switching_with_shards", "stats")) > 0


def test_modes_change_while_training_goes_on() -> None:
    for modes in values("switching", "modes"):
        assert len(modes) >= 2


def test_own_schedules_stay_own() -> None:
    for facts in facts_of("schedulers_of_their_own"):
        assert facts["own_lr"] == pytest.approx(facts["expected_lr"])


def test_what_a_helper_cannot_repeat_is_fetched() -> None:
    assert sum(stats["fetched"] for stats in values("clipping_by_hand", "stats")) > 0
    assert sum(stats["fetched"] for stats in values("clipping_inside", "stats")) == 0


def test_both_optimizers_are_equal_everywhere() -> None:
    others = values("two_optimizers", "other")
    assert others == others[:1] * RANKS


def test_join() -> None:
    joined = values("joining", "joined")
    assert joined == joined[:1] * RANKS


def test_the_others_train_on_during_a_long_evaluation() -> None:
    assert values("a_long_evaluation", "missed")[RANKS - 1] >= 20


def test_collectives_of_the_user() -> None:
    means = values("collectives_at_the_end_of_epochs", "means")
    assert len(means[0]) >= 4 and means == [[1.0] * len(means[0])] * RANKS


def test_functions_of_horovod_torch_meet_the_other_ranks() -> None:
    """Without names of ours every rank would wait for ever here, and with the program's own replicas would differ."""
    means = values("functions_of_horovod_torch", "means")
    assert len(means[0]) >= 4 and means == [[[1.0, 1.0]] * len(means[0])] * RANKS
    digests = values("functions_of_horovod_torch", "digests")
    assert digests == digests[:1] * RANKS and len(set(digests[0])) == len(digests[0])


def test_shutdown_of_horovod_torch_waits_for_the_slow_rank() -> None:
    assert values("shutdown_of_horovod_torch", "initialized") == [False] * RANKS
    assert "leaves with the parameters it has" not in _job().tail


def test_auto_stays_in_sync_while_nobody_is_slow() -> None:
    """Nobody is slow on purpose. A busy machine may slow a rank down all the same: then `auto` is right to act."""
    if values("auto_without_a_slow_rank", "modes")[0] == ["sync"]:
        assert sum(stats["folds"] + stats["late"] for stats in values("auto_without_a_slow_rank", "stats")) == 0
        return
    slowest = max(_slowness(values("auto_without_a_slow_rank", "times_s")))
    assert slowest > 1.2, "ranks as fast as each other, by this test's own clock"


def _slowness(times_s: list[list[float]], window: int = 5) -> list[float]:
    """For every few steps, how much slower the slowest rank was than the median of the ranks."""
    medians = [
        [statistics.median(rank[first : first + window]) for rank in times_s]
        for first in range(len(times_s[0]) - window + 1)
    ]
    return [max(each) / statistics.median(each) for each in medians]


def test_auto_relaxes_and_returns() -> None:
    modes = values("auto_with_a_rank_that_recovers", "modes")[0]
    assert modes[0] == modes[-1] == "sync" and set(modes) > {"sync"}


def test_the_job_ends_well() -> None:
    job = _job().check()
    assert [result["running"] for result in job.results] == [""] * RANKS
