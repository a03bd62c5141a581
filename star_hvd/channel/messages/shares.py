"""Messages about batch shares: all ranks change the sizes of their batches at the same step.

The coordinator proposes sizes. Every rank answers with the first step from which it forms no batch until the order
arrives: one for which it has formed none yet. The order takes effect at the latest of those steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from star_hvd.channel.messages.base import Message, message_kind

__all__ = ["EPOCH_START", "Feeds", "MemoryLimit", "ShareOrder", "ShareProposal", "ShareReady"]

EPOCH_START = -1
"""In place of a step: the first one of an epoch that no rank has begun."""


@message_kind
@dataclass(frozen=True, slots=True)
class ShareProposal(Message):
    """Proposal of batch sizes for a loader: samples per step of every rank, empty for equal batches."""

    kind: ClassVar[str] = "share_proposal"
    loader: int
    number: int
    shares: list[int]


@message_kind
@dataclass(frozen=True, slots=True)
class ShareReady(Message):
    """Answer to `ShareProposal`: from where this rank can change sizes; it forms no batch there until the order.

    Attributes:
        epoch: Epoch of the loader.
        step: First step for which it forms no batch, `EPOCH_START` for the beginning of the epoch.
        batches: Batches of this rank per step.
        taken: Samples of the epoch in its batches before that step.
        ahead: Planned sizes, as pairs: number of batches after that step, and batch size from there; the first is at 0.
        most: Most samples it can have in a batch, 0 if it knows no limit.
        least: Fewest samples it should have.
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
    least: int = 1


@message_kind
@dataclass(frozen=True, slots=True)
class ShareOrder(Message):
    """Batch sizes from a step on.

    Attributes:
        accepted: Whether the proposal takes effect; otherwise sizes stay unchanged and the fields below mean nothing.
        shares: Samples of every rank, empty for equal batches.
        epoch: Epoch in which it takes effect.
        step: Step from which it takes effect, `EPOCH_START` for the beginning of the epoch.
        remaining: Samples of that epoch from that step on.
        whole: How the last step of an epoch is divided, see `LastStep`.
        least: The same.
    """

    kind: ClassVar[str] = "share_order"
    loader: int
    number: int
    accepted: bool
    shares: list[int]
    epoch: int
    step: int
    remaining: int
    whole: bool = False
    least: int = 1


@message_kind
@dataclass(frozen=True, slots=True)
class MemoryLimit(Message):
    """A rank ran out of memory: from now on it can have at most `most` samples in a batch of a loader."""

    kind: ClassVar[str] = "memory_limit"
    loader: int
    most: int


@message_kind
@dataclass(frozen=True, slots=True)
class Feeds(Message):
    """Rank 0: gradients follow the batches of this loader, so batch shares are for it.

    Attributes:
        loader: Its number, -1 if they follow no loader's.
        step: Step of the first of these gradients.
        mixed: Whether they are of another loader's batches too, so that all shares have to be equal.
    """

    kind: ClassVar[str] = "feeds"
    loader: int
    step: int
    mixed: bool = False
