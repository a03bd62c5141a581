"""When batch shares change, and to what, with ranks whose times follow a law that the policy does not know."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.balance.batch_shares import LastStep, divide
from scheduler.balance.share_policy import SharePolicy, share_sentence, solve_shares
from scheduler.balance.time_curves import TimeCurves, fixed_part
from tests.support.effort import cases

BATCH = 19


class Job:
    """Steps of ranks with t_i(b) = slow_i (fixed + (1 - fixed) b / 19) and a jitter; changes take effect at once."""

    def __init__(self, slow: Callable[[int, int], float], *, ranks: int = 4, fixed: float = 0.2, jitter: float = 0.02):
        self.policy = SharePolicy(ranks, BATCH)
        self.ranks, self.slow, self.fixed, self.jitter = ranks, slow, fixed, jitter
        self.shares = (BATCH,) * ranks
        self.changes: list[tuple[int, tuple[int, ...]]] = []
        self.random = random.Random(5)
        self.step = 0

    def run(self, steps: int) -> Job:
        for _ in range(steps):
            for rank, share in enumerate(self.shares):
                time_s = self.slow(rank, self.step) * (self.fixed + (1.0 - self.fixed) * share / BATCH)
                self.policy.note(rank, share, time_s * (1.0 + self.jitter * self.random.gauss(0.0, 1.0)))
            found = self.policy.decide(self.shares)
            if found is not None:
                self.shares = found
                self.policy.changed(found)
                self.changes.append((self.step, found))
            assert sum(self.shares) == BATCH * self.ranks, "the global batch is constant"
            self.step += 1
        return self

    def step_s(self) -> float:
        return max(
            self.slow(rank, self.step) * (self.fixed + (1.0 - self.fixed) * share / BATCH)
            for rank, share in enumerate(self.shares)
        )


def best_s(slow: list[float], fixed: float) -> float:
    shares = solve_shares(slow, BATCH, fixed)
    return max(s * (fixed + (1.0 - fixed) * b / BATCH) for s, b in zip(slow, shares, strict=True))


@pytest.mark.parametrize("fixed", [0.0, 0.2, 0.5])
@pytest.mark.parametrize("slow", [[1.0, 1.0, 2.0, 1.0], [4.0] + [1.0] * 3, [2.0, 2.0, 1.0, 1.0], [1.0, 1.2, 1.4, 1.6]])
def test_a_lasting_straggler_gets_the_share_that_the_unknown_law_makes_best(slow: list[float], fixed: float) -> None:
    job = Job(lambda rank, step: slow[rank], fixed=fixed).run(120)
    assert job.step_s() <= 1.06 * best_s(slow, fixed), (job.shares, job.changes)
    assert len(job.changes) <= 6


def test_equal_ranks_keep_equal_batches_whatever_the_jitter() -> None:
    for jitter in (0.01, 0.05, 0.15):
        assert Job(lambda rank, step: 1.0, jitter=jitter).run(400).changes == []


def test_shares_follow_a_straggler_and_are_equal_again_once_it_is_well() -> None:
    job = Job(lambda rank, step: 3.0 if rank == 2 and 50 <= step < 150 else 1.0)
    job.run(60)
    assert job.changes and job.changes[0][0] <= 56 and job.shares[2] < 12
    job.run(90)
    assert job.shares[2] < 8
    job.run(40)
    assert job.step_s() <= 1.05
    job.run(100)
    assert job.shares == (BATCH,) * 4 or job.step_s() <= 1.03


def test_stragglers_that_rotate_are_followed_no_more_after_a_few_times() -> None:
    job = Job(lambda rank, step: 4.0 if step // 5 % 4 == rank else 1.0).run(300)
    early = sum(step < 100 for step, _ in job.changes)
    late = sum(step >= 150 for step, _ in job.changes)
    assert late <= max(2, early // 3), job.changes


@pytest.mark.parametrize(("steps", "part"), [(3, 1.01), (5, 1.01), (8, 1.0), (20, 0.9), (60, 0.4)])
def test_a_straggler_that_moves_makes_no_step_dearer_on_the_whole_and_fewer_the_longer_it_stays(
    steps: int, part: float
) -> None:
    """Equal batches would take 4 all the time."""
    job, total_s = Job(lambda rank, step: 4.0 if step // steps % 4 == rank else 1.0), 0.0
    for _ in range(300):
        total_s += job.step_s()
        job.run(1)
    assert total_s <= part * 300 * 4.0, job.changes


def at_start(first_s: list[float], second_s: list[float]) -> tuple[int, ...] | None:
    """What is decided from two reports of every rank, of which the first contains what is done only once."""
    policy = SharePolicy(4, BATCH)
    for rank, time_s in enumerate(first_s):
        policy.note_first(rank, time_s)
    assert policy.decide((BATCH,) * 4) is None
    for rank, time_s in enumerate(second_s):
        policy.note(rank, BATCH, time_s)
    return policy.decide((BATCH,) * 4)


def test_the_first_reports_may_confirm_a_slow_rank_but_show_none_by_themselves() -> None:
    found = at_start([1.7, 1.5, 1.6, 4.6], [1.0, 1.0, 1.0, 4.0])
    assert found == solve_shares([1.0, 1.0, 1.0, 4.0], BATCH, 0.0)
    assert at_start([9.0, 1.5, 1.6, 1.5], [1.0] * 4) is None, "rank 0 did something once"
    assert at_start([9.0, 1.5, 1.6, 1.5], [1.0, 1.0, 1.0, 4.0]) is None, "the reports contradict each other"
    assert at_start([1.4, 1.0, 1.0, 1.0], [1.4, 1.0, 1.0, 1.0]) is None, "a little slower is not clear yet"


def test_a_limit_is_kept_at_once_behind_the_first_reports_too() -> None:
    policy = SharePolicy(4, BATCH)
    for rank in range(4):
        policy.note_first(rank, 1.0)
    found = policy.decide((BATCH,) * 4, (0, 0, 0, 8))
    assert found is not None and found[3] <= 8 and sum(found) == 4 * BATCH


def test_small_differences_change_shares_only_where_the_times_tell_them() -> None:
    assert Job(lambda rank, step: 1.08 if rank == 1 else 1.0, fixed=0.0, jitter=0.005).run(100).shares[1] < BATCH
    assert not Job(lambda rank, step: 1.02 if rank == 1 else 1.0, jitter=0.005).run(100).changes


def test_bounds_hold() -> None:
    assert max(solve_shares([4.0, 1.0, 1.0, 1.0], BATCH, 0.0, most=[0, 20, 20, 20])) == 20
    assert sum(solve_shares([4.0, 1.0, 1.0, 1.0], BATCH, 0.0, most=[0, 20, 20, 20])) == 76
    assert max(solve_shares([1.0, 1.0, 1.0, 1.0], BATCH, 0.0, most=[0, 16, 0, 0])[1:2]) == 16, "equal is too much"
    with pytest.raises(ValueError, match="batch_size of at most 15"):
        solve_shares([4.0, 1.0, 1.0, 1.0], BATCH, 0.0, most=[1, 20, 20, 20])
    policy = SharePolicy(2, 10)
    for _ in range(40):
        policy.note(0, 15, 1.0)
        policy.note(1, 5, 1.0)
    assert policy.decide((15, 5), most=[12, 0]) is not None, "a rank that holds more than it can gives it up"
    assert policy.decide((15, 5), most=[12, 7]) is None, "no shares are within the limits: batches are cut"
    assert SharePolicy(2, 10).decide((), most=[8, 0]) == (8, 12), "before any report"


@pytest.mark.parametrize("jitter", [0.0, 0.3])
def test_a_share_that_did_not_fit_costs_the_others_nothing_of_what_is_known(jitter: float) -> None:
    """The first balanced step runs out of memory. The slow rank keeps its small batch, however unequal two steps are,
    and to give up what does not fit is no flap, behind which the next change would take longer.
    """
    job = Job(lambda rank, step: 4.0 if rank == 2 else 1.0, fixed=0.0, jitter=0.02).run(5)
    assert job.shares[1] > 20 and job.shares[2] < 12
    for rank, share in enumerate(job.shares):
        for sign in (-1.0, 1.0):
            time_s = (1.0 + sign * jitter) * job.slow(rank, 0) * share / BATCH
            job.policy.note(rank, share, time_s)
    found = job.policy.decide(job.shares, most=[0, 20, 0, 0])
    assert found is not None and found[1] <= 20 < max(found) and found[2] < 12
    job.policy.changed(found)
    job.shares, job.slow, job.changes = found, lambda rank, step: 1.0, []
    job.run(30)
    assert job.changes and job.changes[0][1] == (BATCH,) * 4
    job.slow, job.changes, begin = lambda rank, step: 4.0 if rank == 0 else 1.0, [], job.step
    job.run(30)
    assert job.changes and job.changes[0][0] - begin <= 10


@given(
    st.lists(st.tuples(st.floats(0.1, 10.0), st.integers(0, 9)), min_size=2, max_size=3),
    st.integers(1, 5),
    st.sampled_from([0.0, 0.3, 0.9]),
)
def test_shares_are_the_best_within_the_limits(ranks: list[tuple[float, int]], batch: int, fixed: float) -> None:
    levels, most = [level for level, _ in ranks], [limit for _, limit in ranks]
    total = batch * len(ranks)
    ranges = [range(1, (min(limit, total) if limit else total) + 1) for limit in most]
    possible = [sizes for sizes in itertools.product(*ranges) if sum(sizes) == total]
    if not possible:
        with pytest.raises(ValueError, match="at most"):
            solve_shares(levels, batch, fixed, most)
        return

    def time_s(sizes: tuple[int, ...]) -> float:
        return max(s * (fixed + (1.0 - fixed) * b / batch) for s, b in zip(levels, sizes, strict=True))

    shares = solve_shares(levels, batch, fixed, most)
    assert shares in possible
    slack = 1.03 if shares == (batch,) * len(ranks) else 1.0
    assert time_s(shares) <= slack * min(map(time_s, possible)) * (1.0 + 1e-9)


def test_the_fixed_part_is_found_from_one_change() -> None:
    for fixed in (0.0, 0.3, 0.8):
        times = [3.0 * (fixed + (1.0 - fixed) * size) for size in (1.0, 0.4)]
        assert fixed_part((1.0, times[0]), (0.4, times[1])) == pytest.approx(fixed, abs=1e-9)
    curves = TimeCurves(3, 10)
    # One of the ranks becomes slow at the very step of the change.
    for sizes, slow in (((10, 10, 10), 1.0), ((4, 13, 13), 3.0)):
        for _ in range(8):
            for rank, size in enumerate(sizes):
                curves.note(rank, size, (slow if rank == 1 else 1.0) * (0.4 + 0.6 * size / 10))
    assert curves.fixed == pytest.approx(0.4, abs=0.01)


def test_512_ranks_are_solved_for_in_less_than_50_ms() -> None:
    levels = [1.0 + (rank % 7) / 3.0 for rank in range(512)]
    solve_shares(levels, 32, 0.1)
    took_s = []
    for _ in range(5):
        began_s = time.thread_time()  # Of this thread: other work on the machine does not count.
        shares = solve_shares(levels, 32, 0.1)
        took_s.append(time.thread_time() - began_s)
    assert sum(shares) == 512 * 32
    assert min(took_s) < 0.05


@settings(max_examples=cases(200), deadline=None)
@given(shares=st.lists(st.integers(1, 40), min_size=1, max_size=8), total=st.integers(0, 200))
def test_what_is_left_is_divided_in_proportion(shares: list[int], total: int) -> None:
    parts = divide(total, shares)
    assert sum(parts) == total and min(parts) >= (1 if total >= len(shares) else 0)
    if total >= sum(shares):
        assert all(abs(part - total * share / sum(shares)) < 1.0 for part, share in zip(parts, shares, strict=True))


@settings(max_examples=cases(200), deadline=None)
@given(
    shares=st.lists(st.integers(1, 40), min_size=1, max_size=8), total=st.integers(0, 200), least=st.integers(1, 5)
)
def test_a_part_is_not_below_the_least_while_nobody_takes_more_than_its_share_for_that(
    shares: list[int], total: int, least: int
) -> None:
    total = min(total, sum(shares))
    parts = divide(total, shares, least)
    assert sum(parts) == total
    few = [part for part in parts if 0 < part < least]
    if total >= least * len(shares):
        assert not few and min(parts) >= least
    elif few:  # The ranks that have a part have hardly room for more, or all has to go to one.
        having = [share for part, share in zip(parts, shares, strict=True) if part]
        assert total < least or sum(sorted(having)[1:]) < total
    assert all(not part or share >= min(each for each, other in zip(shares, parts, strict=True) if other)
               for part, share in zip(parts, shares, strict=True))


def test_the_last_step_is_divided_among_ranks_that_can_have_the_least_or_is_left_out() -> None:
    assert LastStep(whole=True).parts(48, (4, 20, 20, 20)) == (0, 0, 0, 0)
    assert LastStep().parts(16, (20, 20, 20, 4)) == (5, 5, 5, 1)
    assert LastStep(least=2).parts(5, (16, 16, 16, 16)) == (3, 2, 0, 0)
    assert LastStep(least=2).parts(5, (2, 2, 2, 2)) == (2, 2, 1, 0), "no rank gets more than its share"


def test_shares_have_a_lower_bound_of_at_most_a_usual_batch_and_the_limit_of_the_rank() -> None:
    levels = [1.0, 1.0, 1.0, 40.0]
    assert solve_shares(levels, BATCH, 0.0)[3] == 1
    assert solve_shares(levels, BATCH, 0.0, least=5)[3] == 5
    assert solve_shares(levels, BATCH, 0.0, least=1000) == (BATCH,) * 4
    assert solve_shares(levels, BATCH, 0.0, most=[0, 0, 0, 3], least=5)[3] == 3


def test_the_sentence_names_who_gets_least() -> None:
    assert share_sentence((24, 16, 12, 24), 0.9) == (
        "rank 2 gets 12 of 76 samples, step 0.90 of that with equal batches"
    )
    assert share_sentence((19,) * 4, 1.0) == "all ranks get equal batches"
