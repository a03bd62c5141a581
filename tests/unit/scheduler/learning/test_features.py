"""Feature rows: free of scale and of names, finite, and the same in a live job as in the simulator."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from scheduler.cost.conditions import Conditions
from scheduler.learning.features import FEATURES, MOMENT, PLAN, rows
from scheduler.learning.simulated_rows import in_order
from scheduler.plan.plan import Plan
from scheduler.plan.transmission import Transmission
from scheduler.policy.candidates import candidates
from scheduler.records import RankStats, Window

N = 8


def window(scale: float = 1.0, *, order: list[int] | None = None, slow: float = 3.0, rate: float = 1e9) -> Window:
    """Rank 2 is slow in the last 20 of 40 steps; `order` says which rank takes whose place, times are in `scale` s."""
    rng = np.random.default_rng(5)
    times = scale * np.exp(0.05 * rng.standard_normal((N, 40)))
    times[2, 20:] *= slow
    order = order or list(range(N))
    ranks = tuple(
        RankStats(
            rank=rank,
            compute_s=tuple(times[order[rank]].tolist()),
            steps=tuple(range(40)),
            link_bytes_per_s=rate / scale * (1.0 + 0.01 * order[rank]),
        )
        for rank in range(N)
    )
    return Window(step=40, ranks=ranks, noise_scale=6.0, comm_bytes=10_000_000)


def table(given: Window, active: Plan | None = None) -> tuple[list[Plan], np.ndarray]:
    conditions = Conditions.from_window(given)
    assert conditions is not None
    active = active or Plan.sync(N)
    offered = candidates(conditions, active, hosts=[f"h{r}" for r in range(N)])
    return offered, rows(offered, conditions, given, active, in_order(offered, conditions))


def column(found: np.ndarray, name: str) -> np.ndarray:
    return found[:, FEATURES.index(name)]


def test_there_is_a_row_for_every_candidate_and_every_number_is_finite() -> None:
    offered, found = table(window(rate=math.inf))
    assert found.shape == (len(offered), len(FEATURES)) and len(offered) > 6
    assert np.isfinite(found).all()
    assert len(set(FEATURES)) == len(FEATURES) == len(MOMENT) + len(PLAN)


def test_a_job_a_thousand_times_slower_has_the_same_rows() -> None:
    """Constants in seconds, a collective's cycle and the resolution of reports, are left small by both scales."""
    _, one = table(window(scale=10.0))
    _, thousand = table(window(scale=10_000.0))
    same = [name not in ("cycle_log", "served_log") for name in FEATURES]
    # Quantiles of `local` jump a little with its count of steps, which is whole.
    assert np.allclose(one[:, same], thousand[:, same], atol=0.1)


def test_it_does_not_matter_which_rank_is_slow() -> None:
    swapped = [5, 1, 7, 3, 4, 2, 6, 0]
    some, one = table(window())
    other, two = table(window(order=swapped))
    assert [p.mode for p in some] == [p.mode for p in other]
    assert np.allclose(one, two, atol=0.02)  # A group goes by its first rank's link.


def test_the_moment_is_described_as_it_is() -> None:
    offered, found = table(window())
    assert set(column(found, "slow_share")) == {1 / N}
    assert column(found, "run_log")[0] == pytest.approx(math.log1p(20))
    assert column(found, "run_whole")[0] == pytest.approx(0.5)
    assert column(found, "late_share")[0] == pytest.approx(20 / (40 * N))
    assert column(found, "slowest_log")[0] == pytest.approx(math.log(3.0), abs=0.1)
    moment = found[:, : len(MOMENT)]
    assert (moment == moment[0]).all()
    assert column(found, "is_active").tolist() == [float(p.mode == "sync") for p in offered]


def test_candidates_are_told_apart() -> None:
    offered, found = table(window())
    own = found[:, len(MOMENT) :]
    assert len(np.unique(own, axis=0)) == len(offered)
    subgroup = next(i for i, p in enumerate(offered) if p.mode == "subgroup")
    assert column(found, "waited_log")[subgroup] < 0.2 < column(found, "waited_log")[0]


def test_forms_of_servers_are_told_apart() -> None:
    given = window()
    conditions = Conditions.from_window(given)
    assert conditions is not None
    forms = (Plan.ps(N, N - 1, rule=rule, lr_rule="none", servers=(0,)) for rule in ("backup", "grace"))
    plans = [Plan.sync(N), *forms]
    plans.append(plans[-1].replace(transmission=Transmission(background=True)))
    found = rows(plans, conditions, given, plans[0], in_order(plans, conditions))
    assert column(found, "drops").tolist() == [0.0, 1.0, 1.0, 1.0]
    assert column(found, "grace").tolist() == [0.0, 0.0, 1.0, 1.0]
    assert column(found, "behind").tolist() == [0.0, 0.0, 0.0, 1.0]


def test_exact_modes_are_told_apart() -> None:
    given = window()
    conditions = Conditions.from_window(given)
    assert conditions is not None
    plans = [Plan.sync(N), Plan.sync(N, balanced=True), Plan.sync(N, steal=True)]
    found = rows(plans, conditions, given, plans[0], in_order(plans, conditions))
    assert column(found, "balanced").tolist() == [0.0, 1.0, 0.0] and column(found, "steals").tolist() == [0.0, 0.0, 1.0]


@pytest.mark.parametrize(("scale", "silent_s", "counted"), [(0.01, 0.9, False), (1.0, 9.0, False), (1.0, 11.0, True)])
def test_the_time_of_a_batch_is_no_silence(scale: float, silent_s: float, counted: bool) -> None:
    """When a decision falls within a step is chance; in a simulated job it falls at the end of one."""
    given = window(scale)
    ranks = (dataclasses.replace(given.ranks[0], silent_s=silent_s), *given.ranks[1:])
    _, found = table(dataclasses.replace(given, ranks=ranks))
    assert column(found, "silent_log")[0] == (pytest.approx(math.log1p(silent_s / scale), rel=0.1) if counted else 0.0)


@pytest.mark.parametrize("steps_ago", [0, 3, 30])
def test_an_evaluation_of_all_ranks_is_no_slowness(steps_ago: int) -> None:
    """It lies within the next step's compute time of every rank, and can last hundreds of steps."""
    given = window(slow=1.0)
    at = 39 - steps_ago
    ranks = tuple(
        dataclasses.replace(
            each, compute_s=(*each.compute_s[:at], each.compute_s[at] + 200.0, *each.compute_s[at + 1 :])
        )
        for each in given.ranks
    )
    _, calm = table(given)
    _, paused = table(dataclasses.replace(given, ranks=ranks))
    for name in ("late_now", "late_share", "late_ranks", "late_factor_log", "run_log"):
        assert column(paused, name)[0] == column(calm, name)[0] == 0.0, name
    for name in ("row_max_recent_log", "row_max_past_log", "onset_log", "jitter_log"):
        assert column(paused, name)[0] == pytest.approx(column(calm, name)[0], abs=0.15), name


def test_a_few_reports_or_different_numbers_of_them_do_no_harm() -> None:
    given = window()
    ranks = [dataclasses.replace(s, compute_s=s.compute_s[-3 - s.rank :], steps=s.steps[-3 - s.rank :])
             for s in given.ranks]
    _, found = table(dataclasses.replace(given, ranks=tuple(ranks)))
    assert np.isfinite(found).all()


def test_predictions_must_be_one_for_each() -> None:
    given = window()
    conditions = Conditions.from_window(given)
    assert conditions is not None
    offered = [Plan.sync(N), Plan.partial(N, 7)]
    with pytest.raises(ValueError, match="1 predictions for 2 candidates"):
        rows(offered, conditions, given, offered[0], in_order(offered, conditions)[:1])
