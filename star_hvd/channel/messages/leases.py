"""Messages about leases: which samples of an epoch a rank holds ahead of its work; see `scheduler.rules.leasing`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from star_hvd.channel.messages.base import Message, message_kind

__all__ = ["Consumed", "ConsumedRequest", "Lease", "LeaseAsk", "LeaseRecall", "LeaseReturn", "ReportConsumed"]


@message_kind
@dataclass(frozen=True, slots=True)
class LeaseAsk(Message):
    """A rank that has begun so many samples of an epoch asks for more. Each is answered by one `Lease`.

    Attributes:
        ahead: Batches that its workers load ahead.
        load_s: Seconds until a batch would be loaded if none were on its way, as far as it is known.
        digest: Of the order of the samples, equal on all ranks; 0 where it is not known yet.
        done: Starts and stops of spans that were consumed before the epoch was interrupted; in the first message.
        undelivered: Samples that count as begun and are still on their way, where batches overtake each other.
        fixed: The loader's batches keep their size: it takes no part in batch shares.
        idle: Its training thread has nothing to work on.
        even: Every rank needs as many batches as the others, since Horovod's own reductions wait for all ranks.
        again: It repeats, with news, a request that may not have been answered; if it was, there is no second answer.
    """

    kind: ClassVar[str] = "lease_ask"
    loader: int
    epoch: int
    samples: int
    batch: int
    drop_last: bool
    begun: int
    ahead: int = 0
    load_s: float = 0.0
    digest: int = 0
    done: list[int] = field(default_factory=list)
    undelivered: int = 0
    fixed: bool = False
    idle: bool = False
    again: bool = False
    even: bool = False


@message_kind
@dataclass(frozen=True, slots=True)
class Lease(Message):
    """Answer to `LeaseAsk`: positions start to stop of the epoch's permutation are this rank's. Where they are equal
    there is nothing for now, or, if `over`, for the rest of the epoch.

    Attributes:
        refused: Why this rank gets nothing in this epoch, empty as a rule.
    """

    kind: ClassVar[str] = "lease"
    loader: int
    epoch: int
    start: int
    stop: int
    over: bool
    refused: str = ""


@message_kind
@dataclass(frozen=True, slots=True)
class LeaseRecall(Message):
    """Another rank would end sooner what this one has not begun: it is to be given back, but for the first `keep`
    samples."""

    kind: ClassVar[str] = "lease_recall"
    loader: int
    epoch: int
    keep: int = 0


@message_kind
@dataclass(frozen=True, slots=True)
class LeaseReturn(Message):
    """All that was leased to this rank beyond the samples it has begun, and `kept` more, is given back.

    Attributes:
        kept: Samples behind those it has begun that it still holds.
        undone: Starts and stops of spans that count as begun and were never delivered.
        leaves: It takes no more.
        early: Its program left the loop before it had heard that the epoch is over; it does not wait for the others.
        unasked: It was not recalled: the rank has had its share of the epoch.
        undelivered: Samples that count as begun and are still on their way, where batches overtake each other.
    """

    kind: ClassVar[str] = "lease_return"
    loader: int
    epoch: int
    begun: int
    leaves: bool
    early: bool = False
    kept: int = 0
    undone: list[int] = field(default_factory=list)
    unasked: bool = False
    undelivered: int = 0


@message_kind
@dataclass(frozen=True, slots=True)
class ConsumedRequest(Message):
    """A rank wants to know which samples of an epoch all ranks have consumed in the steps up to `step`.

    Attributes:
        step: Steps its parameters have had; -1 where there is no optimizer: all that was delivered counts.
        number: The rank's own count of its requests.
    """

    kind: ClassVar[str] = "consumed_request"
    loader: int
    epoch: int
    step: int
    number: int


@message_kind
@dataclass(frozen=True, slots=True)
class ReportConsumed(Message):
    """Every rank is to say what it has consumed; see `ConsumedRequest`."""

    kind: ClassVar[str] = "report_consumed"
    loader: int
    epoch: int
    step: int


@message_kind
@dataclass(frozen=True, slots=True)
class Consumed(Message):
    """Starts and stops of the spans consumed: by one rank, answer to `ReportConsumed`, or, on the way down, by all,
    answer to `ConsumedRequest`."""

    kind: ClassVar[str] = "consumed"
    loader: int
    epoch: int
    step: int
    spans: list[int]
    number: int = 0
