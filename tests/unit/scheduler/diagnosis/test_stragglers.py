"""Who is named slow, and who is not."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.diagnosis.links import link_ratio
from scheduler.diagnosis.stragglers import CAUSES, Readings, Straggler, find_stragglers
from scheduler.records import RankStats, Window
from scheduler.stats import lower_median
from tests.support.effort import cases
from tests.support.traces import golden_and_recorded, uncontended_s

USUAL_S = 0.1


def window(times: list[list[float]], *, first: int = 0, **shares: dict[int, float]) -> Window:
    """A window of one report per step and rank; `times[rank]` in units of the usual time."""
    ranks = tuple(
        RankStats(
            rank=rank,
            compute_s=tuple(USUAL_S * value for value in row),
            steps=tuple(range(first, first + len(row))),
            **{name: values.get(rank, 0.0) for name, values in shares.items()},
        )
        for rank, row in enumerate(times)
    )
    return Window(step=first + max(map(len, times), default=0), ranks=ranks)


def names(found: tuple[Straggler, ...]) -> list[int]:
    return [straggler.rank for straggler in found]


def test_one_rank_four_times_slower() -> None:
    rows = [[1.0] * 20 for _ in range(4)]
    rows[3][12:] = [4.0] * 8
    (found,) = find_stragglers(window(rows, first=398))
    assert (found.rank, found.since_step, found.cause) == (3, 410, "compute")
    assert found.slowdown == pytest.approx(4.0)
    assert found.sentence == "rank 3 computes 4.0x slower than the median since step 410 (compute)"
    assert "last 8 reports slow, 400.0 ms against 100.0 ms" in found.evidence


@pytest.mark.parametrize(("n", "slow"), [(2, 1), (3, 1), (4, 2), (5, 2), (6, 3), (8, 4)])
def test_up_to_half_of_the_ranks_are_named(n: int, slow: int) -> None:
    rows = [[1.0] * 10] * (n - slow) + [[2.0] * 10] * slow
    found = find_stragglers(window(rows))
    assert names(found) == list(range(n - slow, n))
    assert all(item.slowdown == pytest.approx(2.0) for item in found)


def test_when_most_are_slow_nobody_is() -> None:
    assert find_stragglers(window([[1.0] * 10] + [[4.0] * 10] * 2)) == ()


def test_needs_consecutive_slow_reports_up_to_the_latest() -> None:
    rows = [[1.0] * 20 for _ in range(4)]
    rows[1][18:] = [4.0] * 2
    assert find_stragglers(window(rows)) == ()
    rows[1][17] = 4.0
    assert names(find_stragglers(window(rows))) == [1]
    rows[1].append(1.0)
    assert find_stragglers(window(rows)) == ()


def test_a_spike_names_nobody_however_large() -> None:
    rows = [[1.0] * 20 for _ in range(4)]
    rows[2][19] = 1000.0
    assert find_stragglers(window(rows)) == ()


def test_a_straggler_that_alternates_between_two_ranks_is_named_each_time() -> None:
    rows = [[4.0 if (step // 5) % 2 == rank else 1.0 for step in range(35)] for rank in range(2)]
    for end, slow in ((20, 1), (25, 0), (30, 1), (35, 0)):
        assert names(find_stragglers(window([row[:end] for row in rows]))) == [slow]


def test_all_ranks_slower_together_is_no_straggler() -> None:
    rows = [[1.0] * 20 + [2.0] * more for more in (5, 5, 5, 5)]
    assert find_stragglers(window(rows)) == ()
    rows[2][20:] = [6.0] * 5  # but one that became still slower is
    assert names(find_stragglers(window(rows))) == [2]


def test_reports_of_a_late_rank_come_at_other_steps() -> None:
    ranks = [RankStats(rank=r, compute_s=(USUAL_S,) * 40, steps=tuple(range(40))) for r in range(3)]
    ranks.append(RankStats(rank=3, compute_s=(4 * USUAL_S,) * 5, steps=(16, 20, 24, 28, 32)))
    (found,) = find_stragglers(Window(step=40, ranks=tuple(ranks)))
    assert (found.rank, found.since_step) == (3, 16)


@pytest.mark.parametrize(
    ("shares", "cause"),
    [
        ({}, "compute"),
        ({"input_share": {3: 0.7}}, "input"),
        ({"starved_share": {3: 0.7}}, "starved"),
        ({"input_share": {3: 0.2}, "starved_share": {3: 0.2}}, "compute"),
        ({"input_share": {3: 0.3}, "starved_share": {3: 0.45}}, "starved"),
        # Everybody waits for data 30 ms per batch; the slow rank is slow for another reason.
        ({"input_share": {0: 0.3, 1: 0.3, 2: 0.3, 3: 0.075}}, "compute"),
    ],
)
def test_cause_is_what_explains_most_of_the_excess(shares: dict[str, dict[int, float]], cause: str) -> None:
    (found,) = find_stragglers(window([[1.0] * 10] * 3 + [[4.0] * 10], **shares))
    assert found.cause == cause
    assert cause in CAUSES


def test_shares_diluted_by_earlier_fast_reports_still_add_up() -> None:
    """27 fast reports and 3 at 4x whose whole excess is waiting: 9 of 39 units, a share of only 0.23."""
    rows = [[1.0] * 30 for _ in range(4)]
    rows[3][27:] = [4.0] * 3
    (found,) = find_stragglers(window(rows, input_share={3: 9.0 / 39.0}))
    assert found.cause == "input"


def test_differences_below_what_a_step_resolves_are_none() -> None:
    """1.5 times slow, but by one millisecond."""
    rows = [[0.02] * 10] * 3 + [[0.03] * 10]
    assert find_stragglers(window(rows)) == ()
    assert names(find_stragglers(window([[10 * value for value in row] for row in rows]))) == [3]


def test_too_little_is_known() -> None:
    assert find_stragglers(Window(step=0)) == ()
    assert find_stragglers(window([[1.0] * 10])) == ()
    assert find_stragglers(window([[], [], [], []])) == ()
    assert find_stragglers(window([[1.0] * 2, [4.0] * 2])) == ()
    assert find_stragglers(window([[1.0] * 9, [], [], []])) == ()
    # A rank without reports does not hide the others.
    assert names(find_stragglers(window([[1.0] * 9, [1.0] * 9, [4.0] * 9, []]))) == [2]


def test_times_that_are_no_times_are_left_out() -> None:
    nan, inf = float("nan"), float("inf")
    rows = [[1.0] * 8, [1.0] * 8, [1.0] * 8, [1.0, 1.0, nan, 4.0, inf, 4.0, -1.0, 4.0]]
    (found,) = find_stragglers(window(rows))
    assert (found.rank, found.since_step, found.slowdown) == (3, 3, pytest.approx(4.0))


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="2 steps and 1 times"):
        find_stragglers(Window(step=1, ranks=(RankStats(rank=0, compute_s=(1.0,), steps=(0, 1)),)))
    with pytest.raises(ValueError, match="no values"):
        lower_median([])


@settings(max_examples=cases(200), deadline=None)
@given(
    n=st.integers(2, 12),
    slowdown=st.floats(1.6, 20.0),
    jitter=st.floats(0.0, 0.06),
    scale=st.floats(0.1, 1e4),
    seed=st.integers(0, 10_000),
    data=st.data(),
)
def test_names_exactly_the_slow_ranks_at_any_scale(
    n: int, slowdown: float, jitter: float, scale: float, seed: int, data: st.DataObject
) -> None:
    slow = sorted(data.draw(st.sets(st.integers(0, n - 1), max_size=n // 2)))
    rng = random.Random(seed)
    rows = [
        [scale * (slowdown if rank in slow else 1.0) * (1.0 + rng.uniform(-jitter, jitter)) for _ in range(12)]
        for rank in range(n)
    ]
    found = find_stragglers(window(rows))
    assert names(found) == slow
    assert all(item.slowdown == pytest.approx(slowdown, rel=2.5 * jitter + 1e-9) for item in found)


def links(
    rates: list[float], *, comm_bytes: int = 10_000_000, slow: dict[int, float] | None = None, **comm_s: float
) -> Window:
    """Ten reports of every rank at the usual time or `slow` times it; rates in MB/s; `comm_s` by name `r0`."""
    ranks = tuple(
        RankStats(
            rank=rank,
            compute_s=(USUAL_S * (slow or {}).get(rank, 1.0),) * 10,
            steps=tuple(range(10)),
            link_bytes_per_s=rate * 1e6,
            comm_s=(comm_s[f"r{rank}"],) * 10 if f"r{rank}" in comm_s else (),
        )
        for rank, rate in enumerate(rates)
    )
    return Window(step=10, ranks=ranks, comm_bytes=comm_bytes)


def test_a_slow_link() -> None:
    (found,) = find_stragglers(links([100.0, 110.0, 10.0, 90.0]))
    assert (found.rank, found.cause, found.since_step, found.silent) == (2, "link", 10, False)
    assert found.slowdown == pytest.approx(10.0)
    assert found.sentence == (
        "rank 2 has a link of 10 MB/s, 10.0x slower than the others', and communicates 1.5 s per step (link)"
    )


@pytest.mark.parametrize(
    ("rates", "slow"),
    [
        ([100.0, 49.0], [1]),
        ([100.0, 51.0], []),
        ([100.0, 10.0, 10.0, 100.0], [1, 2]),
        ([10.0, 10.0, 10.0, 100.0], []),  # three of four: slow is what this job is
        ([100.0, 10.0, float("nan"), float("nan")], []),  # one of three others is no reference
        ([100.0, 10.0, float("nan"), 90.0], [1]),
        ([100.0, 0.0, 100.0, 100.0], []),
        ([100.0, 100.0, 100.0, 10_000.0], []),
    ],
)
def test_links_are_compared_with_the_median_of_the_others(rates: list[float], slow: list[int]) -> None:
    assert names(find_stragglers(links(rates))) == slow


def test_a_slow_link_counts_only_where_communication_is_a_considerable_part() -> None:
    rates = [100.0, 100.0, 10.0, 100.0]
    assert find_stragglers(links(rates, comm_bytes=0)) == ()
    assert find_stragglers(links(rates, comm_bytes=100_000)) == ()  # 15 ms of 115
    assert names(find_stragglers(links(rates, comm_bytes=300_000))) == [2]  # 45 ms of 145
    # What is measured comes before what a ring would send.
    assert find_stragglers(links(rates, r2=0.01)) == ()
    assert names(find_stragglers(links(rates, comm_bytes=0, r2=0.06))) == [2]
    assert find_stragglers(links(rates, comm_bytes=0, r2=float("nan"))) == ()


def test_of_two_causes_the_one_that_costs_more_is_named() -> None:
    rates = [100.0, 100.0, 20.0, 100.0]
    for factor, cause in ((2.0, "link"), (9.0, "compute")):  # the link costs 300 ms
        (found,) = find_stragglers(links(rates, comm_bytes=5_000_000, slow={2: factor}))
        assert found.cause == cause


def test_link_ratio() -> None:
    window_ = links([100.0, 25.0, 50.0, float("nan")])
    assert [link_ratio(window_, rank) for rank in range(3)] == [4.0, 0.5, 2.0]
    assert math.isnan(link_ratio(window_, 3))
    assert math.isnan(link_ratio(links([5.0]), 0))


def silence(silent_s: list[float], own: float = 1.0) -> Window:
    ranks = tuple(
        RankStats(
            rank=rank,
            compute_s=(USUAL_S * (own if rank == 1 else 1.0),) * 10,
            steps=tuple(range(10)),
            silent_s=value,
        )
        for rank, value in enumerate(silent_s)
    )
    return Window(step=10, ranks=ranks)


def test_a_rank_that_is_not_heard_of() -> None:
    (found,) = find_stragglers(silence([0.1, 3.0, 0.2, 0.0]))
    assert (found.rank, found.cause, found.silent) == (1, "starved", True)
    assert found.sentence == "rank 1 has sent nothing for 3.0 s (starved)"
    assert find_stragglers(silence([0.1, 0.9, 0.2, 0.0])) == ()
    assert find_stragglers(silence([2.9, 3.0, 2.8, 2.9])) == ()  # nobody is heard: it is not this rank
    # A rank of 20 usual steps per batch is slow, not silent, for two of its own.
    assert all(not straggler.silent for straggler in find_stragglers(silence([0.0, 4.0, 0.0, 0.0], own=20.0)))


def test_a_rank_that_never_reported_is_not_silent() -> None:
    ranks = [RankStats(rank=r, compute_s=(USUAL_S,) * 9, steps=tuple(range(9))) for r in range(3)]
    ranks.append(RankStats(rank=3, compute_s=(), steps=(), silent_s=60.0))
    assert find_stragglers(Window(step=9, ranks=tuple(ranks))) == ()


def test_readings_may_be_handed_in() -> None:
    made = window([[1.0] * 9, [1.0] * 9, [4.0] * 9])
    assert find_stragglers(made, readings=Readings(made)) == find_stragglers(made)


@pytest.mark.parametrize(
    ("path", "model", "what", "most"),
    golden_and_recorded(
        [
            ("jitter", "compute", 0.0),
            ("bursts", "compute", 0.0),
            ("rotating", "compute", 0.0),
            ("jitter", "total", 0.01),
        ],
        [
            ("transformer", "compute", 0.0),
            ("alexnet_ratio", "compute", 0.0),
            ("transformer", "total", 0.01),
            ("alexnet_ratio", "total", 0.15),  # 112 ms +- 58 %: communication, which is not asked about
        ],
    ),
)
def test_false_alarms_on_uncontended_traces(path: Path, model: str, what: str, most: float) -> None:
    times = uncontended_s(path, model, what) / USUAL_S
    alarms = windows = minimum_rule = 0
    for end in range(8, len(times) + 1):
        recent = times[max(0, end - 40) : end]
        windows += 1
        alarms += bool(find_stragglers(window(recent.T.tolist())))
        minimum_rule += bool(recent[-1].max() > 1.2 * recent[-1].min())
    assert alarms <= most * windows
    if what == "total":
        assert minimum_rule > 0.7 * windows  # what the rule of "20 % over the fastest" would have done
