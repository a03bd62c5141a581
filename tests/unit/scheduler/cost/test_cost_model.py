"""What modes are predicted to cost: closed forms, star.md's objections, and reading windows."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.cost.conditions import NOISE, Conditions
from scheduler.cost.cost_model import predict, rank
from scheduler.cost.priors import LARGE
from scheduler.cost.staleness_price import StalenessPrice
from scheduler.plan.completion import with_groups
from scheduler.plan.plan import MODES, Plan
from tests.support.windows import steady, window


def conditions(times: list[float], **fields: object) -> Conditions:
    n = len(times)
    values: dict[str, object] = {"rate": np.full(n, math.inf), **fields}
    return Conditions(times_s=np.array([times] * 24), **values)  # type: ignore[arg-type]


def every_mode(n: int) -> list[Plan]:
    return [
        Plan.sync(n), Plan.partial(n, n - 1), Plan.partial(n, n // 2), Plan.subgroup(n, range(n - 1)),
        Plan.grouped(n, 2), Plan.ps(n, 1), Plan.ps(n, n - 1), Plan.ps(n, 1, rule="groups"),
        Plan.ps(n, n - 1, rule="grace", lr_rule="none"), Plan.local(n, steps=4), Plan.local(n, seconds=1.0),
        Plan.ps(n, 1, rule="ssp", slack=3), Plan.ps(n, 1, lr_rule="none", damping="none"),
    ]  # fmt: skip


def test_sync_is_the_unit() -> None:
    found = predict(Plan.sync(4), conditions([1.0, 1.0, 1.0, 4.0]))
    assert (found.relative, found.progress, found.drift, found.reach) == (1.0, 1.0, 0.0, 1.0)
    assert found.interval_s == pytest.approx(4.0, rel=0.01)


@pytest.mark.parametrize("rate", [[1e9] * 4, [1e9, 1e8, 1e9, 1e9]])
def test_what_a_collective_takes_beyond_its_bytes_is_in_every_mode_that_has_one(rate: list[float]) -> None:
    times = steady(4, slow={3: 4.0})
    wire_s = 1.5 * 1_000_000 / min(rate)
    quiet, loud = (
        window(times, rates=rate, comm_s=(0.0015 + wire_s + beyond_s,) * 8) for beyond_s in (0.0, 0.05)
    )
    plain, busy = Conditions.from_window(quiet), Conditions.from_window(loud)
    assert plain is not None and busy is not None
    assert plain.beyond_s == pytest.approx(0.0, abs=1e-9) and busy.beyond_s == pytest.approx(0.05)
    members = Plan.subgroup(4, (0, 1, 2))
    for plan, share in ((Plan.sync(4), 1.0), (Plan.partial(4, 3), 1.35), (members, 5.0 / 6.0)):
        more_s = predict(plan, busy).interval_s - predict(plan, plain).interval_s
        assert more_s == pytest.approx(0.05 * share, rel=0.05), plan.label
    server = Plan.ps(4, 4)
    assert predict(server, busy).interval_s - predict(server, plain).interval_s == pytest.approx(0.035, rel=0.05)
    # Steps that end without the slow one take an order and a stand-in more; while nobody is late there are none.
    calm = dataclasses.replace(busy, times_s=steady(4)), dataclasses.replace(plain, times_s=steady(4))
    more_s = predict(Plan.partial(4, 3), calm[0]).interval_s - predict(Plan.partial(4, 3), calm[1]).interval_s
    assert more_s == pytest.approx(0.05, rel=0.05)
    # Two that come late are more work than one, and waiting for one of the two leaves one.
    two = dataclasses.replace(busy, times_s=steady(4, slow={2: 4.0, 3: 4.0}))
    quiet_two = dataclasses.replace(two, beyond_s=0.0)
    for quorum, share in ((2, 1.5), (3, 1.35), (4, 1.0)):
        plan = Plan.partial(4, quorum)
        more_s = predict(plan, two).interval_s - predict(plan, quiet_two).interval_s
        assert more_s == pytest.approx(0.05 * share, rel=0.05), plan.label
    # What waiting for the slow rank costs is a smaller part then.
    assert predict(Plan.partial(4, 3), busy).relative > predict(Plan.partial(4, 3), plain).relative


class PriceOf(StalenessPrice):
    """A price that is known."""

    def __init__(self, price: float, lr_ratio: float = LARGE.lr_ratio) -> None:
        super().__init__(dataclasses.replace(LARGE, lr_ratio=lr_ratio))
        self._fixed = price

    @property
    def value(self) -> float:
        return self._fixed

    def quantiles(self, *levels: float) -> list[float]:
        return [self._fixed for _ in levels]


@pytest.mark.parametrize("phi", [100 / 128, 400 / 128, 3000 / 128, 9000 / 128])
def test_without_a_price_equal_ranks_would_choose_asgd(phi: float) -> None:
    """star.md 4.10: Cost(1) / Cost(N) = (1 + phi / b) / (N + phi / b), .20 .37 .78 .91; here by the same formula."""
    free = conditions([1.0] * 8, noise=phi, price=PriceOf(0.0, 1.0))
    star = Plan.ps(8, 1, lr_rule="noise", noise_scale=phi, damping="none")
    found = predict(star, free)
    # Their K(x): one update of K(8) / K(1) synchronous steps every 1 / 8 of a step, at the best learning rate.
    assert found.progress / found.interval_s == pytest.approx(8.0 * (1 + phi / 8) / (1 + phi), rel=0.01)
    assert (found.relative - (1.0 - found.reach)) == pytest.approx((1 + phi) / (8 + phi), rel=0.01)


@settings(max_examples=25, deadline=None)
@given(
    n=st.sampled_from((2, 4, 8, 16)), noise=st.floats(0.0, 200.0), rho=st.floats(0.05, 1.0), above=st.floats(1.0, 8.0)
)
def test_any_price_of_the_learning_rate_ratio_keeps_equal_ranks_in_sync(
    n: int, noise: float, rho: float, above: float
) -> None:
    fair = conditions([1.0] * n, noise=noise, price=PriceOf(rho * above, rho))
    best = rank(every_mode(n), fair)[0]
    # Servers may save the millisecond of a collective's negotiation, in a step of a second.
    assert best.plan.mode == "sync" or best.relative > 0.998


@settings(max_examples=25, deadline=None)
@given(
    times=st.lists(st.floats(0.02, 3.0), min_size=4, max_size=9),
    noise=st.floats(0.0, 500.0),
    rate=st.floats(1e6, 1e10),
)
def test_predictions_are_numbers_in_order(times: list[float], noise: float, rate: float) -> None:
    n = len(times)
    found = rank(every_mode(n), conditions(times, noise=noise, rate=np.full(n, rate), comm_bytes=1e7))
    assert len(found) == len(every_mode(n))
    assert [p.relative for p in found] == sorted(p.relative for p in found)
    for p in found:
        assert 0.0 < p.low <= p.relative * (1 + 1e-9) and p.relative <= p.high * (1 + 1e-9) and p.interval_s > 0.0
        assert 0.0 <= p.reach <= 1.0 and math.isfinite(p.high)
        assert p.drift >= 0.0


def test_a_slow_rank_makes_partial_and_its_relatives_faster() -> None:
    found = {p.plan.label: p for p in rank(every_mode(8), conditions([1.0] * 7 + [4.0]))}
    assert found["partial(7)"].relative == pytest.approx(0.25, rel=0.15)
    assert found["subgroup(0,1,2,3,4,5,6)"].relative == pytest.approx(0.25, rel=0.15)
    assert found["grouped(2)"].relative < 0.5
    assert found["local(4)"].relative > 1.0  # It waits as long and drifts besides.


def test_a_slow_link_is_left_only_by_modes_that_do_not_use_it() -> None:
    rate = np.array([1e9] * 7 + [1e7])
    found = {p.plan.label: p for p in rank(every_mode(8), conditions([0.1] * 8, rate=rate, comm_bytes=1e7))}
    assert found["subgroup(0,1,2,3,4,5,6)"].relative < 0.2
    assert found["partial(7)"].relative == pytest.approx(1.0, rel=0.05)
    ring_s = 2 * 7 / 8 * 1e7 / 1e7
    assert found["sync"].interval_s == pytest.approx(0.1 + ring_s, rel=0.05)


def test_freezes_cost_every_collective_but_not_servers() -> None:
    times = np.full((24, 8), 0.1)
    times[3, 5] = 6.0
    frozen = Conditions(times_s=times, rate=np.full(8, math.inf)).with_freezes(0.3, [5], [5])
    assert frozen.times_s.max() == pytest.approx(0.1)
    assert times.max() == 6.0
    assert frozen.freezing == (5,)
    found = {p.plan.label: p for p in rank(every_mode(8), frozen)}
    for label in ("sync", "partial(7)", "subgroup(0,1,2,3,4,5,6)", "local(4)"):
        assert found[label].interval_s == pytest.approx(0.4, rel=0.1), label
    assert found["ps(7)"].interval_s == pytest.approx(0.1, rel=0.1)
    unfrozen = Conditions(times_s=times, rate=np.full(8, math.inf))
    assert unfrozen.with_freezes(0.0, [], []) is unfrozen


def test_drift_may_miss_the_target() -> None:
    many = predict(Plan.ps(32, 1, lr_rule="none", damping="none"), conditions([1.0] * 32))
    few = predict(Plan.ps(2, 1), conditions([1.0, 1.0]))
    assert many.reach < 0.01 < 0.9 < few.reach
    assert many.relative > 1.0


def test_groups_left_open_are_formed() -> None:
    times_s = [1.0] * 6 + [3.0, 3.0]
    assert with_groups(Plan.grouped(8, 2), times_s).groups == ((0, 1, 2, 3, 4, 5), (6, 7))
    assert with_groups(Plan.ps(8, 1, rule="groups"), times_s).groups == ((0, 1, 2, 3, 4, 5), (6, 7))
    assert with_groups(Plan.sync(8), times_s) == Plan.sync(8)


# ---- windows --------------------------------------------------------------------------------------------------------


def test_a_window_is_read() -> None:
    rates = [1e9] * 3 + [math.nan]
    found = Conditions.from_window(window(steady(4, slow={2: 3.0}), rates=rates, noise_scale=math.nan))
    assert found is not None
    assert found.noise == NOISE
    assert found.usual_s[2] / found.typical_s == pytest.approx(3.0, rel=0.05)
    assert math.isinf(found.rate[3]) and found.comm_bytes == 1e6
    assert found.world_size == 4


def test_a_rank_without_reports_makes_no_conditions() -> None:
    full = window(steady(3))
    empty = full.ranks[1].__class__(rank=1, compute_s=(), steps=())
    missing = window(steady(3)).__class__(step=8, ranks=(full.ranks[0], empty, full.ranks[2]))
    assert Conditions.from_window(missing) is None


def test_a_present_slow_run_is_expected_to_go_on() -> None:
    times = steady(4, 40)
    times[-5:, 1] *= 4.0  # Slow for 5 steps: its mean over the window is 1.4.
    found = Conditions.from_window(window(times))
    assert found is not None and found.usual_s[1] / found.typical_s == pytest.approx(4.0, rel=0.05)


def test_what_comes_and_goes_is_expected_as_often_as_it_came() -> None:
    times = steady(4, 40)
    times[::8, 1] *= 4.0
    found = Conditions.from_window(window(times))
    assert found is not None and found.usual_s[1] / found.typical_s == pytest.approx(1.0 + 3.0 / 8.0, rel=0.1)


def test_starvation_counts_where_it_makes_slow() -> None:
    found = Conditions.from_window(window(steady(4, slow={1: 3.0}), starved={1: 0.6, 2: 0.9}))
    late_only = Conditions.from_window(window(steady(4, slow={1: 3.0}), starved={1: 0.6}))
    assert found is not None and late_only is not None
    helped = predict(Plan.partial(4, 3), found).interval_s
    assert helped == predict(Plan.partial(4, 3), late_only).interval_s, "rank 2 is in time"
    unhindered = predict(Plan.partial(4, 3), Conditions(times_s=found.times_s, rate=found.rate, comm_bytes=1e6))
    assert helped > unhindered.interval_s + 0.02


def test_all_modes_have_a_prediction() -> None:
    assert {plan.mode for plan in every_mode(4)} == set(MODES)


def test_partial_damps_late_gradients_as_the_live_job() -> None:
    """There `relative` is `inverse`, for a step takes in the gradients of all ranks, and `none` damps nothing."""
    slow = conditions([1.0] * 7 + [6.0])
    inverse, relative, none = (
        predict(Plan.partial(8, 4, damping=name), slow).drift for name in ("inverse", "relative", "none")
    )
    assert relative == inverse < none


def test_compression_shortens_reductions_and_pushes_but_no_parameters() -> None:
    """10 MB over links of 10 MB/s: a ring takes 1.5 s, a push and its answer 1 s each; compute hides little of it."""
    whole = conditions([0.01] * 4, rate=np.full(4, 1e7), comm_bytes=1e7)
    reduced, pushed = dataclasses.replace(whole, reduced_part=0.02), dataclasses.replace(whole, pushed_part=0.25)

    def saved_s(plan: Plan, small: Conditions) -> float:
        return predict(plan, whole).interval_s - predict(plan, small).interval_s

    for plan in (Plan.sync(4), Plan.partial(4, 3)):
        assert saved_s(plan, reduced) == pytest.approx(0.98 * 1.5, rel=0.02), plan.label
        assert saved_s(plan, pushed) == 0.0, plan.label
    assert saved_s(Plan.subgroup(4, (0, 1, 2)), reduced) == pytest.approx(0.98 * 4 / 3, rel=0.02)
    assert saved_s(Plan.local(4, steps=4), reduced) == saved_s(Plan.local(4, steps=4), pushed) == 0.0
    server = Plan.ps(4, 1, servers=(0, 1, 2, 3))
    assert saved_s(server, reduced) == 0.0 < saved_s(server, pushed)
    # Over fast links a smaller form would cost more than it saves, and is not used.
    fast = dataclasses.replace(pushed, rate=np.full(4, 1e10))
    assert predict(server, fast).interval_s == predict(server, dataclasses.replace(fast, pushed_part=1.0)).interval_s
