"""Messages about micro-batches: which of a step's a rank has, and which it takes over; see
`scheduler.rules.microbatches`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from star_hvd.channel.messages.base import Message, message_kind

__all__ = [
    "MicrobatchBegin", "MicrobatchGrant", "MicrobatchOpen", "MicrobatchRecall", "MicrobatchReturn", "MicrobatchShares",
    "MicrobatchesClosed",
]  # fmt: skip


@message_kind
@dataclass(frozen=True, slots=True)
class MicrobatchOpen(Message):
    """A rank begins an epoch of a loader with micro-batches.

    Attributes:
        batch: Samples of a rank in a step.
        parts: Micro-batches of a rank in a step.
        ahead: Micro-batches that its workers load ahead.
        digest: Of the order of the samples, equal on all ranks.
        done: Starts and stops of spans that were consumed before the epoch was interrupted.
    """

    kind: ClassVar[str] = "microbatch_open"
    loader: int
    epoch: int
    samples: int
    batch: int
    parts: int
    drop_last: bool
    ahead: int
    digest: int
    done: list[int] = field(default_factory=list)


@message_kind
@dataclass(frozen=True, slots=True)
class MicrobatchBegin(Message):
    """A rank begins a micro-batch, or has none to work on.

    Attributes:
        task: Its number in the step, -1 for none.
        compute_s: Time that the micro-batch before it took this rank, 0 where there was none.
    """

    kind: ClassVar[str] = "microbatch_begin"
    loader: int
    epoch: int
    step: int
    task: int
    compute_s: float


@message_kind
@dataclass(frozen=True, slots=True)
class MicrobatchReturn(Message):
    """Answer to `MicrobatchRecall`: the micro-batch is given back, or was begun meanwhile."""

    kind: ClassVar[str] = "microbatch_return"
    loader: int
    epoch: int
    step: int
    task: int
    given: bool


@message_kind
@dataclass(frozen=True, slots=True)
class MicrobatchShares(Message):
    """The micro-batches with which every rank begins a step: rank 0 has the first ones, rank 1 those behind them."""

    kind: ClassVar[str] = "microbatch_shares"
    loader: int
    epoch: int
    step: int
    counts: list[int]


@message_kind
@dataclass(frozen=True, slots=True)
class MicrobatchRecall(Message):
    """Another rank would end this micro-batch sooner: it is to be given back, unless it is begun."""

    kind: ClassVar[str] = "microbatch_recall"
    loader: int
    epoch: int
    step: int
    task: int


@message_kind
@dataclass(frozen=True, slots=True)
class MicrobatchGrant(Message):
    """A micro-batch that another rank had is this rank's now."""

    kind: ClassVar[str] = "microbatch_grant"
    loader: int
    epoch: int
    step: int
    task: int


@message_kind
@dataclass(frozen=True, slots=True)
class MicrobatchesClosed(Message):
    """All micro-batches of a step, and of those before it, are begun: its reduction follows."""

    kind: ClassVar[str] = "microbatches_closed"
    loader: int
    epoch: int
    step: int
