"""Pushes to parameter servers under `Compression.auto`: uncompressed, or as int8 with error feedback.

Blocks of steps alternate between the two forms; int8 is kept only if it makes steps 3 % shorter (`OffSwitch`). Its
residual stays with the rank, as after a reduction (`BucketCodec`). The pushed buffer is overwritten with the values
that the servers decode, so that a push which is kept, for example because it comes too late for the mode, has these.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from scheduler.transmission.decision import SERVERS, Decision
from scheduler.transmission.off_switch import OffSwitch
from star_hvd.engine.buckets import Bucket

__all__ = ["Residuals", "ServerPushes"]

logger = logging.getLogger("star_hvd")

_NAME = "int8 for pushes to servers"


class Residuals(Protocol):
    """The part of `LossyWire` used here."""

    forbidden: str

    def shrink(self, bucket: Bucket, ranges: Sequence[tuple[int, int]], *, small: bool) -> list[bytes | None]: ...


class ServerPushes:
    """Chooses the form of one rank's pushes in one mode; used by the training thread.

    Args:
        residuals: Encodes, and keeps this rank's residuals.
        rank: This rank.
        switch: Chooses the form.
        clock: The time in seconds; only differences count.
        note: Called with every decision.
    """

    def __init__(
        self,
        residuals: Residuals,
        rank: int,
        switch: OffSwitch | None = None,
        clock: Callable[[], float] = time.monotonic,
        note: Callable[[Decision], None] = lambda decision: None,
    ) -> None:
        self.switch = switch or OffSwitch()
        self._residuals, self._rank, self._clock, self._note = residuals, rank, clock, note
        self._ended_s: float | None = None

    def shrink(self, bucket: Bucket, ranges: Sequence[tuple[int, int]]) -> list[bytes | None]:
        """Return the payload for each range of a complete bucket; None if the bucket's own elements are sent."""
        small = self.switch.on and not self._residuals.forbidden
        return self._residuals.shrink(bucket, ranges, small=small)

    def ended(self) -> None:
        """Note that a push has its result and the next step begins."""
        now_s = self._clock()
        if self._ended_s is not None and not self._residuals.forbidden and self.switch.note(now_s - self._ended_s):
            logger.info("rank %d: %s", self._rank, self.explain())
            self._note(self.switch.decision(SERVERS, _NAME, "int8", "whole"))
        self._ended_s = now_s

    def explain(self) -> str:
        """Describe what was measured."""
        return self.switch.describe(_NAME)
