"""Parameter servers: headers, records, layouts, the messages that a server acts on, and answers that a worker gets."""

from __future__ import annotations

import functools
import os
import random
from typing import Any

import msgpack
import torch
import zmq

from scheduler.plan.plan import Plan
from star_hvd.engine.buckets import pack as pack_buckets
from star_hvd.engine.hyperparameters import HyperRow
from star_hvd.errors import ChannelError
from star_hvd.ps.common.layout import Layout, LayoutError
from star_hvd.ps.common.mirror import Mirror, new_memory
from star_hvd.ps.common.optimizer_spec import OptimizerSpec
from star_hvd.ps.common.record import make_record, read_record
from star_hvd.ps.common.wire import HEADER_BYTES, Header, Kind, pack, read_meta, unpack
from star_hvd.ps.server.server import Job
from star_hvd.ps.worker.exchange import Exchange, StateExchange
from tests.fuzz.mutate import damaged, damaged_bytes, packed, weird
from tests.fuzz.run import Target

_WORLD = 3
_SHAPES = ((20, 16), (20,), (4, 20))
_KINDS = tuple(Kind)


@functools.lru_cache(maxsize=1)
def _made() -> tuple[Layout, OptimizerSpec, int, list[bytes]]:
    """A layout, an optimizer, the length of its rows, and every chunk's first record."""
    generator = torch.Generator().manual_seed(1)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in _SHAPES]
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    buckets = pack_buckets(params, 2000)
    layout = Layout.build(buckets, optimizer.param_groups, torch.optim.SGD, 1, 1024)
    hyper = HyperRow(optimizer.param_groups)
    spec = OptimizerSpec.of(torch.optim.SGD, optimizer.param_groups, hyper)
    return layout, spec, hyper.size, [_record(layout, index) for index in range(len(layout.chunks))]


def _record(layout: Layout, index: int) -> bytes:
    chunk = layout.chunks[index]
    states = [{"momentum_buffer": torch.zeros(piece.shape), "step": 3} for piece in chunk.pieces]
    record = make_record(torch.ones(chunk.numel), states, 0, 0, {}, None)
    target = torch.zeros(record.nbytes, dtype=torch.uint8)
    record.write(target)
    return bytes(target.numpy())


# ---- single messages ------------------------------------------------------------------------------------------------


def _header(draw: random.Random) -> bytes:
    numbers = [draw.choice((0, 1, 2, 5, 1 << 20, (1 << 32) - 1)) for _ in range(8)]
    header = Header(draw.randrange(16), *numbers[:3], numbers[3], *numbers[4:])
    return damaged_bytes(pack(header), draw) + packed(weird(draw))


def _read_header(data: bytes) -> None:
    try:
        unpack(data[:HEADER_BYTES])
    except ChannelError:
        pass
    read_meta(data[HEADER_BYTES:])


def _layout(draw: random.Random) -> bytes:
    layout, spec, _, _ = _made()
    return packed([damaged(layout.to_dict(), draw, draw.choice((0, 1, 1, 2))), damaged(spec.to_dict(), draw)])


def _read_layout(data: bytes) -> None:
    values = msgpack.unpackb(data)
    if not isinstance(values, list) or len(values) != 2:
        return
    try:
        layout = Layout.from_dict(values[0])
        assert sum(layout.nbytes(chunk) for chunk in layout.chunks) < 1 << 50
    except LayoutError:
        pass
    OptimizerSpec.from_dict(values[1])


def _record_bytes(draw: random.Random) -> bytes:
    layout, _, _, records = _made()
    if draw.random() < 0.5:
        return damaged_bytes(draw.choice(records), draw)
    like = layout.chunks[0].numel
    manifest = damaged([0, 0, [[0, 1]], None, [[["m", "t", "float32", [4]], ["s", "v", 3, None]]]], draw, 2)
    head = packed(manifest)
    body = head + b"\0" * (-(8 + len(head)) % 16) + b"\0" * (4 * like + 64)
    return len(head).to_bytes(8, "little") + body


def _read_record(data: bytes) -> None:
    layout, _, _, _ = _made()
    given = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)
    version, seq, applied, row, params, states = read_record(given, torch.empty(layout.chunks[0].numel))
    assert type(version) is int and type(seq) is int and params.numel() == layout.chunks[0].numel
    assert all(type(value) is int for pair in applied.items() for value in pair) and isinstance(states, list)
    assert row is None or all(type(value) in (int, float) for value in row)


def _memory(draw: random.Random) -> bytes:
    mirror_bytes = bytes(4096)
    slots = b"".join(
        draw.choice((0, 4096, 8192, 1 << 40, (1 << 64) - 1)).to_bytes(8, "little") for _ in range(4 * 4)
    )
    return slots + damaged_bytes(mirror_bytes, draw)[: draw.choice((100, 4096))]


def _read_memory(data: bytes) -> None:
    descriptor = new_memory()
    os.write(descriptor, data)
    os.ftruncate(descriptor, 12288)
    mirror = Mirror(descriptor, 2)
    try:
        for entry in range(2):
            found = mirror.read(entry)
            assert found is None or found.numel() >= 0
    finally:
        mirror.close()


# ---- a server -------------------------------------------------------------------------------------------------------


class _Sink:
    """The server around a job: what it sends is counted."""

    def __init__(self) -> None:
        self.faults: dict[str, Any] = {}
        self.outbox = self
        self.sent = 0

    def event(self, event: dict[str, Any]) -> None:
        msgpack.packb(event)
        self.sent += 1

    def chunk(self, identity: bytes, header: Header, store: Any) -> None:
        pack(header)
        self.sent += 1

    def none(self, identity: bytes, header: Header) -> None:
        pack(header)
        self.sent += 1

    def meta(self, identity: bytes, header: Header, meta: Any) -> None:
        pack(header), msgpack.packb(meta)
        self.sent += 1


_PLANS = (
    Plan.ps(_WORLD, 2), Plan.ps(_WORLD, 1), Plan.ps(_WORLD, _WORLD), Plan.ps(_WORLD, 1, rule="ssp", slack=2),
    Plan.ps(_WORLD, 1, guard="reject"), Plan.ps(_WORLD, 2, rule="backup"), Plan.ps(_WORLD, 2, rule="grace"),
)  # fmt: skip


def _job(plan: dict[str, Any]) -> Job:
    layout, spec, _, records = _made()
    values = {
        "optimizer_id": 0, "session": 0, "index": 0, "endpoints": [], "plan": plan, "version": 0,
        "layout": layout.to_dict(), "spec": spec.to_dict(),
    }  # fmt: skip
    job = Job(_Sink(), values, None, False)  # type: ignore[arg-type]
    for index, record in enumerate(records):
        job.shard.seed(index, torch.frombuffer(bytearray(record), dtype=torch.uint8))
    return job


def _push(rank: int, step: int, draw: random.Random) -> list[list[Any]]:
    """A push: its announcement and its chunks."""
    layout, _, size, _ = _made()
    row = draw.choice((None, [0.1] * size))
    meta = {"version": 0, "weight": 1.0, "count": 1, "own_steps": step, "row": row, "loss": draw.choice((None, 1.5))}
    found: list[list[Any]] = [[list(Header(Kind.PUSH, 0, 0, rank, step)), meta]]
    for chunk in layout.chunks:
        size = layout.nbytes(chunk)
        found.append([list(Header(Kind.CHUNK, 0, 0, rank, step, chunk.index, 0, 0, size)), bytes(size)])
    draw.shuffle(found)
    return found


def _script(draw: random.Random) -> bytes:
    said: list[list[Any]] = []
    steps = [0] * _WORLD
    wild = draw.choice((0.0, 0.1, 0.4))
    for _ in range(draw.randrange(3, 12)):
        rank = draw.randrange(_WORLD)
        steps[rank] += 1
        said += _push(rank, steps[rank], draw)
        kind = draw.choice(_KINDS)
        if draw.random() < 0.5:
            meta = draw.choice(({"what": "absent"}, {"what": "present"}, {"what": "lost"}, {"what": ["absent"]},
                                {"rank": rank, "products": None}, {"rank": 1, "products": [1.0, 1.0, 1.0]},
                                {"seq": 3, "op": "send", "to": [[0, 1]]}, {}))  # fmt: skip
            header = Header(kind, 0, 0, rank, draw.randrange(5), draw.randrange(3), draw.randrange(4))
            said.append([list(header), meta])
    found = []
    for header, payload in said:
        if draw.random() < wild:
            header, payload = draw.choice(
                ((damaged(header, draw), payload), (header, damaged(payload, draw)), (header, weird(draw)))
            )
        found.append([_pack_header(header), payload if isinstance(payload, bytes) else packed(payload)])
    return packed([draw.choice(_PLANS).to_dict(), found])


def _pack_header(values: Any) -> bytes:
    try:
        return pack(Header(*values))
    except Exception:  # What a header cannot hold.
        return b"STPS" + bytes(HEADER_BYTES - 4)


def _play(data: bytes) -> int:
    plan, said = msgpack.unpackb(data)
    job = _job(plan)
    assert job.primary is not None
    for header, payload in said:
        before = _state(job)
        try:
            job.take(unpack(header), zmq.Frame(payload))
        except ChannelError:
            assert _state(job) == before, "a refused message changed something"
        assert all(store.version <= job.primary.version for store in job.shard.stores.values())
    return len(said)


def _state(job: Job) -> tuple[Any, ...]:
    """What of a job would change if a refused message were half applied."""
    assert job.primary is not None
    memory = job.primary._memory
    return (
        memory.seq, len(memory.log), dict(memory.applied), {r: s for r, (s, _) in memory.fed.items()},
        memory.rule.version,
        len(job.primary._unfed), job.primary.known_pushes, dict(job.primary._done), _shard_state(job),
    )  # fmt: skip


def _shard_state(job: Job) -> tuple[Any, ...]:
    shard = job.shard
    return (
        {index: (store.version, store.seq, store.row) for index, store in shard.stores.items()},
        shard.seq, shard.known_pushes, sorted(shard._staged), sorted(shard._parts), dict(shard._over),
    )  # fmt: skip


def _orders(draw: random.Random) -> bytes:
    """Orders as a shard that is not the primary gets them."""
    found: list[Any] = []
    for seq in range(1, draw.randrange(3, 14)):
        rank = draw.randrange(_WORLD)
        order = draw.choice(
            (
                {"op": "update", "version": seq - 1, "parts": [[rank, seq, 1.0]], "lr_factor": 0.5, "row": None,
                 "send": [[rank, seq]]},
                {"op": "send", "to": [[rank, seq]]}, {"op": "drop", "rank": rank, "step": seq},
                {"op": "guard", "on": True},
                {"op": "pull", "rank": rank, "request": 7, "known": draw.choice((None, 0, seq)), "empty": seq % 3 == 0},
                {"op": "state", "rank": rank, "request": 7},
                {"op": "cut", "version": seq},
            )
        )  # fmt: skip
        order = {**order, "seq": seq}
        found.append(packed(damaged(order, draw) if draw.random() < 0.3 else order))
    return packed(found)


def _play_orders(data: bytes) -> int:
    job = _job(_PLANS[0].to_dict())
    job.primary = None  # It is another shard's.
    orders = msgpack.unpackb(data)
    for order in orders:
        before = _shard_state(job)
        try:
            job.shard.order(read_meta(order))
        except ChannelError:
            assert _shard_state(job) == before, "a refused order changed something"
    return len(orders)


# ---- a worker -------------------------------------------------------------------------------------------------------


def _answers(draw: random.Random) -> bytes:
    layout, _, _, records = _made()
    found: list[Any] = []
    verdict = {"kind": draw.choice(("params", "dropped", "moved")), "version": 3, "plan_id": 1, "applied": True,
               "reason": "", "notes": [{"version": 3, "ranks": [0], "staleness": [0], "gradients": 1, "damped": [0.0],
                                        "loss": None}]}  # fmt: skip
    found.append(["judge", b"", packed(damaged(verdict, draw) if draw.random() < 0.5 else verdict)])
    for chunk in layout.chunks:
        for kind, body in (("params", bytes(layout.nbytes(chunk))), ("state", records[chunk.index])):
            header = list(Header(Kind.PARAMS, 0, 0, 0, 1, chunk.index, 3, 0, len(body)))
            if draw.random() < 0.25:
                header = damaged(header, draw)
            if draw.random() < 0.15:
                body = damaged_bytes(body, draw)
            found.append([kind, _pack_header(header), body])
    draw.shuffle(found)
    return packed(found)


def _play_answers(data: bytes) -> int:
    layout, _, _, _ = _made()
    flats = [torch.zeros(bucket.numel, dtype=bucket.dtype) for bucket in layout.buckets]
    exchange, state = Exchange(layout, flats), StateExchange(layout)
    answers = msgpack.unpackb(data)
    for kind, header, body in answers:
        try:
            if kind == "judge":
                exchange.set_result(read_meta(body))
            else:
                (exchange if kind == "params" else state).add(unpack(header), zmq.Frame(body).buffer)
        except ChannelError:
            continue
    if exchange.complete:
        exchange.reply()
    if state.complete:
        try:
            state.snapshot()
        except ChannelError:
            pass
    assert exchange.describe() and state.describe()
    return len(answers)


TARGETS = (
    Target("ps-header", _header, _read_header, (ChannelError,), 8.0),
    Target("ps-layout", _layout, _read_layout, (LayoutError,), 2.0),
    Target("ps-record", _record_bytes, _read_record, (ChannelError,), 4.0),
    Target("ps-mirror", _memory, _read_memory, (), 1.0),
    Target("ps-server", _script, _play, (), 6.0),
    Target("ps-orders", _orders, _play_orders, (), 3.0),
    Target("ps-answers", _answers, _play_answers, (), 3.0),
)
