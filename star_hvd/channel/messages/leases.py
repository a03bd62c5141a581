"""Messages about leases: which samples of an epoch a rank holds ahead of its work; see `scheduler.rules.leasing`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from star_hvd.channel.messages.base import Message, message_kind

__all__ = ["Lease", "LeaseAsk", "LeaseRecall", "LeaseReturn"]


@message_kind
@dataclass(frozen=True, slots=True)
class LeaseAsk(Message):
    """A rank that has begun so many samples of an epoch asks for more. Each is answered by one `Lease`."""

    kind: ClassVar[str] = "lease_ask"
    loader: int
    epoch: int
    samples: int
    batch: int
    drop_last: bool
    begun: int


@message_kind
@dataclass(frozen=True, slots=True)
class Lease(Message):
    """Answer to `LeaseAsk`: positions start to stop of the epoch's permutation are this rank's. Where they are equal
    there is nothing for now, or, if `over`, for the rest of the epoch."""

    kind: ClassVar[str] = "lease"
    loader: int
    epoch: int
    start: int
    stop: int
    over: bool


@message_kind
@dataclass(frozen=True, slots=True)
class LeaseRecall(Message):
    """Another rank would end sooner what this one has not begun: it is to be given back."""

    kind: ClassVar[str] = "lease_recall"
    loader: int
    epoch: int


@message_kind
@dataclass(frozen=True, slots=True)
class LeaseReturn(Message):
    """All that was leased to this rank beyond the samples it has begun is given back.

    Attributes:
        leaves: It takes no more.
        early: Its program left the loop before it had heard that the epoch is over; it waits for nobody.
    """

    kind: ClassVar[str] = "lease_return"
    loader: int
    epoch: int
    begun: int
    leaves: bool
    early: bool = False
