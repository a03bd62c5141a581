"""The mode that the user asked for: when it is to be published, again and again, and why it is not in force. Pure.

It only says which plan is due; `OptimizerState` publishes it. A mode comes into force late if it needs a loader of
`shard` or the rates of links, and not at all, until it is tried again, if a rank failed to prepare it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Sequence

from scheduler.plan.plan import Plan
from scheduler.policy.regrouping import Regrouping
from star_hvd.coordinator.plans.switch import Switch

__all__ = ["AskedMode"]

logger = logging.getLogger("star_hvd")

_FED_BY = 8  # Steps after which a loader of `shard` is known if there is one.
_RATES_S = 3.0  # Longest wait for the rates of links before servers are placed; a sweep takes at most 2 s.


class AskedMode:
    """The requests of all ranks, and rank 0's, which is carried out.

    Args:
        optimizer_id: Number of the optimizer.
        world_size: Number of ranks.
        hosts: Address of every rank's host.

    Attributes:
        plan: The mode; None for `auto`, and for plain `sync` if the optimizer starts in it.
        no_loader_reason: Why the batch shares or the stealing that it needs are not possible, empty if they may be.
        failure: Why it did not come into force when it was last tried, empty if it did.
    """

    def __init__(self, optimizer_id: int, world_size: int, hosts: Sequence[str]) -> None:
        self.plan: Plan | None = None
        self.no_loader_reason = self.failure = ""
        self._optimizer_id, self._world_size = optimizer_id, world_size
        self._linked = len(set(hosts)) > 1
        self._requests: dict[int, Plan | None] = {}
        self._rates_by_s = math.inf  # Until when the placement of servers waits for the rates of links.
        self._regrouping = Regrouping()

    # ---- what was asked for -----------------------------------------------------------------------------------

    def request(self, rank: int, plan: Plan | None) -> None:
        """Note what a rank asks for, None for `auto`."""
        self._requests[rank] = plan

    @property
    def complete(self) -> bool:
        """Whether all ranks have asked."""
        return len(self._requests) >= self._world_size

    @property
    def auto(self) -> bool:
        """Whether rank 0, which has asked, asks for `auto`."""
        return self._requests[0] is None

    @property
    def lockstep(self) -> bool:
        """Whether no rank has asked for a mode in which some ranks make other steps than others."""
        return all(plan is None or plan.lockstep for plan in self._requests.values())

    @property
    def needs_loader(self) -> bool:
        """Whether the mode needs a loader of `shard`, so that it is due once one feeds the ranks."""
        return self.plan is not None and (self.plan.uneven or self.plan.steal)

    def begin(self, active: Plan, now_s: float) -> Plan | None:
        """Return the mode to switch to from the active plan, None if that is the right one or for `auto`.

        Called once all ranks have asked; those that ask for another mode than rank 0 are warned about.
        """
        wanted = self._requests[0]
        differing = [rank for rank, plan in self._requests.items() if plan != wanted]
        if differing:
            logger.warning("ranks %s request another mode than rank 0; rank 0's is used on all ranks", differing)
        if wanted is None or (wanted.mode == active.mode and wanted.plain):
            return None
        self.plan, self._rates_by_s = wanted, now_s + _RATES_S
        return wanted

    # ---- when it is due ---------------------------------------------------------------------------------------

    def awaits_rates(self, bytes_per_s: Sequence[float]) -> bool:
        """Whether servers that the user asked for have yet to be placed and the rates of some links are unknown.

        In every step the parameters of all ranks cross a server's link; if it is slow, that costs more than the wait.

        Args:
            bytes_per_s: Rate of every rank's link, NaN if unknown.
        """
        wanted = self.plan
        if wanted is None or wanted.family not in ("ps", "grouped") or wanted.servers or self._rates_by_s == math.inf:
            return False
        return self._linked and any(map(math.isnan, bytes_per_s))

    def has_loader(self, lack: str, equal_batches: str, step: int) -> bool:
        """Whether the loader that the mode needs feeds the ranks, if it needs one; a lack is warned about once.

        Args:
            lack: Why the loader does not do for the mode, as far as is known; empty if it does.
            equal_batches: Why batches may not differ between ranks, empty if they may.
            step: The current step; in the first ones, no loader may have asked for samples yet.
        """
        if equal_batches and self.needs_loader:  # Another optimizer needs equal batches.
            self.no_loader_reason = equal_batches
            return False
        if not lack:
            self.no_loader_reason = ""
        elif step >= _FED_BY and not self.no_loader_reason:
            self.no_loader_reason = lack
            logger.warning("optimizer %d stays in sync: %s", self._optimizer_id, lack)
        return not lack

    def due(
        self, active: Plan, blocked: Collection[str], bytes_per_s: Sequence[float], now_s: float
    ) -> Plan | None:
        """Return the mode if it is to be published now, None if it is in force or has to wait.

        Args:
            active: The active plan.
            blocked: Modes that failed and are not to be tried yet.
            bytes_per_s: Rate of every rank's link, NaN if unknown.
            now_s: Current time.
        """
        wanted = self.plan
        if wanted is None or (self.awaits_rates(bytes_per_s) and now_s < self._rates_by_s):
            return None
        self._rates_by_s = math.inf
        same = active.mode == wanted.mode and active.uneven == wanted.uneven and active.steal == wanted.steal
        return None if same or wanted.mode in blocked else wanted

    def regrouped(
        self, active: Plan, complete: Callable[[Plan], Plan], usual_s: Callable[[], Sequence[float]]
    ) -> Plan | None:
        """Return the mode, for new groups, if the user gave none and others have been better for long enough.

        Args:
            active: The active plan.
            complete: Returns a plan with the groups that it leaves open.
            usual_s: Returns the usual compute time of every rank, NaN where unknown.
        """
        wanted = self.plan
        if wanted is None or wanted.groups or active.mode != wanted.mode or not active.groups:
            return None
        if not self._regrouping.due(active, complete(wanted).groups, usual_s):
            return None
        return wanted.replace(reason="other ranks are alike by now")

    # ---- what became of it ------------------------------------------------------------------------------------

    def failed(self, switch: Switch, reason: str, active: Plan) -> str:
        """Note that a switch has failed; return what to tell the user, empty if it was not to the mode.

        Args:
            switch: The switch.
            reason: Why it failed.
            active: The plan that stays active.
        """
        if self.plan is None or self.plan.mode != switch.plan.mode:
            return ""
        failed = "did not come into force" if switch.prepared else "could not be prepared"
        self.failure = f"{self.plan.label} {failed}: {reason}"
        return (
            f". Training continues in {active.label}, and {self.plan.label}, which was asked for, is "
            "tried again in a minute, then less often: remove the cause meanwhile, or ask for another mode"
        )

    def activated(self, active: Plan) -> None:
        """Note that a plan has become active."""
        if self.plan is not None and self.plan.mode == active.mode:
            self.failure = ""
