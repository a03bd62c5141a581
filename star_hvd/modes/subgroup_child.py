"""A rank outside the subgroup: it sends its gradient to a member, its parent, and gets current parameters back.

The members never wait for it. The parent folds the gradient into its own next submission, however late it is.

In the background (`Plan.in_background`) the rank does not wait for its parent either: `LateSender` sends, and the
parameters are loaded at the end of the first step by which they have arrived. Gradients computed meanwhile are summed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from scheduler.records import Plan
from star_hvd.channel.late_push import ParentLink
from star_hvd.channel.late_sender import LateSender, Sum
from star_hvd.engine.buckets import Bucket
from star_hvd.engine.records import Snapshot
from star_hvd.engine.state_source import StateSource, StateSources
from star_hvd.engine.step_engine import StepEngine
from star_hvd.modes.ps_worker import StepInfo

__all__ = ["ChildSteps", "Parent"]

logger = logging.getLogger("star_hvd")

_PATIENCE_S = 1.0  # Wait for a parent's newest parameters; a step of the members is usually far shorter.
_MEETING_PATIENCE_S = 10.0  # Where all ranks meet; there the parent soon has the newest step.
_SHORT_PATIENCE_S = 0.02  # After the parent has not answered in time, until it does.


@dataclass(frozen=True, slots=True)
class Parent:
    """The parent as a source of state (`StateSource`).

    Attributes:
        link: The connection.
        state_too: Whether to include the optimizer's state besides the parameters.
        awaited: Whether all ranks wait for this rank.
    """

    link: ParentLink
    state_too: bool
    awaited: bool = False

    def snapshot(self, min_step: int, deadline_s: float) -> Snapshot | None:
        """See `StateSource`."""
        return self.link.state(min_step, state_too=self.state_too, awaited=self.awaited)


class ChildSteps:
    """Steps of a child; see the module docstring.

    Args:
        engine: This rank's engine, which reduces nothing meanwhile.
        plan: The plan, which may no longer be in force.
        link: Connection to the parent.
        ranks: The other ranks, for a state that the parent does not have.
        deadline_s: Longest wait for the parent.
        state_deadline_s: Longest wait for the optimizer's state.
        on_step: Called with every step.
        background: Whether a separate thread sends the gradients.
    """

    def __init__(
        self,
        engine: StepEngine,
        plan: Plan,
        link: ParentLink,
        *,
        ranks: StateSource,
        deadline_s: float,
        state_deadline_s: float,
        on_step: Callable[[StepInfo], None],
        background: bool = False,
    ) -> None:
        self.plan = plan
        self._engine = engine
        self._link = link
        self._ranks = ranks
        self._deadline_s = deadline_s
        self._state_deadline_s = state_deadline_s
        self._on_step = on_step
        self._answered = True
        self._loaded: list[int] = []  # The parameters' tensor versions when the parent's newest were written to them.
        name = f"star-late-{engine.rank}"
        self._sender = LateSender(link, name, self._newest, engine.streams.own) if background else None

    @property
    def over(self) -> bool:
        """Whether another plan is in force."""
        return self._engine.plan.plan_id != self.plan.plan_id

    @property
    def holds_step(self) -> bool:
        """Whether the parameters are the members' after step `engine.step`, so that this number shows who is behind.

        False if the program has written to them since, as in `broadcast_parameters`.
        """
        return not self.over and self._loaded == self._versions()

    def _versions(self) -> list[int]:
        return [param._version for bucket in self._engine.applier.buckets for param in bucket.params]

    def give(self, bucket: Bucket) -> None:
        """Count a complete gradient."""
        self._engine.outside_gradient()

    def step(self, *, skip: bool) -> Any:
        """Send this rank's gradient to the parent and load the parameters of the step that contains it.

        This rank is always late, and the members do not wait for it.

        Args:
            skip: Send zeros of weight 0 in the gradient's place (a GradScaler found infinities in it).
        """
        engine = self._engine
        engine.own.steps += 1
        engine.applier.clip()
        version = engine.step
        weights = []  # A buffer of bfloat16 rounds its own.
        for bucket in engine.applier.buckets:
            own = engine.own.weigh(bucket, skip=skip)
            weights.append(own + engine.fold_late(bucket, bucket.flat))
        flats = [bucket.flat for bucket in engine.applier.buckets]
        if self.over:
            engine.keep_late([flat.clone() for flat in flats], version, weights=weights)
            return None
        engine.streams.await_host(self._deadline_s)
        engine.counters.late += 1
        # The parent counts it as produced on its side, and counts its outcome.
        engine.sent_elsewhere(sum(weights) / len(weights))
        if self._sender is not None:
            self._sender.add(flats, version, weights)
            self._take_results(self._sender)
            return None
        began_s = time.monotonic()
        contained = self._link.push(flats, version, weights)
        # A parent that is elsewhere must not hold up this rank, which then continues with its present parameters.
        self._receive(contained, _PATIENCE_S if self._answered else _SHORT_PATIENCE_S)
        # Reported under this plan though the next may be in force, under which the containing step may not exist.
        staleness, plan_id = max(0, contained - 1 - version), self.plan.plan_id
        self._on_step(StepInfo(contained, staleness, time.monotonic() - began_s, plan_id))
        return None

    def _take_results(self, sender: LateSender) -> None:
        """Report what the parent has taken meanwhile, and load what it has sent."""
        sent, snapshot = sender.take_results()
        for each in sent:
            staleness = max(0, each.contained - 1 - each.version)
            self._on_step(StepInfo(each.contained, staleness, 0.0, self.plan.plan_id))
        self._load(snapshot)

    def _flush(self) -> None:
        """Wait until nothing is in transit; then this thread may use the link."""
        if self._sender is not None:
            self._sender.flush(self._deadline_s)
            self._take_results(self._sender)

    def discard(self) -> None:
        """Drop gradients that were not sent, and parameters that have come: the program has loaded a state since."""
        unsent = self._sender.discard() if self._sender is not None else None
        if unsent is not None:
            self._engine.not_taken(unsent.weight, unsent.count)

    def _newest(self, min_step: int) -> Snapshot | None:
        snapshot = StateSources(parent=Parent(self._link, state_too=False)).find(min_step, _PATIENCE_S, self._wanted)
        return self._newer() if snapshot is None and self._wanted() else snapshot

    def _receive(self, min_step: int, patience_s: float, *, awaited: bool = False) -> None:
        parent = Parent(self._link, state_too=False, awaited=awaited)
        snapshot = StateSources(parent=parent).find(min_step, patience_s, self._wanted)
        self._answered = snapshot is not None
        self._load(self._newer() if snapshot is None and self._wanted() else snapshot)

    def _newer(self) -> Snapshot | None:
        """Ask once for any newer parameters: a parent that waits elsewhere may not get to the awaited step.

        With several optimizers it may wait there for this rank, which would train with its old parameters for ever.
        """
        return self._link.state(self._engine.step + 1, state_too=False)

    def _load(self, snapshot: Snapshot | None) -> None:
        if snapshot is not None and not self.over:
            snapshot = self._engine.replica.placed(snapshot)
            with self._engine.replica.apply_lock:
                self._engine.replica.load(snapshot)
                self._engine.note_step(snapshot.step)
                self._loaded = self._versions()

    def _wanted(self) -> bool:
        if self._engine.failure is not None:
            raise self._engine.failure
        return not self.over

    def catch_up(self) -> None:
        """Get the parent's parameters, e.g. at the end of an epoch."""
        if not self.over:
            self._flush()
            self._receive(self._engine.step, _MEETING_PATIENCE_S, awaited=True)

    def refresh_state(self) -> None:
        """Fetch the optimizer's state, which only the members have, for a checkpoint of this rank.

        The parent may be behind, in a barrier of the user's: then any rank that has the state provides it.
        """
        if not self.over:
            self._flush()
            engine = self._engine
            sources = StateSources(parent=Parent(self._link, state_too=True), ranks=self._ranks)
            snapshot = sources.require(engine.rank, engine.step, self._state_deadline_s, self._wanted)
            if snapshot is not None and not self.over:
                self._engine.adopt_state(snapshot)

    def set_inactive(self, inactive: bool) -> None:
        """Does nothing: the members never wait for a child."""

    def confirm_inactive(self) -> None:
        """Does nothing: the members never wait for a child."""

    def wake(self) -> None:
        """Does nothing: waits here check for the end of the mode themselves."""

    def drain(self) -> None:
        """Does nothing: no other rank waits for this one here."""

    def shutdown(self) -> None:
        """Does nothing: no other rank waits for this one here."""

    def exit(self) -> None:
        """Leave the mode, which has ended; what was not sent becomes this rank's own late gradient."""
        if self._sender is not None:
            unsent = self._sender.close(self._state_deadline_s)
            if unsent is not None and self._engine.failure is None:
                buckets = self._engine.applier.buckets
                flats = [flat.to(bucket.flat.device) for flat, bucket in zip(unsent.flats, buckets, strict=True)]
                # It counts as taken over, since it was counted as sent.
                self._engine.keep_late(flats, unsent.version, taken_over=True, weights=unsent.weights)
            self._count_unanswered(self._sender.unanswered)
        if self._sender is None or not self._sender.closes_link:
            self._link.close()

    def _count_unanswered(self, push: Sum | None) -> None:
        """Count the gradients of a failed push as dropped; if the parent did get it, the parent counts it too."""
        if push is not None:
            self._engine.not_taken(push.weight, push.count)
            logger.warning(
                "rank %d: its parent %d did not answer; %d late gradients count as dropped",
                self._engine.rank, self._link.parent, push.count,
            )  # fmt: skip
