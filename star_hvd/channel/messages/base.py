"""Messages between agents and the coordinator: flat records, packed with msgpack and type-checked when decoded."""

from __future__ import annotations

import dataclasses
import operator
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

import msgpack

from scheduler.records import StepTimes
from star_hvd.errors import ChannelError

__all__ = [
    "MOST_TEXT",
    "CLOSE",
    "MAX_BYTES",
    "Abandon",
    "Arrive",
    "Away",
    "Bye",
    "CloseStep",
    "EpochEnd",
    "Finished",
    "GradientSizes",
    "Grant",
    "Heartbeat",
    "Hello",
    "ReportImmediately",
    "StepWaits",
    "Join",
    "Late",
    "Message",
    "OptimizerDropped",
    "OptimizerOver",
    "PlanMessage",
    "ModeUnsupported",
    "Register",
    "Send",
    "HeaderNote",
    "FindStateSource",
    "StateSource",
    "RequestBatch",
    "TransmissionNote",
    "Unregister",
    "decode",
    "encode",
    "kinds",
    "wire_fields",
]

MAX_BYTES = 1 << 20
MOST_TEXT = 500
"""Characters of a sentence in a message."""

_VERSION = 1
_MOST = 1 << 53  # Bound of integers, so that they are exact as floats too.


@dataclass(frozen=True, slots=True)
class Message:
    """Base of all messages; fields are int, float, bool, str, a list of ints or strs, a mapping or `StepTimes`.

    A record (`StepTimes`) inside a message is sent as its fields, in order, at its position among the other fields.
    """

    kind: ClassVar[str] = ""


class Send(Protocol):
    """Sends a control message; one that is not urgent may be held back and sent with others."""

    def __call__(self, message: Message, *, urgent: bool = True) -> None: ...


_KINDS: dict[str, type[Message]] = {}
_FIELDS: dict[str, tuple[tuple[str, str], ...]] = {}  # Per kind: names and types of the values sent.
_RECORDS: dict[str, type] = {"StepTimes": StepTimes}
_RECORD_AT: dict[str, tuple[slice, type]] = {}  # Kinds with a record: position of its fields, its class.
_ITEMS: dict[str, type] = {"list[int]": int, "list[str]": str}
_PLAIN: dict[str, type] = {
    "float": float, "bool": bool, "str": str, "int": int, "dict[str, Any]": dict, **dict.fromkeys(_ITEMS, list)
}
_TYPES: dict[str, tuple[type, ...]] = {}  # Per kind: the types of its fields.
_WHOLE: dict[str, tuple[int, ...]] = {}  # Per kind: positions of the integer fields.
_LISTS: dict[str, tuple[tuple[int, type], ...]] = {}  # Per kind: positions of the lists, and their items' types.
_GETTERS: dict[str, Callable[[Any], tuple[Any, ...]]] = {}  # Per kind: reads the values to send.
M = TypeVar("M", bound=type[Message])


def message_kind(cls: M) -> M:
    """Class decorator: register a message for `decode`."""
    _KINDS[cls.kind] = cls
    _FIELDS[cls.kind] = items = tuple(_flattened(cls))
    _TYPES[cls.kind] = tuple(_PLAIN[wanted] for _, wanted in items)
    _WHOLE[cls.kind] = tuple(at for at, (_, wanted) in enumerate(items) if wanted == "int")
    _LISTS[cls.kind] = tuple((at, _ITEMS[wanted]) for at, (_, wanted) in enumerate(items) if wanted in _ITEMS)
    names = [name for name, _ in items]
    _GETTERS[cls.kind] = operator.attrgetter("kind", *names) if names else lambda message: (message.kind,)
    return cls


def _flattened(cls: type[Message]) -> list[tuple[str, str]]:
    """Return names and types of the values sent for a message; a record's fields are `its_name.field`."""
    found: list[tuple[str, str]] = []
    for item in dataclasses.fields(cls):
        record = _RECORDS.get(str(item.type))
        if record is None:
            found.append((item.name, str(item.type)))
            continue
        parts = [(f"{item.name}.{part.name}", str(part.type)) for part in dataclasses.fields(record)]
        _RECORD_AT[cls.kind] = slice(len(found), len(found) + len(parts)), record
        found += parts
    return found


def kinds() -> dict[str, type[Message]]:
    """Return all messages that `decode` knows, by kind."""
    return dict(_KINDS)


def wire_fields(kind: str) -> tuple[tuple[str, str], ...]:
    """Return names and types of the values sent for a kind of message, in order; `times.compute_s` is in a record."""
    return _FIELDS[kind]


@message_kind
@dataclass(frozen=True, slots=True)
class Hello(Message):
    """An agent has connected."""

    kind: ClassVar[str] = "hello"
    rank: int


@message_kind
@dataclass(frozen=True, slots=True)
class Heartbeat(Message):
    """Heartbeat, in both directions."""

    kind: ClassVar[str] = "beat"
    rank: int


@message_kind
@dataclass(frozen=True, slots=True)
class Register(Message):
    """A rank has created an optimizer. `initial` is its first plan, `plan` the one the user requests, empty for `auto`.
    `exact` restricts `auto` to the exact modes. `edge_part` is the fraction of the gradient's bytes in the bucket that
    is filled last and needed first, 1 if all buckets are sent together. `pushed_part` is the fraction of its bytes
    that a push to one rank has in the smallest allowed form."""

    kind: ClassVar[str] = "register"
    optimizer_id: int
    initial: dict[str, Any]
    plan: dict[str, Any]
    gradient_bytes: int = 0
    exact: bool = False
    edge_part: float = 1.0
    pushed_part: float = 1.0


@message_kind
@dataclass(frozen=True, slots=True)
class GradientSizes(Message):
    """Parameters were added to an optimizer, on all ranks; from `step` on gradients have these sizes, as in
    `register`."""

    kind: ClassVar[str] = "gradient_sizes"
    optimizer_id: int
    step: int
    gradient_bytes: int
    edge_part: float
    pushed_part: float


@message_kind
@dataclass(frozen=True, slots=True)
class TransmissionNote(Message):
    """A rank other than rank 0 has decided how it sends something, see `scheduler.transmission.decision.Decision`; rank
    0 explains it."""

    kind: ClassVar[str] = "transmission"
    optimizer_id: int
    step: int
    what: str
    chosen: str
    gain: float
    text: str


@message_kind
@dataclass(frozen=True, slots=True)
class Unregister(Message):
    """An optimizer is not used any more, on all ranks."""

    kind: ClassVar[str] = "unregister"
    optimizer_id: int


@message_kind
@dataclass(frozen=True, slots=True)
class OptimizerDropped(Message):
    """A rank has dropped an optimizer; its helper contributes from now on.

    `step` is the first step the rank has not submitted completely, -1 if it does not reduce gradients in steps;
    `begun` tells whether it has submitted part of that step, `in_flight` whether the previous step is still in flight.
    """

    kind: ClassVar[str] = "dropped"
    optimizer_id: int
    step: int
    begun: bool
    in_flight: bool


@message_kind
@dataclass(frozen=True, slots=True)
class OptimizerOver(Message):
    """All ranks have dropped an optimizer, and no collective of it is in flight."""

    kind: ClassVar[str] = "over"
    optimizer_id: int


@message_kind
@dataclass(frozen=True, slots=True)
class Arrive(Message):
    """A rank's fresh gradient of step `step` is submitted; carries its times, and the wait in the step before."""

    kind: ClassVar[str] = "arrive"
    optimizer_id: int
    step: int
    plan_id: int
    times: StepTimes
    previous_wait_s: float


@message_kind
@dataclass(frozen=True, slots=True)
class Late(Message):
    """A rank's gradient, computed on the parameters of step `version`, missed that step."""

    kind: ClassVar[str] = "late"
    optimizer_id: int
    version: int
    plan_id: int
    times: StepTimes


@message_kind
@dataclass(frozen=True, slots=True)
class Join(Message):
    """A rank that was behind computes on the parameters of step `version` from now on."""

    kind: ClassVar[str] = "join"
    optimizer_id: int
    version: int


CLOSE = "close"
"""Reason of an `Away` that ends an optimizer."""


@message_kind
@dataclass(frozen=True, slots=True)
class Away(Message):
    """A rank becomes inactive (`away`) or active again: out of data, or in a collective of the user's program."""

    kind: ClassVar[str] = "away"
    away: bool
    out_of_data: bool
    reason: str


@message_kind
@dataclass(frozen=True, slots=True)
class ModeUnsupported(Message):
    """A rank cannot run the plan of this id, or relaxed modes at all.

    Attributes:
        equal_batches: Its batch sizes and its number of micro-batches must also equal those of the other ranks.
    """

    kind: ClassVar[str] = "refuse"
    optimizer_id: int
    plan_id: int
    reason: str
    equal_batches: bool = False


@message_kind
@dataclass(frozen=True, slots=True)
class Finished(Message):
    """A rank has finished its program and waits for the others."""

    kind: ClassVar[str] = "finished"
    rank: int


@message_kind
@dataclass(frozen=True, slots=True)
class HeaderNote(Message):
    """The statistics in a step's reduced header, from rank 0's engine. `sent_bytes` is the size of the gradients
    after compression, 0 in an averaging of parameters."""

    kind: ClassVar[str] = "round"
    optimizer_id: int
    step: int
    plan_id: int
    fresh: list[int]
    loss: float
    weight: float
    weight_sqr: float
    local_sqr: float
    local_count: int
    mean_sqr: float
    folds: float
    sent_bytes: int = 0


@message_kind
@dataclass(frozen=True, slots=True)
class RequestBatch(Message):
    """A rank requests its next batch from a loader's work queue.

    `number` counts the rank's requests, from 1: a repeated one gets the same answer. 0 is always new.
    """

    kind: ClassVar[str] = "take"
    loader: int
    epoch: int
    samples: int
    batch: int
    drop_last: bool
    number: int = 0


@message_kind
@dataclass(frozen=True, slots=True)
class Grant(Message):
    """Answer to `RequestBatch`: positions start to stop of the epoch's permutation; stop = start ends the epoch.

    `number` is that of the request.
    """

    kind: ClassVar[str] = "grant"
    loader: int
    epoch: int
    start: int
    stop: int
    number: int = 0


@message_kind
@dataclass(frozen=True, slots=True)
class EpochEnd(Message):
    """All ranks have ended an epoch of a loader.

    Attributes:
        together: Whether all ranks reached its end and meet there; False if one left its loop early.
    """

    kind: ClassVar[str] = "epoch_end"
    loader: int
    epoch: int
    together: bool = True


@message_kind
@dataclass(frozen=True, slots=True)
class ReportImmediately(Message):
    """Whether arrivals must be reported at once, because a rank is inactive and steps in `sync` may need closing."""

    kind: ClassVar[str] = "hurry"
    now: bool


@message_kind
@dataclass(frozen=True, slots=True)
class StepWaits(Message):
    """A step, or the end of the job (step -1), has been waiting for some ranks for `waited_s` seconds.

    They log where their training threads are.
    """

    kind: ClassVar[str] = "waits"
    optimizer_id: int
    step: int
    waited_s: float
    ranks: list[int]


@message_kind
@dataclass(frozen=True, slots=True)
class CloseStep(Message):
    """Order to close a step; a rank that is merely out of phase gets back into phase by `typical_compute_s`."""

    kind: ClassVar[str] = "close"
    optimizer_id: int
    step: int
    typical_compute_s: float


@message_kind
@dataclass(frozen=True, slots=True)
class PlanMessage(Message):
    """A plan to prepare. `active` is the id of the plan that was in force when it was published."""

    kind: ClassVar[str] = "plan"
    optimizer_id: int
    plan: dict[str, Any]
    active: int = -1


@message_kind
@dataclass(frozen=True, slots=True)
class Abandon(Message):
    """The plan of this id is abandoned."""

    kind: ClassVar[str] = "abandon"
    optimizer_id: int
    plan_id: int
    reason: str


@message_kind
@dataclass(frozen=True, slots=True)
class FindStateSource(Message):
    """A rank that is behind asks for a rank from which it can fetch the state."""

    kind: ClassVar[str] = "source"
    optimizer_id: int


@message_kind
@dataclass(frozen=True, slots=True)
class StateSource(Message):
    """Answer to `FindStateSource`: a rank that is up to date, -1 if there is none."""

    kind: ClassVar[str] = "source_reply"
    optimizer_id: int
    rank: int


@message_kind
@dataclass(frozen=True, slots=True)
class Bye(Message):
    """All ranks have finished and may exit."""

    kind: ClassVar[str] = "bye"


def encode(message: Message) -> bytes:
    """Return a message as bytes."""
    return bytes(msgpack.packb([_VERSION, *_GETTERS[message.kind](message)]))


def decode(data: bytes) -> Message:
    """The inverse of `encode`.

    Raises:
        ChannelError: Wrong size, version, kind, number of fields or type of a field.
    """
    if len(data) > MAX_BYTES:
        raise ChannelError(f"a control message has {len(data)} bytes; expected at most {MAX_BYTES}")
    try:
        parts = msgpack.unpackb(data, strict_map_key=True)
    except Exception as error:  # msgpack raises a family of unrelated types for damaged input.
        raise ChannelError(f"a control message cannot be unpacked: {type(error).__name__}") from error
    if not isinstance(parts, list) or len(parts) < 2 or parts[0] != _VERSION:
        raise ChannelError(f"a control message is {_short(parts)}; expected a list of protocol version {_VERSION}")
    cls = _KINDS.get(parts[1]) if isinstance(parts[1], str) else None
    if cls is None:
        raise ChannelError(f"a control message has the unknown kind {_short(parts[1])}; do all ranks run one version?")
    items = _FIELDS[cls.kind]
    if len(parts) - 2 != len(items):
        raise ChannelError(f"a {cls.kind} message has {len(parts) - 2} fields; expected {len(items)}")
    values = parts[2:]
    # Fast path: nearly all messages have exactly these types.
    if not (
        tuple(map(type, values)) == _TYPES[cls.kind]
        and all([-_MOST < values[at] < _MOST for at in _WHOLE[cls.kind]])
        and all([set(map(type, values[at])) <= {kind} for at, kind in _LISTS[cls.kind]])
    ):
        values = [_check(cls, name, wanted, value) for (name, wanted), value in zip(items, values, strict=True)]
    if (at := _RECORD_AT.get(cls.kind)) is not None:
        part, record = at
        values[part] = [record(*values[part])]
    return cls(*values)


def _check(cls: type[Message], name: str, wanted: str, value: Any) -> Any:
    if wanted == "float" and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    ok = {
        "int": isinstance(value, int) and not isinstance(value, bool) and abs(value) < _MOST,
        "float": isinstance(value, float),  # Norms of a diverging job may be infinite; the coordinator checks times.
        "bool": isinstance(value, bool),
        "str": isinstance(value, str),
        "list[int]": isinstance(value, list) and all(isinstance(v, int) and not isinstance(v, bool) for v in value),
        "list[str]": isinstance(value, list) and all(isinstance(v, str) for v in value),
        "dict[str, Any]": isinstance(value, dict),
    }[wanted]
    if not ok:
        raise ChannelError(f"field {name} of a {cls.kind} message is {_short(value)}; expected {wanted}")
    return value


def _short(value: Any) -> str:
    """Return a value for an error's text, bounded because a damaged message must not fill the log."""
    text = reprlib.repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
