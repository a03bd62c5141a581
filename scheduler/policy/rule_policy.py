"""The rule that chooses a mode without predictions: `sync` while no rank is slow, else a mode by the cause.

Used for `policy="rule"`, while predictions fail, and as a baseline of evaluations. Modes that the window does not allow
are never chosen.

Compute. Slow compute, and waiting for data, are answered by `partial(m)`, from the last window alone and on its last
`_QUIET` steps or fewer:

* relax (`sync` to `partial(m)`): some rank, not necessarily the same, was slow in each of the last `PERSISTENCE`
  steps; or in as many scattered ones, if they cost at least `_FREQUENT_GAIN` of the time. m leaves out as many ranks
  as are slow at the same time.
* lower m: more ranks are slow at once than m leaves out, and waiting for fewer is predicted to gain `_RELAX_GAIN`. m
  never falls below the least share of the ranks, by default half (the majority of eager-SGD, Li et al. 2020): when more
  than half are slow, slow is the usual case, and a step of few gradients is mostly noise.
* raise m: fewer ranks than m leaves out were slow at once over the last `2 * _QUIET` steps; up to `sync`, as soon as
  waiting for all ranks would have cost at most `_RETURN_LOSS` over the last `_QUIET` steps.

Lowering to m requires overlaps that raising above m excludes; relaxing requires a gain of 10 %, returning a loss of at
most 5 % and three steps without a slow rank. No window satisfies both, so the rule cannot flap on the same evidence.

Links, starved and frozen ranks. `partial` needs every rank's network and a processor for its helper in every step, so
it isolates a job from slow compute only. `subgroup` needs neither from ranks that are not members, and `ps` needs
nothing of a rank that does not push. Hence a rank with a slow link becomes a child of a subgroup, or the job uses
servers on other hosts; for a starved or repeatedly frozen rank the job uses servers, with x = n less the slow ranks. If
such a rank has a server, the job passes through `sync` to servers on other ranks, as running ones cannot move. It
returns to `sync` once no rank was slow for `_QUIET` steps. A window has no history of links and silence, so the rule
records which ranks were slow at which step. Hysteresis: a link is slow below half of the usual rate and normal above
three quarters of it; a plan ends after `_QUIET` steps without a slow rank and begins after `PERSISTENCE` slow ones.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler.diagnosis.links import LINK_CALM, link_ratio
from scheduler.diagnosis.stragglers import (
    PERSISTENCE,
    RESOLUTION_S,
    Readings,
    Straggler,
    find_stragglers,
)
from scheduler.plan.headroom import server_cores
from scheduler.plan.placement import PUSH_ROUND_S, PlacementDecision, place_on_hosts
from scheduler.policy.candidates import LEAST_SHARE, most_left_out
from scheduler.records import Plan, Window
from scheduler.stats import listing, lower_median

__all__ = ["RulePolicy"]

_QUIET = 25
"""Steps without loss before the job returns to stricter waiting. Stragglers in the STAR logs last 3.4 steps on average
and 10 at the 95th percentile and come back: 25 outlasts their gaps."""

_FREQUENT_GAIN = 0.25
"""Non-consecutive slow steps make the job relax if relaxing would have gained this share of the last `_QUIET` steps. A
4x hiccup every 8 steps does, one every 10 steps does not: with the return after `_QUIET` steps this keeps the cost of
waiting, in any rhythm of a 4x straggler, below twice the undisturbed time (measured in the tests)."""

_OVERLAP = 0.1
"""m leaves out as many ranks as are slow simultaneously in at least this share of the slow steps."""

_RELAX_GAIN = 0.10
"""Least predicted gain for relaxing, as a fraction of the step time. Without barrier waits jobs without slow ranks gain
up to 11 % (transformer log): less is jitter, not a straggler."""

_RETURN_LOSS = 0.05
"""Largest predicted loss at which m is raised; well below `_RELAX_GAIN`, or the rule flaps."""

_SILENCE = 8
"""In `partial`, steps without an expected report after which a rank counts as slow."""

_LATE_SLACK = 0.25
"""A batch of 4.1 usual times misses four steps, not five, because of the grace; the default `grace_fraction`."""

_FROZEN_MEMORY = 4
"""Two silences within this many times `_QUIET` steps make a rank that freezes repeatedly. One may be a debugger, and a
plan that isolates a frozen rank cannot become active before it thaws."""

_Times = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Timeline:
    """Batch times at the last steps.

    Attributes:
        steps: The steps, consecutive, oldest first, shape (k,).
        times_s: Time of each rank's batch at that step, shape (k, n_ranks); NaN where unknown.
        slow: Whether that batch was slow, shape (k, n_ranks).
    """

    steps: npt.NDArray[np.int64]
    times_s: _Times
    slow: npt.NDArray[np.bool_]

    def tail(self, rows: int) -> _Timeline:
        """The last `rows` steps."""
        return _Timeline(steps=self.steps[-rows:], times_s=self.times_s[-rows:], slow=self.slow[-rows:])


class RulePolicy:
    """Chooses `sync`, `partial(m)`, `subgroup` or `ps(x)` from recent windows.

    Windows must span at least `_QUIET` steps (see `window_steps`), or the rule never returns to `sync`.

    Args:
        world_size: Number of ranks.
        damping: Damping of `sync` and `partial` after `ps`, which has its own; else the active plan's is kept.
        hosts: Host of every rank, to place servers; None if unknown, then there is one server.
        least_share: Share of the ranks whose fresh gradients a plan has to wait for.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        world_size: int,
        *,
        damping: str = "inverse",
        hosts: Sequence[str] | None = None,
        least_share: float = LEAST_SHARE,
    ) -> None:
        if world_size < 1:
            raise ValueError(f"policy world_size is {world_size}; expected at least 1")
        if hosts is not None and len(hosts) != world_size:
            raise ValueError(f"policy hosts is {hosts}; expected one for each of {world_size} ranks")
        if not 0.0 < least_share <= 1.0:
            raise ValueError(f"policy least_share is {least_share}; expected above 0 and at most 1")
        self.world_size = world_size
        self._damping = damping
        self._most = most_left_out(world_size, least_share)
        # With a share that leaves out no rank, `_most` is for servers only: their updates take every gradient.
        self._excluded = () if world_size - self._most >= least_share * world_size - 1e-9 else ("partial", "subgroup")
        self._hosts = hosts
        self._forget()

    @property
    def window_steps(self) -> int:
        """Steps, and reports per rank, that a window should hold at least."""
        return 2 * _QUIET

    def decide(self, window: Window, active: Plan) -> Plan | None:
        """Return the plan to switch to, or `None` to keep the active one.

        The same window may be passed again; windows of a job come in order of step.

        Args:
            window: Recent reports of all ranks, one entry per rank.
            active: The active plan. The new plan takes its damping, its staleness bound and its id plus one. The rule
                never switches to or from `grouped` and `local`, nor from a `sync` with uneven or shared batches.

        Raises:
            ValueError: The window or the plan is for another number of ranks.
        """
        for what, size in (("window", window.world_size), ("plan", active.world_size)):
            if size != self.world_size:
                raise ValueError(f"the {what} is for {size} ranks; expected {self.world_size}, as in this job")
        readings = Readings.of(window)
        if self.world_size < 2 or math.isnan(readings.reference_s):
            return None
        if active.uneven or active.steal:
            return None  # Batch times follow from the shares; the mode itself answers stragglers, and exactly.
        if active.mode not in window.allowed | window.blocked and active.mode != "sync" and "sync" in window.allowed:
            return self._sync(active, f"{active.label} can no longer run: back to {{label}}")
        found = find_stragglers(window, readings=readings)
        hard = self._note(window, found)
        if self._excluded:
            window = dataclasses.replace(window, allowed=window.allowed.difference(self._excluded))
        if active.mode == "subgroup":
            return self._adjust_subgroup(window, active, found, hard)
        if active.mode == "ps":
            return self._adjust_servers(window, active, found, hard)
        if active.mode not in ("sync", "partial"):
            return None  # Not a mode of this rule.
        plan = self._isolate(window, active, found, hard) if hard else None
        return plan or self._answer_compute(window, active, found)

    # ---- slow compute: sync and partial ---------------------------------------------------------------------

    def _answer_compute(self, window: Window, active: Plan, found: Sequence[Straggler]) -> Plan | None:
        """Change the quorum; where `partial` cannot run, use a subgroup of the fast ranks or servers."""
        readings = Readings.of(window)
        plan = self._adjust_partial(readings, active) if active.may_close else self._relax(readings, active)
        if plan is None or plan.mode in window.allowed:
            return plan
        if plan.mode != "partial":
            return None
        if found and "subgroup" in window.allowed:
            return self._subgroup(active, self._choose(found, {}), found)
        if "ps" in window.allowed:
            return self._new_servers(window, active, plan.quorum, found)
        return None

    def _relax(self, readings: Readings, active: Plan) -> Plan | None:
        """From `sync`: relax when slow steps persist and the slow ranks can be left out."""
        last = readings.last_steps()
        # Up to the last step that all ranks reported: later ones look fast until their slowest rank reports.
        if not readings.any_slow(min(last) - _QUIET):
            return None  # The usual case, without computing a timeline.
        seen = self._timeline(readings, min(last), projected=False, rows=_QUIET)
        slow = np.asarray(seen.slow.any(axis=1))
        run = _ending_run(slow)
        if int(slow.sum()) < PERSISTENCE:
            return None
        scope, least = slice(None), _FREQUENT_GAIN
        if run >= PERSISTENCE:
            scope, least = slice(len(slow) - run, None), _RELAX_GAIN
        projected = self._timeline(readings, min(last), projected=True, rows=_QUIET)
        quorum = self.world_size - self._simultaneous(projected.slow)
        strict = _order_mean_s(seen.times_s[scope], self.world_size, readings.reference_s)
        relaxed = _order_mean_s(seen.times_s[scope], quorum, readings.reference_s)
        if not _worth(strict, relaxed, least):
            return None
        gain = f"is expected to take {relaxed / strict:.2f} of sync's step time"
        return self._plan(active, quorum, f"{self._who(readings, seen, scope)}: {{label}} {gain}")

    def _adjust_partial(self, readings: Readings, active: Plan) -> Plan | None:
        """From `partial`: lower the quorum when too many ranks are slow at once, raise it when that costs nothing."""
        # Closed steps and the open one. A rank without a report of the latter is judged by its previous batch.
        now = max(readings.last_steps())
        past = self._timeline(readings, now, projected=True, rows=self.window_steps)
        line = past.tail(_QUIET)
        # Jitter is no reason to stay relaxed: times that are not slow count as usual.
        times = np.where(line.slow, line.times_s, readings.reference_s)
        costs = np.sort(np.where(np.isnan(times), readings.reference_s, times), axis=1).mean(axis=0).tolist()
        present = costs[active.quorum - 1]
        fewer = self.world_size - self._simultaneous(line.slow)
        if fewer < active.quorum and _worth(present, costs[fewer - 1], _RELAX_GAIN):
            gain = f"is expected to take {costs[fewer - 1] / present:.2f} of {active.label}'s step time"
            return self._plan(active, fewer, f"{self._who(readings, line, slice(None))}: {{label}} {gain}")
        # Rows without reports are no evidence that no rank is slow.
        more = active.quorum
        if not np.isnan(past.times_s).any():
            more = self.world_size - int(past.slow.sum(axis=1).max())
        quiet = not np.isnan(line.times_s).any() and not line.slow[-PERSISTENCE :].any()
        if quiet and costs[-1] <= (1.0 + _RETURN_LOSS) * present:
            more = self.world_size
        if more <= active.quorum:
            return None
        calm = f"waiting for {more} of {self.world_size} ranks would have cost nothing recently"
        return self._plan(active, more, f"{calm}: back to {{label}}")

    def _timeline(self, readings: Readings, now: int, *, projected: bool, rows: int) -> _Timeline:
        """Batch times at the last `rows` steps up to `now`.

        Args:
            readings: The window's reports.
            now: Last step of the timeline.
            projected: Extend each slow batch over all the steps it would last if no step waited for it. In `partial`
                that is what happens; in `sync`, where a slow batch is one slow step, it shows how many ranks would be
                late at the same time: with a rotating straggler, batches of several periods overlap.
            rows: Number of steps.
        """
        first = now - rows + 1
        times, plain = readings.in_force(first, rows, now - _SILENCE - 1 if projected else None)
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
                continue  # In `sync` it made this step; in `partial` it would still compute its slow batch.
            following = reports[index + 1][0] if index + 1 < len(reports) else now + 1
            end = following
            if projected and is_slow:
                end = step + max(1, math.ceil(time_s / readings.reference_s - _LATE_SLACK))
                free = end
            spans.append((step, end, time_s, is_slow))
        if projected:
            due = max(free, reports[-1][0] + 1) if reports else now + 1 - self.window_steps
            if now - due >= _SILENCE:
                spans.append((due, now + 1, (now - due + 1) * readings.reference_s, True))
        return spans

    def _simultaneous(self, slow: npt.NDArray[np.bool_]) -> int:
        """Number of ranks that m must leave out, from 1 to the most that a plan may.

        The largest count reached in at least `PERSISTENCE` slow steps and the share `_OVERLAP` of them: a high quantile
        over slow steps only, so that a straggler counts from its first steps on.
        """
        counts = slow.sum(axis=1)
        support = max(PERSISTENCE, math.ceil(_OVERLAP * int((counts > 0).sum())))
        # The support-th largest count is reached in `support` steps.
        reached = int(np.sort(counts)[-support]) if support <= len(counts) else 1
        return min(max(1, reached), self._most)

    def _who(self, readings: Readings, line: _Timeline, scope: slice) -> str:
        """`rank 3 computes 4.0x slower since step 12`, or the same of several ranks."""
        slow = line.slow[scope]
        ranks = np.flatnonzero(slow.any(axis=0)).tolist()
        factor = lower_median(line.times_s[scope][slow]) / readings.reference_s
        row = int(np.argmax(slow.any(axis=1)))
        since = int(line.steps[scope][row])
        if len(ranks) == 1:
            return f"rank {ranks[0]} computes {factor:.1f}x slower since step {since}"
        most = int(slow.sum(axis=1).max())
        how = "" if most == len(ranks) else ", one at a time," if most == 1 else f", up to {most} at once,"
        return f"{listing(ranks)} compute {factor:.1f}x slower{how} since step {since}"

    def _plan(self, active: Plan, quorum: int, reason: str) -> Plan:
        """The next plan; `{label}` in `reason` stands for its label."""
        mode = "sync" if quorum == self.world_size else "partial"
        return self._finish(active.replace(mode=mode, quorum=quorum, plan_id=active.plan_id + 1), reason)

    def _forget(self) -> None:
        self._history: deque[tuple[int, frozenset[int]]] = deque()
        self._link_since: dict[int, int] = {}
        self._links: set[int] = set()
        self._silent: set[int] = set()
        self._freezes: dict[int, list[int]] = {}

    # ---- which ranks are slow by another cause --------------------------------------------------------------

    def _note(self, window: Window, found: Sequence[Straggler]) -> dict[int, Straggler]:
        """Record a window; returns the stragglers that `partial` cannot isolate."""
        if self._history and window.step < self._history[-1][0]:
            self._forget()  # Another run.
        named = {straggler.rank: straggler for straggler in found}
        links = {rank for rank, straggler in named.items() if straggler.cause == "link"}
        self._links = {r for r in self._links | links if not link_ratio(window, r) >= LINK_CALM}
        self._link_since = {r: self._link_since.get(r, window.step) for r in links}
        frozen = self._note_silence(window, found)
        self._remember(window.step, {*named, *self._links, *frozen})
        hard = {r: named[r] for r, since in self._link_since.items() if window.step - since >= PERSISTENCE}
        hard.update({s.rank: s for s in found if s.cause == "starved" and not s.silent})
        return {**hard, **frozen}

    def _note_silence(self, window: Window, found: Sequence[Straggler]) -> dict[int, Straggler]:
        """Ranks that froze repeatedly within `_FROZEN_MEMORY`."""
        silent = {straggler.rank for straggler in found if straggler.silent}
        for rank in silent - self._silent:
            self._freezes.setdefault(rank, []).append(window.step)
        self._silent = silent
        horizon = window.step - _FROZEN_MEMORY * _QUIET
        self._freezes = {r: kept for r, s in self._freezes.items() if (kept := [step for step in s if step > horizon])}
        return {
            rank: Straggler(
                rank=rank,
                slowdown=math.inf,
                since_step=steps[0],
                cause="starved",
                evidence=f"froze {len(steps)} times since step {steps[0]}",
                silent=True,
            )
            for rank, steps in self._freezes.items()
            if len(steps) >= 2
        }

    def _remember(self, step: int, slow: Iterable[int]) -> None:
        now = frozenset(slow)
        if self._history and self._history[-1][0] == step:
            now |= self._history.pop()[1]
        self._history.append((step, now))
        # One entry from before the period stays, as evidence that the whole period was observed.
        while len(self._history) > 1 and self._history[1][0] <= step - _QUIET:
            self._history.popleft()

    def _recent(self) -> list[frozenset[int]]:
        """The slow ranks of each window of the last `_QUIET` steps."""
        begin = self._history[-1][0] - _QUIET
        return [slow for step, slow in self._history if step > begin]

    def _seen_in_full(self) -> bool:
        return self._history[0][0] <= self._history[-1][0] - _QUIET

    def _still(self, ranks: Iterable[int]) -> set[int]:
        """Those of the ranks that were slow during the last `_QUIET` steps; all if the period was not observed."""
        if not self._seen_in_full():
            return set(ranks)
        return set(ranks) & set().union(*self._recent())

    # ---- slow links, starved and frozen ranks: subgroup and ps ----------------------------------------------

    def _isolate(
        self, window: Window, active: Plan, found: Sequence[Straggler], hard: dict[int, Straggler]
    ) -> Plan | None:
        """From `sync` and `partial`: a plan that does not need the slow ranks."""
        causes = {straggler.cause for straggler in hard.values()}
        slow = [*{**{s.rank: s for s in found}, **hard}.values()]
        left_out = self._choose(slow, hard)
        if "ps" in window.allowed and ("starved" in causes or "subgroup" not in window.allowed):
            return self._new_servers(window, active, self.world_size - len(left_out), slow)
        if "link" in causes and "subgroup" in window.allowed:
            return self._subgroup(active, left_out, slow)
        return None

    def _adjust_subgroup(
        self, window: Window, active: Plan, found: Sequence[Straggler], hard: dict[int, Straggler]
    ) -> Plan | None:
        """From `subgroup`: change the members, use servers for a starved rank, or return to `sync`."""
        if any(straggler.cause == "starved" for straggler in hard.values()) and "ps" in window.allowed:
            return self._isolate(window, active, found, hard)
        children = {child for child, _ in active.parents}
        # A slow link counts once it persists; stragglers of all other causes have persisted.
        named = [straggler for straggler in found if straggler.cause != "link" or straggler.rank in hard]
        still = self._still(children)
        left_out = self._choose(named, {}, first=still)
        if not left_out:
            return self._back(window, active)
        members = set(range(self.world_size)) - left_out
        if members == set(active.members):
            return None
        if members.isdisjoint(active.members):  # No rank could hand the state over.
            return self._sync(active, "all members became slow: {label} before another subgroup")
        return self._subgroup(active, left_out, [s for s in named if s.rank not in children], children - left_out)

    def _adjust_servers(
        self, window: Window, active: Plan, found: Sequence[Straggler], hard: dict[int, Straggler]
    ) -> Plan | None:
        """From `ps`: change x, or return to `sync`: if no rank is slow, or before servers off the slow ranks."""
        if not self._still(range(self.world_size)):
            return self._back(window, active)
        slow = [*{**{s.rank: s for s in found}, **hard}.values()]
        if "sync" in window.allowed and self._has_better_servers(window, active, hard, slow):
            # From `ps` to `ps` servers stay where they are; from `sync` they are placed anew.
            sentences = "; ".join(hard[rank].sentence for rank in active.servers if rank in hard)
            return self._sync(active, f"{sentences}: {{label}} until servers run on other ranks")
        if active.rule != "x":
            return None
        now = self.world_size - len(self._choose(slow, hard))
        if now < active.quorum:
            return self._servers(window, active, now, slow)
        most = max(map(len, self._recent()))
        wanted = self.world_size - min(self._most, max(1, most))
        if self._seen_in_full() and wanted > active.quorum:
            reason = f"at most {most} ranks were slow at once for {_QUIET} steps: {{label}}"
            return self._finish(active.replace(quorum=wanted, plan_id=active.plan_id + 1), reason)
        return None

    def _has_better_servers(
        self, window: Window, active: Plan, hard: dict[int, Straggler], slow: Sequence[Straggler]
    ) -> bool:
        """Whether servers placed now would be on fewer slow ranks; only fewer, or two placements could alternate."""
        now = len(set(active.servers) & set(hard))
        return now > 0 and len(set(self._servers(window, active, active.quorum, slow).servers) & set(hard)) < now

    # ---- plans ----------------------------------------------------------------------------------------------

    def _choose(
        self, stragglers: Iterable[Straggler], hard: dict[int, Straggler], *, first: Iterable[int] = ()
    ) -> set[int]:
        """The ranks to leave out: those in `first`, then in `hard`, then the slowest, `_most` at most."""
        slowdown = {straggler.rank: straggler.slowdown for straggler in stragglers}
        kept = set(first)
        order = sorted(kept | set(slowdown), key=lambda r: (r not in kept, r not in hard, -slowdown.get(r, 0.0), r))
        return set(order[: self._most])

    def _subgroup(self, active: Plan, left_out: set[int], why: Sequence[Straggler], back: Iterable[int] = ()) -> Plan:
        members = [rank for rank in range(self.world_size) if rank not in left_out]
        plan = Plan.subgroup(
            self.world_size,
            members,
            damping=self._step_damping(active),
            max_staleness=active.max_staleness,
            plan_id=active.plan_id + 1,
        )
        named = [straggler.sentence for straggler in why if straggler.rank in left_out]
        calm = [f"{listing(sorted(back))} not slow for {_QUIET} steps"] if back else []
        return self._finish(
            plan,
            f"{'; '.join([*named, *calm])}: {{label}} all-reduces, gradients of {listing(sorted(left_out))} come late",
        )

    def _new_servers(self, window: Window, active: Plan, x: int, why: Sequence[Straggler]) -> Plan | None:
        """From a mode without servers; None if these would slow another job, unless a frozen rank stops this one."""
        if self._place(window, why).slows and not any(straggler.silent for straggler in why):
            return None
        return self._servers(window, active, x, why)

    def _place(self, window: Window, why: Sequence[Straggler]) -> PlacementDecision:
        return place_on_hosts(
            range(self.world_size),
            hosts=self._hosts,
            slow={straggler.rank for straggler in why},
            link_bytes_per_s=[stats.link_bytes_per_s for stats in window.ranks],
            state_bytes=window.comm_bytes,
            round_s=PUSH_ROUND_S,
            headroom=window.headroom or None,
            need_cores=server_cores(self.world_size / Readings.of(window).typical_s, window.comm_bytes),
        )

    def _servers(self, window: Window, active: Plan, x: int, why: Sequence[Straggler]) -> Plan:
        placed = self._place(window, why)
        plan = Plan.ps(
            self.world_size,
            x,
            damping="none" if active.damping == "none" else "relative",
            max_staleness=active.max_staleness,
            servers=placed.servers,
            plan_id=active.plan_id + 1,
        )
        sentences = "; ".join(straggler.sentence for straggler in why) or "ranks are slow in turn"
        return self._finish(
            plan, f"{sentences}: {{label}} waits for any {x} gradients, with servers at {listing(placed.servers)}"
        )

    def _back(self, window: Window, active: Plan) -> Plan | None:
        if "sync" not in window.allowed:
            return None
        return self._sync(active, f"no rank was slow for {_QUIET} steps: back to {{label}}")

    def _sync(self, active: Plan, reason: str) -> Plan:
        """The plan of mode `sync` that follows `active`; `{label}` in `reason` stands for its label."""
        plan = Plan.sync(
            self.world_size,
            damping=self._step_damping(active),
            max_staleness=active.max_staleness,
            plan_id=active.plan_id + 1,
        )
        return self._finish(plan, reason)

    def _step_damping(self, active: Plan) -> str:
        """Damping of `sync`, `partial` and `subgroup`: server modes have their own, unless it is `none`."""
        return active.damping if active.mode != "ps" or active.damping == "none" else self._damping

    def _finish(self, plan: Plan, reason: str) -> Plan:
        return plan.replace(reason=reason.replace("{label}", plan.label))


def _ending_run(flags: npt.NDArray[np.bool_]) -> int:
    """Length of the run of true values at the end of the array."""
    backwards = flags[::-1]
    return len(flags) if backwards.all() else int(np.argmin(backwards))


def _order_mean_s(times_s: _Times, quorum: int, usual_s: float) -> float:
    """Mean over steps of the `quorum`-th smallest time of a step, seconds; unknown times count as usual."""
    filled = np.where(np.isnan(times_s), usual_s, times_s)
    return float(np.sort(filled, axis=1)[:, quorum - 1].mean())


def _worth(present_s: float, relaxed_s: float, least: float) -> bool:
    """Whether the predicted gain exceeds the fraction `least` of the step and the resolution of a step's time."""
    gain = present_s - relaxed_s
    return gain > least * present_s and gain > RESOLUTION_S
