"""What agents and the coordinator say to each other: flat records, packed with msgpack, checked when they arrive."""

from __future__ import annotations

import dataclasses
import operator
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import msgpack

from star_hvd.errors import ChannelError

__all__ = [
    "CLOSE",
    "MAX_BYTES",
    "Abandon",
    "Arrive",
    "Away",
    "Bye",
    "CloseStep",
    "EpochEnd",
    "Finished",
    "Grant",
    "Heartbeat",
    "Hello",
    "ReportImmediately",
    "Join",
    "Late",
    "Message",
    "OptimizerDropped",
    "OptimizerOver",
    "PlanMessage",
    "ModeUnsupported",
    "Register",
    "HeaderNote",
    "FindStateSource",
    "StateSource",
    "RequestBatch",
    "Unregister",
    "decode",
    "encode",
]

MAX_BYTES = 1 << 20
_VERSION = 1
_MOST = 1 << 53  # Of integers, which others may keep as floats.


@dataclass(frozen=True, slots=True)
class Message:
    """Base of all messages; fields are int, float, bool, str, a list of ints or a mapping."""

    kind: ClassVar[str] = ""


_KINDS: dict[str, type[Message]] = {}
_FIELDS: dict[str, tuple[tuple[str, str], ...]] = {}  # Of every kind: names and types.
_ITEMS: dict[str, type] = {"list[int]": int, "list[str]": str}
_PLAIN: dict[str, type] = {
    "float": float, "bool": bool, "str": str, "int": int, "dict[str, Any]": dict, **dict.fromkeys(_ITEMS, list)
}
_TYPES: dict[str, tuple[type, ...]] = {}  # Of every kind: the types of its fields.
_WHOLE: dict[str, tuple[int, ...]] = {}  # Of every kind: which fields are whole numbers.
_LISTS: dict[str, tuple[tuple[int, type], ...]] = {}  # Of every kind: which fields are lists, and of what.
_GETTERS: dict[str, Callable[[Any], tuple[Any, ...]]] = {}  # Of every kind: what is sent of a message.
M = TypeVar("M", bound=type[Message])


def message_kind(cls: M) -> M:
    """Make a record known to `decode`."""
    _KINDS[cls.kind] = cls
    _FIELDS[cls.kind] = items = tuple((item.name, str(item.type)) for item in dataclasses.fields(cls))
    _TYPES[cls.kind] = tuple(_PLAIN[wanted] for _, wanted in items)
    _WHOLE[cls.kind] = tuple(at for at, (_, wanted) in enumerate(items) if wanted == "int")
    _LISTS[cls.kind] = tuple((at, _ITEMS[wanted]) for at, (_, wanted) in enumerate(items) if wanted in _ITEMS)
    names = [name for name, _ in items]
    _GETTERS[cls.kind] = operator.attrgetter("kind", *names) if names else lambda message: (message.kind,)
    return cls


@message_kind
@dataclass(frozen=True, slots=True)
class Hello(Message):
    """An agent introduces itself."""

    kind: ClassVar[str] = "hello"
    rank: int


@message_kind
@dataclass(frozen=True, slots=True)
class Heartbeat(Message):
    """Sign of life in both directions."""

    kind: ClassVar[str] = "beat"
    rank: int


@message_kind
@dataclass(frozen=True, slots=True)
class Register(Message):
    """A rank has made an optimizer. `initial` is its first plan, `plan` what the user asked for, empty for `auto`.
    `exact` says that `auto` is to choose among the exact modes only."""

    kind: ClassVar[str] = "register"
    optimizer_id: int
    initial: dict[str, Any]
    plan: dict[str, Any]
    gradient_bytes: int = 0
    exact: bool = False


@message_kind
@dataclass(frozen=True, slots=True)
class Unregister(Message):
    """An optimizer is not used any more, on all ranks."""

    kind: ClassVar[str] = "unregister"
    optimizer_id: int


@message_kind
@dataclass(frozen=True, slots=True)
class OptimizerDropped(Message):
    """A rank has no use for an optimizer any more, and its helper contributes for it.

    `step` is the first step the rank has not wholly submitted, -1 where it does not reduce its gradients in steps;
    `begun` says whether it has submitted a part of that step, `in_flight` whether the one before has yet to end.
    """

    kind: ClassVar[str] = "dropped"
    optimizer_id: int
    step: int
    begun: bool
    in_flight: bool


@message_kind
@dataclass(frozen=True, slots=True)
class OptimizerOver(Message):
    """All ranks have dropped an optimizer, and nothing of it is under way."""

    kind: ClassVar[str] = "over"
    optimizer_id: int


@message_kind
@dataclass(frozen=True, slots=True)
class Arrive(Message):
    """A rank's fresh gradient of step `step` is submitted; carries the measurements around the one before."""

    kind: ClassVar[str] = "arrive"
    optimizer_id: int
    step: int
    plan_id: int
    compute_s: float
    input_s: float
    cpu_s: float
    runqueue_s: float
    previous_wait_s: float


@message_kind
@dataclass(frozen=True, slots=True)
class Late(Message):
    """A rank's gradient, computed on the parameters of step `version`, missed that step."""

    kind: ClassVar[str] = "late"
    optimizer_id: int
    version: int
    plan_id: int
    compute_s: float
    input_s: float
    cpu_s: float
    runqueue_s: float


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
    """A rank enters (`away`) or leaves a place where it delivers no gradients: out of data, or in a collective."""

    kind: ClassVar[str] = "away"
    away: bool
    out_of_data: bool
    reason: str


@message_kind
@dataclass(frozen=True, slots=True)
class ModeUnsupported(Message):
    """A rank cannot prepare the plan of this id, or cannot go on with it."""

    kind: ClassVar[str] = "refuse"
    optimizer_id: int
    plan_id: int
    reason: str


@message_kind
@dataclass(frozen=True, slots=True)
class Finished(Message):
    """A rank has ended its program and waits for the others."""

    kind: ClassVar[str] = "finished"
    rank: int


@message_kind
@dataclass(frozen=True, slots=True)
class HeaderNote(Message):
    """Rank 0's own engine tells the coordinator what a step's header said."""

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


@message_kind
@dataclass(frozen=True, slots=True)
class RequestBatch(Message):
    """A rank asks the work queue of a loader for its next batch.

    `number` is the rank's own count of its requests, from 1: a repeated one gets the same answer. 0 is always new.
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
        together: All came to its end, and meet now. False where one left its loop before; it may be anywhere.
    """

    kind: ClassVar[str] = "epoch_end"
    loader: int
    epoch: int
    together: bool = True


@message_kind
@dataclass(frozen=True, slots=True)
class ReportImmediately(Message):
    """Whether arrivals are to be told at once: somebody is away, so steps in `sync` may have to be closed too."""

    kind: ClassVar[str] = "hurry"
    now: bool


@message_kind
@dataclass(frozen=True, slots=True)
class CloseStep(Message):
    """Order to close a step; `typical_compute_s` lets a rank that is merely out of step fall in again."""

    kind: ClassVar[str] = "close"
    optimizer_id: int
    step: int
    typical_compute_s: float


@message_kind
@dataclass(frozen=True, slots=True)
class PlanMessage(Message):
    """A plan to prepare."""

    kind: ClassVar[str] = "plan"
    optimizer_id: int
    plan: dict[str, Any]


@message_kind
@dataclass(frozen=True, slots=True)
class Abandon(Message):
    """The plan of this id is not taken up."""

    kind: ClassVar[str] = "abandon"
    optimizer_id: int
    plan_id: int
    reason: str


@message_kind
@dataclass(frozen=True, slots=True)
class FindStateSource(Message):
    """A rank that is behind asks whose parameters it can fetch."""

    kind: ClassVar[str] = "source"
    optimizer_id: int


@message_kind
@dataclass(frozen=True, slots=True)
class StateSource(Message):
    """Answer to `FindStateSource`: a rank that is up to date, -1 where none is."""

    kind: ClassVar[str] = "source_reply"
    optimizer_id: int
    rank: int


@message_kind
@dataclass(frozen=True, slots=True)
class Bye(Message):
    """All ranks have finished; everybody may leave."""

    kind: ClassVar[str] = "bye"
    lost: list[int]


def encode(message: Message) -> bytes:
    """One message as bytes."""
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
        raise ChannelError(f"a control message is not of protocol version {_VERSION}")
    cls = _KINDS.get(parts[1]) if isinstance(parts[1], str) else None
    if cls is None:
        raise ChannelError(f"a control message has the unknown kind {_short(parts[1])}")
    items = _FIELDS[cls.kind]
    if len(parts) - 2 != len(items):
        raise ChannelError(f"a {cls.kind} message has {len(parts) - 2} fields; expected {len(items)}")
    values = parts[2:]
    # Almost all are right by their types.
    if not (
        tuple(map(type, values)) == _TYPES[cls.kind]
        and all([-_MOST < values[at] < _MOST for at in _WHOLE[cls.kind]])
        and all([set(map(type, values[at])) <= {kind} for at, kind in _LISTS[cls.kind]])
    ):
        values = [_check(cls, name, wanted, value) for (name, wanted), value in zip(items, values, strict=True)]
    return cls(*values)


def _check(cls: type[Message], name: str, wanted: str, value: Any) -> Any:
    if wanted == "float" and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    ok = {
        "int": isinstance(value, int) and not isinstance(value, bool) and abs(value) < _MOST,
        "float": isinstance(value, float),  # Infinite norms are news of a diverging job; the board judges times.
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
    """What came, for an error: a damaged message must not fill the log."""
    text = reprlib.repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
