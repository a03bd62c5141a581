"""Rate-limited warnings in rank 0's log: stragglers, uneven training loops and steps that wait for a long time."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Collection, Sequence

from scheduler.diagnosis.machine import MachineStats, machine_evidence
from scheduler.diagnosis.slow_episodes import SlowSince, first_slow_step
from scheduler.diagnosis.stragglers import Straggler
from scheduler.records import Window
from scheduler.rules.step_closing import Close, ClosingRule
from star_hvd.config import Config
from star_hvd.coordinator.plans.switch import Switch

__all__ = ["Alerts", "EndAlert"]

logger = logging.getLogger("star_hvd")

_END_WARNING_S = 60.0  # First warning of ranks that others wait for at the end of the job: some evaluate on one rank.


class Alerts:
    """Warnings of one optimizer.

    Args:
        config: Intervals of the warnings and the quorum's deadline.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._slow_since = SlowSince()
        self._reported_at_s: dict[int, float] = {}
        self._waiting_since_s: float | None = None
        self._stall_logged_s = 0.0
        self._warned_of_uneven_loops = False
        self._draining_id, self._draining_since_s = -1, math.inf  # The plan that servers drain for; infinite: warned.

    def stragglers(
        self, window: Window, found: Sequence[Straggler], machines: Sequence[MachineStats], now_s: float
    ) -> tuple[Straggler, ...]:
        """Warn about a window's stragglers; return them with the evidence of their hosts and their first slow step."""
        self._slow_since.note(window)
        stragglers = tuple(self._with_first_step(_with_machine(straggler, machines)) for straggler in found)
        for straggler in stragglers:
            last = self._reported_at_s.get(straggler.rank)
            if last is None or now_s - last >= self._config.report_interval_s:
                self._reported_at_s[straggler.rank] = now_s
                logger.warning("%s", straggler.sentence)
        return stragglers

    def _with_first_step(self, straggler: Straggler) -> Straggler:
        if straggler.silent or straggler.cause == "link":  # No step times show when these began.
            return straggler
        return dataclasses.replace(straggler, since_step=first_slow_step(straggler, self._slow_since.steps))

    def waiting(self, now_s: float | None) -> None:
        """Note since when the current step has been waiting for ranks; None if it is not waiting."""
        self._waiting_since_s = now_s

    def closing(self, order: Close, *, has_queue: bool) -> None:
        """Warn if a step is closed by the quorum's deadline, or without ranks that have ended their loop.

        Args:
            order: The closing of the step.
            has_queue: Whether the ranks take their samples from a work queue.
        """
        self.waiting(None)
        if order.excused and not has_queue and not self._warned_of_uneven_loops:
            self._warned_of_uneven_loops = True
            logger.warning(
                "ranks %s wait at the end of their training loop, or in a collective of the program, while others "
                "still train: with fixed shares of the data fast ranks wait for slow ones there; wrap the data set in "
                "star_hvd.shard, which gives slow ranks fewer batches",
                list(order.excused),
            )
        if order.reason == "deadline":
            logger.warning(
                "step %d closes without ranks %s: its quorum was not reached within %g s",
                order.step,
                list(order.missing),
                self._config.quorum_deadline_s,
            )

    def draining(self, switch: Switch | None, now_s: float) -> None:
        """Warn once of servers that drain for a long time; the plan that they drain for cannot be abandoned."""
        if switch is None or not switch.irrevocable:
            return
        if switch.plan.plan_id != self._draining_id:
            self._draining_id, self._draining_since_s = switch.plan.plan_id, now_s
        waited_s = now_s - self._draining_since_s
        if waited_s >= self._config.stall_warning_s:
            self._draining_since_s = math.inf
            logger.warning(
                "%s (plan %d) has been waiting for %.0f s for the last update of the servers of %s, on ranks %s; see "
                "their logs",
                switch.plan.label,
                switch.plan.plan_id,
                waited_s,
                switch.active.label,
                list(switch.active.servers),
            )

    def stall(self, rule: ClosingRule, now_s: float) -> float | None:
        """Warn, once per `stall_warning_s`, which ranks a step has been waiting for.

        Returns:
            For how many seconds it has been waiting, or None without a warning.
        """
        pause_s = self._config.stall_warning_s
        if self._waiting_since_s is None or now_s - self._waiting_since_s < pause_s:
            return None
        waited_s = now_s - self._waiting_since_s
        if not rule.ready or not rule.missing or now_s - self._stall_logged_s < pause_s:
            return None
        self._stall_logged_s = now_s
        logger.warning("step %d has been waiting for ranks %s for %.0f s", rule.step, list(rule.missing), waited_s)
        return waited_s


class EndAlert:
    """Warns, more and more rarely, of ranks that others, whose programs have ended, wait for."""

    def __init__(self) -> None:
        self._since_s: float | None = None
        self._due_s = 0.0

    def waits(self, ended: Collection[int], world_size: int, now_s: float) -> tuple[list[int], float] | None:
        """Return the ranks waited for and for how many seconds, with a warning; None if none is due.

        Args:
            ended: Ranks whose programs have ended.
            world_size: Number of ranks.
            now_s: Current time.
        """
        if not ended or len(ended) == world_size:
            return None
        if self._since_s is None:
            self._since_s, self._due_s = now_s, now_s + _END_WARNING_S
        if now_s < self._due_s:
            return None
        waited_s = now_s - self._since_s
        self._due_s = now_s + waited_s
        ranks = [rank for rank in range(world_size) if rank not in ended]
        logger.warning("ranks %s have ended, and wait for ranks %s for %.0f s", sorted(ended), ranks, waited_s)
        return ranks, waited_s


def _with_machine(straggler: Straggler, machines: Sequence[MachineStats]) -> Straggler:
    evidence = machine_evidence(straggler.rank, machines)
    joined = "; ".join(filter(None, (straggler.evidence, evidence)))
    return dataclasses.replace(straggler, evidence=joined) if evidence else straggler
