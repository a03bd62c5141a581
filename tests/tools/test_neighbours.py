"""The benchmark of neighbours: what it computes from times, and its hosts."""

from __future__ import annotations

import math

import pytest

from benchmarks.lab.launch import JobFailed
from benchmarks.machine.quota import QuotaError
from benchmarks.neighbours import busy_load, checked_ratios, containers, halves, median_in, ratios


def test_hosts_are_halves_of_the_processors() -> None:
    assert halves([3, 1, 0, 2]) == ((0, 1), (2, 3)) and halves([5, 4]) == ((4,), (5,))
    with pytest.raises(QuotaError, match="two processors"):
        halves([5])


def test_step_times_in_a_phase_over_those_before_it() -> None:
    ends_s = [0.1 * n for n in range(100)] + [10.0 + 0.2 * n for n in range(50)] + [20.0 + 0.1 * n for n in range(50)]
    phases = [("sync", 1.0, 9.0), ("forced", 11.0, 19.0), ("sync", 21.0, 24.0), ("placed", 21.0, 24.0)]
    assert ratios(ends_s, phases) == {"forced": [pytest.approx(2.0)], "placed": [pytest.approx(1.0)]}
    assert math.isnan(median_in(ends_s, 30.0, 40.0))


class TestServersBesideAJob:
    ends_s = tuple(0.1 * n for n in range(200))
    phases = (("sync", 1.0, 4.0), ("placed", 5.0, 9.0), ("sync", 10.0, 13.0), ("placed", 14.0, 18.0))

    def servers(self, *ranks: list[int]) -> dict[str, list[dict[str, object]]]:
        made = {"sync": [[], []], "placed": list(ranks)}
        return {name: [{"ranks": each, "explain": ""} for each in found] for name, found in made.items()}

    def test_they_are_compared_with_sync(self) -> None:
        guest = {"phases": self.phases, "servers": self.servers([2], [3])}
        assert checked_ratios(self.ends_s, guest) == {"placed": [pytest.approx(1.0)] * 2}

    def test_a_phase_without_servers_does_not_show_that_they_harm_nobody(self) -> None:
        with pytest.raises(JobFailed, match="in 1 of 2 phases 'placed'"):
            checked_ratios(self.ends_s, {"phases": self.phases, "servers": self.servers([2], [])})

    def test_a_phase_in_which_the_job_stood_still_is_no_result(self) -> None:
        guest = {"phases": self.phases, "servers": self.servers([2], [3])}
        with pytest.raises(JobFailed, match="too few steps to compare phases 'placed'"):
            checked_ratios(self.ends_s[:120], guest)
        with pytest.raises(JobFailed, match="too few steps"):
            checked_ratios(self.ends_s[45:], guest)


def test_load_ends_with_its_block_and_groups_are_removed() -> None:
    with busy_load(lambda: None, 1):
        pass
    try:
        with containers() as groups:
            assert all(path.is_dir() for path in groups)
    except QuotaError as error:
        pytest.skip(str(error))
    assert not any(path.exists() for path in groups)
