"""What is left on the ranks' hosts: one steady figure per host, from readings that are not."""

from __future__ import annotations

import math
import random

import pytest

from scheduler.diagnosis.host_headroom import HostHeadroom
from scheduler.diagnosis.machine import MachineStats

HOSTS = ("a", "a", "b", "b")


def noted(cores: dict[int, float], times: int = 20, **more: float) -> HostHeadroom:
    found = HostHeadroom(HOSTS)
    for _ in range(times):
        for rank, free in cores.items():
            found.note(rank, MachineStats(free_cpu_cores=free, **more))
    return found


def test_unknown_until_a_rank_of_the_host_has_reported() -> None:
    assert all(math.isnan(level.free_cpu_cores) for level in HostHeadroom(HOSTS).levels())
    levels = noted({3: 2.1}).levels()
    assert math.isnan(levels[0].free_cpu_cores) and levels[2] == levels[3] and levels[2].free_cpu_cores == 2.0


def test_ranks_of_a_host_share_the_least_of_their_readings() -> None:
    assert [level.free_cpu_cores for level in noted({0: 1.7, 1: 0.7, 2: 3.0, 3: 3.4}).levels()] == [0.5, 0.5, 3.0, 3.0]


def test_noise_changes_nothing_and_load_does() -> None:
    found, dice, seen = noted({0: 2.5}, times=2), random.Random(3), set()
    for _ in range(300):
        found.note(0, MachineStats(free_cpu_cores=2.5 + dice.uniform(-0.4, 0.4)))
        seen.add(found.levels()[0].free_cpu_cores)
    assert len(seen) <= 2 and min(seen) >= 2.0, f"placement would follow noise: {seen}"
    for _ in range(12):
        found.note(0, MachineStats(free_cpu_cores=0.0))
        found.note(1, MachineStats(free_cpu_cores=0.0))
    assert found.levels()[0].free_cpu_cores == 0.0


def test_what_ranks_use_for_their_start_counts_as_free_unless_others_want_it() -> None:
    found = HostHeadroom(HOSTS)
    start = {"own_cpu_cores": 0.9, "usable_cpu_cores": 2.0}
    for rank in range(2):
        found.note(rank, MachineStats(free_cpu_cores=0.2, **start))
    found.note(2, MachineStats(free_cpu_cores=0.0, own_cpu_cores=0.5, usable_cpu_cores=2.0))
    found.note(3, MachineStats(free_cpu_cores=0.0, own_cpu_cores=0.5, usable_cpu_cores=2.0))
    cores = [level.free_cpu_cores for level in found.levels()]
    assert cores == pytest.approx([2.0, 2.0, 0.5, 0.5])
    for rank in range(4):
        found.note(rank, MachineStats(free_cpu_cores=0.1 if rank < 2 else 1.7, **start))
    assert [level.free_cpu_cores for level in found.levels()] == [0.0, 0.0, 1.5, 1.5], "from then on it is as measured"


def test_neighbours_of_any_rank_are_the_hosts() -> None:
    found = noted({0: 1.0}, neighbour_ranks=2.0)
    found.note(1, MachineStats(free_cpu_cores=1.0, neighbour_ranks=3.0))
    levels = found.levels()
    assert [level.neighbours for level in levels[:3]] == [3, 3, 0]
