"""Loops of unequal length, without `shard`, `join` or any other help of the user's: the program ends, and ends well."""

from __future__ import annotations

import pytest

from tests.support.launch import JOB_LIMIT_S, run_job

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(JOB_LIMIT_S + 60)]


@pytest.mark.parametrize(
    ("mode", "steps"),
    [
        ("partial", (40, 40, 40)),  # As many gradients each: the slow rank ends last.
        ("partial(1)", (10, 50, 20)),
        ("sync", (30, 10, 20)),  # Under Horovod this one waits for ever.
    ],
)
def test_the_program_ends(mode: str, steps: tuple[int, ...]) -> None:
    job = run_job("tests.multiproc.plain_loop", mode, *map(str, steps), ranks=len(steps)).check()
    for stats, own in zip((result["stats"] for result in job.results), steps, strict=True):
        assert stats["produced_weight"] == own
        assert stats["steps"] >= own or mode != "sync"
