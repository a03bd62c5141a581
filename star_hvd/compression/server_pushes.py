"""Pushes to parameter servers under `Compression.auto`: as they are, or as int8 with error feedback.

Blocks of steps with either form take turns; int8 is kept only where steps become 3 % shorter (`OffSwitch`). What it
does not carry stays with the rank, as after a reduction (`BucketCodec`). The buffer that is pushed becomes what the
servers make of it: a push that comes too late for the mode, for example, is kept as that.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from scheduler.transmission.off_switch import OffSwitch
from star_hvd.engine.buckets import Bucket

__all__ = ["Residuals", "ServerPushes"]

logger = logging.getLogger("star_hvd")


class Residuals(Protocol):
    """The part of `LossyWire` used here."""

    forbidden: str

    def shrink(self, bucket: Bucket, ranges: Sequence[tuple[int, int]], *, small: bool) -> list[bytes | None]: ...


class ServerPushes:
    """The form of one rank's pushes in one mode; used by the training thread.

    Args:
        residuals: What this rank has left to send.
        rank: This rank.
        switch: Chooses the form.
        clock: The time in seconds; only differences count.
    """

    def __init__(
        self,
        residuals: Residuals,
        rank: int,
        switch: OffSwitch | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.switch = switch or OffSwitch()
        self._residuals, self._rank, self._clock = residuals, rank, clock
        self._ended_s: float | None = None

    def shrink(self, bucket: Bucket, ranges: Sequence[tuple[int, int]]) -> list[bytes | None]:
        """What is sent for the ranges of a bucket that is whole; None where it is the bucket's own elements."""
        small = self.switch.on and not self._residuals.forbidden
        return self._residuals.shrink(bucket, ranges, small=small)

    def ended(self) -> None:
        """A push has its result, and the next step begins."""
        now_s = self._clock()
        if self._ended_s is not None and not self._residuals.forbidden and self.switch.note(now_s - self._ended_s):
            logger.info("rank %d: %s", self._rank, self.explain())
        self._ended_s = now_s

    def explain(self) -> str:
        """What was measured."""
        return self.switch.describe("int8 for pushes to servers")
