"""Starts servers and makes process sets ahead of a plan that may be chosen soon. Pure: only queues messages.

Servers take seconds to start; starting one blocks nothing, and an unused one costs only memory. Making a process set
blocks all collectives for a third of a second, so a set is made ahead only if it could not be made later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

import numpy as np

from scheduler.diagnosis.links import slow_links
from scheduler.plan.plan import Plan
from star_hvd.channel.messages.base import Message
from star_hvd.channel.messages.switch import WarmServers
from star_hvd.coordinator.plans.set_ledger import MOST_SETS, SetLedger

__all__ = ["Readiness"]

_WORTH_S = 0.05  # Time of a gradient over a slow link above which a set without that rank may be needed.


class Readiness:
    """Prepares servers and process sets in advance for one optimizer.

    Args:
        optimizer_id: Number of the optimizer.
        sets: The process sets of the job.
        send: Queues a message to all ranks.
    """

    def __init__(self, optimizer_id: int, sets: SetLedger, send: Callable[[Message], None]) -> None:
        self._engine, self._sets, self._send = optimizer_id, sets, send
        self._servers: set[int] = set()

    def for_plan(self, plan: Plan | None, blocked: Collection[str] = ()) -> None:
        """Start the servers of a plan that may be published soon, once each."""
        if plan is None or plan.mode in blocked:
            return
        new = sorted(set(plan.servers) - self._servers)
        if new:
            self._servers.update(new)
            self._send(WarmServers(new))

    def for_links(
        self, bytes_per_s: Sequence[float], gradient_bytes: float, blocked: Collection[str] = ()
    ) -> None:
        """Make the set of ranks with fast links, before it is known whether links matter.

        Horovod cannot make a set while a collective is slow over such a link.
        """
        known = [rate for rate in bytes_per_s if math.isfinite(rate) and rate > 0.0]
        if "subgroup" in blocked or len(known) < len(bytes_per_s) or len(known) < 3:
            return
        fast = tuple(np.flatnonzero(~slow_links(np.array(known))).tolist())
        if 2 * len(fast) >= len(known) > len(fast) and gradient_bytes / min(known) > _WORTH_S:
            self._make(fast)

    def _make(self, ranks: tuple[int, ...]) -> None:
        if ranks not in self._sets and len(self._sets) < MOST_SETS:  # Never replaces a set that was in use.
            for message in self._sets.order(self._engine, [ranks]):
                self._send(message)
