"""The form in which gradients are reduced: chosen by the step times with each form, tried in alternating blocks.

The time of a whole step includes encoding, decoding and the smaller transfer, less what computation hides, so steps are
compared. A form that loses more precision is used only if it saves 3 % of the step compared with one that loses less.
Nothing is tried if the training thread hardly waits for reductions, and later trials cost at most 1 %. Between trials
the waiting is watched: once it clearly rises, as on a link that has become slow, a trial begins at once.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler.transmission.decision import GRADIENTS, Decision

__all__ = ["FORMS", "HALF", "LOW_RANK", "NONE", "WireChoice"]

NONE, HALF, LOW_RANK = 0, 1, 2
FORMS = ("none", "fp16", "low rank")
"""In ascending order of lost precision."""

_LEAST_EXPOSED = 0.05  # Fraction of a step spent waiting; below it a form cannot save 3 % and its own cost.
_LEAST_GAIN = 0.03
_Z = 1.645  # 90 % of a normal distribution lie within this many standard errors.
_SKIPPED = 2  # First steps with a form that are ignored: allocations, Horovod's negotiation of new names.
_BLOCK = 6
_CYCLES = 3  # Blocks of each form in a trial that stays undecided.
_FIRST_REST, _LONGEST_REST = 512, 16_384  # Steps until the next trial; doubled if a trial changes nothing.
_MOST_MISSED = 8  # Steps in a row that this rank did not time, after which it does not ask for a lossy form.
_MOST_COST = 0.01  # Cost of a trial as a fraction of the steps until the next one.
_WATCHED = 24  # Steps between trials whose median says how long steps wait now; 13 slow ones suffice for a trial.
_CLEAR_RISE = 2.0  # Waiting over the rest of a step has risen if it is this many times that of the last trial.


@dataclass(slots=True)
class WireChoice:
    """The form that one rank asks for; the members' leading rank writes it into the header of every step.

    Attributes:
        wanted: The form to ask for.
        lossiest: The last of `FORMS` that is tried, at least HALF.
        reason: The last decision with its measurements, empty before the first.
        saved: Fraction of a step without compression that the chosen form saved in the last trial, or the best one if
            none was chosen; NaN if none was tried.
    """

    wanted: int = NONE
    lossiest: int = LOW_RANK
    reason: str = ""
    saved: float = math.nan
    _chosen: int = NONE
    _trial: bool = True  # The first block, without compression, also measures the exposed part.
    _cycle: int = 0
    _steps: int = 0  # Steps with the wanted form.
    _missed: int = 0
    _rest: int = _FIRST_REST
    _took_s: dict[int, list[float]] = field(default_factory=lambda: {form: [] for form in range(len(FORMS))})
    _exposed: dict[int, list[float]] = field(default_factory=lambda: {form: [] for form in range(len(FORMS))})
    _usual: float = 0.0  # Waiting over the rest of a step with the chosen form, when that was chosen.
    _latest: deque[float] = field(default_factory=lambda: deque(maxlen=_WATCHED))  # Exposed parts since then.

    def observe(self, form: int, step_s: float, exposed_s: float) -> bool:
        """Record the end of a step.

        Args:
            form: The form of its gradients.
            step_s: Time since the previous step.
            exposed_s: Part of that time in which the training thread waited for the reduction.

        Returns:
            Whether a decision was made.
        """
        self._missed = 0
        if form != self.wanted:  # Requested, but not active yet.
            return False
        self._steps += 1
        exposed = min(1.0, exposed_s / step_s) if step_s > 0 else 0.0
        if not self._trial:
            self._latest.append(exposed)
            if self._steps >= self._rest or self._waits_longer():
                self._begin_trial()
            return False
        if self._steps <= _SKIPPED:
            return False
        self._took_s[form].append(step_s)
        self._exposed[form].append(exposed)
        if self._steps < _SKIPPED + _BLOCK:
            return False
        return self._end_block()

    def miss(self) -> bool:
        """Record the end of a step that could not be timed, as a helper completed it for this rank.

        A form that nothing is measured of any more is given up: without measurements it would stay, even if it is slow.

        Returns:
            Whether a decision was made.
        """
        self._missed += 1
        if self._missed < _MOST_MISSED:
            return False
        self._missed = 0
        if self.wanted == NONE:
            return False
        self.restart()
        self.reason = f"{FORMS[NONE]}: this rank comes too late to time steps, so it asks for no other form"
        return True

    @property
    def decision(self) -> Decision:
        """The last decision."""
        return Decision(GRADIENTS, FORMS[self.wanted], f"gradients travel as {self.reason}", self.saved)

    def restart(self) -> None:
        """Start over with other ranks that reduce together: earlier measurements do not apply to them."""
        self.wanted, self._chosen, self.reason, self.saved = NONE, NONE, "", math.nan
        self._rest = _FIRST_REST
        self._latest.clear()
        self._begin_trial()

    def _begin_trial(self) -> None:
        self.wanted, self._trial, self._cycle, self._steps, self._missed = NONE, True, 0, 0, 0
        for values in (*self._exposed.values(), *self._took_s.values()):
            values.clear()

    def _waits_longer(self) -> bool:
        """Whether steps with the chosen form wait so much longer than in the last trial that another may save time.

        Waiting is compared with the rest of the step, since a part that is 0.9 cannot double. A trial takes the waiting
        that began it as the usual one, so what it could not shorten begins no other one. Beyond the lossiest form there
        is none to go to, and the steps of a trial would be the longest where the link is slow.
        """
        if self._chosen == self.lossiest or len(self._latest) < _WATCHED:
            return False
        exposed = statistics.median(self._latest)
        return exposed >= _LEAST_EXPOSED and _ratio(exposed) >= _CLEAR_RISE * self._usual

    def _end_block(self) -> bool:
        self._steps = 0
        if self.wanted == NONE and statistics.median(self._exposed[NONE]) < _LEAST_EXPOSED:
            return self._decide(NONE)
        if self.wanted < self.lossiest:
            self.wanted += 1
            return False
        self._cycle += 1
        best = self._best()
        if best != NONE or self._cycle == _CYCLES or self._hopeless():
            return self._decide(best)
        self.wanted = NONE
        return False

    def _best(self) -> int:
        best = NONE
        for form in range(HALF, self.lossiest + 1):
            saved, error = gain(self._took_s[best], self._took_s[form])
            if saved > _LEAST_GAIN and saved > _Z * error:
                best = form
        return best

    def _hopeless(self) -> bool:
        """Whether no form can be expected to save enough, however long the trial."""
        base = self._took_s[NONE]
        gains = [gain(base, self._took_s[form]) for form in range(HALF, self.lossiest + 1)]
        return all(saved + _Z * error < _LEAST_GAIN for saved, error in gains)

    def _decide(self, form: int) -> bool:
        exposed = statistics.median(self._exposed[NONE])
        self.reason = f"{FORMS[form]}: reductions are {exposed:.0%} of a step without compression"
        took_s = {i: statistics.median(times) for i, times in self._took_s.items() if times}
        if len(took_s) > 1:
            self.reason += "; a step took " + ", ".join(f"{1e3 * s:.1f} ms ({FORMS[i]})" for i, s in took_s.items())
        options = (form,) if form != NONE else (HALF, LOW_RANK)
        base_s = max(1e-9, took_s[NONE])
        self.saved = max((1.0 - took_s[option] / base_s for option in options if option in took_s), default=math.nan)
        changed = form != self._chosen or self._waits_longer()
        self._rest = _FIRST_REST if changed else min(_LONGEST_REST, 2 * self._rest)
        lost = sum(max(0.0, s / took_s[form] - 1) for s in took_s.values() if took_s[form] > 0)
        self._rest = max(self._rest, round((_SKIPPED + _BLOCK) * lost / _MOST_COST))
        self._note_waiting(form)
        self.wanted = self._chosen = form
        self._trial, self._steps = False, 0
        return True

    def _note_waiting(self, form: int) -> None:
        """Note how long steps with the form wait now that it is chosen, for `_waits_longer`."""
        known = [statistics.median(self._exposed[form])]
        if form == self._chosen and len(self._latest) == _WATCHED:  # A trial may have waited less by chance.
            known.append(statistics.median(self._latest))
        self._usual = _ratio(max(known))
        self._latest.clear()


def _ratio(exposed: float) -> float:
    """Waiting over the rest of a step, of a step that waits for the part `exposed`."""
    return exposed / max(1e-3, 1.0 - exposed)


def gain(base_s: Sequence[float], other_s: Sequence[float]) -> tuple[float, float]:
    """Fraction of the base's median that the other saves, and its standard error (medians, MAD)."""
    base, other = statistics.median(base_s), statistics.median(other_s)
    if base <= 0:
        return 0.0, 0.0
    squares = [(1.253 * 1.4826 * _mad(times)) ** 2 / len(times) for times in (base_s, other_s)]
    return (base - other) / base, float(sum(squares) ** 0.5) / base


def _mad(values: Sequence[float]) -> float:
    middle = statistics.median(values)
    return statistics.median(abs(value - middle) for value in values)
