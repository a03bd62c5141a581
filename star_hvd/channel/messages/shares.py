"""Messages about batch shares: all ranks change the sizes of their batches at the same step.

The coordinator proposes; every rank answers with the first step of which it has not formed a batch, and forms none of
that step or later until the order comes; the order takes effect at the latest of those steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from star_hvd.channel.messages.base import Message, message_kind

__all__ = ["EPOCH_START", "MemoryLimit", "ShareOrder", "ShareProposal", "ShareReady"]

EPOCH_START = -1
"""In place of a step: the first one of an epoch that no rank has begun."""


@message_kind
@dataclass(frozen=True, slots=True)
class ShareProposal(Message):
    """Other batch sizes are wanted for a loader: samples of every rank in a step, empty for equal batches."""

    kind: ClassVar[str] = "share_proposal"
    loader: int
    number: int
    shares: list[int]


@message_kind
@dataclass(frozen=True, slots=True)
class ShareReady(Message):
    """Answer to `ShareProposal`: from where on this rank can have other sizes; until the order it forms nothing there.

    Attributes:
        epoch: Of the loader.
        step: The first step of which it has formed nothing, `EPOCH_START` for the beginning of the epoch.
        batches: Batches of this rank in a step.
        taken: Samples of the epoch in its batches before that step.
        ahead: Pairs of a number of batches after that and the size from there on, as they are planned; the first is 0.
        most: The most samples it can have in a batch, 0 where it knows no limit.
    """

    kind: ClassVar[str] = "share_ready"
    loader: int
    number: int
    epoch: int
    step: int
    batches: int
    taken: int
    ahead: list[int]
    most: int


@message_kind
@dataclass(frozen=True, slots=True)
class ShareOrder(Message):
    """Batch sizes from a step on.

    Attributes:
        accepted: Whether the proposal takes effect; else sizes stay as they are, and nothing below means anything.
        shares: Samples of every rank, empty for equal batches.
        epoch: Where it begins.
        step: Likewise, `EPOCH_START` for the beginning of the epoch.
        remaining: Samples of that epoch from there on; its last step divides what is then left in the same proportion.
    """

    kind: ClassVar[str] = "share_order"
    loader: int
    number: int
    accepted: bool
    shares: list[int]
    epoch: int
    step: int
    remaining: int


@message_kind
@dataclass(frozen=True, slots=True)
class MemoryLimit(Message):
    """A rank ran out of memory, and can have at most so many samples in a batch of a loader from here on."""

    kind: ClassVar[str] = "memory_limit"
    loader: int
    most: int
