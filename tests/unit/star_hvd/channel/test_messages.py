"""Control messages: round trips, and nothing but `ChannelError` for whatever else arrives."""

from __future__ import annotations

import dataclasses
import math
import operator
import sys
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.records import StepTimes
from star_hvd.channel.messages import base as messages
from star_hvd.channel.messages import leases, switch
from star_hvd.channel.messages.base import (
    MAX_BYTES,
    HeaderNote,
    Heartbeat,
    Hello,
    Message,
    Register,
    decode,
    encode,
    wire_fields,
)
from star_hvd.errors import ChannelError
from tests.support.effort import cases

MODULES = (messages, leases, switch)
KINDS = [cls for cls in messages.kinds().values() if cls.__module__ in {module.__name__ for module in MODULES}]
INTS = st.integers(-(1 << 53) + 1, (1 << 53) - 1)
SCALARS = st.none() | st.booleans() | INTS | st.floats(allow_nan=False) | st.text(max_size=8)
VALUES = {
    "int": INTS,
    "float": st.floats(),
    "bool": st.booleans(),
    "str": st.text(max_size=30),
    "list[int]": st.lists(st.integers(0, 1 << 30), max_size=8),
    "list[str]": st.lists(st.text(max_size=8), max_size=4),
    "dict[str, Any]": st.dictionaries(st.text(max_size=8), SCALARS, max_size=6),
}


def _field(kind: str) -> st.SearchStrategy[Any]:
    return st.builds(StepTimes, *[VALUES["float"]] * 4) if kind == "StepTimes" else VALUES[kind]


ANY = st.sampled_from(KINDS).flatmap(
    lambda cls: st.tuples(*(_field(str(item.type)) for item in dataclasses.fields(cls))).map(lambda v: cls(*v))
)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, StepTimes):
        return all(map(same, dataclasses.astuple(a), dataclasses.astuple(b)))
    return bool(a == b) or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


@pytest.mark.slow
@settings(max_examples=cases(300), deadline=None)
@given(ANY)
def test_round_trip(message: Message) -> None:
    again = decode(encode(message))
    assert type(again) is type(message)
    for item in dataclasses.fields(message):
        assert same(getattr(again, item.name), getattr(message, item.name))


def test_every_kind_is_known() -> None:
    found = [
        value
        for module in MODULES
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Message) and value.__module__ == module.__name__
    ]
    assert set(found) - {Message} == set(KINDS), "a message lacks its decorator"
    assert len({cls.kind for cls in KINDS}) == len(KINDS) >= 40
    assert all(cls.__name__ in sys.modules[cls.__module__].__all__ for cls in KINDS)


def refused_or_read(data: bytes) -> None:
    try:
        assert isinstance(decode(data), Message)
    except ChannelError as error:
        assert len(str(error)) < 500, "an error must not carry what was received into the log"


@settings(max_examples=cases(500), deadline=None)
@given(st.binary(max_size=200))
def test_arbitrary_bytes(data: bytes) -> None:
    refused_or_read(data)


@pytest.mark.slow
@settings(max_examples=cases(500), deadline=None)
@given(ANY, st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), max_size=4), st.integers(-3, 3))
def test_mutated_messages(message: Message, changes: list[tuple[int, int]], grow: int) -> None:
    data = bytearray(encode(message))
    for place, value in changes:
        data[place % len(data)] = value
    refused_or_read(bytes(data[:grow] if grow < 0 else data + b"\x00" * grow))


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=4)
    | st.binary(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3) | st.binary(max_size=3), inner),
    max_leaves=12,
)


@pytest.mark.slow
@settings(max_examples=cases(150))
@given(st.sampled_from([cls.kind for cls in KINDS]) | JUNK, st.lists(JUNK, max_size=12), st.sampled_from([0, 1, 2]))
def test_junk_in_the_right_frame(kind: Any, fields: list[Any], version: int) -> None:
    refused_or_read(msgpack.packb([version, kind, *fields]))


def test_a_record_inside_a_message_is_sent_flat() -> None:
    """Ranks of another release read it where they expect it."""
    times = StepTimes(0.4, 0.1, 0.2, 0.3, 0.6)
    assert msgpack.unpackb(encode(messages.Arrive(2, 7, 1, times, 0.5))) == [
        1, "arrive", 2, 7, 1, 0.4, 0.1, 0.2, 0.3, 0.6, 0.5
    ]  # fmt: skip
    assert decode(msgpack.packb([1, "late", 2, 7, 1, 1, 0, 0, 0, 0])) == messages.Late(2, 7, 1, StepTimes(1.0))
    assert wire_fields("late")[3:] == tuple(
        (f"times.{name}", "float") for name in ("compute_s", "input_s", "cpu_s", "runqueue_s", "load_s")
    )


def test_size_limit() -> None:
    with pytest.raises(ChannelError, match=f"expected at most {MAX_BYTES}"):
        decode(b"\xc0" * (MAX_BYTES + 1))
    refused_or_read(msgpack.packb([1, "hello", "x" * (MAX_BYTES - 20)]))
    refused_or_read(msgpack.packb([1, "x" * (MAX_BYTES - 20)]))
    refused_or_read(b"\x91" * 100_000)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([2, "hello", 0], "protocol version 1"),
        (["hello", 0], "protocol version 1"),
        ([1, "hullo", 0], "unknown kind 'hullo'"),
        ([1, 7, 0], "unknown kind 7"),
        ([1, "hello"], "has 0 fields; expected 1"),
        ([1, "hello", 0, 0], "has 2 fields; expected 1"),
        ([1, "hello", 1.0], "field rank of a hello message is 1.0; expected int"),
        ([1, "hello", True], "field rank of a hello message is True; expected int"),
        ([1, "hello", 1 << 60], "expected int"),
        ([1, "waits", 0, 1, 1.0, [1, "2"]], "expected list"),
    ],
)
def test_errors_say_what_came(parts: list[Any], message: str) -> None:
    with pytest.raises(ChannelError, match=message):
        decode(msgpack.packb(parts))


def test_whole_numbers_are_floats_too() -> None:
    note = decode(msgpack.packb([1, "round", 0, 5, 1, [0, 1], 2, 1, 1, 0, 1, 0, 0, 0]))
    assert isinstance(note, HeaderNote) and isinstance(note.loss, float) and note.loss == 2.0


def test_numbers_of_a_diverged_step_are_told() -> None:
    """Infinite norms are news of the training, not damage of the channel."""
    note = HeaderNote(0, 1, 0, [0, 1], math.nan, 2.0, 2.0, math.inf, 2, math.inf, 0.0)
    read = decode(encode(note))
    assert isinstance(read, HeaderNote) and math.isinf(read.local_sqr) and math.isnan(read.loss)


def test_equality_and_defaults() -> None:
    assert decode(encode(Hello(3))) == Hello(3)
    assert decode(encode(Heartbeat(0))) == Heartbeat(0)
    plan = {"mode": "sync", "world_size": 2, "quorum": 2}
    assert decode(encode(Register(0, plan, {}))) == Register(0, plan, {})


GOOD: dict[str, Any] = {
    "int": 3,
    "float": 0.5,
    "bool": True,
    "str": "x",
    "list[int]": [1, 2],
    "list[str]": ["a", "b"],
    "dict[str, Any]": {"a": 1},
}
WRONG: dict[str, list[Any]] = {
    "int": [True, 1.0, "3", None, [3], 1 << 53, -(1 << 53), b"3"],
    "float": [True, "0.5", None, [0.5], b""],
    "bool": [0, 1, "true", None, 1.0],
    "str": [b"x", 3, None, ["x"], True],
    "list[int]": [3, "12", {1: 2}, [1.0], [True], [None], [[1]], None],
    "list[str]": [3, "12", {1: 2}, [1], [b"x"], [None], [["a"]], None],
    "dict[str, Any]": [[["a", 1]], "a", 3, None, True],
}
FIELDS = [
    pytest.param(cls, number, id=f"{cls.kind}-{name}")
    for cls in KINDS
    for number, (name, _) in enumerate(wire_fields(cls.kind))
]


@pytest.mark.parametrize(("cls", "number"), FIELDS)
def test_every_field_is_checked(cls: type[Message], number: int) -> None:
    items = wire_fields(cls.kind)
    good = [GOOD[kind] for _, kind in items]
    read = decode(msgpack.packb([1, cls.kind, *good]))
    assert type(read) is cls and [operator.attrgetter(name)(read) for name, _ in items] == good
    name, kind = items[number]
    for value in WRONG[kind]:
        parts = [*good[:number], value, *good[number + 1 :]]
        with pytest.raises(ChannelError) as caught:
            decode(msgpack.packb([1, cls.kind, *parts], use_bin_type=True))
        said = str(caught.value)
        unreadable = isinstance(value, dict)  # Keys that are not text are refused before fields are looked at.
        assert unreadable or (f"field {name} of a {cls.kind} message" in said and f"expected {kind}" in said)


@pytest.mark.parametrize("cls", KINDS, ids=lambda cls: cls.kind)
def test_too_few_and_too_many_fields(cls: type[Message]) -> None:
    good = [GOOD[kind] for _, kind in wire_fields(cls.kind)]
    for parts in [good[:-1]] * bool(good) + [[*good, 0]]:
        with pytest.raises(ChannelError, match=f"has {len(parts)} fields; expected {len(good)}"):
            decode(msgpack.packb([1, cls.kind, *parts]))


@settings(max_examples=cases(200), deadline=None)
@given(ANY, st.data())
def test_a_message_cut_short_is_refused(message: Message, data: st.DataObject) -> None:
    whole = encode(message)
    length = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(ChannelError):
        decode(whole[:length])
    with pytest.raises(ChannelError):
        decode(whole + whole)


def test_a_message_of_the_largest_size_is_read() -> None:
    empty = len(encode(messages.Abandon(0, 1, "x" * 100_000))) - 100_000
    assert decode(encode(messages.Abandon(0, 1, "x" * (MAX_BYTES - empty)))) is not None
    with pytest.raises(ChannelError, match="expected at most"):
        decode(encode(messages.Abandon(0, 1, "x" * (MAX_BYTES - empty + 1))))
