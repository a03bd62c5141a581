"""Messages about ranks that wait for each other for ever: one in a collective of the program, another in a loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from star_hvd.channel.messages.base import Message, message_kind

__all__ = ["Deadlock", "ProgramWait"]


@message_kind
@dataclass(frozen=True, slots=True)
class ProgramWait(Message):
    """The program waits for other ranks: in a collective of all ranks, or in a loop over `shard` that has no batch.

    Attributes:
        calls: Collectives of all ranks that the program has called since the last `join`, this one included.
        joins: How often all ranks have left `join`.
        operation: The collective; empty in a loop, and once the collective has ended or raised an error.
        loader: The loader of the loop, else -1.
        epoch: Its epoch, else -1.
    """

    kind: ClassVar[str] = "program_wait"
    calls: int
    joins: int = 0
    operation: str = ""
    loader: int = -1
    epoch: int = -1


@message_kind
@dataclass(frozen=True, slots=True)
class Deadlock(Message):
    """The rank waits in a loop over `shard` for ranks that wait for it in a collective; it ends with an error."""

    kind: ClassVar[str] = "deadlock"
    reason: str
