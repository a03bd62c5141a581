"""Batch shares of the optimizer that a `shard` loader feeds: what is wanted, and whether it may be asked for. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from scheduler.balance.share_policy import SharePolicy, share_sentence
from scheduler.plan.plan import Plan
from star_hvd.channel.messages.base import Message
from star_hvd.channel.messages.shares import ShareReady
from star_hvd.coordinator.share_desk import Change, ShareDesk

__all__ = ["ShareControl"]

_AGAIN_S = 0.2  # After a proposal that came at a bad moment, between two epochs for example.


class ShareControl:
    """See the module's text.

    Args:
        world_size: Number of ranks.
        send: Sends a message to all ranks.

    Attributes:
        desk: Has the shares in force and changes them.
        changes: What was ordered: first steps and shares, the latest last.
    """

    def __init__(self, world_size: int, send: Callable[[Message], None]) -> None:
        self.desk = ShareDesk(world_size, send)
        self.changes: list[tuple[int, tuple[int, ...], str]] = []
        self._world_size = world_size
        self._policy: SharePolicy | None = None
        self._warm: set[int] = set()  # Ranks whose first report has come, which tells nothing of the steps to come.
        self._again_s = 0.0

    @property
    def policy(self) -> SharePolicy | None:
        """What decides, None before a loader feeds the ranks."""
        if self._policy is None and self.desk.batch:
            self._policy = SharePolicy(self._world_size, self.desk.batch)
        return self._policy

    def note(self, rank: int, step: int, compute_s: float) -> None:
        """Take in a rank's time of a step."""
        if rank not in self._warm:
            self._warm.add(rank)
        elif self.policy is not None:
            self.policy.note(rank, self.desk.samples(rank, step), compute_s)

    def tick(self, plan: Plan, now_s: float) -> None:
        """Ask the ranks for other shares where the plan in force, or what was measured, wants them."""
        self.desk.tick(now_s)
        if self.policy is None or self.desk.pending or now_s < self._again_s:
            return
        wanted = self._wanted(plan)
        if wanted is not None and wanted != self.desk.shares:
            self._again_s = now_s + _AGAIN_S
            self.desk.propose(wanted, now_s)

    def ready(self, rank: int, message: ShareReady, next_step: int) -> Change | None:
        """A rank's answer, see `ShareDesk.ready`."""
        change = self.desk.ready(rank, message, next_step)
        if change is not None and self.policy is not None:
            self.policy.changed(change.shares)
            self.changes.append((change.step, change.shares, self.sentence()))
        return change

    def sentence(self) -> str:
        """What the shares in force are, `rank 2 gets 12 of 76 samples` for example; empty for plain `sync`."""
        if not self.desk.shares or self.policy is None:
            return ""
        return share_sentence(self.desk.shares, self.policy.ratio)

    @property
    def fixed_part(self) -> float:
        """Part of a rank's time that does not depend on its batch; NaN where no change of size has told it."""
        return self.policy.curves.fixed if self.policy is not None and self.policy.curves.known else math.nan

    def scale(self, steps: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Time of a usual batch over that of the batches of these steps, shape (n_ranks, n_steps)."""
        fixed = self.policy.curves.fixed if self.policy is not None else 0.0
        ratio = self.desk.all_samples(steps) / max(1, self.desk.batch)
        return np.asarray(1.0 / (fixed + (1.0 - fixed) * ratio))

    def _wanted(self, plan: Plan) -> tuple[int, ...] | None:
        """The shares to ask for, None to keep those in force."""
        assert self.policy is not None
        if not plan.uneven:
            return ()
        if not plan.balanced:
            return plan.batch_shares
        found = self.policy.decide(self.desk.shares, self.desk.most)
        if found is not None:
            return found
        return None if self.desk.shares else (self.desk.batch,) * self._world_size
