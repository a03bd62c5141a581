"""Messages about micro-batches: which tasks of a step a rank has and which it takes over; see
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
        batch: Samples per rank and step.
        parts: Micro-batches per rank and step.
        ahead: Micro-batches that its workers load ahead.
        digest: Digest of the order of the samples, equal on all ranks.
        done: Starts and stops of spans consumed before the epoch was interrupted.
        most: Most samples in a pass; 0 for `batch`.
        trains: Whether the passes compute gradients.
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
    trains: bool = True


@message_kind
@dataclass(frozen=True, slots=True)
class MicrobatchBegin(Message):
    """A rank starts a pass over some tasks, or has none to work on.

    Attributes:
        task: Number in the step of the first task, -1 for none.
        compute_s: Time of this rank's previous pass, 0 if there was none.
        tasks: Number of tasks.
        given: Starts and stops of runs of tasks that it has not started and gives back, because it has become slow.
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
    """Answer to `MicrobatchRecall`: the rank gives the last of the tasks back, or has started all of them meanwhile.

    Attributes:
        task: The first task that was recalled.
        tasks: Number of tasks given back.
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
    """The tasks with which every rank starts a step: rank 0 has the first ones, rank 1 the next, and so on.

    Attributes:
        counts: Number of tasks per rank.
        sizes: Tasks in each pass of this rank; fewer in total than its tasks if others have started the last ones.
        fixed: Time of a pass independent of its size, relative to the time of a task.
        first_s: Expected time of this rank's first pass, 0 if unknown.
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
    """Order to give back those of these tasks that are not started: another rank would finish them sooner."""

    kind: ClassVar[str] = "microbatch_recall"
    loader: int
    epoch: int
    step: int
    task: int
    tasks: int = 1


@message_kind
@dataclass(frozen=True, slots=True)
class MicrobatchGrant(Message):
    """Another rank's tasks are this rank's now."""

    kind: ClassVar[str] = "microbatch_grant"
    loader: int
    epoch: int
    step: int
    task: int
    tasks: int = 1


@message_kind
@dataclass(frozen=True, slots=True)
class MicrobatchesClosed(Message):
    """All tasks of a step and of earlier steps have been started: the step's reduction follows."""

    kind: ClassVar[str] = "microbatches_closed"
    loader: int
    epoch: int
    step: int
