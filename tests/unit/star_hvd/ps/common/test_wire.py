"""Messages that are damaged, truncated or from strangers are counted and change nothing."""

from __future__ import annotations

import random
import struct
import time
from typing import Any

import msgpack
import pytest
import torch
import zmq
from hypothesis import given
from hypothesis import strategies as st

from scheduler.plan.plan import Plan
from star_hvd.channel.link import Dealer
from star_hvd.channel.reliable import TENSORS
from star_hvd.errors import ChannelError
from star_hvd.ps.common.auth import JobKey, connect
from star_hvd.ps.common.identities import shard_identity, worker_identity
from star_hvd.ps.common.wire import (
    HEADER_BYTES,
    PART_BYTES,
    Assembly,
    Gathering,
    Header,
    Kind,
    pack,
    parts,
    raw,
    read_meta,
    unpack,
)
from star_hvd.ps.worker.exchange import StateExchange
from tests.support.ps_cluster import DEADLINE_S, Cluster, cluster

FIELD = st.integers(0, 2**31)


@given(st.sampled_from(Kind), st.lists(FIELD, min_size=7, max_size=7))
def test_headers_come_back(kind: Kind, numbers: list[int]) -> None:
    header = Header(kind, *numbers, size=max(numbers))
    assert unpack(pack(header)) == header and len(pack(header)) == HEADER_BYTES


@given(
    st.binary(max_size=100)
    | st.tuples(st.integers(0, HEADER_BYTES - 1), st.integers(0, 255)).map(
        lambda change: bytes(
            change[1] if place == change[0] else byte
            for place, byte in enumerate(pack(Header(Kind.CHUNK, 1, 2, 3, chunk=4, size=5)))
        )
    )
)
def test_bytes_are_a_header_or_refused(data: bytes) -> None:
    try:
        header = unpack(data)
    except ChannelError:
        return
    assert unpack(pack(header)) == header and len(data) >= HEADER_BYTES


def test_what_a_header_may_not_say() -> None:
    good = pack(Header(Kind.CHUNK, 0, 0, size=5))
    with pytest.raises(ChannelError, match="expected b'STPS' 1"):
        unpack(b"PICK" + good[4:])
    with pytest.raises(ChannelError, match="kind 99"):
        unpack(good[:5] + b"\x63" + good[6:])
    with pytest.raises(ChannelError, match="impossible"):
        unpack(pack(Header(Kind.CHUNK, 0, 0, offset=9, size=5)))
    with pytest.raises(ChannelError, match="impossible"):
        unpack(good[:-8] + struct.pack("<Q", 1 << 60))
    for damaged in (b"", b"\xc1", msgpack.packb([1]), msgpack.packb({"a": 1})[:-1]):
        with pytest.raises(ChannelError):
            read_meta(damaged)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_bytes_of_a_tensor_are_not_copied(dtype: torch.dtype) -> None:
    tensor = torch.zeros(10, dtype=dtype)
    view = raw(tensor[2:5])
    assert len(view) == 3 * tensor.element_size()
    tensor[2] = 1.0
    assert any(view[: tensor.element_size()])


def test_a_chunk_in_parts_comes_together_in_any_order() -> None:
    size = 2 * PART_BYTES + 77
    data = torch.randint(0, 255, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    spans = list(parts(size))
    assert spans[-1] == (2 * PART_BYTES, size)
    assembly = Assembly(size)
    view = raw(data)
    order = [2, 0, 0, 1]
    assert [assembly.add(spans[i][0], view[slice(*spans[i])]) for i in order] == [False, False, False, True]
    assert torch.equal(assembly.buffer, data)
    for offset, length in ((1, 5), (0, 5), (size, 1), (2 * PART_BYTES, 78)):
        with pytest.raises(ChannelError, match="does not fit"):
            assembly.add(offset, b"x" * length)


def test_a_chunk_of_any_announced_size_takes_the_memory_of_what_came() -> None:
    huge = Gathering(1 << 41)
    assert huge.add(0, bytes(PART_BYTES)) is None
    with pytest.raises(ChannelError, match="does not fit"):
        huge.add(PART_BYTES, b"x")
    data = random.Random(0).randbytes(2 * PART_BYTES + 77)
    spans = list(parts(len(data)))
    gathering = Gathering(len(data))
    found = [gathering.add(spans[i][0], data[slice(*spans[i])]) for i in (2, 0, 0, 1)]
    assert found[:3] == [None] * 3 and found[3] is not None and bytes(found[3].numpy()) == data
    with cluster(Plan.ps(1, 1)) as made:
        exchange = StateExchange(made.layout)
        with pytest.raises(ChannelError, match="bytes for a chunk of"):
            exchange.add(Header(Kind.STATED, 0, 0, chunk=0, size=1 << 41), bytes(PART_BYTES))
        # Nothing is kept of what is refused, else this one would be of another size than its first part.
        exchange.add(Header(Kind.STATED, 0, 0, chunk=0, size=PART_BYTES + 1), bytes(PART_BYTES))
        with pytest.raises(ChannelError, match="comes as"):
            exchange.add(Header(Kind.STATED, 0, 0, chunk=0, size=5), b"12345")


def member(made: Cluster, context: zmq.Context[Any], identity: bytes) -> Dealer:
    """A peer with the job's key, whose messages reach the server's own checks."""
    return Dealer(connect(context, made.key, made.endpoints[0], identity), TENSORS)


def answer(made: Cluster, step: int) -> None:
    made.clients[0].push(step=step, version=step, flats=made.gradients(0, step), weight=1.0)
    assert made.clients[0].wait(DEADLINE_S).version == step + 1


def test_strangers_are_turned_away_and_counted() -> None:
    with cluster(Plan.ps(1, 1)) as made:
        answer(made, 0)
        context = zmq.Context()
        endpoint = made.endpoints[0]
        other = JobKey.new()
        strangers = [connect(context, other, endpoint, worker_identity(0, 0, 0))]
        plain = context.socket(zmq.DEALER)
        plain.connect(f"tcp://{endpoint.host}:{endpoint.port}")
        strangers.append(plain)
        for stranger in strangers:
            stranger.linger = 0
            stranger.send_multipart([pack(Header(Kind.PRESENCE, 0, 0)), msgpack.packb({"what": "absent"})])
        server = made.server_of(0)
        limit_s = time.monotonic() + DEADLINE_S
        while server.socket.denied < 2 and time.monotonic() < limit_s:
            time.sleep(0.02)
        assert server.socket.denied >= 2
        answer(made, 1)
        for stranger in strangers:
            assert not stranger.poll(0)
            stranger.close()
        context.term()
        assert server.malformed == 0


def test_damaged_messages_are_counted_and_change_nothing() -> None:
    with cluster(Plan.ps(1, 1), servers=2) as made:
        answer(made, 0)
        context, rng = zmq.Context(), random.Random(0)
        bad = member(made, context, worker_identity(0, 0, 5))
        bare = connect(context, made.key, made.endpoints[0], worker_identity(0, 0, 6))  # Sends no envelopes.
        chunk = made.layout.of_server(0)[0]
        size = made.layout.nbytes(chunk)
        mine = {"optimizer_id": 0, "session": 0, "rank": 5}
        messages = [
            [b""],
            [b"x" * HEADER_BYTES, b""],
            [pack(Header(Kind.CHUNK, chunk=chunk.index, size=size, **mine))],
            [pack(Header(Kind.CHUNK, chunk=chunk.index, size=size, **mine)), b"x" * (size - 1)],
            [pack(Header(Kind.CHUNK, chunk=10**6, size=size, **mine)), b"x" * size],
            [pack(Header(Kind.CHUNK, chunk=chunk.index, size=size + 1, **mine)), b"x" * (size + 1)],
            [pack(Header(Kind.PUSH, **mine)), b"\xc1"],
            [pack(Header(Kind.PUSH, 0, 0, rank=0)), msgpack.packb({})],  # In the name of another.
            [pack(Header(Kind.PUSH, 7, 3, rank=5)), b"", b""],
            [pack(Header(Kind.ORDER, **mine)), msgpack.packb({"no": "order"})],
            [pack(Header(Kind.PARAMS, **mine)), b""],
            [pack(Header(Kind.PRESENCE, **mine)), msgpack.packb({"what": "nonsense"})],
        ]
        for message in messages:
            bad.send(message)
        for number in range(100):
            damaged = [rng.randbytes(rng.randrange(100)) for _ in range(rng.randrange(1, 4))]
            bad.send(damaged) if number % 2 else bare.send_multipart(damaged)
        server = made.server_of(0)
        limit_s = time.monotonic() + DEADLINE_S
        while server.malformed < len(messages) + 100 and time.monotonic() < limit_s:
            bad.socket.poll(20)
            list(bad.receive())
        assert server.malformed == len(messages) + 100
        bad.close()
        bare.close(linger=0)
        context.term()
        answer(made, 1)
        assert made.clients[0].malformed == 0


PUSH = {"version": 1, "weight": 1.0, "count": 1, "own_steps": 0, "row": None, "loss": None}
ABSURD = [
    (Kind.PUSH, 1, {**PUSH, "version": float("inf")}),  # Was an OverflowError, which ended the server.
    (Kind.PUSH, 1, {**PUSH, "count": None}),
    (Kind.PUSH, 1, {**PUSH, "weight": "much"}),
    (Kind.PUSH, 1, {**PUSH, "own_steps": 1.5}),
    (Kind.PUSH, 1, {**PUSH, "row": [1.0]}),
    (Kind.PUSH, 1, {**PUSH, "row": "row"}),
    (Kind.PUSH, 1, {**PUSH, "loss": []}),
    (Kind.PUSH, 1, {**PUSH, "again": 7}),
    (Kind.PUSH, 1, {}),
    (Kind.PUSH, (1 << 32) - 1, PUSH),
    (Kind.PRESENCE, 2, {"what": "absent"}),
    (Kind.PRESENCE, 1, {"what": "nonsense"}),
    (Kind.PRESENCE, 1, {"what": "lost"}),  # No word that a rank says.
    (Kind.ARRIVED, 1, {"rank": float("inf"), "products": None}),  # An OverflowError likewise.
    (Kind.ARRIVED, 1, {"rank": 1, "products": [1.0]}),  # An IndexError.
    (Kind.ARRIVED, 1, {"rank": 1 << 40, "products": None}),
    (Kind.ARRIVED, 1, {"products": None}),
    (Kind.DONE, 9, {}),
    (Kind.JOIN, 1 << 31, {"since_ns": 1}),
    (Kind.JOIN, 1, {"since_ns": "ever"}),
    (Kind.JOIN, 1, {}),
]


def test_numbers_that_make_no_sense_are_counted_and_end_nothing() -> None:
    with cluster(Plan.ps(2, 1), servers=2) as made:
        answer(made, 0)
        context, server = zmq.Context(), made.server_of(0)
        server.socket.expect(200)  # All of these are of the job, and come at once.
        held: dict[bytes, Dealer] = {}
        for kind, rank, meta in ABSURD:
            between = kind in (Kind.ARRIVED, Kind.DONE, Kind.JOIN)
            name = shard_identity(0, 0, rank) + b"newcomer" if between else worker_identity(0, 0, rank)
            if name not in held:
                held[name] = member(made, context, name)
            held[name].send([pack(Header(kind, 0, 0, rank, step=5)), msgpack.packb(meta)])
        limit_s = time.monotonic() + DEADLINE_S
        while server.malformed < len(ABSURD) and time.monotonic() < limit_s:
            made.clients[0].pull(DEADLINE_S)
            for each in held.values():
                list(each.receive())  # What a connection lost is sent again.
                each.tick()
        assert server.malformed == len(ABSURD)
        answer(made, 1)
        context.destroy(linger=0)


def test_messages_for_sessions_that_never_open_are_few() -> None:
    with cluster(Plan.ps(1, 1)) as made:
        context, server = zmq.Context(), made.server_of(0)
        server.socket.expect(200)  # All of these are of the job, and come at once.
        held = []
        for session in range(1, 101):
            early = member(made, context, worker_identity(0, session, 0))
            early.send([pack(Header(Kind.HELLO, 0, session, 0)), b""])
            held.append(early)
        limit_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < limit_s:
            if server.early_sessions == 64 and sum(each.stream.acknowledged >= 1 for each in held) >= 64:
                break  # Which ones these are depends on the order in which their connections came.
            made.clients[0].pull(DEADLINE_S)
            for each in held:
                list(each.receive())
                each.tick()
        # The first ones give way: their plans were given up, while a new session's HELLO has been acknowledged.
        assert server.early_sessions == 64 and server.malformed == 0
        assert sum(each.stream.acknowledged >= 1 for each in held) >= 64
        context.destroy(linger=0)


def test_messages_for_a_session_that_is_not_open_yet_are_never_lost() -> None:
    """More of them than a server keeps are not acknowledged, and come again once the session is open."""
    with cluster(Plan.ps(1, 1)) as made:
        context, server = zmq.Context(), made.server_of(0)
        server.socket.expect(200)
        early = member(made, context, worker_identity(0, 1, 0))
        early.send([pack(Header(Kind.HELLO, 0, 1, 0)), b""])
        total = 4500
        for step in range(total):
            early.send([pack(Header(Kind.PULL, 0, 1, 0, step=step)), msgpack.packb({"empty": True})])
        limit_s = time.monotonic() + DEADLINE_S
        while early.stream.acknowledged < 4096 and time.monotonic() < limit_s:
            list(early.receive())
            early.tick()
            time.sleep(0.001)
        assert early.stream.acknowledged == 4096
        made.open(1)
        made.seed(1)
        answers: list[tuple[int, int]] = []
        wanted = {(chunk.index, step) for chunk in made.layout.chunks for step in range(total)}
        while len(answers) < len(wanted) and time.monotonic() < limit_s:
            headers = [unpack(frames[0]) for frames in early.receive() if isinstance(frames, list)]
            answers += [(header.chunk, header.step) for header in headers]
            early.tick()
            time.sleep(0.001)
        assert len(answers) == len(wanted) and set(answers) == wanted and server.malformed == 0
        context.destroy(linger=0)
