"""The benchmark of neighbours: what it computes from times, and its hosts."""

from __future__ import annotations

import math

import pytest

from benchmarks.machine.quota import QuotaError
from benchmarks.neighbours import busy_load, containers, halves, median_in, ratios


def test_hosts_are_halves_of_the_processors() -> None:
    assert halves([3, 1, 0, 2]) == ((0, 1), (2, 3)) and halves([5, 4]) == ((4,), (5,))
    with pytest.raises(QuotaError, match="two processors"):
        halves([5])


def test_step_times_in_a_phase_over_those_before_it() -> None:
    ends_s = [0.1 * n for n in range(100)] + [10.0 + 0.2 * n for n in range(50)] + [20.0 + 0.1 * n for n in range(50)]
    phases = [("sync", 1.0, 9.0), ("forced", 11.0, 19.0), ("sync", 21.0, 24.0), ("placed", 21.0, 24.0)]
    assert ratios(ends_s, phases) == {"forced": [pytest.approx(2.0)], "placed": [pytest.approx(1.0)]}
    assert math.isnan(median_in(ends_s, 30.0, 40.0))


def test_load_ends_with_its_block_and_groups_are_removed() -> None:
    with busy_load(lambda: None, 1):
        pass
    try:
        with containers() as groups:
            assert all(path.is_dir() for path in groups)
    except QuotaError as error:
        pytest.skip(str(error))
    assert not any(path.exists() for path in groups)
