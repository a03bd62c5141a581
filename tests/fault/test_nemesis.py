"""The short form of `make nemesis`: some faults in two modes; with more effort one of each kind to each role, in modes
of every family."""

from __future__ import annotations

import pytest

from benchmarks.machine.netns import NetworkError
from tests.nemesis.__main__ import MODES, judge, plan_of, run
from tests.nemesis.faults import FAULTS, ROLES, possible
from tests.nemesis.job import SAMPLES
from tests.support.effort import cases

pytestmark = [pytest.mark.fault, pytest.mark.timeout(1500)]

JOBS = (
    ("partial(3)", (("reset", "worker"), ("pause", "worker"), ("partition", "worker"), ("reset", "rank 0"))),
    ("ps(3)", (("kill", "server"), ("reset", "owner"), ("rate", "worker"), ("pause", "server"))),
    ("subgroup(0,1,2)", (("reset", "worker"), ("partition", "worker"))),
    ("local(3)", (("reset", "rank 0"), ("rate", "worker"))),
    ("ps(1)", (("reset", "worker"), ("pause", "rank 0"), ("pause", "owner"))),
)[: cases(2)]  # A minute each.


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "strikes"), JOBS, ids=[mode for mode, _ in JOBS])
def test_faults_lose_no_sample_and_no_gradient(mode: str, strikes: tuple[tuple[str, str], ...]) -> None:
    try:
        outcome = run(1, mode, list(strikes))
    except NetworkError as error:
        pytest.skip(f"no hosts can be made here: {error}")
    assert outcome.wrong == [], "\n".join([*outcome.faults, *outcome.output.splitlines()[-60:]])
    assert len(outcome.faults) == len(strikes)


def test_what_is_lost_twice_or_different_is_seen() -> None:
    stats = {
        "produced_weight": 3.0, "applied_weight": 2.0, "damped_weight": 0.5, "dropped_weight": 0.5,
        "pending_weight": 0.0, "mismatches": 0,
    }  # fmt: skip
    half = SAMPLES // 2
    good = [
        {"epochs": [list(range(half))], "digest": "a", "stats": stats},
        {"epochs": [list(range(half, SAMPLES))], "digest": "a", "stats": stats},
    ]
    assert judge(good) == []
    lost = [good[0], {**good[1], "epochs": [list(range(half + 1, SAMPLES))]}]
    assert "samples [60] in no gradient" in judge(lost)[0]
    twice = [good[0], {**good[1], "epochs": [list(range(half - 1, SAMPLES))]}]
    assert "[59] in several" in judge(twice)[0]
    assert judge([good[0], {**good[1], "digest": "b"}]) == ["replicas differ"]
    lossy = {**good[1], "stats": {**stats, "applied_weight": 1.0}}
    assert "rank 1 made gradients of weight 3, 2 is accounted for" in judge([good[0], lossy])


def test_seeds_in_a_row_come_to_every_fault_that_can_happen() -> None:
    met = {(mode, plan[0]) for mode, plan in (plan_of(seed) for seed in range(20 * len(MODES)))}
    assert met == {
        (mode, (fault, role)) for mode in MODES for fault in FAULTS for role in ROLES if possible(fault, role, mode)
    }
