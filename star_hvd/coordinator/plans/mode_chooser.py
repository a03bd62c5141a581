"""Chooses the plan in mode `auto`: which policy decides, and how often. Pure: no clock."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

from scheduler.diagnosis.stragglers import Straggler
from scheduler.diagnosis.window_stats import Readings
from scheduler.plan.plan import Plan
from scheduler.policy.cost_policy import CostPolicy, Ranker
from scheduler.policy.rule_policy import RulePolicy
from scheduler.policy.switch_outcome import SwitchOutcome
from scheduler.records import Window
from star_hvd.config import Config

__all__ = ["Choice"]

logger = logging.getLogger("star_hvd")

_FIRST_INTERVAL_S, _QUIET_INTERVAL_S, _QUIETEST_INTERVAL_S, _SLOWER = 0.1, 0.5, 2.0, 1.25
"""Interval between full decisions while nothing changes: predictions take milliseconds of CPU, so it grows by `_SLOWER`
each time, from 0.1 s at the job's start, where every report is new information, to 0.5 s and finally 2 s."""
_LEAST_INTERVAL_S, _LEAST_MOST_S = 0.3, 1.0
"""Minimum interval outside `sync`, even after changes: a decision holds the interpreter lock of rank 0, which trains
and closes steps. It grows in the same way while the set of stragglers keeps changing."""
_PAUSE_S, _MOST_PAUSE_S = 60.0, 3600.0  # Time without predictions after one failed: doubled each time.
_FORGIVEN_S = 3600.0  # Time of predictions without a failure after which the next pause is the first again.
_ALERT = 2  # Consecutive slow reports of a rank that trigger a decision at once in `sync`, where all ranks wait for it.


class _Pace:
    """Decides when a full decision is due."""

    def __init__(self) -> None:
        self._last_s, self._next_s = -math.inf, 0.0
        self._interval_s, self._least_s = _FIRST_INTERVAL_S / _SLOWER, _LEAST_INTERVAL_S
        self._seen: tuple[object, ...] | None = None

    def due(self, seen: tuple[object, ...], now_s: float, *, in_sync: bool) -> bool:
        """Whether a decision is due; if so, it counts as made.

        Args:
            seen: What a decision depends on; its first item is the active plan's `plan_id`.
            now_s: Current time.
            in_sync: Whether all ranks wait for the slowest, so that a change is decided on at once.
        """
        same = seen == self._seen
        another_plan = self._seen is None or seen[0] != self._seen[0]
        if another_plan or now_s - self._last_s >= _QUIETEST_INTERVAL_S:
            self._least_s = _LEAST_INTERVAL_S
        restless = self._least_s > _LEAST_INTERVAL_S
        soonest_s = self._last_s + self._least_s if not in_sync and (restless or not same) else 0.0
        if now_s < max(soonest_s, self._next_s if same else 0.0):
            return False
        if not same and not another_plan:
            self._least_s = min(_LEAST_MOST_S, _SLOWER * self._least_s)
        longest_s = _QUIETEST_INTERVAL_S if same or self._seen is None else _QUIET_INTERVAL_S
        self._interval_s = min(longest_s, _SLOWER * self._interval_s)
        self._seen, self._last_s, self._next_s = seen, now_s, now_s + self._interval_s
        return True


class Choice:
    """Decides for one optimizer.

    Args:
        world_size: Number of ranks.
        config: Settings.
        hosts: Address of every rank's host.
        ranker: The trained predictor, None for the cost model.
    """

    def __init__(
        self, world_size: int, config: Config, hosts: Sequence[str], ranker: Ranker | None = None
    ) -> None:
        self._world_size, self._ranker = world_size, ranker
        self._known = hosts if len(set(hosts)) > 1 else None
        self._rule = RulePolicy(
            world_size, damping=config.damping, hosts=self._known, least_share=config.least_quorum
        )
        self._least_share, self._background = config.least_quorum, config.background
        self._predicting = self._make_predicting() if config.policy != "rule" else None
        self._rule_failed = False  # Whether a failure of the rule-based policy has been logged.
        self._failed = 0
        self._forgiven_at_s = math.inf  # When predictions will have succeeded long enough for the shortest pause.
        self._retry_at_s: float | None = None  # When predictions are tried again.
        self._pace = _Pace()

    def decide(
        self, window: Window, active: Plan, stragglers: Sequence[Straggler], now_s: float
    ) -> Plan | None:
        """Return the plan to switch to, None to keep the active one.

        A change of stragglers triggers a decision at once in `sync`, within 0.3 to 1 s in other modes; without changes
        decisions become rarer, down to one per 2 s. An alarm of the guard of accuracy is answered at once. If a
        prediction raises, the active plan stays and the rule-based policy decides for a minute or more.
        """
        if self._retry_at_s is not None and now_s >= self._retry_at_s:
            self._retry_at_s, self._predicting = None, self._make_predicting()
            self._forgiven_at_s = now_s + _FORGIVEN_S
        if self._predicting is None:
            return self._decide_by_rule(window, active)
        alert = active.mode == "sync" and bool((Readings.of(window).run_lengths() >= _ALERT).any())
        seen = (active.plan_id, tuple((s.rank, s.cause) for s in stragglers), window.allowed, alert)
        due = self._pace.due(seen, now_s, in_sync=active.mode == "sync")
        try:
            # A loss that rises is no reason to predict more often, but `sync` must not wait for the next prediction.
            if not (self._predicting.alarmed(window, active) or due):
                self.watch(window, active, now_s)
                return None
            plan = self._predicting.decide(window, active)
        except Exception:
            self._give_predicting_up(now_s)
            return None
        if self._failed and now_s >= self._forgiven_at_s:
            self._failed = 0
        return plan

    def _decide_by_rule(self, window: Window, active: Plan) -> Plan | None:
        """Decide without predictions; a failure keeps the active plan: it must not end the coordinator either."""
        try:
            return self._rule.decide(window, active)
        except Exception:
            if not self._rule_failed:  # The rule is asked with every report.
                logger.exception("the rule-based policy failed; the active plan stays")
            self._rule_failed = True
            return None

    def watch(self, window: Window, active: Plan, now_s: float, *, preparing: bool = False) -> None:
        """Pass a window to the policy without a decision, so that it follows silent ranks and outcomes of switches.

        Args:
            window: Recent reports.
            active: The active plan.
            now_s: Current time.
            preparing: Whether another plan is being prepared.
        """
        if self._predicting is not None:
            try:
                self._predicting.watch(window, active, preparing=preparing)
            except Exception:
                self._give_predicting_up(now_s)

    def explain(self) -> str:
        """Explain the current choice in one sentence; empty under the rule-based policy, whose plans carry a reason."""
        return self._predicting.explain() if self._predicting is not None else ""

    @property
    def policy(self) -> CostPolicy | None:
        """The policy that predicts; None under the rule-based policy or while predictions fail."""
        return self._predicting

    def take_outcomes(self) -> list[SwitchOutcome]:
        """Return the outcomes of switches since the last call."""
        if self._predicting is None:
            return []
        found, self._predicting.outcomes = self._predicting.outcomes, []
        return found

    @property
    def coming(self) -> Plan | None:
        """A plan that may be chosen soon and takes long to prepare."""
        return self._predicting.coming if self._predicting is not None else None

    def predictions(self) -> dict[str, Any]:
        """Return the last decision's predictions for the run log: time of each candidate relative to `sync`."""
        if self._predicting is None:
            return {}
        return {
            p.plan.label: {
                "relative": p.relative,
                "low": p.reported_interval[0],
                "high": p.reported_interval[1],
                "reach": p.reach,
                "interval_s": p.interval_s,
            }
            for p in self._predicting.last[:12]
        }

    def _make_predicting(self) -> CostPolicy:
        return CostPolicy(
            self._world_size, ranker=self._ranker, hosts=self._known, least_share=self._least_share,
            background=self._background,
        )

    def _give_predicting_up(self, now_s: float) -> None:
        """Let the rule-based policy decide for a while: a failed prediction must not end the coordinator."""
        pause_s = min(_MOST_PAUSE_S, _PAUSE_S * 2.0**self._failed)
        self._failed += 1
        logger.exception("predicting modes failed; the rule-based policy decides for the next %.0f s", pause_s)
        self._predicting, self._retry_at_s = None, now_s + pause_s
