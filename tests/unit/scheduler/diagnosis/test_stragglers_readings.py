"""Windows read as arrays say what reading them rank by rank says, and records survive being arrays."""

from __future__ import annotations

import dataclasses
import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.diagnosis.links import link_ratio
from scheduler.diagnosis.stragglers import Readings, Straggler, find_stragglers
from scheduler.records import RankStats, RankTable, Window
from tests.support.effort import cases
from tests.unit.scheduler.diagnosis import plain_causes

_NAN, _INF = math.nan, math.inf
# No sum of which is a half of anything, and none in both: what is just a half, or as much as another, is open.
_INPUT_SHARES = (0.0, 0.0, 0.1037, 0.5173, 0.9011)
_STARVED_SHARES = (0.0, 0.0, 0.1213, 0.5391, 0.8807)


@st.composite
def windows(draw: st.DrawFn) -> Window:
    """Ranks in step or not, of different lengths, some without reports, some with times that are none."""
    seed = draw(st.integers(0, 2**32 - 1))
    n = draw(st.integers(0, 9))
    random = np.random.default_rng(seed)
    in_step, tidy = random.random() < 0.5, random.random() < 0.5
    longest, jitter = int(random.integers(1, 70)), random.choice([0.0, 0.05, 0.4])
    usual_s, change = random.choice([0.003, 0.1]), int(random.integers(0, 70))
    ranks = []
    for rank in range(n):
        count = longest if in_step else int(random.integers(0, longest + 1))
        first = 0 if in_step else int(random.integers(0, 5))
        steps = first + np.cumsum(np.ones(count, dtype=int) if in_step else random.integers(0, 3, count))
        times = usual_s * np.exp(jitter * random.standard_normal(count))
        times[change:] *= random.choice([1.0, 1.0, 2.5])
        start = int(random.integers(0, count + 1))
        times[start:] *= random.choice([1.0, 1.0, 1.5, 4.0])
        if not tidy and count:
            times[random.integers(0, count, 3)] = random.choice([_NAN, _INF, -1.0, 0.0, usual_s])
        ranks.append(
            RankStats(
                rank=rank,
                compute_s=tuple(times.tolist()),
                steps=tuple(steps.tolist()),
                input_share=float(random.choice(_INPUT_SHARES)),
                starved_share=float(random.choice(_STARVED_SHARES)),
                late_share=0.25,
                link_bytes_per_s=float(random.choice([_NAN, 1e7, 1e8, 1e8, 2e8, 0.0, _INF])),
                comm_s=tuple(random.choice([0.0, 0.05, _NAN], int(random.integers(0, 6))).tolist()),
                silent_s=float(random.choice([0.0, 0.0, 0.2, 30.0])),
            )
        )
    return Window(step=longest, ranks=tuple(ranks), comm_bytes=int(random.choice([0, 10**6, 10**7])))


def _close(found: Straggler, expected: Straggler) -> None:
    """Sums are taken in another order, so numbers may differ in the last digit."""
    assert found == dataclasses.replace(expected, slowdown=found.slowdown, evidence=found.evidence)
    assert found.slowdown == pytest.approx(expected.slowdown)
    numbers = r"\d+(?:\.\d+)?(?:e[+-]?\d+)?"
    assert re.split(numbers, found.evidence) == re.split(numbers, expected.evidence)
    pairs = zip(re.findall(numbers, found.evidence), re.findall(numbers, expected.evidence), strict=True)
    assert all(float(one) == pytest.approx(float(other), rel=0.02, abs=1.0) for one, other in pairs)


@pytest.mark.slow
@settings(max_examples=cases(400), deadline=None)
@given(windows())
def test_the_same_ranks_are_named(window: Window) -> None:
    found, expected = find_stragglers(window), plain_causes.find_stragglers(window)
    assert [s.rank for s in found] == [s.rank for s in expected]
    for one, other in zip(found, expected, strict=True):
        _close(one, other)


@pytest.mark.slow
@settings(max_examples=cases(400), deadline=None)
@given(windows())
def test_the_same_reports_are_slow(window: Window) -> None:
    readings, plain = Readings(window), plain_causes.Readings(window)
    assert readings.reference_s == pytest.approx(plain.reference_s, nan_ok=True, rel=0.0)
    assert list(readings.reports) == plain.reports
    assert readings.counts.tolist() == [len(reports) for reports in plain.reports]
    width = readings.slow().shape[1]
    newest = readings.newest(5)
    for rank, reports in enumerate(plain.reports):
        assert readings.slow_run(rank) == plain.slow_run(rank)
        expected = [plain.is_slow(*report) for report in reports]
        assert readings.slow_reports(rank) == expected
        assert readings.slow()[rank].tolist() == [False] * (width - len(reports)) + expected
        own = [time_s for _, time_s in reports][-5:]
        np.testing.assert_array_equal(newest[rank], [_NAN] * (5 - len(own)) + own)
        assert link_ratio(window, rank) == pytest.approx(plain_causes.link_ratio(window, rank), nan_ok=True)
    assert readings.last_steps() == [reports[-1][0] for reports in plain.reports if reports]
    times, simple = readings.in_force(3, 20, None)
    for rank, reports in enumerate(plain.reports):
        assert simple[rank] == (bool(reports) and not any(readings.slow_reports(rank)))
        past = [[time_s for step, time_s in reports if step <= now] for now in range(3, 23)]
        expected_s = [own[-1] if own and simple[rank] else _NAN for own in past]
        np.testing.assert_array_equal(times[:, rank], expected_s)
    for after in (-1, 0, 10, 60):
        assert readings.any_slow(after) == plain.any_slow(after)


@settings(max_examples=cases(100), deadline=None)
@given(windows())
def test_records_survive_being_arrays(window: Window) -> None:
    table = window.table
    assert table is window.table
    again = dataclasses.replace(window, ranks=table)
    assert repr(tuple(again.ranks)) == repr(window.ranks)
    assert repr(find_stragglers(again)) == repr(find_stragglers(window))
    assert len(table) == window.world_size == again.world_size


def test_a_replaced_tuple_replaces_the_arrays() -> None:
    old = Window(step=1, ranks=(RankStats(rank=0, compute_s=(1.0,), steps=(0,)),))
    assert old.table.compute_s.tolist() == [[1.0]]
    new = dataclasses.replace(old, ranks=(RankStats(rank=0, compute_s=(2.0, 3.0), steps=(0, 1)),))
    assert new.table.compute_s.tolist() == [[2.0, 3.0]]


def test_a_table_is_a_sequence_of_records() -> None:
    stats = [
        RankStats(rank=0, compute_s=(), steps=(), link_bytes_per_s=5.0),
        RankStats(rank=1, compute_s=(1.0, 2.0), steps=(3, 4), link_bytes_per_s=6.0, comm_s=(0.5,)),
    ]
    table = RankTable.of(stats)
    assert table == tuple(stats)
    assert table[-1] == stats[1]
    assert table[:1] == (stats[0],)
    assert hash(table) == hash(tuple(stats))
    with pytest.raises(IndexError):
        table[2]
