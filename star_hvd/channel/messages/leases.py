"""Messages about leases, the samples of an epoch that a rank holds ahead of its work; see `scheduler.rules.leasing`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

from scheduler.rules.runs import Run, Span
from star_hvd.channel.messages.base import Message, message_kind
from star_hvd.errors import ChannelError

__all__ = [
    "Consumed", "ConsumedRequest", "Lease", "LeaseAsk", "LeaseRecall", "LeaseReturn", "LoaderClosed", "ReportConsumed",
    "flat", "runs_of", "spans_of",
]  # fmt: skip


@message_kind
@dataclass(frozen=True, slots=True)
class LeaseAsk(Message):
    """A rank asks for more samples of an epoch, of which it has begun `begun`. Each request gets one `Lease`.

    Attributes:
        ahead: Batches that its workers load ahead.
        load_s: Seconds to load a batch if none is being loaded yet, as far as known.
        digest: Digest of the order of the samples, equal on all ranks; 0 while unknown.
        done: Starts and stops of spans consumed before the epoch was interrupted; in the first message only.
        undelivered: Samples that count as begun but are not delivered yet, if batches may overtake each other.
        fixed: The loader's batch size is fixed: it takes no part in batch shares.
        idle: Its training thread has nothing to work on.
        even: Every rank needs the same number of batches, since Horovod's own reductions wait for all ranks.
        least: Fewest samples that a rank should have in a batch.
        again: Repeats, with new values, a request that may be unanswered; if it was answered, it gets no second answer.
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
    least: int = 1


@message_kind
@dataclass(frozen=True, slots=True)
class Lease(Message):
    """Positions of the epoch's permutation that are this rank's: the answer to `LeaseAsk`, or what it is dealt in rows.

    Attributes:
        runs: The positions, as start, size, stride and pieces of each run (`scheduler.rules.runs`); empty if there is
            nothing now or, if `over`, in the rest of the epoch.
        refused: Why this rank gets nothing in this epoch, normally empty.
        behind: The rank keeps this many of all positions that it was given in this epoch, and gets these in place of
            all behind; -1 in the answer to a request, whose positions come behind all others.
        even: The epoch is dealt in rows of which every rank has a part: all ranks get equally many batches.
    """

    kind: ClassVar[str] = "lease"
    loader: int
    epoch: int
    runs: list[int]
    over: bool = False
    refused: str = ""
    behind: int = -1
    even: bool = False


@message_kind
@dataclass(frozen=True, slots=True)
class LeaseRecall(Message):
    """Order to give back the samples not begun, except the first `keep`: another rank would finish them sooner."""

    kind: ClassVar[str] = "lease_recall"
    loader: int
    epoch: int
    keep: int = 0


@message_kind
@dataclass(frozen=True, slots=True)
class LeaseReturn(Message):
    """A rank gives back all its leased samples except those it has begun and the next `kept`.

    Attributes:
        kept: Samples after those it has begun that it still holds.
        undone: Starts and stops of spans that count as begun but were never delivered.
        leaves: The rank takes no more samples.
        early: Its program left the loop before it heard that the epoch is over; it does not wait for the other ranks.
        undelivered: Samples that count as begun but are not delivered yet, if batches may overtake each other.
        meets: Its training thread waits for the other ranks at the end of the epoch, unless the rank leaves `early`.
    """

    kind: ClassVar[str] = "lease_return"
    loader: int
    epoch: int
    begun: int
    leaves: bool
    early: bool = False
    kept: int = 0
    undone: list[int] = field(default_factory=list)
    undelivered: int = 0
    meets: bool = True


@message_kind
@dataclass(frozen=True, slots=True)
class LoaderClosed(Message):
    """A rank sends nothing more of a loader: its program has no reference to it any more."""

    kind: ClassVar[str] = "loader_closed"
    loader: int


@message_kind
@dataclass(frozen=True, slots=True)
class ConsumedRequest(Message):
    """A rank asks which samples of an epoch all ranks have consumed in the steps up to `step`.

    Attributes:
        step: Number of steps in its parameters; -1 without an optimizer: then everything delivered counts.
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
    """Order to every rank to report what it has consumed; see `ConsumedRequest`."""

    kind: ClassVar[str] = "report_consumed"
    loader: int
    epoch: int
    step: int


@message_kind
@dataclass(frozen=True, slots=True)
class Consumed(Message):
    """Consumed positions, in runs as in `Lease`: one rank's, its answer to `ReportConsumed`, or all ranks', the
    coordinator's answer to `ConsumedRequest`."""

    kind: ClassVar[str] = "consumed"
    loader: int
    epoch: int
    step: int
    runs: list[int]
    number: int = 0


def flat(rows: Iterable[Span | Run]) -> list[int]:
    """Return the numbers of spans or runs in one list, as in messages."""
    return [number for row in rows for number in row]


def spans_of(bounds: list[int]) -> list[Span]:
    """Return the spans of a list from `flat`.

    Raises:
        ChannelError: The list is not pairs of a start and a later stop.
    """
    spans = list(zip(bounds[::2], bounds[1::2], strict=False))
    if len(bounds) % 2 or any(not 0 <= start < stop for start, stop in spans):
        raise ChannelError(f"{len(bounds)} bounds of spans of samples are no pairs of a start and a later stop")
    return spans


def runs_of(numbers: list[int]) -> list[Run]:
    """Return the runs of a list from `flat`.

    Raises:
        ChannelError: The list is not four numbers for each run.
    """
    runs = [Run(*numbers[at : at + 4]) for at in range(0, len(numbers) - 3, 4)]
    if len(numbers) % 4 or any(run.start < 0 or not 1 <= run.size <= run.stride or run.pieces < 1 for run in runs):
        raise ChannelError(f"{len(numbers)} numbers of samples are no runs of pieces at equal distances")
    return runs
