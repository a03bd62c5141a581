"""A rank is killed in the middle of an epoch of `shard`: the others go on with it, and every sample is there once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.fault.elastic_loader_job import COMMITS_AT, SAMPLES
from tests.support.elastic import ELASTIC_LIMIT_S, TWO_HOSTS, run_elastic, two_survive
from tests.support.launch import JobResult

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


@pytest.mark.parametrize(
    ("before", "after"),
    [("localhost:1\n127.0.0.1:1\n", "localhost:2,127.0.0.1:1"), (TWO_HOSTS, "localhost:2")],
    ids=["a rank joins", "a host leaves"],
)
def test_the_epoch_goes_on_with_other_hosts(tmp_path: Path, before: str, after: str) -> None:
    """A rank that joins has nothing yet, and gets the same parameters, weight decay or not."""
    size, notes = {"localhost:2": 2, "localhost:2,127.0.0.1:1": 3}[after], tmp_path / "notes"

    def recovered(job: JobResult) -> bool:
        done = sum(map(bool, job.results)) == 2  # Those who were there at the start, or two of these are left.
        if not done:
            shutil.rmtree(notes)
            notes.mkdir()
        return done

    notes.mkdir()
    words = (str(tmp_path / "hosts"), after)
    job = run_elastic("tests.fault.elastic_hosts_job", *words, folder=tmp_path, recovered=recovered, hosts=before)
    found = [facts for facts in job.results if facts]
    assert [facts["size"] for facts in found] == [size] * 2, job.tail
    assert len(found[0]["digests"]) == size and len(set(found[0]["digests"])) == 1
    for epoch in range(found[0]["epochs"]):
        lines = (line.split() for file in notes.iterdir() for line in file.read_text().splitlines())
        seen = [int(number) for of, *numbers in lines if int(of) == epoch for number in numbers]
        assert sorted(seen) == list(range(SAMPLES)), f"every sample once in epoch {epoch}"
