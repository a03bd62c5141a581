"""A coordinator's history as arrays tells what lists of reports would."""

from __future__ import annotations

import math
import statistics
from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.policy.accuracy_guard import loss_alarm
from scheduler.records import StepReport, StepTimes
from star_hvd.coordinator.reports import Arrivals, History, Losses

_DEPTH = 16


def _filled(n: int, counts: list[int], seed: int) -> tuple[History, list[deque[StepReport]]]:
    random = np.random.default_rng(seed)
    history, plain = History(n, _DEPTH), [deque[StepReport](maxlen=_DEPTH) for _ in range(n)]
    for rank, count in enumerate(counts):
        for step in range(count):
            compute_s, waits = float(random.uniform(0.0, 2.0)), random.uniform(0.0, 1.0, 4).tolist()
            times = StepTimes(compute_s, waits[1], waits[2], waits[3] * float(random.choice([0.0, 1.0])))
            late = bool(random.integers(2))
            report = StepReport(rank=rank, step=3 * step, times=times, wait_s=waits[0], late=late)
            history.append(report)
            plain[rank].append(report)
    return history, plain


def _share(reports: deque[StepReport], name: str) -> float:
    total_s = sum(report.times.compute_s for report in reports)
    return min(1.0, sum(getattr(report.times, name) for report in reports) / total_s) if total_s > 0 else 0.0


def _waits_out(reports: deque[StepReport], usual: float) -> float:
    """The part of a rank's waits that is usual: all of it in a table that is too short to say more."""
    share = _share(reports, "runqueue_s")
    if len(reports) < 16 or (1.0 - usual) ** 2 <= 1.3 * (1.0 - share):
        return 1.0
    return usual / (1.0 - usual) * (1.0 - share) / share


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=5), st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.2, 2]))
def test_a_table_tells_what_the_reports_say(counts: list[int], seed: int, limit: float) -> None:
    n = len(counts)
    history, plain = _filled(n, counts, seed)
    throttled = [0.5 if rank == 1 else 0.0 for rank in range(n)]
    table = history.table(
        oversubscribed_share=limit,
        starved_share=throttled,
        link_bytes_per_s=[1e6] * n,
        silent_s=[0.1] * n,
        comm_s=(0.01, 0.02),
    )
    usual_share = sorted(_share(reports, "runqueue_s") for reports in plain)[(n - 1) // 2]
    assert len(table) == n
    for rank, (stats, reports) in enumerate(zip(table, plain, strict=True)):
        assert stats.rank == rank
        assert stats.steps == tuple(report.step for report in reports)
        part = _waits_out(reports, usual_share) if usual_share > limit else 0.0
        expected = [report.times.compute_s - part * report.times.runqueue_s for report in reports]
        assert stats.compute_s == pytest.approx(tuple(expected), rel=0.0, abs=1e-12)
        assert stats.input_share == pytest.approx(_share(reports, "input_s"))
        assert stats.starved_share == pytest.approx(max(_share(reports, "runqueue_s"), throttled[rank]))
        assert stats.late_share == pytest.approx(statistics.fmean(r.late for r in reports) if reports else 0.0)
        assert (stats.link_bytes_per_s, stats.silent_s, stats.comm_s) == (1e6, 0.1, (0.01, 0.02))
        usual = statistics.median([r.times.compute_s for r in reports]) if reports else math.nan
        assert history.usual_s()[rank] == pytest.approx(usual, nan_ok=True)
        assert history.latest_s(rank, 5) == [report.times.compute_s for report in plain[rank]][-5:]
        assert len(history[rank]) == len(reports)
        for one, other in zip(history[rank], reports, strict=True):
            assert (one.step, one.late) == (other.step, other.late)
            assert (one.times, one.wait_s) == (other.times, other.wait_s)


def test_a_table_is_not_changed_by_later_reports() -> None:
    history, _ = _filled(2, [3, 3], 0)
    table = history.table(
        oversubscribed_share=1.0, starved_share=[0.0, 0.0], link_bytes_per_s=[1.0, 1.0], silent_s=[0.0, 0.0], comm_s=()
    )
    before = repr(tuple(table))
    for step in range(20):
        history.append(StepReport(rank=0, step=100 + step, times=StepTimes(9.0)))
    assert repr(tuple(table)) == before


def test_of_a_starved_rank_only_the_usual_waits_are_taken_out() -> None:
    history = History(4, 32)
    for step in range(32):
        for rank, (compute_s, waits_s) in enumerate([(0.1, 0.004)] * 3 + [(0.4, 0.3)]):
            history.append(StepReport(rank=rank, step=step, times=StepTimes(compute_s, runqueue_s=waits_s)))
    table = history.table(
        oversubscribed_share=0.03, starved_share=[0.0] * 4, link_bytes_per_s=[1.0] * 4, silent_s=[0.0] * 4, comm_s=()
    )
    expected = [0.096] * 3 + [0.4 - 0.1 * 0.04 / 0.96]
    assert [stats.compute_s[-1] for stats in table] == pytest.approx(expected)
    assert [history.newest_s(rank) for rank in range(4)] == pytest.approx(expected)
    assert [stats.starved_share for stats in table] == pytest.approx([0.04] * 3 + [0.75])


def test_usual_times_of_full_histories() -> None:
    history = History(3, 64)
    for step in range(70):
        for rank in range(3):
            history.append(StepReport(rank=rank, step=step, times=StepTimes(float((rank + 1) * (step % 16)))))
    assert history.usual_s() == pytest.approx([7.5, 15.0, 22.5])


def _table(history: History, factors: tuple[float, float] | None = None) -> tuple[list[float], float]:
    """The last rank's times and input share; computing and loading of usual batches take `factors` of the reported."""
    table = history.table(
        oversubscribed_share=1.0, starved_share=[0.0], link_bytes_per_s=[1.0], silent_s=[0.0], comm_s=(),
        scale=None if factors is None else lambda steps: tuple(np.full(steps.shape, each) for each in factors),
    )  # fmt: skip
    stats = next(iter(table))
    return list(stats.compute_s), stats.input_share


@pytest.mark.parametrize(
    ("times", "factors", "compute_s", "input_share"),
    [
        (StepTimes(1.0, 0.4), None, 1.0, 0.4),
        (StepTimes(1.0, 0.4, load_s=0.8), None, 1.0, 0.4),
        (StepTimes(1.0, 0.0, load_s=3.0), None, 3.0, 2 / 3),  # Hidden behind a wait for other ranks.
        (StepTimes(1.0, 0.4), (1.5, 4.0), 1.5, 0.4),  # Loading is unknown.
        (StepTimes(1.0, 0.4, load_s=0.8), (1.5, 4.0), 3.2, 2.3 / 3.2),  # The batch was a quarter of a usual one.
        (StepTimes(1.0, 0.4, load_s=0.1), (1.5, 4.0), 0.9, 0.0),
    ],
)
def test_a_rank_is_no_faster_than_its_loading(
    times: StepTimes, factors: tuple[float, float] | None, compute_s: float, input_share: float
) -> None:
    history = History(1, 8)
    for step in range(3):
        history.append(StepReport(rank=0, step=step, times=times))
    found_s, share = _table(history, factors)
    assert history.newest_s(0, factors) == pytest.approx(compute_s)
    assert found_s == pytest.approx([compute_s] * 3) and share == pytest.approx(input_share)


def test_the_latest_time_is_without_waits_where_those_of_the_table_are() -> None:
    for limit, found_s in ((0.1, 0.4), (0.9, 1.0)):
        history = History(1, 8)
        history.append(StepReport(rank=0, step=0, times=StepTimes(1.0, runqueue_s=0.6)))
        table = history.table(
            oversubscribed_share=limit, starved_share=[0.0], link_bytes_per_s=[1.0], silent_s=[0.0], comm_s=()
        )
        assert history.newest_s(0) == pytest.approx(found_s) == next(iter(table)).compute_s[0]


def _relaxed_steps(came_s: list[list[float | None]], reduction_s: float) -> Arrivals:
    """Steps whose ranks arrive at these times after its start; None: late. A step waits 30 ms for those."""
    arrivals, began_s, waits = Arrivals(len(came_s[0])), 0.0, [0.0] * len(came_s[0])
    for step, offsets in enumerate(came_s):
        known = sorted((when, rank) for rank, when in enumerate(offsets) if when is not None)
        for when, rank in known:
            arrivals.fresh(rank, step, waits[rank], began_s + when)
        last = known[-1][0]
        if len(known) < len(offsets):
            last += 0.03
            arrivals.closed(step, began_s + last)
        for when, rank in known:
            waits[rank] = last + reduction_s - when
        began_s += last + reduction_s
    return arrivals


def test_reductions_of_steps_without_a_rank_are_timed() -> None:
    """Without what a step waited for ranks, whether or not these came; the waits of late ranks are older."""
    always = _relaxed_steps([[0.1, 0.12, None]] * 5, 0.2)
    assert list(always.reduced_s) == pytest.approx([0.2] * 4) and not always.comm_s
    sometimes = _relaxed_steps([[0.1, 0.12, 0.12 if step % 3 else None] for step in range(10)], 0.2)
    assert list(sometimes.reduced_s) == pytest.approx([0.2] * len(sometimes.reduced_s))
    assert len(sometimes.reduced_s) >= 5


def test_a_rise_of_the_loss_under_servers_is_seen_as_soon_as_in_sync() -> None:
    """Two percent per step's worth of pushes: with a loss per push, 120 losses are two such steps, and look flat."""
    n, losses = 64, Losses()
    for update in range(160):
        usual = 2.0 * 1.02 ** max(0, update - 100)
        for rank in range(n):
            losses.note_push(n * update + rank, usual * (1.0 + 0.01 * (-1) ** (rank // 2)), n)
        before = sum(step < 6400 for step in losses.steps)
        if loss_alarm(tuple(losses.values), before):
            break
    assert 106 <= update <= 130
    assert len(losses.values) == update + 1 and losses.steps[-1] == n * update + n - 1


def test_pushes_without_a_loss_count_and_those_of_another_plan_do_not() -> None:
    losses = Losses()
    for step, loss in enumerate((1.0, math.nan, 3.0, math.nan, math.nan, math.nan, 1.0, math.inf, -math.inf)):
        losses.note_push(step, loss, 3)
    assert tuple(losses.values) == (2.0, math.inf) and tuple(losses.steps) == (2, 8) and losses.usual == 2.0
    losses.note_push(9, 100.0, 3)
    losses.drop_pushes()
    for step in (10, 11, 12):
        losses.note_push(step, 1.0, 3)
    assert losses.values[-1] == 1.0 and losses.steps[-1] == 12


class Counted(float):
    """A time that counts how often one is compared with another."""

    compared = 0

    def __lt__(self, other: float) -> bool:
        Counted.compared += 1
        return float(self) < float(other)

    def __gt__(self, other: float) -> bool:
        Counted.compared += 1
        return float(self) > float(other)


def test_arrivals_of_many_ranks_in_lockstep_are_found_in_one_pass() -> None:
    n = 64
    arrivals = Arrivals(n)
    for rank in range(n):
        arrivals.in_lockstep(rank, 0, Counted(n - rank))
    assert arrivals.offsets_s() == [float(rank) for rank in range(n)] and arrivals.usual_comm_s == 1.0
    assert Counted.compared <= 2 * n
