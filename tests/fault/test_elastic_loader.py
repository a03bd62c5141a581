"""A rank is killed in the middle of an epoch of `shard`: the others go on with it, and every sample is there once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fault.elastic_loader_job import COMMITS_AT, SAMPLES
from tests.support.elastic import ELASTIC_LIMIT_S, run_elastic, two_survive

pytestmark = [pytest.mark.fault, pytest.mark.timeout(ELASTIC_LIMIT_S)]


def test_the_epoch_goes_on_behind_the_last_commit(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    job = run_elastic("tests.fault.elastic_loader_job", str(notes), folder=tmp_path, recovered=two_survive(notes))
    assert sum(map(bool, job.results)) == 2, job.tail
    seen: dict[str, list[int]] = {"0": [], "1": []}
    before = 0
    for file in notes.iterdir():
        for line in file.read_text().splitlines():
            world, epoch, count, *numbers = line.split()
            if world == "second" or int(count) <= COMMITS_AT:
                seen[epoch] += map(int, numbers)
                before += world == "first"
    assert before == 4 * COMMITS_AT, "all four had come to the commit"
    assert sorted(seen["0"]) == list(range(SAMPLES)), "every sample once, over the reset"
    assert sorted(seen["1"]) == list(range(SAMPLES))
    assert {facts["epoch"] for facts in job.results if facts} == {2}
