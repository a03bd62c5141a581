"""What the coordinator knows of the loader of `shard` that feeds the ranks: what it allows the exact modes. Pure."""

from __future__ import annotations

import math

from scheduler.plan.plan import Plan
from star_hvd.channel.messages.leases import LeaseAsk
from star_hvd.channel.messages.microbatches import MicrobatchOpen
from star_hvd.coordinator.reports import Scale
from star_hvd.coordinator.share_control import ShareControl

__all__ = ["FeedingLoader"]


class FeedingLoader:
    """The loader as one optimizer sees it; it feeds the ranks from its first request for samples on.

    Attributes:
        has_queue: Whether there is such a loader.
        has_shares: Whether its batches can have other sizes.
        equal_batches: Why batches, or numbers of micro-batches, may not differ between ranks; empty if they may.
        shares: The batch shares of the loader that feeds this optimizer, None until it does.
        microbatch_fixed_part: See `MicrobatchService.fixed_part`.
    """

    def __init__(self) -> None:
        self.has_queue = self.has_shares = False
        self.equal_batches = ""
        self.shares: ShareControl | None = None
        self.microbatch_fixed_part = math.nan
        self._microbatches = 0  # Per rank and step, if it splits its batches.
        # Ranks on which a pass may not have more than a whole batch, of those that have opened it.
        self._short_passes: set[int] = set()

    def leased(self, message: LeaseAsk) -> None:
        """Take in a rank's request for samples."""
        self.has_queue = self.has_queue or message.samples > 0
        self.has_shares = self.has_shares or (message.samples > 0 and message.batch > 1 and not message.fixed)

    def opened(self, rank: int, message: MicrobatchOpen) -> None:
        """Take in that a rank begins an epoch with micro-batches."""
        self.has_queue = self.has_queue or message.samples > 0
        self._microbatches = self._microbatches or (message.parts if message.samples > 0 else 0)
        (self._short_passes.discard if message.most > message.batch else self._short_passes.add)(rank)

    @property
    def splits(self) -> bool:
        """Whether it splits its batches into micro-batches."""
        return self._microbatches > 0

    def lack(self, plan: Plan) -> str:
        """Return why it does not do for a plan's batch shares or stealing, empty if it does."""
        if plan.steal and not self._microbatches:
            return f"{plan.label} needs hvd.shard(..., microbatches=k), which cuts the batches"
        if not plan.uneven or self.has_shares:
            return ""
        if self._microbatches:
            return f"{plan.label} is not for micro-batches; use sync(steal), or leave microbatches out"
        if self.has_queue:
            return (
                f"{plan.label} needs batches whose sizes hvd.shard can choose; those of a stream, of hvd.work, of a "
                "batch sampler and of one sample are as they are: use a map-style data set with a batch_size"
            )
        return f"{plan.label} needs hvd.shard, which forms the batches; without it the sizes are the user's"

    def exact_mode(self, active: Plan) -> Plan | None:
        """Return the exact mode that it allows, which costs nothing while no rank is slow; None if there is none.

        Not `sync(steal)` where a pass over more than a batch may not fit in memory on a rank that has opened the loader
        so far; one that opens it later only limits the passes of that epoch.

        Args:
            active: The active plan, `sync`.
        """
        if self.equal_batches or (self._microbatches and self._short_passes):
            return None
        if self._microbatches:
            return active.replace(steal=True, reason="ranks take over micro-batches from the first step on")
        if self.has_shares:
            reason = "batch shares follow the ranks' speed from the first steps on"
            return active.replace(balanced=True, reason=reason)
        return None

    # ---- sizes of batches, and times --------------------------------------------------------------------------

    @property
    def batch(self) -> int:
        """Samples of a usual batch if a rank can have more or fewer of them, else 0."""
        return self.shares.sizable if self.shares is not None and not self.equal_batches else 0

    @property
    def microbatches(self) -> int:
        """Micro-batches per rank and step if other ranks can take them over, else 0."""
        return 0 if self.equal_batches else self._microbatches

    @property
    def fixed_part(self) -> float:
        """Part of a rank's time that does not depend on its samples, NaN if unknown."""
        return self.shares.fixed_part if self.shares is not None else self.microbatch_fixed_part

    @property
    def scale(self) -> Scale | None:
        """What converts times to those of usual batches; None while all batches are of the usual size."""
        return self.shares.scale if self.shares is not None and self.shares.changed else None

    def scale_of(self, rank: int, step: int) -> tuple[float, float] | None:
        """Return the same for one step of one rank, see `ShareControl.scale_of`."""
        return self.shares.scale_of(rank, step) if self.shares is not None and self.shares.changed else None
