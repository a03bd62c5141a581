"""Measured outcome of a switch, compared with its prediction. Pure: no clock.

If the cost model is wrong (helper threads beside the ranks on few cores, servers that share them) a plan can make
every step slower than the plan it replaced, on all ranks alike, so that no rank's report shows it. Therefore the time
between updates is measured under every plan:

    cost = wall time of an update / its progress in synchronous steps + expected cost of freezes per step

The progress is that of `scheduler.cost.cost_model`, by which `Prediction.relative` is divided too: an update of 3 of 4
gradients counts less than one of four. Freezes are rare and long: blocks with one are left out, and their cost, as
`scheduler.diagnosis.freezes` expects it, is added to the plans that a freeze delays.

Updates are counted in blocks of at least a fifth of a second, since messages come in batches of a tenth. Means of
blocks are compared, as in a Welch test, not medians: if a rank is slow in a third of the steps, a median reflects
either none or all of it. Blocks in which all ranks pause at once, as for an evaluation, are left out, unless nearly
every block has a pause. A block counts as at most four times the plan's median block.

Only comparable conditions are compared. Every block keeps its normalized step time: the predicted time of an update in
units of a typical rank's compute time, which is unchanged when all ranks become slower alike. Blocks for which it
differs from the plan's current one by a factor above 1.2 are scaled to that; above 2, or with other slow links, they
are ignored.

A plan that is costlier by 5 % and by 2.5 standard errors is replaced by the previous plan. Its mode is held back for a
time that doubles with each repetition, unless the prediction is now so much better that the same error would not
matter. A plan of the mode that does no harm halves the number of holds that count. Late,
frozen or dead ranks only change what is measured; nothing here waits.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from scheduler.cost.conditions import Conditions
from scheduler.plan.plan import Plan

__all__ = [
    "Block",
    "Comparison",
    "CostFactors",
    "ModeBackoff",
    "OutcomeCheck",
    "SlownessProfile",
    "SwitchOutcome",
    "compare",
]

_BLOCK_STEPS, _BLOCK_S = 2, 0.2
_WARMUP_STEPS, _WARMUP_S = 3, 0.2  # Not counted after a switch: caches warm up, connections open, ranks rejoin.
_KEPT = 64  # Blocks of each plan.
_MOST_LEFT = 3  # Plans that may come back.
_OLD_S, _OLD_STEPS = 120.0, 400
"""Blocks older in both are ignored, and so is the interval predicted of the replaced plan: the load of the machine, or
the size of a step, may have changed."""

_HARM = 0.05
_ERRORS = 2.5
_LEAST_STEPS, _LEAST_BLOCKS = 20.0, 3
_SURE, _ENOUGH_BLOCKS = 0.05, 24  # Standard error, or number of blocks, with which a measurement is reported.
_ERROR_FLOOR = 0.01
_PREDICTED_ERROR, _PREDICTED_ROOM = 0.15, 1.05
"""Standard error of, and factor on, the predicted interval of the replaced plan. Used if that plan was active too
briefly to be measured (a switch at step 5 of a job). The error shrinks over time: a wrong return costs little and
measures that plan."""

_BATCH_S = 0.1  # Time for which messages are held back.
_OUTLIER = 4.0
_MOST_PAUSES = 4
"""Excess of blocks left out over blocks kept from which on none is left out: pauses in nearly all blocks are a part of
the plan's steps."""
_SAME, _COMPARABLE = 1.2, 2.0  # Ratios of normalized step times.
_ALIKE = math.log(1.5)
"""Profiles are alike while the sorted slowdowns of the slower half of the ranks agree within this factor: on a busy
machine with jitter of 10 to 30 % it constantly changes which rank is slowest, without effect."""


@dataclass(frozen=True, slots=True)
class SlownessProfile:
    """Distribution of slowness as far as it affects the cost of a step; independent of the ranks' overall speed.

    Attributes:
        slowdowns: Times of the slower half of the ranks relative to the typical one, largest first.
        links: Ranks with a slow link.
    """

    slowdowns: tuple[float, ...]
    links: tuple[int, ...] = ()

    @classmethod
    def of(cls, conditions: Conditions, links: Sequence[int]) -> SlownessProfile:
        """The profile of the expected times."""
        ratios = np.sort(conditions.usual_s / conditions.typical_s)[::-1]
        half = max(1, conditions.world_size // 2)
        return cls(tuple(np.maximum(1.0, ratios[:half]).tolist()), tuple(links))

    def alike(self, other: SlownessProfile) -> bool:
        """Whether measurements under both can be compared."""
        pairs = zip(self.slowdowns, other.slowdowns, strict=False)
        return self.links == other.links and all(abs(math.log(one / two)) <= _ALIKE for one, two in pairs)


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive updates.

    Attributes:
        end_s: When it ended.
        end_step: Its last step.
        steps: Updates in it.
        interval_s: Mean wall time of an update.
        normalized_step: Normalized step time: predicted time of an update in units of a typical rank's compute time.
        links: Ranks with a slow link.
    """

    end_s: float
    end_step: int
    steps: int
    interval_s: float
    normalized_step: float
    links: tuple[int, ...] = ()

    def scaled_s(self, normalized_step: float) -> float:
        """The interval expected at another normalized step time."""
        ratio = normalized_step / self.normalized_step
        return self.interval_s * (ratio if not 1.0 / _SAME <= ratio <= _SAME else 1.0)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Measured cost of a plan relative to that of another; above 1 is costlier."""

    ratio: float
    error: float
    steps: float

    @property
    def harmful(self) -> bool:
        """Whether the plan is costlier by more than the limit and significantly so."""
        return self.ratio > 1.0 + _HARM and math.log(self.ratio) > _ERRORS * self.error


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchOutcome:
    """Outcome of a switch.

    Attributes:
        plan_id: Id of the plan.
        label: Its name.
        step: Last step of the measurement.
        against: Name of the plan it is compared with: the replaced one or `sync`.
        predicted: Predicted speed relative to that plan's.
        measured: Measured speed relative to that plan's.
        steps: Measured progress in synchronous steps.
        harmful: Whether the plan is replaced because of it.
    """

    plan_id: int
    label: str
    step: int
    against: str
    predicted: float
    measured: float
    steps: float
    harmful: bool

    def as_record(self) -> dict[str, Any]:
        """Fields and sentence for logs and reports, where the plan's id is called `epoch`."""
        values = dataclasses.asdict(self)
        return {"step": values.pop("step"), "epoch": values.pop("plan_id"), **values, "sentence": self.sentence}

    @property
    def sentence(self) -> str:
        """`partial(2) was predicted 1.1x faster than sync, was 0.83x over 24 steps`."""
        return (
            f"{self.label} was predicted {self.predicted:.2g}x faster than {self.against}, was {self.measured:.2g}x "
            f"over {self.steps:.0f} steps"
        )


def compare(new_s: Sequence[float], old_s: Sequence[float], steps: float, *, old_error: float = 0.0) -> Comparison:
    """Compare costs of blocks.

    Args:
        new_s: Costs under the active plan, seconds per synchronous step.
        old_s: Costs under the other plan.
        steps: Progress in synchronous steps behind `new_s`.
        old_error: Lower bound of the relative standard error of `old_s`.
    """
    (new, new_error), (old, error) = _mean(new_s), _mean(old_s)
    return Comparison(new / old, math.hypot(new_error, max(error, old_error), _ERROR_FLOOR), steps)


def _mean(costs_s: Sequence[float]) -> tuple[float, float]:
    """Mean and its relative standard error, outliers clipped."""
    most_s = _OUTLIER * statistics.median(costs_s)
    kept = [min(cost_s, most_s) for cost_s in costs_s]
    mean_s = statistics.fmean(kept)
    if len(kept) < 2:
        return mean_s, 0.0
    return mean_s, statistics.stdev(kept) / math.sqrt(len(kept)) / mean_s


@dataclass(frozen=True, slots=True)
class CostFactors:
    """Factors that convert a plan's blocks to current conditions.

    Attributes:
        gain: Progress of an update in synchronous steps.
        frozen_s: Expected cost of freezes per synchronous step.
        normalized_step: Current normalized step time, as in `Block`.
        interval_s: Predicted time of an update, with freezes.
    """

    gain: float
    frozen_s: float
    normalized_step: float
    interval_s: float = math.nan

    def costs_s(self, blocks: Sequence[Block]) -> list[float]:
        """Seconds per synchronous step of progress, for each block."""
        return [block.scaled_s(self.normalized_step) / self.gain + self.frozen_s for block in blocks]


@dataclass(slots=True)
class _Expected:
    """The prediction behind a switch, kept until the next one."""

    plan: Plan
    replaced: Plan
    predicted: float  # Speed relative to the replaced plan.
    over_sync: float  # Speed relative to `sync`.
    replaced_s: float  # Predicted cost of the replaced plan.
    normalized_step: float  # The replaced plan's normalized step time then; NaN if `replaced_s` is not to be used.

    def measured_only(self) -> _Expected:
        """The same for a plan that comes back: what was predicted of the replaced one may be old by then."""
        return dataclasses.replace(self, normalized_step=math.nan)


@dataclass(slots=True)
class _ActivePlanStats:
    """Measurements of the active plan."""

    plan_id: int
    label: str
    begin_s: float
    begin_step: int
    expected: _Expected | None
    blocks: deque[Block] = field(default_factory=lambda: deque(maxlen=_KEPT))
    open: tuple[float, int] | None = None  # Time and step at which the current block began.
    pauses: int = 0  # Blocks left out for a pause, less those kept meanwhile.
    reported: bool = False


class OutcomeCheck:
    """Measures every plan and judges the active one."""

    def __init__(self) -> None:
        self._active: _ActivePlanStats | None = None
        self._expected: _Expected | None = None
        # Those of the plans which the active one, not chosen for its speed, has replaced or kept from coming: one of
        # them may come back without a decision, as after a state was loaded.
        self._left: tuple[_Expected, ...] = ()
        self._blocks: dict[str, deque[Block]] = {}
        self._normalized_step = math.nan
        self._links: tuple[int, ...] = ()
        self._last_step = 0

    def expect(
        self,
        plan: Plan,
        replaced: Plan,
        *,
        predicted: float,
        over_sync: float,
        replaced_s: float,
        normalized_step: float,
    ) -> None:
        """Record the prediction behind a decided switch, which may still fail.

        Args:
            plan: The next plan.
            replaced: The active one.
            predicted: Predicted speed of `plan` relative to `replaced`.
            over_sync: Predicted speed of `plan` relative to `sync`.
            replaced_s: Predicted cost of `replaced`, seconds per synchronous step.
            normalized_step: Normalized step time of `replaced`.
        """
        self._expected = _Expected(plan, replaced, predicted, over_sync, replaced_s, normalized_step)

    def set_normalized_step(self, normalized_step: float, links: tuple[int, ...] = ()) -> None:
        """Set the normalized step time of the active plan, and the ranks with slow links."""
        ratio = normalized_step / self._normalized_step
        if self._active is not None and not (1.0 / _COMPARABLE <= ratio <= _COMPARABLE and links == self._links):
            self._active.open = None  # A block across the change would be meaningless.
        self._normalized_step, self._links = normalized_step, links

    def note(self, step: int, now_s: float, active: Plan, *, frozen: bool, pause_s: float = 0.0) -> None:
        """Record the progress of training; called for every window.

        Args:
            step: Updates so far.
            now_s: Wall time; NaN if unknown, then nothing is measured.
            active: The active plan.
            frozen: Whether a rank is frozen, or something else that is not the plan's delays steps for a time.
            pause_s: Length of a pause of all ranks that ended since the last call, 0 without one.
        """
        if math.isnan(now_s):
            return
        stats, ended, self._last_step = self._active, step > self._last_step, step
        if stats is None or stats.plan_id != active.plan_id or step < stats.begin_step:
            stats = self._begin(step, now_s, active)
        if frozen or math.isnan(self._normalized_step):
            stats.open = None
            return
        if step - stats.begin_step < _WARMUP_STEPS or now_s - stats.begin_s < _WARMUP_S:
            return
        if not ended:
            return  # Blocks begin and end with a step, not in a pause of which it is not known yet how long it is.
        if stats.open is None:
            stats.open = (now_s, step)
            return
        if pause_s and stats.pauses < _MOST_PAUSES:
            stats.open, stats.pauses = (now_s, step), stats.pauses + 1
            if stats.blocks and stats.blocks[-1].end_s >= now_s - pause_s - _BATCH_S:  # It ended in the pause.
                stats.blocks.pop()
                self._blocks[stats.label].pop()
                stats.pauses += 1  # What that block had taken off.
            return
        began_s, first = stats.open
        if step - first >= _BLOCK_STEPS and now_s - began_s >= _BLOCK_S:
            interval_s = (now_s - began_s) / (step - first)
            block = Block(now_s, step, step - first, interval_s, self._normalized_step, self._links)
            stats.pauses = max(0, stats.pauses - 1) if stats.pauses < _MOST_PAUSES else stats.pauses
            stats.blocks.append(block)
            self._blocks.setdefault(stats.label, deque(maxlen=_KEPT)).append(block)
            stats.open = (now_s, step)

    def measured(self, plan: Plan, normalized_step: float) -> bool:
        """Whether there are enough blocks of a plan that are comparable with this normalized step time."""
        return len(self._comparable(self._blocks.get(plan.label, ()), normalized_step)) >= _LEAST_BLOCKS

    def measured_s(self, factors: CostFactors) -> float:
        """Measured cost of the active plan plus a standard error, seconds per synchronous step of progress.

        Infinite while there are too few blocks.

        Args:
            factors: Factors of the active plan.
        """
        if self._active is None:
            return math.inf
        blocks = self._comparable(self._active.blocks, factors.normalized_step)
        if len(blocks) < _LEAST_BLOCKS or factors.gain * sum(block.steps for block in blocks) < _LEAST_STEPS:
            return math.inf
        cost_s, error = _mean(factors.costs_s(blocks))
        return cost_s * (1.0 + max(error, _ERROR_FLOOR))

    @property
    def steps(self) -> int:
        """Updates under the active plan, as of the last window."""
        if self._active is None:
            return 0
        return self._last_step - self._active.begin_step

    @property
    def expected(self) -> _Expected | None:
        """The prediction for the active plan; None if it was not chosen for its speed."""
        return self._active.expected if self._active is not None else None

    def judge(self, factors: dict[str, CostFactors]) -> SwitchOutcome | None:
        """Outcome of the active plan; None if not known yet, or already reported and not harmful since.

        Args:
            factors: Factors of the active plan and of those named in `references`.
        """
        stats = self._active
        if stats is None or stats.expected is None:
            return None
        here = factors[stats.label]
        blocks = self._comparable(stats.blocks, here.normalized_step)
        own = here.costs_s(blocks)
        steps = here.gain * sum(block.steps for block in blocks)
        if len(own) < _LEAST_BLOCKS or steps < _LEAST_STEPS:
            return None
        known = [one for one in (self._against(name, own, steps, factors[name]) for name in self.references) if one]
        harmful = max((one for one in known if one[1].harmful), key=lambda one: one[1].ratio, default=None)
        if harmful is not None:
            return self._outcome(*harmful)
        if known and not stats.reported and (known[0][1].error < _SURE or len(own) >= _ENOUGH_BLOCKS):
            return self._outcome(*known[0])
        return None

    @property
    def references(self) -> tuple[str, ...]:
        """Labels of the plans that the active one is compared with: the replaced one and `sync`."""
        stats = self._active
        if stats is None or stats.expected is None:
            return ()
        names = (stats.expected.replaced.label, "sync")
        return tuple(name for name in dict.fromkeys(names) if name != stats.label)

    def _begin(self, step: int, now_s: float, active: Plan) -> _ActivePlanStats:
        if self._active is not None and step < self._active.begin_step:
            self._active, self._left = None, ()  # Another run.
            self._blocks.clear()
        expected, self._expected = self._expected, None
        if expected is not None and expected.plan.label == active.label:
            self._left = ()
        else:  # Not chosen by the policy: it may have come back, even without another plan in between that was seen.
            former = self._active.expected if self._active is not None else None
            known = [one for one in (expected, former, *self._left) if one is not None]
            back = next((one for one in known if one.plan.label == active.label), None)
            expected = back.measured_only() if back is not None else None
            self._left = tuple(known[:_MOST_LEFT]) if back is None else ()
        self._active = _ActivePlanStats(active.plan_id, active.label, now_s, step, expected)
        return self._active

    def _comparable(self, blocks: Sequence[Block] | deque[Block], normalized_step: float) -> list[Block]:
        """The recent blocks of a plan that are comparable with its current normalized step time."""
        if not blocks:
            return []
        last = self._active.blocks[-1] if self._active is not None and self._active.blocks else blocks[-1]
        return [
            block
            for block in blocks
            if 1.0 / _COMPARABLE <= normalized_step / block.normalized_step <= _COMPARABLE
            and block.links == self._links
            and (last.end_s - block.end_s <= _OLD_S or last.end_step - block.end_step <= _OLD_STEPS)
        ]

    def _against(
        self, name: str, own: Sequence[float], steps: float, there: CostFactors
    ) -> tuple[str, Comparison] | None:
        stats = self._active
        assert stats is not None and stats.expected is not None
        others = there.costs_s(self._comparable(self._blocks.get(name, ()), there.normalized_step))
        if len(others) >= _LEAST_BLOCKS:
            return name, compare(own, others, steps)
        expected, last = stats.expected, stats.blocks[-1]
        if last.end_s - stats.begin_s > _OLD_S and last.end_step - stats.begin_step > _OLD_STEPS:
            return None  # The prediction is as old as blocks that are ignored.
        if name == expected.replaced.label and 1.0 / _SAME <= there.normalized_step / expected.normalized_step <= _SAME:
            error = _PREDICTED_ERROR * math.sqrt(_LEAST_BLOCKS / len(own))
            return name, compare(own, [_PREDICTED_ROOM * expected.replaced_s], steps, old_error=error)
        return None

    def _outcome(self, against: str, found: Comparison) -> SwitchOutcome:
        stats = self._active
        assert stats is not None and stats.expected is not None
        stats.reported = True
        replaced = against == stats.expected.replaced.label
        return SwitchOutcome(
            plan_id=stats.plan_id,
            label=stats.label,
            step=stats.blocks[-1].end_step,
            against=against,
            predicted=stats.expected.predicted if replaced else stats.expected.over_sync,
            measured=1.0 / found.ratio,
            steps=found.steps,
            harmful=found.harmful,
        )


@dataclass(slots=True)
class _Hold:
    until_step: int
    until_s: float
    times: int  # Holds before it that count.
    error: float  # Ratio of predicted to measured speed.
    predicted: float
    profile: SlownessProfile


class ModeBackoff:
    """Holds back modes whose plans did harm, twice as long after each repetition.

    The number of holds is halved when a plan of the mode does no harm: in a job of days a few harmful plans far
    apart would otherwise exclude the mode for hours each time.

    Args:
        steps: Steps of the first hold.
        seconds: Seconds of the first hold, which lasts until both have passed.
    """

    _MOST_DOUBLINGS = 6
    _MORE = 1.1

    def __init__(self, steps: int = 200, seconds: float = 60.0) -> None:
        self._steps, self._seconds = steps, seconds
        self._holds: dict[str, _Hold] = {}

    def hold(self, mode: str, outcome: SwitchOutcome, profile: SlownessProfile, step: int, now_s: float) -> None:
        """Hold a mode back because a plan of it did harm."""
        before = self._holds.get(mode)
        times = min(self._MOST_DOUBLINGS, before.times + 1 if before is not None else 0)
        error = max(outcome.predicted, 1.0) / max(outcome.measured, 1e-6)
        self._holds[mode] = _Hold(
            step + self._steps * 2**times, now_s + self._seconds * 2.0**times, times, error, outcome.predicted, profile
        )

    def forgive(self, mode: str) -> None:
        """Halve the number of holds of a mode, a plan of which did no harm; that under way keeps its length."""
        hold = self._holds.get(mode)
        if hold is not None:
            hold.times = (hold.times + 1) // 2 - 1

    def holds(self, mode: str, speed: float, profile: SlownessProfile, step: int, now_s: float) -> bool:
        """Whether a plan of this mode is held back now.

        It is not if the current profile of slowness differs from the one at the time of the harm and the plan would pay
        even with the same error of the prediction.

        Args:
            mode: The plan's mode.
            speed: Its predicted speed relative to the active plan.
            profile: Current profile of slowness.
            step: Current step.
            now_s: Current time; NaN if unknown, then only steps count.
        """
        hold = self._holds.get(mode)
        if hold is None or (step >= hold.until_step and not now_s < hold.until_s):
            return False
        return profile.alike(hold.profile) or speed < self._MORE * hold.error

    def held(self, step: int, now_s: float) -> dict[str, tuple[int, float]]:
        """The modes that are held back now, with the earliest step and time of their release."""
        return {
            mode: (hold.until_step, hold.until_s)
            for mode, hold in self._holds.items()
            if step < hold.until_step or now_s < hold.until_s
        }
