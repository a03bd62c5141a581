"""What the ranks agree on in band: the plan in force, the leader, its hyperparameters, and that replicas are equal.

Every rank reads the same header in the same step, so every decision made here is the same on all ranks.
"""

from __future__ import annotations

import threading

from scheduler.records import Plan
from star_hvd.engine.applier import Applier
from star_hvd.engine.header import Contribution, Header, HeaderCodec
from star_hvd.engine.records import Listener, OpenStep

__all__ = ["Agreement"]


class Agreement:
    """Any thread may call `refusal`, `prepare`, `abandon` and `pin`; the engine calls the rest under its lock.

    Args:
        rank: This rank.
        plan: The first plan.
        applier: Source of hyperparameters and checksums.
        listener: Called at the end of steps, at switches and at mismatches.
        lock: The engine's, which is reentrant.
    """

    def __init__(
        self, rank: int, plan: Plan, applier: Applier, listener: Listener, lock: threading.Condition
    ) -> None:
        self.rank = rank
        self.plan = plan
        self.prepared: Plan | None = None
        self.pinned: str | None = None
        self.codec = HeaderCodec(plan.world_size, applier.hyper.size)
        self._applier = applier
        self._listener = listener
        self._lock = lock
        self._leader = 0
        self._row: tuple[float, ...] | None = None
        self.mixed = False  # Whether any step was incomplete or relaxed, so that ranks may be at different steps.
        self._outdated = -1  # The last plan whose servers, if it needs any, may lack parameters that were added since.
        self._checksum_round: int | None = None
        self.checksum: tuple[int, int] = (-1, 0)  # A step and its checksum, if it was computed beforehand.

    def refusal(self, plan: Plan) -> str | None:
        """Return why this rank cannot adopt a plan, None if it can."""
        with self._lock:
            if plan.world_size != self.plan.world_size:
                return f"the plan is for {plan.world_size} ranks, this job has {self.plan.world_size}"
            if plan.plan_id <= self.plan.plan_id:
                return f"the plan's id {plan.plan_id} is not newer than {self.plan.plan_id}"
            if plan.family in ("ps", "grouped") and plan.plan_id <= self._outdated:
                return "parameters were added to the optimizer while the servers were being prepared"
            return self.pinned if plan.relaxed else None

    def prepare(self, plan: Plan) -> str | None:
        """Get ready for a plan and raise its flag in the next headers. Return why not, or None."""
        with self._lock:
            reason = self.refusal(plan)
            if reason is None:
                self.prepared = plan
            return reason

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that currently reduce together."""
        return self.plan.members_or_all

    def resume(self, plan: Plan, step: int) -> None:
        """Adopt a plan that all ranks enter with a handed-over state, discarding earlier agreements."""
        self.plan = plan
        if self.prepared is not None and self.prepared.plan_id <= plan.plan_id:
            self.prepared = None
        self.mixed = True
        self._leader, self._row = self.members[0], None
        self._checksum_round = step + 1
        self._listener.on_switch(step, plan)

    def abandon(self, plan_id: int) -> None:
        """Lower the flag of a plan that some rank could not prepare."""
        with self._lock:
            if self.prepared is not None and self.prepared.plan_id == plan_id:
                self.prepared = None

    def pin(self, reason: str) -> None:
        """Refuse relaxed plans from now on."""
        with self._lock:
            self.pinned = reason
            if self.prepared is not None and self.prepared.relaxed:
                self.prepared = None

    def outdate(self, plan_id: int) -> Plan | None:
        """Refuse plans up to this one if they need servers: parameters were added, on all ranks in the same step.

        Returns:
            The plan whose flag was up, and is lowered; None if there is none.
        """
        with self._lock:
            self._outdated = plan_id
            lowered = self.prepared
            if lowered is None or self.refusal(lowered) is None:
                return None
            self.prepared = None
            return lowered

    def layout_changed(self) -> None:
        """Adapt to a new layout of the hyperparameters, which changes on all ranks in the same step."""
        self.codec = HeaderCodec(self.plan.world_size, self._applier.hyper.size)
        self._row = None

    def contribution(self, step: OpenStep, own_steps: int, *, fresh: bool, inactive: bool = False) -> Contribution:
        """Return this rank's part of the header: flag, leadership, folds and, if fresh, the checksum when due."""
        item = Contribution(fresh=fresh, own_steps=own_steps)
        # Wait for two own steps: whatever forbids relaxed modes (a GradScaler, sparse gradients) shows in the first.
        if self.prepared is not None and self._may_flag(self.prepared, own_steps, fresh=fresh, inactive=inactive):
            item.flag_plan_id_delta = self.prepared.plan_id - self.plan.plan_id
            step.flagged = self.prepared
        if self._leader == self.rank:
            # A leader that turns out late repeats the last agreed values; its own may have advanced.
            own_wanted = fresh or self._row is None
            item.hyper = self._applier.hyper.read(self._applier.optimizer.param_groups) if own_wanted else self._row
        item.folds = step.folded / max(1, len(step.buffers))
        if fresh and self.checksum_due(step.number):
            taken, value = self.checksum
            item.checksum = value if taken == step.number else self._applier.checksum()
        return item

    def checksum_due(self, number: int) -> bool:
        """Whether the header of a step includes a checksum of the parameters."""
        return self._checksum_round == number and self.plan.mode != "local"

    def _may_flag(self, prepared: Plan, own_steps: int, *, fresh: bool, inactive: bool) -> bool:
        if own_steps < 2 and prepared.relaxed:
            return False
        if inactive and prepared.family != self.plan.family:
            return False  # Entering another family needs the training thread, which will be back soon.
        # A rank that supplies the next plan's initial state must have the state of the step it starts with.
        return fresh or prepared.family == self.plan.family or self.rank not in prepared.sources

    def read(self, step: OpenStep, header: Header, mean_sqr: float) -> tuple[float, ...] | None:
        """Act on a reduced header. Headers are read in step order.

        Returns:
            The hyperparameters to apply the step with: the leader's once any step has been incomplete or relaxed, else
            None, so that each rank uses its own as in Horovod.
        """
        row = self.row_of(header)
        if header.hyper is not None:
            self._row = header.hyper
        self._leader = header.leader_of(self.members)
        self.mixed = self._mixed_by(header)
        if header.checksum_ok is False:
            self._listener.on_mismatch(step.number)
        self._listener.on_step_end(step.number, header, self.plan, mean_sqr, step.sent_bytes)
        self._maybe_switch(step, header)
        return row

    def row_of(self, header: Header) -> tuple[float, ...] | None:
        """Return the hyperparameters that `read` will return for a header."""
        if not self._mixed_by(header):
            return None
        return header.hyper if header.hyper is not None else self._row

    def _mixed_by(self, header: Header) -> bool:
        return self.mixed or self.plan.relaxed or not header.complete(self.members)

    def _maybe_switch(self, step: OpenStep, header: Header) -> None:
        delta = header.agreed_plan_id_delta(len(self.members))
        if delta is None:
            return
        # All members raised this plan's flag in this step, so all of them adopt it now, even if it was abandoned or
        # superseded while the step was in flight.
        flagged = step.flagged
        assert flagged is not None and flagged.plan_id - self.plan.plan_id == delta
        self.plan = flagged
        if flagged.family != "all_ranks" or flagged.mode == "local":
            # From now on ranks are at different steps, and no more headers are read here; in `local` only those of
            # averagings, the first of which waits for ranks that may be in a collective of the program by then.
            self.mixed = True
        if self.prepared is not None and self.prepared.plan_id <= flagged.plan_id:
            self.prepared = None
        self._checksum_round = step.number + 1
        if self.rank in self.members:
            self._leader = self._leader if self._leader in self.members else self.members[0]
        self._listener.on_switch(step.number + 1, self.plan)
