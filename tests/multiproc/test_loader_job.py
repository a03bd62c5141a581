"""Real jobs that `shard` feeds by worker processes: every sample once, whoever leaves, and over a checkpoint."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest

from tests.multiproc.loader_job import (
    ALONE,
    BATCH,
    INNER,
    OUTER,
    SAMPLES,
    SEVERAL,
    SHORT,
    SHORT_EPOCHS,
    SHORT_STEPS,
    STOPS_AT,
    samples_of,
)
from tests.support.launch import JOB_LIMIT_S, JobResult, run_job

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(2 * JOB_LIMIT_S + 60)]

ALL = list(range(SAMPLES))


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> tuple[JobResult, JobResult]:
    """Four ranks that are interrupted in the middle of an epoch, and three that go on."""
    folder = tmp_path_factory.mktemp("loader")
    runs = []
    for part, ranks in (("first", 4), ("second", 3)):
        runs.append(run_job("tests.multiproc.loader_job", part, str(folder), ranks=ranks, fresh=True).check())
    return runs[0], runs[1]


def together(parts: list[list[Any]]) -> list[Any]:
    return sorted(item for part in parts for item in part)


def test_every_sample_once_in_a_relaxed_mode_whoever_leaves_its_loop(jobs: tuple[JobResult, JobResult]) -> None:
    first = jobs[0].results
    for epoch in range(4):
        parts = [each["epochs"][epoch] for each in first]
        assert together(parts) == ALL
    assert len(first[0]["epochs"][0]) == 3 * BATCH
    assert len({each["digest"] for each in first}) == 1
    *others, slow = (len(each["epochs"][3]) for each in first)
    assert slow < max(others), "the slow rank takes fewer"


def test_a_sampler_of_the_user_s_gives_the_order(jobs: tuple[JobResult, JobResult]) -> None:
    drawn = [together([each["weighted"][epoch] for each in jobs[0].results]) for epoch in range(2)]
    assert [len(each) for each in drawn] == [120, 120] and drawn[0] != drawn[1]
    assert max(Counter(drawn[0]).values()) > 1, "with replacement"


def test_ranges_of_work_are_handed_out_once(jobs: tuple[JobResult, JobResult]) -> None:
    for call in range(2):
        ranges = together([each["ranges"][call] for each in jobs[0].results])
        assert ranges[0][0] == 0 and ranges[-1][1] == SAMPLES
        assert all(one[1] == other[0] for one, other in itertools.pairwise(ranges))


def test_an_epoch_goes_on_behind_a_checkpoint_with_another_number_of_ranks(jobs: tuple[JobResult, JobResult]) -> None:
    before = together([each["seen"] for each in jobs[0].results])
    after = together([each["epochs"][0] for each in jobs[1].results])
    assert len(before) == 4 * STOPS_AT * BATCH
    assert sorted(before + after) == ALL
    assert together([each["epochs"][1] for each in jobs[1].results]) == ALL
    assert {each["epoch"] for each in jobs[1].results} == {6}
    assert len({each["digest"] for each in jobs[1].results}) == 1


def test_a_loop_may_draw_from_several_loaders_of_any_lengths() -> None:
    results = run_job("tests.multiproc.loader_job", "several", ".", ranks=3, fresh=True).check().results
    for mode in SEVERAL:
        each = [result[mode] for result in results]
        for epoch in range(2):
            for drawn in zip(*together([one["pairs"][epoch] for one in each]), strict=True):
                assert len(set(drawn)) == len(drawn) and INNER - 2 <= len(drawn) <= INNER, "each batch once"
            samples = together([one["restarted"][epoch] for one in each])
            assert len(set(samples)) == len(samples) == samples_of(OUTER)
        assert len({one["last"] for one in each}) == 1
        if mode == "sync":
            assert all(len({one["digests"][epoch] for one in each}) == 1 for epoch in range(2)), "ranks meet"


def test_no_step_behind_the_end_of_an_epoch_lacks_a_rank() -> None:
    """Its gradient would come a step later, in a mode that promises none of that."""
    made = run_job("tests.multiproc.loader_job", "short", ".", ranks=2).check().results
    steps = SHORT_EPOCHS * SHORT_STEPS
    assert made == [{how: {"steps": steps, "fresh": steps, "late": 0} for how in SHORT}] * 2


def test_a_state_where_ranks_step_alone_takes_nothing_for_consumed_that_the_parameters_lack() -> None:
    """And repeats no more than what other ranks have begun since they last heard of new parameters."""
    (states, *_) = run_job("tests.multiproc.loader_job", "alone", ".", ranks=3, fresh=True).check().results
    for mode in ALONE:
        for state in states[mode]:
            consumed, contained = set(state["consumed"]), set(state["contained"])
            assert consumed <= contained, (mode, sorted(consumed - contained))
            assert len(contained - consumed) <= 2 * 3 * BATCH, (mode, sorted(contained - consumed))
