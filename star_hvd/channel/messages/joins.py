"""Messages about `join`: ranks without data, and the other ranks' collectives, to which they add zeros."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from star_hvd.channel.messages.base import Message, message_kind

__all__ = ["JoinCalled", "JoinedRanks", "ProgramCollective"]


@message_kind
@dataclass(frozen=True, slots=True)
class JoinCalled(Message):
    """A rank has called `join`, and waits until all have."""

    kind: ClassVar[str] = "join_called"


@message_kind
@dataclass(frozen=True, slots=True)
class JoinedRanks(Message):
    """The ranks that have called `join`, the last one last; once these are all ranks, `join` ends everywhere."""

    kind: ClassVar[str] = "joined_ranks"
    ranks: list[int]


@message_kind
@dataclass(frozen=True, slots=True)
class ProgramCollective(Message):
    """A collective that the program has begun on a rank while others are in `join`; passed on to those.

    Attributes:
        operation: Name of the function.
        name: Name of the operation, equal on all ranks.
        counter: What `number` counts; ranks count alike.
        number: Which of these operations it is: several ranks report the same one.
        meets: Whether the ranks meet at one step before it.
        shapes: For each tensor, its number of dimensions and their sizes.
        dtypes: For each tensor, the name of its type; empty if joined ranks cannot take part.
        device: Type of the tensors' device.
        op: Horovod's number of the reduction.
        prescale: Factor before the reduction.
        postscale: Factor after it.
    """

    kind: ClassVar[str] = "program_collective"
    operation: str
    name: str
    counter: str
    number: int
    meets: bool
    shapes: list[int]
    dtypes: list[str]
    device: str
    op: int
    prescale: float
    postscale: float
