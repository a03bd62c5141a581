"""Since when ranks are slow, over windows that reach back less far than that, and the sentences that say so."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import pytest

from scheduler.diagnosis.slow_episodes import CALM_REPORTS, SlowSince
from scheduler.plan.plan import MODES, Plan
from scheduler.policy.cost_policy import CostPolicy
from scheduler.records import Window
from star_hvd.config import Config
from tests.support.job_states import Job
from tests.support.windows import window

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

