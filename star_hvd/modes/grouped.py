"""Mode `grouped` on a worker: the ranks of a group sum their gradients in a process set, then push to the servers.

The group's first rank, the leader, talks to the servers for all and distributes the parameters inside the set.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from scheduler.records import Plan
from star_hvd.engine.buckets import set_weight, wire_dtype
from star_hvd.engine.collective import Collective, wait_all
from star_hvd.engine.step_engine import StepEngine
from star_hvd.errors import DeadlineError
from star_hvd.locks import ordered_lock
from star_hvd.modes.ps_worker import Client, Outcome, ServerSteps
from star_hvd.telemetry.wait_time import WaitTime
from star_hvd.threads import supervised

__all__ = ["GroupSteps"]

_IDLE_S, _LONGEST_IDLE_S = 0.005, 0.1
"""Pause of a proxy while its whole group is inactive. It doubles, so that a member that becomes active waits for the
others' proxies hardly longer than the group was inactive, and at most a tenth of a second."""
_SLICE_S = 1.0  # Of a wait for another thread of this rank.
_KINDS = ("params", "moved", "dropped", "idle")


class GroupSteps(ServerSteps):
    """Steps of mode `grouped`: `ServerSteps` for a group, whose members sum their gradients first.

    While a member is inactive, its proxy (a thread) contributes zeros in its place, so that the others need not wait.

    Args:
        engine: See `ServerSteps`.
        client: Pushes on the leader only.
        collective: The group's own collective; None for a group of one.
        ranks: The group, its leader first.
        **common: See `ServerSteps`.
    """

    def __init__(
        self,
        engine: StepEngine,
        plan: Plan,
        client: Client,
        collective: Collective | None,
        ranks: tuple[int, ...],
        **common: Any,
    ) -> None:
        super().__init__(engine, plan, client, **common)
        self._collective = collective
        self._ranks = ranks
        self._one_at_a_time = ordered_lock("GroupSteps._one_at_a_time")
        self._inactive, self._woken = threading.Event(), threading.Event()
        self._shutting_down = self._shut_down = False
        self._handed_out = -1  # Version of the parameters that the members got last; none in this session yet.
        self._proxy: threading.Thread | None = None

    def _exchange(self, flats: list[torch.Tensor], weights: Sequence[float]) -> Outcome:
        with self._turn():
            return self._group_step(flats, weights)

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Let the training thread and the proxy make steps of the group one after the other.

        Raises:
            DeadlineError: The other thread's step did not end.
        """
        wait = WaitTime(_SLICE_S, self._step_before)
        while not self._one_at_a_time.acquire(timeout=min(_SLICE_S, self._deadline_s)):
            if wait.count() >= self._deadline_s:
                raise DeadlineError(
                    f"rank {self._engine.rank}: {self._step_before()} did not end within {self._deadline_s:g} s; see "
                    f"the log of rank {min(self._ranks)} for the member that is missing, or that of rank 0 for the "
                    "server"
                )
        try:
            yield
        finally:
            self._one_at_a_time.release()

    def _step_before(self) -> str:
        return f"the step of the group of ranks {self._ranks} before this one"

    def _group_step(
        self, flats: list[torch.Tensor], weights: Sequence[float] | None = None, *, reads: bool = False
    ) -> Outcome:
        """Make one step of the group, in this rank's turn: sum, exchange with the servers (leader), distribution.

        The previous step, made by this rank's other thread, may have been the last: then the other members have left.
        If no member has a gradient or wants parameters, which all learn from the same sum, only heads are reduced.

        Args:
            flats: The gradient, or zeros.
            weights: The gradient's weight per bucket; None for zeros.
            reads: Whether this rank wants parameters without a gradient.
        """
        fresh = weights is not None
        weights = [0.0] * len(flats) if weights is None else weights
        if self._collective is None:
            return self._push(flats, weights, count=1)
        if self.over:
            return Outcome("moved", self._engine.step, self._engine.plan.plan_id, [], applied=False)
        flags = [float(fresh), float(self._shutting_down), float(reads), 0.0, 0.0, 0.0]
        head = torch.tensor(flags, dtype=torch.float32, device="cpu")
        # A rank with a gradient knows that the buckets are summed and does not wait for the head first.
        sums = _to_sum(flats, weights) if fresh else []
        self._reduce([("gh", head), *_named(sums)])
        present, ending, reading = (round(value) for value in head.tolist()[:3])
        if not fresh and (present or reading):
            sums = _to_sum(flats, weights)
            self._reduce(_named(sums) if present else [])
        outcome = self._lead(flats, sums, present) if self._leads else None
        found = self._hand_out(outcome, sums)
        self._shut_down = ending == len(self._ranks)
        self._moved = found.kind == "moved"
        return found

    @property
    def over(self) -> bool:
        """Whether the group has ended: all members end in the step in which the leader learns of the mode's end."""
        return self._moved or self._shut_down or (self._collective is None and not self.wanted)

    @property
    def acts_on(self) -> int:
        """Id of this plan until the group is over, then of the plan in force.

        Members meet once more on their process set even if another plan is already in force.
        """
        return self._engine.plan.plan_id if self.over else self.plan.plan_id

    @property
    def _computed_on(self) -> int:
        """See `ServerSteps`. An inactive leader's own step stays, while the other members go on."""
        return max(self._engine.step, self._handed_out)

    @property
    def _leads(self) -> bool:
        return self._engine.rank == self._ranks[0]

    def _lead(self, flats: Sequence[torch.Tensor], sums: Sequence[torch.Tensor], present: int) -> Outcome:
        if present:
            self._engine.streams.await_host(self._deadline_s)
            weights = [float(each[-1]) for each in sums]
            # In the parameters' own type, which servers expect; it may round the weights.
            own = [each.to(flat.dtype) for each, flat in zip(sums, flats, strict=True)]
            return self._push(own, weights, count=present)
        if not (sums and self.wanted):
            kind = "idle" if self.wanted else "moved"
            return Outcome(kind, self._engine.step, self._engine.plan.plan_id, [], applied=False)
        reply = self._pull()
        return Outcome(reply.kind, reply.version, reply.plan_id, reply.params, applied=False)

    def _hand_out(self, outcome: Outcome | None, sums: list[torch.Tensor]) -> Outcome:
        """Distribute the leader's parameters to all members: a sum to which the others contribute zeros."""
        head = torch.zeros(8, dtype=torch.float64, device="cpu")
        for flat in sums:
            flat.zero_()
        if outcome is not None:
            values = (_KINDS.index(outcome.kind), outcome.version, outcome.plan_id, outcome.applied, outcome.damped)
            head[: len(values)] = torch.tensor([float(v) for v in values], dtype=torch.float64, device="cpu")
            for flat, values_of in zip(sums, outcome.params, strict=bool(outcome.params)):
                flat[: values_of.numel()].copy_(values_of)
        self._reduce([("gv", head), *_named(sums)])
        kind, version, plan_id, applied, damped = head.tolist()[:5]
        params = [flat[:-1] for flat in sums]
        if _KINDS[round(kind)] in ("params", "dropped"):
            self._handed_out = round(version)
        return Outcome(_KINDS[round(kind)], round(version), round(plan_id), params, applied=applied > 0, damped=damped)

    def _reduce(self, items: Sequence[tuple[str, torch.Tensor]]) -> None:
        assert self._collective is not None
        prefix = self._engine.prefix
        handles = [self._collective.submit(f"{prefix}.{name}", tensor) for name, tensor in items]
        what = f"a step of the group of ranks {self._ranks}"
        wait_all(self._collective, handles, self._deadline_s, what, first=min(self._ranks))

    def set_inactive(self, inactive: bool) -> None:
        """While inactive, have a proxy contribute zeros to the group's steps.

        On return the proxy's current step is not waited for: it ends with the other members' next step, and they may
        meanwhile be waiting for this rank outside this package. This rank's own next step waits for it.
        """
        if self._collective is None:
            super().set_inactive(inactive)
            return
        if inactive:
            if self._inactive.is_set():
                return
            self._woken.clear()
            self._inactive.set()
            self._proxy = supervised(self._take_part, "star-group", args=(self._proxy,))
            self._proxy.start()
        else:
            self._inactive.clear()
            self._woken.set()

    def confirm_inactive(self) -> None:
        """Wait for the servers if this rank is a group of its own; in larger groups the proxy stands in."""
        if self._collective is None:
            super().confirm_inactive()

    def drain(self) -> None:
        """Contribute zeros until the leader has learned of the mode's end.

        Raises:
            DeadlineError: It has not.
        """
        wait = WaitTime(what=f"rank {self._ranks[0]} to end the group of ranks {self._ranks}")
        while not self.over and self._engine.failure is None:
            if wait.count() >= self._deadline_s:
                raise DeadlineError(
                    f"rank {self._engine.rank}: the group of ranks {self._ranks} did not end within "
                    f"{self._deadline_s:g} s; rank {self._ranks[0]}, which leads it, has not learned of the mode's "
                    "end: see its log"
                )
            with self._turn():
                outcome = self._group_step([b.new_flat() for b in self._engine.applier.buckets])
            if outcome.kind == "idle":
                time.sleep(_IDLE_S)

    def shutdown(self) -> None:
        """Take part until a step reports that all members are shutting down.

        If a member left earlier, the next step would wait for it forever.
        """
        self._shutting_down = True
        self._woken.set()
        if self._proxy is not None and not self._join(self._proxy):
            raise DeadlineError(
                f"the group of ranks {self._ranks} did not end within {self._deadline_s:g} s; some member has not "
                f"closed its optimizer. See which one in the log of rank {min(self._ranks)}, or raise "
                "Config.step_deadline_s"
            )

    def _join(self, proxy: threading.Thread) -> bool:
        """Wait for a proxy to end; return whether it has."""
        wait = WaitTime(_SLICE_S, f"the last step of the group of ranks {self._ranks}")
        while proxy.is_alive() and wait.count() < self._deadline_s:
            proxy.join(min(_SLICE_S, self._deadline_s))
        return not proxy.is_alive()

    def _take_part(self, before: threading.Thread | None) -> None:
        if before is not None:  # The previous proxy may still be in a step, and would continue with the next.
            self._join(before)
        with self._engine.streams.own():
            self._contribute_nothing()

    def _contribute_nothing(self) -> None:
        zeros = [bucket.new_flat() for bucket in self._engine.applier.buckets]
        pause_s = _IDLE_S
        try:
            while (self._inactive.is_set() or self._shutting_down) and not self.over and self._engine.failure is None:
                with self._turn():
                    outcome = self._group_step(zeros)
                if outcome.kind != "idle":
                    pause_s = _IDLE_S
                elif not self.over:
                    self._woken.wait(pause_s)  # Outside the turn: this rank's next step need not wait for it.
                    pause_s = min(_LONGEST_IDLE_S, 2.0 * pause_s)
        except Exception as error:
            self._engine.fail(error, unseen=True)

    def catch_up(self) -> None:
        """Get the newest parameters, together with the group."""
        if self._collective is None:
            super().catch_up()
        elif not self.over:
            with self._turn():
                zeros = [b.new_flat() for b in self._engine.applier.buckets]
                outcome = self._group_step(zeros, reads=True)
            if outcome.kind == "params":
                self._write(outcome)


def _to_sum(flats: Sequence[torch.Tensor], weights: Sequence[float]) -> list[torch.Tensor]:
    """Return copies in which a group may sum, with these weights unrounded: Horovod rejects some types."""
    sums = [flat.to(wire_dtype(flat.dtype, fp16=False), copy=True) for flat in flats]
    for each, weight in zip(sums, weights, strict=True):
        set_weight(each, weight)
    return sums


def _named(sums: Sequence[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    return [(f"g{i}", flat) for i, flat in enumerate(sums)]
