"""`mode="auto"`: a rule that chooses `sync` while nobody is slow, and else a mode by the cause.

Slow compute, and waiting for data, are answered by `partial(m)` here; slow links and starved or frozen ranks by
`subgroup` and `ps` in `policy_causes.py`. A mode that the window does not allow is never chosen.

The rule knows windows and active plans only, so that a live job, a simulator and a test decide alike. For `partial`
it depends on the last window alone and works in three movements, each on the last `quiet` steps or fewer:

* relax (`sync` to `partial(m)`): some rank, not necessarily the same, was slow in each of the last
  `persistence` steps; or in as many scattered ones, and they cost at least `frequent_gain` of the time. m
  leaves out as many ranks as are slow at the same time.
* lower m: more ranks overlap than m leaves out, and waiting for fewer is predicted to gain `relax_gain`.
  m never falls below half of the ranks (the majority of eager-SGD, Li et al. 2020): when more than half are
  slow, they are the usual case and the others merely fast, and a step of few gradients is mostly noise.
* raise m: fewer ranks than m leaves out were slow at once over the last `2 * quiet` steps; up to `sync`, as
  soon as waiting for everybody would have cost at most `return_loss` over the last `quiet` ones.

Lowering to m asks for overlaps that raising above m excludes, and relaxing for a gain of 10 % where returning
asks for a loss of at most 5 % and three steps without anybody slow: no window satisfies both, so the rule
cannot flap on the same evidence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler.diagnosis.stragglers import PERSISTENCE, RESOLUTION_S, THRESHOLD, Readings, find_stragglers
from scheduler.policy.cause_policy import CausePolicy, listing
from scheduler.records import Plan, Window
from scheduler.stats import lower_median

__all__ = ["RulePolicy"]

_LATE_SLACK = 0.25
"""A batch of 4.1 usual times misses four steps, not five: a step waits a grace for ranks about to arrive.
Same value as the live job's default `grace_fraction`."""

_Times = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Timeline:
    """Times in force at the last steps.

    Attributes:
        steps: The steps, consecutive, oldest first, shape (k,).
        times_s: Time of the batch each rank was on, shape (k, n_ranks); NaN where nothing is known.
        slow: Whether that batch was a slow one, shape (k, n_ranks).
    """

    steps: npt.NDArray[np.int64]
    times_s: _Times
    slow: npt.NDArray[np.bool_]

    def tail(self, rows: int) -> _Timeline:
        """The last `rows` steps of it."""
        return _Timeline(steps=self.steps[-rows:], times_s=self.times_s[-rows:], slow=self.slow[-rows:])


class RulePolicy:
    """Chooses `sync`, `partial(m)`, `subgroup` or `ps(x)` from recent windows.

    The window must reach back at least `quiet` steps (`window_steps` says how many to keep), or the rule
    never returns to `sync`.

    Args:
        world_size: Number of ranks.
        threshold: A report above this multiple of the reference is slow (`causes.THRESHOLD`).
        persistence: Slow steps in a row that make the job relax (`causes.PERSISTENCE`): a hiccup of one step
            changes nothing, and a 4x straggler costs three slow steps before it is answered.
        frequent_gain: Slow steps that do not come in a row make the job relax when relaxing would have gained
            this part of the last `quiet` steps. A 4x hiccup every 8 steps does, one every 10 steps does not:
            with the return after `quiet` steps this keeps what waiting costs, in any rhythm of a 4x
            straggler, below twice the undisturbed time (measured, see the tests).
        quiet: Steps without loss before the job returns to stricter waiting. Stragglers in the STAR logs last
            3.4 rounds on average and 10 at the 95th percentile and come back: 25 outlasts their gaps.
        overlap: m covers the number of simultaneously slow ranks that at least this part of the slow steps
            reach.
        relax_gain: Smallest predicted gain that is worth relaxing for, as a part of the step time. Removing
            barrier waits gains up to 11 % where nobody is slow (transformer log): less is jitter, not a
            straggler.
        return_loss: Largest predicted loss at which m is raised again; well below `relax_gain`, or the rule
            flaps.
        silence: In `partial`, steps without the report that is due after which a rank counts as slow.
        damping: Damping of `sync` and `partial` after `ps`, which has its own; otherwise the active plan's stays.
        hosts: Host of every rank, to place servers; None where unknown, then there is one server.

    Raises:
        ValueError: A value out of range.
    """

    def __init__(
        self,
        world_size: int,
        *,
        threshold: float = THRESHOLD,
        persistence: int = PERSISTENCE,
        frequent_gain: float = 0.25,
        quiet: int = 25,
        overlap: float = 0.1,
        relax_gain: float = 0.10,
        return_loss: float = 0.05,
        silence: int = 8,
        damping: str = "inverse",
        hosts: Sequence[str] | None = None,
    ) -> None:
        rules = {
            "world_size": (world_size, world_size >= 1, "at least 1"),
            "threshold": (threshold, threshold > 1.0, "above 1"),
            "persistence": (persistence, persistence >= 1, "at least 1"),
            "frequent_gain": (frequent_gain, relax_gain <= frequent_gain < 1.0, "from relax_gain to below 1"),
            "quiet": (quiet, quiet >= persistence, "at least persistence"),
            "overlap": (overlap, 0.0 < overlap <= 1.0, "above 0 and at most 1"),
            "relax_gain": (relax_gain, 0.0 < relax_gain < 1.0, "between 0 and 1"),
            "return_loss": (return_loss, 0.0 <= return_loss < relax_gain, "at least 0, below relax_gain"),
            "silence": (silence, silence >= 1, "at least 1"),
            "hosts": (hosts, hosts is None or len(hosts) == world_size, f"one for each of {world_size} ranks"),
        }
        for name, (value, valid, expected) in rules.items():
            if not valid:
                raise ValueError(f"policy {name} is {value}; expected {expected}")
        self.world_size = world_size
        self.threshold = threshold
        self.persistence = persistence
        self.frequent_gain = frequent_gain
        self.quiet = quiet
        self.overlap = overlap
        self.relax_gain = relax_gain
        self.return_loss = return_loss
        self.silence = silence
        self._causes = CausePolicy(world_size, quiet=quiet, persistence=persistence, damping=damping, hosts=hosts)

    @property
    def window_steps(self) -> int:
        """Steps, and reports of a rank, that a window should reach back; more does no harm."""
        return 2 * self.quiet

    def decide(self, window: Window, active: Plan) -> Plan | None:
        """The plan to switch to, or `None` to keep the active one.

        A window may be asked about again; windows of one job come in order of step.

        Args:
            window: Recent reports of all ranks, one entry per rank.
            active: The plan in force. Its damping and staleness bound are carried over; its epoch plus one is
                the new plan's. `grouped` and `local` are never chosen and never left by this rule.

        Raises:
            ValueError: The window or the plan is for another number of ranks.
        """
        for what, size in (("window", window.world_size), ("plan", active.world_size)):
            if size != self.world_size:
                raise ValueError(f"the {what} is for {size} ranks; expected {self.world_size}, as in this job")
        own = self.threshold != THRESHOLD
        readings = Readings(window, threshold=self.threshold) if own else Readings.of(window)
        if self.world_size < 2 or math.isnan(readings.reference_s):
            return None
        if active.mode not in window.allowed and active.mode != "sync" and "sync" in window.allowed:
            return self._causes.sync(active, f"{active.label} cannot run any more: back to {{label}}")
        found = find_stragglers(window, threshold=self.threshold, persistence=self.persistence, readings=readings)
        answer = self._causes.decide(window, active, found)
        if answer.mine:
            return answer.plan
        plan = self._adjust(readings, active) if active.may_close else self._relax(readings, active)
        if plan is None or plan.mode in window.allowed:
            return plan
        return self._causes.replace_partial(window, active, found, plan) if plan.mode == "partial" else None

    def _relax(self, readings: Readings, active: Plan) -> Plan | None:
        """From `sync`: relax when steps keep being slow and the ranks that make them so can be left out."""
        last = readings.last_steps()
        # Up to the step that all have reported: later ones look fast until their slowest rank reports.
        if not readings.any_slow(min(last) - self.quiet):
            return None  # the usual case, and the cheap one
        seen = self._timeline(readings, min(last), projected=False, rows=self.quiet)
        slow = np.asarray(seen.slow.any(axis=1))
        run = _ending_run(slow)
        if int(slow.sum()) < self.persistence:
            return None
        scope, least = slice(None), self.frequent_gain
        if run >= self.persistence:
            scope, least = slice(len(slow) - run, None), self.relax_gain
        projected = self._timeline(readings, min(last), projected=True, rows=self.quiet)
        quorum = self.world_size - self._simultaneous(projected.slow)
        strict = _order_mean_s(seen.times_s[scope], self.world_size, readings.reference_s)
        relaxed = _order_mean_s(seen.times_s[scope], quorum, readings.reference_s)
        if not _worth(strict, relaxed, least):
            return None
        gain = f"is expected to take {relaxed / strict:.2f} of sync's step time"
        return self._plan(active, quorum, f"{self._who(readings, seen, scope)}: {{label}} {gain}")

    def _adjust(self, readings: Readings, active: Plan) -> Plan | None:
        """From `partial`: wait for fewer ranks when too many are slow at once, for more when that is free."""
        # Closed steps and the open one. A rank yet to report on the latter is judged by its previous batch.
        now = max(readings.last_steps())
        past = self._timeline(readings, now, projected=True, rows=self.window_steps)
        line = past.tail(self.quiet)
        # Jitter is no reason to stay relaxed: whatever is not slow counts as usual.
        times = np.where(line.slow, line.times_s, readings.reference_s)
        costs = np.sort(np.where(np.isnan(times), readings.reference_s, times), axis=1).mean(axis=0).tolist()
        present = costs[active.quorum - 1]
        fewer = self.world_size - self._simultaneous(line.slow)
        if fewer < active.quorum and _worth(present, costs[fewer - 1], self.relax_gain):
            gain = f"is expected to take {costs[fewer - 1] / present:.2f} of {active.label}'s step time"
            return self._plan(active, fewer, f"{self._who(readings, line, slice(None))}: {{label}} {gain}")
        # Rows without reports are no evidence of quiet.
        more = active.quorum
        if not np.isnan(past.times_s).any():
            more = self.world_size - int(past.slow.sum(axis=1).max())
        quiet = not np.isnan(line.times_s).any() and not line.slow[-self.persistence :].any()
        if quiet and costs[-1] <= (1.0 + self.return_loss) * present:
            more = self.world_size
        if more <= active.quorum:
            return None
        calm = f"waiting for {more} of {self.world_size} ranks would have cost nothing of late"
        return self._plan(active, more, f"{calm}: back to {{label}}")

    def _timeline(self, readings: Readings, now: int, *, projected: bool, rows: int) -> _Timeline:
        """Times in force at the last `rows` steps up to `now`.

        Args:
            readings: The window's reports.
            now: Last step of the timeline.
            projected: Show each slow batch over all the steps it would last if nobody waited for it. In
                `partial` that is what happens; in `sync`, where a slow batch is one slow step, it tells how
                many ranks will be busy at the same time once nobody waits: a rank that began a slow batch in
                one period of a rotating straggler is still on it in the next one.
            rows: Number of steps.
        """
        first = now - rows + 1
        times, plain = readings.in_force(first, rows, now - self.silence - 1 if projected else None)
        slow = np.zeros((rows, self.world_size), dtype=np.bool_)
        for rank in np.flatnonzero(~plain).tolist():
            for begin, end, time_s, is_slow in self._spans(readings, rank, now, projected):
                where = slice(max(begin - first, 0), max(end - first, 0))
                times[where, rank] = time_s
                slow[where, rank] = is_slow
        return _Timeline(steps=np.arange(first, now + 1), times_s=times, slow=slow)

    def _spans(
        self, readings: Readings, rank: int, now: int, projected: bool
    ) -> list[tuple[int, int, float, bool]]:
        """One rank's batches as (first step, step after its last, seconds, slow), oldest first."""
        spans: list[tuple[int, int, float, bool]] = []
        free = -1
        reports = readings.reports[rank]
        for index, ((step, time_s), is_slow) in enumerate(zip(reports, readings.slow_reports(rank), strict=True)):
            if step < free:
                continue  # in `sync` it made this step; in `partial` it would still be on its slow batch
            following = reports[index + 1][0] if index + 1 < len(reports) else now + 1
            end = following
            if projected and is_slow:
                end = step + max(1, math.ceil(time_s / readings.reference_s - _LATE_SLACK))
                free = end
            spans.append((step, end, time_s, is_slow))
        if projected:
            due = max(free, reports[-1][0] + 1) if reports else now + 1 - self.window_steps
            if now - due >= self.silence:
                spans.append((due, now + 1, (now - due + 1) * readings.reference_s, True))
        return spans

    def _simultaneous(self, slow: npt.NDArray[np.bool_]) -> int:
        """How many ranks at once m must leave out, from 1 to half of them: a step keeps at least a majority.

        The largest count that is reached in at least the part `overlap` of the slow steps, and in `persistence`
        of them: a high quantile over the slow steps only, so that a straggler counts from its first steps on.
        """
        counts = slow.sum(axis=1)
        support = max(self.persistence, math.ceil(self.overlap * int((counts > 0).sum())))
        most = max(1, self.world_size - max(1, self.world_size // 2))
        # The support-th largest count is reached in as many steps.
        reached = int(np.sort(counts)[-support]) if support <= len(counts) else 1
        return min(max(1, reached), most)

    def _who(self, readings: Readings, line: _Timeline, scope: slice) -> str:
        """`rank 3 computes 4.0x slower since step 12`, or the ranks that do so in turn."""
        slow = line.slow[scope]
        ranks = np.flatnonzero(slow.any(axis=0)).tolist()
        factor = lower_median(line.times_s[scope][slow].tolist()) / readings.reference_s
        row = int(np.argmax(slow.any(axis=1)))
        since = int(line.steps[scope][row])
        if len(ranks) == 1:
            return f"rank {ranks[0]} computes {factor:.1f}x slower since step {since}"
        most = int(slow.sum(axis=1).max())
        how = "" if most == len(ranks) else ", one at a time," if most == 1 else f", up to {most} at once,"
        return f"{listing(ranks)} compute {factor:.1f}x slower{how} since step {since}"

    def _plan(self, active: Plan, quorum: int, reason: str) -> Plan:
        """The next plan; `reason` may name itself by `{label}`."""
        mode = "sync" if quorum == self.world_size else "partial"
        plan = active.replace(mode=mode, quorum=quorum, plan_id=active.plan_id + 1)
        return plan.replace(reason=reason.format(label=plan.label))


def _ending_run(flags: npt.NDArray[np.bool_]) -> int:
    """Length of the run of true values that ends the array."""
    backwards = flags[::-1]
    return len(flags) if backwards.all() else int(np.argmin(backwards))


def _order_mean_s(times_s: _Times, quorum: int, usual_s: float) -> float:
    """Mean over steps of the `quorum`-th smallest time of a step, seconds; unknown times count as usual."""
    filled = np.where(np.isnan(times_s), usual_s, times_s)
    return float(np.sort(filled, axis=1)[:, quorum - 1].mean())


def _worth(present_s: float, relaxed_s: float, least: float) -> bool:
    """Whether the predicted gain is large enough, in parts of the step and against what a step resolves."""
    gain = present_s - relaxed_s
    return gain > least * present_s and gain > RESOLUTION_S
