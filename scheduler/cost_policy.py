"""A policy that takes the fastest candidate, by the cost model or by any other ranker, once a switch pays.

Ski-rental: the active plan is left when the loss against the best candidate, added up since the best one was first
better, has reached the price of the switch. So a disturbance that ends before costs no switch, and one that lasts
costs at most twice the best that hindsight knows (break-even rule). Hysteresis: a candidate must be better than the
active plan by 5 %; a return to `sync` needs no gain, only no loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from scheduler.candidates import candidates, find_trouble
from scheduler.cost_model import Conditions, Prediction, rank
from scheduler.plans import Plan
from scheduler.records import Window
from scheduler.staleness import StalenessPrice

__all__ = ["CostPolicy", "Ranker"]

Ranker = Callable[[Sequence[Plan], Conditions, Window, Plan], list[Prediction]]

_GAIN = 0.05
"""Least predicted gain. Intervals over 24 rows are known to 2 to 5 % where jitter is 10 %."""

_SWITCH_S, _HANDOVER_S = 0.02, 0.5
_COPIES = 3.0  # Parameters and two moments move at a hand-over.
_CALM_STEPS = 12
"""Steps without trouble before the job returns to `sync`: STAR's stragglers stay 3.4 rounds, 10 at the 95th
percentile, and come back."""


class CostPolicy:
    """Decides by predictions.

    Args:
        world_size: Number of ranks.
        ranker: Predictions for candidates, best first, or not; the cost model if None.
        hosts: Host of every rank, to place servers.
        gain: Least predicted gain that is worth a switch.

    Attributes:
        price: The price of staleness as learned so far.
        last: Predictions behind the last decision, best first.
    """

    def __init__(
        self,
        world_size: int,
        *,
        ranker: Ranker | None = None,
        hosts: Sequence[str] | None = None,
        gain: float = _GAIN,
    ) -> None:
        self.world_size = world_size
        self.price = StalenessPrice()
        self.last: list[Prediction] = []
        self._ranker = ranker
        self._hosts = hosts
        self._gain = gain
        self._lost_s = 0.0
        self._step: int | None = None
        self._calm_since: int | None = None
        self._noise = 4.0

    def decide(self, window: Window, active: Plan) -> Plan | None:
        """The plan to switch to, or None to keep the active one.

        Raises:
            ValueError: The window or the plan is for another number of ranks.
        """
        for what, size in (("window", window.world_size), ("plan", active.world_size)):
            if size != self.world_size:
                raise ValueError(f"the {what} is for {size} ranks; expected {self.world_size}, as in this job")
        conditions = Conditions.from_window(window, self.price)
        if conditions is None or self.world_size < 2:
            return None
        self._noise = conditions.noise
        trouble = bool(find_trouble(conditions))
        self._calm_since = None if trouble else window.step if self._calm_since is None else self._calm_since
        if not trouble and active.mode == "sync":
            self._forget(window)
            return None
        offered = candidates(conditions, active, allowed=window.allowed, hosts=self._hosts)
        if self._ranker is None:
            self.last = rank(offered, conditions)
        else:
            self.last = sorted(self._ranker(offered, conditions, window, active), key=lambda p: p.relative)
        return self._choose(window, conditions, active, offered)

    def observe(self, plan: Plan, updates: float, decrease: float, drift: float) -> None:
        """What training achieved under a plan: the price of staleness is learned from it."""
        length = plan.quorum / self.world_size if plan.mode == "ps" and plan.lr_rule == "linear" else 1.0
        gradients = float(plan.quorum) if plan.mode in ("ps", "partial", "subgroup") else float(self.world_size)
        if plan.mode == "grouped":
            count = max(1, len(plan.groups) or plan.group_count)
            length, gradients = 1.0 / count, self.world_size / count
        self.price.observe(
            decrease=decrease,
            updates=updates,
            drift=drift,
            length=length,
            gradients=gradients,
            noise=self._noise,
            world=self.world_size,
        )

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _forget(self, window: Window) -> None:
        self._lost_s, self._step = 0.0, window.step

    def _choose(self, window: Window, conditions: Conditions, active: Plan, offered: Sequence[Plan]) -> Plan | None:
        now = next((p for p in self.last if p.plan is active or p.plan == active), None)
        best = self.last[0]
        sync = next((p for p in self.last if p.plan.mode == "sync"), None)
        if now is None:
            return self._go(window, best, active, None)
        calm = active.mode != "sync" and sync is not None and self._calm(window, active)
        if calm and sync is not None and sync.relative <= now.relative * (1.0 + 0.5 * self._gain):
            return self._go(window, sync, active, now)
        if best.plan is now.plan or not best.relative < (1.0 - self._gain) * now.relative:
            self._forget(window)
            return None
        steps = max(1, window.step - (self._step if self._step is not None else window.step - 1))
        self._lost_s += steps * now.interval_s * (1.0 - best.relative / now.relative)
        self._step = window.step
        if self._lost_s < self._price_s(conditions, active, best.plan):
            return None
        return self._go(window, best, active, now)

    def _calm(self, window: Window, active: Plan) -> bool:
        """Nobody was in trouble for a while; under servers steps are updates, of which there are more."""
        if self._calm_since is None:
            return False
        per_step = self.world_size / active.quorum if active.mode == "ps" else 1.0
        return window.step - self._calm_since >= _CALM_STEPS * per_step

    def _price_s(self, conditions: Conditions, active: Plan, plan: Plan) -> float:
        if active.family == plan.family == "rounds":
            return _SWITCH_S
        rate = float(conditions.rate.min())
        moved_s = _COPIES * conditions.comm_bytes / rate if math.isfinite(rate) else 0.0
        return _HANDOVER_S + moved_s + float(conditions.usual_s.max())

    def _go(self, window: Window, best: Prediction, active: Plan, now: Prediction | None) -> Plan | None:
        self._forget(window)
        if best.plan == active or (best.plan.mode == active.mode == "sync"):
            return None
        gain = 1.0 / best.relative if best.relative > 0.0 else math.inf
        text = f"{best.plan.label} is predicted {gain:.1f}x as fast as sync, 90 % interval "
        text += f"{1.0 / max(best.high, 1e-9):.1f}-{1.0 / max(best.low, 1e-9):.1f}"
        if now is not None and now.plan.mode != "sync":
            text += f"; {now.plan.label} {1.0 / max(now.relative, 1e-9):.1f}x"
        return best.plan.replace(epoch=active.epoch + 1, reason=text)
