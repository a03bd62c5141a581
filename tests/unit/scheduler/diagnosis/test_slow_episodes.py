"""Since when ranks are slow, over windows that reach back less far than that, the sentences about it, and changes."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import pytest

from scheduler.diagnosis.slow_episodes import CALM_REPORTS, SlowSince, changes_per_step
from scheduler.diagnosis.window_stats import Readings
from scheduler.plan.plan import MODES, Plan
from scheduler.policy.cost_policy import CostPolicy
from scheduler.records import Window
from star_hvd.config import Config
from tests.support.job_states import Job
from tests.support.windows import steady, window

DEPTH = 64


def windows_of(
    slow: list[bool], n: int = 4, first: int = 0, allowed: Sequence[str] = MODES
) -> list[Window]:
    """What a job knows after every step, of its last reports: the last rank is four times slower in some of them."""
    times = np.full((len(slow), n), 0.1)
    times[:, n - 1] *= np.where(slow, 4.0, 1.0)
    return [
        window(times[max(0, end - DEPTH) : end], end=first + end, comm_bytes=10_000, allowed=allowed)
        for end in range(1, len(slow) + 1)
    ]


def steps_after(slow: list[bool]) -> dict[int, int]:
    since = SlowSince()
    for one in windows_of(slow):
        since.note(one)
        since.note(one)  # Who looks twice learns nothing new.
    return dict(since.steps)


def test_the_first_slow_step_is_remembered_beyond_the_window() -> None:
    assert steps_after([True] * 300) == {3: 0}
    assert steps_after([False] * 20 + [True] * 300) == {3: 20}
    assert steps_after([True] * 5) == {3: 0}, "as many as there are, fewer than make a calm"
    assert steps_after([True, False, False, False] * 50) == {3: 0}, "slow again and again is one episode"


def test_a_calm_ends_an_episode() -> None:
    short, long = [False] * (CALM_REPORTS - 1), [False] * CALM_REPORTS
    assert steps_after([True] * 100 + short) == {3: 0}
    assert steps_after([True] * 100 + long) == {}
    assert steps_after([True] * 100 + short + [True] * 100) == {3: 0}
    assert steps_after([True] * 100 + long + [True] * 100) == {3: 100 + CALM_REPORTS}


def test_a_calm_between_two_looks_is_seen() -> None:
    all_windows = windows_of([True] * 100 + [False] * CALM_REPORTS + [True] * 4)
    since = SlowSince()
    since.note(all_windows[99])
    since.note(all_windows[-1])
    assert dict(since.steps) == {3: 112}


def test_many_ranks_at_once_agree_with_one_by_one() -> None:
    rng = np.random.default_rng(0)
    slow = rng.random((200, 9)) < 0.1
    times = np.where(slow, 0.4, 0.1)
    since = SlowSince()
    for end in range(1, 201):
        since.note(window(times[max(0, end - DEPTH) : end], end=end))
    expected = {}
    for rank in range(9):
        first, quick = None, 0
        for step in range(200):
            quick = 0 if slow[step, rank] else quick + 1
            if slow[step, rank] and first is None:
                first = step
            first = None if quick >= CALM_REPORTS else first
        if first is not None:
            expected[rank] = first
    # Of several slow at once by chance the fastest decides; one in ten leaves one of nine that is not.
    assert dict(since.steps) == expected and len(expected) > 4


# ---- what is said ---------------------------------------------------------------------------------------------------


def test_a_rank_that_is_always_slow_is_not_slow_now_and_then() -> None:
    """Two slow reports are enough for a decision, and three to be named."""
    policy, said = CostPolicy(4), ""
    for one in windows_of([False] * 20 + [True] * 2):
        policy.decide(one, Plan.sync(4))
        said = policy.explain()
    assert said.startswith("rank 3 computes 4.0x slower since step 20: "), said
    policy, said = CostPolicy(4), ""
    for one in windows_of([False] * 20 + [True, True, False, True]):
        policy.decide(one, Plan.sync(4))
        said = policy.explain()
    assert said.startswith("rank 3 computes 4.0x slower intermittently since step 20: "), said


def test_a_sentence_says_the_step_that_its_window_does_not_reach() -> None:
    policy = CostPolicy(4)
    for one in windows_of([False] * 20 + [True] * 300, first=7, allowed=("sync",)):
        policy.decide(one, Plan.sync(4))
    assert policy.explain().startswith("rank 3 computes 4.0x slower since step 27: ")


def test_log_and_stragglers_keep_the_step(caplog: pytest.LogCaptureFixture) -> None:
    job = Job(3, Config(report_interval_s=20.0, lost_after_s=1e6))
    job.register(Plan.sync(3))
    with caplog.at_level(logging.WARNING):
        for step in range(200):
            for rank in range(3):
                job.arrive(rank, step, compute_s=0.4 if rank == 2 and step >= 11 else 0.1)
            job.now_s += 0.4
            job.tick()
    lines = [record.getMessage() for record in caplog.records if "slower" in record.getMessage()]
    assert len(lines) >= 3 and all("slower than the median since step 11 (" in line for line in lines), lines
    assert [straggler.since_step for straggler in job.engine.stragglers] == [11]



def _changes(spells: Sequence[tuple[int, int, int]], steps: int = 32) -> float:
    """Changes in `steps` steps of four ranks, of which `rank` is slow from `begin` to before `end`."""
    times = steady(4, steps)
    for rank, begin, end in spells:
        times[begin:end, rank] *= 4.0
    return round(steps * changes_per_step(Readings.of(window(times))))


@pytest.mark.parametrize(
    ("spells", "expected"),
    [
        ([], 0),
        ([(2, 0, 32)], 0),
        ([(2, 10, 32), (3, 20, 32)], 0),  # Nobody recovered in between.
        ([(2, 10, 20)], 0),
        ([(2, 0, 10), (3, 10, 32)], 1),
        ([(2, 0, 10), (2, 20, 32)], 1),
        ([(2, 0, 10), (3, 10, 12), (0, 20, 21)], 0),  # Too short to be followed.
        ([(r % 4, 4 * r, 4 * r + 4) for r in range(8)], 7),
    ],
)
def test_changes_of_slowness_are_counted(spells: list[tuple[int, int, int]], expected: int) -> None:
    assert _changes(spells) == expected


def test_a_rank_that_recovers_within_the_error_of_its_times_has_recovered() -> None:
    times = steady(4, 20)
    times[:5, 0] *= 4.0
    times[5:, 0] *= 1.45
    times[5:, 1] *= 4.0
    assert changes_per_step(Readings.of(window(times[:7]))) == 0.0, "two slow reports are no spell yet"
    assert [round(end * changes_per_step(Readings.of(window(times[:end])))) for end in (8, 12, 20)] == [1, 1, 1]


def test_changes_are_seen_in_a_job_that_has_just_begun_and_of_late_only() -> None:
    times = steady(4, 64)
    times[:5, 0] *= 4.0
    times[5:8, 1] *= 4.0
    assert changes_per_step(Readings.of(window(times[:8]))) == pytest.approx(1 / 8)
    assert changes_per_step(Readings.of(window(times[:1]))) == 0.0
    assert changes_per_step(Readings.of(window(times[:0]))) == 0.0
    assert changes_per_step(Readings.of(window(times))) == 0.0, "long ago"
