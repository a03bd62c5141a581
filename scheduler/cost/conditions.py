"""The input of a decision: expected times, links, noise, and the price of staleness."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from scheduler.balance.share_policy import FIXED
from scheduler.cost.priors import prior_of
from scheduler.cost.staleness_price import StalenessPrice
from scheduler.diagnosis.links import ring_bytes
from scheduler.diagnosis.slow_episodes import changes_per_step
from scheduler.diagnosis.stragglers import MIN_REPORTS, PERSISTENCE, Readings
from scheduler.plan.headroom import Headroom
from scheduler.records import Window
from scheduler.stats import lower_median
from scheduler.transmission.behind_compute import EDGE

__all__ = ["CYCLE_S", "NOISE", "Array", "Conditions"]

Array = npt.NDArray[np.float64]

NOISE = 4.0
"""Default phi, in gradients of one rank: in the middle of STAR's tables at a batch of 128."""

CYCLE_S = 1.5e-3  # Time of a collective's negotiation.
_ROWS, _ROWS_MANY, _MANY = 24, 5, 128
_EARLY, _EARLY_STEPS = 2.0, 100.0
"""Staleness costs twice as much at the first step as from step 100 on: of 42 trainings of a perceptron (107 kB) with
momentum and two of four gradients late at times, 8 fell back to chance level within the first 60 steps; of 24 with one
late, 1 did. Sync-Switch (Li et al. 2021) reports the same for the first percents of training."""

_CROWDED = 0.15
"""Median share of time that ranks wait for a processor above which hosts count as having too few cores: 4 ranks on 2
idle cores show 0.01, on 2 busy ones 0.4."""

_FREEZE, _FREEZE_S = 5.0, 0.5
"""A report of a freezing rank above this multiple of the typical time and above these seconds contains a freeze; steps
of all ranks above this multiple contain a pause of the whole program. Long sequences make steps a few times longer."""

_AGAIN = 0.5  # Part of the excess of a pause above which another slow report is the same pause again.


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """The input of a decision.

    Attributes:
        times_s: Expected compute times, one row per step, shape (n_steps, n_ranks), seconds.
        rate: Link bandwidth of every rank in bytes/s; infinite where unknown.
        comm_bytes: Gradient bytes.
        edge_part: Fraction of those bytes that compute cannot hide at servers: what is ready last or needed first.
        reduced_part: Fraction of those bytes that a reduction sends, below 1 with compression.
        pushed_part: The same for a push to a server or another rank, in the smallest form that the user allows.
        noise: phi in gradients of one rank.
        starved: Share of its time a rank is without a processor, 0 to 1, shape (n_ranks,).
        beyond_s: Measured time of a collective beyond latency and transfer, seconds; with fewer cores than ranks it
            exceeds both.
        frozen_s: Mean time per step that freezing ranks delay every collective, seconds.
        freezing: The ranks that cause this delay.
        crowded: Whether most ranks wait for a processor: a server would take CPU time from them, and times are known
            less precisely.
        early: Factor on the price of staleness at the beginning of a training; 1 later.
        batch: Samples of a rank's batch if batch shares are possible, else 0.
        fixed_part: Fraction of a rank's time that does not depend on its batch size.
        microbatches: Micro-batches of a rank in a step if they can be taken over, else 0.
        same_steps: Whether every row has the times of one step, as they were reported.
        changes: How often per step another rank becomes slow (`scheduler.diagnosis.slow_episodes`).
        headroom: Unused capacity of every rank's host; empty if unknown.
        background: The user's setting for transfers behind compute (`Plan.transmission`), None to leave it to the
            plans.
        price: Price of staleness, with the other assumptions on the network (rho and tolerable drift).
        usual_s: Mean time of every rank, shape (n_ranks,).
        typical_s: Lower median of `usual_s`.
        prices: The price, its 5 % and its 95 % quantile.
    """

    times_s: Array
    rate: Array
    comm_bytes: float = 0.0
    edge_part: float = EDGE
    reduced_part: float = 1.0
    pushed_part: float = 1.0
    noise: float = NOISE
    starved: Array = field(default_factory=lambda: np.zeros(0))
    beyond_s: float = 0.0
    frozen_s: float = 0.0
    freezing: tuple[int, ...] = ()
    crowded: bool = False
    early: float = 1.0
    batch: int = 0
    fixed_part: float = FIXED
    microbatches: int = 0
    same_steps: bool = False
    changes: float = 0.0
    headroom: tuple[Headroom, ...] = ()
    background: bool | None = None
    price: StalenessPrice = field(default_factory=StalenessPrice)
    usual_s: Array = field(init=False)
    typical_s: float = field(init=False)
    prices: Array = field(init=False)

    def __post_init__(self) -> None:
        usual_s = np.asarray(self.times_s.mean(axis=0))
        object.__setattr__(self, "usual_s", usual_s)
        object.__setattr__(self, "typical_s", lower_median(usual_s))
        object.__setattr__(self, "prices", np.array([self.price.value, *self.price.quantiles(0.05, 0.95)]))

    @property
    def world_size(self) -> int:
        return int(self.times_s.shape[1])

    @property
    def reduced_bytes(self) -> float:
        """Gradient bytes of a reduction, after compression."""
        return self.comm_bytes * self.reduced_part

    @classmethod
    def from_window(cls, window: Window, price: StalenessPrice | None = None) -> Conditions | None:
        """Read a window. None if a rank has not reported, or has too few reports and no link rate is known.

        Expected times are those of a rank's current run of slow reports, else its recent ones: intermittent slowness
        is expected to recur at the same rate, a single slow step and a pause of all ranks are not. Freezes are added
        by `with_freezes`.
        """
        readings = Readings.of(window)
        if window.world_size == 0 or not readings.counts.all():
            return None
        known = np.isfinite(window.table.link_bytes_per_s) & (window.table.link_bytes_per_s > 0.0)
        rate = np.where(known, window.table.link_bytes_per_s, math.inf)
        rows = _ROWS if window.world_size <= _MANY else _ROWS_MANY
        if not math.isnan(readings.reference_s):
            times, same_steps = _expected_times(readings, rows)
        elif known.any():
            # Too few reports to compare compute times, but links are known: assume equal times.
            times, same_steps = np.full((rows, window.world_size), readings.typical_s), False
        else:
            return None
        return cls(
            times_s=times,
            rate=rate,
            comm_bytes=float(window.comm_bytes),
            edge_part=window.edge_part,
            reduced_part=window.reduced_part,
            pushed_part=window.pushed_part,
            noise=_known(window.noise_scale, NOISE),
            beyond_s=_beyond_s(window, rate),
            crowded=lower_median(window.table.starved_share) > _CROWDED,
            starved=np.minimum(0.99, window.table.starved_share),
            early=1.0 + (_EARLY - 1.0) * max(0.0, 1.0 - window.step / _EARLY_STEPS),
            price=price or StalenessPrice(prior_of(window.comm_bytes)),
            batch=window.batch,
            headroom=window.headroom,
            fixed_part=window.fixed_part if math.isfinite(window.fixed_part) else FIXED,
            microbatches=window.microbatches,
            same_steps=same_steps,
            changes=changes_per_step(readings),
        )

    def with_freezes(self, frozen_s: float, freezing: Collection[int], froze: Collection[int]) -> Conditions:
        """Return a copy that accounts for freezes.

        Times that contain a freeze are replaced: one that does not recur is irrelevant, and recurring ones are counted
        by `frozen_s`, because they delay every rank of a collective.

        Args:
            frozen_s: Mean time per step lost to freezes, seconds.
            freezing: Ranks that freeze repeatedly.
            froze: Ranks that froze at least once.
        """
        if not froze:
            return self
        times = self.times_s.copy()
        for one in froze:
            own = times[:, one]
            usual_s = min(float(np.median(own)), _FREEZE * self.typical_s)
            own[own > max(_FREEZE * self.typical_s, _FREEZE_S)] = usual_s
        return dataclasses.replace(self, times_s=times, frozen_s=frozen_s, freezing=tuple(sorted(freezing)))


def _known(value: float, default: float) -> float:
    return value if math.isfinite(value) and value > 0.0 else default


def _expected_times(readings: Readings, rows: int) -> tuple[Array, bool]:
    """Expected times, one row per step, and whether every row has the times of one step."""
    reported = without_pauses(readings, rows)
    width = reported.shape[1]
    times = np.full((rows, len(reported)), math.nan)
    times[max(0, rows - width) :] = reported[:, -rows:].T
    expected = np.flatnonzero((readings.run_lengths() >= PERSISTENCE) | (readings.counts < rows)).tolist()
    same_steps = not expected and bool((np.ptp(readings.steps[:, -rows:], axis=0) == 0).all())
    for one in expected:
        own = reported[one, width - int(readings.counts[one]) :]
        times[:, one] = _expected(own, int(readings.run_lengths()[one]), rows)
    _forget_single(times, reported, readings)
    return times, same_steps


def _expected(own: Array, run: int, rows: int) -> Array:
    """Expected times of a rank with these reports, of which the last `run` are slow."""
    run = min(run, rows)
    if run >= PERSISTENCE:
        # Repeated, with the newest last in every column, so that times of the same step stay in one row.
        return own[-run:][::-1][np.arange(rows) % run][::-1]
    times = own[-rows:]
    # Padded with the median, not repeated: one long step of six would become four of 24 and look intermittent.
    return np.concatenate((np.full(rows - len(times), np.median(times)), times))


def without_pauses(readings: Readings, rows: int) -> Array:
    """The reports of every rank without pauses of the whole program, newest last, shape (n_ranks, n_reports).

    An evaluation or a recompilation makes a step long for all ranks. No plan shortens it, and in a mean of few reports
    it would hide the ranks that are slow all the time. It counts as a rank's usual time, plus what a slow rank takes
    longer than the fastest one.
    """
    slow = readings.slow()
    times = readings.newest(slow.shape[1])
    paused = (times > _FREEZE * readings.reference_s) & ~slow
    if not paused.any():
        return times
    usual_s = np.nanmedian(times[:, -rows:], axis=1, keepdims=True)
    steps, which = np.unique(readings.steps[paused], return_inverse=True)
    shortest_s = np.full(len(steps), math.inf)
    np.minimum.at(shortest_s, which, times[paused])
    place = np.minimum(np.searchsorted(steps, readings.steps), len(steps) - 1)
    late = slow & (steps[place] == readings.steps)
    return np.where(paused, usual_s, np.where(late, usual_s + times - shortest_s[place], times))


def _beyond_s(window: Window, rate: Array) -> float:
    """Time of collectives beyond latency and transfer, from the rank with the slowest link; 0 if not measured.

    A lower bound: the whole transfer is subtracted, as if computing hid none of it.
    """
    slowest = int(rate.argmin())
    times = [time_s for time_s in window.table.comm_s[slowest] if math.isfinite(time_s) and time_s >= 0.0]
    if len(times) < MIN_REPORTS:
        return 0.0
    n = window.world_size
    wire_s = ring_bytes(n, window.comm_bytes * window.reduced_part) / float(rate[slowest])
    return max(0.0, lower_median(times) - CYCLE_S - wire_s)


def _forget_single(times: Array, reported: Array, readings: Readings) -> None:
    """Replace a rank's single pause in the expected times: one pause is not evidence of recurring slowness.

    That is its longest slow report if no other one reaches `_AGAIN` of its excess: the short slow reports of a noisy
    machine do not say that a checkpoint of some seconds comes back, and in a mean it would outweigh all other reports.
    """
    slow, usual_s = readings.slow(), readings.reference_s
    ranks = np.flatnonzero(slow.any(axis=1))
    if not len(ranks):
        return
    over_s = np.where(slow[ranks], reported[ranks], usual_s)
    second_s, longest_s = np.partition(over_s, -2, axis=1)[:, -2:].T
    single = second_s - usual_s < _AGAIN * (longest_s - usual_s)
    own = times[:, ranks[single]]
    # By value, for a run of slow reports is repeated.
    times[:, ranks[single]] = np.where(own == longest_s[single], np.median(own, axis=0), own)
