"""How many buckets are reduced at once: what takes least, and all ranks alike."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from scheduler.transmission.order import order_in_groups
from scheduler.transmission.sizes import SizeSearch

STEPS = 4 + 6 * 10


def run(buckets: int, step_s: Mapping[int, float], noise: float, seed: int) -> tuple[SizeSearch, list[int]]:
    rng, search, seen = random.Random(seed), SizeSearch(buckets), []
    while not search.decided:
        seen.append(search.together)
        ended = search.note(step_s[search.together] * (1.0 + abs(rng.gauss(0.0, noise))))
        assert ended == search.decided
        assert len(seen) <= STEPS
    return search, seen


@pytest.mark.parametrize("best", [1, 2, 4])
@pytest.mark.parametrize("seed", range(5))
def test_what_takes_least_is_kept(best: int, seed: int) -> None:
    search, seen = run(16, {choice: 0.8 if choice == best else 1.0 for choice in (1, 2, 4)}, 0.05, seed)
    assert search.together == best and len(seen) == STEPS
    assert f"at once: {best} (a step took" in search.describe()
    assert not search.note(0.1) and search.together == best


def test_one_at_a_time_unless_others_save_three_percent() -> None:
    assert run(16, {1: 1.0, 2: 0.98, 4: 0.975}, 0.0, 1)[0].together == 1
    assert run(16, {1: 1.0, 2: 0.98, 4: 0.95}, 0.0, 1)[0].together == 4


def test_a_pause_of_the_program_does_not_count() -> None:
    rng, search = random.Random(3), SizeSearch(16)
    while not search.decided:
        search.note(50.0 if rng.random() < 0.1 else {1: 1.0, 2: 0.8, 4: 0.9}[search.together])
    assert search.together == 2


def test_blocks_alternate() -> None:
    seen = run(16, {1: 1.0, 2: 1.0, 4: 1.0}, 0.0, 1)[1]
    assert seen == [1] * 14 + [2] * 10 + [4] * 10 + [1] * 10 + [2] * 10 + [4] * 10


def test_few_buckets_have_few_choices() -> None:
    for buckets in (0, 1, 2):
        assert SizeSearch(buckets).decided and SizeSearch(buckets).describe() == ""
    assert set(run(4, {1: 1.0, 2: 0.5}, 0.0, 1)[0].times_s) == {1, 2}


@pytest.mark.parametrize("buckets", [0, 1, 5, 16])
@pytest.mark.parametrize("together", [1, 2, 4])
def test_every_bucket_is_in_one_group_of_neighbours(buckets: int, together: int) -> None:
    groups = order_in_groups(buckets, together)
    assert sorted(index for group in groups for index in group) == list(range(buckets))
    assert all(group == tuple(range(group[0], group[0] + len(group))) and len(group) <= together for group in groups)
