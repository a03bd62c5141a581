"""Messages about micro-batches: which tasks of a step a rank has, and which it takes over; see
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
        most: Samples of a pass, at most; 0 for `batch`.
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
    most: int = 0


@message_kind
@dataclass(frozen=True, slots=True)
class MicrobatchBegin(Message):
    """A rank begins a pass over some tasks, or has none to work on.

    Attributes:
        task: The first one's number in the step, -1 for none.
        compute_s: Time that the pass before it took this rank, 0 where there was none.
        tasks: How many.
        given: Starts and stops of runs of tasks that it has not begun and gives back, because it has become slow.
    """

    kind: ClassVar[str] = "microbatch_begin"
    loader: int
    epoch: int
    step: int
    task: int
    compute_s: float
    tasks: int = 1
    given: list[int] = field(default_factory=list)


@message_kind
@dataclass(frozen=True, slots=True)
class MicrobatchReturn(Message):
    """Answer to `MicrobatchRecall`: the last of the tasks are given back, or all were begun meanwhile.

    Attributes:
        task: The first one that was wanted.
        tasks: How many are given back.
    """

    kind: ClassVar[str] = "microbatch_return"
    loader: int
    epoch: int
    step: int
    task: int
    given: bool
    tasks: int = 1


@message_kind
@dataclass(frozen=True, slots=True)
class MicrobatchShares(Message):
    """The tasks with which every rank begins a step: rank 0 has the first ones, rank 1 those behind them.

    Attributes:
        counts: Tasks of every rank.
        sizes: Tasks of each pass of this rank; together less than its own where others have begun the last ones.
        fixed: Time of a pass whatever its size, over that of a task.
        first_s: Expected time of this rank's first pass, 0 where it is not known.
    """

    kind: ClassVar[str] = "microbatch_shares"
    loader: int
    epoch: int
    step: int
    counts: list[int]
    sizes: list[int] = field(default_factory=list)
    fixed: float = 0.0
    first_s: float = 0.0


@message_kind
@dataclass(frozen=True, slots=True)
class MicrobatchRecall(Message):
    """Another rank would end these tasks sooner: they are to be given back, as far as they are not begun."""

    kind: ClassVar[str] = "microbatch_recall"
    loader: int
    epoch: int
    step: int
    task: int
    tasks: int = 1


@message_kind
@dataclass(frozen=True, slots=True)
class MicrobatchGrant(Message):
    """Tasks that another rank had are this rank's now."""

    kind: ClassVar[str] = "microbatch_grant"
    loader: int
    epoch: int
    step: int
    task: int
    tasks: int = 1


@message_kind
@dataclass(frozen=True, slots=True)
class MicrobatchesClosed(Message):
    """All tasks of a step, and of those before it, are begun: its reduction follows."""

    kind: ClassVar[str] = "microbatches_closed"
    loader: int
    epoch: int
    step: int
