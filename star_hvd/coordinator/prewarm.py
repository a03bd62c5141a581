"""Gets ready what a plan that may come would need: servers, which take seconds to start, and sets. Pure.

Nothing waits for a server; one that was started in vain costs memory. Making a process set holds every collective up
for a third of a second, whenever it is made, so that on suspicion only a set is made that could not be made later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

import numpy as np

from scheduler.diagnosis.links import slow_links
from scheduler.plan.plan import Plan
from star_hvd.channel.messages.base import Message
from star_hvd.channel.messages.switch import WarmServers
from star_hvd.coordinator.set_ledger import MOST_SETS, SetLedger

__all__ = ["Readiness"]

_WORTH_S = 0.05  # Time of a gradient over a slow link above which a set without it may be wanted.


class Readiness:
    """What was got ready for one optimizer.

    Args:
        optimizer_id: Number of the optimizer.
        sets: The process sets of the job.
        send: Queues a message to all ranks.
    """

    def __init__(self, optimizer_id: int, sets: SetLedger, send: Callable[[Message], None]) -> None:
        self._engine, self._sets, self._send = optimizer_id, sets, send
        self._servers: set[int] = set()

    def for_plan(self, plan: Plan | None, barred: Collection[str] = ()) -> None:
        """A plan would be better than the one in force, and may be published once that pays."""
        if plan is None or plan.mode in barred:
            return
        new = sorted(set(plan.servers) - self._servers)
        if new:
            self._servers.update(new)
            self._send(WarmServers(new))

    def for_links(
        self, bytes_per_s: Sequence[float], gradient_bytes: float, barred: Collection[str] = ()
    ) -> None:
        """Links are known before it is known whether they matter: a set without slow ones cannot be made in time later.

        While a collective crawls over a slow link, Horovod makes no set.
        """
        known = [rate for rate in bytes_per_s if math.isfinite(rate) and rate > 0.0]
        if "subgroup" in barred or len(known) < len(bytes_per_s) or len(known) < 3:
            return
        fast = tuple(np.flatnonzero(~slow_links(np.array(known))).tolist())
        if 2 * len(fast) >= len(known) > len(fast) and gradient_bytes / min(known) > _WORTH_S:
            self._make(fast)

    def _make(self, ranks: tuple[int, ...]) -> None:
        if ranks not in self._sets and len(self._sets) < MOST_SETS:  # It pushes out nothing that was in use once.
            for message in self._sets.order(self._engine, [ranks]):
                self._send(message)
